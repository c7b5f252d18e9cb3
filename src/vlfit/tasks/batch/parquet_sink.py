"""Parquet output: a folder of parts, as Spark, DuckDB and Hugging Face read it. Survives a kill at any time.

A Parquet file is only valid once it is closed. So records wait as JSON lines in ``_waiting-00007.jsonl``
until there are enough for ``part-00007.parquet``, which is written under another name and renamed when
complete. Readers of such folders skip names that start with ``_``.
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
from vlfit.tasks.batch.job import TaskKind
from vlfit.tasks.batch.jsonl import JsonlFile, read_keys, read_records, sync_folder, to_line
from vlfit.tasks.batch.parquet import first_line, import_parquet, open_table
from vlfit.units import MIB

# Writing a part takes some tenths of a second, with 1000 rows in memory at a time.
PART_ROWS = 10_000
PART_BYTES = 64 * MIB
_GROUP_ROWS = 1000
_PART = re.compile(r"part-(\d{5,})\.parquet")
_WAITING = re.compile(r"_waiting-(\d{5,})\.jsonl")
_MAKE_ROOM = "What was written before is intact: free disk space and repeat the command."


class ParquetSink:
    """A ``Sink`` that writes Parquet files into the folder ``output``. ``kind``: the task, for the columns.

    Creating it removes unfinished parts that a killed run left. Raises ``UsageError`` if ``output`` is a
    file, or pyarrow is missing.
    """

    def __init__(self, output: Path, *, kind: TaskKind) -> None:
        import_parquet()
        if output.exists() and not output.is_dir():
            raise UsageError(
                f"{output} is a file, but Parquet output is a folder of parts",
                "Name another output, such as out.parquet.",
            )
        self.output = output
        self._schema = schema_for(kind)
        self._lines: JsonlFile | None = None
        self._rows = self._bytes = 0
        names = self._names()
        parts = {int(found[1]) for found in map(_PART.fullmatch, names) if found}
        waiting = {int(found[1]) for found in map(_WAITING.fullmatch, names) if found}
        self._number = max(waiting - parts, default=max(parts, default=-1) + 1)
        # Left by a kill: rows that are already in a part, and unfinished parts.
        for number in waiting & parts:
            self._waiting(number).unlink()
        for name in names:
            if name.startswith("_part-") and name.endswith(".new"):
                (output / name).unlink()

    def done_keys(self) -> Iterator[str]:
        """Keys of the records in all parts, and of those waiting for the next part.

        Raises ``UsageError`` for a broken part.
        """
        for name in self._names():
            if _PART.fullmatch(name):
                yield from self._keys_of_part(self.output / name)
        yield from read_keys(self._waiting())

    def open(self) -> None:
        """Does nothing: the first ``write`` creates the folder."""

    def write(self, record: Record) -> None:
        """Append ``record`` to those waiting, and write all of them as a part when there are enough.

        Raises ``CannotWrite``, which leaves records written before intact.
        """
        if self._lines is None:
            self._lines = JsonlFile(self._waiting())
            self._rows = sum(1 for _ in read_keys(self._waiting()))
            self._bytes = self._waiting().stat().st_size
        self._lines.append(record)
        self._rows += 1
        self._bytes += len(to_line(record))
        if self._rows >= PART_ROWS or self._bytes >= PART_BYTES:
            self._make_part()

    def flush(self) -> None:
        """Make the waiting records survive a power failure."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """Write the waiting records as a last part, those of a killed earlier run included. Idempotent.

        Raises ``CannotWrite``.
        """
        if self._waiting().exists():
            self._make_part()

    def _make_part(self) -> None:
        waiting, part = self._waiting(), self.output / f"part-{self._number:05d}.parquet"
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if next(read_keys(waiting), None) is not None:
            try:
                self._write_part(part)
            except OSError as error:
                raise CannotWrite(f"cannot write {part}: {error.strerror or error}", _MAKE_ROOM) from error
            self._number += 1
        waiting.unlink()  # its rows are in the part; after a kill here, the next run removes it
        self._rows = self._bytes = 0

    def _write_part(self, part: Path) -> None:
        fresh = part.with_name(f"_{part.name}.new")
        records = read_records(self._waiting())
        with (
            fresh.open("wb") as file,
            import_parquet().ParquetWriter(file, self._schema) as writer,
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

        rows = [to_row(record, self._schema.names) for record in records]
        try:
            return pyarrow.RecordBatch.from_pylist(rows, schema=self._schema)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
            # A field of an unexpected type must not lose answers: such rows go into ``other``.
            return pyarrow.RecordBatch.from_pylist(
                [self._salvaged_row(row) for row in rows], schema=self._schema
            )

    def _salvaged_row(self, row: Record) -> Record:
        import pyarrow

        try:
            pyarrow.RecordBatch.from_pylist([row], schema=self._schema)
            return row
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
            texts = {
                name: value for name, value in row.items() if name in _TEXT_COLUMNS and isinstance(value, str)
            }
            rest = {name: value for name, value in row.items() if name not in texts}
            return {**texts, "other": json.dumps(rest)}

    def _keys_of_part(self, part: Path) -> Iterator[str]:
        hint = "Remove it from the folder; its pictures are then done again."
        try:
            for batch in open_table(part).iter_batches(columns=["key"], use_threads=False):
                yield from batch.column(0).to_pylist()
        except UsageError as error:
            raise UsageError(error.message, hint) from None
        except Exception as error:  # pages may hold anything
            raise UsageError(f"{part} is not a part of a batch: {first_line(error)}", hint) from None

    def _waiting(self, number: int | None = None) -> Path:
        return self.output / f"_waiting-{self._number if number is None else number:05d}.jsonl"

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.output)) if self.output.exists() else []


# Text columns of every task. ``value``, ``extra`` and ``other`` are JSON as text.
_TEXT_COLUMNS = ("key", "picture", "text", "model", "finish_reason")
_ANSWER_COLUMNS = ("text", "finish_reason")
_JSON_COLUMNS = frozenset(("value", "extra", "other"))


def schema_for(kind: TaskKind) -> Any:
    """The Arrow schema of the records of task ``kind``. Fields whose type varies are columns of JSON text."""
    import pyarrow as pa

    text, texts, count = pa.string(), pa.list_(pa.string()), pa.int64()
    pixels = ("width", "height", "seen_width", "seen_height", "tokens", "frames")
    image = pa.struct([*((name, count) for name in pixels), ("notes", texts)])
    tokens = ("prompt_tokens", "image_tokens", "completion_tokens", "cached_tokens", "total_tokens")
    box = [("label", text), ("box", pa.list_(count)), ("box_1000", pa.list_(pa.float64()))]
    found = [("objects", pa.list_(pa.struct(box))), ("warnings", texts)]
    own: dict[TaskKind, list[tuple[str, Any]]] = {
        "caption": [],
        "ask": [("value", text)],
        "scene": [("summary", text), ("words", texts), *found],
        "detect": [("width", count), ("height", count), *found],
        "embed": [("embedding", pa.list_(pa.float32()))],
    }
    # A vector has no text.
    texts_of_task = [name for name in _TEXT_COLUMNS if kind != "embed" or name not in _ANSWER_COLUMNS]
    return pa.schema(
        [
            *((name, text) for name in texts_of_task),
            *own[kind],
            ("images", pa.list_(image)),
            ("usage", pa.struct([(name, count) for name in tokens])),
            ("same_as", text),
            ("extra", text),
            ("sidecar_error", text),
            ("other", text),
        ]
    )


def to_row(record: Record, names: list[str]) -> Record:
    """``record`` as a row with the columns ``names``; its other fields become JSON text in ``other``."""
    row = {name: _valid_utf8(record[name]) for name in names if name in record}
    for name in _JSON_COLUMNS & row.keys():
        row[name] = json.dumps(record[name])
    further = {name: value for name, value in record.items() if name not in row}
    return {**row, "other": json.dumps(further)} if further else row


def _valid_utf8(value: Any) -> Any:
    """``value`` with lone surrogates (from JSON or file names) escaped, as Parquet holds UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_valid_utf8(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _valid_utf8(inner) for name, inner in value.items()}
    return value
