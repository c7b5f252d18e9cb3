"""From what a person typed to a source: folders, patterns, lists, pictures, tar shards and Parquet, together.

Knows how each is told from the others, and how keys stay apart where several are given. What is wrong with
the words is said here, before a model is loaded for them. Does not know how any of them is read.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from vlfit.errors import PictureNotFound, UsageError
from vlfit.tasks.batch.folders import PICTURES, FolderSource, check_folder, split_pattern
from vlfit.tasks.batch.items import Item, Source, Unreadable, extension_of, hash_of, key_of
from vlfit.tasks.batch.list_files import ListSource, picture_named
from vlfit.tasks.batch.parquet import ParquetSource
from vlfit.tasks.batch.webdataset import PACKED_HINT, WebDatasetSource, packed_by

LISTS = frozenset((".txt", ".lst", ".list", ".jsonl", ".ndjson"))
TABLES = frozenset((".parquet", ".pq"))
SHARDS = frozenset((".tar",))
_PACKED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")
_MOST_BRACES = 100_000
_KINDS = "a folder, a pattern, pictures, a list (.txt, .jsonl), tar shards or Parquet"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """``column``: of Parquet files, the one with pictures; ``keep``: those that go along into the output.

    ``allow_private``: URLs in lists and tables may lead into private networks. ``hidden``: pictures count
    whose name, or whose folder's, begins with a dot. ``output``: where records go; it is no source.
    """

    column: str | None = None
    keep: tuple[str, ...] = ()
    allow_private: bool = False
    hidden: bool = False
    output: Path | None = None


_DEFAULTS = SourceOptions()


def open_sources(typed: Sequence[str], options: SourceOptions = _DEFAULTS) -> Source:
    """What ``typed`` means, as one source. Keys are as short as they can be: below the folder, if it is one.

    With several folders, patterns or lists, what each is called stands before its keys (``2020/a.jpg``, and
    for a second one of that name ``2020-2/a.jpg``). Raises ``PictureNotFound`` for what is not there,
    ``UsageError`` for what is none of these, for the output itself, or for columns where there is no table.
    """
    sorted_out = _SortedOut(options)
    for text in dict.fromkeys(typed):
        sorted_out.add(text)
    parts = sorted_out.parts()
    if not parts:
        raise UsageError("no pictures are named", f"Name {_KINDS}.")
    if (options.column is not None or options.keep) and not sorted_out.has_tables:
        raise UsageError("--column and --keep go with .parquet tables, and none is named", "leave them out")
    return parts[0] if len(parts) == 1 else JoinedSource(tuple(parts))


class NamedPictures:
    """A ``Source`` of pictures that were named one by one, as a shell does with ``*.jpg``; keys as typed."""

    def __init__(self, names: Sequence[str]) -> None:
        # URLs may lead anywhere: they were typed by whoever runs it.
        self._items = {
            item.key: item for name in names if (item := picture_named(name, "", allow_private=True))
        }

    def __iter__(self) -> Iterator[Item]:
        yield from self._items.values()

    def count(self) -> int:
        return len(self._items)

    def notes(self) -> list[str]:
        """None: nobody names a picture that is to be left out."""
        return []


class BegunSource:
    """``source``, which may be gone through a single time, with its ``first`` item looked at; None: it is
    empty. Waits for whoever writes the list.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        items = iter(source)
        self.first = next(items, None)
        self._items: Iterator[Item] | None = items if self.first is None else chain([self.first], items)

    def __iter__(self) -> Iterator[Item]:
        if self._items is None:
            return iter(self._source)  # which says that it was read
        items, self._items = self._items, None
        return items

    def count(self) -> int | None:
        return self._source.count()

    def notes(self) -> list[str]:
        return self._source.notes()


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """Several as one, in the order of the parts. Their keys are kept apart by whoever joins them."""

    parts: tuple[Source, ...]

    def __iter__(self) -> Iterator[Item]:
        for part in self.parts:
            yield from part

    def count(self) -> int | None:
        counts = [part.count() for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes()]


@dataclass(frozen=True, slots=True)
class _Prefixed:
    """``source`` with a name before its keys."""

    name: str
    source: Source

    def __iter__(self) -> Iterator[Item]:
        for item in self.source:
            yield replace(item, key=f"{self.name}/{item.key}")

    def count(self) -> int | None:
        return self.source.count()

    def notes(self) -> list[str]:
        return self.source.notes()


@dataclass(slots=True)
class _SortedOut:
    """What was typed, by kind. Named files of a kind are one source, however many the shell made of them."""

    options: SourceOptions
    pictures: list[str] = field(default_factory=list)
    shards: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)
    # What has keys below itself, with the name that stands before them if there are several.
    wholes: list[tuple[str, Source]] = field(default_factory=list)
    has_tables: bool = False

    def add(self, text: str) -> None:
        if not text:
            raise PictureNotFound("the name of a source is empty", f"Name {_KINDS}.")
        if text == "-":
            self.wholes.append(("stdin", ListSource("-", self.options.allow_private)))
            return
        if "://" in text[:16] or text[:5].lower() == "data:":
            self._add_address(text)
            return
        path = os.path.expanduser(text)
        if os.path.isdir(path):
            self._add_folder(path)
        elif os.path.lexists(path):
            self._add_file(path)
        elif _BRACES.search(text):
            for name in _expanded(path):
                self._add_listed(name, text)
        elif set(text) & set("*?["):
            self._add_pattern(path, text)
        else:
            raise PictureNotFound(f"{key_of(text)}: no such file or folder", f"You are in {Path.cwd()}.")

    def parts(self) -> list[Source]:
        bare: list[Source] = []
        if self.pictures:
            bare.append(NamedPictures(self.pictures))
        if self.shards:
            bare.append(WebDatasetSource(self.shards, _short_names(self.shards)))
        if self.tables:
            bare.append(self._tables(self.tables, _short_names(self.tables)))
        if len(self.wholes) + len(bare) == 1:
            return bare or [self.wholes[0][1]]
        # A picture that was typed as 2020/a.jpg is not the one of a folder called 2020.
        taken = {key_of(str(Path(name))).split("/")[0] for name in self.pictures}
        named: list[Source] = []
        for name, source in self.wholes:
            unique, number = name, 1
            while unique in taken:
                number += 1
                unique = f"{name}-{number}"
            taken.add(unique)
            named.append(_Prefixed(unique, source))
        return bare + named

    def _add_address(self, url: str) -> None:
        kind = extension_of(url.partition("?")[0].partition("#")[0])
        if kind in TABLES | SHARDS | LISTS or url.lower().endswith(_PACKED):
            raise UsageError(
                f"{url[:120]}: of shards, tables and lists, files of this computer are read",
                "Download it first, or mount it.",
            )
        self.pictures.append(url)

    def _add_folder(self, folder: str) -> None:
        check_folder(folder)
        self._refuse_output(folder)
        kinds = Counter(extension_of(entry.name) for entry in os.scandir(folder) if entry.name[0] not in "._")
        name = key_of(os.path.basename(os.path.abspath(folder))) or "root"
        source: Source
        if any(kinds[kind] for kind in PICTURES) or not any(kinds[kind] for kind in SHARDS | TABLES):
            source = FolderSource(folder, hidden=self.options.hidden)
        elif any(kinds[kind] for kind in TABLES):
            if any(kinds[kind] for kind in SHARDS):
                raise UsageError(
                    f"{key_of(folder)} holds tar shards and Parquet files",
                    f"Say which: '{key_of(folder)}/*.tar' or '{key_of(folder)}/*.parquet'.",
                )
            source = self._below(folder, None, TABLES)
        else:
            source = self._below(folder, None, SHARDS)
        self.wholes.append((name, source))

    def _add_pattern(self, pattern: str, typed: str) -> None:
        root, parts = split_pattern(pattern)
        if pattern.lower().endswith(_PACKED):
            raise _packed(typed)
        kind = extension_of(parts[-1])
        if os.path.isdir(root):
            check_folder(root)
        source: Source
        if kind in LISTS:
            for name in self._matching(root, parts, frozenset((kind,))):
                self._add_file(os.path.join(root, name))
            return
        if kind in SHARDS | TABLES:
            source = self._below(root, parts, frozenset((kind,)))
        else:
            # An extension that is typed out is meant, whatever it is.
            meant = None if kind and not set(kind) & set("*?[]") else PICTURES
            source = FolderSource(root, parts, meant, self.options.hidden)
            if not os.path.isdir(root) or next(source.names(), None) is None:
                raise PictureNotFound(f"{key_of(typed)} matches no picture", f"You are in {Path.cwd()}.")
        self.wholes.append((key_of(os.path.basename(os.path.abspath(root))) or "root", source))

    def _add_listed(self, name: str, typed: str) -> None:
        if not os.path.lexists(name):
            raise PictureNotFound(
                f"{key_of(name)}: no such file, of those that {key_of(typed)} means",
                "Name those that are there, or fetch the others first.",
            )
        self._add_file(name)

    def _add_file(self, name: str) -> None:
        self._refuse_output(name)
        kind, path = extension_of(name), Path(name)
        if name.lower().endswith(_PACKED) or (kind in SHARDS and packed_by(path)):
            raise _packed(name)
        if kind in SHARDS:
            self.shards.append(path)
        elif kind in TABLES:
            self.tables.append(path)
        elif kind in LISTS:
            self.wholes.append((key_of(path.stem), ListSource(name, self.options.allow_private)))
        elif kind in PICTURES:
            self.pictures.append(name)
        elif kind in (".csv", ".tsv", ".json", ".zip"):
            raise UsageError(
                f"{key_of(name)}: {kind} files are not read",
                'Make it a list: a path or URL in each line (.txt), or {"picture": ..., ...} (.jsonl).',
            )
        else:
            raise UsageError(
                f"{key_of(name)} is by its name no picture, list, shard or table",
                f"Name {_KINDS}. To try it as a picture all the same: echo NAME | vlfit batch - ...",
            )

    def _refuse_output(self, name: str) -> None:
        output = self.options.output
        if output is not None and output.exists() and os.path.exists(name) and output.samefile(name):
            raise UsageError(
                f"{key_of(name)} is a source, and the output too",
                "Name another output: records of one would be read as pictures of the other.",
            )

    def _below(self, root: str, parts: tuple[str, ...] | None, kinds: frozenset[str]) -> Source:
        """The shards or tables in a folder, called as they lie below it."""
        names = self._matching(root, parts, kinds)
        paths = [Path(root) / name for name in names]
        keys = [key_of(name) for name in names]
        if kinds <= TABLES:
            return self._tables(paths, keys)
        if packed_by(paths[0]):
            raise _packed(str(paths[0]))
        return WebDatasetSource(paths, keys)

    def _matching(self, root: str, parts: tuple[str, ...] | None, kinds: frozenset[str]) -> list[str]:
        """Files below ``root``. Raises ``PictureNotFound`` for none, ``UsageError`` for folders unread."""
        found = FolderSource(root, parts, kinds, self.options.hidden)
        names = []
        for name in found.names() if os.path.isdir(root) else ():
            if isinstance(name, Unreadable):
                raise UsageError(name.message, name.hint)
            # Spark and others lay marks (_SUCCESS, _metadata) beside their files.
            if not os.path.basename(name).startswith("_"):
                names.append(name)
        if not names:
            what = " or ".join(sorted(kinds))
            raise PictureNotFound(f"{key_of(root)}: no {what} there matches", f"You are in {Path.cwd()}.")
        return names

    def _tables(self, paths: list[Path], names: list[str]) -> Source:
        self.has_tables = True
        return ParquetSource(
            paths,
            names,
            column=self.options.column,
            keep=self.options.keep,
            allow_private=self.options.allow_private,
        )


def _short_names(paths: list[Path]) -> list[str]:
    """File names, where no two are the same; else the paths as they were typed."""
    short = [path.name for path in paths]
    return [key_of(name) for name in (short if len(set(short)) == len(short) else map(str, paths))]


def _expanded(text: str) -> Iterator[str]:
    """``shard-{000..123}.tar``, ``{train,val}.tar``, as in a shell. Raises ``UsageError`` for too many."""
    names = [text]
    while any(_BRACES.search(name) for name in names):
        longer: list[str] = []
        for name in names:
            longer += _first_brace(name)
            if len(longer) > _MOST_BRACES:
                raise UsageError(f"{key_of(text)} means more than {_MOST_BRACES:,} files", "Name fewer.")
        names = longer
    yield from names


def _first_brace(name: str) -> Iterator[str]:
    found = _BRACES.search(name)
    if found is None:
        yield name
        return
    before, behind = name[: found.start()], name[found.end() :]
    if found[3] is not None:
        yield from (before + one + behind for one in found[3].split(","))
        return
    width = len(found[1]) if found[1].startswith("0") or len(found[1]) == len(found[2]) else 0
    first, last = int(found[1][:18]), int(found[2][:18])
    for number in range(first, min(last, first + _MOST_BRACES) + 1):
        yield f"{before}{number:0{width}d}{behind}"


def _packed(name: str) -> UsageError:
    return UsageError(f"{key_of(name)} is packed", PACKED_HINT)


# One of N parts of a source, the same in every run: N machines share a job so, with no word between them.
#
# Knows keys and their hashes. Does not know where items come from, or who has the other parts.


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The items of ``source`` whose keys fall into part ``index`` (from 1) of ``of``.

    By the hash of its key alone: pictures that are added later move no other one to another machine.
    """

    source: Source
    index: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.of:
            raise UsageError(
                f"there is no part {self.index} of {self.of}",
                f"parts of {self.of} are 1/{self.of} to {self.of}/{self.of}" if self.of > 0 else _HOW,
            )

    def __iter__(self) -> Iterator[Item]:
        return (item for item in self.source if hash_of(item.key) % self.of == self.index - 1)

    def count(self) -> int | None:
        """About as many as an even share: the hash is as even as chance, so that of a million pictures in
        eight parts each has its 125,000 within a percent. Counting would be another pass of hashing all keys.
        """
        total = self.source.count()
        return None if total is None else round(total / self.of)

    @property
    def about(self) -> bool:
        """Whether ``count`` is a reckoning."""
        return self.of > 1

    def notes(self) -> list[str]:
        """What the whole source has to say."""
        return self.source.notes()


_HOW = "write --shard 1/8 on the first of eight machines, 2/8 on the second, ..."


def read_shard(text: str) -> tuple[int, int]:
    """``2/8`` as (2, 8). Raises ``UsageError`` for anything else."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"--shard is {text!r}", _HOW)
    return int(match[1]), int(match[2])
