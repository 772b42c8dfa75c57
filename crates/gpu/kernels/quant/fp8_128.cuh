// FP8_128: 128 8-bit floats of a row share an f32 scale, as in FP8 checkpoints. Products take the scale times 2^8 as
// f16, and floats 2^8 too small.
#pragma once
#include "float8.cuh"
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 128;
    typedef Staged<2048, 0, 64, 0> Bytes;

    DEVICE_METHOD static float unscale(const Part&) { return 1.0f; }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        u32 by[2];
        for (int h = 0; h < 2; h++) {
            const float scale = __fmul_rn(*(const float*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 4), 256.0f);
            by[h] = pack_f16x2(scale, scale);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w0 = *(const uint4*)(staged + half * 1024 + lane * 16);
            const uint4 w1 = *(const uint4*)(staged + half * 1024 + 512 + lane * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 c0 = word_of(w0, k), c1 = word_of(w1, k);
                const u32 a[4] = {mul_f16x2(two_floats8_of(c0, 0), by[0]), mul_f16x2(two_floats8_of(c1, 0), by[1]),
                                  mul_f16x2(two_floats8_of(c0, 1), by[0]), mul_f16x2(two_floats8_of(c1, 1), by[1])};
                use(half * 4 + k, a);
            }
        }
    }
    // As they are stored, for products of 8-bit floats: use(k, a) of the step's thirty-twos of columns in order, as
    // `WgmmaFloats8` takes them. Of 32 columns the first sixteen are 8t to 8t + 3, the others 8t + 4 to 8t + 7.
    template <class Use> DEVICE_METHOD static void floats8(const u8* staged, int lane, Use use) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w0 = *(const uint4*)(staged + half * 1024 + lane * 16);
            const uint4 w1 = *(const uint4*)(staged + half * 1024 + 512 + lane * 16);
            const u32 first[4] = {w0.x, w1.x, w0.y, w1.y}, second[4] = {w0.z, w1.z, w0.w, w1.w};
            use(half * 2, first);
            use(half * 2 + 1, second);
        }
    }
    // What the sums of a step's products in a lane's row g, or g + 8, are multiplied by.
    DEVICE_METHOD static float step_scale(const u8* staged, int lane, int below) {
        return *(const float*)(staged + Bytes::SCALES + (below * 8 + lane / 4) * 4);
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        long at = p.tile * 2048 + p.block / 2 * 1024 + p.half * 512 + p.lane * 16 + p.block % 2 * 8 + p.i;
        const float code = f16_to_f32((u16)two_floats8(part.codes[at], 0x4404));
        return __fmul_rn(((const float*)part.scales)[p.tile * 16 + row % 16], __fmul_rn(code, 256.0f));
    }
};
