"""No line is wider than the terminal: the help of every command, and the pages of those that print tables."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.cli_docs import command_paths
from typer.main import get_command

from tests.cli.conftest import Ended, Vlfit
from vlfit.bench.card_row import COLUMNS, table_line
from vlfit.cli.main import app
from vlfit.cli.servers import record_server

WIDTHS = (60, 80, 200)
CARD = ("--gpu", "RTX 5060", "--desktop", "951MiB", "--wsl2")
LOGS = sorted(Path(__file__).parents[1].glob("*/logs/*.log"))
PAGES = {
    "doctor": ("doctor",),
    "machine": ("machine",),
    "machine of a card": ("machine", *CARD),
    "cards": ("machine", "--cards"),
    "models": ("models",),
    "status": ("status",),
    "stop": ("stop",),
    "top": ("top", "--once", "--port", "1"),
    "plan": ("plan", *CARD),
    "plan of a set": ("plan", "4B", "2B", *CARD),
    "comparison": ("plan", "--compare", "4B", "8B", "2B", *CARD),
    **{f"doctor {log.stem}": ("doctor", *CARD, "--log", log) for log in LOGS if log.stem != "nothing-known"},
}


@dataclass(frozen=True)
class Terminal:
    """Runs ``vlfit`` on a terminal of ``width`` columns."""

    width: int
    vlfit: Vlfit
    monkeypatch: pytest.MonkeyPatch

    def run(self, *arguments: object) -> Ended:
        self.monkeypatch.setenv("COLUMNS", str(self.width))
        self.monkeypatch.setenv("TERM", "xterm")  # rich takes 80 columns for a dumb one
        self.monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        ended = self.vlfit(*arguments)
        assert ended.out
        shown = re.sub(r"\x1b\[[\d;]*m", "", ended.out)
        # A quoted word of a command is never broken, nor is a row to post.
        breakable = re.sub(r"^ +'[^']*'( \\)?$", "", shown, flags=re.MULTILINE)
        assert widest(breakable.partition(table_line(COLUMNS))[0]) <= self.width, shown
        return ended


@pytest.fixture(params=WIDTHS)
def terminal(request: pytest.FixtureRequest, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(request.param, vlfit, monkeypatch)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


@pytest.mark.parametrize("path", command_paths(get_command(app)), ids=" ".join)
def test_help(path: tuple[str, ...], terminal: Terminal) -> None:
    ended = terminal.run(*path, "--help")
    assert ended.code == 0
    assert "..." not in ended.out.partition("\nCommands:\n")[2]


@pytest.mark.parametrize("width", [30, 40, 46, 52])
@pytest.mark.parametrize("path", [("caption",), ("batch",), ()], ids=" ".join)
def test_help_on_a_narrow_terminal_says_the_same(
    path: tuple[str, ...], width: int, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prose(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        return vlfit(*path, "--help").out.partition("Examples:")[0].partition("\n\n")[2]

    assert widest(prose(width)) <= width
    assert prose(width).split() == prose(120).split()
    monkeypatch.setenv("COLUMNS", str(width))
    options = vlfit(*path, "--help").out.partition("\nOptions:\n")[2].partition("\nCommands:\n")[0]
    assert "\\" not in options


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, terminal: Terminal) -> None:
    terminal.run(*PAGES[name])


@pytest.mark.parametrize("name", ["plan", "cards", "comparison", "plan of a set"])
def test_columns_are_obeyed_without_a_terminal(
    name: str, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = widest(vlfit(*PAGES[name]).out)
    monkeypatch.setenv("COLUMNS", "60")
    assert widest(vlfit(*PAGES[name]).out) <= 60 < whole
    monkeypatch.setenv("COLUMNS", "wide")
    assert widest(vlfit(*PAGES[name]).out) == whole


def test_status_of_a_server(terminal: Terminal) -> None:
    model = "Qwen/Qwen3-VL-4B-Instruct-FP8"
    with record_server("http://127.0.0.1:1", model, 30.0):
        assert model in terminal.run("status").out


def test_bench(terminal: Terminal) -> None:
    few = ("--tokens", 4, "--repeat", 1, "--size", "64x64", "--device", "cpu", "--quiet")
    ended = terminal.run("bench", "mini", *few)
    (head,) = (line for line in ended.out.splitlines() if line.startswith("| at once"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns[:2] == ["at once", "tokens/s"]
    assert len(columns) in {60: (4,), 80: (5, 6), 200: (8,)}[terminal.width]
    assert ended.out.splitlines()[-3] == table_line(COLUMNS)
