"""Chat completions in OpenAI's format, whole or as server-sent events.

Every response (and the first and last event of a stream) has an object ``vlfit`` beside OpenAI's fields:
what the model saw of each picture, timings, the real finish reasons, and the ignored request fields.
"""

import time
from dataclasses import asdict, replace
from typing import Any

from vlfit.api.conversation import ToolCall
from vlfit.api.outputs import Chunk, ImageSeen, TokenLogprob, Usage
from vlfit.prompt.reasoning import Thinking, ThinkingSplitter
from vlfit.prompt.tool_calls import ToolCallParser
from vlfit.server.chat.choices import GeneratedChoice, merged_timings
from vlfit.server.error_replies import encode_json
from vlfit.server.openai.error_form import error_body

DONE = b"data: [DONE]\n\n"
PING = b": still working\n\n"
# JSON has no minus infinity; OpenAI sends this number for impossible tokens.
_MIN_LOGPROB = -9999.0


def encode_event(value: Any) -> bytes:
    """Encode ``value`` as one server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


class ChatResponseWriter:
    """Formats the reply to one ``/v1/chat/completions`` request (a ``ResponseWriter``).

    Streaming: ``first_events``, then ``events`` per chunk. Not streaming: ``add`` per chunk, then ``body``.

    ``choices``: their number. ``prompt_tokens``, ``image_tokens``, ``images``: 0 or empty if the backend
    cannot count beforehand; then the counts in the last chunks are used. ``ignored``: names of request fields
    without effect. ``with_usage``: end a stream with an event of token counts.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        choices: int,
        *,
        prompt_tokens: int,
        image_tokens: int | None,
        images: tuple[ImageSeen, ...],
        ignored: tuple[str, ...],
        with_logprobs: bool,
        with_usage: bool,
        tool_calls: ToolCallParser | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        """``tool_calls``: parser of tool calls, of which each choice gets a copy; None: no tools.

        ``thinking``: how the model writes its reasoning, which becomes ``reasoning_content``; None: it writes
        none, or the backend has split it off.
        """
        self.choices = [
            GeneratedChoice(
                replace(tool_calls) if tool_calls else None, ThinkingSplitter(thinking) if thinking else None
            )
            for _ in range(choices)
        ]
        self._head = {"id": response_id, "created": int(time.time()), "model": model}
        self._prompt_tokens = prompt_tokens
        self._image_tokens = image_tokens
        self._images = images
        self._ignored = ignored
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._choices_per_prompt = choices

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason for choice in self.choices)

    def body(self) -> dict[str, Any]:
        """The response of a request without ``stream``."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.openai_finish_reason or "stop",
                }
                for index, choice in enumerate(self.choices)
            ],
            "usage": self._usage(),
            "vlfit": self._extras(),
        }

    def add(self, index: int, chunk: Chunk) -> None:
        """Append the next chunk of choice ``index``, for ``body``."""
        self.choices[index].add(chunk)

    def error_event(self, error: Exception) -> bytes:
        """An event with ``error`` in OpenAI's form, the last of a stream that failed."""
        return encode_event(error_body(error))

    def ping(self) -> bytes:
        """A comment, which clients skip."""
        return PING

    def first_events(self) -> bytes:
        """An event with the role for each choice; the first also has what the model sees of each picture."""
        extras = {"vlfit": {"images": [asdict(image) for image in self._images]}}
        return b"".join(
            encode_event(
                {**self._chunk(index, {"role": "assistant", "content": ""}), **(extras if index == 0 else {})}
            )
            for index in range(len(self.choices))
        )

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Events for the next chunk of choice ``index``; empty if it adds nothing.

        With the last chunk of the last choice to end, also the usage and ``[DONE]``.
        """
        choice = self.choices[index]
        before = len(choice.calls)
        added = choice.add(chunk)
        if not (added.text or added.thought or added.calls or chunk.logprobs or chunk.finish_reason):
            return b""
        delta: dict[str, Any] = _reasoning(added.thought) if added.thought else {}
        if added.text or (chunk.logprobs and not delta):
            delta["content"] = added.text
        if added.calls:
            calls = enumerate(added.calls, before)
            delta["tool_calls"] = [{"index": number, **_call(*call)} for number, call in calls]
        body = self._chunk(index, delta, self._logprobs(list(chunk.logprobs)), choice.openai_finish_reason)
        if not self.finished:
            return encode_event(body)
        if not self._with_usage:
            return encode_event({**body, "vlfit": self._extras()}) + DONE
        usage = {**self._chunk_head(), "choices": [], "usage": self._usage(), "vlfit": self._extras()}
        return encode_event(body) + encode_event(usage) + DONE

    def log_note(self) -> str:
        """Token counts for the log line."""
        usage = self._total()
        images = f" ({usage.image_tokens} of them image)" if usage.image_tokens else ""
        return f"{usage.prompt_tokens}{images} + {usage.completion_tokens} tokens"

    def _chunk_head(self) -> dict[str, Any]:
        # With include_usage every chunk but the last has "usage": null, as in OpenAI's API.
        return {
            **self._head,
            "object": "chat.completion.chunk",
            **({"usage": None} if self._with_usage else {}),
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._chunk_head(), "choices": [choice]}

    def _logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            {**logprob_json(each), "top_logprobs": [logprob_json(other) for other in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _total(self) -> Usage:
        """Usage with the prompt counted once; a prompt token is cached if no choice computed it."""
        completion = sum(choice.completion_tokens for choice in self.choices)
        cached = min(choice.cached_tokens for choice in self.choices)
        reported = [choice.usage for choice in self.choices[:: self._choices_per_prompt]]
        prompt = self._prompt_tokens or sum(usage.prompt_tokens for usage in reported)
        known = [usage.image_tokens for usage in reported if usage.image_tokens is not None]
        image = self._image_tokens or (sum(known) if len(known) == len(reported) else None)
        return Usage(prompt, image, completion, cached)

    def _usage(self) -> dict[str, Any]:
        total = self._total()
        return {
            "prompt_tokens": total.prompt_tokens,
            "completion_tokens": total.completion_tokens,
            "total_tokens": total.total_tokens,
            "prompt_tokens_details": {
                "image_tokens": total.image_tokens,
                "cached_tokens": total.cached_tokens,
            },
        }

    def _extras(self) -> dict[str, Any]:
        return {
            "images": [asdict(image) for image in self._images or self.choices[0].images],
            "timings": merged_timings(
                [choice.timings for choice in self.choices if choice.timings is not None]
            ),
            "finish_reasons": [choice.finish_reason for choice in self.choices],
            "ignored": list(self._ignored),
        }


def _message(choice: GeneratedChoice) -> dict[str, Any]:
    text, thoughts = "".join(choice.text), "".join(choice.thoughts)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thoughts or choice.thinking is not None:
        message |= _reasoning(thoughts or None)
    if choice.calls:
        message |= {"content": text or None, "tool_calls": [_call(*call) for call in choice.calls]}
    return message


def _reasoning(thoughts: str | None) -> dict[str, Any]:
    """Reasoning under the names that clients read: DeepSeek's and llama.cpp's, and vLLM's."""
    return {"reasoning_content": thoughts, "reasoning": thoughts}


def _call(call_id: str, call: ToolCall) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def logprob_json(logprob: TokenLogprob) -> dict[str, Any]:
    """A token and its logprob in OpenAI's format, and vlfit's field ``token_id``; without alternatives.

    ``bytes`` is null if the token is only part of a character; minus infinity becomes -9999.
    """
    whole = "\ufffd" not in logprob.token
    return {
        "token": logprob.token,
        "token_id": logprob.token_id,
        "logprob": max(logprob.logprob, _MIN_LOGPROB),
        "bytes": list(logprob.token.encode("utf-8", "replace")) if whole else None,
    }
