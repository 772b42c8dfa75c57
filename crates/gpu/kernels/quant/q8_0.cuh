// Q8_0: 32 values share an f16 scale; value = scale * code, rounded once.
//
// Codes are kept 128 higher, and are whole numbers times 2^-24 as those of superblocks.cuh are: the low bits of an f16.
// Scales are kept times a power of two for the part, 2^P, that brings the largest below 2^15; a value comes out times
// 2^(P - 24), the largest below 2^-2. `mins` holds the largest scale's bits and 2^(24 - P).
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 128;
    typedef Staged<2048, 0, 128, 0> Bytes;

    DEVICE_METHOD static float unscale(const Part& part) { return ((const float*)part.mins)[1]; }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        uint2 scales[2];
        for (int h = 0; h < 2; h++) scales[h] = *(const uint2*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 8);
        // Rolled up: the code is there once.
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            uint4 codes[2];
            u32 less[2];
            for (int h = 0; h < 2; h++) {
                codes[h] = *(const uint4*)(staged + half * 1024 + h * 512 + lane * 16);
                less[h] = mul_f16x2(scales[h].x, 0x80808080);  // times -128 * 2^-24
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int h = i % 2;
                    const u32 two = __byte_perm(word_of(codes[h], k), 0, i / 2 ? 0x4342 : 0x4140);
                    a[i] = fma_f16x2(two, broadcast_f16(scales[h].x, k / 2), broadcast_f16(less[h], k / 2));
                }
                use(half * 4 + k, a);
            }
            for (int h = 0; h < 2; h++) scales[h].x = scales[h].y;
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        long at = p.tile * 2048 + p.block / 2 * 1024 + p.half * 512 + p.lane * 16 + p.block % 2 * 8 + p.i;
        const float scale = block_f16(part.scales, p.tile, row, p.block) * (unscale(part) * 0x1p-24f);
        return scale * (float)((int)part.codes[at] - 128);
    }
};
