"""The batch as Ray Data runs it: one task lists, as far ahead as there is room; actors do; what is done
streams back to the process that writes.

Knows Ray Data. A row of its datasets is a handful of items, because that is what should be lost, and done
again, when a worker dies. Does not know what a handful holds.
"""

import os
import platform
import socket
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow
import ray
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.util.annotations import RayDeprecationWarning

from vlfit._version import __version__
from vlfit.backends.opening import Wanted
from vlfit.errors import ClusterError, EngineLost, VlfitError
from vlfit.tasks.batch.executor import Crew, Outcome
from vlfit.tasks.batch.items import Item, Source
from vlfit.tasks.batch.ray.chunks import Done, Duty, Handful, Unsettled, handfuls, packed, unpacked
from vlfit.tasks.batch.ray.cluster import Cluster, Team, missing_model, other_version

if TYPE_CHECKING:
    from vlfit.backends.base import LocalBackend


# An actor of the cluster: a backend of its own, and a crew that keeps it busy with handfuls of items.
#
# Knows what a handful is and how its items become records. Does not know who lists, who writes, or how many
# other workers there are. What goes wrong for good comes back in words: an exception that ends an actor
# would reach nobody but Ray.


class Worker:
    """What Ray makes one of for each actor. Called with handfuls, by two threads at a time: so the engine has
    the next one's pictures before the last answer of this one has come.
    """

    def __init__(self, duty: Duty) -> None:
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._problem: VlfitError | None = None
        self._backend: LocalBackend | None = None
        self._crew: Crew | None = None
        self._said: deque[str] = deque()
        go_to(duty.folder)
        try:
            self._open(duty)
        except VlfitError as error:
            self._problem = located(error)

    def _open(self, duty: Duty) -> None:
        from vlfit.tasks.batch.runner import open_for_batch

        if duty.version != __version__:
            raise other_version(platform.node(), __version__, duty.version)
        lacking = missing_model(duty.wanted)
        if lacking is not None:
            raise lacking
        self._backend, pace = open_for_batch(
            self._heard(duty.wanted),
            duty.at_once,
            readers=duty.readers,
            tries=duty.tries,
            alike=bool(duty.work.wish.system),
        )
        self._crew = Crew(duty.work, self._backend, replace(pace, keep_going=duty.keep_going))

    def _heard(self, wanted: Wanted) -> Wanted:
        """``wanted``, and what vLLM's start says is kept for whoever started the batch."""
        if wanted.kind != "vllm":
            return wanted
        from vlfit.backends.vllm.serve_command import VllmOptions

        return replace(wanted, vllm=replace(wanted.vllm or VllmOptions(), tell=self._said.append))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """A batch of Ray's in and out: a column of packed handfuls, a column of what became of each."""
        return {"done": [packed(self.do(unpacked(cell))) for cell in batch["handful"]]}

    def do(self, handful: Handful) -> Done:
        """Settle every item of ``handful``."""
        if handful.problem is not None or self._problem is not None:
            return Done(self._name, problem=handful.problem or self._problem, told=self._to_tell())
        assert self._crew is not None
        assert self._backend is not None
        originals = {item.key: item for item in handful.items}
        try:
            outcomes = tuple(_light(outcome, originals) for outcome in self._crew.outcomes(handful.to_read()))
        except EngineLost as error:
            end_of_process(error)
        except VlfitError as error:
            return Done(self._name, problem=located(error), told=self._to_tell())
        return Done(self._name, self._backend.model, outcomes, handful.end, told=self._to_tell())

    def _to_tell(self) -> tuple[str, ...]:
        """What was said since somebody asked; another thread may ask too."""
        told: list[str] = []
        with suppress(IndexError):
            while True:
                told.append(self._said.popleft())
        return tuple(told)

    def __del__(self) -> None:
        # Ray drops a worker when there is no more to do, and its process ends soon after.
        backend = getattr(self, "_backend", None)
        if backend is not None:
            with suppress(Exception):
                backend.close()


def _light(outcome: Outcome, originals: dict[str, Item]) -> Outcome:
    """``outcome`` as it travels back: without the picture's bytes, and with an error that pickles."""
    error = outcome.error
    if error is not None and not isinstance(error, VlfitError):
        error = VlfitError(f"{type(error).__name__}: {error}")
    return replace(outcome, item=originals[outcome.item.key], error=error)


def go_to(folder: str) -> None:
    """Stand where the batch was started, if there is such a folder: relative names mean the same then."""
    with suppress(OSError):
        os.chdir(folder)


def end_of_process(error: EngineLost) -> NoReturn:
    """The model is gone, and this process has no other: it ends as if it had been killed, so that Ray starts
    another in its place and gives that the handful. Its log says why.
    """
    sys.stderr.write(f"{error.message}\n{error.hint}\n")
    sys.stderr.flush()
    os._exit(1)


def located(error: VlfitError) -> VlfitError:
    """``error`` with the machine that it happened on."""
    error.message = f"on {platform.node()}: {error.message}"
    return error


@dataclass(frozen=True, slots=True)
class Way:
    """How a dataset is gone through. ``size``: items of a handful. ``calls``: handfuls that a worker has at a
    time. ``retries``: how often one is done again after its worker died. ``lost``: how many may stay undone
    before the run is given up. ``send``: pictures go along.
    """

    size: int
    calls: int
    retries: int
    lost: int
    send: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """Goes through ``source`` on a machine of the cluster. ``settled`` refers to the sorted hashes of keys
    that there is nothing to do for; ``limit``: how many others there are at most.
    """

    source: Source
    settled: "ray.ObjectRef[Any]"
    way: Way
    folder: str
    limit: int | None = None

    def blocks(self) -> Iterator[pyarrow.Table]:
        """Rows, one at a time: Ray asks for the next one when there is room for it. An error is a row too, or
        Ray would only write it into its log.
        """
        go_to(self.folder)
        try:
            last = yield from self._handfuls()
        except VlfitError as error:
            last = Handful(problem=error)
        except Exception as error:
            last = Handful(
                problem=ClusterError(f"the pictures cannot be listed: {type(error).__name__}: {error}")
            )
        yield _row(last)

    def _handfuls(self) -> Generator[pyarrow.Table, None, Handful]:
        """All but the last, which is given back: it says what the source has to say at the end."""
        waiting: Handful | None = None
        items = Unsettled(self.source, ray.get(self.settled))
        for handful in handfuls(islice(items, self.limit), self.way.size, send=self.way.send):
            if waiting is not None:
                yield _row(waiting)
            waiting = handful
        assert waiting is not None
        assert waiting.end is not None
        end = replace(waiting.end, notes=tuple(self.source.notes()), skipped=items.skipped)
        return replace(waiting, end=end)


class _Datasource(Datasource):
    """One read task, which goes through a listing."""

    def __init__(self, listing: Listing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listing = listing

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        nothing_known = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._listing.blocks, nothing_known)]


def stream(cluster: Cluster, team: Team, duty: Duty, listing: Listing) -> Generator[Done, None, None]:
    """What the workers of ``team`` have done with what ``listing`` gives, as it comes. Handfuls whose workers
    died too often are missing. Raises ``ClusterError`` when too many are.

    To be closed: the workers end with it.
    """
    with _settings(listing.way):
        rows = iter(_dataset(cluster.home, team, duty, listing).iter_rows())
        try:
            for row in rows:
                yield unpacked(row["done"])
        except ray.exceptions.RayError as error:
            raise _died(error, cluster) from error


def _dataset(home: str, team: Team, duty: Duty, listing: Listing) -> ray.data.Dataset:
    way = listing.way
    listed = ray.data.read_datasource(
        _Datasource(listing),
        override_num_blocks=1,
        num_cpus=0,
        label_selector={"ray.io/node-id": home},  # where the source's names mean what was typed
    )
    with warnings.catch_warnings():
        # max_task_retries has no place of its own among map_batches' names, and the place for others is to
        # go in Ray 2.64. Without it a picture that kills workers would kill them for ever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        dataset: ray.data.Dataset = listed.map_batches(
            Worker,
            fn_constructor_args=(duty,),
            batch_size=1,
            batch_format="numpy",
            compute=ActorPoolStrategy(
                size=team.size,
                max_tasks_in_flight_per_actor=way.calls + 1,  # one waits there, so that nobody waits for it
                max_concurrent_calls_per_actor=way.calls,
                enable_true_multi_threading=way.calls > 1,
            ),
            max_task_retries=way.retries,
            **_resources(team),
        )
    return dataset


def _resources(team: Team) -> dict[str, int]:
    """Of an actor. Ray gives it only the GPUs that are its own to see, and as many threads as it has CPUs."""
    return {"num_gpus": team.gpus} if team.gpus else {"num_cpus": team.cpus}


@contextmanager
def _settings(way: Way) -> Iterator[None]:
    """Ray Data's settings of this process, for as long as a dataset of ours is run."""
    context = DataContext.get_current()
    ours = {
        "target_max_block_size": 1,  # a block for each row, so that a task has one handful
        "max_errored_blocks": way.lost,
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    before = {name: getattr(context, name) for name in ours}
    for name, value in ours.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)


def _row(handful: Handful) -> pyarrow.Table:
    return pyarrow.table({"handful": pyarrow.array([packed(handful)], pyarrow.large_binary())})


def _died(error: Exception, cluster: Cluster) -> ClusterError:
    heard = cluster.overheard.last_words()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = heard or (lines[-1][:300] if lines else type(error).__name__)
    return ClusterError(
        f"workers end again and again: {why}",
        "what is done is in the output; Ray's logs are in /tmp/ray/session_latest/logs on each machine."
        " Out of memory is the usual cause: try --concurrency 1, or fewer --workers",
    )
