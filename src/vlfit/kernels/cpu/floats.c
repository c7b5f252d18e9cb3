// Many rows in float32: x @ weight.T for all forms that gemm.c and tiles.c leave. Part of products.c.
//
// torch's float32 product is MKL's, which on processors of others than Intel reaches half to two thirds of what they
// can do; and weights would pass through memory in float32. AVX-512 BF16 without AMX gains nothing over this: it is
// twice as fast as float32, and would take two to three products of parts (as in tiles.c).
//
// Inputs are brought once into the order in which they are multiplied, 2 LANES rows beside each other, so that
// weights need not be: a thread dequantizes some outputs, and multiplies each weight with vectors of rows,
// FLOATS_DEPTH inputs at a time, so that what it works on stays in its cache.

#define FLOATS (LEVEL > 0)

#if FLOATS
#define FLOATS_OUTPUTS (LEVEL == 512 ? 12 : 6)  // whose sums are in registers
#define FLOATS_ROWS (2 * LANES)
#define FLOATS_DEPTH 256
#define FLOATS_TASK 48  // outputs of a task at most; a multiple of FLOATS_OUTPUTS

typedef struct {
    const Weight *weight;
    const float *x, *bias;
    float *inputs;  // [blocks of FLOATS_ROWS rows][inputs][FLOATS_ROWS], zeros in rows that are not there
    float *out;
    int64_t rows, blocks, out_stride, task, next, next_input;
} Floats;

static void run_float_inputs(void *data) {
    Floats *job = data;
    const int64_t inputs = job->weight->inputs;
    for (;;) {
        const int64_t block = __atomic_fetch_add(&job->next_input, 1, __ATOMIC_RELAXED);
        if (block >= job->blocks) break;
        float *to = job->inputs + block * inputs * FLOATS_ROWS;
        for (int64_t first = 0; first < inputs; first += 64) {
            const int64_t last = first + 64 < inputs ? first + 64 : inputs;
            for (int64_t r = 0; r < FLOATS_ROWS; r++) {
                const int64_t row = block * FLOATS_ROWS + r;
                const float *from = job->x + row * inputs;
                for (int64_t i = first; i < last; i++) to[i * FLOATS_ROWS + r] = row < job->rows ? from[i] : 0;
            }
        }
    }
}

// Add products of ``count`` inputs to sums [FLOATS_OUTPUTS][FLOATS_ROWS], of all rows or of the first LANES.
INLINE void add_floats(const int vectors, const float *weights, int64_t pitch, const float *x, int64_t count,
                       float *sums) {
    vf total[FLOATS_OUTPUTS][2];
    #pragma GCC unroll 12
    for (int r = 0; r < FLOATS_OUTPUTS; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) total[r][v] = load(sums + r * FLOATS_ROWS + v * LANES);
    for (int64_t i = 0; i < count; i++, weights++, x += FLOATS_ROWS) {
        const vf first = load(x), second = vectors == 2 ? load(x + LANES) : first;
        #pragma GCC unroll 12
        for (int r = 0; r < FLOATS_OUTPUTS; r++) {
            const vf weight = all(weights[r * pitch]);
            total[r][0] += weight * first;
            if (vectors == 2) total[r][1] += weight * second;
        }
    }
    #pragma GCC unroll 12
    for (int r = 0; r < FLOATS_OUTPUTS; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) store(sums + r * FLOATS_ROWS + v * LANES, total[r][v]);
}

// Outputs ``begin`` to ``end`` for all rows. ``weights``: [task, pitch]; ``sums``: [blocks][task][FLOATS_ROWS].
static void multiply_floats(const Floats *job, int64_t begin, int64_t end, int64_t pitch, float *scratch,
                            float *weights, float *sums) {
    const Weight *w = job->weight;
    const int64_t inputs = w->inputs, task = job->task, span = task * FLOATS_ROWS;
    for (int64_t i = 0; i < task; i++)
        if (begin + i < end)
            dequantize_any(w, begin + i, scratch, weights + i * pitch);
        else
            memset(weights + i * pitch, 0, inputs * sizeof(float));
    memset(sums, 0, job->blocks * span * sizeof(float));
    for (int64_t first = 0; first < inputs; first += FLOATS_DEPTH) {
        const int64_t count = first + FLOATS_DEPTH < inputs ? FLOATS_DEPTH : inputs - first;
        for (int64_t block = 0; block < job->blocks; block++) {
            const float *x = job->inputs + (block * inputs + first) * FLOATS_ROWS;
            for (int64_t i = 0; i < task && begin + i < end; i += FLOATS_OUTPUTS) {
                float *to = sums + block * span + i * FLOATS_ROWS;
                if (job->rows - block * FLOATS_ROWS > LANES)
                    add_floats(2, weights + i * pitch + first, pitch, x, count, to);
                else
                    add_floats(1, weights + i * pitch + first, pitch, x, count, to);
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

static void run_floats(void *data) {
    Floats *job = data;
    const Weight *w = job->weight;
    // Rows of weights a line from a power of two, so that those of a task are not in one set of the cache.
    const int64_t pitch = (w->inputs + 15) / 16 * 16 + 16, scratch = (scratch_of(w) + 15) / 16 * 16;
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
    const int64_t inputs = weights[0].inputs, blocks = (rows + FLOATS_ROWS - 1) / FLOATS_ROWS;
    int64_t out_stride = 0, done = 0;
    float *ordered = NULL;
    if (posix_memalign((void **)&ordered, 64, blocks * FLOATS_ROWS * inputs * sizeof(float))) return 1;
    for (int64_t i = 0; i < count; i++) out_stride += weights[i].outputs;
    for (int64_t i = 0; i < count; i++) {
        const Weight *w = &weights[i];
        int64_t task = w->outputs / (2 * threads) / FLOATS_OUTPUTS * FLOATS_OUTPUTS;
        task = task > FLOATS_TASK ? FLOATS_TASK : task < FLOATS_OUTPUTS ? FLOATS_OUTPUTS : task;
        Floats job = {w, x, bias ? bias + done : NULL, ordered, out + done, rows, blocks, out_stride, task, 0, 0};
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
