/* Weights formed of a base and two low-rank factors. dispatch.py has the reference, and gives the same bits: products are added one
 * after the other, in float32, and native.c says what that asks of the compiler. */

#include "floats.h"

enum { HIGH = 4, WIDE = 16, PANELS = 8, ACROSS = WIDE * PANELS };

typedef float lanes __attribute__((vector_size(4 * WIDE), aligned(4)));

/* The sums of HIGH rows of one panel. Adding waits for the sum before, and HIGH of them hide each other's latency. */
INLINE void sum_panel(float sums[HIGH][ACROSS], const float *const left[HIGH], const float *panel, size_t rank) {
    lanes total[HIGH] = {{0}};
    for (size_t k = 0; k < rank; k++) {
        const lanes right = *(const lanes *)(panel + k * WIDE);
        for (size_t row = 0; row < HIGH; row++) total[row] += right * left[row][k];
    }
    for (size_t row = 0; row < HIGH; row++) memcpy(sums[row], &total[row], sizeof total[row]);
}

INLINE void add(float *restrict weights, const float *restrict sums, size_t count) {
    for (size_t i = 0; i < count; i++) weights[i] += sums[i];
}

/* Write base + left right^T, rounded once, for `rows` of `columns` weights; out may be the base's memory.
 *
 * left has `rank` numbers a row. panels hold the right factor, WIDE of its rows side by side: (panels, rank, WIDE), the last
 * panel padded. */
CLONES PUBLIC void zo2core_form(
    int dtype, const void *base, void *out, const float *left, const float *panels, uint64_t rows, uint64_t columns,
    uint64_t rank) {
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    float sums[HIGH][ACROSS] __attribute__((aligned(64))), weights[ACROSS] __attribute__((aligned(64)));
    for (uint64_t column = 0; column < columns; column += ACROSS) {
        const size_t count = columns - column < ACROSS ? columns - column : ACROSS;
        for (uint64_t row = 0; row < rows; row += HIGH) {
            const size_t high = rows - row < HIGH ? rows - row : HIGH;
            const float *factors[HIGH];
            for (size_t i = 0; i < HIGH; i++) factors[i] = left + (row + (i < high ? i : 0)) * rank;
            for (size_t first = 0; first < count; first += WIDE)
                sum_panel((float(*)[ACROSS])(sums[0] + first), factors, panels + (column + first) * rank, rank);
            for (size_t i = 0; i < high; i++) {
                const uint64_t place = ((row + i) * columns + column) * size;
                load(dtype, weights, (const char *)base + place, count);
                add(weights, sums[i], count);
                round_all(dtype, weights, count);
                store(dtype, (char *)out + place, weights, count);
            }
        }
    }
}
