/* torch's CPU generator and its normal distribution, bit for bit, several times faster.
 *
 * torch draws from a Mersenne twister one word after the other, and turns sixteen uniforms at a time into normal numbers
 * with AVX2, eight pairs side by side. Which of those operations round once and which twice was read off torch's machine
 * code: fmaf below stands where one instruction multiplies and adds, and nothing else may be contracted. Whether a torch
 * computes like that depends on its version and on the machine: noise.py compares both before it uses this one.
 *
 * Numbers below sixteen are drawn one by one in float64, with the machine's libm, as torch draws them.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "floats.h"

enum { WORDS = 624, AHEAD = 397 };  /* of MT19937 (Matsumoto and Nishimura, 1998) */
enum { GROUP = 16, HALF = GROUP / 2 };  /* numbers that are drawn together: their radii come first, then their angles */
enum { BATCH = 1024 };  /* numbers, worked on while they are in the first cache; a multiple of GROUP */

/* A generator. Plain memory: a copy of it is a copy of the generator. */
struct twister {
    uint32_t words[WORDS];
    uint32_t next;   /* word to hand out; WORDS: none is left */
    int32_t spare_is_there;
    double spare;    /* second of a pair that was drawn one by one */
};

/* ---- Words ---- */

INLINE uint32_t twist(uint32_t here, uint32_t after) {
    return ((here & 0x80000000) | (after & 0x7fffffff)) >> 1 ^ (0x9908b0df & -(after & 1));
}

INLINE uint32_t tempered(uint32_t y) {
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680;
    y ^= y << 15 & 0xefc60000;
    return y ^ y >> 18;
}

CLONES static void refill(struct twister *t) {
    uint32_t *w = t->words;
    for (size_t i = 0; i < WORDS - AHEAD; i++) w[i] = w[i + AHEAD] ^ twist(w[i], w[i + 1]);
    for (size_t i = WORDS - AHEAD; i < WORDS - 1; i++) w[i] = w[i + AHEAD - WORDS] ^ twist(w[i], w[i + 1]);
    w[WORDS - 1] = w[AHEAD - 1] ^ twist(w[WORDS - 1], w[0]);
    t->next = 0;
}

CLONES static void temper(uint32_t *restrict to, const uint32_t *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = tempered(from[i]);
}

static void draw_words(struct twister *t, uint32_t *to, size_t count) {
    while (count > 0) {
        if (t->next == WORDS) refill(t);
        const size_t some = count < WORDS - t->next ? count : WORDS - t->next;
        temper(to, t->words + t->next, some);
        t->next += (uint32_t)some, to += some, count -= some;
    }
}

static void skip_words(struct twister *t, uint64_t count) {
    while (count > WORDS - t->next) {
        count -= WORDS - t->next;
        refill(t);
    }
    t->next += (uint32_t)count;
}

/* ---- Sixteen or more numbers ---- */

/* Box-Muller on the polynomials of Cephes (Moshier), single precision: logf, sinf and cosf. */
INLINE void box_muller(uint32_t radial, uint32_t angular, float *first, float *second) {
    const float u = fmaf((float)(int32_t)(radial & 0xffffff), -0x1p-24f, 1.0f); /* exact, as the next uniform is */
    const int32_t above = (int32_t)bits(u) - 0x3f3504f3; /* sqrt(1/2) */
    const int32_t exponent = above >> 23;
    const float f = number(bits(u) - ((uint32_t)exponent << 23)) - 1.0f, e = (float)exponent;
    const float f2 = f * f;
    float p = 7.0376836292e-2f;
    p = fmaf(p, f, -1.1514610310e-1f);
    p = fmaf(p, f, 1.1676998740e-1f);
    p = fmaf(p, f, -1.2420140846e-1f);
    p = fmaf(p, f, 1.4249322787e-1f);
    p = fmaf(p, f, -1.6668057665e-1f);
    p = fmaf(p, f, 2.0000714765e-1f);
    p = fmaf(p, f, -2.4999993993e-1f);
    p = fmaf(p, f, 3.3333331174e-1f);
    p = fmaf(p * f, f2, e * -2.12194440e-4f);
    p = fmaf(f2, -0.5f, p);
    const float logarithm = fmaf(e, 0.693359375f, f + p);
    const float radius = sqrtf(logarithm * -2.0f);

    const float theta = (float)(int32_t)(angular & 0xffffff) * (6.2831855f * 0x1p-24f);
    const int32_t octant = ((int32_t)(theta * 1.27323954f) + 1) & ~1; /* 4 / pi */
    const float nearest = (float)octant;
    float x = fmaf(nearest, -0.78515625f, theta);
    x = fmaf(nearest, -2.4187564849853515625e-4f, x);
    x = fmaf(nearest, -3.77489497744594108e-8f, x);
    const float y = x * x;
    float c = 2.443315711809948e-5f;
    c = fmaf(c, y, -1.388731625493765e-3f);
    c = fmaf(c, y, 4.166664568298827e-2f);
    c = fmaf(y, c * y, y * -0.5f) + 1.0f;
    float s = -1.9515295891e-4f;
    s = fmaf(s, y, 8.3321608736e-3f);
    s = fmaf(s, y, -1.6666654611e-1f);
    s = fmaf(s * y, x, x);
    const float cosine = octant & 2 ? s : c, sine = octant & 2 ? c : s;
    const uint32_t cosine_sign = (uint32_t)(octant + 2) << 29 & 0x80000000, sine_sign = (uint32_t)octant << 29 & 0x80000000;
    *first = fmaf(radius, number(bits(cosine) ^ cosine_sign), 0.0f); /* a mean is added: no number is -0 */
    *second = fmaf(radius, number(bits(sine) ^ sine_sign), 0.0f);
}

#define DEFINE_TRANSFORM(name, attributes)                                                                                  \
    attributes static void name(float *restrict z, const uint32_t *restrict words, size_t count) {                          \
        uint32_t radial[BATCH / 2] __attribute__((aligned(64))), angular[BATCH / 2] __attribute__((aligned(64)));           \
        float first[BATCH / 2] __attribute__((aligned(64))), second[BATCH / 2] __attribute__((aligned(64)));                \
        for (size_t i = 0; i < count; i += GROUP) {                                                                         \
            memcpy(radial + i / 2, words + i, sizeof *words * HALF);                                                        \
            memcpy(angular + i / 2, words + i + HALF, sizeof *words * HALF);                                                \
        }                                                                                                                   \
        for (size_t i = 0; i < count / 2; i++) box_muller(radial[i], angular[i], first + i, second + i);                    \
        for (size_t i = 0; i < count; i += GROUP) {                                                                         \
            memcpy(z + i, first + i / 2, sizeof *z * HALF);                                                                 \
            memcpy(z + i + HALF, second + i / 2, sizeof *z * HALF);                                                         \
        }                                                                                                                   \
    }

DEFINE_TRANSFORM(transform_plain, )
#ifdef X86
DEFINE_TRANSFORM(transform_avx2, __attribute__((target("avx2,fma"))))
DEFINE_TRANSFORM(transform_avx512, __attribute__((target("avx512f,fma"))))
#endif

/* Draw a multiple of GROUP, BATCH at the most. */
static void draw(struct twister *t, float *z, size_t count) {
    uint32_t words[BATCH] __attribute__((aligned(64)));
    draw_words(t, words, count);
#ifdef X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma")) {
        transform_avx512(z, words, count);
        return;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        transform_avx2(z, words, count);
        return;
    }
#endif
    transform_plain(z, words, count);
}

static void draw_as(struct twister *t, int dtype, void *out, size_t count) {
    if (dtype == FLOAT32) {
        draw(t, out, count);
        return;
    }
    float z[BATCH] __attribute__((aligned(64)));
    draw(t, z, count);
    round_all(dtype, z, count);
    store(dtype, out, z, count);
}

/* Words between the last whole group and the one that ends with the tensor: in float32 torch draws a uniform for each
 * element before it transforms any, and then draws the last group's again. */
static uint64_t dropped(int dtype, uint64_t count) {
    return dtype == FLOAT32 ? count % GROUP : 0;
}

/* ---- Fewer ---- */

static double uniform(struct twister *t) {
    uint32_t words[2];
    draw_words(t, words, 2);
    return (double)(((uint64_t)words[0] << 32 | words[1]) & 0x1fffffffffffff) * 0x1p-53;
}

static double draw_one(struct twister *t) {
    if (t->spare_is_there) {
        t->spare_is_there = 0;
        return t->spare + 0.0;
    }
    const double angle = 2 * 3.14159265358979323846 * uniform(t);
    const double radius = sqrt(-2 * log1p(-uniform(t)));
    t->spare_is_there = 1, t->spare = radius * sin(angle);
    return radius * cos(angle) + 0.0;
}

/* ---- Exported functions ---- */

PUBLIC size_t zo2core_twister_size(void) { return sizeof(struct twister); }

PUBLIC void zo2core_twister_seed(struct twister *t, uint64_t seed) {
    t->words[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < WORDS; i++) t->words[i] = 1812433253 * (t->words[i - 1] ^ t->words[i - 1] >> 30) + i;
    t->next = WORDS, t->spare_is_there = 0, t->spare = 0;
}

/* Write what torch's normal_ writes to a contiguous tensor of `count` elements. */
PUBLIC void zo2core_twister_fill(struct twister *t, int dtype, void *out, uint64_t count) {
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    if (count < GROUP) {
        float z[GROUP];
        for (size_t i = 0; i < count; i++) z[i] = (float)draw_one(t);
        round_all(dtype, z, count);
        store(dtype, out, z, count);
        return;
    }
    uint64_t done = 0;
    for (const uint64_t whole = count - count % GROUP; done < whole;) {
        const size_t some = whole - done < BATCH ? whole - done : BATCH;
        draw_as(t, dtype, (char *)out + done * size, some);
        done += some;
    }
    if (done == count) return;
    skip_words(t, dropped(dtype, count));
    draw_as(t, dtype, (char *)out + (count - GROUP) * size, GROUP); /* over the end of the group before */
}

/* Advance the generator as filling would. */
PUBLIC void zo2core_twister_skip(struct twister *t, int dtype, uint64_t count) {
    if (count < GROUP)
        for (size_t i = 0; i < count; i++) draw_one(t);
    else
        skip_words(t, count - count % GROUP + dropped(dtype, count) + (count % GROUP ? GROUP : 0));
}
