"""The kernels for many rows in FP8 times weights in FP8, on matrix units that multiply 8 bits by 8 bits.

What 128 inputs give is summed by the matrix units, multiplied by the scales of the row and of the weights,
and added up in float32. Reference: the product of ``eight_bits.plain_wide`` and the widened weights. Host
code: ``kernels/gemm/fp8.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.rows.row_kernels import normalized


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


# The kernels that end a step between products in FP8: rows are rounded to 8 bits where they are written.
#
# Every 128 neighbours of a row share a scale, their largest magnitude by the largest number of
# float8_e4m3fn; before that each step rounds as its twin in half precision does
# (``kernels/rows/row_kernels.py``). Reference: ``eight_bits.plain_quantize``. Host code:
# ``kernels/gemm/fp8.py``.


LARGEST = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-12)  # of a group's largest magnitude, so that nothing is divided by 0


@triton.jit
def on_grid(number):
    """The nearest number of float8_e4m3fn, halves to even, in float32: Triton's interpreter cuts some off."""
    exponent = (number.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # Beside 1.5 x 2^(e + 20) float32 keeps 3 bits behind the first of a number with the exponent e.
    large = (((tl.maximum(exponent, 127 - 6) + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (number + large) - large


@triton.jit
def write_codes(
    value,
    codes,
    scale,
    row,
    room,
    start,
    width: tl.constexpr,
    tile: tl.constexpr,
    group: tl.constexpr,
    hardware: tl.constexpr,
):
    """``value`` [tile], elements ``start`` and on of a ``row``, to ``codes`` [rows, width] and ``scale``
    [width / group, room]. ``value`` is 0 past the end of the row. ``hardware``: the card rounds by itself.
    """
    count: tl.constexpr = tile // group
    grouped = tl.reshape(value.to(tl.float32), (count, group))
    largest = tl.maximum(tl.max(tl.abs(grouped), 1), LEAST)
    factor = largest / LARGEST
    inverse = 448.0 / largest
    number = grouped * inverse[:, None]
    if not hardware:
        number = on_grid(number)
    code = number.to(tl.float8e4nv)
    index = start // group + tl.arange(0, count)
    column = index[:, None] * group + tl.arange(0, group)[None, :]
    inside = index < width // group
    place = row.to(tl.int64) * width + column
    tl.store(codes + place, code, mask=inside[:, None])
    tl.store(scale + index.to(tl.int64) * room + row, factor, mask=inside)


@triton.jit(do_not_specialize=["room"])
def quantize(
    x,
    codes,
    scale,
    room,
    stride,
    width: tl.constexpr,
    tile: tl.constexpr,
    group: tl.constexpr,
    hardware: tl.constexpr,
):
    """``tile`` elements of a row of ``x`` [rows, width], rows ``stride`` apart."""
    row = tl.program_id(0)
    start = tl.program_id(1) * tile
    column = start + tl.arange(0, tile)
    value = tl.load(x + row.to(tl.int64) * stride + column, mask=column < width, other=0.0)
    write_codes(value, codes, scale, row, room, start, width, tile, group, hardware)


@triton.jit(do_not_specialize=["room"])
def add_norm(
    hidden,
    delta,
    weight,
    codes,
    scale,
    room,
    eps,
    width: tl.constexpr,
    has_delta: tl.constexpr,
    tile: tl.constexpr,
    group: tl.constexpr,
    hardware: tl.constexpr,
):
    """A program for each row of ``hidden`` [rows, width]: adds ``delta`` to it, and writes its norm."""
    row = tl.program_id(0)
    column = tl.arange(0, tile)
    place = row.to(tl.int64) * width + column
    inside = column < width
    value = tl.load(hidden + place, mask=inside, other=0.0)
    if has_delta:
        added = value.to(tl.float32) + tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        value = added.to(value.dtype)
        tl.store(hidden + place, value, mask=inside)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    write_codes(
        normalized(value, factor, width, eps), codes, scale, row, room, 0, width, tile, group, hardware
    )


@triton.jit(do_not_specialize=["room"])
def silu_and_multiply(
    gate_up,
    codes,
    scale,
    room,
    width: tl.constexpr,
    tile: tl.constexpr,
    group: tl.constexpr,
    hardware: tl.constexpr,
):
    """silu(gate) * up of ``tile`` elements of a row of ``gate_up`` [rows, 2 * width]."""
    row = tl.program_id(0)
    start = tl.program_id(1) * tile
    column = start + tl.arange(0, tile)
    inside = column < width
    place = row.to(tl.int64) * (2 * width) + column
    gate = tl.load(gate_up + place, mask=inside, other=0.0)
    up = tl.load(gate_up + place + width, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    value = (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    write_codes(value, codes, scale, row, room, start, width, tile, group, hardware)
