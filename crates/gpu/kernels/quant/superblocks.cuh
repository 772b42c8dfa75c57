// Q4_K and Q5_K: 256 values in eight blocks of 32 with 6-bit scales and minima;
// value = scale * scales[b] * code - min_scale * mins[b]. A block's product is scaled by its 6 bits in f32, the f16
// scales are applied once per 256 columns, and the minima multiply the blocks' sums as a product of their own.
#pragma once
#include "quant/tile.cuh"

template <int BITS> struct SuperBlocks {
    static const int STEP = 256;
    struct Loaded {
        uint4 codes[2][2];  // (group, half)
        u32 high[2][2];
        uint4 header[2];
    };
    DEVICE_METHOD static Loaded load(const Part& part, long super, int lane) {
        Loaded l;
        for (int g = 0; g < 2; g++)
            for (int h = 0; h < 2; h++) {
                l.codes[g][h] = load_weights(part.codes + (super * 2 + g) * 1024 + h * 512 + lane * 16);
                if (BITS == 5) l.high[g][h] = *(const u32*)(part.high + (super * 2 + g) * 256 + h * 128 + lane * 4);
            }
        for (int h = 0; h < 2; h++) l.header[h] = load_weights(part.scales + super * 256 + (h * 8 + lane / 4) * 16);
        return l;
    }
    DEVICE_METHOD static void scales_of(const uint4& header, u32 scales[2], u32 mins[2]) {
        scales[0] = header.y & 0x3f3f3f3f;
        scales[1] = (header.y >> 2 & 0x30303030) | (header.w & 0x0f0f0f0f);
        mins[0] = header.z & 0x3f3f3f3f;
        mins[1] = (header.z >> 2 & 0x30303030) | (header.w >> 4 & 0x0f0f0f0f);
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const Loaded& l, const Columns<NT>& x, long step, int lane, float acc[NT][4]) {
        int t = lane % 4;
        u32 scales[2][2], mins[2][2];
        scales_of(l.header[0], scales[0], mins[0]);
        scales_of(l.header[1], scales[1], mins[1]);
        float sum[NT][4], m[NT][4];
        for (int nt = 0; nt < NT; nt++)
            for (int i = 0; i < 4; i++) sum[nt][i] = m[nt][i] = 0.0f;
#pragma unroll
        for (int block = 0; block < 8; block++) {
            u32 a[8];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 upper[4] = {0, 0, 0, 0};
                if (BITS == 5) upper_1(byte_of(l.high[block / 4][h], block % 4), upper);
                unpack_codes(word_of(l.codes[block / 4][h], block % 4), upper, OFFSET_0, a + h);
            }
            float scale0 = byte_as_f32(scales[0][block / 4], block % 4), scale1 = byte_as_f32(scales[1][block / 4], block % 4);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                float d[4] = {0, 0, 0, 0};
                mma_block(d, a, x.octet(nt, (int)step * 32 + block * 4 + t));
                add_scaled(sum[nt], d, scale0, scale1);
            }
        }
        // Minima t and t + 4 of both rows: 6 bits are an exact tf32.
        float a[4];
        for (int h = 0; h < 2; h++) {
            a[h] = (float)(mins[h][0] >> (8 * t) & 0xff);
            a[h + 2] = (float)(mins[h][1] >> (8 * t) & 0xff);
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            mma_tf32(m[nt], a, x.sum(nt, (int)step * 8 + t), x.sum(nt, (int)step * 8 + t + 4));
            for (int h = 0; h < 2; h++) {
                u32 both = l.header[h].x;
                acc[nt][2 * h] = __fmaf_rn(f16_to_f32(both & 0xffff), sum[nt][2 * h], acc[nt][2 * h]);
                acc[nt][2 * h] = __fmaf_rn(-f16_to_f32(both >> 16), m[nt][2 * h] + m[nt][2 * h + 1], acc[nt][2 * h]);
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
