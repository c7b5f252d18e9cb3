"""``vlfit bench``: how fast a model is on this machine, as a block of text to be posted, or as JSON.

Knows options and what a person is told meanwhile. Does not measure (``bench/``).
"""

import re
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.printing import Printer
from vlfit.errors import DoesNotFit, UsageError

if TYPE_CHECKING:
    from vlfit.backends.base import Phases
    from vlfit.bench.measure import Measured
    from vlfit.bench.workload import Wanted
    from vlfit.cli.loading import Progress


EXAMPLES = """\b
Examples:
  vlfit bench
  vlfit bench Qwen/Qwen3-VL-4B-Instruct-FP8 --batch 1,4,8
  vlfit bench --picture photo.jpg --tokens 256 --repeat 10
  vlfit bench mini --device cpu --json > bench.json
"""

Text = str | None
Count = int | None


def bench(
    model_argument: Annotated[
        Text, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    model: Annotated[
        Text,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="auto (the best one here, else mini), mini, a folder, or a hub id.  [env VLFIT_MODEL]",
        ),
    ] = None,
    picture: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Ask about this picture (file, URL, -) instead of one that is made up; may be given again.",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="WxH", help="Pixels of the pictures that are made up.")
    ] = "1024x768",
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each answer.")] = 128,
    batch: Annotated[
        Text,
        typer.Option(
            metavar="N,N",
            help="Requests at once, each number measured by itself."
            "  [default: 1 and as many as vlfit serve runs, where they fit]",
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(metavar="N", help="Times to measure each, after one that warms up.")
    ] = 5,
    context: Annotated[
        Count,
        typer.Option(
            metavar="N",
            help="Fill the prompt up with text until it and the answer are so many tokens.",
        ),
    ] = None,
    device: Annotated[
        Text,
        typer.Option(
            metavar="NAME", help="auto (GPU if there is one), cpu, cuda, cuda:1.  [env VLFIT_DEVICE]"
        ),
    ] = None,
    dtype: Annotated[
        Text, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.  [env VLFIT_DTYPE]")
    ] = None,
    kv_dtype: Annotated[
        Text,
        typer.Option(
            metavar="NAME",
            help="Of the KV cache: auto (as computed), bf16, or fp8: half the bytes, rounded."
            "  [env VLFIT_KV_DTYPE]",
        ),
    ] = None,
    image_tokens: Annotated[
        Count,
        typer.Option(
            metavar="N", help="Most tokens of a picture; larger ones are scaled.  [env VLFIT_IMAGE_TOKENS]"
        ),
    ] = None,
    chunk: Annotated[
        Count,
        typer.Option(
            metavar="N", help="Most tokens of one pass through the model.  [default: 1024; env VLFIT_CHUNK]"
        ),
    ] = None,
    offload: Annotated[
        Text,
        typer.Option(
            metavar="GIB",
            help="Let text layers wait in RAM so that the GPU holds so much less; auto: as few as make it"
            " fit.  [env VLFIT_OFFLOAD]",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, in bytes and seconds, with every single measurement.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Measure how fast a model answers about a picture on this machine, to compare and to post.

    Tokens per second, and which share that is of what this machine's memory allows, measured in the same run;
    the parts of the time to the first token; start and memory. The model is loaded with room for these
    requests and nothing else; nothing is remembered between them. Close other programs first.
    """
    from vlfit.backends.base import Phases
    from vlfit.bench.results import facts_of, page
    from vlfit.bench.workload import Wanted
    from vlfit.settings import read_settings
    from vlfit.tasks.pictures import load_picture

    if model_argument and model and model_argument != model:
        raise UsageError(f"two models: {model_argument} and --model {model}", "name one")
    phases = Phases()
    settings = read_settings(
        model=model or model_argument,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        image_tokens=image_tokens,
        chunk=chunk,
        offload=offload,
    )
    printer = Printer(json=as_json, quiet=quiet)
    wanted = Wanted(
        size=_size(size),
        tokens=tokens,
        batches=_batches(batch) if batch is not None else (1, settings.sequences),
        repeat=repeat,
        context=context,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        image_tokens=settings.image_tokens,
        chunk=settings.chunk,
        offload=settings.offload,
    )
    wanted = replace(wanted, pictures=tuple(map(load_picture, picture or ())))
    name = _name(settings.model, printer)
    measured = _measured(name, wanted, printer, phases, may_be_fewer=batch is None)
    if as_json:
        printer.data(facts_of(measured))
    else:
        printer.line("\n".join(page(measured)))


def _name(name: str, printer: Printer) -> str:
    if name != "auto":
        return name
    from vlfit.client import choose_model

    choice = choose_model()
    printer.note(choice.reason)
    return choice.model


def _measured(
    name: str, wanted: "Wanted", printer: Printer, phases: "Phases", *, may_be_fewer: bool
) -> "Measured":
    """``may_be_fewer``: nobody asked for so many requests at once; one will do where they do not fit."""
    from vlfit.bench.measure import measure
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.cli.loading import loading

    checkpoint = open_checkpoint(name)

    def say(text: str) -> None:
        printer.note(f"  {text}")

    def show() -> "AbstractContextManager[Progress]":
        return loading(name, printer, phases)

    try:
        return measure(checkpoint, wanted, say, phases, show)
    except DoesNotFit as error:
        if not may_be_fewer or max(wanted.batches) == 1:
            raise
        printer.note(f"{max(wanted.batches)} at once: {error.message}\nmeasuring one at a time alone")
    return measure(checkpoint, replace(wanted, batches=(1,)), say, phases, show)


def _batches(text: str) -> tuple[int, ...]:
    """ "1,4,8" as numbers. Raises ``UsageError``; whether they make sense, ``Wanted`` says."""
    if not re.fullmatch(r"\s*\d{1,6}\s*(,\s*\d{1,6}\s*)*", text):
        raise UsageError(f"--batch is {text!r}", "write numbers with commas between them, like 1,4,8")
    return tuple(int(number) for number in text.split(","))


def _size(text: str) -> tuple[int, int]:
    """ "1024x768" as width and height. Raises ``UsageError``."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip().lower())
    if found is None or "0" in (found[1].strip("0") or "0", found[2].strip("0") or "0"):
        raise UsageError(f"--size is {text!r}", "write width x height in pixels, like 1024x768")
    return int(found[1]), int(found[2])
