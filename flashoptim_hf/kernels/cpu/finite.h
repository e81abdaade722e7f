/* Whether gradients are finite and small enough, at the speed of memory: included by adamw.c, once for each instruction set. Loops that every
 * compiler turns into vectors: without its sign, a number is the larger the larger its bits are, and NaN the largest. */
static int NAME(too_large)(const void *x, int64_t n, int type) {
    if (type == FP32) {
        const int32_t *bits = (const int32_t *)x;
        int32_t top = 0;
        for (int64_t i = 0; i < n; i++) {
            const int32_t magnitude = bits[i] & 0x7FFFFFFF;
            top = magnitude > top ? magnitude : top;
        }
        return top >= 0x5E800000; /* 2^62 */
    }
    const int16_t *bits = (const int16_t *)x;
    int16_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        const int16_t magnitude = (int16_t)(bits[i] & 0x7FFF);
        top = magnitude > top ? magnitude : top;
    }
    return top >= (type == BF16 ? 0x5E80 : 0x7C00); /* 2^62, or infinity */
}
