"""Golden files: what the program said when they were written, and how they are compared and written anew.

    VLFIT_REGENERATE=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/golden

writes all of them; `git diff tests/golden` then shows what has changed. Knows nothing of vlfit.
"""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ANEW = os.environ.get("VLFIT_REGENERATE") == "1"
_MOST_LINES = 40
_LONG = 400
_HINT = "if that is meant: VLFIT_REGENERATE=1 .venv/bin/python -m pytest tests/golden"


def check(name: str, text: str) -> None:
    """Fail with a short diff where ``text`` is not what the file ``name`` of this folder holds."""
    file = HERE / name
    if ANEW:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.encode())
        return
    kept = file.read_bytes().decode() if file.exists() else ""
    if kept == text:
        return
    before, now = _lines(kept), _lines(text)
    lines = [
        line if line.endswith("\n") else f"{line}\n\\ no end of line\n"
        for line in difflib.unified_diff(before, now, f"kept in {name}", "now", n=1)
    ]
    shown = "".join(_cut(line) for line in lines[:_MOST_LINES])
    more = f"... and {len(lines) - _MOST_LINES} more lines\n" if len(lines) > _MOST_LINES else ""
    pytest.fail(f"{shown}{more}{_HINT}", pytrace=False)


def check_facts(name: str, facts: Any) -> None:
    """``check`` of ``facts`` as JSON with sorted keys."""
    check(name, json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def check_rows(name: str, rows: dict[str, str]) -> None:
    """``check`` of ``rows`` as JSON, one to a line, in the order given."""
    check(name, json.dumps(rows, indent=0, ensure_ascii=False) + "\n")


def _lines(text: str) -> list[str]:
    """With long lines of JSON broken where a value ends, so that a difference in one can be seen."""
    lines = text.splitlines(keepends=True)
    return [
        part
        for line in lines
        for part in (
            re.sub(r"(?<=,) (?=[\"{\[])", "\n", line).splitlines(True) if len(line) > _LONG else [line]
        )
    ]


def _cut(line: str) -> str:
    return line if len(line) <= _LONG else f"{line[:_LONG].rstrip()} ...\n"
