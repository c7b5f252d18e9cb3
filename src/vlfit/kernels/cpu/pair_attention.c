// Attention of many queries in bfloat16 (AVX-512 BF16), as on a GPU: of pictures and prompts whose products may round
// their inputs. Part of products.c, behind floats.c.
//
// Queries, keys, values and weights of a softmax are rounded to bfloat16; scores, sums and the softmax are float32's.
// Scores, of base 2, exist for ATTEND_QUERIES queries and ATTEND_KEYS keys at a time; a query's sum and mixed values
// are scaled when a later key has a larger score. Both products are those of floats.c: keys (or dimensions of values)
// are its rows, 32 beside each other, queries (or weights) its outputs.

// Whether there is ``vlfit_attend_pairs``.
EXPORT int vlfit_attends_in_pairs(void) { return PAIRS; }

#if PAIRS
#define ATTEND_QUERIES 48  // a multiple of FLOATS_OUTPUTS
#define ATTEND_KEYS 256    // a multiple of FLOATS_ROWS

typedef struct {
    const float *query, *keys, *values;
    float *out;          // [queries, heads, dim]
    float *packed_keys;  // [kv_heads][blocks of 32 keys][dim / 2][32] words of two dimensions
    float *packed_values;  // [kv_heads][blocks of 32 dimensions][padded keys / 2][32] words of two keys
    int64_t queries, count, heads, kv_heads, dim, query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t past;    // keys before the first query that it attends to; -1: every query attends to every key
    int64_t padded;  // ``count`` up to a multiple of FLOATS_ROWS
    int64_t blocks;  // of 32 dimensions
    int64_t next_pack, next;
    float scale;
} Attend;

static void run_pack_attention(void *data) {
    Attend *t = data;
    const int64_t words = t->dim / 2, tasks = t->kv_heads * (t->padded / FLOATS_ROWS);
    for (;;) {
        const int64_t task = __atomic_fetch_add(&t->next_pack, 1, __ATOMIC_RELAXED);
        if (task >= tasks) break;
        const int64_t head = task % t->kv_heads, first = task / t->kv_heads * FLOATS_ROWS;
        float *keys = t->packed_keys + (head * t->padded + first) * words;
        float *values = t->packed_values + head * t->blocks * t->padded / 2 * FLOATS_ROWS;
        float row[MAX_DIM / 2];
        for (int64_t k = 0; k < FLOATS_ROWS; k++) {
            const float *from = t->keys + (first + k) * t->key_row + head * t->key_head;
            if (first + k < t->count)
                round_to_pairs(from, t->dim, row);
            else
                memset(row, 0, words * sizeof(float));
            for (int64_t i = 0; i < words; i++) keys[i * FLOATS_ROWS + k] = row[i];
        }
        for (int64_t k = first; k < first + FLOATS_ROWS; k += 2)
            for (int64_t i = 0; i < t->dim; i += 16) {
                const __mmask16 mask = t->dim - i >= 16 ? 0xffff : (1 << (t->dim - i)) - 1;
                const float *from = t->values + k * t->value_row + head * t->value_head + i;
                const __m512 one = k < t->count ? _mm512_maskz_loadu_ps(mask, from) : _mm512_setzero_ps();
                const __m512 other = k + 1 < t->count ? _mm512_maskz_loadu_ps(mask, from + t->value_row)
                                                      : _mm512_setzero_ps();
                const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(one));
                const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(other));
                float *to = values + (i / FLOATS_ROWS * (t->padded / 2) + k / 2) * FLOATS_ROWS + i % FLOATS_ROWS;
                _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
    }
}

typedef struct {
    float query[ATTEND_QUERIES * MAX_DIM / 2];                    // words of two dimensions
    float scores[ATTEND_KEYS / FLOATS_ROWS][FLOATS_OUTPUTS][FLOATS_ROWS];
    float weights[FLOATS_OUTPUTS * ATTEND_KEYS / 2];              // words of two keys
    float mixed[ATTEND_QUERIES / FLOATS_OUTPUTS][MAX_DIM / FLOATS_ROWS][FLOATS_OUTPUTS][FLOATS_ROWS];
    float most[ATTEND_QUERIES], sums[ATTEND_QUERIES];
} __attribute__((aligned(64))) AttendMemory;

// 2**x to 2**-18 of itself. Minus infinity gives 0.
INLINE __m512 power_of_two(__m512 x) {
    const __m512 rest = _mm512_reduce_ps(x, 0);  // from -1/2 to 1/2; the powers of ln 2 over those of n! are Taylor's
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.3333558e-3f), rest, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, _mm512_sub_ps(x, rest));
}

// Turn the scores of a query with the first ``seen`` of ``here`` keys into weights; scale what was mixed before to
// the new maximum. Scores are powers of two.
INLINE void weigh_pairs(AttendMemory *m, int64_t row, int64_t in_group, int64_t group, int64_t seen, int64_t here,
                        int64_t blocks) {
    uint16_t *weights = (uint16_t *)(m->weights + in_group * (ATTEND_KEYS / 2));
    const int64_t vectors = (here + 15) / 16;
    if (seen <= 0) {
        memset(weights, 0, 32 * vectors);
        return;
    }
    const __m512 none = _mm512_set1_ps(-__builtin_inff());
    __m512 most = none;
    for (int64_t i = 0; i < seen / 16; i++)
        most = _mm512_max_ps(most, _mm512_load_ps(&m->scores[i / 2][in_group][i % 2 * 16]));
    for (int64_t i = seen / 16; i < vectors; i++) {  // what is not seen becomes minus infinity
        float *at = &m->scores[i / 2][in_group][i % 2 * 16];
        const __mmask16 mask = seen > 16 * i ? (1 << (seen - 16 * i)) - 1 : 0;
        const __m512 some = _mm512_mask_mov_ps(none, mask, _mm512_load_ps(at));
        _mm512_store_ps(at, some);
        most = _mm512_max_ps(most, some);
    }
    float largest = _mm512_reduce_max_ps(most);
    if (!(largest > m->most[row])) largest = m->most[row];
    if (largest != m->most[row]) {
        const float less = m->most[row] == -__builtin_inff() ? 0 : __builtin_exp2f(m->most[row] - largest);
        for (int64_t block = 0; block < blocks; block++)
            for (int v = 0; v < FLOATS_ROWS; v += LANES) {
                float *at = &m->mixed[group][block][in_group][v];
                store(at, load(at) * less);
            }
        m->most[row] = largest;
        m->sums[row] *= less;
    }
    const __m512 subtracted = _mm512_set1_ps(largest);
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < vectors; i++) {
        const __m512 score = _mm512_load_ps(&m->scores[i / 2][in_group][i % 2 * 16]);
        const __m512 weight = power_of_two(_mm512_sub_ps(score, subtracted));
        total = _mm512_add_ps(total, weight);
        _mm256_storeu_si256((__m256i *)(weights + 16 * i), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    m->sums[row] += sum((vf)total);
}

// ``count`` queries from ``first`` on of a head.
static void attend_pairs(const Attend *t, int64_t head, int64_t first, int64_t count, AttendMemory *m) {
    const int64_t words = t->dim / 2, kv_head = head * t->kv_heads / t->heads, padded = t->padded;
    const float *keys = t->packed_keys + kv_head * padded * words;
    const float *values = t->packed_values + kv_head * t->blocks * padded / 2 * FLOATS_ROWS;
    const int64_t groups = (count + FLOATS_OUTPUTS - 1) / FLOATS_OUTPUTS;
    for (int64_t q = 0; q < groups * FLOATS_OUTPUTS; q++) {
        const float *from = t->query + (first + q) * t->query_row + head * t->query_head;
        float scaled[MAX_DIM];
        for (int64_t i = 0; i < t->dim; i++) scaled[i] = q < count ? from[i] * t->scale : 0;
        round_to_pairs(scaled, t->dim, m->query + q * words);
        m->most[q] = -__builtin_inff();
        m->sums[q] = 0;
    }
    memset(m->mixed, 0, groups * sizeof(m->mixed[0]));
    const int64_t last = t->past < 0 || t->past + first + count > t->count ? t->count : t->past + first + count;
    for (int64_t begin = 0; begin < last; begin += ATTEND_KEYS) {
        for (int64_t group = 0; group < groups; group++) {
            const int64_t of_last = t->past < 0 ? last : t->past + first + (group + 1) * FLOATS_OUTPUTS;
            int64_t here = (of_last < last ? of_last : last) - begin;
            if (here <= 0) continue;
            if (here > ATTEND_KEYS) here = ATTEND_KEYS;
            for (int64_t k = 0; k < here; k += FLOATS_ROWS)
                add_floats(2, 2, 1, m->query + group * FLOATS_OUTPUTS * words, words, keys + (begin + k) * words, words,
                           &m->scores[k / FLOATS_ROWS][0][0]);
            for (int64_t i = 0; i < FLOATS_OUTPUTS; i++) {
                const int64_t row = group * FLOATS_OUTPUTS + i;
                const int64_t seen = t->past < 0 ? here : t->past + first + row + 1 - begin;
                weigh_pairs(m, row, i, group, seen < here ? seen : here, here, t->blocks);
            }
            for (int64_t block = 0; block < t->blocks; block++) {
                const float *from = values + (block * padded / 2 + begin / 2) * FLOATS_ROWS;
                if (t->dim - block * FLOATS_ROWS > LANES)
                    add_floats(2, 2, 0, m->weights, ATTEND_KEYS / 2, from, (here + 1) / 2, &m->mixed[group][block][0][0]);
                else
                    add_floats(2, 1, 0, m->weights, ATTEND_KEYS / 2, from, (here + 1) / 2, &m->mixed[group][block][0][0]);
            }
        }
    }
    for (int64_t q = 0; q < count; q++) {
        const float share = 1 / m->sums[q];
        float *to = t->out + ((first + q) * t->heads + head) * t->dim;
        for (int64_t i = 0; i < t->dim; i++)
            to[i] = m->mixed[q / FLOATS_OUTPUTS][i / FLOATS_ROWS][q % FLOATS_OUTPUTS][i % FLOATS_ROWS] * share;
    }
}

static void run_attend_pairs(void *data) {
    Attend *t = data;
    const int64_t blocks = (t->queries + ATTEND_QUERIES - 1) / ATTEND_QUERIES;
    AttendMemory *memory = NULL;
    if (posix_memalign((void **)&memory, 64, sizeof(AttendMemory))) abort();
    for (;;) {
        const int64_t task = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
        if (task >= blocks * t->heads) break;
        // The last queries first: with ``past`` they attend to most keys.
        const int64_t first = (blocks - 1 - task % blocks) * ATTEND_QUERIES, left = t->queries - first;
        attend_pairs(t, task / blocks, first, left < ATTEND_QUERIES ? left : ATTEND_QUERIES, memory);
    }
    free(memory);
}
#endif

// out [queries, heads, dim] = softmax(query @ keys.T * scale) @ values for each head, contiguous. ``query`` [queries,
// heads, dim], ``keys`` and ``values`` [count, kv_heads, dim], float32 whose rows and heads are ``strides`` numbers
// apart: row and head of query, keys, values. ``past``: query i attends to the first past + i + 1 keys; -1: to all.
// ``dim`` is even, at most MAX_DIM. Returns 0; 1 if there is no memory. Only if ``vlfit_attends_in_pairs``.
EXPORT int vlfit_attend_pairs(const float *query, const float *keys, const float *values, float *out, int64_t queries,
                              int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, const int64_t *strides,
                              int64_t past, float scale, int threads) {
#if PAIRS
    const int64_t padded = (count + FLOATS_ROWS - 1) / FLOATS_ROWS * FLOATS_ROWS;
    const int64_t blocks = (dim + FLOATS_ROWS - 1) / FLOATS_ROWS;
    const int64_t of_keys = kv_heads * padded * (dim / 2), of_values = kv_heads * blocks * padded / 2 * FLOATS_ROWS;
    float *packed = NULL;
    if (posix_memalign((void **)&packed, 64, (of_keys + of_values) * sizeof(float))) return 1;
    Attend job = {query, keys, values, out, packed, packed + of_keys, queries, count, heads, kv_heads, dim,
                  strides[0], strides[1], strides[2], strides[3], strides[4], strides[5], past, padded, blocks, 0, 0,
                  scale * 1.44269504f};
    in_parallel(run_pack_attention, &job, threads);
    in_parallel(run_attend_pairs, &job, threads);
    free(packed);
    return 0;
#else
    return 1;
#endif
}
