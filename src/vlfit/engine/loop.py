"""The thread that drives an engine: builds it, takes requests from any thread, steps while there is work."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from vlfit.engine.account import EngineAccount
from vlfit.engine.engine import Engine, Progress
from vlfit.engine.sequence import Sequence
from vlfit.errors import EngineStopped

logger = logging.getLogger(__name__)


class EngineLoop:
    """Everything that touches the engine's state happens on this thread; others hand over or set a flag.

    The engine is built on it too. torch's OpenMP keeps a pool of threads for every thread that computes: with
    weights loaded on one and run on another there would be two, together more than there are cores, and
    decoding took half as long again (docs/log.md).
    """

    def __init__(self, build: Callable[[Progress], Engine], progress: Progress | None = None) -> None:
        """Raises what ``build`` raises. It is called with a function to report to, which stops it when the
        wait is interrupted.
        """
        self._inbox: deque[Sequence] = deque()
        self._wake = threading.Condition()
        self._closing = False
        built: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build, progress, built), name="vlfit-engine", daemon=True
        )
        self._thread.start()
        try:
            self.engine = built.result()
        except BaseException:  # also Ctrl-C while weights are loaded: they must not go on loading
            self.close()
            raise

    def submit(self, sequence: Sequence) -> None:
        """Hand a request to the engine. Raises ``EngineStopped`` after ``close``."""
        with self._wake:
            if self._closing:
                raise _stopped()
            self._inbox.append(sequence)
            self._wake.notify()

    def account(self) -> EngineAccount:
        """The engine's account, and who has come since its last step. Wakes nobody, waits for nobody."""
        account = self.engine.account()
        return replace(account, waiting=account.waiting + len(self._inbox))

    def cancel(self, sequence: Sequence) -> None:
        """Ask for the end of a request; its blocks are free before the next forward pass."""
        with self._wake:
            sequence.cancelled = True
            self._wake.notify()

    def close(self) -> None:
        """End all requests with ``EngineStopped`` and stop. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(
        self, build: Callable[[Progress], Engine], progress: Progress | None, built: Future[Engine]
    ) -> None:
        def report(what: str, share: float) -> None:
            if self._closing:
                raise _stopped()
            if progress is not None:
                progress(what, share)

        try:
            engine = build(report)
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(engine)
        while self._turn(engine):
            pass

    def _turn(self, engine: Engine) -> bool:
        """Wait for work, and do one step of it. False when it is time to end."""
        with self._wake:
            while not (self._inbox or self._closing or engine.busy):
                if not self._wake.wait(engine.pressure.idle_seconds):
                    break  # a step with nobody in it looks at the memory that is left
            arrivals = list(self._inbox)
            self._inbox.clear()
            closing = self._closing
        for sequence in arrivals:
            engine.add(sequence)
        if closing:
            engine.fail_all(_stopped())
            return False
        try:
            engine.step()
        except Exception as error:
            # The engine ends failing requests itself; what gets here is a fault of ours. Nobody may wait for
            # an answer that will not come.
            logger.exception("the engine failed in a step")
            engine.fail_all(error)
        return True


def _stopped() -> EngineStopped:
    return EngineStopped("the engine has stopped", "start it again")
