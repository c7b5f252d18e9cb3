"""What one client may ask for: requests in a minute, requests at once, and bytes of bodies under way.

Knows: clocks and counts. Does not know: keys (a client is what it is called by), nor what requests are about.
Belongs to one event loop, so that counting needs no lock.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from vlfit.errors import QueueFull, RequestTooSlow, TooManyRequests
from vlfit.units import format_bytes

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
