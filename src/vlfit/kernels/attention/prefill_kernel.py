"""The kernel for attention of chunks of prompts, each over its past and itself, in the blocks of the cache.

Scores exist one tile at a time: softmax is carried along (FlashAttention: Dao et al., 2022). All chunks of a
batch are one launch. Reference: ``attention.plain_attention``.
"""

import triton
import triton.language as tl

from vlfit.kernels.primitives import ONE, factor_of, numbers


@triton.jit(do_not_specialize=["table", "spans", "table_stride"])
def prefill(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    spans,
    output,
    query_stride,
    table_stride,
    key_heads: tl.constexpr,
    shared: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_dim: tl.constexpr,
    factor: tl.constexpr,
    narrow: tl.constexpr,
    hardware: tl.constexpr,
    by_hand: tl.constexpr,
):
    """``output`` [rows, heads, head_dim]: token i of a chunk sees the past and the chunk up to itself.

    ``spans`` [chunks, 3] holds first row, tokens and past of each chunk; ``factor`` turns products of
    ``query`` and ``keys`` [slots, key_heads, head_dim] into powers of two. Keys and values may be ``narrow``,
    as in ``kernels/attention/decode_kernel.py``. One program for ``tile_rows``
    rows of one head of one chunk; those past the end of a short chunk do nothing.
    """
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    first_row = tl.load(spans + chunk * 3)
    tokens = tl.load(spans + chunk * 3 + 1)
    past = tl.load(spans + chunk * 3 + 2)
    # The last rows see most: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if tile * tile_rows < tokens:
        key_head = head // shared
        row = tile * tile_rows + tl.arange(0, tile_rows)
        dim = tl.arange(0, tile_dim)
        inside = (row[:, None] < tokens) & (dim[None, :] < head_dim)
        place = (first_row + row[:, None]).to(tl.int64) * query_stride + head * head_dim + dim[None, :]
        asked = tl.load(query + place, mask=inside, other=0.0)
        if narrow and asked.dtype != tl.float32:
            asked = asked.to(tl.float16)
        largest = tl.full((tile_rows,), float("-inf"), tl.float32)
        weight_sum = tl.zeros((tile_rows,), tl.float32)
        mixed = tl.zeros((tile_rows, tile_dim), tl.float32)
        end = past + tl.minimum((tile + 1) * tile_rows, tokens)
        for first in range(0, end, tile_tokens):
            token = first + tl.arange(0, tile_tokens)
            block = tl.load(table + chunk * table_stride + token // block_size, mask=token < end, other=0)
            slot = (block * block_size + token % block_size).to(tl.int64)
            cell = slot * key_heads + key_head
            kept = cell[:, None] * head_dim + dim[None, :]
            there = (token[:, None] < end) & (dim[None, :] < head_dim)
            key = tl.load(keys + kept, mask=there, other=0)
            if narrow:
                key_factor = factor_of(tl.load(key_scales + cell, mask=token < end, other=ONE), hardware)
                value_scale = tl.load(value_scales + cell, mask=token < end, other=ONE)
                exponent = tl.log2(factor_of(value_scale, hardware))
                key = numbers(key, asked.dtype, hardware, by_hand)
                score = tl.dot(asked, tl.trans(key), input_precision="ieee")
                score = score * (key_factor * factor)[None, :]
                score += exponent[None, :]
            else:
                score = tl.dot(asked, tl.trans(key), input_precision="ieee") * factor
            # Every row sees the first token, so no row is left without a finite score.
            score = tl.where(token[None, :] <= past + row[:, None], score, float("-inf"))
            larger = tl.maximum(largest, tl.max(score, 1))
            weight = tl.exp2(score - larger[:, None])
            shrink = tl.exp2(largest - larger)
            value = tl.load(values + kept, mask=there, other=0)
            if narrow:
                value = numbers(value, asked.dtype, hardware, by_hand)
                weight_sum = weight_sum * shrink + tl.sum(weight * tl.exp2(-exponent)[None, :], 1)
            else:
                weight_sum = weight_sum * shrink + tl.sum(weight, 1)
            mixed = tl.dot(weight.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
            largest = larger
        mixed = mixed / weight_sum[:, None]
        heads: tl.constexpr = key_heads * shared
        target = ((first_row + row[:, None]).to(tl.int64) * heads + head) * head_dim + dim[None, :]
        tl.store(output + target, mixed.to(output.dtype.element_ty), mask=inside)
