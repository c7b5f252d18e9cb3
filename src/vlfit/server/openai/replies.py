"""Answers in OpenAI's shape, whole or as server-sent events.

Knows: chunks of each choice and how OpenAI writes them. Does not know: where chunks come from, how bytes
are sent.

Beside OpenAI's fields every response (and the first and last event of a stream) carries an object
``vlfit``: what the model saw of each picture, how long it took, why each choice really ended, and which
fields were ignored.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

from vlfit.api.conversation import ToolCall
from vlfit.api.outputs import Chunk, FinishReason, ImageSeen, Timings, TokenLogprob, Usage
from vlfit.prompt.tool_calls import ToolCallReader
from vlfit.server.openai.error_replies import encode, error_body

DONE = b"data: [DONE]\n\n"
PING = b": still working\n\n"
# OpenAI has no name for a completion that was stopped because it repeated itself; ``vlfit`` says so.
_OPENAI_FINISH = {"stop": "stop", "length": "length", "loop": "stop"}
# JSON has no minus infinity; OpenAI sends this number for tokens that cannot be.
_LEAST_LOGPROB = -9999.0

_UNTOLD = Usage(0, 0, 0)


def event(value: Any) -> bytes:
    """``value`` as one server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Said:
    """What a chunk says: text, and calls of tools that it made whole, each with its id."""

    text: str = ""
    calls: tuple[tuple[str, ToolCall], ...] = ()


@dataclass(slots=True)
class Choice:
    """What has come of one choice so far. ``reader`` finds calls of tools in it; None: there are none.

    ``usage`` and ``images`` are what its chunks told: all that is known of a prompt which the backend could
    not count (``Prepared``).
    """

    reader: ToolCallReader | None = None
    text: list[str] = field(default_factory=list)
    calls: list[tuple[str, ToolCall]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    timings: Timings | None = None
    usage: Usage = _UNTOLD
    images: tuple[ImageSeen, ...] = ()

    def add(self, chunk: Chunk) -> Said:
        said = self._read(chunk)
        self.text.append(said.text)
        self.calls.extend(said.calls)
        self.logprobs.extend(chunk.logprobs)
        self.finish_reason = chunk.finish_reason
        self.timings = chunk.timings
        self.images = chunk.images or self.images
        if chunk.usage is not None:
            self.usage = chunk.usage
            self.completion_tokens = chunk.usage.completion_tokens
            self.cached_tokens = chunk.usage.cached_tokens
        return said

    def _read(self, chunk: Chunk) -> Said:
        if self.reader is None:
            return Said(chunk.text)
        found = [*self.reader.add(chunk.text), *self._rest(chunk)]
        calls = tuple((f"call_{uuid4().hex[:24]}", each) for each in found if isinstance(each, ToolCall))
        return Said("".join(each for each in found if isinstance(each, str)), calls)

    def _rest(self, chunk: Chunk) -> Iterable[str | ToolCall]:
        if self.reader is None or chunk.finish_reason is None:
            return ()
        return self.reader.flush(cut=chunk.finish_reason == "length")

    @property
    def told_finish(self) -> str | None:
        """Why it ended, as OpenAI puts it."""
        if self.finish_reason is None:
            return None
        reason = _OPENAI_FINISH[self.finish_reason]
        return "tool_calls" if self.calls and reason == "stop" else reason


class Reply:
    """One response under way: its id, its choices, and how to write them down."""

    def __init__(
        self,
        reply_id: str,
        model: str,
        choices: int,
        *,
        prompt_tokens: int,
        image_tokens: int | None,
        images: tuple[ImageSeen, ...],
        ignored: tuple[str, ...],
        with_logprobs: bool,
        with_usage: bool,
        tools: frozenset[str] = frozenset(),
        forced: str | None = None,
    ) -> None:
        """``tools``: names of the functions that were offered; ``forced``: that which must be called."""
        self.choices = [Choice(ToolCallReader(tools, forced) if tools else None) for _ in range(choices)]
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self._prompt_tokens = prompt_tokens
        self._image_tokens = image_tokens
        self._images = images
        self._ignored = ignored
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._each = choices  # of one prompt

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def whole(self) -> dict[str, Any]:
        """The response of a request without ``stream``."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.told_finish or "stop",
                }
                for index, choice in enumerate(self.choices)
            ],
            "usage": self._usage(),
            "vlfit": self._extras(),
        }

    def take(self, index: int, chunk: Chunk) -> None:
        """The next chunk of choice ``index``, of which nothing is written yet."""
        self.choices[index].add(chunk)

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that broke off."""
        return event(error_body(error))

    def opening(self) -> bytes:
        """The first events: the role of each choice, and already what the model sees of each picture."""
        extras = {"vlfit": {"images": [asdict(image) for image in self._images]}}
        return b"".join(
            event(
                {**self._chunk(index, {"role": "assistant", "content": ""}), **(extras if index == 0 else {})}
            )
            for index in range(len(self.choices))
        )

    def step(self, index: int, chunk: Chunk) -> bytes:
        """The events for the next chunk of choice ``index``; the closing ones too if it is the last of
        all.
        """
        choice = self.choices[index]
        before = len(choice.calls)
        said = choice.add(chunk)
        if not (said.text or said.calls or chunk.logprobs or chunk.finish_reason):
            return b""
        delta: dict[str, Any] = {"content": said.text} if said.text or chunk.logprobs else {}
        if said.calls:
            calls = enumerate(said.calls, before)
            delta["tool_calls"] = [{"index": number, **_call(*call)} for number, call in calls]
        body = self._chunk(index, delta, self._logprobs(list(chunk.logprobs)), choice.told_finish)
        if not self.finished:
            return event(body)
        if not self._with_usage:
            return event({**body, "vlfit": self._extras()}) + DONE
        usage = {**self._chunk_head(), "choices": [], "usage": self._usage(), "vlfit": self._extras()}
        return event(body) + event(usage) + DONE

    def note(self) -> str:
        """A few words for the log."""
        usage = self._total()
        images = f" ({usage.image_tokens} of them image)" if usage.image_tokens else ""
        return f"{usage.prompt_tokens}{images} + {usage.completion_tokens} tokens"

    def _chunk_head(self) -> dict[str, Any]:
        # With include_usage every chunk but the last says "usage": null, as at OpenAI.
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
            {**token_facts(each), "top_logprobs": [token_facts(other) for other in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _total(self) -> Usage:
        """The prompt is counted once, however many choices were made of it: as cached, what none computed."""
        completion = sum(choice.completion_tokens for choice in self.choices)
        cached = min(choice.cached_tokens for choice in self.choices)
        told = [choice.usage for choice in self.choices[:: self._each]]
        prompt = self._prompt_tokens or sum(each.prompt_tokens for each in told)
        images = [each.image_tokens for each in told]
        known = [each for each in images if each is not None]
        image = self._image_tokens or (sum(known) if len(known) == len(images) else None)
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


def _message(choice: Choice) -> dict[str, Any]:
    text = "".join(choice.text)
    if not choice.calls:
        return {"role": "assistant", "content": text, "refusal": None}
    calls = [_call(*call) for call in choice.calls]
    return {"role": "assistant", "content": text or None, "refusal": None, "tool_calls": calls}


def _call(call_id: str, call: ToolCall) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def token_facts(logprob: TokenLogprob) -> dict[str, Any]:
    """A token that is a part of a character has no text of its own, so its bytes are not told."""
    whole = "\ufffd" not in logprob.token
    return {
        "token": logprob.token,
        "token_id": logprob.token_id,
        "logprob": max(logprob.logprob, _LEAST_LOGPROB),
        "bytes": list(logprob.token.encode("utf-8", "replace")) if whole else None,
    }


def merged_timings(timings: list[Timings]) -> dict[str, float] | None:
    """The timings of all choices as one: from the first that began to the last that ended."""
    if not timings:
        return None
    first = min(each.first_token_s for each in timings)
    total = max(each.total_s for each in timings)
    decoded = sum(max(each.completion_tokens - 1, 0) for each in timings)
    return {
        "queued_s": round(min(each.queued_s for each in timings), 6),
        "first_token_s": round(first, 6),
        "total_s": round(total, 6),
        "decode_tokens_per_s": round(decoded / (total - first), 3) if total > first else 0.0,
    }
