/* Vectors of the processor's width, the activations of recurrent layers, and small products.

GCC and Clang turn the vector types into the instructions that the processor has. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define V 16 /* numbers in a vector */
#define R 6  /* rows of a product whose sums stay in registers, for four vectors each */
#elif defined(__AVX__)
#define V 8
#define R 3
#elif defined(__aarch64__)
#define V 4
#define R 6
#else
#define V 4
#define R 3
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float vec __attribute__((vector_size(4 * V)));
typedef float loose_vec __attribute__((vector_size(4 * V), aligned(4), may_alias));
typedef int32_t int_vec __attribute__((vector_size(4 * V)));
typedef ptrdiff_t num;

INLINE vec load(const float *at) { return *(const loose_vec *)at; }
INLINE void store(float *at, vec v) { *(loose_vec *)at = v; }
INLINE vec splat(float a) { return a - (vec){0}; }
INLINE vec pick(int_vec where, vec a, vec b) {
    return (vec)((where & (int_vec)a) | (~where & (int_vec)b));
}
INLINE num min(num a, num b) { return a < b ? a : b; }
INLINE num round_up(num n) { return (n + V - 1) / V * V; }

/* ---- activations: at most a few units in the last place off, NaN stays NaN ---- */

/* 2^y is power * (1 + the result), for y within `most` of zero. */
INLINE vec exp2_parts(vec y, float most, vec *power) {
    const vec rounding = splat(12582912.0f + 127.0f); /* 1.5 * 2^23 + the exponent's bias */
    y = pick(y > splat(most), splat(most), y);
    y = pick(y < splat(-most), splat(-most), y);
    const vec n = y + rounding; /* its low bits are the exponent of the nearest power */
    *power = (vec)((int_vec)n << 23);
    const vec r = y - (n - rounding), square = r * r;
    const vec high = 1.535336188e-4f * r + 1.339887440e-3f;
    const vec middle = 9.618437358e-3f * r + 5.550332471e-2f;
    const vec low = 2.402264791e-1f * r + 6.931472029e-1f;
    return ((high * square + middle) * square + low) * r;
}

INLINE vec sigmoid(vec x) {
    vec power, rest = exp2_parts(x * -1.44269504f, 126.0f, &power);
    return 1.0f / ((1.0f + power) + power * rest);
}

INLINE vec tanh_of(vec x) {
    vec power, rest = exp2_parts(x * 2.88539008f, 60.0f, &power);
    const vec less_one = power * rest + (power - 1.0f); /* keeps the digits of a small x */
    return less_one / (less_one + 2.0f);
}

/* ---- products: out[r][n] += sum over k < count of a[r, k] * w[k][n], n of a few vectors ---- */

typedef struct {
    const float *a;
    num a_row, a_step; /* between the numbers of two rows, and of two k */
    const float *w;
    num w_step;
    float *out;
    num out_row;
    num count;
} Product;

INLINE void multiply(const Product *p, const int rows, const int vectors) {
    vec sums[R][4];
    const num a_row = p->a_row, a_step = p->a_step, w_step = p->w_step;
    const float *a = p->a, *w = p->w;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int n = 0; n < vectors; n++) sums[r][n] = splat(0);
    for (num k = p->count; k > 0; k--) {
        vec here[4];
        UNROLL for (int n = 0; n < vectors; n++) here[n] = load(w + n * V);
        UNROLL for (int r = 0; r < rows; r++) {
            const float factor = a[r * a_row];
            UNROLL for (int n = 0; n < vectors; n++) sums[r][n] += here[n] * factor;
        }
        a += a_step;
        w += w_step;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int n = 0; n < vectors; n++) {
            float *out = p->out + r * p->out_row + n * V;
            store(out, load(out) + sums[r][n]);
        }
}

typedef void (*Multiply)(const Product *);
#define MULTIPLY(rows, vectors) \
    static void multiply_##rows##_##vectors(const Product *p) { multiply(p, rows, vectors); }
#define MULTIPLY_ROWS(rows) MULTIPLY(rows, 1) MULTIPLY(rows, 2) MULTIPLY(rows, 3) MULTIPLY(rows, 4)
#define NAMES(rows) {multiply_##rows##_1, multiply_##rows##_2, multiply_##rows##_3, multiply_##rows##_4}
MULTIPLY_ROWS(1) MULTIPLY_ROWS(2) MULTIPLY_ROWS(3)
#if R > 3
MULTIPLY_ROWS(4) MULTIPLY_ROWS(5) MULTIPLY_ROWS(6)
static const Multiply MULTIPLIES[R][4] = {NAMES(1), NAMES(2), NAMES(3), NAMES(4), NAMES(5), NAMES(6)};
#else
static const Multiply MULTIPLIES[R][4] = {NAMES(1), NAMES(2), NAMES(3)};
#endif

/* The same for any number of rows, in blocks of about one size. */
static void multiply_rows(Product p, num rows, num vectors) {
    const num blocks = (rows + R - 1) / R;
    const float *a = p.a;
    float *out = p.out;
    for (num block = 0; block < blocks; block++) {
        const num first = rows * block / blocks, end = rows * (block + 1) / blocks;
        p.a = a + first * p.a_row;
        p.out = out + first * p.out_row;
        MULTIPLIES[end - first - 1][vectors - 1](&p);
    }
}
