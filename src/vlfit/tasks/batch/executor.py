"""Keeps a backend busy with pictures: read and prepared ahead in threads, started as others end, tried again.

Knows how many may run, what is done about a failure, and that pictures of the same bytes are asked about
once. Holds as many pictures as run and as there are readers, however long the source is. Does not know where
items come from or where records go, and never lets the engine wait for either.
"""

import heapq
import pickle
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from vlfit.api.outputs import Answer, Chunk, TokenLogprob, Usage
from vlfit.backends.base import LocalBackend, Prepared, Ticket
from vlfit.errors import EngineStopped
from vlfit.tasks.batch.failures import TRIES, Streak, Verdict, is_own_fault, verdict_on, wait_before
from vlfit.tasks.batch.items import Item, Record, shown_name
from vlfit.tasks.batch.job import Work

# Which picture is next: those whose next try is due, then the source's. Bounds how many are under way.
#
# Knows order and time. Does not know what is done with a picture, or how it went.


@dataclass(slots=True, eq=False)
class Task:
    """One picture under way. ``number`` counts from 0 in the order of the source. The rest is the crew's."""

    item: Item
    number: int
    owner: Any
    tries: int = 0
    digest: bytes | None = None
    picture: Any = None


@dataclass(order=True)
class _Due:
    when: float
    number: int
    task: Task = field(compare=False)


class Intake:
    """Any thread may call. ``most`` tasks are open at a time: taken, and not settled.

    ``ahead``: so many at most are taken and not ``released``, for whoever wants them in the order of the
    source; None: nobody does.
    """

    def __init__(self, items: Iterable[Item], most: int, owner: Any, ahead: int | None = None) -> None:
        self._items: Iterator[Item] = iter(items)
        self._most = most
        self._owner = owner
        self._ahead = ahead
        self._released = 0
        self._changed = threading.Condition()
        self._due: list[_Due] = []
        self._taken = 0
        self._open = 0
        self._exhausted = False
        self._closed = False
        self.problem: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether nothing will come any more and nothing is under way."""
        return self._exhausted and self._open == 0

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def stuck(self) -> bool:
        """Whether nothing is under way, and nothing more is given out before something is released."""
        return self._open == 0 and not self._exhausted and not self._may_take()

    def take(self) -> Task | None:
        """The next task, when there is one; None after the last, or after ``close``, or where the source
        cannot be gone through any further: ``problem`` says why.
        """
        with self._changed:
            while not self._closed and not self.over:
                now = time.monotonic()
                if self._due and self._due[0].when <= now:
                    return heapq.heappop(self._due).task
                if not self._exhausted and self._may_take():
                    try:
                        item = next(self._items, None)
                    except Exception as error:  # nobody knows what is behind this place
                        self.problem = error
                        self._closed = True
                        self._changed.notify_all()
                        return None
                    if item is not None:
                        self._open += 1
                        self._taken += 1
                        return Task(item, self._taken - 1, self._owner)
                    self._exhausted = True
                    self._changed.notify_all()
                    continue
                self._changed.wait(self._due[0].when - now if self._due else None)
            return None

    def again(self, task: Task, seconds: float) -> None:
        """Give ``task`` out once more after ``seconds``."""
        with self._changed:
            heapq.heappush(self._due, _Due(time.monotonic() + seconds, task.number, task))
            self._changed.notify()

    def settle(self) -> None:
        """A task is over, however it ended."""
        with self._changed:
            self._open -= 1
            self._changed.notify_all() if self.over else self._changed.notify()

    def release(self) -> None:
        """One more, in order, has been given to whoever waits for it."""
        with self._changed:
            self._released += 1
            self._changed.notify()

    def _may_take(self) -> bool:
        behind = self._ahead is None or self._taken - self._released < self._ahead
        return self._open < self._most and behind

    def close(self) -> None:
        """Give out nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# Pictures of the same bytes are asked about once: who leads, who follows, and what was said of late ones.
#
# Knows digests and answers as bytes. Bounded: of pictures that are over it keeps the answers of the latest,
# up to ``MOST_BYTES``; one that comes again later is asked about again. Does not know how that is done.


MOST_BYTES = 8 * 1024**2  # answers of some 15,000 captions
_ENTRY_BYTES = 200  # of Python, beside the answer itself
_OWN = ("key", "picture", "extra")


def digest_of(data: bytes) -> bytes:
    """16 bytes: nobody will see two pictures share them."""
    return blake2b(data, digest_size=16).digest()


class Same:
    """``Waiting`` is whatever stands for a picture that waits for another's answer. Any thread may call."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._leading: dict[bytes, list[Any]] = {}
        self._bytes = 0
        self._most = most_bytes

    def lead_or_follow(self, digest: bytes, waiting: Any) -> Record | bool | None:
        """What was said of these bytes; or True: ask yourself, then ``answered`` or ``failed``; or None:
        another asks, and gets ``waiting`` with what comes.
        """
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                record: Record = pickle.loads(known)
                return record
            followers = self._leading.get(digest)
            if followers is not None:
                followers.append(waiting)
                return None
            self._leading[digest] = []
            return True

    def answered(self, digest: bytes, record: Record) -> list[Any]:
        """Keep ``record`` for those that come later. Gives those that wait for it."""
        shared = {name: value for name, value in record.items() if name not in _OWN}
        data = pickle.dumps({**shared, "same_as": record["key"]}, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if digest not in self._known:
                self._known[digest] = data
                self._bytes += len(data) + _ENTRY_BYTES
            while self._bytes > self._most:
                self._bytes -= len(self._known.popitem(last=False)[1]) + _ENTRY_BYTES
            return self._leading.pop(digest, [])

    def failed(self, digest: bytes) -> list[Any]:
        """Those that waited for an answer that will not come."""
        with self._lock:
            return self._leading.pop(digest, [])


def taken_over(shared: Record, item: Item) -> Record:
    """The record of ``item``, whose picture has the bytes of the one that ``shared`` tells of."""
    own: Record = {
        "key": item.key,
        "picture": shown_name(item.path) if item.path is not None else item.key,
        "same_as": shared["same_as"],
    }
    record = {**own, **{name: value for name, value in shared.items() if name not in (*own, *_OWN)}}
    return {**record, "extra": dict(item.extra)} if item.extra else record


_AHEAD = 256  # outcomes that wait for one before them, where the order is kept
_LOOK_AGAIN = 0.5  # seconds after which who waits for a place sees that the run was closed


@dataclass(frozen=True, slots=True)
class Pace:
    """``at_once`` requests are started at a time, ``readers`` threads read and prepare the next ones, and a
    failure that may pass is tried ``tries`` times in all. ``keep_going``: however many fail in a row.
    """

    at_once: int
    readers: int = 2
    tries: int = TRIES
    keep_going: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A picture that is over: its record, or the error that it failed by after so many tries.

    ``number`` counts from 0 in the order of the items.
    """

    item: Item
    record: Record | None = None
    error: Exception | None = None
    tries: int = 1
    number: int = 0


class Crew:
    """What several runs share: the places in the backend, and what was said of which bytes."""

    def __init__(self, work: Work, backend: LocalBackend, pace: Pace) -> None:
        self.work = work
        self.backend = backend
        self.pace = pace
        self.places = threading.Semaphore(pace.at_once)
        self.same = Same()

    def run(self, items: Iterable[Item], *, ordered: bool = False) -> "Run":
        """Begin with ``items``; ``ordered``: outcomes come in their order. Close what it gives."""
        return Run(self, items, ordered=ordered)

    def outcomes(self, items: Iterable[Item]) -> Iterator[Outcome]:
        """Every picture of ``items``, as they end. May be called from several threads at a time. Raises what
        concerns all pictures, and what going through ``items`` raises; what was under way is dropped then.
        """
        run = self.run(items)
        try:
            while (outcome := run.next()) is not None:
                yield outcome
        finally:
            run.close()


_Arrival = Answer | Record | Exception


class Run:
    """One stream of items through a crew. One thread calls ``next``; it and any other may ``close``."""

    def __init__(self, crew: Crew, items: Iterable[Item], *, ordered: bool = False) -> None:
        self._crew = crew
        pace = crew.pace
        # Room for those that wait for their next try, or for another picture's answer: they hold no pictures.
        most = 4 * pace.at_once + 2 * pace.readers + 64
        self._intake = Intake(items, most, self, most + _AHEAD if ordered else None)
        self._ordered = ordered
        self._held: dict[int, Outcome] = {}
        self._next = 0
        self._arrivals: queue.SimpleQueue[tuple[Task, _Arrival] | None] = queue.SimpleQueue()
        self._ready: deque[Outcome] = deque()
        self._suspects: list[Outcome] = []
        self._streak = Streak()
        self.stalled: tuple[float, Exception] | None = None
        """Since when (``time.monotonic``) nothing has succeeded, and which failure is tried again; None: all
        is well."""
        self._running: dict[int, _Collector] = {}
        self._leads: set[bytes] = set()
        self._threads = [
            threading.Thread(target=self._read_on, name=f"vlfit-batch-{number}", daemon=True)
            for number in range(pace.readers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def over(self) -> bool:
        """Whether every outcome has been given."""
        return self._intake.over and not self._ready and not self._suspects

    def next(self, timeout: float | None = None) -> Outcome | None:
        """The next picture that is over, by whatever end. None when there are no more (``over``), or none has
        come for ``timeout`` seconds, or somebody called ``wake``.

        Failures that may not be the pictures' own are held back until something succeeds after them, or the
        end: if too many come in a row an error is raised, and none of the pictures is told to be bad.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            if self._intake.over or self._intake.stuck:
                self._let_suspects_go()
                if not self._ready:
                    break
                continue
            try:
                arrival = self._arrivals.get(
                    timeout=None if end is None else max(0.0, end - time.monotonic())
                )
            except queue.Empty:
                return None
            if arrival is not None:
                self._take(*arrival)
            elif self._intake.problem is not None:
                raise self._intake.problem
            elif not self._intake.over:
                return None
        return self._ready.popleft() if self._ready else None

    def wake(self) -> None:
        """Let ``next`` return. May be called from a signal's handler."""
        self._arrivals.put(None)

    def close(self) -> None:
        """Drop what is under way. Pictures of other runs that waited for one of these go on by themselves."""
        self._intake.close()
        for collector in list(self._running.values()):
            collector.drop()
        for digest in list(self._leads):
            self._give_up(digest)

    def _give_up(self, digest: bytes) -> None:
        """Nobody answers for these bytes any more: who waits for that asks about them after all."""
        self._leads.discard(digest)
        for follower in self._crew.same.failed(digest):
            follower.owner._intake.again(follower, 0.0)

    def deliver(self, task: Task, arrival: _Arrival) -> None:
        """How ``task`` ended; called from any thread, and never waits."""
        self._running.pop(task.number, None)
        self._arrivals.put((task, arrival))

    # --- in the readers' threads ---------------------------------------------------------------------------

    def _read_on(self) -> None:
        while True:
            task = self._intake.take()
            if task is None:
                self._arrivals.put(None)
                return
            try:
                self._begin(task)
            except Exception as error:
                self.deliver(task, error)

    def _begin(self, task: Task) -> None:
        """Read, prepare, and start as soon as there is a place."""
        crew = self._crew
        task.tries += 1
        picture = crew.work.picture(task.item)
        if task.digest is None:
            digest = digest_of(picture.data)
            found = crew.same.lead_or_follow(digest, task)
            if found is None:
                return
            if not isinstance(found, bool):
                self.deliver(task, found)
                return
            task.digest = digest
            self._leads.add(digest)
        prepared = crew.work.prepare(crew.backend, picture)
        task.picture = picture
        while not crew.places.acquire(timeout=_LOOK_AGAIN):
            if self._intake.closed:
                self._give_up(task.digest)
                return
        _Collector(self, task, prepared).start(crew)

    def enter(self, collector: "_Collector") -> None:
        """``collector`` waits for an answer from now on."""
        self._running[collector.task.number] = collector
        if self._intake.closed:
            collector.drop()
            if collector.task.digest is not None:
                self._give_up(collector.task.digest)

    # --- in the thread that calls next ----------------------------------------------------------------------

    def _take(self, task: Task, arrival: _Arrival) -> None:
        if isinstance(arrival, Exception):
            self._take_failure(task, arrival)
        elif isinstance(arrival, Answer):
            try:
                record = self._crew.work.record(task.item, task.picture, arrival)
            except Exception as error:
                self._take_failure(task, error)
                return
            self._settle(task, record)
        else:
            self._settle(task, taken_over(arrival, task.item))

    def _settle(self, task: Task, record: Record) -> None:
        self._streak.success()
        self.stalled = None
        self._let_suspects_go()
        self._emit(Outcome(task.item, record, None, task.tries, task.number))
        if task.digest is not None:
            self._leads.discard(task.digest)
            for follower in self._crew.same.answered(task.digest, record):
                follower.owner.deliver(follower, {**record, "same_as": record["key"]})
        self._finish(task)

    def _take_failure(self, task: Task, error: Exception) -> None:
        task.picture = None
        verdict = verdict_on(error, task.tries, self._crew.pace.tries)
        if verdict is Verdict.AGAIN:
            self.stalled = (self.stalled[0] if self.stalled else time.monotonic(), error)
            self._intake.again(task, wait_before(error, task.tries))
            return
        if verdict is Verdict.ALL:
            raise error
        failed = Outcome(task.item, None, error, task.tries, task.number)
        if is_own_fault(error) or self._crew.pace.keep_going:
            self._emit(failed)
        else:
            self._suspects.append(failed)
            stop = self._streak.stop_for(error)
            if stop is not None:
                raise stop from error
        if task.digest is not None:
            self._leads.discard(task.digest)
            for follower in self._crew.same.failed(task.digest):
                follower.tries = task.tries  # the same bytes were tried as often
                follower.owner.deliver(follower, error)
        self._finish(task)

    def _finish(self, task: Task) -> None:
        task.picture = None
        self._intake.settle()

    def _let_suspects_go(self) -> None:
        suspects, self._suspects = self._suspects, []
        for outcome in suspects:
            self._emit(outcome)

    def _emit(self, outcome: Outcome) -> None:
        """Give ``outcome`` out, in its turn if there are turns."""
        if not self._ordered:
            self._ready.append(outcome)
            return
        self._held[outcome.number] = outcome
        while self._next in self._held:
            self._ready.append(self._held.pop(self._next))
            self._next += 1
            self._intake.release()


class _Collector:
    """Listens to one request, in the engine's thread. Its place is free again when it ends, once."""

    def __init__(self, run: Run, task: Task, prepared: Prepared) -> None:
        self.task = task
        self._run = run
        self._prepared: Prepared | None = prepared
        self._images = prepared.images
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._ticket: Ticket | None = None
        self._place: list[threading.Semaphore] = []

    def start(self, crew: Crew) -> None:
        """``crew.places`` was acquired for it."""
        self._place.append(crew.places)
        self._run.enter(self)
        prepared, self._prepared = self._prepared, None  # the engine lets go of pixels when it has seen them
        assert prepared is not None
        try:
            self._ticket = crew.backend.start(prepared, crew.work.sampling, self)
            if not self._place:
                self._ticket.cancel()  # dropped meanwhile, or over: that does no harm
        except Exception:
            if self._leave():  # else it has ended already, and is not to end twice
                raise

    def __call__(self, arrival: Chunk | Exception) -> None:
        if isinstance(arrival, Exception):
            self._end(arrival)
            return
        self._images = arrival.images or self._images  # a server tells of them with the answer
        self._text.append(arrival.text)
        self._logprobs.extend(arrival.logprobs)
        if arrival.finish_reason is None:
            return
        if arrival.finish_reason == "cancelled":
            self._end(EngineStopped("the request was cancelled before its end", "start again"))
            return
        usage = arrival.usage or Usage(0, 0, 0)
        text, model = "".join(self._text), self._run._crew.backend.model
        self._end(
            Answer(
                text,
                arrival.finish_reason,
                usage,
                model,
                self._images,
                arrival.timings,
                tuple(self._logprobs),
            )
        )

    def drop(self) -> None:
        """End it without an answer."""
        if self._leave() and self._ticket is not None:
            self._ticket.cancel()

    def _end(self, arrival: Answer | Exception) -> None:
        if self._leave():
            self._run.deliver(self.task, arrival)

    def _leave(self) -> bool:
        """Give the place back. False if that was done before."""
        with suppress(IndexError):  # ``pop`` is one step, whichever threads are here
            self._place.pop().release()
            return True
        return False
