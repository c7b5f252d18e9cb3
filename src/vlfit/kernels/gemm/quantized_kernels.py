"""GEMM for up to a few hundred rows with quantized weights, dequantized on the fly.

The transposed output is computed, so that unpacked weights are the dot product's first operand, which may
stay in registers. Fewer rows than 8 are padded: tensor cores wait for memory anyway. With few rows there are
too few output tiles to keep a card busy, so K is split: first among the warps of a program (sliced-K), then
among ``SPLIT_K`` programs (``tile.split_k_epilogue``). Most products of one row: ``one_row_kernels.py``.
Reference: ``layers/linear.py``, which dequantizes and calls ``F.linear``. Host side: ``quantized.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.gemm.tile import (
    block_dot,
    half_tile_starts,
    load_constants,
    load_square_sums,
    load_x,
    output_offsets,
    rms_scale,
    split_k_epilogue,
)
from vlfit.kernels.gemm.unpack import (
    broadcast_spans,
    group_indices,
    load_fp8,
    load_int8,
    load_packed,
    load_scales,
    load_two_level_scales,
    multiply_subtract,
    permute_x_int8,
    permute_x_packed,
)
from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import pdl_sync, pdl_trigger


@cache_launches
@triton.jit(do_not_specialize=["M", "k_steps", "num_sums"])
def quantized_matmul_kernel(
    x,
    codes,
    scales,
    zeros,
    bias,
    partial,
    counters,
    out,
    norm_weight,
    prenorm_out,
    square_sums,
    M,
    N,
    code_columns,
    stride_xm,
    num_groups,
    k_steps,
    num_sums,
    eps,
    FORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    PRENORM: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """``out`` [M, N] = ``x`` [M, K] @ weight.T + ``bias``, accumulated in float32.

    Grid: (tiles of N x tiles of M, splits of K); ``FORM``: the ``ProductForm``. One program computes a tile
    [BLOCK_N, BLOCK_M] over ``k_steps`` blocks of ``BLOCK_K`` inputs. ``codes`` are [N, code_columns] bytes
    (FP8) or int32 words, of four int8 codes or of packed ones, ``scales`` [N / SCALE_N, num_groups],
    ``zeros`` [N / 8, num_groups], or with two levels of scales both as in ``load_two_level_scales``,
    ``zeros`` its ``supers``. ``partial`` and ``counters``: see ``tile.split_k_epilogue``, the epilogue.

    Where a slice of the tile shares one scale, codes are multiplied as they are and the scale is applied to
    the sums; otherwise a weight is code times scale, rounded to the dtype of ``x``.

    Prologue (``PRENORM``): ``x`` are the rows of ``PreNormRows``; sums are multiplied by the norm's factor,
    computed from ``square_sums`` [M, num_sums].
    """
    pid = tl.program_id(0)
    pid_k = tl.program_id(1)
    FORMAT: tl.constexpr = FORM.weights.format
    BITS: tl.constexpr = FORM.weights.bits
    CODEBOOK: tl.constexpr = FORM.weights.codebook
    NATIVE_FP8: tl.constexpr = FORM.weights.native_fp8
    HAS_ZEROS: tl.constexpr = FORM.weights.has_zeros
    HAS_BIAS: tl.constexpr = FORM.has_bias
    SCALE_N: tl.constexpr = FORM.weights.scale_n
    SCALE_K: tl.constexpr = FORM.weights.scale_k
    TWO_LEVEL: tl.constexpr = FORM.weights.two_level
    AFFINE: tl.constexpr = FORM.weights.affine
    SUPER_K: tl.constexpr = FORM.weights.super_k
    SPAN: tl.constexpr = FORM.weights.span if FORM.weights.span < FORM.block_k else FORM.block_k
    ONE_GROUP: tl.constexpr = FORM.one_group
    EVEN: tl.constexpr = FORM.even
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    SLICE_K: tl.constexpr = FORM.slices
    SPLIT_K: tl.constexpr = FORM.splits
    NUM_STAGES: tl.constexpr = FORM.stages
    PACK: tl.constexpr = 8 if BITS == 4 else 4 if FORMAT == "int8" else 1
    K = num_groups * SCALE_K if BITS == 5 or BITS == 6 else code_columns * PACK
    tiles_m = tl.cdiv(M, BLOCK_M)
    # Consecutive programs share weights, which are then read from memory once, whatever the number of rows.
    offs_n = output_offsets(pid // tiles_m, N, BLOCK_N, SWIGLU)
    half_starts = half_tile_starts(pid // tiles_m, N, BLOCK_N, SWIGLU)
    offs_m = (pid % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_begin = pid_k * k_steps * BLOCK_K
    bias_values = load_constants(bias, offs_n, N, HAS_BIAS)
    norm_scale = load_constants(norm_weight, offs_n, N, ADD_RESIDUAL)
    if ONE_GROUP:
        one_scale = load_scales(scales, offs_n, tl.arange(0, 1), N, num_groups, SCALE_N)
    pdl_sync(USE_PDL, not FORM.triggers_late)
    if PRENORM:
        norm_sums = load_square_sums(square_sums, offs_m, M, num_sums, BLOCK_SUMS)
    residual = 0.0
    if ADD_RESIDUAL:
        offs = offs_m[None, :].to(tl.int64) * N + offs_n[:, None]
        mask = (offs_n[:, None] < N) & (offs_m[None, :] < M)
        residual = tl.load(out + offs, mask=mask, other=0.0)
    k_end = tl.minimum(k_begin + k_steps * BLOCK_K, K)
    if SLICE_K > 1:
        acc = tl.zeros((SLICE_K, BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # ``num_stages`` on the loop pipelines the loads of scales too, which would otherwise stall every step.
    for k_start in tl.range(k_begin, k_end, BLOCK_K, num_stages=NUM_STAGES):
        acc += step_dot(
            x,
            codes,
            scales,
            zeros,
            offs_n,
            half_starts,
            offs_m,
            k_start,
            M,
            N,
            K,
            stride_xm,
            num_groups,
            FORMAT,
            BITS,
            CODEBOOK,
            NATIVE_FP8,
            INLINE_PTX,
            HAS_ZEROS,
            SCALE_N,
            SCALE_K,
            TWO_LEVEL,
            AFFINE,
            FORM.weights.scales_in_words,
            SUPER_K,
            SPAN,
            ONE_GROUP,
            EVEN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            SLICE_K,
        )
    pdl_trigger(USE_PDL and FORM.triggers_late)
    if FORMAT == "fp8" and not NATIVE_FP8:
        acc *= 256.0
    if SLICE_K > 1:
        acc = tl.sum(acc, 0)
    if ONE_GROUP:
        acc *= one_scale.to(tl.float32)
    if PRENORM:
        acc *= rms_scale(norm_sums, K, eps)[None, :]
    split_k_epilogue(
        acc,
        bias_values,
        partial,
        counters + pid,
        out,
        norm_scale,
        prenorm_out,
        square_sums + offs_m * (tl.num_programs(0) // tiles_m) + pid // tiles_m,
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


@triton.jit
def step_dot(
    x,
    codes,
    scales,
    zeros,
    offs_n,
    half_starts,
    offs_m,
    k_start,
    M,
    N,
    K,
    stride_xm,
    num_groups,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    AFFINE: tl.constexpr,
    SCALES_IN_WORDS: tl.constexpr,
    SUPER_K: tl.constexpr,
    SPAN: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE_K: tl.constexpr,
):
    """Product of a weight tile and ``x`` over ``BLOCK_K`` inputs from ``k_start`` on.

    Shaped like the result of ``block_dot``. Scales are applied, except with ``ONE_GROUP``. FP8 without
    ``NATIVE_FP8`` gives 2^-8 of the product.
    """
    SLICE_WIDTH: tl.constexpr = BLOCK_K // SLICE_K
    NUM_SPANS: tl.constexpr = BLOCK_K // SPAN
    x_tile = load_x(x, offs_m, M, k_start, K, stride_xm, EVEN, BLOCK_K)
    group = group_indices(k_start, SCALE_K, SPAN, NUM_SPANS)
    if BITS < 8:
        x_tile = permute_x_packed(x_tile, CODEBOOK, BLOCK_M, BLOCK_K)
        w = load_packed(
            codes,
            zeros,
            offs_n,
            k_start,
            group,
            N,
            K,
            num_groups,
            x_tile.dtype,
            BITS,
            CODEBOOK,
            AFFINE,
            HAS_ZEROS,
            True,
            BLOCK_N,
            BLOCK_K,
            NUM_SPANS,
            INLINE_PTX,
        )
    elif FORMAT == "int8":
        x_tile = permute_x_int8(x_tile, BLOCK_M, BLOCK_K)
        w = load_int8(
            codes,
            offs_n,
            k_start,
            N,
            K,
            x_tile.dtype,
            True,
            BLOCK_N,
            BLOCK_K,
            INLINE_PTX,
            EVEN,
        )
    else:
        offs_k = k_start + tl.arange(0, BLOCK_K)
        w = load_fp8(codes, offs_n, offs_k, N, K, NATIVE_FP8, EVEN)
    if ONE_GROUP:
        acc = block_dot(w.to(x_tile.dtype), x_tile, BLOCK_M, BLOCK_N, BLOCK_K, SLICE_K)
    elif SPAN >= SLICE_WIDTH:
        acc = block_dot(w.to(x_tile.dtype), x_tile, BLOCK_M, BLOCK_N, BLOCK_K, SLICE_K)
        slice_group = group_indices(k_start, SCALE_K, SLICE_WIDTH, SLICE_K)
        if TWO_LEVEL:
            w_scale, w_min = load_two_level_scales(
                scales,
                zeros,
                offs_n,
                k_start,
                slice_group,
                N,
                num_groups,
                AFFINE,
                SCALE_K,
                SUPER_K,
                BLOCK_K,
                EVEN,
            )
        elif EVEN and SCALE_N % BLOCK_N == 0:  # loads of a scale for each output would take as long as codes
            half_scale = load_scales(scales, half_starts, slice_group, N, num_groups, SCALE_N, EVEN)
            w_scale = repeat_halves(half_scale.to(tl.float32), BLOCK_N)
        else:
            w_scale = load_scales(scales, offs_n, slice_group, N, num_groups, SCALE_N, EVEN).to(tl.float32)
        if SLICE_K > 1:
            acc *= tl.trans(w_scale)[:, :, None]
        else:
            acc *= w_scale
        if AFFINE:
            x_sum = tl.sum(tl.reshape(x_tile.to(tl.float32), (BLOCK_M, SLICE_K, SLICE_WIDTH)), 2)
            if SLICE_K > 1:
                acc -= tl.trans(w_min)[:, :, None] * tl.trans(x_sum)[:, None, :]
            else:
                acc -= w_min * tl.trans(x_sum)
    else:
        if TWO_LEVEL:
            w_scale, w_min = load_two_level_scales(
                scales,
                zeros,
                offs_n,
                k_start,
                group,
                N,
                num_groups,
                AFFINE,
                SCALE_K,
                SUPER_K,
                BLOCK_K,
                EVEN,
                SCALES_IN_WORDS,
            )
        else:
            w_scale = load_scales(scales, offs_n, group, N, num_groups, SCALE_N, EVEN)
        if AFFINE:
            w_scale = broadcast_spans(w_scale, BITS < 8, BLOCK_N, BLOCK_K, NUM_SPANS)
            w_min = broadcast_spans(w_min, BITS < 8, BLOCK_N, BLOCK_K, NUM_SPANS)
            if INLINE_PTX and w.dtype != tl.float32:
                w_dequant = multiply_subtract(w, w_scale, w_min, BLOCK_N, BLOCK_K)
            else:
                w_dequant = w.to(tl.float32) * w_scale - w_min
        elif w_scale.dtype == w.dtype:
            # If both have the same half precision, their product is rounded only once anyway.
            w_dequant = w * broadcast_spans(w_scale, BITS < 8, BLOCK_N, BLOCK_K, NUM_SPANS)
        elif INLINE_PTX and w.dtype == tl.bfloat16:
            # The scale as a sum of two numbers, so that only the last rounding counts. In float16 the second
            # could be too small a number.
            w_scale = w_scale.to(tl.float32)
            part = w_scale.to(w.dtype)
            rest = (w_scale - part.to(tl.float32)).to(w.dtype)
            part = broadcast_spans(part, BITS < 8, BLOCK_N, BLOCK_K, NUM_SPANS)
            rest = broadcast_spans(rest, BITS < 8, BLOCK_N, BLOCK_K, NUM_SPANS)
            w_dequant = tl.fma(w, part, w * rest)
        else:
            w_scale = broadcast_spans(w_scale.to(tl.float32), BITS < 8, BLOCK_N, BLOCK_K, NUM_SPANS)
            w_dequant = w.to(tl.float32) * w_scale
        acc = block_dot(w_dequant.to(x_tile.dtype), x_tile, BLOCK_M, BLOCK_N, BLOCK_K, SLICE_K)
    return acc


@triton.jit
def repeat_halves(value, BLOCK_N: tl.constexpr):
    """Expand ``value`` [2, n] to [BLOCK_N, n], a row for each half of the tile."""
    expanded = tl.broadcast_to(value[:, None, :], (2, BLOCK_N // 2, value.shape[1]))
    return tl.reshape(expanded, (BLOCK_N, value.shape[1]))
