// What lies between the products of a decoder layer, in float32, included by products.c: residual add and
// RMSNorm, SwiGLU, and QK norm with RoPE that stores keys and values. One call in place of five to twenty small
// operations of torch, whose own time is a tenth of a decode step. Each row is computed in one way, however many
// there are.

#define ROWS_AT_ONCE 16  // that a thread takes

typedef void (*RowWork)(const void *task, int64_t row);

typedef struct {
    RowWork work;
    const void *task;
    int64_t rows, next;
} RowJob;

static void run_rows(void *data) {
    RowJob *job = data;
    for (;;) {
        int64_t row = __atomic_fetch_add(&job->next, ROWS_AT_ONCE, __ATOMIC_RELAXED);
        if (row >= job->rows) break;
        int64_t end = row + ROWS_AT_ONCE < job->rows ? row + ROWS_AT_ONCE : job->rows;
        for (; row < end; row++) job->work(job->task, row);
    }
}

static void for_rows(RowWork work, const void *task, int64_t rows, int threads) {
    RowJob job = {work, task, rows, 0};
    in_parallel(run_rows, &job, rows > ROWS_AT_ONCE ? threads : 1);
}

// 1 / sqrt(mean of squares + eps) of ``width`` numbers.
INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vf some = {0}, more = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        const vf a = load(x + i), b = load(x + i + LANES);
        some += a * a;
        more += b * b;
    }
    float total = sum(some + more);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(total / (float)width + eps);
}

typedef struct {
    float *hidden;
    const float *delta, *weight;
    float *out;
    int64_t width;
    float eps;
} AddNorm;

static void add_norm_row(const void *task, int64_t row) {
    const AddNorm *t = task;
    float *x = t->hidden + row * t->width, *out = t->out + row * t->width;
    if (t->delta) {
        const float *delta = t->delta + row * t->width;
        for (int64_t i = 0; i < t->width; i++) x[i] += delta[i];
    }
    const float scale = inverse_rms(x, t->width, t->eps);
    for (int64_t i = 0; i < t->width; i++) out[i] = x[i] * scale * t->weight[i];
}

// hidden += delta, unless ``delta`` is NULL; out = RMSNorm of the sum times ``weight`` [width]. All others are
// [rows, width], contiguous.
EXPORT void vlfit_add_norm(float *hidden, const float *delta, const float *weight, float *out, int64_t rows,
                           int64_t width, float eps, int threads) {
    const AddNorm task = {hidden, delta, weight, out, width, eps};
    for_rows(add_norm_row, &task, rows, threads);
}

// e**x to two units in the last place, for ``x`` from -87 to 88: a power of two times a polynomial. Coefficients
// are those of Cephes' expf.
INLINE vf exponential(vf x) {
    const vf shifted = x * 1.44269504088896341f + 0x1.8p23f;  // rounds to whole numbers, in the low bits
    const vf whole = shifted - 0x1.8p23f;
    const vi power = (vi)shifted - (vi)all(0x1.8p23f);
    x = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    vf y = all(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return y * (vf)((power + 127) << 23);
}

// x times the sigmoid of z.
INLINE vf times_sigmoid(vf x, vf z) {
    const vf most = all(88.0f), least = all(-87.0f);
    const vi over = -z > most, under = -z < least;  // neither for NaN
    const vf bounded = (vf)((over & (vi)most) | (under & (vi)least) | (~(over | under) & (vi)-z));
    return (vf)(~over & (vi)(x / (exponential(bounded) + 1.0f)));
}

INLINE vf silu(vf x) { return times_sigmoid(x, x); }

// GELU by tanh: (1 + tanh(z / 2)) / 2 is the sigmoid of z.
INLINE vf gelu(vf x) { return times_sigmoid(x, (x + x * x * x * 0.044715f) * 1.5957691216f); }

typedef struct {
    const float *gate_up;
    float *out;
    int64_t inner;
} Swiglu;

static void swiglu_row(const void *task, int64_t row) {
    const Swiglu *t = task;
    const float *gate = t->gate_up + row * 2 * t->inner, *up = gate + t->inner;
    float *out = t->out + row * t->inner;
    int64_t i = 0;
    for (; i + LANES <= t->inner; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
    for (; i < t->inner; i++) out[i] = silu(all(gate[i]))[0] * up[i];
}

// out [rows, inner] = silu(gate) * up of ``gate_up`` [rows, 2 * inner], gates first; both contiguous.
EXPORT void vlfit_swiglu(const float *gate_up, float *out, int64_t rows, int64_t inner, int threads) {
    const Swiglu task = {gate_up, out, inner};
    for_rows(swiglu_row, &task, rows, threads);
}

typedef struct {
    float *x;
    int64_t width;
} Gelu;

static void gelu_row(const void *task, int64_t row) {
    const Gelu *t = task;
    float *x = t->x + row * t->width;
    int64_t i = 0;
    for (; i + LANES <= t->width; i += LANES) store(x + i, gelu(load(x + i)));
    for (; i < t->width; i++) x[i] = gelu(all(x[i]))[0];
}

// GELU by tanh of ``x`` [rows, width], contiguous, in place.
EXPORT void vlfit_gelu(float *x, int64_t rows, int64_t width, int threads) {
    const Gelu task = {x, width};
    for_rows(gelu_row, &task, rows, threads);
}

typedef struct {
    const float *qkv, *weight, *cosines, *sines;
    const int64_t *slots;
    float *query, *keys, *values;
    int64_t heads, kv_heads, head_dim, rotary;
    float eps;
} Rotate;

static void rotate_row(const void *task, int64_t row) {
    const Rotate *t = task;
    const int64_t dim = t->head_dim, rotary = t->rotary, half = rotary / 2, both = t->heads + t->kv_heads;
    const float *x = t->qkv + row * (both + t->kv_heads) * dim;
    const float *cosines = t->cosines + row * rotary, *sines = t->sines + row * rotary;
    const int64_t slot = t->slots ? t->slots[row] : row;
    float *keys = t->keys + slot * t->kv_heads * dim;
    for (int64_t head = 0; head < both; head++, x += dim) {
        float *to = head < t->heads ? t->query + (row * t->heads + head) * dim : keys + (head - t->heads) * dim;
        if (t->weight) {
            const float *weight = t->weight + head * dim, scale = inverse_rms(x, dim, t->eps);
            for (int64_t i = 0; i < dim; i++) to[i] = x[i] * scale * weight[i];
        } else {
            memcpy(to, x, dim * sizeof(float));
        }
        for (int64_t i = 0; i < half; i++) {
            const float a = to[i], b = to[half + i];
            to[i] = a * cosines[i] + b * sines[i];
            to[half + i] = b * cosines[half + i] + a * sines[half + i];
        }
    }
    if (t->values) memcpy(t->values + slot * t->kv_heads * dim, x, t->kv_heads * dim * sizeof(float));
}

// RMSNorm (``weight`` [heads + kv_heads, head_dim], or NULL) and RoPE of the queries and keys of ``qkv`` [rows,
// heads + 2 kv_heads, head_dim], contiguous. ``cosines``, ``sines`` [rows, rotary]: tables for the first
// ``rotary`` elements, in which the sines of the first half are negated. Queries go to ``query`` [rows, heads,
// head_dim]; keys and values to ``slots`` [rows] of ``keys`` and ``values`` [slots, kv_heads, head_dim], or to
// the rows' own numbers if ``slots`` is NULL. ``values`` NULL: values stay where they are. Returns 0, or 1, with
// nothing written, if a slot is none of ``slot_count``.
EXPORT int vlfit_rotate(const float *qkv, const float *weight, const float *cosines, const float *sines,
                        const int64_t *slots, int64_t slot_count, float *query, float *keys, float *values,
                        int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary,
                        float eps, int threads) {
    for (int64_t row = 0; slots && row < rows; row++)
        if (slots[row] < 0 || slots[row] >= slot_count) return 1;
    const Rotate task = {qkv, weight, cosines, sines, slots, query, keys, values,
                         heads, kv_heads, head_dim, rotary, eps};
    for_rows(rotate_row, &task, rows, threads);
    return 0;
}
