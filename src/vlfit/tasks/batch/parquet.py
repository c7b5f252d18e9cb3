"""Source of the pictures in Parquet files: each row is an item, ``table.parquet#17``, counted from 0.

The picture column holds bytes, records of bytes and path (as Hugging Face data sets do), or paths and URLs.
Parquet has no random access to rows: pages are decoded from the start of a row group. So readers stay open,
with the last rows they returned, for threads that ask for nearby rows; a row group is never in memory whole.
pyarrow is imported on use.
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

from vlfit.api.conversation import ImagePart
from vlfit.errors import NotAPicture, PictureError, PictureNotFound, PictureTooLarge, UsageError
from vlfit.tasks.batch.items import Item, Unreadable, display_name, key_of
from vlfit.tasks.batch.list_files import make_item
from vlfit.tasks.pictures import MAX_FILE_BYTES
from vlfit.units import MIB

ColumnForm = Literal["bytes", "record", "name"]

_PICTURE_NAMES = ("image", "picture", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content")
_PATH_NAMES = (
    *("image", "picture", "url", "image_url", "img_url", "image_path", "path"),
    *("file_name", "filename", "file", "filepath"),
)


@dataclass(frozen=True, slots=True)
class PictureColumn:
    """The column of a table that holds the pictures. ``name``: of the column; ``form``: of its cells.

    Forms: ``bytes``: the picture file; ``record``: a struct of ``bytes`` and ``path``; ``name``: a path
    relative to the table's folder, or a URL.
    """

    name: str
    form: ColumnForm


def import_parquet() -> ModuleType:
    """Import and return ``pyarrow.parquet``. Raises ``UsageError`` if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"Parquet files need pyarrow, which cannot be imported: {error}",
            "Install it: pip install 'vlfit[parquet]'.",
        ) from None
    parquet: ModuleType = pyarrow.parquet
    return parquet


def open_table(path: Path) -> Any:
    """Open ``path`` as a ``pyarrow.parquet.ParquetFile``, with as little read-ahead as possible.

    Raises ``UsageError`` for a file that is missing, truncated or not Parquet, or if pyarrow is not
    installed.
    """
    parquet = import_parquet()
    shown = display_name(path)
    try:
        # By default pyarrow reads whole row groups ahead.
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    except FileNotFoundError:
        raise UsageError(f"{shown}: no such file", f"You are in {Path.cwd()}.") from None
    except Exception as error:  # a broken footer may raise anything
        raise UsageError(
            f"{shown} is not a Parquet file, or broken: {first_line(error)}",
            "Copy it again. A Parquet file is only complete once its writer has closed it.",
        ) from None


def find_picture_column(schema: Any, name: str | None, shown: str) -> PictureColumn:
    """The column with pictures: the one called ``name``; None: the only plausible one.

    Plausible are columns of bytes or records; without any, columns of text called ``url``, ``path``, ... Of
    several, those with a usual name, such as ``image``. ``shown``: the table's name in errors. Raises
    ``UsageError``, listing the columns, if none or more than one is left.
    """
    columns = {field.name: column_form(field.type) for field in schema}
    if name is not None:
        if name not in columns:
            raise UsageError(f"{shown} has no column {name!r}", f"It has {_column_list(schema)}.")
        form = columns[name]
        if form is None:
            raise UsageError(
                f"{shown}: column {name!r} has type {schema.field(name).type}, which cannot hold pictures",
                f"It has {_column_list(schema)}.",
            )
        return PictureColumn(name, form)
    held = [PictureColumn(name, form) for name, form in columns.items() if form in ("bytes", "record")]
    named = [
        PictureColumn(name, form) for name, form in columns.items() if name.lower() in _PATH_NAMES and form
    ]
    found = held if len(held) != 0 else named
    if len(found) > 1:
        best = [column for column in found if column.name.lower() in _PICTURE_NAMES]
        found = best or found
    if len(found) == 1:
        return found[0]
    names = " or ".join(f"--column {column.name}" for column in found)
    what = "several columns that may hold pictures" if found else "no column that clearly holds pictures"
    hint = f"Choose one: {names}." if found else f"Choose one with --column. It has {_column_list(schema)}."
    raise UsageError(f"{shown} has {what}", hint)


def column_form(kind: Any) -> ColumnForm | None:
    """In which form (see ``PictureColumn``) a column of the Arrow type ``kind`` can hold pictures; None: it
    cannot.
    """
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "bytes"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "name"
    if types.is_struct(kind):
        inner = {field.name: column_form(field.type) for field in kind}
        return "record" if inner.get("bytes") == "bytes" and inner.get("path", "name") == "name" else None
    return None


def check_kept_columns(schema: Any, keep: tuple[str, ...], shown: str) -> None:
    """Raise ``UsageError`` if a column of ``keep`` is not in ``schema``, or holds bytes, which JSON cannot.

    ``shown``: the table's name in errors.
    """
    import pyarrow.types as types

    for name in keep:
        if name not in schema.names:
            raise UsageError(f"{shown} has no column {name!r}", f"It has {_column_list(schema)}.")
        kind = schema.field(name).type
        if column_form(kind) in ("bytes", "record") or types.is_fixed_size_binary(kind):
            raise UsageError(
                f"{shown}: column {name!r} holds bytes, which cannot be copied into the output",
                "Keep columns of numbers and text.",
            )


def first_line(error: Exception) -> str:
    """The first line of the message of Arrow's ``error``, at most 200 characters.

    Further lines are a stack trace of Arrow.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _column_list(schema: Any) -> str:
    names = [f"{field.name} ({str(field.type)[:40]})" for field in schema]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


# Rows are decoded in batches of about this size, and the last two are kept: a few dozen pictures are read
# ahead, not quite in order.
_BATCH_BYTES = 16 * MIB
_MIN_BATCH_ROWS, _MAX_BATCH_ROWS = 8, 1024
# One at the front, one at the end of the previous file, one for a late retry.
_MAX_READERS = 3

_GroupKey = tuple[Path, tuple[int, int], str, int]
"""File, its size and time, column, row group."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell that holds a picture, not read yet: ``column`` of the file ``path``.

    ``row`` counts from 0 in the row group ``group``, which counts from 0 in the file. ``label`` names the
    cell in errors. ``stamp``: size in bytes and modification time in ns of the file, so that a rewritten file
    gets a new reader. ``allow_private``: a URL in the cell may lead into a private network.
    """

    path: Path
    column: str
    group: int
    row: int
    label: str
    stamp: tuple[int, int]
    allow_private: bool = False

    def read(self) -> bytes:
        """Read the picture's bytes, from the file or URL if the cell names one.

        Thread-safe; cells are decoded one at a time. Raises ``PictureError``: ``PictureNotFound`` for an
        empty cell, ``NotAPicture`` for one that cannot be decoded, and what reading the file or URL raises.
        """
        value = _readers.value(self)
        if isinstance(value, dict):
            # A data set may embed some pictures and name others.
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and value:
            content = make_item(value, str(self.path.parent), allow_private=self.allow_private).read()
            if isinstance(content, ImagePart):
                return bytes(content.data)
            if not isinstance(content, bytes):
                raise NotAPicture(f"{self.label} is a video", "Tables hold pictures.")
            return content
        if not isinstance(value, bytes) or not value:
            raise PictureNotFound(f"{self.label}: the cell is empty", "The table has no picture there.")
        if len(value) > MAX_FILE_BYTES:
            raise PictureTooLarge(
                f"{self.label} is larger than {MAX_FILE_BYTES // MIB} MiB", "Scale the picture down first."
            )
        return value


@dataclass(slots=True)
class _RowReader:
    """A position in a row group of ``rows`` rows: ``recent`` holds the last ones read."""

    group: "_GroupKey"
    rows: int
    batches: Iterator[Any]
    next_row: int = 0
    recent: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=2))

    def can_reach(self, cell: Cell) -> bool:
        """Whether the cell is in ``recent``, or still ahead."""
        first = self.recent[0][0] if self.recent else 0
        return self.group == _group_key(cell) and cell.row >= first

    def value(self, row: int) -> Any:
        while row >= self.next_row:
            batch = next(self.batches, None)
            if batch is None:
                raise ValueError(f"the row group ends before row {row}")
            self.recent.append((self.next_row, batch.column(0)))
            self.next_row += len(batch)
        if self.next_row == self.rows:
            self.batches = iter(())  # frees the last pages
        start, values = next(entry for entry in reversed(self.recent) if entry[0] <= row)
        return values[row - start].as_py()


class _RowReaders:
    """Open readers of this process. One thread reads at a time: it is fast compared to decoding pictures."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._readers: list[_RowReader] = []  # most recently used last
        self._errors: dict[_GroupKey, tuple[int, str]] = {}

    def value(self, cell: Cell) -> Any:
        with self._lock:
            group = _group_key(cell)
            first, why = self._errors.get(group, (None, ""))
            if first is not None and cell.row >= first:
                raise _unreadable_cell(cell, why)
            reader: _RowReader | None = None
            try:
                reader = self._reader_for(cell)
                value = reader.value(cell.row)
            except (PictureError, MemoryError):
                raise
            except Exception as error:  # broken pages may raise anything
                # Later rows would each be searched from the start of the group again.
                self._errors[group] = (reader.next_row if reader else 0, first_line(error))
                raise _unreadable_cell(cell, first_line(error)) from None
            self._readers.append(reader)
            del self._readers[:-_MAX_READERS]
            return value

    def _reader_for(self, cell: Cell) -> _RowReader:
        """The reader closest before ``cell``, removed from the list; or a new one."""
        near = [reader for reader in self._readers if reader.can_reach(cell)]
        if near:
            best = max(near, key=lambda reader: reader.next_row)
            self._readers.remove(best)
            return best
        import pyarrow

        try:
            table = open_table(cell.path)
        except UsageError as error:
            raise NotAPicture(error.message, error.hint) from None
        pyarrow.default_memory_pool().release_unused()  # free pages of the previous group
        group = table.metadata.row_group(cell.group)
        rows = _batch_rows(group, cell.column)
        batches = table.iter_batches(
            batch_size=rows, row_groups=[cell.group], columns=[cell.column], use_threads=False
        )
        return _RowReader(_group_key(cell), group.num_rows, iter(batches))


def _group_key(cell: Cell) -> _GroupKey:
    return cell.path, cell.stamp, cell.column, cell.group


def _batch_rows(group: Any, column: str) -> int:
    leaves = (group.column(index) for index in range(group.num_columns))
    size = sum(
        int(leaf.total_uncompressed_size)
        for leaf in leaves
        if leaf.path_in_schema == column or leaf.path_in_schema.startswith(f"{column}.")
    )
    return min(max(_BATCH_BYTES * int(group.num_rows) // max(size, 1), _MIN_BATCH_ROWS), _MAX_BATCH_ROWS)


def _unreadable_cell(cell: Cell, why: str) -> NotAPicture:
    return NotAPicture(
        f"{cell.label} cannot be read: {why}", f"Copy or write {display_name(cell.path)} again."
    )


_readers = _RowReaders()

_LISTING_ROWS = 1024  # rows per batch of the small columns


class ParquetSource:
    """A ``Source`` of the rows of Parquet files: an item for each row, with the key ``NAME#row``.

    Rows are counted from 0 in each file. ``names``: the NAME of each file; None: their file names.
    ``column``: the one with the pictures; None: found by ``find_picture_column``. ``keep``: columns to
    copy into ``Item.extra``. ``allow_private``: URLs may lead into private networks.

    The constructor opens the first file. Raises ``UsageError`` if it cannot be read or lacks these
    columns, or if pyarrow is missing. A later file of which that is true is one item that fails.
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
        import_parquet()
        if self.paths:
            self._columns(open_table(self.paths[0]), self.paths[0])

    def __iter__(self) -> Iterator[Item]:
        for path, name in zip(self.paths, self.names, strict=True):
            try:
                yield from self._rows(path, name)
            except UsageError as error:
                yield Item(name, Unreadable(name, error.message, error.hint).read)

    def count(self) -> int:
        """Number of rows, from the footers of the files; 1 for a file that cannot be read."""
        return sum(map(self._num_rows, self.paths))

    def notes(self) -> list[str]:
        """Always empty: every row is an item."""
        return []

    def _num_rows(self, path: Path) -> int:
        try:
            return int(open_table(path).metadata.num_rows)
        except UsageError:
            return 1

    def _columns(self, table: Any, path: Path) -> PictureColumn:
        shown = display_name(path)
        check_kept_columns(table.schema_arrow, self.keep, shown)
        return find_picture_column(table.schema_arrow, self.column, shown)

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
            for row, values in enumerate(_small_columns(table, group, read, count, display_name(path))):
                key = f"{name}#{start + row}"
                extra = {kept: _to_json(values[kept]) for kept in self.keep}
                if column.form == "name":
                    yield self._item_by_name(key, values[column.name], path, extra)
                else:
                    cell = Cell(path, column.name, group, row, key, stamp, self.allow_private)
                    yield Item(key, cell.read, None, extra)
            start += count

    def _item_by_name(self, key: str, value: Any, path: Path, extra: dict[str, Any]) -> Item:
        if not isinstance(value, str) or not value:
            empty = Unreadable(key, f"{key}: the cell is empty", "The table has no picture there.")
            return Item(key, empty.read, None, extra)
        item = make_item(value, str(path.parent), allow_private=self.allow_private)
        return replace(item, key=key, extra=extra)


def _small_columns(
    table: Any, group: int, columns: list[str], count: int, shown: str
) -> Iterator[dict[str, Any]]:
    """Rows of a row group with small columns only. Raises ``UsageError`` if they cannot be read."""
    if not columns:
        yield from ({} for _ in range(count))
        return
    batches = table.iter_batches(
        batch_size=_LISTING_ROWS, row_groups=[group], columns=columns, use_threads=False
    )
    while True:
        try:
            batch = next(batches, None)
            rows = batch.to_pylist() if batch is not None else None
        except Exception as error:  # broken pages may raise anything
            raise UsageError(
                f"{shown} is broken in row group {group}: {first_line(error)}",
                "Copy it again. Later rows were not read.",
            ) from None
        if rows is None:
            return
        yield from rows


def _to_json(value: Any) -> Any:
    """``value`` converted to JSON types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): _to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
