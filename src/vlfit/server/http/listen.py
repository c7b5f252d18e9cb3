"""Listening on an address until Ctrl-C, and stopping in time.

Knows: sockets, signals, uvicorn. Does not know: routes or models.

The first Ctrl-C (or SIGTERM) drains: who comes now is told that the server stops (503), what runs may go on
for some seconds and is then cut with an error: few at Ctrl-C, where somebody waits, more at SIGTERM. The
second ends the process on the spot.
"""

import asyncio
import errno
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv6Address, ip_address
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlfit.errors import CannotListen
from vlfit.server.http.disconnect import Closing
from vlfit.server.http.watchdog import Watchdog
from vlfit.server.server_settings import ServerSettings

# How many connections one client may have, so that nobody takes them all; and what who has too many is
# told.
#
# Knows: addresses and counts. Does not know: what is asked. Imports next to nothing: a relay (``relay.py``)
# counts for the server behind it.


NETWORK_BITS = 64  # of an IPv6 address: whoever has one has all that begin like it
DISCARDING = 0.5  # seconds in which a client that was refused may still send


class Connections:
    """How many connections each address has; ``most`` at once, None: any number."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._open: dict[str | int, int] = {}

    def enter(self, host: str) -> bool:
        """Whether there is room for one more from ``host``, which has it then until it leaves."""
        who = _network(host)
        count = self._open.get(who, 0)
        if self.most is not None and count >= self.most:
            return False
        self._open[who] = count + 1
        return True

    def leave(self, host: str) -> None:
        who = _network(host)
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def refusal(self) -> bytes:
        """429, whole, as ``failures.py`` would have it."""
        message = (
            f"this address has {self.most} connections here already, as many as one may have; "
            "close some, or use one for several requests"
        )
        told = {"message": message, "type": "rate_limit_error", "param": None, "code": "too_many_connections"}
        body = json.dumps({"error": told}).encode()
        return (
            b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )


def fair_share() -> int | None:
    """Connections that one address may have: an eighth of the files that may be open. None: no limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft // 8, 1)


def _network(host: str) -> str | int:
    """What is one client: an address, or a network of IPv6."""
    if ":" not in host:
        return host
    address = ip_address(host.partition("%")[0])
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return int(address) >> (128 - NETWORK_BITS)


# Connections: whose they are, how many each may have, and that those on which no request comes are closed:
# else anybody could take them all by opening enough.
#
# Knows: h11's states, as uvicorn holds them, and the line in which a relay (``relay.py``) says who its
# client is. Does not know: what is asked; bodies have a pace of their own (``server/http/admission.py``),
# and uvicorn closes a connection that stays silent after an answer.


HEAD_SECONDS = 15.0  # for the whole head of a request, however many pieces it comes in
LONGEST_LINE = 200  # of a relay
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HeadsInTime(H11Protocol):
    """uvicorn's protocol, which waits no longer than ``HEAD_SECONDS`` for the head of a request.

    What comes over a Unix socket comes from a relay, which says first whose it is, and may be silent until it
    has a client.
    """

    connections_of = Connections()

    _late: asyncio.TimerHandle | None = None
    _relayed = False
    _refused = False
    _line = b""
    _host: str | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._relayed = transport.get_extra_info("socket").family not in (socket.AF_INET, socket.AF_INET6)
        if not self._relayed:
            self._belongs_to(self.client)

    def data_received(self, data: bytes) -> None:
        if self._relayed:
            line, end, data = (self._line + data).partition(b"\n")
            if not end and len(line) <= LONGEST_LINE:
                self._line = line
                return
            host, _, port = line.decode("latin-1").rpartition(" ")
            if not end or not host or not port.isdigit():
                self.transport.close()  # that was no relay
                return
            self._relayed = False
            self.client = host, int(port)
            self._belongs_to(self.client)
        if self._refused or not data:
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()
        if self._host is not None:
            self.connections_of.leave(self._host)
            self._host = None

    def _belongs_to(self, client: tuple[str, int] | None) -> None:
        host = client[0] if client else ""
        if self.connections_of.enter(host):
            self._host = host
            self._watch()
        else:
            self._refused = True
            self.transport.write(self.connections_of.refusal())
            self.transport.write_eof()
            # Closed at once, what the client still sends would make its system throw away what it was told.
            self.loop.call_later(DISCARDING, self.transport.close)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._late = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        if self.conn.trailing_data[0]:  # half a head: somebody asks, if slowly
            self.transport.write(_TOO_LATE)
        self.transport.close()


# The address that a server listens on: bound before the model is loaded, and named for people.
#
# Knows sockets. Does not know what is served; imports nothing slow.


MOST_FILES = 65_536  # containers may have a thousand millions, and programs exist that go through all of them


def bind(host: str, port: int) -> socket.socket:
    """A socket on ``host`` and ``port`` (0: any free one), not yet listening. Raises ``CannotListen``.

    Bound before the model is loaded, so that a taken port is known at once and not after a minute.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}: {error.strerror}", "use --host 127.0.0.1") from error
    if sys.platform != "win32":
        # A port that was in use a moment ago may be taken over; on Windows this would steal one that still
        # is.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def allow_many_connections() -> None:
    """As many files at once as the system lets this process and its children have: a connection is one, two
    in a relay, and shells often start programs with 1,024.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def address_of(listener: socket.socket) -> str:
    """The URL by which programs on this computer reach ``listener``."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # "any address" is none to connect to
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    """What to say when ``host`` and ``port`` cannot be had."""
    hint = "stop the program that uses it, or choose another with --port (0 takes any free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "check --host: it must be an address of this computer, or 0.0.0.0 for all that it has"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = "choose a --port from 1024 on (0 takes any free one): those below are the system's to give"
    return CannotListen(f"cannot listen on {host} port {port}: {error.strerror or error}", hint)


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
