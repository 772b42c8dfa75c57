// The pages of one layer, for one way of storing (KV_BYTES, KV_BF16): (page, K then V, head, token, dim).
#pragma once
#include "prelude.cuh"

#if KV_BYTES == 4
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
// The first value of a head's keys (values: `v` is 1) in a page, token 0.
DEVICE long page_values(int page, int v, int head, int heads, int dim) {
    return (((long)page * 2 + v) * heads + head) * PAGE_TOKENS * dim;
}
