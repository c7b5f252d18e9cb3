"""Loading and unpacking tiles of quantized weights: FP8, int8 and int4 codes, zero points and scales.

Out-of-bounds codes read as some finite number; the matching inputs are 0. ``EVEN``: tiles divide N and K, so
no bounds are checked.
"""

import triton
import triton.language as tl

from vlfit.kernels.primitives import split_halves


@triton.jit
def load_fp8(
    codes,
    offs_n,
    offs_k,
    N,
    K,
    NATIVE_FP8: tl.constexpr,
    EVEN: tl.constexpr = False,
):
    """Tile [BLOCK_N, BLOCK_K] of e4m3 ``codes`` [N, K] as float16; 2^-8 of the value without ``NATIVE_FP8``.

    Compute capability 8.9 and later converts FP8 in hardware. Elsewhere sign, exponent and mantissa are
    shifted to where float16 has them. As float16's exponent bias is 15 and e4m3's 7, the result is exactly
    2^-8 of the value, subnormals included. NaN, which no valid checkpoint holds, reads as 480.
    """
    mask = (offs_n[:, None] < N) & (offs_k[None, :] < K)
    code = load_codes(codes, offs_n, offs_k, K, mask, EVEN)
    if NATIVE_FP8:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = code.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def load_codes(codes, offs_n, offs_col, row_stride, mask, EVEN: tl.constexpr):
    """Elements of ``codes`` [N, row_stride] at rows ``offs_n`` and columns ``offs_col``.

    0 where not ``mask``, which is ignored if ``EVEN``. Weights are read once, so the loads hint that the
    cache need not keep them.
    """
    offs = offs_n[:, None].to(tl.int64) * row_stride + offs_col[None, :]
    if EVEN:
        loaded = tl.load(codes + offs, eviction_policy="evict_first")
    else:
        loaded = tl.load(codes + offs, mask=mask, other=0, eviction_policy="evict_first")
    return loaded


@triton.jit
def load_int4(
    codes,
    zeros,
    offs_n,
    k_start,
    group,
    N,
    K,
    num_groups,
    dtype: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPANS: tl.constexpr,
    INLINE_PTX: tl.constexpr = False,
    ZERO: tl.constexpr = 8,
):
    """Tile of int4 ``codes`` [N, K / 8] int32 from input ``k_start`` on, minus zero points, as ``dtype``.

    Returns [BLOCK_N, BLOCK_K] for the outputs ``offs_n`` [BLOCK_N]; scales are not applied. The block of K
    is cut into ``NUM_SPANS`` spans, and span i has the zero points of group ``group[i]`` in ``zeros`` [N /
    8, num_groups]; without ``HAS_ZEROS`` every zero point is ``ZERO``. ``PERMUTED``: in the input order of
    ``permute_x_int4``. ``INLINE_PTX``: see ``magic_halves``.
    """
    marked = load_int4_magic(
        codes,
        offs_n,
        k_start,
        N,
        K,
        dtype,
        PERMUTED,
        BLOCK_N,
        BLOCK_K,
        INLINE_PTX,
        False,
    )
    mark: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 8388608.0
    if HAS_ZEROS:
        zero = load_zeros(zeros, offs_n, group, N, num_groups) + mark
        return marked - broadcast_spans(zero.to(dtype), PERMUTED, BLOCK_N, BLOCK_K, NUM_SPANS)
    return marked - (mark + ZERO)


@triton.jit
def load_zeros(zeros, offs_n, group, N, num_groups):
    """Zero points of outputs ``offs_n`` in the groups ``group`` [n]: [BLOCK_N, n] float32, 0 out of bounds.

    ``zeros`` [N / 8, num_groups] int32: eight outputs to a word, the first in its lowest bits.
    """
    mask = (offs_n[:, None] < N) & (group[None, :] < num_groups)
    packed = tl.load(zeros + (offs_n[:, None] // 8) * num_groups + group[None, :], mask=mask, other=0)
    return ((packed >> ((offs_n[:, None] % 8) * 4)) & 15).to(tl.float32)


@triton.jit
def load_int4_magic(
    codes,
    offs_n,
    k_start,
    N,
    K,
    dtype: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tile of int4 ``codes`` [N, K / 8] int32 from input ``k_start`` on, plus a magic number, as ``dtype``.

    [BLOCK_N, BLOCK_K]; ``PERMUTED``: in the input order of ``permute_x_int4``.

    Codes are converted without conversion instructions: OR-ed into the lowest mantissa bits of 128
    (bfloat16), 1024 (float16) or 2^23 (float32), where a code counts units. Two codes that are 16 bits apart
    in a word share a register, so two weights cost one instruction and part of a shift. ``INLINE_PTX``: see
    ``magic_halves``.
    """
    offs_word = k_start // 8 + tl.arange(0, BLOCK_K // 8)
    mask = (offs_n[:, None] < N) & (offs_word[None, :] < K // 8)
    packed = load_codes(codes, offs_n, offs_word, K // 8, mask, EVEN)
    shifted = tl.join(packed, packed >> 4)
    marked = magic_halves(tl.join(shifted, shifted >> 8), 0x000F000F, dtype, INLINE_PTX)
    # [BLOCK_N, words, 2, 2, 2]: the last three are the bits of a code's index in its word, lowest first.
    if PERMUTED:
        marked = tl.reshape(marked, (BLOCK_N, BLOCK_K // 32, 4, 2, 2, 2))
        marked = tl.permute(marked, (0, 1, 4, 2, 3, 5))
    else:
        marked = tl.permute(marked, (0, 1, 4, 3, 2))
    return tl.reshape(marked, (BLOCK_N, BLOCK_K))


@triton.jit
def magic_halves(word, MASK: tl.constexpr, dtype: tl.constexpr, INLINE_PTX: tl.constexpr):
    """Bits ``MASK`` of both 16-bit halves of ``word``, OR-ed into the mantissa of a magic number.

    Returns [..., 2] as ``dtype``, the low half first; for the magic numbers see ``load_int4_magic``.
    ``INLINE_PTX`` uses lop3, PTX's three-input logic instruction; the assembler makes two of it, as both
    constants do not fit into one.
    """
    if dtype == tl.float32:
        low = ((word & MASK & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = (((word & MASK) >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
    else:
        MAGIC: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        if INLINE_PTX:
            marked = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, $2, $3, 0xEA;",
                "=r,r,r,r",
                [word, MASK, MAGIC],
                tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            marked = (word & MASK) | MAGIC
        low = (marked & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = ((marked >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def load_int8(
    codes,
    offs_n,
    k_start,
    N,
    K,
    dtype: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INLINE_PTX: tl.constexpr = False,
    EVEN: tl.constexpr = False,
):
    """Tile of int8 ``codes`` [N, K / 4] int32, four to a word, from input ``k_start`` on, as ``dtype``.

    [BLOCK_N, BLOCK_K]; ``PERMUTED``: in the input order of ``permute_x_int8``.

    Converted without conversion instructions, as in ``load_int4_magic``: a signed byte is its low seven bits
    minus 128 if the sign bit is set, and both parts are OR-ed into the same magic number. Two bytes that are
    16 bits apart in a word share a register, so two weights cost three instructions and part of a shift.
    """
    offs_word = k_start // 4 + tl.arange(0, BLOCK_K // 4)
    mask = (offs_n[:, None] < N) & (offs_word[None, :] < K // 4)
    packed = load_codes(codes, offs_n, offs_word, K // 4, mask, EVEN)
    pairs = tl.join(packed, packed >> 8)  # bytes 0 and 2, and bytes 1 and 3
    value = magic_halves(pairs, 0x007F007F, dtype, INLINE_PTX) - magic_halves(
        pairs, 0x00800080, dtype, INLINE_PTX
    )
    # [BLOCK_N, words, 2, 2]: the last two are the bits of a byte's index in its word, lowest first.
    if not PERMUTED:
        value = tl.permute(value, (0, 1, 3, 2))
    return tl.reshape(value, (BLOCK_N, BLOCK_K))


@triton.jit
def permute_x_int8(rows, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """``rows`` [BLOCK_M, BLOCK_K] in the input order of ``load_int8(PERMUTED=True)``.

    That is 0, 2, 1, 3 in each four neighbouring inputs.
    """
    parts = tl.reshape(rows, (BLOCK_M, BLOCK_K // 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2)), (BLOCK_M, BLOCK_K))


@triton.jit
def permute_x_int4(rows, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """``rows`` [BLOCK_M, BLOCK_K] in the input order of ``load_int4(PERMUTED=True)``.

    A dot product may sum its inputs in any order that both operands share. This one matches the register
    layout of tensor cores: a thread holds all codes of a word, so no weight moves between threads. Of 32
    inputs, word t's code 4c + 2a + b is at 16a + 4t + 2b + c.
    """
    parts = tl.reshape(rows, (BLOCK_M, BLOCK_K // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 4, 2, 5, 3)), (BLOCK_M, BLOCK_K))


@triton.jit
def broadcast_spans(
    value,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPANS: tl.constexpr,
):
    """Expand ``value`` [BLOCK_N, NUM_SPANS] to all inputs: [BLOCK_N, BLOCK_K].

    ``PERMUTED``: in the order of ``permute_x_int4``; a span is then a multiple of 8 inputs (one word).
    """
    if PERMUTED:
        WORDS_PER_SPAN: tl.constexpr = BLOCK_K // NUM_SPANS // 8
        word = tl.broadcast_to(value[:, :, None], (BLOCK_N, NUM_SPANS, WORDS_PER_SPAN))
        word = tl.reshape(word, (BLOCK_N, BLOCK_K // 32, 4))
        expanded = tl.broadcast_to(word[:, :, None, :, None, None], (BLOCK_N, BLOCK_K // 32, 2, 4, 2, 2))
    else:
        expanded = tl.broadcast_to(value[:, :, None], (BLOCK_N, NUM_SPANS, BLOCK_K // NUM_SPANS))
    return tl.reshape(expanded, (BLOCK_N, BLOCK_K))


@triton.jit
def group_indices(k_start, SCALE_K: tl.constexpr, SPAN: tl.constexpr, NUM_SPANS: tl.constexpr):
    """Scale group (of ``SCALE_K`` inputs) of each span (of ``SPAN``) from ``k_start`` on: [NUM_SPANS]."""
    lane = tl.arange(0, NUM_SPANS)
    # With one group per span the compiler sees that indices are consecutive and vectorizes the loads.
    return k_start // SPAN + lane if SCALE_K == SPAN else (k_start + lane * SPAN) // SCALE_K


@triton.jit
def load_scales(
    scales,
    offs_n,
    group,
    N,
    num_groups,
    SCALE_N: tl.constexpr,
    EVEN: tl.constexpr = False,
):
    """Scales of outputs ``offs_n`` in the groups ``group`` [n]: [BLOCK_N, n], 0 out of bounds.

    ``scales`` [N / SCALE_N, num_groups]. ``EVEN``: bounds are not checked.
    """
    offs = (offs_n[:, None] // SCALE_N) * num_groups + group[None, :]
    if EVEN:
        return tl.load(scales + offs)
    mask = (offs_n[:, None] < N) & (group[None, :] < num_groups)
    return tl.load(scales + offs, mask=mask, other=0)


@triton.jit
def load_two_level_scales(
    scales,
    supers,
    offs_n,
    k_start,
    group,
    N,
    num_groups,
    AFFINE: tl.constexpr,
    SCALE_K: tl.constexpr,
    SUPER_K: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr = False,
):
    """Scales and minima of outputs ``offs_n`` in the groups ``group`` [n]: [BLOCK_N, n] float32 each.

    A weight is code * scale - minimum; minima are 0 without ``AFFINE``. The groups (of ``SCALE_K`` inputs)
    lie within ``WIDTH`` inputs from ``k_start`` on. ``scales`` [N, num_groups] and ``supers`` [N, K /
    SUPER_K]: see ``quantized.QuantizedWeight``. ``EVEN``: bounds are not checked.
    """
    sub = load_scales(scales, offs_n, group, N, num_groups, 1, EVEN)
    ONE_BLOCK: tl.constexpr = SUPER_K % WIDTH == 0
    block = k_start // SUPER_K + tl.arange(0, 1) if ONE_BLOCK else group * SCALE_K // SUPER_K
    word = load_scales(supers, offs_n, block, N, num_groups * SCALE_K // SUPER_K, 1, EVEN)
    if AFFINE:
        scale, minimum = split_halves(word)
        scale = scale * (sub & 0xFF).to(tl.float32)
        minimum = minimum * ((sub >> 8) & 0xFF).to(tl.float32)
    else:
        scale = word.to(tl.float32) * sub.to(tl.float32)
        minimum = tl.zeros_like(scale)
    return scale, minimum
