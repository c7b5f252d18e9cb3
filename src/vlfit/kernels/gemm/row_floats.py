"""Parts of the kernel for one row that multiply weights in FP8 or in 16 bits as floats, summed in float32.

Weights and the row are loaded in words of 32 bits: taken one by one, Triton would need two instructions to
widen a number where one does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vlfit.kernels.gemm.row_integers import load_inside, split_four, wanted_places

# The four e4m3 codes of $1 by $2 to $5, onto $6.
_FP8 = gl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 p, q; .reg .f32 f; mov.b32 {a, b}, $1; "
    "cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; mov.b32 {a, b}, p; "
    "cvt.f32.f16 f, a; fma.rn.f32 $0, f, $2, $6; cvt.f32.f16 f, b; fma.rn.f32 $0, f, $3, $0; "
    "mov.b32 {a, b}, q; cvt.f32.f16 f, a; fma.rn.f32 $0, f, $4, $0; "
    "cvt.f32.f16 f, b; fma.rn.f32 $0, f, $5, $0; }"
)


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
        group = (step * LANES + lane) * FORM.lane_inputs // SCALE_K
        inside = wanted_places(lane < ROW_WORDS // 4 - step * LANES, wanted)
        scale = load_inside(scales + first + group[None, :], inside, EVEN)
    return weights, scale


@gluon.jit
def float_product(x, weights, step, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """Products of the inputs of a step, scaled, summed over those of each lane: [BLOCK_N, LANES] float32.

    ``x`` [K]: the row. ``weights``: of ``load_floats``.
    """
    words, scale = weights
    LANES: gl.constexpr = 16 * FORM.tiles.warps_k
    PAIRS: gl.constexpr = FORM.lane_inputs // 2
    K: gl.constexpr = FORM.inputs
    EVEN: gl.constexpr = K % (LANES * FORM.lane_inputs) == 0
    X_LAYOUT: gl.constexpr = gl.BlockedLayout([1, PAIRS], [2, 16], LAYOUT.warps_per_cta, [1, 0])
    place = gl.arange(0, LANES * PAIRS, layout=gl.SliceLayout(0, X_LAYOUT))
    pointers = x.to(gl.pointer_type(gl.int32), bitcast=True) + step * (LANES * PAIRS) + place
    pairs = gl.expand_dims(load_inside(pointers, place < K // 2 - step * (LANES * PAIRS), EVEN), 0)
    word = split_four(words, LANES, LAYOUT)
    total = gl.zeros([words.shape[0], LANES], gl.float32, LAYOUT)
    if FORM.weights.format == "fp8":
        even, odd = gl.split(gl.reshape(pairs, [1, LANES * 4, 2]))
        first, second = split_four(even, LANES, LAYOUT), split_four(odd, LANES, LAYOUT)
        for i in gl.static_range(4):
            a, b = widen(first[i], x.dtype.element_ty)
            c, d = widen(second[i], x.dtype.element_ty)
            total = gl.inline_asm_elementwise(
                _FP8, "=&f,r,f,f,f,f,f", [word[i], a, b, c, d, total], gl.float32, is_pure=True, pack=1
            )
        if FORM.has_scales:
            total *= scale.to(gl.float32)
    else:
        pair = split_four(pairs, LANES, LAYOUT)
        for i in gl.static_range(4):
            a, b = widen(pair[i], x.dtype.element_ty)
            low, high = widen(word[i], x.dtype.element_ty)
            total += low * a
            total += high * b
    return total


@gluon.jit
def widen(pair, DTYPE: gl.constexpr):
    """Both 16-bit floats of each word ``pair``, the low half first, in float32."""
    if gl.bfloat16 == DTYPE:
        low = (pair << 16).to(gl.float32, bitcast=True)
        high = (pair & -65536).to(gl.float32, bitcast=True)
    else:
        low = (pair & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
        high = ((pair >> 16) & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
    return low, high
