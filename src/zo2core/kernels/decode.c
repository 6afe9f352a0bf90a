/* Weights of 8 and 4 bits, decoded: multiplied as floats, rounded once. encoding.py is the reference, and gives the same bits;
 * native.c says what that asks of the compiler. Codes and scales may lie at any address, as they do in a checkpoint. */

#include "floats.h"

enum { CHUNK = 1024 }; /* weights, worked on while they are in the first cache */

INLINE float float_at(const void *floats, uint64_t place) {
    float x;
    memcpy(&x, (const char *)floats + 4 * place, sizeof x);
    return x;
}

INLINE float from_e4m3(uint8_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float finite = number(magnitude << 20) * 0x1p120f;
    return number((magnitude == 0x7f ? 0x7fc00000 : bits(finite)) | (uint32_t)(code & 0x80) << 24);
}

INLINE void put(int dtype, void *out, uint64_t place, float *x, size_t count) {
    round_all(dtype, x, count);
    store(dtype, (char *)out + place * (dtype == FLOAT32 ? 4 : 2), x, count);
}

/* A scale a row; `unit` is what a code of 1 at a scale of 1 is worth. */
CLONES PUBLIC void zo2core_decode_int8(
    int dtype, void *out, const int8_t *codes, const void *scales, float unit, uint64_t rows, uint64_t columns) {
    float x[CHUNK] __attribute__((aligned(64)));
    for (uint64_t row = 0; row < rows; row++) {
        const float scale = float_at(scales, row);
        for (uint64_t column = 0; column < columns; column += CHUNK) {
            const size_t count = columns - column < CHUNK ? columns - column : CHUNK;
            const int8_t *from = codes + row * columns + column;
            for (size_t i = 0; i < count; i++) x[i] = (float)from[i] * scale * unit;
            put(dtype, out, row * columns + column, x, count);
        }
    }
}

/* A scale for each block of so many rows and columns, of a matrix whose first row is the `first`th of the whole. */
CLONES PUBLIC void zo2core_decode_float8(
    int dtype, void *out, const uint8_t *codes, const void *scales, uint64_t first, uint64_t rows, uint64_t columns,
    uint64_t block_rows, uint64_t block_columns) {
    float x[CHUNK] __attribute__((aligned(64)));
    const uint64_t across = (columns + block_columns - 1) / block_columns;
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t column = 0; column < columns;) {
            const uint64_t block = column / block_columns;
            const uint64_t end = (block + 1) * block_columns < columns ? (block + 1) * block_columns : columns;
            const size_t count = end - column < CHUNK ? end - column : CHUNK;
            const float scale = float_at(scales, (first + row) / block_rows * across + block);
            const uint8_t *from = codes + row * columns + column;
            for (size_t i = 0; i < count; i++) x[i] = from_e4m3(from[i]) * scale;
            put(dtype, out, row * columns + column, x, count);
            column += count;
        }
}

/* Two codes a byte, the first in its higher bits; a scale for each block of weights, counted from the first one on. */
CLONES PUBLIC void zo2core_decode_nf4(
    int dtype, void *out, const uint8_t *codes, const void *table, const void *scales, uint64_t block, uint64_t count) {
    float x[CHUNK + 2] __attribute__((aligned(64))), pairs[256][2];
    for (size_t byte = 0; byte < 256; byte++)
        pairs[byte][0] = float_at(table, byte >> 4), pairs[byte][1] = float_at(table, byte & 15);
    for (uint64_t done = 0; done < count;) { /* blocks are even, so that a chunk begins with a byte */
        const uint64_t end = (done / block + 1) * block < count ? (done / block + 1) * block : count;
        const size_t length = end - done < CHUNK ? end - done : CHUNK;
        const float scale = float_at(scales, done / block);
        for (size_t i = 0; i < length; i += 2) memcpy(x + i, pairs[codes[(done + i) / 2]], sizeof pairs[0]);
        for (size_t i = 0; i < length; i++) x[i] *= scale;
        put(dtype, out, done, x, length);
        done += length;
    }
}
