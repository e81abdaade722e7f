/* AVX-512 forms that take many elements at once: bf16 weights with their corrections 32 at a time, as 16-bit words, and unpacking and packing.
 *
 * A processor that splits 512-bit operations in two has two of them in flight per cycle: one product or comparison, one sum or conversion,
 * and any integer operation in a free slot. So what can be done in words, or as integers, is.
 */
typedef struct { __m512 a, b; } two; /* 32 fp32 numbers */

/* Integer constants as whole vectors, since an operand in memory costs nothing and a broadcast an operation; words are twice in each 32 bits. They
 * are read from here, since a compiler that knows them moves them from a general register each time, or takes a product apart into shifts. */
#define TWICE(x) SAME((int32_t)((uint32_t)((x) & 0xFFFF) * 0x10001u))
#define SAME(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#define LANES(a) {0, a, 2 * a, 3 * a, 4 * a, 5 * a, 6 * a, 7 * a, 8 * a, 9 * a, 10 * a, 11 * a, 12 * a, 13 * a, 14 * a, 15 * a}
typedef struct {
    uint32_t code_dither[16], mcode_dither[16], code_dither16[16], mcode_dither16[16]; /* the Weyl sequences of codecs/log.py, and the way on */
    int32_t one[16], minus_one[16], mantissa[16], tie[16], largest[16], least[16], limit8[16], limit16[16], next_exponent[16], exponent[16], whole[16], rest[16];
    int32_t times[16], minus_one32[16], magnitude32[16], mantissa32[16], exponent0[16], first_code[16], last_code[16], least8[16];
} __attribute__((aligned(64))) wide_constants;
static const wide_constants WIDE = {
    LANES(2654435761u), LANES(2246822519u), SAME(16 * 2654435761u), SAME(16 * 2246822519u),
    TWICE(1), TWICE(-1), TWICE(0x7F), TWICE(0x8000), TWICE(0x7FFF), TWICE(-0x7FFF), TWICE(-127), TWICE(-32767), TWICE(0x80), TWICE(0x7F00), TWICE(258),
    TWICE(516), TWICE(-127), SAME(-1), SAME(0x7FFFFFFF), SAME(0x7FFFFF), SAME(0x3F800000), SAME(0x4B000001), SAME(0x4B0000FF),
    SAME((int32_t)0x81818181)};
OP const wide_constants *wide_hidden(void) {
    const wide_constants *c = &WIDE;
    __asm__("" : "+r"(c));
    return c;
}
#define READ(name) _mm512_load_si512(c->name)

/* Words 0 to 15, or 16 to 31, in the upper halves of 16 lanes. */
#define UPPER_OF(first) _mm512_set_epi16( \
    first + 15, 0, first + 14, 0, first + 13, 0, first + 12, 0, first + 11, 0, first + 10, 0, first + 9, 0, first + 8, 0, \
    first + 7, 0, first + 6, 0, first + 5, 0, first + 4, 0, first + 3, 0, first + 2, 0, first + 1, 0, first, 0)
/* Words i of the first operand in the lower halves, and i of the second (32 is added) in the upper ones. */
#define BOTH_OF(first) _mm512_set_epi16( \
    first + 47, first + 15, first + 46, first + 14, first + 45, first + 13, first + 44, first + 12, first + 43, first + 11, first + 42, \
    first + 10, first + 41, first + 9, first + 40, first + 8, first + 39, first + 7, first + 38, first + 6, first + 37, first + 5, \
    first + 36, first + 4, first + 35, first + 3, first + 34, first + 2, first + 33, first + 1, first + 32, first)
/* Every second word of two operands. */
#define HALVES(odd) _mm512_set_epi16( \
    62 + odd, 60 + odd, 58 + odd, 56 + odd, 54 + odd, 52 + odd, 50 + odd, 48 + odd, 46 + odd, 44 + odd, 42 + odd, 40 + odd, 38 + odd, 36 + odd, \
    34 + odd, 32 + odd, 30 + odd, 28 + odd, 26 + odd, 24 + odd, 22 + odd, 20 + odd, 18 + odd, 16 + odd, 14 + odd, 12 + odd, 10 + odd, 8 + odd, \
    6 + odd, 4 + odd, 2 + odd, odd)

/* 32 bf16 numbers to fp32. */
OP two wide_from_bf16(__m512i p) {
    return (two){_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, UPPER_OF(0), p)),
                 _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, UPPER_OF(16), p))};
}

/* 32 bf16 weights and their corrections to fp32 masters, as `join` in codecs/weight_split.py.
 *
 * In the integer view of fp32 a master is p + d, with d = c 2^15 / L to the nearest whole number and away from zero where c has the sign of p:
 * c 2^15 / 127 is 258 c + 2 c / 127, and c 2^15 / 32767 is c + c / 32767. The 2^16 patterns around a bf16 number are evenly spaced on both
 * sides of a power of two too, where below it they are half as wide, so that d doubles. |d| is at most 2^15, or one less where p is odd and
 * 2^15 would be rounded away from it. Weights of exponent 0 and those that are not finite
 * have no correction. */
OP two wide_join(const wide_constants *c, __m512i p, __m512i e, const int bits) {
    const __m512i zero = _mm512_setzero_si512();
    e = _mm512_mask_sub_epi16(e, _mm512_movepi16_mask(p), zero, e);
    /* towards zero from a power of two; what doubling would overflow is beyond the limit */
    __mmask32 inward = _mm512_mask_cmplt_epi16_mask(_mm512_testn_epi16_mask(p, READ(mantissa)), e, zero);
    if (bits == 24) e = _mm512_mask_add_epi16(e, inward, e, e);
    else e = _mm512_mask_adds_epi16(e, inward, e, e);
    /* exponents of 0 and of all ones, with 1 added, leave nothing */
    const __mmask32 has = _mm512_test_epi16_mask(_mm512_add_epi16(p, READ(next_exponent)), READ(exponent));
    e = _mm512_maskz_max_epi16(has, e, bits == 24 ? READ(limit8) : READ(limit16));
    const __m512i sign = _mm512_srai_epi16(e, 15);
    __m512i whole = bits == 24 ? _mm512_mullo_epi16(e, READ(whole)) : e;
    __m512i rest = bits == 24 ? _mm512_mulhrs_epi16(e, READ(rest)) : _mm512_mulhrs_epi16(_mm512_add_epi16(e, sign), READ(one));
    __m512i d = _mm512_max_epi16(_mm512_adds_epi16(whole, rest), READ(least));
    /* the full 2^15, which as a word is -2^15 for both signs */
    d = _mm512_mask_add_epi16(d, _mm512_testn_epi16_mask(p, READ(one)), whole, rest);
    p = _mm512_add_epi16(p, sign); /* borrow */
    return (two){_mm512_castsi512_ps(_mm512_permutex2var_epi16(d, BOTH_OF(0), p)), _mm512_castsi512_ps(_mm512_permutex2var_epi16(d, BOTH_OF(16), p))};
}

/* 32 fp32 masters to bf16 weights, nearest even, and with `bits` their corrections as words. NaN must not carry into the sign: its upper word
 * is not 0x7FFF or 0xFFFF, or its lower word is at most 0x8000. */
OP __m512i wide_split(const wide_constants *c, two w, __m512i *correction, const int bits) {
    const __m512i zero = _mm512_setzero_si512(), a = _mm512_castps_si512(w.a), b = _mm512_castps_si512(w.b);
    __m512i p = _mm512_permutex2var_epi16(a, HALVES(1), b), low = _mm512_permutex2var_epi16(a, HALVES(0), b);
    /* a tie is rounded up where the weight is odd, with whose lowest bit it is above a tie */
    const __m512i sticky = _mm512_ternarylogic_epi32(low, p, READ(one), 0xF8);
    const __mmask32 up = _mm512_cmpgt_epu16_mask(sticky, READ(tie)), down = _mm512_cmple_epu16_mask(sticky, READ(tie));
    p = _mm512_mask_sub_epi16(p, up, p, READ(minus_one));
    if (!bits) return p;
    /* w - p in the integer view, away from zero; the tie 2^15 as 2^15 - 1 */
    __m512i d = _mm512_mask_min_epu16(low, down, low, READ(largest)), e;
    const __mmask32 inward = _mm512_mask_testn_epi16_mask(up, p, READ(mantissa)); /* d < 0 where it was rounded up */
    __mmask32 positive = _mm512_testn_epi16_mask(p, READ(tie));
    if (bits == 24) {
        /* -127 d / 2^15; d = -2^14 is a tie, which belongs to the larger correction */
        d = _mm512_mask_srai_epi16(d, inward, d, 1);
        e = _mm512_mulhrs_epi16(d, READ(times));
        *correction = _mm512_mask_sub_epi16(e, positive, zero, e);
    } else {
        /* d - d / 2^15, ties of the quotient towards zero; half of it from a power of two inward */
        __mmask32 above = _mm512_cmpgt_epi16_mask(d, zero), tie = _mm512_mask_cmpeq_epi16_mask(down, low, READ(tie));
        e = _mm512_sub_epi16(d, _mm512_mulhrs_epi16(_mm512_mask_sub_epi16(d, above, d, READ(one)), READ(one)));
        e = _mm512_mask_srai_epi16(e, inward, _mm512_sub_epi16(d, READ(minus_one)), 1);
        e = _mm512_mask_mov_epi16(e, tie, READ(largest));
        *correction = _mm512_mask_sub_epi16(zero, positive, e, zero);
        *correction = _mm512_mask_sub_epi16(*correction, ~positive, zero, e);
    }
    return p;
}

/* Masters and weights at an address, 32 at a time. `type` and `bits` are constants. */
OP two wide_load(const wide_constants *c, const void *param, const void *correction, const int type, const int bits) {
    if (type == FP32) return (two){_mm512_loadu_ps(param), _mm512_loadu_ps((const float *)param + 16)};
    const __m512i p = _mm512_loadu_si512(param);
    if (!bits) return wide_from_bf16(p);
    if (bits == 32) return wide_join(c, p, _mm512_max_epi16(_mm512_loadu_si512(correction), READ(limit16)), 32);
    const __m256i small = _mm256_max_epi8(_mm256_loadu_si256((const __m256i *)correction), _mm256_load_si256((const __m256i *)c->least8));
    return wide_join(c, p, _mm512_cvtepi8_epi16(small), 24);
}

OP void wide_save(const wide_constants *c, two w, void *param, void *correction, const int type, const int bits) {
    if (type == FP32) {
        _mm512_storeu_ps(param, w.a);
        _mm512_storeu_ps((float *)param + 16, w.b);
        return;
    }
    __m512i e;
    _mm512_storeu_si512(param, wide_split(c, w, &e, bits));
    if (bits == 24) _mm256_storeu_si256((__m256i *)correction, _mm512_cvtepi16_epi8(e));
    if (bits == 32) _mm512_storeu_si512(correction, e);
}

/* Gradients at an address. A NaN's payload could carry into the sign when a bf16 weight is rounded; bf16 gradients have none so low. */
OP two wide_load_grad(const void *grad, const int grad_type, const int type) {
    if (grad_type != FP32) return wide_from_bf16(_mm512_loadu_si512(grad));
    two g = {_mm512_loadu_ps(grad), _mm512_loadu_ps((const float *)grad + 16)};
    if (type == FP32) return g;
    const __m512i plain_nan = _mm512_set1_epi32(0x33);
    return (two){_mm512_fixupimm_ps(g.a, g.a, plain_nan, 0), _mm512_fixupimm_ps(g.b, g.b, plain_nan, 0)};
}

/* The largest (or smallest) of each of 16 vectors of unsigned numbers, as one vector: rounds in which two vectors become one. */
OP __m512i wide_pick(__m512i a, __m512i b, const int smallest) { return smallest ? _mm512_min_epu32(a, b) : _mm512_max_epu32(a, b); }
OP __m512i wide_reduce(const uint32_t (*x)[16], const int smallest) {
    __m512i y[8], z[4], q[2];
    /* in the order that leaves group i in lane i */
    #pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int k = (i & 1) * 8 + (i >> 1);
        __m512i a = _mm512_loadu_si512(x[k]), b = _mm512_loadu_si512(x[k + 4]);
        y[i] = wide_pick(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE), smallest);
    }
    #pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        z[i] = wide_pick(_mm512_shuffle_i32x4(y[2 * i], y[2 * i + 1], 0x88), _mm512_shuffle_i32x4(y[2 * i], y[2 * i + 1], 0xDD), smallest);
    #pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        q[i] = wide_pick(_mm512_unpacklo_epi64(z[2 * i], z[2 * i + 1]), _mm512_unpackhi_epi64(z[2 * i], z[2 * i + 1]), smallest);
    const __m512 a = _mm512_castsi512_ps(q[0]), b = _mm512_castsi512_ps(q[1]);
    return wide_pick(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xDD)), smallest);
}
