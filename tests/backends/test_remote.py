"""The remote backend against a vlfit server."""

import asyncio
import gc
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from tests.server.harness import Running, running, wait_for
from tests.server.pictures import png
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import ImagePart, Message, TextPart, VideoPart, single_turn
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.remote import RemoteBackend, RequestLoop
from vlfit.errors import (
    DeviceError,
    DoesNotFit,
    InvalidRequest,
    PictureError,
    RemoteError,
    ServerUnreachable,
    UnknownModel,
    UsageError,
    WrongApiKey,
)
from vlfit.server.server_settings import ServerSettings

GREEDY = SamplingParams()


@pytest.fixture
def remote(server: Running, scripted: ScriptedBackend) -> Iterator[RemoteBackend]:
    with RemoteBackend(server.url) as backend:
        yield backend


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_url_with_or_without_v1(server: Running, ending: str) -> None:
    with RemoteBackend(server.url + ending) as backend:
        assert backend.model == "scripted"


def test_url_without_scheme(server: Running) -> None:
    with RemoteBackend(f"127.0.0.1:{server.port}") as backend:
        assert backend.model == "scripted"


def test_loopback_urls_use_no_proxy(
    server: Running, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with RemoteBackend(server.url) as backend:
        assert backend.stream(single_turn("Hello"), GREEDY).answer().text


def test_whole_answer(remote: RemoteBackend) -> None:
    answer = remote.stream(single_turn("What is it?", ImagePart(png("red"))), GREEDY).answer()
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


def test_chunks_are_streamed(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.go_on = threading.Event()
    stream = remote.stream(single_turn("What is it?", ImagePart(png("red"))), GREEDY)
    first = next(iter(stream))
    assert first.text == "A "
    assert len(stream.images) == 1, "known with the first chunk"
    assert not scripted.tickets[0].ended.is_set()
    scripted.go_on.set()
    rest = list(stream)
    assert "".join(chunk.text for chunk in rest) == "red circle 🙂."
    assert [chunk.finish_reason for chunk in rest] == [None] * 4 + ["stop"]
    assert [chunk.usage is not None for chunk in rest] == [False] * 4 + [True]
    assert stream.answer().text == "A red circle 🙂."


def test_all_sampling_params_are_sent(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    """Neutral values too: the server's defaults (temperature 0.7, top_k 20) must not replace them."""
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
        remote.stream(single_turn("Speak."), sampling).answer()
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
    answer = remote.stream(single_turn("Speak."), SamplingParams(top_logprobs=1)).answer()
    assert "".join(each.token for each in answer.logprobs) == answer.text
    assert answer.logprobs[0].token_id == 7
    assert answer.logprobs[0].top[0].logprob == -1.0


def test_finish_reason_loop(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.finish_reason = "loop"
    assert remote.stream(single_turn("Speak."), GREEDY).answer().finish_reason == "loop"


def test_closing_a_stream_cancels_the_request(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.words, scripted.delay = ("word ",) * 600, 0.05
    stream = remote.stream(single_turn("Speak."), GREEDY)
    next(iter(stream))
    stream.close()
    wait_for(scripted.tickets[0].cancelled.is_set)
    with pytest.raises(UsageError):
        stream.answer()
    assert list(stream) == []


def test_closing_an_unread_stream_cancels_the_request(
    remote: RemoteBackend, scripted: ScriptedBackend
) -> None:
    scripted.words, scripted.delay = ("word ",) * 600, 0.05
    remote.stream(single_turn("Speak."), GREEDY).close()
    wait_for(lambda: bool(scripted.tickets))
    wait_for(scripted.tickets[0].cancelled.is_set)


def test_errors_keep_their_class(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    with pytest.raises(PictureError):
        remote.stream(single_turn("What?", ImagePart(b"")), GREEDY)
    scripted.prepare_error = DoesNotFit("9000 tokens are more than 4096", "send less")
    with pytest.raises(DoesNotFit, match=r"\b9000\b.*\b4096\b") as caught:
        remote.stream(single_turn("What?"), GREEDY)
    assert caught.value.exit_code == 3
    scripted.prepare_error = InvalidRequest("roles must alternate", param="messages")
    with pytest.raises(InvalidRequest, match="roles must alternate") as wrong:
        remote.stream(single_turn("What?"), GREEDY)
    assert wrong.value.param == "messages"


def test_failure_in_mid_stream(remote: RemoteBackend, scripted: ScriptedBackend) -> None:
    scripted.error = DeviceError("the GPU is out of memory", "send less")
    with pytest.raises(RemoteError, match="out of memory"):
        remote.stream(single_turn("What?"), GREEDY).answer()


def test_closing_while_a_request_starts_a_task() -> None:
    """A connection that is being opened: warnings about coroutines never awaited are errors here."""
    requests, cancelled, closed = RequestLoop("test"), threading.Event(), threading.Event()

    async def request() -> None:
        requests.close(cleanup)
        # The loop ends after the first pass; in the second it cancels, and this task starts another.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # As anyio does: cancelled before its first step, a task leaves what it would wait for.
        started = asyncio.create_task(finish(asyncio.sleep(60)))
        try:
            await asyncio.sleep(60)
        finally:
            started.cancel()

    async def finish(work: Coroutine[Any, Any, None]) -> None:
        await work

    async def cleanup() -> None:
        closed.set()

    requests.start(request, cancelled.set)
    assert closed.wait(30)
    assert cancelled.is_set()
    gc.collect()


def test_unknown_model(server: Running) -> None:
    with (
        RemoteBackend(server.url, model="gpt-4o") as backend,
        pytest.raises(UnknownModel, match="'scripted'"),
    ):
        backend.stream(single_turn("Hello"), GREEDY)


def test_api_key(scripted: ScriptedBackend) -> None:
    with running(scripted, ServerSettings(api_keys=("secret",))) as server:
        with pytest.raises(WrongApiKey):
            RemoteBackend(server.url)
        with pytest.raises(WrongApiKey):
            RemoteBackend(server.url, api_key="guess")
        with RemoteBackend(server.url, api_key="secret") as backend:
            assert backend.stream(single_turn("Hello"), GREEDY).answer().text


def test_no_server_at_the_url(server: Running) -> None:
    with server.socket() as connection:
        free_port = connection.getsockname()[1]
    with pytest.raises(ServerUnreachable, match=str(free_port)) as caught:
        RemoteBackend(f"http://127.0.0.1:{free_port}")
    assert "vlfit serve" in caught.value.hint


@pytest.mark.parametrize("url", ["", "ftp://example.org", "http://", "http://[::1", "http://host:port"])
def test_invalid_urls(url: str) -> None:
    with pytest.raises((UsageError, ServerUnreachable)):
        RemoteBackend(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://example.org", "ftp"),
        ("http://me:secret@host:99999/v1", "http://host:99999/v1: 99999"),
        ("host:0", "0"),
    ],
)
def test_invalid_urls_are_named_without_secrets(url: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        RemoteBackend(url)
    assert says in raised.value.message
    assert "secret" not in raised.value.message
