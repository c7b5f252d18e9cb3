"""All that a program says, kept in a file for people and in memory for the doctor.

Knows: where logs lie, that a server may talk for weeks, and that a disk may be full. Does not know what any
line means (``phases.py``, ``memory_lines.py``).
"""

import os
import threading
import time
from collections import deque
from io import FileIO
from pathlib import Path

from vlfit.errors import UsageError

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
