// Q8_0: 32 values share an f16 scale; value = scale * code.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 128;
    static const bool FLOATS = false, SUMS = false;
    typedef Staged<2048, 0, 128, 0> Bytes;

    template <class X> DEVICE_METHOD static void multiply(const u8* staged, const X& x, int step, int lane, float acc[X::N]) {
        uint2 scales[2];
        for (int h = 0; h < 2; h++) scales[h] = *(const uint2*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 8);
        float sum[X::N];
        for (int n = 0; n < X::N; n++) sum[n] = 0.0f;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint4 w0 = *(const uint4*)(staged + pair * 1024 + lane * 16);
            const uint4 w1 = *(const uint4*)(staged + pair * 1024 + 512 + lane * 16);
#pragma unroll
            for (int second = 0; second < 2; second++) {
                const int block = pair * 2 + second;
                const u32 a[4] = {second ? w0.z : w0.x, second ? w1.z : w1.x, second ? w0.w : w0.y, second ? w1.w : w1.y};
                x.block_32(step, block, a, scale_of(scales[0], block), scale_of(scales[1], block), sum);
            }
        }
        for (int n = 0; n < X::N; n++) acc[n] = __fmaf_rn(x.scale(n, step), sum[n], acc[n]);
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        long at = p.tile * 2048 + p.block / 2 * 1024 + p.half * 512 + p.lane * 16 + p.block % 2 * 8 + p.i;
        return block_f16(part.scales, p.tile, row, p.block) * (float)(signed char)part.codes[at];
    }
};
