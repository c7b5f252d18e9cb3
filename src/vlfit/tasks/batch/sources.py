"""Turn command-line arguments into one source: folders, globs, lists, pictures, tar shards, Parquet tables.

Mistakes are reported here, before a model is loaded. With several sources, keys get prefixes to stay unique.
``ShardSource`` takes one of N parts of a source, so that N machines can share a job.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from vlfit.errors import PictureNotFound, UsageError
from vlfit.images.file_kinds import PICTURE_EXTENSIONS
from vlfit.images.media_kinds import MEDIA_EXTENSIONS, MediaKind
from vlfit.tasks.batch.folders import (
    DEFAULT_MEDIA,
    FolderSource,
    check_folder,
    split_glob,
)
from vlfit.tasks.batch.items import Item, Source, Unreadable, extension_of, hash_of, key_of
from vlfit.tasks.batch.list_files import ListFileSource, make_item
from vlfit.tasks.batch.media_items import named_items
from vlfit.tasks.batch.parquet import ParquetSource
from vlfit.tasks.batch.webdataset import COMPRESSED_HINT, WebDatasetSource, compression_of
from vlfit.tasks.files import MediaOptions, kind_by_extension, split_pages
from vlfit.tasks.pictures import describe_missing

LISTS = frozenset((".txt", ".lst", ".list", ".jsonl", ".ndjson"))
TABLES = frozenset((".parquet", ".pq"))
SHARDS = frozenset((".tar",))
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")
_MAX_EXPANDED = 100_000
_SOURCE_KINDS = (
    "a folder, a pattern, pictures, documents, videos, a list (.txt, .jsonl), tar shards or Parquet"
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to read sources.

    ``column``: the Parquet column with pictures; None: the only plausible one. ``keep``: Parquet columns to
    copy into the records. ``allow_private``: URLs in lists and tables may lead into private networks.
    ``hidden``: also take files and folders whose names start with a dot. ``output``: the batch's output,
    which is refused as a source; None: nothing is refused. ``include``: kinds of files that folders and globs
    are searched for beside pictures. ``media``: what to take of videos and animations.
    """

    column: str | None = None
    keep: tuple[str, ...] = ()
    allow_private: bool = False
    hidden: bool = False
    output: Path | None = None
    include: frozenset[MediaKind] = frozenset()
    media: MediaOptions = DEFAULT_MEDIA

    @property
    def extensions(self) -> frozenset[str]:
        """Extensions of the files that folders and globs are searched for, lower case, with the dot."""
        return PICTURE_EXTENSIONS.union(*(MEDIA_EXTENSIONS[kind] for kind in self.include))


_DEFAULTS = SourceOptions()


def open_sources(arguments: Sequence[str], options: SourceOptions = _DEFAULTS) -> Source:
    """One source for all ``arguments``: folders, globs, pictures, list files (``-``: standard input), tar
    shards and tables. Repeated arguments count once.

    With a single folder, glob or list, keys are relative to it. With several arguments, the name of each
    folder, glob or list precedes its keys (``2020/a.jpg``; ``2020-2/a.jpg`` for a second one of that name).

    Raises ``PictureNotFound`` for a path that does not exist, ``UsageError`` for an unknown kind of file, for
    ``options.output`` among the arguments, for no arguments, and for ``column`` or ``keep`` without a table.
    """
    groups = _SourceGroups(options)
    for argument in dict.fromkeys(arguments):
        groups.add(argument)
    parts = groups.parts()
    if not parts:
        raise UsageError("no source is given", f"Name {_SOURCE_KINDS}.")
    if (options.column is not None or options.keep) and not groups.has_tables:
        raise UsageError("--column and --keep are for .parquet tables, and none is given", "Leave them out.")
    return parts[0] if len(parts) == 1 else JoinedSource(tuple(parts))


class NamedPictures:
    """A ``Source`` of single pictures, documents, videos and URLs, as the shell expands ``*.jpg``.

    Keys are the names as typed (see ``make_item`` and ``named_items``); a repeated key is one item.
    ``media``: what to take of videos and animations.
    """

    def __init__(self, names: Sequence[str], media: MediaOptions = DEFAULT_MEDIA) -> None:
        self._items: dict[str, Item] = {}
        for name in names:
            # Private addresses are allowed: the user typed them.
            items = named_items(name, media) or [make_item(name, "", allow_private=True)]
            self._items |= {item.key: item for item in items}

    def __iter__(self) -> Iterator[Item]:
        yield from self._items.values()

    def count(self) -> int:
        """The number of items."""
        return len(self._items)

    def notes(self) -> list[str]:
        """Always empty: every picture named is an item."""
        return []


class PeekedSource:
    """A ``Source`` like ``source``, which can be iterated only once, with its first item read ahead.

    ``first``: that item, which iterating yields too; None if there are no items. Creating it waits for the
    item, which may take a while on a pipe.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        items = iter(source)
        self.first = next(items, None)
        self._items: Iterator[Item] | None = items if self.first is None else chain([self.first], items)

    def __iter__(self) -> Iterator[Item]:
        if self._items is None:
            return iter(self._source)  # raises that it was read already
        items, self._items = self._items, None
        return items

    def count(self) -> int | None:
        """The source's count, with the first item; None if unknown."""
        return self._source.count()

    def notes(self) -> list[str]:
        """The source's notes."""
        return self._source.notes()


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """A ``Source`` of the items of several sources, one after another.

    Their keys must not overlap, which is not checked.
    """

    parts: tuple[Source, ...]

    def __iter__(self) -> Iterator[Item]:
        for part in self.parts:
            yield from part

    def count(self) -> int | None:
        """The sum of the counts of all parts; None if the count of one is None."""
        counts = [part.count() for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def notes(self) -> list[str]:
        """The notes of all parts, in order."""
        return [note for part in self.parts for note in part.notes()]


@dataclass(frozen=True, slots=True)
class _PrefixedSource:
    """``source`` with ``name/`` before its keys."""

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
class _SourceGroups:
    """Arguments by kind: all single pictures are one source, and so are all shards and all tables."""

    options: SourceOptions
    pictures: list[str] = field(default_factory=list)
    shards: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)
    # Folders, globs and lists, with the prefix for their keys if there are several.
    containers: list[tuple[str, Source]] = field(default_factory=list)
    has_tables: bool = False

    def add(self, text: str) -> None:
        if not text:
            raise PictureNotFound("the name of a source is empty", f"Name {_SOURCE_KINDS}.")
        if text == "-":
            self.containers.append(("stdin", ListFileSource("-", self.options.allow_private)))
            return
        if "://" in text[:16] or text[:5].lower() == "data:":
            self._add_url(text)
            return
        path = os.path.expanduser(text)
        if os.path.isdir(path):
            self._add_folder(path)
        elif os.path.lexists(path):
            self._add_file(path)
        elif os.path.lexists(os.path.expanduser(split_pages(text)[0])):
            self.pictures.append(text)
        elif _BRACES.search(text):
            for name in _expand_braces(path):
                self._add_expanded(name, text)
        elif set(text) & set("*?["):
            self._add_pattern(path, text)
        else:
            what, hint = describe_missing(path, "no such file or folder")
            raise PictureNotFound(f"{key_of(text)}: {what}", hint)

    def parts(self) -> list[Source]:
        bare: list[Source] = []
        if self.pictures:
            bare.append(NamedPictures(self.pictures, self.options.media))
        if self.shards:
            bare.append(WebDatasetSource(self.shards, _short_names(self.shards)))
        if self.tables:
            bare.append(self._table_source(self.tables, _short_names(self.tables)))
        if len(self.containers) + len(bare) == 1:
            return bare or [self.containers[0][1]]
        # A picture that was typed as 2020/a.jpg is not the one of a folder called 2020.
        taken = {key_of(str(Path(name))).split("/")[0] for name in self.pictures}
        named: list[Source] = []
        for name, source in self.containers:
            unique, number = name, 1
            while unique in taken:
                number += 1
                unique = f"{name}-{number}"
            taken.add(unique)
            named.append(_PrefixedSource(unique, source))
        return bare + named

    def _add_url(self, url: str) -> None:
        kind = extension_of(url.partition("?")[0].partition("#")[0])
        if kind in TABLES | SHARDS | LISTS or url.lower().endswith(_COMPRESSED):
            raise UsageError(
                f"{url[:120]}: shards, tables and lists have to be local files",
                "Download it first, or mount it.",
            )
        self.pictures.append(url)

    def _add_folder(self, folder: str) -> None:
        check_folder(folder)
        self._refuse_output(folder)
        kinds = Counter(extension_of(entry.name) for entry in os.scandir(folder) if entry.name[0] not in "._")
        name = key_of(os.path.basename(os.path.abspath(folder))) or "root"
        source: Source
        if any(kinds[kind] for kind in self.options.extensions) or not any(
            kinds[kind] for kind in SHARDS | TABLES
        ):
            source = FolderSource(
                folder, None, self.options.extensions, self.options.hidden, self.options.media
            )
        elif any(kinds[kind] for kind in TABLES):
            if any(kinds[kind] for kind in SHARDS):
                raise UsageError(
                    f"{key_of(folder)} contains both tar shards and Parquet files",
                    f"Say which: '{key_of(folder)}/*.tar' or '{key_of(folder)}/*.parquet'.",
                )
            source = self._container_source(folder, None, TABLES)
        else:
            source = self._container_source(folder, None, SHARDS)
        self.containers.append((name, source))

    def _add_pattern(self, pattern: str, typed: str) -> None:
        root, parts = split_glob(pattern)
        if pattern.lower().endswith(_COMPRESSED):
            raise _compressed_error(typed)
        kind = extension_of(parts[-1])
        if os.path.isdir(root):
            check_folder(root)
        source: Source
        if kind in LISTS:
            for name in self._matching(root, parts, frozenset((kind,))):
                self._add_file(os.path.join(root, name))
            return
        if kind in SHARDS | TABLES:
            source = self._container_source(root, parts, frozenset((kind,)))
        else:
            # An explicit extension is taken as it is, whether known or not.
            extensions = None if kind and not set(kind) & set("*?[]") else self.options.extensions
            source = FolderSource(root, parts, extensions, self.options.hidden, self.options.media)
            if not os.path.isdir(root) or next(source.names(), None) is None:
                seen = " ".join(source.notes())
                raise PictureNotFound(
                    f"{key_of(typed)} matches no picture", seen or f"You are in {Path.cwd()}."
                )
        self.containers.append((key_of(os.path.basename(os.path.abspath(root))) or "root", source))

    def _add_expanded(self, name: str, typed: str) -> None:
        if not os.path.lexists(name):
            raise PictureNotFound(
                f"{key_of(name)}: no such file, expanded from {key_of(typed)}",
                "Name files that exist, or fetch the missing ones first.",
            )
        self._add_file(name)

    def _add_file(self, name: str) -> None:
        self._refuse_output(name)
        kind, path = extension_of(name), Path(name)
        if name.lower().endswith(_COMPRESSED) or (kind in SHARDS and compression_of(path)):
            raise _compressed_error(name)
        if kind in SHARDS:
            self.shards.append(path)
        elif kind in TABLES:
            self.tables.append(path)
        elif kind in LISTS:
            self.containers.append((key_of(path.stem), ListFileSource(name, self.options.allow_private)))
        elif kind in PICTURE_EXTENSIONS or kind_by_extension(kind) is not None:
            self.pictures.append(name)
        elif kind in (".csv", ".tsv", ".json", ".zip"):
            raise UsageError(
                f"{key_of(name)}: {kind} files are not supported",
                'Convert it to a list: a path or URL per line (.txt), or {"picture": ..., ...} (.jsonl).',
            )
        else:
            raise UsageError(
                f"{key_of(name)}: its extension is not that of a picture, list, shard or table",
                f"Name {_SOURCE_KINDS}. To read it as a picture anyway: echo NAME | vlfit batch - ...",
            )

    def _refuse_output(self, name: str) -> None:
        output = self.options.output
        if output is not None and output.exists() and os.path.exists(name) and output.samefile(name):
            raise UsageError(
                f"{key_of(name)} is both a source and the output",
                "Name another output.",
            )

    def _container_source(self, root: str, parts: tuple[str, ...] | None, kinds: frozenset[str]) -> Source:
        """The shards or tables in a folder, with keys relative to it."""
        names = self._matching(root, parts, kinds)
        paths = [Path(root) / name for name in names]
        keys = [key_of(name) for name in names]
        if kinds <= TABLES:
            return self._table_source(paths, keys)
        if compression_of(paths[0]):
            raise _compressed_error(str(paths[0]))
        return WebDatasetSource(paths, keys)

    def _matching(self, root: str, parts: tuple[str, ...] | None, kinds: frozenset[str]) -> list[str]:
        """Files below ``root``. Raises ``PictureNotFound`` for none, ``UsageError`` for an unreadable one."""
        folder = FolderSource(root, parts, kinds, self.options.hidden)
        names = []
        for name in folder.names() if os.path.isdir(root) else ():
            if isinstance(name, Unreadable):
                raise UsageError(name.message, name.hint)
            # Spark and others write marker files (_SUCCESS, _metadata).
            if not os.path.basename(name).startswith("_"):
                names.append(name)
        if not names:
            what = " or ".join(sorted(kinds))
            raise PictureNotFound(f"{key_of(root)}: no {what} file matches", f"You are in {Path.cwd()}.")
        return names

    def _table_source(self, paths: list[Path], names: list[str]) -> Source:
        self.has_tables = True
        return ParquetSource(
            paths,
            names,
            column=self.options.column,
            keep=self.options.keep,
            allow_private=self.options.allow_private,
        )


def _short_names(paths: list[Path]) -> list[str]:
    """File names if they are unique, else the paths as typed."""
    short = [path.name for path in paths]
    return [key_of(name) for name in (short if len(set(short)) == len(short) else map(str, paths))]


def _expand_braces(text: str) -> Iterator[str]:
    """Expand ``shard-{000..123}.tar`` and ``{train,val}.tar`` as a shell does. Raises ``UsageError``."""
    names = [text]
    while any(_BRACES.search(name) for name in names):
        longer: list[str] = []
        for name in names:
            longer += _expand_first_brace(name)
            if len(longer) > _MAX_EXPANDED:
                raise UsageError(f"{key_of(text)} means more than {_MAX_EXPANDED:,} files", "Name fewer.")
        names = longer
    yield from names


def _expand_first_brace(name: str) -> Iterator[str]:
    match = _BRACES.search(name)
    if match is None:
        yield name
        return
    before, behind = name[: match.start()], name[match.end() :]
    if match[3] is not None:
        yield from (before + one + behind for one in match[3].split(","))
        return
    width = len(match[1]) if match[1].startswith("0") or len(match[1]) == len(match[2]) else 0
    first, last = int(match[1][:18]), int(match[2][:18])
    for number in range(first, min(last, first + _MAX_EXPANDED) + 1):
        yield f"{before}{number:0{width}d}{behind}"


def _compressed_error(name: str) -> UsageError:
    return UsageError(f"{key_of(name)} is compressed", COMPRESSED_HINT)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A ``Source`` of one shard of ``source``: part ``index`` (from 1) of ``of``, chosen by a hash of the
    key.

    Adding pictures to ``source`` later does not move others to another part. Raises ``UsageError`` unless
    ``index`` is 1 to ``of``.
    """

    source: Source
    index: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.of:
            raise UsageError(
                f"there is no part {self.index} of {self.of}",
                f"Write 1/{self.of} to {self.of}/{self.of}." if self.of > 0 else _SHARD_HINT,
            )

    def __iter__(self) -> Iterator[Item]:
        return (item for item in self.source if hash_of(item.key) % self.of == self.index - 1)

    def count(self) -> int | None:
        """Estimated number of items: the source's count divided by ``of``, as counting would hash all keys.

        With a million pictures in eight parts it is right within one percent. None if the source's count is.
        """
        total = self.source.count()
        return None if total is None else round(total / self.of)

    @property
    def count_is_estimate(self) -> bool:
        """Whether ``count`` is an estimate: false for part 1 of 1."""
        return self.of > 1

    def notes(self) -> list[str]:
        """Notes of the whole source."""
        return self.source.notes()


_SHARD_HINT = "Write --shard 1/8 on the first of eight machines, 2/8 on the second, ..."


def parse_shard(text: str) -> tuple[int, int]:
    """Parse ``--shard``: ``2/8`` gives (2, 8). Raises ``UsageError`` for other text.

    Whether there is such a part is checked by ``ShardSource``.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"--shard is {text!r}", _SHARD_HINT)
    return int(match[1]), int(match[2])
