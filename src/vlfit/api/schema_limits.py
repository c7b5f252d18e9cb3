"""How much a JSON schema may ask for, where llguidance would take any amount of time, memory or stack for it.

Knows: a schema as plain JSON, and bounds on size, depth and counts. What lengths, enums and alternatives cost
is bounded by llguidance's own limits (``grammar.py``). Does not know: what a schema means; where a keyword
stands as a value (in an ``enum``, say), it counts all the same, for a ``$ref`` may lead there. No torch.

With llguidance 1.6.1 on one core: 10 million items, a multiple of 999,983 and 20 patterns that must hold
together take more than 15 s to read, lower limits or not; 4,000 references in a row overflow the stack, which
ends the process. A step behind ``(a{1000}){1000}`` takes 1 s and 270 MiB; an ``initial_lexer_fuel`` that
prevents it would refuse 2,000 properties of six types.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from vlfit.errors import InvalidRequest

DEEPEST = 64  # objects and lists inside of each other
DEEPEST_REFERENCES = 2_000  # depth x (references + 1): levels that may open at most
MOST_PARTS = 5_000  # objects and lists
MOST_PROPERTIES = 2_000  # named, and as many required: the time grows with their square
MOST_ITEMS = 10_000  # of ``_ITEMS``, added up
LARGEST_MULTIPLE = 10_000  # of multipleOf: their common multiple, times their number
MOST_REPEATED = 10_000  # letters of all patterns, {n} written out
MOST_JOINED_PATTERNS = 8  # where several parts of a schema must hold together

_ITEMS = ("minItems", "maxItems", "minProperties", "maxProperties")
_PATTERNS = ("pattern", "format", "whitespace_pattern", "item_separator", "key_separator")
_JOINING = {"$ref", "allOf", "anyOf", "oneOf"}
_WORDS_ONLY = {"title", "description", "default", "examples", "deprecated", "$defs", "definitions"}
_WORDS_ONLY |= {"$schema", "$id", "$comment", "nullable", "discriminator"}
_REPEAT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_REPEAT_OF_GROUP = re.compile(r"[)}*+?]\s*\{")  # or of what is repeated already: counts are multiplied
_SPACED = re.compile(r"\(\?[a-zA-Z-]*x")  # a flag by which spaces and comments mean nothing


def check_schema(schema: object, param: str | None) -> None:
    """Raises ``InvalidRequest`` with the place and the bound. ``schema``: as ``json.loads`` gives it.

    ``param``: the field of the request that the schema came in.
    """
    counts: Counter[str] = Counter()
    references: set[str] = set()
    multiple, deepest, joined = 1, 0, ""

    def keep(place: str, what: str, number: int, most: int) -> None:
        if number > most:
            shown = place if len(place) <= 200 else f"{place[:150]}...{place[-40:]}"
            raise InvalidRequest(
                f"{shown} asks for more than {most:,} {what}",
                "ask for a simpler form; docs/api.md has the bounds",
                param=param,
            )

    def add(place: str, what: str, number: int, most: int) -> None:
        counts[what] += number
        keep(place, what, counts[what], most)

    for place, part, depth in _parts(param or "the schema", schema):
        deepest = max(deepest, depth)
        keep(place, "levels", depth, DEEPEST)
        add(place, "objects and lists in all", 1, MOST_PARTS)
        for key, value in part.items() if isinstance(part, dict) else ():
            at = f"{place}.{key[:80]}"
            if key == "properties" and isinstance(value, dict):
                add(at, "properties in all", len(value), MOST_PROPERTIES)
            elif key == "required" and isinstance(value, list):
                add(at, "names in all", len(value), MOST_PROPERTIES)
            elif key == "patternProperties" and isinstance(value, dict):
                counts["patterns"] += len(value)
                add(
                    at,
                    "letters in all, repetitions written out",
                    sum(map(pattern_size, value)),
                    MOST_REPEATED,
                )
                joined = joined or at  # each is compared to each
            elif key in _PATTERNS and isinstance(value, str):
                counts["patterns"] += 1
                add(at, "letters in all, repetitions written out", pattern_size(value), MOST_REPEATED)
            elif key == "$ref":
                references.add(str(value))
            elif key in _ITEMS and isinstance(value, int):
                add(at, "items in all", max(value, 0), MOST_ITEMS)
            elif key == "multipleOf" and (one := _without_zeros(value)) > 1:
                counts[key] += 1
                multiple = math.lcm(multiple, one)
                keep(
                    at,
                    "as their common multiple, times their number",
                    multiple * counts[key],
                    LARGEST_MULTIPLE,
                )
        if isinstance(part, dict) and _joins(part):
            joined = joined or place
    levels = deepest * (len(references) + 1)
    keep(
        param or "the schema", "levels with its references (levels x references)", levels, DEEPEST_REFERENCES
    )
    if joined:
        keep(joined, "patterns beside it", counts["patterns"], MOST_JOINED_PATTERNS)


def check_schema_text(text: str, param: str | None) -> None:
    """The same of JSON."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the form cannot be read: {error}", param=param) from None
    check_schema(schema, param)


def pattern_size(pattern: str) -> int:
    """At most so many letters ``pattern`` stands for with its ``{n}`` written out."""
    if _SPACED.search(pattern):
        return MOST_REPEATED + 1
    counts = [max(int(number or 1) for number in repeat) for repeat in _REPEAT.findall(pattern)]
    if _REPEAT_OF_GROUP.search(pattern):
        return len(pattern) * math.prod(max(count, 1) for count in counts)
    return len(pattern) + sum(counts)


def _parts(place: str, part: object, depth: int = 1) -> Iterator[tuple[str, dict[str, Any] | list[Any], int]]:
    """Every object and list, with its place and how deep it lies."""
    if isinstance(part, dict | list):
        yield place, part, depth
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, dict | list):
                at = f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key[:80]}"
                yield from _parts(at, value, depth + 1)


def _joins(part: dict[str, Any]) -> bool:
    """Whether ``part`` has several parts that must hold together."""
    together = part.get("allOf")
    if isinstance(together, list) and len(together) > 1:
        return True
    return bool(_JOINING & part.keys()) and len(part.keys() - _WORDS_ONLY) > 1


def _without_zeros(value: object) -> int:
    """The digits of a number as a whole one: 25 of 0.25, 3 of 3,000. A power of ten costs nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    digits = Decimal(str(value)).as_tuple().digits
    return int("".join(map(str, digits)).strip("0") or 1)
