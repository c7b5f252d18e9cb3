"""docs/machine.md lists exactly the fields of a machine file and the ids of problems."""

import re
from dataclasses import fields
from pathlib import Path

from vlfit.machine import problems
from vlfit.machine.model import Gpu, Host

PAGE = (Path(__file__).parents[2] / "docs" / "machine.md").read_text("utf-8")


def names_in_tables(pattern: str) -> set[str]:
    cells = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    return {name for cell in cells for name in re.findall(pattern, cell)}


def test_every_field_is_on_the_page() -> None:
    assert names_in_tables(r"`gpus\[\]\.(\w+)`") == {field.name for field in fields(Gpu)}
    assert names_in_tables(r"`host\.(\w+)`") == {field.name for field in fields(Host)}


def test_every_problem_is_on_the_page() -> None:
    source = Path(problems.__file__).read_text("utf-8")
    known = set(re.findall(r'Problem\(\s*"([a-z_.]+)"', source))
    assert len(known) > 15
    assert names_in_tables(r"`((?:driver|gpu|container|wsl|python)\.[a-z_]+)`") == known
