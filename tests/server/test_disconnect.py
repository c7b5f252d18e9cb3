"""Disconnects at every step of a request release its resources (real sockets)."""

import asyncio
import json
import socket
import threading
import time
from typing import Any

import pytest

from tests.server.harness import Running, wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.server.http.disconnect import Shutdown


@pytest.fixture
def backend(scripted: ScriptedBackend) -> ScriptedBackend:
    """Speaks for half a minute unless it is cancelled."""
    scripted.words, scripted.delay = ("word ",) * 600, 0.05
    return scripted


def send(server: Running, **fields: Any) -> socket.socket:
    """A request whose answer nobody has read yet."""
    body = json.dumps({"messages": [{"role": "user", "content": "Speak."}], **fields}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = server.socket()
    connection.sendall(head.encode() + body)
    return connection


def assert_cancelled_at_once(backend: ScriptedBackend, tickets: int) -> None:
    for ticket in backend.tickets:
        wait_for(ticket.cancelled.is_set)
        wait_for(ticket.ended.is_set)
    assert len(backend.tickets) == tickets


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_cancels(server: Running, backend: ScriptedBackend, stream: bool) -> None:
    connection = send(server, stream=stream)
    wait_for(lambda: bool(backend.tickets))
    if stream:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    time.sleep(0.1)
    assert not backend.tickets[0].cancelled.is_set()
    connection.close()
    assert_cancelled_at_once(backend, 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reset_connection_cancels(server: Running, backend: ScriptedBackend, stream: bool) -> None:
    connection = send(server, stream=stream)
    wait_for(lambda: bool(backend.tickets))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    assert_cancelled_at_once(backend, 1)


def test_all_choices_are_cancelled(server: Running, backend: ScriptedBackend) -> None:
    connection = send(server, n=4)
    wait_for(lambda: len(backend.tickets) == 4)
    connection.close()
    assert_cancelled_at_once(backend, 4)


def test_hanging_up_during_silence(server: Running, backend: ScriptedBackend) -> None:
    """A queued request has nothing to send, so a failing write cannot be what gives it away."""
    backend.delay = 60
    connection = send(server, stream=True)
    wait_for(lambda: bool(backend.tickets))
    connection.recv(1000)
    connection.close()
    assert_cancelled_at_once(backend, 1)


def test_hanging_up_before_the_start_starts_nothing(
    server: Running,
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    preparing, noticed = threading.Event(), threading.Event()

    def prepare(*given: Any) -> Any:
        preparing.set()
        noticed.wait(60)
        return ScriptedBackend().prepare(*given)

    monkeypatch.setattr(backend, "prepare", prepare)
    with caplog.at_level("INFO", "vlfit.server"):
        connection = send(server)
        assert preparing.wait(60)
        connection.close()
        wait_for(lambda: " 499 " in caplog.text)
    noticed.set()
    time.sleep(0.1)
    assert backend.tickets == []


def test_hanging_up_in_the_middle_of_the_body(server: Running, backend: ScriptedBackend) -> None:
    connection = server.socket()
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: 500\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    backend.delay = 0
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "Hi"}]
        )
    assert answer.choices[0].finish_reason == "stop"
    assert len(backend.tickets) == 1


def test_closing_the_openai_stream_cancels(server: Running, backend: ScriptedBackend) -> None:
    with server.openai() as client:
        stream = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "Speak."}], stream=True
        )
        for _, chunk in zip(range(4), stream, strict=False):
            assert chunk.choices
        stream.close()
        assert_cancelled_at_once(backend, 1)


def test_a_finished_request_cancels_nothing(server: Running, backend: ScriptedBackend) -> None:
    staying, leaving = send(server, stream=True), send(server, stream=True)
    wait_for(lambda: len(backend.tickets) == 2)
    leaving.close()
    wait_for(lambda: sum(ticket.cancelled.is_set() for ticket in backend.tickets) == 1)
    time.sleep(0.2)
    assert sum(ticket.cancelled.is_set() for ticket in backend.tickets) == 1
    staying.close()
    assert_cancelled_at_once(backend, 2)


def test_hanging_up_as_the_answer_ends() -> None:
    """Both in one turn of the event loop, the disconnect first: the answer counts."""
    faults: list[dict[str, Any]] = []

    async def run() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        gate = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gate.wait()
            return {"type": "http.disconnect"}

        async def work() -> str:
            for _ in range(3):  # so that ``receive`` waits first, and is woken first
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(gate.set)
            await gate.wait()
            return "answer"

        answer = await Shutdown(1.0).run_until_disconnect(work(), receive)
        for _ in range(3):
            await asyncio.sleep(0)
        return answer

    assert asyncio.run(run()) == "answer"
    assert faults == []
