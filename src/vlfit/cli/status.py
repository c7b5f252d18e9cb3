"""``vlfit status`` and ``vlfit stop``: the servers on this computer, and the end of one.

Knows: how to ask a server and to signal its process. Does not know: what a status means
(``server/status.py``).
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from vlfit.cli.printing import Printer
from vlfit.cli.records import Record, servers
from vlfit.errors import ServerUnreachable, UsageError
from vlfit.units import format_bytes, format_seconds

ASKING_SECONDS = 2.0
GIVING_BACK_SECONDS = 10.0  # beside what requests are granted: a card's memory is freed, a process ends

STATUS_EXAMPLES = """\b
Examples:
  vlfit status
  vlfit status --port 8001
  vlfit status --json
  VLFIT_API_KEY=secret vlfit status
"""

STOP_EXAMPLES = """\b
Examples:
  vlfit stop
  vlfit stop --port 8001
  vlfit stop --all
"""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one line for each server.")]


Port = Annotated[
    int | None, typer.Option(metavar="N", help="That of the server, if several run.", show_default=False)
]


def status(port: Port = None, as_json: Json = False) -> None:
    """Show the servers of this user on this computer: where, which model, what they do and hold.

    Exit code 0 if at least one runs (on --port, if that is given), else 1.
    """
    from vlfit.settings import read_settings

    settings = read_settings()
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    found = _servers(port)
    printer = Printer(json=as_json)
    for record in found:
        facts = _ask(record, key)
        if as_json:
            printer.data({**asdict(record), "status": facts})
        else:
            printer.line(_line(record, facts))


def stop(
    port: Port = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    now: Annotated[
        bool,
        typer.Option("--now", help="Cut what runs, instead of letting it finish for the server's --drain."),
    ] = False,
) -> None:
    """End a server on this computer: no new requests, running ones finish, the memory is given back."""
    found = _servers(port)
    if len(found) > 1 and not everything:
        where = ", ".join(record.url for record in found)
        raise UsageError(f"{len(found)} servers run: {where}", "name one with --port, or say --all")
    printer = Printer()
    for record in found:
        _end(record, now=now)
        printer.line(f"stopped: {record.model} at {record.url}")


def _end(record: Record, *, now: bool) -> None:
    with suppress(ProcessLookupError):
        # The way of Ctrl-C is the quick one.
        os.kill(record.pid, signal.SIGINT if now else signal.SIGTERM)
    limit = time.monotonic() + (0 if now else record.drain) + GIVING_BACK_SECONDS
    while record.alive:
        if time.monotonic() > limit:
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _ask(record: Record, key: str) -> dict[str, Any] | None:
    """What the server tells of itself, or who keeps it meanwhile; None if nobody does."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        # Never by a proxy: it is this computer.
        answer = httpx.get(
            f"{record.url}/v1/vlfit/status", headers=headers, timeout=ASKING_SECONDS, trust_env=False
        )
        if answer.status_code == 200:
            facts: dict[str, Any] = answer.json()
            return facts
        if answer.status_code == 503 and answer.json()["error"]["code"] == "engine_died":
            return {"state": "restarting"}
    return None


def _line(record: Record, facts: dict[str, Any] | None) -> str:
    up = format_seconds(max(time.time() - record.since, 0.0))
    line = f"{record.url}  {record.model}  process {record.pid}, up {up}"
    if facts is None:
        return f"{line}, does not tell more (does it ask for a key? VLFIT_API_KEY)"
    line += f", {facts['state']}"
    if "requests" in facts:
        requests, held = facts["requests"], facts["memory"]["held"]
        line += f", {requests['running']} running, {requests['waiting']} waiting"
        line += f", holds {format_bytes(held)}" if held else ""
    return line


def _servers(port: int | None) -> list[Record]:
    """Those that run, or the one on ``port``. Raises ``ServerUnreachable`` if there is none."""
    found = servers()
    if port is not None:
        found = [record for record in found if record.url.endswith(f":{port}")]
    if found:
        return found
    if port is None:
        raise ServerUnreachable("no server of yours runs on this computer", "start one: vlfit serve --daemon")
    raise ServerUnreachable(f"no server of yours runs on port {port}", "`vlfit status` shows those that do")
