"""What a conversion did, as a record and as the card that lies beside the new weights. Knows no tensors."""

from dataclasses import dataclass
from pathlib import Path

from vlfit._version import __version__
from vlfit.checkpoint.quantization import FP8
from vlfit.units import format_bytes


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written. Bytes are those of all tensors; ``group_size`` is None for FP8.

    ``kept``: text layers that the form cannot hold, so that they kept their 16 bits. ``relative_errors``: by
    kind of layer, the root of the squared error over that of the squared weights.
    """

    source: str
    folder: Path
    weights: str
    bytes_before: int
    bytes_after: int
    parameters: int
    converted_parameters: int
    group_size: int | None
    head: bool
    kept: tuple[str, ...]
    relative_errors: dict[str, float]
    seconds: float


def card(done: Conversion) -> str:
    """README.md of the new checkpoint."""
    if done.weights == FP8:
        title, form = "FP8", "8-bit floats (e4m3) with a scale for each block of 128 x 128"
        reads = "the form of the official Qwen3-VL FP8 checkpoints, which vLLM and transformers read too"
        package = "accelerate"
    else:
        title = "int4"
        form = f"4-bit integers with a scale for each group of {done.group_size} inputs (symmetric, W4A16)"
        reads = "the form `pack-quantized` of compressed-tensors, which vLLM and transformers read too"
        package = "compressed-tensors"
    kept = (
        f" {len(done.kept)} of those layers do not divide into groups and kept 16 bits." if done.kept else ""
    )
    head, own_head = (" and its output head", "") if done.head else ("", ", output head")
    return f"""\
# {done.source} in {title}

Converted by vlfit {__version__}: `vlfit convert {done.source} --weights {done.weights}`.

{done.converted_parameters:,} of {done.parameters:,} parameters, the linear layers of the text model{head},
are stored as {form}:
{reads}.{kept}
Embeddings, norms{own_head} and the vision tower are those of the original, byte for byte.
The weights take {format_bytes(done.bytes_after)}; they took {format_bytes(done.bytes_before)}.
No example data was used.

vlfit and vLLM read these files as they are. For transformers, install the package `{package}` beside it:
`pip install {package}`.

What rounding changed, relative to the weights (root mean square):

| layers | error |
|---|---|
{"".join(f"| {kind} | {error:.2%} |{chr(10)}" for kind, error in done.relative_errors.items())}
The licence of the original applies. Its card, if it has one, is `README.original.md`; the scores in it were
measured on the original.
"""
