// A few rows of inputs in integers: codes of 4 and 8 bits times inputs in three planes. Part of products.c.
//
// A block is LANES words of codes: 8 LANES codes of 4 bits or 4 LANES of 8. Its inputs become integers below
// 2**22, in steps of a power of two, and these three digits of base 256 from -128 to 127. A lane's sum of code *
// input is exact in 32 bits, modulo 2**32 on the way: it is below eight inputs * 8, or four * 128. Codes of 4 bits
// are taken less 8 and those of 8 bits plus 128 later, in ``offset``. The only errors are half a step of each
// input, at most 2**-22 of the block's largest, and float32's own after that: one conversion and two roundings a
// block.
//
// With AVX-512 and no VNNI multiplying in float32 is as fast, and with AVX2 twice as slow.

INLINE int has_planes(int format) {
    const int eight = format == INT8 || format == Q8_0 || format == Q5_K || format == Q6_K;
    return is_four(format) ? VNNI || LEVEL == 256 : VNNI && eight;
}

#if VNNI || LEVEL == 256
#define PLANES 3
#define HALVES(format) (is_four(format) ? 2 : 1)  // even and odd codes of 4 bits
#define BLOCK_BYTES(format) ((PLANES * HALVES(format) + 2) * 4 * LANES)  // planes, offset, scale in each lane
#define BLOCK_INPUTS(format) (HALVES(format) * 4 * LANES)
#define INPUT_BITS 22

typedef uint32_t vu_aligned __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi_aligned __attribute__((vector_size(4 * LANES), may_alias));

// ``total`` plus, in each lane, the sum of four products of bytes of ``codes`` (unsigned) and ``x`` (signed).
INLINE vi dot(vi total, vu codes, const uint8_t *x) {
#if LEVEL == 512
    return (vi)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_load_si512((const void *)x));
#elif VNNI
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, _mm256_load_si256((const __m256i *)x));
#else
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_load_si256((const __m256i *)x));
    return total + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

// The same of even and odd codes of 4 bits, whose sums of pairs fit into 16 bits.
INLINE vi dot_both(vi total, vu even, vu odd, const uint8_t *x) {
#if VNNI
    return dot(dot(total, even, x), odd, x + 4 * LANES);
#else
    const __m256i pairs = _mm256_add_epi16(
        _mm256_maddubs_epi16((__m256i)even, _mm256_load_si256((const __m256i *)x)),
        _mm256_maddubs_epi16((__m256i)odd, _mm256_load_si256((const __m256i *)(x + 32))));
    return total + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

typedef struct {
    const float *scales[TOGETHER];
    const uint8_t *codes[TOGETHER], *x[4];
    int64_t bytes, inputs;  // of a row of codes
    int shift;
    uint32_t mark;
    vi select;
} Planes;

// --- codes from blocks of GGUF files ------------------------------------------------------------------------
//
// The codes of BLOCK_INPUTS inputs as ``even`` and, of 4 bits, ``odd``. In these blocks a byte holds codes 16 inputs
// apart, or 32, and not neighbours: ``even`` gets the first 16 of 32 neighbours and ``odd`` the others, and inputs lie
// so in planes (cut_block_4), so that the eight inputs of a lane share a scale. Q8_0 is taken plus 128, Q6_K plus 32,
// which ``add_offset`` makes good as for Q4_0; types with minima have no offset.

#if LEVEL == 512
#define BYTES_APART(size, i) (i < left ? _mm_loadu_si128((const __m128i *)(at + (size) * (i))) : _mm_setzero_si128())
#endif

// 4 LANES inputs, or 8 LANES of 4 bits, that begin at input ``index`` of the row at ``codes``. ``left``: blocks of 32
// that are there from it on; all are if it is large.
INLINE void block_codes(const int format, const uint8_t *codes, int64_t index, int64_t left, vu *even, vu *odd) {
    const uint64_t super = (uint64_t)index / 256, inside = (uint64_t)index % 256;
#if LEVEL == 512
    const __m512i low = _mm512_set1_epi8(15);
    if (format == Q4_0 || format == Q4_1) {
        const int size = format == Q4_0 ? 18 : 20;
        const uint8_t *at = codes + (uint64_t)index / 32 * size + size - 16;
        __m512i packed = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
        packed = _mm512_inserti32x4(packed, BYTES_APART(size, 1), 1);
        packed = _mm512_inserti32x4(packed, BYTES_APART(size, 2), 2);
        packed = _mm512_inserti32x4(packed, BYTES_APART(size, 3), 3);
        *even = (vu)_mm512_and_si512(packed, low);
        *odd = (vu)_mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
    } else if (format == Q4_K) {
        const __m512i packed = _mm512_loadu_si512((const void *)(codes + 144 * super + 16 + inside / 2));
        const __m512i first = _mm512_and_si512(packed, low);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
        *even = (vu)_mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), second);
        *odd = (vu)_mm512_permutex2var_epi64(first, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), second);
    } else if (format == Q8_0) {
        const uint8_t *at = codes + (uint64_t)index / 32 * 34 + 2;
        __m512i some = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)at));
        if (left > 1) some = _mm512_inserti64x4(some, _mm256_loadu_si256((const __m256i *)(at + 34)), 1);
        else some = _mm512_zextsi256_si512(_mm512_castsi512_si256(some));
        *even = (vu)_mm512_xor_si512(some, _mm512_set1_epi8((char)0x80));
    } else if (format == Q6_K) {
        const uint8_t *at = codes + 210 * super;
        const uint64_t side = inside / 128, upper = inside / 64 % 2;
        const __m512i by = _mm512_set1_epi16((short)(4 * upper));
        const __m512i turn = _mm512_inserti64x4(_mm512_set1_epi32(upper ? 0 : 28), _mm256_set1_epi32(upper ? 2 : 30), 1);
        const __m512i four = _mm512_srlv_epi16(_mm512_loadu_si512((const void *)(at + 64 * side)), by);
        const __m512i two = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 128 + 32 * side)));
        const __m512i code = _mm512_ternarylogic_epi32(four, _mm512_rorv_epi32(two, turn), low, 0xe4);
        *even = (vu)_mm512_and_si512(code, _mm512_set1_epi8(63));
    } else {  // Q5_K
        const uint8_t *at = codes + 176 * super;
        const int pair = (int)(inside / 64);
        const __m512i by = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        const __m512i turn = _mm512_inserti64x4(_mm512_set1_epi32(2 * pair - 4 & 31), _mm256_set1_epi32(2 * pair - 3 & 31), 1);
        const __m512i four = _mm512_srlv_epi16(
            _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 48 + 32 * pair))), by);
        const __m512i one = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 16)));
        const __m512i code = _mm512_ternarylogic_epi32(four, _mm512_rorv_epi32(one, turn), low, 0xe4);
        *even = (vu)_mm512_and_si512(code, _mm512_set1_epi8(31));
    }
#else
    const __m256i low = _mm256_set1_epi8(15);
    if (format == Q4_0 || format == Q4_1) {
        const int size = format == Q4_0 ? 18 : 20;
        const uint8_t *at = codes + (uint64_t)index / 32 * size + size - 16;
        __m256i packed = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)at));
        packed = _mm256_inserti128_si256(
            packed, left > 1 ? _mm_loadu_si128((const __m128i *)(at + size)) : _mm_setzero_si128(), 1);
        *even = (vu)_mm256_and_si256(packed, low);
        *odd = (vu)_mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
    } else if (format == Q4_K) {
        const __m256i packed = _mm256_loadu_si256((const __m256i *)(codes + 144 * super + 16 + inside / 2));
        const __m256i first = _mm256_and_si256(packed, low);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
        *even = (vu)_mm256_permute2x128_si256(first, second, 0x20);
        *odd = (vu)_mm256_permute2x128_si256(first, second, 0x31);
    } else if (format == Q8_0) {
        const __m256i some = _mm256_loadu_si256((const __m256i *)(codes + (uint64_t)index / 32 * 34 + 2));
        *even = (vu)_mm256_xor_si256(some, _mm256_set1_epi8((char)0x80));
    } else if (format == Q6_K) {
        const uint8_t *at = codes + 210 * super;
        const int64_t side = inside / 128, quarter = inside / 32 % 4;
        const __m256i four = _mm256_srl_epi16(
            _mm256_loadu_si256((const __m256i *)(at + 64 * side + 32 * (quarter % 2))), _mm_cvtsi64_si128(4 * (quarter / 2)));
        const __m256i two = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(at + 128 + 32 * side)),
                                             _mm_cvtsi64_si128(2 * quarter));
        const __m256i above = _mm256_slli_epi16(_mm256_and_si256(two, _mm256_set1_epi8(3)), 4);
        *even = (vu)_mm256_or_si256(_mm256_and_si256(four, low), above);
    } else {  // Q5_K
        const uint8_t *at = codes + 176 * super;
        const int64_t run = inside / 32;
        const __m256i four = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(at + 48 + 32 * (run / 2))),
                                              _mm_cvtsi64_si128(4 * (run % 2)));
        const __m256i one = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(at + 16)), _mm_cvtsi64_si128(run));
        const __m256i above = _mm256_slli_epi16(_mm256_and_si256(one, _mm256_set1_epi8(1)), 4);
        *even = (vu)_mm256_or_si256(_mm256_and_si256(four, low), above);
    }
#endif
}

// ``part`` less what its inputs ``stored`` in planes add because codes are not negative.
INLINE vi add_offset(const int format, vi part, const uint8_t *stored) {
    if (format == Q4_1 || format == Q4_K || format == Q5_K) return part;
    const vi offset = *(const vi_aligned *)stored;
    return (vi)((vu)part + (vu)(format == Q6_K ? offset >> 2 : offset));
}

// --- products -----------------------------------------------------------------------------------------------

// Add blocks ``first`` to ``end`` to ``total``. ``wide``: a group is at least a block. ``last``: the last block,
// of which not all codes are there.
INLINE void add_blocks(const int format, const int R, const int M, const int wide, const int last, const Planes *p,
                       int64_t first, int64_t end, vf total[TOGETHER][4]) {
    const int halves = HALVES(format);
    const vu low = (vu){0} + 0x0f0f0f0fu, mark = (vu){0} + p->mark;
    const int64_t size = block_inputs(format), piece = block_bytes(format) * BLOCK_INPUTS(format) / size;
    const Ahead ahead = look_ahead(p->codes[0], p->bytes, R, is_blocks(format) ? 512 / LEVEL * piece : 64);
    for (int64_t b = first; b < end; b++) {
        const int64_t at = b * 4 * LANES;
        vu even[TOGETHER], odd[TOGETHER];
        vf scale[TOGETHER];
        #pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if (is_blocks(format)) {
                const int64_t index = b * BLOCK_INPUTS(format);
                block_codes(format, p->codes[r], index, last ? (p->inputs - index) / 32 : 1 << 20, &even[r], &odd[r]);
                const uint64_t inside = (uint64_t)index % size;
                const uint64_t near = (uint64_t)index / size * block_bytes(format) + inside * block_bytes(format) / size;
                if (!last && (LEVEL == 512 || b % 2 == 0)) ask_for(ahead, near, r);
            } else {
                uint8_t padded[4 * LANES];
                const uint8_t *codes = p->codes[r] + at;
                if (last) codes = whole(codes, p->bytes - at, 4 * LANES, padded);
                const vu packed = *(const vu_loose *)codes;
                if (!last && (LEVEL == 512 || b % 2 == 0)) ask_for(ahead, at, r);
                even[r] = format == INT4 ? packed & low : packed ^ mark;
                odd[r] = packed >> 4 & low;
            }
            scale[r] = wide ? all(p->scales[r][b * LANES >> p->shift])
                            : spread(p->scales[r], b * LANES, p->shift, p->select);
        }
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const uint8_t *digits = p->x[m] + b * BLOCK_BYTES(format), *rest = digits + PLANES * halves * 4 * LANES;
            vi part[TOGETHER];
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) part[r] = (vi){0};
            #pragma GCC unroll 8
            for (int plane = 0; plane < PLANES; plane++) {  // the highest digits first
                const uint8_t *some = digits + plane * halves * 4 * LANES;
                #pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    part[r] = (vi)((vu)part[r] << 8);
                    part[r] = is_four(format) ? dot_both(part[r], even[r], odd[r], some) : dot(part[r], even[r], some);
                }
            }
            const vf step = load((const float *)rest + LANES);
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                part[r] = add_offset(format, part[r], rest);
                total[r][m] += __builtin_convertvector(part[r], vf) * (scale[r] * step);
            }
        }
    }
}

// ``multiply``, with inputs in planes.
INLINE void multiply_planes(const int format, const int R, const int M, const Part *p, int64_t row, int64_t x_row,
                            float *scratch) {
    const Weight *w = p->weight;
    const int64_t span = scratch_of(w), blocks = p->plane_bytes / BLOCK_BYTES(format);
    const int64_t whole_blocks = w->inputs / BLOCK_INPUTS(format);
    float *less[TOGETHER];
    vf total[TOGETHER][4];
    int any = 0;
    Planes planes;
    ask_for_scales(w, row + 2 * R, R);
    for (int r = 0; r < R; r++) collect_scales(w, row + r, halves_in(w, scratch + r * span));
    planes.bytes = code_bytes(p);
    planes.inputs = w->inputs;
    const int64_t group = is_blocks(format) ? block_group(format) : w->group, lanes = group / (4 * HALVES(format));
    planes.shift = shift_for(lanes, is_blocks(format) ? 2 : w->groups);
    planes.select = selection(planes.shift);
    planes.mark = w->flip ? 0 : 0x80808080u;
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        float *scales = scratch + r * span;
        planes.scales[r] = scales;
        less[r] = scales + w->groups + LANES;
        any |= prepare_scales(format, w, row + r, scales);
        planes.codes[r] = codes_at(p, row + r);
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) total[r][m] = (vf){0};
    }
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++) planes.x[m] = p->planes + (x_row + m) * p->plane_bytes;
    if (is_blocks(format) ? lanes >= LANES : planes.shift >= 30 || 1 << planes.shift >= LANES)
        add_blocks(format, R, M, 1, 0, &planes, 0, whole_blocks, total);
    else
        add_blocks(format, R, M, 0, 0, &planes, 0, whole_blocks, total);
    if (block_inputs(format) % BLOCK_INPUTS(format))
        add_blocks(format, R, M, 0, 1, &planes, whole_blocks, blocks, total);
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) finish(p, row + r, x_row + m, sum(total[r][m]), any ? less[r] : NULL);
}

// One row of ``inputs`` into planes.
INLINE void cut_into_planes(const int format, const float *x, int64_t inputs, uint8_t *to) {
    const int size = BLOCK_INPUTS(format), halves = HALVES(format), each = size / LANES;
    for (int64_t begin = 0; begin < inputs; begin += size, to += BLOCK_BYTES(format)) {
        float from[8 * LANES] = {0};
        int32_t steps[8 * LANES];
        memcpy(from, x + begin, (inputs - begin < size ? inputs - begin : size) * sizeof(float));
        if (is_blocks(format)) {  // neighbours are the inputs whose codes a byte holds: 16 of 32 apart
            float natural[8 * LANES];
            memcpy(natural, from, sizeof(from));
            for (int i = 0; i < size; i++) from[i] = natural[i / 32 * 32 + i % 2 * 16 + i % 32 / 2];
        }
        int32_t bits = 0;  // of the largest magnitude, or above infinity's
        for (int i = 0; i < size; i++) {
            int32_t other;
            memcpy(&other, from + i, 4);
            other &= 0x7fffffff;
            bits = other > bits ? other : bits;
        }
        const float largest = bits_to_float((uint32_t)bits);
        const int usable = bits < 0x7f800000 && largest > 0x1p-100f;
        const uint32_t power = bits & 0x7f800000;  // the exponent of the largest: it is below twice that power of two
        const float inverse = usable ? bits_to_float(((uint32_t)(254 + INPUT_BITS - 1) << 23) - power) : 0;
        // Of an input that is no number nothing can be a number.
        const float scale = usable ? bits_to_float(power - ((uint32_t)(INPUT_BITS - 1) << 23))
                            : bits < 0x7f800000 ? 0 : __builtin_nanf("");
        for (int i = 0; i < size; i += LANES) {
            vf value = load(from + i) * inverse;
#if LEVEL == 512
            vi step = (vi)_mm512_cvtps_epi32((__m512)value);
#else
            vi step = (vi)_mm256_cvtps_epi32((__m256)value);
#endif
            if (!usable) step = (vi){0};
            *(vi_loose *)(steps + i) = step;
        }
        int32_t *offset = (int32_t *)(to + PLANES * halves * 4 * LANES);
        float *scales = (float *)offset + LANES;
        for (int lane = 0; lane < LANES; lane++) {
            int32_t some = 0;
            for (int i = 0; i < each; i++) some += steps[lane * each + i];
            offset[lane] = some * (is_four(format) ? -8 : -128);
            scales[lane] = scale;
        }
        for (int i = 0; i < size; i++) steps[i] = (steps[i] + 0x808080) ^ 0x808080;  // bytes: the digits
        for (int plane = 0; plane < PLANES; plane++)
            for (int half = 0; half < halves; half++, to += 4 * LANES)
                for (int i = 0; i < 4 * LANES; i++) to[i] = steps[halves * i + half] >> (16 - 8 * plane);
        to -= PLANES * halves * 4 * LANES;
    }
}

__attribute__((optimize("O3"))) static void cut_4(const float *x, int64_t inputs, uint8_t *to) {
    cut_into_planes(INT4, x, inputs, to);
}
__attribute__((optimize("O3"))) static void cut_8(const float *x, int64_t inputs, uint8_t *to) {
    cut_into_planes(INT8, x, inputs, to);
}
__attribute__((optimize("O3"))) static void cut_block_4(const float *x, int64_t inputs, uint8_t *to) {
    cut_into_planes(Q4_0, x, inputs, to);
}
#define MULTIPLY(format, R, M, p, row, m, scratch)                                                            \
    (has_planes(format) ? multiply_planes(format, R, M, p, row, m, scratch)                                   \
                        : multiply(format, R, M, p, row, m, scratch))
#else
#define BLOCK_BYTES(format) 0
#define BLOCK_INPUTS(format) 1
#define MULTIPLY multiply
static void cut_4(const float *x, int64_t inputs, uint8_t *to) {}
static void cut_8(const float *x, int64_t inputs, uint8_t *to) {}
static void cut_block_4(const float *x, int64_t inputs, uint8_t *to) {}
#endif
