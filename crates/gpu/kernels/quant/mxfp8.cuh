// MXFP8: 32 8-bit floats share a power of two, which is stored 2^8 times as large, as f16; a value is exact in f16,
// unless it is below what f16 has.
#pragma once
#include "float8.cuh"
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 128;
    typedef Staged<2048, 0, 128, 0> Bytes;

    DEVICE_METHOD static float unscale(const Part&) { return 1.0f; }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        uint2 scales[2];
        for (int h = 0; h < 2; h++) scales[h] = *(const uint2*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 8);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w0 = *(const uint4*)(staged + half * 1024 + lane * 16);
            const uint4 w1 = *(const uint4*)(staged + half * 1024 + 512 + lane * 16);
            const u32 s0 = half ? scales[0].y : scales[0].x, s1 = half ? scales[1].y : scales[1].x;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 c0 = word_of(w0, k), c1 = word_of(w1, k);
                const u32 d0 = broadcast_f16(s0, k / 2), d1 = broadcast_f16(s1, k / 2);
                const u32 a[4] = {mul_f16x2(two_floats8_of(c0, 0), d0), mul_f16x2(two_floats8_of(c1, 0), d1),
                                  mul_f16x2(two_floats8_of(c0, 1), d0), mul_f16x2(two_floats8_of(c1, 1), d1)};
                use(half * 4 + k, a);
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        long at = p.tile * 2048 + p.block / 2 * 1024 + p.half * 512 + p.lane * 16 + p.block % 2 * 8 + p.i;
        const float code = f16_to_f32((u16)two_floats8(part.codes[at], 0x4404));
        return __fmul_rn(block_f16(part.scales, p.tile, row, p.block), code);
    }
};
