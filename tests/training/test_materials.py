"""The materials of mini, as far as they can be had without a network."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from training.mini import lettering, openclipart, photographs
from training.mini.atlas import (
    PHOTO_SIDE,
    Atlas,
    Drawing,
    built_in_atlas,
    main_colour,
    pack,
    to_photo,
)
from training.mini.sources import Fetcher, IconSet, Source, emoji_names
from training.mini.things import THINGS
from training.mini.vocabulary import (
    CLOTHES,
    COLOURS,
    GROUP_PLURALS,
    MEASURES,
    NUMBER_WORDS,
    SHAPES,
    UNCOUNTED,
    plural,
    with_article,
)

OF_OLD = (
    "dog cat horse cow pig sheep elephant lion bear fox monkey rabbit mouse duck owl penguin fish whale "
    "turtle snake frog butterfly bee crab octopus snail apple banana orange lemon pear strawberry "
    "pineapple watermelon carrot mushroom cheese pizza hamburger cake car bus truck bicycle motorcycle "
    "tractor airplane helicopter rocket sailboat house tree flower cactus umbrella clock key guitar "
    "camera phone football balloon chair scissors snowman robot shoe cup "
)


def disc(colour: tuple[int, int, int]) -> Image.Image:
    picture = Image.new("RGBA", (90, 60), (0, 0, 0, 0))
    ImageDraw.Draw(picture).ellipse((10, 5, 80, 55), fill=(*colour, 255))
    return picture


@pytest.fixture
def font(tmp_path: Path) -> Path:
    """Pillow's own font as a file."""
    face = ImageFont.load_default(20)
    assert isinstance(face, ImageFont.FreeTypeFont)
    path = tmp_path / "own.ttf"
    path.write_bytes(face.font_bytes)
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    stems = ("ba", "co", "di", "fu", "ge", "ha", "jo", "ki", "lu", "me")
    path.write_text("\n".join(f"{first}{second}" for first in stems for second in stems) + "\n")
    return path


def test_there_are_enough_things_and_all_that_there_were() -> None:
    assert len(THINGS) >= 330
    assert set(OF_OLD.split()) <= THINGS.keys()
    codes = [code for thing in THINGS.values() for code in thing.codes]
    assert len(codes) == len(set(codes)), "one emoji cannot show two things"
    for name, thing in THINGS.items():
        assert name == name.lower()
        assert len(name.split()) <= 3
        assert name not in SHAPES
        assert name not in COLOURS or name == "orange"
        assert thing.codes
        assert all(int(part, 16) > 0x1F for code in thing.codes for part in code.split("-"))


def test_names_are_said_as_people_say_them() -> None:
    said = {name: with_article(name) for name in THINGS}
    assert len(set(said.values())) == len(THINGS)
    assert said["owl"] == "an owl"
    assert said["unicorn"] == "a unicorn"
    assert said["hourglass"] == "an hourglass"
    assert said["scissors"] == "a pair of scissors"
    assert said["cheese"] == "a piece of cheese"
    assert said["bowling pins"] == "some bowling pins"
    assert (plural("knife"), plural("sheep"), plural("bus"), plural("candle")) == (
        "knives",
        "sheep",
        "buses",
        "candles",
    )
    assert (plural("clothing"), with_article("clothing")) == ("pieces of clothing", "a piece of clothing")
    assert set(MEASURES) == UNCOUNTED <= THINGS.keys()
    for name in THINGS:
        if name.endswith(("s", "x", "ch", "sh", "y", "f", "man", "z")) and name not in UNCOUNTED:
            regular = name.endswith("y") and name[-2] in "aeiou"
            assert plural(name) != name + "s" or regular, f"{name} has no regular plural"


def test_groups_and_clothes_are_named() -> None:
    assert GROUP_PLURALS.keys() <= {thing.group for thing in THINGS.values()}
    assert len(set(CLOTHES.values())) == len(CLOTHES) == 10
    assert NUMBER_WORDS[9] == "nine"


def test_the_main_colour_is_named_only_where_one_prevails() -> None:
    two = disc((230, 30, 30))
    ImageDraw.Draw(two).rectangle((45, 0, 90, 60), fill=(30, 80, 230, 255))
    red, mixed = pack([Drawing("sprite", "a", disc((230, 30, 30))), Drawing("sprite", "b", two)], []).colours
    assert (red, mixed) == ("red", "")
    assert main_colour(np.zeros((128, 128, 4), np.uint8)) == ""


def test_an_atlas_comes_back_from_its_file(tmp_path: Path) -> None:
    drawings = [
        Drawing("shape", "circle", disc((255, 255, 255))),
        Drawing("sprite", "apple", disc((220, 30, 30)), "x"),
    ]
    wide = to_photo(Image.new("RGB", (300, 100), (20, 120, 60)), "hat")
    atlas = pack(drawings, [wide, to_photo(Image.new("RGB", (50, 100), (9, 9, 9)))])
    path = tmp_path / "atlas.npz"
    atlas.save(path)
    back = Atlas.load(path)
    for field in ("kinds", "names", "styles", "colours", "photo_labels"):
        assert getattr(back, field) == getattr(atlas, field)
    assert back.photo_aspects == pytest.approx((3.0, 0.5))
    assert back.aspects == pytest.approx(atlas.aspects)
    assert back.photos.shape == (2, PHOTO_SIDE, PHOTO_SIDE, 3)
    visible = atlas.textures[..., 3] > 250
    difference = np.abs(back.textures[visible].astype(int) - atlas.textures[visible].astype(int))
    assert difference.mean() < 4
    assert np.array_equal(back.textures[0, ..., 3], atlas.textures[0, ..., 3])
    assert back.photos_of == {"hat": [0], "": [1]}


def test_parts_of_an_atlas(tmp_path: Path) -> None:
    drawings = [Drawing("sprite", "apple", disc((220, 30, 30)), style) for style in ("one", "two")]
    atlas = built_in_atlas().plus(pack(drawings, [to_photo(disc((9, 9, 9)))]))
    assert [
        s for s, k in zip(atlas.only({"two"}).styles, atlas.only({"two"}).kinds, strict=True) if k == "sprite"
    ] == ["two"]
    assert atlas.only(set()).names_of("shape") == list(SHAPES)
    assert len(atlas.without_photos().photos) == 0 < len(atlas.photos)
    assert atlas.without_words().names_of("word") == []


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"training\.mini\.prepare"):
        Atlas.load(tmp_path / "atlas.npz")
    np.savez(tmp_path / "old.npz", kinds=np.array(["shape"]))
    with pytest.raises(ValueError, match=r"old\.npz"):
        Atlas.load(tmp_path / "old.npz")
    with pytest.raises(ValueError, match="other lengths"):
        Atlas(
            ("shape",),
            (),
            (),
            (),
            (),
            np.zeros((0, 2, 2, 4), np.uint8),
            np.zeros((0, 2, 2, 3), np.uint8),
            (),
            (),
        )


def test_texts_keep_to_their_shares_and_leave_the_held_out_words_alone(words: Path) -> None:
    texts = lettering.training_texts(np.random.default_rng(1), 4000, words)
    held_out = set(lettering.held_out_words(words))
    assert 2 <= len(held_out) <= 25
    assert not held_out & {text.lower() for text in texts}
    assert all(1 <= len(text) <= 8 and text.isascii() for text in texts)
    numbers = [text for text in texts if text.isdigit()]
    assert 0.22 < len(numbers) / 4000 < 0.28
    assert max(int(number) for number in numbers) <= 999
    letters = [text for text in texts if not text.isdigit()]
    assert 0.55 < sum(text.isupper() for text in letters) / len(letters) < 0.66
    listed = {word.lower() for word in words.read_text().split()}
    assert 0.5 < sum(text.lower() in listed for text in texts) / 4000 < 0.62
    again = lettering.training_texts(np.random.default_rng(1), 4000, words)
    assert texts == again


def test_texts_are_drawn(font: Path) -> None:
    atlas = lettering.letter(built_in_atlas(), ["Ham", "42", "I"], [font], np.random.default_rng(0))
    assert (atlas.kinds[-3:], atlas.names[-3:]) == (("word", "number", "word"), ("Ham", "42", "I"))
    assert atlas.styles[-1] == "own"
    assert atlas.aspects[-3] > 1.5 > 0.8 > atlas.aspects[-1]
    assert not np.array_equal(atlas.textures[-3], atlas.textures[-2])
    for texture in atlas.textures[-3:]:
        assert 0.1 < (texture[..., 3] > 128).mean() <= 1.0


def test_many_workers_draw_what_one_draws(font: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["alpha", "7", "Beta"]
    alone = lettering.letter(built_in_atlas(), texts, [font], np.random.default_rng(0))
    monkeypatch.setattr(lettering, "WORTH_WORKERS", 1)
    together = lettering.letter(built_in_atlas(), texts, [font], np.random.default_rng(0))
    assert np.array_equal(alone.textures, together.textures)
    assert alone.aspects == together.aspects


def test_missing_materials_say_how_to_make_them(tmp_path: Path, font: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"training\.mini\.prepare"):
        lettering.word_list(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match=r"training\.mini\.prepare"):
        lettering.fonts(tmp_path / "none")
    with pytest.raises(ValueError, match="without a font"):
        lettering.letter(built_in_atlas(), ["A"], [], np.random.default_rng(0))
    with pytest.raises(ValueError, match="empty"):
        lettering.letter(built_in_atlas(), [" "], [font], np.random.default_rng(0))


def icon_set(folder: Path) -> IconSet:
    folder.mkdir()
    icons = {"fox-face": {"body": "<path/>"}, "wide": {"body": "<rect/>", "width": 40}}
    (folder / "icons.json").write_text(
        json.dumps({"icons": icons, "aliases": {"vixen": {"parent": "fox-face"}}, "width": 20, "height": 20})
    )
    (folder / "info.json").write_text(
        json.dumps({"license": {"spdx": "MIT"}, "author": {"name": "A", "url": "https://a.example"}})
    )
    (folder / "chars.json").write_text(json.dumps({"1f600": "wide"}))
    return IconSet(folder)


def test_icons_are_found_by_code_point_or_by_name(tmp_path: Path) -> None:
    icons = icon_set(tmp_path / "set")
    by_code = icons.find("1f600", [])
    assert by_code is not None
    assert 'viewBox="0 0 40 20"' in by_code
    by_unicode = icons.find("1f98a", emoji_names("1f98a", [{"1f98a": "fox"}]))
    assert by_unicode is not None
    assert "<path/>" in by_unicode
    assert icons.find("1f98a", ["vixen"]) == by_unicode
    assert icons.find("1f98a", ["foxface"]) == by_unicode
    assert icons.find("1f415", emoji_names("1f415", [])) is None


def test_old_drawings_get_a_frame() -> None:
    framed = openclipart.with_frame('<?xml?><svg id="a" width="80.0pt" height="40pt"><g width="3"/></svg>')
    assert framed == '<?xml?><svg viewBox="0 0 100.0 50.0" id="a"><g width="3"/></svg>'
    modern = '<svg viewBox="0 0 1 1" width="2" height="2"/>'
    assert openclipart.with_frame(modern) == modern


def test_the_table_of_clip_art_names_things_only(monkeypatch: pytest.MonkeyPatch) -> None:
    files = openclipart.files_by_thing()
    assert len(files) > 100
    assert all(files.values())
    monkeypatch.setattr(openclipart, "_TABLE", "gizmo: a/b")
    with pytest.raises(ValueError, match="gizmo"):
        openclipart.files_by_thing()


def test_sources_are_recorded_once(tmp_path: Path) -> None:
    fetcher = Fetcher(tmp_path)
    for _ in range(2):
        fetcher.record(Source("npm:x", "1", "MIT", "drawings"))
    fetcher.write_sources(tmp_path / "sources.json")
    (entry,) = json.loads((tmp_path / "sources.json").read_text())
    assert entry["licence"] == "MIT"


def test_clothes_are_read_by_class_and_never_from_the_test_split(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        for label in CLOTHES:
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            Image.new("RGB", (30, 20), (10, 20, 30)).save(folder / "a.webp")
    photos, found = photographs.clothes(tmp_path)
    assert [photo.label for photo in photos] == [*CLOTHES, *CLOTHES]
    assert re.findall(r"\d+", found) == ["20", "10", "10", "10"]  # photos, classes, of either split
    assert photos[0].aspect == 1.5
    hat = tmp_path / "train" / "hat"
    (hat / "a.webp").unlink()
    empty = refusal(tmp_path)
    (hat / "a.gif").write_bytes(b"GIF89a")
    without_photos = refusal(tmp_path)
    (hat / "a.jpg").write_bytes(b"no photo")
    broken = refusal(tmp_path)
    missing = refusal(tmp_path / "nowhere")
    assert len({empty, without_photos, broken, missing.replace(f"{tmp_path}/nowhere", str(tmp_path))}) == 4
    assert str(hat / "a.jpg") in broken
    for message, folder in ((empty, hat), (without_photos, hat), (missing, tmp_path / "nowhere" / "train")):
        assert str(folder) in message
        assert "--photos" in message
    numbers = [re.findall(r"\d+", each.replace(str(tmp_path), "")) for each in (empty, without_photos)]
    assert numbers == [[], ["1"]]  # of files that are no photos


def refusal(folder: Path) -> str:
    with pytest.raises(SystemExit) as ended:
        photographs.clothes(folder)
    return str(ended.value.code)


def test_clothes_may_be_jpeg_png_or_webp_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    names = ("a.JPG", "b.jpeg", "c.png", "d.webp")
    for split in photographs.SPLITS:
        for label in CLOTHES:
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for name in names:
                Image.new("RGB", (30, 20), (10, 20, 30)).save(folder / name)
    (tmp_path / "train" / "hat" / "Thumbs.db").write_bytes(b"")
    photos, found = photographs.clothes(tmp_path)
    assert len(photos) == 2 * 10 * len(names)
    assert re.findall(r"\d+", found) == ["80", "10", "40", "40"]
    assert found.split()[-1] == "train/hat/Thumbs.db"
