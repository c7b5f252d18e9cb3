"""GEMM of few rows with weights in the dtype of the computation, which are read from memory once.

Reference: ``F.linear``. Host side: ``dense.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.gemm.tile import (
    block_dot,
    load_constants,
    load_square_sums,
    load_x,
    output_offsets,
    rms_scale,
    split_k_epilogue,
)
from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import pdl_sync, pdl_trigger


@cache_launches
@triton.jit(do_not_specialize=["M", "k_steps", "num_sums"])
def dense_matmul_kernel(
    x,
    weight,
    bias,
    partial,
    counters,
    out,
    norm_weight,
    prenorm_out,
    square_sums,
    M,
    N,
    K,
    stride_xm,
    k_steps,
    num_sums,
    eps,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    PRENORM: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TRIGGER_LATE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """``out`` [M, N] = ``x`` [M, K] @ ``weight`` [N, K].T + ``bias``, accumulated in float32.

    Grid: (tiles of N, SPLIT_K); all rows are in one tile. One program computes a tile [BLOCK_N, BLOCK_M] over
    ``k_steps`` blocks of ``BLOCK_K`` inputs. ``EVEN``: tiles divide N and K. ``SLICE_K``: number of slices of
    a block of K, one per warp, or 1. ``partial`` and ``counters``: see ``tile.split_k_epilogue``, the
    epilogue. ``TRIGGER_LATE``: ``pdl_trigger`` after the main loop.

    Prologue (``PRENORM``): ``x`` are the rows of ``PreNormRows``; sums are multiplied by the norm's factor,
    computed from ``square_sums`` [M, num_sums].
    """
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    offs_n = output_offsets(pid_n, N, BLOCK_N, SWIGLU)
    offs_m = tl.arange(0, BLOCK_M)
    k_begin = pid_k * k_steps * BLOCK_K
    bias_values = load_constants(bias, offs_n, N, HAS_BIAS)
    norm_scale = load_constants(norm_weight, offs_n, N, ADD_RESIDUAL)
    pdl_sync(USE_PDL, not TRIGGER_LATE)
    if PRENORM:
        norm_sums = load_square_sums(square_sums, offs_m, M, num_sums, BLOCK_SUMS)
    residual = 0.0
    if ADD_RESIDUAL:
        residual_offs = offs_m[None, :].to(tl.int64) * N + offs_n[:, None]
        residual = tl.load(out + residual_offs, mask=(offs_n[:, None] < N) & (offs_m[None, :] < M), other=0.0)
    k_end = tl.minimum(k_begin + k_steps * BLOCK_K, K)
    if SLICE_K > 1:
        acc = tl.zeros((SLICE_K, BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k_start in range(k_begin, k_end, BLOCK_K):
        offs_k = k_start + tl.arange(0, BLOCK_K)
        offs = offs_n[:, None].to(tl.int64) * K + offs_k[None, :]
        if EVEN:
            w_tile = tl.load(weight + offs, eviction_policy="evict_first")
        else:
            mask = (offs_n[:, None] < N) & (offs_k[None, :] < K)
            w_tile = tl.load(weight + offs, mask=mask, other=0.0, eviction_policy="evict_first")
        x_tile = load_x(x, offs_m, M, k_start, K, stride_xm, EVEN, BLOCK_K)
        acc += block_dot(w_tile, x_tile, BLOCK_M, BLOCK_N, BLOCK_K, SLICE_K)
    pdl_trigger(USE_PDL and TRIGGER_LATE)
    if SLICE_K > 1:
        acc = tl.sum(acc, 0)
    if PRENORM:
        acc *= rms_scale(norm_sums, K, eps)[None, :]
    split_k_epilogue(
        acc,
        bias_values,
        partial,
        counters + pid_n,
        out,
        norm_scale,
        prenorm_out,
        square_sums + offs_m * tl.num_programs(0) + pid_n,
        residual,
        offs_n,
        offs_m,
        pid_k,
        M,
        N,
        HAS_BIAS,
        SWIGLU,
        ADD_RESIDUAL,
        SPLIT_K,
    )
