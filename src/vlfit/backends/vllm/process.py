"""A child program with its log.

A guard process (``guard.py``) stops it and all that it started, even if this process is killed. Works from
any thread, without signal handlers.
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

KEPT_FILES = 20  # logs of earlier starts
MAX_FILE_BYTES = 32 * 2**20  # then a new file is begun, and the one before is kept beside it
FIRST_BYTES, LAST_BYTES = 2**18, 2**20  # kept in memory; a failed start logs a few hundred kB


def log_folder() -> Path:
    """The folder of vLLM's logs: ``$XDG_STATE_HOME/vlfit/vllm``, by default below ``~/.local/state``."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / "vllm"


class ProcessLog:
    """A program's output, written to a new file that only this user can read; ``path`` is the file's.

    The beginning and the end of the output are also kept in memory (``kept_output``). ``header``: for the
    file's first line. ``folder``: None: ``log_folder()``. Deletes all logs in the folder but the latest
    ``KEPT_FILES``. Any thread may write. ``write_error``: why the file ends early, "" if it does not. Raises
    ``UsageError`` if the file cannot be created.
    """

    def __init__(self, header: str, folder: Path | None = None) -> None:
        folder = folder or log_folder()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}.log"
        self._first, self._rest, self._rest_bytes = bytearray(), deque[bytes](), 0
        self._lock = threading.Lock()
        self.write_error = ""  # why the file ends early, "" if it does not
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._opened()
            self._written = self._file.write(f"# {header}\n".encode())
        except OSError as error:
            raise UsageError(
                f"cannot write vLLM's log to {self.path}: {error.strerror}",
                "Make room there, or set XDG_STATE_HOME to a folder that can be written.",
            ) from None
        _prune(folder)

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises nothing: a failed write sets ``write_error`` and ends the file.

        A file of more than ``MAX_FILE_BYTES`` is renamed to ``.1.log``, and a new one begun.
        """
        with self._lock:
            self._keep_in_memory(data)
            if self.write_error or self._file.closed:
                return
            try:
                if self._written > MAX_FILE_BYTES:
                    self._file.close()
                    self.path.replace(self.path.with_suffix(".1.log"))
                    self._file, self._written = self._opened(), 0
                self._written += self._file.write(data)
            except OSError as error:
                self.write_error = error.strerror or str(error)

    @property
    def kept_output(self) -> bytes:
        """The output in memory: the first 256 KiB and the last MiB, without what came between."""
        with self._lock:
            return bytes(self._first) + b"".join(self._rest)

    def close(self) -> None:
        """Close the file. Further calls have no effect.

        Output that ``write`` gets afterwards is kept in memory alone (``kept_output``), without an error.
        """
        with self._lock:
            self._file.close()

    def _opened(self) -> FileIO:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return FileIO(descriptor, "w")

    def _keep_in_memory(self, data: bytes) -> None:
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
    """Delete all but the latest logs: their names sort by time."""
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
VMSTAT = Path("/proc/vmstat")


class GuardedProcess:
    """A running program under ``guard.py``, which ends it and its children if this process dies.

    The constructor starts the program. ``environment``: the program's whole environment. ``log`` gets its
    output (stdout and stderr), and ``on_line`` each line that is not blank, from a thread; ``log`` is closed
    at the end. For ``stop``: ``sigint_seconds`` from SIGINT to SIGTERM, ``sigterm_seconds`` from SIGTERM to
    SIGKILL. Raises ``UsageError`` on systems without ``fork``.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: ProcessLog,
        on_line: Callable[[str], None],
        *,
        sigint_seconds: float = GENTLE_SECONDS,
        sigterm_seconds: float = FIRM_SECONDS,
    ) -> None:
        if not hasattr(os, "fork"):
            raise UsageError("vLLM does not run on this system", "Use Linux, or WSL2 on Windows.")
        self._log, self._on_line = log, on_line
        self._limit = sigint_seconds + sigterm_seconds + _BEYOND_SECONDS
        guard = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
        self._process = subprocess.Popen(
            [*guard, str(sigint_seconds), str(sigterm_seconds), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C in a terminal reaches vlfit alone, which ends it in order
        )
        self._stopping = threading.Lock()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="vllm-log", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait_for_end, name="vllm-end", daemon=True).start()

    @property
    def pid(self) -> int:
        """The guard's process id, which is also the id of the session of all its processes."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the program has ended and all its output was read."""
        return self._ended.is_set()

    @property
    def exit_code(self) -> int:
        """Exit code as in a shell: 128 plus the signal's number if a signal ended it; 0 while it runs."""
        code = self._process.returncode or 0
        return code if code >= 0 else 128 - code

    def wait(self, seconds: float | None) -> bool:
        """Wait for ``ended``, at most ``seconds`` (None: no limit). Returns whether it has ended."""
        return self._ended.wait(seconds)

    def resident_bytes(self) -> int | None:
        """Bytes of RAM of the program and its children, shared pages counted once; None: unknown."""
        sizes = [_proportional_ram(pid) for pid in _session_pids(self.pid)]
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None

    def stop(self, *, gently: bool = True) -> None:
        """Stop the program and return when none of its processes is left. From any thread, more than once.

        ``gently``: begin with SIGINT, so that the program can shut down; else with SIGTERM. An exception
        meanwhile (KeyboardInterrupt) kills the program at once and is raised again.
        """
        with self._stopping:
            if self._ended.is_set():
                return
            self._send(b"s" if gently else b"t")
            try:
                ended = self._ended.wait(self._limit)
            except BaseException:
                self._send(b"k")
                self._ended.wait(_BEYOND_SECONDS)
                raise
            if not ended:
                self._kill_session()
                self._ended.wait(_BEYOND_SECONDS)

    def _send(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the guard is gone already
            self._process.stdin.write(word)
            self._process.stdin.flush()

    def _read(self) -> None:
        """Read until the program and its children have closed their end of the pipe."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with self._process.stdout:
            self._read_lines(descriptor)

    def _read_lines(self, descriptor: int) -> None:
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

    def _wait_for_end(self) -> None:
        """Wait for the end of the guard: then all processes are gone, unless it was killed itself."""
        self._process.wait()
        if self._process.returncode < 0:
            self._kill_session()
        # Only a process that left a killed guard's session could still hold the pipe open.
        self._reader.join(_LEAK_SECONDS)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._log.close()
        self._ended.set()

    def _kill_session(self) -> None:
        """Last resort: kill every process of the guard's session."""
        leader = (
            [] if self._process.returncode is not None else [self.pid]
        )  # else another may have its number
        for pid in [*leader, *_session_pids(self.pid)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def oom_kill_count() -> int | None:
    """Number of OOM kills by the kernel since boot; None if the system does not count them.

    ``oom_kill`` in /proc/vmstat, since Linux 4.13.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in VMSTAT.read_text("ascii", "replace").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _proportional_ram(pid: int) -> int | None:
    """Proportional set size (proc(5): Pss); None: unknown."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def _session_pids(leader: int) -> list[int]:
    """All processes of a session but its leader."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            words = entry.read_text("ascii", "replace").rpartition(")")[2].split()
            if int(words[3]) == leader and int(entry.parent.name) != leader:
                pids.append(int(entry.parent.name))
    return pids
