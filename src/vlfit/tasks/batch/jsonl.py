"""Append-only JSON lines that survive a kill at any time.

Each line is a single ``write`` call, so written lines survive the end of the process; ``flush`` makes them
survive a power failure. A line that a killed process left unfinished is cut off when the file is opened.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlfit.errors import CannotWrite, UsageError

_BLOCK = 1 << 16
_KEY_PREFIX = '{"key": '
_DECODER = json.JSONDecoder()


class JsonlFile:
    """A file of JSON lines, open for appending; created, with its folders, if necessary.

    Opening it cuts off a last line that a killed process left unfinished. Raises ``CannotWrite``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _as_cannot_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not path.exists()
            self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = self._repair_end()
            if fresh:
                sync_folder(path.parent)

    def _repair_end(self) -> int:
        """Cut off an unfinished last line, or add a missing newline. Returns the size of the file."""
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

    def append(self, record: dict[str, Any]) -> None:
        """Append ``record`` as one line. Raises ``CannotWrite``, which leaves the file as it was."""
        data = to_line(record)
        assert self._file is not None
        with _as_cannot_write(self.path):
            try:
                written = os.write(self._file, data)
                while written < len(data):  # a full disk takes part of it, then refuses
                    written += os.write(self._file, data[written:])
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(data)

    def flush(self) -> None:
        """Make the lines written so far survive a power failure. Raises ``CannotWrite``."""
        if self._file is not None:
            with _as_cannot_write(self.path):
                os.fsync(self._file)

    def close(self) -> None:
        """Flush and close. Idempotent."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = None


class JsonlSink:
    """A ``Sink`` of JSON lines, in the file ``output``.

    Creating it opens nothing, but raises ``CannotWrite`` if the file exists and is not writable.
    """

    def __init__(self, output: Path) -> None:
        self._path = output
        self._lines: JsonlFile | None = None
        if output.exists():
            with _as_cannot_write(output):
                os.close(os.open(output, os.O_RDWR | os.O_CLOEXEC))

    def done_keys(self) -> Iterator[str]:
        """Keys of all records in the file; none without a file. Raises ``UsageError`` as ``read_keys``."""
        return read_keys(self._path)

    def open(self) -> None:
        """Open or create the file, cutting off an unfinished last line. Idempotent. Raises
        ``CannotWrite``.
        """
        if self._lines is None:
            self._lines = JsonlFile(self._path)

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record`` as one line. Opens the file if needed. Raises ``CannotWrite``."""
        self.open()
        assert self._lines is not None
        self._lines.append(record)

    def flush(self) -> None:
        """Make the records written so far survive a power failure. Raises ``CannotWrite``."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """Flush and close the file, if it is open. Idempotent."""
        if self._lines is not None:
            self._lines.close()


def to_line(record: dict[str, Any]) -> bytes:
    """``record`` as a line of JSON in UTF-8, newline included; in ASCII if it contains lone surrogates."""
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record) + "\n").encode()


def read_keys(path: Path) -> Iterator[str]:
    """The ``key`` of every line of ``path``, without an unfinished last line; empty if there is no such file.

    Raises ``UsageError`` for a line that is not a record of a batch.
    """
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            # Fast path: records start with the key, so the rest need not be parsed.
            if line.startswith(_KEY_PREFIX) and line.endswith("}\n"):
                key = _DECODER.raw_decode(line, len(_KEY_PREFIX))[0]
            else:
                key = json.loads(line)["key"]
        except (ValueError, KeyError, TypeError):
            key = None
        if not isinstance(key, str):
            raise UsageError(
                f"line {number} of {path} is not a record of a batch: {line.strip()[:80]!r}",
                "Remove the line if another program wrote it, or name another file.",
            )
        yield key


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of ``path`` that is a JSON object; other lines are skipped. Empty without such a file."""
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
    """Whether a last line without a newline is an unfinished record, or zeros after a power failure.

    Text of other programs is not, and must not be cut off.
    """
    written = line.lstrip("\0")
    if not _KEY_PREFIX.startswith(written[: len(_KEY_PREFIX)]):
        return False
    try:
        json.loads(written)
    except ValueError:
        return True
    return False


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder``, so that new files survive a power failure. Raises
    ``OSError``.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _as_cannot_write(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` in the block into ``CannotWrite``."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(
            f"cannot write {path}: {error.strerror}",
            "What was written before is intact: free disk space and repeat the command.",
        ) from error
