/* Products of matrices of which one has few columns, in one pass over the wide one and over what they are added to.
 *
 * A sum takes its products in the order of a library's matrix product, which thin.py finds by comparing the bits. */

#include <stdbool.h>

#include "floats.h"
#include "parallel.h"

enum { WIDE = 8, BROAD = 2 };                       /* floats in lanes, lanes of columns at once */
enum { DEEP = 8, HIGH = 2, ACROSS = 512 };          /* products, rows and columns at once of a product that is added to a base */
enum { ROWS = 8, FEW = 4, CHAINS = 4, LONG = 256 }; /* rows at once of sums along rows, in one and in several chains */
enum { TALL = 64, MOST_TILES = 8 };                 /* rows at once of sums along columns, lanes of the thin matrix */

typedef float lanes __attribute__((vector_size(4 * WIDE), aligned(4)));

#define EACH(x) ((lanes){(x), (x), (x), (x), (x), (x), (x), (x)})

/* Sums over the inner index of a wide and a thin matrix: along the wide one's rows or along its columns. */
struct sums {
    int dtype;          /* of x */
    bool has_rank_first; /* along columns: out is (rank, columns), else (columns, rank) */
    float *out;
    const void *x;      /* the wide matrix: (rows, inner) or (inner, columns) */
    const float *thin;  /* (inner, rank) */
    float scale;        /* of the wide matrix */
    uint64_t first, last; /* the range of rows, or of columns */
    uint64_t inner, columns, rank;
    uint64_t block;     /* products of which sums are taken that are then added; 0: CHAINS sums by the index modulo CHAINS */
    bool is_fused;      /* whether a product and its addition round once */
};

#define FOR_SET(name) name##_plain
#define MULTIPLY_ADD(x, y, sum) fused_lanes((x), (y), (sum))
#define fused_lanes(x, y, sum)                                                                                              \
    ({                                                                                                                      \
        const lanes left_ = (x), right_ = (y);                                                                              \
        lanes result_ = (sum);                                                                                              \
        for (size_t lane_ = 0; lane_ < WIDE; lane_++)                                                                       \
            result_[lane_] = __builtin_fmaf(left_[lane_], right_[lane_], result_[lane_]);                                   \
        result_;                                                                                                            \
    })
#include "thin.h"

#ifdef HAS_CLONES
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define FOR_SET(name) name##_avx2
#define MULTIPLY_ADD(x, y, sum) (lanes) _mm256_fmadd_ps((__m256)(x), (__m256)(y), (__m256)(sum))
#include "thin.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define FOR_SET(name) name##_avx512
#define MULTIPLY_ADD(x, y, sum) (lanes) _mm256_fmadd_ps((__m256)(x), (__m256)(y), (__m256)(sum))
#include "thin.h"
#pragma GCC pop_options

static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static bool has_avx512(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#define BEST(name, ...)                                                                                                     \
    do {                                                                                                                    \
        if (has_avx512())                                                                                                   \
            name##_avx512(__VA_ARGS__);                                                                                     \
        else if (has_avx2())                                                                                                \
            name##_avx2(__VA_ARGS__);                                                                                       \
        else                                                                                                                \
            name##_plain(__VA_ARGS__);                                                                                      \
    } while (0)
#else
#define BEST(name, ...) name##_plain(__VA_ARGS__)
#endif

/* Whether the processor multiplies and adds in one instruction: in software it would take a hundred times as long. */
PUBLIC int zo2core_has_fused_products(void) {
#ifdef HAS_CLONES
    return has_avx2();
#elif defined(__aarch64__) || defined(__FMA__)
    return 1;
#else
    return 0;
#endif
}

/* What ``zo2core_thin_product`` is given. */
struct addition {
    int dtype;
    void *out;
    const void *base;
    const float *left, *right;
    float scale;
    uint64_t columns, rank;
};

static void add_rows(const void *addition, uint64_t first, uint64_t last) {
    const struct addition *of = addition;
    const uint64_t place = first * of->columns * (of->dtype == FLOAT32 ? 4 : 2);
    BEST(
        add_thin_product, of->dtype, (char *)of->out + place, of->base ? (const char *)of->base + place : NULL,
        of->left + first * of->rank, of->right, of->scale, last - first, of->columns, of->rank);
}

/* out = round(base + scale * (left right)), or without a base out = round(left right), in parts of `rows_at_once` rows.
 *
 * out and base have `rows` of `columns` numbers of the dtype, and may be the same memory; left (rows, rank) and right
 * (rank, columns) are float32. Products are added one after the other, each in one rounding. */
PUBLIC void zo2core_thin_product(
    int dtype, void *out, const void *base, const float *left, const float *right, float scale, uint64_t rows,
    uint64_t columns, uint64_t rank, uint64_t rows_at_once, unsigned threads) {
    const struct addition of = {dtype, out, base, left, right, scale, columns, rank};
    run_in_parts(add_rows, &of, rows, rows_at_once, threads);
}

static void sum_rows(const void *sums, uint64_t first, uint64_t last) {
    struct sums of = *(const struct sums *)sums;
    of.first = first, of.last = last;
    BEST(sum_along_rows, &of, of.is_fused);
}

static void sum_some_columns(const void *sums, uint64_t first, uint64_t last) {
    struct sums of = *(const struct sums *)sums;
    of.first = first, of.last = last;
    BEST(sum_along_columns, &of, of.is_fused);
}

/* out (rows, rank) = (scale * x) thin, for x (rows, inner) and thin (inner, rank), in parts of `rows_at_once` rows. rank is a
 * multiple of WIDE, and without a block inner is one of CHAINS. */
PUBLIC void zo2core_row_sums(
    int dtype, float *out, const void *x, const float *thin, float scale, uint64_t rows, uint64_t inner, uint64_t rank,
    uint64_t block, int is_fused, uint64_t rows_at_once, unsigned threads) {
    const struct sums of = {
        .dtype = dtype, .out = out, .x = x, .thin = thin, .scale = scale, .inner = inner, .rank = rank, .block = block,
        .is_fused = is_fused};
    run_in_parts(sum_rows, &of, rows, rows_at_once, threads);
}

/* out (rank, columns) = thin^T (scale * x), or its transpose, for x (inner, columns) and thin (inner, rank), in parts of
 * `columns_at_once` columns. rank is a multiple of WIDE. */
PUBLIC void zo2core_column_sums(
    int dtype, float *out, const void *x, const float *thin, float scale, uint64_t columns, uint64_t inner, uint64_t rank,
    uint64_t block, int is_fused, uint64_t columns_at_once, unsigned threads, int has_rank_first) {
    const struct sums of = {
        .dtype = dtype, .has_rank_first = has_rank_first, .out = out, .x = x, .thin = thin, .scale = scale, .inner = inner,
        .columns = columns, .rank = rank, .block = block, .is_fused = is_fused};
    run_in_parts(sum_some_columns, &of, columns, columns_at_once, threads);
}
