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
    float hi[TILE], step[TILE], inverse[TILE], cube[TILE], square[TILE], slope[TILE], above[TILE], e1[TILE], e2[TILE], scale[TILE];
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
                       h->lr * h->rate * share, h->eps, !(h->eps > 0)};
}

/* 2^t, |t| <= 0.757, relative error 1e-7. */
OP __m512 wide_exp2_fraction(__m512 t) {
    __m512 p = 0x1.4043f2p-13f * t + 0x1.617e7ep-10f;
    p = p * t + 0x1.3b3a82p-7f;
    p = p * t + 0x1.c6a7b0p-5f;
    p = p * t + 0x1.ebfba4p-3f;
    p = p * t + 0x1.62e43ap-1f;
    return p * t + 1.0f;
}

/* r sqrt(beta2) is a product: of a power of 2^(16 step) by the upper and one of 2^step by the lower half of the code. */
typedef struct { __m512 upper, lower; } wide_table;
OP wide_table wide_decoder(float hi, float step, float root) {
    const __m512 lanes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), base = lanes * 16.0f - (255.0f - 8.0f);
    const __m512 n = _mm512_roundscale_ps(base * step + hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* hi - n is exact, and the sum is small */
    const __m512 upper = _mm512_scalef_ps(wide_exp2_fraction(base * step + (hi - n)), n) * root;
    return (wide_table){upper, wide_exp2_fraction((lanes - 8.0f) * step)};
}

/* Starts to bring the group `g` from memory: the processor's own prefetching ends with each page of 4 KiB, and a tile uses up whole pages. What
 * lies past the end does no harm. To the L1 cache, or with fp32 weights, of which it could not hold that much, to the L2 cache. */
#define PREFETCH(address) (type == FP32 ? __builtin_prefetch((const void *)(address), 0, 2) : __builtin_prefetch((const void *)(address), 0, 3))
OP void wide_prefetch_moments(const segment *s, const planes *where, int64_t g, const int type, const int grad_type) {
    const int64_t at = g * GROUP, element = s->start + at, grad_width = grad_type == FP32 ? 4 : 2;
    for (int i = 0; i < GROUP * grad_width; i += 64) PREFETCH(s->grad + at * grad_width + i);
    PREFETCH((intptr_t)where->m + element);
    PREFETCH((intptr_t)where->v + element);
}

OP void wide_prefetch_weights(const segment *s, const planes *where, int64_t g, const int type, const int bits) {
    const int64_t at = g * GROUP, width = type == FP32 ? 4 : 2, correction = (int64_t)(intptr_t)where->correction + (s->start + at) * (bits / 8 - 2);
    for (int i = 0; i < GROUP * width; i += 64) PREFETCH(s->param + at * width + i);
    for (int i = 0; i < GROUP * (bits / 8 - 2); i += 64) PREFETCH(correction + i);
}

/* First pass over `count` groups: decode, and update the moments. The first operations on a group, those that make its table, are a long chain:
 * so it is made one group ahead. */
OP void wide_moments(
    const segment *s, const wide_step *h, const planes *where, int64_t g, int count, wide_tile *t, const int type, const int grad_type) {
    const int64_t at = g * GROUP, element = s->start + at, group = element / GROUP;
    const int grad_width = 32 * (grad_type == FP32 ? 4 : 2);
    const char *grad = (const char *)s->grad + at * grad_width / 32;
    const uint8_t *v = where->v + element;
    const int8_t *m_codes = where->m + element;
    wide_table table = wide_decoder(where->hi[group], where->step[group], h->root);
    for (int k = 0; k < count; k++) {
        wide_prefetch_moments(s, where, g + k + TILE, type, grad_type);
        const int64_t next = group + (k + 1 < count ? k + 1 : k);
        const wide_table ahead = wide_decoder(where->hi[next], where->step[next], h->root);
        const __m512i codes = _mm512_loadu_si512(v + k * GROUP);
        const __mmask64 some = _mm512_test_epi8_mask(codes, codes);
        const __m512 unit = _mm512_set1_ps(float_of((uint32_t)where->umax[group + k] << 16) * h->unit);
        __m512i top = _mm512_setzero_si512(), low = _mm512_load_si512(h->integers->minus_one32);
        #pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const two grads = wide_load_grad(grad + (2 * k + i) * grad_width, grad_type, type);
            const __m512 gs[2] = {grads.a, grads.b};
            #pragma GCC unroll 2
            for (int q = 0; q < 2; q++) {
                const int j = k * GROUP + i * 32 + q * 16;
                const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(v + j)));
                const __m512 code_m = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(m_codes + j))));
                const __m512 gradient = gs[q] * h->rest;
                const __m512 upper = _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), table.upper), lower = _mm512_permutexvar_ps(code, table.lower);
                const __m512 decoded = _mm512_maskz_mul_ps((__mmask16)_kshiftri_mask64(some, i * 32 + q * 16), upper, lower);
                const __m512 r = _mm512_sqrt_ps(decoded * decoded + gradient * gradient);
                top = _mm512_max_epu32(top, _mm512_castps_si512(r));
                low = _mm512_min_epu32(low, _mm512_castps_si512(r));
                _mm512_store_ps(t->m[k] + i * 32 + q * 16, code_m * decoded * unit + gradient);
                _mm512_store_ps(t->r[k] + i * 32 + q * 16, r);
            }
        }
        _mm512_store_si512(t->top[k], top);
        _mm512_store_si512(t->low[k], low);
        table = ahead;
    }
}

/* Second pass: the weights, by halves of groups, which are read one half ahead and written one half behind. `type` and `bits` are constants
 * wherever this is inlined: FP32 without corrections, or BF16. */
OP void wide_apply(
    const segment *s, const wide_step *h, const planes *where, int64_t g, int count, const wide_tile *t, const int type, const int bits) {
    const wide_constants *c = h->integers;
    const int64_t at = g * GROUP;
    const int width = 32 * (type == FP32 ? 4 : 2), correction_width = 32 * (bits / 8 - 2);
    char *param = (char *)s->param + at * width / 32, *correction = (char *)where->correction + (s->start + at) * correction_width / 32;
    const float *m = t->m[0], *r = t->r[0];
    two next = wide_load(c, param, correction, type, bits), done = next;
    for (int half = 0; half < 2 * count; half++) {
        if (half % 2 == 0) wide_prefetch_weights(s, where, g + half / 2 + TILE, type, bits);
        const two w = next;
        const int ahead = half + 1 < 2 * count ? half + 1 : half;
        next = wide_load(c, param + ahead * width, correction + ahead * correction_width, type, bits);
        __m512 move[2];
        #pragma GCC unroll 2
        for (int q = 0; q < 2; q++) {
            const __m512 denominator = _mm512_load_ps(r + half * 32 + q * 16) + h->eps;
            move[q] = _mm512_load_ps(m + half * 32 + q * 16) / denominator;
            if (h->zero_eps) move[q] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(denominator, _mm512_setzero_ps(), _CMP_NEQ_UQ), move[q]);
        }
        if (half > 0) wide_save(c, done, param + (half - 1) * width, correction + (half - 1) * correction_width, type, bits);
        done = (two){w.a * h->decay - h->size * move[0], w.b * h->decay - h->size * move[1]};
    }
    wide_save(c, done, param + (2 * count - 1) * width, correction + (2 * count - 1) * correction_width, type, bits);
}

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
     * d + k d (1 - d) + k^2 d (1 - d) (1 - 2 d), but for terms in k^3. Here 256 less that, in 1 + d. */
    const V k = step * 0.69314718f;
    NAME(save)(t->cube, -2 * k * k);
    NAME(save)(t->square, k + 9 * k * k);
    NAME(save)(t->slope, -1 - 3 * k - 13 * k * k);
    NAME(save)(t->above, 257 + 2 * k + 6 * k * k);
    /* 2^(step x) as a polynomial in x, |x| <= 1, with the cubic term spread over the others: error 1.2e-5 for the widest step */
    NAME(save)(t->e1, k + k * k * k * 0.125f);
    NAME(save)(t->e2, k * k * 0.5f);
    return (__mmask16)(NAME(lt)(log_low, hi - 24) | NAME(lt)(hi + 0x1p-10f, log_top) | infinite | zeros);
}

#define EACH _Pragma("GCC unroll 4") for (int q = 0; q < GROUP / 16; q++)

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

/* Dither of 32 bits as 1 + d, d in [0, 1) with 23 bits. */
OP __m512 wide_dither(__m512i d, __m512i one) { return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(d, 9), one)); }

/* Bits of the largest |u| of a group, lane by lane. */
OP void wide_largest(const wide_encoder *c, wide_tile *t, int k, const __m512 *u) {
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
 * the next group is written into the others. With `special`, elements with r = 0 get code 0, and r̂ may be far from r. */
OP void wide_encode_v(
    const wide_encoder *c, uint8_t *codes, wide_tile *t, int k, int next, __m512 *y, __m512i *d, const int dither, const int special) {
    const __m512 inverse = _mm512_set1_ps(t->inverse[k]), cube = _mm512_set1_ps(t->cube[k]), second = _mm512_set1_ps(t->e2[k]);
    const __m512 whole = _mm512_set1_ps(0x1p23f), last = _mm512_set1_ps(0x1p23f + 255);
    const __m512 centres = _mm512_load_ps(LOG_INVERSE), logs = _mm512_load_ps(LOG_CENTRE) - t->hi[next];
    __m512 z[4], e[4], x[4], u[4], f[4], g[4];
    __m512i code[4], at[4];
#define OLD(array) _mm512_load_ps(t->array[k] + q * 16)
#define NEXT _mm512_load_ps(t->r[next] + q * 16)
    EACH z[q] = wide_dither(*d, c->one), *d = _mm512_add_epi32(*d, c->way);
    EACH e[q] = wide_fma(cube, z[q], &t->square[k]), at[q] = _mm512_srli_epi32(_mm512_castps_si512(NEXT), 19);
    EACH e[q] = wide_fma(e[q], z[q], &t->slope[k]);
    EACH z[q] = wide_fma(z[q], e[q], &t->above[k]), f[q] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(NEXT), c->mantissa, c->one, 0xEA));
    EACH z[q] = y[q] * inverse + (dither ? z[q] : last), g[q] = _mm512_permutexvar_ps(at[q], centres);
    EACH z[q] = dither ? _mm512_add_round_ps(z[q], whole, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC) : (__m512)z[q];
    EACH f[q] = f[q] * g[q] - 1.0f;
    EACH code[q] = _mm512_min_epi32(_mm512_max_epi32(_mm512_castps_si512(z[q]), c->first), c->last), g[q] = LOG_3 * f[q] + LOG_2;
    EACH x[q] = _mm512_castsi512_ps(code[q]) - last, g[q] = g[q] * f[q] + LOG_1;
    if (special) {
        EACH {
            const __mmask16 some = _mm512_cmp_ps_mask(OLD(r), _mm512_setzero_ps(), _CMP_NEQ_UQ);
            _mm_storeu_si128((__m128i *)(codes + q * 16), _mm512_maskz_cvtepi32_epi8(some, code[q]));
            u[q] = _mm512_maskz_div_ps(some, OLD(m), (__m512)NAME(exp2)((V)(x[q] * t->step[k] + t->hi[k])));
            y[q] = _mm512_getexp_ps(NEXT) + _mm512_permutexvar_ps(at[q], logs);
        }
    } else {
        EACH x[q] = y[q] * inverse - x[q], y[q] = _mm512_getexp_ps(NEXT) + _mm512_permutexvar_ps(at[q], logs);
        EACH u[q] = wide_fma(second, x[q], &t->e1[k]), _mm_storeu_si128((__m128i *)(codes + q * 16), _mm512_cvtepi32_epi8(code[q]));
        EACH u[q] = (u[q] * x[q] + 1.0f) * (OLD(m) / OLD(r));
    }
    EACH y[q] = g[q] * f[q] + y[q];
    EACH _mm512_store_ps(t->m[k] + q * 16, u[q]);
    wide_largest(c, t, k, u);
#undef OLD
#undef NEXT
}

/* log2 r - hi of group 0, with which the third pass begins: the same operations as there, so that where a tile begins changes no bit. */
OP void wide_first_log(const wide_encoder *c, const wide_tile *t, __m512 *y) {
    const __m512 centres = _mm512_load_ps(LOG_INVERSE), logs = _mm512_load_ps(LOG_CENTRE) - t->hi[0];
    EACH {
        const __m512 r = _mm512_load_ps(t->r[0] + q * 16);
        const __m512i at = _mm512_srli_epi32(_mm512_castps_si512(r), 19);
        const __m512 mantissa = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(r), c->mantissa, c->one, 0xEA));
        const __m512 f = mantissa * _mm512_permutexvar_ps(at, centres) - 1.0f;
        const __m512 g = (LOG_3 * f + LOG_2) * f + LOG_1;
        y[q] = g * f + (_mm512_getexp_ps(r) + _mm512_permutexvar_ps(at, logs));
    }
}

/* The constants of u: bits of `umax`, and the scale to codes. */
OP __m512i wide_scales(wide_tile *t, float share, const int dither) {
    const V u = NAME(max)(NAME(min)((V)wide_reduce(t->top, 0) * share, NAME(set)(0x1.FEp127f)), NAME(set)(0x1p-100f));
    const I stored = ((I)u + (dither ? 0xFFF0 : 0x8000)) & -0x10000;
    NAME(save)(t->scale, (dither ? 127 * (1 - 0x1p-18f) : 127) / (V)stored * share);
    return (__m512i)stored;
}

/* Last pass: u to codes. The scale leaves a little room, so that no dither reaches 128 or -128. */
OP void wide_encode_m(const wide_encoder *e, int8_t *codes, const wide_tile *t, int k, __m512i *d, const int dither) {
    const __m512 scale = _mm512_set1_ps(t->scale[k]);
    EACH {
        const __m512 u = _mm512_load_ps(t->m[k] + q * 16);
        __m512i code;
        if (dither) {
            /* rounding towards zero the sum with a large number leaves the whole number below in the lowest bits */
            const __m512 x = u * scale + wide_dither(*d, e->one);
            *d = _mm512_add_epi32(*d, e->way);
            code = _mm512_castps_si512(_mm512_add_round_ps(x, _mm512_set1_ps(0x1.8p23f - 1), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
        } else {
            code = _mm512_max_epi32(_mm512_min_epi32(_mm512_cvtps_epi32(u * scale), _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
        }
        _mm_storeu_si128((__m128i *)(codes + q * 16), _mm512_cvtepi32_epi8(code));
    }
}

/* Dither of a segment's elements from `at` on: `weyl` in codecs/base.py. */
OP __m512i wide_weyl(const uint32_t *lanes, uint32_t start) {
    return _mm512_add_epi32(_mm512_load_si512(lanes), _mm512_set1_epi32((int)start));
}

/* `count` <= TILE groups from `g` on. */
OP void NAME(groups)(
    const segment *s, const hyper *settings, const planes *where, const options *how, int64_t g, int count, const int type, const int grad_type,
    const int bits, const int dither) {
    wide_tile t;
    const int64_t group = s->start / GROUP + g;
    const __mmask16 there = (__mmask16)((1u << count) - 1);
    const wide_step h = wide_prepare(settings, how);
    wide_moments(s, &h, where, g, count, &t, type, grad_type);
    wide_apply(s, &h, where, g, count, &t, type, bits);
    if (count < TILE) { /* groups of no elements, and without zeros */
        memset(t.top[count], 0, sizeof t.top[0] * (size_t)(TILE - count));
        memset(t.low[count], 0xFF, sizeof t.low[0] * (size_t)(TILE - count));
    }
    const uint32_t special = wide_lattice(&t) & there;
    const uint32_t index = (uint32_t)(s->index + g * GROUP), step = (uint32_t)s->step;
    uint8_t *codes = where->v + s->start + g * GROUP;
    wide_encoder e = wide_codes(h.integers);
    __m512i d = wide_weyl(h.integers->code_dither, index * 2654435761u + step * 2654435769u);
    __m512 y[GROUP / 16];
    wide_first_log(&e, &t, y);
    for (int k = 0; k < count; k++) {
        const int next = k + 1 < count ? k + 1 : k;
        if (__builtin_expect(special >> k & 1, 0)) wide_encode_v(&e, codes + k * GROUP, &t, k, next, y, &d, dither, 1);
        else wide_encode_v(&e, codes + k * GROUP, &t, k, next, y, &d, dither, 0);
    }
    const __m512i stored = wide_scales(&t, h.share, dither);
    d = wide_weyl(h.integers->mcode_dither, index * 2246822519u + step * 1779033703u);
    e.way = _mm512_load_si512(h.integers->mcode_dither16);
    int8_t *m_codes = where->m + s->start + g * GROUP;
    for (int k = 0; k < count; k++) wide_encode_m(&e, m_codes + k * GROUP, &t, k, &d, dither);
    _mm512_mask_storeu_ps(where->hi + group, there, _mm512_load_ps(t.hi));
    _mm512_mask_storeu_ps(where->step + group, there, _mm512_load_ps(t.step));
    _mm256_mask_storeu_epi16(where->umax + group, there, _mm512_cvtepi32_epi16(_mm512_srli_epi32(stored, 16)));
}
