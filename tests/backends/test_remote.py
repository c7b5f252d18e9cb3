"""The remote backend against our own server, and against others that speak less than it."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.server.harness import Running, running, wait_for
from tests.server.pictures import png
from tests.server.scripted import ScriptedBackend
from vlfit.backends.remote import RemoteBackend
from vlfit.engine.answer import Chunk
from vlfit.engine.conversation import ImagePart, Message, TextPart, VideoPart, ask
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import (
    DeviceError,
    DoesNotFit,
    InvalidRequest,
    PictureError,
    QueueFull,
    RemoteError,
    ServerUnreachable,
    UnknownModel,
    UsageError,
    VlfitError,
    WrongApiKey,
)
from vlfit.server.settings import ServerSettings

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def shared_backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture(scope="module")
def server(shared_backend: ScriptedBackend) -> Iterator[Running]:
    with running(shared_backend) as running_server:
        yield running_server


@pytest.fixture
def scripted(shared_backend: ScriptedBackend) -> ScriptedBackend:
    shared_backend.reset()
    return shared_backend


@pytest.fixture
def remote(server: Running, scripted: ScriptedBackend) -> Iterator[RemoteBackend]:
    with RemoteBackend(server.url) as backend:
        yield backend


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_url_is_taken_with_or_without_v1(server: Running, ending: str) -> None:
    with RemoteBackend(server.url + ending) as backend:
        assert backend.model == "scripted"


def test_the_scheme_may_be_left_out(server: Running) -> None:
    with RemoteBackend(f"127.0.0.1:{server.port}") as backend:
        assert backend.model == "scripted"


def test_a_proxy_of_the_environment_does_not_stand_before_this_computer(
    server: Running, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with RemoteBackend(server.url) as backend:
        assert backend.stream(ask("Hello"), GREEDY).answer().text


def test_a_whole_answer(remote: RemoteBackend) -> None:
    answer = remote.stream(ask("What is it?", ImagePart(png("red"))), GREEDY).answer()
    assert answer.text == "A red circle 🙂."
    assert answer.model == "scripted"
    assert answer.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.image_tokens) == (83, 80)
    assert answer.usage.completion_tokens == 5
    [image] = answer.images
    assert (image.width, image.height, image.seen_width, image.seen_height) == (640, 480, 320, 256)
    assert answer.timings is not None
    assert answer.timings.first_token_s == pytest.approx(0.01)
    assert answer.timings.decode_tokens_per_s == pytest.approx(1000, rel=0.01)


def test_chunks_come_as_they_are_said(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.delay = 0.1
    stream = remote.stream(ask("What is it?", ImagePart(png("red"))), GREEDY)
    first = next(iter(stream))
    assert first.text == "A "
    assert len(stream.images) == 1, "known with the first chunk"
    assert not scripted.tickets[0].ended.is_set()
    rest = list(stream)
    assert "".join(chunk.text for chunk in rest) == "red circle 🙂."
    assert [chunk.finish_reason for chunk in rest] == [None] * 4 + ["stop"]
    assert [chunk.usage is not None for chunk in rest] == [False] * 4 + [True]
    assert stream.answer().text == "A red circle 🙂."


def test_every_wish_arrives(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    """The neutral ones too: the server's own defaults (temperature 0.7, top_k 20) must not fill the gaps."""
    wishes = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=5,
        stop=("END",),
        stop_token_ids=(9,),
        ignore_eos=True,
        top_logprobs=2,
        loop_guard=True,
    )
    for sampling in (wishes, GREEDY):
        remote.stream(ask("Speak."), sampling).answer()
        assert scripted.started[-1] == sampling


def test_default_sampling_is_the_servers(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    assert remote.default_sampling() == scripted.default_sampling()


def test_pictures_and_clips_arrive_byte_for_byte(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    red, blue = png("red"), png("blue")
    conversation = (
        Message("system", (TextPart("Be brief."),)),
        Message("user", (TextPart("This"), ImagePart(red), TextPart("and"), VideoPart((red, blue), 4.0))),
        Message("assistant", (TextPart("A square."),)),
        Message("user", (TextPart("Sure?"),)),
    )
    remote.stream(conversation, GREEDY).answer()
    arrived = scripted.asked[0][0]
    assert [message.role for message in arrived] == ["system", "user", "assistant", "user"]
    parts = arrived[1].parts
    assert (parts[0], parts[2]) == (TextPart("This"), TextPart("and"))
    assert isinstance(parts[1], ImagePart)
    assert parts[1].data == red
    assert parts[3] == VideoPart((red, blue), 4.0)


def test_logprobs(remote: RemoteBackend) -> None:
    answer = remote.stream(ask("Speak."), SamplingParams(top_logprobs=1)).answer()
    assert "".join(each.token for each in answer.logprobs) == answer.text
    assert answer.logprobs[0].token_id == 7
    assert answer.logprobs[0].top[0].logprob == -1.0


def test_a_loop_is_told(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.finish_reason = "loop"
    assert remote.stream(ask("Speak."), GREEDY).answer().finish_reason == "loop"


def test_closing_a_stream_ends_the_request_on_the_server(
    remote: RemoteBackend, scripted: ScriptedBackend
) -> None:
    scripted.words, scripted.delay = ("word ",) * 600, 0.05
    stream = remote.stream(ask("Speak."), GREEDY)
    next(iter(stream))
    stream.close()
    wait_for(scripted.tickets[0].cancelled.is_set, seconds=1.0)
    with pytest.raises(UsageError, match="closed before its end"):
        stream.answer()
    assert list(stream) == []


def test_closing_a_stream_that_was_never_read(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.words, scripted.delay = ("word ",) * 600, 0.05
    remote.stream(ask("Speak."), GREEDY).close()
    wait_for(lambda: bool(scripted.tickets))
    wait_for(scripted.tickets[0].cancelled.is_set, seconds=1.0)


def test_errors_keep_their_kind(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    with pytest.raises(PictureError):
        remote.stream(ask("What?", ImagePart(b"")), GREEDY)
    scripted.prepare_error = DoesNotFit("9000 tokens are more than 4096", "send less")
    with pytest.raises(DoesNotFit, match=r"9000 tokens are more than 4096; send less") as caught:
        remote.stream(ask("What?"), GREEDY)
    assert caught.value.exit_code == 3
    scripted.prepare_error = InvalidRequest("roles must alternate", param="messages")
    with pytest.raises(InvalidRequest, match="roles must alternate") as wrong:
        remote.stream(ask("What?"), GREEDY)
    assert wrong.value.param == "messages"


def test_a_failure_in_mid_stream(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.error = DeviceError("the GPU is out of memory", "send less")
    with pytest.raises(RemoteError, match="out of memory"):
        remote.stream(ask("What?"), GREEDY).answer()


def test_another_model_than_the_server_runs(server: Running) -> None:
    with (
        RemoteBackend(server.url, model="gpt-4o") as backend,
        pytest.raises(UnknownModel, match="this server runs 'scripted'"),
    ):
        backend.stream(ask("Hello"), GREEDY)


def test_a_key(scripted: ScriptedBackend) -> None:
    with running(scripted, ServerSettings(api_keys=("secret",))) as server:
        with pytest.raises(WrongApiKey, match="asks for an API key"):
            RemoteBackend(server.url)
        with pytest.raises(WrongApiKey, match="wrong"):
            RemoteBackend(server.url, api_key="guess")
        with RemoteBackend(server.url, api_key="secret") as backend:
            assert backend.stream(ask("Hello"), GREEDY).answer().text


def test_no_server(server: Running) -> None:
    with server.socket() as connection:
        free_port = connection.getsockname()[1]
    with pytest.raises(ServerUnreachable, match=r"no server answers.*\n.*vlfit serve"):
        RemoteBackend(f"http://127.0.0.1:{free_port}")


@pytest.mark.parametrize("url", ["", "ftp://example.org", "http://", "http://[::1", "http://host:port"])
def test_no_url(url: str) -> None:
    with pytest.raises((UsageError, ServerUnreachable)):
        RemoteBackend(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://example.org", "over http or https, not ftp"),
        ("http://me:secret@host:99999/v1", "http://host:99999/v1: 99999 is no port"),
        ("host:0", "0 is no port"),
    ],
)
def test_the_fault_of_a_url_is_named(url: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        RemoteBackend(url)
    assert raised.value.message.endswith(says)


def moved(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.send_response(302)
    handler.send_header("Location", "https://elsewhere/login")
    handler.end_headers()


Answering = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@contextmanager
def other_server(answering: Answering, models: object = None) -> Iterator[str]:
    """A server that is not ours: ``/v1/models`` gives ``models``, every POST what ``answering`` writes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "other"}]} if models is None else models).encode()
            self.send_response(200 if models != 404 else 404)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            answering(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def says(*events: object, status: int = 200) -> Answering:
    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.send_response(status)
        handler.end_headers()
        for event in events:
            data = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            handler.wfile.write(data.encode())

    return answer


WORD = {"choices": [{"index": 0, "delta": {"content": "word"}, "finish_reason": None}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}
DONE = "data: [DONE]\n\n"


def test_another_server_is_told_only_what_openai_knows() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        bodies.append(body)
        says(": a comment\n\n", WORD, END, USAGE, DONE)(handler, body)

    with other_server(answer) as url, RemoteBackend(url) as backend:
        started = time.perf_counter()
        result = backend.stream(ask("Hello", ImagePart(png("red"))), SamplingParams(min_p=0.1)).answer()
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
            backend.stream(ask("Hello", VideoPart((png("red"),))), GREEDY)


def test_a_server_without_a_list_of_models() -> None:
    with other_server(says(WORD, END, DONE), models=404) as url:
        with pytest.raises(RemoteError, match="404"):
            RemoteBackend(url)
        with RemoteBackend(url, model="mine") as backend:
            assert backend.stream(ask("Hello"), GREEDY).answer().model == "mine"
            assert backend.default_sampling() == SamplingParams()


@pytest.mark.parametrize("models", [[], {"data": 5}, {"data": []}, {"models": []}])
def test_a_url_that_is_no_openai_api(models: object) -> None:
    with other_server(says(), models=models) as url, pytest.raises(RemoteError):
        RemoteBackend(url)


@pytest.mark.parametrize(
    ("answering", "kind", "message"),
    [
        (says(WORD), RemoteError, "broke off"),
        (says("<html>\n<p>Welcome</p>"), RemoteError, "no stream of events: '<html>'"),
        (says("SSH-2.0"), RemoteError, "no stream of events: 'SSH-2.0'"),
        (moved, RemoteError, "302: it sends us to https://elsewhere/login"),
        (says(WORD, DONE), RemoteError, "without a reason"),
        (says("data: {broken\n\n"), RemoteError, "no JSON object"),
        (says("busy", status=429), QueueFull, "429: busy"),
        (says(status=500), RemoteError, "500: nothing more"),
        (says('{"detail": "no such route"}', status=404), RemoteError, "no such route"),
        (says('{"error": {"message": "The model `x` does not exist."}}', status=404), UnknownModel, "`x`"),
        (says('{"error": "bad key"}', status=401), WrongApiKey, "bad key"),
        (says({"choices": ["word"]}), RemoteError, "another form"),
        (says({"choices": [{"delta": "word"}]}), RemoteError, "another form"),
        (says({"choices": 5}), RemoteError, "another form"),
        (says(WORD, {"error": {"message": "it broke", "code": 500}}), RemoteError, "it broke"),
    ],
)
def test_what_goes_wrong_elsewhere(answering: Answering, kind: type[VlfitError], message: str) -> None:
    with (
        other_server(answering) as url,
        RemoteBackend(url) as backend,
        pytest.raises(kind, match=message),
    ):
        backend.stream(ask("Hello"), GREEDY).answer()


def test_a_full_server_is_asked_again_when_it_said() -> None:
    asked: list[float] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append(time.perf_counter())
        if len(asked) < 3:
            handler.send_response(429)
            handler.send_header("Retry-After", "0.05")
            handler.end_headers()
        else:
            says(WORD, END, DONE)(handler, body)

    with other_server(answer) as url:
        with RemoteBackend(url) as backend:
            assert backend.stream(ask("Hello"), GREEDY).answer().text == "word"
        assert len(asked) == 3
        assert asked[2] - asked[0] >= 0.1
        asked.clear()
        with RemoteBackend(url, serves=True) as backend, pytest.raises(QueueFull) as full:
            backend.stream(ask("Hello"), GREEDY)
        assert len(asked) == 1, "who stands behind a server leaves waiting to its clients"
        assert full.value.retry_after == 1


def test_requests_run_side_by_side_as_many_as_were_said() -> None:
    lock = threading.Lock()
    running_now: list[int] = [0, 0]

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with lock:
            running_now[0] += 1
            running_now[1] = max(running_now)
        time.sleep(0.02)
        with lock:
            running_now[0] -= 1
        says(WORD, END, DONE)(handler, body)

    with other_server(answer) as url, RemoteBackend(url, at_once=3) as backend:
        prepared = backend.prepare(ask("Hello"), GREEDY)
        ended: queue.SimpleQueue[object] = queue.SimpleQueue()

        def listen(arrival: Chunk | Exception) -> None:
            if isinstance(arrival, Exception) or arrival.finish_reason:
                ended.put(arrival)

        for _ in range(30):
            backend.start(prepared, GREEDY, listen)
        assert all(isinstance(ended.get(timeout=10), Chunk) for _ in range(30))
    assert running_now == [0, 3]


def test_limits_that_are_told_or_given() -> None:
    """Of a request that names no limit as much as nobody can say is 0."""
    bodies: list[dict[str, Any]] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        bodies.append(body)
        says(WORD, END, DONE)(handler, body)

    cards = {"data": [{"id": "other", "owned_by": "vllm", "max_model_len": 512}]}
    with other_server(answer) as url, RemoteBackend(url) as backend:
        assert (backend.context, backend.server) == (None, "other")
        assert backend.prepare(ask("Hello"), GREEDY).most_tokens == 0
        assert backend.prepare(ask("Hello"), SamplingParams(max_tokens=7)).most_tokens == 7
    with other_server(answer, models=cards) as url, RemoteBackend(url, max_tokens=9) as backend:
        assert (backend.context, backend.server) == (512, "vllm")
        assert backend.prepare(ask("Hello"), GREEDY).most_tokens == 9
        assert backend.prepare(ask("Hello"), SamplingParams(max_tokens=7000)).most_tokens == 512
        backend.stream(ask("Hello"), GREEDY).answer()
        backend.stream(ask("Hello"), SamplingParams(max_tokens=7)).answer()
    assert [body["max_tokens"] for body in bodies] == [9, 7]


def test_a_url_is_shown_without_the_password_in_it() -> None:
    with (
        other_server(says(WORD, END, DONE)) as url,
        RemoteBackend(url.replace("://", "://me:secret@")) as backend,
    ):
        assert backend.device == f"{url}/v1"
