"""Invalid and oversized bodies, and wrong routes, get errors in OpenAI's format."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.asking import error_of, post
from tests.server.harness import PATIENCE, Running
from vlfit.server.http import listen
from vlfit.server.server_settings import ServerSettings
from vlfit.units import MIB

pytestmark = pytest.mark.usefixtures("works_afterwards")


@pytest.fixture(scope="module")
def server_settings() -> ServerSettings:
    return ServerSettings(body_limit=16 * MIB)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"messages": ' + b"[" * 10_000]
)
def test_invalid_bodies(server: Running, body: bytes) -> None:
    status, error = post(server, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


def test_ten_megabytes_of_text(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x" * 10**7}])
    assert caught.value.code == "context_length_exceeded"
    assert len(caught.value.message) < 500


def test_a_body_over_the_limit(client: OpenAI) -> None:
    """The client hears the answer although it is still sending when the limit is passed."""
    messages: list[Any] = [{"role": "user", "content": "x" * (20 * MIB)}]
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="scripted", messages=messages)
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


def test_content_length_over_the_limit_is_refused_before_the_body(server: Running) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999\r\n\r\n"
    with server.socket() as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        connection.sendall(bytes(1000))  # is still taken


@pytest.mark.parametrize("length", ["999999999999", "99999999999999999999"])
def test_a_refused_body_that_does_not_come_is_not_waited_for(
    server: Running, monkeypatch: pytest.MonkeyPatch, length: str
) -> None:
    monkeypatch.setattr("vlfit.server.error_replies.DISCARD_SECONDS", 100 * PATIENCE)
    reply = refused_by_length(server, "/v1/chat/completions", length)
    assert reply.lower().partition(b"\r\n\r\n")[0].count(b"connection: close") == 1


@pytest.mark.parametrize(
    ("route", "takes_pictures"),
    [
        ("/v1/chat/completions", True),
        ("/api/chat", True),
        ("/v1/completions", False),
        ("/tokenize", False),
        ("/api/pull", False),
    ],
)
def test_only_where_there_are_pictures_fewer_are_advised(
    server: Running, monkeypatch: pytest.MonkeyPatch, route: str, takes_pictures: bool
) -> None:
    monkeypatch.setattr("vlfit.server.error_replies.DISCARD_IDLE_SECONDS", 0.1)
    assert (b"picture" in refused_by_length(server, route, "999999999999")) == takes_pictures


def refused_by_length(server: Running, route: str, length: str) -> bytes:
    """The whole reply, a 413 after which the server closes the connection."""
    reply = b""
    with server.socket() as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(
            f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        while piece := connection.recv(10_000):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 413")
    return reply


def test_compressed_bodies_are_refused(server: Running) -> None:
    packed = gzip.compress(b'{"messages": []}')
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", content=packed, headers={"Content-Encoding": "gzip"}
    )
    assert answer.status_code == 415
    assert "Content-Encoding 'gzip'" in answer.json()["error"]["message"]


def test_endless_bodies_are_cut_off(server: Running) -> None:
    """Chunked, so that no header gives its size away."""
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 200:
            sent += 1
            yield bytes(MIB)

    try:
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=endless(), timeout=30)
        assert answer.status_code == 413
    except httpx.WriteError:
        pass  # the connection was closed on us while we were still sending: also an answer
    assert sent < 100


CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def send_chunks(server: Running, chunk: bytes, count: int) -> bytes:
    """The response to a chat whose body comes in ``count`` chunks."""
    with server.socket() as connection:
        connection.sendall(CHUNKED % b"/v1/chat/completions")
        piece = b"%x\r\n%s\r\n" % (len(chunk), chunk)
        connection.sendall(piece * count + b"0\r\n\r\n")
        return connection.recv(65_536)


def test_two_million_chunks_cost_little(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused after a part of them. Counted in events, of which each takes microseconds."""
    parsed = 0
    next_event = listen._ChunkLimitedConnection.next_event

    def count(connection: Any) -> Any:
        nonlocal parsed
        parsed += 1
        return next_event(connection)

    monkeypatch.setattr(listen._ChunkLimitedConnection, "next_event", count)
    said = send_chunks(server, b" ", 2_000_000)
    assert said.startswith(b"HTTP/1.1 400 ")
    error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["type"]) == ("too_many_chunks", "invalid_request_error")
    assert listen.MAX_CHUNKS < parsed < listen.MAX_CHUNKS + 1000


def test_small_chunks_are_taken(server: Running) -> None:
    """As programs send them that write JSON piece by piece."""
    said = send_chunks(server, b" ", 60_000)
    assert b"400 Bad Request" in said  # no JSON
    assert b"too_many_chunks" not in said
    assert b"too_many_chunks" not in send_chunks(server, bytes(1024), listen.MAX_CHUNKS // 8)


def test_chunks_of_the_next_request_are_counted_anew(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "MAX_CHUNKS", 30)
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    with httpx.Client() as client:
        for _ in range(3):
            pieces = (body[begin : begin + 4] for begin in range(0, len(body), 4))
            answer = client.post(f"{server.url}/v1/chat/completions", content=pieces)
            assert answer.status_code == 200


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings", b"/nothing"])
def test_broken_chunks_get_one_response(
    server: Running, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after the response: nothing is logged but the request and the bad framing."""
    with server.socket() as connection:
        connection.sendall(CHUNKED % path + b"zz\r\n")
        said = b""
        while more := connection.recv(1000):
            said += more
        assert said.count(b"HTTP/1.1 ") == 1
    with server.socket() as connection:
        connection.sendall(CHUNKED % b"/nothing")
        assert connection.recv(1000).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"zz\r\n\r\n")
        while connection.recv(1000):
            pass
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/edits", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_wrong_routes(server: Running, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    if status == 405:
        assert answer.headers["allow"] in error_of(answer)["message"]
