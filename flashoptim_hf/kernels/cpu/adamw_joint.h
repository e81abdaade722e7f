/* AdamW with `joint` or `learned` states: decode, update, encode, feed back what rounding took from m, and store the weight. Included by adamw.c,
 * once for each instruction set. The arithmetic is that of codecs/joint.py, of codecs/learned.py where there are curves, and of `settle` in
 * optim/adamw.py, with the names used there. Whether there are curves is known when a function is compiled, but in `joint_any`. */
#define JOINT 32
#define JOINT_TILE 16
typedef struct {
    float m[JOINT_TILE][JOINT];     /* the new m */
    float log_r[JOINT_TILE][JOINT]; /* the new v, then log2 r, -2^100 for r = 0 */
    float share[JOINT_TILE][JOINT]; /* what a unit of m moves a weight by, over lr */
    float top[JOINT_TILE], low[JOINT_TILE]; /* largest log2 r, and largest -log2 r */
    float entry[JOINT_TILE], umax[JOINT_TILE]; /* before, then after */
    float n[JOINT_TILE], width[JOINT_TILE], base[JOINT_TILE], last[JOINT_TILE], anchor[JOINT_TILE];
} NAME(joint_tile);

/* What curves are for: codes of r, and where on the lattice they lie. */
typedef struct { float code[JOINT_TILE][JOINT], place[JOINT_TILE][JOINT]; } NAME(curved_tile);

/* Entries of the plane `levels` to n, the number of levels, and octaves between two of them: `lattice`. The same operations in fp32, so that
 * every path has the same numbers. */
OP void NAME(joint_lattice)(V entry, V *n, V *levels, V *width) {
    const M coarse = NAME(lt)(entry, NAME(set)(128));
    *n = NAME(pick)(coarse, NAME(max)(entry, NAME(set)(43)), NAME(set)(140));
    *levels = NAME(floor)(65536 / (2 * *n + 1)) - 1;
    const V octaves = NAME(pick)(coarse, 0x5p24f / (*n * *n * *n * *n), (entry - 120) * 0.18162f);
    *width = NAME(floor)(octaves / (*levels - 17) * 0x1p18f + 0.5f) * 0x1p-18f;
}

/* The entry for groups that span so many octaves: `allot`. */
OP V NAME(joint_allot)(V octaves, V before, V umax, float time) {
    const V one = NAME(set)(1);
    V enough = 64 * NAME(exp2)((2.321928095f - NAME(log2)(NAME(max)(octaves, NAME(set)(0x1p-126f)))) * 0.25f);
    enough = NAME(min)(enough, NAME(set)(96.5f));
    /* where 43 <= before <= enough, and before >= enough 1.1^(-1/4) */
    V n = NAME(max)(NAME(floor)(enough), NAME(set)(43));
    n = NAME(pick)(NAME(lt)(before, enough * 0.976454126f), n, NAME(pick)(NAME(lt)(enough, before), n, before));
    n = NAME(pick)(NAME(lt)(before, NAME(set)(43)), NAME(max)(NAME(floor)(enough), NAME(set)(43)), n);

    const M coarse = NAME(lt)(before, NAME(set)(128));
    const V limit = n * n * (0.0009f * (time + 1000)) * NAME(pick)(coarse, one, one * 0.25f);
    const V needed = NAME(min)(NAME(max)(-NAME(floor)(octaves * -(1 / 0.18162f)), 8 * one), 135 * one) + 120;
    /* an entry that holds what is needed, with at most a tenth to spare */
    V fine = NAME(pick)(NAME(lt)(before, needed), needed, NAME(pick)(NAME(lt)((needed - 120) * 1.1f, before - 120), needed, before));
    return NAME(pick)(NAME(lt)(limit, umax * umax * time), fine, n);
}

/* Steps between the first code of a group and its last. */
OP float NAME(joint_span)(const NAME(joint_tile) *t, int k) { return t->anchor[k] * 16 - t->base[k] - 1; }

/* Whether weights and gradients are of types that the next functions know: FP32 without corrections, or BF16. */
OP int NAME(joint_knows)(const segment *s, int bits) {
    return s->grad_type != FP16 && (s->param_type == BF16 ? bits == 0 || bits == 24 || bits == 32 : s->param_type == FP32 && bits == 0);
}

OP void NAME(joint_read)(const segment *s, const joint_planes *where, int bits, int64_t at, V *w) {
    const char *param = (const char *)s->param + at * (s->param_type == FP32 ? 4 : 2);
    const char *correction = (const char *)where->correction + (s->start + at) * (bits / 8 - 2);
    if (s->param_type == FP32) NAME(read32)(param, correction, FP32, 0, w);
    else if (bits == 24) NAME(read32)(param, correction, BF16, 24, w);
    else if (bits == 32) NAME(read32)(param, correction, BF16, 32, w);
    else NAME(read32)(param, correction, BF16, 0, w);
}

OP void NAME(joint_read_grad)(const segment *s, int64_t at, V *grads) {
    const char *grad = (const char *)s->grad + at * (s->grad_type == FP32 ? 4 : 2);
    if (s->grad_type == BF16) NAME(read_grad32)(grad, BF16, BF16, grads);
    else if (s->param_type == FP32) NAME(read_grad32)(grad, FP32, FP32, grads);
    else NAME(read_grad32)(grad, FP32, BF16, grads);
}

OP void NAME(joint_write)(const segment *s, const joint_planes *where, int bits, int64_t at, const V *w) {
    char *param = (char *)s->param + at * (s->param_type == FP32 ? 4 : 2), *correction = (char *)where->correction + (s->start + at) * (bits / 8 - 2);
    if (s->param_type == FP32) NAME(write32)(param, correction, FP32, 0, w);
    else if (bits == 24) NAME(write32)(param, correction, BF16, 24, w);
    else if (bits == 32) NAME(write32)(param, correction, BF16, 32, w);
    else NAME(write32)(param, correction, BF16, 0, w);
}

/* First pass over one group: decode, and update the moments. */
OP void NAME(joint_moments)(
    const segment *s, const hyper *h, const joint_planes *where, const curve *stored, const options *how, int64_t g, NAME(joint_tile) *t, int k) {
    const int64_t at = g * JOINT, element = s->start + at;
    const float rest1 = h->beta1_rest * how->inv_scale, rest2 = h->beta2_rest * how->inv_scale * how->inv_scale;
    const float n = t->n[k], states = 2 * n + 1, inverse = 1 / states, unit = t->umax[k] / n, step = t->width[k], first = t->base[k];
    const float span = stored ? NAME(joint_span)(t, k) : 0, spacing = stored ? KNOTS / span : 0;
    V grads[JOINT / W];
    NAME(joint_read_grad)(s, at, grads);
    #pragma GCC unroll 8
    for (int j = 0; j < JOINT; j += W) {
        const V grad = grads[j / W];
        const V word = NAME(to_f)((NAME(from_u8)(where->high + element + j) << 8) | NAME(from_u8)(where->low + element + j));
        /* half a word off a whole number, so that no rounding of the product matters */
        const V code = NAME(floor)(word * inverse + 0.5f * inverse);
        const V place = stored ? NAME(place)(stored, code, span, spacing) : code;
        const V r = NAME(keep)(NAME(lt)(NAME(set)(0), code), NAME(exp2)((place + first) * step));
        NAME(save)(t->m[k] + j, (word - code * states - n) * unit * r * h->beta1 + grad * rest1);
        /* at most the largest number: an infinite v would make inf - inf below */
        NAME(save)(t->log_r[k] + j, NAME(min)(r * h->beta2 * r + grad * rest2 * grad, NAME(set)(0x1.fffffep127f)));
    }
}

/* v to log2 r, and what a unit of m moves a weight by. */
OP void NAME(joint_ratios)(const hyper *h, NAME(joint_tile) *t, int k) {
    V top = NAME(set)(-0x1p100f), low = top;
    #pragma GCC unroll 8
    for (int j = 0; j < JOINT; j += W) {
        const V v = NAME(load)(t->log_r[k] + j);
        const M some = NAME(lt)(NAME(set)(0), v);
        const V denominator = NAME(sqrt)(NAME(max)(v, NAME(set)(0))) + h->eps, log = NAME(log2)(v) * 0.5f;
        const V kept = NAME(pick)(some, log, NAME(set)(-0x1p100f));
        top = NAME(max)(top, kept);
        low = NAME(max)(low, NAME(pick)(some, -log, NAME(set)(-0x1p100f)));
        NAME(save)(t->log_r[k] + j, kept);
        NAME(save)(t->share[k] + j, NAME(keep)(NAME(ne0)(denominator), h->rate / denominator));
    }
    t->top[k] = NAME(largest)(top);
    t->low[k] = NAME(largest)(low);
}

/* What describes the groups of a tile, read before the first pass (`before`), and chosen anew after it. */
OP void NAME(joint_constants)(NAME(joint_tile) *t, const float time, const int before) {
    for (int k = 0; k < JOINT_TILE; k += W) {
        V entry = NAME(load)(t->entry + k), hi = NAME(set)(0), n, levels, width, anchor = NAME(load)(t->anchor + k);
        if (!before) {
            const V top = NAME(load)(t->top + k), one = NAME(set)(1);
            hi = NAME(min)(NAME(pick)(NAME(lt)(top, -1000 * one), 0 * one, top), one * (64 - 0x1p-10f));
            const V lo = NAME(max)(NAME(min)(-NAME(load)(t->low + k), hi), hi - 24);
            entry = NAME(joint_allot)(hi - lo, entry, NAME(load)(t->umax + k), time);
            NAME(save)(t->entry + k, entry);
        }
        NAME(joint_lattice)(entry, &n, &levels, &width);
        if (!before) anchor = -NAME(floor)(-(hi / width * 0.0625f));
        const V base = anchor * 16 - levels;
        NAME(save)(t->n + k, n);
        NAME(save)(t->width + k, width);
        NAME(save)(t->anchor + k, anchor);
        NAME(save)(t->base + k, base);
        NAME(save)(t->last + k, NAME(min)(levels, NAME(floor)((64 - 0x1p-10f) / width) - base));
    }
}

/* The start of one group's dither. */
OP uint32_t NAME(joint_dither)(const segment *s, int64_t at) { return (uint32_t)(s->index + at) * 2654435761u + (uint32_t)s->step * 2654435769u; }

/* log2 r of one group to codes on a curve. A pass of its own: these are long chains, of which the processor then works on several at a time. */
OP void NAME(joint_curved)(const segment *s, const curve *next, int64_t g, const NAME(joint_tile) *t, NAME(curved_tile) *to, int k, const int dither) {
    const float width = t->width[k], base = t->base[k], last = t->last[k], span = NAME(joint_span)(t, k);
    const uint32_t start = NAME(joint_dither)(s, g * JOINT);
    #pragma GCC unroll 8
    for (int j = 0; j < JOINT; j += W) {
        const V x = NAME(min)(NAME(max)(NAME(load)(t->log_r[k] + j) / width - base, NAME(set)(1)), NAME(set)(last));
        const V drawn = NAME(weyl)(start + (uint32_t)j * 2654435761u, 2654435761u);
        V place;
        NAME(save)(to->code[k] + j, NAME(on_curve)(next, x, span, last, 0.69314718f * width, dither ? &drawn : 0, &place));
        NAME(save)(to->place[k] + j, place);
    }
}

/* Last pass over one group: to codes, those on a curve where there is one, and on to the weight. */
OP void NAME(joint_encode)(
    const segment *s, const hyper *h, const joint_planes *where, const options *how, float coast, int64_t g, NAME(joint_tile) *t,
    const NAME(curved_tile) *curved, int k, const int dither) {
    const int64_t at = g * JOINT, element = s->start + at;
    const float n = t->n[k], width = t->width[k], base = t->base[k], last = t->last[k];
    const float curve = 0.69314718f * width * 0x1p24f, slope = 0x1p24f - curve; /* of the threshold for rounding up, in units of 2^-24 */
    const uint32_t start = NAME(joint_dither)(s, at);
    V code[JOINT / W], r[JOINT / W], u[JOINT / W], w[JOINT / W], largest = NAME(set)(0);
    #pragma GCC unroll 8
    for (int j = 0; j < JOINT; j += W) {
        const V log_r = NAME(load)(t->log_r[k] + j);
        V x = NAME(min)(NAME(max)(log_r / width - base, NAME(set)(1)), NAME(set)(last)), whole;
        if (curved) {
            whole = NAME(load)(curved->code[k] + j);
        } else if (dither) {
            whole = NAME(floor)(x);
            x = x - whole;
            const M up = NAME(lt)(NAME(weyl)(start + (uint32_t)j * 2654435761u, 2654435761u), x * (curve * x + slope));
            whole = NAME(min)(whole + NAME(keep)(up, NAME(set)(1)), NAME(set)(last));
        } else {
            whole = NAME(floor)(x + 0.5f);
        }
        code[j / W] = whole;
        r[j / W] = NAME(exp2)(((curved ? NAME(load)(curved->place[k] + j) : whole) + base) * width);
        u[j / W] = NAME(keep)(NAME(lt)(NAME(set)(-0x1p99f), log_r), NAME(load)(t->m[k] + j) / r[j / W]);
        largest = NAME(max)(largest, (V)((I)u[j / W] & 0x7FFFFFFF));
    }
    float umax = NAME(largest)(largest);
    umax = float_of((bits_of(umax < 0x1p-100f ? 0x1p-100f : umax > 0x1.FEp127f ? 0x1.FEp127f : umax) + 0x8000) & 0xFFFF0000);
    t->umax[k] = umax;
    const float scale = n / umax, unit = umax / n, decay = 1 - h->lr * h->weight_decay;
    NAME(joint_read)(s, where, how->master_bits, at, w);
    #pragma GCC unroll 8
    for (int j = 0; j < JOINT; j += W) {
        const M some = NAME(lt)(NAME(set)(-0x1p99f), NAME(load)(t->log_r[k] + j));
        const V m = NAME(load)(t->m[k] + j), share = NAME(load)(t->share[k] + j), move = m * share;
        const V ucode = NAME(nearest)(NAME(min)(NAME(max)(u[j / W] * scale, NAME(set)(-n)), NAME(set)(n)));
        const I word = NAME(to_i)(NAME(keep)(some, code[j / W] * (2 * n + 1) + (ucode + n)));
        NAME(to_8)(where->low + element + j, word);
        NAME(to_8)(where->high + element + j, word >> 8);
        const V lost = NAME(keep)(some, m - ucode * unit * r[j / W]), limit = (V)((I)move & 0x7FFFFFFF) * 1.25f + 0.02f;
        w[j / W] = w[j / W] * decay - h->lr * NAME(max)(NAME(min)(move + coast * lost * share, limit), -limit);
    }
    NAME(joint_write)(s, where, how->master_bits, at, w);
}

/* `count` <= JOINT_TILE groups from `g` on; without curves, codes are places. */
OP void NAME(joint_update)(
    const segment *s, const hyper *h, const joint_planes *where, const curve *stored, const curve *next, const options *how, float coast, int64_t g,
    int count) {
    NAME(joint_tile) t;
    const int64_t group = s->start / JOINT + g;
    for (int k = 0; k < JOINT_TILE; k++) {
        t.entry[k] = k < count ? where->levels[group + k] : 43;
        t.umax[k] = k < count ? float_of((uint32_t)where->umax[group + k] << 16) : 0;
        t.anchor[k] = k < count ? half_to_float(where->top[group + k]) : 0;
        t.top[k] = t.low[k] = 0;
    }
    NAME(joint_constants)(&t, 0, 1);
    for (int k = 0; k < count; k++) NAME(joint_moments)(s, h, where, stored, how, g + k, &t, k);
    for (int k = 0; k < count; k++) NAME(joint_ratios)(h, &t, k);
    NAME(joint_constants)(&t, (float)s->step, 0);
    if (next) {
        NAME(curved_tile) curved;
        if (how->dither) for (int k = 0; k < count; k++) NAME(joint_curved)(s, next, g + k, &t, &curved, k, 1);
        else for (int k = 0; k < count; k++) NAME(joint_curved)(s, next, g + k, &t, &curved, k, 0);
        for (int k = 0; k < count; k++) NAME(joint_encode)(s, h, where, how, coast, g + k, &t, &curved, k, 0);
    } else if (how->dither) for (int k = 0; k < count; k++) NAME(joint_encode)(s, h, where, how, coast, g + k, &t, 0, k, 1);
    else for (int k = 0; k < count; k++) NAME(joint_encode)(s, h, where, how, coast, g + k, &t, 0, k, 0);
    for (int k = 0; k < count; k++) {
        where->levels[group + k] = (uint8_t)t.entry[k];
        where->umax[group + k] = (uint16_t)(bits_of(t.umax[k]) >> 16);
        where->top[group + k] = float_to_half(t.anchor[k]);
    }
}

static __attribute__((noinline)) void NAME(joint_groups)(
    const segment *s, const hyper *h, const joint_planes *where, const options *how, float coast, int64_t g, int count) {
    NAME(joint_update)(s, h, where, 0, 0, how, coast, g, count);
}

static __attribute__((noinline)) void NAME(learned_groups)(
    const segment *s, const hyper *h, const joint_planes *where, const curves *bent, const options *how, float coast, int64_t g, int count) {
    NAME(joint_update)(s, h, where, &bent->stored, &bent->next, how, coast, g, count);
}

/* n <= GROUP elements of any types from group `g` of GROUP elements on, by way of fp32 masters on the stack. `bent`: NULL for `joint`. */
static __attribute__((noinline)) void NAME(joint_any)(
    const segment *s, const hyper *h, const joint_planes *where, const curves *bent, const options *how, float coast, int64_t g, int n) {
    const int64_t at = g * GROUP, element = s->start + at, group = element / JOINT;
    const int count = (n + JOINT - 1) / JOINT;
    float w[GROUP] = {0}, grad[GROUP] = {0};
    uint8_t low[GROUP] = {0}, high[GROUP] = {0};
    memcpy(low, where->low + element, (size_t)n);
    memcpy(high, where->high + element, (size_t)n);
    NAME(read_any)(s, where->correction, how->master_bits, at, n, w, grad);
    const segment local = {(int64_t)(intptr_t)w, (int64_t)(intptr_t)grad, 0, GROUP, s->index + at, s->step, FP32, FP32};
    const joint_planes buffers = {low, high, where->top + group, where->levels + group, where->umax + group, 0};
    const options plain = {0, how->dither, how->inv_scale};
    if (bent) NAME(learned_groups)(&local, h, &buffers, bent, &plain, coast, 0, count);
    else NAME(joint_groups)(&local, h, &buffers, &plain, coast, 0, count);
    memcpy(where->low + element, low, (size_t)n);
    memcpy(where->high + element, high, (size_t)n);
    NAME(write_any)(s, where->correction, how->master_bits, at, n, w);
}

/* As `run` in adamw.c: the groups [first, last) of GROUP elements, each two groups of `joint`. */
OP void NAME(run_either)(
    const segment *s, const hyper *h, const joint_planes *where, const curves *bent, const options *how, int64_t first, int64_t last) {
    const float coast = joint_coast(h->beta1, h->beta1_rest, s->step);
    const int64_t full = s->numel / GROUP < last ? s->numel / GROUP : last;
    int64_t g = first;
    if (NAME(joint_knows)(s, how->master_bits))
        for (; g < full; g += JOINT_TILE / 2) {
            const int count = full - g < JOINT_TILE / 2 ? 2 * (int)(full - g) : JOINT_TILE;
            if (bent) NAME(learned_groups)(s, h, where, bent, how, coast, 2 * g, count);
            else NAME(joint_groups)(s, h, where, how, coast, 2 * g, count);
        }
    g = g > full && full >= first ? full : g;
    for (; g < last; g++)
        NAME(joint_any)(s, h, where, bent, how, coast, g, (int)(s->numel - g * GROUP < GROUP ? s->numel - g * GROUP : GROUP));
}

static void NAME(run_joint)(const segment *s, const hyper *h, const planes *opaque, const options *how, int64_t first, int64_t last) {
    NAME(run_either)(s, h, (const joint_planes *)(const void *)opaque, 0, how, first, last);
}

static void NAME(run_learned)(const segment *s, const hyper *h, const planes *opaque, const options *how, int64_t first, int64_t last) {
    const learned_planes *where = (const learned_planes *)(const void *)opaque;
    const curves bent = curves_of((const uint16_t *)(intptr_t)where->tables[s - where->segments]);
    NAME(run_either)(s, h, &where->joint, &bent, how, first, last);
}
