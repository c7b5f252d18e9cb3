"""Boxes in model answers: their JSON schema, lenient parsing, and conversion to pixels of the original.

Qwen3-VL writes boxes as ``bbox_2d`` in thousandths of width and height, whatever size the picture was resized
to. What is repaired or dropped in an answer is listed in ``warnings``; nothing is made up.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from vlfit.api.conversation import ImagePart
from vlfit.api.outputs import Answer
from vlfit.api.sampling_params import Grammar
from vlfit.errors import UnreadableAnswer
from vlfit.units import counted

# The prompts ask for the first of each; other models write the others.
BOX_KEYS = ("bbox_2d", "bbox", "box_2d", "box")
_LABEL_KEYS = ("label", "name")
_MAX_QUOTED = 500  # characters of an unreadable answer in the message; the error has all of it

_BOX = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1000}}
_EXACTLY_FOUR = {**_BOX, "minItems": 4, "maxItems": 4}


def _object_schema(*names: str) -> dict[str, Any]:
    """Schema of an object with its fields in the given order, as a grammar fixes their order."""
    kinds = {"label": {"type": "string", "minLength": 1}, "bbox_2d": _EXACTLY_FOUR}
    return {
        "type": "object",
        "properties": {name: kinds[name] for name in names},
        "required": list(names),
        "additionalProperties": False,
    }


BOXES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [_object_schema("label", "bbox_2d"), _object_schema("bbox_2d", "label")]},
}


def fenced_json_grammar(schema: dict[str, Any]) -> Grammar:
    """A grammar for JSON that matches ``schema``, bare or in a ```json fence as Qwen3-VL writes it.

    Servers get the schema as ``response_format``.
    """
    body = json.dumps({**schema, "x-guidance": {"whitespace_flexible": True}})
    grammar = f'%llguidance {{}}\nstart: "```json\\n" body "\\n```" | body\nbody: %json {body}'
    named = {"name": "answer", "schema": schema, "fenced": True}
    return Grammar(
        "grammar", grammar, wire={"response_format": {"type": "json_schema", "json_schema": named}}
    )


@dataclass(frozen=True, slots=True)
class SceneObject:
    """An object in a picture, with its box.

    ``box``: (left, top, right, bottom) in pixels of the original picture turned upright, and not outside of
    it. ``right`` and ``bottom`` are exclusive; the box is at least one pixel wide and high. ``box_1000``: the
    four numbers as the model wrote them, in thousandths of width and height, neither ordered nor clipped.
    """

    label: str
    box: tuple[int, int, int, int]
    box_1000: tuple[float, float, float, float]


def unreadable_answer(answer: Answer) -> UnreadableAnswer:
    """The error to raise for an ``answer`` without usable JSON.

    It says so if the answer was cut off by ``max_tokens``.
    """
    quoted = repr(answer.text.strip()[:_MAX_QUOTED]) + ("..." if len(answer.text) > _MAX_QUOTED else "")
    if answer.finish_reason == "length":
        tokens = counted(answer.usage.completion_tokens, "token")
        message = f"{answer.model} was cut off at {tokens}, before any JSON value was complete: {quoted}"
        return UnreadableAnswer(message, "raise max_tokens", answer=answer.text)
    message = f"{answer.model} answered without JSON: {quoted}"
    hint = "try a larger model, or ask a question in your own words"
    return UnreadableAnswer(message, hint, answer=answer.text)


def original_size(answer: Answer, picture: ImagePart) -> tuple[int, int]:
    """Width and height in pixels of ``picture`` turned upright.

    ``answer``: to a question about this picture only, with which the backend usually reports its size; else
    it is read from the file by a decode worker, which raises ``PictureError``.
    """
    if answer.images:
        return answer.images[0].width, answer.images[0].height
    from vlfit.images.decode_pool import decode_pool

    return decode_pool().upright_size(picture.data, picture.label)


@dataclass(slots=True)
class BoxReader:
    """Reads objects with boxes from JSON about a picture of ``width`` x ``height`` pixels (upright).

    Its methods never raise: what they repair or drop they append to ``warnings``.
    """

    width: int
    height: int
    warnings: list[str] = field(default_factory=list)

    def read_objects(self, value: Any) -> tuple[SceneObject, ...]:
        """Read a list of objects, or a single object. What cannot be read is dropped with a warning.

        Empty for None.
        """
        entries = [value] if isinstance(value, dict) else value or []
        if not isinstance(entries, list):
            self.warnings.append(f"the objects are not a list and are dropped: {value!r}")
            return ()
        objects = (self.read_object(number, entry) for number, entry in enumerate(entries, start=1))
        return tuple(thing for thing in objects if thing is not None)

    def read_object(self, number: int, entry: Any) -> SceneObject | None:
        """Read one object; None, with a warning, if it has no label or no usable box.

        ``number``: its position in the answer, from 1, to name it in warnings.
        """
        fields = entry if isinstance(entry, dict) else {}
        label = next((fields[name] for name in _LABEL_KEYS if isinstance(fields.get(name), str)), "").strip()
        numbers = _four_numbers(next((fields[name] for name in BOX_KEYS if name in fields), None))
        if not label or numbers is None:
            missing = "box of four numbers" if label else "label"
            self.warnings.append(f"object {number} has no {missing} and is dropped: {entry!r}")
            return None
        box = self.to_pixels(f"object {number} ({label})", numbers)
        return SceneObject(label, box, numbers) if box else None

    def to_pixels(
        self, name: str, raw: tuple[float, float, float, float]
    ) -> tuple[int, int, int, int] | None:
        """Convert the box ``raw``, in thousandths, to pixels; its corners are ordered and clipped to the
        picture.

        None if no area is left. ``name``: the object, in the warnings about each repair.
        """
        left, right = sorted((raw[0], raw[2]))
        top, bottom = sorted((raw[1], raw[3]))
        if (left, top, right, bottom) != raw:
            self.warnings.append(
                f"{name}: corners {_format_box(raw)} were in the wrong order and are swapped"
            )
        kept = tuple(min(max(edge, 0), 1000) for edge in (left, top, right, bottom))
        if kept[0] == kept[2] or kept[1] == kept[3]:
            self.warnings.append(
                f"{name}: box {_format_box(raw)} has no area inside the picture and is dropped"
            )
            return None
        if kept != (left, top, right, bottom):
            self.warnings.append(
                f"{name}: box {_format_box(raw)} exceeds 0-1000 and is clipped to the picture"
            )
        left_edge, right_edge = _pixel_edges(kept[0], kept[2], self.width)
        top_edge, bottom_edge = _pixel_edges(kept[1], kept[3], self.height)
        return left_edge, top_edge, right_edge, bottom_edge


def _four_numbers(value: Any) -> tuple[float, float, float, float] | None:
    if not isinstance(value, list) or len(value) != 4:
        return None
    if any(isinstance(edge, bool) or not isinstance(edge, int | float) for edge in value):
        return None
    # Python's JSON parser accepts NaN, Infinity, and integers too long for a float.
    if any(abs(edge) > 1e9 or not math.isfinite(edge) for edge in value):
        return None
    left, top, right, bottom = value
    return left, top, right, bottom


def _pixel_edges(start: float, end: float, length: int) -> tuple[int, int]:
    """Thousandths of ``length`` as whole pixels, at least one apart."""
    first = min(round(start * length / 1000), length - 1)
    return first, max(round(end * length / 1000), first + 1)


def _format_box(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{number:g}" for number in numbers) + "]"


# Lenient JSON parsing: in a fence, with prose around it, or cut off in the middle.

_CLOSERS = {"{": "}", "[": "]"}
_DECODER = json.JSONDecoder()

# Limits of the work on text full of brackets and commas.
_MAX_STARTS = 50
_MAX_CUTS = 200


@dataclass(frozen=True, slots=True)
class LenientJson:
    """A JSON ``value``, a dict or a list, found in text. ``warnings``: what of the text had to be dropped."""

    value: Any
    warnings: tuple[str, ...] = ()


def find_json(text: str) -> LenientJson | None:
    """The first JSON object, list with objects, or empty list in ``text``; one in a ```json fence is
    preferred.

    Broken or unfinished JSON is cut after its last complete value, with a warning. None if
    ``text`` has no such value.
    """
    starts = [index for index, character in enumerate(text) if character in _CLOSERS]
    fence = text.find("```json")
    if fence >= 0:
        # Prefer what is inside the fence to brackets in the prose before it.
        starts.sort(key=lambda start: start < fence)
    unreadable = False
    for start in starts[:_MAX_STARTS]:
        value = _decode_at(text, start)
        found = LenientJson(value) if value is not None else _repair_json(text[start:])
        if found is not None and _is_object_or_list(found.value):
            warning = f"the JSON before character {start} cannot be read and is dropped"
            return LenientJson(found.value, (warning, *found.warnings)) if unreadable else found
        unreadable = unreadable or value is None
    return None


def _is_object_or_list(value: Any) -> bool:
    """False for brackets in prose, such as a footnote [1]. An empty list means that nothing was found."""
    return isinstance(value, dict) or value == [] or any(isinstance(entry, dict) for entry in value)


def _decode_at(text: str, start: int) -> Any | None:
    """The value at ``start``; None if it is incomplete, or nested beyond the recursion limit."""
    try:
        value, _ = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value


def _repair_json(text: str) -> LenientJson | None:
    """The longest valid prefix of broken JSON: cut after its last complete value, then closed.

    None if not even one value is complete.
    """
    for cut, open_brackets in reversed(_cut_points(text)[-_MAX_CUTS:]):
        closers = "".join(_CLOSERS[bracket] for bracket in reversed(open_brackets))
        value = _decode_at(text[:cut] + closers, 0)
        if value:
            return LenientJson(
                value, (f"the JSON ends or is invalid after character {cut}; the rest is dropped",)
            )
    return None


def _cut_points(text: str) -> list[tuple[int, str]]:
    """Ends of values (at commas, after closing brackets), each with the brackets open there."""
    points: list[tuple[int, str]] = []
    brackets = ""
    in_string = escaped = False
    for index, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in _CLOSERS:
            brackets += character
        elif character == "," and brackets:
            points.append((index, brackets))
        elif character in "]}":
            if not brackets or _CLOSERS[brackets[-1]] != character:
                break
            brackets = brackets[:-1]
            points.append((index + 1, brackets))
            if not brackets:
                break
    return points
