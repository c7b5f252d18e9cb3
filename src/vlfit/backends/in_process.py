"""What the backends of this process have in common: an engine on a thread of its own, and the way to it.

Knows: how a request gets to that thread, and that the thread ends with the program. Does not know which
engine it is, or how a request is prepared (``native.py``, ``backends/transformers/backend.py``).
"""

import atexit
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount
from vlfit.backends.base import Closing, Listener, Prepared, QueuedStream, Ticket

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.checkpoint.processor_files import GenerationDefaults
    from vlfit.checkpoint.source import Checkpoint


class AnEngine(Protocol):
    """What is asked of an engine, whichever it is."""

    @property
    def context(self) -> int: ...
    @property
    def device(self) -> Any: ...
    @property
    def generation(self) -> "GenerationDefaults": ...


class Loop(Protocol):
    """The thread that an engine lives on: ``EngineLoop`` or ``AnyLoop``. Each takes requests of its own."""

    @property
    def engine(self) -> AnEngine: ...
    def account(self) -> EngineAccount: ...
    def submit(self, request: Any, /) -> None: ...
    def cancel(self, request: Any, /) -> None: ...
    def close(self) -> None: ...


class InProcess(Closing, ABC):
    """Close it (or use it in a ``with`` block) to give the memory back; the end of the program does, too."""

    checkpoint: "Checkpoint | AnyCheckpoint"
    _loop: Loop

    def __init__(self, checkpoint: "Checkpoint | AnyCheckpoint", loop: Loop) -> None:
        self.checkpoint = checkpoint
        self._loop = loop
        atexit.register(self.close)

    @abstractmethod
    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared: ...
    @abstractmethod
    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared: ...
    @abstractmethod
    def _request(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Any:
        """What the engine's thread takes. Raises ``UsageError`` for what another backend prepared."""

    @property
    def model(self) -> str:
        return self.checkpoint.name

    @property
    def context(self) -> int:
        """Most tokens of one request, prompt and completion."""
        return self._loop.engine.context

    @property
    def device(self) -> str:
        return str(self._loop.engine.device)

    def account(self) -> EngineAccount:
        """What the engine has done and what it holds. Any thread may ask; the engine notices nothing."""
        return self._loop.account()

    def default_sampling(self) -> SamplingParams:
        return SamplingParams.usual(self._loop.engine.generation)

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        request = self._request(prepared, sampling, listener)
        self._loop.submit(request)
        return LoopTicket(partial(self._loop.cancel, request))

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> QueuedStream:
        return QueuedStream(self, self.prepare(conversation, sampling), sampling)

    def close(self) -> None:
        self._loop.close()
        # Not before: Ctrl-C may come while it waits, and a program must not end beside an engine that runs.
        atexit.unregister(self.close)


@dataclass(frozen=True, slots=True)
class LoopTicket:
    """A request on an engine's thread."""

    cancel: Callable[[], None]


# Holds Ctrl-C back while something runs that does not survive being interrupted. Knows nothing else.


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Within the block SIGINT is only noted; after it, it does what it would have done.

    Importing torch runs C++ start-up code that aborts the process (SIGABRT) when a KeyboardInterrupt comes
    out of it half-way. Only the main thread gets signals, so elsewhere nothing needs to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if noted:
        signal.raise_signal(signal.SIGINT)
