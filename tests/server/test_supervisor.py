"""The supervisor and the relay: crashed workers are restarted, clients get errors. Real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.harness import PATIENCE, wait_for
from tests.server.test_listen import HELLO, NEVER, ask, client_of, server_process, started_stream, taken
from vlfit.server.relay import ResponseTracker, reply_without_worker
from vlfit.server.supervisor import describe_exit


@contextmanager
def kept(*how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with server_process(0, "kept", *how) as found:
        yield found


def serving(url: str) -> int:
    """The process that does."""
    return int(httpx.get(f"{url}/v1/vlfit/status").json()["pid"])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_worker_is_reported_and_restarted() -> None:
    with kept() as (process, url), client_of(url) as client:
        worker = serving(url)
        assert worker != process.pid
        stream = started_stream(client)
        with ThreadPoolExecutor() as clients:
            asked = clients.submit(ask, url)
            wait_for(lambda: taken(url) == 2)
            os.kill(worker, signal.SIGKILL)
            whole = asked.result()
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_died")
        assert int(whole.headers["retry-after"]) > 0
        with pytest.raises(openai.APIError) as died:
            list(stream)
        assert died.value.code == "engine_died"
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert serving(url) != worker
        assert "vlfit_restarts_total 1" in httpx.get(f"{url}/metrics").text
        again = client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=2)
        assert again.choices[0].finish_reason == "length"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert output.splitlines()[-1] == "stopped"
    assert "SIGKILL" in errors


def test_requests_during_the_first_start_get_starting() -> None:
    command = [sys.executable, "-m", "tests.server.serve_scripted", "0", "kept", "slow"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().split()[1]}"
        early = httpx.get(f"{url}/ready")
        assert (early.status_code, early.json()["error"]["code"]) == (503, "starting")
        assert httpx.get(f"{url}/health").json() == {"status": "starting"}
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("ready")
        assert httpx.get(f"{url}/ready").status_code == 200
        process.terminate()
        process.communicate(timeout=PATIENCE)


def test_connections_leave_a_worker_that_stops_accepting() -> None:
    """It outlives each server: who cleans up after a loss, and who was killed before it took them."""
    command = [sys.executable, "-m", "tests.server.serve_scripted", "0", "kept", "slow", "faulty"]
    with ExitStack() as ending:
        process = ending.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        ending.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        told, says = process.stdin, process.stdout

        def line() -> str:
            """What it says once it may go on."""
            told.write("\n")
            told.flush()
            return says.readline()

        port = int(says.readline().split()[1])
        url = f"http://127.0.0.1:{port}"
        assert line().startswith("ready")
        lost = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO})
        assert lost.status_code == 500
        wait_for(lambda: httpx.get(f"{url}/health").json() == {"status": "restarting"})
        assert httpx.get(f"{url}/ready").json()["error"]["code"] == "engine_died"
        assert line().startswith("starting")
        assert line().startswith("ready")

        worker = serving(url)
        os.kill(worker, signal.SIGSTOP)  # it takes nobody any more, and does not tell
        asking = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(3)]
        for each in asking[:2]:
            each.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        time.sleep(0.1)  # or nobody would wait
        os.kill(worker, signal.SIGKILL)
        assert says.readline().startswith("starting")
        asking[2].sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        for each in asking:
            with each, each.makefile("rb") as said:
                assert b'{"status":"restarting"}' in said.read()


def test_requests_on_connections_that_a_dead_worker_had_get_an_answer() -> None:
    """Connections without a request, and idle ones after one: none is reset or closed without a word."""
    command = [sys.executable, "-m", "tests.server.serve_scripted", "0", "kept", "slow"]
    with ExitStack() as ending:
        process = ending.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        ending.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[1])
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("ready")
        open_ones = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(8)]
        for each in open_ones[4:]:
            each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said_before = b""
            while b'"scripted"}' not in said_before:
                said_before += each.recv(1000)
        os.kill(serving(f"http://127.0.0.1:{port}"), signal.SIGKILL)
        assert process.stdout.readline().startswith("starting")  # the next worker waits for a line
        for number, each in enumerate(open_ones):
            path = b"/health" if number % 2 else b"/v1/models"
            each.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        for number, each in enumerate(open_ones):
            with each, each.makefile("rb") as said:
                words = said.read()
            assert (b'{"status":"restarting"}' if number % 2 else b"engine_died") in words
            assert words.startswith(b"HTTP/1.1 200 " if number % 2 else b"HTTP/1.1 503 ")


def test_requests_during_a_restart_get_503_at_once() -> None:
    with kept() as (process, url), httpx.Client() as client:
        os.kill(process.pid, signal.SIGSTOP)  # the keeper does not notice yet
        os.kill(serving(url), signal.SIGKILL)
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGCONT)
        seen = {client.get(f"{url}/ready").status_code for _ in range(20)}
        assert seen <= {200, 503}
        wait_for(lambda: client.get(f"{url}/ready").status_code == 200)


def test_a_lost_engine_is_restarted() -> None:
    """As after a fault of the card: every later request would fail as well."""
    with kept("faulty") as (process, url), client_of(url) as client:
        worker = serving(url)
        with pytest.raises(openai.APIError):
            client.chat.completions.create(model="scripted", messages=HELLO)
        wait_for(lambda: "vlfit_restarts_total 1" in httpx.get(f"{url}/metrics").text)
        assert serving(url) != worker
        again = client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=2)
        assert again.choices[0].finish_reason == "length"
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    assert "CUDA error: an illegal memory access" in errors


def test_it_stops_like_an_unsupervised_server() -> None:
    """What runs is finished, to the last byte; the second signal ends it all on the spot."""
    with kept(*NEVER) as (process, url), client_of(url) as client:
        worker = serving(url)
        stream = started_stream(client, max_tokens=10)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert process.wait(PATIENCE) == 0
        assert not alive(worker)
    with kept(*NEVER) as (process, url), client_of(url) as client:
        stream = started_stream(client)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with kept() as (process, url):
        worker = serving(url)
        process.kill()
        wait_for(lambda: not alive(worker))
        wait_for(lambda: not answers(url))
        wait_for(lambda: not list(tmp_path.iterdir()))


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code > 0
    except httpx.TransportError:
        return False


def test_failing_restarts_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop in a pause between two tries, it leaves nothing behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with kept("broken") as (process, url):
        assert list(tmp_path.iterdir())
        os.kill(serving(url), signal.SIGSEGV)
        assert process.stderr is not None
        said = [process.stderr.readline()]
        assert httpx.get(f"{url}/health").json() == {"status": "restarting"}
        refused = httpx.get(f"{url}/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_died")
        while said[-1] and "code 9" not in said[-1]:
            said.append(process.stderr.readline())
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert "SIGSEGV" in said[0]
    assert said[-1], said
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())
    assert not answers(url)  # the relay ended before its keeper


def test_a_client_that_hangs_up_is_noticed_behind_the_relay() -> None:
    with kept() as (_, url), client_of(url) as client:
        stream = started_stream(client)

        wait_for(lambda: taken(url) == 1)
        stream.close()  # type: ignore[attr-defined]
        wait_for(lambda: taken(url) == 0)


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS = b"6\r\nabcdef\r\n" + b"10\r\n0123456789abcdef\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        EMPTY,
        EVENTS + CHUNKS + b"0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
        reply_without_worker(b"GET / HTTP/1.1"),
    ],
)
def test_response_ends_are_tracked_for_any_chunking(answer: bytes) -> None:
    for step in (1, 2, 3, 7, 1000):
        answers = ResponseTracker()
        answers.on_request_bytes(b"POST / HTTP/1.1\r\n")
        for begin in range(0, len(answer), step):
            assert answers.pending
            answers.on_response_bytes(answer[begin : begin + step])
        assert not answers.pending
        assert not answers.started


def test_head_responses_have_no_body() -> None:
    answers = ResponseTracker()
    answers.on_request_bytes(b"HEAD /health HTTP/1.1\r\n\r\n")
    answers.on_response_bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert not answers.pending


def test_closing_bytes_by_state() -> None:
    def after(*sent: bytes) -> bytes | None:
        answers = ResponseTracker()
        answers.on_request_bytes(b"POST / HTTP/1.1\r\n")
        for each in sent:
            answers.on_response_bytes(each)
        return answers.closing_bytes()

    assert after() == reply_without_worker(b"POST / HTTP/1.1")
    assert after(b"HTTP/1.1 100 Continue\r\n\r\n") == reply_without_worker(b"POST / HTTP/1.1")
    ending = after(EVENTS, CHUNKS)
    assert ending is not None
    assert ending.endswith(b"}\n\n\r\n0\r\n\r\n")
    assert int(ending.split(b"\r\n")[0], 16) == len(ending) - len(ending.split(b"\r\n")[0]) - 9
    assert after(EVENTS, CHUNKS[:-3]) is None  # half an event
    assert after(WHOLE[:-1]) is None
    assert after(b"HTTP/1.1 200") is None


def test_closing_event_of_a_response_is_numbered() -> None:
    event = b'event: response.created\ndata: {"type": "response.created"}\n\n'
    sent = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (event + event, b": ping\n\n", event))
    for step in (1, 5, 1000):
        answers = ResponseTracker()
        answers.on_request_bytes(b"POST /v1/responses HTTP/1.1\r\n")
        for begin in range(0, len(EVENTS + sent), step):
            answers.on_response_bytes((EVENTS + sent)[begin : begin + step])
        words = (answers.closing_bytes() or b"").split(b"\r\n")[1]
        assert words.startswith(b"event: error\ndata: ")
        told = json.loads(words.split(b"data: ", 1)[1])
        assert (told["type"], told["sequence_number"], told["code"]) == ("error", 3, "engine_died")


def test_exit_descriptions() -> None:
    assert "3" in describe_exit(3)
    assert describe_exit(-9).startswith("SIGKILL, ")
    assert describe_exit(-15) == "SIGTERM"
