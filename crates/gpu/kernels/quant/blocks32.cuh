// Q4_0, Q4_1, Q5_0 and Q5_1: 32 values share an f16 scale, and where there is one an f16 minimum;
// value = scale * (code - OFFSET) + min. The codes multiply as exact integers; a block's product is scaled in f32.
#pragma once
#include "quant/tile.cuh"

template <int BITS, int OFFSET, bool MINS> struct Blocks32 {
    static const int STEP = 128;
    struct Loaded {
        uint4 codes[2];
        u32 high[2];
        uint2 scales[2];
        uint2 mins[2];
    };
    DEVICE_METHOD static Loaded load(const Part& part, long tile, int lane) {
        Loaded l;
        for (int h = 0; h < 2; h++) {
            l.codes[h] = load_weights(part.codes + tile * 1024 + h * 512 + lane * 16);
            if (BITS == 5) l.high[h] = *(const u32*)(part.high + tile * 256 + h * 128 + lane * 4);
            int row = h * 8 + lane / 4;
            l.scales[h] = load_weights8(part.scales + tile * 128 + row * 8);
            if (MINS) l.mins[h] = load_weights8(part.mins + tile * 128 + row * 8);
        }
        return l;
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const Loaded& l, const Columns<NT>& x, long step, int lane, float acc[NT][4]) {
        int t = lane % 4;
        // 1024 + OFFSET and 64 + OFFSET as halves; 1/16 is 0x2c00.
        const Unpack u = {0x3c003c00, OFFSET == 0 ? 0xe400e400 : OFFSET == 8 ? 0xe408e408 : 0xe410e410, 0x2c002c00,
                          OFFSET == 0 ? 0xd400d400 : OFFSET == 8 ? 0xd480d480 : 0xd500d500};
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 a[8];
            float scale[2];
            for (int h = 0; h < 2; h++) {
                u32 upper[4] = {0, 0, 0, 0};
                if (BITS == 5) upper_1(byte_of(l.high[h], block), upper);
                unpack_codes(word_of(l.codes[h], block), upper, u, a + h);
                u32 both = block < 2 ? l.scales[h].x : l.scales[h].y;
                scale[h] = f16_to_f32(block % 2 ? both >> 16 : both & 0xffff);
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                uint4 high, rest;
                x.octet(nt, (int)step * 16 + block * 4 + t, high, rest);
                float d[4] = {0, 0, 0, 0};
                mma_block(d, a, high, rest);
                for (int i = 0; i < 4; i++) acc[nt][i] = __fmaf_rn(scale[i / 2], d[i], acc[nt][i]);
            }
        }
        if (MINS) {
            // The four blocks' minima times the sums of their activations: lanes t < 2 hold two blocks each.
            u32 m0 = t == 0 ? l.mins[0].x : t == 1 ? l.mins[0].y : 0;
            u32 m1 = t == 0 ? l.mins[1].x : t == 1 ? l.mins[1].y : 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                uint2 sums = t < 2 ? x.sum_pair(nt, (int)step * 2 + t) : make_uint2(0, 0);
                mma_f16_k8(acc[nt], m0, m1, sums.x);
                mma_f16_k8(acc[nt], m0, m1, sums.y);
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
