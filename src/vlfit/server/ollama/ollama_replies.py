"""Responses in Ollama's form: one JSON object, or one a line (NDJSON)."""

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from vlfit.api.conversation import ToolCall
from vlfit.api.outputs import Chunk, TokenLogprob
from vlfit.backends.base import Prepared
from vlfit.prompt.reasoning import ThinkingSplitter
from vlfit.prompt.tool_calls import ToolCallParser
from vlfit.server.chat.choices import GeneratedChoice
from vlfit.server.error_replies import ErrorFacts, encode_json, error_facts

ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
# The loop guard's end is a stop; ``vlfit.finish_reasons`` has it.
_DONE_REASONS = {"stop": "stop", "length": "length", "loop": "stop"}
_MIN_LOGPROB = -9999.0  # JSON has no minus infinity


def error_form(facts: ErrorFacts) -> dict[str, Any]:
    """The body of an error's response: ``{"error": message}``; the message names the field at fault."""
    param = facts.param
    return {"error": facts.message if not param or param in facts.message else f"{param}: {facts.message}"}


def encode_line(value: dict[str, Any]) -> bytes:
    """Encode ``value`` as one line of a stream (NDJSON)."""
    return encode_json(value) + b"\n"


def timestamp(moment: datetime | None = None) -> str:
    """``moment`` as Ollama writes it: RFC 3339 in UTC. None: now."""
    return f"{(moment or datetime.now(UTC)).astimezone(UTC).replace(tzinfo=None).isoformat()}Z"


def loaded_reply(model: str, *, is_chat: bool, reason: str) -> dict[str, Any]:
    """The response to a request without a prompt, which only loads or unloads the model.

    ``is_chat``: in the form of ``/api/chat``; False: of ``/api/generate``. ``reason``: ``load`` or
    ``unload``.
    """
    return {**_Form(model, is_chat=is_chat).piece(), "done": True, "done_reason": reason}


class _Form:
    """The two shapes of a piece: ``message`` of chat, ``response`` of generate."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat

    def piece(
        self, text: str = "", thought: str = "", calls: tuple[tuple[str, ToolCall], ...] = (), first: int = 0
    ) -> dict[str, Any]:
        """A response without its end. ``first``: number of the first of ``calls`` in the whole response."""
        head = {"model": self._model, "created_at": timestamp()}
        thinking = {"thinking": thought} if thought else {}
        if not self._is_chat:
            return {**head, "response": text, **thinking, "done": False}
        tool_calls = (
            {"tool_calls": [_call(index, *call) for index, call in enumerate(calls, first)]} if calls else {}
        )
        message = {"role": "assistant", "content": text, **thinking, **tool_calls}
        return {**head, "message": message, "done": False}


class OllamaWriter:
    """Formats the reply to one ``/api/chat`` (``is_chat``) or ``/api/generate`` request.

    Streaming: ``first_events`` (empty), then ``events`` per chunk. Not streaming: ``add`` per chunk, then
    ``body``. There is one completion, so their parameter ``index`` is always 0. Make it when the prompt is
    prepared: the time since ``started`` (arrival, by ``time.perf_counter_ns``) is its ``load_duration``.

    ``ignored``: names of request fields without effect. ``tool_calls``: parser of tool calls; None: no tools.
    ``thinking``: splits reasoning from the answer; None for models that do not reason. ``with_thinking``:
    whether the reply has the reasoning; False: it is dropped.
    """

    def __init__(
        self,
        model: str,
        prepared: Prepared,
        *,
        is_chat: bool,
        started: int,
        ignored: tuple[str, ...],
        with_logprobs: bool,
        tool_calls: ToolCallParser | None = None,
        thinking: ThinkingSplitter | None = None,
        with_thinking: bool = True,
    ) -> None:
        self._form = _Form(model, is_chat=is_chat)
        self._prepared = prepared
        self._started = started
        self._prepared_after = time.perf_counter_ns() - started
        self._ignored = ignored
        self._with_logprobs = with_logprobs
        self._choice = GeneratedChoice(tool_calls, thinking)
        self._with_thinking = with_thinking
        self._num_calls = 0

    def first_events(self) -> bytes:
        """Empty: Ollama's streams begin with the first chunk."""
        return b""

    def ping(self) -> bytes:
        """A piece without text: clients parse every line, so that an empty one would be an error."""
        return encode_line(self._form.piece())

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Lines of JSON for the next chunk; empty if it adds nothing.

        With the last chunk also the line with ``"done": true``, counts and durations.
        """
        thought, text, calls = self._add(chunk)
        lines = b""
        if text or thought or calls or (self._with_logprobs and chunk.logprobs):
            piece = self._form.piece(text, thought, calls, self._num_calls)
            self._num_calls += len(calls)
            lines = encode_line({**piece, **self._logprobs(chunk.logprobs)})
        if chunk.finish_reason is None:
            return lines
        return lines + encode_line({**self._form.piece(), **self._end()})

    def add(self, index: int, chunk: Chunk) -> None:
        """Append the next chunk, for ``body``."""
        self._add(chunk)

    def body(self) -> dict[str, Any]:
        """The whole reply, after its last chunk was added."""
        choice = self._choice
        kept = tuple(call for call in choice.calls if _arguments(call[1]) is not None)
        text = "".join([*choice.text, *(each[1].arguments for each in choice.calls if each not in kept)])
        thoughts = "".join(choice.thoughts) if self._with_thinking else ""
        piece = self._form.piece(text, thoughts, kept)
        return {**piece, **self._logprobs(tuple(choice.logprobs)), **self._end()}

    def error_event(self, error: Exception) -> bytes:
        """A line with the error, the last of a stream that failed."""
        return encode_line(error_form(error_facts(error)))

    def log_note(self) -> str:
        """Token counts for the log line."""
        prompt, completion = self._counts()
        image_tokens = self._prepared.image_tokens
        images = f" ({image_tokens} of them image)" if image_tokens else ""
        return f"{prompt}{images} + {completion} tokens"

    def _add(self, chunk: Chunk) -> tuple[str, str, tuple[tuple[str, ToolCall], ...]]:
        """Thought, text and whole calls that ``chunk`` adds. A call that was cut off becomes text."""
        delta = self._choice.add(chunk)
        thought = delta.thought if self._with_thinking else ""
        calls = tuple(call for call in delta.calls if _arguments(call[1]) is not None)
        cut_off = "".join(each[1].arguments for each in delta.calls if each not in calls)
        return thought, delta.text + cut_off, calls

    def _counts(self) -> tuple[int, int]:
        """Tokens of the prompt and of the completion."""
        usage = self._choice.usage
        return self._prepared.prompt_tokens or usage.prompt_tokens, self._choice.completion_tokens

    def _end(self) -> dict[str, Any]:
        choice, timings = self._choice, self._choice.timings
        prompt, completion = self._counts()
        reason = choice.finish_reason or "stop"
        return {
            "done": True,
            "done_reason": _DONE_REASONS.get(reason, "stop"),
            "total_duration": time.perf_counter_ns() - self._started,
            "load_duration": self._prepared_after,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": _ns(timings.first_token_s - timings.queued_s) if timings else 0,
            "eval_count": completion,
            "eval_duration": _ns(timings.total_s - timings.first_token_s) if timings else 0,
            "vlfit": {
                "images": [asdict(image) for image in self._prepared.images or choice.images],
                "finish_reasons": [reason],
                "ignored": list(self._ignored),
            },
        }

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        if not self._with_logprobs or not logprobs:
            return {}
        return {
            "logprobs": [
                {**_logprob(each), "top_logprobs": [_logprob(other) for other in each.top]}
                for each in logprobs
            ]
        }


def _ns(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)


def _logprob(logprob: TokenLogprob) -> dict[str, Any]:
    return {
        "token": logprob.token,
        "logprob": max(logprob.logprob, _MIN_LOGPROB),
        "bytes": list(logprob.token.encode("utf-8", "replace")),
    }


def _arguments(call: ToolCall) -> dict[str, Any] | None:
    """The arguments of ``call``; None if they are no JSON object, as of one that was cut off."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _call(index: int, call_id: str, call: ToolCall) -> dict[str, Any]:
    return {
        "id": call_id,
        "function": {"index": index, "name": call.name, "arguments": _arguments(call) or {}},
    }
