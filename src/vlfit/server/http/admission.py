"""Limits on admission: completions in the server, requests of one client, bytes of request bodies.

Everything here belongs to one event loop, so counting needs no lock.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from vlfit.backends.base import Backend
from vlfit.errors import InvalidRequest, QueueFull, RequestTooSlow, TooManyRequests
from vlfit.units import format_bytes

MAX_RETRY_AFTER = 60  # seconds; many clients ignore a longer Retry-After
MINUTE = 60.0


class Slots:
    """The ``count`` admission slots of one request, which ``AdmissionQueue.acquire`` took for it.

    One is released as each completion ends, the rest on ``close``. ``hold`` keeps the slots until
    uncancellable work ends (``release_hold``), even if the client hangs up: otherwise clients that hang up
    could make the server work on more than it admits.
    """

    def __init__(self, queue: "AdmissionQueue", count: int) -> None:
        self._queue = queue
        self._count = count
        self._on_hold = False
        self._closed = False

    def release_one(self) -> None:
        """Release one slot, if any is left."""
        if self._count:
            self._count -= 1
            self._queue.in_use -= 1

    def hold(self) -> None:
        """Make ``close`` release nothing until ``release_hold``."""
        self._on_hold = True

    def release_hold(self) -> None:
        """End the hold; release the slots now if ``close`` was called meanwhile."""
        self._on_hold = False
        if self._closed:
            self.close()

    def close(self) -> None:
        """Release the slots that are left, now or when the hold ends."""
        self._closed = True
        while self._count and not self._on_hold:
            self.release_one()


class AdmissionQueue:
    """Slots for at most ``limit`` completions, running and waiting together (None: no limit).

    ``backend``: its statistics give the ``retry_after`` of a refusal. ``in_use``: slots taken now.
    ``num_refused``: requests refused with ``QueueFull``.
    """

    def __init__(
        self, backend: Backend, limit: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._promised_until = -math.inf
        self.limit = limit
        self.in_use = 0
        self.num_refused = 0

    @contextmanager
    def acquire(self, count: int) -> Iterator[Slots]:
        """Take ``count`` slots for the length of the block, and yield them.

        At the end of the block the slots that are still taken are released; with ``Slots.hold``, at the end
        of the hold. Raises ``QueueFull`` if fewer than ``count`` are free, ``InvalidRequest`` if the whole
        ``limit`` is less than ``count``.
        """
        if self.limit is not None and self.in_use + count > self.limit:
            raise self._refuse(count, self.limit)
        self.in_use += count
        slots = Slots(self, count)
        try:
            yield slots
        finally:
            slots.close()

    def _refuse(self, count: int, limit: int) -> Exception:
        if count > limit:
            return InvalidRequest(
                f"n is {count}; this server takes at most {limit} completions at once, running and waiting",
                f"Set n to at most {limit}.",
                param="n",
            )
        self.num_refused += 1
        wait = self._retry_after(count)
        return QueueFull(
            f"{self.in_use} completions are running or waiting; this server takes at most {limit} at once",
            f"Try again in {wait} s.",
            retry_after=wait,
        )

    def _retry_after(self, count: int) -> int:
        """Whole seconds until ``count`` slots should be free for the request refused now.

        Each refused request is given a later time than the one before, so that they do not all retry at once.
        """
        now = self._clock()
        free_at = max(self._promised_until, now) + count * self._seconds_per_completion()
        self._promised_until = min(free_at, now + MAX_RETRY_AFTER)
        return max(math.ceil(self._promised_until - now), 1)

    def _seconds_per_completion(self) -> float:
        """Busy seconds of the engine per finished completion; all its busy seconds if none has finished."""
        if not self._backend.capabilities.account:
            return 1.0
        counters = self._backend.account().counters
        return counters.seconds / max(counters.finished, 1)


class RateLimiter:
    """Limits for each client: ``per_minute`` requests started within 60 s, ``concurrent`` running at once.

    None: no limit. ``clock``: returns seconds.
    """

    def __init__(
        self,
        per_minute: int | None = None,
        concurrent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = per_minute
        self._concurrent = concurrent
        self._clock = clock
        self._started: defaultdict[str, deque[float]] = defaultdict(deque)
        self._running: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def acquire(self, client: str) -> Iterator[None]:
        """Count a request of ``client``, running during the block. Raises ``TooManyRequests`` at a limit."""
        if self._concurrent is not None and self._running[client] >= self._concurrent:
            raise TooManyRequests(
                f"this client has {self._running[client]} requests running; "
                f"at most {self._concurrent} may run at once",
                "Wait for one of them to finish.",
            )
        self._check_rate(client)
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1

    def _check_rate(self, client: str) -> None:
        if self._per_minute is None:
            return
        now, started = self._clock(), self._started[client]
        while started and started[0] <= now - MINUTE:
            started.popleft()
        if len(started) >= self._per_minute:
            wait = max(math.ceil(started[0] + MINUTE - now), 1)
            raise TooManyRequests(
                f"this client has sent {len(started)} requests within a minute; "
                f"at most {self._per_minute} are allowed",
                f"Try again in {wait} s.",
                retry_after=wait,
            )
        started.append(now)


class BodyLimiter:
    """Allows ``limit`` bytes of request bodies in memory, over all requests; ``in_use``: bytes now.

    A body of ``n`` bytes may take ``grace_seconds + n / min_bytes_per_s``: a client that sends half of a body
    and falls silent would otherwise keep a connection and its memory for ever.
    """

    def __init__(self, limit: int, grace_seconds: float, min_bytes_per_s: float = 50_000.0) -> None:
        self.limit = limit
        self.in_use = 0
        self.grace_seconds = grace_seconds
        self.min_bytes_per_s = min_bytes_per_s

    @contextmanager
    def track(self, receive: Receive) -> Iterator[Receive]:
        """Yield a wrapper of one request's ``receive``; the bytes it returned count until the block ends.

        The wrapper raises ``QueueFull`` if all bodies together exceed ``limit``, ``RequestTooSlow`` if this
        one arrives too slowly.
        """
        body = _TrackedBody(self, receive)
        try:
            yield body.receive
        finally:
            self.in_use -= body.size


class _TrackedBody:
    def __init__(self, limiter: BodyLimiter, receive: Receive) -> None:
        self._limiter = limiter
        self._receive = receive
        self._started = time.monotonic()
        self._complete = False
        self.size = 0

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        limiter = self._limiter
        deadline = self._started + limiter.grace_seconds + self.size / limiter.min_bytes_per_s
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                message = await self._receive()
        except TimeoutError:
            raise RequestTooSlow(
                f"the request body arrives too slowly: {format_bytes(self.size)} "
                f"in {time.monotonic() - self._started:.0f} s",
                "Send it faster, or send a smaller one.",
            ) from None
        size = len(message.get("body", b""))
        self.size += size
        limiter.in_use += size
        self._complete = not message.get("more_body", False)
        if limiter.in_use > limiter.limit:
            raise QueueFull(
                f"request bodies in progress exceed {format_bytes(limiter.limit)} in all",
                "Try again in a moment.",
            )
        return message
