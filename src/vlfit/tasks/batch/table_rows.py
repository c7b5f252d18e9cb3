"""The bytes of one row of a Parquet file, while several threads ask for rows near one another.

Parquet has no way to a single row: its pages are unpacked from the start of a row group. So a place in the
file is held open, with the last rows that it gave, and whoever asks next takes from there. In memory are
these rows and the pages that they came from, never a row group. Does not know which rows there are.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from vlfit.errors import NotAPicture, PictureError, PictureNotFound, PictureTooLarge, UsageError
from vlfit.tasks.batch.list_files import picture_named
from vlfit.tasks.batch.names import shown_name
from vlfit.tasks.batch.table_columns import first_line, open_table
from vlfit.tasks.pictures import MAX_FILE_BYTES
from vlfit.units import MIB

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
