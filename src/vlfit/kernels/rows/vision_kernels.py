"""The kernels around the patch embedding: from bytes to patches, and the learned positions of what a product
made of those. Host code: ``vision.py``.
"""

import triton
import triton.language as tl


@triton.jit
def place_of(patch, columns, merge: tl.constexpr):
    """Row and column of a ``patch`` in merge order: each merge x merge square together."""
    square = patch // (merge * merge)
    within = patch % (merge * merge)
    across = columns // merge
    return square // across * merge + within // merge, square % across * merge + within % merge


@triton.jit(do_not_specialize=["rows", "columns"])
def patches_into(
    pixels,
    numbers,
    output,
    rows,
    columns,
    frames: tl.constexpr,
    channels: tl.constexpr,
    patch: tl.constexpr,
    merge: tl.constexpr,
    temporal: tl.constexpr,
    tile: tl.constexpr,
):
    """A program for each patch of ``output`` [time * rows * columns, channels * temporal * patch * patch].

    ``pixels`` [time * frames, rows * patch, columns * patch, channels] are bytes; a byte in a channel becomes
    what ``numbers`` [256, channels] has. ``frames`` of a temporal patch: all of it, or one for all.
    """
    program = tl.program_id(0).to(tl.int64)
    time = program // (rows * columns)
    row, column = place_of(program % (rows * columns), columns, merge)
    area: tl.constexpr = patch * patch
    values: tl.constexpr = channels * temporal * area
    value = tl.arange(0, tile)
    inside = value < values
    channel = value // (temporal * area)
    frame = time * frames
    if frames > 1:
        frame += value // area % temporal
    y = row * patch + value // patch % patch
    x = column * patch + value % patch
    place = ((frame * rows * patch + y) * columns * patch + x) * channels + channel
    byte = tl.load(pixels + place, mask=inside, other=0).to(tl.int32)
    number = tl.load(numbers + byte * channels + channel, mask=inside, other=0.0)
    tl.store(output + program * values + value, number.to(output.dtype.element_ty), mask=inside)


@triton.jit
def stretched(place, count, side: tl.constexpr):
    """Where ``place`` of ``count`` lies on an axis of ``side``: the one before, and how far it is past it."""
    longest = tl.maximum(count - 1, 1).to(tl.float32)
    at = tl.math.div_rn((place * (side - 1)).to(tl.float32), longest)
    before = tl.floor(at)
    return before.to(tl.int32), at - before


@triton.jit(do_not_specialize=["rows", "columns"])
def add_positions(
    hidden,
    table,
    rows,
    columns,
    side: tl.constexpr,
    merge: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """A program for each patch of ``hidden`` [rows * columns, width]: adds what is learned of its place.

    Its place in ``table`` [side * side, width] lies between four, whose shares are bilinear, corners fixed.
    """
    patch = tl.program_id(0)
    row, column = place_of(patch, columns, merge)
    top, lower = stretched(row, rows, side)
    left, right = stretched(column, columns, side)
    below = tl.minimum(top + 1, side - 1)
    beside = tl.minimum(left + 1, side - 1)
    value = tl.arange(0, tile)
    inside = value < width
    position = corner(table, top * side + left, width, value, inside) * ((1.0 - lower) * (1.0 - right))
    position += corner(table, top * side + beside, width, value, inside) * ((1.0 - lower) * right)
    position += corner(table, below * side + left, width, value, inside) * (lower * (1.0 - right))
    position += corner(table, below * side + beside, width, value, inside) * (lower * right)
    place = hidden + patch.to(tl.int64) * width + value
    embedded = tl.load(place, mask=inside, other=0.0)
    rounded = position.to(embedded.dtype).to(tl.float32)
    tl.store(place, (embedded.to(tl.float32) + rounded).to(embedded.dtype), mask=inside)


@triton.jit
def corner(table, row, width: tl.constexpr, value, inside):
    """A row of ``table`` in float32."""
    return tl.load(table + row * width + value, mask=inside, other=0.0).to(tl.float32)


# The kernels for what the vision tower does to rows between products: residual and norm, and turning q and
# k by their position. Host code: ``vision.py``.


@triton.jit
def add_layer_norm(
    hidden,
    found,
    weight,
    bias,
    output,
    eps,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """A program for each row of ``hidden`` [rows, width]: adds ``found`` to it, and writes its norm."""
    column = tl.arange(0, tile)
    place = tl.program_id(0).to(tl.int64) * width + column
    inside = column < width
    value = tl.load(hidden + place, mask=inside, other=0.0)
    value = (value.to(tl.float32) + tl.load(found + place, mask=inside, other=0.0).to(tl.float32)).to(
        value.dtype
    )
    tl.store(hidden + place, value, mask=inside)
    wide = value.to(tl.float32)
    apart = tl.where(inside, wide - tl.sum(wide, 0) * (1.0 / width), 0.0)
    normal = apart * tl.rsqrt(tl.sum(apart * apart, 0) * (1.0 / width) + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + place, (normal * factor + shift).to(value.dtype), mask=inside)


@triton.jit(do_not_specialize=["columns", "places"])
def turn_by_place(
    joined,
    angles,
    columns,
    places,
    merge: tl.constexpr,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
):
    """A program for each row of ``joined`` [patches, 3, width], where ``width`` is heads x head_dim.

    q and k are turned in place, v stays. Element i of the first half of a head pairs with i of the second;
    pairs of a head's first quarter turn by the row of their patch, the others by its column. ``angles``
    [2, places, head_dim / 4] has cosines, then sines, in float32. ``tile`` is at least ``width``, which is as
    many as there are pairs.
    """
    half: tl.constexpr = head_dim // 2
    quarter: tl.constexpr = head_dim // 4
    patch = tl.program_id(0)
    row, column = place_of(patch, columns, merge)
    pair = tl.arange(0, tile)
    inside = pair < width
    dim = pair % half
    first = joined + patch.to(tl.int64) * (3 * width) + pair // half * head_dim + dim
    angle = angles + tl.where(dim < quarter, row, column) * quarter + dim % quarter
    cosine = tl.load(angle, mask=inside, other=1.0)
    sine = tl.load(angle + places * quarter, mask=inside, other=0.0)
    one = tl.load(first, mask=inside, other=0.0)
    other = tl.load(first + half, mask=inside, other=0.0)
    wide, partner = one.to(tl.float32), other.to(tl.float32)
    tl.store(first, (wide * cosine - partner * sine).to(one.dtype), mask=inside)
    tl.store(first + half, (partner * cosine + wide * sine).to(one.dtype), mask=inside)
