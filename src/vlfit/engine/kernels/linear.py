"""``x @ weights.T + bias`` where weights are FP8 or int4 and stay so: no widened copy of them ever exists.

Knows: how narrow weights lie in memory, which kernel and which tile sizes a number of rows gets, and what
that allocates. The table of sizes is fixed, so no first start waits for a search; ``benchmarks/kernels.py
--sweep`` measures the candidates it was chosen from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MATVEC_ROWS = 4  # up to so many rows go through the kernel without matrix units
SPLIT_ROWS = 64  # up to so many rows the inputs of a product may be shared out
BUSY = 256  # programs that keep a card's multiprocessors reading; fewer tiles than that are split
LONGEST_SPAN = 128  # inputs that are summed before their scale is applied, at most


@dataclass(frozen=True, slots=True)
class NarrowWeights:
    """A matrix [outputs, inputs] in 8 or 4 bits.

    ``codes``: [outputs, inputs] float8_e4m3fn, or [outputs, inputs / 8] int32 with the first code in the
    lowest bits. ``scale`` [ceil(outputs / block[0]), ceil(inputs / block[1])] is shared by ``block``.
    ``zero_point`` [ceil(outputs / 8), groups] int32, for int4; None: 8 everywhere.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    block: tuple[int, int]

    @property
    def four_bits(self) -> bool:
        return self.codes.dtype == torch.int32

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (8 if self.four_bits else 1)

    @property
    def span(self) -> int:
        """The largest power of two, at most 128, of inputs that share a scale in every row."""
        width = self.block[1]
        return min(width & -width, LONGEST_SPAN)


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes: rows x outputs over steps of inputs, by so many warps and load stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tiles_for(rows: int, weights: NarrowWeights, dtype: torch.dtype) -> Tiles:
    """The sizes for ``rows`` rows: chosen by regime, not by card."""
    if rows <= MATVEC_ROWS:
        tile_rows = 1 if rows == 1 else 2 if rows == 2 else 4
        return Tiles(tile_rows, 4, 1024 if weights.four_bits else 512, 4, 1)
    if dtype == torch.float32:  # no matrix units for it, and twice the room
        return Tiles(16 if rows <= 16 else 32, 32, 32, 4, 2)
    if rows <= 16:
        return Tiles(16, 64, 128, 4, 4)
    if rows <= 32:
        return Tiles(32, 64, 128, 4, 3)
    if rows <= SPLIT_ROWS:
        return Tiles(64, 64, 128, 4, 3)
    return Tiles(128, 128, 64, 8, 3)


def splits_for(rows: int, outputs: int, inputs: int, tiles: Tiles) -> int:
    """Among how many programs the inputs of one tile are shared out: a power of two, at most 16."""
    if rows > SPLIT_ROWS:
        return 1
    programs = -(-outputs // tiles.outputs) * -(-rows // tiles.rows)
    splits = 1
    while splits < 16 and programs * splits < BUSY and inputs >= 4 * splits * tiles.inputs:
        splits *= 2
    return splits


def linear(
    x: Tensor,
    weights: NarrowWeights,
    bias: Tensor | None,
    tiles: Tiles | None = None,
    splits: int | None = None,
    hardware: bool | None = None,
) -> Tensor:
    """``x`` [rows, inputs] (rows may lie apart) times ``weights``: [rows, outputs] in the dtype of ``x``.

    Allocates the output, and for a product that is split as much again in float32 for each split.
    ``tiles``, ``splits`` and ``hardware`` (whether the card converts float8 itself) are chosen if not given.
    """
    rows = len(x)
    output = torch.empty((rows, weights.outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return output
    tiles = tiles or tiles_for(rows, weights, x.dtype)
    if tiles.rows < 16:
        if x.device.type != "meta":
            _launch_matvec(x, weights, bias, output, tiles, _converts_float8(x, hardware))
        return output
    splits = splits or splits_for(rows, weights.outputs, weights.inputs, tiles)
    partial = output
    if splits > 1:
        partial = torch.empty((splits, *output.shape), dtype=torch.float32, device=x.device)
    if x.device.type != "meta":
        _launch_matmul(x, weights, bias, partial, output, tiles, splits, _converts_float8(x, hardware))
    return output


def _converts_float8(x: Tensor, wish: bool | None) -> bool:
    if wish is not None:
        return wish
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9)


def _launch_matvec(
    x: Tensor, weights: NarrowWeights, bias: Tensor | None, output: Tensor, tiles: Tiles, hardware: bool
) -> None:
    from vlfit.engine.kernels.matvec import matvec

    span = weights.span
    matvec[(-(-weights.outputs // tiles.outputs),)](
        *_pointers(x, weights, bias),
        output,
        len(x),
        weights.outputs,
        weights.inputs,
        x.stride(0),
        weights.scale.shape[1],
        **_form(weights, bias, hardware),
        span=span,
        tile_rows=tiles.rows,
        tile_outputs=tiles.outputs,
        tile_spans=max(tiles.inputs // span, 1),
        stages=tiles.stages,
        num_warps=tiles.warps,
    )


def _launch_matmul(
    x: Tensor,
    weights: NarrowWeights,
    bias: Tensor | None,
    partial: Tensor,
    output: Tensor,
    tiles: Tiles,
    splits: int,
    hardware: bool,
) -> None:
    from vlfit.engine.kernels.matmul import join, matmul

    rows, outputs = output.shape
    steps = -(-weights.inputs // (splits * tiles.inputs))
    programs = -(-outputs // tiles.outputs) * -(-rows // tiles.rows)
    matmul[(programs, splits)](
        *_pointers(x, weights, bias),
        partial,
        rows,
        outputs,
        weights.inputs,
        x.stride(0),
        weights.scale.shape[1],
        steps,
        **_form(weights, bias, hardware),
        span=min(weights.span, tiles.inputs),
        tile_rows=tiles.rows,
        tile_outputs=tiles.outputs,
        tile_inputs=tiles.inputs,
        splits=splits,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        cells, tile = output.numel(), 1024
        join[(-(-cells // tile),)](
            partial,
            output if bias is None else bias,
            output,
            cells,
            outputs,
            has_bias=bias is not None,
            splits=splits,
            tile=tile,
        )


def _pointers(x: Tensor, weights: NarrowWeights, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Tensors as the kernels take them; what is not there is stood in for by one that is."""
    codes = weights.codes if weights.four_bits else weights.codes.view(torch.uint8)
    zero_point = codes if weights.zero_point is None else weights.zero_point
    return x, codes, weights.scale, zero_point, x if bias is None else bias


def _form(weights: NarrowWeights, bias: Tensor | None, hardware: bool) -> dict[str, int | bool]:
    return {
        "four_bits": weights.four_bits,
        "hardware": hardware and not weights.four_bits,
        "has_zero_point": weights.zero_point is not None,
        "has_bias": bias is not None,
        "scale_rows": weights.block[0],
        "scale_width": weights.block[1],
    }
