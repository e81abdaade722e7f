/* What every algorithm's file shares that does not depend on the instruction set: a page's segments, fp16 numbers one by one, and the choice
 * of an instruction set when the library is called. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCH 1
#include <immintrin.h>
#endif

/* The nearest whole number, ties to even, of |x| < 2^22, in a form that every compiler turns into vector instructions. */
#define NEAREST(x) (((x) + 0x1.8p23f) - 0x1.8p23f)

enum { BF16 = 0, FP16 = 1, FP32 = 2 };

/* One parameter's part of a page: a row of `Segments.rows` in kernels/rule.py, all int64. */
typedef struct {
    int64_t param, grad;           /* addresses of the first element */
    int64_t start;                 /* first element in the planes, a multiple of 64 */
    int64_t numel;
    int64_t index;                 /* position of the first element in the parameter */
    int64_t step;                  /* step count, this step included */
    int64_t param_type, grad_type; /* BF16, FP16 or FP32 */
} segment;

typedef struct {
    int master_bits, dither;
    float inv_scale;
} options;

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* ------------------------------------------------------------------ fp16, one element at a time: rare on a CPU */

static inline float half_to_float(uint16_t h) {
    uint32_t magnitude = h & 0x7FFF;
    /* exponent and mantissa in place, times 2^112: right for subnormals too */
    float x = magnitude >= 0x7C00 ? float_of(magnitude << 13 | 0x7F800000) : float_of(magnitude << 13) * 0x1p112f;
    return float_of(bits_of(x) | (uint32_t)(h & 0x8000) << 16);
}

static inline uint16_t float_to_half(float x) { /* to nearest even */
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000;
    u &= 0x7FFFFFFF;
    if (u > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (u >= 0x477FF000) return (uint16_t)(sign | 0x7C00);
    /* subnormal: an addition does the rounding, with the fp16 grid at the end of the mantissa */
    if (u < 0x38800000) return (uint16_t)(sign | (bits_of(float_of(u) + 0.5f) - 0x3F000000));
    u += 0xFFF + ((u >> 13) & 1);
    return (uint16_t)(sign | ((u - 0x38000000) >> 13));
}

static inline float half_ulp_of_half(float p) {
    float half = float_of(bits_of(p) & 0x7F800000) * 0x1p-11f;
    return half > 0x1p-25f ? half : 0x1p-25f;
}

static inline float join_half(float p, float c, float limit) {
    if (c == 0 || !(p - p == 0)) return p;
    float half = half_ulp_of_half(p), unit = half / (limit + 1), whole = c * unit, moved = p + whole;
    moved = moved + ((whole - (moved - p)) + (c / limit) * unit);
    uint16_t h = float_to_half(p);
    int inward = (c < 0) != (int)(bits_of(p) >> 31);
    float reach = (h & 0x3FF) == 0 && (h & 0x7C00) > 0x400 && inward ? half * 0.5f : half;
    float gap = float_of(bits_of(p) & 0x7F800000) * 0x1p-23f;
    if (h & 1) reach = half - (gap > 0x1p-149f ? gap : 0x1p-149f);
    return c > 0 ? (moved < p + reach ? moved : p + reach) : (moved > p - reach ? moved : p - reach);
}

static inline float correct_half(float w, uint16_t h, float limit) {
    if ((h & 0x7C00) == 0x7C00) return 0;
    float p = half_to_float(h), x = (w - p) / half_ulp_of_half(p);
    x = x < -1 ? -1 : x > 1 ? 1 : x;
    float scaled = x * (limit + 1), whole = __builtin_rintf(scaled);
    return whole + __builtin_rintf((scaled - whole) - x);
}

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

/* 2: AVX-512, 1: AVX2 with FMA, 0: what the compiler targets. */
int flashoptim_isa(void) {
#ifdef DISPATCH
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

#ifdef DISPATCH
#define PICK(isa, name) ((isa) >= 2 ? JOIN(name, _avx512) : (isa) == 1 ? JOIN(name, _avx2) : JOIN(name, _base))
#else
#define PICK(isa, name) ((void)(isa), JOIN(name, _base))
#endif
