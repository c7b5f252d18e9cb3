"""The kernel for many rows: narrow weights as numbers of the computation's dtype, for torch to multiply with.

Reference: ``dequantize_fp8``, ``_int8`` and ``_int4`` of ``engine/layers/linear.py``, to the bit.
"""

import triton
import triton.language as tl

from vlfit.engine.kernels.unpack import fp8_tile, int4_tile, int8_tile, scales, spread


@triton.jit(do_not_specialize=["first", "outputs"])
def widen(
    codes,
    scale,
    zero_point,
    output,
    first,
    outputs,
    inputs,
    scale_columns,
    form: tl.constexpr,
    hardware: tl.constexpr,
    has_zero_point: tl.constexpr,
    scale_rows: tl.constexpr,
    scale_width: tl.constexpr,
    span: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
):
    """``output`` [outputs - first, inputs]: rows ``first`` to ``outputs`` of the weights, rounded once."""
    tile_spans: tl.constexpr = tile_inputs // span
    output_index = first + tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    start = tl.program_id(1) * tile_inputs
    column = start + tl.arange(0, tile_inputs)
    group = (start + tl.arange(0, tile_spans) * span) // scale_width
    if form == "int4":
        value = int4_tile(
            codes,
            zero_point,
            output_index,
            start,
            group,
            outputs,
            inputs,
            scale_columns,
            output.dtype.element_ty,
            has_zero_point,
            False,
            tile_outputs,
            tile_inputs,
            tile_spans,
        )
    elif form == "int8":
        value = int8_tile(
            codes,
            output_index,
            start,
            outputs,
            inputs,
            output.dtype.element_ty,
            False,
            tile_outputs,
            tile_inputs,
        )
    else:
        value = fp8_tile(codes, output_index, column, outputs, inputs, hardware)
    factor = scales(scale, output_index, group, outputs, scale_columns, scale_rows).to(tl.float32)
    if form == "fp8" and not hardware:
        factor *= 256.0
    weight = value.to(tl.float32) * spread(factor, False, tile_outputs, tile_inputs, tile_spans)
    inside = (output_index[:, None] < outputs) & (column[None, :] < inputs)
    place = (output_index - first)[:, None].to(tl.int64) * inputs + column[None, :]
    tl.store(output + place, weight.to(output.dtype.element_ty), mask=inside)
