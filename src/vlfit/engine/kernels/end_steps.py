"""The kernels with which a decode step begins and ends. Host code, and what they mean: ``ends.py``."""

import triton
import triton.language as tl

from vlfit.engine.kernels.overlap import wait


@triton.jit
def look_up(
    token_ids,
    codes,
    scale,
    output,
    width: tl.constexpr,
    groups: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    """A program for each row: code times scale, in float32 and rounded once."""
    wait(overlap)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + row).to(tl.int64)
    column = tl.arange(0, tile)
    inside = column < width
    code = tl.load(codes + token * width + column, mask=inside, other=0).to(tl.float32)
    factor = tl.load(scale + token * groups + column // (width // groups), mask=inside, other=0.0)
    value = code * factor.to(tl.float32)
    tl.store(output + row * width + column, value.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["axis_stride", "row_stride"])
def rotation_tables(
    positions,
    frequencies,
    axis,
    cosines,
    sines,
    factor,
    axis_stride,
    row_stride,
    has_axis: tl.constexpr,
    pairs: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    """A program for each row. The sines of the first half have their sign turned (``rope.rotate``)."""
    wait(overlap)
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, tile)
    inside = pair < pairs
    place = positions + row * row_stride + pair * 0
    if has_axis:
        place += tl.load(axis + pair, mask=inside, other=0) * axis_stride
    position = tl.load(place, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + pair, mask=inside, other=0.0)
    cosine = (tl.cos(angle) * factor).to(cosines.dtype.element_ty)
    sine = (tl.sin(angle) * factor).to(sines.dtype.element_ty)
    target = row * 2 * pairs + pair
    tl.store(cosines + target, cosine, mask=inside)
    tl.store(cosines + target + pairs, cosine, mask=inside)
    tl.store(sines + target, -sine, mask=inside)
    tl.store(sines + target + pairs, sine, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def next_inputs(
    chosen,
    token_ids,
    positions,
    slots,
    spans,
    table,
    rows,
    blocks: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    """One program for all rows."""
    wait(overlap)
    row = tl.arange(0, tile)
    inside = row < rows
    past = tl.load(spans + row * 3 + 2, mask=inside, other=-1) + 1
    goes_on = inside & (past > 0)
    position = tl.load(positions + row, mask=goes_on, other=0) + 1
    block = past // block_size
    known = goes_on & (block < blocks)
    slot = tl.load(table + row * blocks + block, mask=known, other=0) * block_size + past % block_size
    tl.store(token_ids + row, tl.load(chosen + row, mask=goes_on, other=0).to(tl.int32), mask=goes_on)
    tl.store(positions + row, position, mask=goes_on)
    tl.store(spans + row * 3 + 2, past, mask=goes_on)
    tl.store(slots + row, tl.where(known, slot, -1), mask=goes_on)
