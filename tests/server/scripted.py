"""A backend without a model: generates given words at a given pace, records requests, fails on demand."""

import threading
import time
from dataclasses import dataclass, field

from vlfit.api.conversation import Conversation, ImagePart, TextPart, Tool, VideoPart
from vlfit.api.outputs import Chunk, FinishReason, ImageSeen, Listener, Timings, TokenLogprob, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Prepared, Stream, Ticket
from vlfit.errors import DoesNotFit

CONTEXT = 4096


@dataclass
class ScriptedPrepared:
    images: tuple[ImageSeen, ...]
    prompt_tokens: int
    image_tokens: int
    max_tokens: int = 5


@dataclass
class ScriptedTicket(Ticket):
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class ScriptedBackend(Backend):
    """Generates ``words`` one by one, ``delay`` seconds before each.

    ``prepare_error`` is raised by ``prepare``; ``error_after`` words the completion fails with ``error``.
    Completions wait for each other at ``together``, and after their first word for ``go_on``.
    """

    words: tuple[str, ...] = ("A ", "red ", "circle", " 🙂", ".")
    delay: float = 0.0
    finish_reason: FinishReason = "stop"
    stop_string: str | None = None
    prepare_error: Exception | None = None
    prepare_delay: float = 0.0
    error: Exception | None = None
    error_after: int = 2
    together: threading.Barrier | None = None
    go_on: threading.Event | None = None
    kind: str = "scripted"
    model: str = "scripted"
    context: int = CONTEXT
    device: str = "elsewhere"
    asked: list[tuple[Conversation, SamplingParams]] = field(default_factory=list)
    raw: list[str | tuple[int, ...]] = field(default_factory=list)
    tools: tuple[Tool, ...] = ()
    started: list[SamplingParams] = field(default_factory=list)
    tickets: list[ScriptedTicket] = field(default_factory=list)
    closed: bool = False

    def reset(self) -> None:
        """As new: forget what was asked, and what was changed. For one server that many tests share."""
        self.__dict__.update(ScriptedBackend().__dict__)

    def default_sampling(self) -> SamplingParams:
        return SamplingParams(temperature=0.7, top_p=0.8, top_k=20)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        self.raw.append(prompt)
        return ScriptedPrepared((), len(prompt), 0)

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        self.asked.append((conversation, sampling))
        self.tools = tools
        time.sleep(self.prepare_delay)
        if self.prepare_error is not None:
            raise self.prepare_error
        parts = [part for message in conversation for part in message.parts]
        seen = tuple(
            ImageSeen(640, 480, 320, 256, 80, frames=len(part.frames) if isinstance(part, VideoPart) else 1)
            for part in parts
            if isinstance(part, ImagePart | VideoPart)
        )
        text_tokens = sum(len(part.text) // 4 + 1 for part in parts if isinstance(part, TextPart))
        if text_tokens > self.context:
            raise DoesNotFit(f"the prompt has {text_tokens} tokens, the context {self.context}", "say less")
        return ScriptedPrepared(seen, text_tokens + 80 * len(seen), 80 * len(seen))

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        ticket = ScriptedTicket()
        self.started.append(sampling)
        self.tickets.append(ticket)
        threading.Thread(target=self._speak, args=(prepared, sampling, listener, ticket), daemon=True).start()
        return ticket

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> Stream:
        raise NotImplementedError("the server uses prepare and start")

    def close(self) -> None:
        self.closed = True
        for ticket in self.tickets:
            ticket.cancel()

    def _speak(
        self, prepared: Prepared, sampling: SamplingParams, listener: Listener, ticket: ScriptedTicket
    ) -> None:
        try:
            if self.together is not None:
                self.together.wait(timeout=60)
            self._say_all(prepared, sampling, listener, ticket)
        finally:
            ticket.ended.set()

    def _say_all(
        self, prepared: Prepared, sampling: SamplingParams, listener: Listener, ticket: ScriptedTicket
    ) -> None:
        words = self.words[: sampling.max_tokens]
        reason = self.finish_reason if len(words) == len(self.words) else "length"
        for index, word in enumerate(words):
            cancelled = ticket.cancelled.wait(self.delay)
            while index and self.go_on is not None and not (cancelled or self.go_on.wait(0.01)):
                cancelled = ticket.cancelled.is_set()
            if self.error is not None and index == self.error_after:
                listener(self.error)
                return
            last = cancelled or index == len(words) - 1
            logprobs = (_logprob(word, sampling.top_logprobs),) if sampling.top_logprobs is not None else ()
            listener(
                Chunk(
                    word,
                    logprobs,
                    ("cancelled" if cancelled else reason) if last else None,
                    Usage(prepared.prompt_tokens, prepared.image_tokens, index + 1) if last else None,
                    Timings(0.001, 0.01, 0.01 + 0.001 * index, index + 1) if last else None,
                    stop_string=self.stop_string if last else None,
                )
            )
            if cancelled:
                return


def _logprob(word: str, top: int) -> TokenLogprob:
    others = tuple(TokenLogprob(f"{word}{rank}", rank, -1.0 - rank) for rank in range(top))
    return TokenLogprob(word, 7, -0.5, others)
