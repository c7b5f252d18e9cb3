"""JSON as models write it: in a fence, with prose around it, cut off in the middle.

Knows where JSON begins, where it breaks off and how much of it is sound. Knows nothing of what it means.
"""

import json
from dataclasses import dataclass
from typing import Any

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
