// Many rows on CPUs with AMX: x @ weight.T in tiles of bfloat16, summed in float32. Part of products.c.
//
// A number v is cut into a high part, v in bfloat16, and a low part, v - high in bfloat16, which together are
// within 2**-18 of it. The product is high * high + high * low + low * high; low * low, another 2**-18, is left
// out. So each term is within 2**-16.4 of itself, and within 2**-18 where weights are bfloat16, which have no low
// part. Sums are float32's, of three or two terms an input; what is below 2**-126 counts as zero.
//
// Weights are the first operand, 16 outputs a tile, so that neither they nor their scales are transposed; inputs
// are brought once into the order of the second, pairs of 32 inputs of 16 rows. A thread takes up to
// TILE_OUTPUTS outputs, dequantizes these, and multiplies them with all rows, TILE_DEPTH inputs at a time, so
// that what it works on stays in its cache.

#if AMX
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_OUTPUTS 128  // half as many for few rows
#define TILE_DEPTH 1024
#define PITCH 32  // between rows of weights, so that a tile of them is not in one set of the cache

// 16 numbers in two parts.
INLINE void cut(__m512 value, uint16_t *high, uint16_t *low) {
    const __m256i upper = (__m256i)_mm512_cvtneps_pbh(value);
    _mm256_storeu_si256((__m256i *)high, upper);
    if (!low) return;
    const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
    // Of what is no number, or was rounded to infinity, the low part is zero: infinity less infinity is none.
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(back), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
    _mm256_storeu_si256((__m256i *)low, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_sub_ps(finite, value, back)));
}

typedef struct {
    const Weight *weight;
    const float *x, *bias;
    uint16_t *inputs;  // [pairs of tiles of rows][steps][high, low][2 tiles][16][32]
    float *out;
    int64_t rows, steps, depth, out_stride, task_outputs, next, next_input;
    int parts;  // products of parts: 2 or 3
} Tiling;

// 32 rows of inputs, step by step, into tiles: word [k][row] has inputs 2 k and 2 k + 1 of a row.
static void tile_inputs(const Tiling *job, int64_t pair) {
    const int64_t inputs = job->weight->inputs;
    const __m512i spots = _mm512_mullo_epi32(_mm512_set1_epi32(16),
                                             _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (int64_t step = 0; step < job->steps; step++) {
        uint16_t *to = job->inputs + (pair * job->steps + step) * 2048;
        for (int half = 0; half < 2; half++) {
            uint16_t high[512] = {0}, low[512] = {0};  // [row][input]
            for (int i = 0; i < 16; i++) {
                const int64_t row = pair * 32 + half * 16 + i;
                if (row >= job->rows) break;
                const int64_t left = inputs - step * 32;
                const float *from = job->x + row * inputs + step * 32;
                for (int k = 0; k < 32; k += 16) {
                    const int64_t count = left - k;
                    const __mmask16 mask = count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0;
                    cut(_mm512_maskz_loadu_ps(mask, from + k), high + 32 * i + k, low + 32 * i + k);
                }
            }
            for (int k = 0; k < 16; k++) {
                _mm512_storeu_si512(to + half * 512 + 32 * k, _mm512_i32gather_epi32(spots, (const int *)high + k, 4));
                _mm512_storeu_si512(to + 1024 + half * 512 + 32 * k,
                                    _mm512_i32gather_epi32(spots, (const int *)low + k, 4));
            }
        }
    }
}

typedef struct {
    uint8_t palette, start, zero[14];
    uint16_t width[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

// Outputs ``begin`` to ``end`` for all rows. ``high``, ``low``: [TILE_OUTPUTS, depth] for the weights; ``sums``:
// [pairs of rows][pairs of outputs][4][16][16].
static void multiply_tiles(const Tiling *job, int64_t begin, int64_t end, float *scratch, uint16_t *high,
                           uint16_t *low, float *sums) {
    const Weight *w = job->weight;
    const int64_t depth = job->depth, pitch = depth + PITCH, steps = job->steps;
    const int64_t outputs = (end - begin + 31) / 32, pairs = (job->rows + 31) / 32;
    float *row_of = scratch, *scales = scratch + depth;
    const int three = job->parts == 3;
    for (int64_t i = 0; i < outputs * 32; i++) {
        uint16_t *to = high + i * pitch;
        if (begin + i >= end) {
            memset(to, 0, 2 * depth);
            if (three) memset(low + i * pitch, 0, 2 * depth);
        } else if (!three) {
            memcpy(to, row_at(w, begin + i), w->row_bytes);
            memset(to + w->inputs, 0, 2 * (depth - w->inputs));
        } else {
            dequantize_any(w, begin + i, scales, row_of);
            for (int64_t k = w->inputs; k < depth; k++) row_of[k] = 0;
            for (int64_t k = 0; k < depth; k += 16) cut(_mm512_loadu_ps(row_of + k), to + k, low + i * pitch + k);
        }
    }
    for (int64_t first = 0; first < steps; first += TILE_DEPTH / 32) {
        const int64_t last = first + TILE_DEPTH / 32 < steps ? first + TILE_DEPTH / 32 : steps;
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t output = 0; output < outputs; output++) {
                float *sum = sums + (pair * outputs + output) * 1024;
                if (first) {
                    _tile_loadd(0, sum, 64);
                    _tile_loadd(1, sum + 256, 64);
                    _tile_loadd(2, sum + 512, 64);
                    _tile_loadd(3, sum + 768, 64);
                } else {
                    _tile_zero(0);
                    _tile_zero(1);
                    _tile_zero(2);
                    _tile_zero(3);
                }
                const uint16_t *a = high + output * 32 * pitch, *a_low = low + output * 32 * pitch;
                const uint16_t *x = job->inputs + pair * steps * 2048;
                for (int64_t step = first; step < last; step++) {
                    const uint16_t *at = x + step * 2048;
                    _tile_loadd(4, a + step * 32, 2 * pitch);
                    _tile_loadd(6, at + 1024, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, at + 1536, 64);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_loadd(5, a + 16 * pitch + step * 32, 2 * pitch);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_loadd(6, at, 64);
                    _tile_dpbf16ps(3, 5, 7);
                    _tile_loadd(7, at + 512, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                    if (three) {
                        _tile_loadd(4, a_low + step * 32, 2 * pitch);
                        _tile_dpbf16ps(0, 4, 6);
                        _tile_dpbf16ps(1, 4, 7);
                        _tile_loadd(5, a_low + 16 * pitch + step * 32, 2 * pitch);
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, sum, 64);
                _tile_stored(1, sum + 256, 64);
                _tile_stored(2, sum + 512, 64);
                _tile_stored(3, sum + 768, 64);
            }
    }
    const __m512i spots = _mm512_mullo_epi32(_mm512_set1_epi32(16),
                                             _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (int64_t row = 0; row < job->rows; row++)
        for (int64_t i = 0; begin + i < end; i += 16) {  // tiles: [outputs][rows]
            const float *tile = sums + (row / 32 * outputs + i / 32) * 1024 + i % 32 / 16 * 512 + row % 32 / 16 * 256;
            const __mmask16 mask = end - begin - i >= 16 ? 0xffff : (1 << (end - begin - i)) - 1;
            __m512 value = _mm512_i32gather_ps(spots, tile + row % 16, 4);
            if (job->bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, job->bias + begin + i));
            _mm512_mask_storeu_ps(job->out + row * job->out_stride + begin + i, mask, value);
        }
}

static void run_tile_inputs(void *data) {
    Tiling *job = data;
    const int64_t pairs = (job->rows + 31) / 32;
    for (;;) {
        const int64_t pair = __atomic_fetch_add(&job->next_input, 1, __ATOMIC_RELAXED);
        if (pair >= pairs) break;
        tile_inputs(job, pair);
    }
}

static void run_tiles(void *data) {
    Tiling *job = data;
    const Weight *w = job->weight;
    const int64_t pairs = (job->rows + 31) / 32, tall = (job->task_outputs + 31) / 32;
    const int64_t scratch_bytes = ((job->depth + scratch_of(w)) * 4 + 63) / 64 * 64;
    const int64_t part_bytes = 2 * tall * 32 * (job->depth + PITCH), sums_bytes = pairs * tall * 4096;
    uint8_t *memory = NULL;
    if (posix_memalign((void **)&memory, 64, scratch_bytes + 2 * part_bytes + sums_bytes)) abort();
    uint16_t *high = (uint16_t *)(memory + scratch_bytes), *low = high + part_bytes / 2;
    float *sums = (float *)(memory + scratch_bytes + 2 * part_bytes);
    TileConfig before, ours = {.palette = 1};  // others, such as oneDNN, may have left theirs for their next product
    for (int i = 0; i < 8; i++) {
        ours.width[i] = 64;
        ours.rows[i] = 16;
    }
    _tile_storeconfig(&before);
    _tile_loadconfig(&ours);
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&job->next, job->task_outputs, __ATOMIC_RELAXED);
        if (begin >= w->outputs) break;
        const int64_t end = begin + job->task_outputs < w->outputs ? begin + job->task_outputs : w->outputs;
        multiply_tiles(job, begin, end, (float *)memory, high, low, sums);
    }
    if (before.palette)
        _tile_loadconfig(&before);
    else
        _tile_release();
    free(memory);
}

// Whether this library and CPU have tiles and the system lets this process use them.
EXPORT int vlfit_has_tiles(void) {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18L /* XTILEDATA */) == 0;
}

// out[:, k-th outputs] = x @ weights[k].T + bias, as vlfit_multiply, for many rows. Returns 0; 1 if there is no
// memory. Only after ``vlfit_has_tiles`` was true.
EXPORT int vlfit_multiply_tiles(const Weight *weights, int64_t count, const float *x, int64_t rows, const float *bias,
                                float *out, int threads) {
    const int64_t inputs = weights[0].inputs, steps = (inputs + 31) / 32, pairs = (rows + 31) / 32;
    uint16_t *tiled = NULL;
    int64_t out_stride = 0, done = 0;
    if (posix_memalign((void **)&tiled, 64, pairs * steps * 4096)) return 1;
    for (int64_t i = 0; i < count; i++) out_stride += weights[i].outputs;
    for (int64_t i = 0; i < count; i++) {
        const Weight *w = &weights[i];
        int64_t task = (w->outputs / (2 * threads) + 31) / 32 * 32;
        const int64_t most = rows > 64 ? TILE_OUTPUTS : TILE_OUTPUTS / 2;
        task = task > most ? most : task < 32 ? 32 : task;
        Tiling job = {w, x, bias ? bias + done : NULL, tiled, out + done, rows, steps, steps * 32, out_stride, task, 0, 0,
                      w->format == BF16 && w->scale_kind == NO_SCALE ? 2 : 3};
        if (i == 0) in_parallel(run_tile_inputs, &job, threads);
        in_parallel(run_tiles, &job, threads);
        done += w->outputs;
    }
    free(tiled);
    return 0;
}
#else
EXPORT int vlfit_has_tiles(void) { return 0; }
#endif
