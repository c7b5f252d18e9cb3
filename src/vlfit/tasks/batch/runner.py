"""Run a batch on this machine: from a source through an executor into an output, with progress and speed.

``run_batch`` does all of it on an open backend; ``open_for_batch`` opens a backend for as many concurrent
requests as fit; ``estimate_batch`` estimates how long all pictures would take.
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
    """Counts of a run.

    ``done``: pictures with a record; ``same``: those of them with the same bytes as another, whose answer
    they share. ``failed``: pictures listed as failed in this run. ``skipped``: pictures settled by earlier
    runs. ``prompt_tokens``, ``completion_tokens``: of all requests, so without ``same``. ``total``: items of
    the source, settled ones included; None if unknown. ``about``: ``total`` is an estimate. ``stopped``: the
    run was stopped early. ``began``: its start (``time.monotonic``).
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
        """Seconds since the run began."""
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
        """Keep a sample of the present counts for ``speeds``. To be called about every second."""
        now = time.monotonic()
        if not self._marks:
            self._marks.append((self.began, 0, 0))
        self._marks.append((now, self.settled, self.completion_tokens))
        # Keep the last sample before the window: samples may be further apart than its length.
        while self._marks[1][0] < now - _WINDOW_SECONDS:
            self._marks.popleft()

    def speeds(self) -> tuple[float, float]:
        """Pictures (done or failed) and completion tokens per second, averaged over the last minute.

        Since the start of the run in its first minute, or if ``mark`` was never called.
        """
        now = time.monotonic()
        then, settled, tokens = self._marks[0] if self._marks else (self.began, 0, 0)
        seconds = max(now - then, 1e-9)
        return (self.settled - settled) / seconds, (self.completion_tokens - tokens) / seconds

    def seconds_left(self, before: int) -> float | None:
        """Estimated seconds until all ``total`` pictures are settled, at the present speed.

        ``before``: pictures settled by earlier runs. None if ``total`` is None, or no picture was settled in
        the last minute.
        """
        speed = self.speeds()[0]
        if self.total is None or speed <= 0:
            return None
        return max(0, self.total - before - self.settled) / speed


class BatchProgress:
    """Callbacks of a run, all called from one thread. Subclasses override them to show progress.

    The methods of this base class keep ``tally`` up to date: an override must call ``super()``.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.source_notes_shown = False  # whether the notes of the source have been shown

    def settled(self, outcome: Outcome) -> None:
        """Called for each picture once its record, or its failure, was written to the output."""
        self.tally.take(outcome)

    def tick(self) -> None:
        """Called about twice a second, and at the end."""
        self.tally.mark()

    def note(self, text: str) -> None:
        """Called with a message to show to the user. Does nothing here."""


class BatchOutput(Protocol):
    """The methods of ``Output`` that a run calls."""

    def is_settled(self, key: str) -> bool:
        """Whether nothing is left to do for ``key``: it has a record, or failed and is not to be retried."""
        ...

    def clean_beside(self, item: Item) -> None:
        """Remove unfinished sidecars that a killed run left beside ``item``. Never raises."""
        ...

    def write(self, item: Item, record: Record) -> None:
        """Write the sidecars of ``item``, then ``record``; nothing if the item's key has a record."""
        ...

    def record_failure(self, item: Item, error: Exception, tries: int) -> None:
        """Add ``item`` with its ``error`` to the list of failures. ``tries``: attempts that were made."""
        ...

    def flush(self) -> None:
        """Make the records and failures written so far survive a power failure."""
        ...


class BatchRunner:
    """One run of a batch: the items of ``source`` that are not settled, through ``executor`` into ``output``.

    ``progress``: callbacks; None: a plain ``BatchProgress``. ``limit``: at most so many pictures in this run;
    None: all. ``ordered``: write records in the source's order; False: in the order in which they finish. The
    caller closes ``output``.
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
        """Run to the end of the source, to the limit, or until ``stop``. Returns ``tally``. Call it once.

        Raises ``VlfitError`` for failures that concern all pictures, or too many in a row. Also then, and on
        ``KeyboardInterrupt``, pictures that were finished before are in the output.
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
        """Make ``run`` return soon; requests in flight are cancelled. May be called from a signal handler."""
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
    concurrency: int | None = None,
    progress: LoadProgress | None = None,
    *,
    readers: int | None = None,
    tries: int = DEFAULT_TRIES,
    shared_prefix: bool = False,
) -> tuple[Backend, ExecutorOptions]:
    """Open a backend for ``concurrency`` requests, and make executor options that keep it busy.

    The caller closes the backend. ``concurrency`` None: for the native backend as many of 8, 4, ... as fit,
    for others what ``spec`` says. ``readers``: threads that read ahead; None: one per core, 2 to 8.
    ``tries``: attempts at a picture, if its failures are transient. The native backend runs without encoder
    cache, and without prefix cache unless ``shared_prefix``: all prompts start with the same text before the
    picture.

    Raises ``UsageError`` for numbers out of range, and whatever ``open_backend`` raises.
    """
    check_limits(concurrency, readers, tries)
    if spec.kind == "native":
        backend = _open_native(
            _without_picture_caches(spec, shared_prefix=shared_prefix), concurrency, progress
        )
    else:
        backend = open_backend(_with_concurrency(spec, concurrency), progress)
    return backend, make_executor_options(backend, concurrency, readers=readers, tries=tries)


def check_limits(concurrency: int | None, readers: int | None = None, tries: int | None = None) -> None:
    """Raise ``UsageError`` for a number below 1 or above its limit. None is always valid.

    Limits: 1024 for ``concurrency``, 64 for ``readers``, 1000 for ``tries``.
    """
    for name, value in (("concurrency", concurrency), ("readers", readers), ("tries", tries)):
        if value is not None and not 1 <= value <= _UPPER_LIMITS[name]:
            raise UsageError(f"{name} is {value}", f"Use a number from 1 to {_UPPER_LIMITS[name]}.")


def make_executor_options(
    backend: Backend,
    concurrency: int | None = None,
    *,
    readers: int | None = None,
    tries: int = DEFAULT_TRIES,
) -> ExecutorOptions:
    """Executor options for ``backend``, without ``keep_going``.

    ``max_in_flight`` is ``concurrency``, limited to the number of requests that the backend runs at the same
    time, plus a quarter. The extra requests wait in the engine's queue, so that one starts in the same step
    in which another ends. ``concurrency`` None: as many as the backend runs. A server that does not report
    how many it runs gets exactly ``concurrency``; None: 8.

    ``readers`` None: one per core, 2 to 8. ``tries``: as in ``ExecutorOptions``.
    """
    readers = readers or min(_MAX_READERS, max(2, usable_cores()))
    num_running = getattr(backend, "sequences", None)
    if num_running is None:
        return ExecutorOptions(concurrency or DEFAULT_SERVER_CONCURRENCY, readers, tries)
    return ExecutorOptions(_plus_a_quarter(min(concurrency or num_running, num_running)), readers, tries)


def _plus_a_quarter(num_running: int) -> int:
    return num_running + max(1, num_running // 4)


def _with_concurrency(spec: BackendSpec, concurrency: int | None) -> BackendSpec:
    """``spec`` for a backend that accepts ``concurrency`` requests; unchanged if it is None."""
    if concurrency is not None and spec.kind == "remote":
        return replace(spec, max_concurrent=concurrency)
    if concurrency is not None and spec.kind == "vllm":
        from vlfit.backends.vllm.serve_command import VllmOptions

        return replace(spec, vllm=replace(spec.vllm or VllmOptions(), sequences=concurrency))
    return spec


def _without_picture_caches(spec: BackendSpec, *, shared_prefix: bool) -> BackendSpec:
    """``spec`` without caches across pictures, which the executor has deduplicated already.

    For mini they grew to 215 MiB over 466 pictures.
    """
    options = replace(
        spec.options, prefix_cache=spec.options.prefix_cache and shared_prefix, image_cache_bytes=0
    )
    return replace(spec, options=options)


def _open_native(spec: BackendSpec, concurrency: int | None, progress: LoadProgress | None) -> Backend:
    """Open with the most sequences that fit. Whether they fit is known before anything is loaded."""
    candidates = (concurrency,) if concurrency else SEQUENCES
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
    concurrency: int | None = None,
    limit: int | None = None,
    retry_failed: bool = False,
    progress: BatchProgress | None = None,
) -> Tally:
    """Ask ``wish`` about every picture of ``sources`` that is not settled in ``output`` yet.

    ``concurrency``: requests that run at the same time; None: as many as the backend runs. ``limit``: at most
    so many pictures in this call; None: all. ``retry_failed``: also take pictures that failed in earlier
    runs.

    Pictures that fail are counted in the tally, and listed beside the output. Raises ``UsageError`` if
    ``output`` belongs to another job or ``concurrency`` is out of range, and errors that concern all
    pictures.
    """
    check_limits(concurrency)
    job = Job(wish, sampling, tuple(sources), output)
    source = open_sources(job.sources, SourceOptions(output=output))
    records = Output(job, again=retry_failed)
    try:
        records.begin(backend.model)
        executor = BatchExecutor(
            PictureTask.from_job(job), backend, make_executor_options(backend, concurrency)
        )
        return BatchRunner(executor, source, records, progress=progress, limit=limit).run()
    finally:
        records.close()


def estimate_batch(
    executor: BatchExecutor, source: Source, output: Output | None, total: int | None
) -> dict[str, Any]:
    """Run the first unsettled pictures, two for each request in flight, and extrapolate to all. Writes
    nothing.

    ``output``: that of earlier runs, to skip settled pictures; None: there is none. ``total``: items of the
    source; None if unknown.

    Returns the JSON of ``vlfit batch --dry-run``. ``seconds_for_all`` and ``bytes_for_all`` are for all
    unsettled pictures; None without ``total``, or if no picture was tried.
    """
    settled_before = output.done_before + output.failed_before if output is not None else 0
    unsettled = (item for item in source if output is None or not output.is_settled(item.key))
    began, size = time.monotonic(), 0
    outcomes = list(executor.outcomes(islice(unsettled, 2 * executor.options.max_in_flight)))
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
