"""Chat completions through the ``openai`` package."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.server.harness import Running, running
from tests.server.pictures import data_url, png
from tests.server.scripted import CONTEXT, ScriptedBackend
from vlfit.api.conversation import ImagePart, TextPart, VideoPart
from vlfit.server.server_settings import ServerSettings

SAID = "A red circle 🙂."
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is this?"}]


@pytest.fixture(scope="module")
def shared_backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture(scope="module")
def server(shared_backend: ScriptedBackend) -> Iterator[Running]:
    with running(shared_backend, ServerSettings(aliases=("nickname",), context=CONTEXT)) as running_server:
        yield running_server


@pytest.fixture
def backend(shared_backend: ScriptedBackend) -> ScriptedBackend:
    shared_backend.reset()
    return shared_backend


@pytest.fixture
def client(server: Running, backend: ScriptedBackend) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def with_pictures(*urls: str, text: str = "What is this?") -> list[ChatCompletionMessageParam]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return cast(
        list[ChatCompletionMessageParam],
        [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
    )


def extras(completion: ChatCompletion) -> dict[str, Any]:
    return cast(dict[str, Any], (completion.model_extra or {})["vlfit"])


def test_models_lists_the_one_model(client: OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["scripted"]
    assert models[0].owned_by == "vlfit"
    assert (models[0].model_extra or {})["max_model_len"] == 4096
    assert client.models.retrieve("scripted").id == "scripted"
    assert client.models.retrieve("nickname").id == "scripted"


def test_health(server: Running) -> None:
    answer = httpx.get(f"{server.url}/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "model": "scripted"}
    assert httpx.head(f"{server.url}/health").status_code == 200


def test_a_whole_answer(client: OpenAI, backend: ScriptedBackend) -> None:
    completion = client.chat.completions.create(model="scripted", messages=HELLO)
    assert completion.id.startswith("chatcmpl-")
    assert completion.object == "chat.completion"
    assert completion.model == "scripted"
    [choice] = completion.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content == SAID
    assert choice.logprobs is None
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 4
    assert completion.usage.completion_tokens == 5
    assert completion.usage.total_tokens == 9
    timings = extras(completion)["timings"]
    assert set(timings) == {"queued_s", "first_token_s", "total_s", "decode_tokens_per_s"}
    assert timings["decode_tokens_per_s"] == pytest.approx(1000, rel=0.01)


def test_unset_fields_take_the_checkpoints_defaults(client: OpenAI, backend: ScriptedBackend) -> None:
    client.chat.completions.create(model="nickname", messages=HELLO, top_p=0.5)
    assert backend.started[0].temperature == 0.7
    assert backend.started[0].top_k == 20
    assert backend.started[0].top_p == 0.5


def test_every_sampling_field_arrives(client: OpenAI, backend: ScriptedBackend) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        max_completion_tokens=3,
        max_tokens=3,
        temperature=0,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=-3,
        stop="END",
        logprobs=True,
        top_logprobs=2,
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [5],
            "ignore_eos": True,
            "loop_guard": True,
        },
    )
    sampling = backend.started[0]
    assert sampling.max_tokens == 3
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, -3)
    assert (sampling.stop, sampling.stop_token_ids) == (("END",), (5,))
    assert (sampling.ignore_eos, sampling.top_logprobs, sampling.loop_guard) == (True, 2, True)


def test_finish_reason_length(client: OpenAI) -> None:
    completion = client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=2)
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.content == "A red "


def test_loop_guard_finish_reasons(client: OpenAI, backend: ScriptedBackend) -> None:
    backend.finish_reason = "loop"
    completion = client.chat.completions.create(model="scripted", messages=HELLO)
    assert completion.choices[0].finish_reason == "stop"
    assert extras(completion)["finish_reasons"] == ["loop"]


def test_logprobs_in_openais_shape(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="scripted", messages=HELLO, logprobs=True, top_logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == SAID
    smile = logprobs.content[3]
    assert smile.bytes == list(" 🙂".encode())
    assert smile.logprob == -0.5
    assert [other.logprob for other in smile.top_logprobs] == [-1.0, -2.0]


def test_streamed_logprobs_and_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="scripted",
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == SAID
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 5 + ["stop"]
    tokens = [
        token.token
        for chunk in chunks[1:-1]
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert "".join(tokens) == SAID
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 9
    assert (chunks[-1].model_extra or {})["vlfit"]["finish_reasons"] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_bytes_of_a_stream(server: Running, backend: ScriptedBackend) -> None:
    body = {"messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-request-id"]
        text = answer.read().decode()
    events = text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    first, *_, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert first["vlfit"] == {"images": []}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in last
    assert last["vlfit"]["timings"]["total_s"] > 0


def test_several_choices(client: OpenAI, backend: ScriptedBackend) -> None:
    completion = client.chat.completions.create(model="scripted", messages=HELLO, n=3, seed=10)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert [sampling.seed for sampling in backend.started] == [10, 11, 12]
    assert len(backend.asked) == 1, "the prompt is prepared once"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 15)


def test_several_choices_streamed(client: OpenAI) -> None:
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="scripted", messages=HELLO, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [SAID, SAID]


def test_pictures_arrive_in_order(client: OpenAI, backend: ScriptedBackend) -> None:
    red, blue = png("red"), png("blue")
    completion = client.chat.completions.create(
        model="scripted", messages=with_pictures(data_url(red), data_url(blue))
    )
    conversation, _ = backend.asked[0]
    assert conversation[0].parts[2] == TextPart("What is this?")
    pictures = [part.data for part in conversation[0].parts if isinstance(part, ImagePart)]
    assert pictures == [red, blue]
    assert completion.usage is not None
    assert completion.usage.model_dump()["prompt_tokens_details"]["image_tokens"] == 160
    seen = {"width": 640, "height": 480, "seen_width": 320, "seen_height": 256, "tokens": 80}
    assert extras(completion)["images"] == [{**seen, "frames": 1, "notes": []}] * 2


def test_a_clip_as_frames(client: OpenAI, backend: ScriptedBackend) -> None:
    red, blue = png("red"), png("blue")
    clip = {"type": "video", "frames": [data_url(red), data_url(blue)], "fps": 4}
    messages = cast(list[ChatCompletionMessageParam], [{"role": "user", "content": [clip]}])
    client.chat.completions.create(model="scripted", messages=messages)
    assert backend.asked[0][0][0].parts == (VideoPart((red, blue), 4.0),)


def test_roles(client: OpenAI, backend: ScriptedBackend) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": [{"type": "text", "text": "Three?"}]},
        ],
    )
    roles = [message.role for message in backend.asked[0][0]]
    assert roles == ["system", "user", "assistant", "user"]


def test_unknown_fields_are_named_and_bookkeeping_is_not(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="scripted", messages=HELLO, user="me", extra_body={"temprature": 0.5}
    )
    assert extras(completion)["ignored"] == ["temprature"]


def test_each_picture_has_its_detail(client: OpenAI, backend: ScriptedBackend) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(png("red")), **detail}}
        for detail in ({"detail": "low"}, {"detail": "high"}, {}, {"detail": "original"})
    ]
    content.append({"type": "image_url", "image_url": data_url(png("red"))})  # as many clients send it
    messages = cast(list[ChatCompletionMessageParam], [{"role": "user", "content": content}])
    client.chat.completions.create(model="scripted", messages=messages)
    [message] = backend.asked[-1][0]
    details = [part.detail for part in message.parts if isinstance(part, ImagePart)]
    assert details == ["low", "high", "auto", "high", "auto"]


def test_four_streams_at_once(server: Running, backend: ScriptedBackend) -> None:
    """None of the four says a word before all have begun."""
    backend.together = threading.Barrier(4)

    async def one(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def four() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    assert asyncio.run(four()) == [SAID] * 4
    assert len(backend.tickets) == 4


def test_a_silent_stream_sends_comments(backend: ScriptedBackend) -> None:
    backend.go_on = threading.Event()
    backend.words = ("sl", "ow")
    body = {"messages": HELLO, "stream": True}
    url, lines = "/v1/chat/completions", []
    with running(backend, ServerSettings(ping_seconds=0.1)) as server:
        with httpx.stream("POST", server.url + url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if lines.count(": still working") == 2:
                    backend.go_on.set()
        assert lines.count(": still working") >= 2
        assert [line for line in lines if line][-1] == "data: [DONE]"
        with server.openai() as client:
            chunks = list(client.chat.completions.create(model="scripted", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "slow"


def test_a_body_of_many_pictures_is_taken(client: OpenAI, backend: ScriptedBackend) -> None:
    """5 MiB of data: URL, far more than one read of the socket."""
    big = b"\x89PNG\r\n\x1a\n" + bytes(5 * 1024**2)
    url = "data:image/png;base64," + base64.b64encode(big).decode()
    client.chat.completions.create(model="scripted", messages=with_pictures(url))
    picture = backend.asked[0][0][0].parts[0]
    assert isinstance(picture, ImagePart)
    assert bytes(picture.data) == big
