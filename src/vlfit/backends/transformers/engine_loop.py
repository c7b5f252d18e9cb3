"""The thread that an engine of any architecture lives on: one request at a time, first come first served.

Knows: who waits, and that nobody may wait for an answer that will not come. Does not know what runs.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from vlfit.api.outputs import Chunk
from vlfit.api.stats import EngineAccount
from vlfit.backends.transformers.generate import Request
from vlfit.backends.transformers.generate_engine import AnyEngine, Progress
from vlfit.backends.transformers.model_errors import in_one
from vlfit.engine.loop import build_here, stopped
from vlfit.errors import EngineStopped, OutOfMemory

logger = logging.getLogger(__name__)


class AnyLoop:
    """Builds the engine on its thread, as torch's threads belong to the one that computes."""

    def __init__(self, build: Callable[[Progress], AnyEngine], progress: Progress | None = None) -> None:
        """Raises what ``build`` raises."""
        self._queue: deque[Request] = deque()
        self._wake = threading.Condition()
        self._closing = False
        built: Future[AnyEngine] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build, progress, built), name="vlfit-transformers", daemon=True
        )
        try:
            self._thread.start()
            self.engine = built.result()
        except BaseException:  # also Ctrl-C while weights are loaded
            self._closing = True
            raise

    def submit(self, request: Request) -> None:
        """Queue ``request``. Raises ``EngineStopped`` after ``close``."""
        with self._wake:
            if self._closing:
                raise stopped()
            self._queue.append(request)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Ask for the end of a request, after the pass that runs; one that waits ends at once."""
        request.cancelled = True
        with self._wake:
            waited = request in self._queue
            if waited:
                self._queue.remove(request)
        if waited:
            _tell(request, request.last(Chunk("", finish_reason="cancelled")))

    def account(self) -> EngineAccount:
        """What the engine does and holds, and who waits."""
        return self.engine.account(len(self._queue))

    def close(self) -> None:
        """End all requests with ``EngineStopped`` and stop. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if hasattr(self, "engine"):
            self.engine.closing = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(
        self,
        build: Callable[[Progress], AnyEngine],
        progress: Progress | None,
        built: "Future[AnyEngine]",
    ) -> None:
        engine = build_here(build, progress, lambda: self._closing, built)
        if engine is None:
            return
        while (request := self._next()) is not None:
            self._answer(engine, request)
        for late in self._queue:
            _tell(late, stopped())
        self._queue.clear()
        engine.let_go()

    def _next(self) -> Request | None:
        """Who is next, once there is anybody; None when it is time to end."""
        with self._wake:
            while not self._queue and not self._closing:
                self._wake.wait()
            return None if self._closing else self._queue.popleft()

    def _answer(self, engine: AnyEngine, request: Request) -> None:
        """A model's code may raise anything: that ends this request, and no other."""
        try:
            engine.answer(request)
        except Exception as error:
            told = in_one(error, "the model was answering")
            error.__traceback__ = None  # it holds the tensors of the pass
            engine.failed(isinstance(told, OutOfMemory))
            if not isinstance(told, EngineStopped):
                logger.warning("a request failed: %s", told.message)
            _tell(request, told)


def _tell(request: Request, arrival: Chunk | Exception) -> None:
    try:
        request.listener(arrival)
    except Exception:
        logger.debug("a listener has gone away", exc_info=True)
