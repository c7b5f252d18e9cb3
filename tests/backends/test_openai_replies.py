"""Parsing of replies, without a server."""

import json
from typing import Any

import pytest

from vlfit.api.conversation import ToolCall
from vlfit.backends.openai_replies import EventParser, ReplyReader, reply_error
from vlfit.errors import DoesNotFit, InvalidRequest, QueueFull, RemoteError, VlfitError, WrongApiKey
from vlfit.models.registry import HERMES_TOOL_CALLS
from vlfit.prompt.tool_calls import ToolCallParser


def encode_events(*events: object) -> bytes:
    lines = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in events)
    return "".join(f"data: {line}\n\n" for line in lines).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_split_anywhere(size: int) -> None:
    """Other line separators of Python do not end a line, and no character is split."""
    sent = [{"text": "a\u2028b\x85c\u0085🙂"}, {"text": "\x0b\x0c\x1c"}]
    data = (
        b": hello\r\n\r\nevent: x\r\n"
        + encode_events(*sent).replace(b"\n", b"\r\n")
        + encode_events("[DONE]", "rest")
    )
    events = EventParser()
    found = [event for at in range(0, len(data), size) for event in events.feed(data[at : at + size])]
    assert found == sent
    assert events.done
    events.check_complete()


def test_incomplete_events() -> None:
    events = EventParser()
    assert list(events.feed(b'data: {"a": 1}\n\ndata: {"b"')) == [{"a": 1}]
    with pytest.raises(RemoteError):
        events.check_complete()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def test_parsed_tool_calls_become_text() -> None:
    """As OpenAI streams them: names first, then arguments in pieces, and the finish reason twice."""
    events = [
        delta(role="assistant", content="Let me see."),
        delta(tool_calls=[{"index": 0, "id": "x", "function": {"name": "weather", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"town": "'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": 'Ulm </tool_call>"}'}}]),
        delta(tool_calls=[{"index": 1, "function": {"name": "time", "arguments": "{broken"}}]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2},
            "vlfit": {"finish_reasons": ["stop"]},
        },
    ]
    reader = ReplyReader(0.0)
    text = "".join(chunk.text for event in events if (chunk := reader.read_event(event)) is not None)
    calls = ToolCallParser(frozenset({"weather", "time"}), HERMES_TOOL_CALLS)
    found = [*calls.add(text), *calls.flush()]
    assert found == [
        "Let me see.",
        ToolCall("weather", '{"town": "Ulm </tool_call>"}'),
        ToolCall("time", "{broken"),
    ]
    assert reader.last_chunk().finish_reason == "stop"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        # vLLM 0.32, llama.cpp and OpenAI of a prompt that is too long.
        (
            400,
            {
                "error": {
                    "message": "This model's maximum context length is 1024 tokens. However",
                    "code": 400,
                }
            },
            DoesNotFit,
        ),
        (
            400,
            {"error": {"message": "the request exceeds the available context size", "code": 400}},
            DoesNotFit,
        ),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, DoesNotFit),
        (400, {"error": {"message": "temperature must be positive", "code": 400}}, InvalidRequest),
        (422, {"detail": "wrong field"}, InvalidRequest),
        (401, {"error": "no key"}, WrongApiKey),
        (429, {"error": {"message": "slow down", "code": "rate_limit"}}, QueueFull),
        (500, {"error": {"message": "CUDA error"}}, RemoteError),
        # vLLM where an answer has begun, and its status is long told.
        (
            200,
            {"error": {"message": "Grammar error", "type": "BadRequestError", "code": 400}},
            InvalidRequest,
        ),
        (503, "upstream connect error", RemoteError),
    ],
)
def test_error_classes_by_reply(status: int, body: object, kind: type[VlfitError]) -> None:
    error = reply_error(status, body if isinstance(body, str) else json.dumps(body))
    assert type(error) is kind
    if isinstance(error, RemoteError):
        assert error.status == status


def test_logprobs_of_completions() -> None:
    told = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }
    chunk = ReplyReader(0.0).read_event({"choices": [{"text": "ab", "logprobs": told}]})
    assert chunk is not None
    first, second = chunk.logprobs
    assert (first.token, first.logprob, first.top) == ("a", 0.0, ())
    assert [(each.token, each.logprob) for each in second.top] == [("b", -0.5), ("c", -1.5)]
