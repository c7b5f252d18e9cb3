"""The server over our engine and a tiny checkpoint: same text as in process, no blocks leaked."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.pictures import (
    animation,
    cmyk_jpeg,
    deep_png,
    gif_claiming_4_gigapixels,
    picture,
    png_claiming,
    rotated_by_exif,
)
from tests.server.harness import Running, running, slowly, wait_for
from tests.server.pictures import data_url
from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.backends.remote import RemoteBackend
from vlfit.server.server_settings import ServerSettings

CONTEXT = 512


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("tied")


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[NativeBackend]:
    with NativeBackend.load(
        folder, EngineOptions(device="cpu", max_model_len=CONTEXT, max_num_seqs=4)
    ) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(backend: NativeBackend) -> Iterator[Running]:
    with running(backend, ServerSettings(context=backend.context)) as running_server:
        yield running_server


def test_a_refused_form_is_one_line_of_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that shows only at the first token to allow nothing: it is the request's fault, not ours."""
    one = {"type": "object", "properties": {f"k{number}": {"type": "integer"} for number in range(100)}}
    ways = [{"$ref": "#/$defs/one", "required": [f"k{number}"]} for number in range(100)]
    too_many = {"$defs": {"one": one}, "type": "array", "items": {"anyOf": ways}, "minItems": 1}
    schemas: tuple[dict[str, Any], ...] = (too_many, {"type": "string", "pattern": "["}, {"not": {}})
    for schema in schemas:
        named = {"name": "x", "schema": schema}
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "response_format": {"type": "json_schema", "json_schema": named},
        }
        caplog.clear()
        with caplog.at_level("INFO", "vlfit"):
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            wait_for(lambda: bool(caplog.records))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format"
        [record] = caplog.records
        assert record.exc_info is None
        assert len(record.getMessage().splitlines()) == 1


@pytest.fixture(autouse=True)
def nothing_is_left_behind(backend: NativeBackend) -> Iterator[None]:
    yield
    wait_for(lambda: free_blocks(backend) == backend._engine_thread.engine.block_manager.num_blocks)


def free_blocks(backend: NativeBackend) -> int:
    return int(backend._engine_thread.engine.block_manager.num_free)


def about(question: str, *pictures: bytes) -> list[ChatCompletionMessageParam]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in pictures]
    parts.append({"type": "text", "text": question})
    return cast(list[ChatCompletionMessageParam], [{"role": "user", "content": parts}])


def test_same_text_as_in_process(server: Running, backend: NativeBackend) -> None:
    """By the openai package and by our own remote backend: text, image sizes, tokens and logprobs."""
    data = picture(300, 200, seed=1)
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, top_logprobs=3)
    conversation = single_turn("what is this?", ImagePart(data))
    backend.stream(conversation, sampling).answer()  # from here on its prompt is in the cache
    direct = backend.stream(conversation, sampling).answer()
    assert direct.usage.cached_tokens == direct.usage.prompt_tokens // 16 * 16
    with RemoteBackend(server.url) as remote:
        through = remote.stream(conversation, sampling).answer()
    assert through.text == direct.text
    assert (through.images, through.usage, through.model) == (direct.images, direct.usage, direct.model)
    assert [token.token_id for token in through.logprobs] == [token.token_id for token in direct.logprobs]
    assert [t.logprob for t in through.logprobs] == pytest.approx(
        [t.logprob for t in direct.logprobs], abs=1e-4
    )
    with server.openai() as client:
        completion = client.chat.completions.create(
            model=backend.model,
            messages=about("what is this?", data),
            max_tokens=24,
            temperature=0,
            extra_body={"ignore_eos": True, "top_k": 0},
        )
    assert completion.choices[0].message.content == direct.text
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == direct.usage.prompt_tokens
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == direct.usage.cached_tokens


def test_a_seed_repeats_a_sampled_answer_and_choices_differ(server: Running, backend: NativeBackend) -> None:
    def texts() -> list[str | None]:
        with server.openai() as client:
            completion = client.chat.completions.create(
                model=backend.model,
                messages=about("hello"),
                max_tokens=12,
                temperature=1.5,
                n=3,
                seed=7,
                extra_body={"ignore_eos": True},
            )
        return [choice.message.content for choice in completion.choices]

    first = texts()
    assert texts() == first
    assert len(set(first)) == 3


def test_concurrent_streams_equal_single_ones(server: Running, backend: NativeBackend) -> None:
    pictures = [picture(200 + 40 * seed, 160, seed=seed) for seed in range(4)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    alone = [
        backend.stream(single_turn("what is it?", ImagePart(data)), sampling).answer().text
        for data in pictures
    ]

    async def one(client: AsyncOpenAI, data: bytes) -> str:
        stream = await client.chat.completions.create(
            model=backend.model,
            messages=about("what is it?", data),
            max_tokens=40,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "top_k": 0},
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def four() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, data) for data in pictures))

    assert asyncio.run(four()) == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_blocks(
    server: Running, backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    body = {"messages": about("go on"), "max_tokens": 400, "ignore_eos": True, "stream": stream}
    blocks, cancelled = (
        backend._engine_thread.engine.block_manager.num_blocks,
        backend.account().counters.cancelled,
    )
    slowly(backend, monkeypatch)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: {len(content)}\r\n\r\n"
    with server.socket() as connection:
        connection.sendall(head.encode() + content)
        wait_for(lambda: free_blocks(backend) < blocks)
    wait_for(lambda: free_blocks(backend) == blocks)
    wait_for(lambda: backend.account().counters.cancelled == cancelled + 1)  # counted once they are free


@pytest.mark.parametrize(
    "data",
    [
        b"not a picture",
        b"",
        picture(300, 200, seed=1)[:200],
        picture(300, 200, "JPEG")[:900],
        gif_claiming_4_gigapixels(),
        png_claiming(0, 0),
        png_claiming(1, 20_000),
        png_claiming(20_000, 20_000),
        b"<!doctype html><html></html>",
    ],
    ids=["text", "empty", "png cut", "jpeg cut", "gif bomb", "0x0", "1x20000", "20000x20000", "html"],
)
def test_bad_pictures(server: Running, backend: NativeBackend, data: bytes) -> None:
    with server.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=backend.model, messages=about("what?", picture(), data))
    assert caught.value.code == "invalid_image"
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert "driver" not in caught.value.message


@pytest.mark.parametrize(
    ("data", "code"), [(picture(300, 200)[:900], "invalid_image"), (picture(60, 60), "invalid_request")]
)
def test_a_bad_frame_of_a_clip(server: Running, backend: NativeBackend, data: bytes, code: str) -> None:
    clip = {"type": "video", "frames": [data_url(picture()), data_url(data)]}
    messages = cast(list[ChatCompletionMessageParam], [{"role": "user", "content": [clip]}])
    with server.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=backend.model, messages=messages)
    assert (caught.value.code, caught.value.param) == (code, "messages[0].content[0].frames[1]")


@pytest.mark.parametrize(
    "data",
    [
        cmyk_jpeg(),
        deep_png(np.arange(96 * 64).reshape(64, 96) * 10),
        animation("WEBP"),
        rotated_by_exif(6),
        picture(96, 64, "BMP"),
    ],
    ids=["cmyk", "16 bit", "animated", "rotated", "bmp"],
)
def test_unusual_pictures_are_accepted(server: Running, backend: NativeBackend, data: bytes) -> None:
    with server.openai() as client:
        completion = client.chat.completions.create(
            model=backend.model, messages=about("what?", data), max_tokens=2
        )
    [seen] = (completion.model_extra or {})["vlfit"]["images"]
    assert seen["tokens"] == seen["seen_width"] * seen["seen_height"] // 1024 > 0


def test_what_does_not_fit(server: Running, backend: NativeBackend) -> None:
    with server.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=backend.model, messages=about("words " * 600))
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
            client.chat.completions.create(model=backend.model, messages=about("hello"), max_tokens=5000)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=backend.model, messages=about("x" * 10**7))
