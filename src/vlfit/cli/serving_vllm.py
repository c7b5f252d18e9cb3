"""``vlfit serve --backend vllm``: the plan shown, vLLM started and watched, planned and held side by side.

Knows: what a person is told of it. Does not know how it is planned and started (``backends/vllm``) or how
vlfit serves (``serving.py``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlfit.cli.printing import Printer
from vlfit.cli.serve_options import ALONE, OfServe
from vlfit.cli.signals import cleaned_up_when_terminated
from vlfit.errors import UsageError, VllmFailed
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.base import Phases
    from vlfit.backends.vllm.attempts import Serving
    from vlfit.backends.vllm.backend import VllmBackend
    from vlfit.backends.vllm.installed import Installed
    from vlfit.backends.vllm.planning import Planned
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.plan.actual import Row
    from vlfit.settings import Settings

    Progress = Callable[[str, float], None]


def serve_vllm(settings: "Settings", asked: OfServe, *, json_line: bool, quiet: bool) -> None:
    """Until a signal ends it. Raises what planning and starting raise."""
    if asked.dry_run:
        _print_command(settings, asked, Printer(json=json_line, stream=False, quiet=quiet), as_json=json_line)
    else:
        from vlfit.cli.serving import serve_here

        serve_here(
            settings,
            json_line=json_line,
            quiet=quiet,
            open_model=lambda settings, printer, phases, word: open_vllm(
                settings, asked, printer, phases, word
            ),
        )


def open_vllm(
    settings: "Settings", asked: OfServe, printer: Printer, phases: "Phases", word: "Path | None" = None
) -> "VllmBackend":
    """The model under vLLM, with all that a person is told on the way. ``word``: a file in which one that
    died left what of, for this one, which takes its place.
    """
    from vlfit.backends.vllm.attempts import after_deaths, remember
    from vlfit.backends.vllm.backend import VllmBackend
    from vlfit.checkpoint.source import locate

    planned = planned_for(settings, asked, printer.note)
    if word is not None:
        planned = after_deaths(planned, word)
    show_plan(planned, printer)
    locate(planned.plan.model.place)  # fetched now, with a line of its own, and not behind the bar
    try:
        with cleaned_up_when_terminated(), starting(printer, phases) as (tell, progress):
            options = vllm_options(settings, asked, tell)
            if word is not None:
                options = replace(options, died=partial(remember, word))
            most = settings.max_tokens or engine_options(settings).max_tokens
            backend = VllmBackend.launch(planned, options, progress, max_tokens=most)
    except VllmFailed:
        show_native(planned, printer)
        raise
    show_held(backend.serving, backend.rows(), backend.lost_memory, printer)
    phases.begin("server")
    return backend


def planned_for(
    settings: "Settings", asked: OfServe, tell: Callable[[str], None], *, may_lack: bool = False
) -> "Planned":
    """The plan for what was asked. ``may_lack``: where there is no vLLM, for the newest that is known."""
    from vlfit.backends.vllm.installed import find
    from vlfit.backends.vllm.planning import plan_start
    from vlfit.client import choose_model
    from vlfit.machine.survey import survey

    machine = survey()
    try:
        installed = find(settings.vllm_python)
    except UsageError as error:
        if not may_lack or settings.vllm_python:
            raise
        installed = _assumed(on_cpu=not machine.gpus)
        tell(f"{error.message}: planned for vLLM {installed.version}. {error.hint}")
    name = settings.model
    if name == "auto":
        choice = choose_model("vllm")
        name = choice.model
        tell(choice.reason)
    options = vllm_options(settings, asked, tell)
    return plan_start(name, engine_options(settings), options, installed, machine)


def vllm_options(
    settings: "Settings", asked: OfServe = ALONE, tell: Callable[[str], None] | None = None
) -> "VllmOptions":
    """What vLLM alone is told, by a command's settings; the doctor reads its log when it fails."""
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.doctor.diagnose import read_failure

    return VllmOptions(
        python=settings.vllm_python,
        words=asked.words,
        sequences=_typed(settings, "sequences"),
        chunk=_typed(settings, "chunk"),
        retry=asked.retry,
        read_failure=read_failure,
        tell=tell,
    )


def engine_options(settings: "Settings") -> "EngineOptions":
    """What both engines are told."""
    from vlfit.api.engine_options import EngineOptions

    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        context=settings.context,
        kv_tokens=settings.kv,
        kv_dtype=settings.kv_dtype,
        image_tokens=settings.image_tokens,
        offload=settings.offload,
        prefix_cache=settings.prefix_cache,
        idle_sleep=settings.idle_sleep,
    )


def show_plan(planned: "Planned", printer: Printer) -> None:
    """The banner: settings, ledger, and what each flag is for."""
    from vlfit.cli.plan_page import page
    from vlfit.plan.vllm.lines import too_small

    printer.note(page(planned.plan, lively=False))
    for words in planned.said:
        if words != too_small(planned.plan):  # the page has it already
            printer.warn(words)


def show_held(serving: "Serving", rows: "tuple[Row, ...]", lost: int | None, printer: Printer) -> None:
    """Planned and held, line by line, as vLLM told it."""
    from vlfit.cli.plan_page import ledger_page

    plan, resident = serving.plan, None
    if plan.settings.vllm.in_ram:
        resident = serving.started.guarded.resident()
    held = resident if resident is not None else lost
    planned = sum(row.planned or 0 for row in rows if row.line != "desktop")
    place = (
        "without desktop: RAM of all its processes, what they share counted once"
        if resident is not None
        else f"without desktop, of {plan.gpu.total / MIB:,.0f} on {plan.gpu.name}: what is free no more"
    )
    printer.note(ledger_page(rows, {"planned": planned, "actual": held}, place))
    printer.note(f"vLLM started in {serving.started.seconds:.0f} s; its log: {serving.started.log.path}")


def show_native(planned: "Planned", printer: Printer) -> None:
    """Nothing cheaper is left: what the native engine would do with the same model."""
    from vlfit.backends.vllm.planning import native_offer
    from vlfit.cli.plan_page import page

    offer = native_offer(planned)
    if offer is not None:
        printer.note("vLLM does not serve this here. The native engine does:")
        printer.note(page(offer, lively=False))


@contextmanager
def starting(printer: Printer, phases: "Phases") -> "Iterator[tuple[Callable[[str], None], Progress]]":
    """What shows a start: ``tell`` for sentences and ``progress`` for its phases, which are a bar on a
    terminal and a line each where nobody watches.
    """
    if not printer.lively:
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


def _print_command(settings: "Settings", asked: OfServe, printer: Printer, *, as_json: bool) -> None:
    """The command that would be run, as it can be run by hand, and what it is for on stderr."""
    from vlfit.backends.vllm.planning import check
    from vlfit.backends.vllm.serve_command import KEY_VARIABLE, Front, assemble
    from vlfit.plan.report import facts

    planned = planned_for(settings, asked, printer.note, may_lack=True)
    show_plan(planned, printer)
    check(planned)
    front = Front(settings.host, settings.port, planned.plan.model.name, direct=True)
    program = planned.installed.program
    command = assemble(planned.plan, program, front, planned.own, unset=planned.unset, pinned=planned.pinned)
    for word in command.overrides:
        printer.note(f"planned {word} gives way to what you typed")
    if as_json:
        words: dict[str, Any] = {"command": list(command.words), "environment": dict(command.added)}
        printer.data({**words, "plan": facts(planned.plan)})
        return
    key = f'{KEY_VARIABLE}="$VLFIT_API_KEY" ' if settings.api_key else ""
    printer.line(key + command.shell)


def _assumed(*, on_cpu: bool) -> "Installed":
    from vlfit.backends.vllm.installed import Installed
    from vlfit.plan.vllm.flags import NEWEST

    return Installed(("vllm",), ".".join(map(str, NEWEST)), on_cpu)


def _typed(settings: "Settings", name: str) -> Any:
    """A setting that somebody made; None leaves it to the plan."""
    return getattr(settings, name) if name in settings.model_fields_set else None
