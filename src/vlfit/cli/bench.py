"""``vlfit bench``: how fast a model is on this machine, as text to post or as JSON."""

import re
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.models import resolve_or_ask
from vlfit.cli.options import CommandOptions, complete_model, one_model, takes_options
from vlfit.cli.printing import Printer, has_columns, terminal_width
from vlfit.errors import DoesNotFit, UsageError
from vlfit.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from vlfit.api.progress import LoadProgress
    from vlfit.backends.startup import StartupTimer
    from vlfit.bench.measure import BenchResult
    from vlfit.bench.workload import BenchOptions


EXAMPLES = """\b
Examples:
  vlfit bench
  vlfit bench 4B --batch 1,4,8
  vlfit bench --picture photo.jpg --tokens 256 --repeat 10
  vlfit bench mini --device cpu --json > bench.json
"""


@takes_options(
    *(
        "model",
        "mmproj",
        "yes",
        "picture",
        "size",
        "tokens",
        "batch",
        "repeat",
        "context",
        "device",
        "dtype",
        "kv_dtype",
    ),
    *("image_tokens", "chunk", "offload", "kernels", "json", "quiet"),
    json="Print JSON, in bytes and seconds, with every measurement.",
)
def bench(
    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", autocompletion=complete_model, help="The same as --model.", show_default=False
        ),
    ] = None,
    picture: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Picture to ask about (file, URL, -) instead of a generated one; may be repeated.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="WxH",
            help="Size of generated pictures, in pixels.  [default: 1024x768; 512x512 on a slow CPU]",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per answer.")] = 128,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Requests at once; each number is measured.  [default: 1 and 4, if they fit; 1 on a slow"
            " CPU; env VLFIT_SEQUENCES]",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Measured runs of each, after one warm-up.  [default: 5, fewer on a slow CPU]",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Pad the prompt with text until prompt and answer have N tokens.",
        ),
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Benchmark a model on this machine.

    Measures tokens/s, and their share of what memory bandwidth allows, measured in the same run; the parts of
    the time to first token; startup and memory. The model is loaded for these requests only, nothing is
    cached between them. Close other programs first. Where a CPU would take more than five minutes, a
    smaller picture, one request at a time and fewer runs are measured, unless you give these numbers.

    What is printed is Markdown to post. Its last line is a row of docs/cards.md.
    """
    from vlfit.backends.startup import StartupTimer
    from vlfit.bench.results import markdown_page, to_json
    from vlfit.bench.workload import BenchOptions
    from vlfit.tasks.pictures import load_picture

    phases = StartupTimer()
    settings = options.settings(model=one_model(model_argument, options.model))
    printer = Printer(json=options.json, quiet=options.quiet)
    given: dict[str, Any] = {}
    if size is not None:
        given["size"] = _size(size)
    if batch is not None:
        given["batches"] = _batches(batch)
    if repeat is not None:
        given["repeat"] = repeat
    bench_options = BenchOptions(
        **{"batches": (1, settings.sequences), **given},
        tokens=tokens,
        context=context,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        image_tokens=settings.image_tokens,
        max_num_batched_tokens=settings.chunk,
        offload=settings.offload,
        kernels=settings.kernels,
    )
    if picture:
        bench_options = replace(bench_options, pictures=tuple(map(load_picture, picture)))
    from vlfit.plan.gpus import check_gpus

    check_gpus(settings.device, settings.kernels)
    chosen = resolve_auto(settings.model, printer, settings.device)
    name = resolve_or_ask(chosen, printer, yes=settings.yes, device=settings.device)
    bench_options = _shortened(name, bench_options, given, printer)
    result = _measure(name, bench_options, printer, phases, may_be_fewer=batch is None)
    if options.json:
        printer.data(to_json(result))
    else:
        width = terminal_width(1000) if sys.stdout.isatty() or has_columns() else None
        printer.line("\n".join(markdown_page(result, width)))


def resolve_auto(name: str, printer: Printer, device: str) -> str:
    """``name``; for ``auto`` the model that is chosen here for ``device``, after a note of why."""
    if name != "auto":
        return name
    from vlfit.client import choose_model

    choice = choose_model(device=device)
    printer.note(choice.reason)
    return choice.model


def _shortened(
    name: str, bench_options: "BenchOptions", asked: "Collection[str]", printer: Printer
) -> "BenchOptions":
    """``bench_options``; on a CPU less of what is not in ``asked`` where it takes long, after a note."""
    from vlfit.bench.duration import expected_seconds, shorten
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.machine.survey import survey
    from vlfit.plan.processors import measured_machine, ram_as_gpu
    from vlfit.verify.verify_outcome import planned_model

    machine = survey()
    if bench_options.device not in ("auto", "cpu") or (bench_options.device == "auto" and machine.gpus):
        return bench_options
    checkpoint = open_checkpoint(name)
    model = planned_model(checkpoint, name)
    processor = ram_as_gpu(measured_machine(machine)).processor  # a second, once
    if model is None or processor.bandwidth is None or processor.multiplications is None:
        return bench_options

    shorter = shorten(checkpoint, bench_options, asked, model, processor)
    if shorter != bench_options:
        usual, now = (
            f"{expected_seconds(checkpoint, options, model, processor) / 60:,.0f} min"
            for options in (bench_options, shorter)
        )
        batches, runs = ",".join(map(str, shorter.batches)), counted(shorter.repeat, "run")
        picture = "" if shorter.pictures or model.vision is None else ", {}x{}".format(*shorter.size)
        printer.note(
            f"expected on this CPU: {usual}; measured instead, in about {now}: {batches} at once, {runs}"
            f"{picture} (--batch, --repeat and --size ask for others)"
        )
    return shorter


def _measure(
    name: str, bench_options: "BenchOptions", printer: Printer, phases: "StartupTimer", *, may_be_fewer: bool
) -> "BenchResult":
    """Measure; if ``may_be_fewer``, with one request at a time where the default does not fit."""
    from vlfit.bench.measure import run_bench
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.cli.loading import show_loading

    checkpoint = open_checkpoint(name)

    def say(text: str) -> None:
        printer.note(f"  {text}")

    def show() -> "AbstractContextManager[LoadProgress]":
        return show_loading(name, printer, phases)

    try:
        return run_bench(checkpoint, bench_options, say, phases, show)
    except DoesNotFit as error:
        if not may_be_fewer or max(bench_options.batches) == 1:
            raise
        printer.note(f"{max(bench_options.batches)} at once: {error.message}\nmeasuring one at a time")
    return run_bench(checkpoint, replace(bench_options, batches=(1,)), say, phases, show)


def _batches(text: str) -> tuple[int, ...]:
    """Parse "1,4,8". Raises ``UsageError``; ``BenchOptions`` checks the numbers."""
    if not re.fullmatch(r"\s*\d{1,6}\s*(,\s*\d{1,6}\s*)*", text):
        raise UsageError(f"--batch is {text!r}", "Write numbers with commas between them, like 1,4,8.")
    return tuple(int(number) for number in text.split(","))


def _size(text: str) -> tuple[int, int]:
    """Parse "1024x768". Raises ``UsageError``."""
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text.strip().lower())
    if match is None or "0" in (match[1].strip("0") or "0", match[2].strip("0") or "0"):
        raise UsageError(f"--size is {text!r}", "Write width x height in pixels, like 1024x768.")
    return int(match[1]), int(match[2])
