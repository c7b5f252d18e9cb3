"""Loading and unpacking tiles of quantized weights: FP8, int8 and packed codes, zero points and scales.

Out-of-bounds codes read as some finite number; the matching inputs are 0. ``EVEN``: tiles divide N and K, so
no bounds are checked.
"""

import struct

import triton
import triton.language as tl

from vlfit.checkpoint.quantization import CODEBOOKS
from vlfit.kernels.primitives import split_halves


def _lookup_ptx(values: tuple[int, ...], *, bfloat16: bool) -> str:
    """PTX that turns a word of eight codes into four pairs of ``values`` in 16 bits, in order.

    prmt takes bytes of two registers by four-bit indices, of which it uses the upper bit otherwise: so with
    the lower three bits of each code from both halves of the codebook, and then from these by the fourth bit.
    """
    halves = [struct.pack("<f", each)[2:] if bfloat16 else struct.pack("<e", each) for each in values]
    low, high = (
        [int.from_bytes(bytes(half[byte] for half in halves[i : i + 4]), "little") for i in range(0, 16, 4)]
        for byte in (0, 1)
    )
    lines = ["{ .reg .b32 s, t, m, n, a, b, l0, h0, l1, h1;"]
    lines += ["and.b32 s, $4, 0x77777777;", "shr.u32 t, s, 16;", "shr.u32 m, $4, 1;"]
    lines += ["lop3.b32 m, m, 0x44444444, 0x32103210, 0xEA;", "shr.u32 n, m, 16;"]
    for found, table, codes, fourth in (
        *(("l0", low, "s", "m"), ("h0", high, "s", "m")),
        *(("l1", low, "t", "n"), ("h1", high, "t", "n")),
    ):
        lines.append(f"prmt.b32 a, {table[0]}, {table[1]}, {codes};")
        lines.append(f"prmt.b32 b, {table[2]}, {table[3]}, {codes};")
        lines.append(f"prmt.b32 {found}, a, b, {fourth};")
    for pair in range(4):
        half = pair // 2
        lines.append(f"prmt.b32 ${pair}, l{half}, h{half}, {'0x7362' if pair % 2 else '0x5140'};")
    return " ".join([*lines, "}"])


_IQ4NL, _E2M1 = (tl.constexpr(CODEBOOKS[name]) for name in ("iq4nl", "e2m1"))
_IQ4NL_BFLOAT16, _E2M1_BFLOAT16 = (
    tl.constexpr(_lookup_ptx(CODEBOOKS[name], bfloat16=True)) for name in ("iq4nl", "e2m1")
)
_IQ4NL_FLOAT16, _E2M1_FLOAT16 = (
    tl.constexpr(_lookup_ptx(CODEBOOKS[name], bfloat16=False)) for name in ("iq4nl", "e2m1")
)


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
def load_packed(
    codes,
    zeros,
    offs_n,
    k_start,
    group,
    N,
    K,
    num_groups,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPANS: tl.constexpr,
    INLINE_PTX: tl.constexpr = False,
):
    """Tile of packed ``codes`` of ``BITS`` from input ``k_start`` on, minus zero points, as ``dtype``.

    Returns [BLOCK_N, BLOCK_K] for the outputs ``offs_n`` [BLOCK_N]; scales are not applied. The block of K
    is cut into ``NUM_SPANS`` spans, and span i has the zero points of group ``group[i]`` in ``zeros`` [N /
    8, num_groups]; without ``HAS_ZEROS`` the zero point is the middle code, with ``AFFINE`` 0. With a
    ``CODEBOOK`` ("" is none) codes are what they stand for there. ``PERMUTED``: in the input order of
    ``permute_x_packed``. ``INLINE_PTX``: see ``magic_halves``.
    """
    if CODEBOOK != "" and CODEBOOK != "odd":
        return load_codebook(
            codes, offs_n, k_start, N, K, dtype, CODEBOOK, PERMUTED, BLOCK_N, BLOCK_K, INLINE_PTX, False
        )
    marked = load_packed_magic(
        codes, offs_n, k_start, N, K, dtype, BITS, PERMUTED, BLOCK_N, BLOCK_K, INLINE_PTX, False
    )
    mark: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 8388608.0
    if HAS_ZEROS:
        zero = load_zeros(zeros, offs_n, group, N, num_groups) + mark
        return marked - broadcast_spans(zero.to(dtype), PERMUTED, BLOCK_N, BLOCK_K, NUM_SPANS)
    if CODEBOOK == "odd":
        return (marked - mark) * 2.0 - 15.0
    MIDDLE: tl.constexpr = 0 if AFFINE else 1 << (BITS - 1)
    return marked - (mark + MIDDLE)


@triton.jit
def load_zeros(zeros, offs_n, group, N, num_groups):
    """Zero points of outputs ``offs_n`` in the groups ``group`` [n]: [BLOCK_N, n] float32, 0 out of bounds.

    ``zeros`` [N / 8, num_groups] int32: eight outputs to a word, the first in its lowest bits.
    """
    mask = (offs_n[:, None] < N) & (group[None, :] < num_groups)
    packed = tl.load(zeros + (offs_n[:, None] // 8) * num_groups + group[None, :], mask=mask, other=0)
    return ((packed >> ((offs_n[:, None] % 8) * 4)) & 15).to(tl.float32)


@triton.jit
def load_packed_magic(
    codes,
    offs_n,
    k_start,
    N,
    K,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tile of packed ``codes`` of ``BITS`` from input ``k_start`` on, plus a magic number, as ``dtype``.

    [BLOCK_N, BLOCK_K]; ``PERMUTED``: in the input order of ``permute_x_packed``. ``codes``: [N, K / 8] int32
    words of eight codes; of 5 and 6 bits as from ``layers/linear.py``, ``pack_codes``.

    Codes are converted without conversion instructions: OR-ed into the lowest mantissa bits of 128
    (bfloat16), 1024 (float16) or 2^23 (float32), where a code counts units. Two codes that are 16 bits apart
    in a word share a register, so two weights cost one instruction and part of a shift. ``INLINE_PTX``: see
    ``magic_halves``.
    """
    WORDS: tl.constexpr = BLOCK_K // 8
    LOW: tl.constexpr = BITS - 4  # lowest bits of a code, which lie apart
    offs_word = k_start // 8 + tl.arange(0, WORDS)
    mask = (offs_n[:, None] < N) & (offs_word[None, :] < K // 8)
    if LOW == 0:
        packed = load_codes(codes, offs_n, offs_word, K // 8, mask, EVEN)
        shifted = tl.join(packed, packed >> 4)
        marked = magic_halves(tl.join(shifted, shifted >> 8), 0x000F000F, dtype, INLINE_PTX)
    else:
        # Four words of lowest bits are for RUNS times four words of upper bits. Only views and elementwise
        # operations follow the loads, so that Triton loads both in the layout of the dot product's operand.
        RUNS: tl.constexpr = 4 // LOW
        TILE_RUNS: tl.constexpr = RUNS if WORDS >= 4 * RUNS else WORDS // 4
        LOW_WORDS: tl.constexpr = WORDS // TILE_RUNS
        row_words = (K // 32 + tl.cdiv(K, 32 * RUNS)) * 4
        packed = load_codes(codes, offs_n, offs_word, row_words, mask, EVEN)
        offs_low = K // 32 * 4 + k_start // (32 * RUNS) * 4 + tl.arange(0, LOW_WORDS)
        low_mask = (offs_n[:, None] < N) & (offs_low[None, :] < row_words)
        low = load_codes(codes, offs_n, offs_low, row_words, low_mask, EVEN)
        if TILE_RUNS < RUNS:
            low = low >> (k_start // 32 % RUNS * 4 * LOW)
        if TILE_RUNS == 4:
            low = tl.join(low, low >> 8)
            low = tl.join(low, low >> 4)
        elif TILE_RUNS == 2:
            low = tl.join(low, low >> 4 * LOW)
        low = tl.reshape(low, (BLOCK_N, LOW_WORDS // 4, 4, TILE_RUNS))
        low = tl.reshape(tl.permute(low, (0, 1, 3, 2)), (BLOCK_N, WORDS))
        upper = tl.join(packed << LOW, packed >> (4 - LOW))
        upper = tl.join(upper, upper >> 8)
        low = tl.join(low, low >> LOW)
        low = tl.join(low, low >> 2 * LOW)
        marked = magic_sums(upper, low, LOW, dtype, INLINE_PTX)
    # [BLOCK_N, words, 2, 2, 2]: the last three are the bits of a code's index in its word, lowest first.
    if PERMUTED:
        marked = tl.reshape(marked, (BLOCK_N, BLOCK_K // 32, 4, 2, 2, 2))
        marked = tl.permute(marked, (0, 1, 4, 2, 3, 5))
    else:
        marked = tl.permute(marked, (0, 1, 4, 3, 2))
    return tl.reshape(marked, (BLOCK_N, BLOCK_K))


@triton.jit
def look_up(code, CODEBOOK: tl.constexpr):
    """The integers, int32, that ``code`` (0 to 15) stands for in ``CODEBOOK``: plain, for the interpreter."""
    value = tl.zeros_like(code)
    for index in tl.static_range(16):
        stands_for: tl.constexpr = _IQ4NL[index] if CODEBOOK == "iq4nl" else _E2M1[index]
        value = tl.where(code == index, stands_for, value)
    return value


@triton.jit
def load_codebook(
    codes,
    offs_n,
    k_start,
    N,
    K,
    dtype: tl.constexpr,
    CODEBOOK: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tile of 4-bit ``codes`` [N, K / 8] int32 from input ``k_start`` on, looked up: iq4nl or e2m1.

    [BLOCK_N, BLOCK_K] integers as ``dtype``; ``PERMUTED``: in the input order of ``permute_x_packed``.

    ``INLINE_PTX``: with prmt, which selects bytes of two registers by four-bit indices. A codebook in 16 bits
    is four registers of low bytes and four of high ones; of eight codes each half takes three instructions
    for the low bytes, three for the high ones, and two that bring them together.
    """
    offs_word = k_start // 8 + tl.arange(0, BLOCK_K // 8)
    mask = (offs_n[:, None] < N) & (offs_word[None, :] < K // 8)
    packed = load_codes(codes, offs_n, offs_word, K // 8, mask, EVEN)
    if INLINE_PTX:
        half: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
        if CODEBOOK == "iq4nl":
            PTX: tl.constexpr = _IQ4NL_FLOAT16 if half == tl.float16 else _IQ4NL_BFLOAT16
        else:
            PTX: tl.constexpr = _E2M1_FLOAT16 if half == tl.float16 else _E2M1_BFLOAT16
        first, second, third, fourth = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r", [packed], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        low = (pairs & 0xFFFF).to(tl.uint16).to(half, bitcast=True).to(dtype)
        high = ((pairs >> 16) & 0xFFFF).to(tl.uint16).to(half, bitcast=True).to(dtype)
    else:
        pairs = tl.join(tl.join(packed, packed >> 16), tl.join(packed >> 8, packed >> 24))
        low = look_up(pairs & 15, CODEBOOK).to(dtype)
        high = look_up((pairs >> 4) & 15, CODEBOOK).to(dtype)
    # [BLOCK_N, words, 2, 2, 2]: the last three are the bits of a code's index in its word, highest first.
    value = tl.join(low, high)
    if PERMUTED:
        value = tl.reshape(value, (BLOCK_N, BLOCK_K // 32, 4, 2, 2, 2))
        value = tl.permute(value, (0, 1, 3, 2, 4, 5))
    return tl.reshape(value, (BLOCK_N, BLOCK_K))


@triton.jit
def magic_sums(upper, low, LOW: tl.constexpr, dtype: tl.constexpr, INLINE_PTX: tl.constexpr):
    """``magic_halves`` of codes whose lowest ``LOW`` bits are in ``low`` and the four above in ``upper``."""
    UPPER: tl.constexpr = 0x003C003C if LOW == 2 else 0x001E001E
    LOWEST: tl.constexpr = 0x00030003 if LOW == 2 else 0x00010001
    if INLINE_PTX and dtype != tl.float32:
        MAGIC: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        marked = tl.inline_asm_elementwise(
            "{ .reg .b32 u; lop3.b32 u, $1, $3, $5, 0xEA; lop3.b32 $0, $2, $4, u, 0xEA; }",
            "=r,r,r,r,r,r",
            [upper, low, UPPER, LOWEST, MAGIC],
            tl.int32,
            is_pure=True,
            pack=1,
        )
        first = (marked & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        second = ((marked >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        return tl.join(first, second)
    return magic_halves((upper & UPPER) | (low & LOWEST), UPPER | LOWEST, dtype, False)


@triton.jit
def magic_halves(word, MASK: tl.constexpr, dtype: tl.constexpr, INLINE_PTX: tl.constexpr):
    """Bits ``MASK`` of both 16-bit halves of ``word``, OR-ed into the mantissa of a magic number.

    Returns [..., 2] as ``dtype``, the low half first; for the magic numbers see ``load_packed_magic``.
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

    Converted without conversion instructions, as in ``load_packed_magic``: a signed byte is its low seven
    bits minus 128 if the sign bit is set, and both parts are OR-ed into the same magic number. Two bytes that
    are 16 bits apart in a word share a register, so two weights cost three instructions and part of a shift.
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
def permute_x_packed(rows, CODEBOOK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """``rows`` [BLOCK_M, BLOCK_K] in the input order of ``load_packed(PERMUTED=True)``.

    A dot product may sum its inputs in any order that both operands share. This one matches the register
    layout of tensor cores: a thread holds all codes of a word, so no weight moves between threads. Of 32
    inputs, word t's code 4c + 2a + b is at 16a + 4t + 2b + c; of ``load_codebook`` code 4a + 2b + c.
    """
    parts = tl.reshape(rows, (BLOCK_M, BLOCK_K // 32, 4, 2, 2, 2))
    if CODEBOOK != "" and CODEBOOK != "odd":
        parts = tl.permute(parts, (0, 1, 3, 2, 4, 5))
    else:
        parts = tl.permute(parts, (0, 1, 4, 2, 5, 3))
    return tl.reshape(parts, (BLOCK_M, BLOCK_K))


@triton.jit
def broadcast_spans(
    value,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPANS: tl.constexpr,
):
    """Expand ``value`` [BLOCK_N, NUM_SPANS] to all inputs: [BLOCK_N, BLOCK_K].

    ``PERMUTED``: in the order of ``permute_x_packed``; a span is then a multiple of 8 inputs (one word).
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
