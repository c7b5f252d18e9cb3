"""The kernel for up to a few hundred rows: tiles of narrow weights, unpacked on the fly, times those rows.

``matmul`` computes a tile of the transposed output, so that unpacked weights are the product's first operand:
that one may stay in registers. One row is computed as eight: matrix units wait for memory all the same, while
a kernel without them took twice as long on an H200 (converting and adding up weights one by one). With few
rows there are too few tiles to keep a card busy, so the inputs are shared out among ``splits`` programs, and
the last of them to finish adds up their sums, always in the same order (``finish.py``).
Reference: ``engine/layers/linear.py`` widens and calls ``F.linear``.
"""

import triton
import triton.language as tl

from vlfit.engine.kernels.finish import finish
from vlfit.engine.kernels.overlap import wait
from vlfit.engine.kernels.unpack import fp8_tile, int4_tile, int8_tile, scales, shuffle, shuffle_words, spread


@triton.jit(do_not_specialize=["rows", "steps"])
def matmul(
    x,
    codes,
    scale,
    zero_point,
    bias,
    partial,
    arrivals,
    output,
    rows,
    outputs,
    inputs,
    x_stride,
    scale_columns,
    steps,
    form: tl.constexpr,
    hardware: tl.constexpr,
    has_zero_point: tl.constexpr,
    has_bias: tl.constexpr,
    scale_rows: tl.constexpr,
    scale_width: tl.constexpr,
    span: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    splits: tl.constexpr,
    overlap: tl.constexpr,
):
    """``output`` [rows, outputs] = ``x`` [rows, inputs] @ weights.T + ``bias``, summed in float32.

    With ``splits`` > 1 each program sums over ``steps`` tiles of inputs, and ``finish`` says what ``partial``
    and ``arrivals`` are.
    Where a tile of inputs shares its scale, codes are multiplied as they are and the scale is applied to the
    sum; else a weight is its code times its scale, rounded once to the dtype of ``x``.
    """
    wait(overlap)
    tile_spans: tl.constexpr = tile_inputs // span
    row_tiles = tl.cdiv(rows, tile_rows)
    # Neighbours share weights, which are then read from memory once, whatever the number of rows.
    output_index = (tl.program_id(0) // row_tiles) * tile_outputs + tl.arange(0, tile_outputs)
    row = (tl.program_id(0) % row_tiles) * tile_rows + tl.arange(0, tile_rows)
    split = tl.program_id(1)
    begin = split * steps * tile_inputs
    end = tl.minimum(begin + steps * tile_inputs, inputs)
    total = tl.zeros((tile_outputs, tile_rows), tl.float32)
    for start in range(begin, end, tile_inputs):
        column = start + tl.arange(0, tile_inputs)
        group = (start + tl.arange(0, tile_spans) * span) // scale_width
        x_inside = (row[:, None] < rows) & (column[None, :] < inputs)
        x_place = row[:, None].to(tl.int64) * x_stride + column[None, :]
        x_tile = tl.load(x + x_place, mask=x_inside, other=0.0)
        if form == "int4":
            x_tile = shuffle(x_tile, tile_rows, tile_inputs)
            value = int4_tile(
                codes,
                zero_point,
                output_index,
                start,
                group,
                outputs,
                inputs,
                scale_columns,
                x_tile.dtype,
                has_zero_point,
                True,
                tile_outputs,
                tile_inputs,
                tile_spans,
            )
        elif form == "int8":
            x_tile = shuffle_words(x_tile, tile_rows, tile_inputs)
            value = int8_tile(
                codes, output_index, start, outputs, inputs, x_tile.dtype, True, tile_outputs, tile_inputs
            )
        else:
            value = fp8_tile(codes, output_index, column, outputs, inputs, hardware)
        if tile_spans == 1:
            place = (output_index // scale_rows) * scale_columns + start // scale_width
            factor = tl.load(scale + place, mask=output_index < outputs, other=0.0).to(tl.float32)
            weight = value.to(x_tile.dtype)
            total += tl.dot(weight, tl.trans(x_tile), input_precision="ieee") * factor[:, None]
        else:
            factor = scales(scale, output_index, group, outputs, scale_columns, scale_rows)
            if factor.dtype != value.dtype:
                # Where both are of one half precision, their product is rounded once as it is.
                factor = factor.to(tl.float32)
                value = value.to(tl.float32)
            weight = value * spread(factor, form == "int4", tile_outputs, tile_inputs, tile_spans)
            total = tl.dot(weight.to(x_tile.dtype), tl.trans(x_tile), total, input_precision="ieee")
    if form == "fp8" and not hardware:
        total *= 256.0
    finish(
        total,
        bias,
        partial,
        arrivals + tl.program_id(0),
        output,
        output_index,
        row,
        split,
        rows,
        outputs,
        has_bias,
        splits,
    )
