"""The words that the parts of a batch share: an item, where items come from, where records go.

Knows nothing of models, of files, or of how many things run at once. Sources, sinks and sidecars are made
elsewhere; whatever keeps to these protocols can be one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]
"""One line of the output: ``key``, what the model said, and what it cost. JSON can hold it."""


@dataclass(frozen=True, slots=True)
class Item:
    """One picture to be worked on, not read yet.

    ``key`` names it in the output: unique in its source and the same in every run (the path below the
    source's folder, ``shard.tar#member``, ``table.parquet#row``). ``read`` gives the bytes of the file and
    may raise ``PictureError``; it is called once for each try, in any thread, and is a bound method of a
    small frozen dataclass, so that an item can be pickled. ``path`` is the picture's own file, where it has
    one: sidecars go beside it. ``extra`` is carried into the record under ``extra`` as it is.
    """

    key: str
    read: Callable[[], bytes]
    path: Path | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


class Source(Protocol):
    """Items, in the same order in every run while nothing is added. Cheap to go through: no picture is read.

    A part of a source that cannot be read (a folder, a shard) is one item, whose ``read`` says what is wrong.
    """

    def __iter__(self) -> Iterator[Item]: ...
    def count(self) -> int | None:
        """How many items there are, or None where that takes as long as reading them."""
        ...

    def notes(self) -> list[str]:
        """What the last pass left out, and why, in sentences for a person; none if nothing."""
        ...


class Sink(Protocol):
    """Takes finished records, from one thread. What ``write`` has taken survives the end of the process at
    any instant, or is as if it had never been written; ``flush`` makes that hold for the end of the machine.

    No record is changed before ``open``, which mends what a process left half-written. All may raise
    ``VlfitError``, of a full disk.
    """

    def done_keys(self) -> Iterator[str]:
        """The keys of all records that are in the output, before the first ``write``. Raises ``UsageError``
        for what is no output of a batch.
        """
        ...

    def open(self) -> None:
        """Make the output, or ready to go on. ``write`` does it where nobody has. Any number of times."""
        ...

    def write(self, record: Record) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None:
        """Flush and let go. May be called twice."""
        ...


class Sidecar(Protocol):
    """Writes what was said of a picture beside it, or into it, for programs that look there.

    Called before the record is written, so that a record says that its sidecar is there too: after a kill the
    last few are written again, and the second time must leave the same as the first. Raises ``VlfitError``.
    """

    def write(self, item: Item, record: Record) -> None: ...
    def notes(self) -> list[str]:
        """What was not written, and why, in sentences for a person: files with other words are left alone."""
        ...
