"""A batch on a Ray cluster: from a source through workers on many machines into an output on this one.

Only this process writes. Ray may do a handful twice, when a worker dies; a key is written once. Knows when a
picture is given up. Does not know Ray's API (``cluster.py``, ``pipeline.py``) or what a worker does.
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
from vlfit.backends.opening import Wanted
from vlfit.errors import ClusterError, UsageError, VlfitError
from vlfit.tasks.batch.executor import Outcome
from vlfit.tasks.batch.failures import TRIES, Streak, is_own_fault
from vlfit.tasks.batch.items import Item, KeySet, Source
from vlfit.tasks.batch.job import Job, Work
from vlfit.tasks.batch.ray import RayOptions
from vlfit.tasks.batch.ray.chunks import Done, Duty, Listed
from vlfit.tasks.batch.ray.cluster import Sample, for_elsewhere, other_version, samples_of
from vlfit.tasks.batch.runner import FLUSH_SECONDS, Place, Progress, Tally, check_numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vlfit.tasks.batch.ray.cluster import Cluster, Team
    from vlfit.tasks.batch.ray.pipeline import Way


# Two of them for each worker: enough to keep an engine busy, and little to do again when a worker dies.
HANDFUL = 32
CALLS = 2
# A worker may die of the machine it is on; three times in a row with the same handful it is the handful.
_RETRIES = 3
# Handfuls that may be left over in a run before it is not a few strange pictures.
_LOST = 16


class RayPlace(Place, Protocol):
    """What a run on a cluster needs of an output, beyond what any run does."""

    def begin(self, model: str) -> None: ...
    def settled(self) -> "NDArray[np.uint64]": ...


@dataclass(frozen=True, slots=True)
class Few:
    """A source of items that are known already."""

    items: Sequence[Item]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def count(self) -> int:
        return len(self.items)

    def notes(self) -> list[str]:
        return []


def run_on_ray(
    job: Job,
    wanted: Wanted,
    options: RayOptions,
    *,
    source: Source,
    output: RayPlace,
    progress: Progress | None = None,
    at_once: int | None = None,
    readers: int | None = None,
    tries: int = TRIES,
    limit: int | None = None,
    keep_going: bool = False,
) -> Tally:
    """Do ``job`` to the end of ``source``, or of the first ``limit`` pictures that are not done.

    ``at_once`` requests run in each worker, ``readers`` threads read ahead there, and a failure that may pass
    is tried ``tries`` times; ``keep_going``: however many fail in a row. Raises ``UsageError`` where Ray is
    missing, ``ClusterError``, and what concerns all pictures, with what was finished by then in the output;
    an interrupt too, when the workers are gone.
    """
    check_ray(job, wanted)
    check_numbers(at_once, readers, tries)
    from vlfit.tasks.batch.ray.cluster import connected

    wanted = for_elsewhere(wanted)
    duty = Duty(Work.of(job), wanted, at_once, readers, tries, os.getcwd(), __version__, keep_going)
    ledger = _Ledger(output, progress or Progress(), keep_going)
    samples = samples_of(item for item in source if not output.is_settled(item.key))
    if samples is None:
        return ledger.progress.tally
    ledger.progress.note("reaching the cluster")
    with connected(options) as cluster:
        team = cluster.team(_with_cards(options, wanted), wanted.options.device)
        send = _check_machines(cluster, team, wanted, samples, ledger.progress)
        ledger.progress.note(_in_words(team))
        if not cluster.free(team):
            ledger.progress.note(
                "others have all of the cluster now: it begins when they end (see `ray status`)"
            )
        try:
            _go(cluster, team, duty, source, ledger, send, limit)
        finally:
            with suppress(VlfitError):  # whoever closes the output is told
                output.flush()
    ledger.progress.tick()
    return ledger.progress.tally


def check_ray(job: Job, wanted: Wanted) -> None:
    """Raises ``UsageError`` for what a cluster cannot do, before it is reached."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        raise UsageError("--ray needs Ray, which is not installed", "pip install 'vlfit[ray]'")
    if "-" in job.sources:
        raise UsageError(
            "standard input cannot be listed by another process", "write the list into a file, and name that"
        )
    device = wanted.options.device
    if device.startswith("cuda:"):
        raise UsageError(f"--device {device}: Ray says which GPU a worker has", "use --device cuda, or none")


def _go(
    cluster: "Cluster",
    team: "Team",
    duty: Duty,
    source: Source,
    ledger: "_Ledger",
    send: bool,
    limit: int | None,
) -> None:
    """All of ``source``; then, one by one, what is left of handfuls whose workers kept dying."""
    from vlfit.tasks.batch.ray.pipeline import Way

    size = _handful_size(source, team.size, duty.at_once, limit)
    ledger.take_all(cluster, team, duty, source, Way(size, CALLS, _RETRIES, _LOST, send), limit)
    left = ledger.left_of(source)
    if not left:
        return
    ledger.progress.note(f"{len(left)} pictures of workers that died are done again, one by one")
    # One at a time in each worker, so that the picture which a worker dies of is the one it has.
    alone = Way(size=1, calls=1, retries=1, lost=-1, send=send)
    ledger.take_all(cluster, team, duty, Few(left), alone, None)
    for item in ledger.left_of(Few(left)):
        error = ClusterError(
            "a worker died each time it was given this picture", "look at it with vlfit caption, alone"
        )
        ledger.settle(Outcome(item, error=error, tries=2))


class _Ledger:
    """What is settled in this run, and written. ``output`` may count what failed as not settled."""

    def __init__(self, output: RayPlace, progress: Progress, keep_going: bool = False) -> None:
        self.output = output
        self._keep_going = keep_going
        self.progress = progress
        self._keys = KeySet()
        self._streak = Streak()
        self._all = False  # whether nothing that was listed is missing
        self._limit: int | None = None
        self._begun = False
        self._workers: set[str] = set()
        self._told: set[str] = set()  # what one worker has said of its start, others need not say again
        self._strangers = 0  # workers of the team that have not been heard of yet
        self._flushed = time.monotonic()
        progress.tally.began = self._flushed

    def take_all(
        self, cluster: "Cluster", team: "Team", duty: Duty, source: Source, way: "Way", limit: int | None
    ) -> None:
        """Settle what workers do of ``source``. Raises what one of them could not go on for."""
        import ray

        from vlfit.tasks.batch.ray.pipeline import Listing, stream

        self._limit = limit
        listing = Listing(source, ray.put(self.output.settled()), way, duty.folder, limit)
        with closing(stream(cluster, team, duty, listing)) as dones:
            self.settle_all(dones, team.size)

    def settle_all(self, dones: Iterable[Done], size: int) -> None:
        """Settle what a team of ``size`` workers has done, until nothing more comes."""
        self._all, before = False, len(self._keys)
        self._strangers = size
        end: Listed | None = None
        for done in dones:
            self._take(done)
            end = end or done.end
        if end is not None:
            self._all = len(self._keys) - before >= end.count
            self.progress.tally.skipped += end.skipped
            self.progress.source_told = True
            for note in end.notes:
                self.progress.note(note)

    def _take(self, done: Done) -> None:
        if done.problem is not None:
            self._pass_on(done)
            raise done.problem
        if not self._begun:
            self._begun = True
            self.output.begin(done.model)
        if done.worker not in self._workers:
            self._workers.add(done.worker)
            self._strangers -= 1
            if self._strangers < 0:  # a team has so many at a time: whoever comes beyond that replaces one
                self.progress.note("a worker has died; what it had is done again")
            self.progress.note(f"worker {len(self._workers)} has begun: {done.worker}")
        self._pass_on(done)
        for outcome in done.outcomes:
            self.settle(outcome)
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self.output.flush()
        self.progress.tick()

    def _pass_on(self, done: Done) -> None:
        for words in done.told:
            if words not in self._told:
                self._told.add(words)
                self.progress.note(f"{done.worker}: {words}")

    def settle(self, outcome: Outcome) -> None:
        """Write what became of an item, the first time that it is told."""
        if outcome.item.key in self._keys:
            return
        self._keys.add(outcome.item.key)
        if outcome.record is not None:
            self.output.write(outcome.item, outcome.record)
            self._streak.success()
        elif outcome.error is not None:
            self.output.fail(outcome.item, outcome.error, outcome.tries)
        self.progress.settled(outcome)
        if outcome.error is None or self._keep_going or is_own_fault(outcome.error):
            return
        stop = self._streak.stop_for(outcome.error)
        if stop is not None:
            raise stop from outcome.error

    def left_of(self, source: Source) -> list[Item]:
        """What was listed and not settled. Goes through ``source`` only if something is missing."""
        if self._all:
            return []
        wanted = islice(self._of_this_run(source), self._limit)
        return [item for item in wanted if item.key not in self._keys]

    def _of_this_run(self, source: Source) -> Iterator[Item]:
        """The items that were not settled when the run began. Counts the others, if the listing could not."""
        skipped = 0
        for item in source:
            if item.key in self._keys or not self.output.is_settled(item.key):
                yield item
            else:
                skipped += 1
                self.progress.tally.skipped = max(self.progress.tally.skipped, skipped)


def _with_cards(options: RayOptions, wanted: Wanted) -> RayOptions:
    """``options`` with as many GPUs for each worker as its vLLM is to spread over."""
    if wanted.vllm is None:
        return options
    cards = (wanted.vllm.tensor_parallel or 1) * (wanted.vllm.data_parallel or 1)
    return replace(options, gpus_per_worker=max(options.gpus_per_worker, cards))


def _check_machines(
    cluster: "Cluster", team: "Team", wanted: Wanted, samples: tuple[Sample, ...], progress: Progress
) -> bool:
    """Whether pictures have to be sent: a machine lacks them. Raises ``ClusterError`` if one lacks the model,
    or has another vlfit.
    """
    sights = cluster.look(team, wanted, samples)
    for sight in sights:
        if sight.version != __version__:
            raise other_version(sight.node, sight.version, __version__)
        if sight.lacking is not None:
            raise sight.lacking
    without = next((sight for sight in sights if sight.unread is not None), None)
    if without is not None:
        progress.note(
            f"pictures are read here and sent to the workers: {without.node} cannot read {without.unread}, or"
            " has another file of that name (a folder that all machines see is faster)"
        )
    return without is not None


def _handful_size(source: Iterable[Item], workers: int, at_once: int | None, limit: int | None) -> int:
    """Items that travel together: as many as keep a worker busy, and few enough that all workers get some.
    ``source`` is looked at no further than that takes: to count a hundred million is hours.
    """
    most = max(HANDFUL, at_once or 0)
    shares = workers * CALLS * 2
    enough = most * shares if limit is None else min(limit, most * shares)
    return max(1, min(most, sum(1 for _ in islice(source, enough)) // shares))


def _in_words(team: "Team") -> str:
    what = (
        f"{team.gpus} GPU{'s' if team.gpus > 1 else ''}"
        if team.gpus
        else f"{team.cpus} core{'s' if team.cpus > 1 else ''}"
    )
    machines = f"{len(team.nodes)} machine{'s' if len(team.nodes) > 1 else ''}"
    words = f"starting {team.size} worker{'s' if team.size > 1 else ''} on {machines}, each with {what}"
    waiting = team.size - team.room
    if waiting > 0:
        words += f"; {waiting} of them wait until there is room in the cluster"
    return words + "; pictures come once they have loaded the model"
