"""What a decode worker sends: replies that make no sense are refused, whoever sent them."""

import socket
import struct
import threading
from contextlib import suppress

import pytest

from tests.pictures import picture
from vlfit.errors import NotAPicture
from vlfit.images.decode_pool import DecodePool
from vlfit.images.decode_process import Worker
from vlfit.images.decode_wire import Connection

PICTURE = picture(97, 61, "PNG")


class BrokenWorkers(DecodePool):
    """Workers that send ``replies``, whatever they are told, and then nothing more."""

    def __init__(self, *replies: bytes) -> None:
        super().__init__(1)
        self.replies = replies
        self.ended: list[int] = []

    def _fork(self) -> Worker:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._play, args=(theirs,), daemon=True).start()
        return Worker(1, Connection(ours, ticks=True), self)  # type: ignore[arg-type]

    def end(self, pid: int) -> int:
        self.ended.append(pid)
        return 0

    def _play(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.sendall(b"".join(self.replies))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(2**20):
                pass


def message(text: str) -> bytes:
    return struct.pack("!I", len(text)) + text.encode()


BEGUN = message('{"begun":true}')
HEADER = message('{"width":8,"height":4,"bytes":100}')
PIXELS = message('{"width":8,"height":4,"notes":[]}')


@pytest.mark.parametrize(
    "replies",
    [
        (),
        (struct.pack("!I", 2**31),),
        (message("[1]"),),
        (message("{"),),
        (message("[" * 60_000),),
        (message('{"width":8,"height":4}'),),
        (message('{"width":8,"height":4,"bytes":-1}'),),
        (message('{"width":8,"height":4,"bytes":99999999999}'),),
        (message('{"width":"8","height":4,"bytes":100}'),),
        (message('{"width":0,"height":4,"bytes":100}'),),
        (message('{"width":100000,"height":100000,"bytes":100}'),),
        (message('{"error":"SystemExit","message":"","hint":""}'),),
        (message('{"error":"NotAPicture","message":1,"hint":""}'),),
        (HEADER, message('{"width":9,"height":4,"notes":[]}')),
        (HEADER, message('{"width":8,"height":4,"notes":"all"}')),
        (HEADER, message('{"width":8,"height":4,"notes":' + str([1] * 500) + "}")),
        (HEADER, PIXELS + bytes(8 * 4 * 3 - 1)),
    ],
)
@pytest.mark.parametrize("has_begun", [True, False])
def test_replies_that_make_no_sense_are_refused(replies: tuple[bytes, ...], has_begun: bool) -> None:
    pool = BrokenWorkers(*([BEGUN] if has_begun else []), *replies)
    with pytest.raises(NotAPicture, match=r"^photo "):
        pool.decode(PICTURE, "photo", lambda width, height: (width, height))
    assert pool.ended
    assert pool.stats().busy == 0
    pool.close()


@pytest.mark.parametrize("begun", [BEGUN, b""])
def test_pixels_of_the_right_size_are_taken(begun: bytes) -> None:
    pool = BrokenWorkers(begun, HEADER, PIXELS + bytes(range(96)))
    found = pool.decode(PICTURE, "photo", lambda width, height: (width, height))
    assert found.pixels.tobytes() == bytes(range(96))
    pool.close()
