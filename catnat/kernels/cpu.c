/* Fused CPU kernels, float32: log-probabilities of a tree of binary splits and of sparsemax, their
 * gradients, and the Fisher diagonal of the tree. Plain C called through ctypes; no Python or torch headers.
 *
 * Scores are (B, K-1) or (B, K), rows contiguous. A kernel works through blocks of rows small
 * enough for the first-level cache: elementwise mathematics over the whole block (vectorized by
 * the compiler), then one walk over each row's tree. Built with -ffinite-math-only, which makes
 * comparisons cheap to vectorize; NaN is looked for in the bits and put into the results.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__ /* vectors of 16 floats slow reductions over short rows down */
#define NARROW __attribute__((target("prefer-vector-width=256")))
#else
#define NARROW
#endif

#define LOG_ZERO -1000.0f /* log-probability of an impossible category */
#define NEVER (-3.4028234663852886e38f / 256) /* of an impossible step on a path: see numerics.py */
#define BLOCK 1024 /* scores a block holds, unless one row is longer */
#define LARGEST (3.4028234663852886e38f / 16777216) /* 2^24 */

enum { SIGMOID = 0, NATURAL = 1, TAILED = 2 }; /* TAILED: natural with a tail */

typedef struct {
    int kind;
    float rate, high, low; /* natural: pi/A, and A/2 as a sum of two floats */
    float joint, steepness, at_edge; /* tail: where it begins, slope of log p, log p at the edge */
} activation;

typedef struct { /* cpu.py has the same fields */
    const float *scores, *grad, *constants; /* constants: (R, S), or NULL where centered at 0 */
    const long long *leaf;
    const double *uniforms;
    float *out;
    long long *sampled;
    long rows, categories, repeats, constant_rows; /* repeats: results for each row, of paths */
    activation activation;
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

/* ---------------------------------------------------------------------------- activations */

/* The largest size of a log-probability; an infinite score makes one side impossible. */
static inline float bound(float x) {
    int finite = finite_mask(x);
    return from_bits((bits_of(LARGEST) & finite) | (bits_of(-NEVER) & ~finite));
}

static inline void sigmoid_logs(float x, float *left, float *right) {
    float within = fmaxf(fminf(x, bound(x)), -bound(x));
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
static inline float angle(float d, activation s) { return fmaxf(d * (0.5f * s.rate), 1e-30f); }

/* above, below: distances of x to the upper and to the lower edge. One NaN is put where both results
 * come from it by sums and products alone. */
static inline void natural_logs(float x, float above, float below, activation s, float *left,
                                float *right) {
    float d = fminf(above, below), theta = keep_nan(angle(d, s), x), u = theta * theta;
    float rare = d > 0 ? log_sin_squared(theta, u) : NEVER - theta, likely = log_cos_squared(u);
    *left = above < below ? rare : likely;
    *right = above < below ? likely : rare;
}

static inline void natural_slopes(float x, float above, float below, activation s, float *left,
                                  float *right) {
    float d = fminf(above, below), t = tan_eighth(angle(d, s));
    float scale = keep_nan(d > 0 ? s.rate : 0.0f, x), steep = scale / t, gentle = scale * t;
    *left = above < below ? steep : gentle;
    *right = above < below ? gentle : steep;
}

/* log p of the rarer bit in the tail, log p = log tail before it. */
static inline float tail_log(float d, activation s) {
    return fmaxf(s.at_edge + s.steepness * fminf(d, s.joint), -bound(d));
}

/* The slope of log p in the tail: 0 beyond the largest score and at infinity. */
static inline float tail_slope(float d, float log_p, activation s) {
    return from_bits(bits_of(log_p > -LARGEST ? s.steepness : 0.0f) & finite_mask(d));
}

static inline void tailed_logs(float x, float above, float below, activation s, float *left,
                               float *right) {
    float d = fminf(above, below), theta = angle(d, s), u = theta * theta;
    float log_p = tail_log(d, s), p = exp_minus(-log_p);
    float rare = d > s.joint ? log_sin_squared(theta, u) : log_p;
    float likely = d > s.joint ? log_cos_squared(u) : log1p_unit(-p);
    *left = keep_nan(above < below ? rare : likely, x);
    *right = keep_nan(above < below ? likely : rare, x);
}

static inline void tailed_slopes(float x, float above, float below, activation s, float *left,
                                 float *right) {
    float d = fminf(above, below), t = tan_eighth(angle(d, s));
    float log_p = tail_log(d, s), p = exp_minus(-log_p);
    float r = tail_slope(d, log_p, s);
    float steep = d > s.joint ? s.rate / t : r;
    float gentle = d > s.joint ? s.rate * t : r * (p / (1.0f - p));
    *left = keep_nan(above < below ? steep : gentle, x);
    *right = keep_nan(above < below ? gentle : steep, x);
}

/* Fisher information a'^2 / (a (1 - a)), times the probability of the node; NaN where x is. */
static inline float weighed(float information, float log_p, float x) {
    return keep_nan(keep_nan(exp_or_zero(log_p) * information, log_p), x);
}

static inline void sigmoid_information(float x, float *out, const float *log_p) {
    float left, right;
    sigmoid_slopes(x, &left, &right);
    *out = weighed(left * right, *log_p, x);
}

static inline void natural_information(float x, float above, float below, activation s, float *out,
                                       const float *log_p) {
    *out = weighed(fminf(above, below) < 0 ? 0.0f : s.rate * s.rate, *log_p, x);
}

static inline void tailed_information(float x, float above, float below, activation s, float *out,
                                      const float *log_p) {
    float d = fminf(above, below), tail = tail_log(d, s);
    float p = exp_minus(-tail), r = tail_slope(d, tail, s);
    *out = weighed(d > s.joint ? s.rate * s.rate : r * (r * (p / (1.0f - p))), *log_p, x);
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
#define ACTIVATION_ROWS(NAME, SIGMOID_FUNCTION, NATURAL_FUNCTION, TAILED_FUNCTION)                 \
    static void NAME(const job *j, const float *restrict x, const float *restrict c, long rows,    \
                     long n, float *restrict left, float *restrict right) {                        \
        long S = j->categories - 1;                                                                \
        activation s = j->activation;                                                              \
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
ACTIVATION_ROWS(activation_logs, sigmoid_logs, natural_logs, tailed_logs)
ACTIVATION_ROWS(activation_slopes, sigmoid_slopes, natural_slopes, tailed_slopes)
ACTIVATION_ROWS(activation_information, sigmoid_information, natural_information, tailed_information)

/* ---------------------------------------------------------------------- walks over trees */

/* The log-probability from the sum along a path: LOG_ZERO where a step was impossible. */
static inline float floored(float sum) {
    return keep_nan(sum < NEVER / 2 ? LOG_ZERO : sum, sum);
}

/* Heap node j has children 2j and 2j+1 and owns score j-1; nodes K..2K-1 are leaves.
 * Loops run over the nodes of one level, because such loops can be vectorized. */

/* Values at the children of n nodes of a level, from the values at these nodes. */
INLINE void children(const float *restrict here, const float *restrict left,
                     const float *restrict right, long n, float *restrict pair) {
    for (long i = 0; i < n; i++) {
        pair[2 * i] = here[i] + left[i];
        pair[2 * i + 1] = here[i] + right[i];
    }
}

/* log P(node) of the internal nodes. */
INLINE void descend_inside(long K, const float *restrict left, const float *restrict right,
                           float *restrict heap) {
    heap[1] = 0;
    long first = 1, nodes = K / 2; /* nodes first..nodes-1 have two internal children */
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
    descend_inside(K, left, right, heap);
    long j = K / 2;
    if (K % 2) {
        out[0] = heap[j] + right[j - 1];
        j++;
    }
    children(heap + j, left + j - 1, right + j - 1, K - j, out + (2 * j - K));
    for (long k = 0; k < K; k++) out[k] = floored(out[k]);
}

/* Sums over both children of n nodes of a level, and the gradients of the nodes' scores. */
INLINE void parents(const float *restrict pair, const float *restrict left,
                    const float *restrict right, long n, float *restrict here,
                    float *restrict out) {
    for (long i = 0; i < n; i++) {
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
    long first = 16; /* nodes 1..j-1 are left */
    while (2 * first < j) first *= 2;
    for (; first >= 16 && first < j; first /= 2) {
        parents(heap + 2 * first, left + first - 1, right + first - 1,
                (2 * first < j ? 2 * first : j) - first, heap + first, out + first - 1);
        j = first;
    }
    if (j == 16) { /* loops whose length the compiler knows */
#define LEVEL(n) parents(heap + 2 * n, left + n - 1, right + n - 1, n, heap + n, out + n - 1);
        LEVEL(8) LEVEL(4) LEVEL(2) LEVEL(1)
#undef LEVEL
        return;
    }
    for (j--; j > 0; j--) parents(heap + 2 * j, left + j - 1, right + j - 1, 1, heap + j, out + j - 1);
}

/* Room for n floats and some more. What comes next begins with a cache line, and not at the same place
 * of a page as the n floats: a processor takes equal places for one and waits. */
static long padded(long n) { return (n + 32) / 16 * 16; }

enum { FORWARD, BACKWARD, FISHER };

static void walk_rows(job *j, long first, long last, int what) {
    long K = j->categories, S = K - 1, chunk = S < BLOCK ? BLOCK / S : 1, part = padded(chunk * S);
    float *heap = aligned_alloc(64, sizeof(float) * (size_t)(padded(K + 1) + 3 * part));
    if (!heap) {
        j->failed = 1;
        return;
    }
    float *left = heap + padded(K + 1), *right = left + part, *log_p = right + part;
    for (long row = first; row < last; row += chunk) {
        long n = last - row < chunk ? last - row : chunk;
        const float *scores = j->scores + row * S;
        if (what == BACKWARD) {
            activation_slopes(j, scores, j->constants, n, S, left, right);
            for (long r = 0; r < n; r++)
                ascend(K, left + r * S, right + r * S, j->grad + (row + r) * K, heap,
                       j->out + (row + r) * S);
            continue;
        }
        activation_logs(j, scores, j->constants, n, S, left, right);
        for (long r = 0; r < n; r++)
            if (what == FORWARD)
                descend(K, left + r * S, right + r * S, heap, j->out + (row + r) * K);
            else /* node 1 is the first of a row */
                descend_inside(K, left + r * S, right + r * S, log_p + r * S - 1);
        if (what == FISHER)
            activation_information(j, scores, j->constants, n, S, j->out + row * S, log_p);
    }
    free(heap);
}

static void forward_rows(job *j, long first, long last) { walk_rows(j, first, last, FORWARD); }
static void backward_rows(job *j, long first, long last) { walk_rows(j, first, last, BACKWARD); }
static void fisher_rows(job *j, long first, long last) { walk_rows(j, first, last, FISHER); }

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

NARROW static void sparsemax_forward_rows(job *j, long first, long last) {
    long K = j->categories;
    for (long r = first; r < last; r++) sparsemax_row(j->scores + r * K, K, j->out + r * K);
}

NARROW static void sparsemax_backward_rows(job *j, long first, long last) {
    long K = j->categories;
    for (long r = first; r < last; r++)
        sparsemax_grad_row(j->scores + r * K, j->grad + r * K, K, j->out + r * K);
}

/* ---------------------------------------------------------------------------------- paths
 *
 * A job's result i belongs to row i % rows of the scores: N results for every row. A block of nodes
 * is gathered, scores and constants, into contiguous memory, where the functions of all trees apply
 * to it as to one row. */

typedef struct { /* of BLOCK nodes */
    job tree;
    float scores[BLOCK], left[BLOCK], right[BLOCK], constants[];
} node_block;

static int height(long K) { /* ceil(log2 K): levels of the tree */
    int H = 0;
    while (H < 62 && (1L << H) < K) H++;
    return H;
}

static node_block *make_block(const job *j) {
    node_block *b = malloc(sizeof(node_block) + sizeof(float) * (size_t)j->constant_rows * BLOCK);
    if (!b) return NULL;
    b->tree = *j;
    b->tree.constants = j->constants ? b->constants : NULL;
    return b;
}

/* Put the node with this score into place i of a block of n nodes. */
static inline void gather(const job *j, node_block *b, long i, long n, long row, long score) {
    long S = j->categories - 1;
    b->scores[i] = j->scores[row * S + score];
    for (long r = 0; r < j->constant_rows; r++)
        b->constants[r * n + i] = j->constants[r * S + score];
}

/* Apply activation_logs or activation_slopes to the n nodes of a block. */
static void activate_block(node_block *b, long n,
                        void (*function)(const job *, const float *, const float *, long, long,
                                      float *, float *)) {
    b->tree.categories = n + 1;
    function(&b->tree, b->scores, b->tree.constants, 1, n, b->left, b->right);
}

/* The numbers of results of rows first..last-1, in blocks; the leaves' paths are walked upwards. */
static void path_rows(job *j, long first, long last, int backward) {
    long K = j->categories, S = K - 1, rows = j->rows, H = height(K), chunk = BLOCK / H;
    node_block *b = make_block(j);
    if (!b) {
        j->failed = 1;
        return;
    }
    for (long repeat = 0; repeat < j->repeats; repeat++)
        for (long row = first; row < last; row += chunk) {
            long n = last - row < chunk ? last - row : chunk, start = repeat * rows + row;
            for (long i = 0; i < n; i++) {
                long long leaf = j->leaf[start + i];
                long heap = K + (leaf >= 0 && leaf < K ? (long)leaf : 0);
                for (long h = 0; h < H; h++) {
                    heap >>= 1;
                    gather(j, b, i * H + h, n * H, row + i, heap > 0 ? heap - 1 : 0);
                }
            }
            activate_block(b, n * H, backward ? activation_slopes : activation_logs);
            for (long i = 0; i < n; i++) {
                long long leaf = j->leaf[start + i];
                int valid = leaf >= 0 && leaf < K;
                long heap = K + (valid ? (long)leaf : 0);
                const float *left = b->left + i * H, *right = b->right + i * H;
                if (backward) {
                    float grad = valid ? j->grad[start + i] : from_bits(-1);
                    float *out = j->out + (row + i) * S;
                    for (long h = 0; heap > 1; h++, heap >>= 1)
                        out[heap / 2 - 1] += grad * (heap & 1 ? right[h] : -left[h]);
                } else {
                    float sum = 0;
                    for (long h = 0; heap > 1; h++, heap >>= 1) sum += heap & 1 ? right[h] : left[h];
                    j->out[start + i] = valid ? floored(sum) : from_bits(-1);
                }
            }
        }
    free(b);
}

/* Results start from the root together and go down level by level. */
static void sample_rows(job *j, long first, long last) {
    long K = j->categories, H = height(K);
    node_block *b = make_block(j);
    if (!b) {
        j->failed = 1;
        return;
    }
    for (long repeat = 0; repeat < j->repeats; repeat++)
        for (long row = first; row < last; row += BLOCK) {
            long n = last - row < BLOCK ? last - row : BLOCK, start = repeat * j->rows + row;
            const double *u = j->uniforms + start * H;
            long long *heap = j->sampled + start; /* 0: lost at a NaN */
            for (long i = 0; i < n; i++) heap[i] = 1;
            for (long h = 0; h < H; h++) {
                for (long i = 0; i < n; i++) {
                    int inside = heap[i] > 0 && heap[i] < K;
                    gather(j, b, i, n, row + i, inside ? (long)heap[i] - 1 : 0);
                }
                activate_block(b, n, activation_logs);
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
    path_rows(j, first, last, 0);
}

static void path_backward_rows(job *j, long first, long last) {
    path_rows(j, first, last, 1);
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

size_t catnat_size_of_job(void) { return sizeof(job); } /* cpu.py compares it */

#define EXPORT(NAME, ROWS) \
    int catnat_##NAME(job *j, int threads) { return run(ROWS, j, threads); }
EXPORT(tree_forward, forward_rows)
EXPORT(tree_backward, backward_rows)
EXPORT(tree_fisher, fisher_rows)
EXPORT(path_forward, path_forward_rows)
EXPORT(path_backward, path_backward_rows)
EXPORT(path_sample, sample_rows)
EXPORT(sparsemax_forward, sparsemax_forward_rows)
EXPORT(sparsemax_backward, sparsemax_backward_rows)
