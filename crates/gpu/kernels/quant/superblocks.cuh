// Q4_K and Q5_K: 256 values in eight blocks of 32 with 6-bit scales and minima;
// value = scale * scales[b] * code - min_scale * mins[b]. A block's product is scaled by its 6 bits in f32, the f16
// scales are applied once per 128 columns, and the minima multiply the blocks' sums as a product of their own.
#pragma once
#include "quant/tile.cuh"

template <int BITS> struct SuperBlocks {
    static const int STEP = 256;
    static const bool FLOATS = false, SUMS = true;
    typedef Staged<2048, BITS == 5 ? 512 : 0, 256, 0> Bytes;

    DEVICE_METHOD static void scales_of(const uint4& header, u32 scales[2], u32 mins[2]) {
        scales[0] = header.y & 0x3f3f3f3f;
        scales[1] = (header.y >> 2 & 0x30303030) | (header.w & 0x0f0f0f0f);
        mins[0] = header.z & 0x3f3f3f3f;
        mins[1] = (header.z >> 2 & 0x30303030) | (header.w >> 4 & 0x0f0f0f0f);
    }
    template <class X> DEVICE_METHOD static void multiply(const u8* staged, const X& x, int step, int lane, float acc[X::N]) {
        u32 scales[2][2], mins[2][2];
        float scale[2], least[2];
        for (int h = 0; h < 2; h++) {
            const uint4 header = *(const uint4*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16);
            scales_of(header, scales[h], mins[h]);
            scale[h] = f16_to_f32(header.x & 0xffff);
            least[h] = -f16_to_f32(header.x >> 16);
        }
        // The minimum of block t as f16, twice: in the low bits of 1024.
        const u32 selector = 0x4040 + lane % 4 * 0x0101;
        // Rolled up: the code is there once.
#pragma unroll 1
        for (int group = 0; group < 2; group++) {
            const u32 scales_now[2] = {group ? scales[0][1] : scales[0][0], group ? scales[1][1] : scales[1][0]};
            const u32 mins_now[2] = {group ? mins[0][1] : mins[0][0], group ? mins[1][1] : mins[1][0]};
            uint4 codes[2];
            u32 high[2] = {0, 0};
            for (int h = 0; h < 2; h++) {
                codes[h] = *(const uint4*)(staged + group * 1024 + h * 512 + lane * 16);
                if (BITS == 5) high[h] = *(const u32*)(staged + Bytes::HIGH + group * 256 + h * 128 + lane * 4);
            }
            float sum[X::N], minima[X::N];
            for (int n = 0; n < X::N; n++) sum[n] = 0.0f;
#pragma unroll
            for (int block = 0; block < 4; block++) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 word = word_of(codes[i % 2], block);
                    a[i] = BITS == 5 ? five_bits(word, i / 2, high[i % 2], 2 * block + i / 2, 0)
                                     : i / 2 ? high_nibbles(word) : low_nibbles(word);
                }
                x.block_32(step * 2 + group, block, a, byte_as_f32(scales_now[0], block),
                           byte_as_f32(scales_now[1], block), sum);
            }
            u32 m[2];
            for (int h = 0; h < 2; h++) m[h] = add_f16x2(__byte_perm(mins_now[h], 0x64646464, selector), 0xe400e400);
            x.minima(step * 2 + group, m[0], m[1], minima);
            for (int n = 0; n < X::N; n++) {
                const int h = X::half_of(n);
                const float all = __fmaf_rn(least[h], minima[n], __fmul_rn(scale[h], sum[n]));
                acc[n] = __fmaf_rn(x.scale(n, step * 2 + group), all, acc[n]);
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
