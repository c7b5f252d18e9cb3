"""Records as Parquet: a folder of parts, as Spark, DuckDB and Hugging Face read them, whole after any kill.

A Parquet file cannot grow: it is whole when it is closed, and not before. So records wait as JSON lines in
``_waiting-00007.jsonl`` until they are enough for ``part-00007.parquet``, which gets its name when it is
whole; programs that read such folders pass over names that begin with ``_``. Knows which columns each task
has. Does not know what records mean.
"""

import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vlfit.errors import CannotWrite, UsageError
from vlfit.tasks.batch.items import Record
from vlfit.tasks.batch.job import Kind
from vlfit.tasks.batch.jsonl import Lines, keys_in, line_of, records_in, sync_folder
from vlfit.tasks.batch.parquet import arrow_parquet, first_line, open_table
from vlfit.units import MIB

# A part is made at once, in some tenths of a second, of rows that are in memory a thousand at a time.
PART_ROWS = 10_000
PART_BYTES = 64 * MIB
_GROUP_ROWS = 1000
_PART = re.compile(r"part-(\d{5,})\.parquet")
_WAITING = re.compile(r"_waiting-(\d{5,})\.jsonl")
_ROOM = "what was written before is whole: make room, and give the same command again"


class ParquetSink:
    """A ``Sink``. ``kind`` is the task, which decides the columns: all parts have the same.

    Raises ``UsageError`` for an output that is a file, for a part that is broken, or without pyarrow.
    """

    def __init__(self, output: Path, *, kind: Kind) -> None:
        arrow_parquet()
        if output.exists() and not output.is_dir():
            raise UsageError(
                f"{output} is a file: Parquet output is a folder of parts",
                "Name another, such as out.parquet.",
            )
        self.output = output
        self._schema = schema_of(kind)
        self._lines: Lines | None = None
        self._rows = self._bytes = 0
        names = self._names()
        parts = {int(found[1]) for found in map(_PART.fullmatch, names) if found}
        waiting = {int(found[1]) for found in map(_WAITING.fullmatch, names) if found}
        self._number = max(waiting - parts, default=max(parts, default=-1) + 1)
        # Left by a kill: rows that are in a part by now, and parts that were not whole.
        for number in waiting & parts:
            self._waiting(number).unlink()
        for name in names:
            if name.startswith("_part-") and name.endswith(".new"):
                (output / name).unlink()

    def done_keys(self) -> Iterator[str]:
        """Of all parts, and of what waits for the next."""
        for name in self._names():
            if _PART.fullmatch(name):
                yield from self._keys_of_part(self.output / name)
        yield from keys_in(self._waiting())

    def open(self) -> None:
        """Nothing: the folder is made with its first record."""

    def write(self, record: Record) -> None:
        """Takes it for the part that is under way. Raises ``CannotWrite``; then nothing is changed."""
        if self._lines is None:
            self._lines = Lines(self._waiting())
            self._rows = sum(1 for _ in keys_in(self._waiting()))
            self._bytes = self._waiting().stat().st_size
        self._lines.append(record)
        self._rows += 1
        self._bytes += len(line_of(record))
        if self._rows >= PART_ROWS or self._bytes >= PART_BYTES:
            self._make_part()

    def flush(self) -> None:
        """What waits survives the end of the machine too."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """Makes a part of what waits, also of what an earlier run left. May be called twice."""
        if self._waiting().exists():
            self._make_part()

    def _make_part(self) -> None:
        waiting, part = self._waiting(), self.output / f"part-{self._number:05d}.parquet"
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if next(keys_in(waiting), None) is not None:
            try:
                self._write_part(part)
            except OSError as error:
                raise CannotWrite(f"cannot write {part}: {error.strerror or error}", _ROOM) from error
            self._number += 1
        waiting.unlink()  # its rows are in the part; if this does not happen, it is done when opened again
        self._rows = self._bytes = 0

    def _write_part(self, part: Path) -> None:
        fresh = part.with_name(f"_{part.name}.new")
        records = records_in(self._waiting())
        with (
            fresh.open("wb") as file,
            arrow_parquet().ParquetWriter(file, self._schema) as writer,
        ):
            while rows := list(islice(records, _GROUP_ROWS)):
                writer.write_batch(self._batch(rows))
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(part)
        sync_folder(part.parent)

    def _batch(self, records: list[Record]) -> Any:
        import pyarrow

        rows = [row_of(record, self._schema.names) for record in records]
        try:
            return pyarrow.RecordBatch.from_pylist(rows, schema=self._schema)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
            # Nothing that was paid for is lost because a field is of another type than it should be.
            return pyarrow.RecordBatch.from_pylist([self._sound(row) for row in rows], schema=self._schema)

    def _sound(self, row: Record) -> Record:
        import pyarrow

        try:
            pyarrow.RecordBatch.from_pylist([row], schema=self._schema)
            return row
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
            words = {name: value for name, value in row.items() if name in _WORDS and isinstance(value, str)}
            rest = {name: value for name, value in row.items() if name not in words}
            return {**words, "other": json.dumps(rest)}

    def _keys_of_part(self, part: Path) -> Iterator[str]:
        hint = "Take it out of the folder: its pictures are done again then."
        try:
            for batch in open_table(part).iter_batches(columns=["key"], use_threads=False):
                yield from batch.column(0).to_pylist()
        except UsageError as error:
            raise UsageError(error.message, hint) from None
        except Exception as error:  # pages may hold anything
            raise UsageError(f"{part} is no part of a batch: {first_line(error)}", hint) from None

    def _waiting(self, number: int | None = None) -> Path:
        return self.output / f"_waiting-{self._number if number is None else number:05d}.jsonl"

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.output)) if self.output.exists() else []


# Columns that hold text, of every task. ``value``, ``extra`` and ``other`` are JSON in text.
_WORDS = ("key", "picture", "text", "model", "finish_reason")
_JSON = frozenset(("value", "extra", "other"))


def schema_of(kind: Kind) -> Any:
    """The columns of a task: those of ``Work.record``; what may hold anything is JSON in text."""
    import pyarrow as pa

    text, texts, count = pa.string(), pa.list_(pa.string()), pa.int64()
    pixels = ("width", "height", "seen_width", "seen_height", "tokens", "frames")
    image = pa.struct([*((name, count) for name in pixels), ("notes", texts)])
    tokens = ("prompt_tokens", "image_tokens", "completion_tokens", "cached_tokens", "total_tokens")
    box = [("label", text), ("box", pa.list_(count)), ("box_1000", pa.list_(pa.float64()))]
    found = [("objects", pa.list_(pa.struct(box))), ("warnings", texts)]
    own: dict[Kind, list[tuple[str, Any]]] = {
        "caption": [],
        "ask": [("value", text)],
        "scene": [("summary", text), ("words", texts), *found],
        "detect": [("width", count), ("height", count), *found],
    }
    return pa.schema(
        [
            *((name, text) for name in _WORDS),
            *own[kind],
            ("images", pa.list_(image)),
            ("usage", pa.struct([(name, count) for name in tokens])),
            ("same_as", text),
            ("extra", text),
            ("sidecar_error", text),
            ("other", text),
        ]
    )


def row_of(record: Record, names: list[str]) -> Record:
    """``record`` with the columns ``names``. What has no column of its own is JSON in ``other``."""
    row = {name: _unicode(record[name]) for name in names if name in record}
    for name in _JSON & row.keys():
        row[name] = json.dumps(record[name])
    further = {name: value for name, value in record.items() if name not in row}
    return {**row, "other": json.dumps(further)} if further else row


def _unicode(value: Any) -> Any:
    """Parquet holds UTF-8: half a character of JSON, or a byte of a name, is written as an escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_unicode(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _unicode(inner) for name, inner in value.items()}
    return value
