// Q6_K: 256 values in sixteen blocks of 16 with 8-bit scales; value = scale * scales[b] * (code - 32). A lane holds four
// values of each 16, so that one step of the matrix instruction is one block, scaled in f32.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 256;
    struct Loaded {
        uint4 codes[2][2];  // (group, half)
        uint2 high[2][2];
        uint4 scales[2];
        u16 scale[2];
    };
    DEVICE_METHOD static Loaded load(const Part& part, long super, int lane) {
        Loaded l;
        for (int g = 0; g < 2; g++)
            for (int h = 0; h < 2; h++) {
                l.codes[g][h] = load_weights(part.codes + (super * 2 + g) * 1024 + h * 512 + lane * 16);
                l.high[g][h] = load_weights8(part.high + (super * 2 + g) * 512 + h * 256 + lane * 8);
            }
        for (int h = 0; h < 2; h++) {
            l.scales[h] = load_weights(part.scales + super * 256 + (h * 8 + lane / 4) * 16);
            l.scale[h] = *(const u16*)(part.mins + super * 32 + (h * 8 + lane / 4) * 2);
        }
        return l;
    }
    // A signed byte as f32, without the slow conversion.
    DEVICE_METHOD static float signed_byte(u32 word, int index) {
        u32 bits = __byte_perm(word ^ 0x80808080, 0x4b000000, 0x7650 + index);
        return __uint_as_float(bits) - 8388736.0f;
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const Loaded& l, const Columns<NT>& x, long step, int lane, float acc[NT][4]) {
        int t = lane % 4;
        float sum[NT][4];
        for (int nt = 0; nt < NT; nt++)
            for (int i = 0; i < 4; i++) sum[nt][i] = 0.0f;
#pragma unroll
        for (int block = 0; block < 8; block++) {
            u32 a[8];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 upper[4], word = block % 4 < 2 ? l.high[block / 4][h].x : l.high[block / 4][h].y;
                upper_2(block % 2 ? word >> 16 : word & 0xffff, upper);
                unpack_codes(word_of(l.codes[block / 4][h], block % 4), upper, OFFSET_32, a + h);
            }
#pragma unroll
            for (int s = 0; s < 2; s++) {
                int sixteen = block * 2 + s;
                float scale[2];
                for (int h = 0; h < 2; h++) scale[h] = signed_byte(word_of(l.scales[h], sixteen / 4), sixteen % 4);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    uint2 four = x.four(nt, (int)step * 32 + sixteen * 2 + t / 2, t % 2);
                    float d[4] = {0, 0, 0, 0};
                    mma_bf16(d, a + 4 * s, four.x, four.y);
                    add_scaled(sum[nt], d, scale[0], scale[1]);
                }
            }
        }
        for (int nt = 0; nt < NT; nt++)
            for (int h = 0; h < 2; h++)
                acc[nt][2 * h] = __fmaf_rn(f16_to_f32(l.scale[h]), sum[nt][2 * h], acc[nt][2 * h]);
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        // Four of each 16 columns instead of eight of 32.
        p.lane = row % 8 * 4 + column % 16 / 4;
        p.i = column % 32 / 16 * 4 + column % 4;
        u32 bits = *(const u16*)(part.high + p.tile * 512 + p.half * 256 + p.lane * 8 + p.block * 2);
        int code = (int)(nibble_at(part, p) | (bits >> (2 * (p.i / 2) + 8 * (p.i % 2)) & 3) << 4) - 32;
        long super = p.tile / 2;
        float scale = f16_to_f32(*(const u16*)(part.mins + super * 32 + row % 16 * 2));
        int sub = (signed char)part.scales[super * 256 + row % 16 * 16 + column % 256 / 16];
        return __fmul_rn(__fmul_rn(scale, (float)sub), (float)code);
    }
};
