"""The kernel for few rows: narrow weights times one to four rows, read once, multiplied without matrix units.

Decoding for one person is this. It is bound by reading weights, so a program takes a few outputs over all
inputs: no partial sums to join. Reference: ``engine/layers/linear.py`` widens and calls ``F.linear``.
"""

import triton
import triton.language as tl

from vlfit.engine.kernels.unpack import fp8_tile, int4_tile, spread, zero_points


@triton.jit(do_not_specialize=["rows"])
def matvec(
    x,
    codes,
    scale,
    zero_point,
    bias,
    output,
    rows,
    outputs,
    inputs,
    x_stride,
    scale_columns,
    four_bits: tl.constexpr,
    hardware: tl.constexpr,
    has_zero_point: tl.constexpr,
    has_bias: tl.constexpr,
    scale_rows: tl.constexpr,
    scale_width: tl.constexpr,
    span: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_spans: tl.constexpr,
    stages: tl.constexpr,
):
    """``output`` [rows, outputs] = ``x`` [rows, inputs] @ weights.T + ``bias``, summed in float32.

    A scale is shared by ``scale_rows`` outputs and ``scale_width`` inputs; ``span`` inputs divide the latter
    and are summed before the scale is applied. One program for each ``tile_outputs`` outputs.
    """
    tile_inputs: tl.constexpr = tile_spans * span
    output_index = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    row = tl.arange(0, tile_rows)
    total = tl.zeros((tile_rows, tile_outputs, tile_spans), tl.float32)
    for start in tl.range(0, inputs, tile_inputs, num_stages=stages):
        column = start + tl.arange(0, tile_inputs)
        group = (start + tl.arange(0, tile_spans) * span) // scale_width
        place = row[:, None] * x_stride + column[None, :]
        x_inside = (row[:, None] < rows) & (column[None, :] < inputs)
        x_tile = tl.load(x + place, mask=x_inside, other=0.0).to(tl.float32)
        if four_bits:
            value = int4_tile(codes, output_index, start, outputs, inputs, tile_outputs, tile_inputs)
            zero = zero_points(
                zero_point,
                output_index,
                group,
                outputs,
                scale_columns,
                has_zero_point,
                tile_outputs,
                tile_spans,
            )
            value -= spread(zero, tile_outputs, tile_spans, span)
        else:
            value = fp8_tile(codes, output_index, column, outputs, inputs, hardware).to(tl.float32)
        product = x_tile[:, None, :] * value[None, :, :]
        partial = tl.sum(tl.reshape(product, (tile_rows, tile_outputs, tile_spans, span)), 3)
        inside = (output_index[:, None] < outputs) & (group[None, :] < scale_columns)
        factor = tl.load(
            scale + (output_index[:, None] // scale_rows) * scale_columns + group[None, :],
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        total += partial * factor[None, :, :]
    result = tl.sum(total, 2)
    if not four_bits and not hardware:
        result *= 256.0
    if has_bias:
        result += tl.load(bias + output_index, mask=output_index < outputs, other=0.0).to(tl.float32)[None, :]
    written = (row[:, None] < rows) & (output_index[None, :] < outputs)
    tl.store(
        output + row[:, None] * outputs + output_index[None, :],
        result.to(output.dtype.element_ty),
        mask=written,
    )
