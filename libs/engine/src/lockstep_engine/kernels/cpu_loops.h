/* The kernels' loops, compiled by cpu.c once for each instruction set: NAME gives each build its own names, VEC is the number of
 * floats in its registers. The file is included, because the compiler splits wide vectors before it clones functions for a target.
 *
 * Only speed may depend on VEC. Sums across vectors are kept in LANES partial sums, one for each lane, which `add_lanes` adds up;
 * everything else is computed element by element. `fma` rounds once, in every build. */

typedef float NAME(vec) __attribute__((vector_size(4 * VEC), aligned(4)));
typedef int32_t NAME(int_vec) __attribute__((vector_size(4 * VEC), aligned(4)));
typedef uint16_t NAME(ushort_vec) __attribute__((vector_size(2 * VEC), aligned(2)));
typedef int8_t NAME(byte_vec) __attribute__((vector_size(VEC), aligned(1)));
typedef float NAME(float_vec) __attribute__((vector_size(4 * VEC)));
typedef int16_t NAME(short_vec) __attribute__((vector_size(2 * VEC)));
#define vec NAME(vec)
#define int_vec NAME(int_vec)
#define ushort_vec NAME(ushort_vec)
#define byte_vec NAME(byte_vec)
#define float_vec NAME(float_vec)
#define short_vec NAME(short_vec)

#define PARTS (LANES / VEC) /* vectors in a set of lanes */
#define SELECT(mask, a, b) ((vec)(((int_vec)(a) & (mask)) | ((int_vec)(b) & ~(mask))))
#define EVERY(x) ((vec){} + (x))

INLINE vec NAME(fma)(vec a, vec b, vec c) {
#ifdef FUSED
    return FUSED(a, b, c);
#else
    for (int i = 0; i < VEC; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE vec NAME(widen_halves)(ushort_vec half) {
#ifdef HALVES
    return HALVES(half);
#else
    int_vec code = __builtin_convertvector(half, int_vec), size = code & 0x7fff;
    vec normal = (vec)((size << 13) + (112 << 23)), small = __builtin_convertvector(size, vec) * 0x1p-24f;
    normal = SELECT(size >= 0x7c00, (vec)((size << 13) | 0x7f800000), normal);
    return (vec)((int_vec)SELECT(size < 0x400, small, normal) | (code & 0x8000) << 16);
#endif
}

/* VEC signed bytes. In one step where there is an instruction: the compiler would take them apart. */
INLINE int_vec NAME(widen_bytes)(const void *from) {
#ifdef BYTES
    return BYTES(from);
#else
    return __builtin_convertvector(__builtin_convertvector(*(const byte_vec *)from, short_vec), int_vec);
#endif
}

/* Elements i, i + 1, … of an array of kind `kind`. */
INLINE vec NAME(load)(const void *from, int64_t i, enum kind kind) {
    if (kind == FLOAT32) return *(const vec *)((const float *)from + i);
    if (kind == BFLOAT16) return (vec)(__builtin_convertvector(*(const ushort_vec *)((const uint16_t *)from + i), int_vec) << 16);
    if (kind == FLOAT16) return NAME(widen_halves)(*(const ushort_vec *)((const uint16_t *)from + i));
    ushort_vec codes = (ushort_vec)__builtin_convertvector(*(const byte_vec *)((const uint8_t *)from + i), short_vec);
    return NAME(widen_halves)((codes << 7) & (uint16_t)0xbf80);
}

/* The first `count` of these elements, followed by zeros. */
INLINE vec NAME(load_some)(const void *from, int64_t i, int64_t count, enum kind kind) {
    if (count >= VEC) return NAME(load)(from, i, kind);
    size_t size = kind == FLOAT32 ? 4 : kind == E4M3 ? 1 : 2;
    float some[VEC] = {};
    if (count > 0) memcpy(some, (const char *)from + (size_t)i * size, size * (size_t)count);
    return NAME(load)(some, 0, kind);
}

INLINE void NAME(store_some)(float *to, vec x, int64_t count) {
    if (count >= VEC) *(vec *)to = x;
    else if (count > 0) memcpy(to, &x, sizeof(float) * (size_t)count);
}

/* Add up a set of lanes: the upper half is added to the lower half until one number is left. */
INLINE float NAME(add_lanes)(const vec *lanes) {
    float x[LANES];
    memcpy(x, lanes, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

INLINE float NAME(greatest_lane)(const vec *lanes) {
    float x[LANES];
    memcpy(x, lanes, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i + half] > x[i] ? x[i + half] : x[i];
    return x[0];
}

/* --- elementary functions ------------------------------------------------------------------------------------------------- */

/* e^x for x <= 0; the result is 0 below -87: 2^n * e^r with |r| <= ln(2)/2, the polynomial of Cephes' expf (relative error below 2e-7). */
INLINE vec NAME(exp)(vec x) {
    int_vec below = x < -87.0f;
    x = SELECT(below, (vec){}, x);
    int_vec n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, int_vec);
    vec power = __builtin_convertvector(n, vec);
    vec r = NAME(fma)(power, EVERY(-0.693359375f), x);
    r = NAME(fma)(power, EVERY(2.12194440e-4f), r);
    vec p = NAME(fma)(r, EVERY(1.9875691500e-4f), EVERY(1.3981999507e-3f));
    p = NAME(fma)(p, r, EVERY(8.3334519073e-3f));
    p = NAME(fma)(p, r, EVERY(4.1665795894e-2f));
    p = NAME(fma)(p, r, EVERY(1.6666665459e-1f));
    p = NAME(fma)(p, r, EVERY(5.0000001201e-1f));
    p = NAME(fma)(p, r * r, r) + 1.0f;
    return SELECT(below, (vec){}, p * (vec)((n + 127) << 23));
}

INLINE vec NAME(magnitude)(vec x) { return (vec)((int_vec)x & 0x7fffffff); }

INLINE vec NAME(with_sign)(vec size, vec sign) { return (vec)((int_vec)size | ((int_vec)sign & (int32_t)0x80000000)); }

/* 1 / (1 + e^-x), times y. */
INLINE vec NAME(sigmoid_times)(vec x, vec y) {
    vec e = NAME(exp)(-NAME(magnitude)(x));
    return y * SELECT(x < 0, e, EVERY(1.0f)) / (e + 1.0f);
}

/* Cephes' tanhf: a polynomial below 0.625, else 1 - 2 / (e^2x + 1). */
INLINE vec NAME(tanh)(vec x) {
    vec size = NAME(magnitude)(x), z = x * x;
    vec p = NAME(fma)(z, EVERY(-5.70498872745e-3f), EVERY(2.06390887954e-2f));
    p = NAME(fma)(p, z, EVERY(-5.37397155531e-2f));
    p = NAME(fma)(p, z, EVERY(1.33314422036e-1f));
    p = NAME(fma)(p, z, EVERY(-3.33332819422e-1f));
    p = NAME(fma)(p * z, size, size);
    vec e = NAME(exp)(size * -2.0f);
    return NAME(with_sign)(SELECT(size < 0.625f, p, (1.0f - e) / (e + 1.0f)), x);
}

/* The error function, within two units in the last place: polynomials of x (below 0.93) and of the logarithm of 1 - erf(x). */
INLINE vec NAME(erf)(vec x) {
    vec size = NAME(magnitude)(x), z = x * x;
    size = SELECT(size > 8.0f, EVERY(8.0f), size);
    vec u = NAME(fma)(EVERY(-3.88396438e-3f), size, EVERY(2.42546219e-2f));
    vec far = NAME(fma)(EVERY(-1.72853470e-5f), size, EVERY(3.83197126e-4f));
    far = NAME(fma)(far, size * size, u);
    far = NAME(fma)(far, size, EVERY(-1.06777877e-1f));
    far = NAME(fma)(far, size, EVERY(-6.34846687e-1f));
    far = NAME(fma)(far, size, EVERY(-1.28717512e-1f));
    far = 1.0f - NAME(exp)(NAME(fma)(far, size, -size));
    vec near = NAME(fma)(EVERY(-5.96761703e-4f), z, EVERY(4.99119423e-3f));
    near = NAME(fma)(near, z, EVERY(-2.67681349e-2f));
    near = NAME(fma)(near, z, EVERY(1.12819925e-1f));
    near = NAME(fma)(near, z, EVERY(-3.76125336e-1f));
    near = NAME(fma)(near, z, EVERY(1.28379166e-1f));
    near = NAME(fma)(near, size, size);
    return NAME(with_sign)(SELECT(size > 0.927734375f, far, near), x);
}

INLINE vec NAME(apply)(vec x, enum function function) {
    switch (function) {
    case SIGMOID: return NAME(sigmoid_times)(x, EVERY(1.0f));
    case SILU: return NAME(sigmoid_times)(x, x);
    case TANH: return NAME(tanh)(x);
    case GELU: return x * 0.5f * (NAME(erf)(x * 0.70710678118654752f) + 1.0f);
    case GELU_TANH: return x * 0.5f * (NAME(tanh)(NAME(fma)(x * x * x, EVERY(0.044715f), x) * 0.79788456080286536f) + 1.0f);
    case COSINE:
    case SINE:
        for (int i = 0; i < VEC; i++) x[i] = sine(x[i], function == COSINE);
    }
    return x;
}

static void NAME(map)(float *out, const float *x, int64_t count, int function) {
#define MAP(name)                                                                                                              \
    case name:                                                                                                                 \
        for (int64_t i = 0; i < count; i += VEC)                                                                               \
            NAME(store_some)(out + i, NAME(apply)(NAME(load_some)(x, i, count - i, FLOAT32), name), count - i);                \
        break
    switch ((enum function)function) {
        MAP(SIGMOID);
        MAP(SILU);
        MAP(TANH);
        MAP(GELU);
        MAP(GELU_TANH);
        MAP(COSINE);
        MAP(SINE);
    }
#undef MAP
}

/* --- attention ------------------------------------------------------------------------------------------------------------ */

/* The places of a query's keys and values: a table of ids for each version of a block, and which version of a block is seen. */
struct NAME(view) {
    const void *keys, *values, *cold_keys, *cold_values;
    const float *key_scales, *value_scales;
    const float *wide_keys, *wide_values; /* cold blocks from cold_begin on, widened, where `kind` is FLOAT32; or null */
    const int32_t *hot, *cold;
    int64_t first_cold, cold_begin, cold_end;
    enum kind kind;
    int fetches; /* whether the query is the first of those that see these keys: it fetches blocks for all of them */
};

/* Parameters of a row's scores. */
struct NAME(scoring) {
    float scale, soft_cap;
    const float *bias, *sink;
};

/* scores[LANES] = sum of query[d] * key[d], each key[d] a set of lanes with one component of 16 keys; four sums,
 * then added. Meanwhile the next block is fetched from `ahead` on, unless that is null: a block is about a page, beyond which processors
 * do not look. */
INLINE void NAME(score)(vec *scores, const float *query, const void *keys, int64_t at, int dim, const char *ahead, enum kind kind) {
    vec sums[4][PARTS] = {};
    int d = 0, bytes = LANES * (kind == FLOAT32 ? 4 : kind == E4M3 ? 1 : 2);
    for (; d + 4 <= dim; d += 4) {
        if (ahead)
            for (int line = 0; line < 4 * bytes; line += 64) __builtin_prefetch(ahead + d * bytes + line);
        for (int i = 0; i < 4; i++)
            for (int part = 0; part < PARTS; part++)
                sums[i][part] =
                    NAME(fma)(EVERY(query[d + i]), NAME(load)(keys, at + (d + i) * LANES + part * VEC, kind), sums[i][part]);
    }
    for (; d < dim; d++)
        for (int part = 0; part < PARTS; part++)
            sums[0][part] = NAME(fma)(EVERY(query[d]), NAME(load)(keys, at + d * LANES + part * VEC, kind), sums[0][part]);
    for (int part = 0; part < PARTS; part++) scores[part] = (sums[0][part] + sums[1][part]) + (sums[2][part] + sums[3][part]);
}

/* Where a block of `size` keys, or of values, is. */
struct NAME(place) {
    const void *from;
    int64_t at, scales; /* the first element; the block's first scale, if it has scales */
    int is_coded, has_scales;
};

INLINE struct NAME(place) NAME(find)(const struct NAME(view) *at, int64_t block, int64_t size, int is_value) {
    const void *wide = is_value ? at->wide_values : at->wide_keys;
    int is_cold = block >= at->cold_begin && block < at->cold_end;
    int has_scales = is_cold && at->key_scales, is_wide = has_scales && wide;
    int64_t id = is_cold ? at->cold[block] - at->first_cold : at->hot[block];
    const void *cold = is_wide ? wide : is_value ? at->cold_values : at->cold_keys, *hot = is_value ? at->values : at->keys;
    return (struct NAME(place)){
        is_cold ? cold : hot, (is_wide ? block - at->cold_begin : id) * size, id * BLOCK, has_scales && !is_wide, has_scales};
}

/* The address of a place in memory. */
INLINE const char *NAME(address)(struct NAME(place) place, enum kind kind) {
    return (const char *)place.from + place.at * (place.is_coded ? 1 : kind == FLOAT32 ? 4 : 2);
}

/* scores[LANES * n ...] = the query's scores with the keys of blocks `begin` to before `end`, -inf where hidden.
 * Keys are transposed in their block, [dim][BLOCK]: a product gives the scores of 16 keys at once. Returns the peak. */
INLINE float NAME(score_blocks)(float *scores, const float *query, const struct NAME(view) *at, const struct NAME(scoring) *how,
                                int64_t begin, int64_t end, int64_t first, int64_t last, int dim, enum kind kind) {
    int_vec lane;
    for (int i = 0; i < VEC; i++) lane[i] = i;
    vec peaks[PARTS];
    for (int part = 0; part < PARTS; part++) peaks[part] = EVERY(-INFINITY);
    struct NAME(place) place = NAME(find)(at, begin, (int64_t)BLOCK * dim, 0), next;
    for (int64_t block = begin; block < end; block++, scores += LANES, place = next) {
        vec block_scores[PARTS];
        int is_last = block == end - 1; /* then come values */
        next = NAME(find)(at, is_last ? begin : block + 1, (int64_t)BLOCK * dim, is_last);
        const char *ahead = at->fetches ? NAME(address)(next, kind) : NULL;
        if (place.is_coded) NAME(score)(block_scores, query, place.from, place.at, dim, ahead, E4M3);
        else NAME(score)(block_scores, query, place.from, place.at, dim, ahead, kind);
        const float *scales = place.has_scales ? at->key_scales + place.scales : 0;
        float factor = scales ? how->scale * E4M3_UNIT : how->scale;
        for (int part = 0; part < PARTS; part++) {
            vec score = block_scores[part];
            if (scales) score = score * *(const vec *)(scales + part * VEC);
            score = score * factor;
            if (how->soft_cap > 0) score = how->soft_cap * NAME(tanh)(score / how->soft_cap);
            if (how->bias) score = score + *(const vec *)(how->bias + block * BLOCK + part * VEC);
            int_vec position = lane + (int32_t)(block * BLOCK + part * VEC);
            int_vec hidden = (position < (int32_t)first) | (position > (int32_t)last);
            score = SELECT(hidden, EVERY(-INFINITY), score);
            peaks[part] = SELECT(score > peaks[part], score, peaks[part]);
            *(vec *)(scores + part * VEC) = score;
        }
    }
    float peak = NAME(greatest_lane)(peaks);
    return how->sink && *how->sink > peak ? *how->sink : peak;
}

/* A block's values [BLOCK, dim] from component `from` on, times weights: even and odd keys in separate sums. `chunks` vectors, or
 * `tail` components. `ahead`: as for `score`. */
INLINE void NAME(weigh)(vec *even, vec *odd, const vec *weights, const void *values, int64_t at, int dim, int from, int chunks,
                        int tail, const char *ahead, enum kind kind) {
    int bytes = kind == FLOAT32 ? 4 : kind == E4M3 ? 1 : 2;
    for (int i = 0; i < BLOCK; i += 2) {
        if (ahead)
            for (int line = 0; line < 2 * dim * bytes; line += 64) __builtin_prefetch(ahead + i * dim * bytes + line);
        vec first = EVERY(weights[i / VEC][i % VEC]), second = EVERY(weights[(i + 1) / VEC][(i + 1) % VEC]);
        int64_t row = at + (int64_t)i * dim + from;
        if (tail) {
            even[0] = NAME(fma)(first, NAME(load_some)(values, row, tail, kind), even[0]);
            odd[0] = NAME(fma)(second, NAME(load_some)(values, row + dim, tail, kind), odd[0]);
        } else {
            for (int c = 0; c < chunks; c++) {
                even[c] = NAME(fma)(first, NAME(load)(values, row + c * VEC, kind), even[c]);
                odd[c] = NAME(fma)(second, NAME(load)(values, row + dim + c * VEC, kind), odd[c]);
            }
        }
    }
}

/* out = sum of weights times values, from component `from` on: `chunks` vectors of them, or `tail` components. */
INLINE void NAME(weigh_blocks)(float *out, const float *weights, const struct NAME(view) *at, int64_t begin, int64_t end, int dim,
                               int from, int chunks, int tail, float factor, enum kind kind) {
    int64_t size = (int64_t)BLOCK * dim;
    vec even[COLUMNS] = {}, odd[COLUMNS] = {};
    struct NAME(place) place = NAME(find)(at, begin, size, 1), next;
    for (int64_t block = begin; block < end; block++, weights += LANES, place = next) {
        next = NAME(find)(at, block < end - 1 ? block + 1 : block, size, 1);
        const char *ahead = at->fetches && !from ? NAME(address)(next, kind) : NULL;
        vec weight[PARTS];
        for (int part = 0; part < PARTS; part++) {
            weight[part] = *(const vec *)(weights + part * VEC);
            if (place.has_scales)
                weight[part] = weight[part] * *(const vec *)(at->value_scales + place.scales + part * VEC) * E4M3_UNIT;
        }
        if (place.is_coded) NAME(weigh)(even, odd, weight, place.from, place.at, dim, from, chunks, tail, ahead, E4M3);
        else NAME(weigh)(even, odd, weight, place.from, place.at, dim, from, chunks, tail, ahead, kind);
    }
    if (tail) NAME(store_some)(out + from, (even[0] + odd[0]) * factor, tail);
    else
        for (int c = 0; c < chunks; c++) *(vec *)(out + from + c * VEC) = (even[c] + odd[c]) * factor;
}

/* One query against the keys at positions first..last: scores, softmax, weighted sum of values. Contents of a block beyond the
 * sequence's end are finite, so that a weight of 0 masks them. */
INLINE void NAME(attend_row)(float *out, const float *query, const struct NAME(view) *at, const struct NAME(scoring) *how,
                             int64_t first, int64_t last, int dim, float *scores, enum kind kind) {
    int64_t begin = first / BLOCK, end = last / BLOCK + 1;
    float peak = NAME(score_blocks)(scores, query, at, how, begin, end, first, last, dim, kind);
    vec total[PARTS] = {};
    for (int64_t j = 0; j < (end - begin) * LANES; j += LANES)
        for (int part = 0; part < PARTS; part++) {
            vec *score = (vec *)(scores + j + part * VEC);
            *score = NAME(exp)(*score - peak);
            total[part] = total[part] + *score;
        }
    float weight = NAME(add_lanes)(total);
    if (how->sink) weight += NAME(exp)(EVERY(*how->sink - peak))[0];
    float factor = 1.0f / weight;
    int chunks = dim / VEC, from = 0;
    for (; chunks >= COLUMNS; chunks -= COLUMNS, from += COLUMNS * VEC) /* constant widths let the compiler keep the sums in registers */
        NAME(weigh_blocks)(out, scores, at, begin, end, dim, from, COLUMNS, 0, factor, kind);
#define WEIGH(count) NAME(weigh_blocks)(out, scores, at, begin, end, dim, from, count, 0, factor, kind)
    switch (kind == FLOAT32 ? chunks : -chunks) {
    case 0: break;
#if COLUMNS > 4
    case 4: WEIGH(4); break;
    case 5: WEIGH(5); break;
    case 6: WEIGH(6); break;
#endif
#if COLUMNS > 2
    case 2: WEIGH(2); break;
#endif
    case 1: WEIGH(1); break;
    default: WEIGH(chunks);
    }
#undef WEIGH
    if (dim % VEC) NAME(weigh_blocks)(out, scores, at, begin, end, dim, dim / VEC * VEC, 1, dim % VEC, factor, kind);
}

/* All queries of tokens `token` to before `end`, of one sequence, that use one kv head. */
INLINE void NAME(attend_run)(const struct attention *a, const struct layer *l, float *scratch, int64_t token, int64_t end,
                             int64_t kv_head, enum kind kind) {
    int64_t group = a->heads / l->kv_heads, size = BLOCK * l->dim, row = a->owners[token] * a->width;
    int64_t item = kind == FLOAT32 ? 4 : 2, cold_item = l->key_scales ? 1 : item;
    struct NAME(view) at = {
        .keys = (const char *)l->keys + kv_head * l->blocks * size * item,
        .values = (const char *)l->values + kv_head * l->blocks * size * item,
        .cold_keys = (const char *)l->cold_keys + kv_head * l->cold_blocks * size * cold_item,
        .cold_values = (const char *)l->cold_values + kv_head * l->cold_blocks * size * cold_item,
        .key_scales = l->key_scales ? l->key_scales + kv_head * l->cold_blocks * BLOCK : 0,
        .value_scales = l->value_scales ? l->value_scales + kv_head * l->cold_blocks * BLOCK : 0,
        .hot = (a->hot_tables ? a->hot_tables : a->tables) + row,
        .cold = a->tables + row,
        .first_cold = a->first_cold,
        .cold_begin = a->sink,
    };
    if (a->window && a->positions[token] >= a->window) {
        int64_t seen = (a->positions[token] - a->window + 1) / BLOCK;
        at.cold_begin = seen > at.cold_begin ? seen : at.cold_begin;
    }
    if (kind == FLOAT32 && l->key_scales && a->hot_blocks_before >= 0 && end - token >= WIDEN) {
        float *wide = scratch + a->width * BLOCK + 2 * LANES;
        at.wide_keys = wide;
        at.wide_values = wide + a->width * size;
        for (int64_t block = at.cold_begin; block < a->positions[end - 1] / BLOCK - a->hot_blocks_before; block++, wide += size) {
            int64_t cold = (at.cold[block] - a->first_cold) * size;
            for (int64_t i = 0; i < size; i += VEC) {
                *(vec *)(wide + i) = NAME(load)(at.cold_keys, cold + i, E4M3);
                *(vec *)(wide + a->width * size + i) = NAME(load)(at.cold_values, cold + i, E4M3);
            }
        }
    }
    for (int64_t begin = token; token < end; token++) {
        int64_t last = a->positions[token];
        int64_t first = a->window && last >= a->window ? last - a->window + 1 : 0;
        at.cold_end = a->hot_blocks_before < 0 || !l->cold_keys ? 0 : last / BLOCK - a->hot_blocks_before;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            struct NAME(scoring) how = {a->scale, a->soft_cap, a->bias ? a->bias + head * a->bias_width : 0,
                                        a->sinks ? a->sinks + head : 0};
            at.fetches = token == begin && head == kv_head * group;
            NAME(attend_row)(a->out + (token * a->heads + head) * l->dim,
                             a->q + head * a->q_head_stride + token * a->q_token_stride, &at, &how, first, last, (int)l->dim,
                             scratch, kind);
        }
    }
}

/* Attention of every `step`th pair of a run and a kv head, from `begin` to before `end`. */
INLINE void NAME(attend_all)(const struct attention *a, const struct layer *l, float *scratch, int64_t begin, int64_t end, int64_t step,
                             enum kind kind) {
    int64_t item = 0;
    for (int64_t token = 0; token < a->tokens && begin < end;) {
        int64_t next = run_end(a, token);
        for (; begin < item + l->kv_heads && begin < end; begin += step)
            NAME(attend_run)(a, l, scratch, token, next, begin - item, kind);
        item += l->kv_heads;
        token = next;
    }
}

static void NAME(attend)(const struct attention *a, const struct layer *l, float *scratch, int64_t begin, int64_t end, int64_t step) {
    if (l->kind == FLOAT32) NAME(attend_all)(a, l, scratch, begin, end, step, FLOAT32);
    else if (l->kind == BFLOAT16) NAME(attend_all)(a, l, scratch, begin, end, step, BFLOAT16);
    else NAME(attend_all)(a, l, scratch, begin, end, step, FLOAT16);
}

/* --- cold blocks ---------------------------------------------------------------------------------------------------------- */

/* Codes in e4m3 of |x| <= 448, rounded to nearest, ties to even. */
INLINE int_vec NAME(narrow)(vec x) {
    int_vec sign = (int_vec)x >> 24 & 128, bits = (int_vec)x & 0x7fffffff;
    int_vec normal = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    int_vec small = (int_vec)((vec)bits + 0x1p14f) - 0x46800000; /* a sum whose last bit is worth 2^-9 */
    return sign | (int_vec)SELECT(bits < 0x3c800000, (vec)small, (vec)(normal - 960));
}

/* Lower bound of a vector's largest magnitude, so that its scale and the inverse are finite. */
#define LEAST_PEAK 1e-30f

INLINE void NAME(put_codes)(uint8_t *codes, vec x, int64_t count) {
    x = SELECT(x > 448.0f, EVERY(448.0f), x);
    x = SELECT(x < -448.0f, EVERY(-448.0f), x);
    byte_vec bytes = __builtin_convertvector(NAME(narrow)(x), byte_vec);
    memcpy(codes, &bytes, (size_t)(count < VEC ? count : VEC));
}

/* The larger ones of some magnitudes and those of x, as the integers of their bits. These have the order of the numbers, above which
 * comes infinity and then NaN, so that neither is lost. */
INLINE int_vec NAME(larger)(int_vec sizes, vec x) {
    int_vec others = (int_vec)NAME(magnitude)(x);
    return (int_vec)SELECT(others > sizes, others, sizes);
}

/* The magnitudes of these bits, NaN for infinity, too: a vector with such a component has the scale NaN, whatever its codes are, and
 * reaches the logits as NaN. */
INLINE vec NAME(peaks)(int_vec sizes) { return SELECT(sizes < 0x7f800000, (vec)sizes, EVERY(NAN)); }

/* Compress the keys of a block [dim][BLOCK] to bytes with a scale for each token; tokens are the lanes. */
INLINE void NAME(compress_keys)(uint8_t *codes, float *scales, const void *keys, int64_t at, int dim, enum kind kind) {
    for (int part = 0; part < BLOCK; part += VEC) {
        int_vec sizes = (int_vec)EVERY(LEAST_PEAK);
        for (int d = 0; d < dim; d++) sizes = NAME(larger)(sizes, NAME(load)(keys, at + d * LANES + part, kind));
        vec peaks = NAME(peaks)(sizes), factor = 448.0f / peaks;
        *(vec *)(scales + part) = peaks * (1.0f / 448.0f);
        for (int d = 0; d < dim; d++)
            NAME(put_codes)(codes + d * LANES + part, NAME(load)(keys, at + d * LANES + part, kind) * factor, VEC);
    }
}

/* Compress one token's values [dim] to bytes and a scale. */
INLINE void NAME(compress_values)(uint8_t *codes, float *scale, const void *values, int64_t at, int dim, enum kind kind) {
    int_vec sizes = (int_vec)EVERY(LEAST_PEAK);
    for (int i = 0; i < dim; i += VEC) sizes = NAME(larger)(sizes, NAME(load_some)(values, at + i, dim - i, kind));
    int32_t size = sizes[0];
    for (int i = 1; i < VEC; i++) size = sizes[i] > size ? sizes[i] : size;
    vec peaks = NAME(peaks)((int_vec){} + size), factor = 448.0f / peaks;
    *scale = peaks[0] * (1.0f / 448.0f);
    for (int i = 0; i < dim; i += VEC)
        NAME(put_codes)(codes + i, NAME(load_some)(values, at + i, dim - i, kind) * factor, dim - i);
}

/* Compress for the pairs of a move and a kv head from `begin` to before `end`. */
INLINE void NAME(compress_all)(const struct layer *l, const int32_t *moves, int64_t begin, int64_t end, enum kind kind) {
    int64_t size = BLOCK * l->dim;
    size_t bytes = (size_t)size * (kind == FLOAT32 ? 4 : 2);
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item % l->kv_heads;
        int64_t hot = head * l->blocks + moves[item / l->kv_heads * 2];
        int64_t cold = head * l->cold_blocks + moves[item / l->kv_heads * 2 + 1];
        if (!l->key_scales) {
            memcpy((char *)l->cold_keys + (size_t)cold * bytes, (const char *)l->keys + (size_t)hot * bytes, bytes);
            memcpy((char *)l->cold_values + (size_t)cold * bytes, (const char *)l->values + (size_t)hot * bytes, bytes);
            continue;
        }
        NAME(compress_keys)((uint8_t *)l->cold_keys + cold * size, l->key_scales + cold * BLOCK, l->keys, hot * size, (int)l->dim, kind);
        for (int i = 0; i < BLOCK; i++)
            NAME(compress_values)((uint8_t *)l->cold_values + cold * size + i * l->dim, l->value_scales + cold * BLOCK + i, l->values,
                                  hot * size + i * l->dim, (int)l->dim, kind);
    }
}

static void NAME(compress)(const struct layer *l, const int32_t *moves, int64_t begin, int64_t end) {
    if (l->kind == FLOAT32) NAME(compress_all)(l, moves, begin, end, FLOAT32);
    else if (l->kind == BFLOAT16) NAME(compress_all)(l, moves, begin, end, BFLOAT16);
    else NAME(compress_all)(l, moves, begin, end, FLOAT16);
}

/* --- rows ----------------------------------------------------------------------------------------------------------------- */

/* The sum of (x - offset)^2 of a row, or of x where `squared` is 0. */
INLINE float NAME(sum_row)(const float *x, int64_t width, float offset, int squared) {
    vec sums[PARTS] = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int part = 0; part < PARTS; part++) {
            vec v = *(const vec *)(x + i + part * VEC) - offset;
            sums[part] = squared ? NAME(fma)(v, v, sums[part]) : sums[part] + v;
        }
    for (int part = 0; i < width && part < PARTS; part++) {
        int64_t left = width - i - part * VEC;
        if (left <= 0) break;
        float rest[VEC] = {};
        for (int j = 0; j < VEC && j < left; j++) rest[j] = x[i + part * VEC + j] - offset;
        vec v = *(const vec *)rest;
        sums[part] = squared ? NAME(fma)(v, v, sums[part]) : sums[part] + v;
    }
    return NAME(add_lanes)(sums);
}

static void NAME(sum)(float *out, const float *x, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) out[row] = NAME(sum_row)(x + row * width, width, 0.0f, 0);
}

/* out = x / sqrt(mean(x^2) + eps) * weight, for each of `rows` rows of `width`. */
static void NAME(rms_norm)(float *out, const float *x, const float *weight, int64_t rows, int64_t width, float eps) {
    for (int64_t row = 0; row < rows; row++, out += width, x += width) {
        float scale = 1.0f / sqrtf(NAME(sum_row)(x, width, 0.0f, 1) / (float)width + eps);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* x += delta (unless it is null); out = x / sqrt(mean(x^2) + eps) * weight. */
static void NAME(add_rms_norm)(float *out, float *x, const float *delta, const float *weight, int64_t rows, int64_t width,
                               float eps) {
    if (delta)
        for (int64_t i = 0; i < rows * width; i++) x[i] += delta[i];
    NAME(rms_norm)(out, x, weight, rows, width, eps);
}

static void NAME(layer_norm)(float *out, const float *x, const float *weight, const float *bias, int64_t rows, int64_t width,
                             float eps) {
    for (int64_t row = 0; row < rows; row++, out += width, x += width) {
        float mean = NAME(sum_row)(x, width, 0.0f, 0) / (float)width;
        float scale = 1.0f / sqrtf(NAME(sum_row)(x, width, mean, 1) / (float)width + eps);
        for (int64_t i = 0; i < width; i++) {
            float y = (x[i] - mean) * scale;
            if (weight) y = y * weight[i];
            out[i] = bias ? y + bias[i] : y;
        }
    }
}

static void NAME(softmax)(float *out, const float *x, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++, out += width, x += width) {
        float peak = -INFINITY;
        for (int64_t i = 0; i < width; i++) peak = x[i] > peak ? x[i] : peak;
        vec total[PARTS] = {};
        for (int64_t i = 0; i < width; i += VEC) {
            vec e = NAME(exp)(NAME(load_some)(x, i, width - i, FLOAT32) - peak);
            float some[VEC] = {};
            NAME(store_some)(width - i < VEC ? some : out + i, e, width - i);
            if (width - i < VEC) memcpy(out + i, some, sizeof(float) * (size_t)(width - i));
            total[i / VEC % PARTS] += width - i < VEC ? *(const vec *)some : e;
        }
        float factor = 1.0f / NAME(add_lanes)(total);
        for (int64_t i = 0; i < width; i++) out[i] *= factor;
    }
}

/* ids [rows] = the first place of each row's largest number, or of its first NaN; usable [rows] = the same, or -1 where the number is not
 * finite. */
static void NAME(largest)(int64_t *ids, int64_t *usable, const float *x, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++, x += width) {
        float best = -INFINITY;
        int64_t from = 0, found;
        for (int64_t i = 0; i < width; i += SPAN) {
            int64_t end = width - i < SPAN ? width : i + SPAN;
            vec peaks[PARTS];
            int_vec unequal = {};
            for (int part = 0; part < PARTS; part++) peaks[part] = EVERY(-INFINITY);
            int64_t k = i;
            for (; k + LANES <= end; k += LANES)
                for (int part = 0; part < PARTS; part++) {
                    vec each = *(const vec *)(x + k + part * VEC);
                    peaks[part] = SELECT(each > peaks[part], each, peaks[part]);
                    unequal |= each != each;
                }
            float peak = NAME(greatest_lane)(peaks);
            int has_nan = 0;
            for (int lane = 0; lane < VEC; lane++) has_nan |= unequal[lane] != 0;
            for (; k < end; k++) {
                peak = x[k] > peak ? x[k] : peak;
                has_nan |= x[k] != x[k];
            }
            if (has_nan) {
                best = NAN;
                from = i;
                break;
            }
            if (peak > best) {
                best = peak;
                from = i;
            }
        }
        for (found = from; found + LANES <= width; found += LANES) { /* skip sets of lanes without it */
            int_vec hits = {};
            for (int part = 0; part < PARTS; part++) {
                vec each = *(const vec *)(x + found + part * VEC);
                hits |= (each == best) | (each != each);
            }
            int is_there = 0;
            for (int lane = 0; lane < VEC; lane++) is_there |= hits[lane];
            if (is_there) break;
        }
        for (; found < width - 1 && !(x[found] == best || x[found] != x[found]); found++) {}
        ids[row] = found;
        usable[row] = best - best == 0.0f ? found : -1;
    }
}

/* out [rows, inner] = silu(gate) * up, of gate_up [rows, 2 * inner]. */
static void NAME(silu_mul)(float *out, const float *gate_up, int64_t rows, int64_t inner) {
    for (int64_t row = 0; row < rows; row++, out += inner) {
        const float *gate = gate_up + row * 2 * inner, *up = gate + inner;
        for (int64_t i = 0; i < inner; i += VEC) {
            vec g = NAME(load_some)(gate, i, inner - i, FLOAT32), u = NAME(load_some)(up, i, inner - i, FLOAT32);
            NAME(store_some)(out + i, NAME(sigmoid_times)(g, g) * u, inner - i);
        }
    }
}

/* out [rows, width] = the rows of a table in `kind` that `ids` name. */
static void NAME(widen_rows)(float *out, const void *table, const int64_t *ids, int64_t rows, int64_t width, int64_t kind) {
    for (int64_t row = 0; row < rows; row++, out += width)
        for (int64_t i = 0; i < width; i += VEC)
            NAME(store_some)(out + i, NAME(load_some)(table, ids[row] * width + i, width - i, (enum kind)kind), width - i);
}

/* Rotate one head's pairs (i, i + half) by the position's angles (Su et al. 2021, in Llama's order of components). */
INLINE void NAME(rotate)(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

static void NAME(rotate_all)(const struct rope *r) {
    for (int64_t token = 0; token < r->tokens; token++) {
        float *row = r->qkv + token * (r->heads + 2 * r->kv_heads) * r->dim;
        int64_t at = r->positions[token] * r->dim;
        const float *cosine = r->cosine + at, *sine = r->sine + at;
        for (int64_t head = 0; head < r->heads + r->kv_heads; head++) {
            float *x = row + head * r->dim;
            const float *norm = head < r->heads ? r->q_norm : r->k_norm;
            if (norm) NAME(rms_norm)(x, x, norm, 1, r->dim, r->eps);
            NAME(rotate)(x, cosine, sine, r->dim / 2);
        }
    }
}

/* --- products ------------------------------------------------------------------------------------------------------------- */

#define WIDTH (PANEL / VEC)

enum { NAME(tile_rows) = ROWS };

/* The entries of a table of 16 that the lowest four bits of each word name. */
INLINE vec NAME(look_up)(const float *table, int_vec words) {
#ifdef LOOK_UP
    return LOOK_UP(table, words);
#else
    vec entries;
    for (int i = 0; i < VEC; i++) entries[i] = table[words[i] & 15];
    return entries;
#endif
}

/* The values of codes in one row of a panel, whose group is number `g`. The row begins at element `at`: a byte, or a word of which
 * bits `shift` to shift + 3 are the code. */
INLINE void NAME(load_codes)(vec *weights, const void *panel, int64_t at, int shift, const struct codes *c, int64_t g,
                             enum kind kind) {
    for (int w = 0; w < WIDTH; w++) {
        int64_t place = g * PANEL + w * VEC;
        vec codes;
        if (kind < FOUR_BITS) codes = __builtin_convertvector(NAME(widen_bytes)((const int8_t *)panel + at + w * VEC), vec);
        else codes = NAME(look_up)(c->table, *(const int_vec *)((const int32_t *)panel + at + w * VEC) >> shift);
        vec scales = *(const vec *)(c->scales + place);
        int is_offset = kind == INT8_OFFSETS || kind == FOUR_BITS_OFFSETS;
        weights[w] = is_offset ? NAME(fma)(codes, scales, *(const vec *)(c->offsets + place)) : codes * scales;
        if (kind == INT8_PER_127) weights[w] = weights[w] * 7.874015748031496e-3f;
    }
}

#ifdef WIDENED_ROWS
/* values [end - begin, PANEL]: those of the rows begin..end of a panel of codes. */
INLINE void NAME(widen_codes)(float *values, const void *panel, const struct codes *c, int64_t begin, int64_t end, enum kind kind) {
    int64_t in_word = kind < FOUR_BITS ? 1 : IN_WORD;
    for (int64_t k = begin; k < end;) {
        int64_t g = k / c->group, last = (g + 1) * c->group < end ? (g + 1) * c->group : end;
        for (; k < last; k++, values += PANEL) {
            vec weights[WIDTH];
            NAME(load_codes)(weights, panel, k / in_word * PANEL, (int)(k % in_word) * 4, c, g, kind);
            for (int w = 0; w < WIDTH; w++) *(vec *)(values + w * VEC) = weights[w];
        }
    }
}
#endif

/* One row of a panel: the weights of PANEL output features for one input feature. */
INLINE void NAME(load_panel_row)(vec *weights, const void *panel, int64_t at, enum kind kind) {
    if (kind != PAIRS) {
        for (int w = 0; w < WIDTH; w++) weights[w] = NAME(load)(panel, at + w * VEC, kind);
        return;
    }
    for (int w = 0; w < WIDTH / 2; w++) {
        int_vec pairs = *(const int_vec *)((const uint16_t *)panel + at + 2 * w * VEC);
        weights[w] = (vec)(pairs << 16);
        weights[WIDTH / 2 + w] = (vec)(pairs & (int32_t)0xffff0000);
    }
}

/* The first `columns` of PANEL sums; a tile does not need the others. */
INLINE void NAME(read_sums)(vec *sums, const float *from, int64_t columns) {
    float some[PANEL] = {};
    if (columns < PANEL) {
        memcpy(some, from, sizeof(float) * (size_t)columns);
        from = some;
    }
    for (int w = 0; w < WIDTH; w++) sums[w] = *(const vec *)(from + w * VEC);
}

/* The input features begin..end of `rows` rows of x times `panels` panels of PANEL output features, of which `columns` exist. Element
 * begin + k of row r is at x[k * x_step + r * x_stride]; rows of a panel are `step` apart, the first is that of `begin`; panels are
 * `panel_step` apart. `c`, of codes, is that of the first panel. Every result is one running sum over the input features in order,
 * whatever the number of rows and of panels that are computed together. Sums that continue begin as what is in `out`; the bias is added
 * where they end. */
INLINE void NAME(panel_tile)(float *out, const float *x, int64_t x_step, int64_t x_stride, const void *panel, int64_t step,
                             int64_t panel_step, const struct codes *c, const float *bias, int64_t begin, int64_t end, int64_t stride,
                             int64_t columns, int rows, int panels, int continues, int ends, enum kind kind) {
    vec sums[ROWS][TOGETHER(1)][WIDTH] = {};
    if (continues)
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) NAME(read_sums)(sums[r][p], out + r * stride + p * PANEL, columns - p * PANEL);
    int is_coded = kind >= INT8, in_word = kind >= FOUR_BITS ? IN_WORD : 1;
    int64_t g = is_coded && begin ? begin / c->group : 0; /* a division takes longer than some rows of a panel */
    for (int64_t from = begin; from < end; g++) {
        int64_t to = is_coded && (g + 1) * c->group < end ? (g + 1) * c->group : end;
        for (int64_t word = from - begin; word < to - begin; word += in_word)
            for (int i = 0; i < in_word; i++) {
                vec weights[TOGETHER(1)][WIDTH];
                for (int p = 0; p < panels; p++) {
                    int64_t at = (p * panel_step + word * step) / in_word;
                    if (is_coded) NAME(load_codes)(weights[p], panel, at, 4 * i, c, p * c->groups + g, kind);
                    else NAME(load_panel_row)(weights[p], panel, at, kind);
                }
                for (int r = 0; r < rows; r++) {
                    vec each = EVERY(x[(word + i) * x_step + r * x_stride]);
                    for (int p = 0; p < panels; p++)
                        for (int w = 0; w < WIDTH; w++) sums[r][p][w] = NAME(fma)(weights[p][w], each, sums[r][p][w]);
                }
            }
        from = to;
    }
    for (int p = 0; p < panels; p++) {
        int64_t first = p * PANEL, count = columns - first < PANEL ? columns - first : PANEL;
        float added[PANEL] = {};
        if (bias) memcpy(added, bias + first, sizeof(float) * (size_t)count);
        for (int r = 0; r < rows; r++) {
            float result[PANEL];
            for (int w = 0; w < WIDTH; w++)
                *(vec *)(result + w * VEC) = ends ? sums[r][p][w] + *(const vec *)(added + w * VEC) : sums[r][p][w];
            memcpy(out + r * stride + first, result, sizeof(float) * (size_t)count);
        }
    }
}

/* Multiply all rows by one panel. */
INLINE void NAME(panel_rows)(float *out, const float *x, const void *panel, int64_t step, const float *bias, int64_t rows,
                             int64_t in, int64_t stride, int64_t columns, enum kind kind) {
#define TILE(count)                                                                                                            \
    NAME(panel_tile)(out + row * stride, x + row * in, 1, in, panel, step, 0, NULL, bias, 0, in, stride, columns, count, 1, 0, 1, kind), \
        row += count
    for (int64_t row = 0; row < rows;) { /* constant numbers of rows let the compiler keep the sums in registers */
        int64_t left = rows - row;
        if (left >= ROWS) TILE(ROWS);
#if ROWS > 8
        else if (left >= 8) TILE(8);
#endif
#if ROWS > 4
        else if (left >= 4) TILE(4);
#endif
#if ROWS > 2
        else if (left >= 2) TILE(2);
#endif
        else TILE(1);
    }
#undef TILE
}

/* Lay the tiles begin..end of x out for a product, see `struct linear`. */
static void NAME(interleave)(const struct linear *l, int64_t begin, int64_t end) {
    for (int64_t first = begin * ROWS; first < end * ROWS && first < l->rows; first += ROWS) {
        int64_t rows = l->rows - first < ROWS ? l->rows - first : ROWS;
        const float *x = l->x + first * l->in;
        float *to = l->tiles + first * l->in;
#define CASE(count)                                                                                                            \
    case count:                                                                                                                \
        for (int64_t k = 0; k < l->in; k++)                                                                                    \
            for (int r = 0; r < count; r++) to[k * count + r] = x[r * l->in + k];                                              \
        break
        switch (rows) { /* constant numbers are unrolled */
            CASE(1);
            CASE(2);
#if ROWS > 2
            CASE(3);
#endif
#if ROWS > 3
            CASE(4);
            CASE(5);
            CASE(6);
            CASE(7);
            CASE(8);
            CASE(9);
            CASE(10);
            CASE(11);
            CASE(12);
#endif
        }
#undef CASE
    }
}

/* Multiply the input features begin..end of all rows by `panels` panels, the first of which is `number`; `panel` is its row of `begin`.
 * Results have `stride` floats between rows. Sums continue what is in `out` if `continues`; the bias is added if `ends`. */
INLINE void NAME(all_rows)(const struct linear *l, float *results, int64_t stride, int64_t number, const void *panel,
                           const struct codes *c, int64_t begin, int64_t end, int64_t panels, int continues, int ends, enum kind kind) {
    const float *bias = l->bias ? l->bias + number * PANEL : NULL;
    int64_t columns = l->out_features - number * PANEL;
    for (int64_t first = 0; first < l->rows; first += ROWS) {
        int64_t rows = l->rows - first < ROWS ? l->rows - first : ROWS;
        const float *x = l->tiles + first * l->in + begin * rows;
        float *out = results + first * stride;
#define TILE(rows, panels)                                                                                                     \
    NAME(panel_tile)(out, x, rows, 1, panel, PANEL, PANEL * l->in, c, bias, begin, end, stride, columns, rows, panels, continues, ends, kind)
#define CASE(rows)                                                                                                             \
    case rows:                                                                                                                 \
        if (panels == 1) TILE(rows, 1);                                                                                        \
        else TILE(rows, TOGETHER(rows));                                                                                       \
        break
        switch (rows) { /* constant numbers keep the sums in registers */
            CASE(1);
            CASE(2);
#if ROWS > 2
            CASE(3);
#endif
#if ROWS > 3
            CASE(4);
            CASE(5);
            CASE(6);
            CASE(7);
            CASE(8);
            CASE(9);
            CASE(10);
            CASE(11);
            CASE(12);
#endif
        }
#undef CASE
#undef TILE
    }
}

/* Where the sums of a part of the input features go: the first part's to the result, the others' to planes of [rows, width] beside
 * each other. */
INLINE float *NAME(plane)(const struct linear *l, float *sums, int64_t part, int64_t number, int64_t width, int64_t *stride) {
    *stride = part ? width : l->out_features;
    return part ? sums + (part - 1) * l->rows * width : l->out + number * PANEL;
}

/* Add the parts' sums of `panels` panels, the first of which is `number`: neighbours first, then the sums of neighbours; then the
 * bias. */
static void NAME(add_parts)(const struct linear *l, float *sums, int64_t number, int64_t panels) {
    int64_t width = panels * PANEL, left = l->out_features - number * PANEL, columns = left < width ? left : width;
    for (int64_t apart = 1; apart < l->parts; apart *= 2)
        for (int64_t part = 0; part + apart < l->parts; part += 2 * apart) {
            int64_t stride, other_stride;
            float *to = NAME(plane)(l, sums, part, number, width, &stride);
            const float *from = NAME(plane)(l, sums, part + apart, number, width, &other_stride);
            for (int64_t r = 0; r < l->rows; r++)
                for (int64_t c = 0; c < columns; c++) to[r * stride + c] += from[r * other_stride + c];
        }
    for (int64_t r = 0; r < l->rows; r++) {
        float *to = l->out + r * l->out_features + number * PANEL;
        for (int64_t c = 0; c < columns; c++) to[c] += l->bias ? l->bias[number * PANEL + c] : 0.0f;
    }
}

/* The codes of panel `number` and of those that follow it. */
INLINE struct codes NAME(codes_of)(const struct linear *l, int64_t number) {
    int64_t groups = (l->in + l->group - 1) / l->group, at = number * groups * PANEL;
    return (struct codes){l->scales + at, l->offsets ? l->offsets + at : NULL, l->table, groups, l->group};
}

/* Compute the panels begin..end of a product. */
INLINE void NAME(linear_panels)(const struct linear *l, float *sums, int64_t begin, int64_t end, enum kind kind) {
    int64_t group = l->rows < ROWS ? TOGETHER(l->rows) : 1, together, stride, length = l->in / l->parts;
    int64_t bits = kind == FLOAT32 ? 32 : kind >= FOUR_BITS ? 4 : kind >= INT8 ? 8 : 16, row = PANEL * bits / 8; /* bytes */
    for (int64_t p = begin; p < end; p += together) {
        const char *panel = (const char *)l->panels + p * l->in * row;
        struct codes c = {};
        if (kind >= INT8) c = NAME(codes_of)(l, p);
        together = end - p >= group ? group : 1;
        for (int64_t part = 0; part < l->parts; part++) {
            float *out = NAME(plane)(l, sums, part, p, together * PANEL, &stride);
            int64_t from = part * length;
            NAME(all_rows)(l, out, stride, p, panel + from * row, &c, from, from + length, together, 0, l->parts == 1, kind);
        }
        if (l->parts > 1) NAME(add_parts)(l, sums, p, together);
    }
}

#ifdef WIDENED_ROWS
/* As `linear_panels`, of codes, for many rows: CHUNK input features of a panel are widened once for all of them. */
INLINE void NAME(widened_panels)(const struct linear *l, float *sums, int64_t begin, int64_t end, enum kind kind) {
    float values[CHUNK * PANEL] __attribute__((aligned(64)));
    int64_t length = l->in / l->parts, row = PANEL / (kind >= FOUR_BITS ? 2 : 1), stride;
    for (int64_t p = begin; p < end; p++) {
        const char *panel = (const char *)l->panels + p * l->in * row;
        struct codes c = NAME(codes_of)(l, p);
        for (int64_t part = 0; part < l->parts; part++) {
            float *out = NAME(plane)(l, sums, part, p, PANEL, &stride);
            int64_t first = part * length, last = first + length;
            for (int64_t from = first; from < last; from += CHUNK) {
                int64_t to = last - from < CHUNK ? last : from + CHUNK;
                NAME(widen_codes)(values, panel, &c, from, to, kind);
                NAME(all_rows)(l, out, stride, p, values, NULL, from, to, 1, from > first, to == last && l->parts == 1, FLOAT32);
            }
        }
        if (l->parts > 1) NAME(add_parts)(l, sums, p, 1);
    }
}
#endif

/* Compute the panels begin..end of a product of codes. */
INLINE void NAME(coded_panels)(const struct linear *l, float *sums, int64_t begin, int64_t end, enum kind kind) {
#ifdef WIDENED_ROWS
    if (l->rows >= WIDENED_ROWS(kind)) {
        NAME(widened_panels)(l, sums, begin, end, kind);
        return;
    }
#endif
    NAME(linear_panels)(l, sums, begin, end, kind);
}

static void NAME(linear)(const struct linear *l, float *sums, int64_t begin, int64_t end) {
    switch ((enum kind)l->kind) { /* constant kinds */
    case FLOAT32: NAME(linear_panels)(l, sums, begin, end, FLOAT32); break;
    case PAIRS: NAME(linear_panels)(l, sums, begin, end, PAIRS); break;
    case INT8: NAME(coded_panels)(l, sums, begin, end, INT8); break;
    case INT8_PER_127: NAME(coded_panels)(l, sums, begin, end, INT8_PER_127); break;
    case INT8_OFFSETS: NAME(coded_panels)(l, sums, begin, end, INT8_OFFSETS); break;
    case FOUR_BITS: NAME(coded_panels)(l, sums, begin, end, FOUR_BITS); break;
    case FOUR_BITS_OFFSETS: NAME(coded_panels)(l, sums, begin, end, FOUR_BITS_OFFSETS); break;
    default: NAME(linear_panels)(l, sums, begin, end, FLOAT16);
    }
}

/* `rows` rows of x times `outputs` rows of a matrix with `step` between them: every element is a sum over the input features in LANES
 * partial sums. */
INLINE void NAME(dot_tile)(float *out, const float *x, const void *weight, int64_t at, int64_t step, int64_t in, int64_t stride,
                           int rows, int outputs, enum kind kind) {
    vec sums[DOT_ROWS][DOT_OUTPUTS][PARTS] = {};
    int64_t k = 0;
    for (; k + LANES <= in; k += LANES)
        for (int part = 0; part < PARTS; part++)
            for (int o = 0; o < outputs; o++) {
                vec w = NAME(load)(weight, at + o * step + k + part * VEC, kind);
                for (int r = 0; r < rows; r++)
                    sums[r][o][part] = NAME(fma)(w, *(const vec *)(x + r * in + k + part * VEC), sums[r][o][part]);
            }
    for (int part = 0; part < PARTS; part++) {
        int64_t i = k + part * VEC;
        if (i < in)
            for (int o = 0; o < outputs; o++) {
                vec w = NAME(load_some)(weight, at + o * step + i, in - i, kind);
                for (int r = 0; r < rows; r++)
                    sums[r][o][part] = NAME(fma)(w, NAME(load_some)(x, r * in + i, in - i, FLOAT32), sums[r][o][part]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) out[r * stride + o] = NAME(add_lanes)(sums[r][o]);
}

/* Multiply all rows of x by outputs begin..end of one matrix whose input features are adjacent. */
INLINE void NAME(dot_rows)(const struct product *p, float *out, const float *x, int64_t at, int64_t begin, int64_t end,
                           enum kind kind) {
#define TILE(rows, outputs)                                                                                                    \
    NAME(dot_tile)(out + row * p->out_features + o, x + row * p->in, p->weight, at + o * p->w_out_stride, p->w_out_stride, p->in,  \
                   p->out_features, rows, outputs, kind)
    for (int64_t o = begin; o < end;) {
        int64_t outputs = end - o >= DOT_OUTPUTS ? DOT_OUTPUTS : 1, row = 0;
        for (; row + DOT_ROWS <= p->rows; row += DOT_ROWS)
            if (outputs == 1) TILE(DOT_ROWS, 1);
            else TILE(DOT_ROWS, DOT_OUTPUTS);
        for (; row < p->rows; row++)
            if (outputs == 1) TILE(1, 1);
            else TILE(1, DOT_OUTPUTS);
        o += outputs;
    }
#undef TILE
}

/* Compute the items begin..end of a product; an item is PANEL outputs of one element of the batch. */
INLINE void NAME(multiply_items)(const struct product *p, float *scratch, int64_t begin, int64_t end, enum kind kind) {
    int64_t panels = (p->out_features + PANEL - 1) / PANEL;
    for (int64_t item = begin; item < end; item++) {
        int64_t each = item / panels, first = item % panels * PANEL;
        int64_t columns = p->out_features - first < PANEL ? p->out_features - first : PANEL;
        float *out = p->out + each * p->rows * p->out_features;
        const float *x = p->x + each * p->rows * p->in;
        int64_t at = each * p->w_batch_stride;
        if (p->w_in_stride == 1) {
            NAME(dot_rows)(p, out, x, at, first, first + columns, kind);
        } else if (columns == PANEL) {
            const char *panel = (const char *)p->weight + (at + first) * (kind == FLOAT32 ? 4 : 2);
            NAME(panel_rows)(out + first, x, panel, p->w_in_stride, NULL, p->rows, p->in, p->out_features, columns, kind);
        } else {
            for (int64_t k = 0; k < p->in; k++)
                for (int w = 0; w < PANEL; w += VEC)
                    *(vec *)(scratch + k * PANEL + w) =
                        NAME(load_some)(p->weight, at + k * p->w_in_stride + first + w, columns - w, kind);
            NAME(panel_rows)(out + first, x, scratch, PANEL, NULL, p->rows, p->in, p->out_features, columns, FLOAT32);
        }
    }
}

static void NAME(multiply)(const struct product *p, float *scratch, int64_t begin, int64_t end) {
    if (p->kind == FLOAT32) NAME(multiply_items)(p, scratch, begin, end, FLOAT32);
    else if (p->kind == BFLOAT16) NAME(multiply_items)(p, scratch, begin, end, BFLOAT16);
    else NAME(multiply_items)(p, scratch, begin, end, FLOAT16);
}

#undef vec
#undef int_vec
#undef ushort_vec
#undef byte_vec
#undef float_vec
#undef short_vec
#undef PARTS
#undef SELECT
#undef EVERY
#undef WIDTH
#undef NAME
#undef VEC
#undef ROWS
#undef WIDENED_ROWS
#undef TOGETHER
#undef DOT_ROWS
#undef DOT_OUTPUTS
#undef COLUMNS
#undef FUSED
#undef HALVES
#undef BYTES
#undef LOOK_UP
