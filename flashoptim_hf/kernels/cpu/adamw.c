/* AdamW with `log` states on a CPU: decode, update, encode, in one pass over memory.
 *
 * The arithmetic is that of codecs/log.py, codecs/weight_split.py and optim/adamw.py, one group of 64 elements at a time and in registers.
 * The file includes itself once for each instruction set of x86-64 (see simd.h); which one runs is decided when the library is called.
 * Approximations of log2 and exp2 are far finer than the codec's lattice, so codes differ from the eager ones at rounding boundaries only.
 */
#ifndef BODY

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

#include "loop.h"

/* ------------------------------------------------------------------ one body for each instruction set */

#define BODY

#ifdef DISPATCH
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
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

/* One step of every segment. `isa` as from flashoptim_isa, or lower to force a path. */
void flashoptim_adamw_log(
    const segment *segments, const hyper *hypers, int64_t count, const planes *where, int master_bits, int dither, float inv_scale, int threads,
    int isa) {
    const options how = {master_bits, dither, inv_scale};
    run_page(PICK(isa, run), segments, hypers, 1, count, where, &how, threads);
}

#else /* the body */

#include "simd.h"
#include "weights.h"

static void NAME(many_log2)(const float *x, float *y, int64_t n) { for (int64_t i = 0; i < n; i += W) NAME(save)(y + i, NAME(log2)(NAME(load)(x + i))); }
static void NAME(many_exp2)(const float *x, float *y, int64_t n) { for (int64_t i = 0; i < n; i += W) NAME(save)(y + i, NAME(exp2)(NAME(load)(x + i))); }

/* What a tile of groups carries from one pass to the next: registers would hold one group only, and a group's own chain of reductions and
 * divisions is too long to wait for. In passes over a tile the processor works on several groups at once. All of it stays in the L1 cache. */
#define TILE 8
typedef struct {
    float m[TILE][GROUP];         /* the new m, then u = m / r̂ */
    float log_r[TILE][GROUP];     /* log2 r, -2^100 for r = 0 */
    float inverse_r[TILE][GROUP]; /* 1 / r, 0 for r = 0 */
    float top[TILE], low[TILE];   /* largest log2 r, and largest -log2 r */
    float hi[TILE], step[TILE], inverse_step[TILE], last[TILE], curve[TILE], u[TILE], scale[TILE];
} NAME(tile);

/* First pass over one group: decode, update, store the weight. `type`, `grad_type` and `bits` are constants wherever this is inlined: FP32
 * without corrections, or BF16. */
OP void NAME(update)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, NAME(tile) *t, int k, const int type,
    const int grad_type, const int bits) {
    const int64_t at = g * GROUP, element = s->start + at, group = element / GROUP;
    const float limit = bits == 24 ? 127 : 32767;
    float *param = (float *)s->param + at;
    uint16_t *param16 = (uint16_t *)s->param + at;
    int8_t *c8 = (int8_t *)where->correction + element;
    int16_t *c16 = (int16_t *)where->correction + element;

    const float step = where->step[group], first = where->hi[group] - 255 * step;
    const float umax = float_of((uint32_t)where->umax[group] << 16) / 127 * h->beta1;
    const float rest1 = h->beta1_rest * how->inv_scale, rest2 = h->beta2_rest * how->inv_scale * how->inv_scale;
    const float decay = 1 - h->lr * h->weight_decay, size = h->lr * h->rate;
    V top = NAME(set)(-0x1p100f), low = NAME(set)(-0x1p100f);

    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += W) {
        V grad = grad_type == FP32 ? NAME(load)((const float *)s->grad + at + j)
                                   : (V)(NAME(from_u16)((const uint16_t *)s->grad + at + j) << 16);
        I p = type == FP32 ? (I)NAME(load)(param + j) : NAME(from_u16)(param16 + j) << 16;
        V w = (V)p;
        if (bits) {
            V c = NAME(to_f)(bits == 24 ? NAME(from_i8)(c8 + j) : NAME(from_i16)(c16 + j));
            w = NAME(join)(p, NAME(max)(c, NAME(set)(-limit)), limit);
        }
        V code = NAME(to_f)(NAME(from_u8)(where->v + element + j));
        V r = NAME(keep)(NAME(ne0)(code), NAME(exp2)(code * step + first));
        V m = NAME(to_f)(NAME(from_i8)(where->m + element + j)) * umax * r + grad * rest1;
        /* at most the largest number: an infinite v would make inf * 0 below */
        V v = NAME(min)(r * h->beta2 * r + grad * rest2 * grad, NAME(set)(0x1.fffffep127f));
        M some = NAME(lt)(NAME(set)(0), v);
        V inverse_r = NAME(keep)(some, NAME(rsqrt)(v)), denominator = v * inverse_r + h->eps;
        V move = NAME(keep)(NAME(ne0)(denominator), m / denominator);
        w = w * decay - size * move;
        if (type == FP32) {
            NAME(save)(param + j, w);
        } else {
            p = NAME(to_bf16)(w);
            NAME(to_16)(param16 + j, p >> 16);
            if (bits == 24) NAME(to_8)(c8 + j, NAME(correct)(w, p, limit));
            if (bits == 32) NAME(to_16)(c16 + j, NAME(correct)(w, p, limit));
        }
        V log = NAME(log2)(v) * 0.5f, kept = NAME(pick)(some, log, NAME(set)(-0x1p100f));
        top = NAME(max)(top, kept);
        low = NAME(max)(low, NAME(pick)(some, -log, NAME(set)(-0x1p100f)));
        NAME(save)(t->m[k] + j, m);
        NAME(save)(t->inverse_r[k] + j, inverse_r);
        NAME(save)(t->log_r[k] + j, kept);
    }
    t->top[k] = NAME(largest)(top);
    t->low[k] = NAME(largest)(low);
}

/* hi and step of every group on their grids (`group_constants` in codecs/log.py), and what the second pass needs of them. */
OP void NAME(lattice)(NAME(tile) *t) {
    for (int k = 0; k < TILE; k++) {
        float hi = t->top[k] < -1000 ? 0 : NEAREST(t->top[k] * 0x1p16f) * 0x1p-16f;
        hi = hi > 64 - 0x1p-10f ? 64 - 0x1p-10f : hi;
        float lo = -t->low[k] < hi ? -t->low[k] : hi;
        lo = lo < hi - 24 ? hi - 24 : lo;
        float step = __builtin_ceilf((hi - lo) * (float)(0x1p22 / 254) - 0.25f) * 0x1p-22f;
        step = step < 0x1p-8f ? 0x1p-8f : step;
        t->hi[k] = hi;
        t->step[k] = step;
        t->inverse_step[k] = 1 / step;
        t->last[k] = 255 * step - hi;
        t->curve[k] = 0.69314718f * step * 0x1p24f;
    }
}

/* Second pass: log2 r to codes, and m to u = m / r̂. */
OP void NAME(encode_v)(const segment *s, const planes *where, int64_t g, NAME(tile) *t, int k, const int dither) {
    const int64_t at = g * GROUP, element = s->start + at;
    const float hi = t->hi[k], step = t->step[k], inverse = t->inverse_step[k];
    /* the threshold x - ln2 step x (1 - x), in units of 2^-24 as the dither is */
    const float curve = t->curve[k], slope = 0x1p24f - curve;
    const uint32_t start = (uint32_t)(s->index + at) * 2654435761u + (uint32_t)s->step * 2654435769u;
    /* where codes are clamped, what decodes may be far from r */
    const int clamped = -t->low[k] < hi - 24 || t->top[k] > hi + 0x1p-10f;
    V largest = NAME(set)(0);
    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += W) {
        V log_r = NAME(load)(t->log_r[k] + j);
        V c = NAME(max)(255 - (hi - log_r) * inverse, NAME(set)(1)), code;
        if (dither) {
            code = NAME(floor)(c);
            V x = c - code;
            M up = NAME(lt)(NAME(weyl)(start + (uint32_t)j * 2654435761u, 2654435761u), x * (curve * x + slope));
            code = code + NAME(keep)(up, NAME(set)(1));
        } else {
            code = NAME(nearest)(c);
        }
        code = NAME(keep)(NAME(lt)(NAME(set)(-0x1p99f), log_r), NAME(min)(code, NAME(set)(255)));
        NAME(to_8)(where->v + element + j, NAME(to_i)(code));
        /* m / r̂; r̂ is r times 2^((code - c) step), whose exponent is small */
        V per_r = NAME(load)(t->inverse_r[k] + j) * NAME(exp2_small)((c - code) * step);
        if (clamped) per_r = NAME(exp2)(t->last[k] - code * step);
        V u = NAME(keep)(NAME(ne0)(code), NAME(load)(t->m[k] + j) * per_r);
        NAME(save)(t->m[k] + j, u);
        largest = NAME(max)(largest, (V)((I)u & 0x7FFFFFFF));
    }
    t->u[k] = NAME(largest)(largest);
}

/* Third pass: u to codes. */
OP void NAME(encode_m)(const segment *s, const planes *where, int64_t g, const NAME(tile) *t, int k, const int dither) {
    const int64_t at = g * GROUP, element = s->start + at;
    const float scale = t->scale[k];
    const uint32_t start = (uint32_t)(s->index + at) * 2246822519u + (uint32_t)s->step * 1779033703u;
    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += W) {
        V x = NAME(load)(t->m[k] + j) * scale;
        x = dither ? NAME(floor)(x + NAME(weyl)(start + (uint32_t)j * 2246822519u, 2246822519u) * 0x1p-24f) : NAME(nearest)(x);
        NAME(to_8)(where->m + element + j, NAME(to_i)(NAME(min)(NAME(max)(x, NAME(set)(-127)), NAME(set)(127))));
    }
}

/* `count` <= TILE groups from `g` on. */
OP void NAME(groups)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, int count, const int type, const int grad_type,
    const int bits, const int dither) {
    NAME(tile) t;
    const int64_t group = s->start / GROUP + g;
    for (int k = 0; k < count; k++) NAME(update)(s, h, where, how, g + k, &t, k, type, grad_type, bits);
    for (int k = count; k < TILE; k++) t.top[k] = t.low[k] = t.u[k] = 0;
    NAME(lattice)(&t);
    for (int k = 0; k < count; k++) NAME(encode_v)(s, where, g + k, &t, k, dither);
    uint32_t stored[TILE];
    for (int k = 0; k < TILE; k++) {
        float u = t.u[k] < 0x1p-100f ? 0x1p-100f : t.u[k] > 0x1.FEp127f ? 0x1.FEp127f : t.u[k];
        stored[k] = (bits_of(u) + (dither ? 0xFFF0 : 0x8000)) & 0xFFFF0000;
        t.scale[k] = 127 / float_of(stored[k]);
    }
    for (int k = 0; k < count; k++) NAME(encode_m)(s, where, g + k, &t, k, dither);
    memcpy(where->hi + group, t.hi, (size_t)count * 4);
    memcpy(where->step + group, t.step, (size_t)count * 4);
    for (int k = 0; k < count; k++) where->umax[group + k] = (uint16_t)(stored[k] >> 16);
}

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
#define LOOP(type, grad, bits, dither) \
    for (; g < full; g += TILE) NAME(groups)(s, h, where, how, g, full - g < TILE ? (int)(full - g) : TILE, type, grad, bits, dither)
#define CASE(type, grad, bits) \
    if (s->param_type == type && s->grad_type == grad && how->master_bits == bits) { \
        if (how->dither) LOOP(type, grad, bits, 1); else LOOP(type, grad, bits, 0); \
        g = full > first ? full : first; \
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
#undef LOOP
    for (; g < last; g++) NAME(any_group)(s, h, where, how, g, (int)(s->numel - g * GROUP < GROUP ? s->numel - g * GROUP : GROUP));
}

#undef TILE
#undef V
#undef I
#undef U
#undef M
#undef OP
#endif
