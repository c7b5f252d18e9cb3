"""Connections on which no request comes are closed: else anybody could take them all by opening enough.

Knows: h11's states, as uvicorn holds them. Does not know: what is asked; bodies have a pace of their own
(``limits.py``), and uvicorn closes a connection that stays silent after an answer.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 15.0  # for the whole head of a request, however many pieces it comes in
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HeadsInTime(H11Protocol):
    """uvicorn's protocol, which waits no longer than ``HEAD_SECONDS`` for the head of a request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

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
