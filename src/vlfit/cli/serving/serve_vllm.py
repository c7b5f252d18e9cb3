"""``vlfit serve --backend vllm``: show the plan, start vLLM, show planned and held memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlfit.cli.options import engine_options
from vlfit.cli.printing import Printer
from vlfit.cli.signals import cleaned_up_when_terminated
from vlfit.errors import UsageError, VllmFailed
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.api.progress import LoadProgress
    from vlfit.backends.startup import StartupTimer
    from vlfit.backends.vllm.attempts import ServingVllm
    from vlfit.backends.vllm.backend import VllmBackend
    from vlfit.backends.vllm.installed import InstalledVllm
    from vlfit.backends.vllm.planning import PlannedStart
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.plan.actual import Row
    from vlfit.settings import Settings


@dataclass(frozen=True, slots=True)
class VllmServeOptions:
    """Options of ``vlfit serve`` for ``--backend vllm`` alone.

    ``extra_args``: passed on to vLLM itself. ``dry_run``: print vLLM's command and start nothing. ``retry``:
    after a failed start go on with the next cheaper plan.
    """

    extra_args: tuple[str, ...] = ()
    dry_run: bool = False
    retry: bool = True


def serve_vllm(settings: "Settings", vllm_serve: VllmServeOptions, *, json_line: bool, quiet: bool) -> None:
    """Serve until a signal, then exit the process; with ``vllm_serve.dry_run`` print the command and return.

    Raises what ``plan_vllm_start`` and ``open_vllm`` raise.
    """
    if vllm_serve.dry_run:
        _print_command(
            settings, vllm_serve, Printer(json=json_line, stream=False, quiet=quiet), as_json=json_line
        )
    else:
        from vlfit.cli.serving.serve_here import serve_here

        serve_here(
            settings,
            json_line=json_line,
            quiet=quiet,
            open_model=lambda settings, printer, phases, handover_file: open_vllm(
                settings, vllm_serve, printer, phases, handover_file
            ),
        )


def open_vllm(
    settings: "Settings",
    vllm_serve: VllmServeOptions,
    printer: Printer,
    phases: "StartupTimer",
    handover_file: "Path | None" = None,
) -> "VllmBackend":
    """Start vLLM by a plan and return its backend, ready for requests. Blocks for a minute or more.

    In this order: makes the plan and prints it on stderr, downloads the model (after asking), starts vLLM,
    and prints the memory that it took. ``phases``: gets the phases of the start. ``handover_file``: with
    ``--restart``, a file in which the causes of vLLM's deaths are noted; after a death for want of memory
    the plan takes less. None: nothing is noted.

    Raises ``VllmFailed`` if no start succeeds, and then prints the native engine's plan for the model, if
    there is one; also what ``plan_vllm_start``, ``resolve_or_ask`` and ``VllmBackend.launch`` raise.
    """
    from vlfit.backends.vllm.attempts import adapt_to_deaths, record_death
    from vlfit.backends.vllm.backend import VllmBackend
    from vlfit.checkpoint.source import locate_or_download
    from vlfit.cli.models import resolve_or_ask

    planned = plan_vllm_start(settings, vllm_serve, printer.note)
    if handover_file is not None:
        planned = adapt_to_deaths(planned, handover_file)
    show_plan(planned, printer)
    # Download first: its progress bar would collide with the one below.
    locate_or_download(resolve_or_ask(planned.plan.model.source, printer, yes=settings.yes, backend="vllm"))
    try:
        with cleaned_up_when_terminated(), show_start(printer, phases) as (tell, progress):
            options = vllm_options(settings, vllm_serve, tell)
            if handover_file is not None:
                options = replace(options, on_death=partial(record_death, handover_file))
            max_tokens = engine_options(settings).max_tokens
            backend = VllmBackend.launch(planned, options, progress, max_tokens=max_tokens)
    except VllmFailed:
        show_native_alternative(planned, printer)
        raise
    show_memory(backend.serving, backend.ledger_rows(), backend.process_bytes, printer)
    phases.begin("server")
    return backend


def plan_vllm_start(
    settings: "Settings",
    vllm_serve: VllmServeOptions,
    tell: Callable[[str], None],
    *,
    assume_newest: bool = False,
) -> "PlannedStart":
    """Plan a start of vLLM on this computer; ``tell`` gets notes on the choices.

    ``assume_newest``: if no vLLM is found, plan for the newest version that vlfit knows. Otherwise, and if
    ``--vllm-python`` names one that does not work, raises ``UsageError``.
    """
    from vlfit.backends.vllm.installed import find_vllm
    from vlfit.backends.vllm.planning import plan_start
    from vlfit.client import choose_model
    from vlfit.machine.survey import survey

    machine = survey()
    try:
        installed = find_vllm(settings.vllm_python)
    except UsageError as error:
        if not assume_newest or settings.vllm_python:
            raise
        installed = _newest_known_vllm(on_cpu=not machine.gpus)
        tell(f"{error.message}: planned for vLLM {installed.version}. {error.hint}")
    name = settings.model
    if name == "auto":
        choice = choose_model("vllm")
        name = choice.model
        tell(choice.reason)
    options = vllm_options(settings, vllm_serve, tell)
    return plan_start(name, engine_options(settings), options, installed, machine)


def vllm_options(
    settings: "Settings",
    vllm_serve: VllmServeOptions = VllmServeOptions(),
    tell: Callable[[str], None] | None = None,
) -> "VllmOptions":
    """Options for vLLM from settings. ``tell``: gets messages about its start."""
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.doctor.diagnose import find_failure

    return VllmOptions(
        python=settings.vllm_python,
        words=vllm_serve.extra_args,
        sequences=_explicit(settings, "sequences"),
        chunk=_explicit(settings, "chunk"),
        retry=vllm_serve.retry,
        diagnose_log=find_failure,
        on_status=tell,
    )


def show_plan(planned: "PlannedStart", printer: Printer) -> None:
    """Print the plan on stderr: settings, ledger, and each flag."""
    from vlfit.cli.pages.plan_page import page
    from vlfit.plan.vllm.lines import kv_cache_problem

    printer.note(page(planned.plan, on_terminal=False))
    for words in planned.notes:
        if words != kv_cache_problem(planned.plan):  # already on the page
            printer.warn(words)


def show_memory(
    serving: "ServingVllm", rows: "tuple[Row, ...]", lost_memory: int | None, printer: Printer
) -> None:
    """Print the ledger, planned and held (``rows``, from vLLM's own log), on stderr.

    ``lost_memory``: bytes that were free on the GPU before the start and are not now.
    """
    from vlfit.cli.pages.ledger_page import ledger_page

    plan, resident = serving.plan, None
    from vlfit.plan.vllm.args import vllm_args_of

    if vllm_args_of(plan.settings).on_cpu:
        resident = serving.started.process.resident_bytes()
    held = resident if resident is not None else lost_memory
    planned = sum(row.planned or 0 for row in rows if row.line != "desktop")
    place = (
        "without desktop: RAM of all its processes, shared memory counted once"
        if resident is not None
        else f"without desktop, of {plan.gpu.total / MIB:,.0f} on {plan.gpu.name}: what is no longer free"
    )
    printer.note(ledger_page(rows, {"planned": planned, "actual": held}, place))
    printer.note(f"vLLM started in {serving.started.seconds:.0f} s; its log: {serving.started.log.path}")


def show_native_alternative(planned: "PlannedStart", printer: Printer) -> None:
    """Print on stderr that the native engine can serve the model, with its plan; nothing if no plan fits.

    Called when vLLM could not be started by any plan. ``planned``: the first of them.
    """
    from vlfit.backends.vllm.planning import native_alternative
    from vlfit.cli.pages.plan_page import page

    offer = native_alternative(planned)
    if offer is not None:
        printer.note("vLLM cannot serve this here. The native engine can:")
        printer.note(page(offer, on_terminal=False))


@contextmanager
def show_start(
    printer: Printer, phases: "StartupTimer"
) -> "Iterator[tuple[Callable[[str], None], LoadProgress]]":
    """Show a start of vLLM on stderr, as a bar on a terminal, else as a line for each phase.

    Yields two callbacks: one for messages, and one for progress with a phase and the share of it done. Begins
    each phase in ``phases`` too.
    """
    if not printer.on_terminal:
        seen: list[str] = []

        def progress(what: str, share: float) -> None:
            phases.begin(what)
            if seen[-1:] != [what]:
                seen.append(what)
                printer.note(f"vLLM: {what}")

        yield printer.warn, progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("vLLM", total=1.0, visible=False)

        def move(what: str, share: float) -> None:
            phases.begin(what)
            bar.update(task, description=f"vLLM: {what}", completed=share, visible=True)

        yield lambda words: bar.console.print(words, markup=False, highlight=False), move


def _print_command(
    settings: "Settings", vllm_serve: VllmServeOptions, printer: Printer, *, as_json: bool
) -> None:
    """Print the command on stdout, ready to run by hand, and the plan on stderr."""
    from vlfit.backends.vllm.planning import check_plan_fits
    from vlfit.backends.vllm.serve_command import KEY_VARIABLE, VllmAddress, build_command
    from vlfit.plan.report import plan_to_json

    planned = plan_vllm_start(settings, vllm_serve, printer.note, assume_newest=True)
    show_plan(planned, printer)
    check_plan_fits(planned)
    front = VllmAddress(settings.host, settings.port, planned.plan.model.name, direct=True)
    program = planned.installed.program
    command = build_command(
        planned.plan, program, front, planned.extra_args, unset=planned.unset, pinned=planned.pinned
    )
    for flag in command.overrides:
        printer.note(f"your own option replaces the planned {flag}")
    if as_json:
        words: dict[str, Any] = {"command": list(command.words), "environment": dict(command.variables)}
        printer.data({**words, "plan": plan_to_json(planned.plan)})
        return
    key = f'{KEY_VARIABLE}="$VLFIT_API_KEY" ' if settings.api_key else ""
    printer.line(key + command.shell_line)


def _newest_known_vllm(*, on_cpu: bool) -> "InstalledVllm":
    from vlfit.backends.vllm.installed import InstalledVllm
    from vlfit.plan.vllm.flags import NEWEST

    return InstalledVllm(("vllm",), ".".join(map(str, NEWEST)), on_cpu)


def _explicit(settings: "Settings", name: str) -> Any:
    """A setting that is typed or in the environment; None leaves it to the plan."""
    return getattr(settings, name) if name in settings.model_fields_set else None
