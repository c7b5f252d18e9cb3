"""The held-out questions: what ships is what the gates need, and drawing, writing and reading them works."""

import io
import json
import re
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from training.mini import draw_held_out, quotas
from training.mini.atlas import Atlas, Drawing, built_in_atlas, pack, to_photo
from training.mini.gates import GATES, OPTIONAL
from training.mini.held_out import LICENCES, SHIPPED, HeldOut, only, read, sample, topics_of, write
from training.mini.judge import is_json, is_yes
from training.mini.lettering import is_held_out
from training.mini.lots import draw_scene
from training.mini.quotas import RemainingQuota, slot_of, slot_of_name, topic_of
from training.mini.teller import Exchange
from training.mini.things import THINGS

MB = 1_000_000


@pytest.fixture(scope="module")
def shipped() -> list[HeldOut]:
    return read(SHIPPED)


def exchanges(items: list[HeldOut], topic: str = "") -> list[Exchange]:
    """All of a topic, or all."""
    return [e for item in items for turns in item.dialogues for e in turns if topic in ("", e.topic)]


# What ships


def test_every_gate_has_its_hundred_questions(shipped: list[HeldOut]) -> None:
    asked = Counter(exchange.topic for exchange in exchanges(shipped))
    asked["JSON"] = sum(is_json(exchange.answer) for exchange in exchanges(shipped))
    assert asked.total() >= 2400
    for topic in set(GATES) - OPTIONAL:
        assert asked[topic] >= 100, topic
    for topic in ("several", "clip", "follow-up", "chart", "bigger", "group"):
        assert asked[topic] >= 80, topic
    assert asked["photo"] + asked["photo limits"] >= 80


def test_three_hundred_names_are_asked_in_styles_seen_and_unseen(shipped: list[HeldOut]) -> None:
    for topic in ("name", "name, unseen style"):
        answers = [exchange.answer for exchange in exchanges(shipped, topic)]
        known = {slot_of_name(name).removeprefix("name ") for name in THINGS}
        assert set(answers) <= known
        assert len(set(answers)) >= 300
        assert len(answers) == len(set(answers)), "every name once"


def test_answers_are_balanced(shipped: list[HeldOut]) -> None:
    present = [is_yes(exchange.answer) for exchange in exchanges(shipped, "is there")]
    assert present.count(True) == present.count(False)
    counts = Counter(slot_of(exchange) for exchange in exchanges(shipped, "count"))
    assert set(counts) == {f"count {number}" for number in range(7)}
    assert len(set(counts.values())) == 1
    words = [exchange.answer.split('"')[1] for exchange in exchanges(shipped, "written")]
    assert {len(word) for word in words} == set(range(2, 9))
    assert len(set(words)) > 0.6 * len(words)


def test_pictures_are_of_sizes_that_training_never_draws(shipped: list[HeldOut]) -> None:
    for item in shipped:
        for picture in item.pictures:
            width, height = Image.open(io.BytesIO(picture)).size
            assert 128 <= width <= 448
            assert 128 <= height <= 448
            assert 0.45 <= width / height <= 2.2
            assert width % 32
            assert height % 32


def test_clips_and_sets_of_pictures_are_whole(shipped: list[HeldOut]) -> None:
    for item in shipped:
        topics = {exchange.topic for turns in item.dialogues for exchange in turns}
        if "clip" in topics:
            assert item.is_clip
            assert 4 <= len(item.pictures) <= 8
        elif "several" in topics:
            assert len(item.pictures) in (2, 3)
        else:
            assert len(item.pictures) == (0 if topics == {"talk"} else 1)
    assert any(item.system for item in shipped)
    assert all(
        len(turns) > 1 for item in shipped for turns in item.dialogues if turns[0].topic == "follow-up"
    )


def test_the_file_is_small_and_says_whose_work_it_holds() -> None:
    assert SHIPPED.stat().st_size <= 8 * MB
    with zipfile.ZipFile(SHIPPED) as packed:
        licences = packed.read(LICENCES).decode()
    assert "Twemoji" in licences
    assert "CC BY 4.0" in licences
    assert "CC0-1.0" in licences


# Reading and writing


def item(name: str, *topics: str, pictures: tuple[bytes, ...] = (b"picture",)) -> HeldOut:
    dialogues = tuple((Exchange(topic, f"{topic} {n}?", "Yes."),) for n, topic in enumerate(topics))
    return HeldOut(name, pictures, False, "", dialogues)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    turns = (
        Exchange("follow-up", "What is it?", "It is é."),
        Exchange("follow-up", "Where?", "On the left."),
    )
    items = [
        item("one", "name", "colour"),
        HeldOut("clip", (b"1", b"2"), True, "Be brief.", (turns,)),
        item("talk", "talk", pictures=()),
    ]
    path, again = tmp_path / "a.zip", tmp_path / "b.zip"
    assert write(path, items, "free") == 5
    assert read(path) == items
    write(again, items, "free")
    assert path.read_bytes() == again.read_bytes()
    assert topics_of(items) == ["name", "colour", "follow-up", "talk"]


@pytest.mark.parametrize("content", ["", "[]", '[{"name": 1}]', "[[]]", "{"])
def test_files_that_hold_no_questions_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.zip"
    with pytest.raises(FileNotFoundError, match=r"some\.zip"):
        read(path)
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"some\.zip"):
        read(path)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("questions.json", content)
    if content == "[]":
        assert read(path) == []
        return
    with pytest.raises(ValueError, match=r"some\.zip"):
        read(path)


def test_a_sample_has_its_share_of_every_topic() -> None:
    items = [item(f"picture-{n}", "name", "colour", "name") for n in range(40)] + [item("last", "rare")]
    chosen = sample(items, 30)
    asked = Counter(exchange.topic for exchange in exchanges(chosen))
    assert asked["rare"] == 1
    assert 18 <= asked["name"] <= 22
    assert 9 <= asked["colour"] <= 11
    assert len({i.name for i in chosen}) > 15, "spread over the pictures"
    assert sample(items, 1000) == items
    assert Counter(exchange.topic for exchange in exchanges(only(items, ["colour"]))) == {"colour": 40}


# Quotas


@pytest.mark.parametrize(
    ("topic", "answer", "slot", "shown"),
    [
        ("count", "There are no dogs.", "count 0", "count"),
        ("count", "There is 1 dog.", "count 1", "count"),
        ("count", "There are 6 red stars.", "count 6", "count"),
        ("count", "There are 9 dogs.", "count 9", "count 7-9"),
        ("written", 'It says "STOP".', "written 4", "written"),
        ("written", "The number is 120.", "number 3", "number"),
        ("is there", "No, there is no dog.", "is there, no", "is there"),
        ("name", "It is a dog.", "name It is a dog.", "name"),
        ("grounding", '[{"bbox_2d": [1, 2, 3, 4], "label": "dog"}]', "locate one", "locate one"),
        ("grounding", "[]", "locate one, none", "locate one"),
        ("analysis", '{"objects": [{"label": "dog"}]}', "scene, one", "scene"),
        ("locate all", '[{"label": "dog"}, {"label": "cat"}]', "locate all, more", "locate all"),
        ("count all", "There are 3 things.", "count all, more", "count all"),
        ("count all", "There is 1 thing.", "count all, one", "count all"),
        ("kind", "This is a bar chart.", "kind, chart", "kind"),
        ("colour", "The square is red.", "colour", "colour"),
        ("photo limits", "I cannot tell.", "photo limits", "photo limits"),
    ],
)
def test_slots_and_topics(topic: str, answer: str, slot: str, shown: str) -> None:
    exchange = Exchange(topic, "?", answer)
    assert slot_of(exchange) == slot
    assert topic_of(exchange) == shown


def test_wanted_counts_down() -> None:
    wanted = RemainingQuota(Counter({"colour": 2, "count 1": 1, "shape": 0}))
    colours = [Exchange("colour", f"{n}?", "Red.") for n in range(3)]
    one = Exchange("count", "How many?", "There is 1 dog.")
    taken = wanted.select([*colours, one, Exchange("shape", "?", "It is a star.")], most=5)
    assert taken == [*colours[:2], one]
    assert wanted.total == 3, "nothing is settled yet"
    assert wanted.select([*colours, one], most=1) == colours[:1]
    assert [exchange.topic for exchange in wanted.record(taken)] == ["colour", "colour", "count"]
    assert wanted.total == 0


# Drawing


def sprites(names: list[str], style: str) -> list[Drawing]:
    """Discs of different colours stand for drawings."""
    found = []
    for number, name in enumerate(names):
        picture = Image.new("RGBA", (64, 64), (40 * number % 256, 200, 90, 255))
        found.append(Drawing("sprite", name, picture, style))
    return found


@pytest.fixture(scope="module")
def drawer() -> draw_held_out.HeldOutDrawer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = list(THINGS)[:12]
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 120, (90, 120, 3)).astype(np.uint8))
    atlas = built_in_atlas().plus(pack(sprites(names, "seen"), [to_photo(photo)]))
    return draw_held_out.HeldOutDrawer(atlas, pack(sprites(names, "unseen"), []), [photo], seed=0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that is drawn in seconds."""
    monkeypatch.setattr(quotas, "DRAWN", dict.fromkeys(("colour", "count 3", "chart", "is there, no"), 2))
    monkeypatch.setattr(draw_held_out, "PHOTOS", {"photo": 3, "photo limits": 2})
    for name, count in (("SEVERAL", 5), ("CLIPS", 6), ("FOLLOW_UPS", 3)):
        monkeypatch.setattr(draw_held_out, name, count)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_small_set_is_drawn(drawer: draw_held_out.HeldOutDrawer, tmp_path: Path) -> None:
    path = tmp_path / "small.zip"
    count = write(path, drawer.everything(), draw_held_out.LICENCES)
    items = read(path)
    asked = Counter(exchange.topic for exchange in exchanges(items))
    assert asked.total() == count
    assert asked["name"] == asked["name, unseen style"] == 12
    assert asked["colour"] == asked["count"] == asked["chart"] == asked["is there"] == 2
    assert asked["photo"] == 3
    assert asked["several"] == 5
    assert asked["clip"] == 6
    assert asked["follow-up"] >= 2
    assert asked["talk"] >= 40
    for one in items:
        for picture in one.pictures:
            Image.open(io.BytesIO(picture)).load()


def test_what_no_scene_offers_is_told(
    drawer: draw_held_out.HeldOutDrawer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_held_out, "DESPAIR", 5)
    with pytest.raises(ValueError, match="count 12"):
        next(drawer.worth_asking(RemainingQuota(Counter({"count 12": 1}))))


def test_photos_are_cut_from_the_photo_itself(drawer: draw_held_out.HeldOutDrawer) -> None:
    left, right = (20, 30, 200), (200, 40, 30)
    photo = Image.new("RGB", (400, 200), left)
    photo.paste(right, (200, 0, 400, 200))
    other = draw_held_out.HeldOutDrawer(
        replace_photos(drawer.atlas, photo), drawer.unseen_style, [photo], seed=1
    )
    scene = draw_scene(3, (300, 150), other.atlas, sort="photo")
    shown = scene.background.photo
    assert shown is not None
    whole = replace(shown, crop=(0.0, 0.0, 1.0, 1.0), flipped=True)
    scene = replace(scene, background=replace(scene.background, photo=whole))
    picture = Image.open(io.BytesIO(other.cropped(scene)))
    assert picture.size == (300, 150)
    for bent in (replace(whole, turn=9.0), replace(whole, mix=0.2)):
        with pytest.raises(ValueError, match="one upright photo"):
            other.cropped(replace(scene, background=replace(scene.background, photo=bent)))
    assert np.abs(np.array(picture.getpixel((20, 75))) - right).max() < 8
    assert np.abs(np.array(picture.getpixel((280, 75))) - left).max() < 8


def replace_photos(atlas: Atlas, photo: Image.Image) -> Atlas:
    """The same drawings with one other photo."""
    return atlas.without_photos().plus(pack([], [to_photo(photo)]))


def test_a_folder_without_photos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        draw_held_out.read_photos(tmp_path)


def test_questions_are_json_that_people_can_read() -> None:
    with zipfile.ZipFile(SHIPPED) as packed:
        entries = json.loads(packed.read("questions.json"))
    assert {"name", "pictures", "is_clip", "system", "dialogues"} == set(entries[0])


def test_words_to_read_are_held_out_and_of_every_length(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    letters = "abcdefghij"
    words = [letters[n % 10] * (2 + n % 7) + letters[n // 10 % 10] for n in range(400)]
    path.write_text("\n".join(words))
    drawn = draw_held_out.unseen_words(path, np.random.default_rng(0))
    read_aloud = [text for text in drawn if not text.isdigit()]
    assert read_aloud
    assert all(is_held_out(word) for word in read_aloud)
    assert {str(number) for number in range(1, 21)} <= set(drawn), "what stands on the bars of charts"
