// Q6_K: 256 values in sixteen blocks of 16 with 8-bit scales; value = (scale * scales[b]) * (code - 32), the product of
// the scales rounded to f16, then the whole. An octet lies in one block.
//
// Codes are whole numbers times 2^-24 or 2^-20 as those of superblocks.cuh are, and scales are kept times a power of
// two for the part, 2^P, that brings the largest below 32; a value comes out times 2^(P - 20), the largest below 2^-3.
// Behind `mins` lie the largest scale's bits and 2^(20 - P).
#pragma once
#include "quant/tile.cuh"

struct Quant {
    static const int STEP = 256;
    typedef Staged<2048, 1024, 256, 32> Bytes;

    DEVICE_METHOD static float unscale(const Part& part) {
        return ((const float*)(part.mins + (long)row_tiles_left(part) * part.groups * 16))[1];
    }
    // A word has the upper bits of two octets: rotated right by so much, those of pairs p and p + 1 (p even) of an
    // octet are where the codes want them, from bits 4 and 8 on and 16 further up.
    DEVICE_METHOD static int rotation(int block, int p) { return p / 2 * 2 + block % 2 * 8; }
    // Pair p of a block's codes: of even pairs times 2^-24, of odd ones times 2^-20.
    DEVICE_METHOD static u32 two(u32 word, u32 upper, int block, int p) {
        const int at = p % 2 * 4;
        const u32 bits = moved(word, -(p / 2 * 8)) & 0x000f000fu << at;
        return and_or(rotate_right(upper, rotation(block, p)), 0x00030003u << (4 + at), bits);
    }

    template <class Use> DEVICE_METHOD static void fragments(const u8* staged, int lane, Use use) {
        u32 scale[2];
        for (int h = 0; h < 2; h++) scale[h] = *(const u16*)(staged + Bytes::MINS + (h * 8 + lane / 4) * 2) * 0x00010001u;
        // Which of a block's two scales this octet has, of two blocks at a time: each in the low bits of 1024.
        const u32 chosen = lane % 4 / 2 ? 0x4341 : 0x4240;
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
#pragma unroll
            for (int blocks = 0; blocks < 4; blocks += 2) {
                u32 by[2][2], less[2];
                for (int h = 0; h < 2; h++) {
                    const u32 above = __byte_perm((blocks ? scales[h].y : scales[h].x) ^ 0x80808080, 0x64646464, chosen);
                    by[1][h] = mul_f16x2(add_f16x2(above, 0xe480e480), scale[h]);
                    by[0][h] = mul_f16x2(by[1][h], 0x4c004c00);
                    less[h] = mul_f16x2(by[1][h], 0x82008200);  // times -32 * 2^-20
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int block = blocks + k / 2;
                    u32 a[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int h = i % 2, p = k % 2 * 2 + i / 2;
                        const u32 q = two(word_of(codes[h], block), blocks ? high[h].y : high[h].x, k / 2, p);
                        a[i] = fma_f16x2(q, broadcast_f16(by[p % 2][h], k / 2), broadcast_f16(less[h], k / 2));
                    }
                    use(group * 8 + block * 2 + k % 2, a);
                }
            }
        }
    }
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        Place p = place_of(part, row, column);
        u32 word = *(const u32*)(part.high + p.tile * 512 + p.half * 256 + p.lane * 8 + p.block / 2 * 4);
        u32 upper = rotate_right(word, rotation(p.block, p.i / 2)) >> (4 + p.i / 2 % 2 * 4 + p.i % 2 * 16) & 3;
        int code = (int)(nibble_at(part, p) | upper << 4) - 32;
        long super = p.tile / 2;
        // As it is stored.
        float scale = f16_to_f32(*(const u16*)(part.mins + super * 32 + row % 16 * 2)) * (unscale(part) * 0x1p-20f);
        int sub = (signed char)part.scales[super * 256 + row % 16 * 16 + column % 256 / 16];
        return __fmul_rn(__fmul_rn(scale, (float)sub), (float)code);
    }
};
