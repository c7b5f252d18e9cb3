"""Messages of a batch on a Ray cluster: chunks of items to the workers, results back to the driver.

A chunk is one row of a Ray dataset, and the unit of work that is repeated when a worker dies. Imports no Ray.
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlfit.api.conversation import ImagePart, VideoPart
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
    """A picture or clip that the driver read for workers that cannot, or the error of reading it.

    ``len`` of it: bytes of the encoded picture or frames; 0 for an error.
    """

    content: bytes | ImagePart | VideoPart | VlfitError

    @classmethod
    def read_from(cls, item: Item) -> "SentPicture":
        """Read the picture of ``item``; a ``VlfitError`` becomes ``content``."""
        try:
            return cls(item.read())
        except VlfitError as error:
            return cls(error)

    def __len__(self) -> int:
        if isinstance(self.content, VideoPart):
            return sum(map(len, self.content.frames))
        if isinstance(self.content, ImagePart):
            return len(self.content.data)
        return len(self.content) if isinstance(self.content, bytes) else 0

    def read(self) -> bytes | ImagePart | VideoPart:
        """Return ``content``, or raise it if it is an error: replaces ``Item.read`` on the worker."""
        if isinstance(self.content, VlfitError):
            raise self.content
        return self.content


@dataclass(frozen=True, slots=True)
class ListingEnd:
    """What the listing task knows at the end of the source.

    ``count``: items sent to workers; ``skipped``: items that earlier runs settled; ``notes``:
    ``Source.notes()``.
    """

    count: int
    notes: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class ItemChunk:
    """Message to a worker: some items to process.

    ``sent``: the pictures of ``items``, in their order, if workers cannot read them; else empty. ``end``: set
    in the last chunk. ``error``: why listing the source failed, which ends the run; None if it did not.
    """

    items: tuple[Item, ...] = ()
    sent: tuple[SentPicture, ...] = ()
    end: ListingEnd | None = None
    error: VlfitError | None = None

    def readable_items(self) -> list[Item]:
        """The items, whose ``read`` returns the pictures in ``sent``; if ``sent`` is empty, ``items`` as they
        are.
        """
        if not self.sent:
            return list(self.items)
        return [replace(item, read=sent.read) for item, sent in zip(self.items, self.sent, strict=True)]


@dataclass(frozen=True, slots=True)
class ItemChunkResult:
    """Message of a worker: the outcomes of one ``ItemChunk``.

    ``worker``: ``host:pid``; ``model``: the name of its model; ``end``: that of the chunk. ``error``: an
    error that concerns all pictures and ends the run; ``outcomes`` is empty then. ``messages``: the backend's
    messages since the worker's last result.
    """

    worker: str
    model: str = ""
    outcomes: tuple[Outcome, ...] = ()
    end: ListingEnd | None = None
    error: VlfitError | None = None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Arguments of a worker. ``concurrency``, ``readers``, ``tries``: as for ``open_for_batch``.

    ``folder``: working directory of the driver, so that relative names mean the same on the worker;
    ``version``: the driver's version of vlfit; ``keep_going``: as in ``ExecutorOptions``.
    """

    task: PictureTask
    backend: BackendSpec
    concurrency: int | None
    readers: int | None
    tries: int
    folder: str
    version: str
    keep_going: bool = False


@dataclass(slots=True)
class UnsettledItems:
    """The items of ``source`` whose key is not settled. ``settled``: sorted hashes (``hash_of``) of settled
    keys.

    ``skipped``: number of settled items so far in the present iteration, or in the last one.
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


def split_into_chunks(items: Iterable[Item], size: int, *, send: bool) -> Iterator[ItemChunk]:
    """Split ``items`` into chunks of ``size`` items; the last, which is smaller or empty, has ``end`` set.

    ``send``: read the pictures here and put them into ``sent``; a chunk then also ends once it has
    ``MAX_CHUNK_BYTES`` of them.
    """
    count = 0
    chunk: list[Item] = []
    sent: list[SentPicture] = []
    for item in items:
        count += 1
        chunk.append(item)
        if send:
            sent.append(SentPicture.read_from(item))
        if len(chunk) == size or sum(map(len, sent)) >= MAX_CHUNK_BYTES:
            yield ItemChunk(tuple(chunk), tuple(sent))
            chunk, sent = [], []
    yield ItemChunk(tuple(chunk), tuple(sent), end=ListingEnd(count))


def to_bytes(thing: ItemChunk | ItemChunkResult) -> bytes:
    """Pickle a message, for one cell of a Ray dataset."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def from_bytes(cell: bytes) -> Any:
    """Unpickle the message of ``to_bytes``. Only for data of the same batch's processes: unpickling runs
    code.
    """
    return pickle.loads(cell)
