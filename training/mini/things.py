"""The things that mini can name, their groups, and the emoji that show each.

Code points (as the emoji packages name files, without FE0F) are of drawings that everyone would call by that
name, most plainly first. A name is in this list only if its drawings are unmistakable and unlike those of
every other name: near-twins (mouse and rat, ship and ferry) share one name or leave one out, and no name is a
shape's or a colour's.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Thing:
    """``codes``: emoji that show the thing, most plainly first. ``plural``: only if irregular."""

    group: str
    codes: tuple[str, ...]
    plural: str = ""


# "name (irregular plural): code points", entries parted by "|".
_TABLE: Final[dict[str, str]] = {
    "animal": """
        dog: 1f415 1f436 1f429 | cat: 1f408 1f431 1f408-200d-2b1b | horse: 1f40e 1f434 | cow: 1f404 1f42e
        pig: 1f416 1f437 | sheep (sheep): 1f411 | elephant: 1f418 | lion: 1f981 | bear: 1f43b
        fox (foxes): 1f98a | monkey: 1f412 1f435 | rabbit: 1f407 1f430 | mouse (mice): 1f401 1f42d
        duck: 1f986 | owl: 1f989 | penguin: 1f427 | fish (fish): 1f41f 1f420 | whale: 1f40b 1f433
        turtle: 1f422 | snake: 1f40d | frog: 1f438 | butterfly (butterflies): 1f98b | bee: 1f41d
        crab: 1f980 | octopus (octopuses): 1f419 | snail: 1f40c | unicorn: 1f984 | zebra: 1f993
        deer (deer): 1f98c | goat: 1f410 | camel: 1f42a 1f42b | giraffe: 1f992 | rhino: 1f98f | hippo: 1f99b
        squirrel: 1f43f | hedgehog: 1f994 | bat: 1f987 | polar bear: 1f43b-200d-2744 | koala: 1f428
        panda: 1f43c | kangaroo: 1f998 | wolf (wolves): 1f43a | raccoon: 1f99d | tiger: 1f405 1f42f
        gorilla: 1f98d | chicken: 1f414 | chick: 1f424 1f425 1f423 | bird: 1f426 | eagle: 1f985
        swan: 1f9a2 | flamingo: 1f9a9 | peacock: 1f99a | parrot: 1f99c | crocodile: 1f40a | lizard: 1f98e
        dragon: 1f409 1f432 | dinosaur: 1f995 1f996 | dolphin: 1f42c | shark: 1f988
        jellyfish (jellyfish): 1fabc | lobster: 1f99e | shrimp (shrimps): 1f990 | caterpillar: 1f41b
        ant: 1f41c | ladybug: 1f41e | spider: 1f577 | scorpion: 1f982 | mosquito (mosquitoes): 1f99f
    """,
    "plant": """
        tree: 1f333 1f332 | palm tree: 1f334 | flower: 1f33c 1f338 1f33a | cactus (cacti): 1f335
        rose: 1f339 | tulip: 1f337 | sunflower: 1f33b | clover: 1f340 2618 | leaf (leaves): 1f343
        maple leaf (maple leaves): 1f341 | potted plant: 1fab4 | mushroom: 1f344
    """,
    "food": """
        apple: 1f34e 1f34f | banana: 1f34c | orange: 1f34a | lemon: 1f34b | pear: 1f350
        strawberry (strawberries): 1f353 | pineapple: 1f34d | watermelon: 1f349 | carrot: 1f955
        cheese: 1f9c0 | pizza: 1f355 | hamburger: 1f354 | cake: 1f382 1f370 | peach (peaches): 1f351
        cherries (cherries): 1f352 | blueberries (blueberries): 1fad0 | kiwi: 1f95d | grapes (grapes): 1f347
        coconut: 1f965 | avocado: 1f951 | tomato (tomatoes): 1f345 | eggplant: 1f346
        potato (potatoes): 1f954 | corn: 1f33d | chili pepper: 1f336 | bell pepper: 1fad1 | cucumber: 1f952
        broccoli: 1f966 | garlic: 1f9c4 | onion: 1f9c5 | bread: 1f35e | croissant: 1f950 | pretzel: 1f968
        pancakes (pancakes): 1f95e | chicken leg: 1f357 | bacon: 1f953 | fries (fries): 1f35f
        hot dog: 1f32d | sandwich (sandwiches): 1f96a | taco: 1f32e | egg: 1f95a | fried egg: 1f373
        popcorn: 1f37f | rice: 1f35a | spaghetti: 1f35d | sushi: 1f363 | ice cream: 1f366 1f368
        doughnut: 1f369 | cookie: 1f36a | cupcake: 1f9c1 | chocolate: 1f36b | candy (candies): 1f36c
        lollipop: 1f36d | honey: 1f36f
    """,
    "drink": """
        cup: 2615 1f375 | milk: 1f95b | champagne: 1f37e | wine glass (wine glasses): 1f377
        cocktail: 1f378 1f379 | beer: 1f37a | soda: 1f964 | bubble tea: 1f9cb
    """,
    "vehicle": """
        car: 1f697 1f698 1f699 | bus (buses): 1f68c 1f68d | truck: 1f69a 1f69b | bicycle: 1f6b2
        motorcycle: 1f3cd | tractor: 1f69c | airplane: 2708 1f6e9 1f6eb 1f6ec | helicopter: 1f681
        rocket: 1f680 | sailboat: 26f5 | train: 1f686 1f684 1f685 | steam train: 1f682 | ambulance: 1f691
        fire truck: 1f692 | police car: 1f693 1f694 | taxi: 1f695 1f696 | racing car: 1f3ce | canoe: 1f6f6
        ship: 1f6a2 1f6f3 | flying saucer: 1f6f8
    """,
    "building": """
        house: 1f3e0 1f3e1 | office building: 1f3e2 | hospital: 1f3e5 | school: 1f3eb | shop: 1f3ea
        factory (factories): 1f3ed | castle: 1f3f0 | church (churches): 26ea | mosque: 1f54c | temple: 1f3db
        tower: 1f5fc | tent: 26fa | circus tent: 1f3aa
    """,
    "structure": """
        fountain: 26f2 | ferris wheel: 1f3a1 | roller coaster: 1f3a2 | bridge: 1f309
        traffic light: 1f6a6 1f6a5 | stop sign: 1f6d1 | gas pump: 26fd
        mailbox (mailboxes): 1f4eb 1f4ea 1f4ec 1f4ed
    """,
    "clothing": """
        shoe: 1f45f 1f45e | tie: 1f454 | t-shirt: 1f455 | jeans (jeans): 1f456 | scarf (scarves): 1f9e3
        gloves (gloves): 1f9e4 | coat: 1f9e5 | socks (socks): 1f9e6 | dress (dresses): 1f457 | bikini: 1f459
        shorts (shorts): 1fa73 | boot: 1f462 1f97e | high heel: 1f460 | hat: 1f452 | top hat: 1f3a9
        graduation cap: 1f393 | cap: 1f9e2 | helmet: 1fa96 26d1
    """,
    "other": """
        glasses (glasses): 1f453 | sunglasses (sunglasses): 1f576 | crown: 1f451 | key: 1f511 1f5dd
        gear: 2699 | scales (scales): 2696 | magnet: 1f9f2 | padlock: 1f512 1f513 | anchor: 2693
        compass (compasses): 1f9ed | magnifying glass (magnifying glasses): 1f50d 1f50e | syringe: 1f489
        pill: 1f48a | bandage: 1fa79 | stethoscope: 1fa7a | swords (swords): 2694 | bomb: 1f4a3
        bow and arrow (bows and arrows): 1f3f9 | shield: 1f6e1 | fire extinguisher: 1f9ef
    """,
    "bag": """
        handbag: 1f45c | backpack: 1f392 | suitcase: 1f9f3 | briefcase: 1f4bc | money bag: 1f4b0
    """,
    "instrument": """
        guitar: 1f3b8 | saxophone: 1f3b7 | trumpet: 1f3ba | accordion: 1fa97 | piano: 1f3b9 | violin: 1f3bb
        drum: 1f941 1fa98 | maracas (maracas): 1fa87
    """,
    "sport": """
        football: 26bd | baseball: 26be | basketball: 1f3c0 | volleyball: 1f3d0 | rugby ball: 1f3c9 1f3c8
        bowling pins (bowling pins): 1f3b3 | hockey stick: 1f3d2 1f3d1 | ping-pong paddle: 1f3d3
        racket: 1f3f8 1f3be | boxing glove: 1f94a | golf flag: 26f3 | ice skate: 26f8 | fishing rod: 1f3a3
        skis (skis): 1f3bf | dartboard: 1f3af | billiard ball: 1f3b1 | skateboard: 1f6f9
        roller skate: 1f6fc | trophy (trophies): 1f3c6 | medal: 1f3c5 1f947 1f396 | parachute: 1fa82
    """,
    "toy": """
        balloon: 1f388 | teddy bear: 1f9f8 | yo-yo: 1fa80 | kite: 1fa81 | puzzle piece: 1f9e9
        dice (dice): 1f3b2 | chess pawn: 265f | playing card: 1f0cf | game controller: 1f3ae
        crystal ball: 1f52e
    """,
    "device": """
        clock: 23f0 1f552 1f570 | camera: 1f4f7 1f4f8 | phone: 1f4f1 | telephone: 260e
        watch (watches): 231a | stopwatch (stopwatches): 23f1 | megaphone: 1f4e3 1f4e2 | radio: 1f4fb
        microphone: 1f3a4 1f399 | headphones (headphones): 1f3a7 | battery (batteries): 1f50b | plug: 1f50c
        laptop: 1f4bb | computer: 1f5a5 | printer: 1f5a8 | keyboard: 2328
        computer mouse (computer mice): 1f5b1 | floppy disk: 1f4be | disc: 1f4bf 1f4c0
        movie camera: 1f3a5 1f4fd | television: 1f4fa | light bulb: 1f4a1 | flashlight: 1f526
        telescope: 1f52d | microscope: 1f52c | thermometer: 1f321 | wheelchair: 1f9bd 1f9bc | robot: 1f916
    """,
    "tool": """
        scissors (scissors): 2702 | hammer: 1f528 | axe: 1fa93 | pickaxe: 26cf | saw: 1fa9a
        wrench (wrenches): 1f527 | screwdriver: 1fa9b | toolbox (toolboxes): 1f9f0 | ladder: 1fa9c
    """,
    "office": """
        book: 1f4d5 1f4d7 1f4d8 1f4d9 | open book: 1f4d6 | newspaper: 1f4f0 1f5de | coin: 1fa99
        banknote: 1f4b5 1f4b4 1f4b6 1f4b7 | credit card: 1f4b3 | envelope: 2709 | parcel: 1f4e6
        pencil: 270f | pen: 1f58a 1f58b | paintbrush (paintbrushes): 1f58c | folder: 1f4c1 1f4c2
        calendar: 1f4c5 1f4c6 1f5d3 | pushpin: 1f4cc 1f4cd | paperclip: 1f4ce 1f587 | ruler: 1f4cf
        map: 1f5fa | globe: 1f30d 1f30e 1f30f | painting: 1f5bc | paint palette: 1f3a8 | ticket: 1f3ab 1f39f
        clapperboard: 1f3ac | music note: 1f3b5 1f3b6
    """,
    "household": """
        umbrella: 2614 2602 | toilet: 1f6bd | bathtub: 1f6c1 | mirror: 1fa9e | window: 1fa9f | door: 1f6aa
        candle: 1f56f | lantern: 1f3ee | bell: 1f514 | teapot: 1fad6 | baby bottle: 1f37c | jar: 1fad9
        vase: 1f3fa | plate: 1f37d | spoon: 1f944 | knife (knives): 1f52a | chopsticks (chopsticks): 1f962
        broom: 1f9f9 | basket: 1f9fa | toilet paper: 1f9fb | bucket: 1faa3 | soap: 1f9fc
        toothbrush (toothbrushes): 1faa5 | shopping cart: 1f6d2 | trash can: 1f5d1
        hourglass (hourglasses): 231b 23f3 | gift: 1f381 | ribbon: 1f380 | lipstick: 1f484 | gem: 1f48e
        yarn: 1f9f6 | barrel: 1f6e2 | wheel: 1f6de | lifebuoy: 1f6df | pumpkin: 1f383
    """,
    "furniture": """
        chair: 1fa91 | bed: 1f6cf | couch (couches): 1f6cb
    """,
    "nature": """
        mountain: 26f0 1f3d4 1f5fb | volcano (volcanoes): 1f30b | beach (beaches): 1f3d6 | rainbow: 1f308
        sun: 2600 | moon: 1f315 | planet: 1fa90 | cloud: 2601 | rain cloud: 1f327 | lightning: 26a1
        tornado (tornadoes): 1f32a | snowflake: 2744 | fire: 1f525 | water drop: 1f4a7 | seashell: 1f41a
        feather: 1fab6 | spider web: 1f578 | ice cube: 1f9ca | bone: 1f9b4
    """,
    "figure": """
        snowman (snowmen): 26c4 2603 | baby (babies): 1f476 | man (men): 1f468 | woman (women): 1f469
        smiley: 1f600 1f603 1f642 | clown: 1f921 | ghost: 1f47b | alien: 1f47d | skull: 1f480
    """,
    "body part": """
        hand: 270b 1f590 | eye: 1f441 | ear: 1f442 | nose: 1f443 | mouth: 1f444 | tooth (teeth): 1f9b7
        foot (feet): 1f9b6 | brain: 1f9e0 | arm: 1f4aa
    """,
}


def _read(table: dict[str, str]) -> dict[str, Thing]:
    """The table as things by name; a name given twice is an error in it."""
    things: dict[str, Thing] = {}
    for group, text in table.items():
        for entry in text.replace("\n", "|").split("|"):
            if not entry.strip():
                continue
            named, codes = entry.split(":")
            name, _, plural = named.strip().removesuffix(")").partition(" (")
            if name in things:
                raise ValueError(f"{name!r} is named twice in the table of things")
            things[name] = Thing(group, tuple(codes.split()), plural)
    return things


THINGS: Final[dict[str, Thing]] = _read(_TABLE)
