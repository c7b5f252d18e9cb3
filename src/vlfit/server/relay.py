"""Hands the bytes of clients to the process that serves them and back, and answers for it when it dies.

Knows: sockets, and as much of HTTP as tells whether an answer is whole. Does not know: what is asked. It runs
in a process of its own, without the model: whatever happens to that one, the connections of clients stay.

A request that was under way gets 503, a stream its last event, as if the server had told it itself; where
neither can be said any more the connection breaks. Each direction waits for the other side to take what it
was given, so that who reads slowly has memory for 64 KiB. One connection to the server is there before its
client is, who would wait a millisecond for it; what is said first on each is whose it is (``listen.py``).
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vlfit.server.http.listen import DISCARDING, Connections, fair_share

BACK_AFTER = 5  # seconds; mini is back after three
MOST_HEAD = 64 * 1024
LAST_CALL = signal.SIGUSR1  # nobody serves any more: say what is left to say, and end
LEFT = signal.SIGUSR2  # the server takes no connection any more, and will be started again
LAST_SECONDS = 1.0
HEAD_SECONDS = 15.0  # while nobody serves; a server closes what is silent itself (``server/http/listen.py``)
AFTER = 0.02  # seconds after a client has come: what it asks goes first, here and in the server
LISTENING = 2.0  # seconds in which a client that was told of a death may still send

_HEALTH = (b"GET /health ", b"GET /health?")

# What the keeper says of the server; ``LOST``, what it says of itself: it has served, and only cleans up.
STARTING, SERVING, DEAD, LOST = range(4)


def _error(message: str, code: str) -> dict[str, dict[str, str | None]]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


_DIED = _error(
    "the process that runs the model died, and is being started again; try again in a moment", "engine_died"
)
_STARTS = _error("the model is being loaded; try again in a moment", "starting")
_OF_AN_EVENT = b"\ndata: "  # once in each that has a name: in JSON there are no bare line breaks


class Answers:
    """Follows the answers on one connection. ``feed`` takes what the server sent, ``asked`` what it was."""

    def __init__(self) -> None:
        self.waiting = False  # for an answer, or the rest of one
        self.begun = False  # some of its bytes have gone out
        self.events = False  # it is a stream of events ...
        self.between = False  # ... and what has gone out of it is whole events
        self._head = b""
        self._only_head = False
        self._health = False
        self._numbered = False  # events have types and numbers, as OpenAI's responses have
        self._events = 0
        self._tail = b""
        self._step: Callable[[bytes], bytes] = self._in_head
        self._left = 0

    def asked(self, data: bytes) -> None:
        if not self.waiting:
            self.waiting = True
            self._only_head = data.startswith(b"HEAD ")
            self._health = data.startswith(_HEALTH)
            self._numbered = data.startswith((b"POST /v1/responses ", b"POST /v1/responses?"))
            self._events, self._tail = 0, b""

    def feed(self, data: bytes) -> None:
        while data:
            self.begun = True
            data = self._step(data)

    def _in_head(self, data: bytes) -> bytes:
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._head = b""
        first, *lines = head.lower().split(b"\r\n")
        status = first.split(b" ")[1:2]
        if status and status[0].startswith(b"1"):  # "continue": the answer itself is still to come
            self.begun = False
            return rest
        fields = dict(line.split(b":", 1) for line in lines if b":" in line)
        self.events = b"text/event-stream" in fields.get(b"content-type", b"")
        if self._only_head or status in ([b"204"], [b"304"]):
            self._over()
        elif b"chunked" in fields.get(b"transfer-encoding", b""):
            self.between = self.events
            self._step = self._in_size
        else:
            self._left = int(fields.get(b"content-length", b"0").strip() or 0)
            self._step = self._in_body
            if not self._left:
                self._over()
        return rest

    def _in_body(self, data: bytes) -> bytes:
        rest = data[self._left :]
        self._left -= len(data) - len(rest)
        if not self._left:
            self._over()
        return rest

    def _in_size(self, data: bytes) -> bytes:
        self.between = False
        size, end, rest = (self._head + data).partition(b"\r\n")
        if not end:
            self._head = size
            return b""
        self._head = b""
        self._left = int(size.split(b";")[0], 16) + 2  # and the end of its line
        self._step = self._in_last if self._left == 2 else self._in_chunk
        return rest

    def _in_chunk(self, data: bytes) -> bytes:
        rest = data[self._left :]
        if self._numbered:
            seen = self._tail + data[: self._left]
            self._events += seen.count(_OF_AN_EVENT)
            self._tail = seen[1 - len(_OF_AN_EVENT) :]
        self._left -= len(data) - len(rest)
        if not self._left:
            self.between = self.events
            self._step = self._in_size
        return rest

    def _in_last(self, data: bytes) -> bytes:
        rest = data[self._left :]
        self._left -= len(data) - len(rest)
        if not self._left:
            self._over()
        return rest

    def _over(self) -> None:
        self.waiting = self.begun = self.events = self.between = self._only_head = False
        self._step = self._in_head

    def last_words(self) -> bytes | None:
        """What ends the answer under way for a server that has died; None if nothing can."""
        if not self.begun:
            return alive() if self._health else refusal()
        if self.events and self.between:
            event = b"data: " + json.dumps(_DIED).encode() + b"\n\n"
            if self._numbered:
                told = {**_DIED["error"], **_DIED, "type": "error", "sequence_number": self._events}
                event = b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
            return b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
        return None


def refusal(*, starting: bool = False) -> bytes:
    """503, whole. ``starting``: nobody has served yet; else who did has died."""
    body = json.dumps(_STARTS if starting else _DIED).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"retry-after: %d\r\ncontent-length: %d\r\n\r\n%s" % (BACK_AFTER, len(body), body)
    )


def alive(*, starting: bool = False) -> bytes:
    """What ``/health`` is answered meanwhile: alive, but not ready."""
    body = b'{"status":"starting"}' if starting else b'{"status":"restarting"}'
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )


class _Spare:
    """A connection to the server at ``path`` for the next client."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ready: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    def take(self) -> "_Server | None":
        """The one that is there, if any; another is made, to be there for who comes next."""
        ready, self._ready = self._ready, None
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._make())
        return ready if ready is not None and not ready.is_closing() else None

    async def _make(self) -> None:
        await asyncio.sleep(AFTER)
        with suppress(OSError):  # nobody serves just now
            _, made = await asyncio.get_running_loop().create_unix_connection(_Server, self._path)
            self._ready = made


class _Client(asyncio.Protocol):
    """A connection of a client, and that to the server which belongs to it."""

    def __init__(
        self,
        path: str,
        state: Callable[[], int],
        clients: "set[_Client]",
        connections: Connections,
        spare: _Spare,
    ) -> None:
        self._connections = connections
        self._host: str | None = None
        self._line = b""  # whose it is, until that has been said: with the first that is asked
        self._spare = spare
        self._clients = clients
        self._path = path
        self._state = state
        self._came_early = False  # before anybody has served
        self._early = b""
        self._refused = False
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self.answers = Answers()
        self.transport: Any = None
        self.server: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._clients.add(self)
        host, port = transport.get_extra_info("peername")[:2]
        self._line = f"{host} {port}\n".encode()
        if not self._connections.enter(host):
            self._refused = True
            self.end(self._connections.refusal(), DISCARDING)
            return
        self._host = host
        self._late = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._too_late)
        state = self._state()
        self._came_early = state == STARTING
        if state != SERVING:
            return
        server = self._spare.take()
        if server is not None:
            server.serve(self)
        else:
            self.transport.pause_reading()
            self._task = asyncio.ensure_future(self._connect())

    def _too_late(self) -> None:
        """It has asked nothing, or nobody serves it, and it has not asked enough to be told so."""
        connecting = self._task is not None and not self._task.done()
        if not self._refused and not connecting and (self._line or self.server is None):
            self.transport.close()

    async def _connect(self) -> None:
        try:
            _, server = await asyncio.get_running_loop().create_unix_connection(_Server, self._path)
            server.serve(self)
            if self._state() != SERVING:
                self.leave()
        except OSError:  # it died a moment ago
            self.server = None
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.server is not None:
            self.answers.asked(data)
            self.server.write(self._line + data)
            self._line = b""
        elif not self._refused:
            self._refuse(data)

    def leave(self) -> None:
        """Its server takes no connection any more: one that it never took would wait, in the queue that goes
        from one server to the next, until that one is there. One that it took it closes itself.
        """
        other = None if self.server is None else self.server.get_protocol()
        if other is None or other.heard:
            return
        if self.answers.waiting:
            self.server.abort()  # and the client is told so
        else:  # it has asked nothing yet
            other.close()
            self.server = None

    def _refuse(self, data: bytes) -> None:
        """There is nobody to serve it."""
        self._early += data
        head, end, _ = self._early.partition(b"\r\n\r\n")
        if end or len(self._early) > MOST_HEAD:
            self._refused = True
            answer = alive if head.startswith(_HEALTH) else refusal
            self.end(answer(starting=self._came_early))

    def end(self, words: bytes | None, seconds: float = LISTENING) -> None:
        """Say ``words`` and close, after ``seconds`` in which it may still send; None: break off."""
        if words is None:
            self.transport.abort()
            return
        self.transport.write(words)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # Closed at once, what the client still sends would make its system throw away what it was told.
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
            self._connections.leave(self._host)
        if self._late is not None:
            self._late.cancel()
        if self.server is not None:
            self.server.abort()  # what the client has not taken nobody will


class _Server(asyncio.Protocol):
    """The other half. Until it serves a client it is nobody's."""

    def __init__(self) -> None:
        self._client: _Client | None = None
        self._transport: Any = None
        self.heard = False  # the server has said something on it, and so has taken it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def is_closing(self) -> bool:
        return bool(self._transport.is_closing())

    def close(self) -> None:
        """It is nobody's any more."""
        self._client = None
        self._transport.abort()

    def serve(self, client: _Client) -> None:
        self._client = client
        client.server = self._transport
        if client.transport.is_closing():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._client is not None:
            self._client.answers.feed(data)
            self._client.transport.write(data)

    def pause_writing(self) -> None:
        if self._client is not None:
            self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._client is not None and not self._client.transport.is_closing():
            self._client.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        client = self._client
        if client is None:
            return
        client.server = None
        client._refused = True
        if client.transport.is_closing():
            return
        if client.answers.waiting:
            client.end(client.answers.last_words())
        else:
            client.transport.close()


async def _end(server: asyncio.Server, clients: "set[_Client]") -> None:
    server.close()
    end = time.monotonic() + LAST_SECONDS
    while time.monotonic() < end and any(client.transport.get_write_buffer_size() for client in clients):
        await asyncio.sleep(0.01)
    os._exit(0)


async def relay(listener: socket.socket, path: str, state: Callable[[], int]) -> None:
    """Take clients from ``listener`` until ``LAST_CALL``, and end the process then; ``path`` is where the
    server listens, ``state`` whether it does. ``LEFT`` tells that it has ceased to.
    """
    loop = asyncio.get_running_loop()
    clients: set[_Client] = set()
    connections, spare = Connections(fair_share()), _Spare(path)
    server = await loop.create_server(
        lambda: _Client(path, state, clients, connections, spare), sock=listener, backlog=2048
    )
    ending: list[asyncio.Task[None]] = []
    loop.add_signal_handler(LAST_CALL, lambda: ending.append(loop.create_task(_end(server, clients))))
    loop.add_signal_handler(LEFT, lambda: list(map(_Client.leave, tuple(clients))))
    await asyncio.Event().wait()
