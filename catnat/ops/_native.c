/* Fused CPU kernels, float32: log-probabilities of a tree of binary splits and of sparsemax, their
 * gradients, and the Fisher diagonal of the tree. Plain C called through ctypes; no Python or torch headers.
 *
 * Scores are (B, K-1) or (B, K), rows contiguous. A kernel works through blocks of rows small
 * enough for the first-level cache: elementwise mathematics over the whole block (vectorized by
 * the compiler), then one walk over each row's tree; a long row is walked block by block. Built with
 * -ffinite-math-only, which makes comparisons cheap to vectorize; NaN is looked for in the bits and
 * put into the results.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__ /* vectors of 16 floats slow the many reductions over short rows down */
#define NARROW __attribute__((target("prefer-vector-width=256")))
#else
#define NARROW
#endif

#define LOG_ZERO -1000.0f
#define SHORT 64 /* categories from which on a row is long */
#define BLOCK 1024 /* scores a block holds, unless one row is longer */
#define LARGEST (3.4028234663852886e38f / 16777216) /* 2^24 */

enum { SIGMOID = 0, NATURAL = 1, TAILED = 2 }; /* TAILED: natural with a tail */

typedef struct {
    int kind;
    float rate, high, low; /* natural: pi/A, and A/2 as a sum of two floats */
    float joint, steepness, at_edge; /* tail: where it begins, slope of log p, log p at the edge */
} split;

typedef struct {
    const float *scores, *grad, *constants; /* constants: (R, S), or NULL where centred at 0 */
    float *out;
    long rows, categories;
    split split;
    int failed;
} job;

typedef void (*kernel)(job *, long first, long last);

/* ------------------------------------------------------------------ elementary functions */

static inline int bits_of(float x) {
    union { float f; int i; } u = {x};
    return u.i;
}

static inline float from_bits(int i) {
    union { int i; float f; } u = {i};
    return u.f;
}

/* All bits set where x is NaN, none elsewhere; without a branch, so that loops vectorize. */
static inline int nan_mask(float x) { return -((bits_of(x) & 0x7fffffff) > 0x7f800000); }

/* All bits set where x is finite. */
static inline int finite_mask(float x) { return ((bits_of(x) & 0x7fffffff) - 0x7f800000) >> 31; }

/* y, or 0 where x is NaN. */
static inline float drop_nan(float y, float x) { return from_bits(bits_of(y) & ~nan_mask(x)); }

/* y, or NaN where x is NaN. */
static inline float keep_nan(float y, float x) { return from_bits(bits_of(y) | nan_mask(x)); }

/* exp(-x) for x >= 0, not below 1e-38. Polynomials are in Estrin's form: short chains. */
static inline float exp_minus(float x) {
    x = fminf(x, 87.0f);
    float shifted = 12582912.0f - x * 1.44269504f; /* adding 1.5 * 2^23 rounds to an integer, */
    float n = shifted - 12582912.0f; /* which is then also in the lowest bits of the sum */
    float r = n * 2.12194440e-4f - (n * 0.693359375f + x), r2 = r * r;
    float p = (4.999999341e-1f + 1.666652011e-1f * r) +
              ((4.166839437e-2f + 8.368780366e-3f * r) + 1.381445948e-3f * r2) * r2;
    float power = (1.0f + r) + r2 * p; /* of e, relative error of the polynomial below 4e-9 */
    return from_bits(bits_of(power) + (int)((unsigned)bits_of(shifted) << 23));
}

/* exp(x) for x <= 0, and exactly 0 where that would be below 1e-38. */
static inline float exp_or_zero(float x) { return x < -87.0f ? 0.0f : exp_minus(-x); }

/* 2 atanh(t) = log((1 + t) / (1 - t)) for |t| <= 1/3. */
static inline float two_atanh(float t) {
    float u = t * t, u2 = u * u, u4 = u2 * u2;
    float p = ((2.0f / 3 + 2.0f / 5 * u) + (2.0f / 7 + 2.0f / 9 * u) * u2) +
              ((2.0f / 11 + 2.0f / 13 * u) + 2.0f / 15 * u2) * u4; /* the next term is < 3e-9 */
    return 2.0f * t + t * u * p;
}

static inline float log1p_unit(float x) { return two_atanh(x / (2.0f + x)); } /* -1/2 <= x <= 1 */

/* -log(1 + x) for 0 <= x <= 1; relative error of the polynomial below 5e-9. */
static inline float minus_log1p(float x) {
    float u = x * x, u2 = u * u, u4 = u2 * u2;
    float p = ((-9.999999953e-1f + 4.999990241e-1f * x) +
               (-3.332996218e-1f + 2.495413185e-1f * x) * u) +
              ((-1.967593218e-1f + 1.530557712e-1f * x) +
               (-1.060363557e-1f + 5.695940005e-2f * x) * u) * u2 +
              (-1.985141648e-2f + 3.244019883e-3f * x) * u4;
    return x * p;
}

/* log(x) for normal x > 0; relative error of the polynomial below 5e-9. A division would be slow. */
static inline float log_positive(float x) {
    int e = (bits_of(x) - 0x3f2aaaab) >> 23; /* x = 2^e (1 + f), -1/3 <= f < 1/3 */
    float f = from_bits(bits_of(x) - e * (1 << 23)) - 1.0f, f2 = f * f, f4 = f2 * f2;
    float p = ((-0.5f + 3.333320916e-1f * f) + (-2.499971688e-1f + 2.001074702e-1f * f) * f2) +
              (((-1.668230593e-1f + 1.400116086e-1f * f) +
                (-1.216715574e-1f + 1.400475800e-1f * f) * f2) - 1.294895709e-1f * f4) * f4;
    return (float)e * 0.693147182f + (f + f2 * p);
}

/* 2 log cos(x) for u = x^2, 0 <= x <= pi/4; relative error below 3e-9. */
static inline float log_cos_squared(float u) {
    float u2 = u * u, u4 = u2 * u2;
    float p = ((-1.000000002f - 1.666663549e-1f * u) +
               (-4.445224194e-2f - 1.341941110e-2f * u) * u2) +
              ((-4.691762294e-3f - 7.845413504e-4f * u) - 1.204253843e-3f * u2) * u4;
    return p * u;
}

/* 2 log sin(x) = 2 log(x) + 2 log(sin(x) / x), x normal; error of the second term below 1e-9. */
static inline float log_sin_squared(float x, float u) {
    float p = (-3.333332833e-1f - 1.111189001e-2f * u) +
              (-7.017163058e-4f - 5.993279433e-5f * u) * (u * u);
    return 2.0f * log_positive(x) + p * u;
}

/* tan(x) for 0 <= x <= pi/4; relative error of the polynomial below 2e-9. */
static inline float tan_eighth(float x) {
    float u = x * x, u2 = u * u, u4 = u2 * u2;
    float p = ((9.999999988e-1f + 3.333335752e-1f * u) +
               (1.333252167e-1f + 5.407113447e-2f * u) * u2) +
              ((2.123693302e-2f + 1.093316064e-2f * u) +
               (-1.681492161e-5f + 4.422663114e-3f * u) * u2) * u4;
    return x * p;
}

/* ------------------------------------------------------------------------ binary splits */

static inline void sigmoid_logs(float x, float *left, float *right) {
    float within = fmaxf(fminf(x, LARGEST), -LARGEST);
    float tail = keep_nan(minus_log1p(exp_minus(fabsf(within))), x);
    *left = tail - fmaxf(within, 0.0f);
    *right = tail + fminf(within, 0.0f);
}

static inline void sigmoid_slopes(float x, float *left, float *right) {
    float e = exp_minus(fabsf(x)), major = (fabsf(x) > LARGEST ? 0.0f : 1.0f) / (1.0f + e);
    major = keep_nan(major, x);
    float minor = e * major;
    *left = x > 0 ? major : minor;
    *right = x > 0 ? minor : major;
}

/* theta for the distance d to the nearer edge; 1e-30 on an edge or beyond it. */
static inline float angle(float d, split s) { return fmaxf(d * (0.5f * s.rate), 1e-30f); }

/* above, below: distances of x to the upper and to the lower edge. One NaN is put where both results
 * come from it by sums and products alone. */
static inline void natural_logs(float x, float above, float below, split s, float *left,
                                float *right) {
    float d = fminf(above, below), theta = keep_nan(angle(d, s), x), u = theta * theta;
    float rare = d > 0 ? log_sin_squared(theta, u) : LOG_ZERO - theta, likely = log_cos_squared(u);
    *left = above < below ? rare : likely;
    *right = above < below ? likely : rare;
}

static inline void natural_slopes(float x, float above, float below, split s, float *left,
                                  float *right) {
    float d = fminf(above, below), t = tan_eighth(angle(d, s));
    float scale = keep_nan(d > 0 ? s.rate : 0.0f, x), steep = scale / t, gentle = scale * t;
    *left = above < below ? steep : gentle;
    *right = above < below ? gentle : steep;
}

/* log p of the rarer bit in the tail, log p = log tail before it. */
static inline float tail_log(float d, split s) {
    return fmaxf(s.at_edge + s.steepness * fminf(d, s.joint), -LARGEST);
}

static inline void tailed_logs(float x, float above, float below, split s, float *left,
                               float *right) {
    float d = fminf(above, below), theta = angle(d, s), u = theta * theta;
    float log_p = tail_log(d, s), p = exp_minus(-log_p);
    float rare = d > s.joint ? log_sin_squared(theta, u) : log_p;
    float likely = d > s.joint ? log_cos_squared(u) : log1p_unit(-p);
    *left = keep_nan(above < below ? rare : likely, x);
    *right = keep_nan(above < below ? likely : rare, x);
}

static inline void tailed_slopes(float x, float above, float below, split s, float *left,
                                 float *right) {
    float d = fminf(above, below), t = tan_eighth(angle(d, s));
    float log_p = tail_log(d, s), p = exp_minus(-log_p);
    float r = log_p > -LARGEST ? s.steepness : 0.0f;
    float steep = d > s.joint ? s.rate / t : r;
    float gentle = d > s.joint ? s.rate * t : r * (p / (1.0f - p));
    *left = keep_nan(above < below ? steep : gentle, x);
    *right = keep_nan(above < below ? gentle : steep, x);
}

/* Fisher information a'^2 / (a (1 - a)), and 1 where the split is flat. */
static inline void sigmoid_information(float x, float *information, float *flat) {
    float left, right;
    sigmoid_slopes(x, &left, &right);
    *information = left * right;
    *flat = 0.0f;
}

static inline void natural_information(float x, float above, float below, split s,
                                       float *information, float *flat) {
    float d = fminf(above, below);
    *information = keep_nan(d < 0 ? 0.0f : s.rate * s.rate, x);
    *flat = drop_nan(d <= 0 ? 1.0f : 0.0f, x);
}

static inline void tailed_information(float x, float above, float below, split s,
                                      float *information, float *flat) {
    float d = fminf(above, below), log_p = tail_log(d, s);
    float p = exp_minus(-log_p), r = log_p > -LARGEST ? s.steepness : 0.0f;
    *information = keep_nan(d > s.joint ? s.rate * s.rate : r * (r * (p / (1.0f - p))), x);
    *flat = 0.0f;
}

/* Apply a function to number i of all rows: to whole vectors, and then to the last 16 numbers of a
 * row, some of them a second time. The numbers that vectors leave over would be slow one by one. */
#define TILE 16
#define EACH(FUNCTION, ...)                                                                        \
    for (long r = 0; r < rows; r++, x += n, left += n, right += n) {                               \
        for (long i = 0; i < (n & -TILE); i++) FUNCTION(__VA_ARGS__, left + i, right + i);         \
        if (n % TILE)                                                                              \
            for (long i = n < TILE ? 0 : n - TILE; i < n; i++)                                     \
                FUNCTION(__VA_ARGS__, left + i, right + i);                                        \
    }

/* Apply one of the functions above to n scores of each row; c: the constants of these scores. */
#define SPLIT_ROWS(NAME, SIGMOID_FUNCTION, NATURAL_FUNCTION, TAILED_FUNCTION)                      \
    static void NAME(const job *j, const float *restrict x, const float *restrict c, long rows,    \
                     long n, float *restrict left, float *restrict right) {                        \
        long S = j->categories - 1;                                                                \
        split s = j->split;                                                                        \
        if (!c) n *= rows, rows = 1;                                                               \
        if (s.kind == SIGMOID && !c) {                                                             \
            EACH(SIGMOID_FUNCTION, x[i])                                                           \
        } else if (s.kind == SIGMOID) {                                                            \
            EACH(SIGMOID_FUNCTION, x[i] - c[i])                                                    \
        } else if (s.kind == NATURAL && !c) {                                                      \
            EACH(NATURAL_FUNCTION, x[i], (s.high - x[i]) + s.low, (x[i] + s.high) + s.low, s)      \
        } else if (s.kind == NATURAL) {                                                            \
            EACH(NATURAL_FUNCTION, x[i], (c[i] - x[i]) + c[S + i],                                 \
                 (x[i] - c[2 * S + i]) - c[3 * S + i], s)                                          \
        } else if (!c) {                                                                           \
            EACH(TAILED_FUNCTION, x[i], (s.high - x[i]) + s.low, (x[i] + s.high) + s.low, s)       \
        } else {                                                                                   \
            EACH(TAILED_FUNCTION, x[i], (c[i] - x[i]) + c[S + i],                                  \
                 (x[i] - c[2 * S + i]) - c[3 * S + i], s)                                          \
        }                                                                                          \
    }
SPLIT_ROWS(split_logs, sigmoid_logs, natural_logs, tailed_logs)
SPLIT_ROWS(split_slopes, sigmoid_slopes, natural_slopes, tailed_slopes)
SPLIT_ROWS(split_information, sigmoid_information, natural_information, tailed_information)

/* ---------------------------------------------------------------------- walks over trees */

/* Heap node j has children 2j and 2j+1 and owns score j-1; nodes K..2K-1 are leaves.
 * Loops run over the nodes of one level, because such loops can be vectorized. */

#ifdef __AVX2__ /* vectors with permutations: the uppermost levels are then one vector */
#ifdef __AVX512F__
#define LANES 16
#define HEIGHT 4 /* 2^4 lanes */
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define LANES 8
#define HEIGHT 3
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#endif
#define TOP LANES
#define IN_VECTORS(n) ((n) & -LANES)
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int places __attribute__((vector_size(4 * LANES)));
static const places numbers = NUMBERS;

INLINE vec load(const float *x) { return *(const vec_in_memory *)x; }
INLINE void store(float *x, vec v) { *(vec_in_memory *)x = v; }

/* The numbers at these places, modulo 2 LANES, of a and b in a row. */
INLINE vec take(vec a, vec b, places p) {
#ifdef __AVX512F__
    return (vec)_mm512_permutex2var_ps((__m512)a, (__m512i)p, (__m512)b);
#else
    __m256 from_a = _mm256_permutevar8x32_ps((__m256)a, (__m256i)p);
    __m256 from_b = _mm256_permutevar8x32_ps((__m256)b, (__m256i)p);
    return (vec)_mm256_blendv_ps(from_a, from_b, (__m256)(p << 28)); /* by the bit of value 8 */
#endif
}

/* Nodes TOP..2 TOP - 1: the sum over the path from the root. */
INLINE void descend_top(const float *left, const float *right, float *heap) {
    vec l = load(left), r = load(right), sum = {0};
    for (int up = HEIGHT; up > 0; up--) { /* the ancestor so many levels above */
        places bit = (numbers >> (up - 1)) & 1, score = (numbers >> up) + ((TOP >> up) - 1);
        sum += take(l, r, score + bit * LANES);
    }
    store(heap + TOP, sum);
}

/* Nodes 1..TOP-1: the gradients of their scores, from the sums at nodes TOP..2 TOP - 1. */
INLINE void ascend_top(const float *left, const float *right, const float *heap, float *out) {
    vec low = {0}, high = load(heap + TOP); /* the sums at nodes 0..TOP-1 and TOP..2 TOP - 1 */
    for (int level = 1; level < HEIGHT; level++) /* each time the lowest one missing becomes right */
        low = take(low, high, 2 * numbers) + take(low, high, 2 * numbers + 1);
    vec a = take(low, high, 2 * numbers + 2), b = take(low, high, 2 * numbers + 3);
    float next = out[TOP - 1];
    store(out, b * load(right) - a * load(left));
    out[TOP - 1] = next;
}
#else
#define TOP 16
#define IN_VECTORS(n) 0
#endif

/* Values at the children of n nodes of a level, from the values at these nodes. */
INLINE void children(const float *restrict here, const float *restrict left,
                     const float *restrict right, long n, float *restrict pair) {
#ifdef LANES
    for (long i = 0; i < IN_VECTORS(n); i += LANES) {
        vec h = load(here + i), a = h + load(left + i), b = h + load(right + i);
        places half = numbers >> 1, other = (numbers & 1) * LANES;
        store(pair + 2 * i, take(a, b, half + other));
        store(pair + 2 * i + LANES, take(a, b, half + other + LANES / 2));
    }
#endif
    for (long i = IN_VECTORS(n); i < n; i++) {
        pair[2 * i] = here[i] + left[i];
        pair[2 * i + 1] = here[i] + right[i];
    }
}

/* log P(node) of the internal nodes, or, where that is enough, of the lower ones among them. */
INLINE void descend_inside(long K, const float *restrict left, const float *restrict right,
                           float *restrict heap, int all) {
    heap[1] = 0;
    long first = 1, nodes = K / 2; /* nodes first..nodes-1 have two internal children */
#ifdef LANES
    if (!all && nodes >= TOP) {
        descend_top(left, right, heap);
        first = TOP;
    }
#endif
#define LEVEL(n)                                                                                   \
    if (first == n && nodes >= 2 * n) {                                                            \
        children(heap + n, left + n - 1, right + n - 1, n, heap + 2 * n);                          \
        first = 2 * n;                                                                             \
    }
    LEVEL(1) LEVEL(2) LEVEL(4) LEVEL(8)
#undef LEVEL
    for (; first < nodes; first *= 2)
        children(heap + first, left + first - 1, right + first - 1,
                 (2 * first < nodes ? 2 * first : nodes) - first, heap + 2 * first);
    if (K % 2) heap[K - 1] = heap[K / 2] + left[K / 2 - 1]; /* its sibling K is a leaf */
}

static void descend(long K, const float *restrict left, const float *restrict right,
                    float *restrict heap, float *restrict out) {
    descend_inside(K, left, right, heap, 0);
    long j = K / 2;
    if (K % 2) {
        out[0] = heap[j] + right[j - 1];
        j++;
    }
    children(heap + j, left + j - 1, right + j - 1, K - j, out + (2 * j - K));
}

/* Sums over both children of n nodes of a level, and the gradients of the nodes' scores. */
INLINE void parents(const float *restrict pair, const float *restrict left,
                    const float *restrict right, long n, float *restrict here,
                    float *restrict out) {
#ifdef LANES
    for (long i = 0; i < IN_VECTORS(n); i += LANES) {
        vec low = load(pair + 2 * i), high = load(pair + 2 * i + LANES);
        vec a = take(low, high, 2 * numbers), b = take(low, high, 2 * numbers + 1);
        store(here + i, a + b);
        store(out + i, b * load(right + i) - a * load(left + i));
    }
#endif
    for (long i = IN_VECTORS(n); i < n; i++) {
        float a = pair[2 * i], b = pair[2 * i + 1];
        here[i] = a + b;
        out[i] = b * right[i] - a * left[i];
    }
}

static void ascend(long K, const float *restrict left, const float *restrict right,
                   const float *restrict grad, float *restrict heap, float *restrict out) {
    long j = K / 2 + K % 2; /* first node whose children are both leaves */
    parents(grad + (2 * j - K), left + j - 1, right + j - 1, K - j, heap + j, out + j - 1);
    if (K % 2) { /* node K/2 has the internal child K-1 and the leaf K */
        j--;
        float a = heap[K - 1], b = grad[0];
        heap[j] = a + b;
        out[j - 1] = b * right[j - 1] - a * left[j - 1];
    }
    long first = TOP; /* nodes 1..j-1 are left */
    while (2 * first < j) first *= 2;
    for (; first >= TOP && first < j; first /= 2) {
        parents(heap + 2 * first, left + first - 1, right + first - 1,
                (2 * first < j ? 2 * first : j) - first, heap + first, out + first - 1);
        j = first;
    }
    if (j == TOP) {
#ifdef LANES
        ascend_top(left, right, heap, out);
#else
#define LEVEL(n) parents(heap + 2 * n, left + n - 1, right + n - 1, n, heap + n, out + n - 1);
        LEVEL(8) LEVEL(4) LEVEL(2) LEVEL(1)
#undef LEVEL
#endif
        return;
    }
    for (j--; j > 0; j--) parents(heap + 2 * j, left + j - 1, right + j - 1, 1, heap + j, out + j - 1);
}

/* P(node) times the information of its split, and in the last place the share of flat splits. */
static void weigh(long rows, long K, const float *restrict log_p, float *restrict information,
                  const float *restrict flat, float *restrict out) {
    long S = K - 1;
    for (long i = 0; i < rows * S; i++)
        information[i] = keep_nan(exp_or_zero(log_p[i]) * information[i], log_p[i]);
    for (long r = 0; r < rows; r++) { /* rows are short: the exponentials are computed before */
        float count = 0;
#pragma omp simd reduction(+ : count)
        for (long i = 0; i < S; i++) {
            out[r * K + i] = information[r * S + i];
            count += flat[r * S + i];
        }
        out[r * K + S] = count / (float)S;
    }
}

/* Both walks for a long row, K >= 2 BLOCK: a block of nodes is split, and the walk goes through it
 * at once. Nodes below `half` have their children in the heap; if K is odd, so is one leaf, K. */
static void descend_long(const job *j, const float *scores, float *left, float *right, float *heap,
                         float *out) {
    long K = j->categories, half = (K + 1) / 2;
    const float *c = j->constants;
    split_logs(j, scores, c, 1, BLOCK - 1, left, right);
    descend(BLOCK, left, right, heap, heap + BLOCK);
    for (long node = BLOCK, n; node < K; node += n) {
        n = (node < half ? half : K) - node;
        n = n < BLOCK ? n : BLOCK;
        split_logs(j, scores + node - 1, c ? c + node - 1 : NULL, 1, n, left, right);
        children(heap + node, left, right, n, node < half ? heap + 2 * node : out + (2 * node - K));
    }
    if (K % 2) out[0] = heap[K];
}

static void ascend_long(const job *j, const float *scores, const float *grad, float *left,
                        float *right, float *heap, float *out) {
    long K = j->categories, half = (K + 1) / 2;
    const float *c = j->constants;
    if (K % 2) heap[K] = grad[0];
    for (long end = K, n; end > BLOCK; end -= n) {
        n = end - (end > half ? half : BLOCK);
        n = n < BLOCK ? n : BLOCK;
        long node = end - n;
        split_slopes(j, scores + node - 1, c ? c + node - 1 : NULL, 1, n, left, right);
        parents(node < half ? heap + 2 * node : grad + (2 * node - K), left, right, n, heap + node,
                out + node - 1);
    }
    split_slopes(j, scores, c, 1, BLOCK - 1, left, right);
    ascend(BLOCK, left, right, heap + BLOCK, heap, out);
}

/* Room for n floats and some more. What comes next begins with a cache line, and not at the same place
 * of a page as the n floats: a processor takes equal places for one and waits. */
static long padded(long n) { return (n + 32) / 16 * 16; }

static void walk_rows(job *j, long first, long last, int backward) {
    long K = j->categories, S = K - 1, chunk = S < BLOCK ? BLOCK / S : 1;
    int is_long = K >= 2 * BLOCK;
    long part = padded(is_long ? BLOCK : chunk * S);
    float *heap = aligned_alloc(64, sizeof(float) * (size_t)(padded(K + 1) + 2 * part));
    if (!heap) {
        j->failed = 1;
        return;
    }
    float *left = heap + padded(K + 1), *right = left + part;
    for (long row = first; row < last; row += chunk) {
        long n = last - row < chunk ? last - row : chunk;
        const float *scores = j->scores + row * S, *grad = backward ? j->grad + row * K : NULL;
        float *out = j->out + row * (backward ? S : K);
        if (is_long && backward) {
            ascend_long(j, scores, grad, left, right, heap, out);
        } else if (is_long) {
            descend_long(j, scores, left, right, heap, out);
        } else if (backward) {
            split_slopes(j, scores, j->constants, n, S, left, right);
            for (long r = 0; r < n; r++)
                ascend(K, left + r * S, right + r * S, grad + r * K, heap, out + r * S);
        } else {
            split_logs(j, scores, j->constants, n, S, left, right);
            for (long r = 0; r < n; r++)
                descend(K, left + r * S, right + r * S, heap, out + r * K);
        }
    }
    free(heap);
}

static void forward_rows(job *j, long first, long last) { walk_rows(j, first, last, 0); }
static void backward_rows(job *j, long first, long last) { walk_rows(j, first, last, 1); }

static void fisher_rows(job *j, long first, long last) {
    long K = j->categories, S = K - 1, chunk = S < BLOCK ? BLOCK / S : 1, part = padded(chunk * S);
    float *left = aligned_alloc(64, sizeof(float) * (size_t)(5 * part));
    if (!left) {
        j->failed = 1;
        return;
    }
    float *right = left + part, *information = right + part, *flat = information + part;
    float *log_p = flat + part;
    for (long row = first; row < last; row += chunk) {
        long n = last - row < chunk ? last - row : chunk;
        const float *scores = j->scores + row * S;
        split_logs(j, scores, j->constants, n, S, left, right);
        split_information(j, scores, j->constants, n, S, information, flat);
        for (long r = 0; r < n; r++) /* node 1 is the first of a row */
            descend_inside(K, left + r * S, right + r * S, log_p + r * S - 1, 1);
        weigh(n, K, log_p, information, flat, j->out + row * K);
    }
    free(left);
}

/* ----------------------------------------------------------------------------- sparsemax */

INLINE void sparsemax_logs(const float *restrict s, long K, double top, double tau,
                           float *restrict out) {
    for (long k = 0; k < K; k++) {
        float p = (float)(((double)s[k] - top) - tau);
        out[k] = p > 0 ? log_positive(fmaxf(p, 1e-30f)) : LOG_ZERO;
    }
}

/* Newton's method on sum_k max(s_k - tau, 0) = 1, a convex piecewise linear equation: from below
 * tau only rises and the support only shrinks; once its size stays, tau is exact. First in float,
 * then from there in double, so that small probabilities keep their relative accuracy. */
INLINE void sparsemax_row(const float *restrict s, long K, float *restrict out) {
    float top = s[0];
    int nan = 0, finite = 0;
#pragma omp simd reduction(max : top) reduction(| : nan, finite)
    for (long k = 0; k < K; k++) {
        top = fmaxf(s[k], top);
        nan |= nan_mask(s[k]);
        finite |= finite_mask(s[k]);
    }
    nan |= ~finite | ~finite_mask(top); /* infinite scores leave no probabilities */
    for (long k = 0; k < K; k++) out[k] = keep_nan(fmaxf(s[k] - top, -2.0f), from_bits(nan));
    if (nan) return;
    float tau = -1, size = 0;
    for (;;) {
        float sum = 0, active = 0;
#pragma omp simd reduction(+ : sum, active)
        for (long k = 0; k < K; k++) {
            sum += fmaxf(out[k] - tau, 0.0f);
            active += out[k] > tau ? 1.0f : 0.0f;
        }
        if (active == size) break;
        tau += fmaxf((sum - 1) / active, 0.0f);
        size = active;
    }
    double exact = fmin(tau, -1.0 / (double)K), before = 0; /* tau <= -1/K, whatever rounding did */
    for (;;) {
        double sum = 0, active = 0;
#pragma omp simd reduction(+ : sum, active)
        for (long k = 0; k < K; k++) {
            double p = ((double)s[k] - top) - exact;
            sum += p > 0 ? p : 0.0;
            active += p > 0 ? 1.0 : 0.0;
        }
        if (active == before) break;
        exact += (sum - 1) / active; /* the first step may go down, to below the solution */
        before = active;
    }
    sparsemax_logs(s, K, top, exact, out);
}

/* With g = grad / p on the support: the gradient is g minus its mean there, and 0 elsewhere. */
INLINE void sparsemax_grad_row(const float *restrict log_probs, const float *restrict grad, long K,
                               float *restrict out) {
    float sum = 0, size = 0;
    int nan = 0;
#pragma omp simd reduction(+ : sum, size) reduction(| : nan)
    for (long k = 0; k < K; k++) {
        nan |= nan_mask(log_probs[k]);
        float inside = log_probs[k] <= LOG_ZERO ? 0.0f : 1.0f;
        float g = inside * grad[k] / exp_minus(inside * -log_probs[k]);
        out[k] = g;
        sum += g;
        size += inside;
    }
    float mean = sum / size;
    for (long k = 0; k < K; k++)
        out[k] = keep_nan(log_probs[k] <= LOG_ZERO ? 0.0f : out[k] - mean, from_bits(nan));
}

static void sparsemax_forward_rows(job *j, long first, long last) {
    long K = j->categories;
    for (long r = first; r < last; r++) sparsemax_row(j->scores + r * K, K, j->out + r * K);
}

static void sparsemax_backward_rows(job *j, long first, long last) {
    long K = j->categories;
    for (long r = first; r < last; r++)
        sparsemax_grad_row(j->scores + r * K, j->grad + r * K, K, j->out + r * K);
}

#ifdef LANES
/* The same for short rows, one in each lane of a vector: sums over a row become sums of vectors.
 * A lane keeps its threshold once it has found it: no row changes the numbers of another one. */
typedef double half __attribute__((vector_size(4 * LANES))); /* of the lanes */
typedef long long half_places __attribute__((vector_size(4 * LANES)));

#ifdef __AVX512F__
INLINE vec load_first(const float *x, long n) {
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), x);
}
INLINE half to_double(const float *x) { return (half)_mm512_cvtps_pd(_mm256_loadu_ps(x)); }
INLINE int any(places mask) {
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
}
INLINE void add_positive(vec p, vec *sum, places *count) {
    __mmask16 inside = _mm512_cmp_ps_mask((__m512)p, _mm512_setzero_ps(), _CMP_GT_OQ);
    *sum = (vec)_mm512_mask_add_ps((__m512)*sum, inside, (__m512)*sum, (__m512)p);
    *count = (places)_mm512_mask_add_epi32((__m512i)*count, inside, (__m512i)*count, _mm512_set1_epi32(1));
}
INLINE void add_positive_half(half p, half *sum, half_places *count) {
    __mmask8 inside = _mm512_cmp_pd_mask((__m512d)p, _mm512_setzero_pd(), _CMP_GT_OQ);
    *sum = (half)_mm512_mask_add_pd((__m512d)*sum, inside, (__m512d)*sum, (__m512d)p);
    *count = (half_places)_mm512_mask_add_epi64((__m512i)*count, inside, (__m512i)*count, _mm512_set1_epi64(1));
}
#else
INLINE vec load_first(const float *x, long n) {
    return (vec)_mm256_maskload_ps(x, (__m256i)(numbers < (int)n));
}
INLINE half to_double(const float *x) { return (half)_mm256_cvtps_pd(_mm_loadu_ps(x)); }
INLINE int any(places mask) { return !_mm256_testz_si256((__m256i)mask, (__m256i)mask); }
INLINE void add_positive(vec p, vec *sum, places *count) {
    places inside = p > 0.0f;
    *sum += (vec)(inside & (places)p);
    *count -= inside;
}
INLINE void add_positive_half(half p, half *sum, half_places *count) {
    half_places inside = p > 0.0;
    *sum += (half)(inside & (half_places)p);
    *count -= inside;
}
#endif

/* Rows become columns: columns 0..LANES-1 of n rows. The last row is there as often as needed. */
INLINE void turn(const float *rows, long n, long K, long columns, vec *tile) {
    vec v[LANES];
    for (int r = 0; r < LANES; r++) v[r] = load_first(rows + (r < n ? r : n - 1) * K, columns);
#pragma GCC unroll 4
    for (int d = 1; d < LANES; d *= 2) { /* exchange squares of d by d off the diagonal */
        places odd = (numbers & d) != 0;
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++)
            if (!(r & d)) {
                vec a = v[r], b = v[r + d];
                v[r] = take(a, b, numbers + (odd & (LANES - d)));
                v[r + d] = take(a, b, numbers + d + (odd & (LANES - d)));
            }
    }
    for (int r = 0; r < LANES; r++) tile[r] = v[r];
}

/* The largest score of every row; NaN where a row has no probabilities. */
INLINE vec tops(const vec *scores, long K) {
    vec top = scores[0];
    places nan = {0}, finite = {0};
    for (long k = 0; k < K; k++) {
        places size = (places)scores[k] & 0x7fffffff, above = scores[k] > top;
        nan |= size > 0x7f800000;
        finite |= size < 0x7f800000;
        top = (vec)((above & (places)scores[k]) | (~above & (places)top));
    }
    return (vec)((places)top | nan | ~finite | (((places)top & 0x7fffffff) >= 0x7f800000));
}

INLINE vec float_thresholds(const vec *scores, vec top, long K) {
    vec tau = (vec){0} - 1.0f, shifted[SHORT];
    places size = {0};
    for (long k = 0; k < K; k++) shifted[k] = scores[k] - top;
    for (;;) {
        vec sum = {0};
        places count = {0};
        for (long k = 0; k < K; k++) add_positive(shifted[k] - tau, &sum, &count);
        places open = count != size;
        if (!any(open)) return tau;
        vec step = (sum - 1.0f) / __builtin_convertvector(count, vec);
        tau += (vec)(open & (step > 0.0f) & (places)step);
        size = count;
    }
}

/* For one half of the lanes, from an estimate. */
INLINE half exact_thresholds(const float *scores, half top, half tau, long K) {
    half_places size = {0};
    for (;;) {
        half sum = {0};
        half_places count = {0};
        for (long k = 0; k < K; k++)
            add_positive_half((to_double(scores + k * LANES) - top) - tau, &sum, &count);
        half_places open = count != size;
        if (!any((places)open)) return tau;
        tau += (half)(open & (half_places)((sum - 1.0) / __builtin_convertvector(count, half)));
        size = count;
    }
}

static void sparsemax_forward_short(job *j, long first, long last) {
    long K = j->categories;
    vec scores[SHORT];
    for (long row = first; row < last; row += LANES) {
        const float *s = j->scores + row * K;
        long n = last - row < LANES ? last - row : LANES;
        for (long k = 0; k < K; k += LANES)
            turn(s + k, n, K, K - k < LANES ? K - k : LANES, scores + k);
        float top[LANES], estimate[LANES];
        double tau[LANES];
        vec largest = tops(scores, K);
        store(top, largest);
        store(estimate, float_thresholds(scores, largest, K));
        for (int r = 0; r < LANES; r++) /* tau <= -1/K, whatever rounding did */
            estimate[r] = fminf(estimate[r], -1.0f / (float)K);
        for (int h = 0; h < LANES; h += LANES / 2) {
            half exact = exact_thresholds((float *)scores + h, to_double(top + h), to_double(estimate + h), K);
            for (int r = 0; r < LANES / 2; r++) tau[h + r] = exact[r];
        }
        for (long r = 0; r < n; r++) {
            float *out = j->out + (row + r) * K;
            if (nan_mask(top[r]))
                for (long k = 0; k < K; k++) out[k] = from_bits(-1);
            else
                sparsemax_logs(s + r * K, K, top[r], tau[r], out);
        }
    }
}
#else
static void sparsemax_forward_short(job *j, long first, long last) {
    sparsemax_forward_rows(j, first, last);
}
#endif

/* The same for short rows. */
NARROW static void sparsemax_backward_short(job *j, long first, long last) {
    long K = j->categories;
    for (long r = first; r < last; r++)
        sparsemax_grad_row(j->scores + r * K, j->grad + r * K, K, j->out + r * K);
}

/* ------------------------------------------------------------------------ rows of a layer
 *
 * An output layer over a tree needs, for each token, the rows of its weight on one path. These
 * kernels read and write such rows alone: hidden is (M, D), weight (S, D), nodes (M, H).
 */

static int run(kernel kernel, job *job, int threads);

typedef struct {
    job job; /* first: a kernel gets its address; job.rows counts tokens or segments */
    const float *hidden, *weight, *bias, *grad;
    const long *nodes, *ends;
    float *out;
    long height, width;
} layer_job;

static float dot(const float *restrict a, const float *restrict b, long width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}

static void add_scaled(float *restrict out, const float *restrict row, float factor, long width) {
#pragma omp simd
    for (long i = 0; i < width; i++) out[i] += factor * row[i];
}

static void layer_score_rows(job *base, long first, long last) {
    layer_job *j = (layer_job *)base;
    for (long r = first; r < last; r++)
        for (long h = 0; h < j->height; h++) {
            long node = j->nodes[r * j->height + h];
            float sum = dot(j->hidden + r * j->width, j->weight + node * j->width, j->width);
            j->out[r * j->height + h] = j->bias ? sum + j->bias[node] : sum;
        }
}

static void layer_sum_rows(job *base, long first, long last) {
    layer_job *j = (layer_job *)base;
    for (long r = first; r < last; r++) {
        float *out = j->out + r * j->width;
        for (long i = 0; i < j->width; i++) out[i] = 0;
        for (long h = 0; h < j->height; h++) {
            long node = j->nodes[r * j->height + h];
            add_scaled(out, j->weight + node * j->width, j->grad[r * j->height + h], j->width);
        }
    }
}

/* Segment s holds the pairs ends[s-1]..ends[s]-1; pair i is the token nodes[i] times grad[i]. */
static void segment_sum_rows(job *base, long first, long last) {
    layer_job *j = (layer_job *)base;
    for (long s = first; s < last; s++) {
        float *out = j->out + s * j->width;
        for (long i = 0; i < j->width; i++) out[i] = 0;
        for (long i = s ? j->ends[s - 1] : 0; i < j->ends[s]; i++)
            add_scaled(out, j->hidden + j->nodes[i] * j->width, j->grad[i], j->width);
    }
}

int catnat_layer_scores(const float *hidden, const float *weight, const float *bias,
                       const long *nodes, float *out, long rows, long height, long width,
                       int threads) {
    layer_job j = {{0}, hidden, weight, bias, NULL, nodes, NULL, out, height, width};
    j.job.rows = rows;
    return run(layer_score_rows, &j.job, threads);
}

int catnat_layer_sums(const float *weight, const long *nodes, const float *grad, float *out,
                     long rows, long height, long width, int threads) {
    layer_job j = {{0}, NULL, weight, NULL, grad, nodes, NULL, out, height, width};
    j.job.rows = rows;
    return run(layer_sum_rows, &j.job, threads);
}

int catnat_segment_sums(const float *hidden, const float *grad, const long *tokens,
                        const long *ends, float *out, long segments, long pairs, long width,
                        int threads) {
    layer_job j = {{0}, hidden, NULL, NULL, grad, tokens, ends, out, pairs, width};
    j.job.rows = segments;
    return run(segment_sum_rows, &j.job, threads);
}

/* Adam on some rows: param, mean and square are (S, D); grad is (n, D), for the rows given. */
typedef struct {
    job job; /* job.rows = n */
    float *param, *mean, *square;
    const float *grad;
    const long *rows;
    long width;
    float beta1, beta2, step, scale, eps;
} adam_job;

static void adam_row(float *restrict p, float *restrict m, float *restrict v,
                                const float *restrict g, const adam_job *j) {
    float keep1 = 1 - j->beta1, keep2 = 1 - j->beta2;
    float beta2 = j->beta2, step = j->step, scale = j->scale, eps = j->eps;
#pragma omp simd
    for (long i = 0; i < j->width; i++) {
        float mean = m[i] + keep1 * (g[i] - m[i]), square = beta2 * v[i] + keep2 * (g[i] * g[i]);
        m[i] = mean;
        v[i] = square;
        p[i] -= step * mean / (sqrtf(square) * scale + eps);
    }
}

static void adam_rows(job *base, long first, long last) {
    adam_job *j = (adam_job *)base;
    for (long r = first; r < last; r++) {
        long at = j->rows[r] * j->width;
        adam_row(j->param + at, j->mean + at, j->square + at, j->grad + r * j->width, j);
    }
}

int catnat_adam_rows(float *param, float *mean, float *square, const float *grad,
                     const long *rows, long n, long width, float beta1, float beta2, float step,
                     float scale, float eps, int threads) {
    adam_job j = {{0}, param, mean, square, grad, rows, width, beta1, beta2, step, scale, eps};
    j.job.rows = n;
    return run(adam_rows, &j.job, threads);
}

/* ----------------------------------------------------------------------------- checksums */

/* CRC-32C of n bytes, which TensorBoard's event files need for every record. */
unsigned int catnat_crc32c(const unsigned char *data, long n) {
    static unsigned int table[256];
    if (!table[1])
        for (unsigned int i = 256; i-- > 0;) { /* table[1] last: then all the others are there */
            unsigned int x = i;
            for (int bit = 0; bit < 8; bit++) x = x >> 1 ^ (x & 1 ? 0x82f63b78u : 0);
            table[i] = x;
        }
    unsigned int crc = ~0u;
    for (long i = 0; i < n; i++) crc = table[(crc ^ data[i]) & 255] ^ crc >> 8;
    return ~crc;
}

/* ------------------------------------------------------------------------------- threads */

typedef struct {
    kernel run;
    job *job;
    long first, last;
} share;

static void *run_share(void *argument) {
    share *s = argument;
    s->run(s->job, s->first, s->last);
    return NULL;
}

/* Threads live for one call: nothing to shut down, and safe across fork. */
static int run(kernel kernel, job *job, int threads) {
    enum { MOST = 64 };
    pthread_t handles[MOST];
    share shares[MOST];
    int started[MOST] = {0};
    if (threads > MOST) threads = MOST;
    if (threads > job->rows) threads = (int)job->rows;
    if (threads < 1) threads = 1;
    for (int t = threads - 1; t >= 0; t--) {
        shares[t] = (share){kernel, job, job->rows * t / threads, job->rows * (t + 1) / threads};
        if (t > 0) started[t] = pthread_create(handles + t, NULL, run_share, shares + t) == 0;
        if (!started[t]) run_share(shares + t);
    }
    for (int t = 1; t < threads; t++)
        if (started[t]) pthread_join(handles[t], NULL);
    return job->failed;
}

int catnat_tree_forward(const float *scores, const float *constants, float *out, long rows,
                        long categories, const split *split, int threads) {
    job j = {scores, NULL, constants, out, rows, categories, *split, 0};
    return run(forward_rows, &j, threads);
}

int catnat_tree_fisher(const float *scores, const float *constants, float *out, long rows,
                       long categories, const split *split, int threads) {
    job j = {scores, NULL, constants, out, rows, categories, *split, 0};
    return run(fisher_rows, &j, threads);
}

int catnat_tree_backward(const float *scores, const float *constants, const float *grad,
                         float *out, long rows, long categories, const split *split, int threads) {
    job j = {scores, grad, constants, out, rows, categories, *split, 0};
    return run(backward_rows, &j, threads);
}

int catnat_sparsemax_forward(const float *scores, float *out, long rows, long categories,
                             int threads) {
    job j = {.scores = scores, .out = out, .rows = rows, .categories = categories};
    return run(categories < SHORT ? sparsemax_forward_short : sparsemax_forward_rows, &j, threads);
}

int catnat_sparsemax_backward(const float *log_probs, const float *grad, float *out, long rows,
                              long categories, int threads) {
    job j = {.scores = log_probs, .grad = grad, .out = out, .rows = rows, .categories = categories};
    return run(categories < SHORT ? sparsemax_backward_short : sparsemax_backward_rows, &j, threads);
}

/* ---------------------------------------------------------------------------------- paths
 *
 * A job's result i belongs to row i % rows of the scores: N results for every row. A block of nodes
 * is gathered, scores and constants, into contiguous memory, where the functions of all trees apply
 * to it as to one row. */

typedef struct {
    job tree; /* first: a kernel gets a pointer to this */
    const long long *leaf;
    const double *uniforms;
    const float *levels;
    long long *sampled;
    long repeats, constant_rows;
} path_job;

typedef struct { /* of BLOCK nodes */
    job tree;
    float scores[BLOCK], left[BLOCK], right[BLOCK], constants[];
} node_block;

static int height(long K) { /* ceil(log2 K): levels of the tree */
    int H = 0;
    while (H < 62 && (1L << H) < K) H++;
    return H;
}

static node_block *make_block(const path_job *p) {
    node_block *b = malloc(sizeof(node_block) + sizeof(float) * (size_t)p->constant_rows * BLOCK);
    if (!b) return NULL;
    b->tree = p->tree;
    b->tree.constants = p->tree.constants ? b->constants : NULL;
    return b;
}

/* Put the node with this score into place i of a block of n nodes. */
static inline void gather(const path_job *p, node_block *b, long i, long n, long row, long score) {
    long S = p->tree.categories - 1;
    b->scores[i] = p->tree.scores[row * S + score];
    for (long r = 0; r < p->constant_rows; r++)
        b->constants[r * n + i] = p->tree.constants[r * S + score];
}

/* Apply split_logs or split_slopes to the n nodes of a block. */
static void split_block(node_block *b, long n,
                        void (*split)(const job *, const float *, const float *, long, long,
                                      float *, float *)) {
    b->tree.categories = n + 1;
    split(&b->tree, b->scores, b->tree.constants, 1, n, b->left, b->right);
}

/* The numbers of results of rows first..last-1, in blocks; the leaves' paths are walked upwards. */
static void path_rows(path_job *p, long first, long last, int backward) {
    long K = p->tree.categories, S = K - 1, rows = p->tree.rows, H = height(K), chunk = BLOCK / H;
    node_block *b = make_block(p);
    if (!b) {
        p->tree.failed = 1;
        return;
    }
    for (long repeat = 0; repeat < p->repeats; repeat++)
        for (long row = first; row < last; row += chunk) {
            long n = last - row < chunk ? last - row : chunk, start = repeat * rows + row;
            for (long i = 0; i < n; i++) {
                long long leaf = p->leaf[start + i];
                long heap = K + (leaf >= 0 && leaf < K ? (long)leaf : 0);
                for (long h = 0; h < H; h++) {
                    heap >>= 1;
                    gather(p, b, i * H + h, n * H, row + i, heap > 0 ? heap - 1 : 0);
                }
            }
            split_block(b, n * H, backward ? split_slopes : split_logs);
            for (long i = 0; i < n; i++) {
                long long leaf = p->leaf[start + i];
                int valid = leaf >= 0 && leaf < K;
                long heap = K + (valid ? (long)leaf : 0);
                const float *left = b->left + i * H, *right = b->right + i * H;
                if (backward) {
                    float grad = valid ? p->tree.grad[start + i] : from_bits(-1);
                    float *out = p->tree.out + (row + i) * S;
                    for (long h = 0; heap > 1; h++, heap >>= 1)
                        out[heap / 2 - 1] += grad * (heap & 1 ? right[h] : -left[h]);
                } else {
                    float sum = 0;
                    for (long h = 0; heap > 1; h++, heap >>= 1) sum += heap & 1 ? right[h] : left[h];
                    p->tree.out[start + i] = valid ? sum : from_bits(-1);
                }
            }
        }
    free(b);
}

/* Results start from the root together and go down level by level. */
static void sample_rows(job *j, long first, long last) {
    path_job *p = (path_job *)j;
    long K = j->categories, H = height(K);
    node_block *b = make_block(p);
    if (!b) {
        j->failed = 1;
        return;
    }
    for (long repeat = 0; repeat < p->repeats; repeat++)
        for (long row = first; row < last; row += BLOCK) {
            long n = last - row < BLOCK ? last - row : BLOCK, start = repeat * j->rows + row;
            const double *u = p->uniforms + start * H;
            long long *heap = p->sampled + start; /* 0: lost at a NaN */
            for (long i = 0; i < n; i++) heap[i] = 1;
            for (long h = 0; h < H; h++) {
                for (long i = 0; i < n; i++) {
                    int inside = heap[i] > 0 && heap[i] < K;
                    gather(p, b, i, n, row + i, inside ? (long)heap[i] - 1 : 0);
                }
                split_block(b, n, split_logs);
                for (long i = 0; i < n; i++)
                    if (heap[i] > 0 && heap[i] < K)
                        heap[i] = nan_mask(b->left[i])
                                      ? 0
                                      : 2 * heap[i] + (u[i * H + h] >= exp((double)b->left[i]));
            }
            for (long i = 0; i < n; i++) heap[i] = heap[i] ? heap[i] - K : -1;
        }
    free(b);
}

static void path_forward_rows(job *j, long first, long last) {
    path_rows((path_job *)j, first, last, 0);
}

static void path_backward_rows(job *j, long first, long last) {
    path_rows((path_job *)j, first, last, 1);
}

int catnat_path_forward(const float *scores, const float *constants, const long long *leaf,
                        float *out, long repeats, long constant_rows, long rows, long categories,
                        const split *split, int threads) {
    job j = {scores, NULL, constants, out, rows, categories, *split, 0};
    path_job p = {.tree = j, .leaf = leaf, .repeats = repeats, .constant_rows = constant_rows};
    return run(path_forward_rows, &p.tree, threads);
}

int catnat_path_backward(const float *scores, const float *constants, const long long *leaf,
                         const float *grad, float *out, long repeats, long constant_rows,
                         long rows, long categories, const split *split, int threads) {
    job j = {scores, grad, constants, out, rows, categories, *split, 0};
    path_job p = {.tree = j, .leaf = leaf, .repeats = repeats, .constant_rows = constant_rows};
    return run(path_backward_rows, &p.tree, threads);
}

int catnat_path_sample(const float *scores, const float *constants, const double *uniforms,
                       long long *sampled, long repeats, long constant_rows, long rows,
                       long categories, const split *split, int threads) {
    job j = {scores, NULL, constants, NULL, rows, categories, *split, 0};
    path_job p = {.tree = j, .uniforms = uniforms, .sampled = sampled, .repeats = repeats,
                  .constant_rows = constant_rows};
    return run(sample_rows, &p.tree, threads);
}

/* ---------------------------------------------------------- gradients at random categories
 *
 * grad_s log p(c) for N levels in [0, 1) a row; c is the category where the distribution function
 * passes the level. */

/* Slopes at the nodes of a path, 0 elsewhere, NaN where a score is NaN. The leaves are in their
 * order from the left of the tree to the right: a node compares the level with the share of its
 * left child, and its child gets the level's place within the child's share. */
static void path_gradient_rows(job *j, long first, long last) {
    path_job *p = (path_job *)j;
    long K = j->categories, S = K - 1, H = height(K);
    float level[BLOCK];
    int right_hand[BLOCK];
    long heap[BLOCK];
    node_block *b = make_block(p);
    if (!b) {
        j->failed = 1;
        return;
    }
    for (long repeat = 0; repeat < p->repeats; repeat++)
        for (long row = first; row < last; row += BLOCK) {
            long n = last - row < BLOCK ? last - row : BLOCK, start = repeat * j->rows + row;
            const float *restrict scores = j->scores + row * S;
            float *restrict out = j->out + start * S;
            for (long i = 0; i < n * S; i++) out[i] = keep_nan(0.0f, scores[i]);
            for (long i = 0; i < n; i++) heap[i] = 1, level[i] = p->levels[start + i];
            for (long h = 0; h < H; h++) {
                for (long i = 0; i < n; i++)
                    gather(p, b, i, n, row + i, heap[i] < K ? heap[i] - 1 : 0);
                split_block(b, n, split_logs);
                for (long i = 0; i < n; i++) {
                    float u = fminf(level[i], 0.99999994f), share = exp_or_zero(b->left[i]);
                    right_hand[i] = u >= share;
                    level[i] = u >= share ? (u - share) / (1.0f - share) : u / share;
                }
                split_block(b, n, split_slopes);
                for (long i = 0; i < n; i++) /* apart, because random branches are slow */
                    b->left[i] = right_hand[i] ? b->right[i] : -b->left[i];
                for (long i = 0; i < n; i++)
                    if (heap[i] < K) {
                        out[i * S + heap[i] - 1] = b->left[i];
                        heap[i] = 2 * heap[i] + right_hand[i];
                    }
            }
        }
    free(b);
}

/* ------------------------------------------------------------------- what a monitor needs
 *
 * Of T steps of B rows: the mean Fisher diagonal, and the mean outer products of gradients at random
 * categories. All nodes are split once; the draws walk through the results. A gradient is 0 off the
 * path of its draw, so that a product belongs to a node and one of the nodes above it, or itself: it
 * is added up at (node, depth of the node above). */

typedef struct {
    path_job path; /* first; rows: steps, repeats: draws at each row */
    long rows; /* of a step */
    float *products; /* (2, T, S, S) */
    int sparse; /* sparsemax, not softmax, where there is no tree */
} step_job;

/* Numbers for each node in the sums of products: its depth and more, so that loops are vectors. */
static long width(long H) { return H <= 8 ? 8 : H <= 16 ? 16 : 64; }

typedef struct { /* for a chunk of rows; sums are of a step */
    float *left, *right, *information, *flat, *log_p, *column, *level;
    int *nan, heap[BLOCK], at[BLOCK], turn[BLOCK];
    double *diagonal, *products, *paths; /* (S + 1), (2, S, width), (rows, width) */
    node_block *block;
} step_buffers;

static step_buffers *make_buffers(const step_job *p, long chunk) {
    long S = p->path.tree.categories - 1, H = height(S + 1), part = padded(chunk * S);
    step_buffers *b = malloc(sizeof(step_buffers));
    if (!b) return NULL;
    b->left = aligned_alloc(64, sizeof(float) * (size_t)(5 * part + padded(S) + padded(chunk)));
    b->nan = malloc(sizeof(int) * (size_t)S);
    b->diagonal = malloc(sizeof(double) * (size_t)(S + 1 + (2 * S + chunk) * width(H)));
    b->block = make_block(&p->path);
    return b;
}

static int set_buffers(step_buffers *b, long S, long chunk) {
    long part = padded(chunk * S);
    if (!b || !b->left || !b->nan || !b->diagonal || !b->block) return 0;
    b->right = b->left + part, b->information = b->right + part, b->flat = b->information + part;
    b->log_p = b->flat + part, b->column = b->log_p + part, b->level = b->column + padded(S);
    b->products = b->diagonal + S + 1, b->paths = b->products + 2 * S * width(height(S + 1));
    return 1;
}

static void free_buffers(step_buffers *b) {
    if (b) free(b->left), free(b->nan), free(b->diagonal), free(b->block), free(b);
}

/* Add the Fisher diagonals of n rows, whose splits are computed, to the sums. */
static void add_diagonals(step_buffers *b, const float *restrict scores, long n, long S) {
    float *restrict column = b->column, *restrict information = b->information;
    const float *restrict log_p = b->log_p, *restrict flat = b->flat;
    float flats = 0;
    int any = 0;
#pragma omp simd reduction(+ : flats) reduction(| : any)
    for (long i = 0; i < n * S; i++) {
        information[i] = keep_nan(exp_or_zero(log_p[i]) * information[i], log_p[i]);
        flats += flat[i];
        any |= nan_mask(scores[i]);
    }
    for (long i = 0; i < S; i++) column[i] = 0;
    for (long r = 0; r < n; r++)
        for (long i = 0; i < S; i++) column[i] += information[r * S + i];
    for (long i = 0; i < S; i++) b->diagonal[i] += (double)column[i];
    b->diagonal[S] += (double)flats / (double)S;
    if (any)
        for (long i = 0; i < n * S; i++) b->nan[i % S] |= nan_mask(scores[i]);
}

/* Draw one category in each of n rows. Level h of a path is in place h * n + i: the node's place in
 * its row, the child that was taken, and in the block what split_slopes needs. */
static void draw(const path_job *p, step_buffers *b, const float *restrict scores,
                 const float *restrict levels, long n) {
    int K = (int)p->tree.categories, S = K - 1, H = height(K), *restrict heap = b->heap;
    float *restrict level = b->level;
    const float *restrict left = b->left;
    for (long i = 0; i < n; i++) heap[i] = 1, level[i] = fminf(levels[i], 0.99999994f);
    for (long h = 0; h < H; h++) {
        float *restrict x = b->block->scores + h * n;
        int *restrict at = b->at + h * n, *restrict turn = b->turn + h * n;
#pragma omp simd
        for (int i = 0; i < (int)n; i++) {
            int node = heap[i] < K ? heap[i] - 1 : 0;
            float u = level[i], share = exp_or_zero(left[i * S + node]);
            int to_right = u >= share;
            at[i] = node;
            x[i] = scores[i * S + node];
            turn[i] = heap[i] < K ? 2 * to_right - 1 : 0; /* no node: a leaf was reached before */
            level[i] = fminf(to_right ? (u - share) / (1.0f - share) : u / share, 0.99999994f);
            heap[i] = heap[i] < K ? 2 * heap[i] + to_right : heap[i];
        }
        for (long r = 0; r < p->constant_rows; r++)
            for (long i = 0; i < n; i++)
                b->block->constants[(r * H + h) * n + i] = p->tree.constants[r * S + at[i]];
    }
}

/* For each node of each path its product with all others of the path; those below it do not count. */
INLINE void add_paths(const step_buffers *b, long n, long H, long width, double *restrict products) {
    const float *restrict slope = b->block->left;
    double *restrict paths = b->paths;
    for (long i = 0; i < n; i++)
        for (long h = 0; h < H; h++) paths[i * width + h] = (double)slope[h * n + i];
    for (long i = 0; i < n; i++)
        for (long h = 0; h < H; h++) {
            double *restrict row = products + b->at[h * n + i] * width, here = paths[i * width + h];
#pragma omp simd
            for (long k = 0; k < width; k++) row[k] += here * paths[i * width + k];
        }
}

/* Add the outer products of the gradients at the draws of n rows. */
static void add_products(step_buffers *b, long n, long H, double *restrict products) {
    float *restrict slope = b->block->left;
    const float *restrict right = b->block->right;
    const int *restrict turn = b->turn;
    split_block(b->block, n * H, split_slopes);
    for (long i = 0; i < n * H; i++)
        slope[i] = turn[i] > 0 ? right[i] : turn[i] < 0 ? -slope[i] : 0.0f;
    switch (width(H)) { /* a constant, for the compiler */
    case 8: add_paths(b, n, H, 8, products); break;
    case 16: add_paths(b, n, H, 16, products); break;
    default: add_paths(b, n, H, 64, products);
    }
}

/* Divide the sums of a step. */
static void write_step(const step_job *p, const step_buffers *b, long step) {
    long S = p->path.tree.categories - 1, H = height(S + 1), steps = p->path.tree.rows;
    long M = p->path.repeats;
    float *out = p->path.tree.out + step * (S + 1);
    for (long i = 0; i <= S; i++) out[i] = (float)(b->diagonal[i] / (double)p->rows);
    for (long half = 0; half < 2; half++) {
        double draws = (double)p->rows * (double)(half ? M - M / 2 : M / 2);
        float *restrict matrix = p->products + (half * steps + step) * S * S;
        for (long i = 0; i < S * S; i++) matrix[i] = 0;
        for (long i = 0; i < S; i++) {
            long depth = 0;
            while ((i + 1) >> (depth + 1)) depth++;
            for (long up = 0; up <= depth; up++) {
                long k = ((i + 1) >> (depth - up)) - 1;
                float mean = (float)(b->products[(half * S + i) * width(H) + up] / draws);
                matrix[i * S + k] = matrix[k * S + i] = mean;
            }
        }
        for (long i = 0; i < S; i++)
            for (long k = 0; b->nan[i] && k < S; k++)
                matrix[i * S + k] = matrix[k * S + i] = from_bits(-1);
    }
}

static void observe_steps(job *j, long first, long last) {
    step_job *p = (step_job *)j;
    long K = j->categories, S = K - 1, H = height(K), B = p->rows, M = p->path.repeats;
    long chunk = S < BLOCK ? BLOCK / S : 1;
    if (chunk > TILE) chunk &= -TILE;
    step_buffers *b = make_buffers(p, chunk);
    if (!set_buffers(b, S, chunk)) j->failed = 1, last = first;
    for (long step = first; step < last; step++) {
        for (long i = 0; i < K + (2 * S + chunk) * width(H); i++) b->diagonal[i] = 0; /* all three */
        for (long i = 0; i < S; i++) b->nan[i] = 0;
        for (long start = 0; start < B; start += chunk) {
            long n = B - start < chunk ? B - start : chunk;
            const float *scores = j->scores + (step * B + start) * S;
            split_logs(j, scores, j->constants, n, S, b->left, b->right);
            split_information(j, scores, j->constants, n, S, b->information, b->flat);
            for (long r = 0; r < n; r++)
                descend_inside(K, b->left + r * S, b->right + r * S, b->log_p + r * S - 1, 1);
            add_diagonals(b, scores, n, S);
            for (long m = 0; m < M; m++) {
                draw(&p->path, b, scores, p->path.levels + (m * j->rows + step) * B + start, n);
                add_products(b, n, H, b->products + (m < M / 2 ? 0 : S * width(H)));
            }
        }
        write_step(p, b, step);
    }
    free_buffers(b);
}

int catnat_tree_observe(const float *scores, const float *constants, const float *levels, float *out,
                        float *products, long draws, long constant_rows, long rows, long steps,
                        long categories, const split *split, int threads) {
    job j = {scores, NULL, constants, out, steps, categories, *split, 0};
    path_job path = {.tree = j, .levels = levels, .repeats = draws, .constant_rows = constant_rows};
    step_job p = {path, rows, products, 0};
    return run(observe_steps, &p.path.tree, threads);
}

/* ------------------------------------------------------- gradients of softmax and sparsemax */

/* Sums of weights from the first on. */
INLINE void add_up(const float *restrict weight, long K, float *restrict reached) {
    double total = 0;
    for (long k = 0; k < K; k++) reached[k] = (float)(total += weight[k]);
}

/* The category at which the sums pass the level; its weight is not 0. */
INLINE long passed(const float *restrict reached, long K, float level) {
    float sum = reached[K - 1], below = from_bits(bits_of(sum) - 1); /* no level reaches the sum */
    float wanted = fminf(level * sum, below);
    int drawn = 0;
#pragma omp simd reduction(+ : drawn)
    for (long k = 0; k < K; k++) drawn += reached[k] <= wanted;
    return drawn < K ? drawn : 0;
}

/* exp(s - max s) and its sums; returns one over the last of them, NaN where a score makes it so. */
INLINE float softmax_row(const float *restrict s, long K, float *restrict weight,
                         float *restrict reached) {
    float top = s[0];
    int bad = 0;
#pragma omp simd reduction(max : top) reduction(| : bad)
    for (long k = 0; k < K; k++) top = fmaxf(top, s[k]), bad |= nan_mask(s[k]);
    for (long k = 0; k < K; k++) weight[k] = exp_or_zero(s[k] - top);
    add_up(weight, K, reached);
    return bad | ~finite_mask(top) ? from_bits(-1) : 1.0f / reached[K - 1];
}

/* Probabilities of sparsemax, 1 on the support and 0 elsewhere, and sums; returns the support's size. */
INLINE float support_row(const float *restrict log_p, long K, float *restrict prob,
                         float *restrict inside, float *restrict reached) {
    float size = 0;
#pragma omp simd reduction(+ : size)
    for (long k = 0; k < K; k++) {
        prob[k] = exp_or_zero(log_p[k]);
        inside[k] = log_p[k] <= LOG_ZERO ? 0.0f : 1.0f;
        size += inside[k];
    }
    add_up(prob, K, reached);
    return size;
}

/* Log-probabilities of sparsemax. */
static void sparsemax_of(const float *scores, long rows, long K, float *logs) {
    job forward = {.scores = scores, .out = logs, .rows = rows, .categories = K};
    (K < SHORT ? sparsemax_forward_short : sparsemax_forward_rows)(&forward, 0, rows);
}

/* 1 - p at the category, -p elsewhere. */
NARROW static void softmax_gradient_rows(job *j, long first, long last) {
    path_job *p = (path_job *)j;
    long K = j->categories;
    float *restrict weight = malloc(2 * sizeof(float) * (size_t)K);
    if (!weight) {
        j->failed = 1;
        return;
    }
    float *restrict reached = weight + K;
    for (long row = first; row < last; row++) {
        float scale = softmax_row(j->scores + row * K, K, weight, reached);
        for (long repeat = 0; repeat < p->repeats; repeat++) {
            float *restrict out = j->out + (repeat * j->rows + row) * K;
            for (long k = 0; k < K; k++) out[k] = -scale * weight[k];
            out[passed(reached, K, p->levels[repeat * j->rows + row])] += 1.0f;
        }
    }
    free(weight);
}

/* On the support, of n categories: (1 - 1/n) / p at the category, -1/n / p elsewhere. */
NARROW static void sparsemax_gradient_rows(job *j, long first, long last) {
    enum { TOGETHER = 16 }; /* rows whose log-probabilities are computed at once */
    path_job *p = (path_job *)j;
    long K = j->categories;
    float *restrict logs = malloc((TOGETHER + 3) * sizeof(float) * (size_t)K);
    if (!logs) {
        j->failed = 1;
        return;
    }
    float *restrict prob = logs + TOGETHER * K, *restrict reached = prob + K;
    float *restrict inside = reached + K;
    for (long start = first; start < last; start += TOGETHER) {
        long rows = last - start < TOGETHER ? last - start : TOGETHER;
        sparsemax_of(j->scores + start * K, rows, K, logs);
        for (long r = 0; r < rows; r++) {
            const float *restrict log_p = logs + r * K;
            float size = support_row(log_p, K, prob, inside, reached);
            for (long repeat = 0; repeat < p->repeats; repeat++) {
                long at = repeat * j->rows + start + r, drawn = passed(reached, K, p->levels[at]);
                float steep = keep_nan(1.0f / prob[drawn], log_p[0]), mean = steep / size;
                float *restrict out = j->out + at * K;
                for (long k = 0; k < K; k++) out[k] = -mean * inside[k];
                out[drawn] += steep;
            }
        }
    }
    free(logs);
}

/* ---------------------------------------- what a monitor needs of softmax and sparsemax, K <= 64
 *
 * Of T steps of B rows: the mean Fisher matrix, and the mean outer products of gradients at random
 * categories. Sums of a chunk of rows are in float, those of a step in double. */

enum { WIDEST = 64, CHUNK = 64 }; /* categories; rows */
#define ALIGNED __attribute__((aligned(64)))

typedef struct {
    ALIGNED float part[3][WIDEST * WIDEST]; /* for the exact matrix and the two halves of the draws */
    ALIGNED double sum[3][WIDEST * WIDEST], diagonal[WIDEST];
    ALIGNED float prob[CHUNK * WIDEST], inside[CHUNK * WIDEST], reached[CHUNK * WIDEST];
    ALIGNED float weight[CHUNK * WIDEST]; /* rows of a factor; for sparsemax first log-probabilities */
    float size[CHUNK];
    double still;
    int bad; /* a row has a NaN */
} flat_sums;

/* Add A^T B to a matrix, for rows A and B that are W wide; those behind the last one are 0. */
INLINE void add_product(float *restrict matrix, const float *restrict A, const float *restrict B,
                        long rows, long K, long W) {
    for (long r = 0; r < rows; r += 4, A += 4 * W, B += 4 * W)
        for (long i = 0; i < K; i++) {
            float f0 = A[i], f1 = A[W + i], f2 = A[2 * W + i], f3 = A[3 * W + i];
#pragma omp simd
            for (long k = 0; k < W; k++)
                matrix[i * W + k] +=
                    f0 * B[k] + f1 * B[W + k] + f2 * B[2 * W + k] + f3 * B[3 * W + k];
        }
}

/* P^T P, and for each draw p in the row of its category. */
INLINE void observe_softmax(flat_sums *b, const float *scores, const float *levels, long stride,
                            long M, long n, long K, long W) {
    for (long i = 0; i < CHUNK * W; i++) b->prob[i] = 0;
    for (long r = 0; r < n; r++) {
        float scale = softmax_row(scores + r * K, K, b->weight, b->reached);
        float *restrict prob = b->prob + r * W;
        if (nan_mask(scale)) {
            b->bad = 1;
            continue;
        }
        for (long k = 0; k < K; k++) prob[k] = scale * b->weight[k];
        for (long m = 0; m < M; m++) {
            long drawn = passed(b->reached, K, levels[m * stride + r]);
            float *restrict row = b->part[m < M / 2 ? 1 : 2] + drawn * W;
            for (long k = 0; k < W; k++) row[k] += prob[k];
        }
    }
    add_product(b->part[0], b->prob, b->prob, n, K, W);
}

/* Half of the matrix but for 1/p on its diagonal, with u = 1 on the support, of n categories:
 * (sum of 1/p / (2 n) - 1/p) u^T / n. And the outer products of gradients. */
INLINE void observe_sparsemax(flat_sums *b, const float *scores, const float *levels, long stride,
                              long M, long n, long K, long W) {
    sparsemax_of(scores, n, K, b->weight);
    for (long i = 0; i < CHUNK * W; i++) b->inside[i] = 0;
    for (long r = 0; r < n; r++) {
        const float *log_p = b->weight + r * K;
        float *restrict prob = b->prob + r * W, *restrict inside = b->inside + r * W;
        b->size[r] = support_row(log_p, K, prob, inside, b->reached + r * W);
        if (!nan_mask(log_p[0])) {
            b->still += b->size[r] > 1 ? (double)K - (double)b->size[r] : (double)K;
            continue;
        }
        b->bad = 1; /* the numbers of the step are then NaN, whatever they were */
        b->size[r] = 1;
        for (long k = 0; k < K; k++) prob[k] = b->reached[r * W + k] = 1, inside[k] = 0;
    }
    for (long i = 0; i < CHUNK * W; i++) b->weight[i] = 0;
    for (long r = 0; r < n; r++) {
        const float *restrict prob = b->prob + r * W, *restrict inside = b->inside + r * W;
        float *restrict weight = b->weight + r * W, total = 0, size = b->size[r];
#pragma omp simd reduction(+ : total)
        for (long k = 0; k < K; k++) {
            weight[k] = inside[k] / fmaxf(prob[k], 1e-30f);
            total += weight[k];
        }
        for (long k = 0; k < K; k++) b->diagonal[k] += (double)weight[k];
        for (long k = 0; k < K; k++)
            weight[k] = (inside[k] * (total / (2 * size)) - weight[k]) / size;
    }
    add_product(b->part[0], b->weight, b->inside, n, K, W);
    for (long m = 0; m < M; m++) {
        for (long r = 0; r < n; r++) {
            const float *restrict inside = b->inside + r * W;
            float *restrict weight = b->weight + r * W;
            long drawn = passed(b->reached + r * W, K, levels[m * stride + r]);
            float steep = inside[drawn] / b->prob[r * W + drawn], mean = steep / b->size[r];
            for (long k = 0; k < K; k++) weight[k] = -mean * inside[k];
            weight[drawn] += steep;
        }
        add_product(b->part[m < M / 2 ? 1 : 2], b->weight, b->weight, n, K, W);
    }
}

/* Entry (i, k) of the exact mean matrix (which = 0), or of that of one half of the draws. */
INLINE double mean_entry(const flat_sums *b, int sparse, long which, double draws, long i, long k,
                         long W) {
    double here = b->sum[which][i * W + k], there = b->sum[which][k * W + i];
    if (sparse) return which ? here / draws : here + there + (i == k ? b->diagonal[i] : 0);
    return which ? b->sum[0][i * W + k] - (here + there) / draws : -here;
}

/* Divide the sums of a step. Rows of softmax's matrices sum to 0, which gives their diagonals: 1 - p
 * would lose accuracy where p is near 1. */
static void write_flat_step(const step_job *p, const flat_sums *b, long step, long W) {
    long K = p->path.tree.categories, steps = p->path.tree.rows, M = p->path.repeats;
    double rows = (double)p->rows;
    float *exact = p->path.tree.out + step * (K * K + 1);
    exact[K * K] = (float)(b->still / (rows * (double)K));
    for (long which = 0; which < 3; which++) {
        double draws = (double)(which == 1 ? M / 2 : M - M / 2);
        float *out = which ? p->products + ((which - 1) * steps + step) * K * K : exact;
        for (long i = 0; i < K; i++) {
            double others = 0;
            for (long k = 0; k < K; k++) {
                double mean = mean_entry(b, p->sparse, which, draws, i, k, W) / rows;
                others += i == k ? 0 : mean;
                out[i * K + k] = (float)mean;
            }
            if (!p->sparse) out[i * K + i] = (float)-others;
        }
        for (long i = 0; b->bad && i < K * K; i++) out[i] = from_bits(-1);
    }
}

#define EVERY_STEP(W)                                                                              \
    for (long step = first; step < last; step++) {                                                 \
        *b = (flat_sums){.bad = 0};                                                                \
        for (long start = 0; start < B; start += CHUNK) {                                          \
            long n = B - start < CHUNK ? B - start : CHUNK, at = step * B + start;                 \
            const float *scores = j->scores + at * K, *levels = p->path.levels + at;               \
            if (p->sparse)                                                                         \
                observe_sparsemax(b, scores, levels, j->rows * B, M, n, K, W);                     \
            else                                                                                   \
                observe_softmax(b, scores, levels, j->rows * B, M, n, K, W);                       \
            for (long which = 0; which < 3; which++)                                               \
                for (long i = 0; i < K * W; i++)                                                   \
                    b->sum[which][i] += (double)b->part[which][i], b->part[which][i] = 0;          \
        }                                                                                          \
        write_flat_step(p, b, step, W);                                                            \
    }

NARROW static void observe_flat_steps(job *j, long first, long last) {
    step_job *p = (step_job *)j;
    long K = j->categories, B = p->rows, M = p->path.repeats;
    flat_sums *b = aligned_alloc(64, sizeof(flat_sums));
    if (!b) {
        j->failed = 1;
        return;
    }
    if (K <= 8) { /* a constant, for the compiler */
        EVERY_STEP(8)
    } else if (K <= 16) {
        EVERY_STEP(16)
    } else if (K <= 32) {
        EVERY_STEP(32)
    } else {
        EVERY_STEP(WIDEST)
    }
    free(b);
}

int catnat_path_gradients(const float *scores, const float *constants, const float *levels,
                          float *out, long repeats, long constant_rows, long rows,
                          long categories, const split *split, int threads) {
    job j = {scores, NULL, constants, out, rows, categories, *split, 0};
    path_job p = {.tree = j, .levels = levels, .repeats = repeats, .constant_rows = constant_rows};
    return run(path_gradient_rows, &p.tree, threads);
}

int catnat_softmax_gradients(const float *scores, const float *levels, float *out, long repeats,
                             long rows, long categories, int threads) {
    job j = {.scores = scores, .out = out, .rows = rows, .categories = categories};
    path_job p = {.tree = j, .levels = levels, .repeats = repeats};
    return run(softmax_gradient_rows, &p.tree, threads);
}

int catnat_sparsemax_gradients(const float *scores, const float *levels, float *out, long repeats,
                               long rows, long categories, int threads) {
    job j = {.scores = scores, .out = out, .rows = rows, .categories = categories};
    path_job p = {.tree = j, .levels = levels, .repeats = repeats};
    return run(sparsemax_gradient_rows, &p.tree, threads);
}

int catnat_flat_observe(const float *scores, const float *levels, float *out, float *products,
                        int sparse, long draws, long rows, long steps, long categories,
                        int threads) {
    job j = {.scores = scores, .out = out, .rows = steps, .categories = categories};
    path_job path = {.tree = j, .levels = levels, .repeats = draws};
    step_job p = {path, rows, products, sparse};
    if (categories > WIDEST) return 1;
    return run(observe_flat_steps, &p.path.tree, threads);
}
