// Q4_K and Q5_K: 256 values in eight blocks of 32 with 6-bit scales and minima;
// value = scale * scales[b] * code - min_scale * mins[b]. A block's product is scaled by its 6 bits in f32, the f16
// scales are applied once per 256 columns, and the minima multiply the blocks' sums as a product of their own.
#pragma once
#include "quant/tile.cuh"

template <int BITS> struct SuperBlocks {
    static const int STEP = 256;
    static const int BLOCKS = 1;  // of 512 threads on a multiprocessor: what its registers allow without spilling
    typedef Staged<2048, BITS == 5 ? 512 : 0, 256, 0> Bytes;

    DEVICE_METHOD static void scales_of(const uint4& header, u32 scales[2], u32 mins[2]) {
        scales[0] = header.y & 0x3f3f3f3f;
        scales[1] = (header.y >> 2 & 0x30303030) | (header.w & 0x0f0f0f0f);
        mins[0] = header.z & 0x3f3f3f3f;
        mins[1] = (header.z >> 2 & 0x30303030) | (header.w >> 4 & 0x0f0f0f0f);
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const u8* staged, const Columns<NT>& x, int step, int lane, float acc[NT][4]) {
        int t = lane % 4;
        u32 scales[2][2];
        for (int h = 0; h < 2; h++) {
            u32 mins[2];
            scales_of(*(const uint4*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16), scales[h], mins);
        }
        float sum[NT][4];
        for (int nt = 0; nt < NT; nt++)
            for (int i = 0; i < 4; i++) sum[nt][i] = 0.0f;
#pragma unroll
        for (int group = 0; group < 2; group++) {
            uint4 codes[2];
            u32 high[2];
            for (int h = 0; h < 2; h++) {
                codes[h] = *(const uint4*)(staged + group * 1024 + h * 512 + lane * 16);
                if (BITS == 5) high[h] = *(const u32*)(staged + Bytes::HIGH + group * 256 + h * 128 + lane * 4);
            }
#pragma unroll
            for (int block = 0; block < 4; block++) {
                u32 a[8];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 word = word_of(codes[h], block);
                    u32 first = low_nibbles(word), second = high_nibbles(word);
                    if (BITS == 5) {
                        first |= fifth_bits(high[h], 2 * block);
                        second |= fifth_bits(high[h], 2 * block + 1);
                    }
                    widen(first, a + h);
                    widen(second, a + 4 + h);
                }
                float scale0 = byte_as_f32(scales[0][group], block), scale1 = byte_as_f32(scales[1][group], block);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    const int at = step * 8 + group * 4 + block;
                    float d[4];
                    mma_block(d, a, x.octet(nt, at * 4 + t));
                    add_scaled(sum[nt], d, scale0, scale1);
                }
            }
        }
        // Minima t and t + 4 of both rows, and the scales for what the codes carry too much: 6 bits are an exact tf32. The
        // headers are read again: to keep them would take registers from the loads above.
        float a[4], offset[4];
        u32 both[2];
        for (int h = 0; h < 2; h++) {
            u32 mins[2];
            uint4 header = load_again(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16);
            both[h] = header.x;
            scales_of(header, scales[h], mins);
            for (int i = 0; i < 2; i++) {
                a[2 * i + h] = (float)(mins[i] >> (8 * t) & 0xff);
                offset[2 * i + h] = -(float)CODE_OFFSET * (float)(scales[h][i] >> (8 * t) & 0xff);
            }
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float low = x.sum_32(nt, step * 8 + t), high = x.sum_32(nt, step * 8 + t + 4);
            float m[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_tf32(sum[nt], offset, low, high);
            mma_tf32(m, a, low, high);
            for (int h = 0; h < 2; h++) {
                acc[nt][2 * h] = __fmaf_rn(f16_to_f32(both[h] & 0xffff), sum[nt][2 * h] + sum[nt][2 * h + 1], acc[nt][2 * h]);
                acc[nt][2 * h] = __fmaf_rn(-f16_to_f32(both[h] >> 16), m[2 * h] + m[2 * h + 1], acc[nt][2 * h]);
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
