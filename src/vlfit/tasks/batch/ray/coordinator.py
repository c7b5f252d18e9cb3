"""Run a batch on a Ray cluster: workers on many machines, the output on this one.

Only this process writes. Ray may process a chunk twice when a worker dies, but each key is written once. If
workers keep dying on a chunk, its items are repeated one by one, to find the picture that kills them.
"""

import importlib.util
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from vlfit._version import __version__
from vlfit.backends.opening import BackendSpec
from vlfit.errors import ClusterError, UsageError, VlfitError
from vlfit.tasks.batch.executor import Outcome
from vlfit.tasks.batch.failures import DEFAULT_TRIES, FailureStreak, is_picture_fault
from vlfit.tasks.batch.items import Item, KeySet, Source
from vlfit.tasks.batch.job import Job, PictureTask
from vlfit.tasks.batch.ray import RayOptions
from vlfit.tasks.batch.ray.chunks import ItemChunkResult, ListingEnd, WorkerConfig
from vlfit.tasks.batch.ray.cluster import PictureSample, portable_spec, read_samples, version_error
from vlfit.tasks.batch.runner import FLUSH_SECONDS, BatchOutput, BatchProgress, Tally, check_limits
from vlfit.units import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vlfit.tasks.batch.ray.cluster import Cluster, WorkerPool
    from vlfit.tasks.batch.ray.pipeline import ChunkStreamOptions


# Two chunks per worker keep an engine busy, and little is repeated when a worker dies.
CHUNK_ITEMS = 32
CHUNKS_PER_WORKER = 2
# A worker may die because of its machine; if it dies three times on a chunk, the chunk is the cause.
_RETRIES = 3
# Chunks that may stay unprocessed before the run is given up.
_MAX_LOST_CHUNKS = 16


class RayBatchOutput(BatchOutput, Protocol):
    """The methods of ``Output`` that a run on a cluster calls."""

    def begin(self, model: str) -> None:
        """Prepare for writing records of ``model``, a name. Called once, before the first ``write``."""

    def settled_hashes(self) -> "NDArray[np.uint64]":
        """Sorted hashes (``items.hash_of``) of all keys for which ``is_settled`` is true."""


@dataclass(frozen=True, slots=True)
class FixedSource:
    """A ``Source`` of the items of a list."""

    items: Sequence[Item]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def count(self) -> int:
        """The number of items."""
        return len(self.items)

    def notes(self) -> list[str]:
        """Always empty."""
        return []


def run_on_ray(
    job: Job,
    spec: BackendSpec,
    options: RayOptions,
    *,
    source: Source,
    output: RayBatchOutput,
    progress: BatchProgress | None = None,
    concurrency: int | None = None,
    readers: int | None = None,
    tries: int = DEFAULT_TRIES,
    limit: int | None = None,
    keep_going: bool = False,
) -> Tally:
    """Run ``job`` on a Ray cluster over the pictures of ``source`` that are not settled in ``output``.

    ``concurrency``: requests that run at the same time on each worker; None: as many as fit. ``readers``:
    threads of each worker that read pictures; None: one per core, 2 to 8. ``tries``: attempts at a picture,
    if its failures are transient. ``limit``: at most so many pictures in this run; None: all. ``keep_going``:
    do not stop when many pictures in a row fail. Connects to no cluster if nothing is left to do. The caller
    closes ``output``.

    Raises ``UsageError`` as ``check_ray`` and ``check_limits`` do, ``ClusterError``, other errors that
    concern all pictures, and ``KeyboardInterrupt`` once the workers have ended. Pictures finished by then are
    in the output.
    """
    check_ray(job, spec)
    check_limits(concurrency, readers, tries)
    from vlfit.tasks.batch.ray.cluster import connect

    spec = portable_spec(spec)
    config = WorkerConfig(
        PictureTask.from_job(job), spec, concurrency, readers, tries, os.getcwd(), __version__, keep_going
    )
    writer = _ResultWriter(output, progress or BatchProgress(), keep_going)
    samples = read_samples(_unsettled_items(source, output))
    if samples is None:
        return writer.progress.tally
    writer.progress.note("connecting to the cluster")
    with connect(options) as cluster:
        pool = cluster.plan_worker_pool(_with_gpus_per_worker(options, spec), spec.options.device)
        send = _check_nodes(cluster, pool, spec, samples, writer.progress)
        writer.progress.note(_pool_message(pool))
        if not cluster.free_slots(pool):
            writer.progress.note(
                "the cluster is busy with other jobs: the batch starts when they end (see `ray status`)"
            )
        try:
            _process(cluster, pool, config, source, writer, send, limit)
        finally:
            with suppress(VlfitError):  # closing the output raises it again
                output.flush()
    writer.progress.tick()
    return writer.progress.tally


def check_ray(job: Job, spec: BackendSpec) -> None:
    """Raise ``UsageError`` if Ray is not installed, or a cluster cannot run the job.

    It cannot with standard input as a source, or with one GPU as device (``cuda:1``).
    """
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        raise UsageError("--ray needs Ray, which is not installed", "Install it: pip install 'vlfit[ray]'.")
    if "-" in job.sources:
        raise UsageError("a cluster cannot read standard input", "Write the list to a file and name that.")
    device = spec.options.device
    if device.startswith("cuda:"):
        raise UsageError(
            f"--device {device}: Ray assigns GPUs to workers", "Use --device cuda, or leave it out."
        )


def _process(
    cluster: "Cluster",
    pool: "WorkerPool",
    config: WorkerConfig,
    source: Source,
    writer: "_ResultWriter",
    send: bool,
    limit: int | None,
) -> None:
    """Process ``source``; then, item by item, what is missing of chunks whose workers kept dying."""
    from vlfit.tasks.batch.ray.pipeline import ChunkStreamOptions

    size = _chunk_items(source, pool.size, config.concurrency, limit)
    writer.process(
        cluster,
        pool,
        config,
        source,
        ChunkStreamOptions(size, CHUNKS_PER_WORKER, _RETRIES, _MAX_LOST_CHUNKS, send),
        limit,
    )
    missing = writer.missing_items(source)
    if not missing:
        return
    writer.progress.note(f"{counted(len(missing), 'picture')} of workers that died: repeated one by one")
    # One at a time per worker, so that a worker dies of the picture it has.
    alone = ChunkStreamOptions(chunk_items=1, calls=1, retries=1, max_lost=-1, send=send)
    writer.process(cluster, pool, config, FixedSource(missing), alone, None)
    for item in writer.missing_items(FixedSource(missing)):
        error = ClusterError("workers died each time on this picture", "Try it alone with vlfit caption.")
        writer.write_outcome(Outcome(item, error=error, tries=2))


class _ResultWriter:
    """Writes results of workers to the output, each key once, and keeps track of what is missing."""

    def __init__(self, output: RayBatchOutput, progress: BatchProgress, keep_going: bool = False) -> None:
        self.output = output
        self._keep_going = keep_going
        self.progress = progress
        self._keys = KeySet()
        self._streak = FailureStreak()
        self._complete = False  # whether all listed items are settled
        self._limit: int | None = None
        self._begun = False
        self._workers: set[str] = set()
        self._shown_messages: set[str] = set()  # shown once, though each worker sends them
        self._unseen_workers = 0  # workers of the pool without a result yet
        self._flushed = time.monotonic()
        progress.tally.began = self._flushed

    def process(
        self,
        cluster: "Cluster",
        pool: "WorkerPool",
        config: WorkerConfig,
        source: Source,
        stream_options: "ChunkStreamOptions",
        limit: int | None,
    ) -> None:
        """Process ``source`` on the workers. Raises the error that stopped one of them."""
        import ray

        from vlfit.tasks.batch.ray.pipeline import Listing, stream_results

        self._limit = limit
        listing = Listing(source, ray.put(self.output.settled_hashes()), stream_options, config.folder, limit)
        with closing(stream_results(cluster, pool, config, listing)) as results:
            self.write_results(results, pool.size)

    def write_results(self, results: Iterable[ItemChunkResult], size: int) -> None:
        """Write all results of a pool of ``size`` workers, and note which workers begin or die.

        Raises the error in a result.
        """
        self._complete, before = False, len(self._keys)
        self._unseen_workers = size
        end: ListingEnd | None = None
        for result in results:
            self._write_result(result)
            end = end or result.end
        if end is not None:
            self._complete = len(self._keys) - before >= end.count
            self.progress.tally.skipped += end.skipped
            self.progress.source_notes_shown = True
            for note in end.notes:
                self.progress.note(note)

    def _write_result(self, result: ItemChunkResult) -> None:
        if result.error is not None:
            self._show_messages(result)
            raise result.error
        if not self._begun:
            self._begun = True
            self.output.begin(result.model)
        if result.worker not in self._workers:
            self._workers.add(result.worker)
            self._unseen_workers -= 1
            if self._unseen_workers < 0:  # more workers than the pool has: this one replaces another
                self.progress.note("a worker died; its pictures are repeated")
            self.progress.note(f"worker {len(self._workers)} has begun: {result.worker}")
        self._show_messages(result)
        for outcome in result.outcomes:
            self.write_outcome(outcome)
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self.output.flush()
        self.progress.tick()

    def _show_messages(self, result: ItemChunkResult) -> None:
        for message in result.messages:
            if message not in self._shown_messages:
                self._shown_messages.add(message)
                self.progress.note(f"{result.worker}: {message}")

    def write_outcome(self, outcome: Outcome) -> None:
        """Write an outcome, unless its key was written before.

        Raises ``VlfitError`` if too many pictures in a row failed.
        """
        if outcome.item.key in self._keys:
            return
        self._keys.add(outcome.item.key)
        if outcome.record is not None:
            self.output.write(outcome.item, outcome.record)
            self._streak.count_success()
        elif outcome.error is not None:
            self.output.record_failure(outcome.item, outcome.error, outcome.tries)
        self.progress.settled(outcome)
        if outcome.error is None or self._keep_going or is_picture_fault(outcome.error):
            return
        stop = self._streak.count_failure(outcome.error)
        if stop is not None:
            raise stop from outcome.error

    def missing_items(self, source: Source) -> list[Item]:
        """Items of this run without an outcome. Iterates ``source`` only if some are missing."""
        if self._complete:
            return []
        listed = islice(self._items_of_this_run(source), self._limit)
        return [item for item in listed if item.key not in self._keys]

    def _items_of_this_run(self, source: Source) -> Iterator[Item]:
        """The items that were not settled when the run started. Counts the others as skipped."""
        skipped = 0
        for item in source:
            if item.key in self._keys or not self.output.is_settled(item.key):
                yield item
            else:
                skipped += 1
                self.progress.tally.skipped = max(self.progress.tally.skipped, skipped)


def _unsettled_items(source: Source, output: RayBatchOutput) -> Iterator[Item]:
    """The items that are not settled. Unfinished sidecars are removed beside all up to the last one taken.

    Beside later items they are removed when these are written or fail, which all have to that have some.
    """
    for item in source:
        output.clean_beside(item)
        if not output.is_settled(item.key):
            yield item


def _with_gpus_per_worker(options: RayOptions, spec: BackendSpec) -> RayOptions:
    """``options`` with as many GPUs per worker as its vLLM uses."""
    if spec.vllm is None:
        return options
    gpus = (spec.vllm.tensor_parallel or 1) * (spec.vllm.data_parallel or 1)
    return replace(options, gpus_per_worker=max(options.gpus_per_worker, gpus))


def _check_nodes(
    cluster: "Cluster",
    pool: "WorkerPool",
    spec: BackendSpec,
    samples: tuple[PictureSample, ...],
    progress: BatchProgress,
) -> bool:
    """Whether pictures have to be sent, because a node cannot read them.

    Raises ``ClusterError`` if a node lacks the model, or has another version of vlfit.
    """
    nodes = cluster.inspect_nodes(pool, spec, samples)
    for node in nodes:
        if node.version != __version__:
            raise version_error(node.node, node.version, __version__)
        if node.model_error is not None:
            raise node.model_error
    unreadable = next((node for node in nodes if node.missing_picture is not None), None)
    if unreadable is not None:
        progress.note(
            f"pictures are read here and sent to the workers (a shared folder would be faster): "
            f"{unreadable.node} cannot read {unreadable.missing_picture}, or has another file of that name"
        )
    return unreadable is not None


def _chunk_items(source: Iterable[Item], workers: int, concurrency: int | None, limit: int | None) -> int:
    """Items per chunk: enough to keep a worker busy, few enough that all workers get some.

    Counts no further than needed, as counting a hundred million items takes hours.
    """
    max_items = max(CHUNK_ITEMS, concurrency or 0)
    num_chunks = workers * CHUNKS_PER_WORKER * 2
    enough = max_items * num_chunks if limit is None else min(limit, max_items * num_chunks)
    return max(1, min(max_items, sum(1 for _ in islice(source, enough)) // num_chunks))


def _pool_message(pool: "WorkerPool") -> str:
    what = counted(pool.gpus, "GPU") if pool.gpus else counted(pool.cpus, "core")
    machines = counted(len(pool.nodes), "machine")
    message = f"starting {counted(pool.size, 'worker')} on {machines}, each with {what}"
    waiting = pool.size - pool.capacity
    if waiting > 0:
        message += f"; {waiting} of them wait for free resources"
    return message + "; results follow once they have loaded the model"
