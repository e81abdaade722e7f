/* The few vector operations that the kernels need, for the instruction set that the including file names with ISA: 2 AVX-512, 1 AVX2 with FMA,
 * 0 what the compiler targets (written with the compiler's vector extensions, 4 lanes: SSE2, NEON, ...). NAME(x) gives each its own names.
 *
 * V and I are vectors of W fp32 and int32 lanes; + - * / & | ~ << >> work on them as on numbers. M is the result of a comparison.
 */
#define OP static inline __attribute__((always_inline))

#undef W
#if ISA == 2
#define W 16
#elif ISA == 1
#define W 8
#else
#define W 4
#endif

#define V NAME(vf)
#define I NAME(vi)
#define U NAME(vu)
#define M NAME(mask)
typedef float V __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * W), aligned(4), may_alias));
#if ISA == 2
typedef __mmask16 M;
#else
typedef I M;
#endif

OP V NAME(set)(float x) { return x - (V){0}; }
OP V NAME(load)(const float *p) { return *(const V *)p; }
OP void NAME(save)(float *p, V x) { *(V *)p = x; }
OP V NAME(to_f)(I x) { return __builtin_convertvector(x, V); }

#if ISA == 2

OP V NAME(min)(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
OP V NAME(max)(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
OP I NAME(imin)(I a, I b) { return (I)_mm512_min_epi32((__m512i)a, (__m512i)b); }
OP I NAME(imax)(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
OP V NAME(floor)(V x) { return (V)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
OP V NAME(nearest)(V x) { return (V)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OP I NAME(to_i)(V x) { return (I)_mm512_cvtps_epi32((__m512)x); } /* to nearest, ties to even */
OP V NAME(sqrt)(V x) { return (V)_mm512_sqrt_ps((__m512)x); }
OP M NAME(lt)(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
OP M NAME(ne0)(V a) { return _mm512_cmp_ps_mask((__m512)a, _mm512_setzero_ps(), _CMP_NEQ_UQ); }
OP M NAME(ieq)(I a, I b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
OP M NAME(ilt)(I a, I b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
OP V NAME(pick)(M m, V a, V b) { return (V)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
OP V NAME(keep)(M m, V a) { return (V)_mm512_maskz_mov_ps(m, (__m512)a); }
OP V NAME(scale)(V x, V n) { return (V)_mm512_scalef_ps((__m512)x, (__m512)n); }
OP float NAME(largest)(V x) { return _mm512_reduce_max_ps((__m512)x); }
OP I NAME(from_i8)(const int8_t *p) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
OP I NAME(from_u8)(const uint8_t *p) { return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
OP I NAME(from_i16)(const int16_t *p) { return (I)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
OP I NAME(from_u16)(const uint16_t *p) { return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
OP void NAME(to_8)(void *p, I x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x)); }
OP void NAME(to_16)(void *p, I x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x)); }

#elif ISA == 1

OP V NAME(min)(V a, V b) { return (V)_mm256_min_ps((__m256)a, (__m256)b); }
OP V NAME(max)(V a, V b) { return (V)_mm256_max_ps((__m256)a, (__m256)b); }
OP I NAME(imin)(I a, I b) { return (I)_mm256_min_epi32((__m256i)a, (__m256i)b); }
OP I NAME(imax)(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
OP V NAME(floor)(V x) { return (V)_mm256_floor_ps((__m256)x); }
OP V NAME(nearest)(V x) { return (V)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OP I NAME(to_i)(V x) { return (I)_mm256_cvtps_epi32((__m256)x); }
OP V NAME(sqrt)(V x) { return (V)_mm256_sqrt_ps((__m256)x); }
OP M NAME(lt)(V a, V b) { return (I)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ); }
OP M NAME(ne0)(V a) { return (I)_mm256_cmp_ps((__m256)a, _mm256_setzero_ps(), _CMP_NEQ_UQ); }
OP V NAME(pick)(M m, V a, V b) { return (V)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)m); }
OP I NAME(from_i8)(const int8_t *p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
OP I NAME(from_u8)(const uint8_t *p) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
OP I NAME(from_i16)(const int16_t *p) { return (I)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p)); }
OP I NAME(from_u16)(const uint16_t *p) { return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
OP __m256i NAME(low_bytes)(I x, int width) { /* the low `width` bytes of each lane to the front of each half */
    const __m256i one = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i two = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    return _mm256_shuffle_epi8((__m256i)x, width == 1 ? one : two);
}
OP void NAME(to_8)(void *p, I x) {
    __m256i y = NAME(low_bytes)(x, 1);
    _mm_storel_epi64((__m128i *)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
OP void NAME(to_16)(void *p, I x) {
    __m256i y = NAME(low_bytes)(x, 2);
    _mm_storeu_si128((__m128i *)p, _mm_unpacklo_epi64(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}

#else

OP V NAME(pick)(M m, V a, V b) { return (V)((m & (I)a) | (~m & (I)b)); }
OP V NAME(min)(V a, V b) { return NAME(pick)(a < b, a, b); }
OP V NAME(max)(V a, V b) { return NAME(pick)(a > b, a, b); }
OP I NAME(imin)(I a, I b) { I m = a < b; return (m & a) | (~m & b); }
OP I NAME(imax)(I a, I b) { I m = a > b; return (m & a) | (~m & b); }
/* Adding 1.5 * 2^23 leaves the nearest whole number, ties to even: |x| < 2^22. */
OP V NAME(nearest)(V x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
OP V NAME(floor)(V x) { V n = NAME(nearest)(x); return n - (V)((n > x) & (I)NAME(set)(1)); }
OP I NAME(to_i)(V x) { return __builtin_convertvector(NAME(nearest)(x), I); }
OP V NAME(sqrt)(V x) { V y; for (int i = 0; i < W; i++) y[i] = __builtin_sqrtf(x[i]); return y; }
OP M NAME(lt)(V a, V b) { return a < b; }
OP M NAME(ne0)(V a) { return a != 0; }
OP I NAME(from_i8)(const int8_t *p) { I x; for (int i = 0; i < W; i++) x[i] = p[i]; return x; }
OP I NAME(from_u8)(const uint8_t *p) { I x; for (int i = 0; i < W; i++) x[i] = p[i]; return x; }
OP I NAME(from_i16)(const int16_t *p) { I x; for (int i = 0; i < W; i++) x[i] = p[i]; return x; }
OP I NAME(from_u16)(const uint16_t *p) { I x; for (int i = 0; i < W; i++) x[i] = p[i]; return x; }
OP void NAME(to_8)(void *p, I x) { for (int i = 0; i < W; i++) ((int8_t *)p)[i] = (int8_t)x[i]; }
OP void NAME(to_16)(void *p, I x) { for (int i = 0; i < W; i++) ((int16_t *)p)[i] = (int16_t)x[i]; }

#endif

#if ISA < 2
OP M NAME(ieq)(I a, I b) { return a == b; }
OP M NAME(ilt)(I a, I b) { return a < b; }
OP V NAME(keep)(M m, V a) { return (V)(m & (I)a); }
/* x 2^n for whole n in [-127, 127] and x about 1; 0 where the result would be subnormal */
OP V NAME(scale)(V x, V n) {
    I e = NAME(to_i)(n);
    return NAME(keep)(e > -127, (V)((I)x + (e << 23)));
}
OP float NAME(largest)(V x) {
    float y = x[0];
    for (int i = 1; i < W; i++) y = x[i] > y ? x[i] : y;
    return y;
}
#endif

#if ISA == 2
/* For log2 of a mantissa in [1, 2): its upper four bits choose a centre, in each a 16th; 1 / centre, and log2 of the centre as it then is. */
static const float LOG_INVERSE[16] __attribute__((aligned(64))) = {
    0x1.f07c20p-1f, 0x1.d41d42p-1f, 0x1.bacf92p-1f, 0x1.a41a42p-1f, 0x1.8f9c18p-1f, 0x1.7d05f4p-1f, 0x1.6c16c2p-1f, 0x1.5c9882p-1f,
    0x1.4e5e0ap-1f, 0x1.414142p-1f, 0x1.3521d0p-1f, 0x1.29e412p-1f, 0x1.1f7048p-1f, 0x1.15b1e6p-1f, 0x1.0c9714p-1f, 0x1.041042p-1f};
static const float LOG_CENTRE[16] __attribute__((aligned(64))) = {
    0x1.6bad20p-5f, 0x1.08c588p-3f, 0x1.acf5dep-3f, 0x1.24407ap-2f, 0x1.6e2220p-2f, 0x1.b47ec0p-2f, 0x1.f7a854p-2f, 0x1.1bf314p-1f,
    0x1.3abb40p-1f, 0x1.584820p-1f, 0x1.74b1fcp-1f, 0x1.900e62p-1f, 0x1.aa708ep-1f, 0x1.c3e9cap-1f, 0x1.dc899ep-1f, 0x1.f45e06p-1f};
/* log2(1 + t) / t for |t| <= 1/33, error 6e-8 with the product */
#define LOG_1 0x1.715474p+0f
#define LOG_2 -0x1.717872p-1f
#define LOG_3 0x1.ecd2ecp-2f
#endif

/* log2 of finite x > 0, subnormal or not, |error| <= 2e-7 beside the rounding of the result: the exponent, and a polynomial in the mantissa,
 * which is brought near to 1 by a table, or to [sqrt(1/2), sqrt(2)). */
OP V NAME(log2)(V x) {
#if ISA == 2
    __m512 mantissa = _mm512_getmant_ps((__m512)x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    __m512i at = _mm512_srli_epi32(_mm512_castps_si512(mantissa), 19); /* permutations take the lowest four bits */
    V t = (V)(mantissa * _mm512_permutexvar_ps(at, _mm512_loadu_ps(LOG_INVERSE)) - 1.0f);
    V p = (LOG_3 * t + LOG_2) * t + LOG_1;
    return (p * t + (V)_mm512_permutexvar_ps(at, _mm512_loadu_ps(LOG_CENTRE))) + (V)_mm512_getexp_ps((__m512)x);
#else
    M tiny = NAME(lt)(x, NAME(set)(0x1p-126f));
    x = NAME(pick)(tiny, x * 0x1p24f, x);
    I u = (I)x - 0x3F3504F3;
    V e = NAME(to_f)(u >> 23) - NAME(keep)(tiny, NAME(set)(24));
    V t = (V)((u & 0x7FFFFF) + 0x3F3504F3) - 1.0f;
    V p = -0x1.2b6cc2p-3f * t + 0x1.dfa96ap-3f;
    p = p * t - 0x1.fd964ap-3f;
    p = p * t + 0x1.25f726p-2f;
    p = p * t - 0x1.70e346p-2f;
    p = p * t + 0x1.ec775ap-2f;
    p = p * t - 0x1.715526p-1f;
    p = p * t + 0x1.715474p+0f;
    return p * t + e;
#endif
}

/* 2^x, relative error <= 4e-7 for x in [-126, 127.49]; below, the result is as small or 0. */
OP V NAME(exp2)(V x) {
#if ISA < 2 /* AVX-512 scales right over the whole range */
    x = NAME(min)(NAME(max)(x, NAME(set)(-127)), NAME(set)(127.49f));
#endif
    V n = NAME(nearest)(x), t = x - n;
    V p = 0x1.5f48c8p-10f * t + 0x1.3d107cp-7f;
    p = p * t + 0x1.c6aeccp-5f;
    p = p * t + 0x1.ebf906p-3f;
    p = p * t + 0x1.62e430p-1f;
    p = p * t + 0x1.000002p+0f;
    return NAME(scale)(p, n);
}

/* 2^x for |x| <= 0.1, relative error <= 2e-7. */
OP V NAME(exp2_small)(V x) {
    V p = 0x1.c6d382p-5f * x + 0x1.ec2e50p-3f;
    p = p * x + 0x1.62e42ep-1f;
    return p * x + 0x1.fffffcp-1f;
}

/* 1 / sqrt(x) for x > 0, relative error <= 4e-7: the hardware's estimate and Newton's method; anything for x = 0. */
OP V NAME(rsqrt)(V x) {
#if ISA == 2
    V y = (V)_mm512_rsqrt14_ps((__m512)x);
    return y + (0.5f * y) * (1 - (x * y) * y);
#else
    return 1 / NAME(sqrt)(x);
#endif
}

/* Dither of W elements in units of 2^-24, whole numbers in [0, 2^24): `weyl` in codecs/base.py. `start` is i a + t b of the first. */
OP V NAME(weyl)(uint32_t start, uint32_t a) {
#if ISA == 2
    const U lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif ISA == 1
    const U lanes = {0, 1, 2, 3, 4, 5, 6, 7};
#else
    const U lanes = {0, 1, 2, 3};
#endif
    return NAME(to_f)((I)((lanes * a + start) >> 8));
}
