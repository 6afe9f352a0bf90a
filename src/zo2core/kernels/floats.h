/* Common to all sources: visibility of functions, the bits of floats, and conversions of 16-bit floats. */

#ifndef ZO2CORE_FLOATS_H
#define ZO2CORE_FLOATS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define X86
#include <immintrin.h>
#endif

/* CLONES: loops that the compiler vectorises for each of these instruction sets; the loader picks one when the program
 * starts. clang refuses them for functions with a visibility. */
#if defined(X86) && !defined(__clang__)
#define HAS_CLONES
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
#define PUBLIC __attribute__((visibility("default")))

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* ---- Bits ---- */

INLINE uint32_t bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

INLINE float number(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* ---- 16-bit numbers, which are computed with as rounded floats ---- */

INLINE float rounded_to_bfloat(float x) {
    const uint32_t u = bits(x);
    const uint32_t near = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000;
    return x == x ? number(near) : x;
}

INLINE float from_half(uint16_t h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t scaled = bits(number(magnitude) * 0x1p112f);
    return number((magnitude >= 0x0f800000 ? scaled | 0x7f800000 : scaled) | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t to_half(float x) {
    const uint32_t u = bits(x), magnitude = u & 0x7fffffff;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & 0xffffe000;
    const uint32_t small = bits((number(magnitude) + 0.5f) - 0.5f); /* floats from 0.5 on are 2^-24 apart */
    const uint32_t near = magnitude < 0x38800000 ? small : normal;  /* 2^-14 */
    const uint32_t finite = bits(number(near) * 0x1p-112f) >> 13;
    const uint32_t other = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)((near >= 0x47800000 ? other : finite) | (u >> 16 & 0x8000)); /* 65536 */
}

/* ---- Arrays of 16-bit numbers ---- */

/* Compilers do not find the instructions that convert halves, which are spelled out: 16 at a time, or 8, or one by one. */

#ifdef X86
__attribute__((target("avx512f"))) static size_t load_halves_avx512(float *to, const uint16_t *from, size_t count) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
    return i;
}

__attribute__((target("avx512f"))) static size_t store_halves_avx512(uint16_t *to, const float *from, size_t count) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t load_halves_f16c(float *to, const uint16_t *from, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t store_halves_f16c(uint16_t *to, const float *from, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#endif

static void load_halves(float *to, const uint16_t *from, size_t count) {
    size_t i = 0;
#ifdef X86
    if (__builtin_cpu_supports("avx512f"))
        i = load_halves_avx512(to, from, count);
    else if (__builtin_cpu_supports("f16c"))
        i = load_halves_f16c(to, from, count);
#endif
    for (; i < count; i++) to[i] = from_half(from[i]);
}

static void store_halves(uint16_t *to, const float *from, size_t count) {
    size_t i = 0;
#ifdef X86
    if (__builtin_cpu_supports("avx512f"))
        i = store_halves_avx512(to, from, count);
    else if (__builtin_cpu_supports("f16c"))
        i = store_halves_f16c(to, from, count);
#endif
    for (; i < count; i++) to[i] = to_half(from[i]);
}

CLONES static void load(int dtype, float *restrict to, const void *restrict from, size_t count) {
    const uint16_t *halves = from;
    if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++) to[i] = number((uint32_t)halves[i] << 16);
    else if (dtype == FLOAT16)
        load_halves(to, halves, count);
    else
        memcpy(to, from, count * sizeof *to);
}

/* Write numbers that the dtype has: they have been rounded before. */
CLONES static void store(int dtype, void *restrict to, const float *restrict from, size_t count) {
    uint16_t *halves = to;
    if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++) halves[i] = from[i] == from[i] ? (uint16_t)(bits(from[i]) >> 16) : 0x7fc0;
    else if (dtype == FLOAT16)
        store_halves(halves, from, count);
    else
        memcpy(to, from, count * sizeof *from);
}

enum { ROUNDED_AT_ONCE = 1024 };

/* Round floats to the numbers that a dtype has. */
CLONES static void round_all(int dtype, float *x, size_t count) {
    if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++) x[i] = rounded_to_bfloat(x[i]);
    else if (dtype == FLOAT16)
        for (size_t first = 0; first < count; first += ROUNDED_AT_ONCE) {
            uint16_t halves[ROUNDED_AT_ONCE];
            const size_t length = count - first < ROUNDED_AT_ONCE ? count - first : ROUNDED_AT_ONCE;
            store_halves(halves, x + first, length);
            load_halves(x + first, halves, length);
        }
}

/* Round floats and store them; bfloat16, which most models compute in, takes one pass. */
CLONES static void put(int dtype, void *out, uint64_t place, float *restrict x, size_t count) {
    uint16_t *restrict halves = (uint16_t *)out + place;
    if (dtype == BFLOAT16) {
        for (size_t i = 0; i < count; i++) {
            const uint32_t u = bits(x[i]), near = u + 0x7fff + (u >> 16 & 1);
            halves[i] = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near >> 16);
        }
        return;
    }
    round_all(dtype, x, count);
    store(dtype, (char *)out + place * (dtype == FLOAT32 ? 4 : 2), x, count);
}

#endif
