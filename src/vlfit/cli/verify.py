"""``vlfit verify``: whether a model is computed rightly here, and whether the plan's promises are kept."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.models import resolve_or_ask
from vlfit.cli.options import CommandOptions, complete_model, one_model, takes_options
from vlfit.cli.printing import Printer
from vlfit.cli.verify_here import SETTINGS, report_text, verify_here, verify_options
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.backends.opening import BackendSpec
    from vlfit.parity.findings import CheckProgress, Level
    from vlfit.settings import Settings
    from vlfit.verify.verify_run import VerifyResult

# Engine options that change what transformers does, too; others it ignores.
_OF_EVERY_ENGINE = ("dtype", "max_model_len", "image_tokens", "offload")

EXAMPLES = """\b
Examples:
  vlfit verify
  vlfit verify 4B-FP8 --quick
  vlfit verify ./model.gguf --full --json > verified.json
  vlfit verify 4B-FP8 --share
  vlfit verify 4B-FP8 --against 4B
  vlfit verify --table ./copies --table 4B
  vlfit verify 4B --backend remote http://box:8000
"""


@takes_options(
    *("model", "mmproj", "yes", "backend", "server", "server_key", "trust_remote_code"),
    *("quick", "full", "share", "against", "table", *SETTINGS, "json", "quiet"),
    backend="native; or transformers, or remote followed by the URL of a running server: what their answers"
    " show.",
    server="The same as --backend remote URL. MODEL is the model's name here, whose files are compared with.",
    json="Print JSON, in bytes and seconds, with every comparison.",
)
def verify(
    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", autocompletion=complete_model, help="The same as --model.", show_default=False
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check less, in some 20 s.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Check more: hashes of all files, and longer answers.")
    ] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Print a block to post, without names and paths.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="OTHER",
            autocompletion=complete_model,
            help="Compare MODEL with another copy of it instead: next tokens, boxes, words, counts.",
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            metavar="FOLDER",
            help="Compare all copies in a folder with the widest, in a table; or name models, each with"
            " --table.",
            show_default=False,
        ),
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Verify that this computer computes a model rightly.

    Computes one prompt a second time, in float32 on the processor, straight from the file, and compares every
    step with what the engine computes. Compares the engine with itself: in chunks and whole, alone and in
    company, after sleep. Measures memory and speed beside the plan's. Exit code 1 if anything differs. The
    model is loaded several times; close other programs first.

    With --against or --table it measures what a quantized copy loses beside the same model in a wider one.
    With --backend it compares answers of transformers or of a server with what the file gives.
    """
    from vlfit.cli.bench import resolve_auto
    from vlfit.verify.verify_report import share_block, to_json

    if quick and full:
        raise UsageError("--quick and --full are two levels", "Leave one out.")
    if share and options.json:
        raise UsageError("--share prints text to post, --json the whole report as JSON", "Leave one out.")
    if against is not None or table:
        if against is not None and table:
            raise UsageError("--against and --table are two comparisons", "Leave one out.")
        if quick or full or share:
            raise UsageError(
                "--quick, --full and --share are of the checks of one model",
                "Leave them out with --against and --table.",
            )
        if options.backend not in (None, "native") or options.server is not None:
            raise UsageError("--against and --table run vlfit's own engine", "Leave --backend out.")
        _compare(one_model(model_argument, options.model), against, table or [], options)
        return
    settings = options.settings(model=one_model(model_argument, options.model))
    printer = Printer(json=options.json, quiet=options.quiet)
    level: Level = "quick" if quick else "full" if full else "normal"
    if options.backend not in (None, "native") or options.server is not None:
        result = _elsewhere(settings, options, level, printer)
    else:
        wanted = verify_options(settings)
        from vlfit.plan.gpus import check_gpus

        check_gpus(wanted.device, wanted.kernels)
        chosen = resolve_auto(settings.model, printer, settings.device)
        name = resolve_or_ask(chosen, printer, yes=settings.yes, device=settings.device)
        result = verify_here(name, wanted, level, printer)
    if options.json:
        printer.data(to_json(result))
    elif share:
        printer.line(share_block(result))
    else:
        printer.line(report_text(result))
    if not result.report.ok:
        raise typer.Exit(1)


def _elsewhere(
    settings: "Settings", options: CommandOptions, level: "Level", printer: Printer
) -> "VerifyResult":
    """Verify what another backend runs."""
    from vlfit.backends.opening import BackendSpec
    from vlfit.cli.bench import resolve_auto
    from vlfit.cli.session import resolve_backend

    kind, server = resolve_backend(settings, options.backend, options.server)
    if kind == "vllm":
        raise UsageError(
            "verify asks a vLLM that runs", "Start it (vlfit serve --backend vllm); add --server URL."
        )
    if kind == "remote":
        assert server is not None
        replace(options, dtype=None).refuse_engine_options(server)
        key = settings.server_key or settings.api_key
        spec = BackendSpec(kind=kind, server=server, api_key=key.get_secret_value() if key else None)
        name = None
        if settings.model != "auto":
            name = resolve_or_ask(settings.model, printer, yes=settings.yes)
        dtype = None if settings.dtype == "auto" else settings.dtype
        return _verify_elsewhere(name, spec, level, dtype, printer)
    chosen = resolve_auto(settings.model, printer, settings.device)
    name = resolve_or_ask(chosen, printer, yes=settings.yes, device=settings.device)
    spec = BackendSpec(
        kind=kind,
        model=name,
        options=verify_options(settings),
        trust_remote_code=options.trust_remote_code,
    )
    return _verify_elsewhere(name, spec, level, None, printer)


def _verify_elsewhere(
    name: str | None, spec: "BackendSpec", level: "Level", dtype: str | None, printer: Printer
) -> "VerifyResult":
    """Verify the model that the backend ``spec`` runs, transformers or a server, by its files here.

    ``name``: of these files; None: those that the server's name of its model means. ``dtype``: that a server
    computes in; None: unknown. Raises what opening both raises.
    """
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.opening import open_backend
    from vlfit.bench.results import cpu_name, versions_of
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.plan.actual import Expectation
    from vlfit.verify.verify_backend import verify_backend
    from vlfit.verify.verify_report import unusual_run
    from vlfit.verify.verify_run import speed_or_failure

    def say(progress: "CheckProgress") -> None:
        printer.note(f"  {progress.done + 1} of {progress.total}: {progress.name}")

    with open_backend(spec) as backend:
        checkpoint = open_checkpoint(name or resolve_or_ask(backend.model, printer, yes=False))
        printer.note(f"{checkpoint.name}: beside {backend.model} at {backend.device}")
        speed, failed, machine = None, None, {"device": "a server", "backend": spec.kind}
        unusual: tuple[str, ...] = ()
        versions = versions_of("vlfit", "torch")
        if spec.kind != "remote":
            account = backend.account()
            dtype = account.settings.dtype
            on_cpu = account.settings.device == "cpu"
            machine["device"] = cpu_name() if on_cpu else account.settings.device
            versions = versions_of("vlfit", "torch", spec.kind)
            asked = replace(
                EngineOptions(), **{name: getattr(spec.options, name) for name in _OF_EVERY_ENGINE}
            )
            unusual = (f"backend {spec.kind}", *unusual_run(asked, account.settings))
            sees = checkpoint.config.vision is not None
            speed, failed = speed_or_failure(backend, level, Expectation(), sees=sees)
        result = verify_backend(
            backend,
            checkpoint,
            level,
            machine,
            versions,
            dtype=dtype,
            speed=speed,
            failed=failed,
            on_progress=say,
        )
        return replace(result, unusual=unusual)


def _compare(model: str | None, against: str | None, table: list[str], options: CommandOptions) -> None:
    """Print copies of one model beside the widest of them."""
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.cli.bench import resolve_auto
    from vlfit.errors import CheckpointError
    from vlfit.plan.gpus import check_gpus
    from vlfit.verify.verify_copies import (
        against_lines,
        compare_copies,
        names_in,
        rows_json,
        table_lines,
        unread_row,
    )

    settings = options.settings(model=model)
    printer = Printer(json=options.json, quiet=options.quiet)
    wanted = verify_options(settings)
    check_gpus(wanted.device, wanted.kernels)
    if against is not None:
        names = [resolve_auto(settings.model, printer, settings.device), against]
    else:
        names = [*([model] if model else []), *names_in(table)]
    checkpoints, damaged = [], []
    for name in dict.fromkeys(names):
        folder = resolve_or_ask(name, printer, yes=settings.yes, device=settings.device)
        try:
            checkpoints.append(open_checkpoint(folder))
        except CheckpointError as error:
            if against is not None or len(names) < 3:
                raise
            damaged.append(unread_row(folder, error))
    rows = compare_copies(checkpoints, wanted, lambda name: printer.note(f"  {name}")) + damaged
    if options.json:
        printer.data(rows_json(rows))
    else:
        for line in against_lines(rows) if against is not None else table_lines(rows):
            printer.line(line)
    if any(row.figures is None for row in rows):
        raise typer.Exit(1)
