"""Clients that are killed, stall or read slowly release their KV blocks at once."""

import base64
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pictures import encoded, scene
from tests.server.harness import Running, running, wait_for
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings


@pytest.fixture(scope="module")
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=4, prefix_cache=False)
    with NativeBackend.load(tiny("tied"), options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(backend: NativeBackend) -> Iterator[Running]:
    with running(backend, ServerSettings(context=512, body_seconds=0.3)) as running_server:
        yield running_server


def wish(max_tokens: int, **others: Any) -> bytes:
    return json.dumps(
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "loop_guard": False,
            **others,
        }
    ).encode()


def send(server: Running, content: bytes, claimed: int | None = None) -> socket.socket:
    connection = server.socket()
    connection.sendall(head(len(content) if claimed is None else claimed) + content)
    return connection


def head(length: int) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length


def used(backend: NativeBackend) -> int:
    return backend.account().pool.used


def kill(connection: socket.socket) -> None:
    """As when its process is killed while data is on its way: the connection is reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_blocks_of_killed_clients(server: Running, backend: NativeBackend, stream: bool) -> None:
    other: list[int] = []

    def ask() -> None:
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=wish(60), timeout=60)
        other.append(answer.json()["usage"]["completion_tokens"])

    killed = [send(server, wish(480, stream=stream)) for _ in range(3)]
    wait_for(lambda: backend.account().running == 3)
    thread = threading.Thread(target=ask)
    thread.start()
    assert used(backend) > 0
    for connection in killed:
        kill(connection)
    thread.join()
    wait_for(lambda: used(backend) == 0)
    assert other == [60]
    assert backend.account().counters.cancelled >= 3


def test_half_a_body_takes_no_blocks(server: Running, backend: NativeBackend) -> None:
    content = wish(480)
    halves = [send(server, content[:20], len(content)) for _ in range(8)]
    time.sleep(0.1)
    assert httpx.post(f"{server.url}/v1/chat/completions", content=wish(3)).status_code == 200
    wait_for(lambda: used(backend) == 0)
    for connection in halves:
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()


def test_slow_readers_hold_no_blocks(server: Running, backend: NativeBackend) -> None:
    """Nor does who reads nothing: the answer waits in RAM, the model goes on with others."""
    slow = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((server.host, server.port))
        content = wish(200, stream=True, n=1)
        connection.sendall(head(len(content)) + content)
        slow.append(connection)
    wait_for(lambda: backend.account().running + backend.account().waiting == 4)
    finished = backend.account().counters.finished
    for connection in slow:
        assert connection.recv(1) == b"H"
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=wish(5), timeout=60)
    assert answer.status_code == 200
    wait_for(lambda: backend.account().counters.finished >= finished + 5)
    wait_for(lambda: used(backend) == 0)
    for connection in slow:
        assert connection.recv(1) == b"T"  # they are still there
        kill(connection)


def test_five_hundred_malformed_requests(server: Running, backend: NativeBackend) -> None:
    """4xx each; the server goes on, and nothing of them stays in the engine."""
    bodies = list(malformed())
    assert len(bodies) >= 500
    statuses: dict[int, int] = {}
    with httpx.Client(timeout=60) as client:
        for body in bodies:
            answer = client.post(f"{server.url}/v1/chat/completions", content=body)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert 400 <= answer.status_code < 500, (answer.status_code, body[:300], answer.text[:300])
            assert answer.json()["error"]["message"]
        assert client.post(f"{server.url}/v1/chat/completions", content=wish(2)).status_code == 200
    assert used(backend) == 0
    assert set(statuses) <= {400, 404, 413}


def malformed() -> Iterator[bytes]:
    """Broken JSON, fields of wrong types, and pictures that are none, cut off, or changed in their heads."""
    whole = wish(5)
    for end in range(len(whole) - 1):
        yield whole[:end]
    chance = random.Random(7)
    wrong: list[Any] = [None, [], {}, "x", -1, 1e999, [[]], True, "\ud800", 10**30]
    fields = ("messages", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs")
    for name in fields:
        for value in wrong:
            request = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, name: value}
            if name == "messages" or not acceptable(name, value):
                yield json.dumps(request).encode()
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encoded(scene(64, 48), form)
        for _ in range(55):
            cut = data[: chance.randrange(max(len(data) // 2, 12))]
            url = f"data:image/{form.lower()};base64,{base64.b64encode(cut).decode()}"
            part = {"type": "image_url", "image_url": {"url": url}}
            yield json.dumps({"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}).encode()


def acceptable(name: str, value: Any) -> bool:
    """Null is for most fields as good as nothing, and some of the values are fine for some."""
    fine: dict[str, tuple[Any, ...]] = {
        "stop": ("x", []),
        "seed": (-1,),
        "stream": (True,),
        "logprobs": (True,),
    }
    return value is None or any(value == each and type(value) is type(each) for each in fine.get(name, ()))
