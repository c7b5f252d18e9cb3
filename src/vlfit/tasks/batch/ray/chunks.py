"""Messages between the machines of a cluster: chunks of items out, results back.

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
    """The bytes of a picture, read on the driver for workers that cannot read it, or the error of reading.

    Its length is that of the bytes, 0 for an error.
    """

    content: bytes | ImagePart | VideoPart | VlfitError

    @classmethod
    def read_from(cls, item: Item) -> "SentPicture":
        """Read the picture of ``item``. An error becomes the content."""
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
        """The bytes; raises the error if there is one. For ``Item.read`` on the worker."""
        if isinstance(self.content, VlfitError):
            raise self.content
        return self.content


@dataclass(frozen=True, slots=True)
class ListingEnd:
    """What is known when the source has been listed to its end.

    ``count``: items sent to workers; ``skipped``: items that earlier runs settled; ``notes``: of the source.
    """

    count: int
    notes: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class ItemChunk:
    """Items for a worker, one message.

    ``sent``: their pictures, if workers cannot read them, else empty. ``end``: set in the last chunk.
    ``error``: listing failed; it ends the run.
    """

    items: tuple[Item, ...] = ()
    sent: tuple[SentPicture, ...] = ()
    end: ListingEnd | None = None
    error: VlfitError | None = None

    def readable_items(self) -> list[Item]:
        """The items; if their pictures were sent, ``read`` returns those."""
        if not self.sent:
            return list(self.items)
        return [replace(item, read=sent.read) for item, sent in zip(self.items, self.sent, strict=True)]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The outcomes of a chunk, one message.

    ``worker``: ``host:pid``; ``model``: its name; ``end``: that of the chunk; ``error``: concerns all
    pictures and ends the run, without outcomes; ``messages``: of the backend, since the last chunk.
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
    """The items of ``source`` whose key is not settled yet. ``settled``: sorted hashes of keys.

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


def split_into_chunks(items: Iterable[Item], size: int, *, send: bool) -> Iterator[ItemChunk]:
    """Split ``items`` into chunks of ``size``; the last, which may be empty, has ``end`` set.

    ``send``: read the pictures here and add them; a chunk then also ends at ``MAX_CHUNK_BYTES``.
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


def to_bytes(thing: ItemChunk | ChunkResult) -> bytes:
    """Pickle a message, for one cell of a dataset."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def from_bytes(cell: bytes) -> Any:
    """Unpickle a message. Only for data from processes of the same batch, as unpickling runs code."""
    return pickle.loads(cell)
