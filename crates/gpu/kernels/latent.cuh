// What the kernels of attention over latent rows on tensor cores share. Compiled for one width of rows (LATENT + TURNED) and
// storage type, and for ROWS queries of a block: query i of a sequence's is head i % heads of the block's heads, of token
// i / heads.
//
// Queries are f16 numbers, scaled by a power of two that brings a query's largest into [2^13, 2^14), and so are weights;
// over bf16 rows both are two bf16 numbers (hi and lo), for one alone would be further off than the bound.
//
// Places are cut into spans of SPAN, aligned to absolute places. A span has an online softmax of its own, and spans are
// merged in order: by the block that has all of a token's (`spans` is 0), or by latent_merge where each has its own. So a
// token's result has the same bits whichever tokens are computed beside it. What a query does not see has a weight of
// zero; what nobody of the block sees is zeros, so that a value that is not finite stays in its sequence.
#pragma once
#include "kv.cuh"

#define SPAN 1024
#define LOG2_E 1.4426950408889634f
#define WIDTH (LATENT + TURNED)
#define K_STEPS ((WIDTH + 15) / 16)
#define PARTS (KV_BF16 ? 2 : 1)
// Rows of keys and queries in shared memory, swizzled or padded: eight rows at one column are in different banks.
#define ROW_BYTES (K_STEPS * 32)
#define SWIZZLED (ROW_BYTES % 128 == 0)
#define STRIDE (SWIZZLED ? ROW_BYTES : ROW_BYTES + 16)

struct Latent {
    int heads, each;         // query heads; columns of a head's share of `queries`
    int group, window;       // of pages; a window of 0 sees all
    float scale;
    int block_heads, tokens;  // heads of a block, and its tokens
    int first;               // the first token of the launch
    int spans;               // of each token where a block has one of them, else 0
    int limit;               // tokens of the launch at most
    float* partials;         // (token of the launch, head, span, LATENT + 2)
};

DEVICE int first_seen(const Latent& a, int place) { return a.window ? max(place + 1 - a.window, 0) : 0; }
// Where 16 bytes of a row lie. For wgmma (HALVES) 64 columns of all 64 rows lie before the next 64.
#ifndef HALVES
#define HALVES 0
#endif
DEVICE u32 at_row(int row, int byte) {
    if (HALVES) return byte / 128 * (64 * 128) + row * 128 + (byte % 128 ^ (row & 7) << 4);
    return row * STRIDE + (SWIZZLED ? byte ^ (row & 7) << 4 : byte);
}
// The factor of a sum whose maximum was `own` where the maximum is now `all`; maxima are in units of log2.
DEVICE float rescale_of(float own, float all) { return own == -INFINITY_F ? 0.0f : exp2_approx(own - all); }
DEVICE float merged_sum(float sum, float rescale, float later_sum, float later_rescale) {
    return __fmaf_rn(later_sum, later_rescale, __fmul_rn(sum, rescale));
}

#if KV_BF16
DEVICE void rounded_pair(float x, float y, u32 parts[PARTS]) {
    const u16 a = f32_to_bf16(x), b = f32_to_bf16(y);
    parts[0] = pair(a, b);
    parts[1] = pair(f32_to_bf16(x - bf16_to_f32(a)), f32_to_bf16(y - bf16_to_f32(b)));
}
#else
DEVICE void rounded_pair(float x, float y, u32 parts[PARTS]) { parts[0] = pack_f16x2(x, y); }
#endif

// Brings a query into shared memory; the factor that its scores are multiplied by goes to `factors`. A warp.
DEVICE void put_query(const Latent& a, u8* to, float* factors, int row, const float* absorbed, const float* turned, int lane) {
    constexpr int PAIRS = (K_STEPS * 8 + WARP - 1) / WARP;
    auto value = [&](int i) { return i < LATENT ? load_l2(absorbed + i) : i < WIDTH ? load_l2(turned + (i - LATENT)) : 0.0f; };
    float values[PAIRS][2];
    u32 most = 0;
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            values[n][e] = value((n * WARP + lane) * 2 + e);
            most = max(most, __float_as_uint(values[n][e]) & 0x7fffffff);
        }
    // Zeros, infinity and NaN are not scaled; a tiny maximum is scaled as far as a power of two goes.
    const int exponent = warp_max(most) >> 23;
    const int up = exponent == 0 || exponent == 255 ? 127 : min(267 - exponent, 253);
    const float scale = __uint_as_float((u32)up << 23), inverse = __uint_as_float((u32)(254 - up) << 23);
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int byte = (n * WARP + lane) * 4;
        if (byte >= ROW_BYTES) break;
        u32 parts[PARTS];
        rounded_pair(__fmul_rn(values[n][0], scale), __fmul_rn(values[n][1], scale), parts);
#pragma unroll
        for (int p = 0; p < PARTS; p++) *(u32*)(to + p * ROWS * STRIDE + at_row(row, byte & ~15) + (byte & 15)) = parts[p];
    }
    if (lane == 0) factors[row] = __fmul_rn(__fmul_rn(a.scale, LOG2_E), inverse);
}
