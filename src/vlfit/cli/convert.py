"""``vlfit convert``: a checkpoint's weights in 8 or 4 bits, in a new folder that other programs read too."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.signals import terminated_as_interrupted

if TYPE_CHECKING:
    from vlfit.quantize.model_card import Conversion


class Weights(StrEnum):
    """What ``--weights`` takes."""

    fp8 = "fp8"
    int4 = "int4"


class EightBits(StrEnum):
    """What ``--embedding`` and ``--vision`` take."""

    kept = "16"
    int8 = "int8"


class Head(StrEnum):
    """What ``--head`` takes."""

    kept = "16"
    int8 = "int8"
    int4 = "int4"


class GroupSize(StrEnum):
    """What ``--group-size`` takes: the sizes that the kernels of vLLM take."""

    g32 = "32"
    g64 = "64"
    g128 = "128"


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, mini, or a hub id; with 16-bit, fp32 or FP8 weights."
        ),
    ],
    weights: Annotated[
        Weights,
        typer.Option(
            "--weights",
            "-w",
            help="fp8: nearly the same answers. int4: half its bytes again, a bit less exact.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Where to write.  [default: MODEL-FP8 or MODEL-INT4, beside a folder, else right here]",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        GroupSize | None,
        typer.Option(
            "--group-size",
            help="int4: how many weights share a scale. 128 saves 8 % of those bytes and is less exact."
            "  [default: 32]",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        Head,
        typer.Option(
            "--head",
            help="The output head, where it is not tied to the embedding: in 8B int8 saves 0.6 GiB, int4 0.8."
            " int4 is less exact, and vLLM 0.32 reads it.",
        ),
    ] = Head.kept,
    embedding: Annotated[
        EightBits,
        typer.Option(
            "--embedding",
            help="The table of tokens, and with it a head that is tied to it. int8 saves half of its bytes.",
        ),
    ] = EightBits.kept,
    vision: Annotated[
        EightBits,
        typer.Option("--vision", help="The vision tower's linear layers. int8 saves half of their bytes."),
    ] = EightBits.kept,
    shard_mib: Annotated[
        int,
        typer.Option("--shard-mib", metavar="N", min=1, help="Largest file, in MiB."),
    ] = 4096,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace a checkpoint that is there already.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was done as one line of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Write a copy of a checkpoint with its text layers in FP8 or int4. Prints the new folder.

    FP8 is the form of the official Qwen3-VL FP8 checkpoints, int4 the pack-quantized form of
    compressed-tensors (W4A16): vLLM reads both, transformers too with the package accelerate (FP8) or
    compressed-tensors (int4). Embedding, output head and vision tower keep their bytes unless it is said
    otherwise; int8 in these places is for vlfit, other programs were not tried with it. int4 is made of FP8,
    too; from 16 bits it is a little more exact. The folder appears when it is whole; some rows of one tensor
    are in memory at a time.

    \b
    Examples:
      vlfit convert Qwen/Qwen3-VL-4B-Instruct --weights int4
      vlfit convert Qwen/Qwen3-VL-8B-Instruct -w int4 --embedding int8 --head int8 --vision int8
      vlfit convert Qwen/Qwen3-VL-4B-Instruct-FP8 -w fp8 --embedding int8
    """
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.cli.printing import Printer
    from vlfit.errors import UsageError

    if group_size is not None and weights is not Weights.int4:
        raise UsageError("--group-size is for --weights int4", "FP8 has blocks of 128x128; leave it out")
    printer = Printer(json=json, quiet=quiet)
    checkpoint = open_checkpoint(model)
    target = _default_target(model, checkpoint.name, weights) if out is None else out.expanduser()

    from vlfit.checkpoint.transfer import StderrProgress
    from vlfit.quantize.conversion import DEFAULT_GROUP_SIZE
    from vlfit.quantize.conversion import convert as run
    from vlfit.units import MIB

    progress = None if quiet else StderrProgress(f"{checkpoint.name} to {weights}")
    try:
        with terminated_as_interrupted():
            done = run(
                checkpoint,
                weights.value,
                target,
                group_size=DEFAULT_GROUP_SIZE if group_size is None else int(group_size),
                head=head.value,
                embedding=embedding.value,
                vision=vision.value,
                shard_bytes=shard_mib * MIB,
                replace=force,
                progress=progress,
            )
    finally:
        if progress:
            progress.close()
    for line in _report(done):
        printer.note(line)
    if json:
        printer.data({**asdict(done), "folder": str(done.folder), "seconds": round(done.seconds, 2)})
    else:
        printer.line(str(done.folder))


def _default_target(model: str, name: str, weights: Weights) -> Path:
    """Beside a folder that was named; for what lies elsewhere (mini, the hub's cache) the current folder."""
    new_name = f"{name.partition('@')[0].rpartition('/')[2]}-{weights.upper()}"
    folder = Path(model).expanduser()
    return folder.resolve().parent / new_name if name != model and folder.is_dir() else Path(new_name)


def _report(done: "Conversion") -> list[str]:
    from vlfit.units import format_bytes, format_seconds

    form = done.weights if done.group_size is None else f"{done.weights} in groups of {done.group_size}"
    parts = ("embedding", "head", "vision")
    rest = [f"{part} {getattr(done, part)}" for part in parts if getattr(done, part) != "16"]
    share = done.converted_parameters / done.parameters
    lines = [
        f"{done.source}: {share:.0%} of {done.parameters / 1e6:,.0f} million parameters are now "
        f"{', '.join([form, *rest])}",
        f"weights: {format_bytes(done.bytes_before)} before, {format_bytes(done.bytes_after)} after, "
        f"in {format_seconds(done.seconds)}",
    ]
    if done.relative_errors:
        lines.append(f"relative error: {_listed(done.relative_errors)}")
    if done.nearest_errors != done.relative_errors:
        lines.append(f"by plain rounding: {_listed(done.nearest_errors)}")
    if done.kept:
        shown = ", ".join(done.kept[:3]) + (", ..." if len(done.kept) > 3 else "")
        lines.append(f"{len(done.kept)} layers keep 16 bits, as groups do not divide their inputs: {shown}")
    return lines


def _listed(errors: dict[str, float]) -> str:
    return ", ".join(f"{kind} {error:.2%}" for kind, error in errors.items())
