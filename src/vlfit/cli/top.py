"""``vlfit top``: memory line by line, the plan beside it, requests and speed, for as long as one looks.

Knows: the loop, and how it ends without leaving marks on the terminal. Does not know where numbers come from
(``top_source.py``), what is wrong (``plan/alarms.py``) or how it looks (``top_page.py``).
"""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.printing import Printer
from vlfit.cli.signals import terminated_as_interrupted

if TYPE_CHECKING:
    from vlfit.cli.top_source import Look, Source
    from vlfit.plan.alarms import Alarm

EXAMPLES = """\b
Examples:
  vlfit top
  vlfit top --url http://192.168.1.20:8000 --interval 5
  vlfit top --once --json
  vlfit top --json --interval 10 >> top.jsonl
"""

REMEMBERED = 3600  # looks; the alarms and the curve need minutes


def top(
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="The server to look at; its key goes into VLFIT_API_KEY.  [default: the one on this"
            " computer; env VLFIT_SERVER]",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between two looks."),
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one page and end; speeds take two looks at a server.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one line for each look, in bytes and seconds.")
    ] = False,
) -> None:
    """Watch GPU memory and a running `vlfit serve`: each line of its ledger, planned and held.

    Works without a server: it then shows who holds the GPU. Looking never wakes or slows the server. Warns
    when memory spills into RAM, when it grows without requests, and when other programs eat into the reserve.
    Ctrl-C ends it, with exit code 0. Where stdout is no terminal, each look is one line.
    """
    from vlfit.cli.top_source import Source, default_url
    from vlfit.settings import read_settings

    settings = read_settings(server=url)
    where = settings.server or default_url(settings.host, settings.port)
    key = settings.api_key.get_secret_value() if settings.api_key else None
    printer = Printer(json=as_json)
    with Source(where, key, named=settings.server is not None) as source:
        if once:
            _once(source, interval, printer, as_json=as_json)
            return
        try:
            with terminated_as_interrupted():
                if as_json or not sys.stdout.isatty():
                    _lines(source, interval, printer, as_json=as_json)
                else:
                    _screen(source, interval)
        except KeyboardInterrupt:
            return  # the way to end it


def _once(source: "Source", interval: float, printer: Printer, *, as_json: bool) -> None:
    from vlfit.cli.top_page import facts, page

    looks = [source.look()]
    if looks[0].server is not None:
        time.sleep(interval)
        looks.append(source.look())
    found = _alarms(looks)
    if as_json:
        printer.data(facts(looks, source.url, found))
        return
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    lively = sys.stdout.isatty()
    if not lively:
        console.width = max(console.width, 120)  # nothing is cut in a file
    console.print(page(looks, source.url, found, lively=lively))


def _looks(source: "Source", interval: float) -> "Iterator[Sequence[Look]]":
    """All looks so far, once for each new one, ``interval`` seconds after the one before."""
    looks: deque[Look] = deque(maxlen=REMEMBERED)
    following = time.monotonic()
    while True:
        looks.append(source.look())
        yield looks
        # A look that takes longer than the interval is not made up for.
        following = max(following + interval, time.monotonic())
        time.sleep(following - time.monotonic() if following > time.monotonic() else 0)


def _lines(source: "Source", interval: float, printer: Printer, *, as_json: bool) -> None:
    from vlfit.cli.top_page import facts, line

    told: set[str] = set()
    for looks in _looks(source, interval):
        found = _alarms(looks)
        if as_json:
            printer.data(facts(looks, source.url, found))
            continue
        printer.line(line(looks, found))
        for alarm in found:
            if alarm.id not in told:
                printer.note(f"warning: {alarm.what}\n  -> {alarm.hint}")
        told = {alarm.id for alarm in found}


def _screen(source: "Source", interval: float) -> None:
    """The page on the terminal's other screen, which is gone afterwards, however it ends."""
    from rich.console import Console
    from rich.live import Live

    from vlfit.cli.top_page import page

    console = Console(highlight=False, emoji=False, markup=False)
    looks = _looks(source, interval)
    first = next(looks)  # what keeps it from looking at all is told on the screen that stays
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(page(first, source.url, _alarms(first), lively=True), refresh=True)
        for seen in looks:
            live.update(page(seen, source.url, _alarms(seen), lively=True), refresh=True)


def _alarms(looks: "Sequence[Look]") -> "tuple[Alarm, ...]":
    from vlfit.plan.alarms import Limits, alarms

    server = looks[-1].server
    return alarms([look.sample for look in looks], server.limits if server else Limits())
