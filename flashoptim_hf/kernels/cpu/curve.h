/* Codes of r on a curve, for `learned`: the arithmetic of codecs/learned.py. adamw.c includes this once before its bodies, for the types, and
 * once in each, after simd.h. */
#ifndef BODY

#define KNOTS 16

/* A curve from 0 to 1: where each of its linear pieces begins, how far it rises, and 1 over that. */
typedef struct { float left[KNOTS], rise[KNOTS], inverse[KNOTS]; } curve;

/* A parameter's two: of the codes as they are, and of the next encode. */
typedef struct { curve stored, next; } curves;

static curve curve_of(const uint16_t *knots) {
    curve c;
    const int blank = !(half_to_float(knots[KNOTS]) > 0); /* a table of zeros is a straight curve */
    for (int i = 0; i < KNOTS; i++) {
        c.left[i] = blank ? i / (float)KNOTS : half_to_float(knots[i]);
        c.rise[i] = (blank ? (i + 1) / (float)KNOTS : half_to_float(knots[i + 1])) - c.left[i];
        c.inverse[i] = c.rise[i] > 0 ? 1 / c.rise[i] : 0;
    }
    return c;
}

static curves curves_of(const uint16_t *table) { return (curves){curve_of(table), curve_of(table + KNOTS + 1)}; }

#else

/* Entries of a table of 16, by the lowest four bits of each index. */
OP V NAME(look)(const float *table, I index) {
#if ISA == 2
    return (V)_mm512_permutexvar_ps((__m512i)index, (__m512)NAME(load)(table));
#elif ISA == 1
    const __m256 low = _mm256_permutevar8x32_ps((__m256)NAME(load)(table), (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)NAME(load)(table + 8), (__m256i)index);
    return (V)_mm256_blendv_ps(low, high, (__m256)(index << 28)); /* by the sign */
#else
    V y;
    for (int i = 0; i < W; i++) y[i] = table[index[i] & (KNOTS - 1)];
    return y;
#endif
}

/* Where on the lattice codes lie, in steps from 1 to span + 1; those of code 0 are finite and mean nothing. `spacing` is KNOTS / span. */
OP V NAME(place)(const curve *c, V code, float span, float spacing) {
    const V at = (code - 1) * spacing, knot = NAME(min)(NAME(floor)(at), NAME(set)(KNOTS - 1));
    const I piece = NAME(to_i)(knot);
    return (NAME(look)(c->left, piece) + (at - knot) * NAME(look)(c->rise, piece)) * span + 1;
}

/* The largest code whose place is not above x, but for rounding, and at most the last but one. */
OP V NAME(code_below)(const curve *c, V x, float span) {
    const V y = (x - 1) * (1 / span);
#if ISA == 2
    I piece = {0};
    #pragma GCC unroll 4
    for (int bit = KNOTS / 2; bit; bit /= 2) {
        const I ahead = piece + bit;
        piece = (I)NAME(pick)(NAME(lt)(y, NAME(look)(c->left, ahead)), (V)piece, (V)ahead);
    }
#else /* counted, since looking up costs more than comparing */
    I piece = (I){0} + (KNOTS - 1);
    #pragma GCC unroll 16
    for (int i = 1; i < KNOTS; i++) piece += NAME(lt)(y, NAME(set)(c->left[i]));
#endif
    const V at = NAME(to_f)(piece) + (y - NAME(look)(c->left, piece)) * NAME(look)(c->inverse, piece);
    return NAME(min)(NAME(max)(NAME(floor)(at * (span * (1.0f / KNOTS)) + 1), NAME(set)(1)), NAME(set)(span));
}

/* Places x to codes and to `place`, theirs: the nearest, or up with the probability that keeps v right on average. `bend` is ln 2 octaves of a
 * step, `dither` as from `weyl`, and codes with a place beyond `last` are not taken. Products instead of quotients by the gap. */
OP V NAME(on_curve)(const curve *c, V x, float span, float last, float bend, const V *dither, V *place) {
    const float spacing = KNOTS / span;
    const V below = NAME(code_below)(c, x, span), low = NAME(place)(c, below, span, spacing);
    /* rounding must not put the last code beyond the last place */
    const V high = NAME(min)(NAME(place)(c, below + 1, span, spacing), NAME(set)(span + 1));
    const V gap = high - low, part = NAME(min)(NAME(max)(x - low, NAME(set)(0)), gap);
    /* the probability, times the gap, and the dither likewise */
    const V threshold = part * (0x1p24f - (bend * 0x1p24f) * (gap - part));
    const M up = (dither ? NAME(lt)(*dither * gap, threshold) : ~NAME(lt)(part, gap * 0.5f)) & ~NAME(lt)(NAME(set)(last), high);
    *place = NAME(pick)(up, high, low);
    return NAME(pick)(up, below + 1, below);
}

#endif
