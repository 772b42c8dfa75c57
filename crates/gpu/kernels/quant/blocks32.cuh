// Q4_0, Q4_1, Q5_0 and Q5_1: 32 values share an f16 scale, and where there is one an f16 minimum;
// value = scale * (code - OFFSET) + min. Codes with an offset lie at the top of a byte, where less the offset is the top
// bit turned.
#pragma once
#include "quant/tile.cuh"

template <int BITS, int OFFSET, bool MINS> struct Blocks32 {
    static const int STEP = 128;
    static const bool FLOATS = false, SUMS = MINS;
    typedef Staged<1024, BITS == 5 ? 256 : 0, 128, MINS ? 128 : 0> Bytes;
    static const int AT = OFFSET ? 8 - BITS : 0;  // the code's place in a byte

    DEVICE_METHOD static u32 codes_of(u32 word, int which, u32 upper, int q) {
        const u32 codes = BITS == 5 ? five_bits(word, which, upper, q, AT) : moved(word, AT - 4 * which) & (0x0f0f0f0fu << AT);
        return OFFSET ? codes ^ 0x80808080 : codes;
    }
    template <class X> DEVICE_METHOD static void multiply(const u8* staged, const X& x, int step, int lane, float acc[X::N]) {
        uint4 codes[2];
        u32 high[2] = {0, 0};
        uint2 scales[2], mins[2];
        for (int h = 0; h < 2; h++) {
            codes[h] = *(const uint4*)(staged + h * 512 + lane * 16);
            if (BITS == 5) high[h] = *(const u32*)(staged + Bytes::HIGH + h * 128 + lane * 4);
            int row = h * 8 + lane / 4;
            scales[h] = *(const uint2*)(staged + Bytes::SCALES + row * 8);
            if (MINS) mins[h] = *(const uint2*)(staged + Bytes::MINS + row * 8);
        }
        float sum[X::N], least[X::N];
        for (int n = 0; n < X::N; n++) sum[n] = least[n] = 0.0f;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = codes_of(word_of(codes[i % 2], block), i / 2, high[i % 2], 2 * block + i / 2);
            x.block_32(step, block, a, scale_of(scales[0], block), scale_of(scales[1], block), sum);
            if (MINS)
                for (int n = 0; n < X::N; n++)
                    least[n] = __fmaf_rn(scale_of(mins[X::half_of(n)], block), x.sum_of(n, step, block), least[n]);
        }
        for (int n = 0; n < X::N; n++) {
            const float all = MINS ? sum[n] + least[n] : sum[n] * (1.0f / (1 << AT));
            acc[n] = __fmaf_rn(x.scale(n, step), all, acc[n]);
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        int code = (int)nibble_at(part, p) - OFFSET;
        if (BITS == 5) code += 16 * (int)upper_bit_at(part, p);
        float scaled = __fmul_rn(block_f16(part.scales, p.tile, row, p.block), (float)code);
        return MINS ? scaled + block_f16(part.mins, p.tile, row, p.block) : scaled;
    }
};
