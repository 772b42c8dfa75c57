// Q8_0: 32 values share an f16 scale; value = scale * code. Codes are exact in bf16; a block's product is scaled in f32.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 128;
    static const int BLOCKS = 2;  // of 512 threads on a multiprocessor: what its registers allow without spilling
    typedef Staged<2048, 0, 128, 0> Bytes;

    // Two signed bytes as bf16: the low seven bits above 128, less 128, or less 256 where the sign is set.
    DEVICE_METHOD static u32 signed_pair(u32 word, u32 selector) {
        u32 bytes = __byte_perm(word, 0x43434343, selector);
        return add_bf16x2(bytes & 0xff7fff7f, (bytes & 0xff80ff80) | 0x80008000);
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const u8* staged, const Columns<NT>& x, int step, int lane, float acc[NT][4]) {
        uint2 scales[2];
        for (int h = 0; h < 2; h++) scales[h] = *(const uint2*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 8);
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 a[8];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint2 codes = *(const uint2*)(staged + block / 2 * 1024 + h * 512 + lane * 16 + block % 2 * 8);
                a[h] = signed_pair(codes.x, 0x4140);
                a[h + 2] = signed_pair(codes.x, 0x4342);
                a[h + 4] = signed_pair(codes.y, 0x4140);
                a[h + 6] = signed_pair(codes.y, 0x4342);
            }
            float scale0 = scale_of(scales[0], block), scale1 = scale_of(scales[1], block);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                float d[4];
                mma_block(d, a, x.octet(nt, step * 16 + block * 4 + lane % 4));
                add_scaled(acc[nt], d, scale0, scale1);
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        long at = p.tile * 2048 + p.block / 2 * 1024 + p.half * 512 + p.lane * 16 + p.block % 2 * 8 + p.i;
        return block_f16(part.scales, p.tile, row, p.block) * (float)(signed char)part.codes[at];
    }
};
