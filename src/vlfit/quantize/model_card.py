"""What a conversion did, as a record and as the card that lies beside the new weights. Knows no tensors."""

from dataclasses import dataclass
from pathlib import Path

from vlfit._version import __version__
from vlfit.checkpoint.quantization import FP8, INT8
from vlfit.quantize.recipe import KEPT
from vlfit.units import format_bytes


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written. Bytes are those of all tensors; ``group_size`` is None for FP8.

    ``source_weights``: what the text layers were in. ``head``, ``embedding``, ``vision``: ``16`` where that
    part kept its bytes, else its form. ``kept``: layers that the form cannot hold, so that they kept their 16
    bits. ``relative_errors``: by kind of layer, the root of the squared error over that of the squared
    weights; ``nearest_errors``: what rounding each weight to the nearest code would have made of it.
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
        """Whether only text layers and the head were rounded, as other programs expect."""
        return (self.embedding, self.vision) == (KEPT, KEPT) and self.head != INT8

    @property
    def options(self) -> str:
        """What ``vlfit convert`` was told, so that the same is made again."""
        words = [f"--weights {self.weights}"]
        if self.group_size is not None:
            words.append(f"--group-size {self.group_size}")
        for part in ("head", "embedding", "vision"):
            if getattr(self, part) != KEPT:
                words.append(f"--{part} {getattr(self, part)}")
        return " ".join(words)


_RULE = """\
A group's scale has the sign that puts its largest weight on the side with one code more, and the size, of
those tried, with the least squared error, refined by least squares.
"""


def card(done: Conversion) -> str:
    """README.md of the new checkpoint."""
    return "\n".join(
        [
            f"# {done.source} in {'FP8' if done.weights == FP8 else done.weights}",
            "",
            f"Converted by vlfit {__version__}: `vlfit convert {done.source} {done.options}`.",
            "",
            *_what(done),
            f"The weights take {format_bytes(done.bytes_after)}; they took "
            f"{format_bytes(done.bytes_before)}. No example data was used.",
            "",
            _readers(done),
            "",
            *_errors(done),
            "The licence of the original applies. Its card, if it has one, is `README.original.md`; the",
            "scores in it were measured on the original.",
            "",
        ]
    )


def _what(done: Conversion) -> list[str]:
    """Which parts are in which form."""
    lines = [
        f"{done.converted_parameters:,} of {done.parameters:,} parameters are stored in fewer bits:",
        "",
    ]
    if done.weights == FP8:
        lines.append(
            "- linear layers of the text model: 8-bit floats (e4m3), a scale for each block of 128 x 128"
        )
    else:
        lines.append(
            f"- linear layers of the text model: 4-bit integers, a scale for each group of {done.group_size} "
            "inputs (symmetric, W4A16)"
        )
    names = {
        "head": "output head",
        "embedding": "table of tokens",
        "vision": "linear layers of the vision tower",
    }
    for part, name in names.items():
        form = getattr(done, part)
        if form == INT8:
            lines.append(f"- {name}: 8-bit integers, a scale for each row (symmetric, W8A16)")
        elif form != KEPT:
            lines.append(f"- {name}: 4-bit integers, as the text layers")
    if done.kept:
        lines.append(f"\n{len(done.kept)} of those layers do not divide into groups and kept 16 bits.")
    return [*lines, "", "Everything else is that of the original, byte for byte."]


def _readers(done: Conversion) -> str:
    if not done.is_plain:
        return (
            "vlfit reads these files. The form is `compressed-tensors`, but other programs were not tried\n"
            "with 8-bit integers in these places."
        )
    form, package = (
        ("the form of the official Qwen3-VL FP8 checkpoints", "accelerate")
        if done.weights == FP8
        else ("the form `pack-quantized` of compressed-tensors", "compressed-tensors")
    )
    return (
        f"It is {form}: vlfit and vLLM read these files as they are. For transformers,\ninstall the package "
        f"`{package}` beside it: `pip install {package}`."
    )


def _errors(done: Conversion) -> list[str]:
    """The table of errors. FP8 that was copied has none."""
    if not done.relative_errors:
        return []
    of = "weights" if done.source_weights != FP8 else "weights in FP8 that it was made of"
    lines = [f"What rounding changed, relative to the {of} (root mean square):", ""]
    if done.relative_errors == done.nearest_errors:
        lines += ["| layers | error |", "|---|---|"]
        lines += [f"| {kind} | {error:.2%} |" for kind, error in done.relative_errors.items()]
        return [*lines, ""]
    lines += ["| layers | error | plain rounding to nearest would have |", "|---|---|---|"]
    for kind, error in done.relative_errors.items():
        lines.append(f"| {kind} | {error:.2%} | {done.nearest_errors[kind]:.2%} |")
    return [*lines, "", _RULE]
