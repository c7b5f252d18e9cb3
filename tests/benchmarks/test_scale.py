"""The figures of docs/scale.md are those that its script prints."""

from pathlib import Path

from benchmarks.scale import Inputs, short, size, span, tables

PAGE = Path(__file__).parent.parent.parent / "docs" / "scale.md"
AS_DOCUMENTED = Inputs(64, 200e3, 0.002, 2.0, 60.0, None)


def test_every_row_stands_in_the_page() -> None:
    told = {
        tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith("|")
    }
    for title, rows in tables(AS_DOCUMENTED):
        assert [row for row in rows if tuple(row) not in told] == [], title


def test_numbers_are_written_as_people_read_them() -> None:
    assert [short(number) for number in (10**10, 141_546, 12.34, 0.0123)] == [
        "10 billion",
        "141,546",
        "12",
        "0.012",
    ]
    assert [size(number) for number in (2e15, 748e6, 60e3)] == ["2 PB", "748 MB", "60 kB"]
    assert [span(number) for number in (90, 7200, 5 * 86_400, 4 * 365 * 86_400)] == [
        *("1.5 minutes", "2 hours", "5 days", "4 years")
    ]
