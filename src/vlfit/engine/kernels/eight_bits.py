"""Many rows in FP8 times weights in FP8, where a card multiplies 8 bits by 8 bits (from Ada and Hopper on).

Each row is rounded to float8_e4m3fn with a scale for every 128 neighbours: what transformers and vLLM do with
the official FP8 checkpoints, whose weights have a scale for each 128 x 128. Of checkpoints with a scale for
each output, which are meant for one scale a row, the rows are rounded the same, finer way. It costs about 3 %
of relative error a product, and saves widening the weights. Knows: when this is done, what it allocates, and
how many programs it gets. Few rows are not rounded (``linear.py``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.engine.kernels.launch import power_of_two
from vlfit.engine.kernels.linear import NarrowWeights, converts_float8, means
from vlfit.plan.many_rows import GROUP, WIDEN_ROWS, fits_eight_bits

LARGEST, LEAST = 448.0, 1e-12  # numbers of float8_e4m3fn; of what a scale is made
_TILE = 1024  # elements that one program rounds


@dataclass(frozen=True, slots=True)
class EightBits:
    """Rows in FP8: ``codes`` [rows, width] float8_e4m3fn times ``scale`` [width / 128, rows] float32.

    ``dtype`` is what they were, and what products of them are.
    """

    codes: Tensor
    scale: Tensor
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
    together: int = 8


GATED = Tiles(64, 2 * GROUP, 8, 2, 8)  # of a product whose gates are applied


def tiles_for(device: torch.device) -> Tiles:
    """By what matrix units are told: a Hopper's read shared memory, and need fewer registers."""
    return Tiles(64, 128, 4, 3)


def takes(weights: NarrowWeights, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``rows`` rows are multiplied with ``weights`` here: else they are widened."""
    return rows > WIDEN_ROWS and dtype != torch.float32 and means(device).eight_bits and fits(weights)


def fits(weights: NarrowWeights) -> bool:
    """Whether weights are in FP8, with scales that change where those of rows do."""
    return fits_eight_bits(weights.form, weights.inputs, weights.block[1])


def _room(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> EightBits:
    codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return EightBits(codes, torch.empty((width // GROUP, rows), dtype=torch.float32, device=device), dtype)


def _sizes(x: Tensor, width: int, tile: int) -> dict[str, int | bool]:
    return {"width": width, "tile": tile, "group": GROUP, "hardware": converts_float8(x.device)}


def quantize(x: Tensor) -> EightBits:
    """``x`` [rows, width], whose rows may lie apart, rounded. Allocates what it gives, as the next two do."""
    rows, width = x.shape
    output = _room(rows, width, x.dtype, x.device)
    if x.device.type != "meta":
        from vlfit.engine.kernels.eight_bit_steps import quantize as kernel

        kernel[(rows, -(-width // _TILE))](
            x, output.codes, output.scale, rows, x.stride(0), **_sizes(x, width, _TILE), num_warps=4
        )
    return output


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> EightBits:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives the norm of the sum, times ``weight``."""
    rows, width = hidden.shape
    output = _room(rows, width, hidden.dtype, hidden.device)
    if hidden.device.type != "meta":
        from vlfit.engine.kernels.eight_bit_steps import add_norm as kernel

        tile = max(power_of_two(width), GROUP)
        kernel[(rows,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            output.codes,
            output.scale,
            rows,
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
        from vlfit.engine.kernels.eight_bit_steps import silu_and_multiply as kernel

        kernel[(rows, -(-width // _TILE))](
            gate_up, output.codes, output.scale, rows, **_sizes(gate_up, width, _TILE), num_warps=4
        )
    return output


def multiply(x: EightBits, weights: NarrowWeights, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """``x`` [rows, inputs] times ``weights`` (``fits``) plus ``bias``: [rows, outputs] in ``x.dtype``.

    Allocates what it gives.
    """
    rows, inputs = x.codes.shape
    outputs, device = weights.outputs, x.codes.device
    output = torch.empty((rows, outputs), dtype=x.dtype, device=device)
    if device.type != "meta":
        from vlfit.engine.kernels.eight_bit_product import multiply as kernel

        tiles = tiles or tiles_for(device)
        kernel[(-(-rows // tiles.rows) * -(-outputs // tiles.outputs),)](
            x.codes,
            x.scale,
            weights.codes,
            weights.scale,
            output if bias is None else bias,
            output,
            rows,
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
    return output


def multiply_gated(x: EightBits, weights: NarrowWeights, tiles: Tiles | None = None) -> EightBits:
    """silu(gate) * other [rows, outputs / 2] in FP8, where the first half of the outputs of ``weights``
    (``fits``; outputs a multiple of 256) are gates. Allocates what it gives.
    """
    rows, inputs = x.codes.shape
    units, device = weights.outputs // 2, x.codes.device
    output = _room(rows, units, x.dtype, device)
    if device.type != "meta":
        from vlfit.engine.kernels.eight_bit_product import multiply_gated as kernel

        tiles = tiles or GATED
        kernel[(-(-rows // tiles.rows) * (units // GROUP),)](
            x.codes,
            x.scale,
            weights.codes,
            weights.scale,
            output.codes,
            output.scale,
            rows,
            units,
            inputs,
            weights.scale.shape[1],
            scale_rows=weights.block[0],
            one_group=weights.block[1] != GROUP,
            group=GROUP,
            tile_rows=tiles.rows,
            together=tiles.together,
            hardware=converts_float8(device),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return output


def plain_quantize(x: Tensor) -> EightBits:
    """``quantize`` in plain PyTorch: what the kernels are tested against."""
    grouped = x.float().unflatten(1, (-1, GROUP))
    largest = grouped.abs().amax(2).clamp_min(LEAST)
    codes = (grouped * (LARGEST / largest).unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return EightBits(codes, (largest / LARGEST).T.contiguous(), x.dtype)


def plain_wide(x: EightBits) -> Tensor:
    """The numbers that ``x`` stands for [rows, width], in float64."""
    wide: Tensor = x.codes.double().unflatten(1, (-1, GROUP)) * x.scale.T.double().unsqueeze(2)
    return wide.flatten(1)
