"""Requests that wait for others side by side, all in one thread: an event loop, and who may be in it.

Knows: tasks, threads, how all of it ends. Does not know what a request is (``remote.py``).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from vlfit.errors import EngineStopped

Work = Callable[[], Coroutine[Any, Any, None]]

CLOSING_SECONDS = 5.0  # for connections to be closed; the thread is a daemon, so that nobody waits longer


class Running:
    """One request. ``cancel`` may be called from any thread, at any time, more than once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Work, ended: Callable[[], None]) -> None:
        self._loop = loop
        self._work: Work | None = work
        self._ended = ended
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and all that was in it has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def begin(self) -> None:
        """Called in the loop."""
        work, self._work = self._work, None  # a ticket may be kept for longer than what was sent
        assert work is not None
        self._task = self._loop.create_task(work())
        self._task.add_done_callback(self._done)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._ended()


class SideBySide:
    """``work`` raises nothing: it tells its failures itself. The thread begins with the first of them."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None

    def start(self, work: Work, ended: Callable[[], None]) -> Running:
        """Begin ``work``; ``ended`` is called if it is cancelled. Raises ``EngineStopped`` once closed."""
        with self._lock:
            if self.closed:
                raise EngineStopped("the connection to the server was closed", "open it again")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            running = Running(self._loop, work, ended)
            self._loop.call_soon_threadsafe(running.begin)
        return running

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all that runs, then do ``last``, and end the thread. May be called more than once."""
        with self._lock:
            if self.closed or self._loop is None:
                self.closed = True
                return
            self.closed = True
            self._last = last
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSING_SECONDS)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        try:
            loop.run_until_complete(self._end())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._last is not None:
            await self._last()
