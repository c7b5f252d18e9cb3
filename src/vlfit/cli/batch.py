"""``vlfit batch``: the same thing asked about every picture of a folder, a list or a shard, into one file.

Knows: options, the order of opening and closing, signals, exit codes. Does not know: how a backend is kept
busy or an output kept whole (``tasks/batch``), or what a person is shown (``batch_page.py``).
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from vlfit.cli import batch_options as its
from vlfit.cli.batch_sources import is_read_once, source_of
from vlfit.cli.options import CommonOptions, takes_common_options
from vlfit.cli.signals import end_at_once, terminated_as_interrupted
from vlfit.errors import UsageError, VlfitError

if TYPE_CHECKING:
    from types import FrameType

    from vlfit.backends.base import OpenBackend
    from vlfit.backends.opening import Wanted
    from vlfit.cli.loading import Progress
    from vlfit.cli.session import Session
    from vlfit.tasks.batch.crew import Pace
    from vlfit.tasks.batch.item import Sidecar, Source
    from vlfit.tasks.batch.job import Job
    from vlfit.tasks.batch.ray.options import RayOptions
    from vlfit.tasks.batch.runner import Runner
    from vlfit.tasks.batch.sidecars.late import Passing

INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended


@partial(
    takes_common_options,
    without=("stream",),  # words go into the output
    json="Print a summary at the end, as one line of JSON on stdout.",
)
def batch(
    sources: its.Sources,
    output: its.Output,
    long: its.Long = False,
    ask: its.Ask = None,
    system: its.System = None,
    scene: its.Scene = False,
    detect: its.Detect = None,
    schema: its.Schema = None,
    concurrency: its.Concurrency = None,
    readers: its.Readers = None,
    tries: its.Tries = None,
    keep_going: its.KeepGoing = False,
    limit: its.Limit = None,
    ordered: its.Ordered = False,
    retry_failed: its.RetryFailed = False,
    force: its.Force = False,
    dry_run: its.DryRun = False,
    sidecar: its.Sidecars = None,
    overwrite: its.Overwrite = False,
    backup: its.Backup = False,
    keep_times: its.KeepTimes = False,
    column: its.Column = None,
    keep: its.Keep = None,
    hidden: its.Hidden = False,
    allow_private_urls: its.PrivateUrls = False,
    shard: its.Shard = None,
    ray: its.Ray = None,
    workers: its.Workers = None,
    *,
    options: CommonOptions,
) -> None:
    """Caption every picture of a folder, a list or a shard into one file: or answer, or find things.

    Give the same command again after Ctrl-C, a crash or a full disk, and it goes on where it was: nothing is
    lost and nothing is done twice. Pictures that cannot be read are listed with the reason beside the output,
    in FILE.failed.jsonl, and the others go on. Pictures of the same bytes are asked about once.

    It ends with 0 if all pictures are done, 1 if some are on that list or it had to stop, 2 if it was asked
    for something that makes no sense, 3 if the model does not fit, and 130 after Ctrl-C.

    \b
    Examples:
      vlfit batch holiday/ -o captions.jsonl
      vlfit batch holiday/ --dry-run -o captions.jsonl
      vlfit batch 'scans/**/*.png' --ask "Which date is on this receipt?" -o dates.jsonl
      vlfit batch pictures.txt --detect "cups, plates" -o cups.jsonl
      vlfit batch holiday/ -o captions.jsonl --sidecar xmp
      vlfit batch shards/*.tar --scene -o scenes.parquet --backend vllm
      vlfit batch holiday/ -o captions.jsonl --server http://gpu-box:8000 --concurrency 16
      vlfit batch holiday/ -o captions.jsonl --ray local
    """
    from vlfit.cli.session import Session
    from vlfit.engine.sampling import SamplingParams
    from vlfit.tasks.batch.job import Job
    from vlfit.tasks.batch.opening import check_numbers
    from vlfit.tasks.batch.output import is_table
    from vlfit.tasks.batch.sources import SourceOptions
    from vlfit.tasks.sampling_options import with_options

    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}", "it must be at least 1")
    check_numbers(concurrency, readers, tries)
    is_table(output)
    cluster = its.read_cluster(ray, workers, ordered=ordered, dry_run=dry_run)
    wish = its.read_wish(long=long, ask=ask, system=system, scene=scene, detect=detect, schema=schema)
    with terminated_as_interrupted():
        # On a cluster others look: a model need not be here.
        session = Session(options, looks=cluster is None)
        sampling = with_options(SamplingParams(), session.sampling)
        job = Job(
            wish,
            sampling,
            tuple(sources),
            output,
            sidecars=tuple(sidecar or ()),
            shard=its.read_part(shard),
            engine=session.seen(),
        )
        cards = _sidecars(job, overwrite=overwrite, backup=backup, keep_times=keep_times)
        named = SourceOptions(column, tuple(keep or ()), allow_private_urls, hidden, output)
        source = source_of(job, named, listed_here=cluster is None)
        pace = _Wishes(concurrency, readers, tries, keep_going=keep_going, alike=bool(wish.system))
        if dry_run:
            _try_out(session, job, source, pace, force=force, again=retry_failed, as_json=options.json)
            return
        with _Batch(
            session, job, source, cards, force=force, again=retry_failed, as_json=options.json
        ) as run:
            run.see_to_sidecars(overwrite=overwrite)
            if cluster is not None:
                run.on_ray(cluster, pace, limit)
            else:
                run.here(pace, limit, ordered=ordered)
    run.tell()


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What was typed of how many things run at once; ``alike``: all begin with the same words."""

    concurrency: int | None
    readers: int | None
    tries: int | None
    keep_going: bool
    alike: bool

    def open(self, wanted: "Wanted", progress: "Progress") -> "tuple[OpenBackend, Pace]":
        from vlfit.tasks.batch.failures import TRIES
        from vlfit.tasks.batch.opening import open_for_batch

        backend, pace = open_for_batch(
            wanted,
            self.concurrency,
            progress,
            readers=self.readers,
            tries=TRIES if self.tries is None else self.tries,
            alike=self.alike,
        )
        return backend, replace(pace, keep_going=self.keep_going)


class _Batch:
    """A run, from its output's opening to its closing."""

    def __init__(
        self,
        session: "Session",
        job: "Job",
        source: "Source",
        sidecars: "Sequence[Sidecar]",
        *,
        force: bool,
        again: bool,
        as_json: bool,
    ) -> None:
        from vlfit.cli.batch_page import BatchPage
        from vlfit.tasks.batch.output import Output

        self._session = session
        self._job = job
        self._source = source
        self._sidecars = sidecars
        self._as_json = as_json
        self._late: Passing | None = None  # what waits for its sidecars until the source has been read
        self._output = Output(job, force=force, again=again, sidecars=sidecars)
        self._before = self._output.done_before + (0 if again else self._output.failed_before)
        self._page = BatchPage(session.printer, self._before)
        if self._output.began_with is not None:
            session.printer.note(
                f"{job.output} was begun with {self._output.began_with}: pictures of the same key as one"
                " that is done count as done"
            )

    def __enter__(self) -> "_Batch":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._output.close()
        except VlfitError as failed:
            self._tell_end(failed)
            raise
        if error is not None:
            self._tell_end(error)
        # Where nothing had begun, there is no here to go on from.
        if isinstance(error, VlfitError | KeyboardInterrupt) and self._output.begun:
            done = self._page.tally.done
            words = (
                f"{done:,} {'picture is' if done == 1 else 'pictures are'} done"
                if done
                else "nothing is lost"
            )
            self._session.printer.note(f"{words}; the same command goes on from here")

    def see_to_sidecars(self, *, overwrite: bool) -> None:
        """Those of pictures that were done before, from what the output says of them."""
        from vlfit.tasks.batch.sidecars.late import Passing

        keys = self._output.late(overwrite=overwrite)
        if not len(keys):
            return
        many = f"{len(keys):,} {'picture was' if len(keys) == 1 else 'pictures were'}"
        self._session.printer.note(f"{many} done before: missing sidecars are written from the output")
        if is_read_once(self._job):
            self._source = self._late = Passing(self._source, keys.__contains__)
            return
        others = len(keys) - self._output.write_late(self._source, keys)
        if others:
            self._session.printer.note(
                f"{others:,} of those are not among these pictures: no sidecars are written for them"
            )

    def _tell_end(self, error: BaseException) -> None:
        """Of a run that ``error`` has ended: how far it came, for programs."""
        from vlfit.cli.batch_page import summary

        if self._as_json:
            self._page.tally.stopped = True
            self._session.printer.data(summary(self._page.tally, self._output, error))

    def here(self, pace: _Wishes, limit: int | None, *, ordered: bool) -> None:
        """With a backend of this process. Nothing is loaded if there is nothing left to do."""
        from vlfit.server.host_memory import give_memory_back, keep_what_is_loaded
        from vlfit.tasks.batch.crew import Crew
        from vlfit.tasks.batch.job import Work
        from vlfit.tasks.batch.keys import KeySet
        from vlfit.tasks.batch.runner import Runner

        if not is_read_once(self._job):
            if all(self._output.is_settled(item.key) for item in self._source):
                return
            self._count_beside(limit)
        give_memory_back()
        backend, chosen = self._session.open(pace.open)
        keep_what_is_loaded()
        crew = Crew(Work.of(self._job), backend, chosen)
        runner = Runner(crew, self._source, self._output, progress=self._page, limit=limit, ordered=ordered)
        with _stopped_by_signals(runner), closing(backend):
            self._output.begin(backend.model)
            with self._page:
                runner.run()
        if self._late is not None:
            late = KeySet(item.key for item in self._late.done)
            self._output.write_late(self._late.done, late)

    def on_ray(self, cluster: "RayOptions", pace: _Wishes, limit: int | None) -> None:
        """Over a cluster."""
        from vlfit.tasks.batch.failures import TRIES
        from vlfit.tasks.batch.ray.run import run_on_ray

        self._count_beside(limit)
        with self._page as page:
            run_on_ray(
                self._job,
                self._session.wanted(),
                cluster,
                source=self._source,
                output=self._output,
                progress=page,
                at_once=pace.concurrency,
                readers=pace.readers,
                tries=TRIES if pace.tries is None else pace.tries,
                limit=limit,
                keep_going=pace.keep_going,
            )

    def _count_beside(self, limit: int | None) -> None:
        """Tell the page how many pictures there are to be, as soon as that is known."""

        def count() -> None:
            with suppress(VlfitError):  # who works on the pictures meets the same
                total = self._source.count()
                if total is not None and limit is not None:
                    total = min(total, self._before + limit)
                self._page.tally.about = bool(getattr(self._source, "about", False))
                self._page.tally.total = total

        threading.Thread(target=count, name="vlfit-count", daemon=True).start()

    def tell(self) -> None:
        """How it ended, and the exit code for it."""
        from vlfit.cli.batch_page import summary, tell_summary

        tally, printer = self._page.tally, self._session.printer
        # Of a source that a cluster has listed, what was gone through here may have been a part.
        source_notes = () if self._page.source_told else self._source.notes()
        for note in (*source_notes, *(note for card in self._sidecars for note in card.notes())):
            printer.note(note)
        tell_summary(tally, self._output, printer)
        if tally.stopped:
            printer.note("stopped; the same command goes on from here")
        if self._as_json:
            printer.data(summary(tally, self._output))
        if tally.stopped:
            raise typer.Exit(INTERRUPTED)
        if self._output.failed or self._output.without_sidecar:
            raise typer.Exit(1)


def _try_out(
    session: "Session",
    job: "Job",
    source: "Source",
    pace: _Wishes,
    *,
    force: bool,
    again: bool,
    as_json: bool,
) -> None:
    """Count, and do the first few without writing anything."""
    from vlfit.cli.batch_page import tell_trial
    from vlfit.tasks.batch.crew import Crew
    from vlfit.tasks.batch.job import Work
    from vlfit.tasks.batch.output import Output
    from vlfit.tasks.batch.trial import try_out

    # Opening an output makes one, so an output that is not there stays unopened.
    output = Output(job, force=force, again=again) if job.output.exists() else None
    try:
        backend, chosen = session.open(pace.open)
        try:
            facts = try_out(Crew(Work.of(job), backend, chosen), source, output, source.count())
        finally:
            backend.close()
    finally:
        if output is not None:
            output.close()
    if as_json:
        session.printer.data(facts)
    else:
        tell_trial(facts, session.printer)


def _sidecars(job: "Job", *, overwrite: bool, backup: bool, keep_times: bool) -> "list[Sidecar]":
    from vlfit.tasks.batch.sidecars import sidecar

    if not job.sidecars and (overwrite or backup or keep_times):
        raise UsageError("--overwrite, --backup and --keep-times go with --sidecar", "name a kind of sidecar")
    if (backup or keep_times) and "exif" not in job.sidecars:
        raise UsageError("--backup and --keep-times go with --sidecar exif", "leave them out")
    kinds = dict.fromkeys(job.sidecars)
    return [sidecar(kind, overwrite=overwrite, backup=backup, keep_times=keep_times) for kind in kinds]


@contextmanager
def _stopped_by_signals(runner: "Runner") -> Iterator[None]:
    """Within the block the first Ctrl-C or SIGTERM lets the run end in order; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: "FrameType | None") -> None:
        if runner.tally.stopped:
            end_at_once(INTERRUPTED)
        runner.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
