"""Many rows in FP8 times weights in FP8, where a card multiplies 8 bits by 8 bits (from Ada and Hopper on).

Each row is rounded to float8_e4m3fn with a scale for every 128 neighbours: what transformers and vLLM do with
the official FP8 checkpoints, whose weights have a scale for each 128 x 128. Of checkpoints with a scale for
each output, which are meant for one scale a row, the rows are rounded the same, finer way. It costs about 3 %
of relative error a product, and saves widening the weights. On a Hopper cuBLAS multiplies so, at 640 to 970
TFLOP/s where the kernel here reaches 600, but torch takes longer to ask for it (docs/log.md): it gets the
large products; it takes only rows that are a multiple of 4. Knows: when this is done, what it allocates, and
how many programs it gets. Few rows are not rounded (``linear.py``).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vlfit.kernels.gemm.quantized import NarrowWeights, converts_float8, means
from vlfit.kernels.launch import power_of_two
from vlfit.plan.native.tiles import EIGHT_BIT_ROWS, GROUP, WIDEN_ROWS, fits_eight_bits

LARGEST, LEAST = 448.0, 1e-12  # numbers of float8_e4m3fn; of what a scale is made
_TILE = 1024  # elements that one program rounds
# Multiplications from which a product is cuBLAS's: our kernel takes 150 us for them and cuBLAS a third less,
# which torch needs to ask for it (docs/log.md).
LARGE = 5 * 10**10


@dataclass(frozen=True, slots=True)
class EightBits:
    """Rows in FP8: ``codes`` [rows, width] float8_e4m3fn times ``scale`` [width / 128, rows] float32.

    Both may have more rows than ``rows``, with nothing in them. ``dtype`` is what they were, and what
    products of them are.
    """

    codes: Tensor
    scale: Tensor
    rows: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes: rows x outputs, by so many warps and load stages.

    ``together``: as many tiles of outputs take turns with all rows.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    together: int = 4


TILES = Tiles(64, 128, 4, 3)  # the fastest of ten on an H100, for all shapes of 2B and 4B (docs/log.md)


def takes(weights: NarrowWeights, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``rows`` rows are multiplied with ``weights`` here: else they are widened."""
    return takes_rows(rows, dtype, device) and fits(weights)


def takes_rows(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """``takes``, of weights that ``fits`` is true of."""
    return rows > WIDEN_ROWS and dtype != torch.float32 and means(device).eight_bits


def fits(weights: NarrowWeights) -> bool:
    """Whether weights are in FP8, with scales that change where those of rows do."""
    return fits_eight_bits(weights.form, weights.inputs, weights.block[1])


def _room(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> EightBits:
    room = rows + -rows % EIGHT_BIT_ROWS
    codes = torch.empty((room, width), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((width // GROUP, room), dtype=torch.float32, device=device)
    return EightBits(codes, scale, rows, dtype)


def _sizes(x: Tensor, width: int, tile: int) -> dict[str, int | bool]:
    return {"width": width, "tile": tile, "group": GROUP, "hardware": converts_float8(x.device)}


def quantize(x: Tensor) -> EightBits:
    """``x`` [rows, width], whose rows may lie apart, rounded. Allocates what it gives, as the next two do."""
    rows, width = x.shape
    output = _room(rows, width, x.dtype, x.device)
    if x.device.type != "meta":
        from vlfit.kernels.gemm.fp8_kernels import quantize as kernel

        kernel[(rows, -(-width // _TILE))](
            x,
            output.codes,
            output.scale,
            len(output.codes),
            x.stride(0),
            **_sizes(x, width, _TILE),
            num_warps=4,
        )
    return output


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> EightBits:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives the norm of the sum, times ``weight``."""
    rows, width = hidden.shape
    output = _room(rows, width, hidden.dtype, hidden.device)
    if hidden.device.type != "meta":
        from vlfit.kernels.gemm.fp8_kernels import add_norm as kernel

        tile = max(power_of_two(width), GROUP)
        kernel[(rows,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            output.codes,
            output.scale,
            len(output.codes),
            eps,
            has_delta=delta is not None,
            **_sizes(hidden, width, tile),
            num_warps=8 if tile >= 2048 else 4,
        )
    return output


def silu_and_multiply(gate_up: Tensor) -> EightBits:
    """``silu(gate) * up`` [rows, inner] of ``gate_up`` [rows, 2 * inner]."""
    rows, both = gate_up.shape
    width = both // 2
    output = _room(rows, width, gate_up.dtype, gate_up.device)
    if gate_up.device.type != "meta":
        from vlfit.kernels.gemm.fp8_kernels import silu_and_multiply as kernel

        kernel[(rows, -(-width // _TILE))](
            gate_up,
            output.codes,
            output.scale,
            len(output.codes),
            **_sizes(gate_up, width, _TILE),
            num_warps=4,
        )
    return output


def multiply(x: EightBits, weights: NarrowWeights, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """``x`` [rows, inputs] times ``weights`` (``fits``) plus ``bias``: [rows, outputs] in ``x.dtype``.

    Allocates what it gives, in multiples of ``EIGHT_BIT_ROWS`` rows.
    """
    device = x.codes.device
    large = x.rows * weights.inputs * weights.outputs >= LARGE
    if large and tiles is None and x.dtype == torch.bfloat16 and _blocks(weights) and by_library(device):
        scale = weights.scale.t()
        found = torch._scaled_mm(x.codes, weights.codes.t(), x.scale.t(), scale, out_dtype=x.dtype)
        if x.codes.shape[0] != x.rows:
            found = found[: x.rows]
        return found if bias is None else found.add_(bias)
    output = torch.empty((len(x.codes), weights.outputs), dtype=x.dtype, device=device)[: x.rows]
    if device.type != "meta":
        _launch(x, weights, bias, output, tiles or TILES)
    return output


def _blocks(weights: NarrowWeights) -> bool:
    """Whether weights are scaled as cuBLAS takes them."""
    scale = weights.scale
    return weights.block == (GROUP, GROUP) and scale.shape[1] % 4 == 0 and scale.dtype == torch.float32


@cache
def by_library(device: torch.device) -> bool:
    """Whether torch multiplies such rows and weights on ``device``: asked by a product whose result is known.

    cuBLAS does on compute capability 9.0, from CUDA 12.9 on.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return multiplies_rightly(device)


def multiplies_rightly(device: torch.device) -> bool:
    """Whether torch finds what a product of two blocks of weights must be, whatever stands in its way."""
    x = torch.ones((EIGHT_BIT_ROWS, 4 * GROUP), device=device).to(torch.float8_e4m3fn)
    weight = torch.ones((2 * GROUP, 4 * GROUP), device=device).to(torch.float8_e4m3fn)
    steps = torch.arange(1.0, 5.0, device=device)
    scale = steps.repeat(EIGHT_BIT_ROWS, 1).t().contiguous()
    weight_scale = torch.stack((steps, 2 * steps.flip(0)))  # no two are read for one another
    try:
        found = torch._scaled_mm(x, weight.t(), scale.t(), weight_scale.t(), out_dtype=torch.bfloat16)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    known = found.new_tensor([30, 40]).repeat_interleave(GROUP)  # 1 + 4 + 9 + 16; 2 (4 + 6 + 6 + 4)
    return bool((found == GROUP * known).all())


def _launch(x: EightBits, weights: NarrowWeights, bias: Tensor | None, output: Tensor, tiles: Tiles) -> None:
    from vlfit.kernels.gemm.fp8_kernels import multiply as kernel

    outputs, inputs = weights.outputs, weights.inputs
    kernel[(-(-x.rows // tiles.rows) * -(-outputs // tiles.outputs),)](
        x.codes,
        x.scale,
        weights.codes,
        weights.scale,
        output if bias is None else bias,
        output,
        x.rows,
        len(x.codes),
        outputs,
        inputs,
        weights.scale.shape[1],
        has_bias=bias is not None,
        scale_rows=weights.block[0],
        one_group=weights.block[1] != GROUP,
        group=GROUP,
        tile_rows=tiles.rows,
        tile_outputs=tiles.outputs,
        together=tiles.together,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def plain_quantize(x: Tensor) -> EightBits:
    """``quantize`` in plain PyTorch: what the kernels are tested against."""
    grouped = x.float().unflatten(1, (-1, GROUP))
    largest = grouped.abs().amax(2).clamp_min(LEAST)
    codes = (grouped * (LARGEST / largest).unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return EightBits(codes, (largest / LARGEST).T.contiguous(), len(x), x.dtype)


def plain_wide(x: EightBits) -> Tensor:
    """The numbers that ``x`` stands for [rows, width], in float64."""
    wide: Tensor = x.codes.double().unflatten(1, (-1, GROUP)) * x.scale.T.double().unsqueeze(2)
    return wide[: x.rows].flatten(1)
