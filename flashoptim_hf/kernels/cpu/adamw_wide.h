/* AdamW with `log` states, the AVX-512 form: four passes over a tile of 16 groups. Included by adamw.c, which says what `planes` are.
 *
 * Registers would hold one group only, and a group's own chain of reductions and divisions is too long to wait for: in passes over a tile the
 * processor works on several groups at once, and what 16 groups need once is done for all of them in one vector. All of it stays in the L1
 * cache. Square roots and quotients are left to the divider, which works beside the rest.
 *
 * A processor that splits 512-bit operations in two starts two of them per cycle, of each kind one or two; a broadcast is one too, an operand
 * in memory is none.
 */
#define TILE 16
typedef struct {
    float m[TILE][GROUP];    /* the new m, then u = m / r̂; without its factor `share` */
    float r[TILE][GROUP];    /* the new r */
    uint32_t top[TILE][16];  /* bits of the largest r, lane by lane, then of the largest |u| */
    uint32_t low[TILE][16];  /* bits of the smallest r */
    float power[2][4][16], fourth[2][16], eighth[2][16]; /* what tables are made of: `wide_powers` */
    float hi[TILE], step[TILE], inverse[TILE], cube[TILE], square[TILE], slope[TILE], e1[TILE], e2[TILE], scale[TILE];
} __attribute__((aligned(64))) wide_tile;

/* What is the same for all groups of a segment. m is kept as m / share, so that one multiple of the gradient serves both moments. */
typedef struct {
    const wide_constants *integers;
    float share, root, unit; /* (1 - beta1) / sqrt(1 - beta2), sqrt(beta2), and the factor of m's decoded constant */
    float rest, decay, size, eps;
    int zero_eps;
} wide_step;

OP wide_step wide_prepare(const hyper *h, const options *how) {
    const float rest = __builtin_sqrtf(h->beta2_rest), share = h->beta1_rest / rest;
    /* r sqrt(beta2) is decoded, whose square is what is left of v */
    const float root = h->beta2 > 0 ? __builtin_sqrtf(h->beta2) : 0x1p-80f;
    return (wide_step){wide_hidden(), share, root, h->beta1 / root / share / 127, rest * how->inv_scale, 1 - h->lr * h->weight_decay,
                       h->lr * h->rate * share, h->eps > 0 ? h->eps : 0x1p-126f, !(h->eps > 0)};
}

/* For log2 of a mantissa as in simd.h, but with 32 centres, so that two terms do: |t| <= 1/65, error 5e-7. */
static const float FINE_INVERSE[32] __attribute__((aligned(64))) = {
    0x1.f81f82p-1f, 0x1.e9131ap-1f, 0x1.dae608p-1f, 0x1.cd8568p-1f, 0x1.c0e070p-1f, 0x1.b4e81cp-1f, 0x1.a98ef6p-1f, 0x1.9ec8eap-1f,
    0x1.948b10p-1f, 0x1.8acb90p-1f, 0x1.818182p-1f, 0x1.78a4c8p-1f, 0x1.702e06p-1f, 0x1.681682p-1f, 0x1.605816p-1f, 0x1.58ed24p-1f,
    0x1.51d07ep-1f, 0x1.4afd6ap-1f, 0x1.446f86p-1f, 0x1.3e22ccp-1f, 0x1.381382p-1f, 0x1.323e34p-1f, 0x1.2c9fb4p-1f, 0x1.27350cp-1f,
    0x1.21fb78p-1f, 0x1.1cf06ap-1f, 0x1.181182p-1f, 0x1.135c82p-1f, 0x1.0ecf56p-1f, 0x1.0a6810p-1f, 0x1.0624dep-1f, 0x1.020408p-1f};
static const float FINE_CENTRE[32] __attribute__((aligned(64))) = {
    0x1.6e7966p-6f, 0x1.0eb392p-4f, 0x1.bc841cp-4f, 0x1.32aea2p-3f, 0x1.84c2bep-3f, 0x1.d49ee0p-3f, 0x1.11307ep-2f, 0x1.37124ap-2f,
    0x1.5c01a2p-2f, 0x1.800a5ap-2f, 0x1.a3375ep-2f, 0x1.c592fcp-2f, 0x1.e726aap-2f, 0x1.03fda8p-1f, 0x1.140ca0p-1f, 0x1.23c41cp-1f,
    0x1.3327c8p-1f, 0x1.423b08p-1f, 0x1.51011ap-1f, 0x1.5f7cfep-1f, 0x1.6db194p-1f, 0x1.7ba192p-1f, 0x1.894f76p-1f, 0x1.96bdacp-1f,
    0x1.a3ee80p-1f, 0x1.b0e414p-1f, 0x1.bda070p-1f, 0x1.ca258cp-1f, 0x1.d67540p-1f, 0x1.e29144p-1f, 0x1.ee7b44p-1f, 0x1.fa34e2p-1f};
#define FINE_1 0x1.715a0ep+0f
#define FINE_2 -0x1.715fa6p-1f

#define EACH _Pragma("GCC unroll 4") for (int q = 0; q < GROUP / 16; q++)

/* r sqrt(beta2) is a product of two table entries, one by the upper and one by the lower half of the code: both are powers of two down from the
 * largest, 2^hi sqrt(beta2) times 2^(-16 step i) and 2^(-step i), i = 0 to 15. For 16 groups at a time, the powers of which they are products:
 * i = 3 to 0 next to each other, as a table's 128 bits, then i = 4 and i = 8, not as squares of smaller ones, whose errors would double. Group k is
 * in part k % 4, at 4 (k / 4). */
OP void wide_powers(const segment *s, const planes *where, int64_t g, int64_t count, float root, wide_tile *t) {
    const __mmask16 there = count < TILE ? (__mmask16)((1u << count) - 1) : 0xFFFF;
    const int64_t group = s->start / GROUP + g;
    const V step = (V)_mm512_maskz_loadu_ps(there, where->step + group), hi = (V)_mm512_maskz_loadu_ps(there, where->hi + group);
    #pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const V unit = step * (i ? -16.0f : -1.0f);
        const __m512 a = (__m512)NAME(exp2)(unit), a2 = a * a;
        const __m512 x0 = i ? (__m512)(NAME(exp2)(hi) * root) : _mm512_set1_ps(1), x1 = a * x0, x2 = a2 * x0, x3 = a2 * x1;
        const __m512d even = _mm512_castps_pd(_mm512_unpacklo_ps(x3, x2)), even_rest = _mm512_castps_pd(_mm512_unpacklo_ps(x1, x0));
        const __m512d odd = _mm512_castps_pd(_mm512_unpackhi_ps(x3, x2)), odd_rest = _mm512_castps_pd(_mm512_unpackhi_ps(x1, x0));
        _mm512_store_ps(t->power[i][0], _mm512_castpd_ps(_mm512_unpacklo_pd(even, even_rest)));
        _mm512_store_ps(t->power[i][1], _mm512_castpd_ps(_mm512_unpackhi_pd(even, even_rest)));
        _mm512_store_ps(t->power[i][2], _mm512_castpd_ps(_mm512_unpacklo_pd(odd, odd_rest)));
        _mm512_store_ps(t->power[i][3], _mm512_castpd_ps(_mm512_unpackhi_pd(odd, odd_rest)));
        _mm512_store_ps(t->fourth[i], (__m512)NAME(exp2)(unit * 4));
        _mm512_store_ps(t->eighth[i], (__m512)NAME(exp2)(unit * 8));
    }
}

/* The table of group k for the upper (`i` = 1) or the lower half of a code. */
OP __m512 wide_table(const wide_tile *t, int k, const int i) {
    const __m512 x = _mm512_broadcast_f32x4(_mm_load_ps(&t->power[i][k % 4][k / 4 * 4]));
    const __m512 y = _mm512_mask_mul_ps(x, 0x0F0F, x, _mm512_set1_ps(t->fourth[i][k]));
    return _mm512_mask_mul_ps(y, 0x00FF, y, _mm512_set1_ps(t->eighth[i][k]));
}

/* Starts to bring memory nearer, that of the tile that follows: the processor's own prefetching ends with each page of 4 KiB, and a tile uses up
 * whole pages. What lies past the end does no harm. To the L1 cache, or with fp32 weights, of which it could not hold that much, to the L2 cache.
 * A core waits for two dozen lines at a time, and stands still when there are more: so each pass brings something, m the first, v and corrections
 * the second, weights and gradients the third. */
OP void wide_prefetch(int64_t address, int bytes, const int type) {
    for (int i = 0; i < bytes; i += 64) {
        if (type == FP32) __builtin_prefetch((const void *)(intptr_t)(address + i), 0, 2);
        else __builtin_prefetch((const void *)(intptr_t)(address + i), 0, 3);
    }
}

/* v and corrections of the group `g`. */
OP void wide_prefetch_codes(const segment *s, const planes *where, int64_t g, const int type, const int bits) {
    const int64_t element = s->start + g * GROUP;
    wide_prefetch((intptr_t)where->v + element, GROUP, type);
    if (bits) wide_prefetch((intptr_t)where->correction + element * (bits / 8 - 2), GROUP * (bits / 8 - 2), type);
}

/* Weights and gradients of the group `g`. */
OP void wide_prefetch_weights(const segment *s, int64_t g, const int type, const int grad_type) {
    const int width = GROUP * (type == FP32 ? 4 : 2), grad_width = GROUP * (grad_type == FP32 ? 4 : 2);
    wide_prefetch(s->param + g * width, width, type);
    wide_prefetch(s->grad + g * grad_width, grad_width, type);
}

/* First pass over `count` groups: decode, and update the moments. */
OP void wide_moments(
    const segment *s, const wide_step *h, const planes *where, int64_t g, int count, wide_tile *t, const int type, const int grad_type) {
    const int64_t at = g * GROUP, element = s->start + at, group = element / GROUP;
    const int grad_width = 32 * (grad_type == FP32 ? 4 : 2);
    const char *grad = (const char *)s->grad + at * grad_width / 32;
    for (int k = 0; k < count; k++) {
        wide_prefetch((intptr_t)where->m + element + (k + TILE) * GROUP, GROUP, type);
        const uint8_t *v = where->v + element + k * GROUP;
        const int8_t *m_codes = where->m + element + k * GROUP;
        const __m512 upper = wide_table(t, k, 1), lower = wide_table(t, k, 0);
        const __m512 unit = _mm512_set1_ps(float_of((uint32_t)where->umax[group + k] << 16) * h->unit);
        const two first = wide_load_grad(grad + 2 * k * grad_width, grad_type, type);
        const two second = wide_load_grad(grad + (2 * k + 1) * grad_width, grad_type, type);
        __m512 gradient[4] = {first.a, first.b, second.a, second.b}, decoded[4], m[4], r[4];
        __m512i code[4];
        EACH code[q] = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(v + q * 16)));
        EACH m[q] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(m_codes + q * 16))));
        EACH gradient[q] = gradient[q] * h->rest;
        EACH decoded[q] = _mm512_permutexvar_ps(_mm512_srli_epi32(code[q], 4), upper);
        EACH decoded[q] = _mm512_maskz_mul_ps(_mm512_test_epi32_mask(code[q], code[q]), decoded[q], _mm512_permutexvar_ps(code[q], lower));
        EACH r[q] = gradient[q] * gradient[q];
        EACH m[q] = m[q] * unit;
        EACH r[q] = _mm512_sqrt_ps(decoded[q] * decoded[q] + r[q]);
        EACH _mm512_store_ps(t->m[k] + q * 16, m[q] * decoded[q] + gradient[q]);
        EACH _mm512_store_ps(t->r[k] + q * 16, r[q]);
        EACH code[q] = _mm512_castps_si512(r[q]);
        _mm512_store_si512(t->top[k], _mm512_max_epu32(_mm512_max_epu32(code[0], code[1]), _mm512_max_epu32(code[2], code[3])));
        _mm512_store_si512(t->low[k], _mm512_min_epu32(_mm512_min_epu32(code[0], code[1]), _mm512_min_epu32(code[2], code[3])));
    }
}

#include "adamw_apply.h"

/* hi and step of every group on their grids (`group_constants` in codecs/log.py), and what encoding needs of them. Returns a bit for
 * each group that has zeros, or whose codes are clamped, so that what decodes may be far from r. */
OP __mmask16 wide_lattice(wide_tile *t) {
    const __m512i top = wide_reduce(t->top, 0);
    __m512i low = wide_reduce(t->low, 1);
    const __mmask16 zeros = _mm512_testn_epi32_mask(low, low);
    for (uint32_t rest = zeros; __builtin_expect(rest != 0, 0); rest &= rest - 1) {
        /* the smallest that is not 0 */
        const int k = __builtin_ctz(rest);
        __m512i least = _mm512_set1_epi32(-1);
        for (int j = 0; j < GROUP; j += 16)
            least = _mm512_min_epu32(least, _mm512_sub_epi32(_mm512_castps_si512(_mm512_load_ps(t->r[k] + j)), _mm512_set1_epi32(1)));
        low = _mm512_mask_set1_epi32(low, (__mmask16)(1u << k), (int)(_mm512_reduce_min_epu32(least) + 1));
    }
    const __mmask16 some = _mm512_test_epi32_mask(top, top), infinite = _mm512_cmpgt_epu32_mask(top, _mm512_set1_epi32(0x7F7FFFFF));
    const __m512i largest = _mm512_set1_epi32(0x5F7FFFFF);
    V log_top = NAME(log2)((V)_mm512_min_epu32(top, largest));
    V log_low = NAME(log2)((V)_mm512_min_epu32(low, largest));
    V hi = NAME(min)(NAME(nearest)(log_top * 0x1p16f) * 0x1p-16f, NAME(set)(64 - 0x1p-10f));
    hi = NAME(keep)(some, hi);
    V lo = NAME(max)(NAME(min)(log_low, hi), hi - 24);
    lo = NAME(pick)(some, lo, hi);
    V step = -NAME(floor)(-((hi - lo) * (float)(0x1p22 / 254) - 0.25f)) * 0x1p-22f;
    step = NAME(max)(step, NAME(set)(0x1p-8f));
    NAME(save)(t->hi, hi);
    NAME(save)(t->step, step);
    NAME(save)(t->inverse, 1 / step);
    /* Rounding up happens where the dither d is below x - k x (1 - x), k = ln2 step, for the fraction x: where x is above
     * d + k d (1 - d) + k^2 d (1 - d) (1 - 2 d), but for terms in k^3. Here what is taken from 256, over d, in 2^32 d. */
    const V k = step * 0.69314718f;
    NAME(save)(t->cube, k * k * -0x1p-95f);
    NAME(save)(t->square, (k + 3 * k * k) * 0x1p-64f);
    NAME(save)(t->slope, (-1 - k - k * k) * 0x1p-32f);
    /* 2^(step x) as a polynomial in x, |x| <= 1, with the cubic term spread over the others: error 1.2e-5 for the widest step */
    NAME(save)(t->e1, k + k * k * k * 0.125f);
    NAME(save)(t->e2, k * k * 0.5f);
    return (__mmask16)(NAME(lt)(log_low, hi - 24) | NAME(lt)(hi + 0x1p-10f, log_top) | infinite | zeros);
}

/* What the third and the last pass keep in registers: stores could change what lies in memory, for all that the compiler knows. */
typedef struct { __m512i mantissa, one, way, first, last, magnitude; } wide_encoder;
OP wide_encoder wide_codes(const wide_constants *c) {
    return (wide_encoder){READ(mantissa32), READ(exponent0), READ(code_dither16), READ(first_code), READ(last_code), READ(magnitude32)};
}

/* a b + *c, with *c for all lanes. */
OP __m512 wide_fma(__m512 a, __m512 b, const float *c) {
    __asm__("vfmadd213ps %2%{1to16%}, %1, %0" : "+v"(a) : "v"(b), "m"(*c));
    return a;
}

/* Dither of 32 bits as 2^32 d, d in [0, 1) with 24 bits. */
OP __m512 wide_dither(__m512i d) { return _mm512_cvt_roundepu32_ps(d, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }

/* Bits of the largest |u| of a group, lane by lane. With `special`, NaN is the largest. */
OP void wide_largest(const wide_encoder *c, wide_tile *t, int k, const __m512 *u, const int special) {
    if (!special) {
        enum { LARGER_MAGNITUDE = 0xB };
        const __m512 a = _mm512_range_ps(u[0], u[1], LARGER_MAGNITUDE), b = _mm512_range_ps(u[2], u[3], LARGER_MAGNITUDE);
        _mm512_store_ps((float *)t->top[k], _mm512_range_ps(a, b, LARGER_MAGNITUDE));
        return;
    }
    __m512i a[GROUP / 16];
    EACH a[q] = _mm512_and_si512(_mm512_castps_si512(u[q]), c->magnitude);
    _mm512_store_si512(t->top[k], _mm512_max_epu32(_mm512_max_epu32(a[0], a[1]), _mm512_max_epu32(a[2], a[3])));
}

/* Third pass, for group k: r to codes, and m to u = m / r̂. `y` is log2 r - hi of its elements, and afterwards of those of group `next`.
 *
 * log2 is the exponent, a table by the upper bits of the mantissa, and a polynomial. Codes are rounded up where the fraction is above what
 * `wide_lattice` says for the dither: so 256 less that is added before rounding down, by a sum with 2^23, which leaves whole numbers in the
 * lowest bits. r̂ is r times 2^(step x), x being by how many steps log2 r̂ is too low.
 *
 * Each of these chains of operations keeps one kind of unit busy at a time, even with the four vectors of a group abreast: so that of log2 for
 * the next group is written into the others, in the order that was found to be the fastest. With `special`, elements with r = 0 get code 0, and r̂
 * may be far from r. */
OP void wide_encode_v(
    const wide_encoder *c, uint8_t *codes, wide_tile *t, int k, int next, __m512 *y, __m512i *d, const int dither, const int special) {
    const __m512 inverse = _mm512_set1_ps(t->inverse[k]), cube = _mm512_set1_ps(t->cube[k]), second = _mm512_set1_ps(t->e2[k]);
    const __m512 whole = _mm512_set1_ps(0x1p23f), last = _mm512_set1_ps(0x1p23f + 255);
    const __m512 centres = _mm512_load_ps(FINE_INVERSE), more_centres = _mm512_load_ps(FINE_INVERSE + 16);
    const __m512 logs = _mm512_load_ps(FINE_CENTRE) - t->hi[next], more_logs = _mm512_load_ps(FINE_CENTRE + 16) - t->hi[next];
    __m512 z[4], e[4], x[4], u[4], f[4], g[4], exponent[4], quotient[4];
    __m512i code[4], at[4];
#define OLD(array) _mm512_load_ps(t->array[k] + q * 16)
#define NEXT _mm512_load_ps(t->r[next] + q * 16)
    EACH z[q] = wide_dither(*d), *d = _mm512_add_epi32(*d, c->way);
    EACH f[q] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(NEXT), c->mantissa, c->one, 0xEA));
    EACH e[q] = wide_fma(cube, z[q], &t->square[k]);
    EACH e[q] = wide_fma(e[q], z[q], &t->slope[k]);
    EACH z[q] = z[q] * e[q] + 256.0f;
    EACH z[q] = _mm512_fmadd_ps(y[q], inverse, dither ? z[q] : last);
    EACH z[q] = dither ? _mm512_add_round_ps(z[q], whole, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC) : (__m512)z[q];
    EACH code[q] = _mm512_min_epi32(_mm512_max_epi32(_mm512_castps_si512(z[q]), c->first), c->last);
    EACH at[q] = _mm512_srli_epi32(_mm512_castps_si512(NEXT), 18);
    EACH g[q] = _mm512_permutex2var_ps(centres, at[q], more_centres);
    EACH f[q] = f[q] * g[q] - 1.0f;
    EACH x[q] = _mm512_castsi512_ps(code[q]) - last;
    if (special) {
        EACH {
            const __mmask16 some = _mm512_cmp_ps_mask(OLD(r), _mm512_setzero_ps(), _CMP_NEQ_UQ);
            _mm_storeu_si128((__m128i *)(codes + q * 16), _mm512_maskz_cvtepi32_epi8(some, code[q]));
            u[q] = _mm512_maskz_div_ps(some, OLD(m), (__m512)NAME(exp2)((V)(x[q] * t->step[k] + t->hi[k])));
            exponent[q] = _mm512_getexp_ps(NEXT) + _mm512_permutex2var_ps(logs, at[q], more_logs);
            g[q] = FINE_2 * f[q] + FINE_1;
        }
    } else {
        EACH _mm_storeu_si128((__m128i *)(codes + q * 16), _mm512_cvtepi32_epi8(code[q]));
        EACH exponent[q] = _mm512_getexp_ps(NEXT);
        EACH exponent[q] = exponent[q] + _mm512_permutex2var_ps(logs, at[q], more_logs);
        EACH x[q] = _mm512_fmsub_ps(y[q], inverse, x[q]);
        EACH g[q] = FINE_2 * f[q] + FINE_1;
        EACH quotient[q] = OLD(m) / OLD(r);
        EACH u[q] = wide_fma(second, x[q], &t->e1[k]);
        EACH u[q] = u[q] * x[q] + 1.0f;
        EACH u[q] = u[q] * quotient[q];
    }
    EACH y[q] = g[q] * f[q] + exponent[q];
    EACH _mm512_store_ps(t->m[k] + q * 16, u[q]);
    wide_largest(c, t, k, u, special);
#undef OLD
#undef NEXT
}

/* log2 r - hi of group 0, with which the third pass begins: the same operations as there, so that where a tile begins changes no bit. */
OP void wide_first_log(const wide_encoder *c, const wide_tile *t, __m512 *y) {
    const __m512 centres = _mm512_load_ps(FINE_INVERSE), more_centres = _mm512_load_ps(FINE_INVERSE + 16);
    const __m512 logs = _mm512_load_ps(FINE_CENTRE) - t->hi[0], more_logs = _mm512_load_ps(FINE_CENTRE + 16) - t->hi[0];
    EACH {
        const __m512 r = _mm512_load_ps(t->r[0] + q * 16);
        const __m512i at = _mm512_srli_epi32(_mm512_castps_si512(r), 18);
        const __m512 mantissa = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(r), c->mantissa, c->one, 0xEA));
        const __m512 f = mantissa * _mm512_permutex2var_ps(centres, at, more_centres) - 1.0f;
        const __m512 g = FINE_2 * f + FINE_1;
        y[q] = g * f + (_mm512_getexp_ps(r) + _mm512_permutex2var_ps(logs, at, more_logs));
    }
}

/* The constants of u: bits of `umax`, and the scale to codes. */
OP __m512i wide_scales(wide_tile *t, float share, const int dither) {
    const V u = NAME(max)(NAME(min)((V)wide_reduce(t->top, 0) * share, NAME(set)(0x1.FEp127f)), NAME(set)(0x1p-100f));
    const I stored = ((I)u + (dither ? 0xFFF0 : 0x8000)) & -0x10000;
    V scale = (dither ? 127 * (1 - 0x1p-18f) : 127) / (V)stored * share;
    if (dither) scale = NAME(min)(scale, NAME(set)(0x1p95f)) * 0x1p32f; /* still finite */
    NAME(save)(t->scale, scale);
    return (__m512i)stored;
}

/* Last pass: u to codes. With dither, u times 2^32: rounding towards zero the sum with a large number leaves the whole number below in the lowest
 * bits. The scale leaves a little room, so that no dither reaches 128 or -128. */
OP void wide_encode_m(const wide_encoder *e, int8_t *codes, const wide_tile *t, int k, __m512i *d, const int dither) {
    const __m512 scale = _mm512_set1_ps(t->scale[k]), whole = _mm512_set1_ps(0x1.8p55f);
    __m512 x[4];
    __m512i code[4];
    EACH x[q] = dither ? wide_dither(*d) : scale, *d = _mm512_add_epi32(*d, e->way);
    EACH x[q] = dither ? _mm512_load_ps(t->m[k] + q * 16) * scale + x[q] : _mm512_load_ps(t->m[k] + q * 16) * scale;
    EACH code[q] = dither ? _mm512_castps_si512(_mm512_add_round_ps(x[q], whole, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)) : _mm512_cvtps_epi32(x[q]);
    if (!dither) EACH code[q] = _mm512_max_epi32(_mm512_min_epi32(code[q], _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
    EACH _mm_storeu_si128((__m128i *)(codes + q * 16), _mm512_cvtepi32_epi8(code[q]));
}

/* Dither of a segment's elements from `at` on: `weyl` in codecs/base.py. */
OP __m512i wide_weyl(const uint32_t *lanes, uint32_t start) {
    return _mm512_add_epi32(_mm512_load_si512(lanes), _mm512_set1_epi32((int)start));
}

/* One tile: `count` <= TILE groups from `g` on, whose powers the tile has. It leaves those of the tile that follows, of `following` groups or none.
 * What a reduction over the tile needs is a long chain of operations: so one that does not need its result comes after it. */
OP void wide_one(
    const segment *s, const wide_step *h, const planes *where, int64_t g, int count, int64_t following, wide_tile *t, const int type,
    const int grad_type, const int bits, const int dither) {
    const int64_t group = s->start / GROUP + g;
    const __mmask16 there = (__mmask16)((1u << count) - 1);
    wide_moments(s, h, where, g, count, t, type, grad_type);
    if (count < TILE) { /* groups of no elements, and without zeros */
        memset(t->top[count], 0, sizeof t->top[0] * (size_t)(TILE - count));
        memset(t->low[count], 0xFF, sizeof t->low[0] * (size_t)(TILE - count));
    }
    const uint32_t special = wide_lattice(t) & there;
    if (h->zero_eps) wide_stand_still(t, count);
    if (bits == 24) wide_apply24(s, h, where, g, count, t);
    else wide_apply(s, h, where, g, count, t, type, bits);
    const uint32_t index = (uint32_t)(s->index + g * GROUP), step = (uint32_t)s->step;
    uint8_t *codes = where->v + s->start + g * GROUP;
    wide_encoder e = wide_codes(h->integers);
    __m512i d = wide_weyl(h->integers->code_dither, index * 2654435761u + step * 2654435769u);
    __m512 y[GROUP / 16];
    wide_first_log(&e, t, y);
    for (int k = 0; k < count; k++) {
        const int next = k + 1 < count ? k + 1 : k;
        wide_prefetch_weights(s, g + k + TILE, type, grad_type);
        if (__builtin_expect(special >> k & 1, 0)) wide_encode_v(&e, codes + k * GROUP, t, k, next, y, &d, dither, 1);
        else wide_encode_v(&e, codes + k * GROUP, t, k, next, y, &d, dither, 0);
    }
    const __m512i stored = wide_scales(t, h->share, dither);
    wide_powers(s, where, g + TILE, following, h->root, t);
    d = wide_weyl(h->integers->mcode_dither, index * 2246822519u + step * 1779033703u);
    e.way = _mm512_load_si512(h->integers->mcode_dither16);
    int8_t *m_codes = where->m + s->start + g * GROUP;
    for (int k = 0; k < count; k++) wide_encode_m(&e, m_codes + k * GROUP, t, k, &d, dither);
    _mm512_mask_storeu_ps(where->hi + group, there, _mm512_load_ps(t->hi));
    _mm512_mask_storeu_ps(where->step + group, there, _mm512_load_ps(t->step));
    _mm256_mask_storeu_epi16(where->umax + group, there, _mm512_cvtepi32_epi16(_mm512_srli_epi32(stored, 16)));
}

/* `count` groups from `g` on. */
OP void NAME(groups)(
    const segment *s, const hyper *settings, const planes *where, const options *how, int64_t g, int64_t count, const int type, const int grad_type,
    const int bits, const int dither) {
    wide_tile t;
    const wide_step h = wide_prepare(settings, how);
    wide_powers(s, where, g, count, h.root, &t);
    for (; count > 0; g += TILE, count -= TILE) {
        const int64_t following = count > TILE ? count - TILE : 0;
        wide_one(s, &h, where, g, count < TILE ? (int)count : TILE, following, &t, type, grad_type, bits, dither);
    }
}
