"""Messages between a server and its decode workers, over a Unix socket.

A message is the length of a JSON object, the object, and, where both sides know how many follow, bytes.
Pixels travel through the socket too, which the kernel copies in one call at each end: that takes less than
shared memory whose pages are new each time (0.4 ms for 1024x768, 0.8 to 1.3 ms through a memfd), and what has
been received cannot be changed by its sender any more.
"""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from vlfit.images.spooled_file import EncodedFile, pieces_of

MAX_MESSAGE_BYTES = 64 * 1024
TICK_SECONDS = 0.05  # how often the server looks whether it still wants the answer
_BUFFER = 2**20  # of the kernel, in each direction; it may grant less
# To the fork server: ``FORK`` with a socket attached (it answers with the worker's pid), or ``END`` and a pid
# (it kills that worker, and answers with the status that it ended with).
COMMAND = struct.Struct("!ci")
REPLY = struct.Struct("!i")
FORK, END = b"F", b"E"
READY = 0  # its first reply: the imports are done
EXIT_NO_MEMORY = 12  # of a worker that could not say so
# A worker's first message in a job, unless its answer comes at once. One that sends neither in time is stuck,
# and its file not at fault.
BEGUN = {"begun": True}
BEGIN_SECONDS = 5.0

_LENGTH = struct.Struct("!I")
_COUNT = struct.Struct("!q")
_TIMEVAL = struct.Struct("ll")
# ``json.dumps`` with separators makes an encoder in each call, ``json.loads`` guesses the encoding.
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode


class ConnectionEnded(Exception):
    """The other side has closed the connection, or ended."""


class BrokenProtocol(Exception):
    """The other side sent data that violates the protocol."""


def _no_check() -> None:
    return


class Connection:
    """One side of a connection: JSON messages and raw bytes.

    Each message, number or size sent must be received by the matching method on the other side. All methods
    but ``close`` and ``has_ended`` raise ``ConnectionEnded``; ``receive`` and ``receive_chunks`` also
    ``BrokenProtocol``.

    ``ticks``: while a method waits for the other side, it calls ``on_tick`` every ``TICK_SECONDS``; set that
    to a function that raises to end the wait. Without ``ticks`` methods block.
    """

    def __init__(self, sock: socket.socket, *, ticks: bool = False) -> None:
        self._socket = sock
        self.on_tick: Callable[[], None] = _no_check
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        if ticks:
            # In the kernel rather than by ``settimeout``, with which every call would be two.
            wait = _TIMEVAL.pack(int(TICK_SECONDS), int(TICK_SECONDS % 1 * 1e6))
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, wait)

    def close(self) -> None:
        """Close this side. The other side then gets ``ConnectionEnded``."""
        self._socket.close()

    def has_ended(self) -> bool:
        """Whether the other side has closed the connection and nothing is left to read. Does not wait."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def has_received(self) -> bool:
        """Whether something can be read. Does not wait; False after the other side has closed."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def send(self, fields: dict[str, Any], data: EncodedFile = b"") -> None:
        """Send a message of ``fields``, followed by raw ``data``, whose size the receiver must know."""
        body = _to_json(fields).encode()
        message = _LENGTH.pack(len(body)) + body
        if not len(data):
            self.send_bytes(message)
            return
        pieces = pieces_of(data)
        self._send_both(message, next(pieces))
        for piece in pieces:
            self.send_bytes(piece)

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send raw ``data`` without its size, which the receiver must know."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self.on_tick()
            except OSError as error:
                raise ConnectionEnded(str(error)) from None

    def _send_both(self, first: bytes, second: bytes) -> None:
        """Send both in one call, if the kernel takes them at once."""
        try:
            count = self._socket.sendmsg((first, second))
        except BlockingIOError:
            count = 0
        except OSError as error:
            raise ConnectionEnded(str(error)) from None
        if count < len(first):
            self.send_bytes(memoryview(first)[count:])
        self.send_bytes(memoryview(second)[max(count - len(first), 0) :])

    def receive(self) -> dict[str, Any]:
        """Receive one message."""
        (size,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise BrokenProtocol(f"a message of {size} bytes")
        try:
            fields = _from_json(str(self.receive_bytes(size), "utf-8"))
        except (ValueError, RecursionError):
            raise BrokenProtocol("a message that is not JSON") from None
        if not isinstance(fields, dict):
            raise BrokenProtocol("a message that is no object")
        return fields

    def send_count(self, count: int) -> None:
        """Send a number: less than a message takes."""
        self.send_bytes(_COUNT.pack(count))

    def receive_count(self) -> int:
        """Receive one number."""
        count: int = _COUNT.unpack(self.receive_bytes(_COUNT.size))[0]
        return count

    def receive_bytes(self, size: int) -> bytearray:
        """Receive exactly ``size`` raw bytes."""
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def receive_file(self, size: int) -> bytes:
        """Receive exactly ``size`` bytes, without the copy that ``receive_bytes`` needs to become ``bytes``.

        Only for a side without ticks.
        """
        data = self._socket.recv(size, socket.MSG_WAITALL) if size else b""
        if len(data) < size:
            raise ConnectionEnded("the connection was closed")
        return data

    def send_fd(self, fd: int) -> None:
        """Send an open file: the receiver gets a file descriptor of its own. ``fd`` stays open here."""
        try:
            socket.send_fds(self._socket, [b"F"], [fd])
        except OSError as error:
            raise ConnectionEnded(str(error)) from None

    def receive_fd(self) -> int:
        """Receive an open file; the caller must close it. Only for a side without ticks."""
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise ConnectionEnded("the connection was closed")
        return fds[0]

    def receive_into(self, view: memoryview) -> None:
        """Receive as many bytes as ``view`` has, and write them there."""
        while view:
            try:
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            except BlockingIOError:
                self.on_tick()
                continue
            except OSError as error:
                raise ConnectionEnded(str(error)) from None
            if not count:
                raise ConnectionEnded("the connection was closed")
            if count < len(view):
                self.on_tick()
            view = view[count:]

    def send_chunk(self, data: bytes | memoryview) -> None:
        """Send one chunk of data of unknown total length; end with an empty chunk, ``b""``."""
        self.send_bytes(_LENGTH.pack(len(data)))
        self.send_bytes(data)

    def receive_chunks(self, most: int) -> bytes:
        """Receive chunks up to the empty one, joined. Raises ``BrokenProtocol`` above ``most`` bytes."""
        whole = bytearray()
        while (size := _LENGTH.unpack(self.receive_bytes(_LENGTH.size))[0]) > 0:
            if len(whole) + size > most:
                raise BrokenProtocol(f"more than {most} bytes")
            whole += self.receive_bytes(size)
        return bytes(whole)
