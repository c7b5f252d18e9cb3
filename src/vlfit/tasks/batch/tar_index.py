"""What is in a tar file, and at which byte: read from its headers alone, front to back, once.

Knows how tar files are broken, cut off and made to do harm, and that what ``tarfile`` calls the end may be
any of these. Nothing is unpacked, and no name in it is ever a path here. Does not know what members mean
(``webdataset.py``).
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from vlfit.tasks.batch.names import shown_name
from vlfit.tasks.batch.readers import Unreadable
from vlfit.units import MIB

# Of headers before one member's bytes: long names and attributes. A header may claim any length, and tarfile
# reads it whole. What macOS stores of resource forks stays far below.
_MOST_HEADERS = 4 * MIB
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "ZIP",
}
PACKED_HINT = (
    "Unpack it once (gunzip, zstd -d): to read one picture of a packed shard, all before it is unpacked."
)


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar: ``size`` bytes from ``offset``. ``kind``: why it is no plain file; empty if it is."""

    name: str
    offset: int
    size: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class NoEnd:
    """The file ends where a member ended, without the mark of the end: perhaps it was cut off there."""


def packed_by(path: Path) -> str | None:
    """``gzip`` and the like, by the first bytes; None for what is not packed, or cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except OSError:
        return None
    return next((name for start, name in _PACKED.items() if head.startswith(start)), None)


def members(path: Path, name: str) -> Iterator[Member | Unreadable | NoEnd]:
    """All members in the order of the file. Damage is an ``Unreadable`` (``name``: as what), always the last:
    nothing behind it can be found.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        yield Unreadable(name, f"{shown_name(path)} cannot be read: {error.strerror}", "Check its name.")
        return
    with file:
        packed = packed_by(path)
        if packed is not None:
            yield Unreadable(name, f"{shown_name(path)} is packed by {packed}", PACKED_HINT)
            return
        found, position, damage = 0, 0, ""
        reader = _Headers(file)
        try:
            tar = tarfile.TarFile(
                fileobj=cast(IO[bytes], reader), encoding="utf-8", errors="surrogateescape", mode="r"
            )
            while (info := tar.next()) is not None:
                cast(Any, tar).members.clear()  # it keeps them all, for no use of ours
                reader.begin()
                found += 1
                yield _member(info)
            position = tar.offset
        except GeneratorExit:
            raise
        except Exception as error:  # tarfile raises whatever hostile bytes drive it to
            endless = isinstance(error, RecursionError)
            position, damage = file.tell(), "headers of headers" if endless else str(error)
        yield from _ending(file, name, shown_name(path), found, position, damage)


def _member(info: tarfile.TarInfo) -> Member:
    if info.issparse():
        kind = "sparse file"
    elif info.isdir():
        kind = "folder"
    elif not info.isreg():
        kind = "link" if info.issym() or info.islnk() else "special file"
    else:
        kind = "" if info.size >= 0 else "file of a negative size"
    return Member(info.name, info.offset_data, info.size, kind)


def _ending(
    file: IO[bytes], name: str, shown: str, found: int, position: int, damage: str
) -> Iterator[Unreadable | NoEnd]:
    """Whether what was taken for the end is it: ``tarfile`` stops at any header that it cannot read."""
    size = file.seek(0, 2)
    before = f"; what it has before that ({found:,} of its files) is read" if found else ""
    if not damage:
        file.seek(min(position, size))
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) == tarfile.BLOCKSIZE and not any(block):
            return
        if not block and position == size:
            yield NoEnd()
            return
        damage = "" if len(block) < tarfile.BLOCKSIZE else "no header is there"
    if not size:
        yield Unreadable(name, f"{shown} is empty", "Copy it again.")
    elif not damage or position >= size:
        yield Unreadable(name, f"{shown} is cut off after {size:,} bytes{before}", "Copy it again.")
    elif not found and position <= tarfile.BLOCKSIZE:
        yield Unreadable(name, f"{shown} is no tar file", "Name shards as tar writes them, not packed.")
    else:
        message = f"{shown} is broken at byte {position:,} ({damage[:200]}){before}"
        yield Unreadable(name, message, "Copy it again; GNU tar -t says more.")


class _Headers:
    """What ``tarfile`` reads headers through: little at once, and never backward, so that it must end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = _MOST_HEADERS

    def begin(self) -> None:
        """The next member's headers have the whole room again."""
        self._left = _MOST_HEADERS

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            raise tarfile.ReadError(f"headers of more than {_MOST_HEADERS // MIB} MiB")
        self._left -= size
        return self._file.read(size)

    def seek(self, position: int) -> int:
        if position < self._file.tell() - 1:  # it goes to the last byte before a header
            raise tarfile.ReadError("a header leads back")
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()
