"""The kernels for what the vision tower does to rows between products: residual and norm, and turning q and k
by their position. Host code: ``vision.py``.
"""

import triton
import triton.language as tl

from vlfit.engine.kernels.patches import place_of


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
