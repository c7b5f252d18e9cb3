"""Which of several models is in memory: requests wait in line for theirs, and one change happens at a time.

The line is first come, first served by model: the model of the request that has waited longest is brought up
next, and everybody who waits for it goes in together. If it does not fit beside the models in memory, the
least recently used of these are put to sleep, each only after a minimum stay and once its requests are
answered. Requests for a model that has to go wait behind those it goes for, so that nobody waits for ever.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from vlfit.api.engine_options import SleepLevel
from vlfit.api.stats import SleepResult
from vlfit.errors import DoesNotFit, EngineStopped, OutOfMemory, VlfitError
from vlfit.units import format_seconds

log = logging.getLogger("vlfit.server")

State = Literal["unloaded", "loading", "ready", "sleeping"]

MIN_STAY = 5.0  # seconds that a model stays in memory while it has requests
MAX_STAY = 60.0
STAY_PER_CHANGE = 2.0  # so that at most a third of the time goes into changes
IDLE_GRACE = 0.25  # seconds without a request that end a stay: a client's next one comes sooner
FAILURE_SECONDS = 10.0  # until a model that could not be brought up is tried again


class Switchable(Protocol):
    """A model that can be brought into memory and put to sleep.

    Only the line calls ``bring_up`` and ``put_down``, one at a time over all models, and ``put_down`` only
    while no request uses the model.
    """

    @property
    def name(self) -> str:
        """Its name, unique in a line."""
        ...

    @property
    def state(self) -> State:
        """Where the weights are.

        ``ready``: in memory; ``sleeping``: was loaded before; ``unloaded``: was not. Never ``loading``.
        """
        ...

    async def bring_up(self) -> None:
        """Load or wake the model. Raises a ``VlfitError``; the model is then as before."""

    async def put_down(self, level: SleepLevel) -> SleepResult:
        """Put the model to sleep; for one that sleeps in RAM, ``files`` frees that, too."""
        ...


Fits = Callable[[Switchable, Sequence[Switchable]], Awaitable[bool]]


@dataclass
class _Place:
    """A model in the line.

    ``users``: holds on it. ``gated``: new requests wait, as it is to sleep. ``ready_since``, ``last_used``:
    by the line's clock; the latter is when the last hold ended. ``failure``: why it was not brought up, until
    ``failed_until``.
    """

    model: Switchable
    users: int = 0
    gated: bool = False
    loading: bool = False
    waiters: list["_Waiter"] = field(default_factory=list)
    ready_since: float = 0.0
    last_used: float = 0.0
    failure: VlfitError | None = None
    failed_until: float = float("-inf")
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> State:
        return "loading" if self.loading else self.model.state

    @property
    def admits(self) -> bool:
        return self.state == "ready" and not self.gated

    @property
    def waiting(self) -> int:
        """Requests in line for it; without those whose clients have just left."""
        return sum(not waiter.admitted.done() for waiter in self.waiters)


@dataclass(frozen=True, slots=True)
class _Waiter:
    number: int  # in order of arrival over all models
    admitted: "asyncio.Future[None]"


class Hold:
    """Keeps a model in memory for the ``count`` completions of a request.

    Call ``release_one`` as each ends, ``close`` when the request is over; then the model may go.
    """

    def __init__(self, release: Callable[[], None], count: int) -> None:
        self._release = release
        self._count = count

    def release_one(self) -> None:
        """Release the share of one completion, if any is left."""
        if self._count:
            self._count -= 1
            if not self._count:
                self._release()

    def close(self) -> None:
        """Release what is left. May be called more than once."""
        if self._count:
            self._count = 1
            self.release_one()


class ModelLine:
    """Requests in line for models of which not all fit into memory at once. Belongs to one event loop.

    ``fits``: whether a model fits into memory beside those that are there. ``min_stay``: seconds that a
    model stays once it is in memory, if others wait for its memory; twice as long as the last change took, if
    that is more, at most ``MAX_STAY``. The stay ends early after ``idle_grace`` seconds without a request.
    ``idle_sleep``: seconds without a request after which a model sleeps; None: only if its memory is needed.
    ``clock``: returns seconds.
    """

    def __init__(
        self,
        models: Iterable[Switchable],
        fits: Fits,
        *,
        min_stay: float = MIN_STAY,
        idle_grace: float = IDLE_GRACE,
        idle_sleep: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = {model.name: _Place(model) for model in models}
        self._fits = fits
        self._min_stay = min_stay
        self._idle_grace = idle_grace
        self._idle_sleep = idle_sleep
        self._clock = clock
        self._numbers = count()
        self._lock = asyncio.Lock()  # held during a change
        self._happened = asyncio.Event()  # a hold ended, or a request left the line
        self._runner: asyncio.Task[None] | None = None
        self._sleeps: set[asyncio.Task[None]] = set()
        self._closed: EngineStopped | None = None
        self.num_changes = 0
        self.last_change_seconds = 0.0
        now = clock()
        for place in self._places.values():
            place.ready_since = place.last_used = now

    def begin(self) -> None:
        """Let models that are in memory already sleep after ``idle_sleep``. Call on the event loop."""
        if self._idle_sleep is not None:
            for place in self._places.values():
                self._set_idle_timer(place, self._idle_sleep)

    def add(self, model: Switchable) -> None:
        """Add a model, at the end of the order."""
        now = self._clock()
        self._places[model.name] = _Place(model, ready_since=now, last_used=now)

    def state(self, name: str) -> State:
        """The state of a model."""
        return self._places[name].state

    def in_use(self, name: str) -> int:
        """How many requests hold a model or wait for it."""
        return self._places[name].users + self._places[name].waiting

    def waiting(self, name: str) -> int:
        """How many requests wait in line for a model."""
        return self._places[name].waiting

    def idle_seconds(self, name: str) -> float:
        """Seconds since the last request for a model ended, or since it was added; 0 while one runs."""
        return 0.0 if self.in_use(name) else self._clock() - self._places[name].last_used

    @property
    def stay(self) -> float:
        """Seconds that a model stays in memory while it has requests and others wait."""
        return max(self._min_stay, min(STAY_PER_CHANGE * self.last_change_seconds, MAX_STAY))

    async def acquire(self, name: str, completions: int = 1) -> Hold:
        """Wait until the model is in memory, and keep it there until the result is closed.

        Cancelling leaves the line. Raises what bringing it up raises, also what that raised less than
        ``FAILURE_SECONDS`` ago, and ``EngineStopped`` after ``close``.
        """
        place = self._places[name]
        if self._closed is not None:
            raise self._closed
        if place.admits:
            place.users += 1
        else:
            if place.failure is not None and self._clock() < place.failed_until:
                raise place.failure.with_traceback(None)
            await self._wait_in_line(place)
        return Hold(lambda: self._leave(place), completions)

    async def sleep(self, name: str, level: SleepLevel = "auto") -> SleepResult:
        """Put a model to sleep once its running requests are answered; later ones wait, and wake it again.

        Cancelling withdraws the call while requests run. Raises what ``put_down`` raises.
        """
        place = self._places[name]
        async with self._lock:
            place.gated = True
            try:
                while place.users:
                    await self._next_event(None)
                return await place.model.put_down(level)
            finally:
                self._open_gate(place)

    async def wake(self, name: str) -> SleepResult:
        """Bring a model up without a request, in its turn. Raises as ``acquire``."""
        changed = self._places[name].state != "ready"
        began = self._clock()
        (await self.acquire(name)).close()
        return SleepResult(None, changed, round(self._clock() - began, 3) if changed else 0.0)

    def close(self) -> None:
        """Fail all waiting requests with ``EngineStopped``. Starts no further change and waits for none."""
        self._closed = EngineStopped("the server is stopping", "Try again when it is back.")
        for task in (self._runner, *self._sleeps):
            if task is not None:
                task.cancel()
        for place in self._places.values():
            self._fail(place, self._closed)
            if place.idle_timer is not None:
                place.idle_timer.cancel()

    # --- the line --------------------------------------------------------------------------------------

    async def _wait_in_line(self, place: _Place) -> None:
        waiter = _Waiter(next(self._numbers), asyncio.get_running_loop().create_future())
        place.waiters.append(waiter)
        self._start_runner()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            admitted = waiter.admitted
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self._leave(place)  # admitted at the very moment in which the client left
            raise
        finally:
            with suppress(ValueError):
                place.waiters.remove(waiter)
            self._happened.set()

    def _leave(self, place: _Place) -> None:
        place.users -= 1
        place.last_used = self._clock()
        self._happened.set()
        if not place.users and self._idle_sleep is not None and self._closed is None:
            self._set_idle_timer(place, self._idle_sleep)

    def _admit_all(self, place: _Place) -> None:
        for waiter in place.waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_result(None)
                place.users += 1
        place.waiters.clear()

    def _fail(self, place: _Place, error: VlfitError) -> None:
        for waiter in place.waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error.with_traceback(None))
        place.waiters.clear()

    def _open_gate(self, place: _Place) -> None:
        place.gated = False
        if place.state == "ready":
            self._admit_all(place)
        elif place.waiting:
            self._start_runner()

    def _first_in_line(self) -> _Place | None:
        waiting = [
            (waiter.number, place)
            for place in self._places.values()
            for waiter in place.waiters
            if not waiter.admitted.done()
        ]
        return min(waiting, key=lambda each: each[0])[1] if waiting else None

    def _start_runner(self) -> None:
        if self._closed is None and (self._runner is None or self._runner.done()):
            self._runner = asyncio.get_running_loop().create_task(self._run())

    # --- changes ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Bring up one model after the other until nobody waits."""
        while (place := self._first_in_line()) is not None:
            async with self._lock:
                if place.admits:  # by a change that held the lock before
                    self._admit_all(place)
                elif place.waiting:
                    await self._bring_up_for(place)

    async def _bring_up_for(self, place: _Place) -> None:
        """Make room for a model and bring it up; admit the requests that wait for it, or fail them.

        After an error the models that went to sleep for it are brought back.
        """
        evicted: list[_Place] = []
        failure: VlfitError | None = None
        try:
            if await self._make_room(place, evicted):
                await self._bring_up(place, evicted)
        except Exception as error:
            failure = _error_to_tell(place.model.name, error)
        if failure is not None:  # here, where nothing holds what was loaded so far
            place.failure, place.failed_until = failure, self._clock() + FAILURE_SECONDS
            self._fail(place, failure)
            await self._bring_back(evicted)

    async def _bring_up(self, place: _Place, evicted: list[_Place]) -> None:
        """Bring ``place`` up. While memory is still short, evict another model and try again."""
        while True:
            began = self._clock()
            try:
                await self._load(place)
                break
            except (DoesNotFit, OutOfMemory) as error:
                too_large = error.with_traceback(None)
            if not await self._evict_one(place, evicted):
                raise too_large
        place.failure = None
        self.num_changes += 1
        self.last_change_seconds = self._clock() - began
        log.info("%s is ready after %s", place.model.name, format_seconds(self.last_change_seconds))
        self._admit_to(place)

    async def _load(self, place: _Place) -> None:
        place.loading = True
        try:
            await place.model.bring_up()
        finally:
            place.loading = False
        place.ready_since = place.last_used = self._clock()

    async def _bring_back(self, evicted: list[_Place]) -> None:
        for place in reversed(evicted):
            try:
                await self._load(place)
            except Exception as error:
                log.warning("%s did not come back: %s", place.model.name, error)
            else:
                self._admit_to(place)

    def _admit_to(self, place: _Place) -> None:
        """Admit all requests that wait for a model that was just loaded; if none, start its idle timer."""
        self._admit_all(place)
        if not place.users and self._idle_sleep is not None:
            self._set_idle_timer(place, self._idle_sleep)

    async def _make_room(self, place: _Place, evicted: list[_Place]) -> bool:
        """Evict models until ``place`` fits, or none is left. False: nobody waits for it any more."""
        while others := self._others_in_memory(place):
            if await self._fits(place.model, [each.model for each in others]):
                break
            if not await self._evict_one(place, evicted):
                break
        return bool(place.waiting)

    def _others_in_memory(self, place: _Place) -> list[_Place]:
        return [each for each in self._places.values() if each is not place and each.state == "ready"]

    async def _evict_one(self, place: _Place, evicted: list[_Place]) -> bool:
        """Put one model to sleep for ``place``. False: there is none, or nobody waits for it any more."""
        victim = await self._choose_victim(place)
        if victim is None:
            return False
        victim.gated = True
        try:
            while victim.users:
                if not place.waiting:
                    return False
                await self._next_event(None)
            await victim.model.put_down("auto")
        finally:
            self._open_gate(victim)
        evicted.append(victim)
        return True

    async def _choose_victim(self, place: _Place) -> _Place | None:
        """Wait until a stay is over; return the least recently used model, an idle one if there is any."""
        while place.waiting and (others := self._others_in_memory(place)):
            now = self._clock()
            # An idle model first, even if its grace is not quite over: that is sooner than any answer.
            candidates = [each for each in others if not each.users] or others
            over = [each for each in candidates if self._seconds_left(each, now) <= 0]
            if over:
                return min(over, key=lambda each: each.last_used)
            await self._next_event(min(self._seconds_left(each, now) for each in candidates))
        return None

    def _seconds_left(self, place: _Place, now: float) -> float:
        """Seconds until the minimum stay is over, if no request comes."""
        left = place.ready_since + self.stay - now
        return left if place.users else min(left, place.last_used + self._idle_grace - now)

    async def _next_event(self, seconds: float | None) -> None:
        """Wait until a hold ends or a request leaves the line, at most ``seconds``."""
        self._happened.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._happened.wait()

    # --- sleep without need ----------------------------------------------------------------------------

    def _set_idle_timer(self, place: _Place, seconds: float) -> None:
        if place.idle_timer is not None:
            place.idle_timer.cancel()
        place.idle_timer = asyncio.get_running_loop().call_later(seconds, self._idle_for_long, place)

    def _idle_for_long(self, place: _Place) -> None:
        place.idle_timer = None
        if place.state != "ready" or self.in_use(place.model.name) or self._closed is not None:
            return
        task = asyncio.get_running_loop().create_task(self._sleep_quietly(place))
        self._sleeps.add(task)
        task.add_done_callback(self._sleeps.discard)

    async def _sleep_quietly(self, place: _Place) -> None:
        async with self._lock:
            # Meanwhile it may have been used, or put to sleep for another.
            if place.state != "ready" or self.in_use(place.model.name) or place.idle_timer is not None:
                return
            place.gated = True
            try:
                await place.model.put_down("auto")
            except VlfitError as error:
                log.warning("%s does not sleep: %s", place.model.name, error)
            finally:
                self._open_gate(place)


def _error_to_tell(name: str, error: Exception) -> VlfitError:
    """The error for requests of the model ``name``, whose loading raised ``error``. It is logged here.

    Without tracebacks, whose frames would keep what was loaded so far.
    """
    known = isinstance(error, VlfitError)
    log.warning("%s could not be loaded: %s", name, error, exc_info=not known)
    if isinstance(error, VlfitError):
        told: VlfitError = error
    else:
        told = EngineStopped(f"{name} could not be loaded: {type(error).__name__}", "See the server's log.")
    told.__cause__ = told.__context__ = None
    return told.with_traceback(None)
