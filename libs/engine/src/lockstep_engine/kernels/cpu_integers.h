/* Products of weights and activations that both are 8-bit integers, compiled by cpu.c once for each instruction set: NAME gives each
 * build its own names, VEC, ROWS and TOGETHER are as for cpu_loops.h, LOOPS names what that file has made for the same registers. DOT adds
 * four products of bytes at once; without it, MULTIPLY_PAIRS multiplies 16-bit integers and adds neighbouring products.
 *
 * A sum of integers is exact, so that it has no order. Everything else is computed element by element, rounded where the source says so. */

#define vec LOOPS(vec)
#define int_vec LOOPS(int_vec)
#define byte_vec LOOPS(byte_vec)
#define halves NAME(halves)
typedef uint16_t halves __attribute__((vector_size(4 * VEC)));

#define WIDTH (PANEL / VEC)
#define EVERY(x) ((int_vec){} + (x))
#ifdef DOT
#define X_WORDS 1 /* four activations: bytes of one word */
#else
#define X_WORDS 2 /* the first and the third as halves of a word, the second and the fourth as those of another one */
#endif

/* Add the products of a word's four codes, each plus 128, with four activations. */
INLINE int_vec NAME(add_products)(int_vec sums, int_vec codes, const int32_t *x) {
#ifdef DOT
    DOT(sums, codes, EVERY(x[0]));
    return sums;
#else
    int_vec even = (int_vec)((halves)codes & 0xff), odd = (int_vec)((halves)codes >> 8);
#ifdef MULTIPLY_PAIRS
    return sums + MULTIPLY_PAIRS(even, EVERY(x[0])) + MULTIPLY_PAIRS(odd, EVERY(x[1]));
#else
    sums += (even & 0xffff) * (int32_t)(int16_t)x[0] + (even >> 16) * (x[0] >> 16);
    return sums + (odd & 0xffff) * (int32_t)(int16_t)x[1] + (odd >> 16) * (x[1] >> 16);
#endif
#endif
}

/* Round `length` activations to the nearest integers (of two equally near ones the even one) of 127 over the largest magnitude, and put
 * each four of them `stride` words after those before. `scale` becomes that magnitude over 127, `start` -128 times the integers' sum. A
 * row in which all are smaller than LEAST is 0; one with a number that is not finite has the scale NaN. */
INLINE void NAME(quantize_row)(int32_t *to, int64_t stride, float *scale, int32_t *start, const float *x, int64_t length) {
    int_vec largest = {}, total = {};
    for (int64_t i = 0; i < length; i += VEC) { /* of numbers without signs, their bits have the order */
        int_vec size = (int_vec)LOOPS(load_some)(x, i, length - i, FLOAT32) & 0x7fffffff, is_larger = size > largest;
        largest = (size & is_larger) | (largest & ~is_larger);
    }
    int32_t bits = 0, sum = 0;
    for (int lane = 0; lane < VEC; lane++) bits = largest[lane] > bits ? largest[lane] : bits;
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    *start = 0;
    if (!(peak >= LEAST && peak < INFINITY)) {
        *scale = peak < LEAST ? 0.0f : NAN;
        for (int64_t k = 0; k < length / BYTES_IN_WORD; k++) memset(to + k * stride, 0, X_WORDS * sizeof *to);
        return;
    }
    *scale = peak / 127.0f;
    float inverse = 127.0f / peak;
    for (int64_t i = 0; i < length; i += VEC) {
        vec rounded = LOOPS(load_some)(x, i, length - i, FLOAT32) * inverse + 0x1.8p23f; /* of which a unit is the last place */
        int_vec codes = (int_vec)rounded - 0x4b400000;
        int64_t count = (length - i < VEC ? length - i : VEC) / BYTES_IN_WORD;
        total += codes;
#ifdef DOT
        byte_vec bytes_of = __builtin_convertvector(codes, byte_vec);
        int32_t words[VEC / BYTES_IN_WORD];
        memcpy(words, &bytes_of, sizeof words);
        for (int64_t k = 0; k < count; k++) to[(i / BYTES_IN_WORD + k) * stride] = words[k];
#else
        for (int64_t k = 0; k < count; k++)
            for (int64_t n = 0; n < X_WORDS; n++)
                to[(i / BYTES_IN_WORD + k) * stride + n] = (codes[4 * k + n] & 0xffff) | (int32_t)((uint32_t)codes[4 * k + n + 2] << 16);
#endif
    }
    for (int lane = 0; lane < VEC; lane++) sum += total[lane];
    *start = -128 * sum;
}

/* The words that a part's activations take in a tile of so many rows: a scale and a start for each row, then the rows' words side by
 * side. A tile takes less room than its floats. */
INLINE int64_t NAME(part_words)(const struct linear *l, int64_t rows) {
    return rows * (2 + l->in / l->parts / BYTES_IN_WORD * X_WORDS);
}

/* Quantize the tiles begin..end of x for a product, each part of a row for itself. */
static void NAME(quantize)(const struct linear *l, int64_t begin, int64_t end) {
    int64_t length = l->in / l->parts;
    for (int64_t first = begin * ROWS; first < end * ROWS && first < l->rows; first += ROWS) {
        int64_t rows = l->rows - first < ROWS ? l->rows - first : ROWS;
        for (int64_t part = 0; part < l->parts; part++) {
            float *scales = l->tiles + first * l->in + part * NAME(part_words)(l, rows);
            int32_t *starts = (int32_t *)scales + rows, *words = starts + rows;
            for (int64_t r = 0; r < rows; r++)
                NAME(quantize_row)(words + r * X_WORDS, rows * X_WORDS, scales + r, starts + r,
                                   l->x + (first + r) * l->in + part * length, length);
        }
    }
}

/* One part of `rows` rows times `panels` panels, the first of which is `number`. A result is the sum as a float, times the product of both
 * scales; then the bias if `ends`. Sums stay below 2^31 in magnitude: they begin as what 128 too much in each code will add. */
INLINE void NAME(integer_tile)(float *out, const struct linear *l, const float *x_scales, const char *panel, int64_t number, int64_t stride,
                               int rows, int panels, int ends) {
    const int32_t *starts = (const int32_t *)x_scales + rows, *x = starts + rows;
    int_vec sums[ROWS][TOGETHER(1)][WIDTH];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int w = 0; w < WIDTH; w++) sums[r][p][w] = EVERY(starts[r]);
    for (int64_t word = 0; word < l->in / l->parts / BYTES_IN_WORD; word++)
        for (int p = 0; p < panels; p++)
            for (int w = 0; w < WIDTH; w++) {
                int_vec codes = *(const int_vec *)(panel + p * PANEL * l->in + (word * PANEL + w * VEC) * BYTES_IN_WORD);
                for (int r = 0; r < rows; r++) sums[r][p][w] = NAME(add_products)(sums[r][p][w], codes, x + (word * rows + r) * X_WORDS);
            }
    for (int p = 0; p < panels; p++) {
        int64_t first = (number + p) * PANEL, left = l->out_features - first, count = left < PANEL ? left : PANEL;
        float added[PANEL] = {};
        if (ends && l->bias) memcpy(added, l->bias + first, sizeof(float) * (size_t)count);
        for (int r = 0; r < rows; r++) {
            float result[PANEL];
            for (int w = 0; w < WIDTH; w++) {
                vec scales = *(const vec *)(l->scales + first + w * VEC) * x_scales[r];
                vec each = __builtin_convertvector(sums[r][p][w], vec) * scales;
                *(vec *)(result + w * VEC) = ends ? each + *(const vec *)(added + w * VEC) : each;
            }
            memcpy(out + r * stride + p * PANEL, result, sizeof(float) * (size_t)count);
        }
    }
}

/* Multiply one part of all rows by `panels` panels, the first of which is `number`. */
INLINE void NAME(integer_rows)(const struct linear *l, float *results, int64_t stride, int64_t number, int64_t part, int64_t panels) {
    const char *panel = (const char *)l->panels + (number * l->in + part * (l->in / l->parts)) * PANEL;
    for (int64_t first = 0; first < l->rows; first += ROWS) {
        int64_t rows = l->rows - first < ROWS ? l->rows - first : ROWS;
        const float *tile = l->tiles + first * l->in + part * NAME(part_words)(l, rows);
        float *out = results + first * stride;
#define TILE(rows, panels) NAME(integer_tile)(out, l, tile, panel, number, stride, rows, panels, l->parts == 1)
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

/* Compute the panels begin..end of a product whose activations are quantized. */
static void NAME(multiply_integers)(const struct linear *l, float *sums, int64_t begin, int64_t end) {
    int64_t group = l->rows < ROWS ? TOGETHER(l->rows) : 1, together, stride;
    for (int64_t p = begin; p < end; p += together) {
        together = end - p >= group ? group : 1;
        for (int64_t part = 0; part < l->parts; part++) {
            float *out = LOOPS(plane)(l, sums, part, p, together * PANEL, &stride);
            NAME(integer_rows)(l, out, stride, p, part, together);
        }
        if (l->parts > 1) LOOPS(add_parts)(l, sums, p, together);
    }
}

#undef vec
#undef int_vec
#undef byte_vec
#undef halves
#undef WIDTH
#undef EVERY
#undef X_WORDS
#undef NAME
#undef LOOPS
#undef VEC
#undef ROWS
#undef TOGETHER
#undef DOT
#undef MULTIPLY_PAIRS
