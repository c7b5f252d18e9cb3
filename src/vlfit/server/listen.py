"""Listening on an address until Ctrl-C, and stopping in time.

Knows: sockets, signals, uvicorn. Does not know: routes or models.

The first Ctrl-C (or SIGTERM) drains: who comes now is told that the server stops (503), what runs may go on
for some seconds and is then cut with an error: few at Ctrl-C, where somebody waits, more at SIGTERM. The
second ends the process on the spot.
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from vlfit.server.address import cannot_listen
from vlfit.server.closing import Closing
from vlfit.server.connections import Connections, fair_share
from vlfit.server.heads import HeadsInTime
from vlfit.server.settings import ServerSettings
from vlfit.server.watchdog import Watchdog

BACKLOG = 2048


def serve_until_stopped(
    app: Starlette, listener: socket.socket, settings: ServerSettings, on_ready: Callable[[], None]
) -> None:
    """Serve ``app`` until a signal has stopped it; ``on_ready`` is called once connections are taken."""
    host, port = listener.getsockname()[:2]
    try:
        # Linux lets two programs bind one port and refuses the second only here.
        listener.listen(BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    _Protocol.connections_of = Connections(fair_share())
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        ws="none",
        http=_Protocol,
        # A last resort for a client that does not read: everything else is over when the drain is.
        timeout_graceful_shutdown=1,
    )
    state = app.state
    _Server(config, state.closing, state.watchdog, settings, on_ready).run(sockets=[listener])


class _Protocol(HeadsInTime):
    """Of this server: how many connections each client has is counted for all of its own."""


class _Server(uvicorn.Server):
    """uvicorn with our way of stopping."""

    def __init__(
        self,
        config: uvicorn.Config,
        closing: Closing,
        watchdog: Watchdog,
        settings: ServerSettings,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._closing = closing
        self._watchdog = watchdog
        self._settings = settings
        self._signalled = False
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._closing.on_crash = lambda: self._drain(self._settings.drain_seconds)
        self._watching = asyncio.ensure_future(self._watchdog.watch())
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again: having stopped as told is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = True
        if self._loop is None:
            self.should_exit = True
            return
        seconds = self._settings.drain_seconds if sig == signal.SIGINT else self._settings.term_seconds
        self._loop.call_soon_threadsafe(self._drain, seconds)

    def _drain(self, seconds: float) -> None:
        """Connections are taken for as long as something runs, so that who comes is told."""
        self._closing.begin(seconds)
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await self._closing.over.wait()
        self._watching.cancel()
        self.should_exit = True
