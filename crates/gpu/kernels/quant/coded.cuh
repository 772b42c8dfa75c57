// The rarer formats: codes of four bits that stand for sixteen integers (TABLE0 to TABLE3, four to a word), an f32 scale for
// each 16 values and, with HAS_MINS, an f32 minimum; value = scale * table[code] - min. As in Q6_K a lane holds four values of
// each 16, so that one step of the matrix instruction is one run. A minimum multiplies ones.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 128;
    static const bool FLOATS = false, SUMS = false;
    typedef Staged<1024, 0, 512, HAS_MINS ? 512 : 0> Bytes;

    // Four codes, each in the low half of a byte, as what they stand for.
    DEVICE_METHOD static u32 looked_up(u32 codes) {
        const u32 selector = __byte_perm(codes | codes >> 4, 0, 0x4420) & 0x7777;
        const u32 upper = (codes >> 3 & 0x01010101) * 0xff;
        return (__byte_perm(TABLE0, TABLE1, selector) & ~upper) | (__byte_perm(TABLE2, TABLE3, selector) & upper);
    }
    template <class X> DEVICE_METHOD static void multiply(const u8* staged, const X& x, int step, int lane, float acc[X::N]) {
        uint4 codes[2];
        for (int h = 0; h < 2; h++) codes[h] = *(const uint4*)(staged + h * 512 + lane * 16);
        const float* scales = (const float*)(staged + Bytes::SCALES) + lane / 4 * 8;
        float sum[X::N];
        for (int n = 0; n < X::N; n++) sum[n] = 0.0f;
#pragma unroll
        for (int block = 0; block < 8; block++) {
            u32 a[2];
            for (int h = 0; h < 2; h++) {
                const u32 word = word_of(codes[h], block / 2);
                a[h] = looked_up(block % 2 ? high_nibbles(word) : low_nibbles(word));
            }
            x.block_16(step, block, a, scales[block], scales[64 + block], sum);
#if HAS_MINS
            const u32 ones[2] = {0x01010101, 0x01010101};
            const float* mins = (const float*)(staged + Bytes::MINS) + lane / 4 * 8;
            x.block_16(step, block, ones, -mins[block], -mins[64 + block], sum);
#endif
        }
        for (int n = 0; n < X::N; n++) acc[n] = __fmaf_rn(x.scale(n, step), sum[n], acc[n]);
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        // Four of each 16 columns instead of eight of 32.
        p.lane = row % 8 * 4 + column % 16 / 4;
        p.i = column % 32 / 16 * 4 + column % 4;
        const int integer = (signed char)(looked_up(nibble_at(part, p)) & 0xff);
        const long run = p.tile * 128 + row % 16 * 8 + column % 128 / 16;
        const float value = __fmul_rn(((const float*)part.scales)[run], (float)integer);
#if HAS_MINS
        return value - ((const float*)part.mins)[run];
#else
        return value;
#endif
    }
};
