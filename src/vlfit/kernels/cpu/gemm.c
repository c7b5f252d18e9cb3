// Many rows on CPUs without AMX: codes of 4 and 8 bits times inputs of 16 or 8 bits, in integers. Part of products.c.
//
// A piece is 128 neighbouring inputs, or fewer that share a scale. Its inputs become integers of 16 bits, in steps of
// 1/32767 of the largest; sums of code * input are exact in 32 bits (128 * 128 * 32767 < 2**31). The only errors are
// half a step of each input, 2**-16 of the piece's largest, and float32's own after that: a conversion and two
// roundings a piece. A processor does two to four times as many such products as in float32.
//
// Where inputs may be rounded, and codes have up to five bits, inputs have 8 bits, in steps of 1/127 of the largest:
// an error of 1/254 of it, far below that of the codes. With VNNI twice as many products again. Codes are multiplied
// plus 128 with these.
//
// A thread takes GEMM_OUTPUTS outputs and brings their codes into the order in which they are multiplied, so many
// inputs at a time that they stay in its cache, for all rows.

#define GEMM (VNNI || LEVEL == 256)

INLINE int in_gemm(int format) { return GEMM && (format == INT4 || format == INT8 || is_blocks(format)); }

// Inputs in a word: two of 16 bits, or four of 8.
INLINE int in_word_of(const Weight *w) {
    const int is_narrow = w->format != INT8 && w->format != Q8_0 && w->format != Q6_K;
    return VNNI && w->rounds && is_narrow ? 4 : 2;
}

#if GEMM
#define GEMM_ROWS (LEVEL == 512 ? 8 : 6)  // rows of inputs whose sums are in registers
#define GEMM_OUTPUTS (2 * LANES)
#define GEMM_WORDS 512  // words of inputs that are multiplied with all rows at a time: two or four inputs each
#define PIECE 128
#define GEMM_PITCH 64  // between rows of codes, so that those of all outputs are not in one set of the cache

typedef int16_t vs __attribute__((vector_size(4 * LANES)));

// ``total`` plus, in each lane, two products of 16 bits.
INLINE vi dot_16(vi total, vi codes, vi x) {
#if LEVEL == 512
    return (vi)_mm512_dpwssd_epi32((__m512i)total, (__m512i)codes, (__m512i)x);
#elif VNNI
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)codes, (__m256i)x);
#else
    return total + (vi)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
#endif
}

// ``total`` plus, in each lane, four products of 8 bits: codes without a sign, inputs with one.
INLINE vi dot_8(vi total, vi codes, vi x) {
#if LEVEL == 512 && VNNI
    return (vi)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)x);
#elif VNNI
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, (__m256i)x);
#else
    return total;  // not called
#endif
}

typedef struct {
    const Weight *weight;
    const float *x, *bias;
    // For each GEMM_ROWS rows: words of inputs [inputs / in_word][row]; steps, sums and what totals begin with
    // [pieces][row].
    uint8_t *packed;
    float *out;
    int64_t rows, piece, pieces, block_bytes, out_stride, next, next_input;
    int in_word;  // inputs in a word: two of 16 bits, or four of 8
} Gemm;

INLINE int64_t piece_of(const Weight *w) {
    const int64_t group = is_blocks(w->format) ? block_group(w->format) : w->group;
    return group < PIECE && w->groups > 1 ? group : PIECE;
}

INLINE float *steps_in(const Gemm *job, uint8_t *block) {
    return (float *)(block + job->pieces * job->piece / job->in_word * 4 * GEMM_ROWS);
}

// GEMM_ROWS rows of inputs. Of four neighbours the first and third share a word of 16 bits, as do the others.
static void pack_inputs(const Gemm *job, int64_t number) {
    const int64_t inputs = job->weight->inputs, piece = job->piece;
    uint8_t *block = job->packed + number * job->block_bytes;
    uint32_t *words = (uint32_t *)block;
    float *steps = steps_in(job, block), *sums = steps + job->pieces * GEMM_ROWS;
    int32_t *starts = (int32_t *)(sums + job->pieces * GEMM_ROWS);
    const float most_steps = job->in_word == 4 ? 127 : 32767;
    for (int64_t m = 0; m < GEMM_ROWS; m++) {
        const int64_t row = number * GEMM_ROWS + m;
        for (int64_t p = 0; p < job->pieces; p++) {
            float padded[PIECE];
            int32_t integers[PIECE];
            const int64_t there = inputs - p * piece;
            const float *from = job->x + row * inputs + p * piece;
            if (row >= job->rows || there < piece) {
                memset(padded, 0, sizeof(padded));
                if (row < job->rows) memcpy(padded, from, there * sizeof(float));
                from = padded;
            }
            vi most = {0};
            for (int64_t i = 0; i < piece; i += LANES) {
                const vi some = (vi)load(from + i) & 0x7fffffff, more = some > most;
                most = (some & more) | (most & ~more);
            }
            int32_t bits = 0, total = 0;
            for (int i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
            const float largest = bits_to_float(bits), turn = most_steps / largest;
            // Steps of numbers below 2**-110 would lose digits themselves; what is no number makes none.
            const int usable = bits >= 0x08800000 && bits < 0x7f800000;
            for (int64_t i = 0; i < piece; i += LANES) {
                const vf scaled = (usable ? load(from + i) * turn : (vf){0}) + 0x1.8p23f;
                *(vi_loose *)(integers + i) = (vi)scaled - 0x4b400000;
            }
            uint32_t *to = words + p * piece / job->in_word * GEMM_ROWS + m;
            for (int64_t i = 0; i < piece; i += 4, to += 4 / job->in_word * GEMM_ROWS) {
                total += integers[i] + integers[i + 1] + integers[i + 2] + integers[i + 3];
                if (job->in_word == 4) {
                    to[0] = (integers[i] & 0xff) | (integers[i + 1] & 0xff) << 8 | (integers[i + 2] & 0xff) << 16 |
                            (uint32_t)integers[i + 3] << 24;
                    continue;
                }
                to[0] = (integers[i] & 0xffff) | (uint32_t)integers[i + 2] << 16;
                to[GEMM_ROWS] = (integers[i + 1] & 0xffff) | (uint32_t)integers[i + 3] << 16;
            }
            starts[p * GEMM_ROWS + m] = job->in_word == 4 ? -128 * total : 0;
            const float step = usable ? largest / most_steps : bits < 0x7f800000 ? 0 : __builtin_nanf("");
            steps[p * GEMM_ROWS + m] = step;
            sums[p * GEMM_ROWS + m] = step * (float)total;
        }
    }
}

// The codes of an output as signed bytes, zeros behind them up to ``depth``.
static void codes_to_bytes(const Weight *w, int64_t row, int64_t depth, int8_t *to) {
    const uint8_t *codes = row_at(w, row);
    const int64_t inputs = w->inputs;
    if (is_blocks(w->format)) {
        unpack_row(w, row, w->row_bytes, to);
    } else if (w->format == INT4) {
        for (int64_t i = 0; i < inputs; i += 16) {  // groups are multiples of 16
            const __m128i packed = _mm_loadl_epi64((const __m128i *)(codes + i / 2)), low = _mm_set1_epi8(15);
            const __m128i both = _mm_unpacklo_epi8(_mm_and_si128(packed, low),
                                                   _mm_and_si128(_mm_srli_epi16(packed, 4), low));
            _mm_storeu_si128((__m128i *)(to + i), _mm_sub_epi8(both, _mm_set1_epi8(8)));
        }
    } else {
        memcpy(to, codes, inputs);
        if (w->flip)
            for (int64_t i = 0; i < inputs; i++) to[i] ^= 0x80;
    }
    memset(to + inputs, 0, depth - inputs);
}

typedef struct {
    float *scratch;   // of ``scratch_of``
    int8_t *bytes;    // [GEMM_OUTPUTS, depth + GEMM_PITCH] codes
    uint32_t *words;  // [GEMM_WORDS][GEMM_OUTPUTS] of two codes, or of four
    float *scales, *less;  // [pieces][GEMM_OUTPUTS]
    float *sums;      // [rows][GEMM_OUTPUTS]
} GemmMemory;

// Scales and codes of outputs ``begin`` to ``end``. Returns whether ``less`` counts.
static int unpack_gemm_outputs(const Gemm *job, int64_t begin, int64_t end, GemmMemory *memory) {
    const Weight *w = job->weight;
    const int64_t depth = job->piece * job->pieces, in_group = w->groups == 1 ? job->pieces : w->group / job->piece;
    int any = 0;
    for (int64_t r = 0; r < GEMM_OUTPUTS; r++) {
        if (begin + r >= end) {
            for (int64_t p = 0; p < job->pieces; p++)
                memory->scales[p * GEMM_OUTPUTS + r] = memory->less[p * GEMM_OUTPUTS + r] = 0;
            memset(memory->bytes + r * (depth + GEMM_PITCH), 0, depth);
            continue;
        }
        float *scales = memory->scratch;
        any = prepare_scales(is_blocks(w->format) ? INT8 : w->format, w, begin + r, scales);
        const float *less = scales + w->groups + LANES;
        for (int64_t p = 0; p < job->pieces; p++) {
            memory->scales[p * GEMM_OUTPUTS + r] = scales[p / in_group];
            memory->less[p * GEMM_OUTPUTS + r] = any ? less[p / in_group] : 0;
        }
        codes_to_bytes(w, begin + r, depth, memory->bytes + r * (depth + GEMM_PITCH));
    }
    return any;
}

// Four codes, a byte each, of LANES outputs into the words in which they are multiplied.
INLINE void store_words(const int in_word, const vs four, uint32_t *to) {
    if (in_word == 4) {
        *(vu *)to = (vu)four ^ 0x80808080;
    } else {
        *(vs *)to = (vs)(four << 8) >> 8;
        *(vs *)(to + GEMM_OUTPUTS) = four >> 8;
    }
}

#if LEVEL == 512
// 64 codes of each of 16 outputs, ``pitch`` bytes apart, into words: a matrix of 16 x 16 words is transposed.
INLINE void pack_square(const int in_word, const int8_t *from, int64_t pitch, uint32_t *to) {
    __m512i a[16], b[16];
    #pragma GCC unroll 16
    for (int r = 0; r < 16; r++) a[r] = _mm512_loadu_si512(from + r * pitch);
    #pragma GCC unroll 8
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    #pragma GCC unroll 4
    for (int r = 0; r < 16; r += 4) {  // of each four inputs, four outputs
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    #pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        const __m512i low_2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        const __m512i high_2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        b[i] = _mm512_shuffle_i32x4(low, low_2, 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(high, high_2, 0x88);
        b[i + 8] = _mm512_shuffle_i32x4(low, low_2, 0xdd);
        b[i + 12] = _mm512_shuffle_i32x4(high, high_2, 0xdd);
    }
    #pragma GCC unroll 16
    for (int k = 0; k < 16; k++) store_words(in_word, (vs)b[k], to + k * 4 / in_word * GEMM_OUTPUTS);
}
#endif

// ``count`` inputs from ``first`` on of the bytes of all outputs, into words.
INLINE void pack_codes(const int in_word, const GemmMemory *memory, int64_t depth, int64_t first, int64_t count) {
    uint32_t *to = memory->words;
    const int8_t *from = memory->bytes + first;
    const int64_t pitch = depth + GEMM_PITCH;
    int64_t k = 0;
#if LEVEL == 512
    for (; k + 64 <= count; k += 64, to += 64 / in_word * GEMM_OUTPUTS)
        for (int half = 0; half < 2; half++)
            pack_square(in_word, from + k + half * LANES * pitch, pitch, to + half * LANES);
#endif
    for (; k < count; k += 4, to += 4 / in_word * GEMM_OUTPUTS)
        for (int half = 0; half < 2; half++) {
            uint32_t four[LANES] __attribute__((aligned(64)));
            #pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) memcpy(four + r, from + k + (half * LANES + r) * pitch, 4);
            store_words(in_word, *(const vs *)four, to + half * LANES);
        }
}

// Add the products of pieces ``begin`` to ``end`` to the sums of GEMM_ROWS rows.
INLINE void add_pieces(const int in_word, const int any, const Gemm *job, const GemmMemory *memory, int64_t begin,
                       int64_t end, int64_t number) {
    uint8_t *block = job->packed + number * job->block_bytes;
    const float *steps = steps_in(job, block), *inputs_of = steps + job->pieces * GEMM_ROWS;
    const int32_t *starts = (const int32_t *)(inputs_of + job->pieces * GEMM_ROWS);
    const vi *words = (const vi *)memory->words;
    const int32_t *x = (const int32_t *)block + begin * job->piece / in_word * GEMM_ROWS;
    vf *sums = (vf *)(memory->sums + number * GEMM_ROWS * GEMM_OUTPUTS);
    for (int64_t p = begin; p < end; p++) {
        vi total[GEMM_ROWS][2];
        #pragma GCC unroll 8
        for (int m = 0; m < GEMM_ROWS; m++)
            total[m][0] = total[m][1] = (vi){0} + (in_word == 4 ? starts[p * GEMM_ROWS + m] : 0);
        for (int64_t k = 0; k < job->piece / in_word; k++, words += 2, x += GEMM_ROWS) {
            const vi first = words[0], second = words[1];
            #pragma GCC unroll 8
            for (int m = 0; m < GEMM_ROWS; m++) {
                const vi all_of = (vi){0} + x[m];
                total[m][0] = in_word == 4 ? dot_8(total[m][0], first, all_of) : dot_16(total[m][0], first, all_of);
                total[m][1] = in_word == 4 ? dot_8(total[m][1], second, all_of) : dot_16(total[m][1], second, all_of);
            }
        }
        const vf *scales = (const vf *)(memory->scales + p * GEMM_OUTPUTS);
        const vf *less = (const vf *)(memory->less + p * GEMM_OUTPUTS);
        #pragma GCC unroll 8
        for (int m = 0; m < GEMM_ROWS; m++)
            #pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vf sum = sums[2 * m + half];
                sum += __builtin_convertvector(total[m][half], vf) * (scales[half] * steps[p * GEMM_ROWS + m]);
                if (any) sum -= less[half] * inputs_of[p * GEMM_ROWS + m];
                sums[2 * m + half] = sum;
            }
    }
}

INLINE void multiply_gemm_as(const int in_word, const Gemm *job, int64_t begin, int64_t end, GemmMemory *memory) {
    const int64_t depth = job->piece * job->pieces, blocks = (job->rows + GEMM_ROWS - 1) / GEMM_ROWS;
    const int64_t at_once = GEMM_WORDS * in_word / job->piece;
    const int any = unpack_gemm_outputs(job, begin, end, memory);
    memset(memory->sums, 0, blocks * GEMM_ROWS * GEMM_OUTPUTS * sizeof(float));
    for (int64_t first = 0; first < job->pieces; first += at_once) {
        const int64_t last = first + at_once < job->pieces ? first + at_once : job->pieces;
        pack_codes(in_word, memory, depth, first * job->piece, (last - first) * job->piece);
        for (int64_t number = 0; number < blocks; number++)
            if (any)
                add_pieces(in_word, 1, job, memory, first, last, number);
            else
                add_pieces(in_word, 0, job, memory, first, last, number);
    }
    for (int64_t row = 0; row < job->rows; row++) {
        const float *from = memory->sums + row * GEMM_OUTPUTS;
        float *to = job->out + row * job->out_stride + begin;
        for (int64_t r = 0; r < end - begin; r++) to[r] = job->bias ? from[r] + job->bias[begin + r] : from[r];
    }
}

static void multiply_gemm(const Gemm *job, int64_t begin, int64_t end, GemmMemory *memory) {
    if (VNNI && job->in_word == 4)
        multiply_gemm_as(4, job, begin, end, memory);
    else
        multiply_gemm_as(2, job, begin, end, memory);
}

static void run_pack_inputs(void *data) {
    Gemm *job = data;
    const int64_t blocks = (job->rows + GEMM_ROWS - 1) / GEMM_ROWS;
    for (;;) {
        const int64_t number = __atomic_fetch_add(&job->next_input, 1, __ATOMIC_RELAXED);
        if (number >= blocks) break;
        pack_inputs(job, number);
    }
}

static void run_gemm(void *data) {
    Gemm *job = data;
    const Weight *w = job->weight;
    const int64_t depth = job->piece * job->pieces, blocks = (job->rows + GEMM_ROWS - 1) / GEMM_ROWS;
    const int64_t sizes[] = {
        scratch_of(w) * 4, GEMM_OUTPUTS * (depth + GEMM_PITCH), GEMM_WORDS * 4 * GEMM_OUTPUTS, job->pieces * GEMM_OUTPUTS * 4,
        job->pieces * GEMM_OUTPUTS * 4, blocks * GEMM_ROWS * GEMM_OUTPUTS * 4,
    };
    int64_t total = 0, starts[6];
    for (int i = 0; i < 6; i++) {
        starts[i] = total;
        total += (sizes[i] + 63) / 64 * 64;
    }
    uint8_t *memory = NULL;
    if (posix_memalign((void **)&memory, 64, total)) abort();
    GemmMemory parts = {
        (float *)memory, (int8_t *)memory + starts[1], (uint32_t *)(memory + starts[2]), (float *)(memory + starts[3]),
        (float *)(memory + starts[4]), (float *)(memory + starts[5]),
    };
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&job->next, GEMM_OUTPUTS, __ATOMIC_RELAXED);
        if (begin >= w->outputs) break;
        multiply_gemm(job, begin, begin + GEMM_OUTPUTS < w->outputs ? begin + GEMM_OUTPUTS : w->outputs, &parts);
    }
    free(memory);
}
#endif

// Whether ``vlfit_multiply_gemm`` knows weights in this form.
EXPORT int vlfit_in_gemm(const Weight *w) { return in_gemm(w->format); }

// out[:, k-th outputs] = x @ weights[k].T + bias, as vlfit_multiply, for many rows; of weights for which
// ``vlfit_in_gemm`` is true. Returns 0; 1 if there is no memory.
EXPORT int vlfit_multiply_gemm(const Weight *weights, int64_t count, const float *x, int64_t rows, const float *bias,
                               float *out, int threads) {
#if GEMM
    int64_t out_stride = 0, done = 0, largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t piece = piece_of(&weights[i]), pieces = (weights[i].inputs + piece - 1) / piece;
        const int64_t size = (pieces * piece * 4 / in_word_of(&weights[i]) + pieces * 12) * GEMM_ROWS;
        if (size > largest) largest = (size + 63) / 64 * 64;
        out_stride += weights[i].outputs;
    }
    uint8_t *packed = NULL;
    if (posix_memalign((void **)&packed, 64, (rows + GEMM_ROWS - 1) / GEMM_ROWS * largest)) return 1;
    for (int64_t i = 0; i < count; i++) {
        const Weight *w = &weights[i];
        const int64_t piece = piece_of(w);
        const int in_word = in_word_of(w);
        Gemm job = {w, x, bias ? bias + done : NULL, packed, out + done, rows, piece, (w->inputs + piece - 1) / piece,
                    largest, out_stride, 0, 0, in_word};
        const int as_before = i > 0 && piece == piece_of(w - 1) && in_word == in_word_of(w - 1);
        if (!as_before) in_parallel(run_pack_inputs, &job, threads);
        in_parallel(run_gemm, &job, threads);
        done += w->outputs;
    }
    free(packed);
    return 0;
#else
    return 1;
#endif
}
