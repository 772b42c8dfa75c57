// Q4_0, Q4_1, Q5_0 and Q5_1: 32 values share an f16 scale, and where there is one an f16 minimum;
// value = scale * (code - OFFSET) + min, rounded once.
#pragma once
#include "quant/tile.cuh"

template <int BITS, int OFFSET, bool MINS> struct Blocks32 {
    static const int STEP = 128;
    typedef Staged<1024, BITS == 5 ? 256 : 0, 128, MINS ? 128 : 0> Bytes;

    DEVICE_METHOD static float unscale(const Part&) { return 1.0f; }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        uint4 codes[2];
        u32 high[2] = {0, 0};
        uint2 scales[2], mins[2];
        for (int h = 0; h < 2; h++) {
            codes[h] = *(const uint4*)(staged + h * 512 + lane * 16);
            if (BITS == 5) high[h] = *(const u32*)(staged + Bytes::HIGH + h * 128 + lane * 4);
            int row = h * 8 + lane / 4;
            scales[h] = *(const uint2*)(staged + Bytes::SCALES + row * 8);
            if (MINS) mins[h] = *(const uint2*)(staged + Bytes::MINS + row * 8);
        }
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 scale[2], min[2];
            for (int h = 0; h < 2; h++) {
                scale[h] = twice(block < 2 ? scales[h].x : scales[h].y, block % 2);
                if (MINS) min[h] = twice(block < 2 ? mins[h].x : mins[h].y, block % 2);
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int h = i % 2;
                    const u32 q = two_codes<BITS - 4, OFFSET>(word_of(codes[h], block), high[h], block, k * 2 + i / 2);
                    a[i] = MINS ? fma_f16x2(q, scale[h], min[h]) : mul_f16x2(q, scale[h]);
                }
                use(block * 2 + k, a);
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        int code = (int)nibble_at(part, p) - OFFSET;
        if (BITS == 5) code += 16 * (int)upper_bit_at(part, p);
        float scaled = __fmul_rn(block_f16(part.scales, p.tile, row, p.block), (float)code);
        return MINS ? scaled + block_f16(part.mins, p.tile, row, p.block) : scaled;
    }
};
