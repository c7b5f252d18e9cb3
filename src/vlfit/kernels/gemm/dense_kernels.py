"""The kernel for few rows times weights in the dtype of the computation: it reads the weights once.

``multiply`` computes a tile of the transposed output over a share of the inputs; ``tile.py`` adds them up.
Reference: ``F.linear``. Host code: ``kernels/gemm/dense.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.gemm.tile import finish, inputs_tile, product, shrink, squares_of, tile_index
from vlfit.kernels.primitives import wait


@triton.jit(do_not_specialize=["rows", "steps", "square_tiles"])
def multiply(
    x,
    weight,
    bias,
    partial,
    arrivals,
    output,
    norm_weight,
    scaled,
    squares,
    rows,
    outputs,
    inputs,
    x_stride,
    steps,
    square_tiles,
    eps,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    normed: tl.constexpr,
    adds: tl.constexpr,
    tile_squares: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    parts: tl.constexpr,
    splits: tl.constexpr,
    overlap: tl.constexpr,
):
    """``output`` [rows, outputs] = ``x`` [rows, inputs] @ ``weight`` [outputs, inputs].T + ``bias``.

    All rows are one tile. ``parts``: into how many a tile of inputs is cut, one for each warp, if not 1. With
    ``splits`` > 1 ``finish`` says what ``partial`` and ``arrivals`` are, and ``gated``. ``normed``: times
    what makes norms of ``x``, by the sums of ``squares`` [rows, square_tiles]. ``adds``: to what stands in
    ``output``; see ``finish`` for ``scaled``, and ``squares`` [rows, tiles].
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    index = tile_index(tile, outputs, tile_outputs, gated)
    row = tl.arange(0, tile_rows)
    begin = split * steps * tile_inputs
    wait(overlap)
    if normed:
        found = squares_of(squares, row, rows, square_tiles, tile_squares)
    before = 0.0
    if adds:
        there = row[None, :].to(tl.int64) * outputs + index[:, None]
        before = tl.load(output + there, mask=(index[:, None] < outputs) & (row[None, :] < rows), other=0.0)
    end = tl.minimum(begin + steps * tile_inputs, inputs)
    if parts > 1:
        total = tl.zeros((parts, tile_outputs, tile_rows), tl.float32)
    else:
        total = tl.zeros((tile_outputs, tile_rows), tl.float32)
    for start in range(begin, end, tile_inputs):
        column = start + tl.arange(0, tile_inputs)
        place = index[:, None].to(tl.int64) * inputs + column[None, :]
        inside = (index[:, None] < outputs) & (column[None, :] < inputs)
        tile_weight = tl.load(weight + place, mask=inside, other=0.0, eviction_policy="evict_first")
        tile_x = inputs_tile(x, row, rows, start, inputs, x_stride, False, tile_inputs)
        total += product(tile_weight, tile_x, tile_rows, tile_outputs, tile_inputs, parts)
    if parts > 1:
        total = tl.sum(total, 0)
    if normed:
        total *= shrink(found, inputs, eps)[None, :]
    finish(
        total,
        bias,
        partial,
        arrivals + tile,
        output,
        norm_weight,
        scaled,
        squares + row * tl.num_programs(0) + tile,
        before,
        index,
        row,
        split,
        rows,
        outputs,
        has_bias,
        gated,
        adds,
        splits,
    )
