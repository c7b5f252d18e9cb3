"""The relay process: forwards bytes between clients and the worker, and replies for it when it dies.

Client connections survive a crash of the worker. A request in progress then gets 503, a stream a final error
event; if neither is possible any more, the connection is closed. Enough HTTP is parsed to tell which.

Backpressure works in both directions, so a slow reader takes 64 KiB at most. One spare connection to the
worker is kept open, which saves a new client a millisecond. Each connection to the worker begins with a line
that gives the client's address (``listen.py``).
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vlfit.server.error_replies import ErrorFacts
from vlfit.server.http.listen import (
    ACCEPTS_PER_TURN,
    DISCARD_SECONDS,
    ConnectionLimiter,
    is_out_of_files,
    max_connections_per_address,
    survive_file_exhaustion,
)
from vlfit.server.openai.error_form import error_form

RETRY_AFTER = 5  # seconds; mini restarts in three
MAX_HEADER_BYTES = 64 * 1024
FINISH_SIGNAL = signal.SIGUSR1  # the server has stopped for good: flush and exit
SERVER_LEFT_SIGNAL = signal.SIGUSR2  # the worker accepts no connections any more and will be restarted
FLUSH_SECONDS = 1.0
HEADER_TIMEOUT_SECONDS = 15.0  # without a worker; a worker has its own timeout (``listen.py``)
SPARE_DELAY = 0.02  # seconds before a new spare connection, so that the client's request goes first
LINGER_SECONDS = 2.0  # how long a client that got an error reply may still send
IDLE_AFTER_WORKER_EXIT_SECONDS = 2.0  # then an idle client is disconnected

_HEALTH = (b"GET /health ", b"GET /health?")
_MAX_LINE = 1024  # of a request's first line, more than any path of a dialect has
_SHARED_PATHS = frozenset(("/", "/health", "/ready", "/metrics"))

# State of the worker, shared by all processes. LOST is set by a worker that has served and only cleans up.
STARTING, SERVING, DEAD, LOST = range(4)


_DIED = ErrorFacts(
    503, "the process that runs the model died and is being restarted. Try again in a moment.", "engine_died"
)
_STARTING = ErrorFacts(503, "the model is being loaded. Try again in a moment.", "starting")
_FULL = ErrorFacts(
    503, "the server has no file descriptors left. Try again in a moment.", "too_many_connections"
)
_DATA_FIELD = b"\ndata: "  # once in each named event, since JSON contains no raw line breaks


class ResponseTracker:
    """Parses the responses on one connection, to know how the current one can be ended.

    Give it all bytes that pass: those of requests to ``on_request_bytes``, those of responses to
    ``on_response_bytes``.
    """

    def __init__(self) -> None:
        self.pending = False  # a response, or the rest of one, is outstanding
        self.started = False  # some of its bytes have been sent
        self.is_event_stream = False
        self.is_ndjson = False
        self.at_event_boundary = False  # only whole events or lines have been sent
        self.closes = False  # the connection ends with the last response
        self._buffer = b""
        self._request_line = b""  # of the current request: its first bytes, to the end of the line or beyond
        self._num_events = 0
        self._tail = b""
        self._parse: Callable[[bytes], bytes] = self._parse_header
        self._bytes_left = 0

    def on_request_bytes(self, data: bytes) -> None:
        """Note that a response is due. Bytes sent while one is due count as part of the same request."""
        if not self.pending:
            self.pending = True
            self._request_line = b""
            self._num_events, self._tail = 0, b""
        if len(self._request_line) < _MAX_LINE and b"\n" not in self._request_line:
            self._request_line += data[:_MAX_LINE]

    @property
    def _is_head_request(self) -> bool:
        return self._request_line.startswith(b"HEAD ")

    @property
    def _has_numbered_events(self) -> bool:
        """Whether events of a stream are numbered, as in OpenAI's Responses API."""
        return self._request_line.startswith((b"POST /v1/responses ", b"POST /v1/responses?"))

    def on_response_bytes(self, data: bytes) -> None:
        """Parse the next bytes from the worker, which may end one response and begin another."""
        while data:
            self.started = True
            data = self._parse(data)

    def _parse_header(self, data: bytes) -> bytes:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._buffer = b""
        first, *lines = head.lower().split(b"\r\n")
        status = first.split(b" ")[1:2]
        if status and status[0].startswith(b"1"):  # 100 Continue: the response itself follows
            self.started = False
            return rest
        fields = dict(line.split(b":", 1) for line in lines if b":" in line)
        self.closes = b"close" in fields.get(b"connection", b"")
        self.is_event_stream = b"text/event-stream" in fields.get(b"content-type", b"")
        self.is_ndjson = b"application/x-ndjson" in fields.get(b"content-type", b"")
        if self._is_head_request or status in ([b"204"], [b"304"]):
            self._complete()
        elif b"chunked" in fields.get(b"transfer-encoding", b""):
            self.at_event_boundary = self.is_event_stream or self.is_ndjson
            self._parse = self._parse_chunk_size
        else:
            self._bytes_left = int(fields.get(b"content-length", b"0").strip() or 0)
            self._parse = self._parse_body
            if not self._bytes_left:
                self._complete()
        return rest

    def _parse_body(self, data: bytes) -> bytes:
        rest = data[self._bytes_left :]
        self._bytes_left -= len(data) - len(rest)
        if not self._bytes_left:
            self._complete()
        return rest

    def _parse_chunk_size(self, data: bytes) -> bytes:
        self.at_event_boundary = False
        size, end, rest = (self._buffer + data).partition(b"\r\n")
        if not end:
            self._buffer = size
            return b""
        self._buffer = b""
        self._bytes_left = int(size.split(b";")[0], 16) + 2  # and its line break
        self._parse = self._parse_last_chunk if self._bytes_left == 2 else self._parse_chunk
        return rest

    def _parse_chunk(self, data: bytes) -> bytes:
        rest = data[self._bytes_left :]
        if self._has_numbered_events:
            seen = self._tail + data[: self._bytes_left]
            self._num_events += seen.count(_DATA_FIELD)
            self._tail = seen[1 - len(_DATA_FIELD) :]
        self._bytes_left -= len(data) - len(rest)
        if not self._bytes_left:
            self.at_event_boundary = self.is_event_stream or self.is_ndjson
            self._parse = self._parse_chunk_size
        return rest

    def _parse_last_chunk(self, data: bytes) -> bytes:
        rest = data[self._bytes_left :]
        self._bytes_left -= len(data) - len(rest)
        if not self._bytes_left:
            self._complete()
        return rest

    def _complete(self) -> None:
        self.pending = self.started = self.at_event_boundary = False
        self.is_event_stream = self.is_ndjson = False
        self._request_line = b""
        self._parse = self._parse_header

    def closing_bytes(self) -> bytes | None:
        """The bytes that end the current response after the worker died; None if it cannot be ended.

        A response that has not begun becomes a complete 503 (200 for ``/health``); a stream between two
        events, or lines, gets an error as its last one, in the form of the request's dialect.
        """
        if not self.started:
            return reply_without_worker(self._request_line)
        if not self.at_event_boundary:
            return None
        error = _error_body(self._request_line, _DIED)
        if self.is_ndjson:
            last = json.dumps(error).encode() + b"\n"
        elif self._has_numbered_events:
            fields = {**error["error"], **error, "type": "error", "sequence_number": self._num_events}
            last = b"event: error\ndata: " + json.dumps(fields).encode() + b"\n\n"
        else:
            name = b"event: error\n" if error.get("type") == "error" else b""  # Anthropic's events have names
            last = name + b"data: " + json.dumps(error).encode() + b"\n\n"
        return b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last)


def reply_without_worker(request: bytes, *, starting: bool = False) -> bytes:
    """A complete response while there is no worker: 503, or 200 to ``/health``.

    ``request``: its first line at least. ``starting``: the first worker is still loading; otherwise one has
    died.
    """
    if request.startswith(_HEALTH):
        return health_reply(starting=starting)
    return _reply_503(request, _STARTING if starting else _DIED)


def _error_body(request: bytes, facts: ErrorFacts) -> dict[str, Any]:
    """The body of an error's response, in the form of the dialect whose path ``request`` has."""
    words = request.split(b"\n", 1)[0].split(b" ")
    path = (words[1] if len(words) > 1 else b"").split(b"?", 1)[0].decode("latin-1")
    if path in _SHARED_PATHS:
        return error_form(facts)
    try:
        from vlfit.server.dialects import dialect_of  # here: it takes 0.4 s, and a relay seldom needs it
    except (OSError, ImportError):  # no file descriptor is left to read a module; vlfit is being upgraded
        return error_form(facts)
    return dialect_of(path).error_form(facts)


def _reply_503(request: bytes, facts: ErrorFacts) -> bytes:
    body = json.dumps(_error_body(request, facts)).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"retry-after: %d\r\ncontent-length: %d\r\n\r\n%s" % (RETRY_AFTER, len(body), body)
    )


def health_reply(*, starting: bool = False) -> bytes:
    """A complete 200 response to ``/health`` while there is no worker.

    ``starting``: the first worker is still loading; otherwise one has died.
    """
    body = b'{"status":"starting"}' if starting else b'{"status":"restarting"}'
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )


class _SpareConnection:
    """An open connection to the worker at ``path`` for the next client."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ready: _ServerConnection | None = None
        self._task: asyncio.Task[None] | None = None

    def take(self) -> "_ServerConnection | None":
        """Take the spare connection, if any, and start opening another."""
        ready, self._ready = self._ready, None
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._make())
        return ready if ready is not None and not ready.is_closing() else None

    async def _make(self) -> None:
        await asyncio.sleep(SPARE_DELAY)
        with suppress(OSError):  # there is no worker now
            _, made = await asyncio.get_running_loop().create_unix_connection(_ServerConnection, self._path)
            self._ready = made


class _ClientConnection(asyncio.Protocol):
    """A client's connection, paired with one to the worker."""

    def __init__(
        self,
        path: str,
        state: Callable[[], int],
        clients: "set[_ClientConnection]",
        connections: ConnectionLimiter,
        spare: _SpareConnection,
    ) -> None:
        self._limiter = connections
        self._host: str | None = None
        self._address_line = b""
        self._client_line = b""  # client address, sent to the worker before the first request; then empty
        self._spare = spare
        self._clients = clients
        self._path = path
        self._state = state
        self._server_starting = False  # connected before the first worker was ready
        self._unserved = b""  # received while there is no connection to a worker
        self._refused = False
        self._task: asyncio.Task[None] | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self.tracker = ResponseTracker()
        self.transport: Any = None
        self.server: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._clients.add(self)
        host, port = transport.get_extra_info("peername")[:2]
        self._client_line = self._address_line = f"{host} {port}\n".encode()
        if not self._limiter.acquire(host):
            self._refused = True
            self.end(self._limiter.refusal_reply(), DISCARD_SECONDS)
            return
        self._host = host
        self._start_header_timer(HEADER_TIMEOUT_SECONDS)
        state = self._state()
        self._server_starting = state == STARTING
        if state == SERVING:
            self._open_server()

    def _start_header_timer(self, seconds: float) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = asyncio.get_running_loop().call_later(seconds, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        """Close a connection that has sent no request, or no complete header while there is no worker."""
        if not self._refused and not self._connecting and (self._client_line or self.server is None):
            self.transport.close()

    @property
    def _connecting(self) -> bool:
        return self._task is not None and not self._task.done()

    def _open_server(self) -> None:
        """Connect to the worker, at once if there is a spare connection."""
        server = self._spare.take()
        if server is not None:
            server.serve(self)
            self._send_unserved()
        else:
            self.transport.pause_reading()
            self._task = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        full = False
        try:
            _, server = await asyncio.get_running_loop().create_unix_connection(_ServerConnection, self._path)
            server.serve(self)
            if self._state() != SERVING:
                self.leave_server()
        except OSError as error:  # the worker died a moment ago, or there are no file descriptors left
            self.server = None
            full = is_out_of_files(error)
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        if full:
            self._refused = True
            self.end(_reply_503(self._unserved, _FULL))
        elif self.server is not None:
            self._send_unserved()
        elif self._unserved:
            self._refuse()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unserved += data
        if self.server is not None:
            self._send_unserved()
        elif self._connecting:
            pass  # sent once connected
        elif self._state() == SERVING:
            self._open_server()
        else:
            self._refuse()

    def _send_unserved(self) -> None:
        data, self._unserved = self._unserved, b""
        if data:
            self.tracker.on_request_bytes(data)
            self.server.write(self._client_line + data)
            self._client_line = b""

    def server_hung_up(self) -> None:
        """The worker died or closed the connection. Reply for it if a request is in progress.

        Otherwise it may have closed an idle connection while a request was under way to it. Stay connected
        for a moment, in which that request gets another worker's reply or 503, and not a broken connection.
        """
        self.server = None
        if self.transport.is_closing():
            return
        if self.tracker.pending:
            self._refused = True
            self.end(self.tracker.closing_bytes())
        elif self.tracker.closes:
            self._refused = True
            self.transport.close()
        else:
            self._client_line = self._address_line
            self._start_header_timer(IDLE_AFTER_WORKER_EXIT_SECONDS)

    def leave_server(self) -> None:
        """Leave a worker that accepts no connections any more.

        A connection that it never accepted would wait in the socket's queue for the next worker; one that it
        accepted it closes itself.
        """
        other = None if self.server is None else self.server.get_protocol()
        if other is None or other.has_replied:
            return
        if self.tracker.pending:
            self.server.abort()  # the client gets an error
        else:  # no request yet
            other.close()
            self.server = None

    def _refuse(self) -> None:
        """Reply 503 (or to ``/health``) once the header is complete, as there is no worker."""
        head, end, _ = self._unserved.partition(b"\r\n\r\n")
        if end or len(self._unserved) > MAX_HEADER_BYTES:
            self._refused = True
            self.end(reply_without_worker(head, starting=self._server_starting))

    def end(self, data: bytes | None, seconds: float = LINGER_SECONDS) -> None:
        """Send ``data`` and close after ``seconds``, in which the client may still send; None: abort."""
        if data is None:
            self.transport.abort()
            return
        self.transport.write(data)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # Closing at once would make the client's TCP stack discard the reply while it is still sending.
        asyncio.get_running_loop().call_later(seconds, self.transport.close)

    def pause_writing(self) -> None:
        if self.server is not None:
            self.server.pause_reading()

    def resume_writing(self) -> None:
        if self.server is not None and not self.server.is_closing():
            self.server.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._clients.discard(self)
        if self._host is not None:
            self._limiter.release(self._host)
        if self._header_timer is not None:
            self._header_timer.cancel()
        if self.server is not None:
            self.server.abort()


class _ServerConnection(asyncio.Protocol):
    """A connection to the worker; spare until it serves a client."""

    def __init__(self) -> None:
        self._client: _ClientConnection | None = None
        self._transport: Any = None
        self.has_replied = False  # so the worker has accepted it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def is_closing(self) -> bool:
        return bool(self._transport.is_closing())

    def close(self) -> None:
        """Detach from the client and abort."""
        self._client = None
        self._transport.abort()

    def serve(self, client: _ClientConnection) -> None:
        self._client = client
        client.server = self._transport
        if client.transport.is_closing():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.has_replied = True
        if self._client is not None:
            self._client.tracker.on_response_bytes(data)
            self._client.transport.write(data)

    def pause_writing(self) -> None:
        if self._client is not None:
            self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._client is not None and not self._client.transport.is_closing():
            self._client.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._client is not None:
            self._client.server_hung_up()


async def _finish(servers: list[asyncio.Server], clients: "set[_ClientConnection]") -> None:
    for server in servers:
        server.close()
    end = time.monotonic() + FLUSH_SECONDS
    while time.monotonic() < end and any(client.transport.get_write_buffer_size() for client in clients):
        await asyncio.sleep(0.01)
    os._exit(0)


async def relay(
    listeners: Sequence[socket.socket], worker_socket: str, read_state: Callable[[], int]
) -> None:
    """Relay clients of ``listeners`` to the worker; never returns, since ``FINISH_SIGNAL`` ends the process.

    ``worker_socket``: path of the worker's Unix socket. ``read_state``: returns STARTING, SERVING, DEAD or
    LOST. On ``SERVER_LEFT_SIGNAL`` connections leave a worker that accepts no more of them.
    """
    loop = asyncio.get_running_loop()
    clients: set[_ClientConnection] = set()
    connections, spare = ConnectionLimiter(max_connections_per_address()), _SpareConnection(worker_socket)
    servers = [
        await loop.create_server(
            lambda: _ClientConnection(worker_socket, read_state, clients, connections, spare),
            sock=listener,
            backlog=ACCEPTS_PER_TURN,
        )
        for listener in listeners
    ]
    survive_file_exhaustion(loop, *listeners)
    ending: list[asyncio.Task[None]] = []
    loop.add_signal_handler(FINISH_SIGNAL, lambda: ending.append(loop.create_task(_finish(servers, clients))))
    loop.add_signal_handler(
        SERVER_LEFT_SIGNAL, lambda: list(map(_ClientConnection.leave_server, tuple(clients)))
    )
    await asyncio.Event().wait()
