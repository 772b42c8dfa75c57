// Q8_0: 32 values share an f16 scale; value = scale * code. Codes are exact halves; a block's product is scaled in f32.
#pragma once
#include "quant/tile.cuh"
#define ACTIVATIONS_BF16 0

struct Quant {
    static const int STEP = 128;
    struct Loaded {
        uint4 codes[2][2];
        uint2 scales[2];
    };
    DEVICE_METHOD static Loaded load(const Part& part, long tile, int lane) {
        Loaded l;
        for (int p = 0; p < 2; p++)
            for (int h = 0; h < 2; h++) l.codes[p][h] = load_weights(part.codes + tile * 2048 + p * 1024 + h * 512 + lane * 16);
        for (int h = 0; h < 2; h++) l.scales[h] = load_weights8(part.scales + tile * 128 + (h * 8 + lane / 4) * 8);
        return l;
    }
    // Two signed bytes as halves: with the sign bit flipped they are 0..255 above 1024, of which 1152 is taken.
    DEVICE_METHOD static u32 halves(u32 flipped, u32 selector) {
        return fma_f16x2(__byte_perm(flipped, 0x64646464, selector), 0x3c003c00, 0xe480e480);
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const Loaded& l, const Columns<NT>& x, long step, int lane, float acc[NT][4]) {
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 a[8];
            float scale[2];
            for (int h = 0; h < 2; h++) {
                const uint4& c = l.codes[block / 2][h];
                u32 first = (block % 2 ? c.z : c.x) ^ 0x80808080, second = (block % 2 ? c.w : c.y) ^ 0x80808080;
                a[h] = halves(first, 0x4140);
                a[h + 2] = halves(first, 0x4342);
                a[h + 4] = halves(second, 0x4140);
                a[h + 6] = halves(second, 0x4342);
                u32 both = block < 2 ? l.scales[h].x : l.scales[h].y;
                scale[h] = f16_to_f32(block % 2 ? both >> 16 : both & 0xffff);
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                uint4 high, rest;
                x.octet(nt, (int)step * 16 + block * 4 + lane % 4, high, rest);
                float d[4] = {0, 0, 0, 0};
                mma_block(d, a, high, rest);
                for (int i = 0; i < 4; i++) acc[nt][i] = __fmaf_rn(scale[i / 2], d[i], acc[nt][i]);
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        long at = p.tile * 2048 + p.block / 2 * 1024 + p.half * 512 + p.lane * 16 + p.block % 2 * 8 + p.i;
        return block_f16(part.scales, p.tile, row, p.block) * (float)(signed char)part.codes[at];
    }
};
