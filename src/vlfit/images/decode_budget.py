"""RAM for large pictures, shared by all decoding of this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vlfit.images.cancellation import check_cancelled
from vlfit.images.decode_wire import TICK_SECONDS


class MemoryBudget:
    """A budget of ``limit`` bytes of RAM. Thread-safe.

    ``take`` or ``try_take`` bytes before decoding, and ``release`` as many afterwards; ``hold`` counts pixels
    that stay. While nothing is taken, a request of any size is granted. Waiting requests are served in order
    of arrival, with two exceptions. One that fits passes larger ones, until the first in the queue has been
    the first for ``max_passed_seconds``. And when bytes are released, the waiting requests of at most half as
    many go before all others: several large pictures in turn do not hold up a small one.
    """

    def __init__(self, limit: int, max_passed_seconds: float = 20.0) -> None:
        self.limit = limit
        self._max_passed_seconds = max_passed_seconds
        self._taken = 0  # by pictures that are decoded
        self._held = 0  # by pixels that stay
        self._waiting: list[_Request] = []
        self._first_since = 0.0  # when ``_waiting[0]`` became the first
        self._changed = threading.Condition()

    @property
    def in_use(self) -> int:
        """Bytes taken and held, which may exceed ``limit``."""
        return self._taken + self._held

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait in ``take``."""
        return len(self._waiting)

    @property
    def longest_wait(self) -> float:
        """Seconds that a request of at most a quarter of ``limit`` has waited; 0 if there is none."""
        with self._changed:
            waiting = [each.since for each in self._waiting if each.count <= self.limit // 4]
            return time.monotonic() - min(waiting) if waiting else 0.0

    def take(self, count: int, check: Callable[[], None] = check_cancelled) -> None:
        """Wait until ``count`` bytes are free, and take them.

        ``check``: called while it waits; raises to end the wait.
        """
        request = _Request(count)
        with self._changed:
            if not self._waiting:
                self._first_since = time.monotonic()
            self._waiting.append(request)
            try:
                while not self._is_next(request):
                    self._changed.wait(TICK_SECONDS)
                    check()
                self._taken += count
            finally:
                if self._waiting[0] is request:
                    self._first_since = time.monotonic()
                self._waiting.remove(request)
                self._changed.notify_all()

    def try_take(self, count: int) -> bool:
        """Take ``count`` bytes without waiting. False, and none taken, if too few are free or others wait."""
        with self._changed:
            if self._waiting or not self._fits(count):
                return False
            self._taken += count
            return True

    def release(self, count: int) -> None:
        """Return ``count`` bytes that were taken."""
        if not count:  # of a small picture: nothing has changed for those that wait
            return
        with self._changed:
            self._taken -= count
            for request in self._waiting:
                request.goes_first |= request.count <= count // 2
            self._changed.notify_all()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Within the block, count ``count`` bytes of decoded pixels as in use, even above ``limit``.

        The pixels exist already, so this does not wait; later requests do.
        """
        with self._changed:
            self._held += count
        try:
            yield
        finally:
            with self._changed:
                self._held -= count
                self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        # A picture decoded alone always fits: a request that holds pixels may be waiting for its next one.
        return not self._taken or self._taken + self._held + count <= self.limit

    def _is_next(self, request: "_Request") -> bool:
        if not self._fits(request.count):
            return False
        if any(each.goes_first for each in self._waiting):
            return request.goes_first
        is_first = self._waiting[0] is request
        return is_first or time.monotonic() - self._first_since < self._max_passed_seconds


class _Request:
    """Bytes that are waited for. ``goes_first``: they are few, and larger ones have been served meanwhile."""

    __slots__ = ("count", "goes_first", "since")

    def __init__(self, count: int) -> None:
        self.count = count
        self.since = time.monotonic()
        self.goes_first = False
