"""``x @ weight.T + bias`` for few rows and weights in the dtype of the computation.

While one decodes, a product is as fast as its weights are read. Knows: up to how many rows the kernel is
used, its tiles, and what it allocates. More rows are torch's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.gemm.epilogue import Onto, Scaled, choices, numbers, pointers
from vlfit.kernels.launch import arrivals, overlapping

FEW_ROWS = 16
BUSY = 256  # programs that keep a card reading; fewer tiles than that are split


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes: outputs over steps of inputs, by so many warps and load stages.

    With several ``parts``, as many as warps, each warp sums over one part of every step.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1


def tiles_for(dtype: torch.dtype) -> Tiles:
    return Tiles(32, 64, 4, 2) if dtype == torch.float32 else Tiles(32, 128, 4, 4)


def splits_for(outputs: int, inputs: int, tiles: Tiles) -> int:
    """Among how many programs the inputs of one tile are shared out: a power of two, at most 8."""
    programs, splits = -(-outputs // tiles.outputs), 1
    while splits < 8 and programs * splits < BUSY and inputs >= 4 * splits * tiles.inputs:
        splits *= 2
    return splits


def multiply(
    x: Tensor | Scaled,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tiles | None = None,
    splits: int | None = None,
    gated: bool = False,
) -> Tensor:
    """``x`` [rows, inputs], at most ``FEW_ROWS``, times ``weight`` [outputs, inputs].T: [rows, outputs].

    ``gated``: the first half of the outputs are gates, and what comes is silu(gate) * other,
    [rows, outputs / 2]. Rows of ``x`` may lie apart. Allocates the output and, for a product that is split,
    as much as all outputs in float32 for each split.
    """
    rows = x.rows if isinstance(x, Scaled) else x
    outputs = len(weight) // 2 if gated else len(weight)
    output = torch.empty((len(rows), outputs), dtype=rows.dtype, device=rows.device)
    _launch(x, weight, bias, output, tiles or tiles_for(rows.dtype), splits, gated=gated)
    return output


def add_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    onto: Onto,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Scaled:
    """Adds to the rows of ``onto``, in place, what ``multiply`` gives; what comes is ready for the next."""
    tiles = tiles or tiles_for(x.dtype)
    left = onto.scaled(tiles.outputs)
    _launch(x, weight, bias, onto.hidden, tiles, splits, onto=onto, left=left)
    return left


def _launch(
    x: Tensor | Scaled,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
    tiles: Tiles,
    splits: int | None,
    gated: bool = False,
    onto: Onto | None = None,
    left: Scaled | None = None,
) -> None:
    norm = x if isinstance(x, Scaled) else None
    x = x.rows if isinstance(x, Scaled) else x
    rows, inputs = x.shape
    outputs = len(weight)
    splits = splits or splits_for(outputs, inputs, tiles)
    # Halves of a tile are gates and what they are for.
    cut = (outputs // 2, tiles.outputs // 2) if gated else (outputs, tiles.outputs)
    programs = -(-cut[0] // cut[1])
    partial = output
    if splits > 1:
        partial = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    if x.device.type == "meta" or not rows:
        return
    from vlfit.kernels.gemm.dense_kernels import multiply as kernel

    kernel[(programs, splits)](
        x,
        weight,
        output if bias is None else bias,
        partial,
        arrivals(x.device),
        output,
        *pointers(x, norm, onto, left),
        rows,
        outputs,
        inputs,
        x.stride(0),
        -(-inputs // (splits * tiles.inputs)),
        *numbers(norm),
        has_bias=bias is not None,
        gated=gated,
        **choices(norm, onto),
        tile_rows=8 if rows <= 8 else 16,
        tile_outputs=tiles.outputs,
        tile_inputs=tiles.inputs,
        parts=tiles.parts,
        splits=splits,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlapping(x.device),
    )
