/* CPU kernels in float32. A row's result depends on that row alone: every sum runs over its own elements in a fixed order,
 * whatever else is computed in the same call and on however many threads.
 *
 * Built without linking an OpenMP runtime: its symbols come from the one that torch has loaded, so that there is one pool.
 * Each kernel exists for AVX-512, AVX2 and plain x86 or Arm; the loader picks at run time.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define KERNEL __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define KERNEL
#endif

#define BLOCK 16
#define LANES 16

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define INLINE static inline __attribute__((always_inline))

INLINE float add_lanes(lanes x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

/* e^x for x <= 0: 2^n * e^r with |r| <= ln(2)/2, the polynomial of Cephes' expf (relative error below 2e-7). */
INLINE lanes exp_lanes(lanes x) {
    const float low = -87.0f;
    int_lanes below = x < low;
    x = (lanes)(((int_lanes)x & ~below) | ((int_lanes)(lanes){} & below));
    lanes shifted = x * 1.44269504088896341f;
    int_lanes n;
    for (int i = 0; i < LANES; i++) n[i] = (int32_t)(shifted[i] - 0.5f);
    lanes whole;
    for (int i = 0; i < LANES; i++) whole[i] = (float)n[i];
    lanes r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    lanes power = (lanes)((n + 127) << 23);
    lanes result = p * power;
    return (lanes)((int_lanes)result & ~below);
}

/* One query against its visible keys first..last, two passes: scores, then the weighted sum of values.
 * scores: scratch for last - first + 1 + LANES floats. */
INLINE void attend_row(float *out, const float *query, const float *keys, const float *values, const int32_t *table,
                       int64_t first, int64_t last, int dim, float scale, float soft_cap, float *scores) {
    int chunks = dim / LANES;
    float peak = -INFINITY;
    int64_t count = last - first + 1;
    for (int64_t j = 0; j < count; j++) {
        int64_t position = first + j;
        const float *key = keys + ((int64_t)table[position / BLOCK] * BLOCK + position % BLOCK) * dim;
        lanes sum = {};
        for (int c = 0; c < chunks; c++) sum += ((const lanes *)query)[c] * ((const lanes *)key)[c];
        float tail = 0;
        for (int i = chunks * LANES; i < dim; i++) tail += query[i] * key[i];
        float score = (add_lanes(sum) + tail) * scale;
        if (soft_cap > 0) score = soft_cap * tanhf(score / soft_cap);
        scores[j] = score;
        if (score > peak) peak = score;
    }
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;
    lanes total = {};
    for (int64_t j = 0; j < padded; j += LANES) {
        lanes e = exp_lanes(*(const lanes *)(scores + j) - peak);
        *(lanes *)(scores + j) = e;
        total += e;
    }
    float inverse = 1.0f / add_lanes(total);
    for (int i = 0; i < dim; i++) out[i] = 0;
    for (int64_t j = 0; j < count; j++) {
        int64_t position = first + j;
        const float *value = values + ((int64_t)table[position / BLOCK] * BLOCK + position % BLOCK) * dim;
        float weight = scores[j] * inverse;
        for (int c = 0; c < chunks; c++) ((lanes *)out)[c] += weight * ((const lanes *)value)[c];
        for (int i = chunks * LANES; i < dim; i++) out[i] += weight * value[i];
    }
}

/* out [tokens, heads, dim]; queries at q + head * q_head_stride + token * q_token_stride; keys and values of one layer
 * [kv_heads, blocks, BLOCK, dim]; owners [tokens]: rows of tables [sequences, width]; window 0: none. */
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

/* Every `step`th pair of a token and a kv head, from `begin` on. */
KERNEL void lockstep_attend(const struct attention *a, float *scores, int64_t begin, int64_t step) {
    int64_t group = a->heads / a->kv_heads;
    int64_t head_size = a->blocks * BLOCK * a->dim;
    for (int64_t item = begin; item < a->tokens * a->kv_heads; item += step) {
        int64_t token = item / a->kv_heads, kv_head = item % a->kv_heads;
        int64_t last = a->positions[token];
        int64_t first = a->window && last >= a->window ? last - a->window + 1 : 0;
        const int32_t *table = a->tables + a->owners[token] * a->width;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
            attend_row(a->out + (token * a->heads + head) * a->dim,
                       a->q + head * a->q_head_stride + token * a->q_token_stride, a->keys + kv_head * head_size,
                       a->values + kv_head * head_size, table, first, last, (int)a->dim, a->scale, a->soft_cap, scores);
    }
}

/* scores: scratch for threads * (longest context + 2 * LANES) floats. */
void lockstep_attention(const struct attention *a, float *scores, int64_t scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++) lockstep_attend(a, scores + scratch * slice, slice, threads);
}

/* Copy keys and values of a step [kv_heads, tokens, dim] (strided) into their slots [kv_heads, slots a head, dim]. */
void lockstep_store(float *cache, const float *x, int64_t head_stride, int64_t token_stride, const int64_t *slots,
                    int64_t tokens, int kv_heads, int64_t slots_a_head, int dim) {
    for (int head = 0; head < kv_heads; head++)
        for (int64_t token = 0; token < tokens; token++)
            memcpy(cache + (head * slots_a_head + slots[token]) * dim, x + head * head_stride + token * token_stride,
                   sizeof(float) * (size_t)dim);
}

/* out = x / sqrt(mean(x^2) + eps) * weight, for each of `rows` rows of `width`. */
KERNEL void lockstep_rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t width, float eps) {
    int64_t whole = width / LANES * LANES;
    for (int64_t row = 0; row < rows; row++, out += width, x += width) {
        lanes sum = {};
        for (int64_t i = 0; i < whole; i += LANES) {
            lanes v = *(const lanes *)(x + i);
            sum += v * v;
        }
        float squares = add_lanes(sum);
        for (int64_t i = whole; i < width; i++) squares += x[i] * x[i];
        float scale = 1.0f / sqrtf(squares / (float)width + eps);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
    }
}
