"""Limits on the size of a JSON schema, for what llguidance does not limit in time, memory or stack itself.

llguidance's own limits (``grammar.py``) cover lengths, enums and alternatives. Keywords are counted wherever
they occur, also as values (in an ``enum``, say), since a ``$ref`` may point there. No torch.

Measured with llguidance 1.6.1 on one core: 10 million items, a multiple of 999,983 or 20 patterns joined in
one subschema take more than 15 s to compile, whatever its limits; 4,000 chained references overflow the
stack, which ends the process. A step after ``(a{1000}){1000}`` takes 1 s and 270 MiB; an
``initial_lexer_fuel`` that prevents it would refuse 2,000 properties of six types.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from vlfit.errors import InvalidRequest

MAX_DEPTH = 64  # nested objects and lists
MAX_REFERENCE_DEPTH = 2_000  # depth x (distinct references + 1)
MAX_NODES = 5_000  # objects and lists
MAX_PROPERTIES = 2_000  # properties, and as many required names: compile time is quadratic in them
MAX_ITEMS = 10_000  # sum of all ``_ITEM_COUNTS``
MAX_MULTIPLE = 10_000  # of multipleOf: least common multiple times their number
MAX_PATTERN_SIZE = 10_000  # characters of all patterns, with {n} expanded
MAX_JOINED_PATTERNS = 8  # patterns in subschemas that must all hold

_ITEM_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_PATTERNS = ("pattern", "format", "whitespace_pattern", "item_separator", "key_separator")
_COMBINERS = {"$ref", "allOf", "anyOf", "oneOf"}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$defs", "definitions"}
_ANNOTATIONS |= {"$schema", "$id", "$comment", "nullable", "discriminator"}
_REPEAT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_REPEAT_OF_GROUP = re.compile(r"[)}*+?]\s*\{")  # or of another repetition: counts are multiplied
_VERBOSE_FLAG = re.compile(r"\(\?[a-zA-Z-]*x")  # (?x): whitespace and comments in patterns are ignored


def check_schema(schema: object, param: str | None) -> None:
    """Raise ``InvalidRequest`` if ``schema`` (parsed JSON) is too large; the message has path and limit.

    ``param``: the request field that held the schema, with which paths start; None if unknown.
    """
    counts: Counter[str] = Counter()
    references: set[str] = set()
    multiple, max_depth, joined = 1, 0, ""

    def check(path: str, what: str, number: int, limit: int) -> None:
        if number > limit:
            shown = path if len(path) <= 200 else f"{path[:150]}...{path[-40:]}"
            raise InvalidRequest(
                f"{shown} has more than {limit:,} {what}",
                "Use a simpler schema; docs/api.md lists the limits.",
                param=param,
            )

    def add(path: str, what: str, number: int, limit: int) -> None:
        counts[what] += number
        check(path, what, counts[what], limit)

    for path, part, depth in _nodes(param or "the schema", schema):
        max_depth = max(max_depth, depth)
        check(path, "levels", depth, MAX_DEPTH)
        add(path, "objects and lists in all", 1, MAX_NODES)
        for key, value in part.items() if isinstance(part, dict) else ():
            key_path = f"{path}.{key[:80]}"
            if key == "properties" and isinstance(value, dict):
                add(key_path, "properties in all", len(value), MAX_PROPERTIES)
            elif key == "required" and isinstance(value, list):
                add(key_path, "required names in all", len(value), MAX_PROPERTIES)
            elif key == "patternProperties" and isinstance(value, dict):
                counts["patterns"] += len(value)
                add(
                    key_path,
                    "pattern characters in all, repetitions expanded",
                    sum(map(pattern_size, value)),
                    MAX_PATTERN_SIZE,
                )
                joined = joined or key_path  # every pattern is compared with every other
            elif key in _PATTERNS and isinstance(value, str):
                counts["patterns"] += 1
                add(
                    key_path,
                    "pattern characters in all, repetitions expanded",
                    pattern_size(value),
                    MAX_PATTERN_SIZE,
                )
            elif key == "$ref":
                references.add(str(value))
            elif key in _ITEM_COUNTS and isinstance(value, int):
                add(key_path, "items in all", max(value, 0), MAX_ITEMS)
            elif key == "multipleOf" and (digits := _significant_digits(value)) > 1:
                counts[key] += 1
                multiple = math.lcm(multiple, digits)
                check(
                    key_path,
                    "as least common multiple times their number",
                    multiple * counts[key],
                    MAX_MULTIPLE,
                )
        if isinstance(part, dict) and _combines(part):
            joined = joined or path
    levels = max_depth * (len(references) + 1)
    check(
        param or "the schema", "levels with its references (levels x references)", levels, MAX_REFERENCE_DEPTH
    )
    if joined:
        check(joined, "patterns in combined subschemas", counts["patterns"], MAX_JOINED_PATTERNS)


def check_schema_text(text: str, param: str | None) -> None:
    """``check_schema`` for JSON text. Also raises ``InvalidRequest`` for invalid JSON.

    ``param``: the request field that held the schema; None if unknown.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"the schema is not valid JSON: {error}", "Send a JSON Schema.", param=param
        ) from None
    check_schema(schema, param)


def pattern_size(pattern: str) -> int:
    """Upper bound of the length of a regular expression with its ``{n}`` repetitions expanded.

    For a pattern in verbose mode, ``(?x)``, where repetitions are hard to find: ``MAX_PATTERN_SIZE`` + 1.
    """
    if _VERBOSE_FLAG.search(pattern):
        return MAX_PATTERN_SIZE + 1
    counts = [max(int(number or 1) for number in repeat) for repeat in _REPEAT.findall(pattern)]
    if _REPEAT_OF_GROUP.search(pattern):
        return len(pattern) * math.prod(max(count, 1) for count in counts)
    return len(pattern) + sum(counts)


def _nodes(path: str, part: object, depth: int = 1) -> Iterator[tuple[str, dict[str, Any] | list[Any], int]]:
    """Yield every object and list of a schema with its path and depth."""
    if isinstance(part, dict | list):
        yield path, part, depth
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, dict | list):
                key_path = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key[:80]}"
                yield from _nodes(key_path, value, depth + 1)


def _combines(part: dict[str, Any]) -> bool:
    """Whether ``part`` combines several subschemas that must all hold."""
    together = part.get("allOf")
    if isinstance(together, list) and len(together) > 1:
        return True
    return bool(_COMBINERS & part.keys()) and len(part.keys() - _ANNOTATIONS) > 1


def _significant_digits(value: object) -> int:
    """The significant digits of a number as an integer: 25 for 0.25, 3 for 3,000; powers of ten are free."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    digits = Decimal(str(value)).as_tuple().digits
    return int("".join(map(str, digits)).strip("0") or 1)
