"""The ledger of a server that has started, in the form of the plan: line, planned, held.

Knows words and columns. Does not know how either number came about (``plan/actual.py``).
"""

from collections.abc import Mapping, Sequence

from rich.table import Table

from vlfit.cli.plan_page import LETTERS, new_console, text_of
from vlfit.cli.printing import plain
from vlfit.plan.actual import Row, off_plan, planned_for
from vlfit.units import MIB


def ledger_page(found: Sequence[Row], total: Mapping[str, int | None], place: str) -> str:
    """``found`` line by line. ``total``: bytes planned and actual. ``place``: what the memory is of."""
    page = new_console(lively=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    for name in ("planned MiB", "held MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for row in found:
        words = plain("; ".join(part for part in (row.note, row.remark) if part), terminal=True)
        sign = LETTERS.get(row.line, "")
        table.add_row(sign, row.line, _count(row.planned), _count(row.actual), row.how, words)
    table.add_row("", "total", _count(total["planned"]), _count(total["actual"]), "", place)
    page.print(table)
    return text_of(page)


def differences(found: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Lines that hold over 3 % more than planned, and lines that hold as much less, in words."""
    more: list[str] = []
    less: list[str] = []
    planned = {row.line: planned_for(row, found) for row in found}
    for line, count in off_plan(found):
        who = f"{line} holds" if line != "text_workspace" else "vision_workspace and text_workspace hold"
        words = f"{who} {_count(abs(count))} MiB {'more' if count > 0 else 'less'} than the "
        words += f"{_count(planned[line])} MiB planned" if planned[line] else "plan"
        (more if count > 0 else less).append(words)
    return more, less


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:,.0f}"
