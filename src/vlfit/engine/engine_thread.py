"""The thread that builds an engine, steps it while it has requests, puts it to sleep and wakes it.

The engine sleeps after ``EngineOptions.idle_sleep`` seconds without requests, or on ``EngineThread.sleep``;
the next request wakes it.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, NoReturn, TypeVar

from vlfit.api.engine_options import SleepLevel
from vlfit.api.progress import LoadProgress
from vlfit.api.stats import EngineAccount, SleepResult
from vlfit.engine.device import limit_threads_to_cores
from vlfit.engine.protocol import Engine
from vlfit.engine.request import Request
from vlfit.errors import EngineLost, EngineStopped, VlfitError
from vlfit.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

INTERRUPT_SECONDS = 5.0  # for a start that was interrupted to end; transformers' loading cannot be stopped

E = TypeVar("E", bound=Engine)


class EngineThread(Generic[E]):
    """Owns an engine: builds, steps, sleeps, wakes and closes it on one thread of its own.

    All methods may be called from any thread. The engine is built on that thread too, because torch's OpenMP
    keeps a thread pool for every thread that computes: with weights loaded on one thread and run on another
    there were two pools, more threads than cores, and decoding took half as long again (docs/log.md).
    """

    def __init__(self, build: Callable[[LoadProgress], E], progress: LoadProgress | None = None) -> None:
        """Start the thread, call ``build`` on it and wait for the engine; raises what ``build`` raises.

        ``build`` gets a callback to report its progress to, which calls ``progress``. If the caller is
        interrupted (Ctrl-C), the next report raises ``EngineStopped``, so that loading ends too.
        """
        self._sleep_calls: list[tuple[SleepLevel, Future[SleepResult]]] = []
        self._wake_calls: list[Future[SleepResult]] = []
        self._last_active = time.monotonic()
        self._condition = threading.Condition()
        self._closing = False
        self._lost: EngineLost | None = None
        self._engine: E | None = None
        built: Future[E] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build, progress, built), name="vlfit-engine", daemon=True
        )
        try:
            self._thread.start()
            self._engine = built.result()
        except BaseException:  # also Ctrl-C while weights are loaded: loading must not go on
            self.close(INTERRUPT_SECONDS)
            raise

    @property
    def engine(self) -> E:
        """The engine. Only methods that any thread may call (see ``Engine``) are for the caller."""
        assert self._engine is not None  # else __init__ has raised
        return self._engine

    def submit(self, request: Request) -> None:
        """Queue a request; a sleeping engine wakes for it, and if it cannot, the request fails.

        Raises ``EngineStopped`` after ``close``, ``EngineLost`` if the thread has failed.
        """
        with self._condition:
            self._check_open()
            self.engine.submit(request)
            self._condition.notify()

    def cancel(self, request: Request) -> None:
        """End a request, at the latest after its next token. Does nothing for one that has ended."""
        with self._condition:
            self.engine.cancel(request)
            self._condition.notify()

    def sleep(self, level: SleepLevel = "auto") -> "Future[SleepResult]":
        """Put the engine to sleep as soon as no request is running or queued. Returns at once.

        The future has the result, or the exception of ``Engine.sleep``. While requests are left, cancelling
        the future withdraws the call; so does ``wake``, with a result that has ``asleep`` None. Raises
        ``EngineStopped`` after ``close``, ``EngineLost`` if the thread has failed.
        """
        with self._condition:
            self._check_open()
            self._sleep_calls.append((level, Future()))
            self._condition.notify()
            return self._sleep_calls[-1][1]

    def wake(self) -> "Future[SleepResult]":
        """Wake the engine without a request. Returns at once.

        The future has the result (``changed`` False if the engine was awake), or the exception of
        ``Engine.wake``. Raises ``EngineStopped`` after ``close``, ``EngineLost`` if the thread has failed.
        """
        with self._condition:
            self._check_open()
            self._wake_calls.append(Future())
            self._condition.notify()
            return self._wake_calls[-1]

    def account(self) -> EngineAccount:
        """``Engine.account``, read on the calling thread without a lock."""
        return self.engine.account()

    def close(self, timeout: float | None = None) -> None:
        """End all requests with ``EngineStopped``, close the engine and wait for the thread to end.

        Waits at most ``timeout`` seconds (None: without limit) and then returns, although the thread may
        still run. May be called more than once.
        """
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._engine is not None:
            self._engine.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _check_open(self) -> None:
        if self._closing:
            raise self._lost or engine_stopped_error()

    def _run(
        self, build: Callable[[LoadProgress], E], progress: LoadProgress | None, built: "Future[E]"
    ) -> None:
        def report(what: str, share: float) -> None:
            if self._closing:
                raise engine_stopped_error()
            if progress is not None:
                progress(what, share)

        limit_threads_to_cores()
        try:
            engine = build(report)
        except BaseException as error:
            built.set_exception(error)
            return
        self._last_active = time.monotonic()
        built.set_result(engine)
        try:
            while self._run_once(engine):
                pass
            engine.close()
        except BaseException as error:
            # A bug. No request may wait for an engine that is gone, neither those here nor those to come.
            logger.exception("the engine's thread failed")
            self._fail(EngineLost(f"the engine is lost: {type(error).__name__}", "Start it again."), engine)

    def _fail(self, error: EngineLost, engine: E) -> None:
        with self._condition:
            self._closing, self._lost = True, error
            futures = [*self._wake_calls, *(future for _, future in self._sleep_calls)]
        _settle(futures, partial(_raise, error))
        engine.fail_all(error)

    def _run_once(self, engine: E) -> bool:
        """Wait for work and do one step of it. False: the thread is to end."""
        with self._condition:
            while not (engine.busy or self._closing or self._sleep_calls or self._wake_calls):
                if not self._condition.wait(self._wait_seconds(engine)):
                    break  # a step without requests checks the free memory
            closing = self._closing
            wakes, self._wake_calls = self._wake_calls, []
            sleeps: list[tuple[SleepLevel, Future[SleepResult]]] = []
            if closing or wakes or not engine.busy:
                sleeps, self._sleep_calls = self._sleep_calls, []
        futures = [*wakes, *(future for _, future in sleeps)]
        if closing:
            engine.fail_all(engine_stopped_error())
            _settle(futures, partial(_raise, engine_stopped_error()))
            return False
        if wakes:
            _settle(futures, lambda: self._wake_engine(engine))
        else:
            for level, future in sleeps:
                _settle([future], partial(self._put_to_sleep, engine, level))
        if self._ready_to_step(engine):
            self._step(engine)
        return True

    def _wait_seconds(self, engine: E) -> float | None:
        """Seconds until an engine without requests has something to do; None: nothing."""
        if engine.asleep is not None:
            return None
        idle = engine.options.idle_sleep
        until_sleep = None if idle is None else max(self._last_active + idle - time.monotonic(), 0.0)
        times = (until_sleep, engine.idle_interval)
        return min((seconds for seconds in times if seconds is not None), default=None)

    def _ready_to_step(self, engine: E) -> bool:
        """Whether there is a step to run. Wakes a sleeping engine that has requests; puts one that has been
        idle for long enough to sleep.
        """
        asleep, idle = engine.asleep is not None, engine.options.idle_sleep
        try:
            if engine.busy:
                self._wake_engine(engine)
                return True
            if not asleep and idle is not None and time.monotonic() >= self._last_active + idle:
                self._last_active = time.monotonic()  # if it fails, the next attempt comes after as long
                self._put_to_sleep(engine, "auto")
                return False
        except Exception as error:
            logger.warning("%s", error, exc_info=not isinstance(error, VlfitError))
            engine.fail_all(error)
            return False
        return not asleep

    def _step(self, engine: E) -> None:
        busy = engine.busy
        try:
            engine.step()
        except Exception as error:
            # A bug: the engine itself ends requests that fail. No request may wait for ever.
            logger.exception("the engine failed in a step")
            engine.fail_all(error)
        if busy:
            self._last_active = time.monotonic()

    def _put_to_sleep(self, engine: E, level: SleepLevel) -> SleepResult:
        if engine.asleep is not None:
            if not (level == "files" and engine.asleep.level == "ram"):
                return SleepResult(engine.asleep, False, 0.0)
            began = time.monotonic()
            freed = format_bytes(engine.asleep.ram_bytes)
            asleep = engine.sleep(level)
            logger.info("still asleep: %s of RAM given back, the weights are in their files", freed)
            return SleepResult(asleep, True, round(time.monotonic() - began, 3))
        asleep = engine.sleep(level)
        where = f"{format_bytes(asleep.ram_bytes)} of RAM" if asleep.ram_bytes else "their files"
        logger.info(
            "asleep: %s given back in %s, the weights are in %s",
            *(format_bytes(asleep.freed_bytes), format_seconds(asleep.seconds), where),
        )
        return SleepResult(asleep, True, asleep.seconds)

    def _wake_engine(self, engine: E) -> SleepResult:
        if engine.asleep is None:
            return SleepResult(None, False, 0.0)
        began = time.monotonic()
        engine.wake()
        self._last_active = time.monotonic()
        seconds = round(self._last_active - began, 3)
        logger.info("awake again after %s", format_seconds(seconds))
        return SleepResult(None, True, seconds)


def engine_stopped_error() -> EngineStopped:
    """The error of requests that were unfinished when the engine closed, or were submitted later."""
    return EngineStopped("the engine has stopped", "Start it again.")


def _settle(futures: list["Future[SleepResult]"], action: Callable[[], SleepResult]) -> None:
    """Run ``action`` once and give its result, or its exception, to all futures not cancelled by now."""
    pending = [future for future in futures if future.set_running_or_notify_cancel()]
    if not pending:
        return
    try:
        result = action()
    except Exception as error:
        for future in pending:
            future.set_exception(error)
        return
    for future in pending:
        future.set_result(result)


def _raise(error: Exception) -> NoReturn:
    raise error
