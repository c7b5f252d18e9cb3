"""A batch on this machine: from a source through a crew into an output.

Knows what is done already, when the output is made safe, and how a run is stopped. Does not know how a
backend is kept busy (``tasks/batch/executor.py``) or how a person is told (``progress.py``).
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import LocalBackend, OpenBackend
from vlfit.backends.opening import Wanted, open_backend
from vlfit.errors import DoesNotFit, UsageError, VlfitError
from vlfit.machine.host import own_cores
from vlfit.plan.candidates import SEQUENCES
from vlfit.tasks.batch.executor import Crew, Outcome, Pace, Run
from vlfit.tasks.batch.failures import TRIES
from vlfit.tasks.batch.items import Item, Record, Source
from vlfit.tasks.batch.job import Job, Wish, Work
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.sources import SourceOptions, open_sources

# How far a batch is, how fast, and how long it will take.
#
# Counts, and knows times. Does not know how that is shown: whoever shows it makes a ``Progress`` of its
# own.


_WINDOW_SECONDS = 60.0  # speeds are those of the last minute


@dataclass(slots=True)
class Tally:
    """What a run has done so far. ``same`` of ``done`` took over an answer; ``skipped`` were settled before.

    ``total``: items of the source, where known; ``about``: reckoned, not counted.
    ``stopped``: somebody ended it before its end.
    """

    done: int = 0
    same: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total: int | None = None
    about: bool = False
    stopped: bool = False
    began: float = field(default_factory=time.monotonic)
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)

    @property
    def settled(self) -> int:
        """Pictures that this run is through with."""
        return self.done + self.failed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def take(self, outcome: Outcome) -> None:
        """Count ``outcome``."""
        record = outcome.record
        if record is None:
            self.failed += 1
            return
        self.done += 1
        if "same_as" in record:
            self.same += 1  # its tokens were the other's
            return
        self.prompt_tokens += record["usage"]["prompt_tokens"]
        self.completion_tokens += record["usage"]["completion_tokens"]

    def mark(self) -> None:
        """Note the time, for speeds. Called now and then."""
        now = time.monotonic()
        if not self._marks:
            self._marks.append((self.began, 0, 0))
        self._marks.append((now, self.settled, self.completion_tokens))
        # The last of those before the window stays: marks may be further apart than it is long.
        while self._marks[1][0] < now - _WINDOW_SECONDS:
            self._marks.popleft()

    def speeds(self) -> tuple[float, float]:
        """Pictures and tokens of answers in a second, over the last minute."""
        now = time.monotonic()
        then, settled, tokens = self._marks[0] if self._marks else (self.began, 0, 0)
        seconds = max(now - then, 1e-9)
        return (self.settled - settled) / seconds, (self.completion_tokens - tokens) / seconds

    def seconds_left(self, before: int) -> float | None:
        """Until the end, at the speed of the last minute; ``before`` were settled in earlier runs."""
        speed = self.speeds()[0]
        if self.total is None or speed <= 0:
            return None
        return max(0, self.total - before - self.settled) / speed


class Progress:
    """Told what becomes of pictures, by one thread. This one counts and says nothing."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.source_told = False  # whether what the source left out has been noted already

    def settled(self, outcome: Outcome) -> None:
        """A picture is over, and in the output or on the list of failures."""
        self.tally.take(outcome)

    def tick(self) -> None:
        """Time has passed; called about twice a second."""
        self.tally.mark()

    def note(self, text: str) -> None:
        """Something that a person should read."""


FLUSH_SECONDS = 5.0  # what the end of the machine may cost: so much is asked about again
TICK_SECONDS = 0.5
STALL_SECONDS = 5.0  # in which nothing succeeds before a person is told why


class Place(Protocol):
    """What a run needs of an output."""

    def is_settled(self, key: str) -> bool: ...
    def write(self, item: Item, record: Record) -> None: ...
    def fail(self, item: Item, error: Exception, tries: int) -> None: ...
    def flush(self) -> None: ...


class Runner:
    """One run. ``limit``: of so many pictures at most. ``ordered``: records stand in the source's order."""

    def __init__(
        self,
        crew: Crew,
        source: Source,
        output: Place,
        *,
        progress: Progress | None = None,
        limit: int | None = None,
        ordered: bool = False,
    ) -> None:
        self._progress = progress or Progress()
        self.tally = self._progress.tally
        self._crew = crew
        self._source = source
        self._output = output
        self._limit = limit
        self._ordered = ordered
        self._run: Run | None = None
        self._flushed = self._ticked = 0.0
        self._stall_told = False

    def run(self) -> Tally:
        """To the end of the source, or until ``stop``. Raises what concerns all pictures, with what was
        finished by then in the output; an interrupt too.
        """
        tally = self.tally
        self._flushed = self._ticked = time.monotonic()
        tally.began = self._flushed
        run = self._run = self._crew.run(islice(self._fresh(), self._limit), ordered=self._ordered)
        try:
            while not run.over and not tally.stopped:
                outcome = run.next(TICK_SECONDS)
                if outcome is not None:
                    self._keep(outcome)
                self._look_around(run)
        except VlfitError:
            self._keep_the_rest(run)
            raise
        else:
            self._keep_the_rest(run)
        finally:
            run.close()
            with suppress(VlfitError):  # whoever closes the output is told
                self._output.flush()
        self._progress.tick()
        return tally

    def stop(self) -> None:
        """End the run: what is under way is dropped. May be called from a signal's handler."""
        self.tally.stopped = True
        if self._run is not None:
            self._run.wake()

    def _fresh(self) -> Iterator[Item]:
        for item in self._source:
            if self._output.is_settled(item.key):
                self.tally.skipped += 1
            else:
                yield item

    def _keep(self, outcome: Outcome) -> None:
        if outcome.record is not None:
            self._output.write(outcome.item, outcome.record)
        elif outcome.error is not None:
            self._output.fail(outcome.item, outcome.error, outcome.tries)
        self._progress.settled(outcome)

    def _keep_the_rest(self, run: Run) -> None:
        """What has ended by now was paid for."""
        with suppress(VlfitError):  # the first of them is on its way already
            while (outcome := run.next(0.0)) is not None:
                self._keep(outcome)

    def _look_around(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self._output.flush()
        if now - self._ticked >= TICK_SECONDS:
            self._ticked = now
            self._tell_of_stall(run, now)
            self._progress.tick()

    def _tell_of_stall(self, run: Run, now: float) -> None:
        """Once, until something succeeds: who sees a bar that stands still wants to know."""
        if run.stalled is None:
            self._stall_told = False
            return
        since, error = run.stalled
        if not self._stall_told and now - since >= STALL_SECONDS:
            self._stall_told = True
            why = getattr(error, "message", repr(error))
            self._progress.note(f"nothing succeeds just now, and is tried again: {why}")


# A backend opened for a batch: with room for as many requests as fit, and how many to keep it busy with.
#
# Knows what each kind of backend can run at once. Does not know what is asked.


# Requests at a server that does not say how many it runs: as many as a plan asks for at most.
AT_A_SERVER = SEQUENCES[0]
_MOST_READERS = 8
# More is a slip: each reader is a thread of this process, each request one at a server, and a thousand tries
# with half a minute between them are eight hours.
_AT_MOST = {"concurrency": 1024, "readers": 64, "tries": 1000}

LoadProgress = Callable[[str, float], None]


def open_for_batch(
    wanted: Wanted,
    at_once: int | None = None,
    progress: LoadProgress | None = None,
    *,
    readers: int | None = None,
    tries: int = TRIES,
    alike: bool = False,
) -> tuple[OpenBackend, Pace]:
    """Open what is ``wanted`` so that ``at_once`` requests run together; None: as many as fit, of the numbers
    that plans try. ``readers``: threads that read ahead; None: one for each processor, 2 to 8. ``alike``: all
    begin with the same words, before the picture.

    Raises ``UsageError`` for numbers that make no sense, and what ``open_backend`` raises.
    """
    check_numbers(at_once, readers, tries)
    if wanted.kind == "native":
        backend = _open_native(_for_pictures_that_differ(wanted, alike=alike), at_once, progress)
    else:
        backend = open_backend(_with_room(wanted, at_once), progress)
    return backend, pace_for(backend, at_once, readers=readers, tries=tries)


def check_numbers(at_once: int | None, readers: int | None = None, tries: int | None = None) -> None:
    """Raises ``UsageError`` for one that makes no sense; None: nobody named it."""
    for name, value in (("concurrency", at_once), ("readers", readers), ("tries", tries)):
        if value is not None and not 1 <= value <= _AT_MOST[name]:
            raise UsageError(f"{name} is {value}", f"it must be at least 1, and at most {_AT_MOST[name]}")


def pace_for(
    backend: LocalBackend, at_once: int | None = None, *, readers: int | None = None, tries: int = TRIES
) -> Pace:
    """How to keep ``backend`` busy: with ``at_once`` requests, None: as many as it runs together."""
    readers = readers or min(_MOST_READERS, max(2, own_cores()))
    runs = getattr(backend, "sequences", None)
    if runs is None:
        return Pace(at_once or AT_A_SERVER, readers, tries)
    return Pace(_with_next(min(at_once or runs, runs)), readers, tries)


def _with_next(runs: int) -> int:
    """Those that run, and some that wait inside: where one ends, the next begins in the same step."""
    return runs + max(1, runs // 4)


def _with_room(wanted: Wanted, at_once: int | None) -> Wanted:
    """So that ``at_once`` requests are let in, where somebody asked for a number."""
    if at_once is not None and wanted.kind == "remote":
        return replace(wanted, at_once=at_once)
    if at_once is not None and wanted.kind == "vllm":
        from vlfit.backends.vllm.serve_command import VllmOptions

        return replace(wanted, vllm=replace(wanted.vllm or VllmOptions(), sequences=at_once))
    return wanted


def _for_pictures_that_differ(wanted: Wanted, *, alike: bool) -> Wanted:
    """Nothing of one picture is kept for another: a crew asks about the same bytes once. What would be kept
    took 215 MiB of mini in 466 pictures, by hand.
    """
    options = replace(wanted.options, prefix_cache=wanted.options.prefix_cache and alike, image_cache_bytes=0)
    return replace(wanted, options=options)


def _open_native(wanted: Wanted, at_once: int | None, progress: LoadProgress | None) -> OpenBackend:
    """With the most sequences that there is memory for. What does not fit is known before anything loads."""
    steps = (at_once,) if at_once else SEQUENCES
    for runs in steps:
        # A process that does nothing else for hours: it keeps to its plan, as a server does.
        options = replace(wanted.options, sequences=runs, keep_to_plan=True)
        try:
            return open_backend(replace(wanted, options=options), progress)
        except DoesNotFit:
            if runs == steps[-1]:
                raise
    raise AssertionError("steps are never empty")


# A batch in one call, for whoever has a backend open: sources in, an output, a tally back.
#
# Knows the order of opening and closing. Does not know how a backend is opened, signals, or what is shown.


def run_batch(
    backend: LocalBackend,
    sources: Sequence[str],
    output: Path,
    wish: Wish,
    sampling: SamplingParams,
    *,
    at_once: int | None = None,
    limit: int | None = None,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Tally:
    """Ask ``wish`` about every picture of ``sources`` that is not in ``output`` yet.

    ``at_once``: requests under way; None: as many as the backend runs. ``limit``: of so many pictures at
    most. Raises ``UsageError`` for an output of another job, and what concerns all pictures; those that
    failed by themselves are counted, and listed beside the output.
    """
    check_numbers(at_once)
    job = Job(wish, sampling, tuple(sources), output)
    source = open_sources(job.sources, SourceOptions(output=output))
    place = Output(job, again=retry_failed)
    try:
        place.begin(backend.model)
        crew = Crew(Work.of(job), backend, pace_for(backend, at_once))
        return Runner(crew, source, place, progress=progress, limit=limit).run()
    finally:
        place.close()


# A dry run: how many pictures there are, and how long the first few take. Writes nothing.


def try_out(crew: Crew, source: Source, output: Output | None, total: int | None) -> dict[str, Any]:
    """Do as many of what is left as run at once, twice over, and reckon from that.

    ``output``: that of earlier runs; None: there is none. ``total``: items of the source, if known.
    """
    settled_before = output.done_before + output.failed_before if output is not None else 0
    fresh = (item for item in source if output is None or not output.is_settled(item.key))
    began, size = time.monotonic(), 0
    outcomes = list(crew.outcomes(islice(fresh, 2 * crew.pace.at_once)))
    seconds = time.monotonic() - began
    for outcome in outcomes:
        size += len(json.dumps(outcome.record, ensure_ascii=False)) + 1 if outcome.record is not None else 0
    tried = len(outcomes)
    left = None if total is None else max(0, total - settled_before)
    known = left is not None and tried > 0
    return {
        "pictures": total,
        "about": bool(getattr(source, "about", False)),
        "settled_before": settled_before,
        "tried": tried,
        "failed": sum(outcome.error is not None for outcome in outcomes),
        "seconds": round(seconds, 3),
        "pictures_per_s": round(tried / seconds, 3) if tried else None,
        "seconds_for_all": round(seconds / tried * left, 1) if known and left is not None else None,
        "bytes_for_all": size * left // tried if known and left is not None else None,
    }
