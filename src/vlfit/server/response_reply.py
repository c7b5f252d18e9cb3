"""Answers in the shape of OpenAI's responses, whole or as events that have names and numbers.

Knows: items of output and the events around each. Does not know: where chunks come from, how bytes are sent.
"""

import time
from dataclasses import asdict
from typing import Any

from vlfit.backends.base import Prepared
from vlfit.engine.answer import Chunk, TokenLogprob, Usage
from vlfit.engine.conversation import ToolCall
from vlfit.engine.tool_calls import ToolCallReader
from vlfit.server.failures import encode, error_body
from vlfit.server.replies import Choice, merged_timings, token_facts

Item = dict[str, Any]


class ResponseReply:
    """One response under way. Output is one message, if anything is said, and a call of each function."""

    def __init__(
        self,
        request_id: str,
        model: str,
        sent: dict[str, Any],
        prepared: Prepared,
        *,
        ignored: tuple[str, ...],
        with_logprobs: bool,
        tools: frozenset[str],
        forced: str | None = None,
    ) -> None:
        """``sent``: fields of the request that the response repeats; ``tools``: names of functions, of which
        ``forced`` must be called.
        """
        self._id = request_id
        self._model = model
        self._sent = sent
        self._prompt_tokens = prepared.prompt_tokens
        self._image_tokens = prepared.image_tokens
        self._images = prepared.images
        self._ignored = ignored
        self._with_logprobs = with_logprobs
        self._choice = Choice(ToolCallReader(tools, forced) if tools else None)
        self._created = int(time.time())
        self._number = 0
        self._items: list[Item] = []
        self._message: Item | None = None  # that is being said

    def opening(self) -> bytes:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def step(self, index: int, chunk: Chunk) -> bytes:
        said = self._choice.add(chunk)
        events = b""
        if said.text or (chunk.logprobs and not said.calls):
            events += self._say(said.text, chunk.logprobs)
        for call_id, call in said.calls:
            events += self._end_message() + self._call(call_id, call)
        if chunk.finish_reason is None:
            return events
        if not self._items and self._message is None:
            events += self._say("", ())  # an answer of no words is a message all the same
        events += self._end_message()
        status = self._status()
        return events + self._event(f"response.{status}", response=self._response(status, self._items))

    def take(self, index: int, chunk: Chunk) -> None:
        self.step(index, chunk)

    def whole(self) -> dict[str, Any]:
        return self._response(self._status(), self._items)

    def failed(self, error: Exception) -> bytes:
        body = error_body(error)["error"]
        return self._event("error", **{name: body[name] for name in ("code", "message", "param")}, error=body)

    def note(self) -> str:
        usage = self._total()
        images = f" ({usage.image_tokens} of them image)" if usage.image_tokens else ""
        return f"{usage.prompt_tokens}{images} + {usage.completion_tokens} tokens"

    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _say(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> bytes:
        events = b""
        if self._message is None:
            name = f"msg_{self._id[:24]}{len(self._items)}"
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._message = {
                "type": "message",
                "id": name,
                "status": "in_progress",
                "role": "assistant",
                "content": [part],
            }
            events += self._event(
                "response.output_item.added",
                output_index=len(self._items),
                item={**self._message, "content": []},
            )
            events += self._event("response.content_part.added", **self._where(), part=dict(part))
        part = self._message["content"][0]
        part["text"] += text
        told = [token_facts(each) for each in logprobs] if self._with_logprobs else []
        part["logprobs"] += told
        if text or told:
            events += self._event("response.output_text.delta", **self._where(), delta=text, logprobs=told)
        return events

    def _end_message(self) -> bytes:
        message = self._message
        if message is None:
            return b""
        part = message["content"][0]
        events = self._event(
            "response.output_text.done", **self._where(), text=part["text"], logprobs=part["logprobs"]
        ) + self._event("response.content_part.done", **self._where(), part=part)
        message["status"] = self._status()
        self._message = None
        return events + self._end_item(message)

    def _call(self, call_id: str, call: ToolCall) -> bytes:
        item = {
            "type": "function_call",
            "id": f"fc_{call_id.removeprefix('call_')}",
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": self._status(),
        }
        where = {"item_id": item["id"], "output_index": len(self._items)}
        begun = {**item, "arguments": "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=len(self._items), item=begun)
        events += self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        events += self._event(
            "response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments
        )
        return events + self._end_item(item)

    def _end_item(self, item: Item) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _where(self) -> dict[str, Any]:
        name = self._message["id"] if self._message else ""
        return {"item_id": name, "output_index": len(self._items), "content_index": 0}

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + encode(body) + b"\n\n"

    def _response(self, status: str, items: list[Item]) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._model,
            "output": items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._sent,
            "usage": None if status == "in_progress" else self._usage(),
            "vlfit": {
                "images": [asdict(image) for image in self._images or self._choice.images],
                "timings": merged_timings([self._choice.timings] if self._choice.timings else []),
                "finish_reasons": [self._choice.finish_reason],
                "ignored": list(self._ignored),
            },
        }

    def _total(self) -> Usage:
        """What the backend counted before, or told afterwards."""
        told = self._choice.usage
        return Usage(
            self._prompt_tokens or told.prompt_tokens,
            self._image_tokens or told.image_tokens,
            self._choice.completion_tokens,
            self._choice.cached_tokens,
        )

    def _usage(self) -> dict[str, Any]:
        total = self._total()
        return {
            "input_tokens": total.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": total.cached_tokens,
                "image_tokens": total.image_tokens,
            },
            "output_tokens": total.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total.total_tokens,
        }
