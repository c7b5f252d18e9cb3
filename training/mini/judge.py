"""Scores of answers from 0 to 1 against the true ones, by kind of answer. Pure functions of text.

They are strict where answers are short: the truth in other words counts as wrong, because mini was taught the
words.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable

from training.mini.vocabulary import COLOURS

# A thing is found if its box overlaps the true one by this much; boxes are good if the mean is as high as
# GOOD_OVERLAP. Both are intersections over unions.
FOUND, GOOD_OVERLAP = 0.5, 0.7
# Small talk is right if it shares this much of what it says with the true answer.
ALIKE = 0.7
# Words that carry no meaning of their own in small talk.
FILLERS = frozenset({
    "a", "an", "and", "are", "at", "be", "can", "do", "i", "in", "is", "it", "me", "my", "of", "on", "or",
    "so", "that", "the", "to", "with", "you", "your",
})  # fmt: skip
LIGHT = frozenset({"bright", "dark"})

Box = tuple[float, float, float, float]
Boxes = list[tuple[str, Box]]


def score(topic: str, truth: str, said: str) -> float:
    """What ``said`` is worth as the answer to a question of ``topic`` whose true answer is ``truth``.

    True answers in JSON are judged as JSON whatever the topic; topics without a judge word by word.
    """
    true_value = unfence(truth)
    if isinstance(true_value, dict):
        return scene_right(truth, said)
    if isinstance(true_value, list):
        return boxes_right(truth, said)
    return JUDGES.get(topic, exact)(truth, said)


def is_json(truth: str) -> bool:
    """Whether a question with this true answer asks for JSON."""
    return isinstance(unfence(truth), list | dict)


# Words


def plain(text: str) -> str:
    """Lower case, spaces and full stops evened out."""
    return re.sub(r"\s+", " ", text).strip().rstrip(".").rstrip().lower()


def exact(truth: str, said: str) -> float:
    """1 if the words are the same. Case is no difference: many letters look alike in both."""
    return float(plain(said) == plain(truth))


def yes_or_no(truth: str, said: str) -> float:
    """1 if both begin with the same yes or no."""
    true, heard = _first_word(truth), _first_word(said)
    return float(heard == true and heard in ("yes", "no"))


def is_yes(truth: str) -> bool:
    """Whether the true answer is yes."""
    return _first_word(truth) == "yes"


def _first_word(text: str) -> str:
    return next(iter(_words(text)), "")


def sentences(truth: str, said: str) -> float:
    """The share of sentences that both have: missing and added ones count against it."""
    true, heard = (Counter(re.split(r"\. ", plain(text))) for text in (truth, said))
    return _shared(true, heard)


def key_words(truth: str, said: str) -> float:
    """1 if the two answers say nearly the same, fillers and order left aside."""
    true, heard = (Counter(word for word in _words(text) if word not in FILLERS) for text in (truth, said))
    return float(_shared(true, heard) >= ALIKE)


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


def _shared(true: Counter[str], heard: Counter[str]) -> float:
    total = true.total() + heard.total()
    return 2 * (true & heard).total() / total if total else 0.0


def photo(truth: str, said: str) -> float:
    """1 if the facts told of a photo are true and nothing is invented.

    Shares of colours can be close, so their order is free but for this: the main colour is named, and what
    is named first is one of the true ones. Bright must not be called dark. Answers without colours: exact.
    """
    true, heard = _colours(truth), _colours(said)
    if not true:
        return exact(truth, said)
    opposite = LIGHT & set(_words(truth)) and LIGHT & set(_words(said)) - set(_words(truth))
    invented = set(_words(said)) - set(_words(truth)) - set(COLOURS) - LIGHT - {"and", "a"}
    named = heard and heard[0] in true and true[0] in heard
    same_form = set(_words(truth)) - set(_words(said)) <= set(COLOURS) | LIGHT | {"and"}
    return float(bool(named and same_form and not opposite and not invented))


def _colours(text: str) -> list[str]:
    return [word for word in _words(text) if word in COLOURS]


# JSON


def unfence(text: str) -> object:
    """The JSON value of an answer, inside a ```json fence or bare; None if there is none.

    Stricter than ``vlfit.tasks.boxes``, which mends what models break.
    """
    match = re.fullmatch(r"\s*```json\s*\n(.*)\n\s*```\s*", text, re.DOTALL)
    try:
        return json.loads(match.group(1) if match else text)
    except (json.JSONDecodeError, RecursionError):
        return None


def parses(truth: str, said: str) -> bool:
    """Whether ``said`` is JSON of the form of ``truth``: a list of boxes, or a scene of three parts."""
    value = unfence(said)
    if isinstance(unfence(truth), dict):
        return _scene_parts(value) is not None
    return _boxes(value) is not None


def boxes_in(answer: str) -> Boxes:
    """Labels and boxes of a grounding answer; empty if it is not of that form."""
    return _boxes(unfence(answer)) or []


def _boxes(value: object) -> Boxes | None:
    """Labels and boxes, or None if ``value`` is not a list of both."""
    if not isinstance(value, list):
        return None
    found: Boxes = []
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("label"), str):
            return None
        edges = item.get("bbox_2d")
        if not isinstance(edges, list) or len(edges) != 4 or not all(map(_is_number, edges)):
            return None
        left, top, right, bottom = (float(edge) for edge in edges)
        found.append((item["label"], (left, top, right, bottom)))
    return found


def _is_number(value: object) -> bool:
    # As in JSON: true is no number. What a float cannot hold is no edge of a picture.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _scene_parts(value: object) -> tuple[str, Boxes, list[str]] | None:
    """Summary, objects and text of a scene; None if one is missing or of another type."""
    if not isinstance(value, dict):
        return None
    summary, objects, text = value.get("summary"), _boxes(value.get("objects")), value.get("text")
    if not isinstance(summary, str) or objects is None or not isinstance(text, list):
        return None
    if not all(isinstance(word, str) for word in text):
        return None
    return summary, objects, text


def boxes_right(truth: str, said: str) -> float:
    """1 if every true thing is found, nothing else is, and the mean overlap is good."""
    if not parses(truth, said):
        return 0.0
    overlaps = match(boxes_in(truth), boxes_in(said))
    if not overlaps:
        return 1.0
    return float(min(overlaps) >= FOUND and sum(overlaps) / len(overlaps) >= GOOD_OVERLAP)


def scene_right(truth: str, said: str) -> float:
    """1 if labels and text are those of the scene, every thing is found, and there is a summary."""
    true, heard = _scene_parts(unfence(truth)), _scene_parts(unfence(said))
    if true is None:
        raise ValueError(f"the true answer is no scene: {truth!r}")
    if heard is None:
        return 0.0
    overlaps = match(true[1], heard[1])
    same_text = [plain(word) for word in true[2]] == [plain(word) for word in heard[2]]
    return float(same_text and bool(heard[0].strip()) and all(value >= FOUND for value in overlaps))


def box_overlap(truth: Boxes, said: Boxes) -> float:
    """The mean overlap of boxes matched by label; missing and added ones count as 0. Two empty lists: 1."""
    overlaps = match(truth, said)
    return sum(overlaps) / len(overlaps) if overlaps else 1.0


def match(truth: Boxes, said: Boxes) -> list[float]:
    """Overlaps of true boxes with boxes of the same label, each used once, the best pairs first.

    As long as the longer of the two lists: whatever is left without a partner stands there with 0.
    """
    pairs = sorted(
        (
            (overlap(box, other), here, there)
            for here, (label, box) in enumerate(truth)
            for there, (name, other) in enumerate(said)
            if plain(name) == plain(label)
        ),
        reverse=True,
    )
    used_here: set[int] = set()
    used_there: set[int] = set()
    overlaps = []
    for value, here, there in pairs:
        if here not in used_here and there not in used_there:
            used_here.add(here)
            used_there.add(there)
            overlaps.append(value)
    return overlaps + [0.0] * (max(len(truth), len(said)) - len(overlaps))


def overlap(one: Box, other: Box) -> float:
    """Intersection over union of two boxes (left, top, right, bottom)."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    area = (one[2] - one[0]) * (one[3] - one[1]) + (other[2] - other[0]) * (other[3] - other[1]) - shared
    return shared / area if area > 0 else 0.0


# Many answers


def balanced(answers: Iterable[tuple[bool, float]]) -> float:
    """Balanced accuracy: the mean of what is right among true yeses and among true noes.

    ``answers``: whether the true answer is yes, and the score. Raises ``ValueError`` if one kind is missing.
    """
    scores: dict[bool, list[float]] = {True: [], False: []}
    for present, value in answers:
        scores[present].append(value)
    if not scores[True] or not scores[False]:
        raise ValueError("balanced accuracy needs questions of both kinds: true yeses and true noes")
    return sum(sum(values) / len(values) for values in scores.values()) / 2


JUDGES: dict[str, Callable[[str, str], float]] = {
    "is there": yes_or_no,
    "detail": sentences,
    "photo": photo,
    "talk": key_words,
}
