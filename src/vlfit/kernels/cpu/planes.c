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
    int64_t bytes;  // of a row of codes
    int shift;
    uint32_t mark;
    vi select;
} Planes;

// --- products -----------------------------------------------------------------------------------------------

// The step of the inputs in planes at ``x``.
INLINE vf step_at(const int format, const uint8_t *x) { return load((const float *)(x + BLOCK_BYTES(format)) - LANES); }

// ``part`` less what its inputs ``stored`` in planes add because codes are not negative.
INLINE vi add_offset(const int format, vi part, const uint8_t *stored) {
    if (format == Q4_1 || format == Q4_K || format == Q5_K) return part;
    const vi offset = *(const vi_aligned *)stored;
    return (vi)((vu)part + (vu)(format == Q6_K ? offset >> 2 : offset));
}

// The sums of code * input of step ``step``, in planes at ``x``, of ``R`` runs.
INLINE void add_planes(const int format, const int R, const vu *even, const vu *odd, const uint8_t *x, vi *part) {
    const int halves = HALVES(format);
    UNROLL
    for (int r = 0; r < R; r++) part[r] = (vi){0};
    UNROLL
    for (int plane = 0; plane < PLANES; plane++, x += halves * 4 * LANES)  // the highest digits first
        UNROLL
        for (int r = 0; r < R; r++) {
            part[r] = (vi)((vu)part[r] << 8);
            part[r] = is_four(format) ? dot_both(part[r], even[r], odd[r], x) : dot(part[r], even[r], x);
        }
    UNROLL
    for (int r = 0; r < R; r++) part[r] = add_offset(format, part[r], x);
}

// Add blocks ``first`` to ``end`` to ``total``. ``wide``: a group is at least a block. ``last``: the last block,
// of which not all codes are there.
INLINE void add_blocks(const int format, const int R, const int M, const int wide, const int last, const Planes *p,
                       int64_t first, int64_t end, vf total[TOGETHER][4]) {
    const vu low = (vu){0} + 0x0f0f0f0fu, mark = (vu){0} + p->mark;
    const Ahead ahead = look_ahead(p->codes[0], p->bytes, R);
    for (int64_t b = first; b < end; b++) {
        const int64_t at = b * 4 * LANES;
        vu even[TOGETHER], odd[TOGETHER];
        vf scale[TOGETHER];
        #pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            uint8_t padded[4 * LANES];
            const uint8_t *codes = p->codes[r] + at;
            if (last) codes = whole(codes, p->bytes - at, 4 * LANES, padded);
            const vu packed = *(const vu_loose *)codes;
            if (!last && (LEVEL == 512 || b % 2 == 0)) ask_for(ahead, at, r);
            even[r] = format == INT4 ? packed & low : packed ^ mark;
            odd[r] = packed >> 4 & low;
            scale[r] = wide ? all(p->scales[r][b * LANES >> p->shift])
                            : spread(p->scales[r], b * LANES, p->shift, p->select);
        }
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const uint8_t *digits = p->x[m] + b * BLOCK_BYTES(format);
            vi part[TOGETHER];
            add_planes(format, R, even, odd, digits, part);
            const vf step = step_at(format, digits);
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) total[r][m] += __builtin_convertvector(part[r], vf) * (scale[r] * step);
        }
    }
}

// ``multiply``, with inputs in planes.
INLINE void multiply_planes(const int format, const int R, const int M, const Part *p, int64_t row, int64_t x_row,
                            float *scratch) {
    const Weight *w = p->weight;
    const int64_t span = scratch_of(w), whole_blocks = w->inputs / BLOCK_INPUTS(format);
    float *less[TOGETHER];
    vf total[TOGETHER][4];
    int any = 0;
    Planes planes;
    ask_for_scales(w, row + 2 * R, R);
    planes.bytes = code_bytes(p);
    planes.shift = shift_for(w->group / (4 * HALVES(format)), w->groups);
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
    if (planes.shift >= 30 || 1 << planes.shift >= LANES)
        add_blocks(format, R, M, 1, 0, &planes, 0, whole_blocks, total);
    else
        add_blocks(format, R, M, 0, 0, &planes, 0, whole_blocks, total);
    if (w->inputs % BLOCK_INPUTS(format))
        add_blocks(format, R, M, 0, 1, &planes, whole_blocks, whole_blocks + 1, total);
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) finish(p, row + r, x_row + m, sum(total[r][m]), any ? less[r] : NULL);
}

// --- straight from blocks of GGUF files -----------------------------------------------------------------------
//
// A run of 256 inputs takes RUN / BLOCK_INPUTS steps. In blocks of 4 bits a byte holds codes 16 inputs apart, or 32, and
// not neighbours: ``even`` gets the first 16 of 32 neighbours and ``odd`` the others, so that the eight inputs of a lane
// share a scale. Of two steps the first has every other group of 32, and the second those between. Inputs lie so in
// planes (cut_block_4). Q8_0 is taken plus 128, Q6_K plus 32, which ``add_offset`` makes good as for Q4_0; types with
// minima have no offset.

// The codes of step ``step`` of the run at ``at``: ``even``, and of 4 bits ``odd``.
INLINE void block_codes(const int format, const uint8_t *at, const int step, vu *even, vu *odd) {
#if LEVEL == 512
    const __m512i low = _mm512_set1_epi8(15);
    if (format == Q4_0 || format == Q4_1) {
        const int size = block_bytes(format);
        at += (step + 1) * size - 16;
        __m512i packed = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
        packed = _mm512_inserti32x4(packed, _mm_loadu_si128((const __m128i *)(at + 2 * size)), 1);
        packed = _mm512_inserti32x4(packed, _mm_loadu_si128((const __m128i *)(at + 4 * size)), 2);
        packed = _mm512_inserti32x4(packed, _mm_loadu_si128((const __m128i *)(at + 6 * size)), 3);
        *even = (vu)_mm512_and_si512(packed, low);
        *odd = (vu)_mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
    } else if (format == Q4_K) {
        const __m512i some = _mm512_loadu_si512((const void *)(at + 16)), more = _mm512_loadu_si512((const void *)(at + 80));
        const __m512i first = _mm512_shuffle_i64x2(some, more, 0x88), second = _mm512_shuffle_i64x2(some, more, 0xdd);
        *even = (vu)_mm512_and_si512(step ? _mm512_srli_epi16(first, 4) : first, low);
        *odd = (vu)_mm512_and_si512(step ? _mm512_srli_epi16(second, 4) : second, low);
    } else if (format == Q8_0) {
        at += 68 * step;
        const __m512i some = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(at + 2)));
        const __m512i both = _mm512_inserti64x4(some, _mm256_loadu_si256((const __m256i *)(at + 36)), 1);
        *even = (vu)_mm512_xor_si512(both, _mm512_set1_epi8((char)0x80));
    } else if (format == Q6_K) {
        const int side = step / 2, upper = step % 2;
        const __m512i turn = _mm512_inserti64x4(_mm512_set1_epi32(upper ? 0 : 28), _mm256_set1_epi32(upper ? 2 : 30), 1);
        const __m512i packed = _mm512_loadu_si512((const void *)(at + 64 * side));
        const __m512i four = upper ? _mm512_srli_epi16(packed, 4) : packed;
        const __m512i two = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 128 + 32 * side)));
        const __m512i code = _mm512_ternarylogic_epi32(four, _mm512_rorv_epi32(two, turn), low, 0xe4);
        *even = (vu)_mm512_and_si512(code, _mm512_set1_epi8(63));
    } else {  // Q5_K
        const __m512i by = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        const __m512i turn = _mm512_inserti64x4(_mm512_set1_epi32((2 * step + 28) & 31), _mm256_set1_epi32((2 * step + 29) & 31), 1);
        const __m512i four = _mm512_srlv_epi16(
            _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 48 + 32 * step))), by);
        const __m512i one = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(at + 16)));
        const __m512i code = _mm512_ternarylogic_epi32(four, _mm512_rorv_epi32(one, turn), low, 0xe4);
        *even = (vu)_mm512_and_si512(code, _mm512_set1_epi8(31));
    }
#else
    const __m256i low = _mm256_set1_epi8(15);
    if (format == Q4_0 || format == Q4_1) {
        const int size = block_bytes(format);
        at += (step / 2 * 4 + step % 2 + 1) * size - 16;
        const __m256i packed = _mm256_loadu2_m128i((const __m128i *)(at + 2 * size), (const __m128i *)at);
        *even = (vu)_mm256_and_si256(packed, low);
        *odd = (vu)_mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
    } else if (format == Q4_K) {
        at += 16 + 64 * (step / 2);
        const __m256i some = _mm256_loadu_si256((const __m256i *)at), more = _mm256_loadu_si256((const __m256i *)(at + 32));
        const __m256i first = _mm256_permute2x128_si256(some, more, 0x20);
        const __m256i second = _mm256_permute2x128_si256(some, more, 0x31);
        *even = (vu)_mm256_and_si256(step % 2 ? _mm256_srli_epi16(first, 4) : first, low);
        *odd = (vu)_mm256_and_si256(step % 2 ? _mm256_srli_epi16(second, 4) : second, low);
    } else if (format == Q8_0) {
        const __m256i some = _mm256_loadu_si256((const __m256i *)(at + 34 * step + 2));
        *even = (vu)_mm256_xor_si256(some, _mm256_set1_epi8((char)0x80));
    } else if (format == Q6_K) {
        const int side = step / 4, quarter = step % 4;
        const __m256i four = _mm256_srl_epi16(
            _mm256_loadu_si256((const __m256i *)(at + 64 * side + 32 * (quarter % 2))), _mm_cvtsi32_si128(4 * (quarter / 2)));
        const __m256i two = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(at + 128 + 32 * side)),
                                             _mm_cvtsi32_si128(2 * quarter));
        const __m256i above = _mm256_slli_epi16(_mm256_and_si256(two, _mm256_set1_epi8(3)), 4);
        *even = (vu)_mm256_or_si256(_mm256_and_si256(four, low), above);
    } else {  // Q5_K
        const __m256i four = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(at + 48 + 32 * (step / 2))),
                                              _mm_cvtsi32_si128(4 * (step % 2)));
        const __m256i one = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(at + 16)), _mm_cvtsi32_si128(step));
        const __m256i above = _mm256_slli_epi16(_mm256_and_si256(one, _mm256_set1_epi8(1)), 4);
        *even = (vu)_mm256_or_si256(_mm256_and_si256(four, low), above);
    }
#endif
}

// Add the products of step ``step`` of the ``R`` runs at ``at``, with inputs in planes at ``x``. ``groups``: of each lane
// in the first step.
INLINE void add_step(const int format, const int R, const uint8_t *const *at, float scales[TOGETHER][16], const uint8_t *x,
                     vi groups, const int step, vf *total) {
    const int apart = HALVES(format), in_step = BLOCK_INPUTS(format) / block_group(format);
    const int first = step / apart * apart * in_step + step % apart;
    const vf unit = step_at(format, x);
    vu even[TOGETHER], odd[TOGETHER];
    vi part[TOGETHER];
    UNROLL
    for (int r = 0; r < R; r++) block_codes(format, at[r], step, &even[r], &odd[r]);
    add_planes(format, R, even, odd, x, part);
    UNROLL
    for (int r = 0; r < R; r++) {
#if LEVEL == 512
        const vf scale = (vf)_mm512_permutexvar_ps((__m512i)(groups + first), (__m512)load(scales[r]));
#else
        const __m256 some = (__m256)load(scales[r] + first / LANES * LANES);
        const vf scale = (vf)_mm256_permutevar8x32_ps(some, (__m256i)(groups + first));
#endif
        total[r] += __builtin_convertvector(part[r], vf) * (scale * unit);
    }
}

// ``R`` outputs from ``row`` on, for one row of inputs.
INLINE void multiply_blocks(const int format, const int R, const Part *p, int64_t row, int64_t x_row) {
    const Weight *w = p->weight;
    const int64_t size = run_bytes(format), bytes = w->row_bytes;
    const int affine = format == Q4_1 || format == Q4_K || format == Q5_K;
    const vi groups = selection(__builtin_ctz(block_group(format) / 4 / HALVES(format))) * HALVES(format);
    const uint8_t *x = p->planes + x_row * p->plane_bytes;
    const float *sums = affine ? p->sums + x_row * sums_of(w) : NULL;
    const uint8_t *at[TOGETHER];
    vf total[TOGETHER];
    __m256 minus[TOGETHER];
    UNROLL
    for (int r = 0; r < R; r++) {
        at[r] = row_at(w, row + r);
        total[r] = (vf){0};
        minus[r] = (__m256){0};
    }
    const uint8_t *ahead = at[0] + 2 * R * bytes;
    uint8_t last[TOGETHER][MOST_RUN_BYTES];
    for (int64_t left = bytes; left > 0; left -= size) {
        float scales[TOGETHER][16], less[8];
        UNROLL
        for (int r = 0; r < R; r++) {
            if (RUN > block_inputs(format)) at[r] = whole(at[r], left, size, last[r]);
            run_scales(format, at[r], scales[r], less);
            if (affine) minus[r] += _mm256_loadu_ps(less) * _mm256_loadu_ps(sums);
        }
        for (int64_t line = 0; line < R * size; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        ahead += R * size;
        for (int step = 0; step < RUN / BLOCK_INPUTS(format); step += 2, x += 2 * BLOCK_BYTES(format)) {
            add_step(format, R, at, scales, x, groups, step, total);
            add_step(format, R, at, scales, x + BLOCK_BYTES(format), groups, step + 1, total);
        }
        UNROLL
        for (int r = 0; r < R; r++) at[r] += size;
        if (affine) sums += 8;
    }
    UNROLL
    for (int r = 0; r < R; r++) {
        float value = sum(total[r]);
        if (affine) value -= sum_of_eight(minus[r]);
        finish(p, row + r, x_row, value, NULL);
    }
}

// --- inputs -----------------------------------------------------------------------------------------------

// ``BLOCK_INPUTS`` inputs as integers: ``integers``, in steps of the result.
INLINE float cut_block(const int size, const float *from, int32_t *integers) {
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
    for (int i = 0; i < size; i += LANES) {
        const vf value = load(from + i) * inverse;
#if LEVEL == 512
        const vi some = (vi)_mm512_cvtps_epi32((__m512)value);
#else
        const vi some = (vi)_mm256_cvtps_epi32((__m256)value);
#endif
        *(vi_loose *)(integers + i) = usable ? some : (vi){0};
    }
    // Of an input that is no number nothing can be a number.
    return usable ? bits_to_float(power - ((uint32_t)(INPUT_BITS - 1) << 23)) : bits < 0x7f800000 ? 0 : __builtin_nanf("");
}

// One row of ``inputs`` into planes, in whole runs.
INLINE void cut_into_planes(const int format, const float *x, int64_t inputs, uint8_t *to) {
    const int size = BLOCK_INPUTS(format), halves = HALVES(format), each = size / LANES, planes = PLANES * halves * 4 * LANES;
    for (int64_t begin = 0; begin < (inputs + RUN - 1) / RUN * RUN; begin += 2 * size) {
        const int64_t left = begin < inputs ? inputs - begin : 0;
        float from[16 * LANES] = {0}, scales[2];
        int32_t integers[16 * LANES];
        memcpy(from, x + begin, (left < 2 * size ? left : 2 * size) * sizeof(float));
        for (int b = 0; b < 2; b++) scales[b] = cut_block(size, from + b * size, integers + b * size);
        for (int b = 0; b < 2; b++, to += BLOCK_BYTES(format)) {
            int32_t here[8 * LANES];
            int32_t *offset = (int32_t *)(to + planes);
            float *scale = (float *)offset + LANES;
            for (int i = 0; i < size; i++)
                here[i] = integers[is_blocks(format) ? (i / 32 * 2 + b) * 32 + i % 2 * 16 + i % 32 / 2 : b * size + i];
            for (int lane = 0; lane < LANES; lane++) {
                int32_t some = 0;
                for (int i = 0; i < each; i++) some += here[lane * each + i];
                offset[lane] = some * (is_four(format) ? -8 : -128);
                scale[lane] = scales[is_blocks(format) ? 2 * lane / LANES : b];
            }
            for (int i = 0; i < size; i++) here[i] = (here[i] + 0x808080) ^ 0x808080;  // bytes: the digits
            for (int plane = 0; plane < PLANES; plane++)
                for (int half = 0; half < halves; half++)
                    for (int i = 0; i < 4 * LANES; i++)
                        to[(plane * halves + half) * 4 * LANES + i] = here[halves * i + half] >> (16 - 8 * plane);
        }
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
    (is_blocks(format)    ? multiply_blocks(format, R, p, row, m)                                             \
     : has_planes(format) ? multiply_planes(format, R, M, p, row, m, scratch)                                 \
                          : multiply(format, R, M, p, row, m, scratch))
#else
#define BLOCK_BYTES(format) 0
#define BLOCK_INPUTS(format) 1
#define MULTIPLY multiply
static void cut_4(const float *x, int64_t inputs, uint8_t *to) {}
static void cut_8(const float *x, int64_t inputs, uint8_t *to) {}
static void cut_block_4(const float *x, int64_t inputs, uint8_t *to) {}
#endif
