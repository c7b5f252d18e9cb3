"""The kernels for many rows in FP8 times weights in FP8, on matrix units that multiply 8 bits by 8 bits.

What 128 inputs give is summed by the matrix units, multiplied by the scales of the row and of the weights,
and added up in float32. Reference: the product of ``eight_bits.plain_wide`` and the widened weights. Host
code: ``eight_bits.py``.
"""

import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["rows", "room"])
def multiply(
    x,
    x_scale,
    weight,
    scale,
    bias,
    output,
    rows,
    room,
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
    """``output`` [rows, outputs] of ``x`` [rows, inputs], scaled by ``x_scale`` [inputs / group, room], and
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
        x_scale += room
    if one_group:
        last = tl.load(scale_at).to(tl.float32)
        total *= last if whole else last[None, :]
    if has_bias:
        total += tl.load(bias + tl.minimum(index, outputs - 1)).to(tl.float32)[None, :]
    place = row[:, None].to(tl.int64) * outputs + index[None, :]
    inside = (row[:, None] < rows) & (index[None, :] < outputs)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside)
