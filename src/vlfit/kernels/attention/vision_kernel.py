"""The kernel for attention of the vision tower: every patch of a frame looks at all of them.

Scores exist one tile at a time: softmax is carried along (FlashAttention: Dao et al., 2022). A head of 72
elements is computed as 64 and 16, of which 8 are nothing, where torch's kernel rounds it up to 96. Host code:
``vision.py``.
"""

import triton
import triton.language as tl


@triton.jit
def heads_of(first, row, row_width: tl.constexpr, start: tl.constexpr, size: tl.constexpr, end: tl.constexpr):
    """Elements ``start`` to ``start + size`` of a head in each ``row``; those from ``end`` on are 0."""
    dim = start + tl.arange(0, size)
    place = first + row[:, None].to(tl.int64) * row_width + dim[None, :]
    if start + size > end:
        return tl.load(place, mask=dim[None, :] < end, other=0.0)
    return tl.load(place)


@triton.jit
def look(
    keys,
    values,
    asked,
    asked_rest,
    largest,
    weight_sum,
    mixed,
    mixed_rest,
    first,
    patches,
    factor: tl.constexpr,
    row_width: tl.constexpr,
    head_dim: tl.constexpr,
    low: tl.constexpr,
    rest: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """One tile of keys and values, from the patch ``first`` on; ``masked``: not all of them are there."""
    patch = first + tl.arange(0, tile_keys)
    there = tl.minimum(patch, patches - 1) if masked else patch
    key = heads_of(keys, there, row_width, 0, low, head_dim)
    score = tl.dot(asked, tl.trans(key), input_precision="ieee")
    if rest > 0:
        key_rest = heads_of(keys, there, row_width, low, rest, head_dim)
        score = tl.dot(asked_rest, tl.trans(key_rest), score, input_precision="ieee")
    if masked:
        score = tl.where(patch[None, :] < patches, score, float("-inf"))
    larger = tl.maximum(largest, tl.max(score, 1) * factor)
    weight = tl.exp2(score * factor - larger[:, None])
    shrink = tl.exp2(largest - larger)
    weight_sum = weight_sum * shrink + tl.sum(weight, 1)
    value = heads_of(values, there, row_width, 0, low, head_dim)
    weight = weight.to(value.dtype)
    mixed = tl.dot(weight, value, mixed * shrink[:, None], input_precision="ieee")
    if rest > 0:
        value_rest = heads_of(values, there, row_width, low, rest, head_dim)
        mixed_rest = tl.dot(weight, value_rest, mixed_rest * shrink[:, None], input_precision="ieee")
    return larger, weight_sum, mixed, mixed_rest


@triton.jit(do_not_specialize=["patches"])
def whole_attention(
    joined,
    output,
    patches,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    low: tl.constexpr,
    rest: tl.constexpr,
    factor: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """A program for ``tile_rows`` patches of one head: from ``joined`` [patches, 3, heads, head_dim], which
    holds q, k and v, to ``output`` [patches, heads, head_dim].

    A head is the first ``low`` elements and ``rest`` more, both powers of two, that are 0 past its end.
    ``factor`` turns products of q and k into powers of two.
    """
    width: tl.constexpr = heads * head_dim
    filler: tl.constexpr = rest if rest > 0 else 16  # never used where there is no rest
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    start = tl.program_id(1) * head_dim
    queries, keys, values = joined + start, joined + width + start, joined + 2 * width + start
    safe = tl.minimum(row, patches - 1)
    asked = heads_of(queries, safe, 3 * width, 0, low, head_dim)
    asked_rest = heads_of(queries, safe, 3 * width, low, rest, head_dim) if rest > 0 else asked
    largest = tl.full((tile_rows,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((tile_rows,), tl.float32)
    mixed = tl.zeros((tile_rows, low), tl.float32)
    mixed_rest = tl.zeros((tile_rows, filler), tl.float32)
    whole = patches // tile_keys * tile_keys
    for first in range(0, whole, tile_keys):
        largest, weight_sum, mixed, mixed_rest = look(
            keys, values, asked, asked_rest, largest, weight_sum, mixed, mixed_rest, first, patches,
            factor, 3 * width, head_dim, low, rest, tile_keys, False,
        )  # fmt: skip
    for first in range(whole, patches, tile_keys):
        largest, weight_sum, mixed, mixed_rest = look(
            keys, values, asked, asked_rest, largest, weight_sum, mixed, mixed_rest, first, patches,
            factor, 3 * width, head_dim, low, rest, tile_keys, True,
        )  # fmt: skip
    target = output + row[:, None].to(tl.int64) * width + start
    dim = tl.arange(0, low)
    inside = (row[:, None] < patches) & (dim[None, :] < head_dim)
    tl.store(target + dim[None, :], (mixed / weight_sum[:, None]).to(output.dtype.element_ty), mask=inside)
    if rest > 0:
        dim = low + tl.arange(0, rest)
        inside = (row[:, None] < patches) & (dim[None, :] < head_dim)
        mixed_rest = mixed_rest / weight_sum[:, None]
        tl.store(target + dim[None, :], mixed_rest.to(output.dtype.element_ty), mask=inside)
