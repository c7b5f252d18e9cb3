// Products with weights as they are stored, on a CPU: x @ weight.T in float32, from codes of 4 or 8 bits or
// values of 16 bits.
//
// Compiled at the first use by kernels/cpu/library.py, for the vector unit that torch uses: one source, three
// levels (AVX-512, AVX2 with FMA and F16C, and plain C that compilers turn into NEON or SSE). No header of
// Python or torch, so that it compiles in seconds. The caller (kernels/cpu/products.py) has checked shapes.
//
// A weight is (code - zero) * scale, or code * scale - minimum if affine. Codes are summed with their inputs
// first, and the sum is multiplied by the group's scale; zero points and minima are multiplied by the sum of the
// group's inputs. FP8 codes are decoded to numbers 2**8 too small (as float16), which their scales make good.
//
// A few rows: codes of 4 bits, and of 8 where the CPU has integer dot products (VNNI), meet inputs that are cut
// into three signed bytes (planes.c), so that their sums are exact; all else is multiplied in float32. Many rows:
// tiles.c where the CPU has AMX, else gemm.c for codes of 4 and 8 bits and floats.c for the rest, which round their
// inputs where they may and where that is faster; without vector units torch, after vlfit_dequantize.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LEVEL 512
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LEVEL 256
#define LANES 8
#else
#define LEVEL 0
#define LANES 4
#endif

#if LEVEL == 512 && defined(__AVX512VNNI__)
#define VNNI 1
#elif LEVEL == 256 && defined(__AVXVNNI__)
#define VNNI 1
#else
#define VNNI 0
#endif
#if LEVEL == 512 && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define AMX 1
#else
#define AMX 0
#endif

// Kinds of codes; from Q4_0 on blocks of GGUF files, which hold their scales (blocks.c).
enum {
    INT4, INT8, FP8, FP8_WITH_NAN, BF16, F16,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, NVFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,
};
enum {
    NO_SCALE, SCALE_F32, SCALE_F16, SCALE_BF16, SCALE_TWO_LEVEL, SCALE_AFFINE, SCALE_BLOCKS, SCALE_BLOCKS_AFFINE,
};

typedef struct {
    const uint8_t *codes;  // [outputs, row_bytes]
    const uint8_t *scale;  // [ceil(outputs / block_rows), groups]
    const uint8_t *zeros;  // [ceil(outputs / 8), groups] words of eight 4-bit zero points; or NULL
    const uint8_t *supers;  // [outputs, super_groups] for two-level scales; or NULL
    const int32_t *order;  // [outputs] rows of ``codes``, for blocks; NULL: in order
    int64_t outputs, inputs, row_bytes, groups, group, block_rows, super_groups;
    int32_t format, scale_kind;
    int32_t flip;  // 0x80 where codes of 8 bits are stored plus 128, else 0
    int32_t rounds;  // whether products of many rows may round their inputs
} Weight;

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef float vf_loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu_loose __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef int32_t vi_loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_loose __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef int8_t vb_loose __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vf load(const float *at) { return *(const vf_loose *)at; }
INLINE void store(float *at, vf value) { *(vf_loose *)at = value; }
INLINE vf all(float value) { return value - (vf){0}; }

// The sum of all lanes in pairs: one after the other, each addition would wait for the one before.
#if LEVEL
INLINE float sum_of_eight(__m256 value) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif

INLINE float sum(vf value) {
#if LEVEL == 512
    return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256((__m512)value), _mm512_extractf32x8_ps((__m512)value, 1)));
#elif LEVEL == 256
    return sum_of_eight((__m256)value);
#else
    return (value[0] + value[2]) + (value[1] + value[3]);
#endif
}

INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t half_at(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

INLINE float from_bf16(uint16_t bits) { return bits_to_float((uint32_t)bits << 16); }

INLINE float from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return bits_to_float(sign | rest << 13) * 0x1p112f;  // the exponents' biases differ by 112
}

// An FP8 (e4m3) code, divided by 2**8.
INLINE float from_fp8(uint8_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x80) << 24, rest = bits & 0x7f;
    return bits_to_float(sign | rest << 20) * 0x1p112f;
}

INLINE int bytes_per_code(int format) { return format >= BF16 ? 2 : 1; }

// The numbers that LANES codes of 8 or 16 bits stand for.
INLINE vf decode(int format, const uint8_t *at, int flip) {
#if LEVEL == 512
    if (format == BF16)
        return (vf)_mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16));
    if (format == F16) return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
    if (format != FP8_WITH_NAN) {
        __m128i codes = _mm_loadu_si128((const __m128i *)at);
        if (format == FP8) {
            __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
            return (vf)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff)));
        }
        codes = _mm_xor_si128(codes, _mm_set1_epi8((char)flip));
        return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    }
#elif LEVEL == 256
    if (format == BF16)
        return (vf)_mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
    if (format == F16) return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
    if (format != FP8_WITH_NAN) {
        __m128i codes = _mm_loadl_epi64((const __m128i *)at);
        if (format == FP8) {
            __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
            return (vf)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xbfff)));
        }
        codes = _mm_xor_si128(codes, _mm_set1_epi8((char)flip));
        return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    }
#endif
    vf value = {0};
    for (int i = 0; i < LANES; i++) {
        if (format == BF16)
            value[i] = from_bf16(half_at(at + 2 * i));
        else if (format == F16)
            value[i] = from_f16(half_at(at + 2 * i));
        else if (format == FP8)
            value[i] = from_fp8(at[i]);
        else if (format == FP8_WITH_NAN)
            value[i] = (at[i] & 0x7f) == 0x7f ? __builtin_nanf("") : from_fp8(at[i]);
        else
            value[i] = (float)(int8_t)(at[i] ^ flip);
    }
    return value;
}

// Numbers of 16 bits, each in 32: float16 to float32.
INLINE vf from_halves(vu bits) {
#if LEVEL == 512
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif LEVEL == 256
    const __m256i packed = (__m256i)bits;
    return (vf)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
#else
    vf value = {0};
    for (int i = 0; i < LANES; i++) value[i] = from_f16((uint16_t)bits[i]);
    return value;
#endif
}

// ``at``, or if fewer than ``size`` bytes are there (``left``) a copy of these in ``padded`` with zeros behind.
INLINE const uint8_t *whole(const uint8_t *at, int64_t left, int64_t size, uint8_t *padded) {
    if (left >= size) return at;
    memset(padded, 0, size);
    return memcpy(padded, at, left);
}

// The codes number k of LANES words of eight 4-bit codes, less 8.
#if LEVEL == 512
#define MARK(words) (words)
INLINE vf nibbles(vu words, int k) {
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (vf)_mm512_permutexvar_ps((__m512i)(words >> (4 * k)), table);
}
#else
#define MARK(words) ((words) ^ 0x88888888u)  // less 8, in two's complement
INLINE vf nibbles(vu words, int k) {
    return __builtin_convertvector((vi)(words << (28 - 4 * k)) >> 28, vf);
}
#endif

// --- scales ------------------------------------------------------------------------------------------------

// ``count`` numbers of 16 bits in float32.
static void widen(int format, const uint8_t *from, float *to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, decode(format, from + 2 * i, 0));
    for (; i < count; i++) to[i] = format == BF16 ? from_bf16(half_at(from + 2 * i)) : from_f16(half_at(from + 2 * i));
}

// Lane i: values[(index + i) >> shift], for an ``index`` that is a multiple of LANES. ``select``: i >> shift.
INLINE vf spread(const float *values, int64_t index, int shift, vi select) {
    if (1 << (shift < 8 ? shift : 8) >= LANES) return all(values[index >> shift]);
    const float *at = values + (index >> shift);
    // Only what is needed is loaded: a whole vector would nearly always lie in two lines of the cache.
#if LEVEL == 512
    if (shift == 3) {
        double both;
        memcpy(&both, at, 8);
        return (vf)_mm512_permutexvar_ps((__m512i)select, _mm512_castpd_ps(_mm512_set1_pd(both)));
    }
    if (shift == 2) return (vf)_mm512_permutexvar_ps((__m512i)select, _mm512_broadcast_f32x4(_mm_loadu_ps(at)));
#elif LEVEL == 256
    if (shift == 2) {
        double both;
        memcpy(&both, at, 8);
        return (vf)_mm256_permutevar8x32_ps(_mm256_castpd_ps(_mm256_set1_pd(both)), (__m256i)select);
    }
#endif
    const vf some = load(at);
#if LEVEL == 512
    return (vf)_mm512_permutexvar_ps((__m512i)select, (__m512)some);
#elif LEVEL == 256
    return (vf)_mm256_permutevar8x32_ps((__m256)some, (__m256i)select);
#else
    vf value = {0};
    for (int i = 0; i < LANES; i++) value[i] = some[select[i]];
    return value;
#endif
}

INLINE vi selection(int shift) {
    vi select = {0};
    for (int i = 0; i < LANES; i++) select[i] = i >> (shift < 8 ? shift : 8);
    return select;
}

// Such that ``count`` neighbours share a value of ``values``: count is 2**shift, or there is one value.
INLINE int shift_for(int64_t count, int64_t values) {
    return values == 1 ? 62 : __builtin_ctzll((unsigned long long)count);
}

#include "blocks.c"

// Floats of memory for ``row_scales``: scales, what is subtracted, and its own; for blocks also a row of codes.
INLINE int64_t scratch_of(const Weight *w) {
    return (2 * (w->groups + LANES) + 4 * (w->super_groups + LANES) + block_scratch_of(w) + 15) / 16 * 16;
}

// Floats for the sums of the groups of a row of inputs: whole runs of groups of 32.
INLINE int64_t sums_of(const Weight *w) { return (w->groups + 7) / 8 * 8; }

INLINE int is_affine(const Weight *w) {
    return w->scale_kind == SCALE_AFFINE || w->scale_kind == SCALE_BLOCKS_AFFINE;
}

// The scales [groups] of one output into ``scratch``, zeros after them, and behind these its zero points, or
// minima if affine. Returns whether it has any.
static int row_scales(const Weight *w, int64_t row, float *scratch) {
    const int64_t groups = w->groups, first = row / w->block_rows * groups;
    float *scales = scratch, *less = scratch + groups + LANES, *supers = less + groups + LANES;
    switch (w->scale_kind) {
    case NO_SCALE:
        for (int64_t g = 0; g < groups; g++) scales[g] = 1;
        break;
    case SCALE_F32:
        memcpy(scales, w->scale + 4 * first, 4 * groups);
        break;
    case SCALE_F16:
        widen(F16, w->scale + 2 * first, scales, groups);
        break;
    case SCALE_BF16:
        widen(BF16, w->scale + 2 * first, scales, groups);
        break;
    case SCALE_BLOCKS:
    case SCALE_BLOCKS_AFFINE:
        block_scales(w, row, scales, less);
        break;
    default: {
        const int64_t count = w->super_groups, super = row * count;
        const int shift = shift_for(groups / count, count);
        const vi select = selection(shift);
        float *minima = supers + count + LANES;
        uint8_t padded[4 * LANES];
        if (is_affine(w)) {  // a scale in the low half of each word, a minimum in the high one
            for (int64_t i = 0; i < count; i += LANES) {
                const uint8_t *at = w->supers + 4 * (super + i);
                const vu pairs = *(const vu_loose *)whole(at, 4 * (count - i), 4 * LANES, padded);
                store(supers + i, from_halves(pairs & 0xffff));
                store(minima + i, from_halves(pairs >> 16));
            }
            for (int64_t g = 0; g < groups; g += LANES) {
                const uint8_t *at = w->scale + 2 * (first + g);
                const vh_loose pairs = *(const vh_loose *)whole(at, 2 * (groups - g), 2 * LANES, padded);
                const vi both = __builtin_convertvector(pairs, vi);
                store(scales + g, __builtin_convertvector(both & 0xff, vf) * spread(supers, g, shift, select));
                store(less + g, __builtin_convertvector(both >> 8, vf) * spread(minima, g, shift, select));
            }
        } else {
            widen(F16, w->supers + 2 * super, supers, count);
            for (int64_t g = 0; g < groups; g += LANES) {
                const uint8_t *at = w->scale + first + g;
                const uint8_t *codes = whole(at, groups - g, LANES, padded);
                store(scales + g, decode(INT8, codes, 0) * spread(supers, g, shift, select));
            }
        }
    }
    }
    if (w->format == FP8 || w->format == FP8_WITH_NAN)
        for (int64_t g = 0; g < groups; g++) scales[g] *= 256;
    for (int i = 0; i < LANES; i++) scales[groups + i] = 0;
    if (w->zeros) {
        const uint8_t *zeros = w->zeros + row / 8 * groups * 4 + row % 8 / 2;
        const int shift = row % 2 * 4;
        for (int64_t g = 0; g < groups; g++) less[g] = (float)(zeros[4 * g] >> shift & 15);
    }
    return w->zeros != NULL || is_affine(w);
}

#include "threads.c"
#include "rows.c"
#include "attention.c"

// --- a few rows --------------------------------------------------------------------------------------------

#define TOGETHER 4  // outputs that share the loads of their inputs
#define FROM_BLOCKS 3  // rows that are multiplied straight from blocks; for more these are brought into bytes first
#define TASK_BYTES 32768  // of codes that a thread takes at least
#define MOST_TASKS 64  // that it takes at a time: a thread without a core keeps them from the others
#define SHORT_ROW 2560  // bytes

typedef struct {
    const Weight *weight;
    const float *x;  // [rows, padded]; for 4-bit codes in the order in which words are taken apart
    const uint8_t *planes;  // [rows, plane_bytes] in place of x where ``has_planes``
    const float *sums;  // [rows, sums_of] of the inputs of each group, zeros behind them; NULL: not needed
    const float *bias;  // [outputs] or NULL
    float *out;
    int64_t padded, plane_bytes, rows, out_stride, first_task, task_outputs, tasks;
    int format;  // how codes are multiplied: of blocks that are brought into bytes INT8
    const uint8_t *unpacked;  // codes of a thread's outputs from ``first_unpacked`` on, ``unpacked_stride`` apart; or NULL
    int64_t first_unpacked, unpacked_stride;
} Part;

typedef struct {
    Part *parts;
    int64_t count, tasks, next;
    int threads;
} Job;

// Where the codes of the next outputs are asked for: while byte ``at`` of ``R`` outputs is read, the line
// from + at * times + r * apart, for each output r. A core has few places for lines on their way to its first cache,
// so they come into the second. Short rows are asked for as they lie, two rounds ahead, long ones side by side, as they
// are read: measured, for 4 bits.
typedef struct {
    const uint8_t *from;
    int64_t times, apart;
} Ahead;

INLINE Ahead look_ahead(const uint8_t *codes, int64_t bytes, const int R) {
    const int is_short = bytes < SHORT_ROW;
    return (Ahead){codes + (is_short ? 2 * R : R) * bytes, is_short ? R : 1, is_short ? 64 : bytes};
}

INLINE void ask_for(Ahead ahead, int64_t at, int64_t r) {
    __builtin_prefetch(ahead.from + at * ahead.times + r * ahead.apart, 0, 2);
}

// Ask for the scales of ``R`` outputs that are multiplied soon: they lie apart from the codes, and every row of them
// would be waited for.
INLINE void ask_for_scales(const Weight *w, int64_t row, const int R) {
    if (w->block_rows != 1 || w->scale_kind < SCALE_F32 || w->scale_kind > SCALE_BF16) return;
    const int64_t bytes = w->groups * (w->scale_kind == SCALE_F32 ? 4 : 2);
    const uint8_t *from = w->scale + row * bytes;
    for (int64_t at = 0; at < R * bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// Take tasks: a share of those left of one part, so that memory is read in long runs and all threads end together.
// Returns 0 if none are left.
static int take_tasks(Job *job, const Part **part, int64_t *begin, int64_t *end) {
    int64_t task = __atomic_load_n(&job->next, __ATOMIC_RELAXED), last;
    const Part *p;
    do {
        if (task >= job->tasks) return 0;
        for (p = job->parts; task >= p->first_task + p->tasks; p++) {}
        int64_t count = (job->tasks - task) / (2 * job->threads);
        count = count < 1 ? 1 : count > MOST_TASKS ? MOST_TASKS : count;
        last = p->first_task + p->tasks;
        if (last > task + count) last = task + count;
    } while (!__atomic_compare_exchange_n(&job->next, &task, last, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    *part = p;
    *begin = (task - p->first_task) * p->task_outputs;
    *end = (last - p->first_task) * p->task_outputs;
    if (*end > p->weight->outputs) *end = p->weight->outputs;
    return 1;
}

// Whether codes have 4 bits and are multiplied so.
INLINE int is_four(const int format) { return format == INT4 || format == Q4_0 || format == Q4_1 || format == Q4_K; }

// ``row_scales``, and for 4-bit codes in place of zero points and minima what the sums of groups are multiplied
// by: codes are taken less 8.
INLINE int prepare_scales(const int format, const Weight *w, int64_t row, float *scales) {
    const int any = row_scales(w, row, scales);
    float *less = scales + w->groups + LANES;
    if (any && format == INT4)
        for (int64_t g = 0; g < w->groups; g += LANES) {
            const vf scale = load(scales + g), zero = load(less + g);
            store(less + g, is_affine(w) ? zero - 8 * scale : (zero - 8) * scale);
        }
    return any;
}

// The codes of an output, and how many bytes they are.
INLINE const uint8_t *codes_at(const Part *p, int64_t row) {
    if (p->unpacked) return p->unpacked + (row - p->first_unpacked) * p->unpacked_stride;
    return row_at(p->weight, row);
}

INLINE int64_t code_bytes(const Part *p) { return p->unpacked ? p->weight->inputs : p->weight->row_bytes; }

INLINE vu load_words(const uint8_t *at, int64_t words) {
    if (words >= LANES) return *(const vu_loose *)at;
    vu some = {0};
    memcpy(&some, at, 4 * words);
    return some;
}

// Store one output: ``value`` without what ``less`` (NULL: nothing) takes from it, with its bias.
INLINE void finish(const Part *p, int64_t row, int64_t x_row, float value, const float *less) {
    if (less) {
        const int64_t groups = p->weight->groups;
        const float *sums = p->sums + x_row * sums_of(p->weight);
        vf some = {0};
        int64_t g = 0;
        for (; g + LANES <= groups; g += LANES) some += load(less + g) * load(sums + g);
        float minus = sum(some);
        for (; g < groups; g++) minus += less[g] * sums[g];
        value -= minus;
    }
    if (p->bias) value += p->bias[row];
    p->out[x_row * p->out_stride + row] = value;
}

// ``R`` outputs from ``row`` on, for ``M`` rows of inputs.
INLINE void multiply(const int format, const int R, const int M, const Part *p, int64_t row, int64_t x_row,
                     float *scratch) {
    const Weight *w = p->weight;
    const int flip = w->flip;
    const int64_t span = scratch_of(w);
    float *scales[TOGETHER], *less[TOGETHER];
    int any = 0;
    vf total[TOGETHER][4];
    const uint8_t *codes[TOGETHER];
    const float *x[4];
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        scales[r] = scratch + r * span;
        less[r] = scales[r] + w->groups + LANES;
        any |= prepare_scales(format, w, row + r, scales[r]);
        codes[r] = codes_at(p, row + r);
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) total[r][m] = (vf){0};
    }
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++) x[m] = p->x + (x_row + m) * p->padded;
    const int64_t code_size = code_bytes(p);
    if (format == INT4) {
        const Ahead ahead = look_ahead(codes[0], code_size, R);
        const int64_t words = w->inputs / 8;
        const int shift = shift_for(w->group / 8, w->groups);
        const vi select = selection(shift);
        for (int64_t word = 0; word < words; word += LANES) {
            vu packed[TOGETHER];
            vf part[TOGETHER][4];
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                packed[r] = MARK(load_words(codes[r] + 4 * word, words - word));
                if (LEVEL == 512 || word % 16 == 0) ask_for(ahead, 4 * word, r);
                #pragma GCC unroll 8
                for (int m = 0; m < M; m++) part[r][m] = (vf){0};
            }
            #pragma GCC unroll 8
            for (int k = 0; k < 8; k++)
                #pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const vf code = nibbles(packed[r], k);
                    #pragma GCC unroll 8
                    for (int m = 0; m < M; m++) part[r][m] += code * load(x[m] + 8 * word + k * LANES);
                }
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vf scale = spread(scales[r], word, shift, select);
                #pragma GCC unroll 8
                for (int m = 0; m < M; m++) total[r][m] += scale * part[r][m];
            }
        }
    } else {
        const int64_t bytes = bytes_per_code(format), inputs = w->inputs, group = w->group;
        const int64_t whole = inputs / LANES * LANES;
        const Ahead ahead = {codes[0] + R * code_size, 1, code_size};
        for (int64_t g = 0; g < w->groups; g++) {
            const int64_t begin = g * group, end = begin + group < whole ? begin + group : whole;
            vf part[TOGETHER][4];
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                #pragma GCC unroll 8
                for (int m = 0; m < M; m++) part[r][m] = (vf){0};
            for (int64_t i = begin; i < end; i += LANES)
                #pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const vf code = decode(format, codes[r] + bytes * i, flip);
                    if (i * bytes % 64 == 0) ask_for(ahead, bytes * i, r);
                    #pragma GCC unroll 8
                    for (int m = 0; m < M; m++) part[r][m] += code * load(x[m] + i);
                }
            if (whole < inputs && begin + group >= inputs) {  // the last, incomplete lanes
                #pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    uint8_t rest[2 * LANES] = {0};
                    memcpy(rest, codes[r] + bytes * whole, bytes * (inputs - whole));
                    const vf code = decode(format, rest, flip);
                    #pragma GCC unroll 8
                    for (int m = 0; m < M; m++) part[r][m] += code * load(x[m] + whole);
                }
            }
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                #pragma GCC unroll 8
                for (int m = 0; m < M; m++) total[r][m] += part[r][m] * scales[r][g];
        }
    }
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) finish(p, row + r, x_row + m, sum(total[r][m]), any ? less[r] : NULL);
}

#include "planes.c"

// Bring the codes of ``count`` outputs into bytes, if that is how they are multiplied.
INLINE void unpack_outputs(Part *p, int64_t row, int64_t count, float *scratch) {
    if (!p->unpacked) return;
    p->first_unpacked = row;
    for (int64_t r = 0; r < count; r++)
        unpack_row(p->weight, row + r, count * p->weight->row_bytes,
                   codes_in(p->weight, scratch + r * scratch_of(p->weight)));
}

INLINE void multiply_rows(const int format, Part *p, int64_t begin, int64_t end, float *scratch) {
    int64_t row = begin;
    for (; row + TOGETHER <= end; row += TOGETHER) {
        int64_t m = 0;
        unpack_outputs(p, row, TOGETHER, scratch);
        for (; m + 4 <= p->rows && !is_blocks(format); m += 4) {
            MULTIPLY(format, 2, 4, p, row, m, scratch);
            MULTIPLY(format, 2, 4, p, row + 2, m, scratch);
        }
        for (; m < p->rows; m++) MULTIPLY(format, 4, 1, p, row, m, scratch);
    }
    for (; row < end; row++) {
        unpack_outputs(p, row, 1, scratch);
        for (int64_t m = 0; m < p->rows; m++) MULTIPLY(format, 1, 1, p, row, m, scratch);
    }
}

#define FOR_FORMAT(format)                                                                                    \
    static __attribute__((noinline)) void multiply_##format(Part *p, int64_t begin, int64_t end,              \
                                                            float *scratch) {                                 \
        multiply_rows(format, p, begin, end, scratch);                                                        \
    }
FOR_FORMAT(INT4)
FOR_FORMAT(INT8)
FOR_FORMAT(FP8)
FOR_FORMAT(BF16)
FOR_FORMAT(F16)

static void multiply_FP8_WITH_NAN(Part *p, int64_t begin, int64_t end, float *scratch) {  // as it is rare
    for (int64_t row = begin; row < end; row++)
        for (int64_t m = 0; m < p->rows; m++) multiply(FP8_WITH_NAN, 1, 1, p, row, m, scratch);
}

#if VNNI || LEVEL == 256
FOR_FORMAT(Q4_0)
FOR_FORMAT(Q4_1)
FOR_FORMAT(Q4_K)
#else
#define multiply_Q4_0 NULL
#define multiply_Q4_1 NULL
#define multiply_Q4_K NULL
#endif
#if VNNI
FOR_FORMAT(Q8_0)
FOR_FORMAT(Q5_K)
FOR_FORMAT(Q6_K)
#else
#define multiply_Q8_0 NULL
#define multiply_Q5_K NULL
#define multiply_Q6_K NULL
#endif

static void (*const BY_FORMAT[])(Part *, int64_t, int64_t, float *) = {
    [INT4] = multiply_INT4, [INT8] = multiply_INT8, [FP8] = multiply_FP8, [FP8_WITH_NAN] = multiply_FP8_WITH_NAN,
    [BF16] = multiply_BF16, [F16] = multiply_F16, [Q4_0] = multiply_Q4_0, [Q4_1] = multiply_Q4_1,
    [Q4_K] = multiply_Q4_K, [Q8_0] = multiply_Q8_0, [Q5_K] = multiply_Q5_K, [Q6_K] = multiply_Q6_K,
};

static void run_job(void *data) {
    Job *job = data;
    int64_t most = 0;
    for (int64_t i = 0; i < job->count; i++) {
        const Weight *w = job->parts[i].weight;
        int64_t size = TOGETHER * scratch_of(w);
        if (size > most) most = size;
    }
    float *scratch = malloc(most * sizeof(float));
    if (!scratch) abort();
    const Part *p;
    int64_t begin, end;
    while (take_tasks(job, &p, &begin, &end)) {
        Part mine = *p;
        if (is_blocks(p->weight->format) && p->format == INT8) {
            mine.unpacked = (const uint8_t *)codes_in(p->weight, scratch);
            mine.unpacked_stride = scratch_of(p->weight) * sizeof(float);
        }
        BY_FORMAT[p->format](&mine, begin, end, scratch);
    }
    free(scratch);
}

// ``x`` [rows, inputs] padded with zeros to whole runs; for 4-bit codes input 8 i + k of a block of
// 8 LANES becomes number k LANES + i.
static void prepare_inputs(const Weight *w, const float *x, int64_t rows, int64_t padded, float *to) {
    for (int64_t m = 0; m < rows; m++) {
        const float *from = x + m * w->inputs;
        float *row = to + m * padded;
        memset(row + w->inputs / (8 * LANES) * (8 * LANES), 0,
               (padded - w->inputs / (8 * LANES) * (8 * LANES)) * sizeof(float));
        if (w->format == INT4)
            for (int64_t block = 0; block < w->inputs; block += 8 * LANES)
                for (int64_t word = 0; word < LANES && block + 8 * word < w->inputs; word++)
                    for (int k = 0; k < 8; k++) row[block + k * LANES + word] = from[block + 8 * word + k];
        else
            memcpy(row, from, w->inputs * sizeof(float));
    }
}

// Sums [rows, sums_of] of the inputs ``x`` of each group.
static void sum_groups(const Weight *w, const float *x, int64_t rows, float *sums) {
    memset(sums, 0, rows * sums_of(w) * sizeof(float));
    for (int64_t m = 0; m < rows; m++)
        for (int64_t g = 0; g < w->groups; g++) {
            const float *from = x + m * w->inputs;
            int64_t i = g * w->group, end = i + w->group < w->inputs ? i + w->group : w->inputs;
            vf some = {0};
            for (; i + LANES <= end; i += LANES) some += load(from + i);
            float total = sum(some);
            for (; i < end; i++) total += from[i];
            sums[m * sums_of(w) + g] = total;
        }
}

// out[:, k-th outputs] = x @ weights[k].T + bias, for matrices with the same number of inputs side by side.
// ``x`` [rows, inputs] and ``out`` [rows, all outputs] float32, contiguous, at least one row; ``bias`` [all
// outputs] or NULL. Returns 0, or 1 if there is no memory.
EXPORT int vlfit_multiply(const Weight *weights, int64_t count, const float *x, int64_t rows, const float *bias,
                          float *out, int threads) {
    int64_t inputs = weights[0].inputs, padded = (inputs + RUN - 1) / RUN * RUN;
    int64_t sums_size = 0, out_stride = 0, done = 0;
    for (int64_t i = 0; i < count; i++) {
        out_stride += weights[i].outputs;
        sums_size += rows * sums_of(&weights[i]);
    }
    // Inputs in up to four forms, of which the one for codes of 8 bits in planes takes 5 bytes each.
    const int64_t form_bytes = (rows * padded * 5 + 63) / 64 * 64;
    uint8_t *memory = malloc(4 * form_bytes + sums_size * sizeof(float) + 64);
    Part *parts = malloc(count * sizeof(Part));
    if (!memory || !parts) {
        free(memory);
        free(parts);
        return 1;
    }
    uint8_t *aligned = (uint8_t *)(((uintptr_t)memory + 63) / 64 * 64), *prepared[4] = {NULL, NULL, NULL, NULL};
    float *sums = (float *)(aligned + 4 * form_bytes);
    Job job = {parts, count, 0, 0, threads};
    for (int64_t i = 0; i < count; i++) {
        const Weight *w = &weights[i];
        const int as_bytes = is_blocks(w->format) && (!has_planes(w->format) || rows > FROM_BLOCKS);
        const int format = as_bytes ? INT8 : w->format, in_planes = has_planes(format);
        const int kind = format == INT4 ? 1 : !in_planes ? 0 : is_four(format) ? 3 : 2;
        const int needs_sums = w->zeros != NULL || is_affine(w);
        const int64_t together = is_four(format) ? BLOCK_INPUTS(INT4) : BLOCK_INPUTS(INT8);
        const int64_t plane_size = is_four(format) ? BLOCK_BYTES(INT4) : BLOCK_BYTES(INT8);
        const int64_t plane_bytes = padded / together * plane_size;
        if (!prepared[kind]) {
            prepared[kind] = aligned + kind * form_bytes;
            if (in_planes)
                for (int64_t m = 0; m < rows; m++)
                    (kind == 1 ? cut_4 : kind == 2 ? cut_8 : cut_block_4)(x + m * inputs, inputs,
                                                                          prepared[kind] + m * plane_bytes);
            else
                prepare_inputs(w, x, rows, padded, (float *)prepared[kind]);
        }
        if (needs_sums) sum_groups(w, x, rows, sums);
        int64_t task = TASK_BYTES / (w->row_bytes + 1) / TOGETHER * TOGETHER;
        int64_t fair = w->outputs / (4 * threads) / TOGETHER * TOGETHER;
        if (task > fair) task = fair;
        if (task < TOGETHER) task = TOGETHER;
        parts[i] = (Part){w, (float *)prepared[kind], prepared[kind], needs_sums ? sums : NULL, bias ? bias + done : NULL, out + done,
                          padded, plane_bytes, rows, out_stride, job.tasks, task, (w->outputs + task - 1) / task,
                          format};
        job.tasks += parts[i].tasks;
        done += w->outputs;
        if (needs_sums) sums += rows * sums_of(w);
    }
    in_parallel(run_job, &job, threads);
    free(memory);
    free(parts);
    return 0;
}

// --- many rows: weights in float32 for torch's product -----------------------------------------------------

typedef struct {
    const Weight *weight;
    float *out;
    int64_t first, count, next;
} Dequantization;

INLINE void dequantize_row(const int format, const Weight *w, int64_t row, float *scales, float *out) {
    const float *less = scales + w->groups + LANES;
    const int any = row_scales(w, row, scales), affine = is_affine(w);
    const int flip = w->flip;
    const uint8_t *codes = row_at(w, row);
    if (is_blocks(w->format)) {
        unpack_row(w, row, w->row_bytes, codes_in(w, scales));
        codes = (const uint8_t *)codes_in(w, scales);
    }
    if (format == INT4) {
        for (int64_t g = 0; g < w->groups; g++) {
            const float scale = scales[g], zero = affine ? 0 : any ? less[g] : 8, minimum = affine ? less[g] : 0;
            const uint8_t *at = codes + g * w->group / 2;
            float *to = out + g * w->group;
            for (int64_t i = 0; i < w->group; i += 16) {  // groups are multiples of 16
#if LEVEL > 0
                const __m128i pairs = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(at + i / 2)));
                const __m128i both = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16(pairs, 4)),
                                                   _mm_set1_epi16(0x0f0f));
#if LEVEL == 512
                const vf value = (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both));
                store(to + i, (value - zero) * scale - minimum);
#else
                const vf low = (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(both));
                const vf high = (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(both, 8)));
                store(to + i, (low - zero) * scale - minimum);
                store(to + i + 8, (high - zero) * scale - minimum);
#endif
#else
                for (int64_t j = 0; j < 8; j++) {
                    to[i + 2 * j] = ((float)(at[i / 2 + j] & 15) - zero) * scale - minimum;
                    to[i + 2 * j + 1] = ((float)(at[i / 2 + j] >> 4) - zero) * scale - minimum;
                }
#endif
            }
        }
        return;
    }
    const int64_t bytes = bytes_per_code(format), whole = w->inputs / LANES * LANES;
    for (int64_t g = 0; g < w->groups; g++) {
        const float scale = scales[g], minimum = any ? less[g] : 0;
        const int64_t begin = g * w->group, end = begin + w->group < whole ? begin + w->group : whole;
        if (w->scale_kind == NO_SCALE)
            for (int64_t i = begin; i < end; i += LANES) store(out + i, decode(format, codes + bytes * i, flip));
        else
            for (int64_t i = begin; i < end; i += LANES)
                store(out + i, decode(format, codes + bytes * i, flip) * scale - minimum);
    }
    if (whole < w->inputs) {
        uint8_t rest[2 * LANES] = {0};
        memcpy(rest, codes + bytes * whole, bytes * (w->inputs - whole));
        const vf value = decode(format, rest, flip) * scales[w->groups - 1] - (any ? less[w->groups - 1] : 0);
        for (int64_t i = whole; i < w->inputs; i++) out[i] = value[i - whole];
    }
}

#define DEQUANTIZE_FORMAT(format)                                                                             \
    case format: dequantize_row(format, w, row, scales, to); break;

// One output in float32: ``to`` [inputs], with memory for ``scales`` (scratch_of).
static void dequantize_any(const Weight *w, int64_t row, float *scales, float *to) {
    switch (is_blocks(w->format) ? INT8 : w->format) {
        DEQUANTIZE_FORMAT(INT4)
        DEQUANTIZE_FORMAT(INT8)
        DEQUANTIZE_FORMAT(FP8)
        DEQUANTIZE_FORMAT(FP8_WITH_NAN)
        DEQUANTIZE_FORMAT(BF16)
        DEQUANTIZE_FORMAT(F16)
    }
}

static void run_dequantize(void *data) {
    Dequantization *job = data;
    const Weight *w = job->weight;
    float *scales = malloc(scratch_of(w) * sizeof(float));
    if (!scales) abort();
    for (;;) {
        int64_t begin = __atomic_fetch_add(&job->next, 8, __ATOMIC_RELAXED);
        if (begin >= job->count) break;
        for (int64_t row = begin; row < begin + 8 && row < job->count; row++)
            dequantize_any(w, job->first + row, scales, job->out + row * w->inputs);
    }
    free(scales);
}

// The outputs ``first`` to ``first + count`` of ``weight`` in float32: ``out`` [count, inputs], contiguous.
EXPORT void vlfit_dequantize(const Weight *weight, int64_t first, int64_t count, float *out, int threads) {
    Dequantization job = {weight, out, first, count, 0};
    in_parallel(run_dequantize, &job, threads);
}

#include "tiles.c"
#include "gemm.c"
#include "floats.c"
#include "pair_attention.c"

// --- the same for a few rows by number (an embedding), facts -------------------------------------------------

EXPORT void vlfit_lookup(const Weight *weight, const int64_t *rows, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) vlfit_dequantize(weight, rows[i], 1, out + i * weight->inputs, 1);
}

// Whether any of ``count`` FP8 codes stands for no number.
EXPORT int vlfit_has_nan(const uint8_t *codes, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += 4096) {
        int found = 0;
        int64_t end = begin + 4096 < count ? begin + 4096 : count;
        for (int64_t i = begin; i < end; i++) found |= (codes[i] & 0x7f) == 0x7f;
        if (found) return 1;
    }
    return 0;
}

typedef struct {
    const uint8_t *from;
    int64_t bytes, next;
    uint32_t result;
} Reading;

static void run_reading(void *data) {
    Reading *job = data;
    const int64_t piece = 1 << 20;
    vu a = {0}, b = {0}, c = {0}, d = {0};
    for (;;) {
        int64_t begin = __atomic_fetch_add(&job->next, piece, __ATOMIC_RELAXED);
        if (begin + piece > job->bytes) break;
        for (int64_t i = begin; i < begin + piece; i += 16 * LANES) {
            a += *(const vu_loose *)(job->from + i);
            b += *(const vu_loose *)(job->from + i + 4 * LANES);
            c += *(const vu_loose *)(job->from + i + 8 * LANES);
            d += *(const vu_loose *)(job->from + i + 12 * LANES);
        }
    }
    a += b + c + d;
    uint32_t total = 0;
    for (int i = 0; i < LANES; i++) total += a[i];
    __atomic_fetch_add(&job->result, total, __ATOMIC_RELAXED);
}

// Read ``bytes`` (in whole MiB) and do nothing with them: how fast memory is. Returns their sum.
EXPORT uint32_t vlfit_read(const uint8_t *from, int64_t bytes, int threads) {
    Reading job = {from, bytes, 0, 0};
    in_parallel(run_reading, &job, threads);
    return job.result;
}

#include "decode_layers.c"

EXPORT int vlfit_level(void) { return LEVEL + VNNI + 2 * AMX + 4 * PAIRS; }
