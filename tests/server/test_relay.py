"""The relay between clients and a worker that resets connections: a socket played by the test."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import PATIENCE
from vlfit.server.dialects import DIALECTS, dialect_of
from vlfit.server.error_replies import ErrorFacts
from vlfit.server.relay import DEAD, SERVING, STARTING, ResponseTracker, reply_without_worker

HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
Worker = Callable[[socket.socket], None]


def reset_unread(connection: socket.socket) -> None:
    """Close a connection of which something is unread: the kernel resets it (ECONNRESET)."""
    connection.recv(1)


def reset_at_once(connection: socket.socket) -> None:
    """Close it before anything has come."""


def reset_later(connection: socket.socket) -> None:
    """Answer one request in full, and reset the next one on the same connection."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        more = connection.recv(1000)
        if not more:  # a spare connection, which ends with its relay
            return
        data += more
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    connection.recv(1)


@contextmanager
def worker_at(path: Path, play: Worker) -> Iterator[None]:
    """A worker's socket at ``path``; ``play`` gets each connection, which is closed after it."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            play(connection)

    def serve() -> None:
        with suppress(OSError):
            while True:  # a relay also opens spare connections, on which nothing comes for now
                threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        path.unlink()


RELAY = """
import asyncio, socket, sys
from vlfit.server.relay import relay
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
asyncio.run(relay([listener], sys.argv[1], lambda: int(sys.argv[2])))
"""


class Relay:
    """A relay process for a worker at ``path`` that is always in ``state``."""

    def __init__(self, path: Path, state: int) -> None:
        self.path = path
        command = [sys.executable, "-c", RELAY, str(path), str(state)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def ask(self, *requests: bytes) -> bytes:
        """All that comes for ``requests`` on one connection; each is sent after the answer before, "ok"."""
        received = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as client:
            for number, request in enumerate(requests, 1):
                with suppress(ConnectionError):  # it may answer before it has read all
                    client.sendall(request)
                while number < len(requests) and not received.endswith(b"ok"):
                    data = client.recv(1000)
                    assert data, received
                    received += data
            while data := client.recv(65536):
                received += data
        return received


@pytest.fixture(scope="module", params=[STARTING, DEAD])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """A relay without a worker."""
    yield from kept(Relay(tmp_path_factory.mktemp("relay") / "gone", request.param))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Relay]:
    """A relay whose worker is ``worker_at``. One for each test: it keeps a spare connection to its worker."""
    yield from kept(Relay(tmp_path / "server", SERVING))


def kept(relay: Relay) -> Iterator[Relay]:
    with relay.process:
        yield relay
        relay.process.kill()


@pytest.mark.parametrize("play", [reset_unread, reset_at_once, reset_later])
@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
def test_a_worker_that_resets_connections_becomes_an_answer(serving: Relay, play: Worker, path: str) -> None:
    request = HEALTH.replace(b"/health", path.encode())
    count = 2 if play is reset_later else 1
    with worker_at(serving.path, play):
        received = serving.ask(*[request] * count)
    answer = received.removeprefix(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    head, _, body = answer.partition(b"\r\n\r\n")
    if path == "/health":
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(body) == {"status": "restarting"}
    else:
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "engine_died"


def test_a_body_under_way_does_not_hide_the_answer(serving: Relay) -> None:
    """The client still sends when the worker resets the connection."""
    request = b"POST /v1/messages HTTP/1.1\r\nHost: here\r\nContent-Length: 8000000\r\n\r\n" + bytes(
        8_000_000
    )
    with worker_at(serving.path, reset_unread):
        received = serving.ask(request)
    assert received.startswith(b"HTTP/1.1 503 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["type"] == "error"


def test_without_a_worker_errors_have_the_form_of_the_dialect(alone: Relay) -> None:
    for dialect in DIALECTS:
        for prefix in dialect.prefixes:
            request = f"POST {prefix}/x?y=1 HTTP/1.1\r\nHost: here\r\n\r\n".encode()
            if dialect.name == "Rerank":
                request = request.replace(b"/x", b"")
            received = alone.ask(request)
            head, _, body = received.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            told: dict[str, Any] = json.loads(body)
            facts = ErrorFacts(503, "", "engine_died")
            assert shape(told) == shape(dialect.error_form(facts)), prefix


def shape(value: Any) -> Any:
    """Keys and types, without texts."""
    return {key: shape(each) for key, each in value.items()} if isinstance(value, dict) else type(value)


def test_a_request_whose_first_line_comes_in_pieces_is_known() -> None:
    tracker = ResponseTracker()
    for position in range(len(HEALTH)):
        tracker.on_request_bytes(HEALTH[position : position + 1])
    assert tracker.closing_bytes() == reply_without_worker(HEALTH)
    assert b"restarting" in reply_without_worker(HEALTH)


@pytest.mark.parametrize(
    ("path", "media", "part"),
    [
        ("/v1/chat/completions", "text/event-stream", b"data: {}\n\n"),
        ("/v1/messages", "text/event-stream", b"event: ping\ndata: {}\n\n"),
        ("/api/chat", "application/x-ndjson", b"{}\n"),
    ],
)
def test_a_stream_that_is_cut_ends_with_an_error_in_its_form(path: str, media: str, part: bytes) -> None:
    tracker = ResponseTracker()
    tracker.on_request_bytes(f"POST {path} HTTP/1.1\r\n\r\n".encode())
    tracker.on_response_bytes(
        f"HTTP/1.1 200 OK\r\nContent-Type: {media}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    tracker.on_response_bytes(b"%x\r\n%s\r\n" % (len(part), part))
    size, _, rest = (tracker.closing_bytes() or b"").partition(b"\r\n")
    last, end = rest[: int(size, 16)], rest[int(size, 16) :]
    assert end == b"\r\n0\r\n\r\n"
    assert last.endswith(part[part.rindex(b"}") + 1 :])
    line = last.split(b"data: ")[-1]
    assert shape(json.loads(line)) == shape(dialect_of(path).error_form(ErrorFacts(503, "", "engine_died")))
    assert last.startswith(b"event: error\n") == (path == "/v1/messages")
    tracker.on_response_bytes(b"5\r\n{")
    assert tracker.closing_bytes() is None
