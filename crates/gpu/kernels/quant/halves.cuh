// F16 and BF16: two-byte values as they are. BF16 weights meet activations split into two bf16, F16 weights two f16.
#pragma once
#include "quant/tile.cuh"

template <bool BF16> struct Halves {
    static const int STEP = 128;
    struct Loaded {
        uint4 values[4][2];  // (block, half)
    };
    DEVICE_METHOD static Loaded load(const Part& part, long tile, int lane) {
        Loaded l;
        for (int block = 0; block < 4; block++)
            for (int h = 0; h < 2; h++)
                l.values[block][h] = load_weights(part.codes + tile * 4096 + block * 1024 + h * 512 + lane * 16);
        return l;
    }
    template <int NT>
    DEVICE_METHOD static void multiply(const Loaded& l, const Columns<NT>& x, long step, int lane, float acc[NT][4]) {
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const uint4 &w0 = l.values[block][0], &w1 = l.values[block][1];
            u32 a[8] = {w0.x, w1.x, w0.y, w1.y, w0.z, w1.z, w0.w, w1.w};
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                uint4 high, rest;
                x.octet(nt, (int)step * 16 + block * 4 + lane % 4, high, rest);
                if (BF16) {
                    mma_bf16(acc[nt], a, high.x, high.y);
                    mma_bf16(acc[nt], a, rest.x, rest.y);
                    mma_bf16(acc[nt], a + 4, high.z, high.w);
                    mma_bf16(acc[nt], a + 4, rest.z, rest.w);
                } else {
                    mma_block(acc[nt], a, high, rest);
                }
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        u16 bits = *(const u16*)(part.codes + p.tile * 4096 + p.block * 1024 + p.half * 512 + p.lane * 16 + p.i * 2);
        return BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
};
