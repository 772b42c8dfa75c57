// Pages of the K/V cache of one layer, compiled for one storage type (KV_BYTES, KV_BF16): (page, K then V, head, token,
// dim). 8-bit floats of a head share a power of two: behind the codes of a page's tokens lie their exponents.
#pragma once
#include "float8.cuh"

#define KV_F8 (KV_BYTES == 1)
#if KV_F8
typedef u8 Stored;
#elif KV_BYTES == 4
typedef float Stored;
DEVICE float widened(Stored v) { return v; }
DEVICE Stored stored(float v) { return v; }
#elif KV_BF16
typedef u16 Stored;
DEVICE float widened(Stored v) { return bf16_to_f32(v); }
DEVICE Stored stored(float v) { return f32_to_bf16(v); }
#else
typedef u16 Stored;
DEVICE float widened(Stored v) { return f16_to_f32(v); }
DEVICE Stored stored(float v) { return f32_to_f16(v); }
#endif

#define PAGE_TOKENS 32
// What a head's keys, or values, take in a page.
DEVICE int head_values(int dim) { return PAGE_TOKENS * (KV_F8 ? dim + 1 : dim); }
// The first value of a head's keys (values: `v` is 1) in a page, token 0.
DEVICE long page_values(int page, int v, int head, int heads, int dim) {
    return (((long)page * 2 + v) * heads + head) * head_values(dim);
}

#if KV_F8
// One head's keys or values of a token, by a warp, to where the head's begin in the page.
DEVICE void store_head(Stored* to, int token, const float* values, int dim, int lane) {
    u32 most = 0;
    for (int i = lane; i < dim; i += WARP) most = max(most, __float_as_uint(values[i]) & 0x7fffffff);
    const u32 exponent = float8_exponent(warp_max(most));
    for (int i = lane; i < dim; i += WARP) to[token * dim + i] = float8_code(values[i], exponent);
    if (lane == 0) to[PAGE_TOKENS * dim + token] = (u8)exponent;
}
#endif
