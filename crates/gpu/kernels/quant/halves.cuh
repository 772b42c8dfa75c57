// F16 and BF16: two-byte values. A BF16 is kept as an f16, times a power of two that brings the largest of its part to
// [2^13, 2^14): what is at least 2^-31 of that is exact. `scales` holds the largest magnitude's bits and the power's
// inverse.
#pragma once
#include "quant/tile.cuh"

template <bool BF16> struct Halves {
    static const int STEP = 128;
    typedef Staged<4096, 0, 0, 0> Bytes;

    DEVICE_METHOD static float unscale(const Part& part) { return BF16 ? ((const float*)part.scales)[1] : 1.0f; }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const uint4 w0 = *(const uint4*)(staged + block * 1024 + lane * 16);
            const uint4 w1 = *(const uint4*)(staged + block * 1024 + 512 + lane * 16);
            const u32 first[4] = {w0.x, w1.x, w0.y, w1.y}, second[4] = {w0.z, w1.z, w0.w, w1.w};
            use(2 * block, first);
            use(2 * block + 1, second);
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        u16 bits = *(const u16*)(part.codes + p.tile * 4096 + p.block * 1024 + p.half * 512 + p.lane * 16 + p.i * 2);
        return BF16 ? __fmul_rn(f16_to_f32(bits), unscale(part)) : f16_to_f32(bits);
    }
};
