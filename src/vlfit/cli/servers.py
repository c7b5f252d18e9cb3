"""``vlfit status`` and ``vlfit stop``: the servers on this computer, and the end of one.

Knows: how to ask a server and to signal its process. Does not know: what a status means
(``server/admin/status.py``).
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from vlfit.cli.printing import Printer
from vlfit.errors import RemoteError, ServerUnreachable, UsageError
from vlfit.units import format_bytes, format_seconds

# Which servers run on this computer: each leaves a small file for as long as it does.
#
# Knows: where the files are, and whether the process of one is still there. Does not know: HTTP.


@dataclass(frozen=True, slots=True)
class Record:
    """A server that is ready, or is being started again. ``began``: when its process did, as the system
    counts (None: it does not tell); a number alone may by now be another's. ``drain``: seconds that it lets
    requests go on after SIGTERM.
    """

    url: str
    model: str
    pid: int
    began: str | None
    since: float
    drain: float

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # there, but another user's
        return began(self.pid) == self.began


def folder() -> Path:
    """For this user alone, and gone with the session where the system has such a place."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "vlfit"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlfit" / "servers"


@contextmanager
def recorded(
    url: str,
    model: str,
    drain: float,
    pid: int | None = None,
    goes_on: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """``model`` is served at ``url`` for as long as the block lasts, by this process or the one that keeps it
    (``pid``), and longer if at its end ``goes_on`` says that another process takes over. Where no file can be
    left, none is.
    """
    pid = pid or os.getpid()
    record = Record(url, model, pid, began(pid), time.time(), drain)
    place = folder() / f"{record.pid}.json"
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = place.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record)), "utf-8")
        fresh.replace(place)
    try:
        yield
    finally:
        if not goes_on():
            forget(record.pid)


def forget(pid: int) -> None:
    """The server of this process, if it is known as one, runs no more."""
    with suppress(OSError):
        (folder() / f"{pid}.json").unlink()


def servers() -> list[Record]:
    """Those that run, the oldest first. What others left behind is taken away."""
    found = []
    for place in folder().glob("*.json"):
        try:
            record = Record(**json.loads(place.read_text("utf-8")))
            alive = record.alive
        except (OSError, ValueError, TypeError):
            continue  # being written, or not ours
        if alive:
            found.append(record)
        else:
            with suppress(OSError):
                place.unlink()
    return sorted(found, key=lambda record: record.since)


def began(pid: int) -> str | None:
    """When a process began, in the system's own count; None where there is no /proc, or no such process: one
    that has ended, and whose parent has not asked how, is none.
    """
    try:
        # The name of a program, in brackets, may hold anything; the 20th field after it is the time.
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else facts[18]
    except (OSError, IndexError):
        return None


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


# ``vlfit sleep`` and ``vlfit wake``: a running server gives its GPU memory back, and takes it again.
#
# Knows: how to ask, and what a person is told. Does not know: what sleeping is
# (``engine/memory/sleep.py``).


CONNECT_SECONDS = 5.0

SLEEP_EXAMPLES = """\b
Examples:
  vlfit sleep
  vlfit sleep --park files
  vlfit sleep --url http://192.168.1.20:8000
  curl -X POST http://127.0.0.1:8000/v1/vlfit/sleep
"""

WAKE_EXAMPLES = """\b
Examples:
  vlfit wake
  vlfit wake --url http://192.168.1.20:8000
  curl -X POST http://127.0.0.1:8000/v1/vlfit/wake
"""

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The server; its key goes into VLFIT_API_KEY.  [default: the one on this computer; env"
        " VLFIT_SERVER]",
        show_default=False,
    ),
]
AnswerJson = Annotated[
    bool, typer.Option("--json", help="Print what the server answers, in bytes and seconds.")
]


def sleep(
    url: Url = None,
    park: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Where weights wait: ram, files (to be read again, which takes no RAM), or auto: RAM if"
            " there is enough.",
        ),
    ] = "auto",
    as_json: AnswerJson = False,
) -> None:
    """Let a running `vlfit serve` give the GPU back: weights wait in RAM, all but the CUDA context is freed.

    Requests that run or wait are answered first. The next request wakes the server, or `vlfit wake`; looking
    at /health, at metrics or with `vlfit top` does not.
    """
    if park not in ("auto", "ram", "files"):
        raise UsageError(f"--park is {park!r}", "use auto, ram or files")
    facts = _post("sleep", url, {"park": park})
    if facts["state"] != "asleep":
        raise RemoteError("the server is awake: it was woken while it waited to sleep", "try again")
    printer = Printer(json=as_json)
    if as_json:
        printer.data(facts)
        return
    told = facts["sleep"]
    where = f"{format_bytes(told['ram'])} of RAM" if told["ram"] else "their files"
    after = f"after {format_seconds(told['seconds'])}" if facts["changed"] else "already"
    printer.line(f"asleep {after}: {format_bytes(told['freed'])} given back, the weights are in {where}")


def wake(url: Url = None, as_json: AnswerJson = False) -> None:
    """Let a running `vlfit serve` that sleeps take its GPU memory again, before a request does.

    If others have the memory by now it says how much is missing, and sleeps on (exit code 1).
    """
    facts = _post("wake", url, {})
    printer = Printer(json=as_json)
    if as_json:
        printer.data(facts)
        return
    printer.line(f"awake after {format_seconds(facts['seconds'])}" if facts["changed"] else "awake already")


def _post(what: str, url: str | None, body: dict[str, str]) -> dict[str, Any]:
    """The server's answer, checked. It waits for as long as the server does: requests may run."""
    import httpx

    from vlfit.backends.openai_replies import error_from
    from vlfit.backends.server_url import base_url, failures_in_words
    from vlfit.cli.top import default_url
    from vlfit.server.server_settings import is_loopback
    from vlfit.settings import read_settings

    settings = read_settings(server=url)
    base = base_url(settings.server or default_url(settings.host, settings.port))
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    with failures_in_words(base):
        answer = httpx.post(
            f"{base}/vlfit/{what}",
            json=body,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=not is_loopback(urlsplit(base).hostname or ""),  # a proxy's 127.0.0.1 is another
        )
    if answer.status_code not in (200, 404, 405):
        raise error_from(answer.status_code, answer.text)
    try:
        facts: dict[str, Any] = answer.json()
        known = facts["state"] in ("asleep", "ready") and "seconds" in facts
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise RemoteError(
            f"a server answers at {base}, but it knows no {what}",
            "another program, or an older vlfit; --url names another server",
        )
    return facts
