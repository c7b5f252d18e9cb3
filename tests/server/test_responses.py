"""Responses and text completions through the ``openai`` package."""

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
from openai import APIError, OpenAI
from pydantic import BaseModel

from tests.server.harness import Running, running
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import ImagePart, TextPart, ToolCall
from vlfit.errors import ModelFailed
from vlfit.server.server_settings import ServerSettings

SAID = "A red circle 🙂."
CLOCK: Any = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
NOW = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Running, ScriptedBackend]]:
    backend = ScriptedBackend()
    with running(backend, ServerSettings()) as running_server:
        yield running_server, backend


@pytest.fixture
def backend(server: tuple[Running, ScriptedBackend]) -> ScriptedBackend:
    server[1].reset()
    return server[1]


@pytest.fixture
def client(server: tuple[Running, ScriptedBackend]) -> Iterator[OpenAI]:
    with server[0].openai() as client:
        yield client


def test_a_whole_response(client: OpenAI, backend: ScriptedBackend) -> None:
    response = client.responses.create(
        model="scripted", input="What is this?", instructions="Be brief.", temperature=0.5
    )
    assert response.output_text == SAID
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 5)
    conversation, sampling = backend.asked[0]
    assert [message.role for message in conversation] == ["system", "user"]
    assert sampling.temperature == 0.5


def test_a_streamed_response(client: OpenAI, backend: ScriptedBackend) -> None:
    with client.responses.stream(model="scripted", input="What is this?") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAID
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert final.output_text == SAID


def test_an_incomplete_response(client: OpenAI, backend: ScriptedBackend) -> None:
    response = client.responses.create(model="scripted", input="What is this?", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "A red "


def test_pictures_and_earlier_messages(client: OpenAI, backend: ScriptedBackend) -> None:
    red = png("red")
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
    picture = {"type": "input_image", "image_url": data_url(red), "detail": "low"}
    client.responses.create(
        model="scripted",
        input=cast(
            Any,
            [
                {"role": "user", "content": [picture, {"type": "input_text", "text": "What?"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
                call,
                {"type": "function_call_output", "call_id": "c1", "output": "Noon"},
                {"type": "message", "role": "user", "content": "And now?"},
            ],
        ),
        tools=[CLOCK],
    )
    user, assistant, tool, last = backend.asked[0][0]
    assert user.parts == (ImagePart(red, "picture 1", "low"), TextPart("What?"))
    assert (assistant.parts, assistant.calls) == ((TextPart("Wait."),), (ToolCall("clock", "{}"),))
    assert (tool.role, tool.parts) == ("tool", (TextPart("Noon"),))
    assert last.parts == (TextPart("And now?"),)
    assert [each.name for each in backend.tools] == ["clock"]


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_are_output_items(client: OpenAI, backend: ScriptedBackend, streamed: bool) -> None:
    backend.words = ("Let me see.", "\n", NOW)
    if streamed:
        with client.responses.stream(model="scripted", input="Time?", tools=[CLOCK]) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(model="scripted", input="Time?", tools=[CLOCK])
    message, call = response.output
    assert response.output_text == "Let me see."
    assert message.status == "completed"
    assert (call.type, call.name, call.arguments) == ("function_call", "clock", "{}")


def test_one_tool_that_must_be_called(client: OpenAI, backend: ScriptedBackend) -> None:
    choice: Any = {"type": "function", "name": "clock"}
    client.responses.create(model="scripted", input="Time?", tools=[CLOCK], tool_choice=choice)
    form = backend.started[0].grammar
    assert form is not None
    assert "start: calls\n" in form.text


class Circle(BaseModel):
    colour: str
    radius: int


def test_an_answer_as_a_pydantic_model(client: OpenAI, backend: ScriptedBackend) -> None:
    backend.words = ('{"colour": "red", ', '"radius": 3}')
    parsed = client.responses.parse(model="scripted", input="What is this?", text_format=Circle)
    assert parsed.output_parsed == Circle(colour="red", radius=3)
    form = backend.started[0].grammar
    assert form is not None
    assert set(json.loads(form.text)["properties"]) == {"colour", "radius"}


def test_a_failure_in_a_stream_is_an_event(client: OpenAI, backend: ScriptedBackend) -> None:
    backend.error = ModelFailed("no numbers", "try again")
    stream = client.responses.create(model="scripted", input="What?", stream=True)
    with pytest.raises(APIError, match="no numbers"):
        list(stream)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "input", ""),
        ({"input": []}, "input", ""),
        ({"input": 5}, "input", "5"),
        ({"input": [{"role": "user"}]}, "input[0].content", ""),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0]",
            "input_audio",
        ),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id", ""),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "", "schema": {}}}},
            "text.format.name",
            "1",
        ),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", ""),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "0"),
    ],
)
def test_invalid_responses_are_refused(
    server: tuple[Running, ScriptedBackend], fields: dict[str, Any], param: str, says: str
) -> None:
    answer = httpx.post(f"{server[0].url}/v1/responses", json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_a_completion(client: OpenAI, backend: ScriptedBackend) -> None:
    completion = client.completions.create(model="scripted", prompt="Once", logprobs=1, seed=1)
    [choice] = completion.choices
    assert (completion.object, choice.text, choice.finish_reason) == ("text_completion", SAID, "stop")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == SAID
    assert choice.logprobs.text_offset == [0, 2, 6, 12, 14]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 5)
    assert backend.started[0].max_tokens == 16


def test_completions_of_several_prompts(client: OpenAI, backend: ScriptedBackend) -> None:
    completion = client.completions.create(model="scripted", prompt=["Once", "Twice"], n=2, echo=True)
    begins = ["Once", "Once", "Twice", "Twice"]
    assert [choice.text for choice in completion.choices] == [each + SAID for each in begins]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (9, 20)
    client.completions.create(model="scripted", prompt=[1, 2, 3])
    client.completions.create(model="scripted", prompt=[[1], [2]])
    assert backend.raw == ["Once", "Twice", (1, 2, 3), (1,), (2,)]


def test_a_streamed_completion(client: OpenAI, backend: ScriptedBackend) -> None:
    chunks = list(
        client.completions.create(
            model="scripted", prompt="Once", stream=True, stream_options={"include_usage": True}, echo=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Once" + SAID
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ],
)
def test_invalid_completions_are_refused(
    server: tuple[Running, ScriptedBackend], fields: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{server[0].url}/v1/completions", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_tool_may_be_named(backend: ScriptedBackend, server: tuple[Running, ScriptedBackend]) -> None:
    """One that is there, one that is not, and none."""
    backend.words = (NOW,)
    for name, status in (("clock", 200), ("watch", 400), ("", 400)):
        body = {"input": "When?", "tools": [CLOCK], "tool_choice": {"type": "function", "name": name}}
        answer = httpx.post(f"{server[0].url}/v1/responses", json=body)
        assert answer.status_code == status, answer.text
    body = {"input": "", "tool_choice": {"type": "function", "name": ""}}
    assert httpx.post(f"{server[0].url}/v1/responses", json=body).status_code == 400
