"""The ledger of a server that has just started: planned and held MiB, and where they differ."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from vlfit.cli.pages.plan_page import MAX_WIDTH, new_console, text_of
from vlfit.cli.printing import escape_control
from vlfit.plan.actual import Row, lines_off_plan, planned_bytes_of
from vlfit.plan.ledger import shown_name
from vlfit.plan.svg import LETTERS
from vlfit.units import MIB

_NARROW = 76  # columns below which the ledger has no column of words


def ledger_page(
    found: Sequence[Row], total: Mapping[str, int | None], place: str, width: int = MAX_WIDTH
) -> str:
    """Ledger of a running server with planned and held MiB, as plain text, at most ``width`` columns wide.

    ``total``: bytes by ``planned`` and ``actual``. ``place``: words beside the total, which memory it is of.
    Narrower than ``_NARROW``, it says of the total alone what it is.
    """
    page = new_console(width, on_terminal=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    for name in ("planned MiB", "held MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    is_narrow = width < _NARROW
    if not is_narrow:
        table.add_column("what it is", overflow="fold")
    for row in found:
        words = escape_control("; ".join(part for part in (row.note, row.remark) if part), terminal=True)
        sign = LETTERS.get(row.line, "")
        cells = (sign, shown_name(row.line), _mib_or_blank(row.planned), _mib_or_blank(row.actual), row.how)
        table.add_row(*cells, *(() if is_narrow else (words,)))
    sums = ("", "total", _mib_or_blank(total["planned"]), _mib_or_blank(total["actual"]), "")
    table.add_row(*sums, *(() if is_narrow else (place,)))
    page.print(table)
    if is_narrow:
        page.print(f"total: {place}")
    return text_of(page)


def ledger_differences(found: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Sentences on ledger lines that hold much more than planned, and on those that hold much less.

    A pair of lists; much: over 3 % and 8 MiB (``lines_off_plan``).
    """
    more: list[str] = []
    less: list[str] = []
    planned = {row.line: planned_bytes_of(row, found) for row in found}
    for line, count in lines_off_plan(found):
        who = (
            f"{shown_name(line)} holds"
            if line != "text_workspace"
            else "vision_workspace and text_workspace hold"
        )
        words = f"{who} {_mib_or_blank(abs(count))} MiB {'more' if count > 0 else 'less'} than the "
        words += f"{_mib_or_blank(planned[line])} MiB planned" if planned[line] else "plan"
        (more if count > 0 else less).append(words)
    return more, less


def _mib_or_blank(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:,.0f}"
