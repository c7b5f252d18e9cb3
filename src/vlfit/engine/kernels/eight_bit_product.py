"""The kernels for many rows in FP8 times weights in FP8, on matrix units that multiply 8 bits by 8 bits.

What 128 inputs give is summed by the matrix units, multiplied by the scales of the row and of the weights,
and added up in float32. Reference: the product of ``eight_bits.plain_wide`` and the widened weights. Host
code: ``eight_bits.py``.
"""

import triton
import triton.language as tl

from vlfit.engine.kernels.eight_bit_steps import LARGEST, LEAST, on_grid
from vlfit.engine.kernels.quick import quick


@triton.jit
def tile_of(program, across, down, together: tl.constexpr):
    """Which tile of outputs and of rows: ``together`` tiles of outputs take turns with all tiles of rows, so
    that what several read is in the cache.
    """
    apart = together * down
    first = program // apart * together
    size = tl.minimum(across - first, together)
    within = program % apart
    return first + within % size, within // size


@triton.jit
def places(first, count, inputs, tile: tl.constexpr, group: tl.constexpr):
    """Where ``group`` inputs of each of ``tile`` rows from ``first`` on lie, of ``count`` rows, relative to
    the first. Past the end the last row is meant again: what comes of it is not stored, and no mask slows
    loads.
    """
    within = tl.minimum(tl.arange(0, tile), count - 1 - first)
    return within[:, None] * inputs + tl.arange(0, group)[None, :]


@triton.jit
def scale_of(scale, first, outputs, scale_columns, scale_rows: tl.constexpr, tile_outputs: tl.constexpr):
    """Where the scales of the first inputs are, for the outputs from ``first`` on: one for the whole tile,
    or one for each of its outputs.
    """
    if scale_rows % tile_outputs == 0:
        place = scale + first // scale_rows * scale_columns
    else:
        index = tl.minimum(first + tl.arange(0, tile_outputs), outputs - 1)
        place = scale + index // scale_rows * scale_columns
    return place


@triton.jit
def scaled(found, factor, scale, whole: tl.constexpr):
    """``found`` [rows, outputs] times ``factor`` [rows] and ``scale``: one number if ``whole``."""
    return found * (factor * scale)[:, None] if whole else found * factor[:, None] * scale[None, :]


@quick
@triton.jit(do_not_specialize=["rows"])
def multiply(
    x,
    x_scale,
    weight,
    scale,
    bias,
    output,
    rows,
    outputs,
    inputs,
    scale_columns,
    has_bias: tl.constexpr,
    scale_rows: tl.constexpr,
    one_group: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    together: tl.constexpr,
):
    """``output`` [rows, outputs] of ``x`` [rows, inputs], scaled by ``x_scale`` [inputs / group, rows], and
    ``weight`` [outputs, inputs], of which ``scale_rows`` outputs and ``group`` inputs (all of them if
    ``one_group``) share one of ``scale``.
    """
    whole: tl.constexpr = scale_rows % tile_outputs == 0
    across, down = tl.cdiv(outputs, tile_outputs), tl.cdiv(rows, tile_rows)
    of_outputs, of_rows = tile_of(tl.program_id(0), across, down, together)
    first_row, first = of_rows * tile_rows, of_outputs * tile_outputs
    row, index = first_row + tl.arange(0, tile_rows), first + tl.arange(0, tile_outputs)
    in_x = places(first_row, rows, inputs, tile_rows, group)
    in_weight = places(first, outputs, inputs, tile_outputs, group)
    x += first_row.to(tl.int64) * inputs
    weight += first.to(tl.int64) * inputs
    safe_row = tl.minimum(row, rows - 1)
    scale_at = scale_of(scale, first, outputs, scale_columns, scale_rows, tile_outputs)
    total = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for step in range(inputs // group):
        found = tl.dot(tl.load(x + in_x), tl.trans(tl.load(weight + in_weight)))
        factor = tl.load(x_scale + safe_row)
        if one_group:
            total += found * factor[:, None]
        else:
            total += scaled(found, factor, tl.load(scale_at + step).to(tl.float32), whole)
        x += group
        weight += group
        x_scale += rows
    if one_group:
        last = tl.load(scale_at).to(tl.float32)
        total *= last if whole else last[None, :]
    if has_bias:
        total += tl.load(bias + tl.minimum(index, outputs - 1)).to(tl.float32)[None, :]
    place = row[:, None].to(tl.int64) * outputs + index[None, :]
    inside = (row[:, None] < rows) & (index[None, :] < outputs)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside)


@quick
@triton.jit(do_not_specialize=["rows"])
def multiply_gated(
    x,
    x_scale,
    weight,
    scale,
    codes,
    code_scale,
    rows,
    units,
    inputs,
    scale_columns,
    scale_rows: tl.constexpr,
    one_group: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    together: tl.constexpr,
    hardware: tl.constexpr,
):
    """silu(gate) * other in FP8, rounded once: to ``codes`` [rows, units] and
    ``code_scale`` [units / group, rows].

    ``weight`` [2 * units, inputs] has the gates, then what they are for; all else is as in ``multiply``. A
    program computes ``group`` units, so that it knows their largest.
    """
    whole: tl.constexpr = scale_rows % group == 0
    across, down = units // group, tl.cdiv(rows, tile_rows)
    of_units, of_rows = tile_of(tl.program_id(0), across, down, together)
    first_row, first = of_rows * tile_rows, of_units * group
    row, unit = first_row + tl.arange(0, tile_rows), first + tl.arange(0, group)
    in_x = places(first_row, rows, inputs, tile_rows, group)
    in_weight = places(first, units, inputs, group, group)
    x += first_row.to(tl.int64) * inputs
    weight += first.to(tl.int64) * inputs
    weight_other = weight + units.to(tl.int64) * inputs
    safe_row = tl.minimum(row, rows - 1)
    gate_scale = scale_of(scale, first, units, scale_columns, scale_rows, group)
    other_scale = scale_of(scale, units + first, 2 * units, scale_columns, scale_rows, group)
    gate = tl.zeros((tile_rows, group), tl.float32)
    other = tl.zeros((tile_rows, group), tl.float32)
    for step in range(inputs // group):
        tile_x = tl.load(x + in_x)
        found = tl.dot(tile_x, tl.trans(tl.load(weight + in_weight)))
        found_other = tl.dot(tile_x, tl.trans(tl.load(weight_other + in_weight)))
        factor = tl.load(x_scale + safe_row)
        if one_group:
            gate += found * factor[:, None]
            other += found_other * factor[:, None]
        else:
            gate += scaled(found, factor, tl.load(gate_scale + step).to(tl.float32), whole)
            other += scaled(found_other, factor, tl.load(other_scale + step).to(tl.float32), whole)
        x += group
        weight += group
        weight_other += group
        x_scale += rows
    if one_group:
        last, last_other = tl.load(gate_scale).to(tl.float32), tl.load(other_scale).to(tl.float32)
        gate *= last if whole else last[None, :]
        other *= last_other if whole else last_other[None, :]
    value = gate / (1.0 + tl.exp(-gate)) * other
    largest = tl.maximum(tl.max(tl.abs(value), 1), LEAST)
    inverse = 448.0 / largest
    number = value * inverse[:, None]
    if not hardware:
        number = on_grid(number)
    place = row[:, None].to(tl.int64) * units + unit[None, :]
    tl.store(codes + place, number.to(tl.float8e4nv), mask=row[:, None] < rows)
    tl.store(code_scale + of_units.to(tl.int64) * rows + row, largest / LARGEST, mask=row < rows)
