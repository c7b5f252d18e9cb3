"""The ``openai`` package against a server with mini: sync, async, streams, structured output, tools."""

import asyncio
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict, Field

from tests.server.harness import Running, running
from tests.server.pictures import data_url
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

PICTURE = (Path(__file__).parents[2] / "examples" / "pictures" / "number-25.png").read_bytes()
ASK = cast(
    list[ChatCompletionMessageParam],
    [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(PICTURE)}},
                {"type": "text", "text": "What is this?"},
            ],
        }
    ],
)


class Sort(StrEnum):
    animal = "animal"
    number = "number"


class Thing(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sort: Sort
    sure: bool


class Seen(BaseModel):
    model_config = ConfigDict(extra="forbid")

    things: list[Thing] = Field(min_length=1, max_length=2)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_closer",
        "description": "Shows a part of the picture larger.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"part": {"enum": ["left", "right"]}, "times": {"enum": [2, 4]}},
            "required": ["part", "times"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with (
        NativeBackend.load(
            "mini", EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=4)
        ) as backend,
        running(backend, ServerSettings()) as running_server,
    ):
        yield running_server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def test_streamed_equals_whole(client: OpenAI) -> None:
    wishes: Any = {"model": "mini", "messages": ASK, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**wishes)
    chunks = list(
        client.chat.completions.create(**wishes, stream=True, stream_options={"include_usage": True})
    )
    assert "elephant" in (whole.choices[0].message.content or "").lower()
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_as_a_pydantic_model(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="mini", messages=ASK, response_format=Seen, temperature=0
    )
    seen = completion.choices[0].message.parsed
    assert seen is not None
    assert 1 <= len(seen.things) <= 2
    assert seen.model_dump(mode="json") == json.loads(completion.choices[0].message.content or "")


def test_streamed_structured_output(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="mini", messages=ASK, response_format=Seen, temperature=1.0, seed=5
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Seen)


def test_any_json_object(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="mini",
        messages=[{"role": "user", "content": 'Answer with JSON: {"count": number}'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=60,
    )
    [choice] = completion.choices
    assert (choice.message.content or "").startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


def test_a_tool_that_must_be_called(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="mini", messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=2
    )
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "look_closer"
    arguments = json.loads(call.function.arguments)
    assert arguments["part"] in ("left", "right")
    assert arguments["times"] in (2, 4)


def test_tool_results_are_accepted(client: OpenAI) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "look_closer", "arguments": '{"part": "left"}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "An elephant."},
    ]
    completion = client.chat.completions.create(
        model="mini",
        messages=cast(list[ChatCompletionMessageParam], messages),
        tools=[TOOL],
        tool_choice="none",
        max_tokens=20,
    )
    assert completion.usage is not None
    assert completion.choices[0].finish_reason in ("stop", "length")


def test_several_at_once_by_the_async_client(server: Running) -> None:
    async def one(client: AsyncOpenAI, seed: int) -> Seen:
        completion = await client.chat.completions.parse(
            model="mini", messages=ASK, response_format=Seen, temperature=1.0, seed=seed
        )
        parsed = completion.choices[0].message.parsed
        assert parsed is not None
        return parsed

    async def words(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model="mini", messages=ASK, temperature=0, max_tokens=40, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> tuple[list[Seen], str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            seen = asyncio.gather(*(one(client, seed) for seed in range(3)))
            return await seen, await words(client)

    forms, said = asyncio.run(all_of_them())
    assert len(forms) == 3
    assert "elephant" in said.lower()


def test_a_response_with_a_picture(client: OpenAI) -> None:
    content = [
        {"type": "input_image", "image_url": data_url(PICTURE)},
        {"type": "input_text", "text": "What is this?"},
    ]
    wishes: Any = {"model": "mini", "input": [{"role": "user", "content": content}], "temperature": 0}
    whole = client.responses.create(**wishes, max_output_tokens=40)
    assert "elephant" in whole.output_text.lower()
    with client.responses.stream(**wishes, text_format=Seen) as stream:
        parsed = stream.get_final_response().output_parsed
    assert isinstance(parsed, Seen)


def test_a_completion_goes_on_with_a_template_written_out(client: OpenAI) -> None:
    prompt = "<|im_start|>user\nWhat is two and two?<|im_end|>\n<|im_start|>assistant\n"
    chat = client.chat.completions.create(
        model="mini",
        messages=[{"role": "user", "content": "What is two and two?"}],
        temperature=0,
        max_tokens=16,
    )
    plain = client.completions.create(model="mini", prompt=prompt, temperature=0)
    assert plain.choices[0].text == chat.choices[0].message.content
    assert plain.usage is not None
    assert chat.usage is not None
    assert plain.usage.prompt_tokens == chat.usage.prompt_tokens
