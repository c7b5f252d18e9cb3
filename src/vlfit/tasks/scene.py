"""What is in a picture and where: asks for JSON, and reads what comes as generously as is sound.

Knows the form that Qwen3-VL answers in (``bbox_2d`` in thousandths of width and height) and turns it into
pixels of the original picture. What it has to drop or mend it says in ``warnings``; it invents nothing.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from vlfit.backends.base import Backend
from vlfit.engine.answer import Answer, Usage
from vlfit.engine.conversation import ImagePart, ask
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import UnreadableAnswer
from vlfit.tasks.loose_json import find_json
from vlfit.tasks.prompts import SCENE

# The prompt asks for the first of each; models that were taught otherwise write the others.
_BOX_NAMES = ("bbox_2d", "bbox", "box_2d", "box")
_LABEL_NAMES = ("label", "name")
_MOST_SHOWN = 500  # letters of an unreadable answer in the error's message; the error carries all of it


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One thing in a picture.

    ``box`` is (left, top, right, bottom) in pixels of the original picture, inside it and at least one pixel
    wide and high. ``box_1000`` holds the four numbers as the model gave them, meant as thousandths.
    """

    label: str
    box: tuple[int, int, int, int]
    box_1000: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture taken apart. ``width`` and ``height`` are the original's, in pixels, upright.

    ``warnings`` says in words what was mended or dropped of the model's answer.
    """

    summary: str
    objects: tuple[SceneObject, ...]
    text: tuple[str, ...]
    width: int
    height: int
    answer: Answer
    warnings: tuple[str, ...] = ()

    @property
    def usage(self) -> Usage:
        """Tokens that it cost."""
        return self.answer.usage

    def __str__(self) -> str:
        return self.summary


def scene(backend: Backend, picture: ImagePart, sampling: SamplingParams | None = None) -> Scene:
    """Ask for a summary, objects with boxes, and the words seen in ``picture``.

    Raises ``UnreadableAnswer`` if the model did not answer in JSON; ``PictureError`` and ``DoesNotFit`` as
    every task does.
    """
    answer = backend.stream(ask(SCENE, picture), sampling or SamplingParams()).answer()
    return read_scene(answer, *_original_size(answer, picture))


def read_scene(answer: Answer, width: int, height: int) -> Scene:
    """What ``answer`` says of a picture of ``width`` x ``height`` pixels.

    It should be JSON with the three parts asked for, or a bare list of objects with boxes.
    """
    found = find_json(answer.text)
    if found is None:
        raise _unreadable(answer)
    reader = _Reader(width, height, warnings=list(found.warnings))
    if answer.finish_reason == "length":
        reader.warnings.append(f"the answer was cut off at {answer.usage.completion_tokens} tokens")
    parts = _as_parts(found.value)
    return Scene(
        summary=reader.read_summary(parts.get("summary")),
        objects=reader.read_objects(parts.get("objects")),
        text=reader.read_text(parts.get("text")),
        width=width,
        height=height,
        answer=answer,
        warnings=tuple(reader.warnings),
    )


def _unreadable(answer: Answer) -> UnreadableAnswer:
    said = repr(answer.text.strip()[:_MOST_SHOWN]) + ("..." if len(answer.text) > _MOST_SHOWN else "")
    if answer.finish_reason == "length":
        tokens = answer.usage.completion_tokens
        message = f"{answer.model} was cut off at {tokens} tokens, before any of its JSON was whole: {said}"
        return UnreadableAnswer(message, "give it more room with max_tokens", answer=answer.text)
    message = f"{answer.model} answered without JSON, so there are no boxes to read: {said}"
    hint = "try a larger model, or ask for what you need in your own words"
    return UnreadableAnswer(message, hint, answer=answer.text)


def _original_size(answer: Answer, picture: ImagePart) -> tuple[int, int]:
    """Width and height in pixels, from the backend; servers that are not ours do not tell it."""
    if answer.images:
        return answer.images[0].width, answer.images[0].height
    from vlfit.engine.picture_files import decode

    return decode(picture.data, picture.label).image.size


def _as_parts(value: Any) -> dict[str, Any]:
    """The three parts, also when the model gave only its list of objects, or only one of them."""
    if isinstance(value, list):
        return {"objects": value}
    if any(name in value for name in _BOX_NAMES):
        return {"objects": [value]}
    return dict(value)


@dataclass(slots=True)
class _Reader:
    """Takes what is sound for a picture of ``width`` x ``height`` pixels and notes the rest."""

    width: int
    height: int
    warnings: list[str] = field(default_factory=list)

    def read_summary(self, value: Any) -> str:
        if isinstance(value, str):
            return value.strip()
        if value is not None:
            self.warnings.append(f"the summary is no text and is dropped: {value!r}")
        return ""

    def read_text(self, value: Any) -> tuple[str, ...]:
        words = [value] if isinstance(value, str) else value or []
        if not isinstance(words, list):
            self.warnings.append(f"the text seen is no list and is dropped: {value!r}")
            return ()
        dropped = [word for word in words if not isinstance(word, str)]
        if dropped:
            self.warnings.append(f"{len(dropped)} of the words seen are no text and are dropped: {dropped!r}")
        return tuple(word for word in words if isinstance(word, str) and word.strip())

    def read_objects(self, value: Any) -> tuple[SceneObject, ...]:
        entries = [value] if isinstance(value, dict) else value or []
        if not isinstance(entries, list):
            self.warnings.append(f"the objects are no list and are dropped: {value!r}")
            return ()
        objects = (self.read_object(number, entry) for number, entry in enumerate(entries, start=1))
        return tuple(thing for thing in objects if thing is not None)

    def read_object(self, number: int, entry: Any) -> SceneObject | None:
        fields = entry if isinstance(entry, dict) else {}
        label = next((fields[name] for name in _LABEL_NAMES if isinstance(fields.get(name), str)), "").strip()
        numbers = _four_numbers(next((fields[name] for name in _BOX_NAMES if name in fields), None))
        if not label or numbers is None:
            missing = "box of four numbers" if label else "label"
            self.warnings.append(f"object {number} has no {missing} and is dropped: {entry!r}")
            return None
        box = self.to_pixels(f"object {number} ({label})", numbers)
        return SceneObject(label, box, numbers) if box else None

    def to_pixels(
        self, name: str, raw: tuple[float, float, float, float]
    ) -> tuple[int, int, int, int] | None:
        """``raw`` thousandths as pixels: corners put in order, kept inside; None when no area is left."""
        left, right = sorted((raw[0], raw[2]))
        top, bottom = sorted((raw[1], raw[3]))
        if (left, top, right, bottom) != raw:
            self.warnings.append(f"{name}: corners {_plain(raw)} were in the wrong order and are swapped")
        kept = tuple(min(max(edge, 0), 1000) for edge in (left, top, right, bottom))
        if kept[0] == kept[2] or kept[1] == kept[3]:
            self.warnings.append(f"{name}: box {_plain(raw)} has no area inside the picture and is dropped")
            return None
        if kept != (left, top, right, bottom):
            self.warnings.append(f"{name}: box {_plain(raw)} goes beyond 0-1000 and is cut to the picture")
        left_edge, right_edge = _edges(kept[0], kept[2], self.width)
        top_edge, bottom_edge = _edges(kept[1], kept[3], self.height)
        return left_edge, top_edge, right_edge, bottom_edge


def _four_numbers(value: Any) -> tuple[float, float, float, float] | None:
    if not isinstance(value, list) or len(value) != 4:
        return None
    if any(isinstance(edge, bool) or not isinstance(edge, int | float) for edge in value):
        return None
    # JSON as Python reads it knows NaN and Infinity, and integers too long for a float.
    if any(abs(edge) > 1e9 or not math.isfinite(edge) for edge in value):
        return None
    left, top, right, bottom = value
    return left, top, right, bottom


def _edges(start: float, end: float, length: int) -> tuple[int, int]:
    """Thousandths of ``length`` pixels as whole pixels, at least one apart."""
    first = min(round(start * length / 1000), length - 1)
    return first, max(round(end * length / 1000), first + 1)


def _plain(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{number:g}" for number in numbers) + "]"
