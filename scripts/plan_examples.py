"""Writes what `vlfit plan` prints now into the examples of docs/plan.md, each below its command.

    .venv/bin/python scripts/plan_examples.py

``tests/cli/test_plan.py`` holds the document to it; prose around the examples has to be read again by hand.
"""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from vlfit.cli.main import app

DOCUMENT = Path(__file__).parents[1] / "docs" / "plan.md"
EXAMPLE = re.compile(r"^```console\n\$ vlfit (.*)\n(?s:.*?)```", re.MULTILINE)


def _printed(found: re.Match[str]) -> str:
    printed = CliRunner().invoke(app, shlex.split(found[1])).stdout
    return f"```console\n$ vlfit {found[1]}\n{printed}```"


if __name__ == "__main__":
    DOCUMENT.write_text(EXAMPLE.sub(_printed, DOCUMENT.read_text("utf-8")), "utf-8")
