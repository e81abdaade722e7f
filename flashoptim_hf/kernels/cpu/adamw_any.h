/* AdamW with `log` states, the form for AVX2 and for what the compiler targets: passes over a tile of groups. Included by adamw.c. */

/* What a tile of groups carries from one pass to the next: registers would hold one group only, and a group's own chain of reductions and
 * divisions is too long to wait for. In passes over a tile the processor works on several groups at once. All of it stays in the L1 cache. */
#define TILE 8
typedef struct {
    float m[TILE][GROUP];         /* the new m, then u = m / r̂ */
    float log_r[TILE][GROUP];     /* the new v, then log2 r, -2^100 for r = 0 */
    float inverse_r[TILE][GROUP]; /* 1 / r, 0 for r = 0 */
    float move[TILE][GROUP];      /* what is taken from the weight */
    float top[TILE], low[TILE];   /* largest log2 r, and largest -log2 r */
    float hi[TILE], step[TILE], inverse_step[TILE], last[TILE], curve[TILE], u[TILE], scale[TILE];
} NAME(tile);

/* First pass over one group: decode, and update the moments. Three passes, since the chain of operations from a code to the weight that it
 * changes is too long for the processor to look past. */
OP void NAME(moments)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, NAME(tile) *t, int k, const int grad_type) {
    const int64_t at = g * GROUP, element = s->start + at, group = element / GROUP;
    const float step = where->step[group], first = where->hi[group] - 255 * step;
    const float umax = float_of((uint32_t)where->umax[group] << 16) / 127 * h->beta1;
    const float rest1 = h->beta1_rest * how->inv_scale, rest2 = h->beta2_rest * how->inv_scale * how->inv_scale;
    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += W) {
        const V grad = grad_type == FP32 ? NAME(load)((const float *)s->grad + at + j)
                                         : (V)(NAME(from_u16)((const uint16_t *)s->grad + at + j) << 16);
        const V code = NAME(to_f)(NAME(from_u8)(where->v + element + j));
        const V r = NAME(keep)(NAME(ne0)(code), NAME(exp2)(code * step + first));
        NAME(save)(t->m[k] + j, NAME(to_f)(NAME(from_i8)(where->m + element + j)) * umax * r + grad * rest1);
        /* at most the largest number: an infinite v would make inf * 0 below */
        NAME(save)(t->log_r[k] + j, NAME(min)(r * h->beta2 * r + grad * rest2 * grad, NAME(set)(0x1.fffffep127f)));
    }
}

/* v to log2 r and 1 / r, and the step of the weight. */
OP void NAME(ratios)(const hyper *h, NAME(tile) *t, int k) {
    V top = NAME(set)(-0x1p100f), low = NAME(set)(-0x1p100f);
    const float size = h->lr * h->rate;
    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += W) {
        const V v = NAME(load)(t->log_r[k] + j);
        const M some = NAME(lt)(NAME(set)(0), v);
        const V inverse_r = NAME(keep)(some, NAME(rsqrt)(v)), denominator = v * inverse_r + h->eps;
        NAME(save)(t->move[k] + j, NAME(keep)(NAME(ne0)(denominator), NAME(load)(t->m[k] + j) / denominator) * size);
        const V log = NAME(log2)(v) * 0.5f, kept = NAME(pick)(some, log, NAME(set)(-0x1p100f));
        top = NAME(max)(top, kept);
        low = NAME(max)(low, NAME(pick)(some, -log, NAME(set)(-0x1p100f)));
        NAME(save)(t->inverse_r[k] + j, inverse_r);
        NAME(save)(t->log_r[k] + j, kept);
    }
    t->top[k] = NAME(largest)(top);
    t->low[k] = NAME(largest)(low);
}

/* The weights. `type` and `bits` are constants wherever this is inlined: FP32 without corrections, or BF16. */
OP void NAME(apply)(
    const segment *s, const hyper *h, const planes *where, int64_t g, const NAME(tile) *t, int k, const int type, const int bits) {
    const int64_t at = g * GROUP;
    char *param = (char *)s->param + at * (type == FP32 ? 4 : 2), *correction = (char *)where->correction + (s->start + at) * (bits / 8 - 2);
    const float decay = 1 - h->lr * h->weight_decay;
    for (int i = 0; i < GROUP; i += 32) {
        V w[32 / W];
        NAME(read32)(param + i * (type == FP32 ? 4 : 2), correction + i * (bits / 8 - 2), type, bits, w);
        #pragma GCC unroll 8
        for (int j = 0; j < 32; j += W) w[j / W] = w[j / W] * decay - NAME(load)(t->move[k] + i + j);
        NAME(write32)(param + i * (type == FP32 ? 4 : 2), correction + i * (bits / 8 - 2), type, bits, w);
    }
}

/* hi and step of every group on their grids (`group_constants` in codecs/log.py), and what encoding needs of them. */
OP void NAME(lattice)(NAME(tile) *t) {
    for (int k = 0; k < TILE; k++) {
        float hi = t->top[k] < -1000 ? 0 : NEAREST(t->top[k] * 0x1p16f) * 0x1p-16f;
        hi = hi > 64 - 0x1p-10f ? 64 - 0x1p-10f : hi;
        float lo = -t->low[k] < hi ? -t->low[k] : hi;
        lo = lo < hi - 24 ? hi - 24 : lo;
        float step = __builtin_ceilf((hi - lo) * (float)(0x1p22 / 254) - 0.25f) * 0x1p-22f;
        step = step < 0x1p-8f ? 0x1p-8f : step;
        t->hi[k] = hi;
        t->step[k] = step;
        t->inverse_step[k] = 1 / step;
        t->last[k] = 255 * step - hi;
        t->curve[k] = 0.69314718f * step * 0x1p24f;
    }
}

/* log2 r to codes, and m to u = m / r̂. */
OP void NAME(encode_v)(const segment *s, const planes *where, int64_t g, NAME(tile) *t, int k, const int dither) {
    const int64_t at = g * GROUP, element = s->start + at;
    const float hi = t->hi[k], step = t->step[k], inverse = t->inverse_step[k];
    /* the threshold x - ln2 step x (1 - x), in units of 2^-24 as the dither is */
    const float curve = t->curve[k], slope = 0x1p24f - curve;
    const uint32_t start = (uint32_t)(s->index + at) * 2654435761u + (uint32_t)s->step * 2654435769u;
    /* where codes are clamped, what decodes may be far from r */
    const int clamped = -t->low[k] < hi - 24 || t->top[k] > hi + 0x1p-10f;
    V largest = NAME(set)(0);
    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += W) {
        V log_r = NAME(load)(t->log_r[k] + j);
        V c = NAME(max)(255 - (hi - log_r) * inverse, NAME(set)(1)), code;
        if (dither) {
            code = NAME(floor)(c);
            V x = c - code;
            M up = NAME(lt)(NAME(weyl)(start + (uint32_t)j * 2654435761u, 2654435761u), x * (curve * x + slope));
            code = code + NAME(keep)(up, NAME(set)(1));
        } else {
            code = NAME(nearest)(c);
        }
        code = NAME(keep)(NAME(lt)(NAME(set)(-0x1p99f), log_r), NAME(min)(code, NAME(set)(255)));
        NAME(to_8)(where->v + element + j, NAME(to_i)(code));
        /* m / r̂; r̂ is r times 2^((code - c) step), whose exponent is small */
        V per_r = NAME(load)(t->inverse_r[k] + j) * NAME(exp2_small)((c - code) * step);
        if (clamped) per_r = NAME(exp2)(t->last[k] - code * step);
        V u = NAME(keep)(NAME(ne0)(code), NAME(load)(t->m[k] + j) * per_r);
        NAME(save)(t->m[k] + j, u);
        largest = NAME(max)(largest, (V)((I)u & 0x7FFFFFFF));
    }
    t->u[k] = NAME(largest)(largest);
}

/* u to codes. */
OP void NAME(encode_m)(const segment *s, const planes *where, int64_t g, const NAME(tile) *t, int k, const int dither) {
    const int64_t at = g * GROUP, element = s->start + at;
    const float scale = t->scale[k];
    const uint32_t start = (uint32_t)(s->index + at) * 2246822519u + (uint32_t)s->step * 1779033703u;
    #pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += W) {
        V x = NAME(load)(t->m[k] + j) * scale;
        x = dither ? NAME(floor)(x + NAME(weyl)(start + (uint32_t)j * 2246822519u, 2246822519u) * 0x1p-24f) : NAME(nearest)(x);
        NAME(to_8)(where->m + element + j, NAME(to_i)(NAME(min)(NAME(max)(x, NAME(set)(-127)), NAME(set)(127))));
    }
}

/* `count` <= TILE groups from `g` on. */
OP void NAME(one)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, int count, const int type, const int grad_type,
    const int bits, const int dither) {
    NAME(tile) t;
    const int64_t group = s->start / GROUP + g;
    for (int k = 0; k < count; k++) NAME(moments)(s, h, where, how, g + k, &t, k, grad_type);
    for (int k = 0; k < count; k++) NAME(ratios)(h, &t, k);
    for (int k = 0; k < count; k++) NAME(apply)(s, h, where, g + k, &t, k, type, bits);
    for (int k = count; k < TILE; k++) t.top[k] = t.low[k] = t.u[k] = 0;
    NAME(lattice)(&t);
    for (int k = 0; k < count; k++) NAME(encode_v)(s, where, g + k, &t, k, dither);
    uint32_t stored[TILE];
    for (int k = 0; k < TILE; k++) {
        float u = t.u[k] < 0x1p-100f ? 0x1p-100f : t.u[k] > 0x1.FEp127f ? 0x1.FEp127f : t.u[k];
        stored[k] = (bits_of(u) + (dither ? 0xFFF0 : 0x8000)) & 0xFFFF0000;
        t.scale[k] = 127 / float_of(stored[k]);
    }
    for (int k = 0; k < count; k++) NAME(encode_m)(s, where, g + k, &t, k, dither);
    memcpy(where->hi + group, t.hi, (size_t)count * 4);
    memcpy(where->step + group, t.step, (size_t)count * 4);
    for (int k = 0; k < count; k++) where->umax[group + k] = (uint16_t)(stored[k] >> 16);
}

/* `count` groups from `g` on. */
OP void NAME(groups)(
    const segment *s, const hyper *h, const planes *where, const options *how, int64_t g, int64_t count, const int type, const int grad_type,
    const int bits, const int dither) {
    for (; count > 0; g += TILE, count -= TILE)
        NAME(one)(s, h, where, how, g, count < TILE ? (int)count : TILE, type, grad_type, bits, dither);
}
