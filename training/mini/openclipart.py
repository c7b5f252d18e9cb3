"""Drawings of things from the Open Clip Art Library, each checked by eye."""

import re
from typing import Final

from training.mini.atlas import Drawing
from training.mini.sources import Fetcher, Renderer, Source
from training.mini.things import THINGS

PACKAGE: Final = "openclipart-svg"
STYLE: Final = "openclipart"
FOLDER: Final = "usr/share/openclipart/svg"
# How long the units of old drawings are, in the units in which their outlines are written.
UNITS: Final = {"": 1.0, "px": 1.0, "pt": 1.25, "mm": 3.543, "cm": 35.43, "in": 90.0}

# "name: files", without ".svg"; a line that is further in goes on with the name before it.
_TABLE: Final = """
    dog: animals/mammals/dogs/bored_dog_01 animals/mammals/dog_on_leash_gerald_g._01
        animals/mammals/dogs/dog_head_nicu_buculei_01 animals/mammals/dogs/dog_head_nicu_buculei_02
        animals/mammals/dog_01_drawn_with_strai_01
    cat: animals/mammals/cartoon_cat_gerald_g._01 animals/mammals/housecats/gatto_cat_architetto_fra_01
        animals/mammals/housecats/gatto_cat_architetto_fra_03
        animals/mammals/housecats/gatto_cat_architetto_fra_04
    pig: animals/mammals/pig_marcelo_caiafa1
    sheep: animals/mammals/sheep-md-v0.1
    monkey: animals/sailor_monkey_nicu_bucul_01 animals/mammals/happy_monkey_benji_park_01
        animals/mammals/monkey_head_nicu_buculei_01
    duck: recreation/toys/rubber_duck1_ganson recreation/toys/rubber_ducks_ganson
    penguin: animals/birds/new_penguin_charles_mcco_01 animals/birds/emperor_penguin_ralf_ste_01
    fish: animals/fish/brown_fish_01
    turtle: animals/turtle_jurgen_gaeremyn_01
    butterfly: animals/bugs/butterfly_jonvdveen_01 animals/bugs/butterfly_jonathan_dietr_01
        animals/bugs/farfalla_butterfly_fra1
    bee: animals/bugs/bee1_mimooh_01 animals/bugs/bee3_mimooh_01 animals/bugs/bee
    camel: animals/mammals/camel_head_01
    tiger: animals/mammals/big_cats/tiger_graig_ryan_smith_-_01
        animals/mammals/big_cats/color_tiger_susan_park_01
    bird: animals/birds/bird_of_peace_mauro_oliv_01
    dolphin: animals/fish/dolphin animals/fish/dolphin_enrique_meza_c_01
        animals/fish/dolphin_enrique_meza_c_02
    ant: animals/bugs/ant
    ladybug: animals/bugs/ladybug_01 animals/bugs/ladybug_02
    spider: animals/bugs/spider
    scorpion: animals/scorpion-md-v0.1
    tree: plants/trees/evergreen/tree_02 plants/flowers/cartoon_tree_01 food/fruit/tree_whit_fruits_01
    flower: plants/flowers/flower_03 plants/flowers/flower_peterm_01 plants/flowers/red_flower_01
        plants/flowers/flower1_juliane_krug_01
    tulip: plants/flowers/tulips_ganson
    mushroom: plants/mushroom_benji_park_ plants/mushroom
    apple: food/fruit/applf food/fruit/an_apple_01
    banana: food/fruit/bananas_nicu_buculei_01 food/fruit/banana
    orange: food/fruit/orange_dave_pena_01 food/fruit/orange_simple food/fruit/orange
    lemon: food/fruit/lemon_simple food/fruit/lemon_whole_ganson
    pear: food/fruit/pear_01 food/fruit/green_pear_01 food/fruit/pear_simple
    strawberry: food/fruit/strawberry_simple food/fruit/strawberry_jonathan_diet_01 food/fruit/strawberry
    pineapple: food/fruit/pineapple
    watermelon: food/fruit/watermelon_simple
    cheese: food/dairy/cheese_01
    pizza: food/pizza_slice_01 food/pizza_pepperoni food/pizza_slice_fco._andrade_01
        food/pizza_4_stagioni_archite_01
    hamburger: food/meats_and_eggs/hamburger_ganson food/meats_and_eggs/burger_http_www.treebui_r
    cake: food/desserts/cake_etienne_bersac_r food/desserts/cake_jarno_vasamaa_r
        food/desserts/pink_cake_gabrielle_now_r
    peach: food/fruit/peach_simple
    cherries: food/fruit/cherries
    grapes: food/fruit/grapes_01 food/fruit/grapes_simple
    potato: food/breads_and_carbs/potato_nicu_buculei_
    bread: food/breads_and_carbs/bread_01 food/breads_and_carbs/bread
    croissant: food/breads_and_carbs/croissant_01 food/breads_and_carbs/croissant_gerald_g._01
    pretzel: food/breads_and_carbs/pretzel_01
    pancakes: food/breads_and_carbs/pancakes_berries
    bacon: food/meats_and_eggs/bacon_ganson
    fries: food/fries_ganson food/french_fries_juliane_kr_r
    hot dog: food/meats_and_eggs/hot_dog food/meats_and_eggs/hot_dog_juliane_krug_r
    egg: food/meats_and_eggs/half_egg_jean-victor_bal_01
    fried egg: food/meats_and_eggs/fried_eggs food/meats_and_eggs/fried_egg
    ice cream: food/desserts/cone_alt1 food/desserts/cone_alt3 food/desserts/cone_alt4
        food/desserts/cone1_ganson
    candy: food/desserts/candy_01 food/desserts/candy_02
    lollipop: food/desserts/lollipop_dave_pena_01
    cup: food/beverages/coffee_ganson office/cup_rollandin_francesco_ food/beverages/coffee
        food/beverages/mug
    wine glass: food/beverages/alcohol/wine_glass_christian_h._
    cocktail: food/beverages/alcohol/cocktail_daniel_steele_r
    beer: food/beverages/alcohol/beer food/beverages/alcohol/beer1
    car: transportation/car_jamin_ellis_ transportation/skoda_car_alejandro_teja_
        transportation/vehicles/car
    bus: transportation/bus1_jarno_vasamaa_01 transportation/bus2_jarno_vasamaa_01
        transportation/roadsigns/bus_symbol_black_01
    truck: transportation/truck_jarno_vasamaa1 transportation/truck_jarno_vasamaa_
        transportation/small_truck_steffen_gluc_01
    bicycle: transportation/vehicles/bicycle_01
    motorcycle: transportation/motorcycle_jarno_vasama_
    rocket: transportation/vehicles/rocket
    sailboat: transportation/boating/sailboat_illustration
    steam train: recreation/toys/kiddy_train_orlando_kara_
    house: buildings/homes/my_house_01 buildings/homes/house_juliane_krug_01
        buildings/homes/house_christoph_brill_01
    factory: buildings/factory_gabrielle_nowick_
    stop sign: transportation/roadsigns/stop transportation/roadsigns/stop_sign_01
        transportation/roadsigns/stop_sign_right_font_mig_
    mailbox: office/mailbox1 office/mailbox2
    shoe: people/clothing/tennis_shoe_jarno_vasama_ people/clothing/tennis_shoes_jarno_vasam_
    sunglasses: people/clothing/sunglasses_01
    t-shirt: people/clothing/t-shirt_01 people/clothing/t-shirt_02
    boot: people/clothing/hiking_boot_jarno_vasama_
    hat: people/clothing/hats/aussie_hat_01 people/clothing/hats/slouch_hat_01
        people/clothing/adventurer_hat_nicu_bucu_01 people/clothing/hats/purple_hat_nicu_buculei_01
        people/clothing/hats/hat_-_clothing_nicu_bucu_01
    suitcase: transportation/little_tan_suitcase_jona_
    guitar: recreation/music/guitar_ganson recreation/music/guitar_jarno_vasamaa1
        recreation/music/guitar_jarno_vasamaa2 recreation/music/bass_guitar_a.j._ashton_
        recreation/music/guitar_profile_philippe__01
    trumpet: recreation/music/trumpet_b_flat_colour_ganso recreation/music/trumpet_pocket__ganson
    violin: recreation/music/violin_ganson recreation/music/violin_colour_ganson
    drum: recreation/music/djambf_ganson
    maracas: recreation/music/maracas_ganson
    football: recreation/sports/soccer_ball_ganson recreation/sports/soccer_ballon_tanguy_jac_
    baseball: recreation/sports/basebalm_ganson
    balloon: recreation/party/balloon-red-aj recreation/party/balloon-blue-aj
        recreation/party/balloon-black-aj recreation/party/balloon-green-aj
    teddy bear: recreation/toys/simple_teddy_bear_gerald_01 recreation/toys/stylized_teddy_bear_gera_01
    dice: recreation/dice
    camera: computer/hardware/digital-camera_aj_ashton_01 computer/hardware/digital_camera_nicu_bucu_01
    phone: office/telephone/mobile_phone_01 office/slim_cell_phone_israel_c_01
    telephone: office/telephone/red_telephone_mimooh_01
    headphones: recreation/music/headphones_davide_pesent_
    battery: electronics/battery/battery_01 electronics/battery/battery_jean-victor_bali_01
    laptop: computer/hardware/laptop_01 computer/etiquette_laptop_01 computer/hardware/laptop
    computer: computer/hardware/computer computer/green_computer_merzok_01
    printer: office/printer1 computer/etiquette_printer_01 computer/hardware/printer_nicu_buculei_01
    keyboard: computer/hardware/keyboard_01
    computer mouse: computer/mouse_the_structorr_ computer/hardware/mouse2 computer/hardware/mouse
        computer/hardware/mouse_scroll_fco._andrad_01
    floppy disk: computer/floppy_frederic_moser_01 computer/floppy
    disc: computer/etiquette_cd-rom_01 electronics/cd
    television: buildings/furniture/television_peterm_ electronics/television_alexander_d.__01
    light bulb: electronics/bulb/lightbulb_jon_phillips_01
    scissors: office/scissors_01 office/scissors_forbici_franc_
    hammer: tools/hammer_peterm1 tools/hammer_nicu_buculei_01 tools/construction_hammer_jon__01
    axe: tools/axe_peterm_
    saw: tools/saw_peterm_
    padlock: tools/padlock_aj_ashton_01 tools/lock
    anchor: transportation/anchor_juliane_krug_01 transportation/anchor
    magnifying glass: tools/mag1 office/lens_lente_francesco_ro_r
    bomb: tools/weapons/bomb_01
    shield: tools/weapons/shield_matt_todd_02
    book: education/books/closed_book_01 education/books/book_01
    open book: education/books/open_book_nae_02
    newspaper: education/books/newspaper_nicu_buculei_01
    envelope: office/mail1 office/mail2 office/envelope_juliane_krug_01
    pencil: education/pencil_benji_park_01
    pen: education/pen_01 education/pen_uliphant_01
    folder: office/fancy_folder_01 office/fancy_folder_02 computer/folders/folder
    paperclip: education/paperclip
    painting: office/picture_frame_jakob_chao_
    ticket: recreation/sports/ticket_benji_park_
    music note: recreation/music/funny_music_note_01
    umbrella: tools/umbrella recreation/holiday/canada_umbrella_ganson
    teapot: food/beverages/teapot_ganson
    baby bottle: food/beverages/baby_bottle_01
    plate: food/large_plate
    knife: tools/weapons/knife
    broom: tools/broom_nicu_buculei_01
    toothbrush: tools/toothbrush_and_paste_ganson
    gift: recreation/holiday/gift01 recreation/holiday/gift02 recreation/holiday/gift03
        recreation/holiday/gift04 recreation/holiday/gift05
    barrel: buildings/furniture/wooden_barrel_petri_lumm_01
    pumpkin: food/pumpkin2_yemu_01
    rainbow: recreation/holiday/rainbow_linda_kim_01
    moon: science/astronomy/the_moon_dan_gerhards_01
    fire: recreation/party/fire_valessio_soares_de_
    ice cube: food/beverages/ice_cube_jarno_vasamaa_
    snowman: recreation/holiday/snowman_01
    smiley: people/smilies/smiley_nicolas_01 people/smilies/smiley001
    alien: people/alien_peterm_01
    skull: people/skull_charles_mccolm_01
    eye: people/blue_eye_alex_fernandez_01
    ear: people/bodypart/ear_-_body_part_nicu_buc_01
    mouth: people/bodypart/mouth_-_body_part_nicu_b_01 people/bodypart/mouth_-_body_part_nicu_b_04
        people/bodypart/mouth_-_body_part_nicu_b_06
    foot: people/bodypart/left_foot_print_benji_pa_01
"""


def drawings(fetcher: Fetcher, render: Renderer) -> list[Drawing]:
    """Every drawing in the table. A file that is missing from the package is an error."""
    unpacked, version = fetcher.debian(PACKAGE)
    fetcher.record(
        Source(f"debian:{PACKAGE}", version, "public domain", "drawings of things", "Open Clip Art Library")
    )
    found = []
    for name, files in files_by_thing().items():
        for file in files:
            path = unpacked / FOLDER / f"{file}.svg"
            if not path.exists():
                raise SystemExit(
                    f"{PACKAGE} {version} has no {path.name}; see openclipart.py for what is expected"
                )
            svg = with_frame(path.read_text(encoding="utf-8", errors="replace"))
            found.append(Drawing("sprite", name, render(svg), STYLE))
    return found


def files_by_thing() -> dict[str, list[str]]:
    """The files of the table by thing. A name that is no thing is an error in the table."""
    files: dict[str, list[str]] = {}
    for line in _TABLE.strip().splitlines():
        name, named, rest = line.rpartition(":")
        if named:
            files[name.strip()] = []
        files[list(files)[-1]] += rest.split()
    unknown = files.keys() - THINGS.keys()
    if unknown:
        raise ValueError(f"the table of drawings names what is no thing: {sorted(unknown)}")
    return files


def with_frame(svg: str) -> str:
    """The SVG with a ``viewBox``, which old drawings lack: without one a renderer cannot scale them."""
    opened = re.search(r"<svg\b[^>]*>", svg)
    if opened is None or "viewBox" in opened.group(0):
        return svg
    lengths = []
    for side in ("width", "height"):
        measured = re.search(rf'\s{side}="\s*([0-9.]+)\s*([a-z]*)\s*"', opened.group(0))
        if measured is None or measured.group(2) not in UNITS:
            return svg
        lengths.append(float(measured.group(1)) * UNITS[measured.group(2)])
    bare = re.sub(r'\s(width|height)="[^"]*"', "", opened.group(0))
    framed = bare.replace("<svg", f'<svg viewBox="0 0 {lengths[0]:.1f} {lengths[1]:.1f}"', 1)
    return svg[: opened.start()] + framed + svg[opened.end() :]
