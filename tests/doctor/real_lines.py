"""Reads ``real_lines.txt``: real output of failed programs, by rule."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RealLine:
    """Lines of a log, the rule that they match, and their source."""

    rule: str
    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text[:40]}"


def read_real_lines() -> list[RealLine]:
    """All entries of the file."""
    entries = Path(__file__).with_suffix(".txt").read_text("utf-8").split("\n### ")[1:]
    found = []
    for entry in entries:
        heading, _, text = entry.partition("\n")
        rule, _, source = heading.partition(" | ")
        found.append(RealLine(rule, source, text.strip("\n")))
    return found


REAL_LINES = read_real_lines()
