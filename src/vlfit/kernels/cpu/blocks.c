// Blocks of GGUF files as they lie in the file: their scales and codes. Part of products.c.
//
// A block is a run of 32, 64 or 256 weights of a row with its scales. Every weight is code * scale, or code * scale -
// minimum, for groups of 16 or 32. A few rows of the common types are multiplied straight from the blocks in integers
// (planes.c, ``block_codes``); for all else the codes of four outputs at a time are brought into bytes, which stay in
// the nearest cache, and go on as codes of 8 bits.

// ``order`` in Weight: the row of the file in which an output lies.
INLINE const uint8_t *row_at(const Weight *w, int64_t row) {
    return w->codes + (w->order ? w->order[row] : row) * w->row_bytes;
}

INLINE int is_blocks(int format) { return format >= Q4_0; }

// Weights of a block; of other formats 1.
INLINE int block_inputs(int format) {
    if (!is_blocks(format)) return 1;
    return format >= Q2_K && format <= IQ4_XS ? 256 : format == NVFP4 ? 64 : 32;
}

// Neighbours that share a scale.
INLINE int block_group(int format) {
    return format == Q6_K || format == Q2_K || format == Q3_K || format == NVFP4 ? 16 : 32;
}

INLINE int block_bytes(int format) {
    switch (format) {
    case Q4_0: case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case IQ4_XS: return 136;
    case MXFP4: return 17;
    default: return 36;
    }
}

INLINE float half(const uint8_t *at) {
#if LEVEL > 0
    return _cvtsh_ss(half_at(at));
#else
    return from_f16(half_at(at));
#endif
}

INLINE uint32_t word_at(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

#define UNROLL _Pragma("GCC unroll 8")

typedef uint8_t bytes16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t bytes32 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint32_t words16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t pairs16 __attribute__((vector_size(16)));
typedef uint16_t pairs32 __attribute__((vector_size(32)));

// Bits of each byte from ``by`` on, as many as ``mask`` has.
#define BITS16(bytes, by, mask) ((bytes16)((pairs16)(bytes) >> (by)) & (uint8_t)(mask))
#define BITS32(bytes, by, mask) ((bytes32)((pairs32)(bytes) >> (by)) & (uint8_t)(mask))

// --- scales ------------------------------------------------------------------------------------------------

// Scales are made of RUN inputs at a time: 8 or 16 groups, in whole blocks.
#define RUN 256
#define MOST_RUN_BYTES 272

INLINE int64_t run_bytes(const int format) { return RUN / block_inputs(format) * block_bytes(format); }

// Floats of memory for a row of blocks: its codes as bytes.
INLINE int64_t block_scratch_of(const Weight *w) { return is_blocks(w->format) ? w->inputs / 4 + 4 * LANES + 16 : 0; }

// The float16 numbers at ``at`` of eight blocks of ``size`` bytes.
INLINE void eight_halves(const uint8_t *at, const int size, float *to) {
#if LEVEL > 0
    uint64_t low = 0, high = 0;
    UNROLL
    for (int i = 0; i < 4; i++) {
        low |= (uint64_t)half_at(at + i * size) << 16 * i;
        high |= (uint64_t)half_at(at + (i + 4) * size) << 16 * i;
    }
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_set_epi64x((int64_t)high, (int64_t)low)));
#else
    for (int i = 0; i < 8; i++) to[i] = half(at + i * size);
#endif
}

// Eight of the ``bytes``, from ``first`` on, times ``factor``.
INLINE void eight_scales(bytes16 bytes, const int first, float factor, float *to) {
#if LEVEL > 0
    const __m128i some = first ? _mm_unpackhi_epi64((__m128i)bytes, (__m128i)bytes) : (__m128i)bytes;
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(some)), _mm256_set1_ps(factor)));
#else
    for (int i = 0; i < 8; i++) to[i] = (float)bytes[first + i] * factor;
#endif
}

// The 16 signed bytes at ``from`` times ``factor``.
INLINE void sixteen_scales(const int8_t *from, float factor, float *to) {
    for (int i = 0; i < 16; i += LANES)
        store(to + i, decode(INT8, (const uint8_t *)from + i, 0) * factor);
}

// The scales of the run at ``at``, and its minima or nothing.
INLINE void run_scales(const int format, const uint8_t *at, float *scales, float *less) {
    switch (format) {
    case Q8_0: case Q4_0: case Q5_0: case IQ4_NL: eight_halves(at, block_bytes(format), scales); return;
    case Q4_1: case Q5_1:
        eight_halves(at, block_bytes(format), scales);
        eight_halves(at + 2, block_bytes(format), less);
        for (int i = 0; i < 8; i++) less[i] = -less[i];
        return;
    case Q4_K: case Q5_K: {  // of six bits; of the last four scales and minima the upper two lie with the first four
        const words16 stored = *(const words16 *)at, masks = {0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f};
        const words16 low = {stored[1], stored[3], stored[2], stored[3]}, above = {0, stored[1], 0, stored[2]};
        const bytes16 six = (bytes16)((low >> (words16){0, 0, 0, 4} & masks) | (above >> 2 & 0x30303030));
        eight_scales(six, 0, half(at), scales);
        eight_scales(six, 8, half(at + 2), less);
        return;
    }
    case Q6_K: sixteen_scales((const int8_t *)at + 192, half(at + 208), scales); return;
    case Q2_K: {
        const bytes16 both = *(const bytes16 *)at, first = both & 15, second = BITS16(both, 4, 15);
        sixteen_scales((const int8_t *)&first, half(at + 80), scales);
        sixteen_scales((const int8_t *)&second, half(at + 82), less);
        return;
    }
    case Q3_K: {
        const uint32_t a = word_at(at + 96), m = word_at(at + 100), c = word_at(at + 104);
        const uint32_t words[4] = {
            (a & 0x0f0f0f0f) | (c << 4 & 0x30303030), (m & 0x0f0f0f0f) | (c << 2 & 0x30303030),
            (a >> 4 & 0x0f0f0f0f) | (c & 0x30303030), (m >> 4 & 0x0f0f0f0f) | (c >> 2 & 0x30303030),
        };
        bytes16 some;
        memcpy(&some, words, 16);
        some -= 32;
        sixteen_scales((const int8_t *)&some, half(at + 108), scales);
        return;
    }
    case IQ4_XS:
        for (int i = 0; i < 8; i++) {
            const int low = at[4 + i / 2] >> i % 2 * 4 & 15, high = half_at(at + 2) >> 2 * i & 3;
            scales[i] = half(at) * (float)((low | high << 4) - 32);
        }
        return;
    case MXFP4:  // half of two to a power; the two smallest are subnormal
        for (int i = 0; i < 8; i++, at += 17)
            scales[i] = bits_to_float(*at < 2 ? 0x00200000u << *at : (*at - 1u) << 23);
        return;
    default:  // NVFP4: half of an e4m3 without a sign; 127 counts as 0
        for (int i = 0; i < 16; i++) {
            const int stored = at[i / 4 * 36 + i % 4], exponent = stored >> 3 & 15;
            const float fraction = (float)(stored & 7);
            const float value = exponent ? (8 + fraction) * bits_to_float((uint32_t)(exponent + 117) << 23)
                                         : fraction * 0x1p-9f;
            scales[i] = stored == 127 ? 0 : value * 0.5f;
        }
    }
}

// The scales [groups] of one output, and its minima or nothing.
static void block_scales(const Weight *w, int64_t row, float *scales, float *less) {
    const uint8_t *at = row_at(w, row);
    const int64_t size = run_bytes(w->format), in_run = RUN / block_group(w->format);
    int64_t left = w->row_bytes, g = 0;
    for (; left >= size; left -= size, at += size, g += in_run) run_scales(w->format, at, scales + g, less + g);
    if (left) {
        uint8_t run[MOST_RUN_BYTES];
        float some[16], others[16];
        run_scales(w->format, whole(at, left, size, run), some, others);
        memcpy(scales + g, some, (w->groups - g) * sizeof(float));
        memcpy(less + g, others, (w->groups - g) * sizeof(float));
    }
}

// --- codes -------------------------------------------------------------------------------------------------

static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t FP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Low and then high halves of 16 bytes, less ``middle``.
INLINE void nibbles_of(const uint8_t *at, int middle, int8_t *to) {
    const bytes16 packed = *(const bytes16 *)at;
    *(bytes16 *)to = (packed & 15) - (uint8_t)middle;
    *(bytes16 *)(to + 16) = BITS16(packed, 4, 15) - (uint8_t)middle;
}

// The values of the low and then of the high halves of 16 bytes; ``runs``: of each 16 / ``runs`` in turn.
INLINE void looked_up(const uint8_t *at, const int8_t *values, int runs, int8_t *to) {
#if LEVEL > 0
    const __m128i packed = _mm_loadu_si128((const __m128i *)at), low = _mm_set1_epi8(15);
    const __m128i table = _mm_loadu_si128((const __m128i *)values);
    const __m128i first = _mm_shuffle_epi8(table, _mm_and_si128(packed, low));
    const __m128i second = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(packed, 4), low));
    _mm_storeu_si128((__m128i *)to, runs == 1 ? first : _mm_unpacklo_epi64(first, second));
    _mm_storeu_si128((__m128i *)(to + 16), runs == 1 ? second : _mm_unpackhi_epi64(first, second));
#else
    const int size = 16 / runs;
    for (int i = 0; i < 16; i++) {
        to[i / size * 2 * size + i % size] = values[at[i] & 15];
        to[i / size * 2 * size + size + i % size] = values[at[i] >> 4];
    }
#endif
}

// Codes of 5 bits: ``above`` holds their fifth bits.
INLINE void fives_of(uint32_t above, const uint8_t *at, int middle, int8_t *to) {
#if LEVEL > 0
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i others = _mm256_set1_epi64x(0x7fbfdfeff7fbfdfe);
    const __m256i fifth = _mm256_cmpeq_epi8(
        _mm256_or_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)above), byte_of), others), _mm256_set1_epi8(-1));
    const __m128i packed = _mm_loadu_si128((const __m128i *)at);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
    const __m256i four = _mm256_and_si256(both, _mm256_set1_epi8(15));
    const __m256i code = _mm256_or_si256(four, _mm256_and_si256(fifth, _mm256_set1_epi8(16)));
    _mm256_storeu_si256((__m256i *)to, _mm256_sub_epi8(code, _mm256_set1_epi8((char)middle)));
#else
    for (int i = 0; i < 16; i++) {
        to[i] = (int8_t)(((at[i] & 15) | (above >> i & 1) << 4) - middle);
        to[i + 16] = (int8_t)((at[i] >> 4 | (above >> (i + 16) & 1) << 4) - middle);
    }
#endif
}

// The codes of the block at ``at``.
INLINE void unpack_block(const int format, const uint8_t *at, int8_t *to) {
    switch (format) {
    case Q4_0: nibbles_of(at + 2, 8, to); return;
    case Q4_1: nibbles_of(at + 4, 0, to); return;
    case Q5_0: fives_of(word_at(at + 2), at + 6, 16, to); return;
    case Q5_1: fives_of(word_at(at + 4), at + 8, 0, to); return;
    case Q8_0: *(bytes32 *)to = *(const bytes32 *)(at + 2); return;
    case IQ4_NL: looked_up(at + 2, IQ4_VALUES, 1, to); return;
    case MXFP4: looked_up(at + 1, FP4_VALUES, 1, to); return;
    case IQ4_XS:
        for (int i = 0; i < 8; i++) looked_up(at + 8 + 16 * i, IQ4_VALUES, 1, to + 32 * i);
        return;
    case Q4_K:
        for (int i = 0; i < 4; i++) {
            const bytes32 packed = *(const bytes32 *)(at + 16 + 32 * i);
            *(bytes32 *)(to + 64 * i) = packed & 15;
            *(bytes32 *)(to + 64 * i + 32) = BITS32(packed, 4, 15);
        }
        return;
    case Q2_K:
        UNROLL
        for (int i = 0; i < 8; i++)
            *(bytes32 *)(to + 32 * i) = BITS32(*(const bytes32 *)(at + 16 + i / 4 * 32), i % 4 * 2, 3);
        return;
    case Q3_K: {
        const bytes32 above = *(const bytes32 *)at;
        UNROLL
        for (int i = 0; i < 8; i++) {
            const bytes32 low = BITS32(*(const bytes32 *)(at + 32 + i / 4 * 32), i % 4 * 2, 3);
            const bytes32 high = i < 2 ? (bytes32)((pairs32)above << (2 - i)) : (bytes32)((pairs32)above >> (i - 2));
            *(bytes32 *)(to + 32 * i) = (low | (high & 4)) - 4;
        }
        return;
    }
    case Q5_K: {
        const bytes32 above = *(const bytes32 *)(at + 16);
        UNROLL
        for (int i = 0; i < 8; i++) {
            const bytes32 low = BITS32(*(const bytes32 *)(at + 48 + i / 2 * 32), i % 2 * 4, 15);
            const bytes32 high = i < 4 ? (bytes32)((pairs32)above << (4 - i)) : (bytes32)((pairs32)above >> (i - 4));
            *(bytes32 *)(to + 32 * i) = low | (high & 16);
        }
        return;
    }
    case Q6_K:
        UNROLL
        for (int i = 0; i < 8; i++) {
            const bytes32 low = BITS32(*(const bytes32 *)(at + i / 4 * 64 + i % 2 * 32), i % 4 / 2 * 4, 15);
            const pairs32 above = (pairs32) * (const bytes32 *)(at + 128 + i / 4 * 32);
            const bytes32 high = i % 4 < 2 ? (bytes32)(above << (4 - i % 4 * 2)) : (bytes32)(above >> (i % 4 * 2 - 4));
            *(bytes32 *)(to + 32 * i) = (low | (high & 48)) - 32;
        }
        return;
    default:  // NVFP4
        looked_up(at + 4, FP4_VALUES, 2, to);
        looked_up(at + 20, FP4_VALUES, 2, to + 32);
    }
}

#define UNPACK_ROW(format)                                                                                    \
    static __attribute__((noinline)) void unpack_##format(const uint8_t *at, int64_t blocks, int64_t ahead,   \
                                                          int8_t *to) {                                       \
        for (int64_t b = 0; b < blocks; b++, at += block_bytes(format), to += block_inputs(format)) {         \
            for (int i = 0; i < block_bytes(format); i += 64) __builtin_prefetch(at + ahead + i, 0, 2);       \
            unpack_block(format, at, to);                                                                     \
        }                                                                                                     \
    }
UNPACK_ROW(Q4_0)
UNPACK_ROW(Q4_1)
UNPACK_ROW(Q5_0)
UNPACK_ROW(Q5_1)
UNPACK_ROW(Q8_0)
UNPACK_ROW(IQ4_NL)
UNPACK_ROW(MXFP4)
UNPACK_ROW(NVFP4)
UNPACK_ROW(Q2_K)
UNPACK_ROW(Q3_K)
UNPACK_ROW(Q4_K)
UNPACK_ROW(Q5_K)
UNPACK_ROW(Q6_K)
UNPACK_ROW(IQ4_XS)

// The codes of one output as signed bytes [inputs]; ``ahead``: bytes from it to what is read next.
static void unpack_row(const Weight *w, int64_t row, int64_t ahead, int8_t *to) {
    static void (*const by_format[])(const uint8_t *, int64_t, int64_t, int8_t *) = {
        [Q4_0] = unpack_Q4_0, [Q4_1] = unpack_Q4_1, [Q5_0] = unpack_Q5_0, [Q5_1] = unpack_Q5_1,
        [Q8_0] = unpack_Q8_0, [IQ4_NL] = unpack_IQ4_NL, [MXFP4] = unpack_MXFP4, [NVFP4] = unpack_NVFP4,
        [Q2_K] = unpack_Q2_K, [Q3_K] = unpack_Q3_K, [Q4_K] = unpack_Q4_K, [Q5_K] = unpack_Q5_K,
        [Q6_K] = unpack_Q6_K, [IQ4_XS] = unpack_IQ4_XS,
    };
    by_format[w->format](row_at(w, row), w->inputs / block_inputs(w->format), ahead, to);
}

// Where in the memory of scratch_of the codes of an output are.
INLINE int8_t *codes_in(const Weight *w, float *scratch) {
    return (int8_t *)(((uintptr_t)(scratch + 2 * (w->groups + LANES)) + 63) / 64 * 64);
}
