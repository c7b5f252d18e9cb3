"""The thread that drives an engine: builds it, takes requests from any thread, steps while there is work.

When nothing has come for as long as the engine's options say, or somebody asks for it, it lets the engine
sleep; the next request wakes it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from vlfit.api.engine_options import Park
from vlfit.api.stats import EngineAccount, Rest
from vlfit.engine.device import keep_to_own_cores
from vlfit.engine.engine import Engine, Progress
from vlfit.engine.scheduling.sequence import Sequence
from vlfit.errors import EngineLost, EngineStopped, VlfitError
from vlfit.units import format_bytes, format_seconds

# How the thread of an engine begins: it builds the engine that it will run, if anybody still wants it.
#
# Knows: who waits for it. Does not know which engine it is, or what the thread does then (``loop.py``,
# ``backends/transformers/engine_loop.py``).


BuildProgress = Callable[[str, float], None]
E = TypeVar("E")


def build_here(
    build: Callable[[BuildProgress], E],
    progress: BuildProgress | None,
    unwanted: Callable[[], bool],
    built: Future[E],
) -> E | None:
    """What ``build`` builds, which ``built`` has then, too; None where it fails, and ``built`` has why.

    ``progress``, if there is one, is told what ``build`` reports. The next report after the engine has become
    ``unwanted`` ends it with ``EngineStopped``.
    """

    def report(what: str, share: float) -> None:
        if unwanted():
            raise stopped()
        if progress is not None:
            progress(what, share)

    keep_to_own_cores()
    try:
        engine = build(report)
    except BaseException as error:
        built.set_exception(error)
        return None
    built.set_result(engine)
    return engine


def stopped() -> EngineStopped:
    """What requests are told that end because the engine does, or come after it."""
    return EngineStopped("the engine has stopped", "start it again")


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
        self._sleepers: list[tuple[Park, Future[Rest]]] = []
        self._wakers: list[Future[Rest]] = []
        self._active = time.monotonic()
        self._wake = threading.Condition()
        self._closing = False
        self._lost: EngineLost | None = None
        built: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build, progress, built), name="vlfit-engine", daemon=True
        )
        try:
            self._thread.start()
            self.engine = built.result()
        except BaseException:  # also Ctrl-C while weights are loaded: they must not go on loading
            self.close()
            raise

    def submit(self, sequence: Sequence) -> None:
        """Hand a request to the engine. Raises ``EngineStopped`` after ``close``."""
        with self._wake:
            self._check_open()
            self._inbox.append(sequence)
            self._wake.notify()

    def sleep(self, park: Park = "auto") -> "Future[Rest]":
        """Let the engine sleep as soon as nothing runs or waits; at once if so. Cancelling the future in time
        withdraws the wish, and so does ``wake``: the result says then that it is awake. Raises
        ``EngineStopped`` after ``close``; the future has what ``Sleep.fall_asleep`` raises.
        """
        with self._wake:
            self._check_open()
            self._sleepers.append((park, Future()))
            self._wake.notify()
            return self._sleepers[-1][1]

    def wake(self) -> "Future[Rest]":
        """Wake the engine without a request. Raises ``EngineStopped`` after ``close``; the future has what
        ``Sleep.wake`` raises.
        """
        with self._wake:
            self._check_open()
            self._wakers.append(Future())
            self._wake.notify()
            return self._wakers[-1]

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
        # One whose start was interrupted cannot be waited for, perhaps; it ends by itself.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _check_open(self) -> None:
        if self._closing:
            raise self._lost or stopped()

    def _run(
        self, build: Callable[[Progress], Engine], progress: Progress | None, built: Future[Engine]
    ) -> None:
        engine = build_here(build, progress, lambda: self._closing, built)
        if engine is None:
            return
        self._active = time.monotonic()
        try:
            while self._turn(engine):
                pass
        except BaseException as error:
            # Nobody is to wait for an engine that is not there, neither who has come nor who comes now.
            logger.exception("the engine's thread ended by a mistake of ours")
            self._end_by(EngineLost(f"the engine is lost: {type(error).__name__}", "start it again"), engine)

    def _end_by(self, error: EngineLost, engine: Engine) -> None:
        with self._wake:
            self._closing, self._lost = True, error
            late, wishes = [*self._inbox], [*self._wakers, *(wish for _, wish in self._sleepers)]
        for sequence in late:
            sequence.listener(error)
        _settle(wishes, partial(_raise, error))
        engine.fail_all(error)

    def _turn(self, engine: Engine) -> bool:
        """Wait for work, and do one step of it. False when it is time to end."""
        with self._wake:
            while not (self._inbox or self._closing or engine.busy or self._sleepers or self._wakers):
                if not self._wake.wait(self._patience(engine)):
                    break  # a step with nobody in it looks at the memory that is left
            arrivals = list(self._inbox)
            closing = self._closing
            wakers, self._wakers = self._wakers, []
            sleepers: list[tuple[Park, Future[Rest]]] = []
            if closing or wakers or not (arrivals or engine.busy):
                sleepers, self._sleepers = self._sleepers, []
        for sequence in arrivals:
            engine.add(sequence)
            self._inbox.popleft()  # not before: who is nowhere would wait for ever
        if closing:
            engine.fail_all(stopped())
            for wish in [*wakers, *(wish for _, wish in sleepers)]:
                if wish.set_running_or_notify_cancel():
                    wish.set_exception(stopped())
            return False
        if wakers:
            _settle([*wakers, *(wish for _, wish in sleepers)], lambda: self._awake(engine))
        else:
            for park, wish in sleepers:
                _settle([wish], partial(self._asleep, engine, park))
        if self._is_up(engine):
            self._step(engine)
        return True

    def _patience(self, engine: Engine) -> float | None:
        """Seconds to wait for somebody before something is to be done; None: nothing is."""
        if engine.sleep.asleep is not None:
            return None
        idle, look = engine.options.idle_sleep, engine.pressure.idle_seconds
        left = None if idle is None else max(self._active + idle - time.monotonic(), 0.0)
        return min((seconds for seconds in (left, look) if seconds is not None), default=None)

    def _is_up(self, engine: Engine) -> bool:
        """Whether there is a step to take. A sleeping engine wakes if somebody wants it; one that nobody has
        wanted for long falls asleep.
        """
        asleep, idle = engine.sleep.asleep is not None, engine.options.idle_sleep
        try:
            if engine.busy:
                self._awake(engine)
                return True
            if not asleep and idle is not None and time.monotonic() >= self._active + idle:
                self._active = time.monotonic()  # if it cannot, it tries again after as long
                self._asleep(engine, "auto")
                return False
        except Exception as error:
            logger.warning("%s", error, exc_info=not isinstance(error, VlfitError))
            engine.fail_all(error)
            return False
        return not asleep

    def _step(self, engine: Engine) -> None:
        busy = engine.busy
        try:
            engine.step()
        except Exception as error:
            # The engine ends failing requests itself; what gets here is a fault of ours. Nobody may wait for
            # an answer that will not come.
            logger.exception("the engine failed in a step")
            engine.fail_all(error)
        if busy:
            self._active = time.monotonic()

    def _asleep(self, engine: Engine, park: Park) -> Rest:
        if engine.sleep.asleep is not None:
            return Rest(engine.sleep.asleep, False, 0.0)
        asleep = engine.sleep.fall_asleep(park)
        where = f"{format_bytes(asleep.ram)} of RAM" if asleep.ram else "their files"
        logger.info(
            "asleep: %s given back in %s, the weights are in %s",
            *(format_bytes(asleep.freed), format_seconds(asleep.seconds), where),
        )
        return Rest(asleep, True, asleep.seconds)

    def _awake(self, engine: Engine) -> Rest:
        if engine.sleep.asleep is None:
            return Rest(None, False, 0.0)
        began = time.monotonic()
        engine.sleep.wake()
        self._active = time.monotonic()
        seconds = round(self._active - began, 3)
        logger.info("awake again after %s", format_seconds(seconds))
        return Rest(None, True, seconds)


def _settle(wishes: list[Future[Rest]], do: Callable[[], Rest]) -> None:
    """Do what all ``wishes`` that were not withdrawn ask for, and tell them what came of it."""
    wanted = [wish for wish in wishes if wish.set_running_or_notify_cancel()]
    if not wanted:
        return
    try:
        rest = do()
    except Exception as error:
        for wish in wanted:
            wish.set_exception(error)
        return
    for wish in wanted:
        wish.set_result(rest)


def _raise(error: Exception) -> Rest:
    raise error
