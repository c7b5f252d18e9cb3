"""The thread that drives an engine: takes requests from any thread and steps while there is work."""

import logging
import threading
from collections import deque

from vlfit.engine.engine import Engine
from vlfit.engine.sequence import Sequence
from vlfit.errors import EngineStopped

logger = logging.getLogger(__name__)


class EngineLoop:
    """Everything that touches the engine's state happens on this thread; others hand over or set a flag."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: deque[Sequence] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="vlfit-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Hand a request to the engine. Raises ``EngineStopped`` after ``close``."""
        with self._wake:
            if self._closing:
                raise EngineStopped("the engine has stopped", "start it again")
            self._inbox.append(sequence)
            self._wake.notify()

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

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._closing or self.engine.busy):
                    self._wake.wait()
                arrivals = list(self._inbox)
                self._inbox.clear()
                closing = self._closing
            for sequence in arrivals:
                self.engine.add(sequence)
            if closing:
                self.engine.fail_all(EngineStopped("the engine has stopped", "start it again"))
                return
            try:
                self.engine.step()
            except Exception as error:
                # The engine ends failing requests itself; what gets here is a fault of ours. Nobody may wait
                # for an answer that will not come.
                logger.exception("the engine failed in a step")
                self.engine.fail_all(error)
