"""Sleep and wake over HTTP."""

import json
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pictures import picture
from tests.programs import Program
from tests.server.harness import Running, running, wait_for
from tests.server.pictures import data_url
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.held_memory import expected_memory
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

SLEEP, WAKE, STATUS = "/v1/vlfit/sleep", "/v1/vlfit/wake", "/v1/vlfit/status"
OPTIONS = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=2)


@pytest.fixture
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), OPTIONS) as loaded:
        yield loaded


@pytest.fixture
def server(backend: NativeBackend) -> Iterator[Running]:
    with running(backend, ServerSettings(expectation=expected_memory(backend, ()))) as serving:
        yield serving


def body(tokens: int = 8, **more: Any) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": data_url(picture(96, 64, seed=3))}},
    ]
    messages = [{"role": "user", "content": parts}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def say(server: Running, **more: Any) -> str:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body(**more), timeout=60)
    assert answer.status_code == 200
    words: str = answer.json()["choices"][0]["message"]["content"]
    return words


def post(server: Running, path: str, **more: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=60, **more)


def state(server: Running) -> str:
    """As it is now: an answer that was given before is shared for a moment."""
    time.sleep(0.25)
    told: str = httpx.get(server.url + STATUS).json()["state"]
    return told


def test_asleep_and_awake_again(server: Running) -> None:
    words = say(server)
    facts = post(server, SLEEP).json()
    assert (facts["state"], facts["changed"], facts["sleep"]["park"]) == ("asleep", True, "files")
    assert facts["sleep"]["freed"] > 0 == facts["sleep"]["ram"]
    again = post(server, SLEEP)
    assert (again.status_code, again.json()["changed"]) == (200, False)
    assert again.json()["sleep"] == facts["sleep"]
    assert say(server) == words
    assert state(server) == "ready"
    for content in (b"[", b'"now"', b'{"park": "ram"}'):
        assert post(server, WAKE, content=content).status_code == 400
    awake = post(server, WAKE, content=b"{}")
    assert (awake.status_code, awake.json()["changed"], awake.json()["sleep"]) == (200, False, None)
    post(server, SLEEP)
    assert post(server, WAKE).json()["changed"] is True
    assert say(server, stream=False) == words


def test_many_requests_wake_it_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    words = say(server)
    post(server, SLEEP)
    with ThreadPoolExecutor(6) as clients:
        assert list(clients.map(lambda _: say(server), range(6))) == [words] * 6
    assert caplog.text.count("awake again") == 1


def test_status_does_not_wake_it(server: Running) -> None:
    post(server, SLEEP)
    assert state(server) == "asleep"
    for path in ("/health", "/v1/models", "/v1/vlfit/ledger", STATUS):
        assert httpx.get(server.url + path).status_code == 200
    assert httpx.get(f"{server.url}/health").json() == {
        "status": "ok",
        "model": server_model(server),
        "asleep": True,
    }
    facts = httpx.get(server.url + STATUS).json()
    assert facts["sleep"]["park"] == "files"
    assert facts["kv_blocks"]["total"] == 0 < facts["kv_blocks"]["planned"]
    rows = {row["line"]: row for row in facts["ledger"]}
    assert rows["weights.text"]["actual"] == rows["kv_cache"]["actual"] == 0 < rows["weights.text"]["planned"]
    assert facts["over_plan"] == []
    assert state(server) == "asleep"


def server_model(server: Running) -> str:
    name: str = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    return name


def test_invalid_requests_do_not_wake_it(server: Running) -> None:
    post(server, SLEEP)
    empty: dict[str, Any] = {"messages": []}
    for content in (empty, body(model="another"), body(tokens=5000)):
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=content)
        assert refused.status_code in (400, 404)
    assert state(server) == "asleep"


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        (b"{", None, ""),
        (b"[" * 4000, None, ""),
        (b'{"park": "disk"}', "park", "auto, ram, files"),
        (b'{"park": 3}', "park", "auto, ram, files"),
        (b"[1]", None, ""),
        (b'{"park": "ram"}', "park", "CPU"),
        (b'{"prak": "ram"}', "prak", "'prak'"),
        (b'{"park": "files", "\\ud800": 1}', "?", "'\\ud800'"),
    ],
)
def test_invalid_sleep_bodies(server: Running, content: bytes, param: str | None, words: str) -> None:
    refused = post(server, SLEEP, content=content)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", param)
    assert words in error["message"]
    assert post(server, SLEEP, content=b"x" * 100_000).status_code == 413
    assert httpx.get(server.url + SLEEP).status_code == 405
    assert state(server) == "ready"


def test_a_key_is_asked_for(backend: NativeBackend) -> None:
    with running(backend, ServerSettings(api_keys=("sesame",))) as server:
        for path in (SLEEP, WAKE):
            assert post(server, path).status_code == 401
            assert post(server, path, headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_a_backend_without_sleep() -> None:
    with running(ScriptedBackend()) as server:
        refused = post(server, SLEEP)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_is_not_cut_by_sleep(server: Running, backend: NativeBackend, stream: bool) -> None:
    """It waits for what runs. One who comes before that is over is answered first, too."""
    whole = say(server, tokens=300)
    replies: list[httpx.Response] = []
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(tokens=300, stream=True), timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        wish = threading.Thread(target=lambda: replies.append(post(server, SLEEP)))
        wish.start()
        wait_for(lambda: len(backend._engine_thread._sleep_calls) == 1)
        late = httpx.post(url, json=body(tokens=3, stream=stream), timeout=60)
        assert late.status_code == 200
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    wish.join()
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert said == whole
    assert replies[0].json()["state"] == "asleep"


def test_a_disconnect_cancels_the_sleep(server: Running, backend: NativeBackend) -> None:
    go_on, heard = threading.Event(), threading.Event()

    def listen(_: object) -> None:
        heard.set()
        go_on.wait(60)

    sampling = SamplingParams(max_tokens=4)
    backend.start(backend.prepare(single_turn("hello"), sampling), sampling, listen)
    assert heard.wait(60)  # and the engine's thread waits in the listener
    with server.socket() as client:
        client.sendall(f"POST {SLEEP} HTTP/1.1\r\nHost: [::]\r\nContent-Length: 0\r\n\r\n".encode())
        wait_for(lambda: len(backend._engine_thread._sleep_calls) == 1)
    [(_, wish)] = backend._engine_thread._sleep_calls
    wait_for(wish.cancelled)
    go_on.set()
    say(server)
    assert state(server) == "ready"


@pytest.mark.parametrize("stream", [True, False])
def test_waking_without_memory_gives_503(
    server: Running, backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """503 with the numbers and when to come again, still asleep; and then it is there again."""
    words = say(server)
    post(server, SLEEP)
    with monkeypatch.context() as patched:
        patched.setattr(backend._engine_thread.engine.executor.budget, "available_bytes", lambda: 3 * 1024)
        url = f"{server.url}/v1/chat/completions"
        for refused in (httpx.post(url, json=body(stream=stream), timeout=60), post(server, WAKE)):
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("cannot_wake", "server_error")
            assert "3.0 KiB" in error["message"]
            assert int(refused.headers["retry-after"]) > 0
        assert state(server) == "asleep"
    assert say(server) == words


def test_idle_sleep(tiny: Callable[[str], Path]) -> None:
    with (
        NativeBackend.load(tiny("tied"), replace(OPTIONS, idle_sleep=0.3)) as backend,
        running(backend) as server,
    ):
        words = say(server)
        wait_for(lambda: httpx.get(f"{server.url}/health").json()["asleep"])
        assert say(server) == words


def test_a_sleeping_server_stops(tiny: Callable[[str], Path]) -> None:
    """``vlfit serve --idle-sleep``, Ctrl-C while it sleeps."""
    words = (tiny("tied"), "--port", "0", "--device", "cpu", "--json", "--idle-sleep", "0.3s")
    with Program("serve", *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            wait_for(lambda: httpx.get(f"{url}/health").json()["asleep"])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            told = process.stderr.read()
        finally:
            process.kill()
    assert "asleep: " in told
    assert told.endswith("stopped\n")
    assert "Traceback" not in told
