"""Tools and structured output through the ``openai`` package, with scripted answers."""

import base64
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.server.harness import Running, running
from tests.server.pictures import png
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import TextPart, Tool, ToolCall, VideoPart
from vlfit.server.server_settings import ServerSettings

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "strict": True}}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


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


def say(backend: ScriptedBackend, text: str) -> None:
    """In pieces of three characters."""
    backend.words = tuple(text[place : place + 3] for place in range(0, len(text), 3))


def test_calls_in_a_whole_answer(client: OpenAI, backend: ScriptedBackend) -> None:
    say(backend, f"Let me see.\n{OSLO}\n{NOW}")
    [choice] = client.chat.completions.create(
        model="scripted", messages=HELLO, tools=[WEATHER, CLOCK]
    ).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [call.function.name for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}
    assert len({call.id for call in calls}) == 2
    assert backend.tools == (
        Tool("weather", "Tells it.", PARAMETERS),
        Tool("clock", strict=True),
    )


def test_calls_in_a_stream(client: OpenAI, backend: ScriptedBackend) -> None:
    say(backend, f"Let me see.\n{OSLO}\n{NOW}")
    with client.chat.completions.stream(model="scripted", messages=HELLO, tools=[WEATHER, CLOCK]) as stream:
        words = "".join(event.delta for event in stream if event.type == "content.delta")
        message = stream.get_final_completion().choices[0]
    assert words == "Let me see."
    assert message.finish_reason == "tool_calls"
    assert [call.function.name for call in message.message.tool_calls or []] == ["weather", "clock"]


def test_allowed_tools_hide_the_others(client: OpenAI, backend: ScriptedBackend) -> None:
    say(backend, NOW)
    wishes = {"tools": [WEATHER, CLOCK], "tool_choice": allowed("auto", "clock")}
    [choice] = client.chat.completions.create(model="scripted", messages=HELLO, extra_body=wishes).choices
    assert [tool.name for tool in backend.tools] == ["clock"]
    calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [call.function.name for call in calls] == ["clock"]
    with pytest.raises(BadRequestError, match="'x'") as caught:
        client.chat.completions.create(
            model="scripted", messages=HELLO, extra_body={**wishes, "tool_choice": allowed("auto", "x")}
        )
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("cut", "content", "arguments"),
    [
        (OSLO.index('lo"}}'), None, '{"city": "Os'),
        (OSLO.index('{"city'), None, ""),
        (OSLO.index('", "arg'), "", None),
        (8, "", None),
        (3, "<to", None),
    ],
)
def test_a_truncated_call(
    client: OpenAI, backend: ScriptedBackend, cut: int, content: str | None, arguments: str | None
) -> None:
    backend.words, backend.finish_reason = (OSLO[:cut],), "length"
    [choice] = client.chat.completions.create(model="scripted", messages=HELLO, tools=[WEATHER]).choices
    assert choice.finish_reason == "length"
    assert choice.message.content == content
    calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [call.function.arguments for call in calls] == ([] if arguments is None else [arguments])


@pytest.mark.parametrize("cut", [0, 8, len("<tool_call>"), OSLO.index('", "arg')])
def test_a_forced_call_is_reported_when_truncated(client: OpenAI, backend: ScriptedBackend, cut: int) -> None:
    backend.words, backend.finish_reason = (OSLO[:cut],), "length"
    named: Any = {"type": "function", "function": {"name": "weather"}}
    [choice] = client.chat.completions.create(
        model="scripted", messages=HELLO, tools=[WEATHER], tool_choice=named
    ).choices
    calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", "")]
    assert choice.finish_reason == "length"


def test_nothing_but_a_call_has_no_content(client: OpenAI, backend: ScriptedBackend) -> None:
    say(backend, OSLO)
    [choice] = client.chat.completions.create(model="scripted", messages=HELLO, tools=[WEATHER]).choices
    assert choice.message.content is None


def test_tool_choice_none_hides_tools(client: OpenAI, backend: ScriptedBackend) -> None:
    say(backend, OSLO)
    [choice] = client.chat.completions.create(
        model="scripted", messages=HELLO, tools=[WEATHER], tool_choice="none"
    ).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (OSLO, None, "stop")
    assert backend.tools == ()


def test_tool_results_arrive(client: OpenAI, backend: ScriptedBackend) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Noon"},
    ]
    client.chat.completions.create(
        model="scripted", messages=cast(list[ChatCompletionMessageParam], messages), tools=[CLOCK]
    )
    _, assistant, tool = backend.asked[0][0]
    assert (assistant.parts, assistant.calls) == ((), (ToolCall("clock", "{}"),))
    assert (tool.role, tool.parts) == ("tool", (TextPart("Noon"),))


@pytest.mark.parametrize(
    ("fields", "kind", "holds"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}},
            "json",
            json.dumps(PARAMETERS),
        ),
        ({"tools": [WEATHER], "tool_choice": "required"}, "grammar", "start: calls\n"),
        (
            {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            "grammar",
            "clock",
        ),
        ({"tools": [WEATHER, CLOCK], "tool_choice": allowed("required", "clock")}, "grammar", "clock"),
        ({"tools": [WEATHER, CLOCK], "tool_choice": allowed("auto", "weather")}, None, ""),
        ({"tools": [CLOCK]}, "grammar", "TEXT"),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, "grammar", "call? text"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "grammar", "calls | answer"),
        ({"tools": [WEATHER]}, None, ""),
        ({"tools": [CLOCK], "tool_choice": "none"}, None, ""),
        ({"response_format": {"type": "text"}}, None, ""),
    ],
)
def test_response_format_becomes_a_grammar(
    client: OpenAI, backend: ScriptedBackend, fields: dict[str, Any], kind: str | None, holds: str
) -> None:
    client.chat.completions.create(model="scripted", messages=HELLO, extra_body=fields)
    form = backend.started[0].grammar
    assert (form.kind if form else None) == kind
    assert form is None or holds in form.text


def test_frames_in_one_url(client: OpenAI, backend: ScriptedBackend) -> None:
    frames = [png("red"), png("blue")]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    content = [{"type": "video_url", "video_url": {"url": url}}]
    messages = cast(list[ChatCompletionMessageParam], [{"role": "user", "content": content}])
    client.chat.completions.create(model="scripted", messages=messages)
    assert backend.asked[0][0][0].parts == (VideoPart(tuple(frames), 2.0),)
