"""The ``Engine`` protocol: implemented by vlfit's native engine and by the one over transformers."""

from typing import Any, Protocol

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount, SleepState
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.engine.request import Listener, PreparedRequest, Request


class Engine(Protocol):
    """A model on a device.

    Any thread may call ``prepare``, ``prepare_text``, ``make_request``, ``submit``, ``cancel``, ``account``
    and ``interrupt``; all other methods are called on the engine's thread only (``engine_thread.py``).
    Each engine has its own classes of requests and prompts.
    """

    @property
    def options(self) -> EngineOptions: ...
    @property
    def context(self) -> int:
        """Most tokens of one request, prompt and completion."""
        ...

    @property
    def device(self) -> Any:
        """The engine's ``torch.device``."""
        ...

    @property
    def generation(self) -> GenerationDefaults:
        """The checkpoint's own sampling defaults and EOS tokens."""
        ...

    @property
    def prompt_class(self) -> type:
        """Class of ``PreparedRequest.prompt``."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any request is running or queued."""
        ...

    @property
    def asleep(self) -> SleepState | None:
        """Level and freed bytes of the current sleep; None while awake."""
        ...

    @property
    def idle_interval(self) -> float | None:
        """Seconds between calls of ``step`` while no request runs; None: it needs none then."""
        ...

    def prepare(
        self, conversation: Conversation, params: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> PreparedRequest[Any]:
        """Decode pictures, render the chat template, count tokens, check against the context.

        Raises ``PictureError``, ``InvalidRequest`` or ``DoesNotFit``.
        """
        ...

    def prepare_text(self, prompt: str | tuple[int, ...], params: SamplingParams) -> PreparedRequest[Any]:
        """``prepare`` for plain text or token ids, without a chat template."""
        ...

    def make_request(
        self, prepared: PreparedRequest[Any], params: SamplingParams, listener: Listener, /
    ) -> Request:
        """A new request for ``submit``, which reports to ``listener``: chunks, or one error.

        May be called several times with the same ``prepared``, for several answers to one prompt.
        """
        ...

    def submit(self, request: Any, /) -> None:
        """Queue a request from ``make_request`` for the next step. Any thread may call it."""
        ...

    def cancel(self, request: Any, /) -> None:
        """End a request before its next token. A request that has ended stays as it is."""
        ...

    def step(self) -> None:
        """Compute the next tokens of one or more requests and pass them to the listeners.

        Errors of a request go to its listener and end it; they are not raised.
        """
        ...

    def fail_all(self, error: Exception, /) -> None:
        """End every request, running or queued: its listener gets ``error``."""
        ...

    def sleep(self, level: SleepLevel, /) -> SleepState:
        """Free the device's memory until ``wake``. No request may be running or queued."""
        ...

    def wake(self) -> None:
        """Allocate the device's memory again and restore the weights.

        Raises ``CannotWake`` if the memory is not free; the engine then stays asleep.
        """
        ...

    def account(self) -> EngineAccount:
        """Counters, settings and memory of the engine now. Takes no lock and never blocks."""
        ...

    def interrupt(self) -> None:
        """End the running step early, because the engine is about to close."""
        ...

    def close(self) -> None:
        """Release what is not freed with the engine object itself. The engine is not used afterwards."""
        ...
