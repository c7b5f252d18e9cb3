"""``vlfit convert``: quantize a checkpoint to FP8, int4 or GGUF, readable by other programs."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.options import CommandOptions, complete_model, takes_options
from vlfit.cli.signals import terminated_as_interrupted
from vlfit.units import counted

if TYPE_CHECKING:
    from vlfit.checkpoint.source import Checkpoint
    from vlfit.quantize.model_card import ConversionResult


class ConvertedWeights(StrEnum):
    """Values of ``--weights``: for checkpoints in safetensors, then for GGUF."""

    fp8 = "fp8"
    int4 = "int4"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q5_1 = "q5_1"
    q5_0 = "q5_0"
    q4_1 = "q4_1"
    q4_0 = "q4_0"


_SAFETENSORS_WEIGHTS = (ConvertedWeights.fp8, ConvertedWeights.int4)


class TargetFormat(StrEnum):
    """Values of ``--to``: the kind of files to write."""

    safetensors = "safetensors"
    gguf = "gguf"


class PartDtype(StrEnum):
    """Values of ``--embedding`` and ``--vision``: as they are (16 bits), or int8."""

    kept = "16"
    int8 = "int8"


class HeadDtype(StrEnum):
    """Values of ``--head``: as it is (16 bits), int8 or int4."""

    kept = "16"
    int8 = "int8"
    int4 = "int4"


class GroupSize(StrEnum):
    """Values of ``--group-size``, in weights: those that vLLM's kernels support."""

    g32 = "32"
    g64 = "64"
    g128 = "128"


@takes_options("yes", "json", "quiet", json="Print the result as one line of JSON.")
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="A folder, mini, a hub id or a short name, with 16-bit, fp32 or FP8 weights; 4B is the one"
            " in 16 bits.",
        ),
    ],
    weights: Annotated[
        ConvertedWeights | None,
        typer.Option(
            "--weights",
            "-w",
            help="fp8: nearly the same answers. int4: half the size of fp8, less exact. The others are types"
            " of GGUF: q8_0 is nearly exact, q4_0 half its size.  [default with --to gguf: bf16]",
            show_default=False,
            case_sensitive=False,
        ),
    ] = None,
    to: Annotated[
        TargetFormat,
        typer.Option("--to", help="Kind of files: gguf is for llama.cpp, Ollama and LM Studio too."),
    ] = TargetFormat.safetensors,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Output folder.  [default: MODEL-FP8 or MODEL-INT4 in vlfit's store, where every command"
            " finds it by this name; see vlfit models]",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        GroupSize | None,
        typer.Option(
            "--group-size",
            help="int4: weights per scale. 128 saves 8 % and is less exact.  [default: 32]",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        HeadDtype,
        typer.Option(
            "--head",
            help="Output head, unless tied to the embedding. For 8B int8 saves 0.6 GiB, int4 0.8 GiB; int4 is"
            " less exact, and vLLM 0.32 reads it.",
        ),
    ] = HeadDtype.kept,
    embedding: Annotated[
        PartDtype,
        typer.Option(
            "--embedding",
            help="Token embedding, and the head if tied to it. int8 halves the size.",
        ),
    ] = PartDtype.kept,
    vision: Annotated[
        PartDtype,
        typer.Option("--vision", help="Linear layers of the vision tower. int8 halves the size."),
    ] = PartDtype.kept,
    shard_mib: Annotated[
        int,
        typer.Option("--shard-mib", metavar="N", min=1, help="Max size of a file, in MiB."),
    ] = 4096,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing checkpoint.")] = False,
    *,
    options: CommandOptions,
) -> None:
    """Quantize a checkpoint to FP8 or int4, or write it as GGUF.

    Writes a copy and prints its folder, which appears when it is complete. The text layers are quantized;
    embedding, output head and vision tower keep their dtype unless you choose int8 or int4 for them.

    fp8 is the format of the official Qwen3-VL FP8 checkpoints, int4 is pack-quantized compressed-tensors
    (W4A16). vLLM reads both, transformers with accelerate (fp8) or compressed-tensors (int4) installed. Only
    vlfit was tried with int8 parts. int4 can be made from FP8, too, slightly less exactly than from 16 bits.

    With --to gguf a folder with the model's file and its vision tower's (mmproj) is written, and the model's
    file printed.

    \b
    Examples:
      vlfit convert 4B --weights int4
      vlfit convert 8B -w int4 --embedding int8 --head int8 --vision int8
      vlfit convert 4B-FP8 -w fp8 --embedding int8
      vlfit convert 4B --to gguf -w q8_0
    """
    from vlfit.checkpoint import store
    from vlfit.checkpoint.conversions import GROUP_SIZE as DEFAULT_GROUP_SIZE
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.cli.models import resolve_or_ask
    from vlfit.cli.printing import Printer
    from vlfit.errors import UsageError

    if to is TargetFormat.gguf:
        others = (group_size, head, embedding, vision)
        _convert_to_gguf(model, weights, out, others, replace=force, options=options)
        return
    if weights not in _SAFETENSORS_WEIGHTS:
        raise UsageError(
            "--weights is missing" if weights is None else f"--weights {weights} is a type of GGUF files",
            "Name one of fp8 and int4, or write GGUF files with --to gguf.",
        )
    if group_size is not None and weights is not ConvertedWeights.int4:
        raise UsageError(
            "--group-size needs --weights int4", "Leave it out: FP8 always has blocks of 128x128."
        )
    printer = Printer(json=options.json, quiet=options.quiet)
    checkpoint = open_checkpoint(resolve_or_ask(_unquantized(model), printer, yes=options.settings().yes))
    size = DEFAULT_GROUP_SIZE if group_size is None else int(group_size)
    if out is None:
        target = store.folder_for(_default_name(checkpoint, weights, size, head, embedding, vision))
        _create(target.parent)
    else:
        target = out.expanduser()

    from vlfit.checkpoint.transfer import StderrProgress
    from vlfit.quantize.conversion import convert as run
    from vlfit.units import MIB

    progress = None if options.quiet else StderrProgress(f"{checkpoint.name} to {weights}")
    try:
        with terminated_as_interrupted():
            done = run(
                checkpoint,
                weights.value,
                target,
                group_size=size,
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
    for line in _summary(done):
        printer.note(line)
    if options.json:
        printer.data({**asdict(done), "folder": str(done.folder), "seconds": round(done.seconds, 2)})
    else:
        printer.line(str(done.folder))


def _convert_to_gguf(
    model: str,
    weights: ConvertedWeights | None,
    out: Path | None,
    others: tuple[StrEnum | None, ...],
    *,
    replace: bool,
    options: CommandOptions,
) -> None:
    """``vlfit convert --to gguf``. ``others``: options that are for safetensors only."""
    from vlfit.checkpoint import store
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.checkpoint.transfer import StderrProgress
    from vlfit.cli.models import resolve_or_ask
    from vlfit.cli.printing import Printer
    from vlfit.errors import UsageError
    from vlfit.quantize.gguf_output import GGUF_TYPES
    from vlfit.units import format_bytes, format_seconds

    if weights in _SAFETENSORS_WEIGHTS:
        raise UsageError(
            f"GGUF has no type {weights}", f"Name one of {', '.join(GGUF_TYPES[:-1])} and {GGUF_TYPES[-1]}."
        )
    if any(value not in (None, "16") for value in others):
        raise UsageError(
            "--group-size, --head, --embedding and --vision are for safetensors",
            "Leave them out: a GGUF's type decides all of them.",
        )
    printer = Printer(json=options.json, quiet=options.quiet)
    checkpoint = open_checkpoint(resolve_or_ask(_unquantized(model), printer, yes=options.settings().yes))
    kind = weights or ConvertedWeights.bf16
    name = f"{checkpoint.name.partition('@')[0].rpartition('/')[2]}-{kind.upper()}-GGUF"
    target = store.folder_for(name) if out is None else out.expanduser()
    _create(target.parent)

    from vlfit.quantize.gguf_output import convert_to_gguf

    progress = None if options.quiet else StderrProgress(f"{checkpoint.name} to GGUF")
    try:
        with terminated_as_interrupted():
            done = convert_to_gguf(checkpoint, kind.value, target, replace=replace, progress=progress)
    finally:
        if progress:
            progress.close()
    files = "a file" if done.mmproj is None else "a file and its mmproj"
    printer.note(f"{files} with {format_bytes(done.bytes)} of {kind} in {format_seconds(done.seconds)}")
    if options.json:
        paths = {key: str(value) for key, value in asdict(done).items() if isinstance(value, Path)}
        printer.data({**asdict(done), **paths, "seconds": round(done.seconds, 2)})
    else:
        printer.line(str(done.model))


def _unquantized(model: str) -> str:
    """``model``; of a name without a weights format (``4B``) the 16-bit checkpoint."""
    from vlfit.checkpoint.catalog import BF16
    from vlfit.checkpoint.source import resolve_name

    found = resolve_name(model)
    if len(found) == 1:
        return model
    return next(each.name for each in found if each.entry is not None and each.entry.weights == BF16)


def _default_name(
    checkpoint: "Checkpoint",
    weights: ConvertedWeights,
    group_size: int,
    head: HeadDtype,
    embedding: PartDtype,
    vision: PartDtype,
) -> str:
    """Name of the copy, as the plan names it: ``Qwen3-VL-8B-Instruct-INT4-E8``."""
    from vlfit.checkpoint.conversions import FormatOptions

    int8_embedding = embedding is PartDtype.int8
    options = FormatOptions(int8_embedding, vision is PartDtype.int8, group_size, head is HeadDtype.int4)
    suffix = options.name_suffix
    if head is HeadDtype.int8 and not int8_embedding:
        suffix += "-H8"
    if head is HeadDtype.kept and int8_embedding and not checkpoint.config.tie_word_embeddings:
        suffix += "-H16"
    name = checkpoint.name.partition("@")[0].rpartition("/")[2]
    return f"{name}{'' if checkpoint.weights_format == weights else f'-{weights.upper()}'}{suffix}"


def _create(folder: Path) -> None:
    from vlfit.errors import CannotWrite

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(
            f"cannot create {folder}: {error.strerror}", "Set VLFIT_HOME to a writable folder, or use --out."
        ) from error


def _summary(done: "ConversionResult") -> list[str]:
    from vlfit.units import format_bytes, format_seconds

    scheme = done.weights if done.group_size is None else f"{done.weights} in groups of {done.group_size}"
    parts = ("embedding", "head", "vision")
    rest = [f"{part} {getattr(done, part)}" for part in parts if getattr(done, part) != "16"]
    share = done.converted_parameters / done.parameters
    lines = [
        f"{done.source}: {share:.0%} of {done.parameters / 1e6:,.0f} million parameters converted to "
        f"{', '.join([scheme, *rest])}",
        f"weights: {format_bytes(done.bytes_before)} before, {format_bytes(done.bytes_after)} after, "
        f"in {format_seconds(done.seconds)}",
    ]
    if done.relative_errors:
        lines.append(f"relative error: {_format_errors(done.relative_errors)}")
    if done.nearest_errors != done.relative_errors:
        lines.append(f"with plain rounding: {_format_errors(done.nearest_errors)}")
    if done.kept:
        shown = ", ".join(done.kept[:3]) + (", ..." if len(done.kept) > 3 else "")
        lines.append(
            f"in 16 bits, as groups do not divide their inputs: {counted(len(done.kept), 'layer')}: {shown}"
        )
    return lines


def _format_errors(errors: dict[str, float]) -> str:
    return ", ".join(f"{kind} {error:.2%}" for kind, error in errors.items())
