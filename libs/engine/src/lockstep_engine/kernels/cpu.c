/* CPU kernels in float32. A row's result depends on that row alone: every sum runs over its own elements in a fixed order,
 * whatever else is computed in the same call and on however many threads.
 *
 * Built without linking an OpenMP runtime: its symbols come from the one that torch has loaded, so that there is one pool.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Raised with every change of a signature or layout: the caller refuses a stale build. */
const int lockstep_cpu_version = 4;

#define BLOCK 16
#define LANES 16
#define PANEL 32 /* output features of a packed weight that lie together */
#define ROWS 12  /* rows that go through a panel together at most: their sums fill the registers */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define SELECT(mask, a, b) ((lanes)(((int_lanes)(a) & (mask)) | ((int_lanes)(b) & ~(mask))))

#define INLINE static inline __attribute__((always_inline))

/* out [tokens, heads, dim]; queries at q + head * q_head_stride + token * q_token_stride; keys and values of one layer
 * (keys [kv_heads, blocks, dim, BLOCK], values [kv_heads, blocks, BLOCK, dim]); owners [tokens]: rows of tables [sequences, width]; window 0: none. */
struct attention {
    float *out;
    const float *q;
    int64_t q_head_stride, q_token_stride;
    const float *keys, *values;
    const int32_t *tables;
    int64_t width;
    const int32_t *owners;
    const int64_t *positions;
    int64_t tokens, heads, kv_heads, blocks, dim, window;
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

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define NAME(name) name##_avx512
#include "cpu_loops.h"
#undef NAME
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define NAME(name) name##_avx2
#include "cpu_loops.h"
#undef NAME
#pragma GCC pop_options
#endif
#define NAME(name) name##_plain
#include "cpu_loops.h"

struct kernels {
    void (*attend)(const struct attention *, float *, int64_t, int64_t);
    void (*add_rms_norm)(float *, float *, const float *, const float *, int64_t, int64_t, float);
    void (*silu_mul)(float *, const float *, int64_t, int64_t);
    void (*rotate_all)(const struct rope *);
    void (*linear)(const struct linear *, int64_t, int64_t);
};

#define KERNELS(set) {attend_##set, add_rms_norm_##set, silu_mul_##set, rotate_all_##set, linear_##set}
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

/* scores: scratch for threads * (longest context + 2 * LANES) floats. */
void lockstep_attention(const struct attention *a, float *scores, int64_t scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++) chosen.attend(a, scores + scratch * slice, slice, threads);
}

/* Put keys and values of a step, each [kv_heads, tokens, dim] (strided), into their slots of a layer's cache. */
void lockstep_store(float *keys, float *values, const float *k, const float *v, int64_t k_head_stride,
                    int64_t k_token_stride, int64_t v_head_stride, int64_t v_token_stride, const int64_t *slots,
                    int64_t tokens, int64_t kv_heads, int64_t blocks, int64_t dim) {
    for (int64_t head = 0; head < kv_heads; head++)
        for (int64_t token = 0; token < tokens; token++) {
            int64_t block = head * blocks + slots[token] / BLOCK, offset = slots[token] % BLOCK;
            const float *key = k + head * k_head_stride + token * k_token_stride;
            float *column = keys + block * BLOCK * dim + offset;
            for (int64_t i = 0; i < dim; i++) column[i * BLOCK] = key[i];
            memcpy(values + (block * BLOCK + offset) * dim, v + head * v_head_stride + token * v_token_stride,
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
void lockstep_rotated_attention(const struct rope *r, struct attention *a, const int64_t *slots, float *scores,
                                int64_t scratch, int threads) {
    int64_t row = (r->heads + 2 * r->kv_heads) * r->dim;
    const float *k = r->qkv + r->heads * r->dim, *v = k + r->kv_heads * r->dim;
    chosen.rotate_all(r);
    lockstep_store((float *)a->keys, (float *)a->values, k, v, r->dim, row, r->dim, row, slots, r->tokens, r->kv_heads,
                   a->blocks, r->dim);
    a->q = r->qkv;
    a->q_head_stride = r->dim;
    a->q_token_stride = row;
    lockstep_attention(a, scores, scratch, threads);
}

void lockstep_linear(const struct linear *l, int threads) {
    int64_t panels = (l->out_features + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++)
        chosen.linear(l, panels * slice / threads, panels * (slice + 1) / threads);
}
