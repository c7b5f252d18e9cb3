"""The picture and the words agree: both follow from the scene."""

import json

import numpy as np
import pytest
import torch

from training.mini.atlas import Atlas, built_in_atlas
from training.mini.lots import draw_scene
from training.mini.phrases import analysis, caption, detail
from training.mini.render import Renderer, to_numbers
from training.mini.scenes import Scene, place_of
from training.mini.texts import TOPICS, Teller, conversation
from training.mini.vocabulary import COLOURS, SHAPES, colour_indices


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return built_in_atlas()


@pytest.fixture(scope="module")
def scenes(atlas: Atlas) -> list[Scene]:
    sizes = ((256, 256), (192, 384), (320, 224))
    return [draw_scene(seed, sizes[seed % 3], atlas) for seed in range(60)]


def test_a_seed_gives_the_same_scene_and_the_same_words(atlas: Atlas) -> None:
    first, second = (draw_scene(5, (256, 256), atlas) for _ in range(2))
    assert first == second
    told = [conversation(first, np.random.default_rng(9), 6) for _ in range(2)]
    assert told[0] == told[1]
    assert draw_scene(6, (256, 256), atlas) != first


def test_things_lie_inside_the_picture_and_apart(scenes: list[Scene]) -> None:
    for scene in scenes:
        boxes = [scene.box(thing) for thing in scene.things]
        assert boxes
        for left, top, right, bottom in boxes:
            assert 0 <= left < right <= 1000
            assert 0 <= top < bottom <= 1000
        assert [thing.x for thing in scene.things] == sorted(thing.x for thing in scene.things)


def test_each_thing_is_drawn_in_its_colour_in_its_box_and_nowhere_else(atlas: Atlas) -> None:
    renderer = Renderer(atlas, torch.device("cpu"))
    checked = 0
    for seed in range(40):
        scene = draw_scene(seed, (256, 256), atlas)
        if scene.background.kind != "plain" or scene.background.texture or scene.finish.grain:
            continue
        picture = renderer.render(to_numbers([scene]), (256, 256))[0].permute(1, 2, 0).numpy()
        # The background takes the same way through brightness and contrast; corners may be covered.
        plain = np.median(picture.reshape(-1, 3), 0) if len(scene.things) < 4 else None
        outside = np.ones((256, 256), bool)
        for thing in scene.things:
            left, top, right, bottom = (round(edge * 0.256) for edge in scene.box(thing))
            outside[max(0, top - 2) : bottom + 2, max(0, left - 2) : right + 2] = False
            inside = picture[top:bottom, left:right].reshape(-1, 3)
            tint = np.array(thing.tint, float)
            nearest = np.abs(inside - tint).sum(1).min()
            assert nearest < 75, f"seed {seed}: no {thing.label} in its box"
            checked += 1
        if plain is not None:
            assert np.abs(picture[outside] - plain).max() < 3, f"seed {seed}: something outside the boxes"
    assert checked > 10


def test_counts_colours_and_names_in_captions_are_those_of_the_scene(scenes: list[Scene]) -> None:
    for scene in scenes:
        sentence = caption(scene).lower()
        for thing in scene.things:
            assert (thing.colour if thing.kind == "shape" else thing.name.lower()) in sentence
        assert sentence.endswith(".")
        for thing in scene.things:
            assert thing.written is False or thing.name in detail(scene)


def test_analysis_is_the_json_that_was_asked_for(scenes: list[Scene]) -> None:
    for scene in scenes:
        answer = analysis(scene)
        assert answer.startswith("```json\n")
        assert answer.endswith("\n```")
        value = json.loads(answer[8:-4])
        assert set(value) == {"summary", "objects", "text"}
        assert [tuple(item["bbox_2d"]) for item in value["objects"]] == [scene.box(t) for t in scene.things]
        assert value["text"] == [t.name for t in scene.things if t.written]


def test_yes_and_no_are_true(scenes: list[Scene]) -> None:
    answers = set()
    for scene in scenes:
        names = {name for thing in scene.things for name in (thing.name, thing.label)}
        for seed in range(4):
            exchange = Teller(scene, np.random.default_rng(seed)).ask("is there")
            assert exchange is not None
            yes = exchange.answer.startswith("Yes")
            answers.add(yes)
            asked = exchange.answer.rstrip(".").split(" there is ")[1]
            name = asked.removeprefix("no ") if not yes else asked.split(" ", 1)[1]
            assert (name in names) is yes, exchange
    assert answers == {True, False}


def test_place_words_are_not_used_near_a_border(scenes: list[Scene]) -> None:
    for scene in scenes:
        for thing in scene.things:
            near = min(abs(thing.x - 1 / 3), abs(thing.x - 2 / 3), abs(thing.y - 1 / 3), abs(thing.y - 2 / 3))
            assert (place_of(thing) is None) == (near < 0.045)


def test_every_topic_is_asked(scenes: list[Scene]) -> None:
    asked = {
        topic
        for topic in TOPICS
        for scene in scenes
        if Teller(scene, np.random.default_rng(1)).ask(topic) is not None
    }
    assert asked == set(TOPICS)


def test_colour_ranges_do_not_overlap_and_photos_use_the_same_names() -> None:
    for name, ranges in COLOURS.items():
        middle = np.array([[(low + high) // 2 for low, high in ranges]], np.uint8)
        assert list(COLOURS)[colour_indices(middle)[0]] == name
        for other, others in COLOURS.items():
            apart = any(a[1] < b[0] or b[1] < a[0] for a, b in zip(ranges, others, strict=True))
            assert name == other or apart, (name, other)


def test_the_atlas_comes_back_from_disk(atlas: Atlas, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("atlas") / "atlas.npz"
    atlas.save(path)
    again = Atlas.load(path)
    assert again.names_of("shape") == list(SHAPES)
    assert again.kinds == atlas.kinds
    assert np.array_equal(again.textures[..., 3], atlas.textures[..., 3])
