/* AdamW with `log` states, the AVX-512 form: four passes over a tile of 16 groups. Included by adamw.c, which says what `planes` are.
 *
 * Registers would hold one group only, and a group's own chain of reductions and divisions is too long to wait for: in passes over a tile the
 * processor works on several groups at once, and what 16 groups need once is done for all of them in one vector. All of it stays in the L1
 * cache. Square roots and quotients are left to the divider, which works beside the rest.
 */
#define TILE 16
typedef struct {
    float m[TILE][GROUP];    /* the new m, then m / r, then u = m / r̂; without its factor `share` */
    float r[TILE][GROUP];    /* the new r, then log2 r - hi */
    uint32_t top[TILE][16];  /* bits of the largest r, lane by lane, then of the largest |u| */
    uint32_t low[TILE][16];  /* bits of the smallest r */
    float hi[TILE], step[TILE], inverse[TILE], lowest[TILE], curve[TILE], slope[TILE], e1[TILE], e2[TILE], e3[TILE], scale[TILE];
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
OP void wide_prefetch(const segment *s, const planes *where, int64_t g, const int type, const int grad_type, const int bits) {
    const int64_t at = g * GROUP, element = s->start + at, width = type == FP32 ? 4 : 2, grad_width = grad_type == FP32 ? 4 : 2;
    const int64_t correction = (int64_t)(intptr_t)where->correction + element * (bits / 8 - 2);
    for (int i = 0; i < GROUP * width; i += 64) PREFETCH(s->param + at * width + i);
    for (int i = 0; i < GROUP * grad_width; i += 64) PREFETCH(s->grad + at * grad_width + i);
    for (int i = 0; i < GROUP * (bits / 8 - 2); i += 64) PREFETCH(correction + i);
    PREFETCH((intptr_t)where->m + element);
    PREFETCH((intptr_t)where->v + element);
}

/* First pass over `count` groups: decode, update, store the weight. `type`, `grad_type` and `bits` are constants wherever this is inlined:
 * FP32 without corrections, or BF16.
 *
 * It goes by halves of groups. The chain of operations from a half's weights as stored to those that are stored is too long for the
 * processor to look past: so weights are read one half ahead of the update, and written one half behind it. */
OP void wide_update(
    const segment *s, const wide_step *h, const planes *where, int64_t g, int count, wide_tile *t, const int type, const int grad_type,
    const int bits) {
    const wide_constants *c = h->integers;
    const int64_t at = g * GROUP, element = s->start + at, group = element / GROUP;
    const int width = 32 * (type == FP32 ? 4 : 2), grad_width = 32 * (grad_type == FP32 ? 4 : 2), correction_width = 32 * (bits / 8 - 2);
    char *param = (char *)s->param + at * width / 32, *correction = (char *)where->correction + element * correction_width / 32;
    const char *grad = (const char *)s->grad + at * grad_width / 32;
    const uint8_t *v = where->v + element;
    const int8_t *m_codes = where->m + element;
    two next = wide_load(c, param, correction, type, bits), done = next;
    for (int k = 0; k < count; k++) {
        wide_prefetch(s, where, g + k + TILE, type, grad_type, bits);
        const wide_table table = wide_decoder(where->hi[group + k], where->step[group + k], h->root);
        const __m512i codes = _mm512_loadu_si512(v + k * GROUP);
        const __mmask64 some = _mm512_test_epi8_mask(codes, codes);
        const __m512 unit = _mm512_set1_ps(float_of((uint32_t)where->umax[group + k] << 16) * h->unit);
        __m512i top = _mm512_setzero_si512(), low = READ(minus_one32);
        #pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const int half = 2 * k + i, ahead = half + 1 < 2 * count ? half + 1 : half;
            const two grads = wide_load_grad(grad + half * grad_width, grad_type, type), w = next;
            __m512 m[2], r[2], gs[2] = {grads.a, grads.b}, move[2];
            #pragma GCC unroll 2
            for (int q = 0; q < 2; q++) {
                const int j = half * 32 + q * 16;
                const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(v + j)));
                const __m512 code_m = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(m_codes + j))));
                const __m512 gradient = gs[q] * h->rest;
                const __m512 decoded = _mm512_maskz_mul_ps(
                    (__mmask16)_kshiftri_mask64(some, i * 32 + q * 16), _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), table.upper),
                    _mm512_permutexvar_ps(code, table.lower));
                m[q] = code_m * decoded * unit + gradient;
                r[q] = _mm512_sqrt_ps(decoded * decoded + gradient * gradient);
            }
            next = wide_load(c, param + ahead * width, correction + ahead * correction_width, type, bits);
            #pragma GCC unroll 2
            for (int q = 0; q < 2; q++) {
                const __m512 denominator = r[q] + h->eps;
                move[q] = m[q] / denominator;
                if (h->zero_eps) move[q] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(denominator, _mm512_setzero_ps(), _CMP_NEQ_UQ), move[q]);
                top = _mm512_max_epu32(top, _mm512_castps_si512(r[q]));
                low = _mm512_min_epu32(low, _mm512_castps_si512(r[q]));
                _mm512_store_ps(t->m[k] + i * 32 + q * 16, m[q]);
                _mm512_store_ps(t->r[k] + i * 32 + q * 16, r[q]);
            }
            if (half > 0) wide_save(c, done, param + (half - 1) * width, correction + (half - 1) * correction_width, type, bits);
            done = (two){w.a * h->decay - h->size * move[0], w.b * h->decay - h->size * move[1]};
        }
        _mm512_store_si512(t->top[k], top);
        _mm512_store_si512(t->low[k], low);
    }
    wide_save(c, done, param + (2 * count - 1) * width, correction + (2 * count - 1) * correction_width, type, bits);
}

/* hi and step of every group on their grids (`group_constants` in codecs/log.py), and what the second pass needs of them. Returns a bit for
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
    /* log2 r - hi of code 1; a margin of twice the error of the quotient keeps what is there from code 0 */
    NAME(save)(t->lowest, step * (-254 * (1 - 0x1p-21f)));
    /* the threshold x - ln2 step x (1 - x) for rounding up, in units of 2^-32 as the dither is */
    NAME(save)(t->curve, step * (0.69314718f * 0x1p32f));
    NAME(save)(t->slope, 0x1p32f - step * (0.69314718f * 0x1p32f));
    /* 2^(step x) as a polynomial in x, |x| <= 1 */
    NAME(save)(t->e1, step * 0x1.62e42ep-1f);
    NAME(save)(t->e2, step * step * 0x1.ec2e50p-3f);
    NAME(save)(t->e3, step * step * step * 0x1.c6d382p-5f);
    return (__mmask16)(NAME(lt)(log_low, hi - 24) | NAME(lt)(hi + 0x1p-10f, log_top) | infinite | zeros);
}

#define EACH _Pragma("GCC unroll 4") for (int q = 0; q < GROUP / 16; q++)

/* log2 r - hi: the exponent, a table by the upper bits of the mantissa, and a polynomial. `logs` is LOG_CENTRE - hi. */
OP __m512 wide_log2(const wide_constants *c, __m512 r, __m512 centres, __m512 logs) {
    const __m512i bits = _mm512_castps_si512(r), at = _mm512_srli_epi32(bits, 19);
    const __m512 mantissa = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, READ(mantissa32), READ(exponent0), 0xEA));
    const __m512 x = mantissa * _mm512_permutexvar_ps(at, centres) - 1.0f;
    return ((LOG_3 * x + LOG_2) * x + LOG_1) * x + (_mm512_getexp_ps(r) + _mm512_permutexvar_ps(at, logs));
}

/* Second pass: r to log2 r - hi, and m to m / r. */
OP void wide_logs(const wide_constants *c, wide_tile *t, int k) {
    const __m512 centres = _mm512_loadu_ps(LOG_INVERSE), logs = _mm512_loadu_ps(LOG_CENTRE) - t->hi[k];
    EACH {
        const __m512 r = _mm512_load_ps(t->r[k] + q * 16);
        _mm512_store_ps(t->m[k] + q * 16, _mm512_load_ps(t->m[k] + q * 16) / r);
        _mm512_store_ps(t->r[k] + q * 16, wide_log2(c, r, centres, logs));
    }
}

/* Between those of code 1 and 255, as integers: those of negative numbers grow with the magnitude. */
OP __m512 wide_limit(__m512 log, __m512i lowest) {
    return _mm512_castsi512_ps(_mm512_min_epu32(_mm512_min_epi32(_mm512_castps_si512(log), _mm512_setzero_si512()), lowest));
}

/* log2 r - hi to codes, in the lowest bits. Returns by how many steps log2 r̂ is too low. */
OP __m512 wide_round(
    const wide_constants *c, const wide_tile *t, int k, __m512 y, __m512i d, __m512i *code, const int dither) {
    const __m512 inverse = _mm512_set1_ps(t->inverse[k]), magic = _mm512_set1_ps(0x1p23f + 255);
    if (!dither) {
        const __m512 near = y * inverse + magic;
        *code = _mm512_castps_si512(near);
        return y * inverse - (near - magic);
    }
    /* rounding towards zero leaves the code below in the lowest bits */
    const __m512 down = _mm512_fmadd_round_ps(y, inverse, magic, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC), x = y * inverse - (down - magic);
    const __m512 curve = _mm512_set1_ps(t->curve[k]), slope = _mm512_set1_ps(t->slope[k]);
    const __mmask16 up = _mm512_cmplt_epu32_mask(d, _mm512_cvtps_epu32(x * (curve * x + slope)));
    *code = _mm512_mask_sub_epi32(_mm512_castps_si512(down), up, _mm512_castps_si512(down), READ(minus_one32));
    return _mm512_mask_sub_ps(x, up, x, _mm512_set1_ps(1));
}

OP __m512i wide_code_dither(const wide_constants *c, const segment *s, int64_t at) {
    const uint32_t start = (uint32_t)(s->index + at) * 2654435761u + (uint32_t)s->step * 2654435769u;
    return _mm512_add_epi32(_mm512_load_si512(c->code_dither), _mm512_set1_epi32((int)start));
}

/* Third pass: to codes, and u = m / r̂. */
OP void wide_encode_v(const wide_constants *c, const segment *s, const planes *where, int64_t g, wide_tile *t, int k, const int dither) {
    const int64_t at = g * GROUP, element = s->start + at;
    const __m512 e1 = _mm512_set1_ps(t->e1[k]), e2 = _mm512_set1_ps(t->e2[k]), e3 = _mm512_set1_ps(t->e3[k]), e0 = _mm512_set1_ps(0x1.fffffcp-1f);
    const __m512i lowest = _mm512_castps_si512(_mm512_set1_ps(t->lowest[k]));
    __m512i d = wide_code_dither(c, s, at), largest = _mm512_setzero_si512();
    EACH {
        __m512i code;
        const __m512 x = wide_round(c, t, k, wide_limit(_mm512_load_ps(t->r[k] + q * 16), lowest), d, &code, dither);
        d = _mm512_add_epi32(d, READ(code_dither16));
        _mm_storeu_si128((__m128i *)(where->v + element + q * 16), _mm512_cvtepi32_epi8(code));
        const __m512 u = (((e3 * x + e2) * x + e1) * x + e0) * _mm512_load_ps(t->m[k] + q * 16);
        _mm512_store_ps(t->m[k] + q * 16, u);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(u), READ(magnitude32)));
    }
    _mm512_store_si512(t->top[k], largest);
}

/* Second and third pass for groups that have zeros, or whose codes are clamped. */
OP void wide_encode_special(const wide_constants *c, const segment *s, const planes *where, int64_t g, wide_tile *t, int k, const int dither) {
    const int64_t at = g * GROUP, element = s->start + at;
    const __m512 hi = _mm512_set1_ps(t->hi[k]), centres = _mm512_loadu_ps(LOG_INVERSE), logs = _mm512_loadu_ps(LOG_CENTRE) - hi;
    const __m512i lowest = _mm512_castps_si512(_mm512_set1_ps(t->lowest[k]));
    __m512i d = wide_code_dither(c, s, at), largest = _mm512_setzero_si512();
    for (int q = 0; q < GROUP / 16; q++) {
        const __m512 r = _mm512_load_ps(t->r[k] + q * 16);
        const __mmask16 some = _mm512_cmp_ps_mask(r, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        __m512i code;
        wide_round(c, t, k, wide_limit(wide_log2(c, r, centres, logs), lowest), d, &code, dither);
        d = _mm512_add_epi32(d, READ(code_dither16));
        _mm_storeu_si128((__m128i *)(where->v + element + q * 16), _mm512_maskz_cvtepi32_epi8(some, code));
        const __m512 below = _mm512_castsi512_ps(code) - (0x1p23f + 255);
        const __m512 u = _mm512_maskz_div_ps(some, _mm512_load_ps(t->m[k] + q * 16), (__m512)NAME(exp2)((V)(below * t->step[k] + hi)));
        _mm512_store_ps(t->m[k] + q * 16, u);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(u), READ(magnitude32)));
    }
    _mm512_store_si512(t->top[k], largest);
}

/* The constants of u: bits of `umax`, and the scale to codes. */
OP __m512i wide_scales(wide_tile *t, float share, const int dither) {
    const V u = NAME(max)(NAME(min)((V)wide_reduce(t->top, 0) * share, NAME(set)(0x1.FEp127f)), NAME(set)(0x1p-100f));
    const I stored = ((I)u + (dither ? 0xFFF0 : 0x8000)) & -0x10000;
    NAME(save)(t->scale, 127 / (V)stored * share);
    return (__m512i)stored;
}

/* Last pass: u to codes. */
OP void wide_encode_m(const wide_constants *c, const segment *s, const planes *where, int64_t g, const wide_tile *t, int k, const int dither) {
    const int64_t at = g * GROUP, element = s->start + at;
    const __m512 scale = _mm512_set1_ps(t->scale[k]);
    /* signed, about a half, the dither needs no shift: its highest bit is turned over */
    const uint32_t start = (uint32_t)(s->index + at) * 2246822519u + (uint32_t)s->step * 1779033703u + 0x80000000u;
    __m512i d = _mm512_add_epi32(_mm512_load_si512(c->mcode_dither), _mm512_set1_epi32((int)start));
    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += 16) {
        const __m512 u = _mm512_load_ps(t->m[k] + j);
        __m512i code;
        if (dither) {
            /* everything is rounded down, so that the dither stays below 1 */
            const __m512 half = u * scale + 0.5f, down = _mm512_cvt_roundepi32_ps(d, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
            d = _mm512_add_epi32(d, READ(mcode_dither16));
            const __m512 x = _mm512_fmadd_round_ps(down, _mm512_set1_ps(0x1p-32f), half, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
            code = _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        } else {
            code = _mm512_min_epi32(_mm512_cvtps_epi32(u * scale), _mm512_set1_epi32(127));
        }
        code = _mm512_max_epi32(code, _mm512_set1_epi32(-127));
        _mm_storeu_si128((__m128i *)(where->m + element + j), _mm512_cvtepi32_epi8(code));
    }
}

/* `count` <= TILE groups from `g` on. */
OP void NAME(groups)(
    const segment *s, const hyper *settings, const planes *where, const options *how, int64_t g, int count, const int type, const int grad_type,
    const int bits, const int dither) {
    wide_tile t;
    const int64_t group = s->start / GROUP + g;
    const __mmask16 there = (__mmask16)((1u << count) - 1);
    const wide_step h = wide_prepare(settings, how);
    wide_update(s, &h, where, g, count, &t, type, grad_type, bits);
    if (count < TILE) { /* groups of no elements, and without zeros */
        memset(t.top[count], 0, sizeof t.top[0] * (size_t)(TILE - count));
        memset(t.low[count], 0xFF, sizeof t.low[0] * (size_t)(TILE - count));
    }
    const uint32_t special = wide_lattice(&t) & there;
    if (__builtin_expect(special, 0)) {
        for (int k = 0; k < count; k++)
            if (special >> k & 1) {
                wide_encode_special(h.integers, s, where, g + k, &t, k, dither);
            } else {
                wide_logs(h.integers, &t, k);
                wide_encode_v(h.integers, s, where, g + k, &t, k, dither);
            }
    } else {
        for (int k = 0; k < count; k++) wide_logs(h.integers, &t, k);
        for (int k = 0; k < count; k++) wide_encode_v(h.integers, s, where, g + k, &t, k, dither);
    }
    const __m512i stored = wide_scales(&t, h.share, dither);
    for (int k = 0; k < count; k++) wide_encode_m(h.integers, s, where, g + k, &t, k, dither);
    _mm512_mask_storeu_ps(where->hi + group, there, _mm512_load_ps(t.hi));
    _mm512_mask_storeu_ps(where->step + group, there, _mm512_load_ps(t.step));
    _mm256_mask_storeu_epi16(where->umax + group, there, _mm512_cvtepi32_epi16(_mm512_srli_epi32(stored, 16)));
}
