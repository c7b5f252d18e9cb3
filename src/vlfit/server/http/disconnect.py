"""How a request ends before its answer is whole: the client hangs up, or the server stops.

Knows: which of the two came first. Does not know: what the work is; it is simply cancelled, and frees in
its own ``finally`` what it held.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from vlfit.errors import EngineLost, EngineStopped, VlfitError

log = logging.getLogger("vlfit.server")

Result = TypeVar("Result")

TELLING_SECONDS = 0.5  # for those who were cut to be told so


def is_fatal(error: Exception) -> bool:
    """Whether ``error`` is one that outlives its request. CUDA goes on failing in a process once a kernel has
    read where it may not; memory that was not there may be there the next time.
    """
    words = str(error)
    lost = "CUDA error" in words and "out of memory" not in words
    return isinstance(error, EngineLost) or (lost and not isinstance(error, VlfitError))


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Closing:
    """The end of one server's life: it runs, then drains (finishes what runs, takes nothing new), then
    cuts. ``over`` tells when nothing runs any more, or what does has been told to end.
    """

    def __init__(self, drain_seconds: float) -> None:
        self._drain_seconds = drain_seconds
        self._cut = False
        self._limits: set[asyncio.Timeout] = set()
        self._running = 0
        self.over = asyncio.Event()
        self.draining = False
        self.crashed = False
        self._cause = ""
        self.on_crash: Callable[[], None] = self.begin

    def begin(self, seconds: float | None = None) -> None:
        """Start draining; what still runs after ``seconds`` is cut. Call it on the event loop."""
        if not self.draining:
            self.draining = True
            later = asyncio.get_running_loop().call_later
            seconds = self._drain_seconds if seconds is None else seconds
            later(seconds, self._cut_all)
            later(seconds + TELLING_SECONDS, self.over.set)
            self._look()

    def _cut_all(self) -> None:
        self._cut = True
        for limit in self._limits:
            _reach(limit)

    def judge(self, error: Exception) -> None:
        """End the server if ``error`` says that the engine will never answer again: a server that fails all
        that it is asked is worth less than one that is started again.
        """
        if not self.draining and is_fatal(error):
            self._cause = f"the engine is lost: {str(error).splitlines()[0] if str(error) else repr(error)}"
            log.error("%s", self._cause)
            self.crashed = True
            self.on_crash()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A request that is to be answered before the server ends."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._look()

    def _look(self) -> None:
        if self.draining and not self._running:
            self.over.set()

    def check(self) -> None:
        """Raises ``EngineStopped`` if no new request is taken any more."""
        if self.draining:
            raise EngineStopped(self._cause or "the server is stopping", "try again when it is back")

    async def watch(self, work: Coroutine[Any, Any, Result], receive: Receive | None = None) -> Result:
        """The result of ``work``, unless the client or the server goes first; then ``work`` is cancelled
        at once.

        ``receive`` is the connection, its request read to the end; without it only the server is watched.
        Raises ``ClientGone``, ``EngineStopped``, or what ``work`` raises.
        """
        gone = asyncio.ensure_future(_hang_up(receive)) if receive is not None else None
        # A limit of time that never comes unless it is told to: so the work needs no task of its own.
        limit = asyncio.timeout(None)

        def end(_: object) -> None:
            _reach(limit)

        try:
            async with limit:
                self._limits.add(limit)
                if self._cut:
                    _reach(limit)
                if gone is not None:
                    gone.add_done_callback(end)
                try:
                    return await work
                finally:
                    self._limits.discard(limit)
                    if gone is not None:
                        gone.remove_done_callback(end)
        except TimeoutError:
            if not limit.expired():  # one of the work's own
                raise
            if self._cut:
                raise EngineStopped(
                    "the server stopped before the answer was done", "try again when it is back"
                ) from None
            raise ClientGone from None
        finally:
            if gone is not None:
                _forget(gone)


def _reach(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


def _forget(task: "asyncio.Task[None]") -> None:
    """However it ended, if it has, is nobody's matter any more."""
    if task.done():
        if not task.cancelled():
            task.exception()
    else:
        task.cancel()


async def _hang_up(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
