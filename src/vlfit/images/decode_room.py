"""RAM for large pictures, shared by all decodes of this process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vlfit.images.cancellation import check_cancelled
from vlfit.images.decode_wire import TICK_SECONDS


class DecodeRoom:
    """``limit`` bytes. Served in order of arrival, but a request that fits passes larger ones that wait.

    Nobody passes one that has waited for ``max_passed_seconds``, so that it gets its turn.
    """

    def __init__(self, limit: int, max_passed_seconds: float = 20.0) -> None:
        self.limit = limit
        self._max_passed_seconds = max_passed_seconds
        self._taken = 0  # by pictures that are decoded
        self._held = 0  # by pixels that stay
        self._waiting: list[_Request] = []
        self._changed = threading.Condition()

    @property
    def in_use(self) -> int:
        return self._taken + self._held

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self, count: int) -> None:
        """Take ``count`` bytes, waiting until they are free; at most ``limit``. Raises ``Cancelled``."""
        request = _Request(count)
        with self._changed:
            self._waiting.append(request)
            try:
                while not self._is_next(request):
                    self._changed.wait(TICK_SECONDS)
                    check_cancelled()
                self._taken += count
            finally:
                self._waiting.remove(request)
                self._changed.notify_all()

    def try_take(self, count: int) -> bool:
        """Take ``count`` bytes if they are free now and nobody waits for them."""
        with self._changed:
            if self._waiting or not self._fits(count):
                return False
            self._taken += count
            return True

    def give_back(self, count: int) -> None:
        """Return ``count`` bytes that were taken."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Count ``count`` bytes of decoded pixels within the block.

        They exist already, so this never waits: others wait until they fit beside them.
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
        oldest = self._waiting[0]
        return oldest is request or time.monotonic() - oldest.since < self._max_passed_seconds


class _Request:
    __slots__ = ("count", "since")

    def __init__(self, count: int) -> None:
        self.count = count
        self.since = time.monotonic()
