"""The words that the parts of a batch share: an item, where items come from, where records go.

Knows nothing of models, of files, or of how many things run at once. Sources, sinks and sidecars are made
elsewhere; whatever keeps to these protocols can be one.
"""

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

from vlfit.errors import NotAPicture, PictureNotFound, PictureTooLarge, PrivateAddress
from vlfit.tasks.pictures import MAX_FILE_BYTES, load_picture, read_file
from vlfit.units import MIB

Record = dict[str, Any]
"""One line of the output: ``key``, what the model said, and what it cost. JSON can hold it."""


@dataclass(frozen=True, slots=True)
class Item:
    """One picture to be worked on, not read yet.

    ``key`` names it in the output: unique in its source and the same in every run (the path below the
    source's folder, ``shard.tar#member``, ``table.parquet#row``). ``read`` gives the bytes of the file and
    may raise ``PictureError``; it is called once for each try, in any thread, and is a bound method of a
    small frozen dataclass, so that an item can be pickled. ``path`` is the picture's own file, where it has
    one: sidecars go beside it. ``extra`` is carried into the record under ``extra`` as it is.
    """

    key: str
    read: Callable[[], bytes]
    path: Path | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


class Source(Protocol):
    """Items, in the same order in every run while nothing is added. Cheap to go through: no picture is read.

    A part of a source that cannot be read (a folder, a shard) is one item, whose ``read`` says what is wrong.
    """

    def __iter__(self) -> Iterator[Item]: ...
    def count(self) -> int | None:
        """How many items there are, or None where that takes as long as reading them."""
        ...

    def notes(self) -> list[str]:
        """What the last pass left out, and why, in sentences for a person; none if nothing."""
        ...


class Sink(Protocol):
    """Takes finished records, from one thread. What ``write`` has taken survives the end of the process at
    any instant, or is as if it had never been written; ``flush`` makes that hold for the end of the machine.

    No record is changed before ``open``, which mends what a process left half-written. All may raise
    ``VlfitError``, of a full disk.
    """

    def done_keys(self) -> Iterator[str]:
        """The keys of all records that are in the output, before the first ``write``. Raises ``UsageError``
        for what is no output of a batch.
        """
        ...

    def open(self) -> None:
        """Make the output, or ready to go on. ``write`` does it where nobody has. Any number of times."""
        ...

    def write(self, record: Record) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None:
        """Flush and let go. May be called twice."""
        ...


class Sidecar(Protocol):
    """Writes what was said of a picture beside it, or into it, for programs that look there.

    Called before the record is written, so that a record says that its sidecar is there too: after a kill the
    last few are written again, and the second time must leave the same as the first. Raises ``VlfitError``.
    """

    def write(self, item: Item, record: Record) -> None: ...
    def notes(self) -> list[str]:
        """What was not written, and why, in sentences for a person: files with other words are left alone."""
        ...


# Names of pictures as keys of records: valid Unicode, ``/`` between folders, the same on every machine.
#
# Knows that a file's name is bytes, and that not all of them are UTF-8. A byte that is none stands in a key
# as ``\xff``, so that JSON, Parquet and terminals can hold it, and ``name_of_key`` finds the way back. Does
# not know which pictures there are.


_SURROGATE = re.compile("[\ud800-\udfff]")
# What an escape looks like. A name that holds one by its own letters is escaped too: no two have one key.
_ESCAPED = re.compile(r"\\(?:\\|x([0-9a-f]{2})|u(d[89a-f][0-9a-f]{2}))")


def key_of(name: str) -> str:
    """``name``, as Python gives file names (``surrogateescape``), as a key. No two names have the same."""
    if os.sep != "/":
        name = name.replace(os.sep, "/")
    # All but a few names are their own keys, and this is done for every one of a million.
    if name.isascii() and "\\" not in name:
        return name
    if not _SURROGATE.search(name) and not _ESCAPED.search(name):
        return name
    return _SURROGATE.sub(_escape, name.replace("\\", "\\\\"))


def name_of_key(key: str) -> str:
    """The name that ``key_of`` made ``key`` of, for Python's functions of files."""
    return _ESCAPED.sub(_unescape, key) if _ESCAPED.search(key) else key


def shown_name(path: Path) -> str:
    """``path`` as text that can be written anywhere, with the folders as they were typed."""
    return key_of(str(path))


def extension_of(name: str) -> str:
    """``.jpg`` of ``Photos/Cat.JPG``; empty for none. Quicker than a ``Path``, for a million of names."""
    return os.path.splitext(name)[1].lower()


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _unescape(found: re.Match[str]) -> str:
    if found[1]:
        return chr(0xDC00 + int(found[1], 16))
    return chr(int(found[2], 16)) if found[2] else "\\"


# Sets of keys that stay small: eight bytes a key, whatever its length.
#
# Knows hashes and nothing of what keys mean. Two keys have the same hash, and the second is taken to be
# there, with a chance of n^2 / 2^65 for n keys: 3 in a million for ten million, 3 in ten thousand for a
# hundred million.


_BYTES = 8
_LEAST_MERGED = 65_536  # a set of as many ints takes some 5 MiB


def hash_of(key: str) -> int:
    """A number of 64 bits that stands for ``key``. Names of files may hold bytes that are no UTF-8."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest(), "big")


class KeySet:
    """Keys in a sorted array; those that came last wait in an ordinary set until they are worth a merge.

    One thread may ``add`` while others look.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._sorted = array("Q")
        self._fresh: set[int] = set()
        for key in keys:
            self.add(key)

    def add(self, key: str) -> None:
        number = hash_of(key)
        if not self._has(number):
            self._fresh.add(number)
            # Merging costs as much as the whole is long, so it waits until there is an eighth more.
            if len(self._fresh) >= max(_LEAST_MERGED, len(self._sorted) // 8):
                self._merge()

    def __contains__(self, key: str) -> bool:
        return self._has(hash_of(key))

    def __len__(self) -> int:
        return len(self._sorted) + len(self._fresh)

    def _has(self, number: int) -> bool:
        if number in self._fresh:
            return True
        place = bisect_left(self._sorted, number)
        return place < len(self._sorted) and self._sorted[place] == number

    def hashes(self) -> NDArray[np.uint64]:
        """All of them, sorted, as a copy."""
        self._merge()
        return np.frombuffer(self._sorted, np.uint64).copy()

    def _merge(self) -> None:
        merged = self._sorted[:]
        merged.extend(self._fresh)
        np.frombuffer(merged, np.uint64).sort()  # in place, without a Python int for each
        # In this order another thread that looks finds every key in one of the two.
        self._sorted = merged
        self._fresh = set()


# What stands behind an item's ``read``: small frozen records, so that an item travels to another process.
#
# Knows files, URLs, and parts of files. Does not know who found them (``folders.py``, ``list_files.py``,
# ``webdataset.py``) or what is done with the bytes.


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A file of its own. ``name`` is its path, absolute: another process may stand in another folder.

    As text, and not as a ``Path`` until something is wrong: there are a million of them.
    """

    name: str

    def read(self) -> bytes:
        """Raises ``PictureNotFound``, ``PictureTooLarge``. A pipe is refused: it would keep whoever reads."""
        label = key_of(self.name)
        try:
            mode = os.stat(self.name).st_mode
            ordinary = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        except (OSError, ValueError):
            ordinary = True  # read_file says what is wrong
        if not ordinary:
            raise PictureNotFound(f"{label} is no ordinary file", "Name files that hold a picture each.")
        return read_file(self.name, label)


@dataclass(frozen=True, slots=True)
class UrlBytes:
    """What is behind an ``http:``, ``https:`` or ``data:`` URL that stands in a list or a table.

    Whoever wrote the list says where this computer connects to: private networks are for those who allow it.
    """

    url: str
    allow_private: bool = False

    def read(self) -> bytes:
        """Raises ``PictureNotFound``, ``NotAPicture``, ``PictureTooLarge``, ``PrivateAddress``."""
        try:
            return load_picture(self.url, allow_private=self.allow_private).data
        except PrivateAddress as error:
            raise PrivateAddress(
                error.message, "If the list is your own and you mean it, add --allow-private-urls."
            ) from error


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` bytes of the file ``path`` from ``offset`` on: a member of a tar shard."""

    path: Path
    offset: int
    size: int
    label: str

    def read(self) -> bytes:
        """Raises ``PictureNotFound`` for a file that is gone, ``NotAPicture`` for one that ends too early,
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
                f"{shown_name(self.path)} cannot be read: {error.strerror}", "Was it moved?"
            ) from error
        if len(data) < self.size:
            raise NotAPicture(
                f"{self.label}: {self.size} bytes were to be there, {len(data)} are",
                f"{shown_name(self.path)} was cut off: copy it again.",
            )
        return data


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where pictures were to be and are not: ``read`` says why, so that it is listed with bad files.

    ``name`` is the part of a source that it stands for: a folder, a shard, a line of a list.
    """

    name: str
    message: str
    hint: str = ""

    def read(self) -> bytes:
        """Raises ``PictureNotFound``, always."""
        raise PictureNotFound(self.message, self.hint)
