"""The kernels for attention of one new token of each sequence over its blocks of the cache.

A sequence's tokens are shared out among ``splits`` programs for each key head; each leaves its weighted
values, its largest score and the sum of its weights, and ``merge`` makes the answer of them. Queries that
share a key head are the rows of one product. Reference: ``attention.plain_attention``.
"""

import triton
import triton.language as tl

from vlfit.engine.kernels.overlap import wait

LEAST = tl.constexpr(-1e30)  # below any score


@triton.jit(do_not_specialize=["table", "spans", "table_stride"])
def decode(
    query,
    keys,
    values,
    table,
    spans,
    partial,
    extremes,
    query_stride,
    table_stride,
    key_heads: tl.constexpr,
    shared: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    splits: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_dim: tl.constexpr,
    factor: tl.constexpr,
    overlap: tl.constexpr,
):
    """``partial`` [sequences, heads, splits, head_dim], ``extremes`` [sequences, heads, splits, 2], float32.

    ``spans`` [sequences, 3] holds row, new tokens (1) and past of each; ``factor`` turns products of
    ``query`` and ``keys`` [slots, key_heads, head_dim] into powers of two.
    """
    wait(overlap)
    sequence = tl.program_id(0)
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(spans + sequence * 3)
    length = tl.load(spans + sequence * 3 + 2) + 1
    share = tl.cdiv(tl.cdiv(length, splits), tile_tokens) * tile_tokens
    begin = split * share
    end = tl.minimum(begin + share, length)
    head = tl.arange(0, tile_heads)
    dim = tl.arange(0, tile_dim)
    inside = (head[:, None] < shared) & (dim[None, :] < head_dim)
    query_place = row * query_stride + (key_head * shared + head[:, None]) * head_dim + dim[None, :]
    asked = tl.load(query + query_place, mask=inside, other=0.0)
    largest = tl.full((tile_heads,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((tile_heads,), tl.float32)
    mixed = tl.zeros((tile_heads, tile_dim), tl.float32)
    for first in range(begin, end, tile_tokens):
        token = first + tl.arange(0, tile_tokens)
        block = tl.load(table + sequence * table_stride + token // block_size, mask=token < end, other=0)
        slot = (block * block_size + token % block_size).to(tl.int64)
        place = (slot[:, None] * key_heads + key_head) * head_dim + dim[None, :]
        there = (token[:, None] < end) & (dim[None, :] < head_dim)
        key = tl.load(keys + place, mask=there, other=0.0)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * factor
        score = tl.where(token[None, :] < end, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - larger[:, None])
        shrink = tl.exp2(largest - larger)
        weight_sum = weight_sum * shrink + tl.sum(weight, 1)
        value = tl.load(values + place, mask=there, other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
        largest = larger
    cell = (sequence * key_heads * shared + key_head * shared + head) * splits + split
    tl.store(partial + cell[:, None] * head_dim + dim[None, :], mixed, mask=inside)
    tl.store(extremes + cell * 2, largest, mask=head < shared)
    tl.store(extremes + cell * 2 + 1, weight_sum, mask=head < shared)


@triton.jit
def merge(
    partial,
    extremes,
    spans,
    output,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    splits: tl.constexpr,
    tile_dim: tl.constexpr,
    overlap: tl.constexpr,
):
    """``output`` [rows, heads, head_dim] of what ``decode`` left; a program for each sequence and head.

    A split that had no tokens left minus infinity as its largest score, so that it weighs nothing. Where no
    split had any, as in a row of a graph that no sequence needs, the answer is zeros.
    """
    wait(overlap)
    sequence = tl.program_id(0)
    cell = (sequence * heads + tl.program_id(1)) * splits + tl.arange(0, splits)
    dim = tl.arange(0, tile_dim)
    inside = (cell[:, None] >= 0) & (dim[None, :] < head_dim)
    largest = tl.load(extremes + cell * 2)
    scale = tl.exp2(largest - tl.maximum(tl.max(largest, 0), LEAST))
    weight_sum = tl.sum(tl.load(extremes + cell * 2 + 1) * scale, 0)
    part = tl.load(partial + cell[:, None] * head_dim + dim[None, :], mask=inside, other=0.0)
    # The largest score weighs 1, so less than that is the sum of no token at all.
    mixed = tl.sum(part * scale[:, None], 0) / tl.maximum(weight_sum, 0.5)
    row = tl.load(spans + sequence * 3)
    tl.store(
        output + (row * heads + tl.program_id(1)) * head_dim + dim,
        mixed.to(output.dtype.element_ty),
        mask=dim < head_dim,
    )
