"""Encoded files of requests, the large ones outside of this process's heap.

A large file is kept in an anonymous file in RAM (memfd): it is read and sent to its decode worker in pieces,
and never whole in this process. It has no name, is on no disk, and is freed with its last reference.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import TypeAlias

from vlfit.units import MIB

MIN_SPOOLED = MIB  # bytes; smaller files are ``bytes``
PIECE_BYTES = MIB // 2
_NAME = "vlfit-picture"  # as /proc/PID/fd shows it
_MFD_NOEXEC_SEAL = 8  # not executable: some systems allow no others


class SpooledFile:
    """A file outside of the heap; ``FileSpool`` makes it. Immutable; equal if the content is.

    ``len`` is its size; ``bytes`` makes a copy of all of it, for code that cannot work on pieces. The memory
    is freed with the object.
    """

    __slots__ = ("_digest", "_fd", "_size")

    def __init__(self, fd: int, size: int, digest: bytes) -> None:
        """``fd``: owned from now on. ``digest``: of the content."""
        self._fd = fd
        self._size = size
        self._digest = digest

    def __del__(self) -> None:
        os.close(self._fd)

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self.read(0, self._size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpooledFile) and self._digest == other._digest

    def __repr__(self) -> str:
        return f"SpooledFile({self._size:,} bytes)"

    def __hash__(self) -> int:
        return hash(self._digest)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``; fewer at the end."""
        return os.pread(self._fd, size, offset)


EncodedFile: TypeAlias = bytes | SpooledFile
"""A picture or another file, as its bytes."""


def read_at(file: EncodedFile, offset: int, size: int) -> bytes:
    """``size`` bytes of ``file`` from ``offset``; fewer at the end."""
    return file.read(offset, size) if isinstance(file, SpooledFile) else file[offset : offset + size]


def pieces_of(file: EncodedFile) -> Iterator[bytes]:
    """All of ``file``: a spooled one in pieces of ``PIECE_BYTES``."""
    if isinstance(file, bytes):
        yield file
        return
    for offset in range(0, len(file), PIECE_BYTES):
        yield file.read(offset, PIECE_BYTES)


def find_in(file: EncodedFile, sought: bytes, start: int = 0) -> int:
    """The first offset from ``start`` at which ``file`` has ``sought``; -1 if nowhere."""
    if isinstance(file, bytes):
        return file.find(sought, start)
    step = PIECE_BYTES - len(sought) + 1  # pieces overlap
    for offset in range(start, len(file), step):
        found = file.read(offset, PIECE_BYTES).find(sought)
        if found >= 0:
            return offset + found
    return -1


class FileSpool:
    """Collects a file that arrives in pieces: in memory up to ``MIN_SPOOLED`` bytes, outside of the heap
    beyond.

    On a system without memfd (macOS), or if no file descriptor is left, all of it stays in memory. ``size``:
    bytes so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._digest = blake2b(digest_size=32)
        self._head = bytearray()
        self._fd: int | None = None

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises ``MemoryError`` if the system has no memory for it."""
        self._digest.update(data)
        self.size += len(data)
        if self._fd is None:
            self._head += data
            if self.size > MIN_SPOOLED and (fd := _anonymous_file()) is not None:
                self._fd = fd
                _write(fd, self._head)
                self._head = bytearray()
        else:
            _write(self._fd, data)

    @property
    def digest(self) -> bytes:
        """A digest of all that was written; files with equal ones are equal."""
        return self._digest.digest()

    def finish(self) -> EncodedFile:
        """The file. The spool is empty afterwards."""
        if self._fd is None:
            return bytes(self._head)
        fd, self._fd = self._fd, None
        return SpooledFile(fd, self.size, self.digest)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _anonymous_file() -> int | None:
    """A file descriptor; None if the system has none."""
    if hasattr(os, "memfd_create"):
        for flags in (os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL, os.MFD_CLOEXEC):
            with suppress(OSError):  # of Linux before 6.3, or no file descriptor is left
                return os.memfd_create(_NAME, flags)
    return None


def _write(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:  # nothing else can fail here
        raise MemoryError(f"no memory for a file of a request: {error.strerror}") from error
