// Q4_0, Q4_1, Q5_0 and Q5_1: 32 values share an f16 scale, and where there is one an f16 minimum;
// value = scale * (code - OFFSET) + min, rounded once.
//
// Without minima codes are the low bits of an f16 (`two_low_codes`). Scales are kept times a power of two for the part,
// 2^P, that brings the largest below 2^15; a value comes out times 2^(P - 22), the largest below 2^-3. `mins` holds the
// largest scale's bits and 2^(22 - P).
#pragma once
#include "quant/tile.cuh"

template <int BITS, int OFFSET, bool MINS> struct Blocks32 {
    static const int STEP = 128;
    static const bool FIVE = BITS == 5;
    typedef Staged<1024, FIVE ? 256 : 0, 128, MINS ? 128 : 0> Bytes;

    DEVICE_METHOD static float unscale(const Part& part) { return MINS ? 1.0f : ((const float*)part.mins)[1]; }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        uint4 codes[2];
        u32 high[2] = {0, 0};
        uint2 scales[2], mins[2];
        for (int h = 0; h < 2; h++) {
            codes[h] = *(const uint4*)(staged + h * 512 + lane * 16);
            if (FIVE) high[h] = *(const u32*)(staged + Bytes::HIGH + h * 128 + lane * 4);
            int row = h * 8 + lane / 4;
            scales[h] = *(const uint2*)(staged + Bytes::SCALES + row * 8);
            if (MINS) mins[h] = *(const uint2*)(staged + Bytes::MINS + row * 8);
        }
        // Two blocks at a time.
#pragma unroll
        for (int blocks = 0; blocks < 4; blocks += 2) {
            // Of even pairs and of odd ones; and what is added.
            u32 by[2][2], more[2];
            for (int h = 0; h < 2; h++) {
                by[0][h] = by[1][h] = blocks ? scales[h].y : scales[h].x;
                if (MINS) {
                    more[h] = blocks ? mins[h].y : mins[h].x;
                } else {
                    by[1][h] = mul_f16x2(by[0][h], 0x2c002c00);
                    more[h] = mul_f16x2(by[0][h], 0x80008000u + OFFSET * 0x00040004u);  // times -OFFSET * 2^-22
                }
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int block = blocks + k / 2;
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int h = i % 2, p = k % 2 * 2 + i / 2;
                    const u32 word = word_of(codes[h], block);
                    const u32 q = MINS ? two_codes<FIVE>(word, high[h], block, p) : two_low_codes<FIVE>(word, high[h], block, p);
                    a[i] = fma_f16x2(q, broadcast_f16(by[p % 2][h], k / 2), broadcast_f16(more[h], k / 2));
                }
                use(block * 2 + k % 2, a);
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        int code = (int)(MINS ? nibble_at(part, p) : rotated_nibble_at(part, p)) - OFFSET;
        if (FIVE) code += 16 * (int)upper_bit_at(part, p);
        const float scale = block_f16(part.scales, p.tile, row, p.block);
        if (MINS) return __fmul_rn(scale, (float)code) + block_f16(part.mins, p.tile, row, p.block);
        // As it is stored.
        return __fmul_rn(scale * (unscale(part) * 0x1p-22f), (float)code);
    }
};
