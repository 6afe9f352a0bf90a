/* Products of matrices with few columns, in one pass over what they are added to. Every sum is a chain of fused
 * multiplications and additions in the order of the inner index: this is the order in which a library's matrix product
 * adds few products, which thin.py compares before these functions are used. */

#include "floats.h"

/* Other clones than the rest: these need fused multiplication and addition, which AVX2 does not imply. */
#ifdef HAS_CLONES
#define FUSED_CLONES __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define FUSED_CLONES
#endif

enum { DEEP = 8, ACROSS = 512, HIGH = 2 };

/* Whether the processor multiplies and adds in one instruction: in software it would take a hundred times as long. */
PUBLIC int zo2core_has_fused_products(void) {
#ifdef HAS_CLONES
    return __builtin_cpu_supports("avx512f") || (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
#elif defined(__aarch64__) || defined(__FMA__)
    return 1;
#else
    return 0;
#endif
}

/* Add DEEP products to the sums of two rows, which share what is read of the right matrix. */
INLINE void add_deep(
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

INLINE void add_one(float *restrict sums, float factor, const float *restrict right, size_t count) {
    for (size_t i = 0; i < count; i++) sums[i] = __builtin_fmaf(factor, right[i], sums[i]);
}

INLINE void add_scaled(float *restrict values, const float *restrict sums, float scale, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] += sums[i] * scale;
}

/* The sums of a range of columns of two rows. */
INLINE void sum_rows(
    float sums[HIGH][ACROSS], const float *left, const float *lower, const float *right, size_t stride, size_t rank,
    size_t count) {
    memset(sums, 0, sizeof *sums * HIGH);
    size_t k = 0;
    for (; k + DEEP <= rank; k += DEEP)
        add_deep(sums[0], sums[1], left + k, lower + k, right + k * stride, stride, count);
    for (; k < rank; k++) {
        add_one(sums[0], left[k], right + k * stride, count);
        add_one(sums[1], lower[k], right + k * stride, count);
    }
}

/* out = round(base + scale * (left right)), or without a base out = round(left right).
 *
 * out and base have `rows` of `columns` numbers of the dtype, and may be the same memory; left (rows, rank) and right
 * (rank, columns) are float32. */
FUSED_CLONES PUBLIC void zo2core_thin_product(
    int dtype, void *out, const void *base, const float *left, const float *right, float scale, uint64_t rows,
    uint64_t columns, uint64_t rank) {
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    float sums[HIGH][ACROSS] __attribute__((aligned(64))), values[ACROSS] __attribute__((aligned(64)));
    for (uint64_t column = 0; column < columns; column += ACROSS) {
        const size_t count = columns - column < ACROSS ? columns - column : ACROSS;
        for (uint64_t row = 0; row < rows; row += HIGH) {
            const size_t high = rows - row < HIGH ? rows - row : HIGH;
            sum_rows(
                sums, left + row * rank, left + (row + high - 1) * rank, right + column, columns, rank, count);
            for (size_t i = 0; i < high; i++) {
                const uint64_t place = (row + i) * columns + column;
                float *result = sums[i];
                if (base) {
                    load(dtype, values, (const char *)base + place * size, count);
                    add_scaled(values, sums[i], scale, count);
                    result = values;
                }
                put(dtype, out, place, result, count);
            }
        }
    }
}

/* out = scale * values, where values have a dtype of 16 or 32 bits, and out is float32. */
CLONES PUBLIC void zo2core_scale_widened(int dtype, float *restrict out, const void *values, float scale, uint64_t count) {
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    for (uint64_t first = 0; first < count; first += ACROSS) {
        const size_t length = count - first < ACROSS ? count - first : ACROSS;
        load(dtype, out + first, (const char *)values + first * size, length);
        for (size_t i = 0; i < length; i++) out[first + i] *= scale;
    }
}
