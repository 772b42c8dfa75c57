// Q4_K and Q5_K: 256 values in eight blocks of 32 with 6-bit scales and minima;
// value = (scale * scales[b]) * code - min_scale * mins[b]: both products rounded to f16, then the whole once. Scales of 64
// and more, of weights that f16 does not hold, become NaN.
#pragma once
#include "quant/tile.cuh"

template <int BITS> struct SuperBlocks {
    static const int STEP = 256;
    typedef Staged<2048, BITS == 5 ? 512 : 0, 256, 0> Bytes;

    DEVICE_METHOD static float unscale(const Part&) { return 1.0f; }

    DEVICE_METHOD static void scales_of(const uint4& header, u32 scales[2], u32 mins[2]) {
        scales[0] = header.y & 0x3f3f3f3f;
        scales[1] = (header.y >> 2 & 0x30303030) | (header.w & 0x0f0f0f0f);
        mins[0] = header.z & 0x3f3f3f3f;
        mins[1] = (header.z >> 2 & 0x30303030) | (header.w >> 4 & 0x0f0f0f0f);
    }
    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        u32 scales[2][2], mins[2][2];
        // Scales, and what the 1024 below six bits are times them, which is exact: a product takes one instruction.
        u32 scale[2], least[2], scale_less[2], least_less[2];
        for (int h = 0; h < 2; h++) {
            const uint4 header = *(const uint4*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16);
            scales_of(header, scales[h], mins[h]);
            scale[h] = twice(header.x, 0);
            least[h] = twice(header.x, 1) ^ 0x80008000;
            scale_less[h] = mul_f16x2(scale[h], 0xe400e400);
            least_less[h] = mul_f16x2(least[h], 0xe400e400);
        }
        // Rolled up: the code is there once.
#pragma unroll 1
        for (int group = 0; group < 2; group++) {
            uint4 codes[2];
            u32 high[2] = {0, 0};
            for (int h = 0; h < 2; h++) {
                codes[h] = *(const uint4*)(staged + group * 1024 + h * 512 + lane * 16);
                if (BITS == 5) high[h] = *(const u32*)(staged + Bytes::HIGH + group * 256 + h * 128 + lane * 4);
            }
#pragma unroll
            for (int block = 0; block < 4; block++) {
                u32 by[2], min[2];
                for (int h = 0; h < 2; h++) {
                    by[h] = fma_f16x2(byte_above_1024(scales[h][0], block), scale[h], scale_less[h]);
                    min[h] = fma_f16x2(byte_above_1024(mins[h][0], block), least[h], least_less[h]);
                }
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    u32 a[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int h = i % 2;
                        const u32 q = two_codes<BITS - 4, 0>(word_of(codes[h], block), high[h], block, k * 2 + i / 2);
                        a[i] = fma_f16x2(q, by[h], min[h]);
                    }
                    use(group * 8 + block * 2 + k, a);
                }
            }
            for (int h = 0; h < 2; h++) {
                scales[h][0] = scales[h][1];
                mins[h][0] = mins[h][1];
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        int code = (int)nibble_at(part, p);
        if (BITS == 5) code += 16 * (int)upper_bit_at(part, p);
        uint4 header = *(const uint4*)(part.scales + (p.tile / 2) * 256 + row % 16 * 16);
        u32 scales[2], mins[2];
        scales_of(header, scales, mins);
        int block = column % 256 / 32;
        float scale = __fmul_rn(f16_to_f32(header.x & 0xffff), (float)byte_of(scales[block / 4], block % 4));
        float least = __fmul_rn(f16_to_f32(header.x >> 16), (float)byte_of(mins[block / 4], block % 4));
        return __fmul_rn(scale, (float)code) - least;
    }
};
