"""Blocking work beside the event loop, in threads that never hold up the end of the process.

The usual thread pool waits at exit for whatever its threads still do; a picture that comes slowly from afar
would keep Ctrl-C waiting. These threads are daemons. Knows nothing of requests.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from vlfit.images.cancellation import until
from vlfit.server.http.admission import Held

Given = ParamSpec("Given")
Result = TypeVar("Result")

# Threads that wait for the next call in place of ending: starting one takes a tenth of a millisecond, which
# the first token waits. For how long, in seconds; and how many.
WAITING_SECONDS = 20.0
MOST_WAITING = 2


@dataclass(frozen=True, slots=True)
class _Call:
    """``settle`` is called on the event loop with what ``function`` gives or raises."""

    function: Callable[[], Any]
    settle: Callable[[Any, BaseException | None], None]
    gone: Callable[[], bool]


_Calls = SimpleQueue[_Call | None]  # None: end


class Threads:
    """At most ``at_once`` threads, each with one call at a time. Belongs to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._permits = asyncio.Semaphore(at_once)
        self._waiting: list[_Calls] = []

    async def run(
        self, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """``function(*args, **kwargs)`` in a thread.

        When the caller is cancelled the thread runs on until it asks whether it is wanted (``wanted.py``) or
        is at its end, keeps its permit so long, and its result is dropped.
        """
        await self._permits.acquire()
        return await self._begin(lambda: function(*args, **kwargs))

    async def run_holding(
        self, held: Held, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """The same; ``held`` is kept until the thread is at its end, whatever becomes of the caller."""
        await self._permits.acquire()
        held.keep()
        return await self._begin(lambda: function(*args, **kwargs), held.let_go)

    def _begin(
        self, function: Callable[[], Result], over: Callable[[], None] = lambda: None
    ) -> "asyncio.Future[Result]":
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        calls = self._waiting.pop() if self._waiting else self._new()

        def settle(result: Any, error: BaseException | None) -> None:
            self._permits.release()
            over()
            self._rest(calls)
            if future.done():  # the caller was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        calls.put(_Call(function, settle, future.cancelled))
        return future

    def _new(self) -> _Calls:
        calls: _Calls = SimpleQueue()
        work = _Worker(calls, asyncio.get_running_loop(), self._retire).run
        threading.Thread(target=work, name="vlfit-server-work", daemon=True).start()
        return calls

    def _rest(self, calls: _Calls) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(calls)
        else:
            calls.put(None)

    def _retire(self, calls: _Calls) -> None:
        """It has waited long; unless it has just been given something it may end."""
        if calls in self._waiting:
            self._waiting.remove(calls)
            calls.put(None)


@dataclass(frozen=True, slots=True)
class _Worker:
    """What one thread does."""

    calls: _Calls
    loop: asyncio.AbstractEventLoop
    retire: Callable[[_Calls], None]

    def run(self) -> None:
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            while (call := self._next()) is not None:
                _carry_out(call, self.loop)
                del call  # while the next is waited for nothing of this one is held

    def _next(self) -> _Call | None:
        try:
            return self.calls.get(timeout=WAITING_SECONDS)
        except Empty:
            self.loop.call_soon_threadsafe(self.retire, self.calls)
            return self.calls.get()


def _carry_out(call: _Call, loop: asyncio.AbstractEventLoop) -> None:
    result, error = None, None
    try:
        with until(call.gone):
            result = call.function()
    except BaseException as raised:
        error = raised
    try:
        loop.call_soon_threadsafe(call.settle, result, error)
    finally:
        # An error holds the frames that it came through. This one must not hold the error, nor the future
        # that does: such a circle would keep a request's pictures until the garbage collector comes.
        del call, result, error
