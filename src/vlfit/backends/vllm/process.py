"""A program that runs for us with all that it starts: started, listened to, and gone when it is stopped.

Knows: pipes and processes. The program runs below a guard (``guard.py``), which ends it and all its children
even if this process is killed. Does not know that the program is vLLM. Needs no main thread and no signals.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path

from vlfit.errors import UsageError

# All that a program says, kept in a file for people and in memory for the doctor.
#
# Knows: where logs lie, that a server may talk for weeks, and that a disk may be full. Does not know what
# any line means (``phases.py``, ``backends/vllm/starting.py``).


KEPT_FILES = 20  # of earlier starts
MOST_FILE = 32 * 2**20  # bytes; then the file goes on in a new one, and the one before stays beside it
FIRST_BYTES, LAST_BYTES = 2**18, 2**20  # in memory; a start that fails says some hundred thousand


def folder() -> Path:
    """``$XDG_STATE_HOME/vlfit/vllm``."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / "vllm"


class Log:
    """A new file, for this user's eyes alone. Raises ``UsageError`` where none can be made.

    ``head`` is written at its top: the command, in the words of a shell. Any thread may write, one at a time.
    """

    def __init__(self, head: str, place: Path | None = None) -> None:
        place = place or folder()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.path = place / f"{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}.log"
        self._first, self._rest, self._rest_bytes = bytearray(), deque[bytes](), 0
        self._lock = threading.Lock()
        self.failure = ""  # why the file ends early, "" if it does not
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._opened()
            self._written = self._file.write(f"# {head}\n".encode())
        except OSError as error:
            raise UsageError(
                f"cannot write vLLM's log to {self.path}: {error.strerror}",
                "make room there, or set XDG_STATE_HOME to a folder that can be written",
            ) from None
        _prune(place)

    def write(self, data: bytes) -> None:
        """Keep ``data``. A file that cannot take it ends there, and ``failure`` says why."""
        with self._lock:
            self._remember(data)
            if self.failure or self._file.closed:
                return
            try:
                if self._written > MOST_FILE:
                    self._file.close()
                    self.path.replace(self.path.with_suffix(".1.log"))
                    self._file, self._written = self._opened(), 0
                self._written += self._file.write(data)
            except OSError as error:
                self.failure = error.strerror or str(error)

    @property
    def text(self) -> bytes:
        """What was said first and last, as much as is in memory."""
        with self._lock:
            return bytes(self._first) + b"".join(self._rest)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _opened(self) -> FileIO:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return FileIO(descriptor, "w")

    def _remember(self, data: bytes) -> None:
        room = FIRST_BYTES - len(self._first)
        if room > 0:
            self._first += data[:room]
            data = data[room:]
        if not data:
            return
        self._rest.append(data)
        self._rest_bytes += len(data)
        while self._rest_bytes > LAST_BYTES and len(self._rest) > 1:
            self._rest_bytes -= len(self._rest.popleft())


def _prune(place: Path) -> None:
    """Only the latest logs stay: their names sort by time."""
    logs = sorted(each.name for each in place.glob("*.log"))
    for name in logs[:-KEPT_FILES]:
        try:
            (place / name).unlink()
        except OSError:
            continue  # another process was faster, or it is not ours to delete


# SIGINT lets vLLM end in order, which takes it four seconds; what still runs then gets SIGTERM, then SIGKILL.
GENTLE_SECONDS, FIRM_SECONDS = 8.0, 3.0
_BEYOND_SECONDS = 3.0  # for the guard itself
_LEAK_SECONDS = 1.0  # for what was still to be heard
_LONGEST_LINE = 2**16
_VMSTAT = Path("/proc/vmstat")


class Guarded:
    """A program below its guard. ``on_line`` hears each line that it says, without its end, in a thread.

    Raises ``UsageError`` where the system cannot do this.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Log,
        on_line: Callable[[str], None],
        *,
        gentle: float = GENTLE_SECONDS,
        firm: float = FIRM_SECONDS,
    ) -> None:
        if not hasattr(os, "fork"):
            raise UsageError("vLLM does not run on this system", "use Linux, or WSL2 on Windows")
        self._log, self._on_line = log, on_line
        self._limit = gentle + firm + _BEYOND_SECONDS
        guard = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
        self._process = subprocess.Popen(
            [*guard, str(gentle), str(firm), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C in a terminal reaches vlfit alone, which ends it in order
        )
        self._stopping = threading.Lock()
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, name="vllm-log", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await, name="vllm-end", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the guard, whose session all of them are in."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended and all that it said was heard."""
        return self._over.is_set()

    @property
    def code(self) -> int:
        """What it ended with, as shells count: 128 and the number of a signal, if one ended it."""
        code = self._process.returncode or 0
        return code if code >= 0 else 128 - code

    def wait(self, seconds: float | None) -> bool:
        """Wait until it has ended, or for ``seconds`` (None: for as long as it takes); whether it has."""
        return self._over.wait(seconds)

    def resident(self) -> int | None:
        """Bytes of RAM that all of it holds, what several share counted once; None where nothing tells."""
        held = [_share_of_ram(pid) for pid in _members(self.pid)]
        known = [size for size in held if size is not None]
        return sum(known) if known else None

    def stop(self, *, gently: bool = True) -> None:
        """End it, and come back when nothing of it is left. Any thread may call it, more than once.

        ``gently``: it may bring its things in order first; a start that nobody wants any more has none. An
        interrupt (Ctrl-C) while this waits ends it at once, and goes on to whoever called.
        """
        with self._stopping:
            if self._over.is_set():
                return
            self._tell(b"s" if gently else b"t")
            try:
                gone = self._over.wait(self._limit)
            except BaseException:
                self._tell(b"k")
                self._over.wait(_BEYOND_SECONDS)
                raise
            if not gone:
                self._kill_session()
                self._over.wait(_BEYOND_SECONDS)

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone already
            self._process.stdin.write(word)
            self._process.stdin.flush()

    def _read(self) -> None:
        """Everything it says until it and its children have closed their end."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with self._process.stdout:
            self._hear(descriptor)

    def _hear(self, descriptor: int) -> None:
        rest = b""
        while data := os.read(descriptor, 2**16):
            self._log.write(data)
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-_LONGEST_LINE:]
            for line in lines:
                if line.strip():
                    self._on_line(line[:_LONGEST_LINE].decode("utf-8", "replace"))
        if rest.strip():
            self._on_line(rest.decode("utf-8", "replace"))

    def _await(self) -> None:
        """Until the guard has ended, which is when all is over; or was killed itself."""
        self._process.wait()
        if self._process.returncode < 0:
            self._kill_session()
        # Only somebody who fled from a killed guard could still hold the other end.
        self._reader.join(_LEAK_SECONDS)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._log.close()
        self._over.set()

    def _kill_session(self) -> None:
        """The last resort: all groups of the session that the guard led."""
        leader = (
            [] if self._process.returncode is not None else [self.pid]
        )  # else another may have its number
        for pid in [*leader, *_members(self.pid)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def killed_for_ram() -> int | None:
    """How many programs the kernel has ended for want of RAM since this computer started; None where it does
    not count (``oom_kill`` of proc(5): vmstat, since Linux 4.13).
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in _VMSTAT.read_text("ascii", "replace").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _share_of_ram(pid: int) -> int | None:
    """Of pages that others have too only a part (proc(5): Pss); None where the system does not tell."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def _members(leader: int) -> list[int]:
    """All processes of a session but the one that leads it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            words = entry.read_text("ascii", "replace").rpartition(")")[2].split()
            if int(words[3]) == leader and int(entry.parent.name) != leader:
                found.append(int(entry.parent.name))
    return found
