"""Parts of the kernel for one row that multiply codes of 4 to 8 bits as integers.

Each program turns the row into 16-bit integers, with a power of two as scale for each 32 inputs, and keeps
them in shared memory. Codes are multiplied as they are by dp2a, which multiplies two 16-bit integers by two
bytes and adds both to a 32-bit integer, so a code is never a float: the sum of 32 inputs is, times its
scale. Numbers of 8 significant bits (bfloat16) lose nothing unless they are less than a 128th of the largest
of their 32, and no number loses more than a 32,768th of that one. An infinite number, or NaN,
makes all products NaN.
"""

from collections.abc import Iterable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vlfit.checkpoint.quantization import CODEBOOKS
from vlfit.kernels.gemm.weights import LOOKUP_OFFSET, LOOKUP_SIGN

ROUND = gl.constexpr(12582912.0)  # 1.5 * 2^23: the sum's lowest 16 bits are the other summand, rounded
LEAST_EXPONENT = gl.constexpr(40)  # of a group's largest number, biased, at least: below, bits are lost


def _words(values: Iterable[int]) -> list[str]:
    """Eight signed bytes as two words, for PTX."""
    packed = bytes(value & 0xFF for value in values)
    return [f"0x{int.from_bytes(packed[i : i + 4], 'little'):08X}" for i in (0, 4)]


def _lookup_ptx(codebook: str) -> str:
    """PTX that looks eight codes $2 up and multiplies them by $3 to $6.

    Products of codes below 8 are added to $7, of others to $8. prmt picks four of eight bytes by the lower
    three bits of four indices; the fourth bit says to fill a byte with the sign of the one picked. So a table
    of numbers that are not negative gives 0 for codes of 8 and more. One of negative numbers, by codes with
    the fourth bit changed, gives -1 for the others, for which the first has 1 more. ``LOOKUP_SIGN`` and
    ``LOOKUP_OFFSET`` make numbers so.

    ``zero`` is 0, which the assembler does not know: it would keep constants in uniform registers, which prmt
    does not take, and copy them each time.
    """
    shifted = [LOOKUP_SIGN[codebook] * value + LOOKUP_OFFSET for value in CODEBOOKS[codebook]]
    low, high = [value + 1 for value in shifted[:8]], shifted[8:]
    if not (min(low) >= 0 and max(low) < 128 and min(high) >= -128 and max(high) < 0):
        raise ValueError(f"{codebook} is not looked up in two tables")
    low_words, high_words = _words(low), _words(high)
    lines = ["{ .reg .b32 zero, low, high, t, u, a, b;"]
    lines += ["mov.u32 zero, %lanemask_lt;", "mov.u32 t, %lanemask_gt;", "and.b32 zero, zero, t;"]
    lines += [f"xor.b32 low, zero, {low_words[0]};", f"xor.b32 high, zero, {high_words[0]};"]
    lines += ["mov.b32 t, $2;", "xor.b32 u, t, 0x88888888;"]
    sums = "$7", "$8"
    for pair in (3, 5):
        lines += [f"prmt.b32 a, low, {low_words[1]}, t;", f"prmt.b32 b, high, {high_words[1]}, u;"]
        for total, table in ((0, "a"), (1, "b")):
            lines += [f"dp2a.lo.s32.s32 ${total}, ${pair}, {table}, {sums[total]};"]
            lines += [f"dp2a.hi.s32.s32 ${total}, ${pair + 1}, {table}, ${total};"]
        if pair == 3:
            lines += ["shr.u32 t, t, 16;", "shr.u32 u, u, 16;"]
        sums = "$0", "$1"
    return " ".join([*lines, "}"])


_IQ4NL, _E2M1 = (gl.constexpr(_lookup_ptx(name)) for name in ("iq4nl", "e2m1"))
# Even codes of $2 by $3 and $4 onto $7, and odd ones, 16 times too large, by $5 and $6 onto $8.
_NIBBLES = gl.constexpr(
    "{ .reg .b32 e, o; and.b32 e, $2, 0x0F0F0F0F; and.b32 o, $2, 0xF0F0F0F0; "
    "dp2a.lo.s32.u32 $0, $3, e, $7; dp2a.lo.s32.u32 $1, $5, o, $8; "
    "dp2a.hi.s32.u32 $0, $4, e, $0; dp2a.hi.s32.u32 $1, $6, o, $1; }"
)
# The same of bytes: even codes in $2, odd ones in $3.
_BYTES = gl.constexpr(
    "dp2a.lo.s32.u32 $0, $4, $2, $8; dp2a.lo.s32.u32 $1, $6, $3, $9; "
    "dp2a.hi.s32.u32 $0, $5, $2, $0; dp2a.hi.s32.u32 $1, $7, $3, $1;"
)
# Signed bytes of $1 and of $2 by $3 to $6 onto $7.
_SIGNED_BYTES = gl.constexpr(
    "dp2a.lo.s32.s32 $0, $3, $1, $7; dp2a.hi.s32.s32 $0, $4, $1, $0; "
    "dp2a.lo.s32.s32 $0, $5, $2, $0; dp2a.hi.s32.s32 $0, $6, $2, $0;"
)
PRODUCTS = {  # by what they multiply, for the tests that run them word by word
    "iq4nl": _IQ4NL,
    "e2m1": _E2M1,
    "nibbles": _NIBBLES,
    "bytes": _BYTES,
    "signed bytes": _SIGNED_BYTES,
}


@gluon.jit
def quantize_row(x, FORM: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """``x`` [K] as 16-bit integers and scales, in shared memory.

    Returns

    - integers: [steps * 4, GROUPS * 4] int32: of each step the first quarters of its groups, then the second
      and so on. A quarter's words are pairs of inputs, in the order in which dp2a takes them for codes in
      ``FORM``.
    - factors: [steps, GROUPS] float32. A product's integer sum times it is the product.
    - sums: [steps * HALVES, GROUPS] int32: sums of the groups' integers, or of their halves'.
    """
    K: gl.constexpr = FORM.inputs
    PARALLEL: gl.constexpr = 8 * WARPS if 8 * WARPS > GROUPS else GROUPS  # groups at a time
    STEPS: gl.constexpr = PARALLEL // GROUPS
    ROUNDS: gl.constexpr = (K + 32 * PARALLEL - 1) // (32 * PARALLEL)
    HALVES: gl.constexpr = FORM.halves
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    integers = gl.allocate_shared_memory(gl.int32, [ROUNDS, PARALLEL * 16], FLAT)
    factors = gl.allocate_shared_memory(gl.float32, [ROUNDS, PARALLEL], FLAT)
    sums = gl.allocate_shared_memory(gl.int32, [ROUNDS, PARALLEL * HALVES], FLAT)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    offs = (
        gl.arange(0, PARALLEL, layout=gl.SliceLayout(1, LAYOUT))[:, None] * 32
        + gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    )
    following = gl.load(x + offs, mask=offs < K, other=0.0)
    for i in range(ROUNDS):
        value = following.to(gl.float32)
        at = (i + 1) * (PARALLEL * 32) + offs
        following = gl.load(x + at, mask=at < K, other=0.0)
        up, factor = power_of_two_scales(value, FORM.shift)
        if FORM.negated:
            factor = -factor
        marked = gl.fma(value, up[:, None] + gl.zeros_like(value), gl.full_like(value, ROUND))
        bits = marked.to(gl.int32, bitcast=True)
        total = gl.sum(gl.reshape(bits - 0x4B400000, [PARALLEL, HALVES, 32 // HALVES]), 2)
        # [group, quarter, 2, 2, 2]: bits of an input's place in its quarter.
        bits = gl.reshape(bits, [PARALLEL, 4, 2, 2, 2])
        if FORM.even_and_odd:
            bits = gl.permute(bits, [0, 1, 4, 2, 3])
        first, second = gl.split(bits)
        pairs = gl.reshape((first & 0xFFFF) | (second << 16), [STEPS, GROUPS, 4, 4])
        integers.index(i).store(gl.reshape(gl.permute(pairs, [0, 2, 1, 3]), [PARALLEL * 16]))
        factors.index(i).store(factor)
        total = gl.permute(gl.reshape(total, [STEPS, GROUPS, HALVES]), [0, 2, 1])
        sums.index(i).store(gl.reshape(total, [PARALLEL * HALVES]))
    ALL: gl.constexpr = ROUNDS * STEPS
    return (
        integers._reinterpret(gl.int32, [ALL * 4, GROUPS * 4], FLAT),
        factors._reinterpret(gl.float32, [ALL, GROUPS], FLAT),
        sums._reinterpret(gl.int32, [ALL * HALVES, GROUPS], FLAT),
    )


@gluon.jit
def power_of_two_scales(value, SHIFT: gl.constexpr):
    """By what each row of ``value`` [groups, n] float32 is multiplied to be below 2^15, and what undoes it.

    Both are powers of two, [groups] float32; what undoes it is smaller by 2^-``SHIFT``, and NaN where a
    number is infinite or NaN.
    """
    # By bits, so that infinity and what is no number are largest.
    largest = gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = gl.maximum(largest >> 23, LEAST_EXPONENT)
    up = ((254 + 14 - exponent) << 23).to(gl.float32, bitcast=True)
    factor = ((exponent - 14 - SHIFT) << 23).to(gl.float32, bitcast=True)
    return up, gl.where(exponent == 255, float("nan"), factor)


@gluon.jit
def load_integers(codes, scales, zeros, row, step, FORM: gl.constexpr, LAYOUT: gl.constexpr, wanted):
    """What one step needs of outputs ``row``: codes, their lowest bits, scales and super scales.

    Codes are [BLOCK_N, words of a step], the others [BLOCK_N, GROUPS], with two groups of 16 inputs in one
    number. What ``FORM`` does not have is a copy of something else. Beyond the row's end all are 0.
    ``wanted``: as in ``load_weights``. Loads ask also where all are inside: those that do not are moved
    behind products, which then wait for them (docs/log.md).
    """
    WORDS: gl.constexpr = FORM.group_words
    GROUPS: gl.constexpr = 16 * FORM.tiles.warps_k
    K: gl.constexpr = FORM.inputs
    SCALE_K: gl.constexpr = FORM.weights.scale_k
    CODE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, WORDS], [2, 16], LAYOUT.warps_per_cta, [1, 0])
    code_row = gl.convert_layout(row, gl.SliceLayout(1, CODE_LAYOUT), assert_trivial=True)
    first_code = code_row.to(gl.int64)[:, None] * FORM.row_words
    lane = gl.arange(0, GROUPS * WORDS, layout=gl.SliceLayout(0, CODE_LAYOUT))
    inside = wanted_places(lane < K // 32 * WORDS - step * (GROUPS * WORDS), wanted)
    pointers = codes + first_code + lane[None, :]
    words = load_inside(pointers + step * (GROUPS * WORDS), inside, False, True)
    low = words
    if FORM.low_bits:
        RUNS: gl.constexpr = 4 // FORM.low_bits
        field = gl.max_contiguous(lane // (4 * RUNS) * 4 + lane % 4, 4)
        pointers = codes + K // 32 * 4 + first_code + field[None, :]
        low = load_inside(pointers + step * (GROUPS * WORDS // RUNS), inside, False)
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, LAYOUT))
    inside = wanted_places(group < K // 32 - step * GROUPS, wanted)
    wide_row = row.to(gl.int64)[:, None]
    if FORM.one_scale:
        sub = gl.zeros([row.shape[0], GROUPS], gl.int32, LAYOUT)
    elif SCALE_K == 16:
        # Two scales at a time.
        PAIR: gl.constexpr = gl.int16 if scales.dtype.element_ty.primitive_bitwidth == 8 else gl.int32
        pairs = scales.to(gl.pointer_type(PAIR), bitcast=True)
        sub = load_inside(pairs + wide_row * (K // 32) + group[None, :] + step * GROUPS, inside, False)
    else:
        sub = load_inside(group_pointers(scales, wide_row, group, step, K, GROUPS, SCALE_K), inside, False)
    sup = sub
    if FORM.weights.two_level:
        SUPER_K: gl.constexpr = FORM.weights.super_k
        sup = load_inside(group_pointers(zeros, wide_row, group, step, K, GROUPS, SUPER_K), inside, False)
    elif FORM.weights.has_zeros:
        word = wide_row // 8
        sup = load_inside(group_pointers(zeros, word, group, step, K, GROUPS, SCALE_K), inside, False)
    return words, low, sub, sup


@gluon.jit
def wanted_places(inside, wanted):
    """``inside`` [n] as [1, n], all False unless ``wanted``; None: it is."""
    places = inside[None, :]
    if wanted is not None:
        places = places & wanted
    return places


@gluon.jit
def load_inside(pointers, inside, EVEN: gl.constexpr, ONCE: gl.constexpr = False):
    """Load from ``pointers``, 0 where not ``inside``; with ``EVEN`` all are.

    ``ONCE``: caches need not keep it.
    """
    if EVEN and ONCE:
        return gl.load(pointers, eviction_policy="evict_first")
    if EVEN:
        return gl.load(pointers)
    if ONCE:
        return gl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")
    return gl.load(pointers, mask=inside, other=0)


@gluon.jit
def group_pointers(values, row, group, step, K: gl.constexpr, GROUPS: gl.constexpr, SHARED_K: gl.constexpr):
    """Pointers into ``values`` [rows, K / SHARED_K], each for ``SHARED_K`` inputs: of a step's groups."""
    if GROUPS * 32 % SHARED_K == 0:
        pointers = values + row * (K // SHARED_K) + (group * 32 // SHARED_K)[None, :]
        pointers += step * (GROUPS * 32 // SHARED_K)
    else:
        pointers = values + row * (K // SHARED_K) + ((step * GROUPS + group) * 32 // SHARED_K)[None, :]
    return pointers


@gluon.jit
def integer_product(inputs, weights, row, step, SCALE_TYPE: gl.constexpr, FORM: gl.constexpr):
    """Products of the inputs of a step, scaled, summed over each group: [BLOCK_N, GROUPS] float32.

    ``inputs``: of ``quantize_row``; ``weights``: of ``load_integers``; ``SCALE_TYPE``: of the scales.
    """
    integers, factors, sums = inputs
    words, low, sub, sup = weights
    LAYOUT: gl.constexpr = sub.type.layout
    GROUP_LAYOUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    factor = gl.expand_dims(factors.index(step).load(GROUP_LAYOUT), 0)
    first_sum = gl.expand_dims(sums.index(step * FORM.halves).load(GROUP_LAYOUT), 0)
    zero = FORM.zero
    if FORM.weights.has_zeros:
        zero = ((sup >> (row % 8 * 4)[:, None]) & 15) * FORM.unit
    second_sum = first_sum
    if FORM.halves == 2:
        second_sum = gl.expand_dims(sums.index(step * 2 + 1).load(GROUP_LAYOUT), 0)
    none = gl.zeros(sub.shape, gl.int32, LAYOUT)
    first, second = integer_sums(
        integers, words, low, step, none - zero * first_sum, none - zero * second_sum, FORM
    )
    first_scale, first_min, second_scale, second_min = weight_scales(sub, sup, SCALE_TYPE, FORM)
    MINIMA: gl.constexpr = FORM.weights.two_level and FORM.weights.affine
    product = first.to(gl.float32) * first_scale
    if MINIMA:
        product -= first_min * (first_sum * FORM.unit).to(gl.float32)
    if FORM.halves == 2:
        product += second.to(gl.float32) * second_scale
        if MINIMA:
            product -= second_min * (second_sum * FORM.unit).to(gl.float32)
    return product * factor


@gluon.jit
def integer_sums(integers, words, low, step, first_start, second_start, FORM: gl.constexpr):
    """Sums of codes times integers over each group, or over its halves: two of [BLOCK_N, GROUPS] int32.

    In units of ``1 / FORM.unit``, on top of both starts. With ``FORM.halves`` 1 the second means nothing.
    """
    LAYOUT: gl.constexpr = first_start.type.layout
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], LAYOUT.warps_per_cta, [1, 0])
    BLOCK_N: gl.constexpr = words.shape[0]
    GROUPS: gl.constexpr = 16 * FORM.tiles.warps_k
    even = gl.zeros([BLOCK_N, GROUPS], gl.int32, LAYOUT)
    odd = first_start
    first = even
    more = words
    if FORM.group_words == 8:
        both = gl.reshape(words, [BLOCK_N, GROUPS * 4, 2])
        words, more = gl.split(both)
    word = split_four(words, GROUPS, LAYOUT)
    other = split_four(more if FORM.group_words == 8 else low, GROUPS, LAYOUT)
    if FORM.low_bits:
        group = step * GROUPS + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, LAYOUT))
        run = (group % (4 // FORM.low_bits) * FORM.low_bits)[None, :]
    for quarter in gl.static_range(4):
        four = integers.index(step * 4 + quarter).load(gl.SliceLayout(0, FOUR))
        pair = split_four(gl.expand_dims(four, 0), GROUPS, LAYOUT)
        if FORM.low_bits:
            even, odd = bytes_product(word[quarter], other[quarter] >> run, pair, even, odd, FORM)
        elif FORM.group_words == 8:
            even = signed_product(word[quarter], other[quarter], pair, even)
        elif FORM.looked_up:
            even, odd = looked_up_product(word[quarter], pair, even, odd, FORM)
        else:
            even, odd = nibbles_product(word[quarter], pair, even, odd)
        if quarter == 1 and FORM.halves == 2:
            first = joined_sum(even, odd, FORM)
            even = gl.zeros([BLOCK_N, GROUPS], gl.int32, LAYOUT)
            odd = second_start
    if FORM.halves == 2:
        second = joined_sum(even, odd, FORM)
    else:
        first = joined_sum(even, odd, FORM)
        second = odd
    return first, second


@gluon.jit
def joined_sum(even, odd, FORM: gl.constexpr):
    """Sums of even and odd codes as one, in the units of ``integer_sums``."""
    if FORM.unit == 16:
        total = even * 16 + odd
        if FORM.weights.codebook == "odd":  # code c stands for 2 * c - 15
            total = total * 2
    elif FORM.group_words == 8:
        total = even
    else:
        total = even + odd
    return total


@gluon.jit
def split_four(value, GROUPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Take the four neighbours apart of which ``value`` has ``GROUPS`` in a row: [rows, GROUPS] each."""
    low, high = gl.split(gl.permute(gl.reshape(value, [value.shape[0], GROUPS, 2, 2]), [0, 1, 3, 2]))
    first, second = gl.split(low)
    third, fourth = gl.split(high)
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
        gl.convert_layout(third, LAYOUT, assert_trivial=True),
        gl.convert_layout(fourth, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def nibbles_product(word, pair, even, odd):
    """Add products of four bits each: of even codes to ``even``, 16 times those of odd ones to ``odd``."""
    return gl.inline_asm_elementwise(
        _NIBBLES,
        "=&r,=&r,r,r,r,r,r,r,r",
        [word, pair[0], pair[1], pair[2], pair[3], even, odd],
        (gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def bytes_product(word, low, pair, even, odd, FORM: gl.constexpr):
    """Add products of codes of 5 or 6 bits: upper four in ``word``, others in the lowest bits of ``low``."""
    LOW: gl.constexpr = FORM.low_bits
    UPPER: gl.constexpr = 0x3C3C3C3C if LOW == 2 else 0x1E1E1E1E
    LOWEST: gl.constexpr = 0x03030303 if LOW == 2 else 0x01010101
    even_codes = ((word << LOW) & UPPER) | (low & LOWEST)
    odd_codes = ((word >> (4 - LOW)) & UPPER) | ((low >> 4) & LOWEST)
    return gl.inline_asm_elementwise(
        _BYTES,
        "=&r,=&r,r,r,r,r,r,r,r,r",
        [even_codes, odd_codes, pair[0], pair[1], pair[2], pair[3], even, odd],
        (gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def signed_product(word, more, pair, total):
    """Add products of the eight signed bytes of ``word`` and ``more`` to ``total``."""
    return gl.inline_asm_elementwise(
        _SIGNED_BYTES,
        "=&r,r,r,r,r,r,r,r",
        [word, more, pair[0], pair[1], pair[2], pair[3], total],
        gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def looked_up_product(word, pair, low, high, FORM: gl.constexpr):
    """Add products of what eight codes stand for to ``low`` and ``high``: see ``_lookup_ptx``."""
    PTX: gl.constexpr = _IQ4NL if FORM.weights.codebook == "iq4nl" else _E2M1
    return gl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,r,r,r,r,r,r,r",
        [word, pair[0], pair[1], pair[2], pair[3], low, high],
        (gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def weight_scales(sub, sup, SCALE_TYPE: gl.constexpr, FORM: gl.constexpr):
    """Scales and minima of a step's weights: of both halves of each group, [BLOCK_N, GROUPS] float32 each.

    ``sub`` and ``sup`` as from ``load_integers``; ``SCALE_TYPE``: of scales in one level.
    Without a second half, or minima, others stand in.
    """
    first, second = sub, sub
    if FORM.weights.scale_k == 16:
        HALF: gl.constexpr = sub.dtype.primitive_bitwidth // 2
        first = (sub & ((1 << HALF) - 1)).to(gl.int16 if HALF == 16 else gl.int8)
        second = (sub >> HALF).to(gl.int16 if HALF == 16 else gl.int8)
        if not FORM.weights.two_level:
            first = first.to(SCALE_TYPE, bitcast=True)
            second = second.to(SCALE_TYPE, bitcast=True)
    if FORM.one_scale:
        first_scale = gl.full_like(sub, 1).to(gl.float32)
        second_scale, first_min, second_min = first_scale, first_scale, first_scale
    elif FORM.weights.two_level and FORM.weights.affine:
        scale = (sup & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        minimum = (sup >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        first_scale = scale * (first & 0xFF).to(gl.float32)
        first_min = minimum * ((first >> 8) & 0xFF).to(gl.float32)
        second_scale = scale * (second & 0xFF).to(gl.float32)
        second_min = minimum * ((second >> 8) & 0xFF).to(gl.float32)
    else:
        first_scale, second_scale = first.to(gl.float32), second.to(gl.float32)
        if FORM.weights.two_level:
            first_scale *= sup.to(gl.float32)
            second_scale *= sup.to(gl.float32)
        first_min, second_min = first_scale, second_scale
    return first_scale, first_min, second_scale, second_min
