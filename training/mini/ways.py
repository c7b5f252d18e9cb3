"""Wordings of each question about a picture (``ways.txt``), drawn at random and filled in."""

import re
from functools import cache
from pathlib import Path

import numpy as np

from training.mini.wordings import BadWording, Wording, compiled, say, sections

WAYS = Path(__file__).parent / "ways.txt"
# What a wording may ask of the scene; any other word in capitals (JSON, OCR) stands for itself.
SLOTS = (
    "A", "COLOUR", "COUNT", "DOES", "FORM", "HUE", "IS", "NAME", "NAMES", "NUMBER", "ONE", "OPPOSITE",
    "ORDINAL", "OTHER", "PLACE", "SIDE", "WAY", "WORD",
)  # fmt: skip
_SLOT = re.compile(rf"\b(?:{'|'.join(SLOTS)})\b")


def way(question: str, random: np.random.Generator, **parts: str) -> str:
    """One of the wordings of a question, with ``parts`` in the places of their names in capitals.

    Raises KeyError for a question that ``ways.txt`` does not hold, and for a wording that needs another part.
    """
    text = say(read_ways()[question], random)
    # "A" is also how an English sentence may begin: it is a slot only where it is given.
    text = _SLOT.sub(lambda match: parts[match[0]] if match[0] in parts or match[0] != "A" else "A", text)
    return text[0].upper() + text[1:]


@cache
def read_ways(path: Path = WAYS) -> dict[str, tuple[Wording, ...]]:
    """The wordings of a file, by question. Raises BadWording."""
    found: dict[str, tuple[Wording, ...]] = {}
    for number, head, body in sections(path):
        try:
            wordings = tuple(compiled(part, {}) for line in body for part in line.split(" / "))
            name = head.strip().strip("[]")
            if name in found:
                raise BadWording("it stands here twice")
            if not wordings:
                raise BadWording("it has no wordings")
        except BadWording as error:
            raise BadWording(f"{path.name}, line {number}, {head}: {error}") from error
        found[name] = wordings
    return found
