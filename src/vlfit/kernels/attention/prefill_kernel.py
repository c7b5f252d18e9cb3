"""Paged attention for prefill: chunks of prompts over their past and themselves, read from KV cache blocks.

Online softmax, one block of scores at a time (FlashAttention: Dao et al., 2022). All chunks of a batch are
one launch. Reference: ``paged.reference_attention``.
"""

import triton
import triton.language as tl

from vlfit.kernels.primitives import BF16_ONE, fp8_to_float, kv_scale_to_float


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
    """``out`` [rows, heads, HEAD_DIM]: causal attention; token i of a chunk sees the past and the chunk up to
    itself.

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
