"""``vlfit status``, ``stop``, ``sleep`` and ``wake``: servers that run on this computer.

Each server leaves a small file for as long as it runs, by which these commands, ``top`` and ``--server auto``
find it. ``sleep`` and ``wake`` also reach servers elsewhere.
"""

import json
import logging
import math
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from vlfit.cli.options import CommandOptions, takes_options
from vlfit.cli.printing import Printer, wrap
from vlfit.errors import RemoteError, ServerUnreachable, UsageError
from vlfit.units import KIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from vlfit.settings import Settings

log = logging.getLogger("vlfit.server")

AUTO_SERVER = "auto"  # as --server or VLFIT_SERVER: the one that runs on this computer
MAX_RECORD_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server on this computer that is ready or restarting. ``since``: when it became ready, in Unix time.

    ``began``: start time of the process from /proc/PID/stat, which tells a reused process id; None: unknown.
    ``drain``: seconds that requests may run on after SIGTERM.
    """

    url: str
    model: str
    pid: int
    began: str | None
    since: float
    drain: float

    @property
    def alive(self) -> bool:
        """Whether the process still runs: its id exists and is not another process's now."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # another user's process
        return process_start(self.pid) == self.began


def records_folders() -> list[Path]:
    """Folders of this user's server records. A server writes to the first that it can; readers look in all.

    The session's runtime folder, if there is one, is in RAM and may be full; the others are on disk.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    folders = [cache / "vlfit" / "servers", state / "vlfit" / "servers"]
    return [Path(runtime) / "vlfit", *folders] if runtime else folders


@contextmanager
def record_server(
    url: str,
    model: str,
    drain: float,
    pid: int | None = None,
    keep_record: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Keep a record of a running server for the length of the block; only log it if that cannot be written.

    ``drain``: seconds that requests may run on after SIGTERM. ``pid``: process to signal, as of a supervisor;
    None: this process. ``keep_record``: called at the end of the block; True keeps the record for the next
    worker of that supervisor.
    """
    pid = pid or os.getpid()
    record = ServerRecord(url, model, pid, process_start(pid), time.time(), drain)
    _write_record(record)
    try:
        yield
    finally:
        if not keep_record():
            delete_record(record.pid)


def _write_record(record: ServerRecord) -> None:
    """Write ``record`` into the first folder that takes it; log a warning if none does."""
    failures = []
    for folder in records_folders():
        path = folder / f"{record.pid}.json"
        temporary = path.with_suffix(".new")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.write_text(json.dumps(asdict(record)), "utf-8")
            temporary.replace(path)
            return
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            failures.append(f"{path}: {error.strerror}")
    log.warning(
        "vlfit status and stop will not find this server: its record cannot be written to %s",
        ", ".join(failures),
    )


def delete_record(pid: int) -> None:
    """Delete the record of the server with the process id ``pid``, if there is one."""
    for folder in records_folders():
        with suppress(OSError):
            (folder / f"{pid}.json").unlink()


def running_servers() -> list[ServerRecord]:
    """Servers recorded on this computer that still run, oldest first. Deletes the records of dead ones."""
    found: dict[int, ServerRecord] = {}
    for path in (path for folder in records_folders() for path in folder.glob("*.json")):
        record = _read_record(path)
        if record is None:
            continue
        if record.alive:
            found.setdefault(record.pid, record)
        else:
            with suppress(OSError):
                path.unlink()
    return sorted(found.values(), key=lambda record: record.since)


def _read_record(path: Path) -> ServerRecord | None:
    """The record in ``path``, or None for anything else: a FIFO, another program's file, a broken record."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            record = ServerRecord(**json.loads(file.read(MAX_RECORD_BYTES)))
        return record if _is_sound(record) else None
    except (OSError, ValueError, TypeError, RecursionError, OverflowError):
        return None


def _is_sound(record: ServerRecord) -> bool:
    """Whether the fields have their types. A signal to process 0 or -1 would go to many processes."""
    return (
        isinstance(record.url, str)
        and record.url.startswith(("http://", "https://"))
        and isinstance(record.model, str)
        and type(record.pid) is int
        and 0 < record.pid < 2**31
        and isinstance(record.began, str | None)
        and all(
            isinstance(each, int | float) and math.isfinite(each) for each in (record.since, record.drain)
        )
    )


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; None without /proc, and for dead processes."""
    try:
        # The program's name, in brackets, may hold anything; the start time is the 20th field after it.
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else facts[18]
    except (OSError, IndexError):
        return None


STATUS_TIMEOUT = 2.0  # seconds
EXIT_SECONDS = 10.0  # after --drain: to free the GPU and exit

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

Port = Annotated[
    int | None, typer.Option(metavar="N", help="Port of the server, if several run.", show_default=False)
]


ModelName = Annotated[
    str | None,
    typer.Option("--name", metavar="MODEL", help="One of the server's models.", show_default=False),
]


@takes_options("json", json="Print JSON, one line per server.")
def status(port: Port = None, *, options: CommandOptions) -> None:
    """List your running servers.

    Prints URL, model, requests and memory of each on this computer. With --json: nothing if none runs.
    """
    from vlfit.settings import read_settings

    settings = read_settings()
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    found = running_servers_on(port)
    printer = Printer(json=options.json)
    if not found:
        _say_none_running(printer, port, as_json=options.json)
    for record in found:
        facts = _status(record, key)
        if options.json:
            printer.data({**asdict(record), "status": facts})
        else:
            printer.line(wrap(_status_line(record, facts), f"{record.url}  "))
            for line in _model_lines(facts):
                printer.line(wrap(line, "  "))


def stop(
    port: Port = None,
    all_servers: Annotated[bool, typer.Option("--all", help="Stop all of them.")] = False,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Cancel running requests instead of letting them finish for up to --drain."
        ),
    ] = False,
) -> None:
    """Stop a server.

    It refuses new requests, finishes running ones, and frees its memory.
    """
    found = running_servers_on(port)
    if len(found) > 1 and not all_servers:
        raise _several(found, "Choose one with --port, or use --all.")
    printer = Printer()
    if not found:
        _say_none_running(printer, port, as_json=False)
    for record in found:
        _stop(record, now=now)
        printer.line(wrap(f"stopped: {record.model} at {record.url}"))


def _stop(record: ServerRecord, *, now: bool) -> None:
    with suppress(ProcessLookupError):
        # SIGINT cancels requests, SIGTERM drains.
        os.kill(record.pid, signal.SIGINT if now else signal.SIGTERM)
    limit = time.monotonic() + (0 if now else record.drain) + EXIT_SECONDS
    while record.alive:
        if time.monotonic() > limit:
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _status(record: ServerRecord, key: str) -> dict[str, Any] | None:
    """Status of a server, or of its supervisor while it restarts; None without an answer."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, RecursionError):
        # No proxy: it is this computer.
        answer = httpx.get(
            f"{record.url}/v1/vlfit/status", headers=headers, timeout=STATUS_TIMEOUT, trust_env=False
        )
        if answer.status_code == 200:
            facts: dict[str, Any] = answer.json()
            return facts if isinstance(facts["state"], str) else None
        if answer.status_code == 503 and answer.json()["error"]["code"] == "engine_died":
            return {"state": "restarting"}
    return None


def _status_line(record: ServerRecord, facts: dict[str, Any] | None) -> str:
    """What ``vlfit status`` prints of a server after its URL."""
    up = format_seconds(max(time.time() - record.since, 0.0))
    line = f"{record.model}  process {record.pid}, up {up}"
    if facts is None:
        return f"{line}, no status (does it need a key? set VLFIT_API_KEY)"
    line += f", {facts['state']}"
    with suppress(KeyError, TypeError, ValueError):
        requests, held = facts["requests"], facts["memory"]["held"]
        line += f", {requests['running']} running, {requests['waiting']} waiting"
        line += f", holds {format_bytes(held)}" if held else ""
    return line


def _model_lines(facts: dict[str, Any] | None) -> list[str]:
    """A line for each of a server's models, if there are several: state, requests, RAM that it sleeps in."""
    lines = []
    with suppress(KeyError, TypeError, ValueError):
        for row in (facts or {}).get("models") or ():
            line = f"{row['model']}  {row['state']}"
            if row["running"] or row["waiting"]:
                line += f", {row['running']} running, {row['waiting']} waiting"
            lines.append(line + (f", {format_bytes(row['ram'])} of RAM" if row["ram"] else ""))
    return lines


def running_servers_on(port: int | None) -> list[ServerRecord]:
    """Those of ``running_servers`` that listen on ``port``, or all if it is None; may be empty."""
    return [record for record in running_servers() if port is None or record.url.endswith(f":{port}")]


def _say_none_running(printer: Printer, port: int | None, *, as_json: bool) -> None:
    """Print that no server runs, on stdout: an answer, not an error. As JSON it is no output."""
    if as_json:
        return
    text = "no server is running on this computer (vlfit serve starts one)"
    if port is not None:
        text = f"no server of yours is running on port {port} (vlfit status lists all)"
    printer.line(wrap(text))


def _several(found: list[ServerRecord], hint: str) -> UsageError:
    where = "".join(f"\n  {record.url}  {record.model}" for record in found)
    return UsageError(f"{len(found)} servers are running:{where}", hint)


def server_url(
    settings: "Settings", port: int | None = None, *, hint: str = "Choose one with --port."
) -> str:
    """URL of the server that ``--server`` names; else of the one on ``port``; else of the only one running.

    ``port`` None: VLFIT_PORT, if set. If no such server is recorded, an address on this computer is guessed
    from ``settings`` and ``port``, since servers in containers leave no record: nothing may listen there.
    Raises ``UsageError`` with ``hint`` if several run.
    """
    from vlfit.cli.watcher import local_server_url

    named = settings.server if settings.server != AUTO_SERVER else None
    if named is not None:
        return named
    if port is None and "port" in settings.model_fields_set:
        port = settings.port
    found = running_servers_on(port)
    if len(found) > 1:
        raise _several(found, hint)
    return found[0].url if found else local_server_url(settings.host, settings.port if port is None else port)


def check_runs(url: str) -> None:
    """Raise ``ServerUnreachable`` if nothing listens at ``url``, which was found and not typed."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_SECONDS).close()
    except OSError:
        raise ServerUnreachable(
            "no server is running on this computer",
            "Start one with `vlfit serve`, or leave --server and VLFIT_SERVER out to load the model here.",
        ) from None


def server_to_watch(url: str | None, port: int | None) -> tuple[str, str | None, bool]:
    """URL and API key of the server to watch, and whether it was named by URL.

    A typed ``port`` wins over VLFIT_SERVER. Raises ``UsageError`` if ``url`` and ``port`` were both typed, or
    if several servers run and none is named.
    """
    from vlfit.settings import read_settings

    if url is not None and port is not None:
        raise UsageError(f"--url {url} and --port {port} both name a server", "Leave one of the two out.")
    settings = read_settings(server=AUTO_SERVER if port is not None else url)
    key = settings.api_key.get_secret_value() if settings.api_key else None
    return server_url(settings, port), key, settings.server not in (None, AUTO_SERVER)


# --- sleep and wake ---------------------------------------------------------------------------------------

CONNECT_SECONDS = 5.0

SLEEP_EXAMPLES = """\b
Examples:
  vlfit sleep
  vlfit sleep --park files
  vlfit sleep --name 2B-FP8
  vlfit sleep --port 8001
  vlfit sleep --url http://192.168.1.20:8000
  curl -X POST http://127.0.0.1:8000/v1/vlfit/sleep
"""

WAKE_EXAMPLES = """\b
Examples:
  vlfit wake
  vlfit wake --url http://192.168.1.20:8000
  curl -X POST http://127.0.0.1:8000/v1/vlfit/wake
"""

_ANSWER_JSON = "Print the server's answer, in bytes and seconds."


@takes_options("url", "park", "json", json=_ANSWER_JSON)
def sleep(
    park: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Where weights wait: ram, files (read again on waking, needs no RAM), or auto (RAM if there"
            " is enough).",
        ),
    ] = "auto",
    name: ModelName = None,
    port: Port = None,
    *,
    options: CommandOptions,
) -> None:
    """Put a server to sleep: it frees the GPU.

    Weights wait in RAM; only the CUDA context stays on the GPU. Accepted requests are answered first. The
    next request or `vlfit wake` wakes it; /health, /metrics and `vlfit top` do not.
    """
    if park not in ("auto", "ram", "files"):
        raise UsageError(f"--park is {park!r}", "Use auto, ram or files.")
    printer = Printer(json=options.json)
    facts = _post("sleep", options.url, port, {"park": park, **_named(name)})
    if facts is None:
        _say_none_running(printer, port, as_json=options.json)
        return
    if facts["state"] != "asleep":
        raise RemoteError("the server is awake: a request woke it before it slept", "Try again.")
    if options.json:
        printer.data(facts)
        return
    slept = facts["sleep"]
    where = f"{format_bytes(slept['ram'])} of RAM" if slept["ram"] else "their files"
    after = f"after {format_seconds(slept['seconds'])}" if facts["changed"] else "already"
    printer.line(f"asleep {after}: {format_bytes(slept['freed'])} freed, the weights are in {where}")


@takes_options("url", "json", json=_ANSWER_JSON)
def wake(name: ModelName = None, port: Port = None, *, options: CommandOptions) -> None:
    """Wake a sleeping server before a request does.

    If other programs have the memory now, prints how much is missing and stays asleep (exit code 1).
    """
    printer = Printer(json=options.json)
    facts = _post("wake", options.url, port, _named(name))
    if facts is None:
        _say_none_running(printer, port, as_json=options.json)
        return
    if options.json:
        printer.data(facts)
        return
    printer.line(f"awake after {format_seconds(facts['seconds'])}" if facts["changed"] else "awake already")


def _named(name: str | None) -> dict[str, str]:
    return {} if name is None else {"model": name}


def _post(action: str, url: str | None, port: int | None, body: dict[str, str]) -> dict[str, Any] | None:
    """POST to the server and check its answer; None if no server was named and none runs here.

    No read timeout: running requests finish first.
    """
    import httpx

    from vlfit.backends.openai_replies import reply_error
    from vlfit.backends.server_url import api_base_url, translate_httpx_errors
    from vlfit.server.server_settings import is_loopback

    where, key, is_named = server_to_watch(url, port)
    base = api_base_url(where)
    try:
        with translate_httpx_errors(base):
            answer = httpx.post(
                f"{base}/vlfit/{action}",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                # A proxy's 127.0.0.1 is another computer.
                trust_env=not is_loopback(urlsplit(base).hostname or ""),
            )
    except ServerUnreachable:
        if is_named:
            raise
        return None
    unknown_model = answer.status_code == 404 and '"model_not_found"' in answer.text
    if answer.status_code not in (200, 404, 405) or unknown_model:
        raise reply_error(answer.status_code, answer.text)
    try:
        facts: dict[str, Any] = answer.json()
        is_valid = facts["state"] in ("asleep", "ready") and "seconds" in facts
    except (ValueError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise RemoteError(
            f"the server at {base} does not support {action}",
            "It is another program or an older vlfit; --url names another server.",
        )
    return facts
