"""Listening on an address until Ctrl-C, and stopping in time.

Knows: sockets, signals, uvicorn. Does not know: routes or models.

The first Ctrl-C (or SIGTERM) drains: nothing new is taken, what runs may go on for ``drain_seconds`` and
is then cut with an error. The second ends the process on the spot.
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

BACKLOG = 2048


def serve_until_stopped(
    app: Starlette, listener: socket.socket, drain_seconds: float, on_ready: Callable[[], None]
) -> None:
    """Serve ``app`` until a signal has stopped it; ``on_ready`` is called once connections are taken."""
    host, port = listener.getsockname()[:2]
    try:
        # Linux lets two programs bind one port and refuses the second only here.
        listener.listen(BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        ws="none",
        # A last resort for a client that does not read: everything else is over when the drain is.
        timeout_graceful_shutdown=int(drain_seconds) + 1,
    )
    _Server(config, app.state.closing, on_ready).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn with our way of stopping."""

    def __init__(self, config: uvicorn.Config, closing: Closing, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing = closing
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
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
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._closing.begin)
