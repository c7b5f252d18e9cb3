"""Questions about groups, colours, doubts and forms of JSON: every answer is checked against its scene."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from training.mini.atlas import Atlas, built_in_atlas
from training.mini.brief import briefly
from training.mini.lots import draw_scene
from training.mini.phrases import SCREEN_CAPTION, SCREEN_LIMIT
from training.mini.scenes import Scene, count_of
from training.mini.teller import Exchange, Teller, as_typed
from training.mini.texts import ask, brief_conversation, conversation
from training.mini.vocabulary import COLOURS, plural
from training.mini.ways import read_ways, way
from training.mini.wordings import BadWording


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return built_in_atlas()


def asked(atlas: Atlas, topic: str, sort: str = "", seeds: int = 150) -> list[tuple[Scene, Exchange]]:
    found = []
    for seed in range(seeds):
        scene = draw_scene(seed, (320, 320), atlas, sort=sort)
        exchange = ask(Teller(scene, np.random.default_rng(seed)), topic)
        if exchange is not None:
            found.append((scene, exchange))
    assert len(found) > 15, f"{topic} is hardly ever asked"
    return found


def test_a_group_is_counted_and_large_groups_come_up(atlas: Atlas) -> None:
    numbers = Counter[int]()
    for scene, exchange in asked(atlas, "kindred", "kindred", 400):
        if "shape" in exchange.answer:
            shapes = sum(thing.kind == "shape" for thing in scene.things)
            assert exchange.answer in (f"There are {shapes} shapes.", f"There is {shapes} shape.")
            numbers[shapes] += 1
    assert set(range(2, 10)) <= set(numbers)
    assert max(numbers[number] for number in range(4, 10)) < 4 * min(numbers[n] for n in range(4, 10))


def test_what_is_red_is_red(atlas: Atlas) -> None:
    for scene, exchange in asked(atlas, "coloured", "few"):
        colours = {thing.colour for thing in scene.things}
        if exchange.answer.startswith("Nothing is "):
            assert exchange.answer.rstrip(".").split()[-1] not in colours
        elif exchange.answer.startswith("There is no "):
            assert exchange.answer.split()[3] not in colours
        elif found := [word for word in exchange.answer.rstrip(".").split() if word.isdigit()]:
            named = next(word for word in exchange.answer.split() if word in COLOURS)
            assert sum(thing.colour == named for thing in scene.things) == int(found[0])
        assert not {thing.colour for thing in scene.things if thing.written}


def test_yes_and_no_about_colours_and_places_are_true_and_balanced(atlas: Atlas) -> None:
    for topic, sort in (("is coloured", "few"), ("is at", "few"), ("so many", "group")):
        noes = yeses = 0
        for scene, exchange in asked(atlas, topic, sort, 300):
            yes = exchange.answer.startswith("Yes, ")
            yeses, noes = yeses + yes, noes + (not yes)
            if topic == "is coloured":
                said = exchange.answer.rstrip(".").split()[-1]
                name = exchange.answer.split("the ", 1)[1].rsplit(" ", 2)[0]
                (thing,) = (t for t in scene.things if name in (t.name, t.kind))
                assert said == thing.colour
                assert (f" {said}" in exchange.question.replace(name, "").lower()) is yes, exchange
        assert 0.3 < yeses / (yeses + noes) < 0.7, topic


def test_so_many_are_those_there_are(atlas: Atlas) -> None:
    for scene, exchange in asked(atlas, "so many", "group"):
        parts = exchange.answer.rstrip(".").split()
        number = 0 if parts[3] == "no" else int(parts[3])
        name = " ".join(parts[4:])
        holding = [t.name for t in scene.things if name in (t.name, plural(t.name))]
        assert len(holding) == number, exchange


def test_boxes_by_category_are_all_boxes_of_those_names(atlas: Atlas) -> None:
    lengths = set()
    for scene, exchange in asked(atlas, "categories", "many"):
        boxes = json.loads(exchange.answer[8:-4])
        lengths.add(len(boxes))
        for box in boxes:
            assert box["label"] in exchange.question
        for label in {box["label"] for box in boxes}:
            assert sum(box["label"] == label for box in boxes) == count_of(scene, label)
    assert len(lengths) > 3


def test_json_of_ones_own_has_the_keys_that_were_shown(atlas: Atlas) -> None:
    keys = set()
    for scene, exchange in asked(atlas, "own json"):
        value = json.loads(exchange.answer[8:-4])
        keys |= set(value)
        shown = exchange.question[exchange.question.index("{") :]
        assert [key for key in value if f'"{key}":' in shown] == list(value)
        assert value.get("count", len(scene.things)) == len(scene.things)
        assert value.get("text", scene.texts) == scene.texts
    assert {"count", "colours", "text", "background"} <= keys


def test_brief_answers_are_what_was_asked() -> None:
    full = {
        ("colour", "The circle is red."): "Red.",
        ("count", "There are no stars."): "0.",
        ("count", "There are 3 red stars."): "3.",
        ("name", "It is an owl."): "Owl.",
        ("place", "The red circle is at the top left."): "Top left.",
        ("is there", "No, there is no dog."): "No.",
    }
    for (topic, answer), kept in full.items():
        assert briefly(Exchange(topic, "?", answer)) == Exchange(topic, "?", kept)
    assert briefly(Exchange("background", "?", "The background fades from red to blue.")) is None
    assert briefly(Exchange("caption", "?", "A dog.")) is None


def test_a_brief_conversation_says_no_sentences(atlas: Atlas) -> None:
    said = [
        exchange
        for seed in range(60)
        for exchange in brief_conversation(
            draw_scene(seed, (256, 256), atlas), np.random.default_rng(seed), 8
        )
    ]
    assert len(said) > 60
    assert max(len(exchange.answer.split()) for exchange in said) <= 3


def test_a_screen_is_told_modestly(atlas: Atlas) -> None:
    for seed in range(40):
        scene = draw_scene(seed, (320, 256), atlas, sort="screen")
        assert scene.marks
        assert not scene.things
        assert not scene.texts
        for mark in scene.marks:
            assert -0.001 <= mark.x - mark.width / 2 <= mark.x + mark.width / 2 <= 1.001
        for exchange in conversation(scene, np.random.default_rng(seed), 8):
            truth = (SCREEN_CAPTION, SCREEN_LIMIT, "This is a picture of text.", "```json")
            assert exchange.answer.startswith(truth), exchange


def test_typing_leaves_copied_prompts_alone_and_shortens_others() -> None:
    copied = 'Locate every instance that belongs to the following categories: "circle, square".'
    assert {as_typed(copied, np.random.default_rng(seed)) for seed in range(100)} == {copied}
    typed = {as_typed("What is the colour of the dog?", np.random.default_rng(seed)) for seed in range(900)}
    assert {
        "What's the colour of the dog?",
        "What is colour of dog?",
        "WHAT IS THE COLOUR OF THE DOG?",
    } <= typed
    assert any(question.endswith(" pls?") for question in typed)
    assert all("dog" in question.lower() for question in typed)


def test_every_question_has_many_wordings_and_no_slot_stays_open(atlas: Atlas) -> None:
    random = np.random.default_rng(3)
    with pytest.raises(KeyError):
        way("colour", random)
    for question in ("colour", "how many", "where", "is there", "word", "caption", "box of"):
        parts = dict.fromkeys(("NAME", "NAMES", "A", "IS", "DOES", "COLOUR"), "x")
        assert len({way(question, random, **parts) for _ in range(400)}) >= 15, question
    assert len(read_ways()) > 50


def test_what_is_written_wrongly_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ways.txt"
    path.write_text("[colour]\nwhat {colour is it\n")
    with pytest.raises(BadWording, match=r"line 1, .*braces do not match"):
        read_ways(path)
    path.write_text("[colour]\na\n[colour]\nb\n")
    with pytest.raises(BadWording, match=r"line 3, .*twice"):
        read_ways(path)
