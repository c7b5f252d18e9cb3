"""Messages between the machines of a cluster: chunks of items out, results back.

A chunk is one row of a Ray dataset, and the unit of work that is repeated when a worker dies. Imports no Ray.
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlfit.backends.opening import BackendSpec
from vlfit.errors import VlfitError
from vlfit.tasks.batch.executor import Outcome
from vlfit.tasks.batch.items import Item, hash_of
from vlfit.tasks.batch.job import PictureTask
from vlfit.units import MIB

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_CHUNK_BYTES = 32 * MIB
"""Limit of a chunk with pictures in it, as Ray keeps several such blocks in memory or on disk."""


@dataclass(frozen=True, slots=True)
class SentPicture:
    """A picture read on the driver for machines that cannot read it, or the error of reading it."""

    content: bytes | VlfitError

    @classmethod
    def of(cls, item: Item) -> "SentPicture":
        try:
            return cls(item.read())
        except VlfitError as error:
            return cls(error)

    def __len__(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else 0

    def read(self) -> bytes:
        """As ``Item.read``."""
        if isinstance(self.content, bytes):
            return self.content
        raise self.content


@dataclass(frozen=True, slots=True)
class ListingEnd:
    """End of the listing: ``count`` items, ``skipped`` were settled before; ``notes`` of the source."""

    count: int
    notes: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class ItemChunk:
    """Items. ``sent``: their pictures, or empty. ``end``: set in the last chunk. ``error``: ends the run."""

    items: tuple[Item, ...] = ()
    sent: tuple[SentPicture, ...] = ()
    end: ListingEnd | None = None
    error: VlfitError | None = None

    def readable_items(self) -> list[Item]:
        """The items, with ``read`` working on this machine."""
        if not self.sent:
            return list(self.items)
        return [replace(item, read=sent.read) for item, sent in zip(self.items, self.sent, strict=True)]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Outcomes of a chunk. ``worker``: host and process; ``model``: name of the model; ``messages``: of the
    backend, since the last chunk.
    """

    worker: str
    model: str = ""
    outcomes: tuple[Outcome, ...] = ()
    end: ListingEnd | None = None
    error: VlfitError | None = None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Arguments of a worker. ``at_once``, ``readers``, ``tries``: as for ``open_for_batch``.

    ``folder``: working directory of the driver, so that relative names mean the same; ``version``: its
    vlfit; ``keep_going``: as in ``ExecutorOptions``.
    """

    task: PictureTask
    backend: BackendSpec
    at_once: int | None
    readers: int | None
    tries: int
    folder: str
    version: str
    keep_going: bool = False


@dataclass(slots=True)
class UnsettledItems:
    """The items of ``source`` whose key hash is not in ``settled`` (sorted).

    ``skipped`` counts the others, in the last iteration.
    """

    source: Iterable[Item]
    settled: "NDArray[np.uint64]"
    skipped: int = 0

    def __iter__(self) -> Iterator[Item]:
        self.skipped = 0
        for item in self.source:
            key_hash = np.uint64(hash_of(item.key))
            position = np.searchsorted(self.settled, key_hash)
            if position < len(self.settled) and self.settled[position] == key_hash:
                self.skipped += 1
            else:
                yield item


def chunked(items: Iterable[Item], size: int, *, send: bool) -> Iterator[ItemChunk]:
    """``items`` in chunks of ``size``, the last with ``end`` set. ``send``: with their pictures."""
    count = 0
    chunk: list[Item] = []
    sent: list[SentPicture] = []
    for item in items:
        count += 1
        chunk.append(item)
        if send:
            sent.append(SentPicture.of(item))
        if len(chunk) == size or sum(map(len, sent)) >= MAX_CHUNK_BYTES:
            yield ItemChunk(tuple(chunk), tuple(sent))
            chunk, sent = [], []
    yield ItemChunk(tuple(chunk), tuple(sent), end=ListingEnd(count))


def to_bytes(thing: ItemChunk | ChunkResult) -> bytes:
    """Pickle, for one cell of a dataset."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def from_bytes(cell: bytes) -> Any:
    """Unpickle ``to_bytes``. Only used for data from processes of the same batch."""
    return pickle.loads(cell)
