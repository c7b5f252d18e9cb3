"""``vlfit batch``: the same task for many pictures, into one file."""

import importlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.options import (
    ANSWERING,
    MEDIA,
    CommandOptions,
    declarations,
    media_options,
    option,
    takes_options,
)
from vlfit.cli.signals import INTERRUPTED, end_at_once, terminated_as_interrupted
from vlfit.errors import PictureNotFound, UsageError, VlfitError
from vlfit.units import counted

if TYPE_CHECKING:
    from types import FrameType

    from vlfit.api.progress import LoadProgress
    from vlfit.backends.base import Backend
    from vlfit.backends.opening import BackendSpec
    from vlfit.cli.session import Session
    from vlfit.images.media_kinds import MediaKind
    from vlfit.tasks.batch.executor import ExecutorOptions
    from vlfit.tasks.batch.items import Item, Sidecar, Source
    from vlfit.tasks.batch.job import Job, Wish
    from vlfit.tasks.batch.ray import RayOptions
    from vlfit.tasks.batch.runner import BatchRunner
    from vlfit.tasks.batch.sidecars.backfill import DoneItemCollector
    from vlfit.tasks.batch.sources import SourceOptions


def normalize_shard(shard: str | None) -> str | None:
    """The value of ``--shard`` as I/N without spaces or leading zeros; None for None and 1/1 (everything).

    Raises ``UsageError`` if it is not I/N.
    """
    from vlfit.tasks.batch.sources import parse_shard

    if shard is None:
        return None
    index, of = parse_shard(shard)
    return f"{index}/{of}" if (index, of) != (1, 1) else None


def read_ray_options(
    ray: str | None, workers: int | None, *, ordered: bool, dry_run: bool
) -> "RayOptions | None":
    """Options of the Ray cluster to run on; None if ``ray`` is None: run on this machine.

    Parameters: the options of ``vlfit batch`` of the same names, as typed. Raises ``UsageError`` for
    options that do not go together, and if Ray is not installed.
    """
    from vlfit.tasks.batch.ray import RayOptions

    if ray is None:
        if workers is not None:
            raise UsageError(
                "--workers needs --ray",
                "Use --concurrency for the number of requests at once on this machine.",
            )
        return None
    if ordered:
        raise UsageError("--ordered does not work with --ray", "Leave one of them out.")
    if dry_run:
        raise UsageError("--dry-run does not work with --ray: it runs on this machine", "Leave --ray out.")
    cluster = RayOptions(ray, workers)
    try:
        importlib.import_module("ray.data")
    except ImportError as error:
        raise UsageError(
            f"--ray needs Ray, which cannot be imported: {error}", "Install it: pip install 'vlfit[ray]'."
        ) from None
    return cluster


def read_wish(options: "BatchOptions") -> "Wish":
    """The task for each picture; a short caption if no task is named.

    Raises ``UsageError`` for two tasks, an empty question, or a schema that cannot be read.
    """
    from vlfit.tasks.batch.job import Wish

    ask, schema = options.ask, options.schema
    typed = {
        "--long": options.long,
        "--ask": ask is not None,
        "--scene": options.scene,
        "--detect": options.detect is not None,
        "--schema": schema is not None and ask is None,
        "--embed": options.embed,
    }
    tasks = [name for name, given in typed.items() if given]
    if len(tasks) > 1:
        raise UsageError(
            f"{' and '.join(tasks)} are different tasks", "Run one at a time, each with its own output."
        )
    if options.system is not None and ask is None:
        raise UsageError("--system needs --ask", "Leave it out, or ask something.")
    if not options.embed and (options.instruction is not None or options.dimensions is not None):
        raise UsageError("--instruction and --dimensions need --embed", "Leave them out.")
    if options.embed:
        if options.sidecar or options.ray is not None:
            other = "--sidecar" if options.sidecar else "--ray"
            raise UsageError(f"--embed does not work with {other}", "Leave one of them out.")
        return Wish.embed(options.instruction or "", dimensions=options.dimensions)
    form = _read_schema(schema) if schema is not None else None
    if ask is not None:
        if not ask.strip():
            raise UsageError("--ask has no question", 'Ask something, in quotes: --ask "What is this?"')
        return Wish.ask(ask, system=options.system or "", schema=form)
    if form is not None:
        return Wish.form(form)
    if options.scene:
        return Wish.scene()
    if options.detect is not None:
        from vlfit.cli.scene import check_things

        check_things(options.detect)
        return Wish.detect(options.detect)
    return Wish.caption("long" if options.long else "short")


def _read_schema(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the schema {path}: {error}", "Give --schema a JSON file.") from error


def reads_stdin(job: "Job") -> bool:
    """Whether a source of ``job`` is stdin, which can be read only once."""
    return "-" in job.sources


def open_source(job: "Job", options: "SourceOptions", *, local: bool) -> "Source":
    """The pictures of ``job``, of its shard only, after checking that there is at least one.

    ``local``: this process reads them. Otherwise (with Ray) stdin among the sources is not checked. Raises
    ``PictureNotFound`` if there are none, and ``UsageError`` for sources that are refused or if the job has
    sidecars and the first picture is no file of its own.
    """
    from vlfit.tasks.batch.sources import PeekedSource, ShardSource, open_sources, parse_shard

    source = open_sources(job.sources, options)
    if job.shard is not None:
        source = ShardSource(source, *parse_shard(job.shard))
    if not reads_stdin(job):
        first = next(iter(source), None)
    elif local:
        source = peeked = PeekedSource(source)
        first = peeked.first
    else:
        return source  # Ray refuses stdin with an error of its own
    if first is None:
        part = f"part {job.shard} of " if job.shard is not None else ""
        named = ("stdin" if name == "-" else name for name in job.sources[:5])
        raise PictureNotFound(
            f"there are no pictures in {part}{', '.join(named)}",
            " ".join(source.notes())
            or "Name a folder that has pictures in it or below it; --include pdf,video,raw takes more kinds.",
        )
    if job.sidecars and first.path is None:
        raise UsageError(
            f"--sidecar writes beside files, but {first.key} is not a file of its own", "Leave --sidecar out."
        )
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(CommandOptions):
    """The options of ``vlfit batch``."""

    long: Annotated[bool, option(None, "Captions of a paragraph, not a sentence.")] = False
    ask: Annotated[str | None, option("QUESTION", "Ask this about each picture.")] = None
    system: Annotated[str | None, option("TEXT", "With --ask: system prompt.")] = None
    scene: Annotated[bool, option(None, "Summary, objects with boxes, and text of each picture.")] = False
    detect: Annotated[str | None, option("THINGS", 'Find these objects: "cups", or "cups, plates".')] = None
    embed: Annotated[bool, option(None, "The vector of each picture; needs an embedding model.")] = False
    instruction: Annotated[
        str | None, option("TEXT", "With --embed: what vectors are for.", default="the model's own")
    ] = None
    dimensions: Annotated[
        int | None, option("N", "With --embed: keep the first N components.", default="all")
    ] = None
    schema: Annotated[
        Path | None, option("FILE", "JSON schema that each answer must match; alone, or with --ask.")
    ] = None
    concurrency: Annotated[
        int | None,
        option("N", "Pictures in progress at once.", default="as many as fit, here at most 8"),
    ] = None
    readers: Annotated[
        int | None, option("N", "Threads that read and decode pictures.", default="one per core, 2-8")
    ] = None
    tries: Annotated[
        int | None, option("N", "Attempts per picture when a failure may be temporary.", default="6")
    ] = None
    keep_going: Annotated[bool, option(None, "Do not stop when many pictures in a row fail.")] = False
    limit: Annotated[int | None, option("N", "Stop after N pictures in this run.")] = None
    ordered: Annotated[bool, option(None, "Write records in input order.")] = False
    retry_failed: Annotated[bool, option(None, "Retry the pictures listed in FILE.failed.jsonl.")] = False
    force: Annotated[bool, option(None, "Continue an output that a different job started.")] = False
    dry_run: Annotated[
        bool, option(None, "Count, try the first few, and estimate the time. Writes nothing.")
    ] = False
    sidecar: Annotated[
        list[str] | None,
        option(
            "KIND",
            "Also write each text beside its picture: txt, xmp, xmp-stem (photo.xmp); or into it: exif"
            " (needs exiftool).",
        ),
    ] = None
    overwrite: Annotated[bool, option(None, "With --sidecar: replace existing texts.")] = False
    backup: Annotated[bool, option(None, "With --sidecar exif: keep the original as FILE_original.")] = False
    keep_times: Annotated[bool, option(None, "With --sidecar exif: keep the file's modification time.")] = (
        False
    )
    column: Annotated[str | None, option("NAME", "Parquet: the column with the pictures.")] = None
    keep: Annotated[
        list[str] | None, option("NAME", "Parquet: copy this column into the records; may be repeated.")
    ] = None
    include: Annotated[
        list[str] | None,
        option("KIND", "Folders and patterns: also take pdf, raw, video, or all; may be repeated."),
    ] = None
    hidden: Annotated[bool, option(None, "Folders: include hidden files.")] = False
    shard: Annotated[str | None, option("I/N", "Only part I of N, to split the work over N machines.")] = None
    ray: Annotated[str | None, option("ADDRESS", "Run on a Ray cluster: host:port, auto, or local.")] = None
    workers: Annotated[
        int | None, option("N", "With --ray: models running at once.", default="one per GPU")
    ] = None


@takes_options(
    *(name for name in declarations(BatchOptions) if name not in declarations(CommandOptions)),
    *MEDIA,
    "allow_private_urls",
    *(name for name in ANSWERING if name != "stream"),
    planned=("allow_private_urls",),
    json="Print a summary at the end, as one line of JSON.",
)
def batch(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Folders, globs, pictures, PDFs (a.pdf#2-5), videos, .txt lists (one name or URL per line),"
            " .tar shards, .parquet tables.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where records go: a .jsonl file, or a .parquet folder.",
        ),
    ],
    *,
    options: BatchOptions,
) -> None:
    """Caption many pictures, or ask about them, into one file.

    Run the same command again after Ctrl-C, a crash or a full disk, and it continues: nothing is lost and
    nothing is done twice. Pictures that cannot be read go into FILE.failed.jsonl with the reason, and the
    others go on. Identical files are processed once.

    Exit codes: 0 all done, 1 some failed or it had to stop, 2 wrong usage, 3 the model does not fit,
    130 Ctrl-C.

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
      vlfit batch papers/ --include pdf --ask "What is this page about?" -o pages.jsonl
      vlfit batch holiday/ --embed -o vectors.parquet
    """
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.cli.session import Session
    from vlfit.tasks.batch.job import Job
    from vlfit.tasks.batch.output import is_parquet
    from vlfit.tasks.batch.runner import check_limits
    from vlfit.tasks.batch.sources import SourceOptions
    from vlfit.tasks.sampling_options import apply_options

    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit is {options.limit}", "Use 1 or more.")
    check_limits(options.concurrency, options.readers, options.tries)
    is_parquet(output)
    cluster = read_ray_options(options.ray, options.workers, ordered=options.ordered, dry_run=options.dry_run)
    wish = read_wish(options)
    with terminated_as_interrupted():
        # On a cluster other machines load the model: this one need not have it.
        session = Session(
            options,
            needs_pictures=cluster is None,
            needs_real_model=True,
            model_kind="embedding" if options.embed else "chat",
        )
        sampling = apply_options(SamplingParams(), session.sampling)
        job = Job(
            wish,
            sampling,
            tuple(sources),
            output,
            sidecars=tuple(options.sidecar or ()),
            shard=normalize_shard(options.shard),
            engine=session.answer_settings(),
        )
        sidecars = _sidecars(job, options)
        named = SourceOptions(
            options.column,
            tuple(options.keep or ()),
            bool(options.allow_private_urls),
            options.hidden,
            output,
            _included_kinds(options),
            media_options(options),
        )
        source = open_source(job, named, local=cluster is None)
        session.resolve_auto(here=cluster is None)
        opener = _Opener(options, shared_prefix=bool(wish.system))
        if options.dry_run:
            _dry_run(session, job, source, opener, options)
            return
        with _BatchRun(session, job, source, sidecars, options) as run:
            run.backfill_sidecars(overwrite=options.overwrite)
            if cluster is not None:
                run.run_on_ray(cluster, opener, options.limit)
            else:
                run.run_locally(opener, options.limit, ordered=options.ordered)
    run.finish()


def _included_kinds(options: BatchOptions) -> "frozenset[MediaKind]":
    """Kinds of ``--include``. Raises ``UsageError`` for an unknown one, ``NotAPicture`` if its package is
    missing.
    """
    from vlfit.images.media_kinds import MEDIA_EXTENSIONS
    from vlfit.tasks.batch.media_items import check_kinds_installed

    names = {name.strip() for text in options.include or () for name in text.split(",")}
    unknown = names - {*MEDIA_EXTENSIONS, "all"}
    if unknown:
        raise UsageError(
            f"--include is {sorted(unknown)[0]!r}", f"Use one of: {', '.join(MEDIA_EXTENSIONS)}, all."
        )
    kinds = frozenset(kind for kind in MEDIA_EXTENSIONS if "all" in names or kind in names)
    check_kinds_installed(kinds)
    return kinds


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens the backend with the batch's options. ``shared_prefix``: all prompts begin alike."""

    options: BatchOptions
    shared_prefix: bool

    @property
    def tries(self) -> int:
        from vlfit.tasks.batch.failures import DEFAULT_TRIES

        return DEFAULT_TRIES if self.options.tries is None else self.options.tries

    def open(self, spec: "BackendSpec", progress: "LoadProgress") -> "tuple[Backend, ExecutorOptions]":
        from vlfit.tasks.batch.runner import open_for_batch

        backend, executor_options = open_for_batch(
            spec,
            self.options.concurrency,
            progress,
            readers=self.options.readers,
            tries=self.tries,
            shared_prefix=self.shared_prefix,
        )
        return backend, replace(executor_options, keep_going=self.options.keep_going)


class _BatchRun:
    """A run: opens the output, works on the pictures, closes the output and reports."""

    def __init__(
        self,
        session: "Session",
        job: "Job",
        source: "Source",
        sidecars: "Sequence[Sidecar]",
        options: BatchOptions,
    ) -> None:
        from vlfit.cli.pages.batch_page import BatchPage
        from vlfit.tasks.batch.output import Output

        self._session = session
        self._job = job
        self._source = source
        self._sidecars = sidecars
        self._as_json = options.json
        self._single_pass: DoneItemCollector | None = None  # stdin: backfilled after the run
        self._output = Output(job, force=options.force, again=options.retry_failed, sidecars=sidecars)
        self._before = self._output.done_before + (0 if options.retry_failed else self._output.failed_before)
        self._page = BatchPage(session.printer, self._before)
        if self._output.earlier_sources is not None:
            session.printer.note(
                f"{job.output} was started with {self._output.earlier_sources}: pictures with the same key"
                " count as done"
            )

    def __enter__(self) -> "_BatchRun":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._output.close()
        except VlfitError as failed:
            self._print_ended(failed)
            raise
        if error is not None:
            self._print_ended(error)
        # An output that was not begun has nothing to continue from.
        if isinstance(error, VlfitError | KeyboardInterrupt) and self._output.begun:
            done = self._page.tally.done
            words = f"{counted(done, 'picture is', 'pictures are')} done" if done else "nothing is lost"
            self._session.printer.note(f"{words}; run the same command to continue")

    def backfill_sidecars(self, *, overwrite: bool) -> None:
        """Write missing sidecars of pictures done in earlier runs, from the output."""
        from vlfit.tasks.batch.sidecars.backfill import DoneItemCollector

        keys = self._output.keys_to_backfill(overwrite=overwrite)
        if not len(keys):
            return
        many = counted(len(keys), "picture was", "pictures were")
        self._session.printer.note(f"{many} done before: missing sidecars are written from the output")
        if reads_stdin(self._job):
            self._source = self._single_pass = DoneItemCollector(self._source, keys.__contains__)
            return
        others = len(keys) - self._output.backfill_sidecars(self._source, keys)
        if others:
            self._session.printer.note(
                f"{others:,} of those are not among these pictures: no sidecars are written for them"
            )

    def _print_ended(self, error: BaseException) -> None:
        """Print the JSON summary of a run that ``error`` ended."""
        from vlfit.cli.pages.batch_page import summary_json

        if self._as_json:
            self._page.tally.stopped = True
            self._session.printer.data(summary_json(self._page.tally, self._output, error))

    def run_locally(self, opener: _Opener, limit: int | None, *, ordered: bool) -> None:
        """Run in this process. Loads nothing if all pictures are done."""
        from vlfit.server.http.malloc import configure_malloc, freeze_gc, keep_buffers
        from vlfit.tasks.batch.executor import BatchExecutor
        from vlfit.tasks.batch.items import KeySet
        from vlfit.tasks.batch.job import PictureTask
        from vlfit.tasks.batch.runner import BatchRunner

        if not reads_stdin(self._job):
            if all(map(self._is_settled, self._source)):
                return
            self._count_in_background(limit)
        configure_malloc()
        backend, chosen = self._session.open(opener.open)
        if self._job.wish.kind == "embed":
            self._session.note_vectors(backend)
        freeze_gc()
        keep_buffers(backend.device)
        executor = BatchExecutor(PictureTask.from_job(self._job), backend, chosen)
        runner = BatchRunner(
            executor, self._source, self._output, progress=self._page, limit=limit, ordered=ordered
        )
        with _stopped_by_signals(runner), closing(backend):
            self._output.begin(backend.model)
            with self._page:
                runner.run()
        if self._single_pass is not None:
            late = KeySet(item.key for item in self._single_pass.done)
            self._output.backfill_sidecars(self._single_pass.done, late)

    def _is_settled(self, item: "Item") -> bool:
        self._output.clean_beside(item)
        return self._output.is_settled(item.key)

    def run_on_ray(self, cluster: "RayOptions", opener: _Opener, limit: int | None) -> None:
        """Run on a Ray cluster."""
        from vlfit.tasks.batch.ray.coordinator import run_on_ray

        self._count_in_background(limit)
        with self._page as page:
            run_on_ray(
                self._job,
                self._session.backend_spec(here=False),
                cluster,
                source=self._source,
                output=self._output,
                progress=page,
                concurrency=opener.options.concurrency,
                readers=opener.options.readers,
                tries=opener.tries,
                limit=limit,
                keep_going=opener.options.keep_going,
            )

    def _count_in_background(self, limit: int | None) -> None:
        """Count the pictures in a thread, for the progress bar."""

        def count() -> None:
            with suppress(VlfitError):  # the run raises the same error
                total = self._source.count()
                if total is not None and limit is not None:
                    total = min(total, self._before + limit)
                self._page.tally.about = bool(getattr(self._source, "count_is_estimate", False))
                self._page.tally.total = total

        threading.Thread(target=count, name="vlfit-count", daemon=True).start()

    def finish(self) -> None:
        """Report how the run ended, and exit with its code."""
        from vlfit.cli.pages.batch_page import print_summary, summary_json

        tally, printer = self._page.tally, self._session.printer
        # A cluster has printed the notes of its own listing.
        source_notes = () if self._page.source_notes_shown else self._source.notes()
        for note in (*source_notes, *(note for card in self._sidecars for note in card.notes())):
            printer.note(note)
        print_summary(tally, self._output, printer)
        if tally.stopped:
            printer.note("stopped; run the same command to continue")
        if self._as_json:
            printer.data(summary_json(tally, self._output))
        if tally.stopped:
            raise typer.Exit(INTERRUPTED)
        if self._output.failed or self._output.without_sidecar:
            raise typer.Exit(1)


def _dry_run(
    session: "Session",
    job: "Job",
    source: "Source",
    opener: _Opener,
    options: BatchOptions,
) -> None:
    """Count the pictures and try the first few, without writing."""
    from vlfit.cli.pages.batch_page import print_dry_run
    from vlfit.tasks.batch.executor import BatchExecutor
    from vlfit.tasks.batch.job import PictureTask
    from vlfit.tasks.batch.output import Output
    from vlfit.tasks.batch.runner import estimate_batch

    # Opening an output creates it.
    output = Output(job, force=options.force, again=options.retry_failed) if job.output.exists() else None
    try:
        backend, chosen = session.open(opener.open)
        try:
            facts = estimate_batch(
                BatchExecutor(PictureTask.from_job(job), backend, chosen), source, output, source.count()
            )
        finally:
            backend.close()
    finally:
        if output is not None:
            output.close()
    if options.json:
        session.printer.data(facts)
    else:
        print_dry_run(facts, session.printer)


def _sidecars(job: "Job", options: BatchOptions) -> "list[Sidecar]":
    from vlfit.tasks.batch.sidecars import make_sidecar

    if not job.sidecars and (options.overwrite or options.backup or options.keep_times):
        raise UsageError("--overwrite, --backup and --keep-times need --sidecar", "Add --sidecar KIND.")
    if (options.backup or options.keep_times) and "exif" not in job.sidecars:
        raise UsageError("--backup and --keep-times need --sidecar exif", "Leave them out.")
    kinds = dict.fromkeys(job.sidecars)
    return [
        make_sidecar(kind, overwrite=options.overwrite, backup=options.backup, keep_times=options.keep_times)
        for kind in kinds
    ]


@contextmanager
def _stopped_by_signals(runner: "BatchRunner") -> Iterator[None]:
    """In the block the first Ctrl-C or SIGTERM ends the run cleanly; the second ends it at once."""
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
