"""Write missing sidecars of earlier runs from the records in the output, without asking a model.

Neither records nor items need to fit into memory.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vlfit.tasks.batch.items import Item, KeySet, Record, Source
from vlfit.tasks.batch.jsonl import read_records

# Items in memory at a time, about 40 MiB. The output is read once for each such group.
_ITEMS_PER_PASS = 100_000
_WAITING = re.compile(r"_waiting-\d{5,}\.jsonl")
_COLUMNS = ("key", "text", "summary", "objects", "sidecar_error", "other")


def backfill(
    output: Path, items: Iterable[Item], keys: KeySet, write: Callable[[Item, Record], object]
) -> int:
    """Call ``write`` with each of ``items`` whose key is in ``keys``, and its record in ``output``.

    Items without a record are left out. Returns the number of calls. Reads the output once per 100,000 items.
    """
    written = 0
    done = (item for item in items if item.key in keys)
    while group := {item.key: item for item in islice(done, _ITEMS_PER_PASS)}:
        for record in read_output_records(output):
            item = group.pop(str(record.get("key")), None)
            if item is not None:
                write(item, record)
                written += 1
            if not group:
                break
    return written


def keys_without_sidecars(output: Path) -> KeySet:
    """Keys of the records in ``output`` with a ``sidecar_error``."""
    return KeySet(str(record["key"]) for record in read_output_records(output) if record.get("sidecar_error"))


def read_output_records(output: Path) -> Iterator[Record]:
    """All records of a ``.jsonl`` file or a Parquet folder; of Parquet, only the fields that sidecars need.

    Lines that are not JSON objects are skipped. No records if ``output`` does not exist.
    """
    if not output.is_dir():
        yield from read_records(output)
        return
    for part in sorted(output.iterdir()):
        if part.match("part-*.parquet"):
            yield from _rows(part)
        elif _WAITING.fullmatch(part.name):
            yield from read_records(part)


def _rows(part: Path) -> Iterator[Record]:
    from vlfit.tasks.batch.parquet import open_table

    table: Any = open_table(part)
    columns = [name for name in table.schema_arrow.names if name in _COLUMNS]
    for batch in table.iter_batches(columns=columns, use_threads=False):
        for row in batch.to_pylist():
            other = row.pop("other", None)  # fields without a column of their own
            yield {
                **{name: value for name, value in row.items() if value is not None},
                **(json.loads(other) if other else {}),
            }


class DoneItemCollector:
    """A ``Source`` of the items of ``source`` that collects in ``done`` those for which ``is_done(key)`` is
    true.

    For the backfill of a source that can be iterated only once, such as a list on standard input: ``done`` is
    complete after the iteration.
    """

    def __init__(self, source: Source, is_done: Callable[[str], bool]) -> None:
        self._source = source
        self._is_done = is_done
        self.done: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        for item in self._source:
            if self._is_done(item.key):
                self.done.append(item)
            yield item

    def count(self) -> int | None:
        """The number of items of the whole source; None if unknown."""
        return self._source.count()

    def notes(self) -> list[str]:
        """The source's notes."""
        return self._source.notes()
