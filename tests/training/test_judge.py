"""Every judge with right, nearly right and wrong answers."""

import json
from collections.abc import Sequence

import pytest

from training.mini.judge import (
    balanced,
    box_overlap,
    boxes_in,
    is_json,
    is_yes,
    match,
    overlap,
    parses,
    plain,
    score,
    unfence,
)


def located(*things: tuple[str, Sequence[float]]) -> str:
    """A grounding answer."""
    return f"```json\n{json.dumps([{'bbox_2d': box, 'label': label} for label, box in things])}\n```"


def scene(text: list[str], *things: tuple[str, Sequence[float]], summary: str = "A dog.") -> str:
    """A scene answer."""
    objects = [{"label": label, "bbox_2d": box} for label, box in things]
    return f"```json\n{json.dumps({'summary': summary, 'objects': objects, 'text': text})}\n```"


DOG, CAT = ("dog", [0, 0, 100, 100]), ("cat", [500, 500, 700, 700])


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        ("The square is red.", 1.0),
        ("  the  square is\nRED", 1.0),
        ("The square is red. The circle is blue.", 0.0),
        ("The square is pink.", 0.0),
        ("red", 0.0),
        ("", 0.0),
    ],
)
def test_short_answers_are_compared_word_by_word(said: str, worth: float) -> None:
    assert score("colour", "The square is red.", said) == worth


def test_a_word_is_read_right_only_with_every_letter() -> None:
    truth = 'It says "MARBLE".'
    assert score("written", truth, 'It says "MARBLE".') == 1
    assert score("written", truth, 'It says "marble"') == 1
    assert score("written", truth, 'It says "MARBLES".') == 0
    assert score("written", truth, 'It says "MAR BLE".') == 0
    assert score("written", "The number is 42.", "The number is 24.") == 0


@pytest.mark.parametrize(
    ("truth", "said", "worth"),
    [
        ("Yes, there is a dog.", "Yes, there is a dog.", 1.0),
        ("Yes, there is a dog.", "Yes.", 1.0),
        ("Yes, there is a dog.", "No, there is no dog.", 0.0),
        ("No, there is no dog.", "no", 1.0),
        ("No, there is no dog.", "Nothing is there.", 0.0),
        ("No, there is no dog.", "There is no dog.", 0.0),
    ],
)
def test_is_there_is_judged_by_yes_and_no(truth: str, said: str, worth: float) -> None:
    assert score("is there", truth, said) == worth


def test_balanced_accuracy_gives_nothing_for_always_saying_yes() -> None:
    truths = ["Yes, there is a dog."] * 30 + ["No, there is no cat."] * 10
    always_yes = [(is_yes(truth), score("is there", truth, "Yes, there is.")) for truth in truths]
    assert balanced(always_yes) == 0.5
    assert balanced([(True, 1.0), (True, 0.0), (False, 1.0)]) == 0.75
    with pytest.raises(ValueError, match="both kinds"):
        balanced([(True, 1.0)])


def test_a_description_is_worth_its_share_of_right_sentences() -> None:
    truth = "A red square is on the left. There is a dog. The background is white."
    assert score("detail", truth, truth) == 1
    assert score("detail", truth, truth.replace("dog", "cat")) == pytest.approx(2 / 3)
    assert score("detail", truth, "There is a dog. The background is white.") == pytest.approx(4 / 5)
    assert score("detail", truth, f"{truth} There is a cat.") == pytest.approx(6 / 7)
    assert score("detail", truth, "There is a dog. " * 9) < 0.2
    assert score("detail", truth, "A green circle.") == 0


@pytest.mark.parametrize(
    ("truth", "said", "worth"),
    [
        ("A photo, mostly red and blue.", "A photo, mostly red and blue.", 1.0),
        ("A photo, mostly red and blue.", "A dark photo, mostly blue, red and grey.", 1.0),
        ("A photo, mostly red and blue.", "A photo, mostly blue.", 0.0),
        ("A photo, mostly red and blue.", "A photo, mostly green, red and blue.", 0.0),
        ("A photo, mostly red and blue.", "A photo of a dog, mostly red and blue.", 0.0),
        ("A photo, mostly red.", "A red square on a red background.", 0.0),
        ("A photo, mostly red.", "red", 0.0),
        ("A dark photo, mostly brown.", "A photo, mostly brown.", 1.0),
        ("A dark photo, mostly brown.", "A bright photo, mostly brown.", 0.0),
        ("Mostly white and grey.", "Mostly grey and white.", 1.0),
        ("Mostly white and grey.", "Mostly green.", 0.0),
        ("It is bright.", "It is bright.", 1.0),
        ("It is bright.", "It is dark.", 0.0),
        ("It is neither bright nor dark.", "It is bright.", 0.0),
        ("I cannot tell.", "It is a dog.", 0.0),
    ],
)
def test_photo_facts_must_be_true_and_nothing_invented(truth: str, said: str, worth: float) -> None:
    assert score("photo", truth, said) == worth


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        ("I do not know. I only describe simple pictures.", 1.0),
        ("I don't know: I describe simple pictures only!", 1.0),
        ("I see no picture. Please attach one.", 0.0),
        ("Paris.", 0.0),
        ("", 0.0),
    ],
)
def test_small_talk_is_judged_by_its_key_words(said: str, worth: float) -> None:
    assert score("talk", "I do not know. I only describe simple pictures.", said) == worth


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        (located(DOG, CAT), 1.0),
        (located(CAT, DOG), 1.0),
        (located(("dog", [0, 0, 100, 80]), CAT), 1.0),
        (located(("dog", [0, 0, 100, 60]), ("cat", [500, 500, 700, 640])), 0.0),  # mean below 0.7
        (located(("dog", [0, 0, 100, 45]), CAT), 0.0),  # one is not found, though the mean is 0.725
        (located(DOG), 0.0),
        (located(DOG, CAT, ("cat", [0, 500, 100, 700])), 0.0),
        (located(DOG, ("dog", [500, 500, 700, 700])), 0.0),
        ("```json\n[]\n```", 0.0),
        ("A dog and a cat.", 0.0),
    ],
)
def test_things_are_located_when_all_are_found_and_the_mean_overlap_is_good(said: str, worth: float) -> None:
    assert score("locate all", located(DOG, CAT), said) == worth


def test_what_is_not_there_has_no_boxes() -> None:
    assert score("locate one", located(), located()) == 1
    assert score("locate one", located(), located(DOG)) == 0
    assert score("locate one", located(), "There is no dog.") == 0


def test_a_box_is_used_once() -> None:
    twice = boxes_in(located(DOG, DOG))
    assert match(twice, boxes_in(located(DOG))) == [1.0, 0.0]
    assert match(boxes_in(located(DOG)), twice) == [1.0, 0.0]
    assert box_overlap(twice, boxes_in(located(("dog", [0, 0, 100, 50])))) == 0.25


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        (scene(["STOP"], DOG), 1.0),
        (scene(["stop"], ("dog", [0, 0, 100, 60]), summary="Some dog."), 1.0),
        (scene(["STOP"], ("dog", [0, 0, 100, 40])), 0.0),
        (scene(["STOP"], ("cat", [0, 0, 100, 100])), 0.0),
        (scene(["STEP"], DOG), 0.0),
        (scene(["STOP"], DOG, CAT), 0.0),
        (scene(["STOP"], DOG, summary=" "), 0.0),
        (located(DOG), 0.0),
        ("{}", 0.0),
    ],
)
def test_a_scene_needs_its_labels_its_text_and_its_boxes(said: str, worth: float) -> None:
    assert score("scene", scene(["STOP"], DOG), said) == worth


@pytest.mark.parametrize(
    ("said", "good"),
    [
        (located(DOG), True),
        ("[]", True),
        (located(DOG)[:-12], False),
        (located(DOG).replace("bbox_2d", "box"), False),
        (located(("dog", [0, 0, 100])), False),
        (located(DOG).replace("100]", "true]"), False),
        (located(DOG).replace("100]", "NaN]"), False),
        (located(DOG).replace('"dog"', "3"), False),
        (f"Here you are:\n{located(DOG)}", False),
        (scene([], DOG), False),
        ("[" * 100_000, False),
    ],
)
def test_only_json_of_the_form_that_was_asked_for_counts_as_json(said: str, good: bool) -> None:
    assert parses(located(CAT), said) is good


def test_a_scene_parses_only_with_its_three_parts() -> None:
    truth = scene([], DOG)
    assert parses(truth, scene(["A", "7"], CAT))
    assert not parses(truth, located(DOG))
    assert not parses(truth, '```json\n{"summary": "A dog.", "objects": []}\n```')
    assert not parses(truth, '{"summary": "A dog.", "objects": [], "text": [7]}')
    assert is_json(truth)
    assert is_json(located())
    assert not is_json("There is 1 dog.")
    assert not is_json("7"), "a bare number is an answer in words"


def test_overlap() -> None:
    assert overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0
    assert overlap((5, 5, 5, 5), (5, 5, 5, 5)) == 0
    assert unfence("no JSON") is None
    assert plain(" A  dog. ") == "a dog"
