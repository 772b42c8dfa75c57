// Q6_K: 256 values in sixteen blocks of 16 with 8-bit scales; value = scale * scales[b] * (code - 32). A lane holds four
// values of each 16, so that one step of the matrix instruction is one block, scaled in f32. Codes lie at the top of a
// byte, where less 32 is the top bit turned.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 256;
    static const bool FLOATS = false, SUMS = false;
    typedef Staged<2048, 1024, 256, 32> Bytes;

    // A signed byte as f32, without the slow conversion.
    DEVICE_METHOD static float signed_byte(u32 word, int index) {
        u32 bits = __byte_perm(word ^ 0x80808080, 0x4b000000, 0x7650 + index);
        return __uint_as_float(bits) - 8388736.0f;
    }
    // Four times four codes less 32, where group q of four has its upper pairs at bits 2q and 2q + 1.
    DEVICE_METHOD static u32 codes_of(u32 word, int which, u32 upper, int q) {
        return (moved(word, 2 - 4 * which) & 0x3c3c3c3c) | ((moved(upper, 6 - 2 * q) & 0xc0c0c0c0) ^ 0x80808080);
    }
    template <class X> DEVICE_METHOD static void multiply(const u8* staged, const X& x, int step, int lane, float acc[X::N]) {
        float scale[2];
        for (int h = 0; h < 2; h++) scale[h] = 0.25f * f16_to_f32(*(const u16*)(staged + Bytes::MINS + (h * 8 + lane / 4) * 2));
        // Rolled up: the code is there once.
#pragma unroll 1
        for (int group = 0; group < 2; group++) {
            uint4 codes[2];
            uint2 high[2], scales[2];
            for (int h = 0; h < 2; h++) {
                codes[h] = *(const uint4*)(staged + group * 1024 + h * 512 + lane * 16);
                high[h] = *(const uint2*)(staged + Bytes::HIGH + group * 512 + h * 256 + lane * 8);
                scales[h] = *(const uint2*)(staged + Bytes::SCALES + (h * 8 + lane / 4) * 16 + group * 8);
            }
            float sum[X::N];
            for (int n = 0; n < X::N; n++) sum[n] = 0.0f;
#pragma unroll
            for (int block = 0; block < 8; block++) {
                const int word = block / 2, which = block % 2;
                u32 a[2];
                float by[2];
                for (int h = 0; h < 2; h++) {
                    a[h] = codes_of(word_of(codes[h], word), which, word < 2 ? high[h].x : high[h].y, word % 2 * 2 + which);
                    by[h] = signed_byte(block < 4 ? scales[h].x : scales[h].y, block % 4);
                }
                x.block_16(step * 2 + group, block, a, by[0], by[1], sum);
            }
            for (int n = 0; n < X::N; n++) {
                const float all = __fmul_rn(scale[X::half_of(n)], sum[n]);
                acc[n] = __fmaf_rn(x.scale(n, step * 2 + group), all, acc[n]);
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        // Four of each 16 columns instead of eight of 32.
        p.lane = row % 8 * 4 + column % 16 / 4;
        p.i = column % 32 / 16 * 4 + column % 4;
        u32 word = *(const u32*)(part.high + p.tile * 512 + p.half * 256 + p.lane * 8 + p.block / 2 * 4);
        u32 upper = word >> (8 * (p.i % 4) + 4 * (p.block % 2) + 2 * (p.i / 4)) & 3;
        int code = (int)(nibble_at(part, p) | upper << 4) - 32;
        long super = p.tile / 2;
        float scale = f16_to_f32(*(const u16*)(part.mins + super * 32 + row % 16 * 2));
        int sub = (signed char)part.scales[super * 256 + row % 16 * 16 + column % 256 / 16];
        return __fmul_rn(__fmul_rn(scale, (float)sub), (float)code);
    }
};
