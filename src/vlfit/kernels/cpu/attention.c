// Attention of decoding sequences over the paged cache in float32, included by products.c: one token each, whose
// heads_per_kv queries share a KV head. Keys and values are read once, in the order of memory: a task is a range
// of tokens for all heads. Its maxima, sums and mixed values are joined at the end.

#define KEYS 16  // tokens whose weights are computed together
#define MAX_DIM 512

typedef struct {
    const float *query, *keys, *values;
    const int64_t *slots, *lengths;
    float *partial;  // [tasks, heads, head_dim + 2]: mixed values, maximum, sum of weights
    const int64_t *first_task;  // [sequences + 1]
    int64_t sequences, longest, heads, kv_heads, head_dim, chunk, next;
    float scale;
} Decode;

// The products of ``group`` queries [group, dim] with one key, into ``scores``, KEYS apart.
INLINE void score(const float *query, const float *key, int64_t group, int64_t dim, float scale, float *scores) {
    for (int64_t g = 0; g < group; g++, query += dim) {
        vf some = {0}, more = {0};
        int64_t i = 0;
        for (; i + 2 * LANES <= dim; i += 2 * LANES) {
            some += load(query + i) * load(key + i);
            more += load(query + i + LANES) * load(key + i + LANES);
        }
        for (; i < dim; i += LANES) some += load(query + i) * load(key + i);
        scores[g * KEYS] = sum(some + more) * scale;
    }
}

// Add KEYS ``scores`` of a head to its maximum and sum in ``mixed`` [dim + 2], and scale what is in ``mixed`` to the
// new maximum; the scores become weights. Of fewer tokens the other scores are minus infinity.
INLINE void weigh(float *scores, float *mixed, int64_t dim) {
    float most = mixed[dim], total = 0;
    for (int k = 0; k < KEYS; k++)
        if (!(scores[k] <= most)) most = scores[k];  // NaN, too
    if (most != mixed[dim]) {
        // Before the first block the maximum is minus infinity, and there is nothing to rescale.
        const float less = mixed[dim] == -__builtin_inff() ? 0 : __builtin_expf(mixed[dim] - most);
        for (int64_t i = 0; i < dim; i += LANES) store(mixed + i, load(mixed + i) * less);
        mixed[dim] = most;
        mixed[dim + 1] *= less;
    }
    for (int k = 0; k < KEYS; k += LANES) {
        const vf below = load(scores + k) - most, least = all(-87.0f);
        const vi under = below < least;
        const vf bounded = (vf)((under & (vi)least) | (~under & (vi)below));
        const vf weight = (vf)(~under & (vi)exponential(bounded));
        store(scores + k, weight);
        total += sum(weight);
    }
    mixed[dim + 1] += total;
}

// mixed [group, dim + 2] += four ``values``, each [dim], times their ``weights``, KEYS apart for each head.
INLINE void mix(float *mixed, const float *weights, const float *const values[4], int64_t group, int64_t dim) {
    for (int64_t g = 0; g < group; g++, mixed += dim + 2, weights += KEYS) {
        const vf a = all(weights[0]), b = all(weights[1]), c = all(weights[2]), d = all(weights[3]);
        for (int64_t i = 0; i < dim; i += LANES)
            store(mixed + i, load(mixed + i) + a * load(values[0] + i) + b * load(values[1] + i) +
                                 c * load(values[2] + i) + d * load(values[3] + i));
    }
}

static void attend_range(const Decode *t, int64_t sequence, int64_t begin, int64_t end, float *partial,
                         float *scores) {
    const int64_t dim = t->head_dim, heads = t->heads, group = heads / t->kv_heads, row = t->kv_heads * dim;
    const int64_t stride = dim + 2;
    const float *query = t->query + sequence * heads * dim;
    const int64_t *slots = t->slots + sequence * t->longest;
    for (int64_t head = 0; head < heads; head++) {
        memset(partial + head * stride, 0, dim * sizeof(float));
        partial[head * stride + dim] = -__builtin_inff();
        partial[head * stride + dim + 1] = 0;
    }
    for (int64_t first = begin; first < end; first += KEYS) {
        const int count = end - first < KEYS ? (int)(end - first) : KEYS;
        const float *values[KEYS];
        for (int64_t i = count < KEYS ? 0 : heads * KEYS; i < heads * KEYS; i++) scores[i] = -__builtin_inff();
        for (int k = 0; k < KEYS; k++) {
            // Behind the last token its values stand in, with weights of 0.
            const int64_t at = slots[first + (k < count ? k : count - 1)] * row;
            values[k] = t->values + at;
            for (int64_t kv = 0; k < count && kv < t->kv_heads; kv++)
                score(query + kv * group * dim, t->keys + at + kv * dim, group, dim, t->scale,
                      scores + kv * group * KEYS + k);
        }
        for (int64_t head = 0; head < heads; head++) weigh(scores + head * KEYS, partial + head * stride, dim);
        for (int k = 0; k < count; k += 4)
            for (int64_t kv = 0; kv < t->kv_heads; kv++) {
                const float *some[4];
                for (int j = 0; j < 4; j++) some[j] = values[k + j] + kv * dim;
                mix(partial + kv * group * stride, scores + kv * group * KEYS + k, some, group, dim);
            }
    }
}

static void run_decode(void *data) {
    Decode *t = data;
    const int64_t tasks = t->first_task[t->sequences];
    float *scores = malloc(t->heads * KEYS * sizeof(float));
    if (!scores) abort();
    for (;;) {
        const int64_t task = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
        if (task >= tasks) break;
        int64_t sequence = 0;
        while (task >= t->first_task[sequence + 1]) sequence++;
        const int64_t begin = (task - t->first_task[sequence]) * t->chunk;
        const int64_t end = begin + t->chunk < t->lengths[sequence] ? begin + t->chunk : t->lengths[sequence];
        attend_range(t, sequence, begin, end, t->partial + task * t->heads * (t->head_dim + 2), scores);
    }
    free(scores);
}

// out [sequences, heads, head_dim] = softmax(query @ keys.T * scale) @ values, for ``query`` in the same shape and
// the first ``lengths`` [sequences] of the slots [sequences, longest] of each, at least one, in ``keys`` and
// ``values`` [slot_count, kv_heads, head_dim]. ``head_dim`` is a multiple of 16, at most MAX_DIM. Returns 0; 1 if
// there is no memory, 2 if a slot is none of ``slot_count`` or a size is not as said.
EXPORT int vlfit_decode_attention(const float *query, const float *keys, const float *values, const int64_t *slots,
                                  const int64_t *lengths, float *out, int64_t slot_count, int64_t sequences,
                                  int64_t longest, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                  float scale, int threads) {
    int64_t total = 0;
    if (head_dim % 16 || head_dim > MAX_DIM || kv_heads < 1 || heads % kv_heads) return 2;
    for (int64_t s = 0; s < sequences; s++) {
        if (lengths[s] < 1 || lengths[s] > longest) return 2;
        total += lengths[s];
        for (int64_t i = 0; i < lengths[s]; i++)
            if (slots[s * longest + i] < 0 || slots[s * longest + i] >= slot_count) return 2;
    }
    // Some eight tasks a thread, of at least 32 tokens.
    int64_t chunk = (total / (8 * (threads > 0 ? threads : 1)) + KEYS - 1) / KEYS * KEYS;
    if (chunk < 2 * KEYS) chunk = 2 * KEYS;
    int64_t *first_task = malloc((sequences + 1) * sizeof(int64_t));
    if (!first_task) return 1;
    first_task[0] = 0;
    for (int64_t s = 0; s < sequences; s++) first_task[s + 1] = first_task[s] + (lengths[s] + chunk - 1) / chunk;
    const int64_t stride = head_dim + 2;
    float *partial = malloc(first_task[sequences] * heads * stride * sizeof(float));
    if (!partial) {
        free(first_task);
        return 1;
    }
    Decode job = {query, keys, values, slots, lengths, partial, first_task, sequences, longest, heads, kv_heads,
                  head_dim, chunk, 0, scale};
    in_parallel(run_decode, &job, threads);
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t head = 0; head < heads; head++) {
            const float *first = partial + (first_task[s] * heads + head) * stride;
            const int64_t parts = first_task[s + 1] - first_task[s];
            float most = -__builtin_inff(), weight = 0;
            for (int64_t p = 0; p < parts; p++) {
                const float other = first[p * heads * stride + head_dim];
                if (!(other <= most)) most = other;
            }
            float *to = out + (s * heads + head) * head_dim;
            memset(to, 0, head_dim * sizeof(float));
            for (int64_t p = 0; p < parts; p++) {
                const float *part = first + p * heads * stride, share = __builtin_expf(part[head_dim] - most);
                weight += share * part[head_dim + 1];
                for (int64_t i = 0; i < head_dim; i++) to[i] += share * part[i];
            }
            for (int64_t i = 0; i < head_dim; i++) to[i] /= weight;
        }
    free(partial);
    free(first_task);
    return 0;
}
