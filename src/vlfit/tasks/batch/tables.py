"""Pictures in Parquet files: each row is an item, ``table.parquet#17``, counted from 0 through the file.

Knows rows and the columns to carry along. Does not know how pictures are found in a table
(``table_columns.py``) or read from it (``table_rows.py``).
"""

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlfit.errors import UsageError
from vlfit.tasks.batch.item import Item
from vlfit.tasks.batch.list_files import picture_named
from vlfit.tasks.batch.names import key_of, shown_name
from vlfit.tasks.batch.readers import Unreadable
from vlfit.tasks.batch.table_columns import (
    Column,
    arrow_parquet,
    check_kept,
    first_line,
    open_table,
    picture_column,
)
from vlfit.tasks.batch.table_rows import Cell

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
