// Q4_K and Q5_K: 256 values in eight blocks of 32 with 6-bit scales and minima;
// value = (scale * scales[b]) * code - min_scale * mins[b]: both products rounded to f16, then the whole once.
//
// Codes are the low bits of an f16 (`two_low_codes`), with nothing to take off. What that is too small by is made good
// by the scales, which are kept times a power of two for the part, 2^P, that brings the largest below 64 (minima,
// negated, 2^6 more); so a value comes out times 2^(P - 18), the largest below 2^-2. What is less than 2^-12 of the
// largest that a part could hold has fewer bits, 2^-23 of it. Beside `mins` lie the largest scale's bits and 2^(18 -
// P).
#pragma once
#include "quant/tile.cuh"

template <int BITS> struct SuperBlocks {
    static const int STEP = 256;
    typedef Staged<2048, BITS == 5 ? 512 : 0, 256, 0> Bytes;

    DEVICE_METHOD static float unscale(const Part& part) { return ((const float*)part.mins)[1]; }

    DEVICE_METHOD static void scales_of(const uint4& header, u32 scales[2], u32 mins[2]) {
        scales[0] = header.y & 0x3f3f3f3f;
        scales[1] = (header.y >> 2 & 0x30303030) | (header.w & 0x0f0f0f0f);
        mins[0] = header.z & 0x3f3f3f3f;
        mins[1] = (header.z >> 2 & 0x30303030) | (header.w >> 4 & 0x0f0f0f0f);
    }
    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        u32 scales[2][2], mins[2][2];
        // Scales, and what the 1024 below six bits are times them, which is exact: a product takes one instruction.
        u32 scale[2], least[2], scale_less[2];
        for (int h = 0; h < 2; h++) {
            const uint4 header = *(const uint4*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16);
            scales_of(header, scales[h], mins[h]);
            scale[h] = broadcast_f16(header.x, 0);
            least[h] = broadcast_f16(header.x, 1);
            scale_less[h] = mul_f16x2(scale[h], 0xe400e400);
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
            // Two blocks at a time.
#pragma unroll
            for (int blocks = 0; blocks < 4; blocks += 2) {
                u32 by[2][2], min[2];
                for (int h = 0; h < 2; h++) {
                    const u32 two_scales = __byte_perm(scales[h][0], 0x64646464, blocks ? 0x4342 : 0x4140);
                    by[1][h] = fma_f16x2(two_scales, scale[h], scale_less[h]);
                    by[0][h] = mul_f16x2(by[1][h], 0x4c004c00);
                    min[h] = mul_f16x2(__byte_perm(mins[h][0], 0, blocks ? 0x4342 : 0x4140), least[h]);
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int block = blocks + k / 2;
                    u32 a[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int h = i % 2, p = k % 2 * 2 + i / 2;
                        const u32 q = two_low_codes<BITS == 5>(word_of(codes[h], block), high[h], block, p);
                        a[i] = fma_f16x2(q, broadcast_f16(by[p % 2][h], k / 2), broadcast_f16(min[h], k / 2));
                    }
                    use(group * 8 + block * 2 + k % 2, a);
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
        int code = (int)rotated_nibble_at(part, p);
        if (BITS == 5) code += 16 * (int)upper_bit_at(part, p);
        uint4 header = *(const uint4*)(part.scales + (p.tile / 2) * 256 + row % 16 * 16);
        u32 scales[2], mins[2];
        scales_of(header, scales, mins);
        const int block = column % 256 / 32;
        // Both as they are stored.
        const float power = unscale(part) * 0x1p-18f, d = f16_to_f32(header.x & 0xffff) * power;
        const float d_min = f16_to_f32(header.x >> 16) * (power * -0x1p-6f);
        const float scale = __fmul_rn(d, (float)byte_of(scales[block / 4], block % 4));
        const float least = __fmul_rn(d_min, (float)byte_of(mins[block / 4], block % 4));
        return __fmul_rn(scale, (float)code) - least;
    }
};
