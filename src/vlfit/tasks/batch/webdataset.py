"""Pictures in tar shards as WebDataset has them: files of one name belong together, ``7.jpg`` and ``7.json``.

Knows which members are pictures and which are words about them; the words go along as ``extra``. Headers are
read in the order of the file, and pictures by their place in it, so that a job that goes on where it was
reads none that are done. Does not know how a tar file is read (``tar_index.py``).
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from vlfit.tasks.batch.folders import PICTURES
from vlfit.tasks.batch.item import Item
from vlfit.tasks.batch.names import extension_of, key_of, shown_name
from vlfit.tasks.batch.readers import Span, Unreadable
from vlfit.tasks.batch.tar_index import Member, NoEnd, members
from vlfit.units import GIB, MIB

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
