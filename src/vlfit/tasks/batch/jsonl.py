"""A file of JSON lines that only grows, and that is whole after a kill at any instant.

A line counts when it is whole; one of ours that a process left unfinished is cut off when the file is opened.
Each line is one write to the system, so what was written survives the end of the process; ``flush`` makes it
survive the end of the machine. Knows nothing of what lines mean.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlfit.errors import CannotWrite, UsageError

_BLOCK = 1 << 16
_KEY_FIRST = '{"key": '
_DECODER = json.JSONDecoder()


class Lines:
    """Opened for appending, made if it is not there. Raises ``CannotWrite``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _in_words(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not path.exists()
            self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = self._mend()
            if fresh:
                sync_folder(path.parent)

    def _mend(self) -> int:
        """End the last line: one that was not finished is cut off, any other lacks its newline only. Gives
        the size then.
        """
        assert self._file is not None
        size = whole = os.fstat(self._file).st_size
        while whole:
            start = max(0, whole - _BLOCK)
            newline = os.pread(self._file, whole - start, start).rfind(b"\n")
            whole = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        if whole == size:
            return size
        if _is_torn(os.pread(self._file, size - whole, whole).decode("utf-8", "surrogateescape")):
            os.ftruncate(self._file, whole)
            return whole
        os.write(self._file, b"\n")
        return size + 1

    def append(self, facts: dict[str, Any]) -> None:
        """Add a line: it is there whole, or (``CannotWrite``) the file is as it was."""
        data = line_of(facts)
        assert self._file is not None
        with _in_words(self.path):
            try:
                written = os.write(self._file, data)
                while written < len(data):  # a disk that fills up takes what it has room for, then refuses
                    written += os.write(self._file, data[written:])
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(data)

    def flush(self) -> None:
        if self._file is not None:
            with _in_words(self.path):
                os.fsync(self._file)

    def close(self) -> None:
        """Flush and let go. May be called twice."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = None


class JsonlSink:
    """Records as JSON lines: a ``Sink``. Raises ``CannotWrite`` for a file that may not be written."""

    def __init__(self, output: Path) -> None:
        self._path = output
        self._lines: Lines | None = None
        if output.exists():
            with _in_words(output):
                os.close(os.open(output, os.O_RDWR | os.O_CLOEXEC))

    def done_keys(self) -> Iterator[str]:
        return keys_in(self._path)

    def open(self) -> None:
        if self._lines is None:
            self._lines = Lines(self._path)

    def write(self, record: dict[str, Any]) -> None:
        self.open()
        assert self._lines is not None
        self._lines.append(record)

    def flush(self) -> None:
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def line_of(facts: dict[str, Any]) -> bytes:
    """One line of JSON, as UTF-8. A file name that is no UTF-8 is written in escapes."""
    try:
        return (json.dumps(facts, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(facts) + "\n").encode()


def keys_in(path: Path) -> Iterator[str]:
    """The ``key`` of every line of ``path``, which need not be there. Raises ``UsageError`` for a line that
    is none of ours.
    """
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            # Ours begin with the key: the rest, a thousand letters or more, need not be read.
            if line.startswith(_KEY_FIRST) and line.endswith("}\n"):
                key = _DECODER.raw_decode(line, len(_KEY_FIRST))[0]
            else:
                key = json.loads(line)["key"]
        except (ValueError, KeyError, TypeError):
            key = None
        if not isinstance(key, str):
            raise UsageError(
                f"line {number} of {path} is no record of a batch: {line.strip()[:80]!r}",
                "was another program at it? Take the line out, or name another file",
            )
        yield key


def records_in(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of ``path`` that is a JSON object; others are passed over."""
    for line in _whole_lines(path):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _whole_lines(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield line
            elif not _is_torn(line):
                yield line + "\n"


def _is_torn(line: str) -> bool:
    """Whether a last line without its newline is one of ours that was being written; after a loss of power
    there may be zeros in place of it. What others wrote is not: nobody may cut that off.
    """
    written = line.lstrip("\0")
    if not _KEY_FIRST.startswith(written[: len(_KEY_FIRST)]):
        return False
    try:
        json.loads(written)
    except ValueError:
        return True
    return False


def sync_folder(folder: Path) -> None:
    """Make names of new files in ``folder`` survive the end of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Within the block a failure of the system is ``CannotWrite``, with the path and what to do."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(
            f"cannot write {path}: {error.strerror}",
            "what was written before is whole: make room, and give the same command again",
        ) from error
