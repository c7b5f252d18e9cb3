"""Pictures in Parquet files: each row is an item, ``table.parquet#17``, counted from 0 through the file.

Knows rows and the columns to carry along. Does not know how pictures are found in a table
(``tasks/batch/parquet.py``) or read from it (``tasks/batch/parquet.py``).
"""

import datetime
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, Literal

from vlfit.errors import NotAPicture, PictureError, PictureNotFound, PictureTooLarge, UsageError
from vlfit.tasks.batch.items import Item, Unreadable, key_of, shown_name
from vlfit.tasks.batch.list_files import picture_named
from vlfit.tasks.pictures import MAX_FILE_BYTES
from vlfit.units import MIB

# Which column of a Parquet file holds pictures, and how: bytes, a record of bytes and path, or a name.
#
# Knows the forms in which data sets keep pictures, Hugging Face's among them, and what to say of files that
# are none of these. Imports pyarrow when it is used. Does not know how rows are read
# (``tasks/batch/parquet.py``).


Form = Literal["bytes", "record", "name"]

_PICTURE_NAMES = ("image", "picture", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content")
_ADDRESS_NAMES = (
    *("image", "picture", "url", "image_url", "img_url", "image_path", "path"),
    *("file_name", "filename", "file", "filepath"),
)


@dataclass(frozen=True, slots=True)
class Column:
    """Where pictures are. ``name`` form: a path below the table's folder, or a URL."""

    name: str
    form: Form


def arrow_parquet() -> ModuleType:
    """``pyarrow.parquet``. Raises ``UsageError`` where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"Parquet files need pyarrow, which cannot be imported: {error}", "pip install 'vlfit[parquet]'"
        ) from None
    parquet: ModuleType = pyarrow.parquet
    return parquet


def open_table(path: Path) -> Any:
    """A ``ParquetFile`` that reads as little ahead as it can.

    Raises ``UsageError`` for a file that is gone, cut off or no Parquet, in words.
    """
    parquet = arrow_parquet()
    shown = shown_name(path)
    try:
        # Not ahead of what is asked for, and in pieces: by itself it reads whole row groups.
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    except FileNotFoundError:
        raise UsageError(f"{shown}: no such file", f"You are in {Path.cwd()}.") from None
    except Exception as error:  # a footer may hold anything
        raise UsageError(
            f"{shown} is no Parquet file, or broken: {first_line(error)}",
            "Copy it again. A Parquet file is only whole when its writer has closed it.",
        ) from None


def picture_column(schema: Any, wanted: str | None, shown: str) -> Column:
    """The column ``wanted``, or the one that can only be meant. Raises ``UsageError``, naming those there."""
    columns = {field.name: form_of(field.type) for field in schema}
    if wanted is not None:
        if wanted not in columns:
            raise UsageError(f"{shown} has no column {wanted!r}", f"It has {_listed(schema)}.")
        form = columns[wanted]
        if form is None:
            raise UsageError(
                f"{shown}: column {wanted!r} holds {schema.field(wanted).type}, which is no picture",
                f"It has {_listed(schema)}.",
            )
        return Column(wanted, form)
    held = [Column(name, form) for name, form in columns.items() if form in ("bytes", "record")]
    named = [Column(name, form) for name, form in columns.items() if name.lower() in _ADDRESS_NAMES and form]
    found = held if len(held) != 0 else named
    if len(found) > 1:
        best = [column for column in found if column.name.lower() in _PICTURE_NAMES]
        found = best or found
    if len(found) == 1:
        return found[0]
    names = " or ".join(f"--column {column.name}" for column in found)
    what = "several columns that may hold pictures" if found else "no column that is sure to hold pictures"
    hint = f"Say which: {names}." if found else f"Say which with --column. It has {_listed(schema)}."
    raise UsageError(f"{shown} has {what}", hint)


def form_of(kind: Any) -> Form | None:
    """How a column of the Arrow type ``kind`` may hold pictures."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "bytes"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "name"
    if types.is_struct(kind):
        inner = {field.name: form_of(field.type) for field in kind}
        return "record" if inner.get("bytes") == "bytes" and inner.get("path", "name") == "name" else None
    return None


def check_kept(schema: Any, keep: tuple[str, ...], shown: str) -> None:
    """Raises ``UsageError`` for columns to be carried along that are not there, or that JSON cannot hold."""
    import pyarrow.types as types

    for name in keep:
        if name not in schema.names:
            raise UsageError(f"{shown} has no column {name!r}", f"It has {_listed(schema)}.")
        kind = schema.field(name).type
        if form_of(kind) in ("bytes", "record") or types.is_fixed_size_binary(kind):
            raise UsageError(
                f"{shown}: column {name!r} holds bytes, which cannot be carried along",
                "Keep columns of numbers and words.",
            )


def first_line(error: Exception) -> str:
    """What Arrow says first; the rest is of its own code."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _listed(schema: Any) -> str:
    names = [f"{field.name} ({str(field.type)[:40]})" for field in schema]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


# The bytes of one row of a Parquet file, while several threads ask for rows near one another.
#
# Parquet has no way to a single row: its pages are unpacked from the start of a row group. So a place in
# the file is held open, with the last rows that it gave, and whoever asks next takes from there. In memory
# are these rows and the pages that they came from, never a row group. Does not know which rows there are.


# Rows are taken from Arrow as many at a time as are about so large together, and twice that is kept: pictures
# are read ahead by a few dozen, and who comes a little late still finds his.
_TAKEN_BYTES = 16 * MIB
_FEWEST, _MOST = 8, 1024
# One for those in front, one for the end of the file before, one for who comes far too late.
_PLACES = 3

_Group = tuple[Path, tuple[int, int], str, int]
"""A column in a row group of a file as it was at a time."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The picture in ``row`` of row group ``group``, both from 0. ``label`` is what errors call it.

    ``stamp``: size and time of the file, so that nobody reads from one that has been written anew.
    """

    path: Path
    column: str
    group: int
    row: int
    label: str
    stamp: tuple[int, int]
    allow_private: bool = False

    def read(self) -> bytes:
        """Raises ``PictureNotFound`` for an empty cell, ``NotAPicture`` for one that cannot be read,
        ``PictureTooLarge``.
        """
        value = _places.value(self)
        if isinstance(value, dict):
            # A data set may hold some pictures itself, and of others the name.
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and value:
            return bytes(picture_named(value, str(self.path.parent), allow_private=self.allow_private).read())
        if not isinstance(value, bytes) or not value:
            raise PictureNotFound(f"{self.label}: the cell is empty", "The table has no picture there.")
        if len(value) > MAX_FILE_BYTES:
            raise PictureTooLarge(
                f"{self.label} is larger than {MAX_FILE_BYTES // MIB} MiB", "Scale the picture down first."
            )
        return value


@dataclass(slots=True)
class _Place:
    """Somewhere in a group of ``rows`` rows: ``batches`` gives what comes next, ``kept`` is what it gave."""

    group: "_Group"
    rows: int
    batches: Iterator[Any]
    next_row: int = 0
    kept: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=2))

    def is_before(self, cell: Cell) -> bool:
        """Whether the cell is here, or still to come."""
        first = self.kept[0][0] if self.kept else 0
        return self.group == _group_of(cell) and cell.row >= first

    def value(self, row: int) -> Any:
        while row >= self.next_row:
            batch = next(self.batches, None)
            if batch is None:
                raise ValueError(f"its row group ends before row {row}")
            self.kept.append((self.next_row, batch.column(0)))
            self.next_row += len(batch)
        if self.next_row == self.rows:
            self.batches = iter(())  # it holds the last pages
        start, values = next(entry for entry in reversed(self.kept) if entry[0] <= row)
        return values[row - start].as_py()


class _Places:
    """Those that this process holds open. One thread reads at a time: unpacking is quick beside decoding."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: list[_Place] = []  # the last used last
        self._broken: dict[_Group, tuple[int, str]] = {}

    def value(self, cell: Cell) -> Any:
        with self._lock:
            group = _group_of(cell)
            first, why = self._broken.get(group, (None, ""))
            if first is not None and cell.row >= first:
                raise _unreadable(cell, why)
            place: _Place | None = None
            try:
                place = self._take(cell)
                value = place.value(cell.row)
            except (PictureError, MemoryError):
                raise
            except Exception as error:  # pages may hold anything
                # Each row behind would be looked for from the start of the group again.
                self._broken[group] = (place.next_row if place else 0, first_line(error))
                raise _unreadable(cell, first_line(error)) from None
            self._open.append(place)
            del self._open[:-_PLACES]
            return value

    def _take(self, cell: Cell) -> _Place:
        """The place that is the least before ``cell``, out of the list; or a new one."""
        near = [place for place in self._open if place.is_before(cell)]
        if near:
            best = max(near, key=lambda place: place.next_row)
            self._open.remove(best)
            return best
        import pyarrow

        try:
            table = open_table(cell.path)
        except UsageError as error:
            raise NotAPicture(error.message, error.hint) from None
        pyarrow.default_memory_pool().release_unused()  # pages of the last group
        group = table.metadata.row_group(cell.group)
        rows = _rows_at_once(group, cell.column)
        batches = table.iter_batches(
            batch_size=rows, row_groups=[cell.group], columns=[cell.column], use_threads=False
        )
        return _Place(_group_of(cell), group.num_rows, iter(batches))


def _group_of(cell: Cell) -> _Group:
    return cell.path, cell.stamp, cell.column, cell.group


def _rows_at_once(group: Any, column: str) -> int:
    leaves = (group.column(index) for index in range(group.num_columns))
    size = sum(
        int(leaf.total_uncompressed_size)
        for leaf in leaves
        if leaf.path_in_schema == column or leaf.path_in_schema.startswith(f"{column}.")
    )
    return min(max(_TAKEN_BYTES * int(group.num_rows) // max(size, 1), _FEWEST), _MOST)


def _unreadable(cell: Cell, why: str) -> NotAPicture:
    return NotAPicture(
        f"{cell.label} cannot be read: {why}", f"Copy {shown_name(cell.path)} again, or write it anew."
    )


_places = _Places()

_ROWS = 1024  # whose small columns are in memory at once


class ParquetSource:
    """A ``Source`` of the rows of ``paths``. ``names`` are what keys call them: ``NAME#row``.

    ``column`` holds the pictures; None: the one that can only be meant. Columns ``keep`` go into ``extra``.
    Raises ``UsageError`` where the first table lacks these; one behind it that does is an item that fails.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        names: Sequence[str] | None = None,
        *,
        column: str | None = None,
        keep: tuple[str, ...] = (),
        allow_private: bool = False,
    ) -> None:
        self.paths = tuple(paths)
        self.names = tuple(names) if names is not None else tuple(key_of(path.name) for path in paths)
        self.column = column
        self.keep = keep
        self.allow_private = allow_private
        arrow_parquet()
        if self.paths:
            self._columns(open_table(self.paths[0]), self.paths[0])

    def __iter__(self) -> Iterator[Item]:
        for path, name in zip(self.paths, self.names, strict=True):
            try:
                yield from self._rows(path, name)
            except UsageError as error:
                yield Item(name, Unreadable(name, error.message, error.hint).read)

    def count(self) -> int:
        """From the ends of the files, where they say how many rows they have."""
        return sum(map(self._count, self.paths))

    def notes(self) -> list[str]:
        """None: every row is an item."""
        return []

    def _count(self, path: Path) -> int:
        try:
            return int(open_table(path).metadata.num_rows)
        except UsageError:
            return 1

    def _columns(self, table: Any, path: Path) -> Column:
        shown = shown_name(path)
        check_kept(table.schema_arrow, self.keep, shown)
        return picture_column(table.schema_arrow, self.column, shown)

    def _rows(self, path: Path, name: str) -> Iterator[Item]:
        path = path.absolute()
        table = open_table(path)
        column = self._columns(table, path)
        found = path.stat()
        stamp = (found.st_size, found.st_mtime_ns)
        read = [*self.keep, *([column.name] if column.form == "name" else [])]
        start = 0
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            for row, values in enumerate(_values(table, group, read, count, shown_name(path))):
                key = f"{name}#{start + row}"
                extra = {kept: _plain(values[kept]) for kept in self.keep}
                if column.form == "name":
                    yield self._named(key, values[column.name], path, extra)
                else:
                    cell = Cell(path, column.name, group, row, key, stamp, self.allow_private)
                    yield Item(key, cell.read, None, extra)
            start += count

    def _named(self, key: str, value: Any, path: Path, extra: dict[str, Any]) -> Item:
        if not isinstance(value, str) or not value:
            empty = Unreadable(key, f"{key}: the cell is empty", "The table names no picture there.")
            return Item(key, empty.read, None, extra)
        item = picture_named(value, str(path.parent), allow_private=self.allow_private)
        return replace(item, key=key, extra=extra)


def _values(table: Any, group: int, columns: list[str], count: int, shown: str) -> Iterator[dict[str, Any]]:
    """The small columns of the rows of a row group. Raises ``UsageError`` where they cannot be read."""
    if not columns:
        yield from ({} for _ in range(count))
        return
    batches = table.iter_batches(batch_size=_ROWS, row_groups=[group], columns=columns, use_threads=False)
    while True:
        try:
            batch = next(batches, None)
            rows = batch.to_pylist() if batch is not None else None
        except Exception as error:  # pages may hold anything
            raise UsageError(
                f"{shown} is broken in row group {group}: {first_line(error)}",
                "Copy it again. What is behind was not read.",
            ) from None
        if rows is None:
            return
        yield from rows


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
