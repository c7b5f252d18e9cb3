"""Connections: whose they are, how many each may have, and that those on which no request comes are closed:
else anybody could take them all by opening enough.

Knows: h11's states, as uvicorn holds them, and the line in which a relay (``relay.py``) says who its client
is. Does not know: what is asked; bodies have a pace of their own (``limits.py``), and uvicorn closes a
connection that stays silent after an answer.
"""

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlfit.server.connections import DISCARDING, Connections

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
