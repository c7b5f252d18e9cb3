"""Vision attention: every patch of a frame attends to all of them, without a mask.

Online softmax, one block of scores at a time (FlashAttention: Dao et al., 2022). A head of 72 elements is
computed as 64 and 16, of which 8 are padding, where torch's kernel pads it to 96. Host side:
``rows/vision_ops.py``.
"""

import triton
import triton.language as tl


@triton.jit
def load_head_part(
    base, rows, ROW_STRIDE: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Elements START to START + SIZE of a head in each of ``rows``; those from ``HEAD_DIM`` on are 0."""
    offs_d = START + tl.arange(0, SIZE)
    offs = base + rows[:, None].to(tl.int64) * ROW_STRIDE + offs_d[None, :]
    if START + SIZE > HEAD_DIM:
        return tl.load(offs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    return tl.load(offs)


@triton.jit
def online_softmax_step(
    k_base,
    v_base,
    q,
    q_rest,
    row_max,
    row_sum,
    acc,
    acc_rest,
    n_start,
    num_patches,
    SCALE_LOG2: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys and values from patch ``n_start`` on to the running maximum, sum and accumulators.

    ``MASKED``: the block reaches past the last patch.
    """
    offs_n = n_start + tl.arange(0, BLOCK_N)
    clamped_n = tl.minimum(offs_n, num_patches - 1) if MASKED else offs_n
    k = load_head_part(k_base, clamped_n, ROW_STRIDE, 0, BLOCK_D, HEAD_DIM)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST_D > 0:
        k_rest = load_head_part(k_base, clamped_n, ROW_STRIDE, BLOCK_D, REST_D, HEAD_DIM)
        score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
    if MASKED:
        score = tl.where(offs_n[None, :] < num_patches, score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1) * SCALE_LOG2)
    p = tl.exp2(score * SCALE_LOG2 - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    v = load_head_part(v_base, clamped_n, ROW_STRIDE, 0, BLOCK_D, HEAD_DIM)
    p = p.to(v.dtype)
    acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    if REST_D > 0:
        v_rest = load_head_part(v_base, clamped_n, ROW_STRIDE, BLOCK_D, REST_D, HEAD_DIM)
        acc_rest = tl.dot(p, v_rest, acc_rest * alpha[:, None], input_precision="ieee")
    return new_max, row_sum, acc, acc_rest


@triton.jit(do_not_specialize=["num_patches"])
def vision_attention_kernel(
    qkv,
    out,
    num_patches,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``out`` [patches, NUM_HEADS, HEAD_DIM] from ``qkv`` [patches, 3, NUM_HEADS, HEAD_DIM].

    Grid: (tiles of BLOCK_M patches, heads). One program computes ``BLOCK_M`` patches of one head over all
    keys, ``BLOCK_N`` at a time. A head is ``BLOCK_D`` elements and ``REST_D`` more, both powers of two,
    padded with 0. ``SCALE_LOG2``: softmax scale times log2(e), for exp2.
    """
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    FILLER: tl.constexpr = REST_D if REST_D > 0 else 16  # a valid shape; unused without a rest
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head_start = tl.program_id(1) * HEAD_DIM
    q_base, k_base, v_base = qkv + head_start, qkv + WIDTH + head_start, qkv + 2 * WIDTH + head_start
    clamped_m = tl.minimum(offs_m, num_patches - 1)
    q = load_head_part(q_base, clamped_m, 3 * WIDTH, 0, BLOCK_D, HEAD_DIM)
    q_rest = load_head_part(q_base, clamped_m, 3 * WIDTH, BLOCK_D, REST_D, HEAD_DIM) if REST_D > 0 else q
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc_rest = tl.zeros((BLOCK_M, FILLER), tl.float32)
    full = num_patches // BLOCK_N * BLOCK_N
    for n_start in range(0, full, BLOCK_N):
        row_max, row_sum, acc, acc_rest = online_softmax_step(
            k_base, v_base, q, q_rest, row_max, row_sum, acc, acc_rest, n_start, num_patches,
            SCALE_LOG2, 3 * WIDTH, HEAD_DIM, BLOCK_D, REST_D, BLOCK_N, False,
        )  # fmt: skip
    for n_start in range(full, num_patches, BLOCK_N):
        row_max, row_sum, acc, acc_rest = online_softmax_step(
            k_base, v_base, q, q_rest, row_max, row_sum, acc, acc_rest, n_start, num_patches,
            SCALE_LOG2, 3 * WIDTH, HEAD_DIM, BLOCK_D, REST_D, BLOCK_N, True,
        )  # fmt: skip
    out_ptrs = out + offs_m[:, None].to(tl.int64) * WIDTH + head_start
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_m[:, None] < num_patches) & (offs_d[None, :] < HEAD_DIM)
    tl.store(out_ptrs + offs_d[None, :], (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=mask)
    if REST_D > 0:
        offs_d = BLOCK_D + tl.arange(0, REST_D)
        mask = (offs_m[:, None] < num_patches) & (offs_d[None, :] < HEAD_DIM)
        acc_rest = acc_rest / row_sum[:, None]
        tl.store(out_ptrs + offs_d[None, :], acc_rest.to(out.dtype.element_ty), mask=mask)
