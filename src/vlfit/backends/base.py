"""What every backend offers: a conversation in, a stream of chunks out.

The backends are ``native`` (vlfit's engine), ``transformers``, ``vllm`` and ``remote`` (any OpenAI server);
``opening.py`` opens one by name.
"""

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import SleepLevel
from vlfit.api.outputs import Answer, Chunk, ImageSeen, Listener, TokenLogprob
from vlfit.api.pooling import ModelPooling, PoolingParams
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount, SleepResult
from vlfit.checkpoint.processor_files import read_chat_template
from vlfit.errors import CheckpointError, InvalidRequest, UsageError
from vlfit.models.registry import HERMES_TOOL_CALLS
from vlfit.prompt.reasoning import (
    NO_THINKING,
    Thinking,
    ThinkingSplitter,
    reads_switch,
    reasoning_then,
    thinking_of_template,
)

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.checkpoint.source import Checkpoint
    from vlfit.plan.actual import Expectation, Row


P = TypeVar("P")


class Stream(Protocol):
    """One running completion: iterate for its chunks, or call ``answer``.

    Iterating raises the error that ends the request. ``close`` before the end cancels the request.
    """

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model saw of each picture.

        Behind a server empty until the first chunk; it stays empty if the server does not report it.
        """
        ...

    def __iter__(self) -> Iterator[Chunk]: ...
    def answer(self) -> Answer:
        """Read to the end and return the whole completion.

        Raises the error that ends the request, or ``UsageError`` if the stream was closed before its end.
        """
        ...

    def close(self) -> None:
        """Cancel the request, unless it has ended. May be called more than once."""
        ...


class Prepared(Protocol):
    """A checked request, ready for ``Backend.start``. Nothing is on the device yet.

    If the backend cannot count tokens (``Capabilities.counts_tokens``), ``prompt_tokens`` is 0 and
    ``images`` is empty: the usage of the completion's last chunk has the counts then.
    """

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model will see of each picture; empty if the backend cannot count tokens."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, ``image_tokens`` included; 0 if the backend cannot count them."""
        ...

    @property
    def image_tokens(self) -> int | None:
        """Tokens of all pictures in the prompt, 0 without pictures; None if the backend cannot count them."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens of the completion; 0: unknown."""
        ...


class Ticket(ABC):
    """A request that was started.

    ``accepted``: None if the model runs in this process: ``start`` has accepted the request. For a model
    behind a server a future: True once the server accepts the request, False if the server refuses it or it
    is cancelled or fails before that, as its listener is told.
    """

    accepted: "Future[bool] | None" = None

    @abstractmethod
    def cancel(self) -> None:
        """End the request: its last chunk has the finish reason ``cancelled``.

        No effect if the request has ended. May be called from any thread, more than once.
        """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Members of ``Backend`` that belong to a missing capability must not be used.

    - ``counts_tokens``: ``prepare`` counts the tokens of a prompt.
    - ``account``: ``account()`` and the attribute ``checkpoint`` exist.
    - ``plan``: ``expectation`` exists. Otherwise callers derive a plan from the checkpoint.
    - ``ledger``: ``ledger_rows()`` exists.
    - ``sleep``: ``sleep()`` and ``wake()`` exist, and ``asleep`` may be true.
    - ``own_process``: the model runs in a process of its own, which can die: ``when_lost()`` exists.
    - ``generates``: the model writes text; False for embedding models and rerankers, whose ``prepare`` raises
      ``InvalidRequest``.
    - ``embeds``, ``scores``: ``prepare_pooled`` takes these tasks, and ``pooling`` is known.

    Without the capability, methods and ``expectation`` raise ``NotImplementedError``.
    """

    counts_tokens: bool = True
    account: bool = False
    plan: bool = False
    ledger: bool = False
    sleep: bool = False
    own_process: bool = False
    generates: bool = True
    embeds: bool = False
    scores: bool = False


class Backend(ABC):
    """A model that answers requests: ``prepare`` one, then ``start`` it; ``stream`` does both.

    Several requests may be open at once. Any thread may call the methods, which raise errors of
    ``vlfit.errors``. ``close`` the backend, or use it in a ``with`` block, to release its memory.

    - ``kind``: ``native``, ``transformers``, ``vllm`` or ``remote``.
    - ``model``: its name in answers and in ``/v1/models``.
    - ``context``: most tokens of one request, prompt and completion; None: unknown.
    - ``device``: ``cpu``, ``cuda:0``, or the server's URL.
    - ``closing_seconds``: how long a program that exits waits for ``close``.
    - ``checkpoint``: the open checkpoint; only with ``Capabilities.account``.
    - ``tool_calls``: the syntax in which completions contain tool calls, as text.
    - ``pooling``: what the model is made for; None: unknown.
    """

    kind: str
    model: str
    context: int | None
    device: str
    capabilities = Capabilities()
    closing_seconds = 0.7  # of the three seconds of Ctrl-C, what is left once all requests are over
    checkpoint: "Checkpoint | AnyCheckpoint"
    tool_calls = HERMES_TOOL_CALLS
    pooling: ModelPooling | None = None

    @abstractmethod
    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own generation settings (``generation_config.json``)."""

    @abstractmethod
    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        """Decode pictures, render the chat template, count tokens, check against the context.

        Blocks the caller. ``tools``: functions the model may call. Raises ``PictureError``,
        ``InvalidRequest`` or ``DoesNotFit``.
        """

    @abstractmethod
    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        """``prepare`` for plain text or token ids, without a chat template."""

    def prepare_pooled(self, prompt: Conversation | tuple[int, ...], pooling: PoolingParams) -> Prepared:
        """``prepare`` a request for a vector or a score. Once started, its only chunk has ``pooled``.

        ``prompt``: a conversation, rendered as for a chat, or token ids, taken as they are. Raises
        ``InvalidRequest`` for a task or ``dimensions`` that the model does not have.
        """
        raise NotImplementedError

    @abstractmethod
    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        """Queue the request and return. ``listener`` is called from another thread with each chunk, in order.

        Its last call gets a chunk with a ``finish_reason``, or the exception that ended the request. One
        prepared request may be started several times (``n`` choices). ``sampling``: as for ``prepare``.
        Raises ``EngineStopped`` after ``close``, ``UsageError`` if another backend prepared the request.
        """

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> Stream:
        """Prepare and start a request; iterate over the result for its chunks. Raises as ``prepare``.

        The chunks have reasoning apart from the answer, and ``sampling.grammar`` is that of the answer alone.
        """
        thinking = self.thinking(sampling)
        sampling = replace(sampling, grammar=reasoning_then(sampling.grammar, thinking))
        return QueuedStream(self, self.prepare(conversation, sampling), sampling, thinking)

    @property
    def chat_template(self) -> str:
        """The Jinja source of the chat template; "" if there is none, or the model runs on another server."""
        checkpoint = getattr(self, "checkpoint", None)
        if checkpoint is None:
            return ""
        try:
            return read_chat_template(checkpoint.folder)
        except CheckpointError:
            return ""

    def thinking(self, sampling: SamplingParams) -> Thinking | None:
        """How completions of a request with ``sampling`` contain reasoning, as text before the answer.

        None: they contain none, vlfit does not know, or a server behind this backend keeps it apart.
        """
        return self.thinking_with(sampling.template_variables)

    def thinking_with(self, variables: str | None) -> Thinking | None:
        """``thinking`` of requests with these ``SamplingParams.template_variables``."""
        template = self.chat_template
        return thinking_of_template(template, self.checkpoint.model_type, variables) if template else None

    def without_thinking(self, sampling: SamplingParams) -> SamplingParams:
        """``sampling`` with reasoning turned off, if the model's chat template has the switch for it."""
        if sampling.template_variables is not None or not reads_switch(self.chat_template):
            return sampling
        return replace(sampling, template_variables=NO_THINKING)

    @abstractmethod
    def close(self) -> None:
        """End all requests and release the memory. May be called more than once."""

    def account(self) -> EngineAccount:
        """Counters, settings and memory of the engine now. Never blocks, and wakes no sleeping engine."""
        raise NotImplementedError

    @property
    def expectation(self) -> "Expectation":
        """The plan of the loaded model: its ledger, and the time of a decode step if known."""
        raise NotImplementedError

    def ledger_rows(self) -> "tuple[Row, ...]":
        """Planned and actual memory, line by line."""
        raise NotImplementedError

    @property
    def asleep(self) -> bool:
        """Whether ``sleep`` has released the memory; always False without the capability ``sleep``."""
        return False

    def sleep(self, level: SleepLevel = "auto") -> "Future[SleepResult]":
        """Put the model to sleep once no request runs or waits: its memory on the device is released.

        Returns at once; the future completes when the model sleeps. Cancel the future before that to withdraw
        the call. The next request wakes the model. ``level``: where the weights are kept: ``ram``, ``files``
        (read again on waking) or ``auto``.
        """
        raise NotImplementedError

    def wake(self) -> "Future[SleepResult]":
        """Wake the model without a request. Returns at once; no effect if the model is awake.

        The future's exception is ``CannotWake`` if the memory is not free; the model then stays asleep.
        """
        raise NotImplementedError

    def when_lost(self, callback: Callable[[Exception], None]) -> None:
        """Call ``callback`` with the cause if the model's process dies by itself; at once if it already has.

        ``callback`` may be called from another thread.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_generates(backend: Backend) -> None:
    """Raise ``InvalidRequest`` for a model that writes no text: an embedding model, or a reranker."""
    if backend.capabilities.generates:
        return
    scores = backend.pooling is not None and backend.pooling.kind == "reranker"
    what, use = (
        ("a reranker", "Use /v1/rerank")
        if scores
        else ("an embedding model", "Use /v1/embeddings or vlfit embed")
    )
    raise InvalidRequest(
        f"{backend.model!r} is {what}: it writes no text",
        f"{use}; to chat, open another model, such as 4B.",
        param="model",
    )


def check_prepared(prepared: object, expected_class: type[P]) -> P:
    """Return ``prepared`` as an ``expected_class``. Raises ``UsageError`` if another backend prepared it."""
    if not isinstance(prepared, expected_class):
        raise UsageError(
            "the request was prepared by another backend", "Prepare and start it on the same one."
        )
    return prepared


class QueuedStream:
    """A ``Stream`` over any backend. The constructor starts the request; one thread may read.

    ``thinking``: how completions contain reasoning, which is split off; None: they are taken as they are.
    """

    def __init__(
        self,
        backend: Backend,
        prepared: Prepared,
        sampling: SamplingParams,
        thinking: Thinking | None = None,
    ) -> None:
        self._splitter = ThinkingSplitter(thinking) if thinking else None
        self._thoughts: list[str] = []
        self._images = prepared.images
        self._model = backend.model
        self._queue: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._done = False
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Chunk | None = None
        self.ticket = backend.start(prepared, sampling, self._queue.put)

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model saw of each picture; empty as long as the backend has not reported it."""
        return self._images

    def __iter__(self) -> Iterator[Chunk]:
        while not self._done:
            chunk = self._queue.get()
            if isinstance(chunk, Exception):
                self._done = True
                raise chunk
            if self._splitter is not None:
                chunk = self._splitter.split(chunk)
            self._images = chunk.images or self._images
            self._text.append(chunk.text)
            self._thoughts.append(chunk.reasoning)
            self._logprobs.extend(chunk.logprobs)
            if chunk.finish_reason is not None:
                self._done = True
                self._last = chunk
            yield chunk

    def answer(self) -> Answer:
        """Read to the end and return the whole completion, including chunks that were read before.

        Raises the error that ends the request, or ``UsageError`` if the stream was closed before its end.
        """
        for _ in self:
            pass
        last = self._last
        if last is None or last.finish_reason is None or last.usage is None:
            raise UsageError("the stream was closed before its end", "Read it to the end to get an answer.")
        return Answer(
            "".join(self._text),
            last.finish_reason,
            last.usage,
            self._model,
            self._images,
            last.timings,
            tuple(self._logprobs),
            last.pooled,
            "".join(self._thoughts),
        )

    def close(self) -> None:
        """Cancel the request, unless it has ended."""
        if not self._done:
            self._done = True
            self.ticket.cancel()
