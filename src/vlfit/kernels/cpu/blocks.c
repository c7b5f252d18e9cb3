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
typedef uint16_t pairs16 __attribute__((vector_size(16)));
typedef uint16_t pairs32 __attribute__((vector_size(32)));

// Bits of each byte from ``by`` on, as many as ``mask`` has.
#define BITS16(bytes, by, mask) ((bytes16)((pairs16)(bytes) >> (by)) & (uint8_t)(mask))
#define BITS32(bytes, by, mask) ((bytes32)((pairs32)(bytes) >> (by)) & (uint8_t)(mask))

// --- scales ------------------------------------------------------------------------------------------------

// Floats of memory for a row of blocks: numbers on their way to scales, and codes as bytes.
INLINE int64_t block_scratch_of(const Weight *w) {
    return is_blocks(w->format) ? w->groups + w->inputs / 4 + 4 * LANES + 16 : 0;
}

// The eight bytes of ``values`` times ``factor``.
INLINE void eight_scales(uint64_t values, float factor, float *to) {
#if LEVEL > 0
    const __m256 wide = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)values)));
    _mm256_storeu_ps(to, _mm256_mul_ps(wide, _mm256_set1_ps(factor)));
#else
    for (int i = 0; i < 8; i++) to[i] = (float)(values >> 8 * i & 255) * factor;
#endif
}

// The 16 signed bytes at ``from`` times ``factor``.
INLINE void sixteen_scales(const int8_t *from, float factor, float *to) {
    for (int i = 0; i < 16; i += LANES)
        store(to + i, decode(INT8, (const uint8_t *)from + i, 0) * factor);
}

// The numbers of 16 bits at byte ``start`` of each block of ``size``, side by side.
INLINE void collect(const uint8_t *at, int64_t blocks, const int size, const int start, uint16_t *to) {
    int64_t b = 0;
    for (at += start; b + 8 <= blocks; b += 8, at += 8 * size) {
        uint64_t low = 0, high = 0;
        UNROLL
        for (int i = 0; i < 4; i++) {
            low |= (uint64_t)half_at(at + i * size) << 16 * i;
            high |= (uint64_t)half_at(at + (i + 4) * size) << 16 * i;
        }
        memcpy(to + b, &low, 8);
        memcpy(to + b + 4, &high, 8);
    }
    for (; b < blocks; b++, at += size) to[b] = half_at(at);
}

// Bring the float16 scales of blocks of 32 side by side, those of minima behind them: ``halves`` [2 * groups]. This is
// done for several outputs before any of them is widened, as a load of what was just stored in pieces waits.
static void collect_scales(const Weight *w, int64_t row, uint16_t *halves) {
    const int format = w->format;
    if (!is_blocks(format) || format == MXFP4 || block_inputs(format) != 32) return;
    const uint8_t *at = row_at(w, row);
    const int64_t blocks = w->groups;
    switch (format) {
    case Q4_0: case IQ4_NL: collect(at, blocks, 18, 0, halves); return;
    case Q5_0: collect(at, blocks, 22, 0, halves); return;
    case Q8_0: collect(at, blocks, 34, 0, halves); return;
    default:
        collect(at, blocks, block_bytes(format), 0, halves);
        collect(at, blocks, block_bytes(format), 2, halves + blocks);
    }
}

// The scales [groups] of one output, and its minima or nothing, after ``collect_scales`` into ``halves``.
static void block_scales(const Weight *w, int64_t row, float *scales, float *less, const uint16_t *halves) {
    const uint8_t *at = row_at(w, row);
    const int format = w->format, size = block_bytes(format);
    const int64_t blocks = w->inputs / block_inputs(format);
    switch (format) {
    case Q8_0: case Q4_0: case Q5_0: case IQ4_NL: widen(F16, (const uint8_t *)halves, scales, blocks); return;
    case Q4_1: case Q5_1:
        widen(F16, (const uint8_t *)halves, scales, blocks);
        widen(F16, (const uint8_t *)(halves + blocks), less, blocks);
        for (int64_t b = 0; b < blocks; b++) less[b] = -less[b];
        return;
    case Q4_K: case Q5_K:
        for (int64_t b = 0; b < blocks; b++, at += size) {
            const uint32_t a = word_at(at + 4), m = word_at(at + 8), c = word_at(at + 12);
            const uint64_t above = (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030);
            const uint64_t minima = (c >> 4 & 0x0f0f0f0f) | (m >> 2 & 0x30303030);
            eight_scales((a & 0x3f3f3f3f) | above << 32, half(at), scales + 8 * b);
            eight_scales((m & 0x3f3f3f3f) | minima << 32, half(at + 2), less + 8 * b);
        }
        return;
    case Q6_K:
        for (int64_t b = 0; b < blocks; b++, at += size)
            sixteen_scales((const int8_t *)at + 192, half(at + 208), scales + 16 * b);
        return;
    case Q2_K:
        for (int64_t b = 0; b < blocks; b++, at += size) {
            const bytes16 both = *(const bytes16 *)at, first = both & 15, second = BITS16(both, 4, 15);
            sixteen_scales((const int8_t *)&first, half(at + 80), scales + 16 * b);
            sixteen_scales((const int8_t *)&second, half(at + 82), less + 16 * b);
        }
        return;
    case Q3_K:
        for (int64_t b = 0; b < blocks; b++, at += size) {
            const uint32_t a = word_at(at + 96), m = word_at(at + 100), c = word_at(at + 104);
            const uint32_t words[4] = {
                (a & 0x0f0f0f0f) | (c << 4 & 0x30303030), (m & 0x0f0f0f0f) | (c << 2 & 0x30303030),
                (a >> 4 & 0x0f0f0f0f) | (c & 0x30303030), (m >> 4 & 0x0f0f0f0f) | (c >> 2 & 0x30303030),
            };
            bytes16 some;
            memcpy(&some, words, 16);
            some -= 32;
            sixteen_scales((const int8_t *)&some, half(at + 108), scales + 16 * b);
        }
        return;
    case IQ4_XS:
        for (int64_t b = 0; b < blocks; b++, at += size)
            for (int i = 0; i < 8; i++) {
                const int low = at[4 + i / 2] >> i % 2 * 4 & 15, high = half_at(at + 2) >> 2 * i & 3;
                scales[8 * b + i] = half(at) * (float)((low | high << 4) - 32);
            }
        return;
    case MXFP4:  // half of two to a power; the two smallest are subnormal
        for (int64_t b = 0; b < blocks; b++)
            scales[b] = bits_to_float(at[17 * b] < 2 ? 0x00200000u << at[17 * b] : (at[17 * b] - 1u) << 23);
        return;
    default:  // NVFP4: half of an e4m3 without a sign; 127 counts as 0
        for (int64_t b = 0; b < blocks; b++)
            for (int i = 0; i < 4; i++) {
                const int stored = at[36 * b + i], exponent = stored >> 3 & 15;
                const float fraction = (float)(stored & 7);
                const float value = exponent ? (8 + fraction) * bits_to_float((uint32_t)(exponent + 117) << 23)
                                             : fraction * 0x1p-9f;
                scales[4 * b + i] = stored == 127 ? 0 : value * 0.5f;
            }
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
    return (int8_t *)(((uintptr_t)(scratch + 3 * w->groups + 6 * LANES) + 63) / 64 * 64);
}
