/* Lion and SGD with `square` states on a CPU: decode, update, encode, in one pass over memory.
 *
 * The arithmetic is that of codecs/square.py, codecs/weight_split.py, optim/lion.py and optim/sgd.py, one group of 32 elements at a time and in
 * registers. The file includes itself once for each instruction set of x86-64 (see simd.h); which one runs is decided when the library is
 * called. Codes differ from the eager ones at rounding boundaries only.
 */
#ifndef BODY

#include "page.h"

#define GROUP 32

/* fp32 scalars of one segment: `HYPER` in optim/lion.py or in optim/sgd.py. */
typedef float hyper;
enum { LR = 0, LION_DECAY, LION_BETA1, LION_REST1, LION_BETA2, LION_REST2, LION_WIDTH };
enum { SGD_DECOUPLED = 1, SGD_COUPLED, SGD_MOMENTUM, SGD_REST, SGD_GRAD_SHARE, SGD_BUFFER_SHARE, SGD_WIDTH };

/* The page's planes, in the codec's order, and the corrections. */
typedef struct {
    int8_t *code;
    uint16_t *scale; /* bf16 */
    void *correction; /* int8_t, int16_t, or unused */
} planes;

#include "loop.h"

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

/* One step of every segment. `isa` as from flashoptim_isa, or lower to force a path. */
void flashoptim_lion_square(
    const segment *segments, const hyper *hypers, int64_t count, const planes *where, int master_bits, int dither, float inv_scale, int threads,
    int isa) {
    const options how = {master_bits, dither, inv_scale};
    run_page(PICK(isa, run_lion), segments, hypers, LION_WIDTH, count, where, &how, threads);
}

void flashoptim_sgd_square(
    const segment *segments, const hyper *hypers, int64_t count, const planes *where, int master_bits, int dither, float inv_scale, int threads,
    int isa) {
    const options how = {master_bits, dither, inv_scale};
    run_page(PICK(isa, run_sgd), segments, hypers, SGD_WIDTH, count, where, &how, threads);
}

#else /* the body */

#include "simd.h"
#include "weights.h"

/* One step of one vector: the new momentum and, through `weight`, the new weight. */
OP V NAME(lion)(V m, V *weight, V grad, const hyper *h) {
    V mix = m * h[LION_BETA1] + grad * h[LION_REST1];
    V move = NAME(keep)(NAME(ne0)(mix), (V)(((I)mix & (int32_t)0x80000000) | (I)NAME(set)(h[LR])));
    *weight = *weight * (1 - h[LR] * h[LION_DECAY]) - move;
    return m * h[LION_BETA2] + grad * h[LION_REST2];
}

OP V NAME(sgd)(V m, V *weight, V grad, const hyper *h) {
    grad = grad + h[SGD_COUPLED] * *weight;
    m = m * h[SGD_MOMENTUM] + grad * h[SGD_REST];
    *weight = *weight * (1 - h[LR] * h[SGD_DECOUPLED]) - h[LR] * (grad * h[SGD_GRAD_SHARE] + m * h[SGD_BUFFER_SHARE]);
    return m;
}

/* One group. `type`, `grad_type`, `bits` and `lion` are constants wherever this is inlined: FP32 without corrections, or BF16. */
OP void NAME(group)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, const int type, const int grad_type, const int bits,
    const int lion) {
    const int64_t at = g * GROUP, element = s->start + at, group = element / GROUP;
    const int width = type == FP32 ? 4 : 2, grad_width = grad_type == FP32 ? 4 : 2;
    char *param = (char *)s->param + at * width, *correction = (char *)where->correction + element * (bits / 8 - 2);
    const float unit = float_of((uint32_t)where->scale[group] << 16) / 16129;
    V m[GROUP / W], w[GROUP / W], grads[GROUP / W], top = NAME(set)(0);
    NAME(read_grad32)((const char *)s->grad + at * grad_width, grad_type, type, grads);
    NAME(read32)(param, correction, type, bits, w);

    #pragma GCC unroll 8
    for (int j = 0; j < GROUP; j += W) {
        V code = NAME(to_f)(NAME(from_i8)(where->code + element + j));
        V x = code * (V)((I)code & 0x7FFFFFFF) * unit;
        const V grad = grads[j / W] * how->inv_scale;
        x = lion ? NAME(lion)(x, &w[j / W], grad, h) : NAME(sgd)(x, &w[j / W], grad, h);
        m[j / W] = x;
        top = NAME(max)(top, (V)((I)x & 0x7FFFFFFF));
    }
    NAME(write32)(param, correction, type, bits, w);

    /* the scale, to the nearest bf16 number, ties up: `bf16_scale` in codecs/log.py */
    float largest = NAME(largest)(top);
    largest = largest < 0x1p-100f ? 0x1p-100f : largest > 0x1.FEp127f ? 0x1.FEp127f : largest;
    const uint32_t stored = (bits_of(largest) + 0x8000) & 0xFFFF0000;
    where->scale[group] = (uint16_t)(stored >> 16);
    const float inverse = 16129 / float_of(stored);
    const uint32_t start = (uint32_t)(s->index + at) * 2654435761u + (uint32_t)(s->step >> 1) * 2654435769u;
    const float sign = s->step & 1 ? -1 : 1;
    #pragma GCC unroll 8
    for (int j = 0; j < GROUP; j += W) {
        V x = m[j / W], z = (V)((I)x & 0x7FFFFFFF) * inverse, e = NAME(set)(0);
        if (how->dither) {
            e = (NAME(weyl)(start + (uint32_t)j * 2654435761u, 2654435761u) * 0x1p-24f - 0.5f) * sign;
            e = NAME(keep)(NAME(lt)(z, NAME(set)(4096)), e);
        }
        V y = NAME(sqrt)(NAME(max)(z + (e * e - 0.25f), NAME(set)(0))) + e;
        y = NAME(min)(NAME(nearest)(y), NAME(set)(127));
        NAME(to_8)(where->code + element + j, NAME(to_i)((V)((I)y ^ ((I)x & (int32_t)0x80000000))));
    }
}

/* A group of n elements of any types, by way of a full group of fp32 masters on the stack. */
static __attribute__((noinline)) void NAME(any_group)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, int n, int lion) {
    const int64_t at = g * GROUP, element = s->start + at;
    float w[GROUP] = {0}, grad[GROUP] = {0};
    int8_t code[GROUP] = {0};
    memcpy(code, where->code + element, (size_t)n);
    NAME(read_any)(s, where->correction, how->master_bits, at, n, w, grad);
    const segment local = {(int64_t)(intptr_t)w, (int64_t)(intptr_t)grad, 0, GROUP, s->index + at, s->step, FP32, FP32};
    const planes buffers = {code, where->scale + element / GROUP, 0};
    if (lion) NAME(group)(&local, h, &buffers, how, 0, FP32, FP32, 0, 1);
    else NAME(group)(&local, h, &buffers, how, 0, FP32, FP32, 0, 0);
    memcpy(where->code + element, code, (size_t)n);
    NAME(write_any)(s, where->correction, how->master_bits, at, n, w);
}

/* The groups [first, last) of a segment: those that are full and of a common type in registers, the others one by one. */
OP void NAME(run)(const segment *s, const hyper *h, const planes *where, const options *how, int64_t first, int64_t last, const int lion) {
    const int64_t full = s->numel / GROUP < last ? s->numel / GROUP : last;
    int64_t g = first;
#define CASE(type, grad, bits) \
    if (s->param_type == type && s->grad_type == grad && how->master_bits == bits) \
        for (; g < full; g++) NAME(group)(s, h, where, how, g, type, grad, bits, lion);
    CASE(FP32, FP32, 0)
    CASE(FP32, BF16, 0)
    CASE(BF16, BF16, 0)
    CASE(BF16, FP32, 0)
    CASE(BF16, BF16, 24)
    CASE(BF16, FP32, 24)
    CASE(BF16, BF16, 32)
    CASE(BF16, FP32, 32)
#undef CASE
    for (; g < last; g++) NAME(any_group)(s, h, where, how, g, (int)(s->numel - g * GROUP < GROUP ? s->numel - g * GROUP : GROUP), lion);
}

static void NAME(run_lion)(const segment *s, const hyper *h, const planes *where, const options *how, int64_t first, int64_t last) {
    NAME(run)(s, h, where, how, first, last, 1);
}

static void NAME(run_sgd)(const segment *s, const hyper *h, const planes *where, const options *how, int64_t first, int64_t last) {
    NAME(run)(s, h, where, how, first, last, 0);
}

#undef V
#undef I
#undef U
#undef M
#undef OP
#endif
