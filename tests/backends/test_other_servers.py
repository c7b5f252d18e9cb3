"""The remote backend against other servers: the fields they get, and their failures."""

import queue
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.backends.other_server import (
    DONE,
    END,
    USAGE,
    WORD,
    ReplyWriter,
    other_server,
    redirect_reply,
    scripted_reply,
)
from tests.server.pictures import png
from vlfit.api.conversation import ImagePart, VideoPart, single_turn
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.remote import RemoteBackend
from vlfit.errors import (
    InvalidRequest,
    QueueFull,
    RemoteError,
    ServerStopping,
    UnknownModel,
    UsageError,
    VlfitError,
    WrongApiKey,
)

GREEDY = SamplingParams()
PAGE = "<!DOCTYPE HTML>\n<html>\n<head>\n<title>A &amp;\n B</title></head><body><h1>No</h1></body></html>"


def test_other_servers_get_only_openai_fields() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        bodies.append(body)
        scripted_reply(": a comment\n\n", WORD, END, USAGE, DONE)(handler, body)

    with other_server(answer) as url, RemoteBackend(url) as backend:
        started = time.perf_counter()
        result = backend.stream(
            single_turn("Hello", ImagePart(png("red"))), SamplingParams(min_p=0.1)
        ).answer()
        elapsed = time.perf_counter() - started
        assert result.text == "word"
        assert result.finish_reason == "length"
        assert (result.usage.prompt_tokens, result.usage.total_tokens) == (3, 4)
        assert result.images == ()
        assert result.timings is not None
        assert 0 < result.timings.first_token_s <= result.timings.total_s <= elapsed
        assert set(bodies[0]) == {
            *("model", "messages", "stream", "stream_options", "temperature", "top_p"),
            *("presence_penalty", "frequency_penalty", "min_p"),
        }
        url_sent = bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
        assert url_sent.startswith("data:image/png;base64,")
        with pytest.raises(InvalidRequest, match="clip"):
            backend.stream(single_turn("Hello", VideoPart((png("red"),))), GREEDY)


def test_server_without_a_model_list() -> None:
    with other_server(scripted_reply(WORD, END, DONE), models=404) as url:
        with pytest.raises(RemoteError, match="404"):
            RemoteBackend(url)
        with RemoteBackend(url, model="mine") as backend:
            assert backend.stream(single_turn("Hello"), GREEDY).answer().model == "mine"
            assert backend.default_sampling() == SamplingParams()


def test_unreported_image_tokens_are_none() -> None:
    cached = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    lasts: list[dict[str, Any]] = [USAGE, {"usage": cached}, {"choices": []}]
    for last in lasts:
        with other_server(scripted_reply(WORD, END, last, DONE)) as url, RemoteBackend(url) as backend:
            assert (
                backend.stream(single_turn("Hello", ImagePart(png("red"))), GREEDY)
                .answer()
                .usage.image_tokens
                is None
            )
            assert backend.stream(single_turn("Hello"), GREEDY).answer().usage.image_tokens == 0


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("htp:/x", "htp:/x"),
        ("http:/x", "http:/x"),
    ],
)
def test_mistyped_scheme(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RemoteBackend(url)


def test_https_to_an_http_server() -> None:
    with other_server(scripted_reply()) as url, pytest.raises(UsageError, match="https") as raised:
        RemoteBackend(url.replace("http:", "https:"))
    assert f"{url}/v1" in raised.value.hint


@pytest.mark.parametrize("models", [[], {"data": 5}, {"data": []}, {"models": []}])
def test_url_without_openai_api(models: object) -> None:
    with other_server(scripted_reply(), models=models) as url, pytest.raises(RemoteError):
        RemoteBackend(url)


@pytest.mark.parametrize(
    ("answering", "kind", "message"),
    [
        (scripted_reply(WORD), RemoteError, "."),
        (scripted_reply("<html>\n<p>Welcome</p>"), RemoteError, "'<html>'"),
        (scripted_reply("SSH-2.0"), RemoteError, "'SSH-2.0'"),
        (redirect_reply, RemoteError, "302: .*https://elsewhere/login"),
        (scripted_reply(WORD, DONE), RemoteError, "."),
        (scripted_reply("data: {broken\n\n"), RemoteError, "{broken"),
        (scripted_reply("busy", status=429), QueueFull, "429: busy"),
        (scripted_reply(PAGE, status=404), RemoteError, r"404.*'A & B'"),
        (scripted_reply(status=500), RemoteError, "500"),
        (scripted_reply('{"detail": "no such route"}', status=404), RemoteError, "no such route"),
        (
            scripted_reply('{"error": {"message": "The model `x` does not exist."}}', status=404),
            UnknownModel,
            "`x`",
        ),
        (scripted_reply('{"error": "bad key"}', status=401), WrongApiKey, "bad key"),
        (
            scripted_reply('{"error": {"message": "bye", "code": "engine_stopped"}}', status=503),
            ServerStopping,
            "bye",
        ),
        (scripted_reply({"choices": ["word"]}), RemoteError, "."),
        (scripted_reply({"choices": [{"delta": "word"}]}), RemoteError, "."),
        (scripted_reply({"choices": 5}), RemoteError, "."),
        (scripted_reply(WORD, {"error": {"message": "it broke", "code": 500}}), RemoteError, "it broke"),
    ],
)
def test_server_failures_become_vlfit_errors(
    answering: ReplyWriter, kind: type[VlfitError], message: str
) -> None:
    with (
        other_server(answering) as url,
        RemoteBackend(url) as backend,
        pytest.raises(kind, match=message),
    ):
        backend.stream(single_turn("Hello"), GREEDY).answer()


def test_full_servers_are_retried_after_retry_after() -> None:
    asked: list[float] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append(time.perf_counter())
        if len(asked) < 3:
            handler.send_response(429)
            handler.send_header("Retry-After", "0.05")
            handler.end_headers()
        else:
            scripted_reply(WORD, END, DONE)(handler, body)

    with other_server(answer) as url:
        with RemoteBackend(url) as backend:
            assert backend.stream(single_turn("Hello"), GREEDY).answer().text == "word"
        assert len(asked) == 3
        assert asked[2] - asked[0] >= 0.1
        asked.clear()
        with RemoteBackend(url, behind_server=True) as backend, pytest.raises(QueueFull) as full:
            backend.stream(single_turn("Hello"), GREEDY)
        assert len(asked) == 1, "who stands behind a server leaves waiting to its clients"
        assert full.value.retry_after == 1


def test_max_concurrent_requests() -> None:
    lock, three = threading.Lock(), threading.Barrier(3)
    running_now: list[int] = [0, 0]

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with lock:
            running_now[0] += 1
            running_now[1] = max(running_now)
        three.wait(60)  # as long as fewer run, nobody goes on
        with lock:
            running_now[0] -= 1
        scripted_reply(WORD, END, DONE)(handler, body)

    with other_server(answer) as url, RemoteBackend(url, max_concurrent=3) as backend:
        prepared = backend.prepare(single_turn("Hello"), GREEDY)
        ended: queue.SimpleQueue[object] = queue.SimpleQueue()

        def listen(arrival: Chunk | Exception) -> None:
            if isinstance(arrival, Exception) or arrival.finish_reason:
                ended.put(arrival)

        for _ in range(30):
            backend.start(prepared, GREEDY, listen)
        assert all(isinstance(ended.get(timeout=60), Chunk) for _ in range(30))
    assert running_now == [0, 3]


def test_context_and_max_tokens_limits() -> None:
    """0 for a request without a limit if nothing limits it."""
    bodies: list[dict[str, Any]] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        bodies.append(body)
        scripted_reply(WORD, END, DONE)(handler, body)

    cards = {"data": [{"id": "other", "owned_by": "vllm", "max_model_len": 512}]}
    with other_server(answer) as url, RemoteBackend(url) as backend:
        assert (backend.context, backend.server) == (None, "other")
        assert backend.prepare(single_turn("Hello"), GREEDY).max_tokens == 0
        assert backend.prepare(single_turn("Hello"), SamplingParams(max_tokens=7)).max_tokens == 7
    with other_server(answer, models=cards) as url, RemoteBackend(url, max_tokens=9) as backend:
        assert (backend.context, backend.server) == (512, "vllm")
        assert backend.prepare(single_turn("Hello"), GREEDY).max_tokens == 9
        assert backend.prepare(single_turn("Hello"), SamplingParams(max_tokens=7000)).max_tokens == 512
        backend.stream(single_turn("Hello"), GREEDY).answer()
        backend.stream(single_turn("Hello"), SamplingParams(max_tokens=7)).answer()
    assert [body["max_tokens"] for body in bodies] == [9, 7]


def test_urls_are_shown_without_passwords() -> None:
    with (
        other_server(scripted_reply(WORD, END, DONE)) as url,
        RemoteBackend(url.replace("://", "://me:secret@")) as backend,
    ):
        assert backend.device == f"{url}/v1"
