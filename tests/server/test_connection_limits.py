"""Header timeouts, and limits on connections per address."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.server.harness import Running, running, wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.server import relay
from vlfit.server.http import listen as heads
from vlfit.server.http.listen import ConnectionLimiter, LimitedH11Protocol

HALF = b"GET /health HTTP/1.1\r\nHost: local"
REST = b"host\r\n\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(heads, "HEADER_TIMEOUT_SECONDS", 0.3)
    with running(ScriptedBackend(words=("word ",) * 12, delay=0.05)) as running_server:
        yield running_server


def test_silent_connections_are_closed(server: Running) -> None:
    with server.socket() as connection:
        assert connection.recv(100) == b""


def test_incomplete_headers_get_408(server: Running) -> None:
    with server.socket() as connection:
        connection.sendall(HALF)
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
    with server.socket() as connection:  # again on a connection that was answered once
        connection.sendall(HALF + REST)
        said = b""
        while b'"scripted"}' not in said:
            said += connection.recv(1000)
        connection.sendall(HALF)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_slow_answers_do_not_time_out(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 12


def test_the_relay_closes_silent_connections_without_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HEADER_TIMEOUT_SECONDS", 0.1)

    async def said_to(sent: bytes) -> bytes:
        clients: set[relay._ClientConnection] = set()
        taking = await asyncio.get_running_loop().create_server(
            lambda: relay._ClientConnection(
                "/nowhere", lambda: relay.DEAD, clients, connections, relay._SpareConnection("/nowhere")
            ),
            "127.0.0.1",
            0,
        )
        async with taking:
            reader, writer = await asyncio.open_connection(*taking.sockets[0].getsockname())
            writer.write(sent)
            said = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            await writer.wait_closed()
        return said

    connections = ConnectionLimiter(1)
    assert asyncio.run(said_to(b"")) == asyncio.run(said_to(HALF)) == b""
    assert b"restarting" in asyncio.run(said_to(HALF + REST))
    assert connections.acquire("127.0.0.1"), "those that were closed are not counted"
    assert asyncio.run(said_to(b"")).startswith(b"HTTP/1.1 429 ")


def test_the_relay_closes_silent_connections_with_a_worker(
    behind: Callable[[], socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SPARE_DELAY", 0.0)
    path = str(tmp_path / "server")

    async def talk() -> list[bytes]:
        clients: set[relay._ClientConnection] = set()
        spare, connections = relay._SpareConnection(path), ConnectionLimiter()
        taking = await asyncio.get_running_loop().create_server(
            lambda: relay._ClientConnection(path, lambda: True, clients, connections, spare), "127.0.0.1", 0
        )
        said = []

        async def another() -> None:
            while spare._ready is None:
                await asyncio.sleep(0.01)

        async with taking:
            for asked in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") * 2:
                monkeypatch.setattr(relay, "HEADER_TIMEOUT_SECONDS", 60.0 if asked else 0.2)
                reader, writer = await asyncio.open_connection(*taking.sockets[0].getsockname())
                while not clients:
                    await asyncio.sleep(0.01)
                await another()  # the second and on have a connection that was there before
                writer.write(asked)
                said.append(await asyncio.wait_for(reader.read(15), 60))
                writer.close()
                await writer.wait_closed()
            await another()
            left = spare.take()
            assert left is not None, "one waits for whoever comes next"
            left.close()
            assert spare._task is not None
            spare._task.cancel()
            await asyncio.sleep(0.05)
        return said

    assert asyncio.run(talk()) == [b"", b"HTTP/1.1 200 OK"] * 2


def test_open_file_limit_is_raised() -> None:
    """In a process of its own: the limit stays."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource as r; from vlfit.server.http.listen import *; "
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 1000)); raise_open_file_limit(); "
        "print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    assert hard == resource.RLIM_INFINITY or hard >= 1000
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(1000, 1000)\n"


@pytest.mark.parametrize("how", [(), ("kept",)], ids=["alone", "behind the relay"])
def test_running_out_of_file_descriptors_is_logged_once(how: tuple[str, ...]) -> None:
    """The server neither spins nor writes a page per try, and goes on when connections close."""
    limits = (60, 60)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.serve_scripted", "0", *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().split()[1])
        with ExitStack() as opened:
            for number in range(100):  # an address may have an eighth
                connection = opened.enter_context(socket.socket())
                connection.bind((f"127.0.1.{1 + number // 6}", 0))
                connection.connect(("127.0.0.1", port))
                connection.sendall(HALF)
            time.sleep(0.5)
            before = _cpu_seconds(process.pid)
            time.sleep(3)  # three tries
            assert _cpu_seconds(process.pid) - before < 1
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200)
    finally:
        process.terminate()
        errors = process.communicate()[1]
    assert "Traceback" not in errors
    assert errors.count("ulimit -n") == 1, errors
    assert len(errors.splitlines()) < 5, errors


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children, in seconds."""
    total = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(folder.name) == pid or int(fields[1]) == pid:
                    total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def test_connections_per_address_are_limited(server: Running) -> None:
    LimitedH11Protocol.connection_limiter.limit = 2
    with ExitStack() as opened:
        opened.callback(setattr, LimitedH11Protocol.connection_limiter, "limit", None)
        first, second = (opened.enter_context(server.socket()) for _ in range(2))
        for each in (first, second):
            each.sendall(HALF + REST)
            assert each.recv(20).startswith(b"HTTP/1.1 200 ")
        third = opened.enter_context(server.socket())
        said = third.recv(2000)
        assert said.startswith(b"HTTP/1.1 429 ")
        assert b"too_many_connections" in said
        assert third.recv(100) == b""
        first.close()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)


@pytest.fixture
def behind(server: Running, tmp_path: Path) -> Iterator[Callable[[], socket.socket]]:
    """The same server where a relay would find it: connections to its Unix socket."""
    path = str(tmp_path / "server")
    inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    inside.bind(path)
    inside.listen()
    loop = server.server.servers[0].get_loop()

    async def listen() -> asyncio.Server:
        config, state = server.server.config, server.server.server_state
        return await loop.create_unix_server(
            lambda: LimitedH11Protocol(config=config, server_state=state, app_state={}), sock=inside
        )

    listening = asyncio.run_coroutine_threadsafe(listen(), loop).result(5)

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        connection.connect(path)
        return connection

    yield connect
    loop.call_soon_threadsafe(listening.close)


def test_the_relay_names_its_client(
    behind: Callable[[], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    with behind() as connection, caplog.at_level("DEBUG", "vlfit.server"):
        time.sleep(0.5)  # one that waits for its client is not closed
        connection.sendall(b"192.0.2.7 50")
        time.sleep(0.05)
        connection.sendall(b"123\n" + HALF + REST)
        assert connection.recv(20).startswith(b"HTTP/1.1 200 ")
        wait_for(
            lambda: any(getattr(each, "fields", {}).get("client") == "192.0.2.7" for each in caplog.records)
        )
    for said in (HALF + REST, b"x" * 300):
        with behind() as connection:
            connection.sendall(said)
            assert connection.recv(20) == b"", "who is no relay has no word here"


def test_ipv6_networks_count_as_one_client() -> None:
    connections = ConnectionLimiter(1)
    assert connections.acquire("2001:db8::1")
    assert not connections.acquire("2001:db8::2")
    assert connections.acquire("2001:db8:0:1::1")
    assert connections.acquire("::ffff:192.0.2.1")
    assert not connections.acquire("192.0.2.1")
    connections.release("2001:db8::1")
    assert connections.acquire("2001:db8::3")
