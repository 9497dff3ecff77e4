/* The kernels' loops, compiled by cpu.c once for each instruction set: NAME gives each build its own names. The compiler
 * splits wide vectors before it would clone functions for a target, hence the inclusion. */

INLINE float NAME(add_lanes)(lanes x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

/* e^x for x <= 0, 0 below -87: 2^n * e^r with |r| <= ln(2)/2, the polynomial of Cephes' expf (relative error below 2e-7). */
INLINE lanes NAME(exp_lanes)(lanes x) {
    int_lanes below = x < -87.0f;
    x = SELECT(below, (lanes){}, x);
    int_lanes n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, int_lanes);
    lanes whole = __builtin_convertvector(n, lanes);
    lanes r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    lanes result = p * (lanes)((n + 127) << 23);
    return SELECT(below, (lanes){}, result);
}

/* Where a query's keys and values are: a table of ids for each version of a block, and which blocks are seen in which. */
struct NAME(view) {
    const float *keys, *values;
    const void *cold_keys, *cold_values;
    const float *key_scales, *value_scales;
    const float *wide_keys, *wide_values; /* cold blocks from cold_begin on, widened; or null */
    const int32_t *hot, *cold;
    int64_t first_cold, cold_begin, cold_end;
};

/* sum of query[d] * key[d], each key[d] a vector of one component of 16 keys; four sums, then together. */
INLINE lanes NAME(score_hot)(const float *query, const float *keys, int dim) {
    const lanes *key = (const lanes *)keys;
    lanes sums[4] = {};
    for (int d = 0; d + 4 <= dim; d += 4)
        for (int i = 0; i < 4; i++) sums[i] += query[d + i] * key[d + i];
    for (int d = dim & ~3; d < dim; d++) sums[0] += query[d] * key[d];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

INLINE lanes NAME(score_cold)(const float *query, const uint8_t *keys, int dim) {
    lanes sums[4] = {};
    for (int d = 0; d + 4 <= dim; d += 4)
        for (int i = 0; i < 4; i++) sums[i] += query[d + i] * NAME(widen)(keys + (d + i) * LANES);
    for (int d = dim & ~3; d < dim; d++) sums[0] += query[d] * NAME(widen)(keys + d * LANES);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* scores[LANES * n ...] = the query's scores with the keys of blocks `begin` to before `end`, -inf where hidden.
 * Keys lie transposed in their block, [dim][BLOCK]: a product gives the scores of 16 keys at once. Returns the peak. */
INLINE float NAME(score_blocks)(float *scores, const float *query, const struct NAME(view) *at, int64_t begin, int64_t end,
                                int64_t first, int64_t last, int dim, float scale, float soft_cap) {
    const int_lanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lanes peaks = (lanes){} - INFINITY;
    for (int64_t block = begin; block < end; block++, scores += LANES) {
        lanes score;
        if (block < at->cold_begin || block >= at->cold_end) {
            score = NAME(score_hot)(query, at->keys + (int64_t)at->hot[block] * BLOCK * dim, dim) * scale;
        } else {
            int64_t id = at->cold[block] - at->first_cold;
            if (!at->key_scales)
                score = NAME(score_hot)(query, (const float *)at->cold_keys + id * BLOCK * dim, dim) * scale;
            else
                score = (at->wide_keys
                             ? NAME(score_hot)(query, at->wide_keys + (block - at->cold_begin) * BLOCK * dim, dim)
                             : NAME(score_cold)(query, (const uint8_t *)at->cold_keys + id * BLOCK * dim, dim)) *
                        *(const lanes *)(at->key_scales + id * BLOCK) * (scale * E4M3_UNIT);
        }
        if (soft_cap > 0)
            for (int i = 0; i < LANES; i++) score[i] = soft_cap * tanhf(score[i] / soft_cap);
        int_lanes position = lane + (int32_t)(block * BLOCK);
        int_lanes hidden = (position < (int32_t)first) | (position > (int32_t)last);
        score = SELECT(hidden, (lanes){} - INFINITY, score);
        peaks = SELECT(score > peaks, score, peaks);
        *(lanes *)scores = score;
    }
    float peak = peaks[0];
    for (int i = 1; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
    return peak;
}

/* out = sum of weights times values, `chunks` vectors wide; even and odd keys are summed apart, then together. */
INLINE void NAME(weigh_blocks)(float *out, const float *weights, const struct NAME(view) *at, int64_t begin, int64_t end,
                               int chunks, float factor) {
    int dim = chunks * LANES;
    lanes even[16] = {}, odd[16] = {};
    for (int64_t block = begin; block < end; block++, weights += LANES) {
        int is_cold = block >= at->cold_begin && block < at->cold_end;
        int64_t id = is_cold ? at->cold[block] - at->first_cold : at->hot[block];
        lanes weight = *(const lanes *)weights;
        if (is_cold && at->value_scales) {
            weight = weight * *(const lanes *)(at->value_scales + id * BLOCK) * E4M3_UNIT;
            if (!at->wide_values) {
                const uint8_t *value = (const uint8_t *)at->cold_values + id * BLOCK * dim;
                for (int i = 0; i < BLOCK; i += 2, value += 2 * dim)
                    for (int c = 0; c < chunks; c++) {
                        even[c] += weight[i] * NAME(widen)(value + c * LANES);
                        odd[c] += weight[i + 1] * NAME(widen)(value + dim + c * LANES);
                    }
                continue;
            }
        }
        const float *values = !is_cold            ? at->values + id * BLOCK * dim
                              : at->value_scales ? at->wide_values + (block - at->cold_begin) * BLOCK * dim
                                                 : (const float *)at->cold_values + id * BLOCK * dim;
        const lanes *value = (const lanes *)values;
        for (int i = 0; i < BLOCK; i += 2, value += 2 * chunks)
            for (int c = 0; c < chunks; c++) {
                even[c] += weight[i] * value[c];
                odd[c] += weight[i + 1] * value[chunks + c];
            }
    }
    for (int c = 0; c < chunks; c++) ((lanes *)out)[c] = (even[c] + odd[c]) * factor;
}

/* One query against the keys at positions first..last: scores, softmax, weighted sum of values. dim is a multiple of LANES.
 * Blocks have finite contents beyond the sequence's end, so that a weight of 0 hides them. */
INLINE void NAME(attend_row)(float *out, const float *query, const struct NAME(view) *at, int64_t first, int64_t last, int dim,
                             float scale, float soft_cap, float *scores) {
    int64_t begin = first / BLOCK, end = last / BLOCK + 1;
    float peak = NAME(score_blocks)(scores, query, at, begin, end, first, last, dim, scale, soft_cap);
    lanes total = {};
    for (int64_t j = 0; j < (end - begin) * LANES; j += LANES) {
        lanes e = NAME(exp_lanes)(*(const lanes *)(scores + j) - peak);
        *(lanes *)(scores + j) = e;
        total += e;
    }
    float factor = 1.0f / NAME(add_lanes)(total);
    switch (dim / LANES) { /* a constant width lets the compiler keep the sums in registers */
    case 1: NAME(weigh_blocks)(out, scores, at, begin, end, 1, factor); break;
    case 2: NAME(weigh_blocks)(out, scores, at, begin, end, 2, factor); break;
    case 4: NAME(weigh_blocks)(out, scores, at, begin, end, 4, factor); break;
    case 5: NAME(weigh_blocks)(out, scores, at, begin, end, 5, factor); break;
    case 6: NAME(weigh_blocks)(out, scores, at, begin, end, 6, factor); break;
    case 8: NAME(weigh_blocks)(out, scores, at, begin, end, 8, factor); break;
    default: NAME(weigh_blocks)(out, scores, at, begin, end, dim / LANES, factor);
    }
}

/* Tokens of one sequence from `token` on that go through attention together. */
INLINE int64_t NAME(run)(const struct attention *a, int64_t token) {
    int64_t end = token + 1;
    while (end < a->tokens && end < token + RUN && a->owners[end] == a->owners[token]) end++;
    return end;
}

/* All queries of tokens `token` to before `end`, of one sequence, that use one kv head. */
INLINE void NAME(attend_run)(const struct attention *a, const struct layer *l, float *scratch, int64_t token, int64_t end,
                             int64_t kv_head) {
    int64_t group = a->heads / l->kv_heads, size = BLOCK * l->dim, row = a->owners[token] * a->width;
    size_t cold_width = l->key_scales ? 1 : sizeof(float);
    struct NAME(view) at = {
        .keys = l->keys + kv_head * l->blocks * size,
        .values = l->values + kv_head * l->blocks * size,
        .cold_keys = (const char *)l->cold_keys + kv_head * l->cold_blocks * size * cold_width,
        .cold_values = (const char *)l->cold_values + kv_head * l->cold_blocks * size * cold_width,
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
    if (l->key_scales && a->hot_window >= 0 && end - token >= WIDEN) {
        float *wide = scratch + a->width * BLOCK + 2 * LANES;
        at.wide_keys = wide;
        at.wide_values = wide + a->width * size;
        for (int64_t block = at.cold_begin; block < a->positions[end - 1] / BLOCK - a->hot_window; block++, wide += size) {
            int64_t cold = (at.cold[block] - a->first_cold) * size;
            for (int64_t i = 0; i < size; i += LANES) {
                *(lanes *)(wide + i) = NAME(widen)((const uint8_t *)at.cold_keys + cold + i);
                *(lanes *)(wide + a->width * size + i) = NAME(widen)((const uint8_t *)at.cold_values + cold + i);
            }
        }
    }
    for (; token < end; token++) {
        int64_t last = a->positions[token];
        int64_t first = a->window && last >= a->window ? last - a->window + 1 : 0;
        at.cold_end = a->hot_window < 0 ? 0 : last / BLOCK - a->hot_window;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
            NAME(attend_row)(a->out + (token * a->heads + head) * l->dim,
                             a->q + head * a->q_head_stride + token * a->q_token_stride, &at, first, last, (int)l->dim,
                             a->scale, a->soft_cap, scratch);
    }
}

/* Every `step`th pair of a run and a kv head, from `begin` on. */
static void NAME(attend)(const struct attention *a, const struct layer *l, float *scratch, int64_t begin, int64_t step) {
    int64_t item = 0;
    for (int64_t token = 0; token < a->tokens;) {
        int64_t end = NAME(run)(a, token);
        for (int64_t kv_head = 0; kv_head < l->kv_heads; kv_head++)
            if (item++ % step == begin) NAME(attend_run)(a, l, scratch, token, end, kv_head);
        token = end;
    }
}

/* Codes in e4m3 of |x| <= 448, rounded to the nearest, of two equally near to the even one. */
INLINE int_lanes NAME(narrow)(lanes x) {
    int_lanes sign = (int_lanes)x >> 24 & 128, bits = (int_lanes)x & 0x7fffffff;
    int_lanes normal = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    int_lanes small = (int_lanes)((lanes)bits + 0x1p14f) - 0x46800000; /* a sum whose last bit is worth 2^-9 */
    return sign | (int_lanes)SELECT(bits < 0x3c800000, (lanes)small, (lanes)(normal - 960));
}

/* The greatest magnitude that a token's scale takes for it. */
#define LEAST_PEAK 1e-30f

/* Keys of a block [dim][BLOCK] to bytes, and a scale for each of its tokens, which are the lanes. */
INLINE void NAME(compress_keys)(uint8_t *codes, float *scales, const float *keys, int dim) {
    const lanes *key = (const lanes *)keys;
    lanes peaks = (lanes){} + LEAST_PEAK;
    for (int d = 0; d < dim; d++) {
        lanes size = (lanes)((int_lanes)key[d] & 0x7fffffff);
        peaks = SELECT(size > peaks, size, peaks);
    }
    lanes factor = 448.0f / peaks;
    *(lanes *)scales = peaks * (1.0f / 448.0f);
    for (int d = 0; d < dim; d++) {
        lanes x = key[d] * factor;
        x = SELECT(x > 448.0f, (lanes){} + 448.0f, x);
        x = SELECT(x < -448.0f, (lanes){} - 448.0f, x);
        *(byte_lanes *)(codes + d * LANES) = __builtin_convertvector(NAME(narrow)(x), byte_lanes);
    }
}

/* One token's values [dim] to bytes and their scale. dim is a multiple of LANES. */
INLINE void NAME(compress_values)(uint8_t *codes, float *scale, const float *values, int dim) {
    const lanes *value = (const lanes *)values;
    lanes peaks = (lanes){} + LEAST_PEAK;
    for (int c = 0; c < dim / LANES; c++) {
        lanes size = (lanes)((int_lanes)value[c] & 0x7fffffff);
        peaks = SELECT(size > peaks, size, peaks);
    }
    float peak = peaks[0];
    for (int i = 1; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
    lanes factor = (lanes){} + 448.0f / peak;
    *scale = peak * (1.0f / 448.0f);
    for (int c = 0; c < dim / LANES; c++) {
        lanes x = value[c] * factor;
        x = SELECT(x > 448.0f, (lanes){} + 448.0f, x);
        x = SELECT(x < -448.0f, (lanes){} - 448.0f, x);
        *(byte_lanes *)(codes + c * LANES) = __builtin_convertvector(NAME(narrow)(x), byte_lanes);
    }
}

/* Pairs of a move and a kv head, from `begin` to before `end`. */
static void NAME(compress)(const struct layer *l, const int32_t *moves, int64_t begin, int64_t end) {
    int64_t size = BLOCK * l->dim;
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item % l->kv_heads;
        int64_t hot = head * l->blocks + moves[item / l->kv_heads * 2];
        int64_t cold = head * l->cold_blocks + moves[item / l->kv_heads * 2 + 1];
        if (!l->key_scales) {
            memcpy((float *)l->cold_keys + cold * size, l->keys + hot * size, sizeof(float) * (size_t)size);
            memcpy((float *)l->cold_values + cold * size, l->values + hot * size, sizeof(float) * (size_t)size);
            continue;
        }
        NAME(compress_keys)((uint8_t *)l->cold_keys + cold * size, l->key_scales + cold * BLOCK, l->keys + hot * size, (int)l->dim);
        for (int i = 0; i < BLOCK; i++)
            NAME(compress_values)((uint8_t *)l->cold_values + cold * size + i * l->dim, l->value_scales + cold * BLOCK + i,
                                  l->values + hot * size + i * l->dim, (int)l->dim);
    }
}

/* out = x / sqrt(mean(x^2) + eps) * weight, for each of `rows` rows of `width`. */
static void NAME(rms_norm)(float *out, const float *x, const float *weight, int64_t rows, int64_t width, float eps) {
    int64_t whole = width / LANES * LANES;
    for (int64_t row = 0; row < rows; row++, out += width, x += width) {
        lanes sum = {};
        for (int64_t i = 0; i < whole; i += LANES) {
            lanes v = *(const lanes *)(x + i);
            sum += v * v;
        }
        float squares = NAME(add_lanes)(sum);
        for (int64_t i = whole; i < width; i++) squares += x[i] * x[i];
        float scale = 1.0f / sqrtf(squares / (float)width + eps);
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

/* out [rows, inner] = silu(gate) * up, of gate_up [rows, 2 * inner]; silu(x) = x / (1 + e^-x). */
static void NAME(silu_mul)(float *out, const float *gate_up, int64_t rows, int64_t inner) {
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * inner, *up = gate + inner;
        float *to = out + row * inner;
        for (int64_t i = 0; i < inner; i += LANES) {
            lanes g = {}, u = {};
            int64_t count = inner - i < LANES ? inner - i : LANES;
            memcpy(&g, gate + i, sizeof(float) * (size_t)count);
            memcpy(&u, up + i, sizeof(float) * (size_t)count);
            int_lanes negative = g < 0;
            lanes e = NAME(exp_lanes)(SELECT(negative, g, -g));
            lanes y = g * u * SELECT(negative, e, (lanes){} + 1.0f) / (1.0f + e);
            memcpy(to + i, &y, sizeof(float) * (size_t)count);
        }
    }
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
        const float *cosine = r->cosine + token * r->dim, *sine = r->sine + token * r->dim;
        for (int64_t head = 0; head < r->heads + r->kv_heads; head++) {
            float *x = row + head * r->dim;
            const float *norm = head < r->heads ? r->q_norm : r->k_norm;
            if (norm) NAME(rms_norm)(x, x, norm, 1, r->dim, r->eps);
            NAME(rotate)(x, cosine, sine, r->dim / 2);
        }
    }
}

/* `rows` rows of x times one panel of PANEL output features: every element is one running sum over the input features in
 * order, so it does not matter how many rows go together. */
INLINE void NAME(linear_tile)(float *out, const float *x, const float *panel, const float *bias, int64_t in, int64_t stride,
                              int64_t columns, int rows) {
    lanes sums[ROWS][2] = {};
    for (int64_t k = 0; k < in; k++, panel += PANEL) {
        lanes low = *(const lanes *)panel, high = *(const lanes *)(panel + LANES);
        for (int r = 0; r < rows; r++) {
            sums[r][0] += low * x[r * in + k];
            sums[r][1] += high * x[r * in + k];
        }
    }
    lanes added[2] = {};
    if (bias) memcpy(added, bias, sizeof(float) * (size_t)columns);
    for (int r = 0; r < rows; r++) {
        lanes result[2] = {sums[r][0] + added[0], sums[r][1] + added[1]};
        memcpy(out + r * stride, result, sizeof(float) * (size_t)columns);
    }
}

/* The panels begin..end of a product. */
static void NAME(linear)(const struct linear *l, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
        const float *panel = l->panels + p * PANEL * l->in;
        const float *bias = l->bias ? l->bias + p * PANEL : NULL;
        int64_t columns = l->out_features - p * PANEL < PANEL ? l->out_features - p * PANEL : PANEL;
        for (int64_t row = 0; row < l->rows;) {
            const float *x = l->x + row * l->in;
            float *out = l->out + row * l->out_features + p * PANEL;
            int64_t left = l->rows - row;
            /* constant numbers of rows let the compiler keep the sums in registers */
            if (left >= ROWS) NAME(linear_tile)(out, x, panel, bias, l->in, l->out_features, columns, ROWS), row += ROWS;
            else if (left >= 8) NAME(linear_tile)(out, x, panel, bias, l->in, l->out_features, columns, 8), row += 8;
            else if (left >= 4) NAME(linear_tile)(out, x, panel, bias, l->in, l->out_features, columns, 4), row += 4;
            else if (left >= 2) NAME(linear_tile)(out, x, panel, bias, l->in, l->out_features, columns, 2), row += 2;
            else NAME(linear_tile)(out, x, panel, bias, l->in, l->out_features, columns, 1), row += 1;
        }
    }
}
