// Activations split in two halves for the matrix instruction: x = high + rest, with 22 bits in f16 and 16 in bf16.
//
// f16 has little range, so a row is first divided by a power of two that brings its largest value into 512..1024; that
// is exact, and `factors` takes it back at the end. A row with NaN or infinity is not scaled and stays broken.
#pragma once
#include "prelude.cuh"

struct Split {
    u8* x;
    u8* sums;
    float* factors;
    int bf16, padded;  // which halves; columns rounded up to 128
};

// The power of two for a row whose largest magnitude has these bits.
DEVICE float split_scale(u32 largest, int bf16) {
    if (bf16 || largest == 0 || largest >= 0x7f800000) return 1.0f;
    int exponent = max((int)(largest >> 23) - 127, -100);
    return __uint_as_float((u32)(9 - exponent + 127) << 23);
}

// Eight values of a row into their octet; the four lanes of 32 columns leave their sum too. All lanes of a warp take
// part. `scale` is the row's.
DEVICE void split_octet(const Split& out, long row, int octet, const float v[8], float scale) {
    u32 high[4], rest[4];
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        u16 h[2], r[2];
        for (int j = 0; j < 2; j++) {
            float value = v[2 * i + j] * scale;
            sum += value;
            h[j] = out.bf16 ? f32_to_bf16(value) : f32_to_f16(value);
            float left = value - (out.bf16 ? bf16_to_f32(h[j]) : f16_to_f32(h[j]));
            r[j] = out.bf16 ? f32_to_bf16(left) : f32_to_f16(left);
        }
        high[i] = pair(h[0], h[1]);
        rest[i] = pair(r[0], r[1]);
    }
    bool inside = octet * 8 < out.padded;
    if (inside) {
        u8* to = out.x + row * out.padded * 4 + octet * 32;
        *(uint4*)to = make_uint4(high[0], high[1], high[2], high[3]);
        *(uint4*)(to + 16) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (inside && octet % 4 == 0) {
        // Blocks 2p and 2p + 1 lie together: high, high, rest, rest.
        int block = octet / 4;
        u16 h = f32_to_f16(sum);
        u16* to = (u16*)(out.sums + row * (out.padded / 8) + block / 2 * 8) + block % 2;
        to[0] = h;
        to[2] = f32_to_f16(sum - f16_to_f32(h));
    }
}
