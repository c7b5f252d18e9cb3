"""Boxes as models write them, and where they land: in pixels of the original picture.

Knows the form that Qwen3-VL answers in (``bbox_2d`` in thousandths of width and height, whatever the picture
was resized to) and holds a model to it that runs here. What it has to drop or mend of an answer it says in
``warnings``; it invents nothing.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from vlfit.api.conversation import ImagePart
from vlfit.api.outputs import Answer
from vlfit.api.sampling_params import Form
from vlfit.errors import UnreadableAnswer

# The prompts ask for the first of each; models that were taught otherwise write the others.
BOX_NAMES = ("bbox_2d", "bbox", "box_2d", "box")
_LABEL_NAMES = ("label", "name")
_MOST_SHOWN = 500  # letters of an unreadable answer in the error's message; the error carries all of it

_BOX = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1000}}
_EXACTLY_FOUR = {**_BOX, "minItems": 4, "maxItems": 4}


def _ordered(*names: str) -> dict[str, Any]:
    """A schema fixes the order of fields, and models have their own."""
    kinds = {"label": {"type": "string", "minLength": 1}, "bbox_2d": _EXACTLY_FOUR}
    return {
        "type": "object",
        "properties": {name: kinds[name] for name in names},
        "required": list(names),
        "additionalProperties": False,
    }


BOXES: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [_ordered("label", "bbox_2d"), _ordered("bbox_2d", "label")]},
}


def fenced_json(schema: dict[str, Any]) -> Form:
    """JSON of ``schema``, bare or between fences as Qwen3-VL likes to put it, with any spaces."""
    body = json.dumps({**schema, "x-guidance": {"whitespace_flexible": True}})
    grammar = f'%llguidance {{}}\nstart: "```json\\n" body "\\n```" | body\nbody: %json {body}'
    named = {"name": "answer", "schema": schema, "fenced": True}
    return Form("grammar", grammar, wire={"response_format": {"type": "json_schema", "json_schema": named}})


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One thing in a picture.

    ``box`` is (left, top, right, bottom) in pixels of the original picture, inside it and at least one pixel
    wide and high. ``box_1000`` holds the four numbers as the model gave them, meant as thousandths.
    """

    label: str
    box: tuple[int, int, int, int]
    box_1000: tuple[float, float, float, float]


def unreadable(answer: Answer) -> UnreadableAnswer:
    said = repr(answer.text.strip()[:_MOST_SHOWN]) + ("..." if len(answer.text) > _MOST_SHOWN else "")
    if answer.finish_reason == "length":
        tokens = answer.usage.completion_tokens
        message = f"{answer.model} was cut off at {tokens} tokens, before any of its JSON was whole: {said}"
        return UnreadableAnswer(message, "give it more room with max_tokens", answer=answer.text)
    message = f"{answer.model} answered without JSON, so there are no boxes to read: {said}"
    hint = "try a larger model, or ask for what you need in your own words"
    return UnreadableAnswer(message, hint, answer=answer.text)


def original_size(answer: Answer, picture: ImagePart) -> tuple[int, int]:
    """Width and height in pixels, from the backend; servers that are not ours do not tell it."""
    if answer.images:
        return answer.images[0].width, answer.images[0].height
    from vlfit.images.decode import decode

    return decode(picture.data, picture.label).image.size


@dataclass(slots=True)
class BoxReader:
    """Takes what is sound for a picture of ``width`` x ``height`` pixels and notes the rest."""

    width: int
    height: int
    warnings: list[str] = field(default_factory=list)

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
        numbers = _four_numbers(next((fields[name] for name in BOX_NAMES if name in fields), None))
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


# JSON as models write it: in a fence, with prose around it, cut off in the middle.
#
# Knows where JSON begins, where it breaks off and how much of it is sound. Knows nothing of what it means.


_CLOSERS = {"{": "}", "[": "]"}
_DECODER = json.JSONDecoder()

# Both bound the work on text that is nothing but brackets and commas.
_MOST_STARTS = 50
_MOST_CUTS = 200


@dataclass(frozen=True, slots=True)
class LooseJson:
    """``value`` is a dict or a list. ``warnings`` says in words what had to be dropped to read it."""

    value: Any
    warnings: tuple[str, ...] = ()


def find_json(text: str) -> LooseJson | None:
    """The first JSON object or list of objects in ``text`` that is whole, else what is sound of a broken one.

    None when there is nothing of the kind.
    """
    starts = [place for place, sign in enumerate(text) if sign in _CLOSERS]
    fence = text.find("```json")
    if fence >= 0:
        # What the model fenced is what it means; brackets in prose before it are not.
        starts.sort(key=lambda place: place < fence)
    unreadable = False
    for start in starts[:_MOST_STARTS]:
        value = _whole(text, start)
        found = LooseJson(value) if value is not None else _saved(text[start:])
        if found is not None and _means_something(found.value):
            warning = f"the JSON before character {start} cannot be read and is dropped"
            return LooseJson(found.value, (warning, *found.warnings)) if unreadable else found
        unreadable = unreadable or value is None
    return None


def _means_something(value: Any) -> bool:
    """False for the brackets of prose, such as a footnote's [1]. An empty list says that nothing is there."""
    return isinstance(value, dict) or value == [] or any(isinstance(entry, dict) for entry in value)


def _whole(text: str, start: int) -> Any | None:
    """The value that begins at ``start``, or None if it is not whole, or nested too deep to be honest."""
    try:
        value, _ = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value


def _saved(text: str) -> LooseJson | None:
    """The longest sound beginning of broken JSON: cut after its last complete value, then closed.

    None when not even one value is sound.
    """
    for cut, open_brackets in reversed(_places_to_cut(text)[-_MOST_CUTS:]):
        closers = "".join(_CLOSERS[bracket] for bracket in reversed(open_brackets))
        value = _whole(text[:cut] + closers, 0)
        if value:
            return LooseJson(
                value, (f"the JSON breaks off or is wrong after character {cut}; the rest is dropped",)
            )
    return None


def _places_to_cut(text: str) -> list[tuple[int, str]]:
    """Where a value has just ended and the brackets open there: at commas and after closing brackets."""
    places: list[tuple[int, str]] = []
    brackets = ""
    in_string = escaped = False
    for place, sign in enumerate(text):
        if in_string:
            in_string = escaped or sign != '"'
            escaped = sign == "\\" and not escaped
        elif sign == '"':
            in_string = True
        elif sign in _CLOSERS:
            brackets += sign
        elif sign == "," and brackets:
            places.append((place, brackets))
        elif sign in "]}":
            if not brackets or _CLOSERS[brackets[-1]] != sign:
                break
            brackets = brackets[:-1]
            places.append((place + 1, brackets))
            if not brackets:
                break
    return places
