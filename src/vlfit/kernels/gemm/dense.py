"""``x @ weight.T + bias`` for up to ``DENSE_MAX_ROWS`` rows and weights in the dtype of the computation.

So few rows are as fast as the weights are read from memory. One row in 16 bits has a kernel of its own
(``one_row.py``); torch multiplies more rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.gemm.epilogue import (
    PreNormRows,
    ResidualEpilogue,
    allocate_partial,
    epilogue_pointers,
    fusion_flags,
    prologue_arguments,
    tiled_outputs,
    unwrap_rows,
)
from vlfit.kernels.gemm.one_row import dense_row_form, launch_row
from vlfit.kernels.launch import pdl_options, tile_counters, triggers_late
from vlfit.kernels.target import TargetCard, card_of, launches_on

DENSE_MAX_ROWS = 16
MIN_PROGRAMS = 256  # enough to keep a card of many multiprocessors busy; with fewer tiles K is split
# For each multiprocessor of a card with few. A step of 2B for eight requests on 30 of an H200's, us: 2,714;
# with half as many 2,878, with 256 in all 2,851, each with the next launch triggered late (docs/log.md).
MIN_PROGRAMS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True)
class DenseTiles:
    """Tile of one program: ``outputs``, for which it sums ``inputs`` per step of its loop over K.

    ``warps`` and pipeline ``stages`` of the program. ``parts`` > 1 (then equal to ``warps``): sliced-K, each
    warp sums its own part of every step's inputs.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1


def dense_tiles(dtype: torch.dtype) -> DenseTiles:
    """The default tile of ``dense_linear`` for activations and weights in ``dtype``."""
    # In 16 bits a warp takes 16 outputs. Microseconds of a layer of 2B: 45.6 on an H100, 69.5 on 30 of its
    # multiprocessors; with four warps, of which two repeat the others' work, 46.7 and 86.8 (docs/log.md).
    return DenseTiles(32, 64, 4, 2) if dtype == torch.float32 else DenseTiles(32, 128, 2, 4)


def dense_splits(outputs: int, inputs: int, tiles: DenseTiles, card: TargetCard | None = None) -> int:
    """Number of programs that share one tile of the outputs by split-K: a power of two, 1 (no split) to 8.

    ``outputs``, ``inputs``: of the linear layer. ``card``: None for one with many multiprocessors.
    """
    programs, splits, least = -(-outputs // tiles.outputs), 1, MIN_PROGRAMS
    if card is not None and card.has_few_multiprocessors:
        least = MIN_PROGRAMS_PER_MULTIPROCESSOR * card.multiprocessors
    while splits < 8 and programs * splits < least and inputs >= 4 * splits * tiles.inputs:
        splits *= 2
    return splits


def dense_linear(
    x: Tensor | PreNormRows,
    weight: Tensor,
    bias: Tensor | None,
    tiles: DenseTiles | None = None,
    splits: int | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``: [rows, outputs] for ``x`` [rows, inputs], ``weight`` [outputs, inputs].

    At most ``DENSE_MAX_ROWS`` rows (``ValueError`` for more), which may be strided. The norm of
    ``PreNormRows`` is applied first. ``swiglu``: the first half of the outputs are gates, and the result
    is silu(gate) * up, [rows, outputs / 2]. ``tiles``: None for the default of the dtype. ``splits``: split-K
    factor; None: chosen by shape. ``out``: the contiguous tensor to write to, of the dtype of ``x``;
    None: a new one. Allocates with split-K [splits, rows, outputs] float32.
    """
    rows, _ = unwrap_rows(x)
    out_width = len(weight) // 2 if swiglu else len(weight)
    if out is None:
        out = torch.empty((len(rows), out_width), dtype=rows.dtype, device=rows.device)
    form = None if tiles or splits else dense_row_form(rows, weight, bias, swiglu=swiglu)
    if form is not None:
        launch_row(x, weight, bias, out, form, swiglu=swiglu)
        return out
    _launch(x, weight, bias, out, tiles or dense_tiles(rows.dtype), splits, swiglu=swiglu)
    return out


def dense_linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: ResidualEpilogue,
    tiles: DenseTiles | None = None,
    splits: int | None = None,
) -> PreNormRows:
    """Compute ``residual.hidden += x @ weight.T + bias`` in place.

    Returns what the next GEMM needs to normalize ``residual.hidden`` in its prologue. ``x``, ``tiles`` and
    ``splits`` as in ``dense_linear``.
    """
    form = None if tiles or splits else dense_row_form(x, weight, bias)
    if form is not None:
        prenorm = residual.allocate_prenorm(form.tiles.outputs, form.tiles.warps_n)
        launch_row(x, weight, bias, residual.hidden, form, residual=residual, prenorm=prenorm)
        return prenorm
    tiles = tiles or dense_tiles(x.dtype)
    prenorm = residual.allocate_prenorm(tiles.outputs)
    _launch(x, weight, bias, residual.hidden, tiles, splits, residual=residual, prenorm=prenorm)
    return prenorm


def _launch(
    x: Tensor | PreNormRows,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: DenseTiles,
    splits: int | None,
    swiglu: bool = False,
    residual: ResidualEpilogue | None = None,
    prenorm: PreNormRows | None = None,
) -> None:
    x, prologue = unwrap_rows(x)
    rows, inputs = x.shape
    if rows > DENSE_MAX_ROWS:
        raise ValueError(f"{rows} rows; the kernel multiplies {DENSE_MAX_ROWS} at most")
    outputs = len(weight)
    splits = splits or dense_splits(outputs, inputs, tiles, card_of(x.device))
    width, tile_width = tiled_outputs(outputs, tiles.outputs, swiglu)
    partial = allocate_partial(out, splits, rows, outputs)
    if not launches_on(x.device) or not rows:
        return
    from vlfit.kernels.gemm.dense_kernels import dense_matmul_kernel

    dense_matmul_kernel[(-(-width // tile_width), splits)](
        x,
        weight,
        out if bias is None else bias,
        partial,
        tile_counters(x.device),
        out,
        *epilogue_pointers(x, prologue, residual, prenorm),
        rows,
        outputs,
        inputs,
        x.stride(0),
        -(-inputs // (splits * tiles.inputs)),
        *prologue_arguments(prologue),
        HAS_BIAS=bias is not None,
        SWIGLU=swiglu,
        **fusion_flags(prologue, residual),
        EVEN=width % tile_width == 0 and inputs % tiles.inputs == 0,
        BLOCK_M=8 if rows <= 8 else 16,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        SLICE_K=tiles.parts,
        SPLIT_K=splits,
        TRIGGER_LATE=triggers_late(rows, "", x.device),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(x.device),
    )
