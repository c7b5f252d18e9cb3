"""The picture and the words agree: both follow from the scene."""

import json

import numpy as np
import pytest
import torch

from training.mini.arrange import arrange
from training.mini.asked_of_photos import CANNOT_TELL
from training.mini.atlas import Atlas, Photo, built_in_atlas, stack_photos
from training.mini.lots import SORTS, draw_scene
from training.mini.phrases import analysis, caption, detail, is_are
from training.mini.render import Renderer, to_numbers
from training.mini.scenes import LARGE, SMALL, Scene, place_of
from training.mini.teller import Teller, as_typed
from training.mini.texts import TASKS, TOPICS, UNJUDGED, ask, conversation, dialogue
from training.mini.vocabulary import CLOTHES, COLOURS, colour_indices

# All that may be said of a photo begins so.
KNOWN_OF_PHOTOS = (
    "A photo", "A dark photo", "A bright photo", "Mostly", "It is ", "This is a photo", "I cannot tell",
    "```json",
)  # fmt: skip


def with_photos(atlas: Atlas) -> Atlas:
    """The atlas with a few one-coloured photos: of a dress, of trousers and of nothing mini knows."""
    shades = {"dress": (220, 20, 20), "pants": (20, 60, 220), "": (60, 160, 60)}
    pixels = [np.full((192, 192, 3), shade, np.uint8) for shade in shades.values()]
    photos = [Photo(each, label, 0.75) for each, label in zip(pixels, shades, strict=True)]
    return Atlas(
        atlas.kinds, atlas.names, atlas.aspects, atlas.styles, atlas.colours, atlas.textures,
        stack_photos(pixels), tuple(p.label for p in photos), tuple(p.aspect for p in photos),
    )  # fmt: skip


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return with_photos(built_in_atlas())


@pytest.fixture(scope="module")
def scenes(atlas: Atlas) -> list[Scene]:
    sizes = ((256, 256), (192, 384), (320, 224))
    drawn = [draw_scene(seed, sizes[seed % 3], atlas) for seed in range(120)]
    return [*drawn, *(draw_scene(seed, sizes[seed % 3], atlas, sort="screen") for seed in range(200, 206))]


@pytest.fixture(scope="module")
def with_things(scenes: list[Scene]) -> list[Scene]:
    return [scene for scene in scenes if scene.sort == "things"]


def test_a_seed_gives_the_same_scene_and_the_same_words(atlas: Atlas) -> None:
    first, second = (draw_scene(5, (256, 256), atlas) for _ in range(2))
    assert first == second
    told = [conversation(first, np.random.default_rng(9), 6) for _ in range(2)]
    assert told[0] == told[1]
    assert draw_scene(6, (256, 256), atlas) != first


def test_every_sort_of_scene_can_be_asked_for(atlas: Atlas) -> None:
    sorts = {sort: draw_scene(3, (256, 256), atlas, sort=sort).sort for sort in SORTS}
    assert sorts["chart"] == "chart"
    assert sorts["photo"] == sorts["garment"] == "photo"
    assert sorts["empty"] == "empty"
    assert sorts["many"] == "things"


def test_things_lie_inside_the_picture_and_apart(with_things: list[Scene]) -> None:
    assert len(with_things) > 50
    for scene in with_things:
        assert scene.things
        for left, top, right, bottom in (scene.box(thing) for thing in scene.things):
            assert 0 <= left < right <= 1000
            assert 0 <= top < bottom <= 1000
        assert [thing.x for thing in scene.things] == sorted(thing.x for thing in scene.things)


def test_a_picture_without_room_says_so(atlas: Atlas) -> None:
    thing = draw_scene(1, (256, 256), atlas, sort="single").things[0]
    wide = [type(thing)("word", "LONG", "red", (255, 0, 0), 0, 0.5, 0.5, 0.01, 1.0)]
    with pytest.raises(ValueError, match="no room"):
        arrange(wide, np.random.default_rng(0), (256, 12), single=False)


def test_each_thing_is_drawn_in_its_colour_in_its_box_and_nowhere_else(atlas: Atlas) -> None:
    renderer = Renderer(atlas, torch.device("cpu"))
    checked = 0
    for seed in range(60):
        scene = draw_scene(seed, (256, 256), atlas)
        plain = scene.background.kind == "plain" and not scene.background.texture
        if scene.sort != "things" or not plain or scene.finish.grain:
            continue
        picture = renderer.render(to_numbers([scene]), (256, 256))[0].permute(1, 2, 0).numpy()
        # The background takes the same way through brightness and contrast; corners may be covered.
        ground = np.median(picture.reshape(-1, 3), 0) if len(scene.things) < 4 else None
        outside = np.ones((256, 256), bool)
        for thing in scene.things:
            left, top, right, bottom = (round(edge * 0.256) for edge in scene.box(thing))
            outside[max(0, top - 2) : bottom + 2, max(0, left - 2) : right + 2] = False
            inside = picture[top:bottom, left:right].reshape(-1, 3)
            nearest = np.abs(inside - np.array(thing.tint, float)).sum(1).min()
            assert nearest < 75, f"seed {seed}: no {thing.label} in its box"
            checked += 1
        if ground is not None:
            assert np.abs(picture[outside] - ground).max() < 3, f"seed {seed}: something outside the boxes"
    assert checked > 10


def test_pictures_drawn_together_are_those_drawn_alone(atlas: Atlas) -> None:
    renderer = Renderer(atlas, torch.device("cpu"))
    found = (draw_scene(seed, (128, 128), atlas) for seed in range(300))
    quiet = [s for s in found if not s.background.texture and not s.finish.grain][:30]
    assert len({len(scene.things) for scene in quiet}) > 3
    together = renderer.render(to_numbers(quiet), (128, 128))
    for scene, picture in zip(quiet, together, strict=True):
        alone = renderer.render(to_numbers([scene]), (128, 128))[0]
        assert float((alone - picture).abs().max()) <= 1


def test_a_chart_draws_what_it_tells(atlas: Atlas) -> None:
    scene = draw_scene(4, (320, 256), atlas, sort="chart")
    heights = {bar.value: bar.height for bar in scene.things}
    tallest = max(heights)
    for value, height in heights.items():
        assert height == pytest.approx(heights[tallest] * value / tallest)
    assert scene.texts == [str(bar.value) for bar in scene.things]
    for bar in scene.things:
        assert f"{bar.colour} {bar.value}" in caption(scene)
    assert f"The {max(scene.things, key=lambda bar: bar.value).label} is the tallest." in detail(scene)


def test_a_photo_is_told_by_its_colours_and_never_by_what_it_might_show(atlas: Atlas) -> None:
    scenes = [draw_scene(seed, (256, 256), atlas, sort="photo") for seed in range(60)]
    told = {caption(scene) for scene in scenes}
    assert "A photo, mostly green." in told
    assert any(sentence.endswith("photo, mostly red.") for sentence in told)
    assert not any(" of " in sentence for sentence in told)
    garments = {scene.garment for scene in scenes}
    assert garments == {"dress", "pants", ""}


def test_clothes_are_named_where_they_are_asked_for(atlas: Atlas) -> None:
    named = set()
    for seed in range(60):
        scene = draw_scene(seed, (256, 256), atlas, sort="photo")
        exchange = ask(Teller(scene, np.random.default_rng(seed)), "garment")
        assert exchange is not None
        named.add(exchange.answer)
        assert exchange.answer == (f"It is {CLOTHES[scene.garment]}." if scene.garment else CANNOT_TELL)
    assert named == {"It is a dress.", "It is a pair of trousers.", CANNOT_TELL}


def test_counts_colours_and_names_in_captions_are_those_of_the_scene(with_things: list[Scene]) -> None:
    for scene in with_things:
        sentence = caption(scene).lower()
        for thing in scene.things:
            assert (thing.colour if thing.kind == "shape" else thing.name.lower()) in sentence
            assert thing.written is False or thing.name in detail(scene)
        assert sentence.endswith(".")


def test_large_and_small_are_said_of_what_is(with_things: list[Scene]) -> None:
    words = {"large ": 0, "small ": 0, "": 0}
    for thing in (thing for scene in with_things for thing in scene.things):
        words[thing.size_word] += 1
        assert (thing.size_word == "large ") == (thing.side >= LARGE)
        assert (thing.size_word == "small ") == (thing.side <= SMALL)
    assert min(words.values()) > 3


def test_analysis_is_the_json_that_was_asked_for(scenes: list[Scene]) -> None:
    for scene in scenes:
        answer = analysis(scene)
        assert answer.startswith("```json\n")
        assert answer.endswith("\n```")
        value = json.loads(answer[8:-4])
        assert set(value) == {"summary", "objects", "text"}
        assert [tuple(item["bbox_2d"]) for item in value["objects"]] == [scene.box(t) for t in scene.things]
        assert value["text"] == scene.texts


def test_yes_and_no_are_true(with_things: list[Scene]) -> None:
    answers = set()
    for scene in with_things:
        names = {name for thing in scene.things for name in (thing.name, thing.label)}
        for seed in range(4):
            exchange = ask(Teller(scene, np.random.default_rng(seed)), "is there")
            assert exchange is not None
            yes = exchange.answer.startswith("Yes")
            answers.add(yes)
            asked = exchange.answer.rstrip(".").split(" there ")[1].split(" ", 1)[1]
            found = any(asked.endswith(name) for name in names)
            assert found is yes, exchange
    assert answers == {True, False}


def test_place_words_are_not_used_near_a_border(with_things: list[Scene]) -> None:
    for thing in (thing for scene in with_things for thing in scene.things):
        near = min(abs(thing.x - 1 / 3), abs(thing.x - 2 / 3), abs(thing.y - 1 / 3), abs(thing.y - 2 / 3))
        assert (place_of(thing) is None) == (near < 0.045)


def test_every_topic_is_asked(scenes: list[Scene]) -> None:
    asked = {
        topic
        for topic in TOPICS | UNJUDGED
        for scene in scenes
        for seed in range(3)
        if ask(Teller(scene, np.random.default_rng([scene.seed, seed])), topic) is not None
    }
    assert asked == {*TOPICS, *UNJUDGED}


def test_nothing_but_clothes_and_colours_is_claimed_about_a_photo(scenes: list[Scene]) -> None:
    photos = [scene for scene in scenes if scene.sort == "photo"]
    assert photos
    for scene in photos:
        for exchange in conversation(scene, np.random.default_rng(1), 12):
            assert exchange.answer.startswith(KNOWN_OF_PHOTOS), exchange
            if exchange.answer.startswith("It is ") and exchange.topic.startswith("garment"):
                assert exchange.answer == f"It is {CLOTHES[scene.garment]}."


def test_the_prompts_of_tasks_are_asked_word_for_word_and_others_as_people_type(scenes: list[Scene]) -> None:
    asked = {e.question for s in scenes for e in conversation(s, np.random.default_rng(s.seed), 12)}
    assert asked >= TASKS
    typed = {as_typed("What is in this picture?", np.random.default_rng(seed)) for seed in range(200)}
    assert {"what is in this picture?", "What is in this picture", "What is in this image?"} <= typed


def test_later_turns_speak_of_the_same_thing(with_things: list[Scene]) -> None:
    for scene in with_things:
        turns = dialogue(scene, np.random.default_rng(scene.seed))
        if turns and turns[0].topic == "follow-up":
            assert len(turns) > 1
            for turn in turns[1:]:
                if turn.answer.startswith("It is ") and turn.question.startswith("What col"):
                    colour = turn.answer.removeprefix("It is ").rstrip(".")
                    assert colour in {thing.colour for thing in scene.things}


def test_is_and_are() -> None:
    assert is_are("dog") == "is"
    assert is_are("red square") == "is"
    assert is_are("scissors") == "are"
    assert is_are("grapes") == "are"
    assert is_are("cheese") == "is"
    assert is_are("sheep") == "is"


def test_colour_ranges_do_not_overlap_and_photos_use_the_same_names() -> None:
    for name, ranges in COLOURS.items():
        middle = np.array([[(low + high) // 2 for low, high in ranges]], np.uint8)
        assert list(COLOURS)[colour_indices(middle)[0]] == name
        for other, others in COLOURS.items():
            apart = any(a[1] < b[0] or b[1] < a[0] for a, b in zip(ranges, others, strict=True))
            assert name == other or apart, (name, other)
