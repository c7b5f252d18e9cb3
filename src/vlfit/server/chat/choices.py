"""A completion as generated so far, for the response writers of all dialects."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import uuid4

from vlfit.api.conversation import ToolCall
from vlfit.api.outputs import Chunk, FinishReason, ImageSeen, Timings, TokenLogprob, Usage
from vlfit.prompt.reasoning import ThinkingSplitter
from vlfit.prompt.tool_calls import ToolCallParser

# OpenAI has no finish reason for a completion stopped by the loop guard; ``vlfit.finish_reasons`` has it.
_OPENAI_FINISH = {"stop": "stop", "length": "length", "loop": "stop"}
_NO_USAGE = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a chunk adds: text, the tool calls that it completes, as (id, call), and reasoning."""

    text: str = ""
    calls: tuple[tuple[str, ToolCall], ...] = ()
    thought: str = ""


@dataclass(slots=True)
class GeneratedChoice:
    """One choice as generated so far.

    ``reader`` parses tool calls out of the text; None: the request has no tools. ``thinking`` splits
    reasoning from the answer; None: the backend has done that, or the model does not reason. ``text``,
    ``thoughts``, ``calls`` and ``logprobs`` grow with each chunk. ``finish_reason``, ``stop_string``,
    ``timings``, ``usage`` and the token counts come with the last. ``images``: only of backends that cannot
    count the prompt beforehand, else empty.
    """

    reader: ToolCallParser | None = None
    thinking: ThinkingSplitter | None = None
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, ToolCall]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    timings: Timings | None = None
    usage: Usage = _NO_USAGE
    images: tuple[ImageSeen, ...] = ()
    stop_string: str | None = None  # the one that ended it

    def add(self, chunk: Chunk) -> Delta:
        """Append the next chunk; returns the text, reasoning and tool calls it adds.

        With ``reader``, text that may be the start of a call is held back until a later chunk decides.
        """
        if self.thinking is not None:
            chunk = self.thinking.split(chunk)
        delta = self._read(chunk)
        self.text.append(delta.text)
        self.thoughts.append(delta.thought)
        self.calls.extend(delta.calls)
        self.logprobs.extend(chunk.logprobs)
        self.finish_reason = chunk.finish_reason
        self.stop_string = chunk.stop_string
        self.timings = chunk.timings
        self.images = chunk.images or self.images
        if chunk.usage is not None:
            self.usage = chunk.usage
            self.completion_tokens = chunk.usage.completion_tokens
            self.cached_tokens = chunk.usage.cached_tokens
        return delta

    def _read(self, chunk: Chunk) -> Delta:
        if self.reader is None:
            return Delta(chunk.text, thought=chunk.reasoning)
        pieces = [*self.reader.add(chunk.text), *self._rest(chunk)]
        calls = tuple((f"call_{uuid4().hex[:24]}", each) for each in pieces if isinstance(each, ToolCall))
        return Delta("".join(each for each in pieces if isinstance(each, str)), calls, chunk.reasoning)

    def _rest(self, chunk: Chunk) -> Iterable[str | ToolCall]:
        if self.reader is None or chunk.finish_reason is None:
            return ()
        return self.reader.flush(cut=chunk.finish_reason == "length")

    @property
    def openai_finish_reason(self) -> str | None:
        """The finish reason in OpenAI's words; None until the last chunk.

        ``loop`` becomes ``stop``, and ``stop`` becomes ``tool_calls`` if there are calls.
        """
        if self.finish_reason is None:
            return None
        reason = _OPENAI_FINISH[self.finish_reason]
        return "tool_calls" if self.calls and reason == "stop" else reason


def merged_timings(timings: list[Timings]) -> dict[str, float] | None:
    """Timings over all choices, in seconds: the earliest start and first token, the latest end.

    None if ``timings`` is empty. ``decode_tokens_per_s``: tokens of all choices without each one's first,
    over the time from the earliest first token to the latest end.
    """
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
