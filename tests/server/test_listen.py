"""A server process: shutdown by signals, and ports in use."""

import errno
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI, Stream
from openai.types.chat import ChatCompletionChunk

from tests.server.harness import PATIENCE, wait_for
from vlfit.errors import CannotListen, UsageError
from vlfit.server.http.listen import bind, listen_error, url_of
from vlfit.server.server_settings import ServerSettings, is_loopback

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@contextmanager
def server_process(port: int = 0, *how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, once it is ready, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.server.serve_scripted", str(port), *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        word, used_port = process.stdout.readline().split()
        assert word == "ready"
        yield process, f"http://127.0.0.1:{used_port}"
    finally:
        process.kill()
        process.communicate()


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def started_stream(client: OpenAI, **options: Any) -> Iterator[ChatCompletionChunk]:
    """A stream that has said its first word."""
    stream: Stream[ChatCompletionChunk] = client.chat.completions.create(
        model="scripted", messages=HELLO, stream=True, **options
    )
    while not next(stream).choices[0].delta.content:
        pass
    return stream


def taken(url: str) -> int:
    """The completions that run."""
    return int(httpx.get(f"{url}/v1/vlfit/status").json()["places"]["taken"])


NEVER = ("drain_seconds=600", "term_seconds=600")  # what runs is not cut before a test has failed


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_stops_at_once(how: signal.Signals) -> None:
    """It does not use up the time that requests would have."""
    with server_process(0, *NEVER) as (process, url):
        with httpx.Client() as client:  # a connection that is kept open, without a request on it
            assert client.get(f"{url}/health").status_code == 200
            process.send_signal(how)
            output, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, output, errors) == (0, "stopped\n", "")


def test_streams_are_drained_then_cancelled_with_an_error() -> None:
    """An answer that is soon done still gets through whole; one of minutes is cut, and hears why."""
    with server_process(0, "drain_seconds=3", "term_seconds=600") as (process, url), client_of(url) as client:
        long = started_stream(client)
        short = started_stream(client, max_tokens=4)
        process.send_signal(signal.SIGINT)
        assert [chunk.choices[0].finish_reason for chunk in short][-1] == "length"
        with pytest.raises(openai.APIError) as cut:
            list(long)
        assert cut.value.code == "engine_stopped"
        output, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, output, errors) == (0, "stopped\n", "")


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO}, timeout=PATIENCE)


def test_a_running_request_without_stream_gets_503() -> None:
    with server_process() as (process, url):
        with ThreadPoolExecutor() as clients:
            asked = clients.submit(ask, url)
            wait_for(lambda: taken(url) == 1)
            process.send_signal(signal.SIGINT)
            answer = asked.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_stopped"
        assert process.wait(PATIENCE) == 0


def test_new_requests_while_draining_get_503() -> None:
    """On a connection that is there, and on a new one."""
    with server_process() as (process, url), client_of(url) as client, httpx.Client() as kept:
        assert kept.get(f"{url}/ready").status_code == 200
        stream = started_stream(client)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: kept.get(f"{url}/ready").status_code == 503)
        for asking in (kept.post, httpx.post):
            answer = asking(f"{url}/v1/chat/completions", json={"messages": HELLO})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_stopped"
            assert int(answer.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/health").json()["status"] == "stopping"
        assert next(stream).choices  # it was running all the while
        client.close()
        assert process.wait(PATIENCE) == 0


def test_sigterm_waits_for_running_requests() -> None:
    """For longer than Ctrl-C does, and no longer than it takes."""
    with (
        server_process(0, "drain_seconds=0.1", "term_seconds=600") as (process, url),
        client_of(url) as client,
    ):
        stream = started_stream(client, max_tokens=20)  # one second
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert process.wait(PATIENCE) == 0


def test_the_second_ctrl_c_ends_the_process() -> None:
    with server_process(0, *NEVER) as (process, url), client_of(url) as client:
        stream = started_stream(client)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 128 + signal.SIGINT
        with pytest.raises(openai.APIConnectionError):
            list(stream)


def test_a_client_that_does_not_read_cannot_block_shutdown() -> None:
    with server_process() as (process, url):
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "n": 16}'
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: {len(body)}\r\n\r\n"
            deaf.sendall(head.encode() + body)
            wait_for(lambda: taken(url) == 16)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0


def test_a_port_in_use() -> None:
    with server_process() as (_, url):
        port = url.rpartition(":")[2]
        second = subprocess.run(
            [sys.executable, "-m", "tests.server.serve_scripted", port],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert second.returncode == 1
    assert second.stdout == ""
    assert re.search(rf"\b127\.0\.0\.1\b.*\b{port}\b", second.stderr)
    assert "--port" in second.stderr
    assert "Traceback" not in second.stderr


def test_the_port_is_free_again_right_after_a_stop() -> None:
    """Connections that the server closed linger for a minute; they must not keep the port."""
    with server_process() as (process, url):
        with client_of(url) as client:
            started_stream(client)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
        with server_process(int(url.rpartition(":")[2])) as (_, again):
            assert httpx.get(f"{again}/health").status_code == 200


@pytest.mark.parametrize("host", ["no.such.host.invalid", "198.51.100.1", "not a host"])
def test_addresses_that_cannot_be_bound(host: str) -> None:
    with pytest.raises(CannotListen, match=host):
        bind(host, 0)


def test_an_address_of_another_computer_is_not_taken_for_a_port_in_use() -> None:
    with pytest.raises(CannotListen) as caught:
        bind("198.51.100.1", 0)
    assert "--host" in caught.value.hint
    assert "--port" not in caught.value.hint


def test_a_port_of_the_system_is_not_taken_for_one_in_use() -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    in_use = OSError(errno.EADDRINUSE, "in use")
    assert "1024" in listen_error("127.0.0.1", 80, refused).hint
    assert "1024" not in listen_error("::1", 80, in_use).hint


def test_url_of_a_listener() -> None:
    with bind("0.0.0.0", 0) as everywhere:
        assert url_of(everywhere).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        try:
            with bind("::1", 0) as six:
                assert url_of(six).startswith("http://[::1]:")
        except CannotListen:
            pytest.skip("this computer has no IPv6")


def test_what_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"))


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match=r"body_limit\b.*\b0\b"):
        ServerSettings(body_limit=0)
