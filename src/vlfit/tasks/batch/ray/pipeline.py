"""The Ray Data pipeline of a batch: one task lists items, actors process them, results stream back.

A row of the dataset is a chunk of items: what is lost, and repeated, when a worker dies. Errors come back as
results: an exception that ends an actor would only reach Ray's log.
"""

import os
import platform
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pyarrow
import ray
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.util.annotations import RayDeprecationWarning

from vlfit._version import __version__
from vlfit.backends.opening import BackendSpec
from vlfit.errors import ClusterError, EngineLost, VlfitError
from vlfit.tasks.batch.executor import BatchExecutor, Outcome
from vlfit.tasks.batch.items import Item, Source
from vlfit.tasks.batch.ray.chunks import (
    ItemChunk,
    ItemChunkResult,
    UnsettledItems,
    WorkerConfig,
    from_bytes,
    split_into_chunks,
    to_bytes,
)
from vlfit.tasks.batch.ray.cluster import Cluster, WorkerPool, find_model_error, version_error

if TYPE_CHECKING:
    from vlfit.backends.base import Backend


RAY_DATA_THREADS = ("iter_threaded", "StreamingExecutor-", "ray-data-metadata-prefetch")
"""Names of Ray Data's threads that use the connection of this process."""

_THREADS_TIMEOUT_S = 30.0  # they end in about 0.1 s


class RayWorker:
    """A worker, as the class of Ray's actors: a backend and an executor. Creating it loads the model.

    If loading fails, nothing is raised; the error is returned as the result of every chunk. Two threads call
    the worker with a chunk each, so that pictures of the next chunk are there before the last answer of this
    one.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._error: VlfitError | None = None
        self._backend: Backend | None = None
        self._executor: BatchExecutor | None = None
        self._messages: deque[str] = deque()
        enter_folder(config.folder)
        try:
            self._open(config)
        except VlfitError as error:
            self._error = add_machine_name(error)

    def _open(self, config: WorkerConfig) -> None:
        from vlfit.tasks.batch.runner import open_for_batch

        if config.version != __version__:
            raise version_error(platform.node(), __version__, config.version)
        model_error = find_model_error(config.backend)
        if model_error is not None:
            raise model_error
        self._backend, options = open_for_batch(
            self._with_messages(config.backend),
            config.concurrency,
            readers=config.readers,
            tries=config.tries,
            shared_prefix=bool(config.task.wish.system),
        )
        self._executor = BatchExecutor(
            config.task, self._backend, replace(options, keep_going=config.keep_going)
        )

    def _with_messages(self, spec: BackendSpec) -> BackendSpec:
        """``spec`` with vLLM's start-up messages collected for the driver."""
        if spec.kind != "vllm":
            return spec
        from vlfit.backends.vllm.serve_command import VllmOptions

        return replace(spec, vllm=replace(spec.vllm or VllmOptions(), on_status=self._messages.append))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """Called by Ray: a column of pickled chunks in, a column of pickled results out."""
        return {"result": [to_bytes(self.process(from_bytes(cell))) for cell in batch["chunk"]]}

    def process(self, chunk: ItemChunk) -> ItemChunkResult:
        """Run every item of ``chunk`` and return the outcomes.

        A ``VlfitError`` that concerns all pictures, or that loading or listing raised, is the result's
        ``error``. ``EngineLost`` ends the whole process, so that Ray starts another.
        """
        if chunk.error is not None or self._error is not None:
            return ItemChunkResult(
                self._name, error=chunk.error or self._error, messages=self._take_messages()
            )
        assert self._executor is not None
        assert self._backend is not None
        originals = {item.key: item for item in chunk.items}
        try:
            outcomes = tuple(
                _portable_outcome(outcome, originals)
                for outcome in self._executor.outcomes(chunk.readable_items())
            )
        except EngineLost as error:
            exit_process(error)
        except VlfitError as error:
            return ItemChunkResult(self._name, error=add_machine_name(error), messages=self._take_messages())
        return ItemChunkResult(
            self._name, self._backend.model, outcomes, chunk.end, messages=self._take_messages()
        )

    def _take_messages(self) -> tuple[str, ...]:
        """Take the messages collected so far. Thread-safe."""
        messages: list[str] = []
        with suppress(IndexError):
            while True:
                messages.append(self._messages.popleft())
        return tuple(messages)

    def __del__(self) -> None:
        # Ray deletes the worker when there is no more work, and ends its process soon after.
        backend = getattr(self, "_backend", None)
        if backend is not None:
            with suppress(Exception):
                backend.close()


def _portable_outcome(outcome: Outcome, originals: dict[str, Item]) -> Outcome:
    """``outcome`` for sending back: without the picture's bytes, and with an error that pickles."""
    error = outcome.error
    if error is not None and not isinstance(error, VlfitError):
        error = VlfitError(f"{type(error).__name__}: {error}")
    return replace(outcome, item=originals[outcome.item.key], error=error)


def enter_folder(folder: str) -> None:
    """Change this process's working directory to ``folder``, the driver's, so that relative names mean the
    same.

    Does nothing if there is no such folder here.
    """
    with suppress(OSError):
        os.chdir(folder)


def exit_process(error: EngineLost) -> NoReturn:
    """End this process at once, with status 1, so that Ray starts another worker for the chunk.

    Prints ``error`` to stderr, which is Ray's log.
    """
    sys.stderr.write(f"{error.message}\n{error.hint}\n")
    sys.stderr.flush()
    os._exit(1)


def add_machine_name(error: VlfitError) -> VlfitError:
    """Put the name of this machine into the message of ``error``. Returns the same object."""
    error.message = f"on {platform.node()}: {error.message}"
    return error


@dataclass(frozen=True, slots=True)
class ChunkStreamOptions:
    """How chunks are streamed: ``chunk_items`` items per chunk, ``calls`` chunks at a time in a worker.

    ``retries``: how often a chunk is repeated if its worker dies. ``max_lost``: how many chunks may stay
    unprocessed, as their workers died each time, before the run fails; -1: any number. ``send``: read the
    pictures on the driver and send them in the chunks.
    """

    chunk_items: int
    calls: int
    retries: int
    max_lost: int
    send: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """The Ray task that lists ``source``, on the driver's node, and yields chunks of its items.

    ``settled``: reference to the sorted hashes of the keys to skip; ``folder``: the driver's working
    directory; ``limit``: at most so many items; None: all.
    """

    source: Source
    settled: "ray.ObjectRef[Any]"
    options: ChunkStreamOptions
    folder: str
    limit: int | None = None

    def blocks(self) -> Iterator[pyarrow.Table]:
        """Yield tables with one row and the column ``chunk``: a pickled ``ItemChunk``.

        If listing fails, the last chunk has ``error`` set: Ray would only log an exception.
        """
        enter_folder(self.folder)
        try:
            last = yield from self._chunks()
        except VlfitError as error:
            last = ItemChunk(error=error)
        except Exception as error:
            last = ItemChunk(
                error=ClusterError(f"the pictures cannot be listed: {type(error).__name__}: {error}")
            )
        yield _row(last)

    def _chunks(self) -> Generator[pyarrow.Table, None, ItemChunk]:
        """All chunks but the last, which is returned with the end of the listing."""
        previous: ItemChunk | None = None
        items = UnsettledItems(self.source, ray.get(self.settled))
        for chunk in split_into_chunks(
            islice(items, self.limit), self.options.chunk_items, send=self.options.send
        ):
            if previous is not None:
                yield _row(previous)
            previous = chunk
        assert previous is not None
        assert previous.end is not None
        end = replace(previous.end, notes=tuple(self.source.notes()), skipped=items.skipped)
        return replace(previous, end=end)


class _Datasource(Datasource):
    """A data source with one read task: the listing."""

    def __init__(self, listing: Listing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listing = listing

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        nothing_known = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._listing.blocks, nothing_known)]


def stream_results(
    cluster: Cluster, pool: WorkerPool, config: WorkerConfig, listing: Listing
) -> Generator[ItemChunkResult, None, None]:
    """Start the workers of ``pool`` and yield their results for the chunks of ``listing``, as they arrive.

    Closing the generator ends the workers. There is no result for a chunk whose workers died each time;
    raises ``ClusterError`` if there are more than ``max_lost`` such chunks.
    """
    threads = set(threading.enumerate())
    with _settings(listing.options):
        # Without prefetching, one thread of Ray's reads the results, one block ahead.
        dataset = _dataset(cluster.home, pool, config, listing)
        batches = dataset.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow")
        tables = cast("Generator[pyarrow.Table, None, None]", iter(batches))
        try:
            for table in tables:
                for cell in table["result"].to_pylist() if table.num_rows else ():
                    yield from_bytes(cell)
        except ray.exceptions.RayError as error:
            raise _workers_died(error, cluster) from error
        finally:
            tables.close()
            _join_ray_data(threads)


def _join_ray_data(before: set[threading.Thread]) -> None:
    """Wait for the threads that Ray Data has started since ``before`` and that still use the connection.

    They outlive an iteration that is closed early. Ray ends the whole process, with status 1 and no message,
    when a thread uses the connection after ``ray.shutdown``.
    """
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(RAY_DATA_THREADS):
            thread.join(max(0.0, deadline - time.monotonic()))


def _dataset(home: str, pool: WorkerPool, config: WorkerConfig, listing: Listing) -> ray.data.Dataset:
    options = listing.options
    listed = ray.data.read_datasource(
        _Datasource(listing),
        override_num_blocks=1,
        num_cpus=0,
        label_selector={"ray.io/node-id": home},  # where the names were typed
    )
    with warnings.catch_warnings():
        # map_batches has no parameter max_task_retries, and passing it through is deprecated until Ray 2.64.
        # Without it a picture that kills workers would do so for ever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        dataset: ray.data.Dataset = listed.map_batches(
            RayWorker,
            fn_constructor_args=(config,),
            batch_size=1,
            batch_format="numpy",
            compute=ActorPoolStrategy(
                size=pool.size,
                # One more is queued there; but none behind a picture that may kill the worker, as both count
                # as tried.
                max_tasks_in_flight_per_actor=options.calls + 1 if options.calls > 1 else 1,
                max_concurrent_calls_per_actor=options.calls,
                enable_true_multi_threading=options.calls > 1,
            ),
            max_task_retries=options.retries,
            **_resources(pool),
        )
    return dataset


def _resources(pool: WorkerPool) -> dict[str, int]:
    """Resources of an actor. Ray shows it only its own GPUs, and gives it as many threads as CPUs."""
    return {"num_gpus": pool.gpus} if pool.gpus else {"num_cpus": pool.cpus}


@contextmanager
def _settings(options: ChunkStreamOptions) -> Iterator[None]:
    """Set Ray Data's context of this process for the duration of the block."""
    context = DataContext.get_current()
    settings = {
        "target_max_block_size": 1,  # one row per block, so that a task gets one chunk
        "max_errored_blocks": options.max_lost,
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    before = {name: getattr(context, name) for name in settings}
    for name, value in settings.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)


def _row(chunk: ItemChunk) -> pyarrow.Table:
    return pyarrow.table({"chunk": pyarrow.array([to_bytes(chunk)], pyarrow.large_binary())})


def _workers_died(error: Exception, cluster: Cluster) -> ClusterError:
    last_exit = cluster.stdout.last_worker_exit()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = last_exit or (lines[-1][:300] if lines else type(error).__name__)
    return ClusterError(
        f"workers keep dying: {why}",
        "Finished pictures are in the output; Ray's logs are in /tmp/ray/session_latest/logs on each machine."
        " Out of memory is the usual cause: try --concurrency 1, or fewer --workers.",
    )
