// Many rows in float32 or bfloat16: x @ weight.T for all forms that gemm.c and tiles.c leave. Part of products.c.
//
// torch's float32 product is MKL's, which on processors of others than Intel reaches half to two thirds of what they
// can do; and weights would pass through memory in float32. Where inputs may be rounded and the processor has AVX-512
// BF16, inputs and weights are rounded to bfloat16, as on a GPU, and sums stay in float32: twice as fast. Without that
// rounding it would take two to three products of parts (as in tiles.c), and gain nothing.
//
// Inputs are brought once into the order in which they are multiplied, 2 LANES rows beside each other, so that
// weights need not be: a thread dequantizes some outputs, and multiplies each weight with vectors of rows,
// FLOATS_DEPTH words of them at a time, so that what it works on stays in its cache. A word is one input in float32,
// or two in bfloat16.

#define FLOATS (LEVEL > 0)
#if LEVEL == 512 && defined(__AVX512BF16__)
#define PAIRS 1
#else
#define PAIRS 0
#endif

#if FLOATS
#define FLOATS_OUTPUTS (LEVEL == 512 ? 12 : 6)  // whose sums are in registers
#define FLOATS_ROWS (2 * LANES)
#define FLOATS_DEPTH 256
#define FLOATS_TASK 48  // outputs of a task at most; a multiple of FLOATS_OUTPUTS

typedef struct {
    const Weight *weight;
    const float *x, *bias;
    float *inputs;  // [blocks of FLOATS_ROWS rows][words][FLOATS_ROWS], zeros in rows that are not there
    float *out;
    int64_t rows, blocks, out_stride, task, next, next_input;
    int64_t words;  // of an output
    int in_word;    // inputs in a word: 1 or 2
} Floats;

#if PAIRS
// ``count`` numbers rounded to bfloat16, a zero behind an odd number of them. ``to`` may be ``from``.
static void round_to_pairs(const float *from, int64_t count, float *to) {
    uint16_t *halves = (uint16_t *)to;
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = count - i >= 16 ? 0xffff : (1 << (count - i)) - 1;
        const __mmask16 whole = count - i >= 16 ? 0xffff : (1 << ((count - i + 1) / 2 * 2)) - 1;
        const __m256i some = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i));
        _mm256_mask_storeu_epi16(halves + i, whole, some);
    }
}
#endif

// ``total`` plus the products of one word of weights and of inputs.
INLINE vf dot_word(const int in_word, vf total, vf weight, vf x) {
#if PAIRS
    if (in_word == 2) return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)weight, (__m512bh)x);
#endif
    return total + weight * x;
}

static void run_float_inputs(void *data) {
    Floats *job = data;
    const int64_t inputs = job->weight->inputs, words = job->words;
    for (;;) {
        const int64_t block = __atomic_fetch_add(&job->next_input, 1, __ATOMIC_RELAXED);
        if (block >= job->blocks) break;
        float *to = job->inputs + block * words * FLOATS_ROWS;
        for (int64_t first = 0; first < words; first += 64) {
            const int64_t last = first + 64 < words ? first + 64 : words;
            for (int64_t r = 0; r < FLOATS_ROWS; r++) {
                const int64_t row = block * FLOATS_ROWS + r;
                const float *from = job->x + row * inputs + first * job->in_word;
                float rounded[64];
#if PAIRS
                if (job->in_word == 2 && row < job->rows) {
                    round_to_pairs(from, last == words ? inputs - 2 * first : 2 * (last - first), rounded);
                    from = rounded;
                }
#endif
                for (int64_t i = first; i < last; i++) to[i * FLOATS_ROWS + r] = row < job->rows ? from[i - first] : 0;
            }
        }
    }
}

// Add products of ``count`` words to sums [FLOATS_OUTPUTS][FLOATS_ROWS], of all rows or of the first LANES. With
// ``fresh`` sums are written, whatever they were.
INLINE void add_floats(const int in_word, const int vectors, const int fresh, const float *weights, int64_t pitch,
                       const float *x, int64_t count, float *sums) {
    vf total[FLOATS_OUTPUTS][2];
    #pragma GCC unroll 12
    for (int r = 0; r < FLOATS_OUTPUTS; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) total[r][v] = fresh ? (vf){0} : load(sums + r * FLOATS_ROWS + v * LANES);
    for (int64_t i = 0; i < count; i++, weights++, x += FLOATS_ROWS) {
        const vf first = load(x), second = vectors == 2 ? load(x + LANES) : first;
        #pragma GCC unroll 12
        for (int r = 0; r < FLOATS_OUTPUTS; r++) {
            const vf weight = (vf)((vi){0} + ((const int32_t *)weights)[r * pitch]);
            total[r][0] = dot_word(in_word, total[r][0], weight, first);
            if (vectors == 2) total[r][1] = dot_word(in_word, total[r][1], weight, second);
        }
    }
    #pragma GCC unroll 12
    for (int r = 0; r < FLOATS_OUTPUTS; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) store(sums + r * FLOATS_ROWS + v * LANES, total[r][v]);
}

// Outputs ``begin`` to ``end`` for all rows. ``weights``: [task, pitch]; ``sums``: [blocks][task][FLOATS_ROWS].
INLINE void multiply_floats_as(const int in_word, const Floats *job, int64_t begin, int64_t end, int64_t pitch,
                               float *scratch, float *weights, float *sums) {
    const Weight *w = job->weight;
    const int64_t words = job->words, task = job->task, span = task * FLOATS_ROWS;
    for (int64_t i = 0; i < task; i++) {
        float *to = weights + i * pitch;
        if (begin + i >= end) {
            memset(to, 0, words * sizeof(float));
        } else if (in_word == 1) {
            dequantize_any(w, begin + i, scratch, to);
        }
#if PAIRS
        else if (w->format == BF16 && w->inputs % 2 == 0) {
            memcpy(to, row_at(w, begin + i), w->row_bytes);
        } else {
            float *row = scratch + scratch_of(w);
            dequantize_any(w, begin + i, scratch, row);
            round_to_pairs(row, w->inputs, to);
        }
#endif
    }
    memset(sums, 0, job->blocks * span * sizeof(float));
    for (int64_t first = 0; first < words; first += FLOATS_DEPTH) {
        const int64_t count = first + FLOATS_DEPTH < words ? FLOATS_DEPTH : words - first;
        for (int64_t block = 0; block < job->blocks; block++) {
            const float *x = job->inputs + (block * words + first) * FLOATS_ROWS;
            for (int64_t i = 0; i < task && begin + i < end; i += FLOATS_OUTPUTS) {
                float *to = sums + block * span + i * FLOATS_ROWS;
                if (job->rows - block * FLOATS_ROWS > LANES)
                    add_floats(in_word, 2, 0, weights + i * pitch + first, pitch, x, count, to);
                else
                    add_floats(in_word, 1, 0, weights + i * pitch + first, pitch, x, count, to);
            }
        }
    }
    for (int64_t row = 0; row < job->rows; row++) {
        const float *from = sums + row / FLOATS_ROWS * span + row % FLOATS_ROWS;
        float *to = job->out + row * job->out_stride + begin;
        for (int64_t i = 0; i < end - begin; i++)
            to[i] = from[i * FLOATS_ROWS] + (job->bias ? job->bias[begin + i] : 0);
    }
}

static void multiply_floats(const Floats *job, int64_t begin, int64_t end, int64_t pitch, float *scratch,
                            float *weights, float *sums) {
    if (PAIRS && job->in_word == 2)
        multiply_floats_as(2, job, begin, end, pitch, scratch, weights, sums);
    else
        multiply_floats_as(1, job, begin, end, pitch, scratch, weights, sums);
}

static void run_floats(void *data) {
    Floats *job = data;
    const Weight *w = job->weight;
    // Rows of weights a line from a power of two, so that those of a task are not in one set of the cache.
    const int64_t pitch = (job->words + 15) / 16 * 16 + 16;
    const int64_t scratch = (scratch_of(w) + (job->in_word == 2 ? w->inputs : 0) + 15) / 16 * 16;
    const int64_t count = scratch + job->task * (pitch + job->blocks * FLOATS_ROWS);
    float *memory = NULL;
    if (posix_memalign((void **)&memory, 64, count * sizeof(float))) abort();
    float *weights = memory + scratch;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&job->next, job->task, __ATOMIC_RELAXED);
        if (begin >= w->outputs) break;
        const int64_t end = begin + job->task < w->outputs ? begin + job->task : w->outputs;
        multiply_floats(job, begin, end, pitch, memory, weights, weights + job->task * pitch);
    }
    free(memory);
}
#endif

// Whether there is ``vlfit_multiply_floats``.
EXPORT int vlfit_has_floats(void) { return FLOATS; }

// out[:, k-th outputs] = x @ weights[k].T + bias, as vlfit_multiply, for many rows. Returns 0; 1 if there is no
// memory. Only if ``vlfit_has_floats``.
EXPORT int vlfit_multiply_floats(const Weight *weights, int64_t count, const float *x, int64_t rows,
                                 const float *bias, float *out, int threads) {
#if FLOATS
    const int in_word = PAIRS && weights[0].rounds ? 2 : 1;
    const int64_t words = (weights[0].inputs + in_word - 1) / in_word, blocks = (rows + FLOATS_ROWS - 1) / FLOATS_ROWS;
    int64_t out_stride = 0, done = 0;
    float *ordered = NULL;
    if (posix_memalign((void **)&ordered, 64, blocks * FLOATS_ROWS * words * sizeof(float))) return 1;
    for (int64_t i = 0; i < count; i++) out_stride += weights[i].outputs;
    for (int64_t i = 0; i < count; i++) {
        const Weight *w = &weights[i];
        int64_t task = w->outputs / (2 * threads) / FLOATS_OUTPUTS * FLOATS_OUTPUTS;
        task = task > FLOATS_TASK ? FLOATS_TASK : task < FLOATS_OUTPUTS ? FLOATS_OUTPUTS : task;
        Floats job = {w, x, bias ? bias + done : NULL, ordered, out + done, rows, blocks, out_stride, task, 0, 0,
                      words, in_word};
        if (i == 0) in_parallel(run_float_inputs, &job, threads);
        in_parallel(run_floats, &job, threads);
        done += w->outputs;
    }
    free(ordered);
    return 0;
#else
    return 1;
#endif
}

// Bits of the inputs of a product of many rows that rounds them: 8 (integers) or 16 (bfloat16). 0: it does not.
// Of products without AMX's tiles, which round nothing.
EXPORT int vlfit_rounded_bits(const Weight *w) {
    if (!w->rounds) return 0;
#if GEMM
    if (in_gemm(w->format)) return in_word_of(w) == 4 ? 8 : 0;
#endif
    return FLOATS && PAIRS ? 16 : 0;
}
