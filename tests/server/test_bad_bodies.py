"""Invalid and oversized bodies, and wrong routes, get errors in OpenAI's format."""

import gzip
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.asking import error_of, post
from tests.server.harness import Running
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
