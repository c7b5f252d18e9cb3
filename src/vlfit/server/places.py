"""How many completions a server takes at once, running and waiting; and when to come again if all are taken.

Knows: numbers, a clock, and the engine's own account of its pace. Does not know: requests, HTTP, or who runs
next (the engine's scheduler). Belongs to one event loop, so that counting needs no lock.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vlfit.backends.base import Accountable, LocalBackend
from vlfit.errors import InvalidRequest, QueueFull

LONGEST_WAIT = 60  # seconds; clients take a longer Retry-After for none at all


class Held:
    """The places of one request. One is given back as each of its completions ends, the rest with it.

    ``keep``: work is done for it that cannot be stopped, so that they stay taken until ``let_go``, also where
    the request is over before: else whoever hangs up could have the server work for more than it takes.
    """

    def __init__(self, places: "Places", count: int) -> None:
        self._places = places
        self._count = count
        self._kept = False
        self._over = False

    def give_back(self) -> None:
        """One of them, if any is left."""
        if self._count:
            self._count -= 1
            self._places.taken -= 1

    def keep(self) -> None:
        self._kept = True

    def let_go(self) -> None:
        self._kept = False
        if self._over:
            self.end()

    def end(self) -> None:
        """The request is over."""
        self._over = True
        while self._count and not self._kept:
            self.give_back()


class Places:
    """``limit`` places, one for each completion; None: as many as anybody wants. ``taken`` are so now.

    ``refused``: requests that were told to come again.
    """

    def __init__(
        self, backend: LocalBackend, limit: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._promised = -math.inf
        self.limit = limit
        self.taken = 0
        self.refused = 0

    @contextmanager
    def take(self, count: int) -> Iterator[Held]:
        """``count`` places for as long as the block lasts, at most.

        Raises ``QueueFull`` if they are not free, ``InvalidRequest`` if so many can never be.
        """
        if self.limit is not None and self.taken + count > self.limit:
            raise self._refusal(count, self.limit)
        self.taken += count
        held = Held(self, count)
        try:
            yield held
        finally:
            held.end()

    def _refusal(self, count: int, limit: int) -> Exception:
        if count > limit:
            return InvalidRequest(
                f"n is {count}, and this server takes {limit} completions at once, running and waiting",
                f"ask for at most {limit}",
                param="n",
            )
        self.refused += 1
        wait = self._wait(count)
        return QueueFull(
            f"{self.taken} completions run or wait here already, and the server takes {limit} at once",
            f"try again in {wait} s",
            retry_after=wait,
        )

    def _wait(self, count: int) -> int:
        """Whole seconds until ``count`` places should be free for who is refused now.

        Everyone who is refused is promised the places after those promised last, so that they do not all come
        again at once. What is promised runs out with time.
        """
        now = self._clock()
        promised = max(self._promised, now) + count * self._seconds_each()
        self._promised = min(promised, now + LONGEST_WAIT)
        return max(math.ceil(self._promised - now), 1)

    def _seconds_each(self) -> float:
        """How far apart completions have ended so far while the engine was at work.

        If none has, it is at least as long as the engine has worked.
        """
        if not isinstance(self._backend, Accountable):
            return 1.0
        counters = self._backend.account().counters
        return counters.seconds / max(counters.finished, 1)
