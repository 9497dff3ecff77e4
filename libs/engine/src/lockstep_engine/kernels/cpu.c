/* CPU kernels. They compute in float32; weights and caches may be stored in 16 bits. A row's result depends on that row alone: every
 * sum runs over its own elements in a fixed order, whatever else is computed in the same call and on however many threads.
 *
 * The loops are compiled once for each instruction set, and all builds give the same bits: sums are kept in 16 lanes whatever the
 * width of a register, multiplications and additions are fused where the source says so and nowhere else, and the elementary
 * functions are part of this file and cpu_loops.h.
 *
 * Built without linking an OpenMP runtime: its symbols come from the one that torch has loaded, so that there is one pool.
 */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

int omp_get_thread_num(void);
int omp_get_num_threads(void);

/* Raised with every change of a signature or layout, so that the caller can refuse a stale build. */
const int lockstep_cpu_version = 18;

#define BLOCK 16
#define LANES 16 /* partial sums of a reduction, in every build */
#define PANEL 32 /* output features of a packed weight that are stored together */
#define RUN 64   /* most tokens of a sequence that go through attention together */
#define WIDEN 3  /* tokens in such a run from which on widening its cold blocks once is faster */
#define IN_WORD 8 /* codes of four bits in a word: those of neighbouring input features, the first in the lowest bits */
#define BYTES_IN_WORD 4 /* codes of eight bits in a word, where activations are quantized: those of neighbouring input features */
#define LEAST 0x1p-100f /* activations that all are smaller are quantized to 0: 127 over them might be no finite number */
#define PATIENCE 300 /* turns in which a thread waits for others before it yields its core: microseconds */
#define YIELDS 2000  /* turns in which it yields before it sleeps between two looks: about a millisecond */
#define SPAN 1024 /* numbers of which the largest is found before its place is */
#define OWN_TILES 16384 /* floats of a product's input up to which each thread of a step lays it out for itself: sooner than it waits */
#define CHUNK 128 /* input features of a packed weight whose values are kept in the first cache for all rows */

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

#define INLINE static inline __attribute__((always_inline))

/* The type in which numbers are stored. PAIRS, in packed weights alone: bfloat16, output feature i of a panel's half beside i of the
 * other half, so that a register of 32-bit words is widened to two registers by a shift and by a mask. INT8, in packed weights alone:
 * signed bytes, a value is the code times the scale of its group; INT8_PER_127: times 1 / 127 after that (bitsandbytes); INT8_OFFSETS:
 * plus the group's offset, rounded once. FOUR_BITS, in packed weights alone: a code names one of 16 numbers, a value is the number times
 * the scale of its group; FOUR_BITS_OFFSETS: plus the group's offset, rounded once. Each product is rounded to float32: the bits that
 * widening beforehand gives. INTEGERS, in packed weights alone: signed bytes, each plus 128, for products with activations that are
 * quantized to 8 bits, too (cpu_integers.h). */
enum kind { FLOAT32, BFLOAT16, FLOAT16, E4M3, PAIRS, INT8, INT8_PER_127, INT8_OFFSETS, FOUR_BITS, FOUR_BITS_OFFSETS, INTEGERS };

/* Codes in e4m3 are read as their values divided by 256: half precision with the same fields, where the exponent's top bit and the
 * fraction's lower bits are 0, has that value. */
#define E4M3_UNIT 256.0f

/* One layer's keys and values (kv_cache.py describes the layout): hot [kv_heads, blocks, dim, BLOCK] and [kv_heads, blocks, BLOCK, dim]
 * in `kind`; cold of the same shapes with `cold_blocks`, as bytes with a scale [kv_heads, cold_blocks, BLOCK] for each token, or in
 * `kind` where the scales are null. cold_keys null: it has no cold blocks, and its queries see none. */
struct layer {
    void *keys, *values, *cold_keys, *cold_values;
    float *key_scales, *value_scales;
    int64_t kv_heads, blocks, cold_blocks, dim, kind;
};

/* out [tokens, heads, dim]; queries at q + head * q_head_stride + token * q_token_stride; owners [tokens]: rows of the tables
 * [sequences, width]; window 0: none. `tables` holds the ids of hot blocks, and first_cold + id for cold ones. A query in block b
 * (its position / BLOCK) sees blocks from `sink` to before b - hot_blocks_before cold, others hot; hot_blocks_before < 0: all hot.
 * If both versions of a block are seen in the step, `hot_tables` (else null) holds the ids of the hot ones. moves [count, 2]: hot
 * blocks and the cold ones that are made of them when the step's keys and values have been stored. bias [heads, bias_width] or
 * null: added to a head's scores by the key's position; bias_width is a multiple of BLOCK. sinks [heads] or null: the score of a
 * key without a value that every query sees. */
struct attention {
    float *out;
    const float *q;
    int64_t q_head_stride, q_token_stride;
    const int32_t *tables, *hot_tables, *moves;
    int64_t width, move_count, first_cold, sink, hot_blocks_before;
    const int32_t *owners;
    const int64_t *positions;
    const float *bias, *sinks;
    int64_t bias_width, tokens, heads, window;
    float scale, soft_cap;
};

/* Queries, keys and values of a step side by side [tokens, (heads + 2 * kv_heads) * dim]; rotated in place. cosine and sine
 * [positions, dim]; positions [tokens]: which of their rows is each token's; q_norm and k_norm [dim] or null. */
struct rope {
    float *qkv;
    const float *cosine, *sine, *q_norm, *k_norm;
    const int64_t *positions;
    int64_t tokens, heads, kv_heads, dim;
    float eps;
};

/* out [rows, out_features] = x [rows, in] times panels [ceil(out_features / PANEL), in, PANEL] in `kind` (not BFLOAT16 or E4M3), plus
 * bias or null. Codes have scales [panels, ceil(in / group), PANEL] for groups of neighbouring inputs, and some kinds offsets like scales.
 * Those of four bits are [panels, in / IN_WORD, PANEL] words, and have a table [16]; IN_WORD divides the group and the input features of
 * a part. tiles: room for rows * in floats, or null for a single row. Rows go through a panel in tiles, and elements of a
 * tile's rows are put side by side before: rows that are a power of two apart would push each other out of the cache. The input
 * features have `parts` equal parts, a power of two. Each is summed for itself, then the parts' sums are added in a balanced tree of
 * neighbours, then the bias: so ranks that have some of the parts each get the same bits together. sums: with more parts than one, room
 * for `sums_size` floats for each thread: (parts - 1) * rows * PANEL, times 4 up to 12 rows.
 *
 * INTEGERS are [panels, in / BYTES_IN_WORD, PANEL] words with scales [panels, PANEL], and BYTES_IN_WORD divides the input features of a
 * part, of which there are 2^17 at most: so a sum fits 32 bits. Each part of a row of x is quantized for itself, so that its scale does not
 * depend on which rank has the other parts. It goes into tiles, which are not null for a single row either. */
struct linear {
    float *out;
    const float *x;
    const void *panels;
    const float *bias;
    float *tiles;
    const float *scales, *offsets, *table;
    float *sums;
    int64_t rows, in, out_features, kind, group, parts, sums_size;
};

/* How the codes of some panels become values, see `struct linear`: scales and offsets are those of the first panel, each has `groups`. */
struct codes {
    const float *scales, *offsets, *table;
    int64_t groups, group;
};

/* out [batch, rows, out_features] = x [batch, rows, in] times a matrix in `kind` for each of the batch: output o's weight of input i is at
 * batch * w_batch_stride + o * w_out_stride + i * w_in_stride, and one of the last two strides is 1. */
struct product {
    float *out;
    const float *x;
    const void *weight;
    int64_t batch, rows, in, out_features, w_batch_stride, w_out_stride, w_in_stride, kind;
};

/* A decoder layer of the plain Llama shape (plain_layer.py): x + attention(norm(x)), then x + mlp(norm(x)). What a step gives to
 * the products and to the rotation is unset in theirs. `number` is that of the layer's cache; window 0: none. */
struct plain_layer {
    const struct linear *qkv, *out, *gate_up, *down;
    const struct rope *rotation;
    const float *first_norm, *second_norm;
    int64_t number, window;
    float first_eps, second_eps, scale;
};

/* A step of such layers. x [rows, hidden] is the residual stream without what the half before the first one adds to it: `delta` of that
 * shape, or null. `result` is what the last half adds. cosine, sine and positions: see struct rope; cells [rows]: where keys and values
 * go in the caches, one for each layer. normed [rows, hidden], wide and inner (the widest of qkv and gate_up, of attention's output and
 * the gated products), tiles (the widest input of each row, or of each wanted one if they are more, and OWN_TILES for each thread) and,
 * for each thread, `scratch` (see lockstep_attention) and `sums` (see struct linear) are room. */
struct plain_step {
    float *x, *result, *normed, *wide, *inner, *tiles, *sums;
    const float *delta, *cosine, *sine;
    const int64_t *positions, *cells;
    const struct attention *attention;
    const struct layer *caches;
    float *scratch;
    int64_t rows, hidden, sums_size, scratch_size;
};

/* What a whole model has around its plain layers: `ids` [rows of the step] name rows of the embedding [ids, hidden] in `kind` (FLOAT32,
 * BFLOAT16 or FLOAT16), which become x; then the residual streams of `wanted` [count], with what the last half adds, are normed into
 * `last` [count, hidden], and the head makes logits [count, its outputs] of them. */
struct plain_ends {
    const void *embedding;
    const int64_t *ids, *wanted;
    const float *norm;
    const struct linear *head;
    float *last, *logits;
    int64_t kind, count;
    float eps;
};

/* The end of the tokens of one sequence, from `token` on, that go through attention together. */
static int64_t run_end(const struct attention *a, int64_t token) {
    int64_t end = token + 1;
    while (end < a->tokens && end < token + RUN && a->owners[end] == a->owners[token]) end++;
    return end;
}

/* How many of them a step has. */
static int64_t count_runs(const struct attention *a) {
    int64_t count = 0;
    for (int64_t token = 0; token < a->tokens; token = run_end(a, token)) count++;
    return count;
}

/* The function that `map` computes of each element. */
enum function { SIGMOID, SILU, TANH, GELU, GELU_TANH, COSINE, SINE };

/* sin(x) and cos(x) of |x| < 2^20 to within a unit in the last place of a float, in double precision: the nearest multiple of pi / 2 is
 * subtracted in three parts, then the polynomials of fdlibm's kernels. Scalar code without contraction: equal in every build. */
static float sine(float angle, int quarter) {
    double x = angle, n = (double)(int64_t)(x * 0.63661977236758134308 + (x < 0 ? -0.5 : 0.5));
    double r = x - n * 1.57079632673412561417e+00;
    r = r - n * 6.07710050630396597660e-11;
    r = r - n * 2.02226624879595063154e-21;
    double z = r * r, result;
    int64_t turn = (int64_t)n + quarter;
    if (turn & 1) {
        double p = -1.13596475577881948265e-11;
        p = p * z + 2.08757232129817482790e-09;
        p = p * z - 2.75573143513906633035e-07;
        p = p * z + 2.48015872894767294178e-05;
        p = p * z - 1.38888888888741095749e-03;
        p = p * z + 4.16666666666666019037e-02;
        result = 1.0 - (0.5 * z - z * z * p);
    } else {
        double p = 1.58969099521155010221e-10;
        p = p * z - 2.50507602534068634195e-08;
        p = p * z + 2.75573137070700676789e-06;
        p = p * z - 1.98412698298579493134e-04;
        p = p * z + 8.33333333332248946124e-03;
        p = p * z - 1.66666666666666324348e-01;
        result = r + r * z * p;
    }
    return (float)(turn & 2 ? -result : result);
}

/* Each build has registers of VEC floats; LANES / VEC of them are one set of lanes. At most ROWS rows of x go through a panel together;
 * from WIDENED_ROWS(kind) on, where it is defined, codes are widened once for all rows, which pays where ROWS is small or widening is
 * slow; so many panels go together that they hide the latency of an addition, TOGETHER(rows) for fewer rows than ROWS. At most DOT_ROWS
 * rows of x go through DOT_OUTPUTS outputs of a matrix that is not packed: their sums fill the registers. */
#if defined(__x86_64__)
typedef char bytes __attribute__((vector_size(16)));
typedef int64_t longs __attribute__((vector_size(16)));
typedef int32_t ints_512 __attribute__((vector_size(64)));
typedef int32_t ints_256 __attribute__((vector_size(32)));
typedef int16_t shorts_512 __attribute__((vector_size(64)));
typedef int16_t shorts_256 __attribute__((vector_size(32)));
typedef int64_t unaligned_long __attribute__((aligned(1), may_alias));
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define NAME(name) name##_avx512
#define VEC 16
#define ROWS 12
#define WIDENED_ROWS(kind) ((kind) < FOUR_BITS ? INT64_MAX : 13)
#define TOGETHER(rows) ((rows) <= 2 ? 4 : (rows) <= 6 ? 2 : 1)
#define DOT_ROWS 4
#define DOT_OUTPUTS 4
#define COLUMNS 8
#define FUSED(a, b, c) ((vec)__builtin_ia32_vfmaddps512_mask((float_vec)(a), (float_vec)(b), (float_vec)(c), (uint16_t)-1, 4))
#define HALVES(x) ((vec)__builtin_ia32_vcvtph2ps512_mask((short_vec)(x), (float_vec){}, (uint16_t)-1, 4))
#define BYTES(from) ((int_vec)__builtin_ia32_pmovsxbd512_mask((bytes)*(const byte_vec *)(from), (ints_512){}, (uint16_t)-1))
#define LOOK_UP(table, words)                                                                                                  \
    ((vec)__builtin_ia32_permvarsf512_mask((float_vec)*(const vec *)(table), (ints_512)(words), (float_vec){}, (uint16_t)-1))
#include "cpu_loops.h"
#define NAME(name) name##_avx512
#define LOOPS(name) name##_avx512
#define VEC 16
#define ROWS 12
#define TOGETHER(rows) ((rows) <= 2 ? 4 : (rows) <= 6 ? 2 : 1)
#define MULTIPLY_PAIRS(a, b) ((int_vec)__builtin_ia32_pmaddwd512_mask((shorts_512)(a), (shorts_512)(b), (ints_512){}, (uint16_t)-1))
#include "cpu_integers.h"
#pragma GCC target("avx512vnni")
#define NAME(name) name##_avx512vnni
#define LOOPS(name) name##_avx512
#define VEC 16
#define ROWS 12
#define TOGETHER(rows) ((rows) <= 2 ? 4 : (rows) <= 6 ? 2 : 1)
#define DOT(sums, codes, x) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x)) /* compilers' builtins differ */
#include "cpu_integers.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define NAME(name) name##_avx2
#define VEC 8
#define ROWS 3
#define WIDENED_ROWS(kind) 4
#define TOGETHER(rows) ((rows) <= 1 ? 2 : 1)
#define DOT_ROWS 2
#define DOT_OUTPUTS 2
#define COLUMNS 4
#define FUSED(a, b, c) ((vec)__builtin_ia32_vfmaddps256((float_vec)(a), (float_vec)(b), (float_vec)(c)))
#define HALVES(x) ((vec)__builtin_ia32_vcvtph2ps256((short_vec)(x)))
#define BYTES(from) ((int_vec)__builtin_ia32_pmovsxbd256((bytes)(longs){*(const unaligned_long *)(from), 0}))
#define HALF_TABLE(table, words) __builtin_ia32_permvarsf256((float_vec)*(const vec *)(table), (ints_256)(words))
#define LOOK_UP(table, words)                                                                                                  \
    ((vec)__builtin_ia32_blendvps256(HALF_TABLE(table, words), HALF_TABLE((table) + VEC, words), (float_vec)((words) << 28)))
#include "cpu_loops.h"
#define NAME(name) name##_avx2
#define LOOPS(name) name##_avx2
#define VEC 8
#define ROWS 3
#define TOGETHER(rows) ((rows) <= 1 ? 2 : 1)
#define MULTIPLY_PAIRS(a, b) ((int_vec)__builtin_ia32_pmaddwd256((shorts_256)(a), (shorts_256)(b)))
#include "cpu_integers.h"
#pragma GCC pop_options
#endif
#define NAME(name) name##_plain
#define VEC 4
#define ROWS 2
#define TOGETHER(rows) 1
#define DOT_ROWS 1
#define DOT_OUTPUTS 2
#define COLUMNS 2
#include "cpu_loops.h"
#define NAME(name) name##_plain
#define LOOPS(name) name##_plain
#define VEC 4
#define ROWS 2
#define TOGETHER(rows) 1
#include "cpu_integers.h"

struct kernels {
    int64_t tile_rows;
    void (*attend)(const struct attention *, const struct layer *, float *, int64_t, int64_t, int64_t);
    void (*compress)(const struct layer *, const int32_t *, int64_t, int64_t);
    void (*add_rms_norm)(float *, float *, const float *, const float *, int64_t, int64_t, float);
    void (*layer_norm)(float *, const float *, const float *, const float *, int64_t, int64_t, float);
    void (*softmax)(float *, const float *, int64_t, int64_t);
    void (*sum)(float *, const float *, int64_t, int64_t);
    void (*largest)(int64_t *, int64_t *, const float *, int64_t, int64_t);
    void (*silu_mul)(float *, const float *, int64_t, int64_t);
    void (*map)(float *, const float *, int64_t, int);
    void (*widen_rows)(float *, const void *, const int64_t *, int64_t, int64_t, int64_t);
    void (*rotate_all)(const struct rope *);
    void (*interleave)(const struct linear *, int64_t, int64_t);
    void (*linear)(const struct linear *, float *, int64_t, int64_t);
    void (*quantize)(const struct linear *, int64_t, int64_t);
    void (*multiply_integers)(const struct linear *, float *, int64_t, int64_t);
    void (*multiply)(const struct product *, float *, int64_t, int64_t);
};

/* The kernels of a build, with products of integers by the same instructions or by `integers`. */
#define KERNELS(set, integers)                                                                                                \
    {tile_rows_##set,  attend_##set,     compress_##set,      add_rms_norm_##set,         layer_norm_##set,  softmax_##set,           \
     sum_##set,        largest_##set,    silu_mul_##set,      map_##set,                  widen_rows_##set,  rotate_all_##set,        \
     interleave_##set, linear_##set,     quantize_##integers, multiply_integers_##integers, multiply_##set}
static struct kernels chosen = KERNELS(plain, plain);

/* Use the build for an instruction set: "avx512vnni" (avx512 with one instruction for four products of bytes), "avx512", "avx2" or
 * "plain". Returns 0, and changes nothing, if this CPU does not have it. */
int lockstep_choose(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512bw");
    if (!strcmp(name, "avx512vnni") && has_avx512 && __builtin_cpu_supports("avx512vnni")) {
        chosen = (struct kernels)KERNELS(avx512, avx512vnni);
        return 1;
    }
    if (!strcmp(name, "avx512") && has_avx512) {
        chosen = (struct kernels)KERNELS(avx512, avx512);
        return 1;
    }
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        chosen = (struct kernels)KERNELS(avx2, avx2);
        return 1;
    }
#endif
    if (strcmp(name, "plain")) return 0;
    chosen = (struct kernels)KERNELS(plain, plain);
    return 1;
}

/* Make cold blocks of hot ones: moves [count, 2]. */
void lockstep_compress(const struct layer *l, const int32_t *moves, int64_t count, int threads) {
    int64_t items = count * l->kv_heads;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1 && items > 1)
    for (int slice = 0; slice < threads; slice++)
        chosen.compress(l, moves, items * slice / threads, items * (slice + 1) / threads);
}

/* Make the cold blocks that the step needs, then compute attention. scratch: `size` floats for each thread, see attention_scratch of
 * cpu.py. */
void lockstep_attention(const struct attention *a, const struct layer *l, float *scratch, int64_t size, int threads) {
    if (a->move_count && l->cold_keys) lockstep_compress(l, a->moves, a->move_count, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++) chosen.attend(a, l, scratch + size * slice, slice, INT64_MAX, threads);
}

/* Put keys and values of a step, each [kv_heads, tokens, dim] (strided) in the layer's kind, into their cells of its cache:
 * block * BLOCK + offset. */
void lockstep_store(const struct layer *l, const void *k, const void *v, int64_t k_head_stride, int64_t k_token_stride,
                    int64_t v_head_stride, int64_t v_token_stride, const int64_t *cells, int64_t tokens) {
    int64_t dim = l->dim;
    size_t size = l->kind == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    for (int64_t head = 0; head < l->kv_heads; head++)
        for (int64_t token = 0; token < tokens; token++) {
            int64_t block = head * l->blocks + cells[token] / BLOCK, offset = cells[token] % BLOCK;
            int64_t from = head * k_head_stride + token * k_token_stride, to = block * BLOCK * dim + offset;
            if (l->kind == FLOAT32)
                for (int64_t i = 0; i < dim; i++) ((float *)l->keys)[to + i * BLOCK] = ((const float *)k)[from + i];
            else
                for (int64_t i = 0; i < dim; i++) ((uint16_t *)l->keys)[to + i * BLOCK] = ((const uint16_t *)k)[from + i];
            memcpy((char *)l->values + (size_t)(block * BLOCK + offset) * (size_t)dim * size,
                   (const char *)v + (size_t)(head * v_head_stride + token * v_token_stride) * size, size * (size_t)dim);
        }
}

/* The tokens of a step, `lengths` of each of so many sequences from position `starts` on: their owners, positions and cells [tokens];
 * tables [sequences, width] of hot blocks. Returns how many blocks they enter, whose ids are put in `entered`; -1 if a position has no
 * place in its table. */
int64_t lockstep_places(const int32_t *starts, const int32_t *lengths, int64_t sequences, const int32_t *tables, int64_t width,
                        int32_t *owners, int64_t *positions, int64_t *cells, int64_t *entered) {
    int64_t token = 0, count = 0;
    for (int64_t sequence = 0; sequence < sequences; sequence++)
        for (int64_t i = 0; i < lengths[sequence]; i++, token++) {
            int64_t position = starts[sequence] + i, offset = position % BLOCK;
            if (position < 0 || position / BLOCK >= width) return -1;
            int64_t block = tables[sequence * width + position / BLOCK];
            owners[token] = (int32_t)sequence;
            positions[token] = position;
            cells[token] = block * BLOCK + offset;
            if (!offset) entered[count++] = block;
        }
    return count;
}

void lockstep_add_rms_norm(float *out, float *x, const float *delta, const float *weight, int64_t rows, int64_t width,
                           float eps) {
    chosen.add_rms_norm(out, x, delta, weight, rows, width, eps);
}

/* out = (x - mean) / sqrt(variance + eps) * weight + bias of each row; weight and bias [width] or null. */
void lockstep_layer_norm(float *out, const float *x, const float *weight, const float *bias, int64_t rows, int64_t width,
                         float eps) {
    chosen.layer_norm(out, x, weight, bias, rows, width, eps);
}

void lockstep_softmax(float *out, const float *x, int64_t rows, int64_t width) { chosen.softmax(out, x, rows, width); }

/* out [rows] = the sum of each row of x [rows, width]. */
void lockstep_sum(float *out, const float *x, int64_t rows, int64_t width) { chosen.sum(out, x, rows, width); }

/* See `largest`. To wake threads takes longer than a few rows. */
void lockstep_largest(int64_t *ids, int64_t *usable, const float *x, int64_t rows, int64_t width, int threads) {
    if (rows * width < 262144) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1 && rows > 1)
    for (int slice = 0; slice < threads; slice++) {
        int64_t begin = rows * slice / threads, count = rows * (slice + 1) / threads - begin;
        chosen.largest(ids + begin, usable + begin, x + begin * width, count, width);
    }
}

/* out[i] = function(x[i]), an `enum function`. */
void lockstep_map(float *out, const float *x, int64_t count, int function, int threads) {
    if (count < 16384) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++) {
        int64_t begin = count * slice / threads;
        chosen.map(out + begin, x + begin, count * (slice + 1) / threads - begin, function);
    }
}

/* Whether a product reads x where it is. */
static int reads_x(const struct linear *l) { return l->rows == 1 && l->kind != INTEGERS; }

/* Lay the tiles begin..end of x out for a product. */
static void lay_out(const struct linear *l, int64_t begin, int64_t end) {
    (l->kind == INTEGERS ? chosen.quantize : chosen.interleave)(l, begin, end);
}

/* Compute the panels begin..end of a product. */
static void multiply_panels(const struct linear *l, float *sums, int64_t begin, int64_t end) {
    (l->kind == INTEGERS ? chosen.multiply_integers : chosen.linear)(l, sums, begin, end);
}

void lockstep_linear(struct linear *l, int threads) {
    int64_t panels = (l->out_features + PANEL - 1) / PANEL, tiles = (l->rows + chosen.tile_rows - 1) / chosen.tile_rows;
    if (reads_x(l)) {
        l->tiles = (float *)l->x;
    } else if (tiles < threads) {
        lay_out(l, 0, tiles);
    } else {
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
        for (int slice = 0; slice < threads; slice++)
            lay_out(l, tiles * slice / threads, tiles * (slice + 1) / threads);
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++)
        multiply_panels(l, l->parts > 1 ? l->sums + slice * l->sums_size : NULL, panels * slice / threads, panels * (slice + 1) / threads);
}

/* scratch: in * PANEL floats for each thread. */
void lockstep_product(const struct product *p, float *scratch, int threads) {
    int64_t items = p->batch * ((p->out_features + PANEL - 1) / PANEL);
    if (items * p->rows * p->in < 4096) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int slice = 0; slice < threads; slice++)
        chosen.multiply(p, scratch + slice * p->in * PANEL, items * slice / threads, items * (slice + 1) / threads);
}

/* A step is a sequence of phases, each a number of items that no thread has yet, that threads work on, or that are done. `next`: the
 * phase's number and, in the lower half, its first item that no thread has. `done`: its items that are. The thread that does the last one
 * begins the next phase. So a thread that comes late, because it had to be woken or because the driver took its core, finds the phase
 * that the others are in, and nobody waits for a thread that does nothing. Which thread does an item changes no bits. */
struct schedule {
    uint64_t next __attribute__((aligned(64)));
    int64_t done __attribute__((aligned(64)));
};

/* A thread of a step, number `slice` of `threads`, and the number of its phase. */
struct worker {
    int slice, threads;
    uint64_t phase;
    struct schedule *schedule;
};

/* Items begin..end. */
struct items {
    int64_t begin, end;
};

/* Take items of a phase of `count`, a multiple of `grain` unless they are the last: at first many, so that threads rarely ask, then few, so
 * that they end together. There are none if begin is not below end; then `leave` the phase. */
static struct items take(const struct worker *w, int64_t count, int64_t grain) {
    uint64_t next = __atomic_load_n(&w->schedule->next, __ATOMIC_ACQUIRE);
    for (;;) {
        int64_t begin = (int64_t)(next & UINT32_MAX), left = count - begin, size = w->threads == 1 ? left : left / (2 * w->threads);
        if (next >> 32 != w->phase || left <= 0) return (struct items){0, 0};
        size = (size + grain - 1) / grain * grain;
        size = size < grain ? grain : size;
        size = size < left ? size : left;
        if (__atomic_compare_exchange_n(&w->schedule->next, &next, next + (uint64_t)size, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return (struct items){begin, begin + size};
    }
}

/* Say that items which were taken are done. */
static void finish(const struct worker *w, int64_t count, struct items items) {
    int64_t size = items.end - items.begin;
    if (__atomic_add_fetch(&w->schedule->done, size, __ATOMIC_ACQ_REL) < count) return;
    __atomic_store_n(&w->schedule->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&w->schedule->next, (w->phase + 1) << 32, __ATOMIC_RELEASE);
}

/* Wait until all items are done. OpenMP's barrier lets a thread sleep that has waited for some time. Where the driver takes a core for a
 * moment, the kernel then may wake two threads on one core, where they wait for each other at each of the step's hundred phases: a
 * step took up to twenty times as long. A thread that yields stays runnable, and lets another one have the core at once. One that has
 * waited for long sleeps for moments, so that a container's quota is not spent on waiting. */
static void leave(struct worker *w) {
    for (int turn = 0; __atomic_load_n(&w->schedule->next, __ATOMIC_ACQUIRE) >> 32 == w->phase; turn++) {
        if (turn < PATIENCE) PAUSE();
        else if (turn < PATIENCE + YIELDS) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    w->phase++;
}

/* A phase: the statement at the end is run for items that this thread takes. Without items there is no phase. */
#define PHASE(w, count, grain, name, ...)                                                                                      \
    do {                                                                                                                       \
        int64_t count_ = (count);                                                                                              \
        if (!count_) break;                                                                                                    \
        for (struct items name; name = take(w, count_, grain), name.begin < name.end; finish(w, count_, name)) __VA_ARGS__;    \
        leave(w);                                                                                                              \
    } while (0)

static void norm_rows(const struct plain_step *s, const float *delta, const float *weight, float eps, struct worker *w) {
    PHASE(w, s->rows, 1, rows, {
        int64_t at = rows.begin * s->hidden;
        chosen.add_rms_norm(s->normed + at, s->x + at, delta ? delta + at : NULL, weight, rows.end - rows.begin, s->hidden, eps);
    });
}

static void multiply_rows(const struct plain_step *s, const struct linear *weight, float *out, const float *x, int64_t rows,
                          struct worker *w) {
    struct linear l = *weight;
    int64_t panels = (l.out_features + PANEL - 1) / PANEL, tiles = (rows + chosen.tile_rows - 1) / chosen.tile_rows;
    int64_t grain = rows <= 2 ? 4 : rows <= 6 ? 2 : 1; /* a multiple of what any build computes together */
    l.out = out;
    l.x = x;
    l.rows = rows;
    l.sums_size = s->sums_size;
    float *sums = l.parts > 1 ? s->sums + w->slice * s->sums_size : NULL;
    int is_laid_out = reads_x(&l);
    if (is_laid_out) {
        l.tiles = (float *)x;
    } else if (rows * l.in <= OWN_TILES) {
        l.tiles = s->tiles + w->slice * OWN_TILES;
    } else {
        l.tiles = s->tiles;
        PHASE(w, tiles, 1, some, lay_out(&l, some.begin, some.end));
        is_laid_out = 1;
    }
    PHASE(w, panels, grain, some, {
        if (!is_laid_out) lay_out(&l, 0, tiles);
        is_laid_out = 1;
        multiply_panels(&l, sums, some.begin, some.end);
    });
}

static void attention_half(const struct plain_step *s, const struct plain_layer *p, const float *delta, struct worker *w) {
    norm_rows(s, delta, p->first_norm, p->first_eps, w);
    multiply_rows(s, p->qkv, s->wide, s->normed, s->rows, w);
    const struct rope *rotation = p->rotation;
    const struct layer *cache = s->caches + p->number;
    int64_t dim = rotation->dim, width = (rotation->heads + 2 * rotation->kv_heads) * dim;
    PHASE(w, s->rows, 1, rows, {
        struct rope r = *rotation;
        r.tokens = rows.end - rows.begin;
        r.qkv = s->wide + rows.begin * width;
        r.cosine = s->cosine;
        r.sine = s->sine;
        r.positions = s->positions + rows.begin;
        chosen.rotate_all(&r);
        const float *k = r.qkv + r.heads * dim;
        lockstep_store(cache, k, k + r.kv_heads * dim, dim, width, dim, width, s->cells + rows.begin, r.tokens);
    });
    struct attention a = *s->attention;
    int64_t moved = cache->cold_keys ? a.move_count * cache->kv_heads : 0;
    PHASE(w, moved, 1, some, chosen.compress(cache, a.moves, some.begin, some.end));
    a.out = s->inner;
    a.q = s->wide;
    a.q_head_stride = dim;
    a.q_token_stride = width;
    a.heads = rotation->heads;
    a.window = p->window;
    a.scale = p->scale;
    PHASE(w, count_runs(&a) * cache->kv_heads, 1, some,
          chosen.attend(&a, cache, s->scratch + w->slice * s->scratch_size, some.begin, some.end, 1));
    multiply_rows(s, p->out, s->result, s->inner, s->rows, w);
}

static void gated_half(const struct plain_step *s, const struct plain_layer *p, const float *delta, struct worker *w) {
    norm_rows(s, delta, p->second_norm, p->second_eps, w);
    multiply_rows(s, p->gate_up, s->wide, s->normed, s->rows, w);
    int64_t inner = p->down->in;
    PHASE(w, s->rows, 1, rows,
          chosen.silu_mul(s->inner + rows.begin * inner, s->wide + 2 * rows.begin * inner, rows.end - rows.begin, inner));
    multiply_rows(s, p->down, s->result, s->inner, s->rows, w);
}

static void embed_rows(const struct plain_step *s, const struct plain_ends *e, struct worker *w) {
    PHASE(w, s->rows, 1, rows,
          chosen.widen_rows(s->x + rows.begin * s->hidden, e->embedding, e->ids + rows.begin, rows.end - rows.begin, s->hidden, e->kind));
}

/* A token may be wanted more than once, so x stays as it is. */
static void finish_rows(const struct plain_step *s, const struct plain_ends *e, struct worker *w) {
    PHASE(w, e->count, 1, some, {
        for (int64_t i = some.begin; i < some.end; i++) {
            float *last = e->last + i * s->hidden;
            int64_t at = e->wanted[i] * s->hidden;
            memcpy(last, s->x + at, sizeof(float) * (size_t)s->hidden);
            chosen.add_rms_norm(last, last, s->result + at, e->norm, 1, s->hidden, e->eps);
        }
    });
    multiply_rows(s, e->head, e->logits, e->last, e->count, w);
}

/* Compute halves of layers, from number `first` to before `end`: 2 i is attention in layer i, 2 i + 1 its gated products; or a whole
 * model, if `ends` is not null. All is one parallel region: one for each product would take longer than the product of a small model. */
void lockstep_plain(const struct plain_layer *layers, int64_t first, int64_t end, const struct plain_step *s, const struct plain_ends *ends,
                    int threads) {
    struct schedule schedule = {};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        struct worker worker = {omp_get_thread_num(), omp_get_num_threads(), 0, &schedule}, *w = &worker;
        if (ends) embed_rows(s, ends, w);
        for (int64_t half = first; half < end; half++)
            (half % 2 ? gated_half : attention_half)(s, layers + half / 2, half == first ? s->delta : s->result, w);
        if (ends && ends->count) finish_rows(s, ends, w);
    }
}
