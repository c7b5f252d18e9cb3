"""``vlfit top``: GPU memory line by line beside the plan, requests and speed, until Ctrl-C."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.options import CommandOptions, takes_options
from vlfit.cli.printing import Printer, has_columns, is_dumb
from vlfit.cli.servers import Port, server_to_watch
from vlfit.cli.signals import terminated_as_interrupted

if TYPE_CHECKING:
    from vlfit.cli.watcher import Snapshot, Watcher
    from vlfit.plan.alarms import Alarm


EXAMPLES = """\b
Examples:
  vlfit top
  vlfit top --port 8001
  vlfit top --url http://192.168.1.20:8000 --interval 5
  vlfit top --once --json
  vlfit top --json --interval 10 >> top.jsonl
"""

MAX_SNAPSHOTS = 3600  # alarms and curves need minutes


@takes_options(
    *("url", "interval", "once", "json"),
    url="Server to watch. Its key goes into VLFIT_API_KEY.",
    json="Print JSON, one line per update, in bytes and seconds.",
)
def top(
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between updates."),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one page and exit.")] = False,
    port: Port = None,
    *,
    options: CommandOptions,
) -> None:
    """Watch GPU memory and a running server.

    Shows each line of the server's ledger, planned and held. Without a server it shows who holds the GPU.
    Watching never wakes or slows the server. Warns when memory spills into RAM, grows without requests, or
    when other programs eat into the reserve. Ctrl-C exits with 0. If stdout is not a terminal, prints one
    line per sample, and exits after the first if there is neither a server nor a GPU.
    """
    from vlfit.cli.watcher import Watcher

    where, key, is_named = server_to_watch(options.url, port)
    printer = Printer(json=options.json)
    with Watcher(where, key, named=is_named) as watcher:
        if once:
            _once(watcher, interval, printer, as_json=options.json)
            return
        try:
            with terminated_as_interrupted():
                if options.json or not sys.stdout.isatty() or is_dumb():
                    _lines(watcher, interval, printer, as_json=options.json)
                else:
                    _screen(watcher, interval)
        except KeyboardInterrupt:
            return


def _once(watcher: "Watcher", interval: float, printer: Printer, *, as_json: bool) -> None:
    from vlfit.cli.pages.top_page import page, to_json

    snapshots = [watcher.snapshot()]
    if snapshots[0].server is not None:
        time.sleep(interval)
        snapshots.append(watcher.snapshot())
    found = _alarms(snapshots)
    if as_json:
        printer.data(to_json(snapshots, watcher.url, found))
        return
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    on_terminal = sys.stdout.isatty()
    if not on_terminal and not has_columns():
        console.width = max(console.width, 120)  # no truncation in files
    console.print(page(snapshots, watcher.url, found, on_terminal=on_terminal))


def _snapshots(watcher: "Watcher", interval: float) -> "Iterator[Sequence[Snapshot]]":
    """Yield all snapshots so far after each new one, every ``interval`` seconds."""
    snapshots: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
    following = time.monotonic()
    while True:
        snapshots.append(watcher.snapshot())
        yield snapshots
        # A snapshot that takes longer than the interval is not caught up.
        following = max(following + interval, time.monotonic())
        time.sleep(following - time.monotonic() if following > time.monotonic() else 0)


def _lines(watcher: "Watcher", interval: float, printer: Printer, *, as_json: bool) -> None:
    from vlfit.cli.pages.top_page import log_line, to_json

    warned: set[str] = set()
    for snapshots in _snapshots(watcher, interval):
        found = _alarms(snapshots)
        is_first = len(snapshots) == 1
        if as_json:
            printer.data(to_json(snapshots, watcher.url, found))
        else:
            if is_first and snapshots[-1].advice:
                printer.note(f"{snapshots[-1].trouble}{snapshots[-1].advice}")
            printer.line(log_line(snapshots, found))
        if is_first and snapshots[-1].server is None and not snapshots[-1].gpus:
            return  # nothing to follow
        if as_json:
            continue
        for alarm in found:
            if alarm.id not in warned:
                printer.note(f"warning: {alarm.what}\n  -> {alarm.hint}")
        warned = {alarm.id for alarm in found}


def _screen(watcher: "Watcher", interval: float) -> None:
    """Show the page on the terminal's alternate screen."""
    from rich.console import Console
    from rich.live import Live

    from vlfit.cli.pages.top_page import page

    console = Console(highlight=False, emoji=False, markup=False)
    snapshots = _snapshots(watcher, interval)
    first = next(snapshots)  # errors of the first snapshot go to the main screen
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(page(first, watcher.url, _alarms(first), on_terminal=True), refresh=True)
        for seen in snapshots:
            live.update(page(seen, watcher.url, _alarms(seen), on_terminal=True), refresh=True)


def _alarms(snapshots: "Sequence[Snapshot]") -> "tuple[Alarm, ...]":
    from vlfit.plan.alarms import Limits, active_alarms

    server = snapshots[-1].server
    return active_alarms([snapshot.sample for snapshot in snapshots], server.limits if server else Limits())
