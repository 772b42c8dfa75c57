// What formats share. A tile is 16 rows x 128 columns; lane 4g + t of a warp holds rows g and g + 8 of it, and of each
// 32 columns the eight from 8t on ("octet"), unless its format says otherwise.
#pragma once
#include "prelude.cuh"

// A step of a product takes 128 or 256 columns of 16 rows. Its bytes lie one plane after the other where a warp has
// copied them; each plane's are contiguous in memory.
template <int CODES_, int HIGH_, int SCALES_, int MINS_> struct Staged {
    static const int CODES = 0, HIGH = CODES_, SCALES = HIGH + HIGH_, MINS = SCALES + SCALES_, BYTES = MINS + MINS_;

    // Where a warp reads: each lane its 16 bytes of every 512.
    const u8 *codes, *high, *scales, *mins;

    DEVICE_METHOD void seek(const Part& part, long step, int lane) {
        codes = part.codes + step * CODES_ + lane * 16;
        if (HIGH_) high = part.high + step * HIGH_ + lane * 16;
        if (SCALES_) scales = part.scales + step * SCALES_ + lane * 16;
        if (MINS_) mins = part.mins + step * MINS_ + lane * 16;
    }
    DEVICE_METHOD void skip(int steps) {
        codes += steps * CODES_;
        if (HIGH_) high += steps * HIGH_;
        if (SCALES_) scales += steps * SCALES_;
        if (MINS_) mins += steps * MINS_;
    }
    template <int TO, int COUNT, int AT> DEVICE_METHOD static void copy(u32 to, const u8* from, int lane) {
        if constexpr (AT < COUNT) {
            if (COUNT - AT >= 512 || lane * 16 < COUNT - AT) copy_begin<TO + AT, AT>(to, from);
            copy<TO, COUNT, AT + 512>(to, from, lane);
        }
    }
    // Begins to copy one step; `to` is this lane's place.
    DEVICE_METHOD void fetch(u32 to, int lane) const {
        copy<CODES, CODES_, 0>(to, codes, lane);
        copy<HIGH, HIGH_, 0>(to, high, lane);
        copy<SCALES, SCALES_, 0>(to, scales, lane);
        copy<MINS, MINS_, 0>(to, mins, lane);
    }
};

// Up to 4 x NT rows of activations, each as two columns of the matrix instruction: the value in bf16, and the rest of it
// in bf16. Together they carry 16 bits, and their products are added at the end. A row is octets of (8 values, 8 rests),
// 32 bytes each; lane 4g + t reads column g, which is row g / 2, the rest if g is odd, and gets results of row t.
template <int NT> struct Columns {
    const u8* x[NT];        // this lane's column in each group of eight; beyond the last row any, its results are unused
    const float* sums[NT];  // its row's sums of 16 columns
    bool rest;

    DEVICE_METHOD uint4 octet(int nt, int octet) const {
        return *(const uint4*)(x[nt] + octet * 32);
    }
    // Four values from an octet's first or second half.
    DEVICE_METHOD uint2 four(int nt, int octet, int half) const {
        return *(const uint2*)(x[nt] + octet * 32 + half * 8);
    }
    // The sum of 16 or 32 columns in two parts that tf32 holds: the upper bits, or the rest.
    DEVICE_METHOD float part_of(float sum) const {
        float high = __uint_as_float(__float_as_uint(sum) & 0xffffe000);
        return rest ? sum - high : high;
    }
    DEVICE_METHOD float sum_16(int nt, int block) const { return part_of(sums[nt][block]); }
    DEVICE_METHOD float sum_32(int nt, int block) const {
        float2 both = *(const float2*)(sums[nt] + block * 2);
        return part_of(both.x + both.y);
    }
};

// d = a (two steps of 16 columns: a[0..4] and a[4..8]) * one block of 32 activations.
DEVICE void mma_block(float d[4], const u32 a[8], uint4 x) {
    mma_bf16_first(d, a, x.x, x.y);
    mma_bf16(d, a + 4, x.z, x.w);
}
// acc += scale * d for both rows, value and rest together.
DEVICE void add_scaled(float acc[4], const float d[4], float scale0, float scale1) {
    acc[0] = __fmaf_rn(scale0, d[0] + d[1], acc[0]);
    acc[2] = __fmaf_rn(scale1, d[2] + d[3], acc[2]);
}

// Four codes below 128, one in each byte, as bf16 of 128 + code: a code in the low bits of 0x4300. What is too much is
// taken off with the blocks' sums, by one product for many blocks. a[0] and a[2] are the pairs.
#define CODE_OFFSET 128
DEVICE void widen(u32 bytes, u32* a) {
    a[0] = __byte_perm(bytes, 0x43434343, 0x4140);
    a[2] = __byte_perm(bytes, 0x43434343, 0x4342);
}
// Eight codes of four bits: value i below 4 is the low half of byte i, value 4 + i the high half.
DEVICE u32 low_nibbles(u32 word) { return word & 0x0f0f0f0f; }
DEVICE u32 high_nibbles(u32 word) { return word >> 4 & 0x0f0f0f0f; }
// The fifth bits of four codes at bit 4 of their bytes, where group q of four has them at bit q.
DEVICE u32 fifth_bits(u32 word, int q) { return (q < 4 ? word << (4 - q) : word >> (q - 4)) & 0x10101010; }
// The fifth and sixth bits, where group q of four has them at bits 2q and 2q + 1.
DEVICE u32 upper_pairs(u32 word, int q) { return (q < 2 ? word << (4 - 2 * q) : word >> (2 * q - 4)) & 0x30303030; }

DEVICE u32 byte_of(u32 word, int index) { return (word >> (8 * index)) & 0xff; }
// A byte of a word as f32, without the slow conversion.
DEVICE float byte_as_f32(u32 word, int index) {
    return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7650 + index)) - 8388608.0f;
}
DEVICE u32 word_of(const uint4& v, int index) {
    return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}

// Where a code lies: tile, half of its rows, lane and octet place, for single values.
struct Place {
    long tile;
    int half, lane, block, i;
};
DEVICE Place place_of(const Part& part, int row, int column) {
    Place p;
    p.tile = (long)(row / 16) * part.groups + column / 128;
    p.half = row % 16 / 8;
    p.lane = row % 8 * 4 + column % 32 / 8;
    p.block = column % 128 / 32;
    p.i = column % 8;
    return p;
}
DEVICE u32 nibble_at(const Part& part, const Place& p) {
    u32 word = *(const u32*)(part.codes + p.tile * 1024 + p.half * 512 + p.lane * 16 + p.block * 4);
    return word >> (8 * (p.i % 4) + 4 * (p.i / 4)) & 15;
}
DEVICE u32 upper_bit_at(const Part& part, const Place& p) {
    u32 word = *(const u32*)(part.high + p.tile * 256 + p.half * 128 + p.lane * 4);
    return word >> (8 * (p.i % 4) + 2 * p.block + p.i / 4) & 1;
}
// The f16 of a 32-column block: (tile, row, block).
DEVICE float block_f16(const u8* plane, long tile, int row, int block) {
    return f16_to_f32(*(const u16*)(plane + tile * 128 + row % 16 * 8 + block * 2));
}
// One of the four f16 of a row of a tile.
DEVICE float scale_of(uint2 four, int block) {
    u32 both = block < 2 ? four.x : four.y;
    return f16_to_f32(block % 2 ? both >> 16 : both & 0xffff);
}
