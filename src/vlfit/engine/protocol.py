"""The ``Engine`` protocol: implemented by vlfit's native engine and by the one over transformers."""

from typing import Any, Protocol

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.outputs import Listener
from vlfit.api.pooling import PoolingParams
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount, SleepState
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.engine.request import PreparedRequest, Request


class Engine(Protocol):
    """A model on a device, and its requests.

    A request goes through ``prepare`` or ``prepare_text``, ``make_request`` and ``submit``; then calls of
    ``step`` compute its tokens while ``busy``. Any thread may call these first four, ``cancel``, ``account``
    and ``interrupt``. Only the engine's thread (``engine_thread.py``) calls ``step``, ``fail_all``,
    ``sleep``, ``wake`` and ``close``. An engine takes only requests and prompts that it made itself.
    """

    @property
    def options(self) -> EngineOptions:
        """The options that the engine was built with."""
        ...

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
        """Seconds between calls of ``step`` while no request is running or queued; None: none are needed."""
        ...

    def prepare(
        self, conversation: Conversation, params: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> PreparedRequest[Any]:
        """Render the chat template, decode pictures, count tokens and check them against the context.

        Queues nothing. Raises ``PictureError``, ``InvalidRequest``, or ``DoesNotFit`` if the prompt and
        ``params.max_tokens`` exceed ``context``.
        """
        ...

    def prepare_text(self, prompt: str | tuple[int, ...], params: SamplingParams) -> PreparedRequest[Any]:
        """``prepare`` for plain text or token ids, without a chat template."""
        ...

    def prepare_pooled(
        self, prompt: Conversation | tuple[int, ...], pooling: PoolingParams
    ) -> PreparedRequest[Any]:
        """``prepare`` a request for a vector or a score, which ends with its prompt.

        Its only chunk has ``pooled``. ``prompt``: a conversation, rendered as for a chat, or token ids, taken
        as they are. Raises ``InvalidRequest`` for a task that the model does not have, ``UsageError`` if the
        engine has none.
        """
        ...

    def make_request(
        self, prepared: PreparedRequest[Any], params: SamplingParams, listener: Listener, /
    ) -> Request:
        """A new request for ``submit``, for one answer to ``prepared``.

        ``listener`` is called on the engine's thread or by ``cancel``: with each ``Chunk``, the last of which
        has a ``finish_reason``, or once with an exception if the request fails. For several answers to one
        prompt, make several requests from the same ``prepared``. Raises ``DoesNotFit`` as ``prepare`` does.
        """
        ...

    def submit(self, request: Any, /) -> None:
        """Queue a request from ``make_request`` for the next step. Any thread may call it."""
        ...

    def cancel(self, request: Any, /) -> None:
        """End a request, at the latest after its next token, with the ``finish_reason`` "cancelled".

        Does nothing for a request that has ended.
        """
        ...

    def step(self) -> None:
        """Compute the next tokens of one or more requests and pass them to the requests' listeners.

        Also starts submitted requests and ends cancelled ones. An error of a request goes to its listener and
        ends the request; it is not raised.
        """
        ...

    def fail_all(self, error: Exception, /) -> None:
        """End every request, running or queued: its listener gets ``error``."""
        ...

    def sleep(self, level: SleepLevel, /) -> SleepState:
        """Free the device's memory until ``wake``. No request may be running or queued.

        An engine that sleeps with its weights in RAM is called again with "files", to free that RAM, too.
        ``level``: where the weights wait: "ram", "files" (read again by ``wake``) or "auto". Raises
        ``VlfitError`` if that is not possible; the engine then stays awake.
        """
        ...

    def wake(self) -> None:
        """Allocate the device's memory again and restore the weights. Does nothing if awake.

        Raises ``CannotWake`` if the memory is not free; the engine then stays asleep and may be woken later.
        """
        ...

    def account(self) -> EngineAccount:
        """Counters, settings and memory of the engine now. Takes no lock and never blocks."""
        ...

    def interrupt(self) -> None:
        """Let the running ``step`` return early, because ``close`` follows. An engine may ignore it."""
        ...

    def close(self) -> None:
        """Release memory that would outlive the engine object. No method may be called afterwards."""
        ...
