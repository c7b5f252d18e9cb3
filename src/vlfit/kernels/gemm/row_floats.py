"""Parts of the kernel for one row that multiply weights in FP8 or in 16 bits as floats, by matrix units.

So weights do not take an instruction each: those in 16 bits go from memory to the unit as they are, codes
in FP8 after one conversion for two. Sums are float32.

A unit multiplies [16, 16] by [16, 8]. Of the first matrix each lane of a warp holds four words, pairs of
numbers; of the second it holds two. Sixteen lanes load 16 bytes each of one output. So a row of the first
matrix is not an output, but what four lanes have of one: lanes 0 to 3, 4 to 7 and so on. Words 0 and 2 of a
lane are in the upper half, words 1 and 3 in the lower half. That makes eight parts of the inputs. Each has a
column of the second matrix, and of the eight sums of a row only that column's is wanted; the others mean
nothing, and cost nothing. Lanes 0, 5, 10 and 15 of sixteen hold the two wanted sums of their four lanes.

All lanes of a warp must get to an instruction of the unit together: no branch by lane around it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vlfit.kernels.gemm.row_integers import load_inside, power_of_two_scales, split_four, wanted_places

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 {{$0, $1, $2, $3}}, {{{1}}}, {{{2}}}, {{{3}}};"
# Four words of two weights each, $4 to $7, by two of the row, $8 and $9, onto $10 to $13.
_BF16, _F16 = (
    gl.constexpr(_MMA.format(name, "$4, $5, $6, $7", "$8, $9", "$10, $11, $12, $13"))
    for name in ("bf16", "f16")
)
# The same of two words of four e4m3 codes each, $4 and $5, by $6 and $7, onto $8 to $11.
_FP8 = gl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 p, q, r, s; mov.b32 {a, b}, $4; "
    "cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; mov.b32 {a, b}, $5; "
    "cvt.rn.f16x2.e4m3x2 r, a; cvt.rn.f16x2.e4m3x2 s, b; "
    + _MMA.format("f16", "p, q, r, s", "$6, $7", "$8, $9, $10, $11")
    + " }"
)


@gluon.jit
def spread_row(x, FORM: gl.constexpr, WARPS: gl.constexpr):
    """``x`` [K] in shared memory, as lanes take it; for FP8 in float16, with powers of two as scales.

    Four lanes' inputs of a step have one scale. Numbers of 8 significant bits (bfloat16) lose nothing in
    float16 unless they are less than 2^-30 of the largest number with the same scale. An infinite number,
    or NaN, makes its factor NaN. Returns

    - words: [steps, 2, LANES * lane_inputs / 4] int32, of two inputs each: for the first and the second 16
      lanes of a warp, for each lane those in the column that it holds.
    - factors: [steps, LANES] float32. Products times them are the product. Not used for weights in
      16 bits: words again.
    """
    WARPS_K: gl.constexpr = FORM.tiles.warps_k
    K: gl.constexpr = FORM.inputs
    SIZE: gl.constexpr = 4 * FORM.lane_inputs  # with one scale
    EIGHTS: gl.constexpr = SIZE // 8
    PARALLEL: gl.constexpr = 32 // EIGHTS * WARPS  # groups at a time
    STEPS: gl.constexpr = PARALLEL // (4 * WARPS_K)
    ROUNDS: gl.constexpr = (K + SIZE * PARALLEL - 1) // (SIZE * PARALLEL)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // EIGHTS, EIGHTS], [WARPS, 1], [1, 0])
    words = gl.allocate_shared_memory(gl.int32, [ROUNDS, PARALLEL * (SIZE // 2)], FLAT)
    spread = words._reinterpret(gl.int32, [ROUNDS * STEPS, 2, WARPS_K * SIZE], WIDE)
    factors = words
    if FORM.weights.format == "fp8":
        factors = gl.allocate_shared_memory(gl.float32, [ROUNDS, PARALLEL * 4], FLAT)
    offs = (
        gl.arange(0, PARALLEL, layout=gl.SliceLayout(1, LAYOUT))[:, None] * SIZE
        + gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    )
    following = gl.load(x + offs, mask=offs < K, other=0.0)
    for i in range(ROUNDS):
        value = following
        at = (i + 1) * (PARALLEL * SIZE) + offs
        following = gl.load(x + at, mask=at < K, other=0.0)
        if FORM.weights.format == "fp8":
            wide = value.to(gl.float32)
            up, factor = power_of_two_scales(wide, 0)
            value = (wide * up[:, None]).to(gl.float16)
            each = factor[:, None] + gl.zeros([PARALLEL, 4], gl.float32, LAYOUT)
            factors.index(i).store(gl.reshape(each, [PARALLEL * 4]))
        bits = value.to(gl.int16, bitcast=True).to(gl.int32)
        # By warp, the lane's place in it, the word's place in the lane's, and whether it is an odd one.
        bits = gl.reshape(bits, [STEPS, WARPS_K, 2, 2, 4, FORM.lane_inputs // 4, 2, 2])
        first, second = gl.split(bits)
        pairs = gl.permute((first & 0xFFFF) | (second << 16), [0, 2, 1, 3, 6, 4, 5])
        words.index(i).store(gl.reshape(pairs, [PARALLEL * (SIZE // 2)]))
    if FORM.weights.format == "fp8":
        factors = factors._reinterpret(gl.float32, [ROUNDS * STEPS, WARPS_K * 16], FLAT)
    return spread, factors


@gluon.jit
def load_floats(codes, scales, row, step, FORM: gl.constexpr, LAYOUT: gl.constexpr, wanted):
    """What one step needs of outputs ``row``: words [BLOCK_N, LANES * 4] int32, and scales [BLOCK_N, LANES].

    Without scales, or with one for an output, words stand in for them. Beyond the row's end all are 0.
    ``wanted``: as in ``load_weights``.
    """
    LANES: gl.constexpr = 16 * FORM.tiles.warps_k
    K: gl.constexpr = FORM.inputs
    ROW_WORDS: gl.constexpr = K // FORM.lane_inputs * 4
    EVEN: gl.constexpr = ROW_WORDS % (LANES * 4) == 0 and wanted is None
    WORD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], LAYOUT.warps_per_cta, [1, 0])
    word_row = gl.convert_layout(row, gl.SliceLayout(1, WORD_LAYOUT), assert_trivial=True)
    place = gl.arange(0, LANES * 4, layout=gl.SliceLayout(0, WORD_LAYOUT))
    inside = wanted_places(place < ROW_WORDS - step * (LANES * 4), wanted)
    words = codes.to(gl.pointer_type(gl.int32), bitcast=True)
    pointers = words + word_row.to(gl.int64)[:, None] * ROW_WORDS + place[None, :]
    weights = load_inside(pointers + step * (LANES * 4), inside, EVEN, True)
    scale = weights
    if FORM.has_scales:
        SCALE_K: gl.constexpr = FORM.weights.scale_k
        lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, LAYOUT))
        first = (row // FORM.weights.scale_n)[:, None] * ((K + SCALE_K - 1) // SCALE_K)
        first_lane = lane // 4 * 4  # of four that have one sum, also beyond the row's end
        group = (step * LANES + first_lane) * FORM.lane_inputs // SCALE_K
        inside = wanted_places(first_lane < ROW_WORDS // 4 - step * LANES, wanted)
        scale = load_inside(scales + first + group[None, :], inside, EVEN)
    return weights, scale


@gluon.jit
def float_product(inputs, weights, step, acc, FORM: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Add products of the inputs of ``step`` to ``acc``, four of [BLOCK_N, LANES] float32.

    ``inputs``: of ``spread_row``, of numbers that were ``DTYPE``; ``weights``: of ``load_floats``.
    ``wanted_sums`` makes sums of the four; of FP8 the first is their sum already.
    """
    words, scale = weights
    row_words, factors = inputs
    word = split_four(words, 16 * FORM.tiles.warps_k, LAYOUT)
    if FORM.weights.format == "fp8":
        pairs = row_pairs(row_words, step, FORM, LAYOUT)
        none = gl.zeros(acc[0].shape, gl.float32, LAYOUT)
        sums = (none, none, none, none)
        for i in gl.static_range(2):
            sums = gl.inline_asm_elementwise(
                _FP8,
                "=&f,=&f,=&f,=&f,r,r,r,r,f,f,f,f",
                [
                    word[2 * i],
                    word[2 * i + 1],
                    pairs[2 * i],
                    pairs[2 * i + 1],
                    sums[0],
                    sums[1],
                    sums[2],
                    sums[3],
                ],
                (gl.float32, gl.float32, gl.float32, gl.float32),
                is_pure=True,
                pack=1,
            )
        factor = gl.expand_dims(factors.index(step).load(gl.SliceLayout(0, LAYOUT)), 0)
        if FORM.has_scales:
            factor = factor * scale.to(gl.float32)
        acc = (acc[0] + (sums[0] + sums[3]) * factor, acc[1], acc[2], acc[3])
    else:
        MMA: gl.constexpr = _BF16 if gl.bfloat16 == DTYPE else _F16
        pairs = row_pairs(row_words, step, FORM, LAYOUT)
        acc = gl.inline_asm_elementwise(
            MMA,
            "=&f,=&f,=&f,=&f,r,r,r,r,r,r,f,f,f,f",
            [word[0], word[1], word[2], word[3], pairs[0], pairs[1], acc[0], acc[1], acc[2], acc[3]],
            (gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    return acc


@gluon.jit
def row_pairs(words, step, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of ``spread_row`` for each lane: two, for FP8 four, of [BLOCK_N, LANES] int32."""
    COUNT: gl.constexpr = FORM.lane_inputs // 4
    LANES: gl.constexpr = 16 * FORM.tiles.warps_k
    BLOCK_N: gl.constexpr = FORM.tiles.outputs
    WARPS: gl.constexpr = LAYOUT.warps_per_cta
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1, COUNT], [1, 2, 16], [WARPS[0], 1, WARPS[1]], [2, 1, 0])
    loaded = gl.expand_dims(words.index(step).load(gl.SliceLayout(0, WIDE)), 0)
    each = gl.reshape(
        loaded + gl.zeros([BLOCK_N // 2, 2, LANES * COUNT], gl.int32, WIDE), [BLOCK_N, LANES * COUNT]
    )
    if COUNT == 4:
        pairs = split_four(each, LANES, LAYOUT)
    else:
        first, second = gl.split(gl.reshape(each, [BLOCK_N, LANES, 2]))
        pairs = (
            gl.convert_layout(first, LAYOUT, assert_trivial=True),
            gl.convert_layout(second, LAYOUT, assert_trivial=True),
        )
    return pairs


@gluon.jit
def wanted_sums(acc, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums of products [BLOCK_N, LANES] of the four of ``float_product``, 0 in lanes that have none."""
    lane = gl.arange(0, 16 * FORM.tiles.warps_k, layout=gl.SliceLayout(0, LAYOUT))
    total = acc[0] + acc[3]
    return gl.where((lane % 16 % 5 == 0)[None, :], total, 0.0)
