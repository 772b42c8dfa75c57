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
        const u32 offset = OFFSET == 0 ? OFFSET_0 : OFFSET == 8 ? OFFSET_8 : OFFSET_16;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 a[8];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 upper[4] = {0, 0, 0, 0};
                if (BITS == 5) upper_1(byte_of(l.high[h], block), upper);
                unpack_codes(word_of(l.codes[h], block), upper, offset, a + h);
            }
            float scale0 = scale_of(l.scales[0], block), scale1 = scale_of(l.scales[1], block);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                float d[4] = {0, 0, 0, 0};
                mma_block(d, a, x.octet(nt, (int)step * 16 + block * 4 + t));
                add_scaled(acc[nt], d, scale0, scale1);
            }
        }
        if (MINS) {
            // The four blocks' minima times the sums of their activations. An f16 is an exact tf32.
            float m[4] = {scale_of(l.mins[0], t), scale_of(l.mins[1], t), 0.0f, 0.0f};
#pragma unroll
            for (int nt = 0; nt < NT; nt++) mma_tf32(acc[nt], m, x.sum(nt, (int)step * 4 + t), 0.0f);
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
