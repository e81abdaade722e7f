/* Whether gradients are finite and small enough, at the speed of memory: included by adamw.c, once for each instruction set. Loops that every
 * compiler turns into vectors: without its sign, a number is the larger the larger its bits are, and NaN the largest. Four places are read
 * in turn, since memory gives one thread several streams sooner than one. */
#define LARGEST(type, mask) \
    const type *bits = (const type *)x; \
    enum { BLOCK = 1024 / sizeof(type) }; \
    const int64_t part = n / 4 / BLOCK * BLOCK; \
    type top = 0; \
    for (int64_t i = 0; i < part; i += BLOCK) \
        for (int64_t q = i; q < 4 * part; q += part) \
            for (int64_t j = q; j < q + BLOCK; j++) { \
                const type magnitude = (type)(bits[j] & mask); \
                top = magnitude > top ? magnitude : top; \
            } \
    for (int64_t i = 4 * part; i < n; i++) { \
        const type magnitude = (type)(bits[i] & mask); \
        top = magnitude > top ? magnitude : top; \
    }

static int NAME(too_large)(const void *x, int64_t n, int type) {
    if (type == FP32) {
        LARGEST(int32_t, 0x7FFFFFFF)
        return top >= 0x5E800000; /* 2^62 */
    }
    LARGEST(int16_t, 0x7FFF)
    return top >= (type == BF16 ? 0x5E80 : 0x7C00); /* 2^62, or infinity */
}
#undef LARGEST
