"""Run a batch on this machine: from a source through an executor into an output, with progress and speed.

``run_batch`` does it in one call for a backend that is open, ``open_for_batch`` opens one with as many
concurrent requests as fit, ``estimate_batch`` estimates how long all pictures would take.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from vlfit.api.progress import LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend
from vlfit.backends.opening import BackendSpec, open_backend
from vlfit.errors import DoesNotFit, UsageError, VlfitError
from vlfit.machine.host import usable_cores
from vlfit.plan.preference import SEQUENCES
from vlfit.tasks.batch.executor import BatchExecutor, ExecutorOptions, Outcome, OutcomeStream
from vlfit.tasks.batch.failures import DEFAULT_TRIES
from vlfit.tasks.batch.items import Item, Record, Source
from vlfit.tasks.batch.job import Job, PictureTask, Wish
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.sources import SourceOptions, open_sources

_WINDOW_SECONDS = 60.0  # speeds are averages over the last minute
FLUSH_SECONDS = 5.0  # a power failure loses at most the records of so long
TICK_SECONDS = 0.5
STALL_SECONDS = 5.0  # without a success, before the user is told why

DEFAULT_SERVER_CONCURRENCY = SEQUENCES[0]  # for servers that do not report how many requests they run
_MAX_READERS = 8
# More is a typing error: each reader is a thread, each request one at a server, and a thousand tries half a
# minute apart take eight hours.
_UPPER_LIMITS = {"concurrency": 1024, "readers": 64, "tries": 1000}


@dataclass(slots=True)
class Tally:
    """Counts of a run. ``done`` includes ``same``: pictures whose bytes another picture had, sent only once.

    ``skipped``: pictures that earlier runs settled (done or failed for good). Tokens: of ``done`` without
    ``same``. ``total``: items of the source, None if unknown; ``about``: ``total`` is an estimate.
    ``stopped``: the run was stopped early. ``began``: its start (``time.monotonic``).
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
        """Pictures done or failed in this run."""
        return self.done + self.failed

    @property
    def seconds(self) -> float:
        """Time since the run began."""
        return time.monotonic() - self.began

    def take(self, outcome: Outcome) -> None:
        """Add ``outcome`` to the counts."""
        record = outcome.record
        if record is None:
            self.failed += 1
            return
        self.done += 1
        if "same_as" in record:
            self.same += 1  # it cost no tokens of its own
            return
        self.prompt_tokens += record["usage"]["prompt_tokens"]
        self.completion_tokens += record["usage"]["completion_tokens"]

    def mark(self) -> None:
        """Record the present counts for ``speeds``. To be called about every second."""
        now = time.monotonic()
        if not self._marks:
            self._marks.append((self.began, 0, 0))
        self._marks.append((now, self.settled, self.completion_tokens))
        # Keep the last sample before the window: samples may be further apart than its length.
        while self._marks[1][0] < now - _WINDOW_SECONDS:
            self._marks.popleft()

    def speeds(self) -> tuple[float, float]:
        """Pictures and completion tokens per second, averaged over the last minute."""
        now = time.monotonic()
        then, settled, tokens = self._marks[0] if self._marks else (self.began, 0, 0)
        seconds = max(now - then, 1e-9)
        return (self.settled - settled) / seconds, (self.completion_tokens - tokens) / seconds

    def seconds_left(self, before: int) -> float | None:
        """Estimated seconds left; None without a total or a speed. ``before``: pictures settled by earlier
        runs.
        """
        speed = self.speeds()[0]
        if self.total is None or speed <= 0:
            return None
        return max(0, self.total - before - self.settled) / speed


class BatchProgress:
    """Callbacks of a run, called from one thread. This base class only keeps ``tally``: call it if
    overridden.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.source_notes_shown = False  # whether the notes of the source have been shown

    def settled(self, outcome: Outcome) -> None:
        """Called when a picture was written to the output, or to the list of failures."""
        self.tally.take(outcome)

    def tick(self) -> None:
        """Called about twice a second, and at the end."""
        self.tally.mark()

    def note(self, text: str) -> None:
        """Called with a message for the user."""


class BatchOutput(Protocol):
    """The methods of ``Output`` that a run calls."""

    def is_settled(self, key: str) -> bool:
        """Whether nothing is left to do for ``key``: it has a record, or failed and is not to be retried."""
        ...

    def clean_beside(self, item: Item) -> None:
        """Remove unfinished sidecars that a killed run left beside ``item``. Never raises."""
        ...

    def write(self, item: Item, record: Record) -> None:
        """Write a record, after its sidecars."""
        ...

    def record_failure(self, item: Item, error: Exception, tries: int) -> None:
        """Add ``item`` to the list of failures."""
        ...

    def flush(self) -> None:
        """Make what was written survive a power failure."""
        ...


class BatchRunner:
    """One run of a batch over the items of ``source`` that are not settled in ``output``.

    ``limit``: pictures at most; None: all. ``ordered``: write records in the source's order, else as they
    finish.
    """

    def __init__(
        self,
        executor: BatchExecutor,
        source: Source,
        output: BatchOutput,
        *,
        progress: BatchProgress | None = None,
        limit: int | None = None,
        ordered: bool = False,
    ) -> None:
        self._progress = progress or BatchProgress()
        self.tally = self._progress.tally
        self._executor = executor
        self._source = source
        self._output = output
        self._limit = limit
        self._ordered = ordered
        self._stream: OutcomeStream | None = None
        self._flushed = self._ticked = 0.0
        self._stall_reported = False

    def run(self) -> Tally:
        """Run to the end of the source, or until ``stop``. Call it once.

        Raises errors that concern all pictures, and ``KeyboardInterrupt``; finished pictures are in the
        output then.
        """
        tally = self.tally
        self._flushed = self._ticked = time.monotonic()
        tally.began = self._flushed
        stream = self._stream = self._executor.stream(
            islice(self._unsettled_items(), self._limit), ordered=self._ordered
        )
        try:
            while not stream.finished and not tally.stopped:
                outcome = stream.next(TICK_SECONDS)
                if outcome is not None:
                    self._store(outcome)
                self._flush_and_tick(stream)
        except VlfitError:
            self._drain(stream)
            raise
        else:
            self._drain(stream)
        finally:
            stream.close()
            with suppress(VlfitError):  # closing the output raises it again
                self._output.flush()
        self._progress.tick()
        return tally

    def stop(self) -> None:
        """Stop the run; requests in flight are cancelled. May be called from a signal handler."""
        self.tally.stopped = True
        if self._stream is not None:
            self._stream.wake()

    def _unsettled_items(self) -> Iterator[Item]:
        for item in self._source:
            self._output.clean_beside(item)
            if self._output.is_settled(item.key):
                self.tally.skipped += 1
            else:
                yield item

    def _store(self, outcome: Outcome) -> None:
        if outcome.record is not None:
            self._output.write(outcome.item, outcome.record)
        elif outcome.error is not None:
            self._output.record_failure(outcome.item, outcome.error, outcome.tries)
        self._progress.settled(outcome)

    def _drain(self, stream: OutcomeStream) -> None:
        """Store results that have already arrived."""
        with suppress(VlfitError):  # the first such error is being raised already
            while (outcome := stream.next(0.0)) is not None:
                self._store(outcome)

    def _flush_and_tick(self, stream: OutcomeStream) -> None:
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self._output.flush()
        if now - self._ticked >= TICK_SECONDS:
            self._ticked = now
            self._report_stall(stream, now)
            self._progress.tick()

    def _report_stall(self, stream: OutcomeStream, now: float) -> None:
        """Tell the user why nothing succeeds, once per stall."""
        if stream.stalled is None:
            self._stall_reported = False
            return
        since, error = stream.stalled
        if not self._stall_reported and now - since >= STALL_SECONDS:
            self._stall_reported = True
            why = getattr(error, "message", repr(error))
            self._progress.note(f"no picture succeeds at the moment, retrying: {why}")


def open_for_batch(
    spec: BackendSpec,
    at_once: int | None = None,
    progress: LoadProgress | None = None,
    *,
    readers: int | None = None,
    tries: int = DEFAULT_TRIES,
    shared_prefix: bool = False,
) -> tuple[Backend, ExecutorOptions]:
    """Open a backend for ``at_once`` concurrent requests, and options to keep it busy. The caller closes it.

    ``at_once`` None: as many as fit, at most 8 for the native backend. ``readers``: threads that read ahead;
    None: one per core, 2 to 8. ``shared_prefix``: all prompts start with the same text, before the picture,
    so the prefix cache stays on.

    Raises ``UsageError`` for numbers out of range, and what ``open_backend`` raises.
    """
    check_limits(at_once, readers, tries)
    if spec.kind == "native":
        backend = _open_native(_without_picture_caches(spec, shared_prefix=shared_prefix), at_once, progress)
    else:
        backend = open_backend(_with_concurrency(spec, at_once), progress)
    return backend, make_executor_options(backend, at_once, readers=readers, tries=tries)


def check_limits(at_once: int | None, readers: int | None = None, tries: int | None = None) -> None:
    """Raises ``UsageError`` for a number out of range. None, for a number that was not given, is valid."""
    for name, value in (("concurrency", at_once), ("readers", readers), ("tries", tries)):
        if value is not None and not 1 <= value <= _UPPER_LIMITS[name]:
            raise UsageError(f"{name} is {value}", f"Use a number from 1 to {_UPPER_LIMITS[name]}.")


def make_executor_options(
    backend: Backend,
    at_once: int | None = None,
    *,
    readers: int | None = None,
    tries: int = DEFAULT_TRIES,
) -> ExecutorOptions:
    """Executor options for ``backend``: ``at_once`` requests, at most as many as it runs, plus a quarter.

    The extra requests wait in the engine's queue, so that one starts in the same step in which another ends.
    A server that does not report how many it runs gets exactly ``at_once``, or 8. ``readers`` None: one per
    core, 2 to 8.
    """
    readers = readers or min(_MAX_READERS, max(2, usable_cores()))
    num_running = getattr(backend, "sequences", None)
    if num_running is None:
        return ExecutorOptions(at_once or DEFAULT_SERVER_CONCURRENCY, readers, tries)
    return ExecutorOptions(_plus_a_quarter(min(at_once or num_running, num_running)), readers, tries)


def _plus_a_quarter(num_running: int) -> int:
    return num_running + max(1, num_running // 4)


def _with_concurrency(spec: BackendSpec, at_once: int | None) -> BackendSpec:
    """``spec`` for a backend that accepts ``at_once`` requests, if a number was given."""
    if at_once is not None and spec.kind == "remote":
        return replace(spec, max_concurrent=at_once)
    if at_once is not None and spec.kind == "vllm":
        from vlfit.backends.vllm.serve_command import VllmOptions

        return replace(spec, vllm=replace(spec.vllm or VllmOptions(), sequences=at_once))
    return spec


def _without_picture_caches(spec: BackendSpec, *, shared_prefix: bool) -> BackendSpec:
    """``spec`` without caches across pictures, which the executor has deduplicated already.

    For mini they grew to 215 MiB over 466 pictures.
    """
    options = replace(
        spec.options, prefix_cache=spec.options.prefix_cache and shared_prefix, image_cache_bytes=0
    )
    return replace(spec, options=options)


def _open_native(spec: BackendSpec, at_once: int | None, progress: LoadProgress | None) -> Backend:
    """Open with the most sequences that fit. Whether they fit is known before anything is loaded."""
    candidates = (at_once,) if at_once else SEQUENCES
    for num_seqs in candidates:
        # It runs for hours with the GPU to itself: enforce the plan's budget, as a server does.
        options = replace(spec.options, max_num_seqs=num_seqs, enforce_plan=True)
        try:
            return open_backend(replace(spec, options=options), progress)
        except DoesNotFit:
            if num_seqs == candidates[-1]:
                raise
    raise AssertionError("candidates are never empty")


def run_batch(
    backend: Backend,
    sources: Sequence[str],
    output: Path,
    wish: Wish,
    sampling: SamplingParams,
    *,
    at_once: int | None = None,
    limit: int | None = None,
    retry_failed: bool = False,
    progress: BatchProgress | None = None,
) -> Tally:
    """Ask ``wish`` about every picture of ``sources`` that is not in ``output`` yet.

    ``at_once``: requests in flight; None: as many as the backend runs. ``limit``: pictures at most.
    ``retry_failed``: also those that failed in earlier runs.

    Raises ``UsageError`` if ``output`` belongs to another job, and errors that concern all pictures; pictures
    that fail are counted, and listed beside the output.
    """
    check_limits(at_once)
    job = Job(wish, sampling, tuple(sources), output)
    source = open_sources(job.sources, SourceOptions(output=output))
    records = Output(job, again=retry_failed)
    try:
        records.begin(backend.model)
        executor = BatchExecutor(PictureTask.from_job(job), backend, make_executor_options(backend, at_once))
        return BatchRunner(executor, source, records, progress=progress, limit=limit).run()
    finally:
        records.close()


def estimate_batch(
    executor: BatchExecutor, source: Source, output: Output | None, total: int | None
) -> dict[str, Any]:
    """Run a few of the remaining pictures (twice the concurrency) and extrapolate, as JSON. Writes nothing.

    ``output``: of earlier runs; None: there is none. ``total``: items of the source, None if unknown; then
    ``seconds_for_all`` and ``bytes_for_all`` are None.
    """
    settled_before = output.done_before + output.failed_before if output is not None else 0
    unsettled = (item for item in source if output is None or not output.is_settled(item.key))
    began, size = time.monotonic(), 0
    outcomes = list(executor.outcomes(islice(unsettled, 2 * executor.options.at_once)))
    seconds = time.monotonic() - began
    for outcome in outcomes:
        size += len(json.dumps(outcome.record, ensure_ascii=False)) + 1 if outcome.record is not None else 0
    tried = len(outcomes)
    left = None if total is None else max(0, total - settled_before)
    known = left is not None and tried > 0
    return {
        "pictures": total,
        "about": bool(getattr(source, "count_is_estimate", False)),
        "settled_before": settled_before,
        "tried": tried,
        "failed": sum(outcome.error is not None for outcome in outcomes),
        "seconds": round(seconds, 3),
        "pictures_per_s": round(tried / seconds, 3) if tried else None,
        "seconds_for_all": round(seconds / tried * left, 1) if known and left is not None else None,
        "bytes_for_all": size * left // tried if known and left is not None else None,
    }
