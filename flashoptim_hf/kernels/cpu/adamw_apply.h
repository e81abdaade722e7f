/* The second pass of the AVX-512 form: the weights. Included by adamw_wide.h. */
/* Where eps is 0, weights whose r is 0 stand still: m becomes 0 there, and eps is the smallest normal number, which is nothing beside any other r. */
OP void wide_stand_still(wide_tile *t, int count) {
    for (int i = 0; i < count * GROUP; i += 16) {
        const __mmask16 some = _mm512_cmp_ps_mask(_mm512_load_ps(t->r[0] + i), _mm512_setzero_ps(), _CMP_NEQ_UQ);
        _mm512_store_ps(t->m[0] + i, _mm512_maskz_mov_ps(some, _mm512_load_ps(t->m[0] + i)));
    }
}

/* By halves of groups, which are read one half ahead and written one half behind. `type` and `bits` are constants wherever this is inlined: FP32
 * without corrections, or BF16. */
OP void wide_apply(
    const segment *s, const wide_step *h, const planes *where, int64_t g, int count, const wide_tile *t, const int type, const int bits) {
    const wide_constants *c = h->integers;
    const int64_t at = g * GROUP;
    const int width = 32 * (type == FP32 ? 4 : 2), correction_width = 32 * (bits / 8 - 2);
    char *param = (char *)s->param + at * width / 32, *correction = (char *)where->correction + (s->start + at) * correction_width / 32;
    const float *m = t->m[0], *r = t->r[0];
    two next = wide_load(c, param, correction, type, bits), done = next;
    for (int half = 0; half < 2 * count; half++) {
        if (half % 2 == 0) wide_prefetch_codes(s, where, g + half / 2 + TILE, type, bits);
        const two w = next;
        const int ahead = half + 1 < 2 * count ? half + 1 : half;
        next = wide_load(c, param + ahead * width, correction + ahead * correction_width, type, bits);
        __m512 move[2];
        #pragma GCC unroll 2
        for (int q = 0; q < 2; q++) move[q] = _mm512_load_ps(m + half * 32 + q * 16) / (_mm512_load_ps(r + half * 32 + q * 16) + h->eps);
        if (half > 0) wide_save(c, done, param + (half - 1) * width, correction + (half - 1) * correction_width, type, bits);
        done = (two){w.a * h->decay - h->size * move[0], w.b * h->decay - h->size * move[1]};
    }
    wide_save(c, done, param + (2 * count - 1) * width, correction + (2 * count - 1) * correction_width, type, bits);
}

/* bf16 weights with 8-bit corrections, by whole groups: a group is joined while the one before is split, as `wide_join` and `wide_split` do (see
 * there). What waits for operands has few places in the processor, and each of the two is a chain of operations: here they are in an order in
 * which most find their operands ready. */
#define BOTH _Pragma("GCC unroll 2") for (int q = 0; q < 2; q++)
OP void wide_apply24(const segment *s, const wide_step *h, const planes *where, int64_t g, int count, const wide_tile *t) {
    const wide_constants *c = h->integers;
    const __m512i zero = _mm512_setzero_si512();
    char *param = (char *)s->param + g * GROUP * 2, *correction = (char *)where->correction + s->start + g * GROUP;
    const two first = wide_load(c, param, correction, BF16, 24), second = wide_load(c, param + 64, correction + 32, BF16, 24);
    __m512 w[4] = {first.a, first.b, second.a, second.b}, move[4];
    wide_prefetch_codes(s, where, g + TILE, BF16, 24);
    EACH move[q] = _mm512_load_ps(t->m[0] + q * 16) / (_mm512_load_ps(t->r[0] + q * 16) + h->eps);
    EACH w[q] = w[q] * h->decay - h->size * move[q];
    for (int k = 1; k < count; k++) {
        /* p and e: a group's weights and corrections; old, low, d: the upper and lower words of the group before, and its corrections */
        __m512i p[2], e[2], next[2], sign[2], whole[2], rest[2], old[2], low[2], sticky[2], d[2];
        __mmask32 negative[2], power[2], inward[2], has[2], even[2], up[2], old_inward[2], positive[2];
        const __m256i *from = (const __m256i *)(correction + GROUP), *least = (const __m256i *)c->least8;
        wide_prefetch_codes(s, where, g + k + TILE, BF16, 24);
        BOTH e[q] = _mm512_cvtepi8_epi16(_mm256_max_epi8(_mm256_loadu_si256(from + q), _mm256_load_si256(least)));
        BOTH p[q] = _mm512_loadu_si512(param + GROUP * 2 + q * 64);
        EACH move[q] = _mm512_load_ps(t->r[k] + q * 16) + h->eps;
        BOTH old[q] = _mm512_permutex2var_epi16(_mm512_castps_si512(w[2 * q]), HALVES(1), _mm512_castps_si512(w[2 * q + 1]));
        BOTH low[q] = _mm512_permutex2var_epi16(_mm512_castps_si512(w[2 * q]), HALVES(0), _mm512_castps_si512(w[2 * q + 1]));
        BOTH negative[q] = _mm512_movepi16_mask(p[q]);
        BOTH e[q] = _mm512_mask_sub_epi16(e[q], negative[q], zero, e[q]);
        BOTH sticky[q] = _mm512_ternarylogic_epi32(low[q], old[q], READ(one), 0xF8);
        BOTH power[q] = _mm512_testn_epi16_mask(p[q], READ(mantissa));
        BOTH up[q] = _mm512_cmpgt_epu16_mask(sticky[q], READ(tie));
        BOTH next[q] = _mm512_add_epi16(p[q], READ(next_exponent));
        EACH move[q] = _mm512_load_ps(t->m[k] + q * 16) / move[q];
        BOTH inward[q] = _mm512_mask_cmplt_epi16_mask(power[q], e[q], zero);
        BOTH old[q] = _mm512_mask_sub_epi16(old[q], up[q], old[q], READ(minus_one));
        BOTH d[q] = _mm512_mask_min_epu16(low[q], ~up[q], low[q], READ(largest));
        BOTH e[q] = _mm512_mask_add_epi16(e[q], inward[q], e[q], e[q]);
        BOTH old_inward[q] = _mm512_mask_testn_epi16_mask(up[q], old[q], READ(mantissa));
        BOTH has[q] = _mm512_test_epi16_mask(next[q], READ(exponent));
        BOTH positive[q] = _mm512_testn_epi16_mask(old[q], READ(tie));
        BOTH e[q] = _mm512_maskz_max_epi16(has[q], e[q], READ(limit8));
        BOTH even[q] = _mm512_testn_epi16_mask(p[q], READ(one));
        BOTH rest[q] = _mm512_mulhrs_epi16(e[q], READ(rest));
        BOTH _mm512_storeu_si512(param + q * 64, old[q]);
        BOTH sign[q] = _mm512_srai_epi16(e[q], 15);
        BOTH d[q] = _mm512_mask_srai_epi16(d[q], old_inward[q], d[q], 1);
        BOTH d[q] = _mm512_mulhrs_epi16(d[q], READ(times));
        BOTH whole[q] = _mm512_mullo_epi16(e[q], READ(whole));
        BOTH e[q] = _mm512_adds_epi16(whole[q], rest[q]);
        BOTH d[q] = _mm512_mask_sub_epi16(d[q], positive[q], zero, d[q]);
        BOTH p[q] = _mm512_add_epi16(p[q], sign[q]);
        BOTH e[q] = _mm512_max_epi16(e[q], READ(least));
        BOTH e[q] = _mm512_mask_add_epi16(e[q], even[q], whole[q], rest[q]);
        BOTH w[2 * q] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(e[q], BOTH_OF(0), p[q]));
        BOTH w[2 * q + 1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(e[q], BOTH_OF(16), p[q]));
        EACH w[q] = w[q] * h->decay - h->size * move[q];
        BOTH _mm256_storeu_si256((__m256i *)(correction + q * 32), _mm512_cvtepi16_epi8(d[q]));
        param += GROUP * 2, correction += GROUP;
    }
    wide_save(c, (two){w[0], w[1]}, param, correction, BF16, 24);
    wide_save(c, (two){w[2], w[3]}, param + 64, correction + 32, BF16, 24);
}
#undef BOTH
