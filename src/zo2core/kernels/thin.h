/* Products of matrices of which one is thin, for one instruction set: thin.c includes this file for each.
 *
 * FOR_SET(name) is a function's name for the instruction set; MULTIPLY_ADD(x, y, sum) rounds once for each of the lanes. */

#define ADD_PRODUCT(sum, x, y, is_fused) (sum) = (is_fused) ? MULTIPLY_ADD(EACH(x), y, sum) : (sum) + EACH(x) * (y)

/* Values in float32, times a scale. */
INLINE void FOR_SET(widen)(int dtype, float *restrict to, const void *restrict from, size_t count, float scale) {
    const uint16_t *halves = from;
    const float *floats = from;
    if (dtype == BFLOAT16) {
        for (size_t i = 0; i < count; i++) to[i] = number((uint32_t)halves[i] << 16) * scale;
    } else if (dtype == FLOAT16) {
        load_halves(to, halves, count);
        for (size_t i = 0; i < count; i++) to[i] *= scale;
    } else {
        for (size_t i = 0; i < count; i++) to[i] = floats[i] * scale;
    }
}

/* ---- base + scale * (left right) ---- */

/* Add DEEP products to the sums of two rows, which share what is read of the right matrix. */
INLINE void FOR_SET(add_deep)(
    float *restrict first, float *restrict second, const float *restrict left, const float *restrict lower,
    const float *restrict right, size_t stride, size_t count) {
    float upper_factors[DEEP], lower_factors[DEEP];
    memcpy(upper_factors, left, sizeof upper_factors);
    memcpy(lower_factors, lower, sizeof lower_factors);
    for (size_t i = 0; i < count; i++) {
        float upper_sum = first[i], lower_sum = second[i];
#pragma GCC unroll 8
        for (size_t k = 0; k < DEEP; k++) {
            upper_sum = __builtin_fmaf(upper_factors[k], right[k * stride + i], upper_sum);
            lower_sum = __builtin_fmaf(lower_factors[k], right[k * stride + i], lower_sum);
        }
        first[i] = upper_sum;
        second[i] = lower_sum;
    }
}

INLINE void FOR_SET(add_one)(float *restrict sums, float factor, const float *restrict right, size_t count) {
    for (size_t i = 0; i < count; i++) sums[i] = __builtin_fmaf(factor, right[i], sums[i]);
}

INLINE void FOR_SET(add_scaled)(float *restrict values, const float *restrict sums, float scale, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] += sums[i] * scale;
}

/* The sums of a range of columns of two rows. */
INLINE void FOR_SET(sum_two_rows)(
    float sums[HIGH][ACROSS], const float *left, const float *lower, const float *right, size_t stride, size_t rank,
    size_t count) {
    memset(sums, 0, sizeof *sums * HIGH);
    size_t k = 0;
    for (; k + DEEP <= rank; k += DEEP)
        FOR_SET(add_deep)(sums[0], sums[1], left + k, lower + k, right + k * stride, stride, count);
    for (; k < rank; k++) {
        FOR_SET(add_one)(sums[0], left[k], right + k * stride, count);
        FOR_SET(add_one)(sums[1], lower[k], right + k * stride, count);
    }
}

static void FOR_SET(add_thin_product)(
    int dtype, void *out, const void *base, const float *left, const float *right, float scale, uint64_t rows,
    uint64_t columns, uint64_t rank) {
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    float sums[HIGH][ACROSS] __attribute__((aligned(64))), values[ACROSS] __attribute__((aligned(64)));
    for (uint64_t column = 0; column < columns; column += ACROSS) {
        const size_t count = columns - column < ACROSS ? columns - column : ACROSS;
        for (uint64_t row = 0; row < rows; row += HIGH) {
            const size_t high = rows - row < HIGH ? rows - row : HIGH;
            FOR_SET(sum_two_rows)(
                sums, left + row * rank, left + (row + high - 1) * rank, right + column, columns, rank, count);
            for (size_t i = 0; i < high; i++) {
                const uint64_t place = (row + i) * columns + column;
                float *result = sums[i];
                if (base) {
                    load(dtype, values, (const char *)base + place * size, count);
                    FOR_SET(add_scaled)(values, sums[i], scale, count);
                    result = values;
                }
                put(dtype, out, place, result, count);
            }
        }
    }
}

/* ---- Sums along rows: (scale * x) right ---- */

/* Add products to the sums of ROWS rows, each in the order of the inner index. */
INLINE void FOR_SET(add_in_order)(
    lanes *restrict sums, const float *left, const float *right, size_t stride, size_t count, bool is_fused) {
    lanes kept[ROWS];
    memcpy(kept, sums, sizeof kept);
    for (size_t k = 0; k < count; k++) {
        const lanes factors = *(const lanes *)(right + k * stride);
#pragma GCC unroll 8
        for (size_t row = 0; row < ROWS; row++) ADD_PRODUCT(kept[row], left[row * LONG + k], factors, is_fused);
    }
    memcpy(sums, kept, sizeof kept);
}

/* Add products to CHAINS sums of each of FEW rows: a product goes to that of its inner index modulo CHAINS. */
INLINE void FOR_SET(add_in_chains)(
    lanes *restrict sums, const float *left, const float *right, size_t stride, size_t count, bool is_fused) {
    lanes kept[FEW * CHAINS];
    memcpy(kept, sums, sizeof kept);
    for (size_t k = 0; k < count; k += CHAINS) {
#pragma GCC unroll 4
        for (size_t chain = 0; chain < CHAINS; chain++) {
            const lanes factors = *(const lanes *)(right + (k + chain) * stride);
#pragma GCC unroll 4
            for (size_t row = 0; row < FEW; row++)
                ADD_PRODUCT(kept[chain * FEW + row], left[row * LONG + k + chain], factors, is_fused);
        }
    }
    memcpy(sums, kept, sizeof kept);
}

/* One sum after the other, or with a block the sums of so many, one added to the other. */
INLINE void FOR_SET(sum_in_order)(const struct sums *of, bool is_fused) {
    float left[ROWS * LONG] __attribute__((aligned(64)));
    lanes sums[MOST_TILES * ROWS], total[MOST_TILES * ROWS];
    const size_t tiles = of->rank / WIDE, size = of->dtype == FLOAT32 ? 4 : 2;
    for (size_t row = of->first; row < of->last; row += ROWS) {
        const size_t rows = of->last - row < ROWS ? of->last - row : ROWS;
        memset(total, 0, sizeof total);
        for (size_t first = 0; first < of->inner; first += of->block) {
            const size_t last = of->inner - first < of->block ? of->inner : first + of->block;
            memset(sums, 0, sizeof sums);
            for (size_t k = first; k < last; k += LONG) {
                const size_t count = last - k < LONG ? last - k : LONG;
                for (size_t i = 0; i < rows; i++)
                    FOR_SET(widen)(
                        of->dtype, left + i * LONG, (const char *)of->x + ((row + i) * of->inner + k) * size, count,
                        of->scale);
                for (size_t tile = 0; tile < tiles; tile++)
                    FOR_SET(add_in_order)(
                        sums + tile * ROWS, left, of->thin + k * of->rank + tile * WIDE, of->rank, count, is_fused);
            }
            for (size_t i = 0; i < tiles * ROWS; i++) total[i] += sums[i];
        }
        for (size_t tile = 0; tile < tiles; tile++)
            for (size_t i = 0; i < rows; i++)
                memcpy(of->out + (row + i) * of->rank + tile * WIDE, total + tile * ROWS + i, sizeof *total);
    }
}

INLINE void FOR_SET(sum_in_chains)(const struct sums *of, bool is_fused) {
    float left[FEW * LONG] __attribute__((aligned(64)));
    lanes sums[MOST_TILES * CHAINS * FEW];
    const size_t tiles = of->rank / WIDE, size = of->dtype == FLOAT32 ? 4 : 2;
    for (size_t row = of->first; row < of->last; row += FEW) {
        const size_t rows = of->last - row < FEW ? of->last - row : FEW;
        memset(sums, 0, sizeof sums);
        for (size_t k = 0; k < of->inner; k += LONG) {
            const size_t count = of->inner - k < LONG ? of->inner - k : LONG;
            for (size_t i = 0; i < rows; i++)
                FOR_SET(widen)(
                    of->dtype, left + i * LONG, (const char *)of->x + ((row + i) * of->inner + k) * size, count,
                    of->scale);
            for (size_t tile = 0; tile < tiles; tile++)
                FOR_SET(add_in_chains)(
                    sums + tile * CHAINS * FEW, left, of->thin + k * of->rank + tile * WIDE, of->rank, count, is_fused);
        }
        for (size_t tile = 0; tile < tiles; tile++)
            for (size_t i = 0; i < rows; i++) {
                const lanes *chains = sums + tile * CHAINS * FEW + i;
                const lanes sum = (chains[0] + chains[2 * FEW]) + (chains[FEW] + chains[3 * FEW]);
                memcpy(of->out + (row + i) * of->rank + tile * WIDE, &sum, sizeof sum);
            }
    }
}

static void FOR_SET(sum_along_rows)(const struct sums *of, bool is_fused) {
    if (of->block && is_fused)
        FOR_SET(sum_in_order)(of, true);
    else if (of->block)
        FOR_SET(sum_in_order)(of, false);
    else if (is_fused)
        FOR_SET(sum_in_chains)(of, true);
    else
        FOR_SET(sum_in_chains)(of, false);
}

/* ---- Sums along columns: (scale * x)^T left, or its transpose ---- */

/* Add products to the sums of BROAD lanes of columns of x with WIDE columns of left. */
INLINE void FOR_SET(add_columns)(
    lanes *restrict sums, const float *x, const float *left, size_t stride, size_t rows, bool is_fused) {
    lanes kept[WIDE * BROAD];
    memcpy(kept, sums, sizeof kept);
    for (size_t row = 0; row < rows; row++) {
#pragma GCC unroll 2
        for (size_t part = 0; part < BROAD; part++) {
            const lanes values = *(const lanes *)(x + (row * BROAD + part) * WIDE);
#pragma GCC unroll 8
            for (size_t i = 0; i < WIDE; i++)
                ADD_PRODUCT(kept[i * BROAD + part], left[row * stride + i], values, is_fused);
        }
    }
    memcpy(sums, kept, sizeof kept);
}

INLINE void FOR_SET(sum_columns)(const struct sums *of, bool is_fused) {
    enum { ACROSS_TILE = BROAD * WIDE };
    float wide[TALL * ACROSS_TILE] __attribute__((aligned(64)));
    lanes sums[MOST_TILES * WIDE * BROAD], total[MOST_TILES * WIDE * BROAD];
    const size_t tiles = of->rank / WIDE, size = of->dtype == FLOAT32 ? 4 : 2;
    memset(wide, 0, sizeof wide);
    for (size_t column = of->first; column < of->last; column += ACROSS_TILE) {
        const size_t count = of->last - column < ACROSS_TILE ? of->last - column : ACROSS_TILE;
        memset(total, 0, sizeof total);
        for (size_t first = 0; first < of->inner; first += of->block) {
            const size_t last = of->inner - first < of->block ? of->inner : first + of->block;
            memset(sums, 0, sizeof sums);
            for (size_t row = first; row < last; row += TALL) {
                const size_t tall = last - row < TALL ? last - row : TALL;
                for (size_t i = 0; i < tall; i++)
                    FOR_SET(widen)(
                        of->dtype, wide + i * ACROSS_TILE, (const char *)of->x + ((row + i) * of->columns + column) * size,
                        count, of->scale);
                for (size_t tile = 0; tile < tiles; tile++)
                    FOR_SET(add_columns)(
                        sums + tile * WIDE * BROAD, wide, of->thin + row * of->rank + tile * WIDE, of->rank, tall,
                        is_fused);
            }
            for (size_t i = 0; i < of->rank * BROAD; i++) total[i] += sums[i];
        }
        const float *values = (const float *)total;
        for (size_t i = 0; i < of->rank; i++)
            for (size_t j = 0; j < count; j++)
                of->out[of->has_rank_first ? i * of->columns + column + j : (column + j) * of->rank + i] =
                    values[i * ACROSS_TILE + j];
    }
}

static void FOR_SET(sum_along_columns)(const struct sums *of, bool is_fused) {
    if (is_fused)
        FOR_SET(sum_columns)(of, true);
    else
        FOR_SET(sum_columns)(of, false);
}

#undef ADD_PRODUCT
#undef MULTIPLY_ADD
#undef FOR_SET
