/* Weights in the blocks of GGUF files, decoded (multiplied as floats, rounded once). gguf.py is the reference, and gives the
 * same bits, which are those of llama.cpp's gguf package; native.c says what that asks of the compiler. Blocks may lie at any
 * address, as they do in a file. */

#include "floats.h"

enum { CHUNK = 1024 }; /* weights, worked on while they are in the first cache; a multiple of all blocks */

/* By the order of the names in encodings.py. */
enum { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, TQ1_0, TQ2_0, IQ1_S,
       IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S };

INLINE float half_at(const uint8_t *bytes) { return from_half((uint16_t)(bytes[0] | bytes[1] << 8)); }

/* ---- Blocks of 32 weights: the lower halves of 16 bytes, then the higher ones ---- */

#define EACH(i, count) /* whole loops are vectorised, unrolled ones are not */ \
    _Pragma("GCC unroll 1") for (int i = 0; i < (count); i++)

/* d * code or, where `least` is not NULL, d * code + *least. */
INLINE float weight(float d, int code, const float *least) { return least ? d * (float)code + *least : d * (float)code; }

INLINE void nibbles(float *restrict x, const uint8_t *restrict q, float d, int zero, const float *least) {
    EACH(i, 16) x[i] = weight(d, (q[i] & 15) - zero, least);
    EACH(i, 16) x[i + 16] = weight(d, (q[i] >> 4) - zero, least);
}

INLINE void nibbles_and_bits(
    float *restrict x, const uint8_t *restrict q, uint32_t high, float d, int zero, const float *least) {
    EACH(i, 16) x[i] = weight(d, (int)((q[i] & 15) | (high >> i & 1) << 4) - zero, least);
    EACH(i, 16) x[i + 16] = weight(d, (int)(q[i] >> 4 | (high >> (i + 16) & 1) << 4) - zero, least);
}

INLINE uint32_t word_at(const uint8_t *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

INLINE void block_q4_0(float *x, const uint8_t *b) { nibbles(x, b + 2, half_at(b), 8, NULL); }

INLINE void block_q4_1(float *x, const uint8_t *b) {
    const float least = half_at(b + 2);
    nibbles(x, b + 4, half_at(b), 0, &least);
}

INLINE void block_q5_0(float *x, const uint8_t *b) { nibbles_and_bits(x, b + 6, word_at(b + 2), half_at(b), 16, NULL); }

INLINE void block_q5_1(float *x, const uint8_t *b) {
    const float least = half_at(b + 2);
    nibbles_and_bits(x, b + 8, word_at(b + 4), half_at(b), 0, &least);
}

INLINE void block_q8_0(float *restrict x, const uint8_t *restrict b) {
    const float d = half_at(b);
    EACH(i, 32) x[i] = (float)(int8_t)b[i + 2] * d;
}

/* ---- Blocks of 256 weights, whose groups of 16 or 32 have scales in 4, 6 or 8 bits themselves ---- */

INLINE void block_q2_k(float *restrict x, const uint8_t *restrict b) {
    const uint8_t *q = b + 16;
    const float d = half_at(b + 80), least = half_at(b + 82);
    for (int group = 0; group < 16; group++) {
        const float scale = d * (float)(b[group] & 15), m = least * (float)(b[group] >> 4);
        const uint8_t *from = q + group / 8 * 32 + group % 2 * 16;
        const int shift = group % 8 / 2 * 2;
        EACH(i, 16) x[group * 16 + i] = scale * (float)(from[i] >> shift & 3) - m;
    }
}

INLINE void block_q3_k(float *restrict x, const uint8_t *restrict b) {
    const uint8_t *q = b + 32, *scales = b + 96;
    const float d = half_at(b + 108);
    for (int group = 0; group < 16; group++) {
        const int low = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
        const int high = scales[8 + group % 4] >> group / 4 * 2 & 3;
        const float scale = d * (float)((low | high << 4) - 32);
        const uint8_t *from = q + group / 8 * 32 + group % 2 * 16, *mask = b + group % 2 * 16;
        const int shift = group % 8 / 2 * 2, bit = group / 2;
        EACH(i, 16) /* a bit that is set stands for no 4 to subtract */
            x[group * 16 + i] = scale * (float)((from[i] >> shift & 3) - (mask[i] >> bit & 1 ? 0 : 4));
    }
}

/* The scale and the minimum of a group of 32, 6 bits each. */
INLINE void scale_and_least(const uint8_t *s, int group, float d, float least, float *scale, float *m) {
    const int i = group % 4;
    const int code = group < 4 ? s[i] & 63 : (s[i + 8] & 15) | (s[i] >> 2 & 48);
    const int least_code = group < 4 ? s[i + 4] & 63 : s[i + 8] >> 4 | (s[i + 4] >> 2 & 48);
    *scale = d * (float)code;
    *m = least * (float)least_code;
}

INLINE void block_q4_k(float *restrict x, const uint8_t *restrict b) {
    const float d = half_at(b), least = half_at(b + 2);
    for (int group = 0; group < 8; group++) {
        float scale, m;
        scale_and_least(b + 4, group, d, least, &scale, &m);
        const uint8_t *from = b + 16 + group / 2 * 32;
        const int shift = group % 2 * 4;
        EACH(i, 32) x[group * 32 + i] = scale * (float)(from[i] >> shift & 15) - m;
    }
}

INLINE void block_q5_k(float *restrict x, const uint8_t *restrict b) {
    const float d = half_at(b), least = half_at(b + 2);
    for (int group = 0; group < 8; group++) {
        float scale, m;
        scale_and_least(b + 4, group, d, least, &scale, &m);
        const uint8_t *from = b + 48 + group / 2 * 32, *high = b + 16;
        const int shift = group % 2 * 4;
        EACH(i, 32)
            x[group * 32 + i] = scale * (float)((from[i] >> shift & 15) | (high[i] >> group & 1) << 4) - m;
    }
}

INLINE void block_q6_k(float *restrict x, const uint8_t *restrict b) {
    const uint8_t *high = b + 128;
    const float d = half_at(b + 208);
    for (int group = 0; group < 16; group++) {
        const float scale = d * (float)(int8_t)b[192 + group];
        const int quarter = group % 8 / 2, at = group % 2 * 16;
        const uint8_t *low = b + group / 8 * 64 + quarter % 2 * 32 + at, *top = high + group / 8 * 32 + at;
        const int shift = quarter / 2 * 4, top_shift = quarter * 2;
        EACH(i, 16)
            x[group * 16 + i] = scale * (float)(((low[i] >> shift & 15) | (top[i] >> top_shift & 3) << 4) - 32);
    }
}

/* ---- Blocks of codes that stand for uneven values, and of three values ---- */

static const int8_t uneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t twice_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

typedef int8_t values16 __attribute__((vector_size(16)));
typedef uint8_t codes16 __attribute__((vector_size(16)));

/* What 16 codes below 16 stand for. The table fits into one register, which compilers do not find. */
INLINE values16 values_of(codes16 codes, values16 table) {
#if defined(__clang__)
    values16 values;
    for (int i = 0; i < 16; i++) values[i] = table[codes[i]];
    return values;
#else
    return __builtin_shuffle(table, (values16)codes);
#endif
}

INLINE void looked_up(float *restrict x, const uint8_t *restrict q, float d, const int8_t *table) {
    codes16 codes;
    values16 values;
    memcpy(&codes, q, 16);
    memcpy(&values, table, 16);
    const values16 low = values_of(codes & 15, values), high = values_of(codes >> 4, values);
    EACH(i, 16) x[i] = d * (float)low[i];
    EACH(i, 16) x[i + 16] = d * (float)high[i];
}

INLINE void block_iq4_nl(float *x, const uint8_t *b) { looked_up(x, b + 2, half_at(b), uneven); }

INLINE void block_iq4_xs(float *restrict x, const uint8_t *restrict b) {
    const float d = half_at(b);
    const int high = b[2] | b[3] << 8;
    for (int group = 0; group < 8; group++) {
        const int scale = (b[4 + group / 2] >> group % 2 * 4 & 15) | (high >> 2 * group & 3) << 4;
        looked_up(x + 32 * group, b + 8 + 16 * group, d * (float)(scale - 32), uneven);
    }
}

INLINE void block_mxfp4(float *x, const uint8_t *b) {
    const uint32_t exponent = b[0]; /* half of the power of 2, since the values are twice as large */
    looked_up(x, b + 1, number(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23), twice_e2m1);
}

/* Digits to the base of 3 of `count` bytes: the first one of all bytes, then the next. */
INLINE float *digits(float *restrict x, const uint8_t *restrict q, int count, int each, float d) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    for (int n = 0; n < each; n++, x += count)
        for (int i = 0; i < count; i++) x[i] = d * (float)(((uint8_t)(q[i] * powers[n]) * 3 >> 8) - 1);
    return x;
}

INLINE void block_tq1_0(float *x, const uint8_t *b) {
    const float d = half_at(b + 52);
    digits(digits(digits(x, b, 32, 5, d), b + 32, 16, 5, d), b + 48, 4, 4, d);
}

INLINE void block_tq2_0(float *restrict x, const uint8_t *restrict b) {
    const float d = half_at(b + 64);
    for (int group = 0; group < 8; group++)
        EACH(i, 32) x[group * 32 + i] = d * (float)((b[group / 4 * 32 + i] >> group % 4 * 2 & 3) - 1);
}

/* ---- Blocks whose codes are rows of a grid of 4 or 8 values, with a sign for each value or an offset for all ---- */

/* 7 signs, and an eighth one that makes their number even. */
INLINE unsigned even(unsigned signs) { return signs | (unsigned)__builtin_parity(signs) << 7; }

typedef int8_t values8 __attribute__((vector_size(8)));
typedef uint8_t bits8 __attribute__((vector_size(8)));
typedef float floats8 __attribute__((vector_size(32)));

/* 8 values, of one row or of two, negated where their bit is set. */
INLINE void signed_rows(float *restrict x, const int8_t *first, const int8_t *second, unsigned signs, float d) {
    values8 values;
    memcpy(&values, first, 4);
    memcpy((char *)&values + 4, second, 4);
    const uint8_t s = (uint8_t)signs;
    const bits8 bits = (bits8){s, s, s, s, s, s, s, s} & (bits8){1, 2, 4, 8, 16, 32, 64, 128};
    const values8 minus = bits != 0;
    const floats8 weights = d * __builtin_convertvector((values ^ minus) - minus, floats8);
    memcpy(x, &weights, 32);
}

INLINE void signed_row(float *x, const int8_t *row, unsigned signs, float d) { signed_rows(x, row, row + 4, signs, d); }

INLINE void moved_row(float *restrict x, const int8_t *row, float offset, float d) {
    values8 values;
    memcpy(&values, row, 8);
    const floats8 weights = d * (__builtin_convertvector(values, floats8) + offset);
    memcpy(x, &weights, 32);
}

INLINE int short_at(const uint8_t *bytes) { return bytes[0] | bytes[1] << 8; }

INLINE int nibble_at(const uint8_t *bytes, int i) { return bytes[i / 2] >> i % 2 * 4 & 15; }

INLINE void block_iq1_s(float *x, const uint8_t *b, const int8_t *grid) {
    const float d = half_at(b);
    for (int n = 0; n < 32; n++) {
        const int high = short_at(b + 34 + n / 4 * 2), row = b[2 + n] | (high >> n % 4 * 3 & 7) << 8;
        moved_row(x + 8 * n, grid + 8 * row, high & 0x8000 ? -0.125f : 0.125f, d * (float)(2 * (high >> 12 & 7) + 1));
    }
}

INLINE void block_iq1_m(float *x, const uint8_t *b, const int8_t *grid) {
    const uint8_t *s = b + 48; /* scales of 3 bits, four in each 12, and 4 bits of the block's scale above */
    const float d = from_half((uint16_t)(s[1] >> 4 | (s[3] & 0xF0) | (s[5] & 0xF0) << 4 | (s[7] & 0xF0) << 8));
    for (int n = 0; n < 32; n++) {
        const int high = nibble_at(b + 32, n), row = b[n] | (high & 7) << 8;
        const int scale = short_at(s + n / 8 * 2) >> n / 2 % 4 * 3 & 7;
        moved_row(x + 8 * n, grid + 8 * row, high & 8 ? -0.125f : 0.125f, d * (float)(2 * scale + 1));
    }
}

INLINE void block_iq2_xxs(float *x, const uint8_t *b, const int8_t *grid) {
    const float d = half_at(b);
    for (int n = 0; n < 32; n++) {
        const uint8_t *group = b + 2 + n / 4 * 8;
        const uint32_t word = word_at(group + 4);
        const float scale = d * (0.5f + (float)(word >> 28)) * 0.25f;
        signed_row(x + 8 * n, grid + 8 * group[n % 4], even(word >> n % 4 * 7 & 127), scale);
    }
}

INLINE void block_iq2_xs(float *x, const uint8_t *b, const int8_t *grid) {
    const float d = half_at(b);
    for (int n = 0; n < 32; n++) {
        const int code = short_at(b + 2 + 2 * n);
        const float scale = d * (0.5f + (float)nibble_at(b + 66, n / 2)) * 0.25f;
        signed_row(x + 8 * n, grid + 8 * (code & 511), even((unsigned)code >> 9), scale);
    }
}

INLINE void block_iq2_s(float *x, const uint8_t *b, const int8_t *grid) {
    const float d = half_at(b);
    for (int n = 0; n < 32; n++) {
        const int row = b[2 + n] | (b[66 + n / 4] >> n % 4 * 2 & 3) << 8;
        const float scale = d * (0.5f + (float)nibble_at(b + 74, n / 2)) * 0.25f;
        signed_row(x + 8 * n, grid + 8 * row, b[34 + n], scale);
    }
}

INLINE void block_iq3_xxs(float *x, const uint8_t *b, const int8_t *grid) {
    const float d = half_at(b);
    for (int n = 0; n < 32; n++) {
        const uint8_t *rows = b + 2 + 2 * n;
        const uint32_t word = word_at(b + 66 + n / 4 * 4);
        const float scale = d * (0.5f + (float)(word >> 28)) * 0.5f;
        signed_rows(x + 8 * n, grid + 4 * rows[0], grid + 4 * rows[1], even(word >> n % 4 * 7 & 127), scale);
    }
}

INLINE void block_iq3_s(float *x, const uint8_t *b, const int8_t *grid) {
    const float d = half_at(b);
    for (int n = 0; n < 32; n++) {
        const uint8_t *rows = b + 2 + 2 * n;
        const int high = b[66 + n / 4] >> n % 4 * 2;
        const float scale = d * (float)(1 + 2 * nibble_at(b + 106, n / 4));
        const int8_t *first = grid + 4 * (rows[0] | (high & 1) << 8), *second = grid + 4 * (rows[1] | (high & 2) << 7);
        signed_rows(x + 8 * n, first, second, b[74 + n], scale);
    }
}

/* ---- Matrices ---- */

#define BLOCKS(decode, weights, nbytes, ...)                                                                        \
    for (size_t i = 0; i < count; i += (weights)) decode(x + i, from + i / (weights) * (nbytes) __VA_OPT__(, ) __VA_ARGS__); \
    break

CLONES static void decode_blocks(
    int kind, float *restrict x, const uint8_t *restrict from, size_t count, const int8_t *restrict grid) {
    switch (kind) {
        case Q4_0: BLOCKS(block_q4_0, 32, 18);
        case Q4_1: BLOCKS(block_q4_1, 32, 20);
        case Q5_0: BLOCKS(block_q5_0, 32, 22);
        case Q5_1: BLOCKS(block_q5_1, 32, 24);
        case Q8_0: BLOCKS(block_q8_0, 32, 34);
        case Q2_K: BLOCKS(block_q2_k, 256, 84);
        case Q3_K: BLOCKS(block_q3_k, 256, 110);
        case Q4_K: BLOCKS(block_q4_k, 256, 144);
        case Q5_K: BLOCKS(block_q5_k, 256, 176);
        case Q6_K: BLOCKS(block_q6_k, 256, 210);
        case IQ4_NL: BLOCKS(block_iq4_nl, 32, 18);
        case IQ4_XS: BLOCKS(block_iq4_xs, 256, 136);
        case MXFP4: BLOCKS(block_mxfp4, 32, 17);
        case TQ1_0: BLOCKS(block_tq1_0, 256, 54);
        case TQ2_0: BLOCKS(block_tq2_0, 256, 66);
        case IQ1_S: BLOCKS(block_iq1_s, 256, 50, grid);
        case IQ1_M: BLOCKS(block_iq1_m, 256, 56, grid);
        case IQ2_XXS: BLOCKS(block_iq2_xxs, 256, 66, grid);
        case IQ2_XS: BLOCKS(block_iq2_xs, 256, 74, grid);
        case IQ2_S: BLOCKS(block_iq2_s, 256, 82, grid);
        case IQ3_XXS: BLOCKS(block_iq3_xxs, 256, 98, grid);
        case IQ3_S: BLOCKS(block_iq3_s, 256, 110, grid);
        case F16:
            for (size_t i = 0; i < count; i++) x[i] = half_at(from + 2 * i);
            break;
        case BF16:
            for (size_t i = 0; i < count; i++) x[i] = number((uint32_t)(from[2 * i] | from[2 * i + 1] << 8) << 16);
            break;
        default: memcpy(x, from, count * 4);
    }
}

/* The stored rows `first` to `last` of a matrix of `rows`, of which each takes `row_bytes`, written where they belong. `heads`
 * is as in GGUFRows, `grid` has the rows of values that the codes of some types stand for. */
PUBLIC void zo2core_decode_gguf(
    int dtype, void *out, const uint8_t *codes, int kind, const int8_t *grid, uint64_t heads, uint64_t rows, uint64_t columns,
    uint64_t row_bytes, uint64_t first, uint64_t last) {
    float x[CHUNK] __attribute__((aligned(64)));
    const uint64_t head_rows = heads ? rows / heads : rows, half = head_rows / 2;
    for (uint64_t row = first; row < last; row++) {
        const uint64_t in_head = row % head_rows;
        const uint64_t place = heads ? row - in_head + in_head % 2 * half + in_head / 2 : row;
        for (uint64_t column = 0; column < columns; column += CHUNK) {
            const size_t count = columns - column < CHUNK ? columns - column : CHUNK;
            decode_blocks(kind, x, codes + row * row_bytes + row_bytes * column / columns, count, grid);
            put(dtype, out, place * columns + column, x, count);
        }
    }
}
