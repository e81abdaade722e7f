/* AdamW with `log`, `joint` or `learned` states on a CPU: decode, update, encode, in one pass over memory.
 *
 * The arithmetic is that of codecs/log.py (or joint.py, or learned.py), codecs/weight_split.py and optim/adamw.py, some groups of elements at a time.
 * The file includes itself once for each instruction set of x86-64 (see simd.h); which one runs is decided when the library is called.
 * Approximations of log2 and exp2 are far finer than the codec's lattice, so codes differ from the eager ones at rounding boundaries only.
 */
#ifndef BODY

#include <math.h>

#include "page.h"

#define GROUP 64

/* fp32 scalars of one segment: `HYPER` in optim/adamw.py. */
typedef struct {
    float lr, weight_decay, beta1, beta1_rest, beta2, beta2_rest, rate, eps;
} hyper;

/* The page's planes, in the codec's order, and the corrections. */
typedef struct {
    int8_t *m;
    uint8_t *v;
    float *hi, *step;
    uint16_t *umax; /* bf16 */
    void *correction; /* int8_t, int16_t, or unused */
} planes;

/* The planes of `joint`, in the codec's order, and the corrections. */
typedef struct {
    uint8_t *low, *high; /* of a 16-bit code */
    uint16_t *top;       /* fp16 */
    uint8_t *levels;
    uint16_t *umax; /* bf16 */
    void *correction;
} joint_planes;

/* Those of `learned`, the same, and the tables of its parameters. */
typedef struct {
    joint_planes joint;
    const int64_t *tables; /* the address of each segment's table: two curves, fp16 */
    const segment *segments;
} learned_planes;

/* How far an error of m will move a weight in the steps to come, in units of what m itself moves it in one: `settle` in optim/adamw.py. */
static float joint_coast(double beta1, double beta1_rest, int64_t step) {
    const double power = pow(beta1, (double)step), q = power > 1e-4 ? power : 1e-4;
    return (float)(beta1 / beta1_rest * (q - 1) * log(1 - q) / q);
}

#include "curve.h"
#include "loop.h"

/* ------------------------------------------------------------------ one body for each instruction set */

#define BODY

#ifdef DISPATCH
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#pragma GCC optimize("no-schedule-insns2") /* operations are in the order in which they are written, which is the faster one */
#define ISA 2
#define NAME(x) JOIN(x, _avx512)
#include __FILE__
#undef ISA
#undef NAME
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define ISA 1
#define NAME(x) JOIN(x, _avx2)
#include __FILE__
#undef ISA
#undef NAME
#pragma GCC pop_options
#endif
#define ISA 0
#define NAME(x) JOIN(x, _base)
#include __FILE__

/* log2 and exp2 of n numbers, n a multiple of 16, as the kernel computes them. For tests. */
void flashoptim_log2(const float *x, float *y, int64_t n, int isa) { PICK(isa, many_log2)(x, y, n); }
void flashoptim_exp2(const float *x, float *y, int64_t n, int isa) { PICK(isa, many_exp2)(x, y, n); }

/* n weights and corrections, n a multiple of 32, joined and split as the kernel does. For tests. */
void flashoptim_join(const uint16_t *p, const void *c, float *w, int64_t n, int bits, int isa) { PICK(isa, many_join)(p, c, w, n, bits); }
void flashoptim_split(const float *w, uint16_t *p, void *c, int64_t n, int bits, int isa) { PICK(isa, many_split)(w, p, c, n, bits); }

/* A tensor to look at: address, number of elements, and type. */
typedef struct { int64_t address, numel, type; } span;

/* Elements that one task looks at: half a megabyte or less. */
#define LOOK 131072
static int64_t looks_of(const span *x) { return (x->numel + LOOK - 1) / LOOK; }

/* Whether any element is NaN, infinite or of magnitude 2^62 and above (`LIMIT` in optim/finite.py). */
int flashoptim_too_large(const span *spans, int64_t count, int threads, int isa) {
    int64_t tasks = 0, taken = 0;
    int found = 0;
    for (int64_t s = 0; s < count; s++) tasks += looks_of(&spans[s]);
    if (threads > tasks) threads = (int)(tasks ? tasks : 1);
    #pragma omp parallel num_threads(threads) reduction(|:found)
    {
        int64_t s = 0, before = 0, task, last; /* as in loop.h */
        while ((task = take_tasks(&taken, tasks, threads, &last)) < last)
            for (; task < last; task++) {
                while (task >= before + looks_of(&spans[s])) before += looks_of(&spans[s++]);
                const int64_t first = (task - before) * LOOK, rest = spans[s].numel - first;
                const char *at = (const char *)(intptr_t)spans[s].address + first * (spans[s].type == FP32 ? 4 : 2);
                found |= PICK(isa, too_large)(at, rest < LOOK ? rest : LOOK, (int)spans[s].type);
            }
    }
    return found;
}

/* One step of every segment. `isa` as from flashoptim_isa, or lower to force a path. */
void flashoptim_adamw_log(
    const segment *segments, const hyper *hypers, int64_t count, const planes *where, int master_bits, int dither, float inv_scale, int threads,
    int isa) {
    const options how = {master_bits, dither, inv_scale};
    run_page(PICK(isa, run), segments, hypers, 1, count, where, &how, threads);
}

void flashoptim_adamw_joint(
    const segment *segments, const hyper *hypers, int64_t count, const planes *where, int master_bits, int dither, float inv_scale, int threads,
    int isa) {
    const options how = {master_bits, dither, inv_scale};
    run_page(PICK(isa, run_joint), segments, hypers, 1, count, where, &how, threads);
}

/* `where` has the address of the tables' addresses last. */
void flashoptim_adamw_learned(
    const segment *segments, const hyper *hypers, int64_t count, const learned_planes *where, int master_bits, int dither, float inv_scale,
    int threads, int isa) {
    const options how = {master_bits, dither, inv_scale};
    const learned_planes mine = {where->joint, where->tables, segments};
    run_page(PICK(isa, run_learned), segments, hypers, 1, count, (const planes *)(const void *)&mine, &how, threads);
}

#else /* the body */

#include "simd.h"
#include "weights.h"
#include "finite.h"

static void NAME(many_log2)(const float *x, float *y, int64_t n) { for (int64_t i = 0; i < n; i += W) NAME(save)(y + i, NAME(log2)(NAME(load)(x + i))); }
static void NAME(many_exp2)(const float *x, float *y, int64_t n) { for (int64_t i = 0; i < n; i += W) NAME(save)(y + i, NAME(exp2)(NAME(load)(x + i))); }

static void NAME(many_join)(const uint16_t *p, const void *c, float *w, int64_t n, int bits) {
    for (int64_t i = 0; i < n; i += 32) {
        V x[32 / W];
        if (bits == 24) NAME(read32)(p + i, (const int8_t *)c + i, BF16, 24, x);
        else NAME(read32)(p + i, (const int16_t *)c + i, BF16, 32, x);
        for (int j = 0; j < 32; j += W) NAME(save)(w + i + j, x[j / W]);
    }
}

static void NAME(many_split)(const float *w, uint16_t *p, void *c, int64_t n, int bits) {
    for (int64_t i = 0; i < n; i += 32) {
        V x[32 / W];
        for (int j = 0; j < 32; j += W) x[j / W] = NAME(load)(w + i + j);
        if (bits == 24) NAME(write32)(p + i, (int8_t *)c + i, BF16, 24, x);
        else NAME(write32)(p + i, (int16_t *)c + i, BF16, 32, x);
    }
}

#if ISA == 2
#include "adamw_wide.h"
#else
#include "adamw_any.h"
#endif

/* A group of n elements of any types, by way of a full group of fp32 masters on the stack. */
static __attribute__((noinline)) void NAME(any_group)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, int n) {
    const int64_t at = g * GROUP, element = s->start + at, group = element / GROUP;
    const int bits = how->master_bits;
    float w[GROUP] = {0}, grad[GROUP] = {0};
    int8_t m[GROUP] = {0};
    uint8_t v[GROUP] = {0};
    memcpy(m, where->m + element, (size_t)n);
    memcpy(v, where->v + element, (size_t)n);
    NAME(read_any)(s, where->correction, bits, at, n, w, grad);
    const segment local = {(int64_t)(intptr_t)w, (int64_t)(intptr_t)grad, 0, GROUP, s->index + at, s->step, FP32, FP32};
    const planes buffers = {m, v, where->hi + group, where->step + group, where->umax + group, 0};
    if (how->dither) NAME(groups)(&local, h, &buffers, how, 0, 1, FP32, FP32, 0, 1);
    else NAME(groups)(&local, h, &buffers, how, 0, 1, FP32, FP32, 0, 0);
    memcpy(where->m + element, m, (size_t)n);
    memcpy(where->v + element, v, (size_t)n);
    NAME(write_any)(s, where->correction, bits, at, n, w);
}

/* The groups [first, last) of a segment: those that are full and of a common type in registers, the others one by one. */
static void NAME(run)(const segment *s, const hyper *h, const planes *where, const options *how, int64_t first, int64_t last) {
    const int64_t full = s->numel / GROUP < last ? s->numel / GROUP : last;
    int64_t g = first;
#define ALL(type, grad, bits, dither) NAME(groups)(s, h, where, how, g, full - g, type, grad, bits, dither)
#define CASE(type, grad, bits) \
    if (g < full && s->param_type == type && s->grad_type == grad && how->master_bits == bits) { \
        if (how->dither) ALL(type, grad, bits, 1); else ALL(type, grad, bits, 0); \
        g = full; \
    }
    CASE(FP32, FP32, 0)
    CASE(FP32, BF16, 0)
    CASE(BF16, BF16, 0)
    CASE(BF16, FP32, 0)
    CASE(BF16, BF16, 24)
    CASE(BF16, FP32, 24)
    CASE(BF16, BF16, 32)
    CASE(BF16, FP32, 32)
#undef CASE
#undef ALL
    for (; g < last; g++) NAME(any_group)(s, h, where, how, g, (int)(s->numel - g * GROUP < GROUP ? s->numel - g * GROUP : GROUP));
}

#include "curve.h"
#include "adamw_joint.h"

#undef TILE
#undef V
#undef I
#undef U
#undef M
#undef OP
#endif
