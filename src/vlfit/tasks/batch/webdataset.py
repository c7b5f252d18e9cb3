"""Pictures in tar shards as WebDataset has them: files of one name belong together, ``7.jpg`` and ``7.json``.

Knows which members are pictures and which are words about them; the words go along as ``extra``. Headers are
read in the order of the file, and pictures by their place in it, so that a job that goes on where it was
reads none that are done. Does not know how a tar file is read (``tasks/batch/webdataset.py``).
"""

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from vlfit.tasks.batch.folders import PICTURES
from vlfit.tasks.batch.items import Item, Span, Unreadable, extension_of, key_of, shown_name
from vlfit.units import GIB, MIB

# What is in a tar file, and at which byte: read from its headers alone, front to back, once.
#
# Knows how tar files are broken, cut off and made to do harm, and that what ``tarfile`` calls the end may
# be any of these. Nothing is unpacked, and no name in it is ever a path here. Does not know what members
# mean (``webdataset.py``).


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


# The names that webdataset itself decodes without being told (its "basic handlers").
_WORDS = frozenset((".txt", ".text", ".transcript", ".caption"))
_NUMBERS = frozenset((".cls", ".cls2", ".class", ".count", ".index", ".inx", ".id"))
_JSON = frozenset((".json", ".jsn"))
_THEIRS = PICTURES | _WORDS | _NUMBERS | _JSON
_LONGEST_WORDS = MIB
# In a tar that is no WebDataset a thousand pictures may share what stands before their first dot.
_LARGEST_GROUP = 64
# Going through headers takes some 30 us each from memory, and a seek each from a disk that turns.
_COUNTED_BYTES = 4 * GIB


class WebDatasetSource:
    """A ``Source`` of the pictures in tar files. ``names`` are what keys call them: ``NAME#member``."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str] | None = None) -> None:
        self.paths = tuple(paths)
        self.names = tuple(names) if names is not None else tuple(key_of(path.name) for path in paths)
        self._skipped: Counter[str] = Counter()
        self._endless: list[str] = []

    def __iter__(self) -> Iterator[Item]:
        self._skipped.clear()
        self._endless.clear()
        for path, name in zip(self.paths, self.names, strict=True):
            yield from self._shard(path, name)

    def count(self) -> int | None:
        """From the headers of all shards; None where those are over 4 GiB together."""
        sizes = [path.stat().st_size for path in self.paths if path.exists()]
        if sum(sizes) > _COUNTED_BYTES:
            return None
        return sum(
            isinstance(found, Unreadable) or (isinstance(found, Member) and _is_picture(found))
            for path, name in zip(self.paths, self.names, strict=True)
            for found in members(path, name)
        )

    def notes(self) -> list[str]:
        """What the last pass left out, in words."""
        said = []
        if self._skipped:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in self._skipped.most_common(8))
            said.append(f"tar shards: left out {self._skipped.total():,} members ({kinds})")
        if self._endless:
            some = ", ".join(self._endless[:5]) + (", ..." if len(self._endless) > 5 else "")
            said.append(f"no end is marked in {some}: if it was cut off there, pictures are missing")
        return said

    def _shard(self, path: Path, name: str) -> Iterator[Item]:
        path = path.absolute()
        seen: Counter[str] = Counter()
        with ExitStack() as opened:
            file: IO[bytes] | None = None
            for group in self._groups(path, name):
                if isinstance(group, Unreadable):
                    yield Item(name, group.read)
                    continue
                file = file or opened.enter_context(path.open("rb"))
                extra = self._words(file, group)
                for member in filter(_is_picture, group):
                    inner = _tidy(member.name)
                    seen[inner] += 1
                    again = f"#{seen[inner]}" if seen[inner] > 1 else ""
                    key = f"{name}#{key_of(inner)}{again}"
                    yield Item(key, Span(path, member.offset, member.size, key).read, None, extra)

    def _groups(self, path: Path, name: str) -> Iterator[list[Member] | Unreadable]:
        group: list[Member] = []
        base: str | None = None
        for found in members(path, name):
            if isinstance(found, NoEnd):
                self._endless.append(shown_name(path))
                continue
            if isinstance(found, Unreadable):
                if group:
                    yield group
                group = []
                yield found
                continue
            if not self._is_theirs(found):
                continue
            here = _base(found.name)
            if group and (here != base or len(group) == _LARGEST_GROUP):
                yield group
                group = []
            base = here
            group.append(found)
        if group:
            yield group

    def _is_theirs(self, member: Member) -> bool:
        if member.kind == "folder" or _is_hidden(member.name):
            return False
        kind = extension_of(member.name)
        if not member.kind and kind in _THEIRS:
            return True
        self._skipped[member.kind or kind or "without extension"] += 1
        return False

    def _words(self, file: IO[bytes], group: list[Member]) -> dict[str, Any]:
        """The fields of a group that are no pictures, by their extensions without the dot."""
        words = [member for member in group if not _is_picture(member)]
        if not words or len(words) == len(group):
            return {}
        found = {}
        for member in words:
            if member.size > _LONGEST_WORDS:
                self._skipped[f"{extension_of(member.name)} over {_LONGEST_WORDS // MIB} MiB"] += 1
                continue
            field = _tidy(member.name)[len(_base(member.name)) + 1 :]
            found[key_of(field)] = _value(file, member)
        return found


def _is_picture(member: Member) -> bool:
    return not member.kind and extension_of(member.name) in PICTURES and not _is_hidden(member.name)


def _is_hidden(name: str) -> bool:
    """What macOS lays beside each file begins with a dot."""
    return name[name.rfind("/") + 1 :].startswith(".")


def _tidy(name: str) -> str:
    """``tar cf shard.tar .`` puts ``./`` before every name."""
    return name.removeprefix("./")


def _base(name: str) -> str:
    """What files that belong together share: the folder, and the name up to its first dot."""
    folder, slash, file = _tidy(name).rpartition("/")
    return folder + slash + file.partition(".")[0]


def _value(file: IO[bytes], member: Member) -> Any:
    file.seek(member.offset)
    text = file.read(member.size).decode("utf-8", "replace")
    kind = extension_of(member.name)
    try:
        if kind in _JSON:
            return json.loads(text, parse_constant=str)  # NaN is no JSON
        return int(text) if kind in _NUMBERS else text
    except (ValueError, RecursionError):
        return text  # as it is: what is said about a picture does not spoil the picture
