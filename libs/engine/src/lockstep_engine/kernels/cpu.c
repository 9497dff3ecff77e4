/* CPU kernels in float32. A row's result depends on that row alone: every sum runs over its own elements in a fixed order,
 * whatever else is computed in the same call and on however many threads.
 *
 * Built without linking an OpenMP runtime: its symbols come from the one that torch has loaded, so that there is one pool.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Raised with every change of a signature or layout: the caller refuses a stale build. */
const int lockstep_cpu_version = 6;

#define BLOCK 16
#define LANES 16
#define PANEL 32 /* output features of a packed weight that lie together */
#define ROWS 12  /* rows that go through a panel together at most: their sums fill the registers */
#define RUN 64   /* tokens of a sequence that go through attention together at most */
#define WIDEN 3  /* tokens in such a run for which it pays to widen cold blocks once and for all */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t byte_lanes __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t half_lanes __attribute__((vector_size(2 * LANES), aligned(2)));

#define SELECT(mask, a, b) ((lanes)(((int_lanes)(a) & (mask)) | ((int_lanes)(b) & ~(mask))))

#define INLINE static inline __attribute__((always_inline))

/* One layer's keys and values (kv_cache.py says how they lie): hot [kv_heads, blocks, dim, BLOCK] and [kv_heads, blocks, BLOCK, dim];
 * cold of the same shapes with `cold_blocks`, as bytes with a scale [kv_heads, cold_blocks, BLOCK] for each token, or as floats where
 * the scales are null. */
struct layer {
    float *keys, *values;
    void *cold_keys, *cold_values;
    float *key_scales, *value_scales;
    int64_t kv_heads, blocks, cold_blocks, dim;
};

/* out [tokens, heads, dim]; queries at q + head * q_head_stride + token * q_token_stride; owners [tokens]: rows of the tables [sequences,
 * width]; window 0: none. `tables` names hot blocks by id and cold ones by first_cold + id. A query in block b (its position / BLOCK) sees
 * blocks from `sink` to before b - hot_window cold, others hot; hot_window < 0: all hot. Where both versions of a block are seen in
 * the step `hot_tables` (else null) names the hot ones. moves [count, 2]: hot blocks and the cold ones that are made of them when the step's
 * keys and values have been stored. */
struct attention {
    float *out;
    const float *q;
    int64_t q_head_stride, q_token_stride;
    const int32_t *tables, *hot_tables, *moves;
    int64_t width, move_count, first_cold, sink, hot_window;
    const int32_t *owners;
    const int64_t *positions;
    int64_t tokens, heads, window;
    float scale, soft_cap;
};

/* Queries, keys and values of a step side by side [tokens, (heads + 2 * kv_heads) * dim]; rotated in place. cosine and sine
 * [tokens, dim]; q_norm and k_norm [dim] or null. */
struct rope {
    float *qkv;
    const float *cosine, *sine, *q_norm, *k_norm;
    int64_t tokens, heads, kv_heads, dim;
    float eps;
};

/* out [rows, out_features] = x [rows, in] times panels [ceil(out_features / PANEL), in, PANEL], plus bias or null. */
struct linear {
    float *out;
    const float *x, *panels, *bias;
    int64_t rows, in, out_features;
};

/* Each build's `widen` gives the values of 16 codes in e4m3, divided by 256: half precision with the same fields, the exponent's
 * top bit and the fraction's lower ones 0, is that. */
#define E4M3_UNIT 256.0f
#define E4M3_AS_HALF(codes) ((__builtin_convertvector(*(const byte_lanes *)(codes), half_lanes) << 7) & (int16_t)0xbf80)

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define NAME(name) name##_avx512
typedef int16_t v16hi __attribute__((vector_size(32)));
typedef float v16sf __attribute__((vector_size(64)));
INLINE lanes NAME(widen)(const uint8_t *codes) {
    return (lanes)__builtin_ia32_vcvtph2ps512_mask((v16hi)E4M3_AS_HALF(codes), (v16sf){}, -1, 4);
}
#include "cpu_loops.h"
#undef NAME
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define NAME(name) name##_avx2
typedef int16_t v8hi __attribute__((vector_size(16)));
typedef float v8sf __attribute__((vector_size(32)));
INLINE lanes NAME(widen)(const uint8_t *codes) {
    union { half_lanes whole; v8hi parts[2]; } half = {E4M3_AS_HALF(codes)};
    union { v8sf parts[2]; lanes whole; } out = {{__builtin_ia32_vcvtph2ps256(half.parts[0]), __builtin_ia32_vcvtph2ps256(half.parts[1])}};
    return out.whole;
}
#include "cpu_loops.h"
#undef NAME
#pragma GCC pop_options
#endif
#define NAME(name) name##_plain
INLINE lanes NAME(widen)(const uint8_t *codes) {
    int_lanes code = __builtin_convertvector(*(const byte_lanes *)codes, int_lanes), size = code & 127;
    lanes normal = (lanes)((size << 20) + (112 << 23)), small = __builtin_convertvector(size, lanes) * 0x1p-17f;
    return (lanes)((int_lanes)SELECT(size < 8, small, normal) | (code & 128) << 24);
}
#include "cpu_loops.h"

struct kernels {
    void (*attend)(const struct attention *, const struct layer *, float *, int64_t, int64_t);
    void (*compress)(const struct layer *, const int32_t *, int64_t, int64_t);
    void (*add_rms_norm)(float *, float *, const float *, const float *, int64_t, int64_t, float);
    void (*silu_mul)(float *, const float *, int64_t, int64_t);
    void (*rotate_all)(const struct rope *);
    void (*linear)(const struct linear *, int64_t, int64_t);
};

#define KERNELS(set) {attend_##set, compress_##set, add_rms_norm_##set, silu_mul_##set, rotate_all_##set, linear_##set}
static struct kernels chosen = KERNELS(plain);

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw"))
        chosen = (struct kernels)KERNELS(avx512);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        chosen = (struct kernels)KERNELS(avx2);
#endif
}

/* Make cold blocks of hot ones: moves [count, 2]. */
void lockstep_compress(const struct layer *l, const int32_t *moves, int64_t count, int threads) {
    int64_t items = count * l->kv_heads;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1 && items > 1)
    for (int slice = 0; slice < threads; slice++)
        chosen.compress(l, moves, items * slice / threads, items * (slice + 1) / threads);
}

/* Cold blocks that the step needs, then attention. scratch: for each thread `size` floats, as attention_scratch of cpu.py says. */
void lockstep_attention(const struct attention *a, const struct layer *l, float *scratch, int64_t size, int threads) {
    if (a->move_count) lockstep_compress(l, a->moves, a->move_count, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++) chosen.attend(a, l, scratch + size * slice, slice, threads);
}

/* Put keys and values of a step, each [kv_heads, tokens, dim] (strided), into their slots of a layer's cache. */
void lockstep_store(const struct layer *l, const float *k, const float *v, int64_t k_head_stride, int64_t k_token_stride,
                    int64_t v_head_stride, int64_t v_token_stride, const int64_t *slots, int64_t tokens) {
    int64_t dim = l->dim;
    for (int64_t head = 0; head < l->kv_heads; head++)
        for (int64_t token = 0; token < tokens; token++) {
            int64_t block = head * l->blocks + slots[token] / BLOCK, offset = slots[token] % BLOCK;
            const float *key = k + head * k_head_stride + token * k_token_stride;
            float *column = l->keys + block * BLOCK * dim + offset;
            for (int64_t i = 0; i < dim; i++) column[i * BLOCK] = key[i];
            memcpy(l->values + (block * BLOCK + offset) * dim, v + head * v_head_stride + token * v_token_stride,
                   sizeof(float) * (size_t)dim);
        }
}

void lockstep_add_rms_norm(float *out, float *x, const float *delta, const float *weight, int64_t rows, int64_t width,
                           float eps) {
    chosen.add_rms_norm(out, x, delta, weight, rows, width, eps);
}

void lockstep_silu_mul(float *out, const float *gate_up, int64_t rows, int64_t inner) {
    chosen.silu_mul(out, gate_up, rows, inner);
}

void lockstep_rope(const struct rope *r) { chosen.rotate_all(r); }

/* A layer's attention from the product of its merged projections: rotate queries and keys, store keys and values, attend. */
void lockstep_rotated_attention(const struct rope *r, struct attention *a, const struct layer *l, const int64_t *slots,
                                float *scratch, int64_t size, int threads) {
    int64_t row = (r->heads + 2 * r->kv_heads) * r->dim;
    const float *k = r->qkv + r->heads * r->dim, *v = k + r->kv_heads * r->dim;
    chosen.rotate_all(r);
    lockstep_store(l, k, v, r->dim, row, r->dim, row, slots, r->tokens);
    a->q = r->qkv;
    a->q_head_stride = r->dim;
    a->q_token_stride = row;
    lockstep_attention(a, l, scratch, size, threads);
}

void lockstep_linear(const struct linear *l, int threads) {
    int64_t panels = (l->out_features + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++)
        chosen.linear(l, panels * slice / threads, panels * (slice + 1) / threads);
}
