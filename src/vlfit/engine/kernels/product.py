"""What kernels for few rows do with a tile of inputs, whatever their weights: load it, and multiply.

Host code: ``linear.py`` and ``few_rows.py``.
"""

import triton
import triton.language as tl


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
def inputs_tile(x, row, rows, start, inputs, x_stride, whole: tl.constexpr, tile_inputs: tl.constexpr):
    """The inputs from ``start`` on of the rows ``row``: [rows of the tile, tile_inputs], 0 outside."""
    column = start + tl.arange(0, tile_inputs)
    inside = row[:, None] < rows
    if not whole:
        inside = inside & (column[None, :] < inputs)
    return tl.load(x + row[:, None].to(tl.int64) * x_stride + column[None, :], mask=inside, other=0.0)
