"""The kernels that end a step between products in FP8: rows are rounded to 8 bits where they are written.

Every 128 neighbours of a row share a scale, their largest magnitude by the largest number of float8_e4m3fn;
before that each step rounds as its twin in half precision does (``row_steps.py``). Reference:
``eight_bits.plain_quantize``. Host code: ``eight_bits.py``.
"""

import triton
import triton.language as tl

from vlfit.engine.kernels.row_steps import normalized

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
