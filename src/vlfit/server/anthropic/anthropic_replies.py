"""Responses in the form of Anthropic's Messages API: one JSON object, or named server-sent events."""

import json
from dataclasses import asdict
from typing import Any

from vlfit.api.conversation import ToolCall
from vlfit.api.outputs import Chunk, Usage
from vlfit.backends.base import Prepared
from vlfit.prompt.reasoning import ThinkingSplitter
from vlfit.prompt.tool_calls import ToolCallParser
from vlfit.server.chat.choices import GeneratedChoice, merged_timings
from vlfit.server.error_replies import ErrorFacts, encode_json, error_facts

ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {
                    "type": "object",
                    "properties": {"error_code": {"type": "string"}, "param": {"type": "string"}},
                },
            },
        },
    },
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Clients send it back with the thoughts; nothing checks it.
_SIGNATURE = "vlfit"

Block = dict[str, Any]


def error_form(facts: ErrorFacts) -> dict[str, Any]:
    """An error's response. The message names the request's field at fault, as Anthropic's do."""
    param, message = facts.param, facts.message
    kind = _ERROR_TYPES.get(facts.status, "invalid_request_error" if facts.status < 500 else "api_error")
    details = {"error_code": facts.code, **({"param": param} if param else {})}
    if param and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}}


class MessageWriter:
    """Formats the reply to one ``POST /v1/messages`` request (a ``ResponseWriter``).

    Streaming: ``first_events``, then ``events`` per chunk. Not streaming: ``add`` per chunk, then
    ``body``. There is one completion, so their parameter ``index`` is always 0. Content blocks are
    thoughts, text and tool calls, in the order generated.

    ``by_context``: the context allows fewer tokens than the request's ``max_tokens``; an answer of that
    length then ends with ``model_context_window_exceeded``. ``ignored``: names of request fields without
    effect. ``tool_calls``: parser of tool calls; None: no tools. ``thinking``: splits reasoning from the
    answer; None for models that do not reason. ``with_thinking``: whether the reply has the reasoning;
    False: it is dropped.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        prepared: Prepared,
        *,
        by_context: bool,
        ignored: tuple[str, ...],
        tool_calls: ToolCallParser | None = None,
        thinking: ThinkingSplitter | None = None,
        with_thinking: bool = False,
    ) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._prepared = prepared
        self._by_context = by_context
        self._ignored = ignored
        self._choice = GeneratedChoice(tool_calls, thinking)
        self._with_thinking = with_thinking
        self._blocks: list[Block] = []
        self._open: Block | None = None  # the last block, if more may be added to it
        self._space = ""  # white space before a block of text, which it may not become

    def first_events(self) -> bytes:
        """The event ``message_start``, with the message's head and the prompt's token counts."""
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._head, **empty, "usage": self._usage()})

    def ping(self) -> bytes:
        """The event ``ping``."""
        return _event("ping")

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Events for the next chunk; empty if it adds nothing.

        With the last chunk also those that end the message: ``message_delta`` and ``message_stop``.
        """
        events = self._add(chunk)
        if chunk.finish_reason is None:
            return events
        events += self._end_block()
        events += _event("message_delta", delta=self._stop(), usage=self._usage(), vlfit=self._extras())
        return events + _event("message_stop")

    def add(self, index: int, chunk: Chunk) -> None:
        """Append the next chunk, for ``body``."""
        self._add(chunk)

    def body(self) -> dict[str, Any]:
        """The whole message, after its last chunk was added."""
        self._end_block()
        return {
            **self._head,
            "content": self._blocks,
            **self._stop(),
            "usage": self._usage(),
            "vlfit": self._extras(),
        }

    def error_event(self, error: Exception) -> bytes:
        """The event ``error``, the last of a stream that failed."""
        return _event("error", error=error_form(error_facts(error))["error"])

    def log_note(self) -> str:
        """Token counts for the log line."""
        usage = self._total()
        images = f" ({usage.image_tokens} of them image)" if usage.image_tokens else ""
        return f"{usage.prompt_tokens}{images} + {usage.completion_tokens} tokens"

    def _add(self, chunk: Chunk) -> bytes:
        events = b""
        delta = self._choice.add(chunk)
        if delta.thought and self._with_thinking:
            events += self._add_text("thinking", delta.thought)
        text = self._space + delta.text
        if text.strip() or (text and self._open is not None and self._open["type"] == "text"):
            self._space = ""
            events += self._add_text("text", text)
        else:  # before a call, or between two, it is no block of its own
            self._space = text
        for call_id, call in delta.calls:
            events += self._add_call(call_id, call)
        return events

    def _add_text(self, kind: str, text: str) -> bytes:
        """Append to the block of ``kind`` (``text`` or ``thinking``), a new one if another is open."""
        events = b""
        if self._open is None or self._open["type"] != kind:
            events += self._end_block()
            self._open = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            events += self._start_block(self._open)
        self._open[kind] += text
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call_id: str, call: ToolCall) -> bytes:
        """A ``tool_use`` block; a call whose arguments are no JSON object, as one cut off, becomes text."""
        arguments = _arguments(call)
        if arguments is None:
            return self._add_text("text", call.arguments)
        self._space = ""
        events = self._end_block()
        block_id = f"toolu_{call_id.removeprefix('call_')}"
        block = {"type": "tool_use", "id": block_id, "name": call.name, "input": arguments}
        events += self._start_block({**block, "input": {}}, keep=block)
        events += self._delta({"type": "input_json_delta", "partial_json": call.arguments or "{}"})
        return events + _event("content_block_stop", index=len(self._blocks) - 1)

    def _start_block(self, block: Block, keep: Block | None = None) -> bytes:
        """``keep``: the whole block, if it is known already."""
        self._blocks.append(keep or block)
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=dict(block))

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        events = b""
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            events = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        return events + _event("content_block_stop", index=len(self._blocks) - 1)

    def _stop(self) -> dict[str, Any]:
        choice = self._choice
        if choice.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._by_context else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if choice.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}

    def _total(self) -> Usage:
        """Token counts: the prompt's as counted before generation, or else as reported with the result."""
        reported = self._choice.usage
        return Usage(
            self._prepared.prompt_tokens or reported.prompt_tokens,
            self._prepared.image_tokens or reported.image_tokens,
            self._choice.completion_tokens,
            self._choice.cached_tokens,
        )

    def _usage(self) -> dict[str, Any]:
        """As in Anthropic's API, ``input_tokens`` leaves out those read from the cache."""
        total = self._total()
        return {
            "input_tokens": total.prompt_tokens - total.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": total.cached_tokens,
            "output_tokens": total.completion_tokens,
        }

    def _extras(self) -> dict[str, Any]:
        choice = self._choice
        return {
            "images": [asdict(image) for image in self._prepared.images or choice.images],
            "timings": merged_timings([choice.timings] if choice.timings else []),
            "finish_reasons": [choice.finish_reason],
            "ignored": list(self._ignored),
        }


def _event(kind: str, /, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode_json({"type": kind, **fields}) + b"\n\n"


def _arguments(call: ToolCall) -> dict[str, Any] | None:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
