/* What both sources need: which functions are seen, and floats as bits and in 16 of them. */

#ifndef ZO2CORE_FLOATS_H
#define ZO2CORE_FLOATS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* CLONES: loops that the compiler vectorises for each of these instruction sets; the loader picks one when the program
 * starts. */
#if defined(__x86_64__) && defined(__gnu_linux__)
#define X86
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

/* ---- 16-bit numbers, computed with as floats that have been rounded ---- */

INLINE float rounded(int dtype, float x) {
    const uint32_t u = bits(x);
    if (dtype == BFLOAT16) {
        const uint32_t near = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000;
        return x == x ? number(near) : x;
    }
    if (dtype == FLOAT16) {
        const uint32_t sign = u & 0x80000000, magnitude = u ^ sign;
        const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & 0xffffe000;
        const uint32_t small = bits((number(magnitude) + 0.5f) - 0.5f);  /* floats from 0.5 on are 2^-24 apart */
        uint32_t near = magnitude < 0x38800000 ? small : normal;         /* 2^-14 */
        near = near >= 0x47800000 ? 0x7f800000 : near;                   /* 65536 */
        return x == x ? number(near | sign) : x;
    }
    return x;
}

INLINE float from_half(uint16_t h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t scaled = bits(number(magnitude) * 0x1p112f);
    return number((magnitude >= 0x0f800000 ? scaled | 0x7f800000 : scaled) | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t to_half(float x) {  /* of a number that has been rounded */
    const uint32_t u = bits(x), magnitude = u & 0x7fffffff;
    const uint32_t finite = bits(number(magnitude) * 0x1p-112f) >> 13;
    const uint32_t other = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)((magnitude >= 0x7f800000 ? other : finite) | (u >> 16 & 0x8000));
}

INLINE uint16_t to_bfloat(float x) {  /* of a number that has been rounded */
    return x == x ? (uint16_t)(bits(x) >> 16) : 0x7fc0;
}

CLONES static void load(int dtype, float *restrict to, const void *restrict from, size_t count) {
    const uint16_t *halves = from;
    if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++) to[i] = number((uint32_t)halves[i] << 16);
    else if (dtype == FLOAT16)
        for (size_t i = 0; i < count; i++) to[i] = from_half(halves[i]);
    else
        memcpy(to, from, count * sizeof *to);
}

CLONES static void store(int dtype, void *restrict to, const float *restrict from, size_t count) {
    uint16_t *halves = to;
    if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++) halves[i] = to_bfloat(from[i]);
    else if (dtype == FLOAT16)
        for (size_t i = 0; i < count; i++) halves[i] = to_half(from[i]);
    else
        memcpy(to, from, count * sizeof *from);
}

CLONES static void round_all(int dtype, float *x, size_t count) {
    if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++) x[i] = rounded(BFLOAT16, x[i]);
    else if (dtype == FLOAT16)
        for (size_t i = 0; i < count; i++) x[i] = rounded(FLOAT16, x[i]);
}

#endif
