"""``/v1/messages``: what is sent reaches the model, and the answer is in Anthropic's form."""

import base64
import json
import threading
from typing import Any

import httpx
import pytest

from tests.server.harness import Running, running
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import ImagePart, Message, TextPart
from vlfit.errors import DoesNotFit, OutOfMemory
from vlfit.models.registry import QWEN_THINKING
from vlfit.prompt.reasoning import Thinking
from vlfit.server.anthropic import anthropic_generation
from vlfit.server.server_settings import ServerSettings

TEXT = "A red circle 🙂."
HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"part": "left", "often": 2}}\n</tool_call>'
TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"part": {"type": "string"}}},
}


def picture(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def post(server: Running, route: str = "", **fields: Any) -> httpx.Response:
    body = {"model": "scripted", "max_tokens": 100, "messages": HELLO, **fields}
    if route:
        del body["max_tokens"]
    return httpx.post(f"{server.url}/v1/messages{route}", json=body, timeout=60)


def whole(server: Running, **fields: Any) -> dict[str, Any]:
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    return body


def events(server: Running, **fields: Any) -> list[dict[str, Any]]:
    answer = post(server, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_in(answer.text)


def events_in(text: str) -> list[dict[str, Any]]:
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def rebuilt(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream describes, as the SDKs collect it; checks the order of events."""
    assert told[0]["type"] == "message_start"
    assert told[-1]["type"] == "message_stop"
    message: dict[str, Any] = told[0]["message"]
    is_open = False
    arguments = ""
    for event in told[1:-1]:
        blocks = message["content"]
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        blocks[-1]["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        blocks[-1]["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        blocks[-1]["signature"] = text
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert is_open
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(arguments)
            case "message_delta":
                assert not is_open
                assert event is told[-2]
                message |= event["delta"]
                message["usage"] |= event["usage"]
                message["vlfit"] = event["vlfit"]
            case "ping":
                pass
            case other:
                raise AssertionError(other)
    return message


def refused(server: Running, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = post(server, **fields)
    assert answer.status_code == status, answer.text
    return error_of(answer)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message", "details"}
    assert body["error"]["message"]
    assert "Traceback" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def conversation(scripted: ScriptedBackend) -> list[Message]:
    return list(scripted.asked[-1][0])


# --- answers -----------------------------------------------------------------------------------------------


def test_a_message(server: Running, scripted: ScriptedBackend) -> None:
    answer = post(server)
    body = answer.json()
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body["id"] == f"msg_{answer.headers['request-id']}"
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "scripted")
    assert body["content"] == [{"type": "text", "text": TEXT}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["input_tokens"] == 2
    assert body["usage"]["output_tokens"] == 5
    assert body["vlfit"]["finish_reasons"] == ["stop"]
    assert body["vlfit"]["ignored"] == []


def test_a_stream_has_the_events_in_order(server: Running, scripted: ScriptedBackend) -> None:
    told = events(server)
    assert [event["type"] for event in told] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(scripted.words),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = told[0]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == 2
    message = rebuilt(told)
    assert message["content"] == [{"type": "text", "text": TEXT}]
    assert message["stop_reason"] == "end_turn"
    assert message["usage"]["output_tokens"] == 5


def test_why_it_ended(server: Running, scripted: ScriptedBackend) -> None:
    assert whole(server, max_tokens=2)["stop_reason"] == "max_tokens"
    scripted.stop_string = "END"
    for body in (whole(server, stop_sequences=["END"]), rebuilt(events(server, stop_sequences=["END"]))):
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    assert scripted.started[-1].stop == ("END",)
    scripted.reset()
    scripted.finish_reason = "loop"
    body = whole(server)
    assert (body["stop_reason"], body["vlfit"]["finish_reasons"]) == ("end_turn", ["loop"])


def test_more_tokens_than_the_context_has(server: Running, scripted: ScriptedBackend) -> None:
    """Clients send the limits of Anthropic's models."""
    assert whole(server, max_tokens=32_000)["stop_reason"] == "end_turn"
    assert scripted.started[-1].max_tokens == scripted.context - 2
    assert scripted.asked[-1][1].max_tokens is None
    scripted.words = ("word ",) * 10
    scripted.context = 7
    body = whole(server, max_tokens=32_000)
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["output_tokens"] == 5
    assert whole(server, max_tokens=5)["stop_reason"] == "max_tokens"


def test_an_empty_answer_has_no_blocks(server: Running, scripted: ScriptedBackend) -> None:
    scripted.words = ("",)
    assert whole(server)["content"] == []
    assert rebuilt(events(server))["content"] == []


def test_white_space_is_kept_with_its_text(server: Running, scripted: ScriptedBackend) -> None:
    scripted.words = ("\n", " A", " ", "b")
    assert whole(server)["content"] == [{"type": "text", "text": "\n A b"}]


# --- prompts -----------------------------------------------------------------------------------------------


def test_system_and_messages(server: Running, scripted: ScriptedBackend) -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    body = whole(server, messages=messages, system=system, metadata={"user_id": "x"})
    assert body["vlfit"]["ignored"] == []
    told = conversation(scripted)
    assert [message.role for message in told] == ["system", "user", "assistant", "user"]
    assert told[0].parts == (TextPart("Be brief.\n\nBe kind."),)
    assert told[2].parts == (TextPart("Hi!"),)
    assert told[3].parts == (TextPart("a"),)
    whole(server, system="Be brief.")
    assert conversation(scripted)[0].parts == (TextPart("Be brief."),)


def test_pictures(server: Running, scripted: ScriptedBackend) -> None:
    red, blue = png("red"), png("blue", 600, 400)
    url = {"type": "image", "source": {"type": "url", "url": data_url(blue)}}
    text = {"type": "text", "text": "What are these?"}
    body = whole(server, messages=[{"role": "user", "content": [picture(red), url, text]}])
    parts = conversation(scripted)[0].parts
    assert [part.data for part in parts if isinstance(part, ImagePart)] == [red, blue]
    assert parts[-1] == TextPart("What are these?")
    assert len(body["vlfit"]["images"]) == 2


def test_large_pictures_are_taken_out_of_the_body(server: Running, scripted: ScriptedBackend) -> None:
    large = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 1000
    content = [picture(large), {"type": "text", "text": "A" * 70}, picture(png("red")), picture(large)]
    whole(server, messages=[{"role": "user", "content": content}])
    pictures = [part.data for part in conversation(scripted)[0].parts if isinstance(part, ImagePart)]
    assert pictures == [large, png("red"), large]


def test_documents_of_text(server: Running, scripted: ScriptedBackend) -> None:
    plain = {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "one"}}
    blocks = {"type": "content", "content": [{"type": "text", "text": "two"}, picture(png("red"))]}
    content = [plain, {"type": "document", "source": blocks}, {"type": "text", "text": "?"}]
    whole(server, messages=[{"role": "user", "content": content}])
    parts = conversation(scripted)[0].parts
    assert [part.text for part in parts if isinstance(part, TextPart)] == ["C\n", "T\none", "two", "?"]
    assert isinstance(parts[3], ImagePart)


def test_sampling(server: Running, scripted: ScriptedBackend) -> None:
    whole(server, temperature=0.25, top_p=0.5, top_k=7, stop_sequences=["a", "b"], max_tokens=9)
    sampling = scripted.started[-1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
    assert (sampling.stop, sampling.max_tokens) == (("a", "b"), 9)
    whole(server)
    assert scripted.started[-1].temperature == 0.7  # the checkpoint's own


def test_a_schema_is_enforced(server: Running, scripted: ScriptedBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    whole(server, output_config={"format": {"type": "json_schema", "schema": schema}})
    grammar = scripted.started[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


# --- tools -------------------------------------------------------------------------------------------------


def test_calls_are_blocks(server: Running, scripted: ScriptedBackend) -> None:
    scripted.words = ("Let ", "me see.\n", *(CALL[at : at + 9] for at in range(0, len(CALL), 9)), f"\n{CALL}")
    body = whole(server, tools=[TOOL])
    assert scripted.tools[0].name == "look"
    assert scripted.tools[0].parameters == TOOL["input_schema"]
    assert body["stop_reason"] == "tool_use"
    text, first, second = body["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"]) == ("tool_use", "look")
    assert first["input"] == second["input"] == {"part": "left", "often": 2}
    assert first["id"] != second["id"]
    assert first["id"].startswith("toolu_")
    streamed = rebuilt(events(server, tools=[TOOL]))
    assert streamed["stop_reason"] == "tool_use"
    assert [{**block, "id": 0} for block in streamed["content"]] == [
        {**block, "id": 0} for block in body["content"]
    ]


def test_results_with_pictures_reach_the_model(server: Running, scripted: ScriptedBackend) -> None:
    red = png("red")
    calls = [
        {"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": {"part": "left"}}
        for name in ("look", "listen")
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_listen", "content": "silence"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_look",
            "content": [{"type": "text", "text": "a wall"}, picture(red)],
        },
        {"type": "tool_result", "tool_use_id": "toolu_look", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *calls]},
        {"role": "user", "content": results},
    ]
    body = whole(server, messages=messages, tools=[TOOL])
    assert body["vlfit"]["ignored"] == ["messages[2].content[2].is_error"]
    told = conversation(scripted)
    assert [message.role for message in told] == ["user", "assistant", "tool", "tool", "tool", "user"]
    assert [call.name for call in told[1].calls] == ["look", "listen"]
    assert json.loads(told[1].calls[0].arguments) == {"part": "left"}
    shown = told[3].parts[1]
    assert isinstance(shown, ImagePart)
    assert shown.data == red
    assert told[5].parts == (TextPart("Go on."),)


@pytest.mark.parametrize(
    ("choice", "required", "calls"),
    [
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "look"}, True, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, True),
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, False),
    ],
)
def test_choosing_tools(
    server: Running, scripted: ScriptedBackend, choice: dict[str, Any], required: bool, calls: bool
) -> None:
    whole(server, tools=[TOOL], tool_choice=choice)
    assert (scripted.started[-1].grammar is not None) == required
    assert bool(scripted.tools) == calls


def test_a_call_that_was_cut_off_is_text(server: Running, scripted: ScriptedBackend) -> None:
    scripted.words = (CALL[:60],)
    scripted.finish_reason = "length"
    for body in (whole(server, tools=[TOOL]), rebuilt(events(server, tools=[TOOL]))):
        [block] = body["content"]
        assert block["type"] == "text"
        assert '"part"' in block["text"]
        assert body["stop_reason"] == "max_tokens"


# --- thinking ----------------------------------------------------------------------------------------------


@pytest.fixture
def thinking_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    thinking = Thinking(QWEN_THINKING, opened=True)
    monkeypatch.setattr(anthropic_generation, "thinking_of", lambda _: thinking)
    backend = ScriptedBackend(words=("Let me ", "see.\n</thi", "nk>\n\n", "A red ", "circle."))
    with running(backend) as server:
        yield server, backend


def test_thoughts_are_blocks(thinking_server: tuple[Running, ScriptedBackend]) -> None:
    server, backend = thinking_server
    config = {"type": "enabled", "budget_tokens": 1024}
    body = whole(server, thinking=config)
    thought, text = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Let me see.")
    assert thought["signature"]
    assert text == {"type": "text", "text": "A red circle."}
    assert body["vlfit"]["ignored"] == ["thinking.budget_tokens"]
    assert rebuilt(events(server, thinking={"type": "adaptive"}))["content"] == body["content"]
    # It is sent back as it was written.
    whole(server, messages=[*HELLO, {"role": "assistant", "content": body["content"]}, *HELLO])
    written = conversation(backend)[1].parts
    assert written == (TextPart("<think>\nLet me see.\n</think>\n\nA red circle."),)


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        (None, []),
        ({"type": "disabled"}, ["thinking"]),
        ({"type": "adaptive", "display": "omitted"}, []),
    ],
)
def test_thoughts_are_left_out(
    thinking_server: tuple[Running, ScriptedBackend], config: dict[str, Any] | None, ignored: list[str]
) -> None:
    body = whole(thinking_server[0], **({"thinking": config} if config else {}))
    assert body["content"] == [{"type": "text", "text": "A red circle."}]
    assert body["vlfit"]["ignored"] == ignored


def test_a_model_that_does_not_think_says_so(server: Running, scripted: ScriptedBackend) -> None:
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "x"}
    messages = [*HELLO, {"role": "assistant", "content": [thinking, {"type": "text", "text": "a"}]}, *HELLO]
    body = whole(server, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024})
    assert body["vlfit"]["ignored"] == ["thinking", "messages[1].content[0]"]
    assert conversation(scripted)[1].parts == (TextPart("a"),)
    assert whole(server, thinking={"type": "disabled"})["vlfit"]["ignored"] == []


# --- counting ----------------------------------------------------------------------------------------------


def test_tokens_are_counted_and_not_run(server: Running, scripted: ScriptedBackend) -> None:
    content = [picture(png("red")), {"type": "text", "text": "Hello"}]
    messages = [{"role": "user", "content": content}]
    answer = post(server, "/count_tokens", messages=messages, tools=[TOOL])
    assert answer.json() == {"input_tokens": 82}
    assert not scripted.started
    assert answer.headers["request-id"]
    assert whole(server, messages=messages)["usage"]["input_tokens"] == 82
    scripted.prepare_error = DoesNotFit("too long", "say less")
    assert error_of(post(server, "/count_tokens"))["type"] == "invalid_request_error"


def test_counting_takes_a_slot() -> None:
    backend = ScriptedBackend(go_on=threading.Event())
    with running(backend, ServerSettings(max_completions=1)) as server:
        threading.Thread(target=post, args=(server,), daemon=True).start()
        while not backend.started:
            pass
        answer = post(server, "/count_tokens")
        assert backend.go_on is not None
        backend.go_on.set()
        assert answer.status_code == 429
        assert error_of(answer)["type"] == "rate_limit_error"
        assert answer.headers["retry-after"]


# --- errors ------------------------------------------------------------------------------------------------

USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "judge", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [picture(b"")]}, *HELLO]},
            "messages[1].content[0]",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "Sure"}]}, "messages[1]"),
        (
            {
                "system": "a",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, picture(b"x")]}],
            },
            "messages[0].content[1]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{**picture(b""), "transformations": {"oversized_image": "error"}}],
                    }
                ]
            },
            "messages[0].content[0].transformations",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "listen"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"thread": {"id": "x"}}, "thread"),
        ({"compaction": {"enabled": True}}, "compaction"),
        ({"thinking": {"type": "a lot"}}, "thinking.type"),
    ],
)
def test_what_is_refused_is_named(
    server: Running, scripted: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    error = refused(server, **fields)
    assert error["type"] == "invalid_request_error"
    assert error["details"]["param"] == param
    assert param in error["message"]
    assert not scripted.started


@pytest.mark.parametrize("in_result", [False, True])
def test_errors_about_urls_name_fields_of_this_api(server: Running, in_result: bool) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}
    messages: list[Any] = [{"role": "user", "content": [image]}]
    place = "messages[0].content[0]"
    if in_result:
        result = {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [{"type": "text", "text": "x"}, image],
        }
        messages = [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
        place = "messages[2].content[0].content[1]"
    error = refused(server, messages=messages, tools=[TOOL])
    assert f"{place}.source" in error["message"]
    assert "image_url" not in error["message"]
    assert error["details"]["param"] == place


def test_a_result_without_its_call_is_told_in_words_of_this_api(server: Running) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    error = refused(server, messages=[{"role": "user", "content": [result]}], tools=[TOOL])
    assert "tool_use" in error["message"]
    assert "tool_calls" not in error["message"]


@pytest.mark.parametrize("name", ["claude-sonnet-5", "claude-3-5-haiku-latest", "gpt-5", "x" * 300])
def test_other_models_are_not_found(server: Running, scripted: ScriptedBackend, name: str) -> None:
    error = refused(server, 404, model=name)
    assert error["type"] == "not_found_error"
    assert "'scripted'" in error["message"]
    assert refused(server, 400, model="")["type"] == "invalid_request_error"


def test_an_alias_may_be_any_name() -> None:
    with running(ScriptedBackend(), ServerSettings(aliases=("claude-sonnet-5",))) as server:
        assert whole(server, model="claude-sonnet-5")["model"] == "scripted"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (DoesNotFit("too long", "say less"), 400, "invalid_request_error"),
        (OutOfMemory("full"), 503, "overloaded_error"),
        (ValueError("secret"), 500, "api_error"),
    ],
)
def test_types_of_errors(
    server: Running, scripted: ScriptedBackend, error: Exception, status: int, kind: str
) -> None:
    scripted.prepare_error = error
    told = refused(server, status)
    assert told["type"] == kind
    assert "secret" not in told["message"]


def test_errors_of_the_router_and_the_body(server: Running, scripted: ScriptedBackend) -> None:
    url = f"{server.url}/v1/messages"
    assert error_of(httpx.get(url))["type"] == "invalid_request_error"
    answer = httpx.post(f"{url}/batches", json={})
    assert (answer.status_code, error_of(answer)["type"]) == (404, "not_found_error")
    assert answer.headers["request-id"]
    assert error_of(httpx.post(url, content=b"{"))["type"] == "invalid_request_error"


def test_an_error_in_a_stream_is_an_event(server: Running, scripted: ScriptedBackend) -> None:
    scripted.error = OutOfMemory("full")
    told = events(server)
    assert [event["type"] for event in told[-2:]] == ["content_block_delta", "error"]
    assert told[-1]["error"]["type"] == "overloaded_error"


def test_a_silent_stream_has_pings() -> None:
    backend = ScriptedBackend(delay=0.2, words=("a", "b"))
    with running(backend, ServerSettings(ping_seconds=0.05)) as server:
        told = events(server)
        assert {"type": "ping"} in told
        assert rebuilt(told)["content"] == [{"type": "text", "text": "ab"}]


def test_keys() -> None:
    with running(ScriptedBackend(), ServerSettings(api_keys=("first", "second"))) as server:
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "third"}, 401),
            ({"authorization": "Bearer third"}, 401),
            ({"x-api-key": "first"}, 200),
            ({"authorization": "Bearer second"}, 200),
            ({"authorization": "Bearer none", "x-api-key": "second"}, 200),
        ):
            for route, fields in (
                ("", {"max_tokens": 5}),
                ("/count_tokens", {}),
            ):
                body = {"model": "scripted", "messages": HELLO, **fields}
                answer = httpx.post(f"{server.url}/v1/messages{route}", json=body, headers=headers)
                assert answer.status_code == status, (headers, route)
                if status == 401:
                    assert error_of(answer)["type"] == "authentication_error"
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status


def test_the_list_of_models(server: Running, scripted: ScriptedBackend) -> None:
    [card] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["type"], card["id"], card["display_name"]) == ("model", "scripted", "scripted")
    assert card["created_at"].endswith("Z")
    assert card["max_input_tokens"] == scripted.context - 1
