// All layers of a decoding step in one call, included by products.c: the same functions that are called one by one
// for prompts, without Python between them, whose own time is a tenth of a step on a CPU whose caches the weights
// have just passed through.

typedef struct {
    const Weight *qkv, *output, *gate_up, *down;  // matrices side by side
    int64_t qkv_count, output_count, gate_up_count, down_count;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // or NULL
    const float *input_norm, *post_attention_norm, *query_key_norm;  // the last one or NULL
} Layer;

typedef struct {
    float *keys, *values;  // [layers, slot_count, kv_heads, head_dim]
    const int64_t *new_slots, *slots, *lengths;  // [rows], [rows, longest], [rows]
    int64_t slot_count, longest, heads, kv_heads, head_dim;
} Cache;

static int64_t outputs_of(const Weight *weights, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += weights[i].outputs;
    return total;
}

// Run ``count`` layers on ``hidden`` [rows, width], in place, one token of each of ``rows`` sequences. ``cosines``
// and ``sines`` [rows, rotary] as for vlfit_rotate; other arguments as for the functions that are called. Returns
// 0; 1 if there is no memory; 2 if a slot or a size does not fit, after which ``hidden`` has no meaning.
EXPORT int vlfit_decode_layers(const Layer *layers, int64_t count, float *hidden, int64_t rows, int64_t width,
                               const float *cosines, const float *sines, int64_t rotary, const Cache *cache,
                               float eps, int threads) {
    const int64_t heads = cache->heads, kv_heads = cache->kv_heads, dim = cache->head_dim;
    const int64_t attended = heads * dim, qkv_width = attended + 2 * kv_heads * dim;
    const int64_t layer_slots = cache->slot_count * kv_heads * dim;
    int64_t inner = 0;
    for (int64_t i = 0; i < count; i++) {
        const Layer *l = &layers[i];
        const int64_t both = outputs_of(l->gate_up, l->gate_up_count);
        if (outputs_of(l->qkv, l->qkv_count) != qkv_width || l->qkv->inputs != width || both != 2 * l->down->inputs ||
            l->output->inputs != attended || outputs_of(l->output, l->output_count) != width ||
            l->gate_up->inputs != width || outputs_of(l->down, l->down_count) != width)
            return 2;
        if (both / 2 > inner) inner = both / 2;
    }
    float *memory = malloc(rows * (2 * width + qkv_width + 2 * attended + 3 * inner) * sizeof(float));
    if (!memory) return 1;
    float *normed = memory, *delta = normed + rows * width, *qkv = delta + rows * width;
    float *query = qkv + rows * qkv_width, *mixed = query + rows * attended, *gate_up = mixed + rows * attended;
    float *activated = gate_up + 2 * rows * inner;
    int failed = 0;
    for (int64_t i = 0; i < count && !failed; i++) {
        const Layer *l = &layers[i];
        float *keys = cache->keys + i * layer_slots, *values = cache->values + i * layer_slots;
        vlfit_add_norm(hidden, i ? delta : NULL, l->input_norm, normed, rows, width, eps, threads);
        failed = vlfit_multiply(l->qkv, l->qkv_count, normed, rows, l->qkv_bias, qkv, threads);
        if (!failed && vlfit_rotate(qkv, l->query_key_norm, cosines, sines, cache->new_slots, cache->slot_count,
                                    query, keys, values, rows, heads, kv_heads, dim, rotary, eps, threads))
            failed = 2;
        if (!failed)
            failed = vlfit_decode_attention(query, keys, values, cache->slots, cache->lengths, mixed,
                                            cache->slot_count, rows, cache->longest, heads, kv_heads, dim,
                                            1.0f / __builtin_sqrtf((float)dim), threads);
        if (!failed) failed = vlfit_multiply(l->output, l->output_count, mixed, rows, l->output_bias, delta, threads);
        if (failed) break;
        vlfit_add_norm(hidden, delta, l->post_attention_norm, normed, rows, width, eps, threads);
        failed = vlfit_multiply(l->gate_up, l->gate_up_count, normed, rows, l->gate_up_bias, gate_up, threads);
        vlfit_swiglu(gate_up, activated, rows, l->down->inputs, threads);
        if (!failed) failed = vlfit_multiply(l->down, l->down_count, activated, rows, l->down_bias, delta, threads);
    }
    for (int64_t i = 0; !failed && i < rows * width; i++) hidden[i] += delta[i];
    free(memory);
    return failed;
}
