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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.options import CommonOptions, takes_common_options
from vlfit.cli.signals import end_at_once, terminated_as_interrupted
from vlfit.errors import PictureNotFound, UsageError, VlfitError

if TYPE_CHECKING:
    from types import FrameType

    from vlfit.backends.base import OpenBackend
    from vlfit.backends.opening import Wanted
    from vlfit.cli.loading import Progress
    from vlfit.cli.session import Session
    from vlfit.tasks.batch.executor import Pace
    from vlfit.tasks.batch.items import Sidecar, Source
    from vlfit.tasks.batch.job import Job, Wish
    from vlfit.tasks.batch.ray import RayOptions
    from vlfit.tasks.batch.runner import Runner
    from vlfit.tasks.batch.sidecars.late import Passing
    from vlfit.tasks.batch.sources import SourceOptions


# Options of ``vlfit batch``, as they are written and explained, and what is asked by them.


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Folders, globs, pictures, .txt lists (one name or URL a line), .tar shards, .parquet tables.",
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Where records go: .jsonl, or .parquet for a folder of them."
    ),
]
Long = Annotated[bool, typer.Option("--long", help="Captions of a paragraph instead of a sentence.")]
Ask = Annotated[str | None, typer.Option("--ask", metavar="QUESTION", help="Answer this about each picture.")]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="With --ask: what to tell the model first.")
]
Scene = Annotated[
    bool, typer.Option("--scene", help="A summary, objects with boxes, and the words on each picture.")
]
Detect = Annotated[
    str | None, typer.Option("--detect", metavar="THINGS", help='Where these are: "cups", "cups, plates".')
]
Schema = Annotated[
    Path | None,
    typer.Option(
        "--schema",
        metavar="FILE",
        help="A JSON schema that each answer must keep to; alone, or for --ask.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        metavar="N",
        help="Pictures that are worked on at once.  [default: as many as fit, at most 8 here]",
    ),
]
Readers = Annotated[
    int | None,
    typer.Option(
        "--readers", metavar="N", help="Threads that read and decode ahead.  [default: one a processor, 2-8]"
    ),
]
Tries = Annotated[
    int | None,
    typer.Option(
        "--tries", metavar="N", help="How often a failure that may pass is tried in all.  [default: 6]"
    ),
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Do not stop when many pictures in a row fail: list them.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="Stop after so many pictures of each run.")
]
Ordered = Annotated[bool, typer.Option("--ordered", help="Write records in the order of the pictures.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Try again what is on the list of failures.")
]
Force = Annotated[bool, typer.Option("--force", help="Go on in an output that another job began.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Count, do the first few without writing, and say how long all take."),
]
Sidecars = Annotated[
    list[str] | None,
    typer.Option(
        "--sidecar",
        metavar="KIND",
        help="Also write each text beside its picture: txt, xmp, xmp-stem (photo.xmp), or into it: exif,"
        " which needs the program exiftool.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="With --sidecar: replace texts that are there already.")
]
Backup = Annotated[
    bool, typer.Option("--backup", help="With --sidecar exif: leave the picture as it was in FILE_original.")
]
KeepTimes = Annotated[
    bool, typer.Option("--keep-times", help="With --sidecar exif: the file keeps its time.")
]
Column = Annotated[
    str | None,
    typer.Option("--column", metavar="NAME", help="Of a .parquet table: the column with the pictures."),
]
Keep = Annotated[
    list[str] | None,
    typer.Option("--keep", metavar="NAME", help="Of a .parquet table: carry this column into the records."),
]
Hidden = Annotated[bool, typer.Option("--hidden", help="Folders: look at names that begin with a dot, too.")]
PrivateUrls = Annotated[
    bool, typer.Option("--allow-private-urls", help="Fetch URLs in the private network, too.")
]
Shard = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only part I of N, for N machines that share the pictures."),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Run on a Ray cluster: host:port, auto, or local."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", help="With --ray: models that run at once.  [default: one a GPU]"),
]


def read_part(shard: str | None) -> str | None:
    """``shard`` as I/N, however it was typed; None for the whole. Raises ``UsageError`` for anything else."""
    from vlfit.tasks.batch.sources import read_shard

    if shard is None:
        return None
    index, of = read_shard(shard)
    return f"{index}/{of}" if (index, of) != (1, 1) else None


def read_cluster(
    ray: str | None, workers: int | None, *, ordered: bool, dry_run: bool
) -> "RayOptions | None":
    """The cluster that was named; None: this machine alone. Raises ``UsageError`` for what does not go with
    the one or the other.
    """
    from vlfit.tasks.batch.ray import RayOptions

    if ray is None:
        if workers is not None:
            raise UsageError("--workers goes with --ray", "--concurrency is how many run at once here")
        return None
    if ordered:
        raise UsageError("a cluster keeps no order", "leave out --ordered, or --ray")
    if dry_run:
        raise UsageError("--dry-run tries the first pictures on this machine alone", "leave out --ray")
    return RayOptions(ray, workers)


def read_wish(
    *,
    long: bool,
    ask: str | None,
    system: str | None,
    scene: bool,
    detect: str | None,
    schema: Path | None,
) -> "Wish":
    """What is asked of each picture. Raises ``UsageError`` for two at once, or a schema that is none."""
    from vlfit.tasks.batch.job import Wish

    typed = {"--long": long, "--ask": ask is not None, "--scene": scene, "--detect": detect is not None}
    typed["--schema"] = schema is not None and ask is None
    both = [name for name, given in typed.items() if given]
    if len(both) > 1:
        raise UsageError(f"{' and '.join(both)} are different tasks", "run one, with an output for each")
    if system is not None and ask is None:
        raise UsageError("--system goes with --ask", "leave it out, or ask something")
    form = _read_schema(schema) if schema is not None else None
    if ask is not None:
        return Wish.ask(ask, system=system or "", schema=form)
    if form is not None:
        return Wish.form(form)
    if scene:
        return Wish.scene()
    if detect is not None:
        return Wish.detect(detect)
    return Wish.caption("long" if long else "short")


def _read_schema(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the schema {path} cannot be read: {error}", "name a file of JSON") from error


# The pictures of ``vlfit batch``, as they were named: opened, and known to be any before a model is loaded.
#
# Knows what is refused. Does not know how sources are read (``tasks/batch``).


def is_read_once(job: "Job") -> bool:
    """Whether pictures are named on standard input, which can be gone through a single time."""
    return "-" in job.sources


def source_of(job: "Job", options: "SourceOptions", *, listed_here: bool) -> "Source":
    """The pictures of ``job``. ``listed_here``: by this process, so that a list from a pipe can be begun.

    Raises ``PictureNotFound`` for none: a wrong folder or an empty list is known before a model is loaded.
    ``UsageError`` for words that make no sense, and for pictures that no sidecar can stand by.
    """
    from vlfit.tasks.batch.sources import BegunSource, ShardSource, open_sources, read_shard

    source = open_sources(job.sources, options)
    if job.shard is not None:
        source = ShardSource(source, *read_shard(job.shard))
    if not is_read_once(job):
        first = next(iter(source), None)
    elif listed_here:
        source = begun = BegunSource(source)
        first = begun.first
    else:
        return source  # refused, in words of its own
    if first is None:
        part = f"part {job.shard} of " if job.shard is not None else ""
        named = ("standard input" if name == "-" else name for name in job.sources[:5])
        raise PictureNotFound(
            f"there are no pictures in {part}{', '.join(named)}",
            " ".join(source.notes()) or "is it the right one?",
        )
    if job.sidecars and first.path is None:
        raise UsageError(
            f"--sidecar writes beside files, and {first.key} is none of its own", "leave --sidecar out"
        )
    return source


INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended


@partial(
    takes_common_options,
    without=("stream",),  # words go into the output
    json="Print a summary at the end, as one line of JSON on stdout.",
)
def batch(
    sources: Sources,
    output: Output,
    long: Long = False,
    ask: Ask = None,
    system: System = None,
    scene: Scene = False,
    detect: Detect = None,
    schema: Schema = None,
    concurrency: Concurrency = None,
    readers: Readers = None,
    tries: Tries = None,
    keep_going: KeepGoing = False,
    limit: Limit = None,
    ordered: Ordered = False,
    retry_failed: RetryFailed = False,
    force: Force = False,
    dry_run: DryRun = False,
    sidecar: Sidecars = None,
    overwrite: Overwrite = False,
    backup: Backup = False,
    keep_times: KeepTimes = False,
    column: Column = None,
    keep: Keep = None,
    hidden: Hidden = False,
    allow_private_urls: PrivateUrls = False,
    shard: Shard = None,
    ray: Ray = None,
    workers: Workers = None,
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
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.cli.session import Session
    from vlfit.tasks.batch.job import Job
    from vlfit.tasks.batch.output import is_table
    from vlfit.tasks.batch.runner import check_numbers
    from vlfit.tasks.batch.sources import SourceOptions
    from vlfit.tasks.sampling_options import with_options

    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}", "it must be at least 1")
    check_numbers(concurrency, readers, tries)
    is_table(output)
    cluster = read_cluster(ray, workers, ordered=ordered, dry_run=dry_run)
    wish = read_wish(long=long, ask=ask, system=system, scene=scene, detect=detect, schema=schema)
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
            shard=read_part(shard),
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
        from vlfit.tasks.batch.runner import open_for_batch

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
        from vlfit.server.http.malloc import give_memory_back, keep_what_is_loaded
        from vlfit.tasks.batch.executor import Crew
        from vlfit.tasks.batch.items import KeySet
        from vlfit.tasks.batch.job import Work
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
        from vlfit.tasks.batch.ray.coordinator import run_on_ray

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
    from vlfit.tasks.batch.executor import Crew
    from vlfit.tasks.batch.job import Work
    from vlfit.tasks.batch.output import Output
    from vlfit.tasks.batch.runner import try_out

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
