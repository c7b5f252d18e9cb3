"""What a tile of narrow weights is in numbers: functions that the kernels for linear layers are made of.

Columns past the last input come out as 0, so that a tile may reach over the edge. Knows no scales.
"""

import triton
import triton.language as tl


@triton.jit
def fp8_tile(
    codes,
    output_index,
    column,
    outputs,
    inputs,
    hardware: tl.constexpr,
):
    """Bytes of ``codes`` [outputs, inputs] as float16: each number itself, or a 256th without ``hardware``.

    Only cards from compute capability 8.9 on convert float8 themselves. Elsewhere sign, exponent and fraction
    are put where float16 has them: its exponent counts from 15 instead of 7, so the number is 2^-8 of what
    the code stands for, exactly, subnormal numbers included. NaN, which no sound file holds, reads as 480.
    """
    inside = (output_index[:, None] < outputs) & (column[None, :] < inputs)
    place = output_index[:, None].to(tl.int64) * inputs + column[None, :]
    code = tl.load(codes + place, mask=inside, other=0)
    if hardware:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def int4_tile(
    words,
    output_index,
    start,
    outputs,
    inputs,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
):
    """Codes of ``words`` [outputs, inputs / 8] from input ``start`` on as float32, 0 to 15.

    A code is put into the last bits of 2^23, from which one subtraction makes a float32 of it: many cards
    convert integers at a quarter of the speed of a subtraction.
    """
    word = start // 8 + tl.arange(0, tile_inputs // 8)
    inside = (output_index[:, None] < outputs) & (word[None, :] < inputs // 8)
    place = output_index[:, None].to(tl.int64) * (inputs // 8) + word[None, :]
    eight = tl.load(words + place, mask=inside, other=0)
    shift = tl.arange(0, 8) * 4
    code = (eight[:, :, None] >> shift[None, None, :]) & 15
    number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return tl.reshape(number, (tile_outputs, tile_inputs))


@triton.jit
def zero_points(
    words,
    output_index,
    group,
    outputs,
    groups,
    has_zero_point: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_groups: tl.constexpr,
):
    """Zero points [tile_outputs, tile_groups] of ``words`` [outputs / 8, groups] as float32; 8 without."""
    if has_zero_point:
        inside = (output_index[:, None] < outputs) & (group[None, :] < groups)
        eight = tl.load(words + (output_index[:, None] // 8) * groups + group[None, :], mask=inside, other=0)
        return ((eight >> ((output_index[:, None] % 8) * 4)) & 15).to(tl.float32)
    return tl.full((tile_outputs, tile_groups), 8.0, tl.float32)


@triton.jit
def spread(value, tile_outputs: tl.constexpr, tile_spans: tl.constexpr, span: tl.constexpr):
    """[tile_outputs, tile_spans] to [tile_outputs, tile_spans * span]: each value ``span`` times."""
    wide = tl.broadcast_to(value[:, :, None], (tile_outputs, tile_spans, span))
    return tl.reshape(wide, (tile_outputs, tile_spans * span))
