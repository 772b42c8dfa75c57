// Q4_0, Q4_1, Q5_0 and Q5_1: 32 values share an f16 scale, and where there is one an f16 minimum;
// value = scale * (code - OFFSET) + min. The codes multiply as exact integers; a block's product is scaled in f32.
#pragma once
#include "quant/tile.cuh"

template <int BITS, int OFFSET, bool MINS> struct Blocks32 {
    static const int STEP = 128;
    static const int BLOCKS = 1;  // of 512 threads on a multiprocessor: what its registers allow without spilling
    typedef Staged<1024, BITS == 5 ? 256 : 0, 128, MINS ? 128 : 0> Bytes;

    template <int NT>
    DEVICE_METHOD static void multiply(const u8* staged, const Columns<NT>& x, int step, int lane, float acc[NT][4]) {
        int t = lane % 4;
        uint4 codes[2];
        u32 high[2];
        uint2 scales[2], mins[2];
        for (int h = 0; h < 2; h++) {
            codes[h] = *(const uint4*)(staged + h * 512 + lane * 16);
            if (BITS == 5) high[h] = *(const u32*)(staged + Bytes::HIGH + h * 128 + lane * 4);
            int row = h * 8 + lane / 4;
            scales[h] = *(const uint2*)(staged + Bytes::SCALES + row * 8);
            if (MINS) mins[h] = *(const uint2*)(staged + Bytes::MINS + row * 8);
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
            float scale0 = scale_of(scales[0], block), scale1 = scale_of(scales[1], block);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                float d[4];
                mma_block(d, a, x.octet(nt, step * 16 + block * 4 + t));
                add_scaled(acc[nt], d, scale0, scale1);
            }
        }
        // Minima, and what the codes carry too much: the four blocks' sums times both. An f16 is an exact tf32.
        float offset[4] = {scale_of(scales[0], t), scale_of(scales[1], t), 0.0f, 0.0f};
        float m[4] = {MINS ? scale_of(mins[0], t) : 0.0f, MINS ? scale_of(mins[1], t) : 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float sum = x.sum_32(nt, step * 4 + t), d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_tf32(d, offset, sum, 0.0f);
            add_scaled(acc[nt], d, -(float)(CODE_OFFSET + OFFSET), -(float)(CODE_OFFSET + OFFSET));
            if (MINS) mma_tf32(acc[nt], m, sum, 0.0f);
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
