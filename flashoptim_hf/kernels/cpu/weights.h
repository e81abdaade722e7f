/* Weights, corrections and gradients in vectors: included by an algorithm's body after simd.h, once for each instruction set. */
#if ISA == 2
#include "wide.h"
#endif

/* bf16 bits in the upper half, and corrections, to fp32 masters: p + c u + (c / L) u with u = half an ulp / (L + 1), rounded once, as in
 * codecs/weight_split.py. In the integer view of fp32 the 2^16 patterns around a bf16 number are evenly spaced on both sides of a power of
 * two too, so one clamp keeps the result among those that round to p: a tie only where the mantissa is even. */
OP V NAME(join)(I p, V c, float limit) {
    I exponent = p & 0x7F800000;
    V unit = (V)(exponent - (8 << 23)) * (1 / (limit + 1)), whole = c * unit, moved = (V)p + whole;
    moved = moved + ((whole - (moved - (V)p)) + (c * (1 / limit)) * unit);
    I d = (I)moved - p, reach = 0x8000 - ((p >> 16) & 1);
    d = NAME(imax)(NAME(imin)(d, reach), -reach);
    /* weights below 2^-118 and those that are not finite have no correction */
    M has = NAME(ilt)((exponent - (9 << 23)) & 0x7FFFFFFF, (I){0} + (0x7F800000 - (9 << 23)));
    return (V)(p + (I)NAME(keep)(has, (V)d));
}

/* fp32 to bf16 bits in the upper half, nearest even; NaN stays NaN. */
OP I NAME(to_bf16)(V w) {
    I u = (I)w, rounded = u + 0x7FFF + ((u >> 16) & 1);
    M finite = NAME(ilt)(u & 0x7FFFFFFF, (I){0} + 0x7F800001);
    return (I)NAME(pick)(finite, (V)rounded, (V)(u | 0x400000)) & -0x10000;
}

/* Corrections L x for x = (w - p) / half an ulp. In 16 bits as (L + 1) x - x, since L x would be rounded twice; see codecs/weight_split.py. */
OP I NAME(correct)(V w, I p, float limit) {
    I exponent = p & 0x7F800000;
    M has = NAME(ilt)((exponent - (9 << 23)) & 0x7FFFFFFF, (I){0} + (0x7F800000 - (9 << 23)));
    V x = NAME(keep)(has, (w - (V)p) * (V)((262 << 23) - exponent));
    if (limit == 127) return NAME(to_i)(x * limit);
    V scaled = x * (limit + 1), whole = NAME(nearest)(scaled);
    return NAME(to_i)(whole + NAME(nearest)((scaled - whole) - x));
}

/* n <= GROUP elements of any types, from element `at` of a segment on, to fp32 masters and gradients. */
OP void NAME(read_any)(const segment *s, const void *correction, int bits, int64_t at, int n, float *w, float *grad) {
    const float limit = bits == 24 ? 127 : 32767;
    const uint16_t *g16 = (const uint16_t *)s->grad + at, *p16 = (const uint16_t *)s->param + at;
    const int64_t element = s->start + at;
    for (int i = 0; i < n; i++) {
        grad[i] = s->grad_type == FP32 ? ((const float *)s->grad)[at + i] : s->grad_type == FP16 ? half_to_float(g16[i]) : float_of((uint32_t)g16[i] << 16);
        w[i] = s->param_type == FP32 ? ((const float *)s->param)[at + i] : s->param_type == FP16 ? half_to_float(p16[i]) : float_of((uint32_t)p16[i] << 16);
        if (!bits) continue;
        float c = bits == 24 ? ((const int8_t *)correction)[element + i] : ((const int16_t *)correction)[element + i];
        c = c < -limit ? -limit : c;
        w[i] = s->param_type == FP16 ? join_half(w[i], c, limit) : NAME(join)((I)NAME(set)(w[i]), NAME(set)(c), limit)[0];
    }
}

/* The way back: fp32 masters to weights and corrections. */
OP void NAME(write_any)(const segment *s, void *corrections, int bits, int64_t at, int n, const float *w) {
    const float limit = bits == 24 ? 127 : 32767;
    const int64_t element = s->start + at;
    for (int i = 0; i < n; i++) {
        if (s->param_type == FP32) {
            ((float *)s->param)[at + i] = w[i];
            continue;
        }
        I p = NAME(to_bf16)(NAME(set)(w[i]));
        uint16_t h16 = s->param_type == FP16 ? float_to_half(w[i]) : (uint16_t)((uint32_t)p[0] >> 16);
        ((uint16_t *)s->param)[at + i] = h16;
        int32_t correction = 0;
        if (bits) correction = s->param_type == FP16 ? (int32_t)correct_half(w[i], h16, limit) : NAME(correct)(NAME(set)(w[i]), p, limit)[0];
        if (bits == 24) ((int8_t *)corrections)[element + i] = (int8_t)correction;
        if (bits == 32) ((int16_t *)corrections)[element + i] = (int16_t)correction;
    }
}

/* 32 weights and gradients at an address to fp32 masters, and back. `type` and `bits` are constants: FP32 without corrections, or BF16. */
OP void NAME(read32)(const void *param, const void *correction, const int type, const int bits, V *w) {
#if ISA == 2
    const two x = wide_load(wide_hidden(), param, correction, type, bits);
    w[0] = (V)x.a;
    w[1] = (V)x.b;
#else
    const float limit = bits == 24 ? 127 : 32767;
    #pragma GCC unroll 8
    for (int j = 0; j < 32; j += W) {
        const I p = type == FP32 ? (I)NAME(load)((const float *)param + j) : NAME(from_u16)((const uint16_t *)param + j) << 16;
        w[j / W] = (V)p;
        if (!bits) continue;
        const V c = NAME(to_f)(bits == 24 ? NAME(from_i8)((const int8_t *)correction + j) : NAME(from_i16)((const int16_t *)correction + j));
        w[j / W] = NAME(join)(p, NAME(max)(c, NAME(set)(-limit)), limit);
    }
#endif
}

OP void NAME(write32)(void *param, void *correction, const int type, const int bits, const V *w) {
#if ISA == 2
    wide_save(wide_hidden(), (two){(__m512)w[0], (__m512)w[1]}, param, correction, type, bits);
#else
    const float limit = bits == 24 ? 127 : 32767;
    #pragma GCC unroll 8
    for (int j = 0; j < 32; j += W) {
        if (type == FP32) {
            NAME(save)((float *)param + j, w[j / W]);
            continue;
        }
        const I p = NAME(to_bf16)(w[j / W]);
        NAME(to_16)((uint16_t *)param + j, p >> 16);
        if (bits == 24) NAME(to_8)((int8_t *)correction + j, NAME(correct)(w[j / W], p, limit));
        if (bits == 32) NAME(to_16)((int16_t *)correction + j, NAME(correct)(w[j / W], p, limit));
    }
#endif
}

OP void NAME(read_grad32)(const void *grad, const int grad_type, const int type, V *g) {
#if ISA == 2
    const two x = wide_load_grad(grad, grad_type, type);
    g[0] = (V)x.a;
    g[1] = (V)x.b;
#else
    (void)type;
    #pragma GCC unroll 8
    for (int j = 0; j < 32; j += W)
        g[j / W] = grad_type == FP32 ? NAME(load)((const float *)grad + j) : (V)(NAME(from_u16)((const uint16_t *)grad + j) << 16);
#endif
}
