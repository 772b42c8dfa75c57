// What formats share. A tile is 16 rows x 128 columns; lane 4g + t of a warp holds rows g and g + 8 of it, and of each
// 32 columns the eight from 8t on ("octet"), unless its format says otherwise.
#pragma once
#include "prelude.cuh"

// The activations of up to 8 x NT rows, split into two halves each: high part and rest. A row is octets of
// (8 high, 8 rest), 32 bytes each.
template <int NT> struct Columns {
    const u8* x[NT];     // this lane's row in each group of eight, null beyond the last
    const u8* sums[NT];  // (pairs of 32-column sums, high then rest): 8 bytes each

    DEVICE_METHOD void octet(int nt, int octet, uint4& high, uint4& rest) const {
        if (x[nt]) {
            high = *(const uint4*)(x[nt] + octet * 32);
            rest = *(const uint4*)(x[nt] + octet * 32 + 16);
        } else {
            high = make_uint4(0, 0, 0, 0);
            rest = high;
        }
    }
    // Four values from an octet's first or second half.
    DEVICE_METHOD void four(int nt, int octet, int half, uint2& high, uint2& rest) const {
        if (x[nt]) {
            high = *(const uint2*)(x[nt] + octet * 32 + half * 8);
            rest = *(const uint2*)(x[nt] + octet * 32 + 16 + half * 8);
        } else {
            high = make_uint2(0, 0);
            rest = high;
        }
    }
    // The sums of 32-column blocks 2p and 2p + 1.
    DEVICE_METHOD uint2 sum_pair(int nt, int p) const {
        return sums[nt] ? *(const uint2*)(sums[nt] + p * 8) : make_uint2(0, 0);
    }
};

// d += a (two steps of 16 columns: a[0..4] and a[4..8]) * one block of 32 activations.
DEVICE void mma_block(float d[4], const u32 a[8], uint4 high, uint4 rest) {
    mma_f16(d, a, high.x, high.y);
    mma_f16(d, a, rest.x, rest.y);
    mma_f16(d, a + 4, high.z, high.w);
    mma_f16(d, a + 4, rest.z, rest.w);
}

// Constants that turn the bits of a code into its value times a scale: even pairs lie in the low bits of a half, odd
// ones four bits higher. (1024 + code) * even + even_offset, (1024 + 16 code) * odd + odd_offset; all exact.
struct Unpack {
    u32 even, even_offset, odd, odd_offset;
};
// Eight codes of one row from 8 nibbles (pair j is nibbles j and j + 4) and their upper bits, placed by the format at
// bits 4 (even) or 8 (odd) and 16 above: a[0], a[2] are the first step's, a[4], a[6] the second's.
DEVICE void unpack_codes(u32 nibbles, const u32 upper[4], const Unpack& u, u32* a) {
    u32 later = nibbles >> 8;
    a[0] = fma_f16x2((nibbles & 0x000f000f) | 0x64006400 | upper[0], u.even, u.even_offset);
    a[2] = fma_f16x2((nibbles & 0x00f000f0) | 0x64006400 | upper[1], u.odd, u.odd_offset);
    a[4] = fma_f16x2((later & 0x000f000f) | 0x64006400 | upper[2], u.even, u.even_offset);
    a[6] = fma_f16x2((later & 0x00f000f0) | 0x64006400 | upper[3], u.odd, u.odd_offset);
}
// One upper bit per code, as a byte (pair j is bits j and j + 4).
DEVICE void upper_1(u32 byte, u32 upper[4]) {
    u32 spread = (byte & 0x0f) | (byte & 0xf0) << 12;
    upper[0] = (spread << 4) & 0x00100010;
    upper[1] = (spread << 7) & 0x01000100;
    upper[2] = (spread << 2) & 0x00100010;
    upper[3] = (spread << 5) & 0x01000100;
}
// Two upper bits per code, as 16 bits (pair j is bits 2j.. and 8 + 2j..).
DEVICE void upper_2(u32 bits, u32 upper[4]) {
    u32 spread = (bits & 0xff) | (bits & 0xff00) << 8;
    upper[0] = (spread << 4) & 0x00300030;
    upper[1] = (spread << 6) & 0x03000300;
    upper[2] = spread & 0x00300030;
    upper[3] = (spread << 2) & 0x03000300;
}
DEVICE u32 byte_of(u32 word, int index) { return (word >> (8 * index)) & 0xff; }
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
    return (word >> (4 * (p.i / 2 + 4 * (p.i % 2)))) & 15;
}
DEVICE u32 upper_bit_at(const Part& part, const Place& p) {
    u32 byte = part.high[p.tile * 256 + p.half * 128 + p.lane * 4 + p.block];
    return (byte >> (p.i / 2 + 4 * (p.i % 2))) & 1;
}
// The f16 of a 32-column block: (tile, row, block).
DEVICE float block_f16(const u8* plane, long tile, int row, int block) {
    return f16_to_f32(*(const u16*)(plane + tile * 128 + row % 16 * 8 + block * 2));
}
