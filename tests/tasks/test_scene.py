"""Scenes: what models really answer, sound and broken, and what is made of it."""

import json
import re

import pytest

from tests.pictures import rotated_by_exif
from tests.scripted_backend import ScriptedBackend, ScriptedStream, answer, png
from tests.wording import figures_in
from vlfit.api.conversation import Conversation, ImagePart
from vlfit.api.sampling_params import SamplingParams
from vlfit.errors import UnreadableAnswer
from vlfit.tasks.describe import SCENE
from vlfit.tasks.objects import Scene, read_scene, scene

WHOLE = {
    "summary": "A cat on a mat.",
    "objects": [
        {"label": "cat", "bbox_2d": [100, 200, 500, 800]},
        {"label": "mat", "bbox_2d": [0, 700, 1000, 1000]},
    ],
    "text": ["WELCOME"],
}


def read(text: str, width: int = 640, height: int = 480) -> Scene:
    return read_scene(answer(text, width=width, height=height), width, height)


def boxes(found: Scene) -> list[tuple[int, int, int, int]]:
    return [thing.box for thing in found.objects]


def labels(found: Scene) -> list[str]:
    return [thing.label for thing in found.objects]


def test_asks_the_prompt_greedily_and_gives_pixels_of_the_original() -> None:
    backend = ScriptedBackend([json.dumps(WHOLE)])
    picture = ImagePart(png(640, 480))
    found = scene(backend, picture)
    [(conversation, sampling)] = backend.asked
    assert conversation[0].parts[0] == picture
    assert conversation[0].parts[1].text == SCENE  # type: ignore[union-attr]
    assert sampling.greedy
    assert found.summary == "A cat on a mat."
    assert labels(found) == ["cat", "mat"]
    assert boxes(found) == [(64, 96, 320, 384), (0, 336, 640, 480)]
    assert found.objects[0].box_1000 == (100, 200, 500, 800)
    assert found.text == ("WELCOME",)
    assert found.warnings == ()
    assert (found.width, found.height) == (640, 480)
    assert found.usage == found.answer.usage


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(WHOLE),
        json.dumps(WHOLE, indent=2),
        f"```json\n{json.dumps(WHOLE)}\n```",
        f"```\n{json.dumps(WHOLE)}\n```",
        f"Here [as you asked] it is:\n```json\n{json.dumps(WHOLE)}\n```\nI hope {{this}} helps!",
        f"{json.dumps(WHOLE)}\nThe picture shows a cat [1].",
        f"Sure! {json.dumps(WHOLE)}",
    ],
    ids=["bare", "indented", "fence", "fence without a name", "prose around", "prose after", "prose before"],
)
def test_finds_the_json_wherever_it_stands(text: str) -> None:
    found = read(text)
    assert (found.summary, labels(found), found.text) == ("A cat on a mat.", ["cat", "mat"], ("WELCOME",))
    assert found.warnings == ()


def test_a_bare_list_of_boxes_as_the_model_was_trained_to_give() -> None:
    found = read('```json\n[{"bbox_2d": [0, 0, 500, 500], "label": "dog"}]\n```')
    assert (found.summary, labels(found), boxes(found)) == ("", ["dog"], [(0, 0, 320, 240)])
    assert found.warnings == ()


def test_one_object_alone() -> None:
    assert labels(read('{"bbox_2d": [0, 0, 500, 500], "label": "dog"}')) == ["dog"]


def test_nothing_to_see() -> None:
    assert read("[]").objects == ()
    assert read("{}") == Scene("", (), (), 640, 480, answer("{}", width=640, height=480))


@pytest.mark.parametrize("length", range(1, len(json.dumps(WHOLE))))
def test_cut_off_anywhere_it_keeps_what_was_whole(length: int) -> None:
    """At every length the result is a beginning of the whole one, with a warning; or a clear error."""
    cut = json.dumps(WHOLE)[:length]
    if length <= len('{"summary": "A cat on a mat."'):
        # Nothing is known to be whole yet: no comma after the first value.
        with pytest.raises(UnreadableAnswer):
            read(cut)
        return
    found = read(cut)
    assert found.summary == "A cat on a mat."
    assert labels(found) == ["cat", "mat"][: len(found.objects)]
    assert found.text in ((), ("WELCOME",))
    assert figures_in(found.warnings[0])  # after which character
    if '"cat", "bbox_2d": [100, 200, 500, 800]}' in cut:
        assert "cat" in labels(found)
    if '"mat", "bbox_2d": [0, 700, 1000, 1000]}' in cut:
        assert labels(found) == ["cat", "mat"]


def test_wrong_in_the_middle_keeps_what_stands_before() -> None:
    found = read('{"summary": "x", "objects": [{"label": "a", "bbox_2d": [1, 2, 300, 400]}, {"label" "b"}]}')
    assert labels(found) == ["a"]
    assert figures_in(found.warnings[0])  # after which character


def test_unreadable_before_the_objects_is_said() -> None:
    found = read('{"summary": "x" "objects": [{"label": "a", "bbox_2d": [1, 2, 300, 400]}]}')
    assert labels(found) == ["a"]
    assert "dropped" in found.warnings[0]


@pytest.mark.parametrize(
    ("raw", "box", "warning"),
    [
        ([500, 800, 100, 200], (64, 96, 320, 384), "swapped"),
        ([500, 200, 100, 800], (64, 96, 320, 384), "swapped"),
        ([-50, 200, 500, 1200], (0, 96, 320, 480), "0-1000"),
        ([100.5, 200.0, 500.0, 800.0], (64, 96, 320, 384), None),
        ([999, 999, 1000, 1000], (639, 479, 640, 480), None),
        ([0, 0, 1, 1], (0, 0, 1, 1), None),
    ],
)
def test_boxes_are_mended_and_it_says_so(
    raw: list[float], box: tuple[int, int, int, int], warning: str | None
) -> None:
    found = read(json.dumps([{"label": "cat", "bbox_2d": raw}]))
    assert boxes(found) == [box]
    assert found.objects[0].box_1000 == tuple(raw)
    if warning is None:
        assert found.warnings == ()
    else:
        assert len(found.warnings) == 1
        assert warning in found.warnings[0]


@pytest.mark.parametrize(
    "entry",
    [
        {"label": "cat", "bbox_2d": [100, 100, 100, 500]},
        {"label": "cat", "bbox_2d": [1200, 100, 1500, 500]},
        {"label": "cat", "bbox_2d": [100, 100, 500]},
        {"label": "cat", "bbox_2d": "100, 100, 500, 500"},
        {"label": "cat", "bbox_2d": [100, 100, 500, None]},
        {"label": "cat", "bbox_2d": [True, True, 500, 500]},
        {"label": "cat", "bbox_2d": [0, 0, 500, float("inf")]},
        {"label": "cat", "bbox_2d": [0, 0, 500, float("nan")]},
        {"label": "cat", "bbox_2d": [0, 0, 500, 10**400]},
        {"label": "cat"},
        {"label": "", "bbox_2d": [1, 2, 300, 400]},
        {"label": 7, "bbox_2d": [1, 2, 300, 400]},
        {"bbox_2d": [1, 2, 300, 400]},
        "cat",
        None,
    ],
    ids=repr,
)
def test_objects_that_cannot_be_true_are_dropped_and_the_others_stay(entry: object) -> None:
    sound = {"label": "dog", "bbox_2d": [0, 0, 500, 500]}
    found = read(json.dumps({"summary": "s", "objects": [entry, sound]}))
    assert labels(found) == ["dog"]
    assert len(found.warnings) == 1
    assert "object 1" in found.warnings[0]
    assert "dropped" in found.warnings[0]


@pytest.mark.parametrize("part", ["summary", "objects", "text"])
def test_a_part_of_the_wrong_kind_is_dropped_alone(part: str) -> None:
    found = read(json.dumps({**WHOLE, part: 7}))
    assert len(found.warnings) == 1
    assert (found.summary == "") == (part == "summary")
    assert (found.objects == ()) == (part == "objects")
    assert (found.text == ()) == (part == "text")


def test_text_as_one_string_and_with_holes() -> None:
    assert read('{"text": "STOP"}').text == ("STOP",)
    found = read('{"text": ["STOP", null, "", 5]}')
    assert found.text == ("STOP",)
    assert len(found.warnings) == 1


@pytest.mark.parametrize("text", ["A cat on a mat.", "", "[1] see above", "{", "[" * 5000, "[," * 3000])
def test_no_json_at_all_is_an_error_with_the_whole_answer(text: str) -> None:
    with pytest.raises(UnreadableAnswer) as caught:
        read(text)
    assert caught.value.answer == text
    assert caught.value.exit_code == 1
    assert caught.value.hint


def test_says_when_it_was_cut_off_by_the_token_limit() -> None:
    cut = answer('{"summary": "A cat", "objects": [{"label"', finish_reason="length")
    assert any(re.search(r"\d+ tokens", warning) for warning in read_scene(cut, 640, 480).warnings)
    with pytest.raises(UnreadableAnswer, match=r"\d+ tokens.*\n.*max_tokens"):
        read_scene(answer('{"summary": "A c', finish_reason="length"), 640, 480)


def test_a_server_that_does_not_tell_the_size() -> None:
    """Servers that are not ours answer without it: then the picture itself is looked at, upright."""

    class Silent(ScriptedBackend):
        def stream(self, conversation: Conversation, sampling: SamplingParams) -> ScriptedStream:
            stream = super().stream(conversation, sampling)
            stream.images = ()
            return stream

    found = scene(Silent([json.dumps(WHOLE)]), ImagePart(rotated_by_exif(6, width=96, height=64)))
    assert (found.width, found.height) == (64, 96)
    assert boxes(found)[1] == (0, 67, 64, 96)
