"""Kernels that dequantize weights: rows of a matrix for torch's GEMM, and rows of a token embedding.

Reference: ``layers/linear.py``. Host side: ``quantized.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.gemm.unpack import (
    broadcast_spans,
    load_fp8,
    load_int8,
    load_packed,
    load_scales,
    load_two_level_scales,
)
from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import pdl_sync


@cache_launches
@triton.jit(do_not_specialize=["first_row", "end_row"])
def dequantize_kernel(
    codes,
    scales,
    zeros,
    out,
    first_row,
    end_row,
    K,
    num_groups,
    FORM: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Dequantize weight rows from ``first_row`` up to ``end_row`` into ``out`` [end_row - first_row, K].

    Grid: (tiles of BLOCK_N rows, blocks of BLOCK_K inputs). See ``dequantize_tile``.
    """
    offs_n = first_row + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_start = tl.program_id(1) * BLOCK_K
    offs_k = k_start + tl.arange(0, BLOCK_K)
    dequantized = dequantize_tile(
        codes,
        scales,
        zeros,
        offs_n,
        k_start,
        end_row,
        K,
        num_groups,
        out.dtype.element_ty,
        FORM,
        INLINE_PTX,
        BLOCK_N,
        BLOCK_K,
    )
    mask = (offs_n[:, None] < end_row) & (offs_k[None, :] < K)
    offs = (offs_n - first_row)[:, None].to(tl.int64) * K + offs_k[None, :]
    tl.store(out + offs, dequantized, mask=mask)


@cache_launches
@triton.jit
def lookup_kernel(
    token_ids,
    codes,
    scales,
    zeros,
    out,
    N,
    K,
    num_groups,
    FORM: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Dequantize the weight rows ``token_ids`` [rows] of N into ``out`` [rows, K], as ``dequantize_kernel``.

    Grid: (rows, blocks of BLOCK_K inputs).
    """
    pdl_sync(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.load(token_ids + row).to(tl.int64) + tl.arange(0, 1)
    k_start = tl.program_id(1) * BLOCK_K
    offs_k = k_start + tl.arange(0, BLOCK_K)
    dequantized = dequantize_tile(
        codes,
        scales,
        zeros,
        offs_n,
        k_start,
        N,
        K,
        num_groups,
        out.dtype.element_ty,
        FORM,
        INLINE_PTX,
        1,
        BLOCK_K,
    )
    tl.store(out + row * K + offs_k[None, :], dequantized, mask=offs_k[None, :] < K)


@triton.jit
def dequantize_tile(
    codes,
    scales,
    zeros,
    offs_n,
    k_start,
    N,
    K,
    num_groups,
    dtype: tl.constexpr,
    FORM: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The weights of rows ``offs_n`` [BLOCK_N] from input ``k_start`` on, [BLOCK_N, BLOCK_K] as ``dtype``.

    Code times scale in float32, rounded once: bit-equal to ``dequantize_fp8``, ``_int8`` and ``_packed`` of
    ``layers/linear.py``. Weights as in ``quantized_kernels.quantized_matmul_kernel``; ``FORM``: their
    ``WeightForm``; rows are below N.
    """
    BITS: tl.constexpr = FORM.bits
    CODEBOOK: tl.constexpr = FORM.codebook  # Triton 3.6 does not take strings of a record as arguments
    AFFINE: tl.constexpr = FORM.affine
    SCALE_K: tl.constexpr = FORM.scale_k
    SPAN: tl.constexpr = FORM.span
    NUM_SPANS: tl.constexpr = BLOCK_K // SPAN
    group = (k_start + tl.arange(0, NUM_SPANS) * SPAN) // SCALE_K
    if BITS < 8:
        w = load_packed(
            codes,
            zeros,
            offs_n,
            k_start,
            group,
            N,
            K,
            num_groups,
            dtype,
            BITS,
            CODEBOOK,
            AFFINE,
            FORM.has_zeros,
            False,
            BLOCK_N,
            BLOCK_K,
            NUM_SPANS,
            INLINE_PTX,
        )
    elif FORM.format == "int8":
        w = load_int8(codes, offs_n, k_start, N, K, dtype, False, BLOCK_N, BLOCK_K)
    else:
        w = load_fp8(codes, offs_n, k_start + tl.arange(0, BLOCK_K), N, K, FORM.native_fp8)
    if FORM.two_level:
        w_scale, w_min = load_two_level_scales(
            scales, zeros, offs_n, k_start, group, N, num_groups, AFFINE, SCALE_K, FORM.super_k, BLOCK_K
        )
    else:
        w_scale = load_scales(scales, offs_n, group, N, num_groups, FORM.scale_n).to(tl.float32)
    if FORM.format == "fp8" and not FORM.native_fp8:
        w_scale *= 256.0
    dequantized = w.to(tl.float32) * broadcast_spans(w_scale, False, BLOCK_N, BLOCK_K, NUM_SPANS)
    if AFFINE:
        dequantized -= broadcast_spans(w_min, False, BLOCK_N, BLOCK_K, NUM_SPANS)
    return dequantized.to(dtype)
