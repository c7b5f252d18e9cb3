"""Shared types of a batch: items, their readers and keys; protocols of sources, sinks and sidecars."""

import os
import re
import stat
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.errors import NotAPicture, PictureNotFound, PictureTooLarge, PrivateAddress
from vlfit.images.spooled_file import pieces_of
from vlfit.tasks.pictures import MAX_FILE_BYTES, load_picture, read_file
from vlfit.units import MIB

Record = dict[str, Any]
"""One line of the output: ``key``, the answer and its usage. JSON-serializable."""


@dataclass(frozen=True, slots=True)
class Item:
    """A picture or clip of a source, not read yet.

    ``key`` names it in the output: unique within its source and the same in every run (the path below the
    source's folder, ``shard.tar#member``, ``table.parquet#row``). ``path``: the picture's own file, beside
    which sidecars are written; None if it has none (a URL, a member of a shard). ``extra``: fields that
    are copied into the record under ``extra``.

    ``read`` returns the file's bytes, an ``ImagePart`` with notes, or a clip, or raises ``PictureError``.
    It is called once per try, from any thread. It is a bound method of a small frozen dataclass, so that
    an item can be pickled.
    """

    key: str
    read: Callable[[], bytes | ImagePart | VideoPart]
    path: Path | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


def digest_of(content: bytes | ImagePart | VideoPart) -> bytes:
    """16-byte BLAKE2b digest of a picture's encoded bytes, or of those of all frames of a clip."""
    digest = blake2b(digest_size=16)
    if isinstance(content, bytes):
        digest.update(content)
    else:
        for file in content.frames if isinstance(content, VideoPart) else (content.data,):
            for piece in pieces_of(file):
                digest.update(piece)
    return digest.digest()


class Source(Protocol):
    """An iterable of items, in the same order in every run unless files are added.

    Iterating reads no picture. A folder, shard or table that cannot be read is one item whose ``read`` raises
    the reason. A list on standard input can be iterated only once; iterating it again raises ``UsageError``.
    """

    def __iter__(self) -> Iterator[Item]: ...
    def count(self) -> int | None:
        """Number of items; None if unknown, because counting would take too long. May iterate the source."""
        ...

    def notes(self) -> list[str]:
        """Notes for the user on what the last iteration left out, and why; empty if nothing."""
        ...


class Sink(Protocol):
    """Writes records to an output file. Not thread-safe.

    Order of calls: ``done_keys``, ``open``, then ``write`` and ``flush``, then ``close``. Records of earlier
    runs stay as they are until ``open``, which repairs what a killed process left half-written. A record is
    written whole or not at all, even if the process is killed. All methods may raise ``VlfitError``, e.g. for
    a full disk.
    """

    def done_keys(self) -> Iterator[str]:
        """Keys of all records that earlier runs wrote; none if there is no output yet.

        Raises ``UsageError`` if the file is not the output of a batch.
        """
        ...

    def open(self) -> None:
        """Create the output, or prepare it to be continued. Idempotent; ``write`` calls it if needed."""
        ...

    def write(self, record: Record) -> None:
        """Append ``record``. Does not check whether its key is in the output already."""
        ...

    def flush(self) -> None:
        """Make the records written so far survive a power failure."""
        ...

    def close(self) -> None:
        """Flush and close. Idempotent."""
        ...


class Sidecar(Protocol):
    """Writes a picture's text beside the picture, or into it, for other programs.

    ``write`` is called before the record is written, so a record implies that its sidecar exists; after a
    kill the last few are written again, so it must be idempotent.
    """

    def write(self, item: Item, record: Record) -> None:
        """Write the text of ``record``, the answer to ``item``. Raises ``VlfitError``.

        Existing other text stays, and is reported by ``notes``, unless the sidecar was created to overwrite
        it.
        """
        ...

    def clean(self, item: Item) -> None:
        """Remove unfinished files that a killed run left beside ``item``. Never raises.

        Called for every item of a run, settled ones included.
        """
        ...

    def notes(self) -> list[str]:
        """Notes for the user: how many pictures ``write`` left alone, and why; empty if none."""
        ...


# Keys: file names as valid Unicode with ``/`` between folders, the same on every machine. A byte that is not
# UTF-8 is escaped as ``\xff``, so that JSON, Parquet and terminals can hold it; ``file_name_of_key`` reverses
# it.


_SURROGATE = re.compile("[\ud800-\udfff]")
# A name that contains such an escape literally is escaped too, so that no two names share a key.
_ESCAPE_SEQUENCE = re.compile(r"\\(?:\\|x([0-9a-f]{2})|u(d[89a-f][0-9a-f]{2}))")


def key_of(name: str) -> str:
    """The key of a path as Python's ``os`` functions spell it: valid Unicode with ``/`` between folders.

    Bytes that are not UTF-8 (in Python: surrogates) are escaped as ``\\xff``. Distinct names have distinct
    keys.
    """
    if os.sep != "/":
        name = name.replace(os.sep, "/")
    # Fast path: nearly all names are their own keys, and there may be a million of them.
    if name.isascii() and "\\" not in name:
        return name
    if not _SURROGATE.search(name) and not _ESCAPE_SEQUENCE.search(name):
        return name
    return _SURROGATE.sub(_escape, name.replace("\\", "\\\\"))


def file_name_of_key(key: str) -> str:
    """The file name whose key is ``key``: the inverse of ``key_of``."""
    return _ESCAPE_SEQUENCE.sub(_unescape, key) if _ESCAPE_SEQUENCE.search(key) else key


def display_name(path: Path) -> str:
    """``path`` as printable text, relative or absolute as given."""
    return key_of(str(path))


def extension_of(name: str) -> str:
    """The extension in lower case, with its dot: ``.jpg`` of ``Photos/Cat.JPG``; empty if there is none."""
    return os.path.splitext(name)[1].lower()


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _unescape(found: re.Match[str]) -> str:
    if found[1]:
        return chr(0xDC00 + int(found[1], 16))
    return chr(int(found[2], 16)) if found[2] else "\\"


# Key sets of 8 bytes a key. Two of n keys collide with probability n^2 / 2^65 (3 in a million for ten million
# keys, 3 in ten thousand for a hundred million); the second is then taken to be present.


_HASH_BYTES = 8
_MIN_MERGED = 65_536  # a set of that many ints takes about 5 MiB


def hash_of(key: str) -> int:
    """64-bit BLAKE2b hash of ``key``, the same in every process. The key may contain surrogates."""
    return int.from_bytes(
        blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest(), "big"
    )


class KeySet:
    """A set of keys that takes 8 bytes each, as it keeps only their 64-bit hashes.

    Two keys with the same hash count as one, which happens in 3 of a million sets of ten million keys. One
    thread may ``add`` while others test membership.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._sorted = array("Q")  # with the most recent hashes in a set until a merge pays off
        self._recent: set[int] = set()
        for key in keys:
            self.add(key)

    def add(self, key: str) -> None:
        """Add ``key``; does nothing if its hash is there already."""
        number = hash_of(key)
        if not self._contains_hash(number):
            self._recent.add(number)
            # A merge costs O(n), so it waits until the array grows by an eighth.
            if len(self._recent) >= max(_MIN_MERGED, len(self._sorted) // 8):
                self._merge()

    def __contains__(self, key: str) -> bool:
        return self._contains_hash(hash_of(key))

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def _contains_hash(self, number: int) -> bool:
        if number in self._recent:
            return True
        place = bisect_left(self._sorted, number)
        return place < len(self._sorted) and self._sorted[place] == number

    def hashes(self) -> NDArray[np.uint64]:
        """All hashes, sorted, as a copy."""
        self._merge()
        return np.frombuffer(self._sorted, np.uint64).copy()

    def _merge(self) -> None:
        merged = self._sorted[:]
        merged.extend(self._recent)
        np.frombuffer(merged, np.uint64).sort()  # in place, without a Python int for each
        # In this order a concurrent reader finds every key in one of the two.
        self._sorted = merged
        self._recent = set()


# Readers behind ``Item.read``: small frozen dataclasses, so that items can be pickled.


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Reads the file ``name``: an absolute path, as another process may have another working directory.

    A string rather than a ``Path`` to save memory, as there may be a million of them.
    """

    name: str

    def read(self) -> bytes:
        """Read the whole file. Pipes and devices are refused, as reading them could block.

        Raises ``PictureNotFound`` and ``PictureTooLarge``.
        """
        label = key_of(self.name)
        try:
            mode = os.stat(self.name).st_mode
            ordinary = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        except (OSError, ValueError):
            ordinary = True  # read_file raises the reason
        if not ordinary:
            raise PictureNotFound(f"{label} is not a regular file", "Name picture files.")
        return read_file(self.name, label)


@dataclass(frozen=True, slots=True)
class UrlBytes:
    """Reads an ``http:``, ``https:`` or ``data:`` URL from a list or a table.

    The author of the list decides where this computer connects to, so private networks need
    ``allow_private``.
    """

    url: str
    allow_private: bool = False

    def read(self) -> bytes:
        """Fetch the picture's bytes.

        Raises ``PictureNotFound``, ``NotAPicture``, ``PictureTooLarge`` and ``PrivateAddress``.
        """
        try:
            return bytes(load_picture(self.url, allow_private=self.allow_private).data)
        except PrivateAddress as error:
            raise PrivateAddress(error.message, "If you trust the list, add --allow-private-urls.") from error


@dataclass(frozen=True, slots=True)
class FileRange:
    """Reads a member of a tar shard: ``size`` bytes of the file ``path``, from ``offset``.

    ``label`` names the member in errors.
    """

    path: Path
    offset: int
    size: int
    label: str

    def read(self) -> bytes:
        """Read the bytes of the member.

        Raises ``PictureNotFound`` if the file is gone, ``NotAPicture`` if it is truncated, and
        ``PictureTooLarge``.
        """
        if self.size > MAX_FILE_BYTES:
            raise PictureTooLarge(
                f"{self.label} is larger than {MAX_FILE_BYTES // MIB} MiB", "Scale the picture down first."
            )
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise PictureNotFound(
                f"{display_name(self.path)} cannot be read: {error.strerror}", "Was it moved?"
            ) from error
        if len(data) < self.size:
            raise NotAPicture(
                f"{self.label}: {self.size} bytes expected, {len(data)} found",
                f"Copy {display_name(self.path)} again: it is truncated.",
            )
        return data


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A part of a source that cannot be read, and why. ``name``: of the folder, shard, or line of a list.

    It stands in the source as an item whose ``read`` raises the reason, so that it is listed as failed.
    """

    name: str
    message: str
    hint: str = ""

    def read(self) -> bytes:
        """Raises ``PictureNotFound``, always."""
        raise PictureNotFound(self.message, self.hint)
