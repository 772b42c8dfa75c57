// The rarer formats: codes of four bits that stand for sixteen integers (TABLE0 to TABLE3, four to a word), an f32
// scale for each 16 values and, with HAS_MINS, an f32 minimum; value = scale * table[code] - min in f32, then rounded
// to f16. An octet lies in one run of 16.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 128;
    typedef Staged<1024, 0, 512, HAS_MINS ? 512 : 0> Bytes;

    DEVICE_METHOD static float unscale(const Part&) { return 1.0f; }

    // Four codes, each in the low half of a byte, as what they stand for.
    DEVICE_METHOD static u32 looked_up(u32 codes) {
        const u32 selector = __byte_perm(codes | codes >> 4, 0, 0x4420) & 0x7777;
        const u32 upper = (codes >> 3 & 0x01010101) * 0xff;
        return (__byte_perm(TABLE0, TABLE1, selector) & ~upper) | (__byte_perm(TABLE2, TABLE3, selector) & upper);
    }
    DEVICE_METHOD static float scaled(u32 integers, int at, float scale, float min) {
        const float value = __fmul_rn(scale, (float)(signed char)byte_of(integers, at));
        return HAS_MINS ? __fadd_rn(value, -min) : value;
    }
    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        uint4 codes[2];
        for (int h = 0; h < 2; h++) codes[h] = *(const uint4*)(staged + h * 512 + lane * 16);
        const float* scales = (const float*)(staged + Bytes::SCALES) + lane / 4 * 8 + lane % 4 / 2;
        const float* mins = (const float*)(staged + Bytes::MINS) + lane / 4 * 8 + lane % 4 / 2;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 integers[2][2];
            float scale[2], min[2];
            for (int h = 0; h < 2; h++) {
                // Values 0, 4, 1, 5 of the octet, and 2, 6, 3, 7.
                const u32 word = word_of(codes[h], block);
                integers[h][0] = looked_up(word & 0x0f0f0f0f);
                integers[h][1] = looked_up(word >> 4 & 0x0f0f0f0f);
                scale[h] = scales[h * 64 + block * 2];
                min[h] = HAS_MINS ? mins[h * 64 + block * 2] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int h = i % 2;
                    const u32 four = integers[h][i / 2];
                    a[i] = pack_f16x2(scaled(four, k, scale[h], min[h]), scaled(four, k + 2, scale[h], min[h]));
                }
                use(block * 2 + k, a);
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        const int integer = (signed char)(looked_up(nibble_at(part, p)) & 0xff);
        const long run = p.tile * 128 + row % 16 * 8 + column % 128 / 16;
        return scaled((u32)integer & 0xff, 0, ((const float*)part.scales)[run], HAS_MINS ? ((const float*)part.mins)[run] : 0.0f);
    }
};
