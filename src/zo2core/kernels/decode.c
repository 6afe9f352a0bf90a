/* Weights of 8 bits and fewer, decoded (multiplied as floats, rounded once), and float weights encoded for 8-bit transfer.
 * encoding.py and low_bit.py are the reference, and give the same bits; native.c says what that asks of the compiler. Codes
 * and scales may lie at any address, as they do in a checkpoint. */

#include "floats.h"

enum { CHUNK = 1024 }; /* weights, worked on while they are in the first cache */

INLINE float float_at(const void *floats, uint64_t place) {
    float x;
    memcpy(&x, (const char *)floats + 4 * place, sizeof x);
    return x;
}

/* Round to the nearest e4m3 number, ties to even. x is not above the largest one. */
INLINE uint8_t to_e4m3(float x) {
    const uint32_t u = bits(x), magnitude = u & 0x7fffffff;
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t small = bits(number(magnitude) + 0x1p14f) & 0xff; /* floats from 2^14 on are 2^-9 apart */
    const uint32_t near = magnitude < 0x3c800000 ? small : normal;   /* 2^-6 */
    return (uint8_t)((magnitude > 0x7f800000 ? 0x7f : near) | (u >> 24 & 0x80));
}

INLINE float from_e4m3(uint8_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float finite = number(magnitude << 20) * 0x1p120f;
    return number((magnitude == 0x7f ? 0x7fc00000 : bits(finite)) | (uint32_t)(code & 0x80) << 24);
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

/* Look up the values of 4-bit codes, two codes a byte, the first in the higher bits. The table fits into one register or two,
 * which compilers do not find. Returns the number of values looked up. */

#ifdef X86
__attribute__((target("avx512f,avx512bw"))) static size_t look_up_avx512(
    float *x, const uint8_t *codes, const float *table, size_t count) {
    const __m512 numbers = _mm512_loadu_ps(table);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(codes + i / 2)), low = _mm_set1_epi8(15);
        const __m128i first = _mm_and_si128(_mm_srli_epi16(bytes, 4), low), second = _mm_and_si128(bytes, low);
        const __m512i left = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(first, second));
        const __m512i right = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(first, second));
        _mm512_storeu_ps(x + i, _mm512_permutexvar_ps(left, numbers));
        _mm512_storeu_ps(x + i + 16, _mm512_permutexvar_ps(right, numbers));
    }
    return i;
}

/* The 16 codes of 8 bytes, a byte each. */
__attribute__((target("avx2"))) INLINE __m128i codes_avx2(const uint8_t *codes) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)codes), low = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), _mm_and_si128(bytes, low));
}

__attribute__((target("avx2"))) static size_t look_up_avx2(float *x, const uint8_t *codes, const float *table, size_t count) {
    const __m256 few = _mm256_loadu_ps(table), many = _mm256_loadu_ps(table + 8);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m128i both = codes_avx2(codes + i / 2);
        for (size_t half = 0; half < 2; half++) {
            const __m256i place = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(both, 8) : both);
            const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(place, 28)); /* the sign says 8 and more */
            const __m256 from_few = _mm256_permutevar8x32_ps(few, place), from_many = _mm256_permutevar8x32_ps(many, place);
            _mm256_storeu_ps(x + i + 8 * half, _mm256_blendv_ps(from_few, from_many, is_high));
        }
    }
    return i;
}
#endif

static void look_up(float *x, const uint8_t *codes, const float *table, size_t count) {
    size_t i = 0;
#ifdef X86
    if (__builtin_cpu_supports("avx512bw"))
        i = look_up_avx512(x, codes, table, count);
    else if (__builtin_cpu_supports("avx2"))
        i = look_up_avx2(x, codes, table, count);
#endif
    for (; i < count; i++) x[i] = table[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
}

/* The scales of blocks: floats or, where there is a table, codes of floats that have scales themselves, and an offset. */
struct scales {
    const void *raw, *nested;
    const float *table;
    uint64_t nested_block;
    float offset;
};

INLINE float scale_at(const struct scales *scales, uint64_t block) {
    if (!scales->table) return float_at(scales->raw, block);
    const float coded = scales->table[((const uint8_t *)scales->raw)[block]];
    return coded * float_at(scales->nested, block / scales->nested_block) + scales->offset;
}

/* Look up the 16-bit values of 4-bit codes. Returns the number of values looked up. */

#ifdef X86
__attribute__((target("avx512f,avx512bw"))) static size_t look_up_halves_avx512(
    uint16_t *out, const uint8_t *codes, const uint16_t *values, size_t count) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)values));
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i pair = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i / 2)));
        /* The instruction ignores all but 5 bits of a place, and of these the table ignores the highest. */
        const __m512i places = _mm512_or_si512(_mm512_srli_epi32(pair, 4), _mm512_slli_epi32(pair, 16));
        _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(places, table));
    }
    return i;
}

__attribute__((target("avx2"))) static size_t look_up_halves_avx2(
    uint16_t *out, const uint8_t *codes, const uint16_t *values, size_t count) {
    uint8_t bytes[2][16]; /* the lower and the higher ones of the values */
    for (size_t i = 0; i < 16; i++) {
        bytes[0][i] = (uint8_t)values[i];
        bytes[1][i] = (uint8_t)(values[i] >> 8);
    }
    const __m128i lower = _mm_loadu_si128((const __m128i *)bytes[0]), higher = _mm_loadu_si128((const __m128i *)bytes[1]);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m128i places = codes_avx2(codes + i / 2);
        const __m128i left = _mm_shuffle_epi8(lower, places), right = _mm_shuffle_epi8(higher, places);
        _mm_storeu_si128((__m128i *)(out + i), _mm_unpacklo_epi8(left, right));
        _mm_storeu_si128((__m128i *)(out + i + 8), _mm_unpackhi_epi8(left, right));
    }
    return i;
}
#endif

static void look_up_halves(uint16_t *out, const uint8_t *codes, const uint16_t *values, size_t count) {
    size_t i = 0;
#ifdef X86
    if (__builtin_cpu_supports("avx512bw"))
        i = look_up_halves_avx512(out, codes, values, count);
    else if (__builtin_cpu_supports("avx2"))
        i = look_up_halves_avx2(out, codes, values, count);
#endif
    for (; i < count; i++) out[i] = values[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
}

/* Whole blocks as 16-bit numbers: a block has 16 values, which are rounded once and then looked up. */
CLONES static void decode_nf4_halves(
    int dtype, uint16_t *out, const uint8_t *codes, const struct scales *scales, const float *numbers, uint64_t block,
    uint64_t first, uint64_t last) {
    enum { VALUES = 16, BLOCKS = CHUNK / VALUES };
    float x[CHUNK] __attribute__((aligned(64)));
    uint16_t values[CHUNK] __attribute__((aligned(64)));
    for (uint64_t place = first; place < last; place += BLOCKS) {
        const size_t blocks = last - place < BLOCKS ? last - place : BLOCKS;
        for (size_t i = 0; i < blocks; i++) {
            const float scale = scale_at(scales, place + i);
            for (size_t j = 0; j < VALUES; j++) x[i * VALUES + j] = numbers[j] * scale;
        }
        put(dtype, values, 0, x, blocks * VALUES);
        for (size_t i = 0; i < blocks; i++)
            look_up_halves(
                out + (place + i - first) * block, codes + (place + i) * (block / 2), values + i * VALUES, block);
    }
}

/* A scale for each block of weights, counted from the matrix's first one on, which is `first` weights before `out`. Blocks
 * are even, and so is `first`: each begins with a byte. */
CLONES PUBLIC void zo2core_decode_nf4(
    int dtype, void *out, const uint8_t *codes, const void *raw, const void *table, const void *nested,
    const void *nested_table, uint64_t nested_block, float offset, uint64_t block, uint64_t first, uint64_t count) {
    float x[CHUNK] __attribute__((aligned(64))), numbers[16], coded[256];
    const struct scales scales = {raw, nested, nested_table ? coded : NULL, nested_block, offset};
    memcpy(numbers, table, sizeof numbers);
    if (nested_table) memcpy(coded, nested_table, sizeof coded);
    uint64_t done = 0;
    if (dtype != FLOAT32 && first % block == 0) {
        done = count / block * block;
        decode_nf4_halves(dtype, out, codes, &scales, numbers, block, first / block, (first + done) / block);
    }
    while (done < count) {
        const size_t length = count - done < CHUNK ? count - done : CHUNK;
        look_up(x, codes + (first + done) / 2, numbers, length);
        for (size_t i = 0; i < length;) {
            const uint64_t place = first + done + i, left = block - place % block;
            const size_t end = left < length - i ? i + left : length;
            const float scale = scale_at(&scales, place / block);
            for (; i < end; i++) x[i] *= scale;
        }
        put(dtype, out, done, x, length);
        done += length;
    }
}

/* The values of 4-bit floats of 2 bits of exponent and one of mantissa. */
INLINE float from_e2m1(uint32_t code) {
    const uint32_t magnitude = code & 7;
    const uint32_t finite = magnitude > 1 ? (magnitude << 22) + 0x3f000000 : magnitude * 0x3f000000; /* 0x3f000000 is 0.5 */
    return number(finite | (code & 8) << 28);
}

/* Matrices (inputs, outputs), stored as (outputs, inputs), two codes a byte, the first in the lower bits, and the exponent of
 * a power of 2 for each 32 inputs. Blocks of some outputs are turned while they are in the first cache. */
CLONES PUBLIC void zo2core_decode_mxfp4(
    int dtype, void *out, const uint8_t *codes, const uint8_t *scales, uint64_t first, uint64_t last, uint64_t inputs,
    uint64_t outputs) {
    enum { BLOCK = 32, HALF = 16, WIDE = 64 };
    const uint64_t blocks = inputs / BLOCK;
    for (uint64_t expert = first; expert < last; expert++)
        for (uint64_t output = 0; output < outputs; output += WIDE) {
            const size_t count = outputs - output < WIDE ? outputs - output : WIDE;
            for (uint64_t block = 0; block < blocks; block++) {
                uint8_t turned[HALF][WIDE] __attribute__((aligned(64)));
                float scale[WIDE] __attribute__((aligned(64))), x[WIDE] __attribute__((aligned(64)));
                for (size_t i = 0; i < count; i++) {
                    const uint64_t place = (expert * outputs + output + i) * blocks + block;
                    const uint32_t exponent = scales[place];
                    scale[i] = number(exponent ? exponent << 23 : 0x00400000); /* 2^-127 has no exponent of its own */
                    for (size_t j = 0; j < HALF; j++) turned[j][i] = codes[place * HALF + j];
                }
                for (size_t j = 0; j < BLOCK; j++) {
                    const uint8_t *pairs = turned[j / 2];
                    const int shift = j % 2 ? 4 : 0;
                    for (size_t i = 0; i < count; i++) x[i] = from_e2m1((uint32_t)pairs[i] >> shift & 15) * scale[i];
                    put(dtype, out, (expert * inputs + block * BLOCK + j) * outputs + output, x, count);
                }
            }
        }
}

/* A matrix of codes of 2, 3, 4 or 8 bits in words of 32, one code after the other from the lowest bits up: of neighbouring
 * inputs, with a row of words for each output (GPTQ); of 8 neighbouring outputs in an order of their own (AWQ, 4 bits); or row
 * by row. Codes of 3 bits may continue in the next word. Passed by value: bytes written to a tile could alias what is pointed
 * to, and its sizes would be read again for each code. */
enum { INPUT_WORDS, OUTPUT_WORDS, ROW_WORDS, TILE = 64 };

struct packed {
    const uint8_t *codes;
    int layout, bits;
    uint64_t rows, columns;
};

INLINE uint32_t word_at(const uint8_t *words, uint64_t place) {
    uint32_t word;
    memcpy(&word, words + 4 * place, 4);
    return word;
}

/* Codes of neighbouring inputs of each of `high` rows; `bits` divides 32 and is known to the compiler. */
INLINE void read_input_words(
    uint8_t tile[TILE][TILE], struct packed m, uint64_t row, uint64_t column, size_t high, size_t wide, int bits) {
    const size_t count = 32 / bits;
    const uint32_t most = (1u << bits) - 1;
    for (size_t j = 0; j < wide; j += count)
        for (size_t i = 0; i < high; i++) {
            const uint32_t word = word_at(m.codes, (column + j) / count * m.rows + row + i);
            for (size_t k = 0; k < count; k++) tile[i][j + k] = word >> bits * k & most;
        }
}

/* Codes of any number of bits, one by one. */
INLINE void read_each(
    uint8_t tile[TILE][TILE], struct packed m, uint64_t row, uint64_t column, size_t high, size_t wide) {
    const uint64_t across = (m.columns * m.bits + 31) / 32;
    const int by_rows = m.layout == ROW_WORDS;
    for (size_t i = 0; i < high; i++)
        for (size_t j = 0; j < wide; j++) {
            const uint64_t bit = (column + j) * m.bits, word = bit / 32, shift = bit % 32;
            const uint64_t from = by_rows ? (row + i) * across + word : word * m.rows + row + i;
            uint64_t both = word_at(m.codes, from);
            if (shift + m.bits > 32) both |= (uint64_t)word_at(m.codes, from + (by_rows ? 1 : m.rows)) << 32;
            tile[i][j] = both >> shift & ((1u << m.bits) - 1);
        }
}

/* The codes of `high` rows and `wide` columns. Rows and columns begin at multiples of 8 and of TILE. */
INLINE void read_codes(
    uint8_t tile[TILE][TILE], struct packed m, uint64_t row, uint64_t column, size_t high, size_t wide) {
    static const uint8_t outputs[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    if (m.layout == OUTPUT_WORDS)
        for (size_t j = 0; j < wide; j++)
            for (size_t i = 0; i < high; i += 8) {
                const uint32_t word = word_at(m.codes, (column + j) * (m.rows / 8) + (row + i) / 8);
                for (size_t k = 0; k < 8; k++) tile[i + outputs[k]][j] = word >> 4 * k & 15;
            }
    else if (m.layout == INPUT_WORDS && m.bits == 4)
        read_input_words(tile, m, row, column, high, wide, 4);
    else if (m.layout == INPUT_WORDS && m.bits == 8)
        read_input_words(tile, m, row, column, high, wide, 8);
    else if (m.bits == 4)
        for (size_t i = 0; i < high; i++) {
            const uint8_t *from = m.codes + (row + i) * ((m.columns + 7) / 8 * 4) + column / 2;
            for (size_t j = 0; j < TILE / 2; j++) { /* a constant number, also where fewer are needed: it is vectorised */
                const uint8_t pair = from[2 * j < wide ? j : 0];
                tile[i][2 * j] = pair & 15;
                tile[i][2 * j + 1] = pair >> 4;
            }
        }
    else if (m.bits == 8)
        for (size_t i = 0; i < high; i++) memcpy(tile[i], m.codes + (row + i) * ((m.columns + 3) / 4 * 4) + column, wide);
    else
        read_each(tile, m, row, column, high, wide);
}

/* Codes of `bits` bits, integers or floats of 4, with a zero to subtract and a scale for each group of a row's weights. `order`
 * has each column's group, where neighbours do not form groups. */
CLONES PUBLIC void zo2core_decode_groups(
    int dtype, void *out, const uint8_t *codes, const float *scales, const float *zeros, const int32_t *order,
    int are_floats, int layout, int bits, uint64_t rows, uint64_t columns, uint64_t group, uint64_t first, uint64_t last) {
    const uint64_t groups = (columns + group - 1) / group;
    const struct packed matrix = {codes, layout, bits, rows, columns};
    uint8_t tile[TILE][TILE] __attribute__((aligned(64)));
    float x[TILE] __attribute__((aligned(64)));
    for (uint64_t row = first; row < last; row += TILE)
        for (uint64_t column = 0; column < columns; column += TILE) {
            const size_t high = last - row < TILE ? last - row : TILE;
            const size_t wide = columns - column < TILE ? columns - column : TILE;
            read_codes(tile, matrix, row, column, high, wide);
            for (size_t i = 0; i < high; i++) {
                const float *scale = scales + (row + i) * groups, *zero = zeros ? zeros + (row + i) * groups : NULL;
                if (are_floats)
                    for (size_t j = 0; j < wide; j++) x[j] = from_e2m1(tile[i][j]);
                else
                    for (size_t j = 0; j < wide; j++) x[j] = (float)tile[i][j];
                for (size_t j = 0; j < wide;) {
                    const uint64_t place = order ? (uint64_t)order[column + j] : (column + j) / group;
                    const uint64_t end = order ? j + 1 : (place + 1) * group - column;
                    const size_t stop = end < wide ? end : wide;
                    const float minus = zero ? zero[place] : 0.0f, by = scale[place];
                    for (; j < stop; j++) x[j] = (x[j] - minus) * by;
                }
                put(dtype, out, (row + i) * columns + column, x, wide);
            }
        }
}

/* Rows of floats, each divided by the smallest power of 2 at which its largest magnitude is not above e4m3's. Returns whether
 * all are finite; others are the reference's to do. */
CLONES PUBLIC int zo2core_encode_float8(
    uint8_t *codes, float *scales, const float *weights, float largest_code, float least_scale, uint64_t rows,
    uint64_t columns) {
    for (uint64_t row = 0; row < rows; row++) {
        const float *restrict from = weights + row * columns;
        uint8_t *restrict to = codes + row * columns;
        uint32_t largest = 0;
        for (size_t i = 0; i < columns; i++) {
            const uint32_t magnitude = bits(from[i]) & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= 0x7f800000) return 0;
        float scale = number(largest) / largest_code;
        if (scale < least_scale) scale = least_scale;
        scale = number((bits(scale) + 0x7fffff) & 0x7f800000); /* up to a power of 2: no mantissa */
        const float inverse = 1.0f / scale;                    /* exact, and so is what it multiplies */
        for (size_t i = 0; i < columns; i++) to[i] = to_e4m3(from[i] * inverse);
        scales[row] = scale;
    }
    return 1;
}
