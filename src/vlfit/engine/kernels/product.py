"""What kernels for few rows have in common, whatever their weights: which outputs and inputs, and a product.

Host code: ``linear.py`` and ``few_rows.py``.
"""

import triton
import triton.language as tl


@triton.jit
def tile_index(tile, outputs, tile_outputs: tl.constexpr, gated: tl.constexpr):
    """Which of ``outputs`` the tile of that number computes: [tile_outputs], ``outputs`` or more for none.

    ``gated``: the first half of all outputs are gates, of which a tile has some and the others that belong to
    them (``finish.py``).
    """
    lane = tl.arange(0, tile_outputs)
    if gated:
        unit = tile * (tile_outputs // 2) + lane % (tile_outputs // 2)
        index = tl.where(unit < outputs // 2, lane // (tile_outputs // 2) * (outputs // 2) + unit, outputs)
    else:
        index = tile * tile_outputs + lane
    return index


@triton.jit
def product(
    weight,
    x_tile,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    parts: tl.constexpr,
):
    """``weight`` [tile_outputs, tile_inputs] times ``x_tile`` [tile_rows, tile_inputs].T.

    [tile_outputs, tile_rows], or that for each of several ``parts`` of the inputs, in float32.
    """
    if parts == 1:
        found = tl.dot(weight, tl.trans(x_tile), input_precision="ieee")
    else:
        width: tl.constexpr = tile_inputs // parts
        left = tl.permute(tl.reshape(weight, (tile_outputs, parts, width)), (1, 0, 2))
        right = tl.permute(tl.reshape(x_tile, (tile_rows, parts, width)), (1, 2, 0))
        found = tl.dot(left, right, input_precision="ieee")
    return found


@triton.jit
def inputs_tile(
    x,
    row,
    rows,
    start,
    inputs,
    x_stride,
    whole: tl.constexpr,
    tile_inputs: tl.constexpr,
):
    """The inputs from ``start`` on of the rows ``row``: [rows of the tile, tile_inputs], 0 outside."""
    column = start + tl.arange(0, tile_inputs)
    inside = row[:, None] < rows
    if not whole:
        inside = inside & (column[None, :] < inputs)
    return tl.load(x + row[:, None].to(tl.int64) * x_stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def squares_of(squares, row, rows, square_tiles, tile_squares: tl.constexpr):
    """What tiles of the product before have left of the rows ``row``, [rows of the tile, tile_squares]."""
    tile = tl.arange(0, tile_squares)
    known = (row[:, None] < rows) & (tile[None, :] < square_tiles)
    return tl.load(squares + row[:, None] * square_tiles + tile[None, :], mask=known, other=0.0)


@triton.jit
def shrink(found, inputs, eps):
    """What sums over rows are multiplied by, that the rows become their norms: [rows].

    ``found`` [rows, some] are sums of squares of ``inputs`` numbers.
    """
    return tl.rsqrt(tl.sum(found, 1) / inputs + eps)
