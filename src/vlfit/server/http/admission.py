"""How many completions a server takes at once, running and waiting; and when to come again if all are taken.

Knows: numbers, a clock, and the engine's own account of its pace. Does not know: requests, HTTP, or who runs
next (the engine's scheduler). Belongs to one event loop, so that counting needs no lock.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from vlfit.backends.base import Accountable, LocalBackend
from vlfit.errors import InvalidRequest, QueueFull, RequestTooSlow, TooManyRequests
from vlfit.units import format_bytes

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


# What one client may ask for: requests in a minute, requests at once, and bytes of bodies under way.
#
# Knows: clocks and counts. Does not know: keys (a client is what it is called by), nor what requests are
# about. Belongs to one event loop, so that counting needs no lock.


MINUTE = 60.0


class Limits:
    """``a_minute`` requests of one client may begin in any minute, ``at_once`` run; None: any number."""

    def __init__(
        self,
        a_minute: int | None = None,
        at_once: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._a_minute = a_minute
        self._at_once = at_once
        self._clock = clock
        self._begun: defaultdict[str, deque[float]] = defaultdict(deque)
        self._running: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def take(self, client: str) -> Iterator[None]:
        """One request of ``client``, for as long as the block lasts. Raises ``TooManyRequests``."""
        if self._at_once is not None and self._running[client] >= self._at_once:
            raise TooManyRequests(
                f"{self._at_once} requests of this client run already, as many as one may have at once",
                "wait for one of them to end",
            )
        self._check_pace(client)
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1

    def _check_pace(self, client: str) -> None:
        if self._a_minute is None:
            return
        now, begun = self._clock(), self._begun[client]
        while begun and begun[0] <= now - MINUTE:
            begun.popleft()
        if len(begun) >= self._a_minute:
            wait = max(math.ceil(begun[0] + MINUTE - now), 1)
            raise TooManyRequests(
                f"this client has asked {len(begun)} times within a minute, as often as one may",
                f"try again in {wait} s",
                retry_after=wait,
            )
        begun.append(now)


class Bodies:
    """Bytes of all bodies that are under way or held: at most ``limit``.

    A body must come at ``pace`` bytes a second, ``patience`` seconds granted: who sends half of one and
    stays silent would else keep a connection and its memory for ever.
    """

    def __init__(self, limit: int, patience: float, pace: float = 50_000.0) -> None:
        self.limit = limit
        self.taken = 0
        self.patience = patience
        self.pace = pace

    @contextmanager
    def reading(self, receive: Receive) -> Iterator[Receive]:
        """``receive`` for one request, whose body counts for as long as the block lasts.

        Raises ``QueueFull`` or ``RequestTooSlow`` in whoever reads.
        """
        body = _Body(self, receive)
        try:
            yield body.receive
        finally:
            self.taken -= body.size


class _Body:
    def __init__(self, bodies: Bodies, receive: Receive) -> None:
        self._bodies = bodies
        self._receive = receive
        self._began = time.monotonic()
        self._whole = False
        self.size = 0

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        bodies = self._bodies
        left = self._began + bodies.patience + self.size / bodies.pace - time.monotonic()
        try:
            async with asyncio.timeout(max(left, 0.001)):
                message = await self._receive()
        except TimeoutError:
            raise RequestTooSlow(
                f"the body of the request comes too slowly: {format_bytes(self.size)} so far",
                "send it faster, or a smaller one",
            ) from None
        size = len(message.get("body", b""))
        self.size += size
        bodies.taken += size
        self._whole = not message.get("more_body", False)
        if bodies.taken > bodies.limit:
            raise QueueFull(
                f"requests of more than {format_bytes(bodies.limit)} are under way", "try again in a moment"
            )
        return message
