"""Which servers run on this computer: each leaves a small file for as long as it does.

Knows: where the files are, and whether the process of one is still there. Does not know: HTTP.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path


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
