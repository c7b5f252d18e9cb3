"""Sockets, connection limits, and uvicorn until a signal stops it.

The first Ctrl-C or SIGTERM drains: new requests get 503, running ones may continue for some seconds
(``drain_seconds`` or ``term_seconds``) and are then cancelled with an error. The second ends the process.
"""

import asyncio
import errno
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv6Address, ip_address
from types import FrameType
from typing import Any, TypeGuard

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlfit.errors import CannotListen
from vlfit.server.http.disconnect import Shutdown
from vlfit.server.http.watchdog import Watchdog
from vlfit.server.server_settings import ServerSettings

log = logging.getLogger("vlfit.server")

BACKLOG = 2048
# Connections accepted per turn of the event loop: asyncio does not stop at the first that fails for want of
# file descriptors, and logs and retries each.
ACCEPTS_PER_TURN = 1
ACCEPT_LOG_SECONDS = 60.0
MAX_OPEN_FILES = 65_536  # containers may allow 1e9, and some programs iterate over all of them
IPV6_PREFIX_BITS = 64  # one client's network: its host part is free to choose
DISCARD_SECONDS = 0.5  # how long a refused client may still send
HEADER_TIMEOUT_SECONDS = 15.0  # for the complete header of a request
MAX_CLIENT_LINE = 200  # bytes of a relay's client line
# Chunks of a body, each of which takes 5 us of the event loop: 0.3 s, and as much again for 64 MiB.
MAX_CHUNKS = 65_536
MIN_CHUNK_BYTES = 1024  # on average, of those beyond
_ABSOLUTE_TARGET = re.compile(rb"https?://(?P<host>[^/?#]+)(?P<path>.*)", re.IGNORECASE | re.DOTALL)
_REQUEST_TIMEOUT_REPLY = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class ConnectionLimiter:
    """Counts open connections of each client and allows ``limit`` for each; None: any number.

    A client is an IPv4 address, or an IPv6 network of 64 bits.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._open: dict[str | int, int] = {}

    def acquire(self, host: str) -> bool:
        """Count one more connection of ``host``; False, and nothing counted, if it has ``limit`` already."""
        client = _client_key(host)
        count = self._open.get(client, 0)
        if self.limit is not None and count >= self.limit:
            return False
        self._open[client] = count + 1
        return True

    def release(self, host: str) -> None:
        """Count one connection less; only after ``acquire`` returned True."""
        client = _client_key(host)
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def refusal_reply(self) -> bytes:
        """A complete 429 response with ``Connection: close``, for a client that ``acquire`` refused."""
        return _error_reply(
            b"429 Too Many Requests\r\nretry-after: 1",
            f"this address has {self.limit} open connections, the most that one address may have. "
            "Close some, or send several requests over one.",
            "rate_limit_error",
            "too_many_connections",
        )


def _error_reply(status: bytes, message: str, kind: str, code: str) -> bytes:
    """A complete response in the shape of ``error_replies.py``; ``status`` may go on with headers."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    return (
        b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (status, len(body), body)
    )


_TOO_MANY_CHUNKS_REPLY = _error_reply(
    b"400 Bad Request",
    f"the body has more than {MAX_CHUNKS:,} chunks of less than {MIN_CHUNK_BYTES:,} bytes on average. "
    "Send larger chunks, or a Content-Length.",
    "invalid_request_error",
    "too_many_chunks",
)


def max_connections_per_address() -> int | None:
    """An eighth of the process's open-file limit, at least 1; None if there is no such limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft // 8, 1)


def _client_key(host: str) -> str | int:
    """What counts as one client: an IPv4 address, or an IPv6 network."""
    if ":" not in host:
        return host
    address = ip_address(host.partition("%")[0])
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return int(address) >> (128 - IPV6_PREFIX_BITS)


class _ChunkLimitedConnection(h11.Connection):
    """h11's parser with a limit on the chunks of a body, and targets in absolute form made relative."""

    has_too_many_chunks = False
    _num_chunks = 0
    _body_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._num_chunks > MAX_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
                self.has_too_many_chunks = True
                raise h11.RemoteProtocolError("too many chunks")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._body_bytes = 0
            return _in_origin_form(event)
        return event


def _in_origin_form(request: h11.Request) -> h11.Request:
    """``request`` with the path of a target ``http://host/path`` as its target, and its host as the Host.

    RFC 9112, 3.2.2: servers accept targets with a host, which counts instead of the header Host.
    """
    match = _ABSOLUTE_TARGET.fullmatch(request.target)
    if match is None:
        return request
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    headers.append((b"host", match["host"]))
    path = match["path"] if match["path"].startswith(b"/") else b"/" + match["path"]
    return h11.Request(method=request.method, target=path, headers=headers, http_version=request.http_version)


class LimitedH11Protocol(H11Protocol):
    """uvicorn's h11 protocol with a header timeout and limits on a client's connections and a body's chunks.

    On a Unix socket the peer is a relay (``relay.py``): it sends ``HOST PORT`` of its client in a first
    line, and may stay silent until it has a client. Bodies have limits of their own (``admission.py``).
    """

    connection_limiter = ConnectionLimiter()

    _header_timer: asyncio.TimerHandle | None = None
    _awaiting_client_line = False
    _refused = False
    _line = b""
    _host: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._parser = _ChunkLimitedConnection(h11.SERVER)

    def connection_made(self, transport: Any) -> None:
        """Count the connection of its client; one beyond the limit gets a 429 and is closed.

        Called by asyncio. On a Unix socket the client is known only once the relay has named it.
        """
        super().connection_made(transport)
        self._awaiting_client_line = transport.get_extra_info("socket").family not in (
            socket.AF_INET,
            socket.AF_INET6,
        )
        if not self._awaiting_client_line:
            self._set_client(self.client)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes of a connection; called by asyncio.

        On a Unix socket the first line names the relay's client; a peer that sends no such line is cut
        off. Bytes of a refused client are discarded.
        """
        if self._awaiting_client_line:
            line, end, data = (self._line + data).partition(b"\n")
            if not end and len(line) <= MAX_CLIENT_LINE:
                self._line = line
                return
            host, _, port = line.decode("latin-1").rpartition(" ")
            if not end or not host or not port.isdigit():
                self.transport.close()  # not a relay
                return
            self._awaiting_client_line = False
            self.client = host, int(port)
            self._set_client(self.client)
        if self._refused or not data:
            return
        super().data_received(data)
        self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, and no longer count it for its client; called by asyncio."""
        super().connection_lost(exc)
        self._cancel_header_timer()
        if self._host is not None:
            self.connection_limiter.release(self._host)
            self._host = None

    def _set_client(self, client: tuple[str, int] | None) -> None:
        host = client[0] if client else ""
        if self.connection_limiter.acquire(host):
            self._host = host
            self._update_header_timer()
        else:
            self._refuse(self.connection_limiter.refusal_reply())

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP: reply 400, or, if the response has begun or is over, just close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        elif self._parser.has_too_many_chunks:
            self._refuse(_TOO_MANY_CHUNKS_REPLY)
        else:
            super().send_400_response(msg)
        if self.cycle is not None:  # the application must not send a second response
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _refuse(self, reply: bytes) -> None:
        """Send ``reply``, and nothing else from now on."""
        self._refused = True
        self.transport.write(reply)
        self.transport.write_eof()
        # Closing at once would make the client's TCP stack discard the reply while it is still sending.
        self.loop.call_later(DISCARD_SECONDS, self.transport.close)

    def _update_header_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._cancel_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self._on_header_timeout)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        if self.conn.trailing_data[0]:  # part of a header has arrived
            self.transport.write(_REQUEST_TIMEOUT_REPLY)
        self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to ``host`` and ``port`` (0: any free one), not yet listening. Raises ``CannotListen``.

    Called before the model is loaded, so that a port in use is reported at once.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}: {error.strerror}", "Use --host 127.0.0.1.") from error
    if sys.platform != "win32":
        # Reuse a port that was in use a moment ago. On Windows this would steal one still in use.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise listen_error(host, port, error) from error
    return listener


def survive_file_exhaustion(loop: asyncio.AbstractEventLoop, *listeners: socket.socket) -> None:
    """Make ``loop`` log only once a minute that it cannot accept connections for want of file descriptors.

    asyncio retries once a second by itself. Replaces the loop's exception handler, and lengthens the queue of
    each of ``listeners`` to ``BACKLOG``: the server on them was made with ``backlog=ACCEPTS_PER_TURN``.
    """
    for listener in listeners:
        listener.listen(BACKLOG)  # asyncio's ``backlog`` is both, the queue's length and accepts per turn
    last_logged = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last_logged
        error = context.get("exception")
        if not is_out_of_files(error) or "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif time.monotonic() - last_logged >= ACCEPT_LOG_SECONDS:
            last_logged = time.monotonic()
            log.error(
                "cannot accept connections: %s; new ones wait until others close (see `ulimit -n`)",
                os.strerror(error.errno or 0),
            )

    loop.set_exception_handler(handle)


def is_out_of_files(error: object) -> TypeGuard[OSError]:
    """Whether ``error`` means that there are no more file descriptors, or no memory for them."""
    few = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
    return isinstance(error, OSError) and error.errno in few


def raise_open_file_limit() -> None:
    """Raise the soft open-file limit to the hard one, at most ``MAX_OPEN_FILES``.

    A connection takes one file, two in a relay, and shells often start programs with 1,024.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with suppress(OSError, ValueError):  # macOS has a limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def url_of(listener: socket.socket) -> str:
    """URL of ``listener`` for programs on this computer; loopback if it listens on all addresses."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # wildcard addresses are not connectable
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen_error(host: str, port: int, error: OSError) -> CannotListen:
    """The error to raise when binding ``host`` and ``port`` failed with ``error``."""
    hint = "Stop the program that uses the port, or choose another with --port (0: any free one)."
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "Check --host: it must be an address of this computer, or 0.0.0.0 for all its addresses."
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = "Choose a --port of 1024 or above (0: any free one): lower ports need privileges."
    return CannotListen(f"cannot listen on {host} port {port}: {error.strerror or error}", hint)


def serve_until_stopped(
    app: Starlette,
    listeners: Sequence[socket.socket],
    settings: ServerSettings,
    on_ready: Callable[[], None],
) -> None:
    """Serve ``app``, made by ``create_app``, until it has drained after a signal or a fatal engine error.

    ``listeners``: bound sockets. ``on_ready`` is called once connections are accepted. A second signal ends
    the process at once. Raises ``CannotListen``.
    """
    for listener in listeners:
        try:
            # Linux lets two programs bind one port and fails only in the second one's listen().
            listener.listen(BACKLOG)
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise listen_error(host, port, error) from error
    _ServerProtocol.connection_limiter = ConnectionLimiter(max_connections_per_address())
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=ACCEPTS_PER_TURN,
        ws="none",
        http=_ServerProtocol,
        # For clients that do not read; everything else has ended with the drain.
        timeout_graceful_shutdown=1,
    )
    state = app.state
    _Server(config, state.shutdown, state.watchdog, settings, on_ready).run(sockets=list(listeners))


class _ServerProtocol(LimitedH11Protocol):
    """A class of its own, so that its ``connection_limiter`` counts this server's clients only."""


class _Server(uvicorn.Server):
    """uvicorn with graceful shutdown by ``Shutdown``."""

    def __init__(
        self,
        config: uvicorn.Config,
        shutdown: Shutdown,
        watchdog: Watchdog,
        settings: ServerSettings,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._shutdown = shutdown
        self._watchdog = watchdog
        self._settings = settings
        self._signalled = False
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        survive_file_exhaustion(self._loop, *(sockets or ()))
        self._shutdown.on_crash = lambda: self._drain(self._settings.drain_seconds)
        self._watchdog_task = asyncio.ensure_future(self._watchdog.watch())
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but the signal is not raised again: a requested stop is a success."""
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
        """Keep accepting connections while requests run, so that new ones get a 503."""
        self._shutdown.begin(seconds)
        self._stop_task = asyncio.ensure_future(self._stop_when_done())

    async def _stop_when_done(self) -> None:
        await self._shutdown.done.wait()
        self._watchdog_task.cancel()
        self.should_exit = True
