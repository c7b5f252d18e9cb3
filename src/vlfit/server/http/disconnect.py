"""Early ends of a request: the client disconnects, or the server shuts down.

Both cancel the request's coroutine; its ``finally`` blocks free what it holds.
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

ERROR_FLUSH_SECONDS = 0.5  # for cancelled requests to send their error


def is_fatal(error: Exception) -> bool:
    """Whether the engine cannot recover from ``error``.

    After an illegal access every CUDA call of the process fails; running out of memory may be temporary.
    """
    message = str(error)
    cuda_failed = "CUDA error" in message and "out of memory" not in message
    return isinstance(error, EngineLost) or (cuda_failed and not isinstance(error, VlfitError))


class ClientDisconnected(Exception):
    """The client closed its connection before the answer was complete."""


class Shutdown:
    """Graceful shutdown: refuse new requests, let running ones finish, then cancel the rest.

    A request runs inside ``track_request``, calls ``check_accepting`` first, and does its work in
    ``run_until_disconnect``. Whoever stops the server calls ``begin`` and waits for ``done``.
    ``drain_seconds``: how long requests may go on after ``begin``. ``draining``: True from ``begin`` on.
    ``done``: set once no request runs, or the cancelled ones have had time to send their error.
    ``crashed``: True once ``stop_if_fatal`` got a fatal error, for which it calls ``on_crash`` (by default
    ``begin``).
    """

    def __init__(self, drain_seconds: float) -> None:
        self._drain_seconds = drain_seconds
        self._cancelled = False
        self._timeouts: set[asyncio.Timeout] = set()
        self._running = 0
        self.done = asyncio.Event()
        self.draining = False
        self.crashed = False
        self._cause = ""
        self.on_crash: Callable[[], None] = self.begin

    def begin(self, seconds: float | None = None) -> None:
        """Start draining; requests still running after ``seconds`` are cancelled. Call on the event loop.

        ``seconds`` None: those given to the constructor. Later calls have no effect.
        """
        if not self.draining:
            self.draining = True
            later = asyncio.get_running_loop().call_later
            seconds = self._drain_seconds if seconds is None else seconds
            later(seconds, self._cancel_all)
            later(seconds + ERROR_FLUSH_SECONDS, self.done.set)
            self._check_done()

    def _cancel_all(self) -> None:
        self._cancelled = True
        for timeout in self._timeouts:
            _expire(timeout)

    def stop_if_fatal(self, error: Exception) -> None:
        """Call ``on_crash`` if ``error`` is fatal for the engine; a supervisor then restarts the server.

        No effect while draining.
        """
        if not self.draining and is_fatal(error):
            self._cause = f"the engine is lost: {str(error).splitlines()[0] if str(error) else repr(error)}"
            log.error("%s", self._cause)
            self.crashed = True
            self.on_crash()

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count a running request for the length of the block; shutdown waits for it."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._check_done()

    def _check_done(self) -> None:
        if self.draining and not self._running:
            self.done.set()

    def check_accepting(self) -> None:
        """Raise ``EngineStopped`` while draining, since the server then accepts no new requests."""
        if self.draining:
            raise EngineStopped(self._cause or "the server is stopping", "Try again when it is back.")

    async def run_until_disconnect(
        self, work: Coroutine[Any, Any, Result], receive: Receive | None = None
    ) -> Result:
        """Return the result of ``work``; cancel it if the client disconnects or the drain's time ends first.

        ``receive``: the request's ASGI ``receive``, its body already read; None: a disconnect goes unnoticed.
        Raises ``ClientDisconnected``, ``EngineStopped`` at the end of the drain, or what ``work`` raises.
        """
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive)) if receive is not None else None
        # A timeout that expires only on demand cancels ``work`` without a task of its own.
        timeout = asyncio.timeout(None)

        def expire(_: object) -> None:
            if timeout in self._timeouts:  # else ``work`` has ended between the disconnect and this call
                _expire(timeout)

        try:
            async with timeout:
                self._timeouts.add(timeout)
                if self._cancelled:
                    _expire(timeout)
                if disconnect is not None:
                    disconnect.add_done_callback(expire)
                try:
                    return await work
                finally:
                    self._timeouts.discard(timeout)
                    if disconnect is not None:
                        disconnect.remove_done_callback(expire)
        except TimeoutError:
            if not timeout.expired():  # raised by ``work`` itself
                raise
            if self._cancelled:
                raise EngineStopped(
                    "the server stopped before the answer was complete", "Try again when it is back."
                ) from None
            raise ClientDisconnected from None
        finally:
            if disconnect is not None:
                _discard(disconnect)


def _expire(timeout: asyncio.Timeout) -> None:
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())


def _discard(task: "asyncio.Task[None]") -> None:
    """Cancel ``task``, or retrieve its exception so that asyncio does not log it."""
    if task.done():
        if not task.cancelled():
            task.exception()
    else:
        task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
