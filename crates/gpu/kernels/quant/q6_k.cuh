// Q6_K: 256 values in sixteen blocks of 16 with 8-bit scales; value = scale * scales[b] * (code - 32). A lane holds four
// values of each 16, so that one step of the matrix instruction is one block, scaled in f32.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 256;
    static const int BLOCKS = 1;  // of 512 threads on a multiprocessor: what its registers allow without spilling
    typedef Staged<2048, 1024, 256, 32> Bytes;

    // A signed byte as f32, without the slow conversion.
    DEVICE_METHOD static float signed_byte(u32 word, int index) {
        u32 bits = __byte_perm(word ^ 0x80808080, 0x4b000000, 0x7650 + index);
        return __uint_as_float(bits) - 8388736.0f;
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const u8* staged, const Columns<NT>& x, int step, int lane, float acc[NT][4]) {
        int t = lane % 4;
        float sum[NT][4];
        for (int nt = 0; nt < NT; nt++)
            for (int i = 0; i < 4; i++) sum[nt][i] = 0.0f;
#pragma unroll
        for (int group = 0; group < 2; group++) {
            uint4 codes[2];
            uint2 high[2], scales[2];
            for (int h = 0; h < 2; h++) {
                codes[h] = *(const uint4*)(staged + group * 1024 + h * 512 + lane * 16);
                high[h] = *(const uint2*)(staged + Bytes::HIGH + group * 512 + h * 256 + lane * 8);
                scales[h] = *(const uint2*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16 + group * 8);
            }
#pragma unroll
            for (int block = 0; block < 4; block++) {
                u32 a[8];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 word = word_of(codes[h], block), upper = block < 2 ? high[h].x : high[h].y;
                    widen(low_nibbles(word) | upper_pairs(upper, block % 2 * 2), a + h);
                    widen(high_nibbles(word) | upper_pairs(upper, block % 2 * 2 + 1), a + 4 + h);
                }
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    const int within = block * 2 + s, sixteen = step * 16 + group * 8 + within;
                    float scale[2];
                    for (int h = 0; h < 2; h++)
                        scale[h] = signed_byte(within < 4 ? scales[h].x : scales[h].y, within % 4);
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) {
                        uint2 four = x.four(nt, sixteen * 2 + t / 2, t % 2);
                        float d[4];
                        mma_bf16_first(d, a + 4 * s, four.x, four.y);
                        add_scaled(sum[nt], d, scale[0], scale[1]);
                    }
                }
            }
        }
        // What the codes carry too much: the sixteen scales, four for each t, times the blocks' sums. 8 bits are exact.
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float offset[4];
            for (int i = 0; i < 4; i++) {
                u32 word = *(const u32*)(staged + Bytes::SCALES + (i % 2 * 8 + lane / 4) * 16 + half * 8 + i / 2 * 4);
                offset[i] = -(float)(CODE_OFFSET + 32) * (float)(signed char)(word >> (8 * t));
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
                mma_tf32(sum[nt], offset, x.sum_16(nt, step * 16 + half * 8 + t), x.sum_16(nt, step * 16 + half * 8 + t + 4));
        }
        for (int h = 0; h < 2; h++) {
            float scale = f16_to_f32(*(const u16*)(staged + Bytes::MINS + (h * 8 + lane / 4) * 2));
            for (int nt = 0; nt < NT; nt++) acc[nt][2 * h] = __fmaf_rn(scale, sum[nt][2 * h] + sum[nt][2 * h + 1], acc[nt][2 * h]);
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        // Four of each 16 columns instead of eight of 32.
        p.lane = row % 8 * 4 + column % 16 / 4;
        p.i = column % 32 / 16 * 4 + column % 4;
        u32 word = *(const u32*)(part.high + p.tile * 512 + p.half * 256 + p.lane * 8 + p.block / 2 * 4);
        u32 upper = word >> (8 * (p.i % 4) + 4 * (p.block % 2) + 2 * (p.i / 4)) & 3;
        int code = (int)(nibble_at(part, p) | upper << 4) - 32;
        long super = p.tile / 2;
        float scale = f16_to_f32(*(const u16*)(part.mins + super * 32 + row % 16 * 2));
        int sub = (signed char)part.scales[super * 256 + row % 16 * 16 + column % 256 / 16];
        return __fmul_rn(__fmul_rn(scale, (float)sub), (float)code);
    }
};
