"""The kernel that turns q and k of the vision tower by their position. Host code: ``vision.py``."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["cells"])
def turn_into(
    fresh,
    cosines,
    sines,
    target,
    cells,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
):
    """``tile`` elements of ``target`` [rows, 3, width] from ``fresh``, where ``width`` is heads x head_dim.

    Element i of the first half of a head pairs with i of the second, as in ``decoder/rope.py``; v, the last
    third of a row, is copied. ``cosines`` and ``sines`` [rows, head_dim] are float32; cells are all elements.
    """
    half: tl.constexpr = head_dim // 2
    cell = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = cell < cells
    row = cell // (3 * width)
    column = cell % (3 * width)
    dim = column % head_dim
    turned = inside & (column < 2 * width)
    value = tl.load(fresh + cell, mask=inside, other=0.0)
    partner = tl.load(fresh + tl.where(dim < half, cell + half, cell - half), mask=turned, other=0.0)
    angle = row * head_dim + dim
    cosine = tl.load(cosines + angle, mask=turned, other=1.0)
    sine = tl.load(sines + angle, mask=turned, other=0.0)
    wide = value.to(tl.float32) * cosine + partner.to(tl.float32) * sine
    tl.store(target + cell, wide.to(value.dtype), mask=inside)
