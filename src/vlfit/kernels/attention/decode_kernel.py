"""The kernel for attention of one new token of each sequence over itself and its blocks of the cache.

Query, key and value come as the product before leaves them: here they are normalized and turned, and the
newest key and value go to the cache. A sequence's tokens are shared out among ``splits`` programs for each
key head; each leaves its weighted values, its largest score and the sum of its weights, and the last one to
come makes the answer of them, always in the same order. Queries that share a key head are the rows of one
product. Reference: ``attention.plain_attention``.
"""

import triton
import triton.language as tl

from vlfit.kernels.primitives import ONE, factor_of, narrowed, numbers, wait
from vlfit.kernels.rows.row_kernels import turned

LEAST = tl.constexpr(-1e30)  # below any score


@triton.jit(do_not_specialize=["table", "spans", "table_stride"])
def decode(
    joined,
    norm_weight,
    cosines,
    sines,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    spans,
    partial,
    extremes,
    arrivals,
    output,
    eps,
    table_stride,
    key_heads: tl.constexpr,
    shared: tl.constexpr,
    head_dim: tl.constexpr,
    rotated: tl.constexpr,
    has_norm: tl.constexpr,
    block_size: tl.constexpr,
    splits: tl.constexpr,
    sharing: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_shared: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_dim: tl.constexpr,
    factor: tl.constexpr,
    narrow: tl.constexpr,
    hardware: tl.constexpr,
    by_hand: tl.constexpr,
    overlap: tl.constexpr,
):
    """``output`` [sequences, heads, head_dim]; what is normalized and turned as in ``row_kernels.py``.

    ``joined`` [sequences, heads + 2 * key_heads, head_dim], ``keys`` and ``values`` [slots, key_heads,
    head_dim]. ``narrow``: these are codes of FP8, and ``key_scales`` and ``value_scales`` [slots, key_heads]
    belong to them; ``hardware``, ``by_hand``: see ``primitives.py``. ``spans`` [sequences, 3] holds row, new
    tokens (1) and past of each; ``factor`` turns products of queries and keys into powers of two. With
    ``splits`` > 1 ``partial`` is [sequences, heads, splits, head_dim], ``extremes`` [sequences, heads,
    splits, 2], both float32, and ``arrivals`` counts the programs of each sequence and key head: 0 before the
    first and after the last. The first ``sharing`` programs have the past, the last one has the newest token.
    A row whose slot is negative leaves nothing in the cache, and its answer is zeros.
    """
    sequence = tl.program_id(0)
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    heads: tl.constexpr = key_heads * shared
    head = tl.arange(0, tile_heads)[:, None]
    dim = tl.arange(0, tile_dim)[None, :]
    # The kernel before writes ``joined`` and nothing else that is read here: the first keys and values are on
    # their way while it runs.
    past = tl.load(spans + sequence * 3 + 2)
    slot = tl.load(slots + sequence).to(tl.int64)
    share = tl.cdiv(tl.cdiv(past, sharing), tile_tokens) * tile_tokens
    begin = split * share
    end = tl.minimum(begin + share, past)
    blocks = table + sequence * table_stride
    token = begin + tl.arange(0, tile_tokens)
    cell = cells(blocks, token, end, key_head, key_heads, block_size)
    place = cell[:, None] * head_dim + dim
    there = dim < head_dim
    key = tl.load(keys + place, mask=(token[:, None] < end) & there, other=0)
    value = tl.load(values + place, mask=(token[:, None] < end) & there, other=0)
    key_scale = scale_at(key_scales, cell, token < end, narrow)
    value_scale = scale_at(value_scales, cell, token < end, narrow)
    wait(overlap)
    inside = (head < shared) & there
    own = joined + sequence.to(tl.int64) * (heads + 2 * key_heads) * head_dim + dim
    weight = norm_weight + dim
    angle = sequence * rotated + dim
    first_head = key_head * shared
    asked = turned(
        own + (first_head + head) * head_dim,
        weight + (first_head + head) * head_dim,
        cosines + angle,
        sines + angle,
        dim,
        inside,
        eps,
        head_dim,
        rotated,
        has_norm,
    )
    if narrow and asked.dtype != tl.float32:
        asked = asked.to(tl.float16)  # as codes become
    largest = tl.full((tile_heads,), LEAST, tl.float32)
    weight_sum = tl.zeros((tile_heads,), tl.float32)
    mixed = tl.zeros((tile_heads, tile_dim), tl.float32)
    if (split == splits - 1) & (slot >= 0):
        new_key = turned(
            own + (heads + key_head) * head_dim,
            weight + (heads + key_head) * head_dim,
            cosines + angle,
            sines + angle,
            dim,
            there,
            eps,
            head_dim,
            rotated,
            has_norm,
        )
        new_value = tl.load(own + (heads + key_heads + key_head) * head_dim, mask=there, other=0.0)
        new_cell = slot * key_heads + key_head
        kept = new_cell * head_dim + dim
        if narrow:  # it sees itself as all after it will
            new_key, new_key_scale = narrowed(new_key)
            new_value, new_value_scale = narrowed(new_value)
            one = new_cell + tl.arange(0, 1)[:, None]
            tl.store(key_scales + one, new_key_scale)
            tl.store(value_scales + one, new_value_scale)
        tl.store(keys + kept, new_key, mask=there)
        tl.store(values + kept, new_value, mask=there)
        if narrow:
            new_key = numbers(new_key, asked.dtype, hardware, by_hand)
            new_value = numbers(new_value, asked.dtype, hardware, by_hand)
        largest = tl.sum(asked.to(tl.float32) * new_key.to(tl.float32), 1) * factor
        mixed += new_value.to(tl.float32)
        if narrow:
            new_key_scale, new_value_scale = (
                tl.reshape(new_key_scale, (1,)),
                tl.reshape(new_value_scale, (1,)),
            )
            exponent = tl.log2(factor_of(new_value_scale, hardware))
            largest = largest * factor_of(new_key_scale, hardware) + exponent
            weight_sum += tl.exp2(-exponent)
        else:
            weight_sum += 1.0
    if begin < end:
        largest, weight_sum, mixed = seen(
            asked,
            key,
            value,
            key_scale,
            value_scale,
            token < end,
            largest,
            weight_sum,
            mixed,
            factor,
            narrow,
            hardware,
            by_hand,
        )
    if (
        begin + tile_tokens < end
    ):  # apart from the loop, which makes itself ready even if it has nothing to do
        for first in range(begin + tile_tokens, end, tile_tokens):
            token = first + tl.arange(0, tile_tokens)
            cell = cells(blocks, token, end, key_head, key_heads, block_size)
            place = cell[:, None] * head_dim + dim
            key = tl.load(keys + place, mask=(token[:, None] < end) & there, other=0)
            value = tl.load(values + place, mask=(token[:, None] < end) & there, other=0)
            largest, weight_sum, mixed = seen(
                asked,
                key,
                value,
                scale_at(key_scales, cell, token < end, narrow),
                scale_at(value_scales, cell, token < end, narrow),
                token < end,
                largest,
                weight_sum,
                mixed,
                factor,
                narrow,
                hardware,
                by_hand,
            )
    cell = sequence * heads + first_head
    if splits > 1:
        real = tl.arange(0, tile_heads) < shared
        left = (cell + tl.arange(0, tile_heads)) * splits + split
        tl.store(partial + left[:, None] * head_dim + dim, mixed, mask=inside)
        tl.store(extremes + left * 2, largest, mask=real)
        tl.store(extremes + left * 2 + 1, weight_sum, mask=real)
        tl.debug_barrier()  # all threads' numbers are on their way before the one that counts says so
        arrived = arrivals + sequence * key_heads + key_head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
            merge(
                partial, extremes, output, cell, dim, there, shared, head_dim, splits, tile_shared, tile_dim
            )
            tl.store(arrived, 0)
    else:
        write(output, cell + tl.arange(0, tile_heads), weight_sum, mixed, dim, inside, head_dim)


@triton.jit
def cells(
    blocks,
    token,
    end,
    key_head,
    key_heads: tl.constexpr,
    block_size: tl.constexpr,
):
    """Which row of the cache each ``token`` [tokens] has at ``key_head``: of keys, values and scales."""
    block = tl.load(blocks + token // block_size, mask=token < end, other=0)
    slot = (block * block_size + token % block_size).to(tl.int64)
    return slot * key_heads + key_head


@triton.jit
def scale_at(scales, cell, known, narrow: tl.constexpr):
    """Scales of the rows ``cell`` [tokens], 1 for those that are not ``known``; nothing if not ``narrow``."""
    return tl.load(scales + cell, mask=known, other=ONE) if narrow else known


@triton.jit
def seen(
    asked,
    key,
    value,
    key_scale,
    value_scale,
    known,
    largest,
    weight_sum,
    mixed,
    factor: tl.constexpr,
    narrow: tl.constexpr,
    hardware: tl.constexpr,
    by_hand: tl.constexpr,
):
    """Largest scores, sums of weights and weighted values, with a tile of tokens more: those ``known``."""
    if narrow:
        key = numbers(key, asked.dtype, hardware, by_hand)
        value = numbers(value, asked.dtype, hardware, by_hand)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee")
        score = score * (factor_of(key_scale, hardware) * factor)[None, :]
        exponent = tl.log2(factor_of(value_scale, hardware))
        score += exponent[None, :]
    else:
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * factor
    score = tl.where(known[None, :], score, float("-inf"))
    larger = tl.maximum(largest, tl.max(score, 1))
    power = tl.exp2(score - larger[:, None])
    shrink = tl.exp2(largest - larger)
    weight = power * tl.exp2(-exponent)[None, :] if narrow else power
    weight_sum = weight_sum * shrink + tl.sum(weight, 1)
    mixed = tl.dot(power.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return larger, weight_sum, mixed


@triton.jit
def merge(
    partial,
    extremes,
    output,
    cell,
    dim,
    there,
    shared: tl.constexpr,
    head_dim: tl.constexpr,
    splits: tl.constexpr,
    tile_shared: tl.constexpr,
    tile_dim: tl.constexpr,
):
    """The answers of ``shared`` heads from ``cell`` on, of what all programs of their key head have left.

    Of those heads alone: exponentials of the others that a tile of a product has take longer than all else
    here. A split that had no tokens left ``LEAST`` as its largest score, so that it weighs nothing.
    """
    head = tl.arange(0, tile_shared)
    real = head < shared
    inside = real[:, None] & there
    largest = tl.full((tile_shared,), LEAST, tl.float32)
    weight_sum = tl.zeros((tile_shared,), tl.float32)
    mixed = tl.zeros((tile_shared, tile_dim), tl.float32)
    for split in tl.static_range(splits):
        # Past the first cache, which does not see what other multiprocessors write.
        place = (cell + head) * splits + split
        other = tl.load(extremes + place * 2, mask=real, other=LEAST, cache_modifier=".cg")
        other_sum = tl.load(extremes + place * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
        place = place[:, None] * head_dim + dim
        other_mixed = tl.load(partial + place, mask=inside, other=0.0, cache_modifier=".cg")
        larger = tl.maximum(largest, other)
        shrink, scale = tl.exp2(largest - larger), tl.exp2(other - larger)
        weight_sum = weight_sum * shrink + other_sum * scale
        mixed = mixed * shrink[:, None] + other_mixed * scale[:, None]
        largest = larger
    write(output, cell + head, weight_sum, mixed, dim, inside, head_dim)


@triton.jit
def write(output, head, weight_sum, mixed, dim, inside, head_dim: tl.constexpr):
    """``mixed`` to the rows ``head`` of ``output``; zeros where no token was seen: then nothing weighs."""
    answer = mixed / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    tl.store(output + head[:, None] * head_dim + dim, answer.to(output.dtype.element_ty), mask=inside)
