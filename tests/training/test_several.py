"""Several pictures in one prompt, and clips: what is asked is true of what is shown."""

import re

import numpy as np
import pytest

from training.mini.atlas import Atlas, built_in_atlas
from training.mini.clips import DIRECTIONS, EVENTS, ask_clip, draw_clip
from training.mini.differences import SAME, changed, difference
from training.mini.lots import draw_scene
from training.mini.phrases import caption
from training.mini.several import ORDINALS, ask_several, draw_several
from training.mini.vocabulary import plural


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return built_in_atlas()


def test_which_picture_shows_it(atlas: Atlas) -> None:
    asked = 0
    for seed in range(60):
        shown = draw_several(seed, (256, 256), 2 + seed % 2, atlas)
        for exchange in ask_several(shown, np.random.default_rng(seed)):
            if " shows a" not in exchange.answer or "None" in exchange.answer:
                continue
            label = exchange.answer.rstrip(".").split(" shows ")[1].split(" ", 1)[1]
            ordinal = exchange.answer.split()[1]
            holding = [
                n for n, scene in enumerate(shown) if any(label in (t.name, t.label) for t in scene.things)
            ]
            assert holding == [ORDINALS.index(ordinal)], exchange
            asked += 1
    assert asked > 20


def test_one_of_them_is_described(atlas: Atlas) -> None:
    described = 0
    for seed in range(40):
        shown = draw_several(seed, (256, 256), 3, atlas)
        for exchange in ask_several(shown, np.random.default_rng(seed)):
            for ordinal, scene in zip(ORDINALS, shown, strict=True):
                if f"the {ordinal} p" in exchange.question.lower():
                    described += exchange.answer == caption(scene)
    assert described > 10


def test_a_picture_that_was_changed_is_told_apart(atlas: Atlas) -> None:
    told = set()
    for seed in range(60):
        first = draw_scene(seed, (256, 256), atlas, sort="few")
        second = changed(first, np.random.default_rng(seed), atlas)
        sentence = difference(first, second)
        same = first.things == second.things
        assert (sentence == SAME) is same
        if sentence.startswith("There is no "):
            label = sentence.removeprefix("There is no ").removesuffix(" in the second picture.")
            assert label in {thing.label for thing in first.things}
            assert label not in {thing.label for thing in second.things}
        if " and " in sentence and " in the first picture" in sentence:
            before, after = sentence.split(" is ")[1].split(" in the first picture and ")
            assert before in {thing.colour for thing in first.things}
            assert after.split()[0] in {thing.colour for thing in second.things}
        told.add(sentence.split()[0])
    assert {"There", "The", "I"} <= told


def test_counts_are_those_of_the_picture_that_was_named(atlas: Atlas) -> None:
    counted = 0
    for seed in range(80):
        shown = draw_several(seed, (256, 256), 2, atlas)
        for exchange in ask_several(shown, np.random.default_rng(seed)):
            found = re.fullmatch(r"There (?:is|are) (\d+|no) (.+) in the (\w+) picture\.", exchange.answer)
            if not found:
                continue
            things = shown[ORDINALS.index(found[3])].things
            number = sum(found[2] in (thing.name, plural(thing.name)) for thing in things)
            assert number == (0 if found[1] == "no" else int(found[1])), exchange
            counted += 1
    assert counted > 20


def test_a_clip_says_no_too(atlas: Atlas) -> None:
    said = set()
    for seed in range(60):
        clip = draw_clip(seed, (224, 192), 4, atlas)
        for exchange in ask_clip(clip, np.random.default_rng(seed)):
            if exchange.answer.startswith(("Yes, it ", "No, it ")):
                said.add(exchange.answer[:2])
                happens = exchange.answer.split(", it ")[1].rstrip(".")
                assert happens in (EVENTS[clip.event], EVENTS["still"]), exchange
                assert happens == EVENTS[clip.event] or clip.event not in DIRECTIONS
    assert said == {"Ye", "No"}


def test_the_thing_of_a_clip_goes_where_it_is_said_to_go(atlas: Atlas) -> None:
    events = set()
    for seed in range(80):
        clip = draw_clip(seed, (224, 192), 6, atlas)
        events.add(clip.event)
        shown = [frame.things[0] for frame in clip.frames if frame.things]
        first, last = shown[0], shown[-1]
        across, down = DIRECTIONS.get(clip.event, (0, 0))
        assert np.sign(round(last.x - first.x, 3)) == across
        assert np.sign(round(last.y - first.y, 3)) == down
        assert (last.width > first.width) == (clip.event == "grows")
        assert (len(shown) < 6) == (clip.event in ("appears", "disappears"))
        for thing in shown:
            for frame in clip.frames[:1]:
                left, top, right, bottom = frame.box(thing)
                assert right > left >= 0
                assert bottom > top >= 0
        told = ask_clip(clip, np.random.default_rng(seed))
        assert EVENTS[clip.event] in told[0].answer
        assert {exchange.topic for exchange in told} == {"clip"}
    assert events == set(EVENTS)
