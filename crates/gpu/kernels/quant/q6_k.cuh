// Q6_K: 256 values in sixteen blocks of 16 with 8-bit scales; value = (scale * scales[b]) * (code - 32), the product of the
// scales rounded to f16, then the whole. An octet lies in one block.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 256;
    typedef Staged<2048, 1024, 256, 32> Bytes;

    DEVICE_METHOD static float unscale(const Part&) { return 1.0f; }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        u32 scale[2];
        for (int h = 0; h < 2; h++) scale[h] = *(const u16*)(staged + Bytes::MINS + (h * 8 + lane / 4) * 2) * 0x00010001u;
        const u32 second = lane % 4 / 2;  // which of a block's two this octet has
        // Rolled up: the code is there once.
#pragma unroll 1
        for (int group = 0; group < 2; group++) {
            uint4 codes[2];
            uint2 high[2], scales[2];
            for (int h = 0; h < 2; h++) {
                codes[h] = *(const uint4*)(staged + group * 1024 + h * 512 + lane * 16);
                high[h] = *(const uint2*)(staged + Bytes::HIGH + group * 512 + h * 256 + lane * 8);
                scales[h] = *(const uint2*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16 + group * 8);
                scales[h].x ^= 0x80808080;
                scales[h].y ^= 0x80808080;
            }
#pragma unroll
            for (int block = 0; block < 4; block++) {
                u32 by[2];
                for (int h = 0; h < 2; h++) {
                    const u32 above = byte_above_1024(block < 2 ? scales[h].x : scales[h].y, block % 2 * 2 + second);
                    by[h] = mul_f16x2(add_f16x2(above, 0xe480e480), scale[h]);
                }
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    u32 a[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int h = i % 2;
                        const u32 upper = block < 2 ? high[h].x : high[h].y;
                        a[i] = mul_f16x2(two_codes<2, 32>(word_of(codes[h], block), upper, block % 2, k * 2 + i / 2), by[h]);
                    }
                    use(group * 8 + block * 2 + k, a);
                }
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        u32 word = *(const u32*)(part.high + p.tile * 512 + p.half * 256 + p.lane * 8 + p.block / 2 * 4);
        u32 upper = word >> (16 * (p.i % 2) + 8 * (p.block % 2) + 2 * (p.i / 2)) & 3;
        int code = (int)(nibble_at(part, p) | upper << 4) - 32;
        long super = p.tile / 2;
        float scale = f16_to_f32(*(const u16*)(part.mins + super * 32 + row % 16 * 2));
        int sub = (signed char)part.scales[super * 256 + row % 16 * 16 + column % 256 / 16];
        return __fmul_rn(__fmul_rn(scale, (float)sub), (float)code);
    }
};
