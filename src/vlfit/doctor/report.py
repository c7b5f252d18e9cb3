"""Checks and diagnoses as a person reads them, and as JSON.

Knows: words and their order. Does not know how they were found.
"""

from dataclasses import asdict
from typing import Any

from vlfit.doctor.check import Check
from vlfit.doctor.checks import worst
from vlfit.doctor.diagnose import Examined

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
