"""Which picture is next: those whose next try is due, then the source's. Bounds how many are under way.

Knows order and time. Does not know what is done with a picture, or how it went.
"""

import heapq
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vlfit.tasks.batch.item import Item


@dataclass(slots=True, eq=False)
class Task:
    """One picture under way. ``number`` counts from 0 in the order of the source. The rest is the crew's."""

    item: Item
    number: int
    owner: Any
    tries: int = 0
    digest: bytes | None = None
    picture: Any = None


@dataclass(order=True)
class _Due:
    when: float
    number: int
    task: Task = field(compare=False)


class Intake:
    """Any thread may call. ``most`` tasks are open at a time: taken, and not settled.

    ``ahead``: so many at most are taken and not ``released``, for whoever wants them in the order of the
    source; None: nobody does.
    """

    def __init__(self, items: Iterable[Item], most: int, owner: Any, ahead: int | None = None) -> None:
        self._items: Iterator[Item] = iter(items)
        self._most = most
        self._owner = owner
        self._ahead = ahead
        self._released = 0
        self._changed = threading.Condition()
        self._due: list[_Due] = []
        self._taken = 0
        self._open = 0
        self._exhausted = False
        self._closed = False
        self.problem: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether nothing will come any more and nothing is under way."""
        return self._exhausted and self._open == 0

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def stuck(self) -> bool:
        """Whether nothing is under way, and nothing more is given out before something is released."""
        return self._open == 0 and not self._exhausted and not self._may_take()

    def take(self) -> Task | None:
        """The next task, when there is one; None after the last, or after ``close``, or where the source
        cannot be gone through any further: ``problem`` says why.
        """
        with self._changed:
            while not self._closed and not self.over:
                now = time.monotonic()
                if self._due and self._due[0].when <= now:
                    return heapq.heappop(self._due).task
                if not self._exhausted and self._may_take():
                    try:
                        item = next(self._items, None)
                    except Exception as error:  # nobody knows what is behind this place
                        self.problem = error
                        self._closed = True
                        self._changed.notify_all()
                        return None
                    if item is not None:
                        self._open += 1
                        self._taken += 1
                        return Task(item, self._taken - 1, self._owner)
                    self._exhausted = True
                    self._changed.notify_all()
                    continue
                self._changed.wait(self._due[0].when - now if self._due else None)
            return None

    def again(self, task: Task, seconds: float) -> None:
        """Give ``task`` out once more after ``seconds``."""
        with self._changed:
            heapq.heappush(self._due, _Due(time.monotonic() + seconds, task.number, task))
            self._changed.notify()

    def settle(self) -> None:
        """A task is over, however it ended."""
        with self._changed:
            self._open -= 1
            self._changed.notify_all() if self.over else self._changed.notify()

    def release(self) -> None:
        """One more, in order, has been given to whoever waits for it."""
        with self._changed:
            self._released += 1
            self._changed.notify()

    def _may_take(self) -> bool:
        behind = self._ahead is None or self._taken - self._released < self._ahead
        return self._open < self._most and behind

    def close(self) -> None:
        """Give out nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
