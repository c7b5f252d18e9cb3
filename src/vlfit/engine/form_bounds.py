"""How much a JSON schema may ask for: what cannot be followed in bounded time and memory is refused at once.

Knows: a schema as plain JSON, and bounds for what makes a grammar large: numbers, patterns, what several
parts ask for together. Does not know: llguidance, or what a schema means; where a keyword stands as a value
(in an ``enum``, say), its number counts all the same, for a ``$ref`` may lead there. No torch.

The bounds are far above what schemas of programs ask for, and far below what hurts: with llguidance 1.6.1 on
one core of a server, 10 million items need more than 5 GiB, a multiple of 999,983 takes 17 s, each two
patterns more that must hold together take ten times as long, and 4,000 references in a row overflow the
stack.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from vlfit.errors import InvalidRequest

MOST_PARTS = 5_000  # objects and lists in a schema
DEEPEST = 64  # of them inside of each other
DEEPEST_REFERENCES = 2_000  # depth x (definitions that are referred to + 1): levels that may open at most
MOST_PROPERTIES = 2_000  # named in a schema, added up, and as many required: the time grows with their square
MOST_ITEMS = 10_000  # minItems, maxItems, minProperties and maxProperties of a schema, added up
MOST_LETTERS = 1_000_000  # minLength or maxLength
LARGEST_MULTIPLE = 10_000  # multipleOf of a schema, trailing zeros left out: added up, and together
LONGEST_PATTERN = 1_000  # characters
MOST_REPEATED = 10_000  # letters that the patterns of a schema stand for, {n} written out
MOST_PATTERNS = 200
MOST_JOINED_PATTERNS = 8  # where several parts of a schema must hold together

_ITEMS = ("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
_SCHEMAS = ("properties", "patternProperties", "anyOf", "oneOf", "allOf", "prefixItems")
_LETTERS = ("minLength", "maxLength")
_PATTERNS = ("pattern", "format", "whitespace_pattern", "item_separator", "key_separator")
_JOINING = {"$ref", "allOf", "anyOf", "oneOf"}
_WORDS_ONLY = {"title", "description", "default", "examples", "deprecated", "$defs", "definitions"}
_WORDS_ONLY |= {"$schema", "$id", "$comment", "nullable", "discriminator"}
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
# Sets in sets and flags, which change what a bracket or a space is.
_UNUSUAL = re.compile(r"\[\^?\]|\[[^\]]*\[|\(\?(?!:)")


def check_schema(schema: object, param: str | None) -> None:
    """Raises ``InvalidRequest`` with the place and the bound. ``schema``: as ``json.loads`` gives it.

    ``param``: the field of the request that the schema came in.
    """
    found = _Found(param)
    for place, part, depth in _parts(schema, param):
        found.add(place, part, depth)
    found.check()


def check_schema_text(text: str, param: str | None) -> None:
    """The same of JSON. What is no JSON is left to who reads it next."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _beyond("the schema", "levels", DEEPEST, param) from None
    except ValueError:
        return
    check_schema(schema, param)


def pattern_size(pattern: str) -> int:
    """How many letters ``pattern`` stands for with its ``{n}`` written out, alternatives added up.

    It is read as far as this needs: what is no sound pattern gets some number as well, and what can be read
    in two ways the most that it may be.
    """
    if _UNUSUAL.search(pattern):
        return len(pattern) * math.prod(_times(each) for each in _REPEAT.finditer(pattern))
    sums, last, place = [0], 0, 0
    while place < len(pattern):
        letter, width = pattern[place], 1
        repeat = _REPEAT.match(pattern, place)
        if repeat is not None:
            last, width = last * _times(repeat), repeat.end() - place
        elif letter == "(":
            sums[-1] += last
            sums.append(0)
            last = 0
        elif letter == ")" and len(sums) > 1:
            last += sums.pop()
        elif letter not in "*+?|":
            sums[-1] += last
            last, width = 1, _width(pattern, place)
        place += width
    return sum(sums) + last


def _times(repeat: re.Match[str]) -> int:
    return max((int(number) for number in repeat.groups() if number), default=1) or 1


def _width(pattern: str, place: int) -> int:
    """Of one letter, one that is escaped, or a set of them."""
    if pattern[place] == "\\":
        return 2
    if pattern[place] != "[":
        return 1
    end = place + 1
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1 - place


@dataclass(slots=True)
class _Found:
    """What a schema asks for, as it is walked through."""

    param: str | None
    parts: int = 0
    properties: int = 0
    required: int = 0
    depth: int = 0
    items: int = 0
    multiples: int = 0
    multiple: int = 1  # of all of them
    patterns: int = 0
    repeated: int = 0
    joined: str | None = None
    references: set[str] = field(default_factory=set)

    def add(self, place: str, part: dict[str, Any] | list[Any], depth: int) -> None:
        self.parts += 1
        self.depth = max(self.depth, depth)
        self._keep(place, "objects and lists in all", self.parts, MOST_PARTS)
        self._keep(place, "levels", depth, DEEPEST)
        if isinstance(part, list):
            return
        for key, value in part.items():
            if key == "properties" and isinstance(value, dict):
                self.properties += len(value)
                self._keep(f"{place}.{key}", "properties in all", self.properties, MOST_PROPERTIES)
            if key == "required" and isinstance(value, list):
                self.required += len(value)
                self._keep(f"{place}.{key}", "names in all", self.required, MOST_PROPERTIES)
            if key in _SCHEMAS and isinstance(value, dict | list):
                inside = value.values() if isinstance(value, dict) else value
                self.parts += sum(isinstance(each, bool) for each in inside)  # schemas, too: of anything
            self._number(f"{place}.{key[:80]}", key, value)
            if key in _PATTERNS and isinstance(value, str):
                self._pattern(f"{place}.{key}", value)
            if key == "patternProperties" and isinstance(value, dict):
                self.joined = self.joined or f"{place}.{key}"  # each is compared to each
                for pattern in value:
                    self._pattern(f"{place}.{key}", pattern)
        reference = part.get("$ref")
        if isinstance(reference, str):
            self.references.add(reference)
        together = part.get("allOf")
        several = isinstance(together, list) and len(together) > 1
        if several or (_JOINING & part.keys() and len(part.keys() - _WORDS_ONLY) > 1):
            self.joined = self.joined or place

    def check(self) -> None:
        where = self.param or "the schema"
        levels = self.depth * (len(self.references) + 1)
        self._keep(where, "levels with its references (levels x references)", levels, DEEPEST_REFERENCES)
        if self.joined is not None:
            self._keep(self.joined, "patterns beside it", self.patterns, MOST_JOINED_PATTERNS)

    def _number(self, place: str, key: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if key in _ITEMS:
            self.items += _whole(value)
            self._keep(place, "items in all", self.items, MOST_ITEMS)
        elif key in _LETTERS:
            self._keep(place, "letters", _whole(value), MOST_LETTERS)
        elif key == "multipleOf":
            one = _without_zeros(value)
            self.multiples += one if one > 1 else 0
            self._keep(place, "as multiples, added up", self.multiples, LARGEST_MULTIPLE)
            self.multiple = math.lcm(self.multiple, max(one, 1))
            self._keep(place, "as their common multiple", self.multiple, LARGEST_MULTIPLE)

    def _pattern(self, place: str, pattern: str) -> None:
        self.patterns += 1
        self._keep(place, "patterns in all", self.patterns, MOST_PATTERNS)
        self._keep(place, "characters", len(pattern), LONGEST_PATTERN)
        self.repeated += pattern_size(pattern)
        self._keep(place, "letters in all, repetitions written out", self.repeated, MOST_REPEATED)

    def _keep(self, place: str, what: str, number: int, most: int) -> None:
        if number > most:
            raise _beyond(place, what, most, self.param)


def _parts(schema: object, param: str | None) -> Iterator[tuple[str, dict[str, Any] | list[Any], int]]:
    """Every object and list, with its place and how deep it lies. One place at a time: keys may be long."""
    waiting: list[Iterator[tuple[str, object]]] = [iter([(param or "the schema", schema)])]
    while waiting:
        place, part = next(waiting[-1], ("", None))
        if not place:
            waiting.pop()
        elif isinstance(part, dict | list):
            yield place, part, len(waiting)
            waiting.append(_inside(place, part))


def _inside(place: str, part: dict[str, Any] | list[Any]) -> Iterator[tuple[str, object]]:
    if isinstance(part, dict):
        yield from ((f"{place}.{key[:80]}", value) for key, value in part.items())
    else:
        yield from ((f"{place}[{number}]", value) for number, value in enumerate(part))


def _whole(value: float) -> int:
    """``value`` as a count; what is none at all counts as too much."""
    return max(math.ceil(value), 0) if math.isfinite(value) else 10**30


def _without_zeros(value: float) -> int:
    """Its digits as a whole number: 25 of 0.25, 3 of 3,000. A power of ten costs nothing."""
    try:
        digits = Decimal(str(value)).normalize().as_tuple().digits
    except InvalidOperation:
        return 10**30
    return int("".join(map(str, digits)))


def _beyond(place: str, what: str, most: int, param: str | None) -> InvalidRequest:
    shown = place if len(place) <= 200 else f"{place[:150]}...{place[-40:]}"
    return InvalidRequest(
        f"{shown} asks for more than {most:,} {what}",
        "ask for a simpler form; docs/api.md has the bounds",
        param=param,
    )
