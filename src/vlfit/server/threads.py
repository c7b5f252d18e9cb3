"""Blocking work beside the event loop, in threads that never hold up the end of the process.

The usual thread pool waits at exit for whatever its threads still do; a picture that comes slowly from afar
would keep Ctrl-C waiting. These threads are daemons. Knows nothing of requests.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from vlfit.engine.wanted import until
from vlfit.server.places import Held

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Threads:
    """At most ``at_once`` threads, each for one call. Belongs to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._permits = asyncio.Semaphore(at_once)

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
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            self._permits.release()
            over()
            if future.done():  # the caller was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        threading.Thread(
            target=_work,
            args=(function, loop, settle, future.cancelled),
            name="vlfit-server-work",
            daemon=True,
        ).start()
        return future


def _work(
    function: Callable[[], Result],
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[Result | None, BaseException | None], None],
    gone: Callable[[], bool],
) -> None:
    """What ``function`` gives or raises, to ``settle`` on ``loop``."""
    result, error = None, None
    try:
        with until(gone):
            result = function()
    except BaseException as raised:
        error = raised
    with suppress(RuntimeError):  # the loop is gone: nobody waits any more
        loop.call_soon_threadsafe(settle, result, error)
    # An error holds the frames that it came through. This one must not hold the error, nor the future that
    # does: such a circle would keep a request's pictures until the garbage collector comes.
    del settle, gone, result, error
