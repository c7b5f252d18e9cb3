"""A pool of daemon threads for blocking work beside the event loop.

``ThreadPoolExecutor`` joins its threads at exit, so one slow download would delay Ctrl-C.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from vlfit.images.cancellation import cancel_when
from vlfit.server.http.admission import Slots

P = ParamSpec("P")
Result = TypeVar("Result")

# Idle threads kept for the next call, and for how long: starting one adds 0.1 ms to the first token.
IDLE_SECONDS = 20.0
MAX_IDLE = 2


@dataclass(frozen=True, slots=True)
class _Call:
    """``on_done`` is called on the event loop with the result or the error of ``function``."""

    function: Callable[[], Any]
    on_done: Callable[[Any, BaseException | None], None]
    is_cancelled: Callable[[], bool]


_CallQueue = SimpleQueue[_Call | None]  # None ends the thread


class DaemonThreadPool:
    """At most ``max_threads`` threads, each with one call at a time. Belongs to one event loop."""

    def __init__(self, max_threads: int) -> None:
        self._permits = asyncio.Semaphore(max_threads)
        self._idle: list[_CallQueue] = []

    async def run(self, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Return ``function(*args, **kwargs)``, called in a thread; wait first if all threads are busy.

        Raises what ``function`` raises. If the caller is cancelled, ``function`` runs on until it calls
        ``check_cancelled`` or ends; until then it counts towards ``max_threads``. Its result is dropped.
        """
        await self._permits.acquire()
        return await self._submit(lambda: function(*args, **kwargs))

    async def run_with_slots(
        self, slots: Slots, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Like ``run``, and hold ``slots`` until ``function`` ends, even if the caller is cancelled before.

        The hold begins when a thread is free.
        """
        await self._permits.acquire()
        slots.hold()
        return await self._submit(lambda: function(*args, **kwargs), slots.release_hold)

    def _submit(
        self, function: Callable[[], Result], finalize: Callable[[], None] = lambda: None
    ) -> "asyncio.Future[Result]":
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        calls = self._idle.pop() if self._idle else self._start_worker()

        def on_done(result: Any, error: BaseException | None) -> None:
            self._permits.release()
            finalize()
            self._keep_or_end(calls)
            if future.done():  # the caller was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        calls.put(_Call(function, on_done, future.cancelled))
        return future

    def _start_worker(self) -> _CallQueue:
        calls: _CallQueue = SimpleQueue()
        worker = _Worker(calls, asyncio.get_running_loop(), self._retire)
        threading.Thread(target=worker.run, name="vlfit-server-work", daemon=True).start()
        return calls

    def _keep_or_end(self, calls: _CallQueue) -> None:
        if len(self._idle) < MAX_IDLE:
            self._idle.append(calls)
        else:
            calls.put(None)

    def _retire(self, calls: _CallQueue) -> None:
        """End a thread that was idle too long, unless it has just been given a call."""
        if calls in self._idle:
            self._idle.remove(calls)
            calls.put(None)


@dataclass(frozen=True, slots=True)
class _Worker:
    """The loop of one thread."""

    calls: _CallQueue
    loop: asyncio.AbstractEventLoop
    retire: Callable[[_CallQueue], None]

    def run(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            while (call := self._next()) is not None:
                _execute(call, self.loop)
                del call  # free its arguments while waiting for the next

    def _next(self) -> _Call | None:
        try:
            return self.calls.get(timeout=IDLE_SECONDS)
        except Empty:
            self.loop.call_soon_threadsafe(self.retire, self.calls)
            return self.calls.get()


def _execute(call: _Call, loop: asyncio.AbstractEventLoop) -> None:
    result, error = None, None
    try:
        with cancel_when(call.is_cancelled):
            result = call.function()
    except BaseException as raised:
        error = raised
    try:
        loop.call_soon_threadsafe(call.on_done, result, error)
    finally:
        # Break the reference cycle from the error's traceback to this frame and back, which would keep a
        # request's pictures until the next garbage collection.
        del call, result, error
