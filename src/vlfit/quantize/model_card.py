"""The result of a conversion, and the model card (README.md) written beside the new weights."""

from dataclasses import dataclass
from pathlib import Path

from vlfit._version import __version__
from vlfit.checkpoint.quantization import FP8, INT8
from vlfit.quantize.recipe import UNCHANGED
from vlfit.units import format_bytes


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What a conversion wrote to ``folder``, and its quantization errors.

    ``source``: name of the original. ``source_weights``, ``weights``: formats of the text layers before and
    after. ``bytes_before``, ``bytes_after``: of all tensors. ``parameters``: number of weights;
    ``converted_parameters``: how many of them are stored in 8 or 4 bits now. ``group_size``: None for FP8.
    ``head``, ``embedding``, ``vision``: the new format of that part, ``16`` if it was copied. ``kept``:
    layers that stay in 16 bits, as groups do not divide their inputs. ``relative_errors``: by kind of layer,
    the root of the squared error over that of the squared weights; ``nearest_errors``: the same for plain
    rounding to nearest. ``seconds``: duration. ``vlfit convert --json`` prints these fields.
    """

    source: str
    source_weights: str
    folder: Path
    weights: str
    bytes_before: int
    bytes_after: int
    parameters: int
    converted_parameters: int
    group_size: int | None
    head: str
    embedding: str
    vision: str
    kept: tuple[str, ...]
    relative_errors: dict[str, float]
    nearest_errors: dict[str, float]
    seconds: float

    @property
    def is_plain(self) -> bool:
        """Whether vLLM and transformers read the result too.

        So they do if embedding and vision tower were copied and the head is not int8.
        """
        return (self.embedding, self.vision) == (UNCHANGED, UNCHANGED) and self.head != INT8

    @property
    def cli_options(self) -> str:
        """The options of ``vlfit convert`` that reproduce this conversion."""
        words = [f"--weights {self.weights}"]
        if self.group_size is not None:
            words.append(f"--group-size {self.group_size}")
        for part in ("head", "embedding", "vision"):
            if getattr(self, part) != UNCHANGED:
                words.append(f"--{part} {getattr(self, part)}")
        return " ".join(words)


_SCALE_SEARCH_NOTE = """\
Each group's scale has the sign that puts its largest weight on the side with one more code. Its magnitude is
the best of a search for the least squared error, refined by least squares.
"""


def model_card(result: ConversionResult) -> str:
    """The text of README.md for the new checkpoint, in Markdown."""
    return "\n".join(
        [
            f"# {result.source} in {'FP8' if result.weights == FP8 else result.weights}",
            "",
            f"Converted by vlfit {__version__}: `vlfit convert {result.source} {result.cli_options}`.",
            "",
            *_contents_section(result),
            f"The weights take {format_bytes(result.bytes_after)}; they took "
            f"{format_bytes(result.bytes_before)}. No example data was used.",
            "",
            _compatibility_section(result),
            "",
            *_errors_section(result),
            "The licence of the original applies. Its card, if it has one, is `README.original.md`; the",
            "scores in it were measured on the original.",
            "",
        ]
    )


def _contents_section(result: ConversionResult) -> list[str]:
    """The format of each part."""
    lines = [
        f"{result.converted_parameters:,} of {result.parameters:,} parameters are stored in fewer bits:",
        "",
    ]
    if result.weights == FP8:
        lines.append(
            "- linear layers of the text model: 8-bit floats (e4m3), a scale for each block of 128 x 128"
        )
    else:
        lines.append(
            "- linear layers of the text model: 4-bit integers, a scale for each group of "
            f"{result.group_size} inputs (symmetric, W4A16)"
        )
    names = {
        "head": "output head",
        "embedding": "embedding",
        "vision": "linear layers of the vision tower",
    }
    for part, name in names.items():
        part_format = getattr(result, part)
        if part_format == INT8:
            lines.append(f"- {name}: 8-bit integers, a scale for each row (symmetric, W8A16)")
        elif part_format != UNCHANGED:
            lines.append(f"- {name}: 4-bit integers, as the text layers")
    if result.kept:
        lines.append(
            f"\n{len(result.kept)} of those layers stay in 16 bits, as groups do not divide their inputs."
        )
    return [*lines, "", "Everything else is copied from the original, byte for byte."]


def _compatibility_section(result: ConversionResult) -> str:
    if not result.is_plain:
        return (
            "vlfit reads these files. The format is `compressed-tensors`, but other programs have not been\n"
            "tested with 8-bit integers in these places."
        )
    format_name, package = (
        ("the format of the official Qwen3-VL FP8 checkpoints", "accelerate")
        if result.weights == FP8
        else ("the `pack-quantized` format of compressed-tensors", "compressed-tensors")
    )
    return (
        f"It is {format_name}: vlfit and vLLM read these files as they are. For transformers,\n"
        f"install the package `{package}` beside it: `pip install {package}`."
    )


def _errors_section(result: ConversionResult) -> list[str]:
    """The table of quantization errors; empty if all quantized weights were copied."""
    if not result.relative_errors:
        return []
    of = "weights" if result.source_weights != FP8 else "FP8 weights that it was made from"
    lines = [f"Quantization error relative to the {of} (root mean square):", ""]
    if result.relative_errors == result.nearest_errors:
        lines += ["| layers | error |", "|---|---|"]
        lines += [f"| {kind} | {error:.2%} |" for kind, error in result.relative_errors.items()]
        return [*lines, ""]
    lines += ["| layers | error | with plain rounding to nearest |", "|---|---|---|"]
    for kind, error in result.relative_errors.items():
        lines.append(f"| {kind} | {error:.2%} | {result.nearest_errors[kind]:.2%} |")
    return [*lines, "", _SCALE_SEARCH_NOTE]
