"""Loading and unpacking tiles of quantized weights: FP8, int8 and packed codes, zero points and scales.

Out-of-bounds codes read as some finite number; the matching inputs are 0. ``EVEN``: tiles divide N and K, so
no bounds are checked.
"""

import struct

import triton
import triton.language as tl

from vlfit.checkpoint.quantization import CODEBOOKS
from vlfit.kernels.primitives import split_halves


def _half_bits(value: float, *, bfloat16: bool) -> int:
    """The 16 bits of ``value``. Raises ``ValueError`` if bfloat16 has no such number."""
    bits = struct.pack("<f", value) if bfloat16 else struct.pack("<e", value)
    if bfloat16 and any(bits[:2]):
        raise ValueError(f"{value} is no number in bfloat16")
    return int.from_bytes(bits[-2:], "little")


def _pair(value: float, *, bfloat16: bool) -> str:
    """``value`` in both halves of a word, for PTX."""
    return f"0x{_half_bits(value, bfloat16=bfloat16) * 0x10001:08X}"


def _words(values: bytes) -> list[str]:
    """Words of four of the bytes ``values`` each, the first in the lowest bits, for PTX."""
    return [f"0x{word:08X}" for (word,) in struct.iter_unpack("<I", values)]


def _have_equal_upper_bytes(values: tuple[int, ...]) -> bool:
    """Whether ``values`` are whole numbers of eight bits, and the upper bytes in bfloat16 equal in pairs."""
    upper = [struct.pack("<f", value)[3] for value in values]
    return upper[::2] == upper[1::2] and all(abs(value) < 256 for value in values)


def _lookup_ptx(values: tuple[int, ...], *, bfloat16: bool) -> str:
    """PTX that turns a word of eight codes into four pairs of the 16 ``values`` in 16 bits, in order.

    prmt takes four bytes of two registers by the lower three bits of four indices. So the upper three bits of
    each code select one of eight lower bytes, of the values of even codes and of those of odd ones, and the
    lowest bit one of both. A number is added to all values and subtracted at last, so that the upper bytes
    take one prmt, or none: in float16 one that makes the least of them 1,024, with which upper bytes are
    equal; in bfloat16 one with which those of an even code and of the next are.

    ``zero`` is 0, which the assembler does not know: it would keep constants in uniform registers, which
    prmt does not take, and copy them each time.
    """
    if bfloat16:
        added = next(n for n in range(256) if _have_equal_upper_bytes(tuple(value + n for value in values)))
    else:
        added = 1024 - min(values)
    halves = [_half_bits(value + added, bfloat16=bfloat16) for value in values]
    lower, upper = bytes(half & 0xFF for half in halves), bytes(half >> 8 for half in halves)
    even, odd, high = _words(lower[::2]), _words(lower[1::2]), _words(upper[::2])
    lines = ["{ .reg .b32 zero, even, odd, high, less, one, t, m, t2, m2, a, b, l, h;"]
    lines += ["mov.u32 zero, %lanemask_lt;", "mov.u32 t, %lanemask_gt;", "and.b32 zero, zero, t;"]
    lines += [f"xor.b32 even, zero, {even[0]};", f"xor.b32 odd, zero, {odd[0]};"]
    lines += [f"xor.b32 high, zero, {high[0]};"]
    lines += [
        f"mov.b32 one, {_pair(1, bfloat16=bfloat16)};",
        f"mov.b32 less, {_pair(-added, bfloat16=bfloat16)};",
    ]
    lines += ["shr.u32 t, $4, 1;", "and.b32 t, t, 0x77777777;", "shl.b32 m, $4, 2;"]
    lines += ["lop3.b32 m, m, 0x44444444, 0x32103210, 0xEA;", "shr.u32 t2, t, 16;", "shr.u32 m2, m, 16;"]
    for pair, top, lowest in ((0, "t", "m"), (2, "t2", "m2")):
        lines += [f"prmt.b32 a, even, {even[1]}, {top};", f"prmt.b32 b, odd, {odd[1]}, {top};"]
        lines += [f"prmt.b32 l, a, b, {lowest};"]
        lines += ["mov.b32 h, high;" if len(set(upper)) == 1 else f"prmt.b32 h, high, {high[1]}, {top};"]
        for number, joined in ((pair, "0x5140"), (pair + 1, "0x7362")):
            lines += [f"prmt.b32 a, l, h, {joined};"]
            lines += [f"fma.rn.{'bf16x2' if bfloat16 else 'f16x2'} ${number}, a, one, less;"]
    return " ".join([*lines, "}"])


def _e2m1_ptx(*, bfloat16: bool) -> str:
    """PTX that turns a word of eight e2m1 codes into pairs of twice their values, four bits apart.

    Pair i holds codes i and i + 4. A code's sign is moved to bit 15, and its exponent and mantissa to where
    the lowest bits of an exponent and the highest of a mantissa are in 16 bits. That is a known fraction of
    the value, also of the subnormal 0.5, and is multiplied. In bfloat16 one multiplication moves both parts.
    """
    shift, factor = (6, 2.0**127) if bfloat16 else (9, 2.0**15)
    fields = (7 << shift) * 0x10001  # exponent and mantissa in both halves
    lines = ["{ .reg .b32 w, a, b, factor, none;", f"mov.b32 factor, {_pair(factor, bfloat16=bfloat16)};"]
    lines += [f"mov.b32 none, {_pair(-0.0, bfloat16=bfloat16)};", "shr.u32 w, $4, 8;"]
    for pair in range(4):
        word, low = "w" if pair >= 2 else "$4", pair % 2 * 4
        if bfloat16:
            lines += [f"and.b32 a, {word}, 0x{0x000F000F << low:08X};"]
            lines += [
                f"mul.lo.u32 a, a, {(1 << 12 - low) + (1 << shift - low)};",
                f"and.b32 a, a, 0x{fields | 0x80008000:08X};",
            ]
        else:
            lines += [f"shl.b32 a, {word}, {shift - low};", f"shl.b32 b, {word}, {12 - low};"]
            lines += [f"and.b32 a, a, 0x{fields:08X};", "lop3.b32 a, b, 0x80008000, a, 0xEA;"]
        lines += [f"fma.rn.{'bf16x2' if bfloat16 else 'f16x2'} ${pair}, a, factor, none;"]
    return " ".join([*lines, "}"])


_SIGNED_BFLOAT16, _SIGNED_FLOAT16 = (
    tl.constexpr(
        "{ .reg .b32 a, b, less; "
        f"mov.b32 less, {_pair(-1, bfloat16=bfloat16)}; "
        f"lop3.b32 a, $1, 0x007F007F, {_pair(magic, bfloat16=bfloat16)}, 0xEA; "
        f"lop3.b32 b, $1, 0x00800080, {_pair(magic, bfloat16=bfloat16)}, 0xEA; "
        f"fma.rn.{'bf16x2' if bfloat16 else 'f16x2'} $0, b, less, a; }}"
    )
    for magic, bfloat16 in ((128, True), (1024, False))
)
_MULTIPLY_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 p, a, b; mov.b32 p, {$1, $2}; shl.b32 a, p, 16; and.b32 b, p, 0xFFFF0000; "
    "fma.rn.f32 a, a, $3, $4; fma.rn.f32 b, b, $3, $4; cvt.rn.bf16x2.f32 $0, b, a; }"
)
_MULTIPLY_FLOAT16 = tl.constexpr(
    "{ .reg .f32 a, b; cvt.f32.f16 a, $1; cvt.f32.f16 b, $2; "
    "fma.rn.f32 a, a, $3, $4; fma.rn.f32 b, b, $3, $4; cvt.rn.f16x2.f32 $0, b, a; }"
)
_IQ4NL, _E2M1 = (tl.constexpr(CODEBOOKS[name]) for name in ("iq4nl", "e2m1"))
_IQ4NL_BFLOAT16, _IQ4NL_FLOAT16 = (
    tl.constexpr(_lookup_ptx(CODEBOOKS["iq4nl"], bfloat16=bfloat16)) for bfloat16 in (True, False)
)
_E2M1_BFLOAT16, _E2M1_FLOAT16 = (tl.constexpr(_e2m1_ptx(bfloat16=bfloat16)) for bfloat16 in (True, False))


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
        w = load_codebook(
            codes, offs_n, k_start, N, K, dtype, CODEBOOK, PERMUTED, BLOCK_N, BLOCK_K, INLINE_PTX
        )
    else:
        ZERO: tl.constexpr = -1 if HAS_ZEROS else 0 if AFFINE or CODEBOOK == "odd" else 1 << (BITS - 1)
        w = load_packed_integers(
            codes, offs_n, k_start, N, K, dtype, BITS, ZERO, PERMUTED, BLOCK_N, BLOCK_K, INLINE_PTX
        )
        if HAS_ZEROS:
            magic: tl.constexpr = (
                128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 8388608.0
            )
            zero = load_zeros(zeros, offs_n, group, N, num_groups) + magic
            w -= broadcast_spans(zero.to(dtype), PERMUTED, BLOCK_N, BLOCK_K, NUM_SPANS)
        elif CODEBOOK == "odd":
            w = tl.fma(w, tl.full(w.shape, 2.0, dtype), tl.full(w.shape, -15.0, dtype))
    return w


@triton.jit
def load_zeros(zeros, offs_n, group, N, num_groups):
    """Zero points of outputs ``offs_n`` in the groups ``group`` [n]: [BLOCK_N, n] float32, 0 out of bounds.

    ``zeros`` [N / 8, num_groups] int32: eight outputs to a word, the first in its lowest bits.
    """
    mask = (offs_n[:, None] < N) & (group[None, :] < num_groups)
    packed = tl.load(zeros + (offs_n[:, None] // 8) * num_groups + group[None, :], mask=mask, other=0)
    return ((packed >> ((offs_n[:, None] % 8) * 4)) & 15).to(tl.float32)


@triton.jit
def load_packed_integers(
    codes,
    offs_n,
    k_start,
    N,
    K,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INLINE_PTX: tl.constexpr,
):
    """Tile of packed ``codes`` of ``BITS`` from input ``k_start`` on as ``dtype``: [BLOCK_N, BLOCK_K].

    ``PERMUTED``: in the input order of ``permute_x_packed``. ``codes``: [N, K / 8] int32 words of eight
    codes; of 5 and 6 bits as from ``layers/linear.py``, ``pack_codes``. ``ZERO``: the code that stands for 0;
    -1: codes are as they are, plus a magic number.

    Codes are converted without conversion instructions: OR-ed into the lowest mantissa bits of the magic
    number, 128 (bfloat16), 1024 (float16) or 2^23 (float32), where a code counts units. Two codes that are 16
    bits apart in a word share a register, so two weights cost one instruction and part of a shift, and
    another one to subtract. ``INLINE_PTX``: see ``magic_halves``.
    """
    WORDS: tl.constexpr = BLOCK_K // 8
    LOW: tl.constexpr = BITS - 4  # lowest bits of a code, which lie apart
    offs_word = k_start // 8 + tl.arange(0, WORDS)
    mask = (offs_n[:, None] < N) & (offs_word[None, :] < K // 8)
    if LOW == 0:
        packed = load_codes(codes, offs_n, offs_word, K // 8, mask, False)
        shifted = tl.join(packed, packed >> 4)
        marked = magic_halves(tl.join(shifted, shifted >> 8), 0x000F000F, ZERO, dtype, INLINE_PTX)
    else:
        # Four words of lowest bits are for RUNS times four words of upper bits. Only views and elementwise
        # operations follow the loads, so that Triton loads both in the layout of the dot product's operand.
        RUNS: tl.constexpr = 4 // LOW
        TILE_RUNS: tl.constexpr = RUNS if WORDS >= 4 * RUNS else WORDS // 4
        LOW_WORDS: tl.constexpr = WORDS // TILE_RUNS
        row_words = (K // 32 + tl.cdiv(K, 32 * RUNS)) * 4
        packed = load_codes(codes, offs_n, offs_word, row_words, mask, False)
        offs_low = K // 32 * 4 + k_start // (32 * RUNS) * 4 + tl.arange(0, LOW_WORDS)
        low_mask = (offs_n[:, None] < N) & (offs_low[None, :] < row_words)
        low = load_codes(codes, offs_n, offs_low, row_words, low_mask, False)
        if TILE_RUNS < RUNS:
            low = low >> (k_start // 32 % RUNS * LOW)
        if TILE_RUNS == 4:
            low = tl.join(tl.join(low, low >> 2 * LOW), tl.join(low >> LOW, low >> 3 * LOW))
        elif TILE_RUNS == 2:
            low = tl.join(low, low >> LOW)
        low = tl.reshape(low, (BLOCK_N, LOW_WORDS // 4, 4, TILE_RUNS))
        low = tl.reshape(tl.permute(low, (0, 1, 3, 2)), (BLOCK_N, WORDS))
        # Even and odd codes in bytes of their own.
        UPPER: tl.constexpr = 0x3C3C3C3C if LOW == 2 else 0x1E1E1E1E
        LOWEST: tl.constexpr = 0x03030303 if LOW == 2 else 0x01010101
        even = ((packed << LOW) & UPPER) | (low & LOWEST)
        odd = ((packed >> (4 - LOW)) & UPPER) | ((low >> 4) & LOWEST)
        whole = tl.join(even, odd)
        marked = magic_halves(tl.join(whole, whole >> 8), 0x00FF00FF, ZERO, dtype, INLINE_PTX)
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
        value = tl.where(code == index, _IQ4NL[index] if CODEBOOK == "iq4nl" else _E2M1[index], value)
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
):
    """Tile of 4-bit ``codes`` [N, K / 8] int32 from input ``k_start`` on, looked up: iq4nl or e2m1.

    [BLOCK_N, BLOCK_K] integers as ``dtype``; ``PERMUTED``: in the input order of ``permute_x_packed``.
    ``INLINE_PTX``: see ``_lookup_ptx`` and ``_e2m1_ptx``.
    """
    offs_word = k_start // 8 + tl.arange(0, BLOCK_K // 8)
    mask = (offs_n[:, None] < N) & (offs_word[None, :] < K // 8)
    packed = load_codes(codes, offs_n, offs_word, K // 8, mask, False)
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
        value = split_pairs(pairs, half).to(dtype)
    else:
        STEP: tl.constexpr = 8 if CODEBOOK == "iq4nl" else 4  # bits from one pair to the next
        APART: tl.constexpr = 4 if CODEBOOK == "iq4nl" else 16  # bits from one code of a pair to the other
        pairs = tl.join(tl.join(packed, packed >> 2 * STEP), tl.join(packed >> STEP, packed >> 3 * STEP))
        value = tl.join(look_up(pairs & 15, CODEBOOK), look_up((pairs >> APART) & 15, CODEBOOK)).to(dtype)
    # [BLOCK_N, words, 2, 2, 2]: bits of a pair's index, highest first, and which code of it.
    if PERMUTED:
        value = tl.reshape(value, (BLOCK_N, BLOCK_K // 32, 4, 2, 2, 2))
        value = tl.permute(value, (0, 1, 3, 2, 4, 5))
    elif CODEBOOK == "e2m1":
        value = tl.permute(value, (0, 1, 4, 2, 3))
    return tl.reshape(value, (BLOCK_N, BLOCK_K))


@triton.jit
def magic_halves(word, MASK: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr, INLINE_PTX: tl.constexpr):
    """Bits ``MASK`` of both 16-bit halves of ``word``, OR-ed into the mantissa of a magic number.

    Returns [..., 2] as ``dtype``, the low half first; for the magic numbers see ``load_packed_integers``. If
    ``ZERO`` is not negative, it and the magic number are subtracted. ``INLINE_PTX`` uses lop3, PTX's
    three-input logic instruction.
    """
    MAGIC: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    if dtype == tl.float32:
        low = ((word & MASK & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = (((word & MASK) >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
        halves = tl.join(low, high)
        if ZERO >= 0:
            halves -= 8388608.0 + ZERO
    elif INLINE_PTX:
        marked = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [word, MASK, MAGIC], tl.int32, is_pure=True, pack=1
        )
        halves = subtract_pairs(marked, ZERO, dtype)
    else:
        halves = split_pairs((word & MASK) | MAGIC, dtype)
        if ZERO >= 0:
            halves -= (128.0 if dtype == tl.bfloat16 else 1024.0) + ZERO
    return halves


@triton.jit
def subtract_pairs(marked, ZERO: tl.constexpr, dtype: tl.constexpr):
    """``split_pairs`` of ``marked``, less the magic number and ``ZERO`` if that is not negative.

    Both halves of a register at once: Triton takes them apart and puts them together again, four
    instructions for two weights.
    """
    if ZERO >= 0:
        ONE: tl.constexpr = 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00
        LESS: tl.constexpr = (0xC300C300 if dtype == tl.bfloat16 else 0xE400E400) + ZERO * 0x10001
        PTX: tl.constexpr = (
            "fma.rn.bf16x2 $0, $1, $2, $3;" if dtype == tl.bfloat16 else "fma.rn.f16x2 $0, $1, $2, $3;"
        )
        marked = tl.inline_asm_elementwise(
            PTX, "=r,r,r,r", [marked, ONE, LESS], tl.int32, is_pure=True, pack=1
        )
    return split_pairs(marked, dtype)


@triton.jit
def split_pairs(pairs, dtype: tl.constexpr):
    """Both 16-bit halves of ``pairs``: [..., 2] as ``dtype``, the low half first."""
    low = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = ((pairs >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def signed_halves(word, dtype: tl.constexpr, INLINE_PTX: tl.constexpr):
    """The low bytes of both 16-bit halves of ``word``, signed: [..., 2] as ``dtype``, the low half first."""
    if INLINE_PTX and dtype != tl.float32:
        PTX: tl.constexpr = _SIGNED_BFLOAT16 if dtype == tl.bfloat16 else _SIGNED_FLOAT16
        pairs = tl.inline_asm_elementwise(PTX, "=r,r", [word], tl.int32, is_pure=True, pack=1)
        halves = split_pairs(pairs, dtype)
    else:
        halves = magic_halves(word, 0x007F007F, -1, dtype, False)
        halves -= magic_halves(word, 0x00800080, -1, dtype, False)
    return halves


@triton.jit
def multiply_subtract(weight, scale, minimum, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``weight * scale - minimum`` [BLOCK_N, BLOCK_K] in float32, rounded once to the 16 bits of ``weight``.

    ``scale`` and ``minimum`` float32, the same for an even input and the next. In PTX, two at a time: Triton
    takes four more instructions to take them apart.
    """
    pairs: tl.constexpr = (BLOCK_N, BLOCK_K // 2, 2)
    first, second = tl.split(tl.reshape(weight, pairs))
    factor, _ = tl.split(tl.reshape(scale, pairs))
    less, _ = tl.split(tl.reshape(-minimum, pairs))
    if weight.dtype == tl.bfloat16:
        PTX: tl.constexpr = _MULTIPLY_BFLOAT16
    else:
        PTX: tl.constexpr = _MULTIPLY_FLOAT16
    both = tl.inline_asm_elementwise(
        PTX, "=r,h,h,f,f", [first, second, factor, less], tl.int32, is_pure=True, pack=1
    )
    return tl.reshape(split_pairs(both, weight.dtype), (BLOCK_N, BLOCK_K))


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

    Converted without conversion instructions, as in ``load_packed_integers``: a signed byte is its low seven
    bits minus 128 if the sign bit is set, and both parts are OR-ed into the same magic number. Two bytes that
    are 16 bits apart in a word share a register, so two weights cost three instructions and part of a shift.
    """
    offs_word = k_start // 4 + tl.arange(0, BLOCK_K // 4)
    mask = (offs_n[:, None] < N) & (offs_word[None, :] < K // 4)
    packed = load_codes(codes, offs_n, offs_word, K // 4, mask, EVEN)
    pairs = tl.join(packed, packed >> 8)  # bytes 0 and 2, and bytes 1 and 3
    value = signed_halves(pairs, dtype, INLINE_PTX)
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
    inputs, word t's code 4c + 2a + b is at 16a + 4t + 2b + c; of iq4nl, whose pairs are neighbours, and of
    e2m1 see ``load_codebook``.
    """
    parts = tl.reshape(rows, (BLOCK_M, BLOCK_K // 32, 4, 2, 2, 2))
    if CODEBOOK == "iq4nl":
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
def load_byte_scales(scales, offs_n, first, N, num_groups, NUM_GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Scales, int8, of outputs ``offs_n`` in ``NUM_GROUPS`` groups from ``first`` on, as int32.

    [BLOCK_N, NUM_GROUPS]; ``NUM_GROUPS``, ``first`` and ``num_groups`` are multiples of 4.

    Four at a time: Triton loads ahead by instructions that take at least four bytes. What it cannot load
    ahead, and that is multiplied into weights, keeps these from being loaded in the layout of tensor cores.
    """
    words = scales.to(tl.pointer_type(tl.int32))
    word = first // 4 + tl.arange(0, NUM_GROUPS // 4)
    four = load_scales(words, offs_n, word, N, num_groups // 4, 1, EVEN)
    pairs = tl.join(tl.join(four << 24, four << 8), tl.join(four << 16, four))
    return tl.reshape(pairs, (offs_n.shape[0], NUM_GROUPS)) >> 24


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
    IN_WORDS: tl.constexpr = False,
):
    """Scales and minima of outputs ``offs_n`` in the groups ``group`` [n]: [BLOCK_N, n] float32 each.

    A weight is code * scale - minimum; minima are 0 without ``AFFINE``. The groups (of ``SCALE_K`` inputs)
    lie within ``WIDTH`` inputs from ``k_start`` on. ``scales`` [N, num_groups] and ``supers`` [N, K /
    SUPER_K]: see ``quantized.QuantizedWeight``. ``EVEN``: bounds are not checked. ``IN_WORDS``: scales of 8
    bits are loaded by ``load_byte_scales``.
    """
    NUM_GROUPS: tl.constexpr = group.shape[0]
    if IN_WORDS and NUM_GROUPS * SCALE_K == WIDTH and NUM_GROUPS % 4 == 0:
        sub = load_byte_scales(scales, offs_n, k_start // SCALE_K, N, num_groups, NUM_GROUPS, EVEN)
    else:
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
