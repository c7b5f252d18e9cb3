"""The ledger that ``vlfit serve`` prints when it has started."""

from dataclasses import replace

from tests.wording import figures_in
from vlfit.cli.pages.ledger_page import ledger_differences, ledger_page
from vlfit.plan.actual import Row, totals
from vlfit.units import MIB

ROWS = (
    Row("desktop", 951 * MIB, 970 * MIB, "measured", "what others hold"),
    Row("context", 646 * MIB, 402 * MIB, "modelled", "CUDA and its libraries"),
    Row("weights.text", 3500 * MIB, 3500 * MIB, "exact", "text layers in fp8"),
    Row("kv_cache", 576 * MIB, 620 * MIB, "exact", "4096 tokens"),
    Row("vision_workspace", 300 * MIB, None, "modelled", "peak", "in text_workspace"),
    Row("text_workspace", 20 * MIB, 325 * MIB, "modelled", "256 tokens a pass", "both workspaces"),
    Row("reserve", 128 * MIB, None, "modelled", "air", "1,300 MiB of the card are free"),
)


def test_each_line_has_what_was_planned_and_what_is_held() -> None:
    planned, actual = totals(ROWS)
    page = ledger_page(ROWS, {"planned": planned, "actual": actual}, "of 8,151 on NVIDIA GeForce RTX 5060")
    lines = page.splitlines()
    assert lines[0].split()[:5] == ["line", "planned", "MiB", "held", "MiB"]
    assert len(lines) == 2 + len(ROWS)
    for row, line in zip(ROWS, lines[1:], strict=False):
        words = line.split()
        assert words[1] == ("runtime" if row.line == "context" else row.line)
        assert words[2] == f"{(row.planned or 0) / MIB:,.0f}"
        assert words[3] == ("-" if row.actual is None else f"{row.actual / MIB:,.0f}")
        assert line.endswith(row.remark or row.note)
    assert lines[-1].split()[:3] == ["total", "6,121", "5,817"]
    assert lines[-1].endswith("RTX 5060")


def test_lines_that_are_off_the_plan_are_named() -> None:
    """By over 3 %; the desktop is others' doing, and the workspaces have one number together."""
    more, less = ledger_differences(ROWS)
    assert [(each.split()[0], figures_in(each)) for each in more] == [("kv_cache", [44, 576])]
    assert [(each.split()[0], figures_in(each)) for each in less] == [("runtime", [244, 646])]
    assert ledger_differences(ROWS[:1]) == ([], [])
    tower, text = ROWS[4], replace(ROWS[5], actual=400 * MIB)
    ((together,), _) = ledger_differences((tower, text))
    assert {"vision_workspace", "text_workspace"} <= set(together.split())
    assert figures_in(together) == [80, 320]


def test_a_name_from_outside_cannot_steer_a_terminal() -> None:
    page = ledger_page((Row("kv_cache", 1, 1, "exact", "a\x1b[31mb"),), {"planned": 1, "actual": 1}, "")
    assert "\x1b" not in page
