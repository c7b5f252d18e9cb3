"""What travels between the machines of a cluster: a handful of items out, what became of them back.

A handful is one row of a Ray dataset, and the unit of what is done again when a worker dies. Knows no Ray.
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlfit.backends.opening import Wanted
from vlfit.errors import VlfitError
from vlfit.tasks.batch.executor import Outcome
from vlfit.tasks.batch.items import Item, hash_of
from vlfit.tasks.batch.job import Work
from vlfit.units import MIB

if TYPE_CHECKING:
    from numpy.typing import NDArray


MOST_BYTES = 32 * MIB
"""A handful with pictures in it is closed at so many: blocks of that size wait on disks and networks."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A picture that was read where the batch was started, for machines that cannot. Or why it was not."""

    found: bytes | VlfitError

    @classmethod
    def of(cls, item: Item) -> "Sent":
        try:
            return cls(item.read())
        except VlfitError as error:
            return cls(error)

    def __len__(self) -> int:
        return len(self.found) if isinstance(self.found, bytes) else 0

    def read(self) -> bytes:
        """As ``Item.read``."""
        if isinstance(self.found, bytes):
            return self.found
        raise self.found


@dataclass(frozen=True, slots=True)
class Listed:
    """The listing came to its end: it gave ``count`` items and passed over ``skipped`` that were settled
    before; ``notes`` are what the source has to say.
    """

    count: int
    notes: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Handful:
    """``sent`` is empty, or has one for each item. ``end``: behind the last one. ``problem`` ends the run."""

    items: tuple[Item, ...] = ()
    sent: tuple[Sent, ...] = ()
    end: Listed | None = None
    problem: VlfitError | None = None

    def to_read(self) -> list[Item]:
        """The items, such that ``read`` works where the handful is now."""
        if not self.sent:
            return list(self.items)
        return [replace(item, read=sent.read) for item, sent in zip(self.items, self.sent, strict=True)]


@dataclass(frozen=True, slots=True)
class Done:
    """What a worker has done. ``worker``: its machine and process; ``model``: what its backend calls it;
    ``told``: what its backend had to say since the last time.
    """

    worker: str
    model: str = ""
    outcomes: tuple[Outcome, ...] = ()
    end: Listed | None = None
    problem: VlfitError | None = None
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Duty:
    """What a worker is started with. ``at_once``, ``readers`` and ``tries`` are those of
    ``open_for_batch``; ``folder``: where the batch was started, so that names mean the same; ``version``: of
    vlfit there; ``keep_going``: of ``Pace``.
    """

    work: Work
    wanted: Wanted
    at_once: int | None
    readers: int | None
    tries: int
    folder: str
    version: str
    keep_going: bool = False


@dataclass(slots=True)
class Unsettled:
    """The items of ``source`` whose keys' hashes are not among ``settled``, which is sorted. ``skipped``
    counts the others, of the last pass.
    """

    source: Iterable[Item]
    settled: "NDArray[np.uint64]"
    skipped: int = 0

    def __iter__(self) -> Iterator[Item]:
        self.skipped = 0
        for item in self.source:
            number = np.uint64(hash_of(item.key))
            place = np.searchsorted(self.settled, number)
            if place < len(self.settled) and self.settled[place] == number:
                self.skipped += 1
            else:
                yield item


def handfuls(items: Iterable[Item], size: int, *, send: bool) -> Iterator[Handful]:
    """``items`` in handfuls of ``size``; the last tells that it is. ``send``: with their pictures."""
    count = 0
    some: list[Item] = []
    pictures: list[Sent] = []
    for item in items:
        count += 1
        some.append(item)
        if send:
            pictures.append(Sent.of(item))
        if len(some) == size or sum(map(len, pictures)) >= MOST_BYTES:
            yield Handful(tuple(some), tuple(pictures))
            some, pictures = [], []
    yield Handful(tuple(some), tuple(pictures), end=Listed(count))


def packed(thing: Handful | Done) -> bytes:
    """As bytes: one cell of a dataset."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def unpacked(cell: bytes) -> Any:
    """What was ``packed``. Only what another process of the same batch has packed comes here."""
    return pickle.loads(cell)
