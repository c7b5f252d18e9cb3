"""Wordings with choices in them: their syntax, and drawing one at random.

``{one|other}`` stands for one of the two, ``NAME`` for a part of the list of that name; both may be nested.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

# A wording, ready to be said: words as they are, and choices of which one is drawn.
Wording: TypeAlias = "tuple[str | tuple[Wording, ...], ...]"

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LIST = re.compile(r"[A-Z]{3,}")


class BadWording(ValueError):
    """What is written down is no wording; says where and why."""


def say(wordings: tuple[Wording, ...], random: np.random.Generator) -> str:
    """One of the wordings, with its choices drawn."""
    return "".join(
        part if isinstance(part, str) else say(part, random)
        for part in wordings[int(random.random() * len(wordings))]
    )


def compiled(text: str, lists: Mapping[str, tuple[Wording, ...]]) -> Wording:
    """A wording from its written form. Raises BadWording for braces that do not match."""
    parts: list[str | tuple[Wording, ...]] = []
    for at, piece in enumerate(_split(text)):
        if at % 2:
            parts.append(tuple(compiled(choice, lists) for choice in _alternatives(piece)))
            continue
        start = 0
        for match in _LIST.finditer(piece):
            # Other words in capitals (GPT, CPU) stand for themselves.
            if match[0] in lists:
                parts += [piece[start : match.start()], lists[match[0]]]
                start = match.end()
        parts.append(piece[start:])
    return tuple(part for part in parts if part)


def slip(text: str, random: np.random.Generator) -> str:
    """The text with two letters swapped, one left out, one doubled, or one hit wrongly."""
    at = 1 + int(random.random() * (len(text) - 3))
    one, two = text[at], text[at + 1]
    if not (one.isalpha() and two.isalpha()):
        return text
    wrong = LETTERS[int(random.random() * len(LETTERS))]
    slips = (two + one, two, one + one + two, wrong + two)
    return text[:at] + slips[int(random.random() * len(slips))] + text[at + 2 :]


def _split(text: str) -> list[str]:
    """The text cut at its outermost braces: outside, inside, outside, ..."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if (letter == "{" and depth == 1) or (letter == "}" and depth == 0):
            pieces.append("")
        else:
            pieces[-1] += letter
        if depth < 0:
            break
    if depth:
        raise BadWording(f"braces do not match in {text!r}")
    return pieces


def _alternatives(text: str) -> list[str]:
    """The text cut at the bars that stand in no inner braces."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def sections(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line number, heading and lines of each section; comments and empty lines left out."""
    number, head = 0, ""
    body: list[str] = []
    for at, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.startswith("["):
            if head:
                yield number, head, body
            number, head, body = at, line, []
        elif line and not line.startswith("#"):
            body.append(line)
    if head:
        yield number, head, body
