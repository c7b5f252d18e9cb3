"""Rewrite the outputs of `vlfit plan` in the examples of docs/plan.md.

    .venv/bin/python scripts/plan_examples.py

``tests/cli/test_plan.py`` compares them; the prose around them has to be read again by hand.
"""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from vlfit.cli.main import app

DOCUMENT = Path(__file__).parents[1] / "docs" / "plan.md"
EXAMPLE = re.compile(r"^```console\n\$ vlfit (.*)\n(?s:.*?)```", re.MULTILINE)


def _example(match: re.Match[str]) -> str:
    printed = CliRunner().invoke(app, shlex.split(match[1])).stdout
    return f"```console\n$ vlfit {match[1]}\n{printed}```"


if __name__ == "__main__":
    DOCUMENT.write_text(EXAMPLE.sub(_example, DOCUMENT.read_text("utf-8")), "utf-8")
