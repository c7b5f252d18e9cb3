"""From a log to what is wrong: every rule over every piece of it, echoes out, the likeliest cause first."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from vlfit.doctor.checks import Check, worst
from vlfit.doctor.logs import BEFORE, Facts, Piece, pieces
from vlfit.doctor.rule import Case, Diagnosis, Found, Rule, judge
from vlfit.doctor.rules import RULES
from vlfit.machine.model import Machine
from vlfit.plan.vllm.step_down import Failure

_LONGEST_LINE = 400
_MOST_LINES = 3
_ABSURD = re.compile(r"-?[\d.]{16,}")


@dataclass
class _Seen:
    """Where a rule was found: first, last, and how often."""

    rule: Rule
    first: Found
    last: Found
    count: int = 1


@dataclass(frozen=True)
class Examined:
    """What became of a log: diagnoses, the likeliest cause first, and how much was read."""

    diagnoses: tuple[Diagnosis, ...]
    characters: int
    known: bool = field(default=True)

    @property
    def only_wrappers(self) -> bool:
        """Whether all that was recognised are lines that report a failure without its cause."""
        return bool(self.diagnoses) and not self.known


def examine(stream: BinaryIO, machine: Machine | None = None) -> Examined:
    """Read the log in ``stream`` to its end and say what went wrong. ``machine``: where it happened."""
    facts, characters = Facts(), 0
    seen: dict[str, _Seen] = {}
    for piece in pieces(stream):
        facts.read(piece)
        for rule in RULES:
            _search(rule, piece, seen)
        characters = piece.start + piece.last
    causes = _ranked(list(seen.values()), facts)
    diagnoses = tuple(judge(one.rule, Case(one.last, facts, machine)) for one in causes)
    return Examined(diagnoses, characters, any(not one.rule.wrapper for one in causes))


def _search(rule: Rule, piece: Piece, seen: dict[str, _Seen]) -> None:
    text = piece.text if rule.one_line else piece.flat
    if not any(word in text for word in rule.words):
        return
    matches = 0
    first = last = None
    for match in rule.expression.finditer(text):
        if piece.first <= match.start() < piece.last and not any(map(_absurd, match.groups())):
            first, last, matches = first or match, match, matches + 1
    if first is None or last is None:
        return
    if (known := seen.get(rule.id)) is None:
        seen[rule.id] = _Seen(rule, _found(first, piece), _found(last, piece), matches)
    else:
        known.last, known.count = _found(last, piece), known.count + matches


def _absurd(group: str | None) -> bool:
    """Whether a number is longer than any that these programs print."""
    return group is not None and _ABSURD.fullmatch(group) is not None


def _found(match: re.Match[str], piece: Piece) -> Found:
    start = match.start()
    return Found(
        start=piece.start + start,
        groups={name: value or "" for name, value in match.groupdict().items()},
        evidence=_lines(piece.text, start, match.end()),
        before=piece.text[max(start - BEFORE, 0) : start],
    )


def _lines(text: str, start: int, end: int) -> str:
    """The lines of ``text`` in which ``[start, end)`` lies, cut to what one can read."""
    start = text.rfind("\n", 0, start + 1 if text[start : start + 1] == "\n" else start) + 1
    stop = text.find("\n", end)
    lines = text[start : stop if stop >= 0 else len(text)].strip().split("\n")
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "..." for line in lines[:_MOST_LINES]
    )


def _ranked(seen: list[_Seen], facts: Facts) -> list[_Seen]:
    """Causes without their echoes: those of the last run first, then by place in the log."""
    causes = [one for one in seen if not one.rule.wrapper]
    if not causes:
        return sorted(seen, key=lambda one: one.first.start)[:1]
    hidden = {name for one in causes for name in one.rule.hides}
    causes = [one for one in causes if one.rule.id not in hidden]
    # Somebody who tries flag after flag pastes several runs: the last one is what fails now.
    return sorted(causes, key=lambda one: (one.last.start < facts.last_start, one.first.start))


# The bridge from the log of a start that failed to what is tried next: the likeliest cause with its
# numbers.
#


def read_failure(stream: BinaryIO, machine: Machine | None = None) -> tuple[Failure, Diagnosis | None]:
    """The likeliest cause in the log ``stream``: for a program, and for a person, None if none is known.

    Lines that report a failure without its cause are no cause for a program.
    """
    found = examine(stream, machine)
    first = next(iter(found.diagnoses), None)
    if first is None or found.only_wrappers:
        return Failure(""), first
    return Failure(first.id, first.values, first.values.get("stage", "")), first


# Checks and diagnoses as a person reads them, and as JSON.
#


UNKNOWN = (
    "nothing in this log is known to the doctor",
    "It knows vLLM, transformers, PyTorch, llama.cpp, Ollama and the kernel. If it is one of them, send "
    "the log from its first line, `vlfit doctor --json` and `vlfit machine --json` to the project, so that "
    "it learns it.",
)


def checks_as_json(checks: list[Check]) -> dict[str, Any]:
    """All checks, and the worst level among them."""
    return {"checks": [asdict(check) for check in checks], "worst": worst(checks)}


def diagnoses_as_json(examined: Examined) -> dict[str, Any]:
    """``{"diagnoses": [{"id", "cause", "evidence", "remedy", "command"}]}``; an empty command is null."""
    names = ("id", "cause", "evidence", "remedy")
    return {
        "diagnoses": [
            {**{name: getattr(one, name) for name in names}, "command": one.command or None}
            for one in examined.diagnoses
        ]
    }


def diagnosis_lines(examined: Examined) -> list[tuple[str, str]]:
    """Pairs of a heading and its text, in the order in which they are read."""
    lines: list[tuple[str, str]] = []
    for place, one in enumerate(examined.diagnoses):
        lines.append(("cause" if place == 0 else "also", f"{one.cause}  [{one.id}]"))
        lines.append(("seen", one.evidence))
        lines.append(("remedy", one.remedy))
        if one.command:
            lines.append(("run", one.command))
    return lines
