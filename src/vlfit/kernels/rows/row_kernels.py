"""The kernels for what is done to rows between products: residual and norm, rotation into the cache, SiLU.

Each rounds where plain PyTorch does (``layers/fused.py``), so that half precision gives the same
numbers whether steps are fused or not. Host code: ``fused.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.primitives import narrowed, wait


@triton.jit
def add_norm(
    hidden,
    delta,
    weight,
    output,
    eps,
    width: tl.constexpr,
    has_delta: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    """A program for each row of ``hidden`` [rows, width]: adds ``delta`` to it, and writes its norm."""
    wait(overlap)
    column = tl.arange(0, tile)
    place = tl.program_id(0).to(tl.int64) * width + column
    inside = column < width
    value = tl.load(hidden + place, mask=inside, other=0.0)
    if has_delta:
        added = value.to(tl.float32) + tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        value = added.to(value.dtype)
        tl.store(hidden + place, value, mask=inside)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(output + place, normalized(value, factor, width, eps), mask=inside)


@triton.jit
def normalized(value, weight, width: tl.constexpr, eps):
    """``rms_norm`` of one row, rounded before it is multiplied by ``weight``, as the reference does."""
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) * (1.0 / width)
    rounded = (wide * tl.rsqrt(mean_square + eps)).to(value.dtype)
    return (rounded.to(tl.float32) * weight.to(tl.float32)).to(value.dtype)


@triton.jit
def rotate_and_store(
    joined,
    norm_weight,
    cosines,
    sines,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    query,
    eps,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rotated: tl.constexpr,
    has_norm: tl.constexpr,
    tile_heads: tl.constexpr,
    tile: tl.constexpr,
    narrow: tl.constexpr,
    overlap: tl.constexpr,
):
    """``tile_heads`` heads of a row of ``joined`` [rows, query_heads + 2 * key_heads, head_dim].

    Queries and keys are normalized and their first ``rotated`` elements turned; queries go to ``query``
    [rows, query_heads, head_dim], keys and values to the slot of the row in ``keys`` and ``values`` [slots,
    key_heads, head_dim]; ``narrow``: as codes of FP8, with their scales to ``key_scales`` and
    ``value_scales`` [slots, key_heads]. A row whose slot is negative leaves nothing in the cache.
    """
    wait(overlap)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)[:, None]
    dim = tl.arange(0, tile)[None, :]
    inside = (dim < head_dim) & (head < query_heads + 2 * key_heads)
    in_turn = inside & (head < query_heads + key_heads)
    source = joined + (row * (query_heads + 2 * key_heads) + head) * head_dim + dim
    weight = norm_weight + head * head_dim + dim
    angle = row * rotated + dim
    slot = tl.load(slots + row).to(tl.int64)
    value = turned(
        source, weight, cosines + angle, sines + angle, dim, in_turn, eps, head_dim, rotated, has_norm
    )
    tl.store(query + (row * query_heads + head) * head_dim + dim, value, mask=in_turn & (head < query_heads))
    in_keys = in_turn & (head >= query_heads) & (slot >= 0)
    key_cell = slot * key_heads + head - query_heads
    in_values = inside & (head >= query_heads + key_heads) & (slot >= 0)
    value_cell = key_cell - key_heads
    other = tl.load(source, mask=in_values, other=0.0)
    if narrow:
        value, scale = narrowed(tl.where(head < query_heads + key_heads, value, other))
        other = value
        is_key = (head >= query_heads) & (head < query_heads + key_heads) & (slot >= 0)
        is_value = (head >= query_heads + key_heads) & (head < query_heads + 2 * key_heads) & (slot >= 0)
        tl.store(key_scales + key_cell, scale, mask=is_key)
        tl.store(value_scales + value_cell, scale, mask=is_value)
    tl.store(keys + key_cell * head_dim + dim, value, mask=in_keys)
    tl.store(values + value_cell * head_dim + dim, other, mask=in_values)


@triton.jit
def turned(
    source,
    weight,
    cosines,
    sines,
    dim,
    inside,
    eps,
    head_dim: tl.constexpr,
    rotated: tl.constexpr,
    has_norm: tl.constexpr,
):
    """Heads of one row, normalized if they are to be, and their first ``rotated`` elements turned.

    ``source`` and ``weight`` are where the elements [heads, dim] and their weights lie, ``cosines`` and
    ``sines`` [1, dim] where the row's angles do.
    """
    half: tl.constexpr = rotated // 2
    in_turn = dim < rotated
    to_partner = tl.where(in_turn, tl.where(dim < half, half, -half), 0)
    value = tl.load(source, mask=inside, other=0.0)
    partner = tl.load(source + to_partner, mask=inside, other=0.0)
    if has_norm:
        wide = value.to(tl.float32)
        shrink = tl.rsqrt(tl.sum(wide * wide, 1) * (1.0 / head_dim) + eps)[:, None]
        own = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(weight + to_partner, mask=inside, other=0.0).to(tl.float32)
        value = ((wide * shrink).to(value.dtype).to(tl.float32) * own).to(value.dtype)
        partner = (partner.to(tl.float32) * shrink).to(value.dtype).to(tl.float32) * other
        partner = partner.to(value.dtype)
    cosine = tl.load(cosines, mask=in_turn, other=1.0).to(tl.float32)
    sine = tl.load(sines, mask=in_turn, other=0.0).to(tl.float32)
    straight = (value.to(tl.float32) * cosine).to(value.dtype).to(tl.float32)
    return (straight + partner.to(tl.float32) * sine).to(value.dtype)


@triton.jit(do_not_specialize=["cells"])
def silu_and_multiply(gate_up, cells, width: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr):
    """silu(gate) * up of ``gate_up`` [rows, 2 * width], where gate was; cells are rows x width."""
    wait(overlap)
    cell = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = cell < cells
    place = cell // width * (2 * width) + cell % width
    gate = tl.load(gate_up + place, mask=inside, other=0.0)
    up = tl.load(gate_up + place + width, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(gate_up + place, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


# The kernels with which a decode step begins and ends. Host code, and what they mean:
# ``kernels/rows/row_ops.py``.


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
