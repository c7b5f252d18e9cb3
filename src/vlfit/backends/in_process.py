"""The base class of backends whose engine runs in this process, and the import of that engine."""

import atexit
import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import SleepLevel
from vlfit.api.outputs import Listener
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount, SleepResult
from vlfit.backends.base import Backend, Prepared, Ticket, check_prepared
from vlfit.models.registry import tool_call_syntax

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.checkpoint.source import Checkpoint
    from vlfit.engine.engine_thread import EngineThread
    from vlfit.engine.protocol import Engine
    from vlfit.engine.request import PreparedRequest, Request


class EngineTicket(Ticket):
    """The ticket of a request that an engine in this process has accepted."""

    def __init__(self, engine_thread: "EngineThread[Any]", request: "Request") -> None:
        self._engine_thread = engine_thread
        self._request = request

    def cancel(self) -> None:
        """End the request, at the latest after its next token; see ``Ticket``."""
        self._engine_thread.cancel(self._request)


class InProcessBackend(Backend):
    """A backend whose engine runs in this process, on ``engine_thread``. Closed at exit if it is still open.

    ``close`` ends the thread.
    """

    def __init__(self, checkpoint: "Checkpoint | AnyCheckpoint", engine_thread: "EngineThread[Any]") -> None:
        self._engine_thread = engine_thread
        self.checkpoint = checkpoint
        self.model = checkpoint.name
        self.tool_calls = tool_call_syntax(checkpoint.model_type)
        self.context = engine_thread.engine.context
        self.device = str(engine_thread.engine.device)
        atexit.register(self.close)

    @property
    def engine(self) -> "Engine":
        """The engine. Only its own thread may change its state."""
        engine: Engine = self._engine_thread.engine
        return engine

    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own generation settings, as ``SamplingParams.from_defaults`` reads them."""
        return SamplingParams.from_defaults(self.engine.generation)

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> "PreparedRequest[Any]":
        """Decode pictures, render the chat template, count tokens, check against the context.

        Runs on the caller's thread. Raises ``PictureError``, ``InvalidRequest`` or ``DoesNotFit``.
        """
        return self.engine.prepare(conversation, sampling, tools)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> "PreparedRequest[Any]":
        """``prepare`` for plain text or token ids, without a chat template."""
        return self.engine.prepare_text(prompt, sampling)

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        """Queue the request and return; ``listener`` is called on the engine's thread, as in
        ``Backend.start``.

        Raises ``EngineStopped`` after ``close``, ``UsageError`` if another backend prepared the request.
        """
        from vlfit.engine.request import PreparedRequest

        prepared_request = check_prepared(prepared, PreparedRequest)
        check_prepared(prepared_request.prompt, self.engine.prompt_class)
        request = self.engine.make_request(prepared_request, sampling, listener)
        self._engine_thread.submit(request)
        return EngineTicket(self._engine_thread, request)

    def account(self) -> EngineAccount:
        """Counters, settings and memory of the engine now. Never blocks."""
        return self._engine_thread.account()

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self.engine.asleep is not None

    def sleep(self, level: SleepLevel = "auto") -> "Future[SleepResult]":
        """Put the engine to sleep once no request runs or waits. Returns at once; see ``Backend.sleep``."""
        return self._engine_thread.sleep(level)

    def wake(self) -> "Future[SleepResult]":
        """Wake the engine without a request. Returns at once; see ``Backend.wake``."""
        return self._engine_thread.wake()

    def close(self) -> None:
        """End all requests, release the memory, and wait for the engine's thread to end.

        May be called more than once.
        """
        self._engine_thread.close()
        # Not before: Ctrl-C may interrupt the wait, and the program must not end beside a running engine.
        atexit.unregister(self.close)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer SIGINT to the end of the block.

    Importing torch runs C++ start-up code that aborts the process (SIGABRT) if a KeyboardInterrupt is raised
    within it. Only the main thread gets signals: in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if received:
        signal.raise_signal(signal.SIGINT)


SPIN_COUNT = "10000"


def import_engine() -> None:
    """Import the native engine and torch, with SIGINT deferred (``defer_interrupts``).

    Before that sets the environment variable ``GOMP_SPINCOUNT``, unless it or ``OMP_WAIT_POLICY`` is set.
    """
    # torch's OpenMP threads wait for each other by spinning, for milliseconds. On a machine whose cores have
    # other work, every small operation then lasts as long as a time slice of the scheduler: mini was 25 times
    # slower beside one busy process. Not spinning at all costs a quarter on a quiet machine; a short spin is
    # the middle (docs/log.md). OpenMP reads this when torch is loaded; what the user set stands.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    collects = gc.isenabled()
    gc.disable()  # imported objects stay; collecting among them takes a tenth of the import time
    try:
        with defer_interrupts():
            import vlfit.engine.engine  # noqa: F401
    finally:
        if collects:
            gc.enable()
