"""Paged attention over KV cache blocks: decoding (flash-decoding) and prefill. Host side: ``paged.py``.

Decoding: one new token of each sequence over its blocks and itself. Reads queries, keys and values as the QKV
projection leaves them, applies RMSNorm and RoPE, and stores the new key and value in the cache. The queries
of one KV head are the rows of one dot product. The context is split among ``NUM_SPLITS`` programs (split-KV);
the last to finish merges the partial results in a fixed order.

Prefill: chunks of prompts over their past and themselves. Online softmax, one block of scores at a time
(FlashAttention: Dao et al., 2022). All chunks of a batch are one launch.

Reference of both: ``paged.reference_attention``.
"""

import triton
import triton.language as tl

from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import BF16_ONE, fp8_to_float, kv_scale_to_float, pdl_sync, quantize_kv_rows
from vlfit.kernels.rows.row_kernels import load_rope_tables, load_with_partners, norm_rope

MIN_SCORE = tl.constexpr(-1e30)  # below any real score


@cache_launches
@triton.jit(do_not_specialize=["block_tables", "query_spans", "stride_table", "num_blocks"])
def paged_decode_kernel(
    qkv,
    qk_norm_weight,
    cos,
    sin,
    slot_mapping,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    block_tables,
    query_spans,
    partial_out,
    partial_stats,
    counters,
    out,
    eps,
    stride_table,
    num_blocks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    MERGE_BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    FP8_KV: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """``out`` [seqs, NUM_HEADS, HEAD_DIM]: softmax(q @ k.T) @ v over past and new token.

    Grid: (seqs, NUM_KV_HEADS, NUM_SPLITS). One program computes the ``GROUP_SIZE`` query heads of a KV head
    over tiles ``split``, ``split + NUM_SPLITS``, ... of the context, ``BLOCK_T`` tokens each. The last split,
    which has no more tiles than any other, also has the new token.

    ``qkv`` [seqs, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]; ``k_cache`` and ``v_cache`` [slots, NUM_KV_HEADS,
    HEAD_DIM], with ``FP8_KV`` as codes with ``k_scales`` and ``v_scales`` [slots, NUM_KV_HEADS]
    (``primitives.py``). ``block_tables`` [seqs, num_blocks]; ``query_spans`` [seqs, 3]: row, new tokens (1)
    and past of each sequence.
    ``SCALE_LOG2``: softmax scale times log2(e), for exp2. ``WINDOW``: sliding window in tokens, or 0. With
    ``NUM_SPLITS`` > 1 float32 ``partial_out`` [seqs, NUM_HEADS, NUM_SPLITS, HEAD_DIM] and ``partial_stats``
    [seqs, NUM_HEADS, NUM_SPLITS, 2] (maximum and sum of weights); ``counters`` per sequence and KV head, zero
    before and after. A row with a negative slot stores nothing, and its output is zeros.
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    # tl.dot takes at least 16 rows, so each query head is repeated.
    REPEATS: tl.constexpr = BLOCK_H // MERGE_BLOCK_H
    offs_h = tl.arange(0, MERGE_BLOCK_H)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    # Before ``pdl_sync``: the previous kernel writes only ``qkv``, so the first keys and values, weights of
    # the norm and RoPE's tables can be loaded while it runs. After it all loads are issued before the first
    # is used, so that nothing waits for memory twice.
    past = tl.load(query_spans + seq * 3 + 2)
    slot = tl.load(slot_mapping + seq).to(tl.int64)
    t_begin = split * BLOCK_T
    if WINDOW:  # a row that stores its own token counts it as part of the window
        t_begin += tl.maximum(past - WINDOW + (slot >= 0).to(tl.int32), 0)
    block_table = block_tables + seq * stride_table
    offs_t = t_begin + tl.arange(0, BLOCK_T)
    # Not up to ``past``: without a window the blocks' numbers are asked for together with it.
    kv_row = kv_rows(block_table, offs_t, num_blocks * BLOCK_SIZE, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    offs = kv_row[:, None] * HEAD_DIM + offs_d
    dim_mask = offs_d < HEAD_DIM
    k = tl.load(k_cache + offs, mask=(offs_t[:, None] < past) & dim_mask, other=0)
    v = tl.load(v_cache + offs, mask=(offs_t[:, None] < past) & dim_mask, other=0)
    k_scale = load_kv_scales(k_scales, kv_row, offs_t < past, FP8_KV)
    v_scale = load_kv_scales(v_scales, kv_row, offs_t < past, FP8_KV)
    mask = (offs_h < GROUP_SIZE) & dim_mask
    first_head = kv_head * GROUP_SIZE
    head_offs = (first_head + offs_h) * HEAD_DIM + offs_d
    key_offs = (NUM_HEADS + kv_head) * HEAD_DIM + offs_d
    has_new = (split == NUM_SPLITS - 1) & (slot >= 0)
    new_mask = dim_mask & has_new
    weights = load_with_partners(qk_norm_weight + head_offs, offs_d, mask, ROTARY_DIM, HAS_QK_NORM)
    key_weights = load_with_partners(qk_norm_weight + key_offs, offs_d, new_mask, ROTARY_DIM, HAS_QK_NORM)
    rope_offs = seq * ROTARY_DIM + offs_d
    tables = load_rope_tables(cos + rope_offs, sin + rope_offs, offs_d, ROTARY_DIM)
    pdl_sync(USE_PDL)
    qkv_row = qkv + seq.to(tl.int64) * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    heads = load_with_partners(qkv_row + head_offs, offs_d, mask, ROTARY_DIM, True)
    new_key = load_with_partners(qkv_row + key_offs, offs_d, new_mask, ROTARY_DIM, True)
    new_value = tl.load(qkv_row + NUM_KV_HEADS * HEAD_DIM + key_offs, mask=new_mask, other=0.0)
    q = norm_rope(heads, weights, tables, eps, HEAD_DIM, HAS_QK_NORM)
    if FP8_KV and q.dtype != tl.float32:
        q = q.to(tl.float16)  # the dtype of dequantized codes
    q = tl.reshape(tl.broadcast_to(q[:, None, :], (MERGE_BLOCK_H, REPEATS, BLOCK_D)), (BLOCK_H, BLOCK_D))
    row_max = tl.full((BLOCK_H,), MIN_SCORE, tl.float32)
    row_sum = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    if has_new:
        new_k, new_v = norm_rope(new_key, key_weights, tables, eps, HEAD_DIM, HAS_QK_NORM), new_value
        new_row = slot * NUM_KV_HEADS + kv_head
        new_offs = new_row * HEAD_DIM + offs_d
        if FP8_KV:  # the new token sees itself quantized, as later tokens will
            new_k, new_k_scale = quantize_kv_rows(new_k)
            new_v, new_v_scale = quantize_kv_rows(new_v)
            scale_offs = new_row + tl.arange(0, 1)[:, None]
            tl.store(k_scales + scale_offs, new_k_scale)
            tl.store(v_scales + scale_offs, new_v_scale)
        tl.store(k_cache + new_offs, new_k, mask=dim_mask)
        tl.store(v_cache + new_offs, new_v, mask=dim_mask)
        if FP8_KV:
            new_k = fp8_to_float(new_k, q.dtype, NATIVE_FP8, INLINE_PTX)
            new_v = fp8_to_float(new_v, q.dtype, NATIVE_FP8, INLINE_PTX)
        row_max = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * SCALE_LOG2
        acc += new_v.to(tl.float32)
        if FP8_KV:
            new_k_scale, new_v_scale = (
                tl.reshape(new_k_scale, (1,)),
                tl.reshape(new_v_scale, (1,)),
            )
            v_scale_log2 = tl.log2(kv_scale_to_float(new_v_scale, NATIVE_FP8))
            row_max = row_max * kv_scale_to_float(new_k_scale, NATIVE_FP8) + v_scale_log2
            row_sum += tl.exp2(-v_scale_log2)
        else:
            row_sum += 1.0
    STRIDE: tl.constexpr = NUM_SPLITS * BLOCK_T
    if t_begin < past:
        row_max, row_sum, acc = online_softmax_step(
            q,
            k,
            v,
            k_scale,
            v_scale,
            offs_t < past,
            row_max,
            row_sum,
            acc,
            SCALE_LOG2,
            FP8_KV,
            NATIVE_FP8,
            INLINE_PTX,
        )
    if t_begin + STRIDE < past:  # an empty loop would still cost its pipeline's prologue
        for t_start in range(t_begin + STRIDE, past, STRIDE):
            offs_t = t_start + tl.arange(0, BLOCK_T)
            kv_row = kv_rows(block_table, offs_t, past, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            offs = kv_row[:, None] * HEAD_DIM + offs_d
            k = tl.load(k_cache + offs, mask=(offs_t[:, None] < past) & dim_mask, other=0)
            v = tl.load(v_cache + offs, mask=(offs_t[:, None] < past) & dim_mask, other=0)
            row_max, row_sum, acc = online_softmax_step(
                q,
                k,
                v,
                load_kv_scales(k_scales, kv_row, offs_t < past, FP8_KV),
                load_kv_scales(v_scales, kv_row, offs_t < past, FP8_KV),
                offs_t < past,
                row_max,
                row_sum,
                acc,
                SCALE_LOG2,
                FP8_KV,
                NATIVE_FP8,
                INLINE_PTX,
            )
    kv_row = seq * NUM_HEADS + first_head
    row = tl.arange(0, BLOCK_H)
    head = row // REPEATS
    first = (row % REPEATS == 0) & (head < GROUP_SIZE)
    mask = first[:, None] & dim_mask
    if NUM_SPLITS > 1:
        split_row = (kv_row + head) * NUM_SPLITS + split
        tl.store(partial_out + split_row[:, None] * HEAD_DIM + offs_d, acc, mask=mask)
        tl.store(partial_stats + split_row * 2, row_max, mask=first)
        tl.store(partial_stats + split_row * 2 + 1, row_sum, mask=first)
        tl.debug_barrier()  # every thread has stored its part before the counter is incremented
        counter = counters + seq * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_SPLITS - 1:
            merge_splits(
                partial_out,
                partial_stats,
                out,
                kv_row,
                offs_d,
                dim_mask,
                GROUP_SIZE,
                HEAD_DIM,
                NUM_SPLITS,
                MERGE_BLOCK_H,
                BLOCK_D,
            )
            tl.store(counter, 0)
    else:
        store_output(out, kv_row + head, row_sum, acc, offs_d, mask, HEAD_DIM)


@triton.jit
def kv_rows(
    block_table,
    offs_t,
    t_end,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Where the tokens ``offs_t`` of a sequence are in the cache: [BLOCK_T] int64.

    Indices of rows in keys and values [slots * NUM_KV_HEADS, HEAD_DIM], and of scales. Tokens from ``t_end``
    on read as being in block 0.
    """
    block = tl.load(block_table + offs_t // BLOCK_SIZE, mask=offs_t < t_end, other=0)
    slot = (block * BLOCK_SIZE + offs_t % BLOCK_SIZE).to(tl.int64)
    return slot * NUM_KV_HEADS + kv_head


@triton.jit
def load_kv_scales(scales, kv_row, mask, FP8_KV: tl.constexpr):
    """Scales (bits of bfloat16) of the cache rows ``kv_row`` [BLOCK_T], those of 1.0 where not ``mask``.

    Without ``FP8_KV`` nothing is loaded; ``mask`` is returned as a placeholder.
    """
    return tl.load(scales + kv_row, mask=mask, other=BF16_ONE) if FP8_KV else mask


@triton.jit
def online_softmax_step(
    q,
    k,
    v,
    k_scale,
    v_scale,
    mask,
    row_max,
    row_sum,
    acc,
    SCALE_LOG2: tl.constexpr,
    FP8_KV: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INLINE_PTX: tl.constexpr,
):
    """Attend to one block of keys and values [BLOCK_T, BLOCK_D].

    Returns the updated ``row_max``, ``row_sum`` and ``acc``. ``mask`` [BLOCK_T]: tokens to attend to. With
    ``FP8_KV`` the values' scales enter the exponent, so that softmax weights stay at most 1, and are taken
    out of ``row_sum`` (``primitives.py``).
    """
    if FP8_KV:
        k = fp8_to_float(k, q.dtype, NATIVE_FP8, INLINE_PTX)
        v = fp8_to_float(v, q.dtype, NATIVE_FP8, INLINE_PTX)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = score * (kv_scale_to_float(k_scale, NATIVE_FP8) * SCALE_LOG2)[None, :]
        v_scale_log2 = tl.log2(kv_scale_to_float(v_scale, NATIVE_FP8))
        score += v_scale_log2[None, :]
    else:
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE_LOG2
    score = tl.where(mask[None, :], score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    p = tl.exp2(score - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    p_unscaled = p * tl.exp2(-v_scale_log2)[None, :] if FP8_KV else p
    row_sum = row_sum * alpha + tl.sum(p_unscaled, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def merge_splits(
    partial_out,
    partial_stats,
    out,
    first_row,
    offs_d,
    dim_mask,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MERGE_BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge all splits' partial results into ``out``, for ``GROUP_SIZE`` heads from ``first_row`` on.

    ``partial_out``, ``partial_stats`` and ``out``: as in ``paged_decode_kernel``. ``first_row``: index of
    the sequence times the number of heads, plus the first head. ``offs_d`` [1, BLOCK_D]: index of each
    element in its head; ``dim_mask``: true below HEAD_DIM. A split without tokens has ``MIN_SCORE`` as its
    maximum, so its weight is 0.

    ``MERGE_BLOCK_H``: ``GROUP_SIZE`` rounded up to a power of two. It is not repeated to 16 rows as for
    ``tl.dot``: their exponentials would take longer than everything else here.
    """
    offs_h = tl.arange(0, MERGE_BLOCK_H)
    head_mask = offs_h < GROUP_SIZE
    mask = head_mask[:, None] & dim_mask
    row_max = tl.full((MERGE_BLOCK_H,), MIN_SCORE, tl.float32)
    row_sum = tl.zeros((MERGE_BLOCK_H,), tl.float32)
    acc = tl.zeros((MERGE_BLOCK_H, BLOCK_D), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        # Bypass L1, which does not see other multiprocessors' writes.
        offs = (first_row + offs_h) * NUM_SPLITS + split
        other_max = tl.load(partial_stats + offs * 2, mask=head_mask, other=MIN_SCORE, cache_modifier=".cg")
        other_sum = tl.load(partial_stats + offs * 2 + 1, mask=head_mask, other=0.0, cache_modifier=".cg")
        offs = offs[:, None] * HEAD_DIM + offs_d
        other_acc = tl.load(partial_out + offs, mask=mask, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, other_max)
        alpha, beta = tl.exp2(row_max - new_max), tl.exp2(other_max - new_max)
        row_sum = row_sum * alpha + other_sum * beta
        acc = acc * alpha[:, None] + other_acc * beta[:, None]
        row_max = new_max
    store_output(out, first_row + offs_h, row_sum, acc, offs_d, mask, HEAD_DIM)


@triton.jit
def store_output(out, rows, row_sum, acc, offs_d, mask, HEAD_DIM: tl.constexpr):
    """Store ``acc`` / ``row_sum`` to ``rows`` of ``out`` [..., HEAD_DIM]; zeros where ``row_sum`` is 0."""
    normalized = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out + rows[:, None] * HEAD_DIM + offs_d, normalized.to(out.dtype.element_ty), mask=mask)


@cache_launches
@triton.jit(do_not_specialize=["block_tables", "query_spans", "stride_table"])
def paged_prefill_kernel(
    q_rows,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    block_tables,
    query_spans,
    out,
    stride_q,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    FP8_KV: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INLINE_PTX: tl.constexpr,
):
    """Causal attention of prompt chunks: ``out`` [rows, heads, HEAD_DIM] for ``q_rows`` of the same shape.

    Token i of a chunk sees the past and the chunk up to itself, whose keys and values are in the cache.

    Grid: (tiles of BLOCK_M rows of the longest chunk, heads, chunks). One program computes ``BLOCK_M`` rows
    of one head over all keys, ``BLOCK_T`` tokens at a time; tiles past the end of a shorter chunk do nothing.
    ``query_spans`` [chunks, 3]: first row, tokens and past of each chunk. ``SCALE_LOG2``: softmax scale times
    log2(e), for exp2. ``WINDOW``: sliding window in tokens, or 0. Cache and scales are those of
    ``paged_decode_kernel``.
    """
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    first_row = tl.load(query_spans + chunk * 3)
    num_tokens = tl.load(query_spans + chunk * 3 + 1)
    past = tl.load(query_spans + chunk * 3 + 2)
    # The last rows see the most keys: start them first.
    pid_m = tl.num_programs(0) - 1 - tl.program_id(0)
    if pid_m * BLOCK_M < num_tokens:
        kv_head = head // GROUP_SIZE
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_d = tl.arange(0, BLOCK_D)
        mask = (offs_m[:, None] < num_tokens) & (offs_d[None, :] < HEAD_DIM)
        offs = (first_row + offs_m[:, None]).to(tl.int64) * stride_q + head * HEAD_DIM + offs_d[None, :]
        q = tl.load(q_rows + offs, mask=mask, other=0.0)
        if FP8_KV and q.dtype != tl.float32:
            q = q.to(tl.float16)
        # With a window a row may see nothing in its first blocks: the maximum must stay finite.
        row_max = tl.full((BLOCK_M,), -1e30 if WINDOW else float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        t_end = past + tl.minimum((pid_m + 1) * BLOCK_M, num_tokens)
        t_begin = 0
        if WINDOW:
            t_begin = tl.maximum(past + pid_m * BLOCK_M + 1 - WINDOW, 0) // BLOCK_T * BLOCK_T
        for t_start in range(t_begin, t_end, BLOCK_T):
            offs_t = t_start + tl.arange(0, BLOCK_T)
            block = tl.load(
                block_tables + chunk * stride_table + offs_t // BLOCK_SIZE, mask=offs_t < t_end, other=0
            )
            slot = (block * BLOCK_SIZE + offs_t % BLOCK_SIZE).to(tl.int64)
            kv_row = slot * NUM_KV_HEADS + kv_head
            kv_offs = kv_row[:, None] * HEAD_DIM + offs_d[None, :]
            kv_mask = (offs_t[:, None] < t_end) & (offs_d[None, :] < HEAD_DIM)
            k = tl.load(k_cache + kv_offs, mask=kv_mask, other=0)
            if FP8_KV:
                k_scale = kv_scale_to_float(
                    tl.load(k_scales + kv_row, mask=offs_t < t_end, other=BF16_ONE), NATIVE_FP8
                )
                v_scale = tl.load(v_scales + kv_row, mask=offs_t < t_end, other=BF16_ONE)
                v_scale_log2 = tl.log2(kv_scale_to_float(v_scale, NATIVE_FP8))
                k = fp8_to_float(k, q.dtype, NATIVE_FP8, INLINE_PTX)
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
                score = score * (k_scale * SCALE_LOG2)[None, :]
                score += v_scale_log2[None, :]
            else:
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE_LOG2
            # Every row sees the first token, so each has a finite score.
            score = tl.where(offs_t[None, :] <= past + offs_m[:, None], score, float("-inf"))
            if WINDOW:
                score = tl.where(offs_t[None, :] > past + offs_m[:, None] - WINDOW, score, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1))
            p = tl.exp2(score - new_max[:, None])
            alpha = tl.exp2(row_max - new_max)
            v = tl.load(v_cache + kv_offs, mask=kv_mask, other=0)
            if FP8_KV:
                v = fp8_to_float(v, q.dtype, NATIVE_FP8, INLINE_PTX)
                row_sum = row_sum * alpha + tl.sum(p * tl.exp2(-v_scale_log2)[None, :], 1)
            else:
                row_sum = row_sum * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            row_max = new_max
        if WINDOW:  # rows past the end of the chunk may see nothing
            row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc / row_sum[:, None]
        NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
        out_offs = ((first_row + offs_m[:, None]).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + offs_d[
            None, :
        ]
        tl.store(out + out_offs, acc.to(out.dtype.element_ty), mask=mask)
