/* Counter-based noise and MeZO's elementwise arithmetic in one pass over memory: the fast path on CPUs.
 *
 * The functions are called through ctypes, which releases the GIL. reference.py gives the same bits: every float operation
 * below is one IEEE operation that rounds once, as it does in torch. So this must be compiled with -ffp-contract=off, and
 * never with -ffast-math.
 *
 * Loops are plain and of constant length where it counts, so that the compiler vectorises them.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "floats.h"
#include "parallel.h"

enum { CHUNK = 1024 };  /* elements, worked on while they are in the first cache; a multiple of both groups of reference.py */
enum { GAUSSIAN, RADEMACHER };
enum { PERTURB, PERTURB_FOLDED, DESCEND };
enum { CACHED = 4 };  /* directions whose chunk of z is kept for the next instructions */

/* One instruction, whose scalars are the arguments of reference.py. */
struct instruction {
    int32_t kind;
    int32_t direction;   /* whose z */
    float scale;         /* PERTURB: shift; PERTURB_FOLDED: shift * zo_eps; DESCEND: projected_grad */
    float rate;          /* PERTURB: zo_eps; DESCEND: lr */
    float weight_decay;  /* DESCEND */
};

struct direction {
    uint64_t seed;
    const void *z;  /* already drawn, in the parameter's dtype, from the range's first element on; NULL: draw from seed */
};

/* ---- Philox4x32-10 (Salmon et al., SC 2011) ---- */

/* Words of the counters (block + i, parameter, 0), i below count: word w of counter i goes to words[w * count + i].
 *
 * block and count are multiples of 8, so that a vector's counters differ in the low word alone. A counter's word lies in the
 * lower half of a 64-bit lane, and what a product leaves in the upper half is ignored by the next one: compilers do not find
 * that form of the multiplication by themselves, which is why it is spelled out. Several vectors `together` hide each other's
 * latency.
 */

#define DEFINE_PHILOX(name, attributes, width, together, mul)                                                               \
    attributes static void name(uint32_t *words, size_t count, uint64_t block, uint32_t parameter, uint64_t seed) {         \
        typedef uint64_t lanes __attribute__((vector_size(8 * width)));                                                     \
        typedef uint32_t narrow __attribute__((vector_size(4 * width), aligned(4)));                                        \
        lanes place = {0};                                                                                                  \
        for (size_t i = 0; i < width; i++) place[i] = i;                                                                    \
        for (size_t first = 0; first < count; first += width * together) {                                                  \
            lanes c0[together], c1[together], c2[together], c3[together];                                                   \
            uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);                                                      \
            _Pragma("GCC unroll 4") for (size_t i = 0; i < together; i++) {                                                 \
                const uint64_t base = block + first + i * width;                                                            \
                c0[i] = place + (uint32_t)base, c1[i] = (lanes){0} + (base >> 32);                                          \
                c2[i] = (lanes){0} + parameter, c3[i] = (lanes){0};                                                         \
            }                                                                                                               \
            _Pragma("GCC unroll 10") for (int round = 0; round < 10; round++) {                                             \
                _Pragma("GCC unroll 4") for (size_t i = 0; i < together; i++) {                                             \
                    const lanes p0 = mul(lanes, c0[i], 0xD2511F53), p1 = mul(lanes, c2[i], 0xCD9E8D57);                     \
                    c0[i] = p1 >> 32 ^ c1[i] ^ k0, c1[i] = p1;                                                              \
                    c2[i] = p0 >> 32 ^ c3[i] ^ k1, c3[i] = p0;                                                              \
                }                                                                                                           \
                k0 += 0x9E3779B9, k1 += 0xBB67AE85;                                                                         \
            }                                                                                                               \
            _Pragma("GCC unroll 4") for (size_t i = 0; i < together; i++) {                                                 \
                uint32_t *to = words + first + i * width;                                                                   \
                *(narrow *)to = __builtin_convertvector(c0[i], narrow);                                                     \
                *(narrow *)(to + count) = __builtin_convertvector(c1[i], narrow);                                           \
                *(narrow *)(to + 2 * count) = __builtin_convertvector(c2[i], narrow);                                       \
                *(narrow *)(to + 3 * count) = __builtin_convertvector(c3[i], narrow);                                       \
            }                                                                                                               \
        }                                                                                                                   \
    }

#define MUL(lanes, x, m) (((x) & 0xffffffff) * (uint64_t)(m))
DEFINE_PHILOX(philox_plain, , 2, 2, MUL)

#ifdef X86
#define MUL_AVX2(lanes, x, m) (lanes) _mm256_mul_epu32((__m256i)(x), _mm256_set1_epi64x(m))
#define MUL_AVX512(lanes, x, m) (lanes) _mm512_mul_epu32((__m512i)(x), _mm512_set1_epi64(m))
DEFINE_PHILOX(philox_avx2, __attribute__((target("avx2"))), 4, 2, MUL_AVX2)
DEFINE_PHILOX(philox_avx512, __attribute__((target("avx512f"))), 8, 4, MUL_AVX512)
DEFINE_PHILOX(philox_avx512_few, __attribute__((target("avx512f"))), 8, 1, MUL_AVX512)
#endif

static void philox(uint32_t *words, size_t count, uint64_t block, uint32_t parameter, uint64_t seed) {
#ifdef X86
    if (__builtin_cpu_supports("avx512f")) {
        (count % 32 ? philox_avx512_few : philox_avx512)(words, count, block, parameter, seed);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        philox_avx2(words, count, block, parameter, seed);
        return;
    }
#endif
    philox_plain(words, count, block, parameter, seed);
}

/* ---- Numbers: reference.py documents them and their error ---- */

INLINE void box_muller(uint32_t radial, uint32_t angular, float *first, float *second) {
    const float u = (float)(int32_t)(radial >> 1) + 0.5f;
    const int32_t above = (int32_t)bits(u) - 0x3f3504f3; /* sqrt(1/2) */
    const int32_t exponent = above >> 23;
    const float f = number(bits(u) - ((uint32_t)exponent << 23)) - 1.0f;
    float p = 0.20213786f;
    p = p * f + -0.3244516f;
    p = p * f + 0.3450166f;
    p = p * f + -0.3980033f;
    p = p * f + 0.4993982f;
    p = p * f + -0.6667012f;
    p = p * f + 1.0000073f;
    p = p * f + -1.9999999f;
    const float squared = p * f + (float)(exponent - 31) * -1.3862944f;
    const float radius = sqrtf(squared);

    const uint32_t quarter = angular + 0x20000000; /* its upper two bits: which axis is nearest */
    const float t = (float)((int32_t)(angular << 2) >> 2) * 0x1p-29f;
    const float y = t * t;
    float s = -3.595045e-05f;
    s = s * y + 0.002490001f;
    s = s * y + -0.080745436f;
    s = s * y + 0.7853982f;
    s = s * t;
    float c = -0.0003188805f;
    c = c * y + 0.015849914f;
    c = c * y + -0.30842426f;
    c = c * y + 1.0f;
    const float cosine = quarter & 0x40000000 ? s : c, sine = quarter & 0x40000000 ? c : s;
    const uint32_t cosine_sign = (quarter + 0x40000000) & 0x80000000, sine_sign = quarter & 0x80000000;
    *first = radius * number(bits(cosine) ^ cosine_sign);
    *second = radius * number(bits(sine) ^ sine_sign);
}

CLONES static void gaussian(int dtype, float *restrict z, uint64_t element, uint32_t parameter, uint64_t seed) {
    enum { COUNTERS = 64 };
    uint32_t words[4 * COUNTERS];
    for (size_t group = 0; group < CHUNK; group += 4 * COUNTERS) {
        philox(words, COUNTERS, (element + group) / 4, parameter, seed);
        for (size_t half = 0; half < 4 * COUNTERS; half += 2 * COUNTERS) {
            const uint32_t *from = words + half;
            float *out = z + group + half;
            for (size_t i = 0; i < COUNTERS; i++) box_muller(from[i], from[COUNTERS + i], out + i, out + COUNTERS + i);
        }
    }
    round_all(dtype, z, CHUNK);
}

CLONES static void rademacher(float *restrict z, uint64_t element, uint32_t parameter, uint64_t seed) {
    enum { COUNTERS = 8 };
    uint32_t words[4 * COUNTERS];
    philox(words, COUNTERS, element / 128, parameter, seed);
    for (size_t bit = 0; bit < 32; bit++)
        for (size_t i = 0; i < 4 * COUNTERS; i++)
            z[bit * 4 * COUNTERS + i] = number(0x3f800000 | (words[i] << (31 - bit) & 0x80000000));
}

static void draw(int distribution, int dtype, float *z, uint64_t element, uint32_t parameter, uint64_t seed) {
    if (distribution == GAUSSIAN)
        gaussian(dtype, z, element, parameter, seed);
    else
        rademacher(z, element, parameter, seed);
}

/* ---- The arithmetic of reference.py ---- */

INLINE void run_instruction(
    int is_bfloat, float *restrict theta, const float *restrict z, struct instruction move, size_t count) {
    const float scale = move.scale, rate = move.rate, weight_decay = move.weight_decay;
#define ROUNDED(x) (is_bfloat ? rounded_to_bfloat(x) : (x))
    if (move.kind == PERTURB_FOLDED)
        for (size_t i = 0; i < count; i++) theta[i] = ROUNDED(theta[i] + ROUNDED(z[i] * scale));
    else if (move.kind == PERTURB)
        for (size_t i = 0; i < count; i++) theta[i] = ROUNDED(theta[i] + ROUNDED(ROUNDED(z[i] * scale) * rate));
    else if (weight_decay == 0)
        for (size_t i = 0; i < count; i++) theta[i] = ROUNDED(theta[i] - ROUNDED(ROUNDED(z[i] * scale) * rate));
    else
        for (size_t i = 0; i < count; i++) {
            const float gradient = ROUNDED(ROUNDED(z[i] * scale) + ROUNDED(theta[i] * weight_decay));
            theta[i] = ROUNDED(theta[i] - ROUNDED(gradient * rate));
        }
#undef ROUNDED
}

/* The same for halves: one operation after the other over the whole chunk, since only whole chunks round fast. */
CLONES static void run_on_halves(float *restrict theta, const float *restrict z, struct instruction move, size_t count) {
    float step[CHUNK] __attribute__((aligned(64)));
    for (size_t i = 0; i < count; i++) step[i] = z[i] * move.scale;
    round_all(FLOAT16, step, count);
    if (move.kind == DESCEND && move.weight_decay != 0) {
        float decay[CHUNK] __attribute__((aligned(64)));
        for (size_t i = 0; i < count; i++) decay[i] = theta[i] * move.weight_decay;
        round_all(FLOAT16, decay, count);
        for (size_t i = 0; i < count; i++) step[i] = step[i] + decay[i];
        round_all(FLOAT16, step, count);
    }
    if (move.kind != PERTURB_FOLDED) {
        for (size_t i = 0; i < count; i++) step[i] = step[i] * move.rate;
        round_all(FLOAT16, step, count);
    }
    if (move.kind == DESCEND)
        for (size_t i = 0; i < count; i++) theta[i] = theta[i] - step[i];
    else
        for (size_t i = 0; i < count; i++) theta[i] = theta[i] + step[i];
    round_all(FLOAT16, theta, count);
}

CLONES static void apply(int dtype, float *theta, const float *z, const struct instruction *move, size_t count) {
    if (dtype == BFLOAT16)
        run_instruction(1, theta, z, *move, count);
    else if (dtype == FLOAT16)
        run_on_halves(theta, z, *move, count);
    else
        run_instruction(0, theta, z, *move, count);
}

/* ---- Exported functions ---- */

/* Raised whenever an exported function of any source changes its arguments or results; the loader compares it. */
PUBLIC int zo2core_revision(void) { return 16; }

parallel *run_in_threads = NULL;

PUBLIC void zo2core_use_threads(parallel *function) { run_in_threads = function; }

typedef void function(void);

static void call_some(const void *functions, uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; i++) ((function *const *)functions)[i]();
}

/* Call functions in the threads, each of which calls the next one when its last one has returned. */
PUBLIC void zo2core_run_each(function *const *functions, uint64_t count, unsigned threads) {
    run_in_parts(call_some, functions, count, 1, threads);
}

/* Write z of the elements from start on. */
PUBLIC void zo2core_fill(
    int dtype, void *out, uint64_t count, int distribution, uint64_t seed, uint32_t parameter, uint64_t start) {
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    float z[CHUNK] __attribute__((aligned(64)));
    for (uint64_t done = 0; done < count;) {
        const size_t skip = (start + done) % CHUNK;
        const size_t length = count - done < CHUNK - skip ? count - done : CHUNK - skip;
        draw(distribution, dtype, z, start + done - skip, parameter, seed);
        store(dtype, (char *)out + done * size, z + skip, length);
        done += length;
    }
}

/* Run the first `in_place` instructions on theta in place, and all the others on a copy of the result that goes to out; what
 * comes of all of them goes to rounded as well, in that memory's dtype.
 *
 * theta is only read if in_place is 0; out is only written if there are others; out and rounded may be NULL. theta and out may be
 * the same memory, else none of them must overlap. start is the element of the parameter at which theta starts.
 */
PUBLIC void zo2core_walk(
    int dtype, void *theta, void *out, int rounded_dtype, void *rounded, uint64_t count, const struct instruction *program,
    size_t in_place, size_t length, const struct direction *directions, int distribution, uint32_t parameter, uint64_t start) {
    const size_t size = dtype == FLOAT32 ? 4 : 2, rounded_size = rounded_dtype == FLOAT32 ? 4 : 2;
    float weights[CHUNK] __attribute__((aligned(64)));
    float zs[CACHED][CHUNK] __attribute__((aligned(64)));
    for (uint64_t done = 0; done < count;) {
        const size_t skip = (start + done) % CHUNK;
        const size_t elements = count - done < CHUNK - skip ? count - done : CHUNK - skip;
        int32_t held[CACHED];
        for (size_t slot = 0; slot < CACHED; slot++) held[slot] = -1;
        load(dtype, weights, (char *)theta + done * size, elements);
        for (size_t i = 0; i < length; i++) {
            const struct instruction *move = program + i;
            const struct direction *direction = directions + move->direction;
            const size_t slot = (size_t)move->direction % CACHED;
            if (i == in_place && in_place > 0) store(dtype, (char *)theta + done * size, weights, elements);
            if (held[slot] != move->direction) {
                if (direction->z == NULL)
                    draw(distribution, dtype, zs[slot], start + done - skip, parameter, direction->seed);
                else
                    load(dtype, zs[slot] + skip, (const char *)direction->z + done * size, elements);
                held[slot] = move->direction;
            }
            apply(dtype, weights, zs[slot] + skip, move, elements);
        }
        if (in_place == length && in_place > 0) store(dtype, (char *)theta + done * size, weights, elements);
        if (in_place < length && out != NULL) store(dtype, (char *)out + done * size, weights, elements);
        if (rounded != NULL) {
            round_all(rounded_dtype, weights, elements);
            store(rounded_dtype, (char *)rounded + done * rounded_size, weights, elements);
        }
        done += elements;
    }
}

/* Write theta, moved by each of `length` instructions by itself, to as many rows of out, rounded to its dtype. A scale of 0
 * moves nothing. Instructions along one direction that follow each other share what is drawn. */
PUBLIC void zo2core_move_each(
    int dtype, const void *theta, int out_dtype, void *out, uint64_t count, const struct instruction *moves, size_t length,
    const struct direction *directions, int distribution, uint32_t parameter) {
    const size_t size = dtype == FLOAT32 ? 4 : 2, out_size = out_dtype == FLOAT32 ? 4 : 2;
    float weights[CHUNK] __attribute__((aligned(64))), moved[CHUNK] __attribute__((aligned(64)));
    float z[CHUNK] __attribute__((aligned(64)));
    for (uint64_t done = 0; done < count; done += CHUNK) {
        const size_t elements = count - done < CHUNK ? count - done : CHUNK;
        int32_t held = -1;
        load(dtype, weights, (const char *)theta + done * size, elements);
        for (size_t i = 0; i < length; i++) {
            const struct instruction *move = moves + i;
            memcpy(moved, weights, elements * sizeof *moved);
            if (move->scale != 0) {
                if (held != move->direction)
                    draw(distribution, dtype, z, done, parameter, directions[move->direction].seed);
                held = move->direction;
                apply(dtype, moved, z, move, elements);
            }
            round_all(out_dtype, moved, elements);
            store(out_dtype, (char *)out + (i * count + done) * out_size, moved, elements);
        }
    }
}
