"""Sidecars of pictures that were done in earlier runs, from what the output says of them: no model is asked.

Knows how records are read back, and that neither they nor the items need fit into memory. Does not know which
sidecars there are to be (``output.py``) or what is in them.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vlfit.tasks.batch.items import Item, KeySet, Record, Source
from vlfit.tasks.batch.jsonl import records_in

# Items that are held at a time, some 40 MiB of them: for each so many the output is read once.
_AT_ONCE = 100_000
_LINES = re.compile(r"_waiting-\d{5,}\.jsonl")
_NEEDED = ("key", "text", "summary", "objects", "sidecar_error", "other")


def write_late(
    output: Path, items: Iterable[Item], wanted: KeySet, write: Callable[[Item, Record], object]
) -> int:
    """``write`` each of ``items`` whose key is in ``wanted``, with its record. Gives how many there were."""
    many = 0
    done = (item for item in items if item.key in wanted)
    while some := {item.key: item for item in islice(done, _AT_ONCE)}:
        for record in records_of(output):
            item = some.pop(str(record.get("key")), None)
            if item is not None:
                write(item, record)
                many += 1
            if not some:
                break
    return many


def without_sidecars(output: Path) -> KeySet:
    """The keys of the records that say that a sidecar could not be written."""
    return KeySet(str(record["key"]) for record in records_of(output) if record.get("sidecar_error"))


def records_of(output: Path) -> Iterator[Record]:
    """The records of an output: of a table what sidecars are made of."""
    if not output.is_dir():
        yield from records_in(output)
        return
    for part in sorted(output.iterdir()):
        if part.match("part-*.parquet"):
            yield from _rows(part)
        elif _LINES.fullmatch(part.name):
            yield from records_in(part)


def _rows(part: Path) -> Iterator[Record]:
    from vlfit.tasks.batch.parquet import open_table

    table: Any = open_table(part)
    columns = [name for name in table.schema_arrow.names if name in _NEEDED]
    for batch in table.iter_batches(columns=columns, use_threads=False):
        for row in batch.to_pylist():
            other = row.pop("other", None)  # what found no place in a column of its own
            yield {
                **{name: value for name, value in row.items() if value is not None},
                **(json.loads(other) if other else {}),
            }


class Passing:
    """``source`` gone through once, by whoever does what is left: items that ``is_done`` are kept in
    ``done``, for want of a second time.
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
        return self._source.count()

    def notes(self) -> list[str]:
        """What the source has to say."""
        return self._source.notes()
