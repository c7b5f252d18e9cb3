"""``Engine``: what every engine in this process implements, vlfit's own and the one over transformers."""

from typing import Any, Protocol

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount, SleepState
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.engine.request import Listener, PreparedRequest, Request


class Engine(Protocol):
    """A model on a device.

    Any thread may call ``prepare``, ``prepare_text``, ``request``, ``submit``, ``cancel``, ``account`` and
    ``interrupt``; all other methods are called on the engine's thread only (``engine_thread.py``). Requests
    and prompts are of the engine's own classes.
    """

    @property
    def options(self) -> EngineOptions: ...
    @property
    def context(self) -> int:
        """Most tokens of one request, prompt and completion."""
        ...

    @property
    def device(self) -> Any: ...
    @property
    def generation(self) -> GenerationDefaults: ...
    @property
    def prompt_class(self) -> type:
        """What ``PreparedRequest.prompt`` is an instance of."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        ...

    @property
    def asleep(self) -> SleepState | None:
        """None while awake."""
        ...

    @property
    def idle_interval(self) -> float | None:
        """Seconds between steps while no request runs; None: an idle engine needs none."""
        ...

    def prepare(
        self, conversation: Conversation, params: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> PreparedRequest[Any]:
        """Decode pictures, render the chat template, count tokens, check against the context.

        Raises ``PictureError``, ``InvalidRequest`` or ``DoesNotFit``.
        """
        ...

    def prepare_text(self, prompt: str | tuple[int, ...], params: SamplingParams) -> PreparedRequest[Any]:
        """``prepare`` for plain text or token ids, without a template."""
        ...

    def request(
        self, prepared: PreparedRequest[Any], params: SamplingParams, listener: Listener, /
    ) -> Request:
        """A request ready to be submitted. One prepared request may become several of them."""
        ...

    def submit(self, request: Any, /) -> None:
        """Queue a request."""
        ...

    def cancel(self, request: Any, /) -> None:
        """End a request before its next token. A request that has ended stays as it is."""
        ...

    def step(self) -> None:
        """Compute the next tokens of one or more requests. A failure ends the requests it concerns."""
        ...

    def fail_all(self, error: Exception, /) -> None:
        """End every request with ``error``."""
        ...

    def sleep(self, level: SleepLevel, /) -> SleepState:
        """Give the device's memory back. No request may run or wait."""
        ...

    def wake(self) -> None:
        """Take the memory again. Raises ``CannotWake`` if it is not free; the engine then stays asleep."""
        ...

    def account(self) -> EngineAccount:
        """Work done and memory held. Takes no lock and waits for nothing."""
        ...

    def interrupt(self) -> None:
        """Cut the step under way short: the engine is about to close."""
        ...

    def close(self) -> None:
        """Release what the end of the thread does not."""
        ...
