// F16 and BF16: two-byte values as they are. An F16 has three bits more than a bf16: it is multiplied as a sum of two.
#pragma once
#include "quant/tile.cuh"

template <bool BF16> struct Halves {
    static const int STEP = 128;
    static const bool FLOATS = true, SUMS = false;
    typedef Staged<4096, 0, 0, 0> Bytes;

    template <class X> DEVICE_METHOD static void multiply(const u8* staged, const X& x, int step, int lane, float acc[X::N]) {
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const uint4 w0 = *(const uint4*)(staged + block * 1024 + lane * 16);
            const uint4 w1 = *(const uint4*)(staged + block * 1024 + 512 + lane * 16);
            u32 a[8] = {w0.x, w1.x, w0.y, w1.y, w0.z, w1.z, w0.w, w1.w}, rest[8];
            if (!BF16) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float low = f16_to_f32(a[i] & 0xffff), high = f16_to_f32(a[i] >> 16);
                    u16 low_bits = f32_to_bf16(low), high_bits = f32_to_bf16(high);
                    a[i] = pair(low_bits, high_bits);
                    rest[i] = pair(f32_to_bf16(low - bf16_to_f32(low_bits)), f32_to_bf16(high - bf16_to_f32(high_bits)));
                }
            }
#pragma unroll
            for (int nt = 0; nt < X::N / 4; nt++) {
                const uint4 eight = x.octet(nt, step, block);
                mma_bf16(acc + nt * 4, a, eight.x, eight.y);
                mma_bf16(acc + nt * 4, a + 4, eight.z, eight.w);
                if (!BF16) {
                    mma_bf16(acc + nt * 4, rest, eight.x, eight.y);
                    mma_bf16(acc + nt * 4, rest + 4, eight.z, eight.w);
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
