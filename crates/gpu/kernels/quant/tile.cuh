// What formats share. A tile is 16 rows x 128 columns; lane 4g + t of a warp holds rows g and g + 8 of it, and of each
// 32 columns the eight from 8t on ("octet"), unless its format says otherwise.
#pragma once
#include "prelude.cuh"

// Up to 4 x NT rows of activations, each as two columns of the matrix instruction: the value in bf16, and the rest of it
// in bf16. Together they carry 16 bits, and their products are added at the end. A row is octets of (8 values, 8 rests),
// 32 bytes each; lane 4g + t reads column g, which is row g / 2, the rest if g is odd.
template <int NT> struct Columns {
    const u8* x[NT];     // this lane's column in each group of eight, null beyond the last
    const u8* sums[NT];  // the same of the sums of 32 columns: (sum, rest of it) in f32

    DEVICE_METHOD uint4 octet(int nt, int octet) const {
        return x[nt] ? *(const uint4*)(x[nt] + octet * 32) : make_uint4(0, 0, 0, 0);
    }
    // Four values from an octet's first or second half.
    DEVICE_METHOD uint2 four(int nt, int octet, int half) const {
        return x[nt] ? *(const uint2*)(x[nt] + octet * 32 + half * 8) : make_uint2(0, 0);
    }
    DEVICE_METHOD float sum(int nt, int block) const { return sums[nt] ? *(const float*)(sums[nt] + block * 8) : 0.0f; }
};

// d += a (two steps of 16 columns: a[0..4] and a[4..8]) * one block of 32 activations.
DEVICE void mma_block(float d[4], const u32 a[8], uint4 x) {
    mma_bf16(d, a, x.x, x.y);
    mma_bf16(d, a + 4, x.z, x.w);
}
// acc += scale * d for both rows, value and rest together.
DEVICE void add_scaled(float acc[4], const float d[4], float scale0, float scale1) {
    acc[0] = __fmaf_rn(scale0, d[0] + d[1], acc[0]);
    acc[2] = __fmaf_rn(scale1, d[2] + d[3], acc[2]);
}

// Eight codes of one row, less an offset, as bf16: 8 nibbles (pair j is nibbles j and j + 4) and their upper bits, placed
// by the format at bit 4 and above. A code in the low bits of 0x4300 is 128 + code; `offset` is minus (128 + what the
// format takes off), twice. a[0], a[2] are the first step's, a[4], a[6] the second's.
DEVICE void unpack_codes(u32 nibbles, const u32 upper[4], u32 offset, u32* a) {
#pragma unroll
    for (int j = 0; j < 4; j++) a[2 * j] = add_bf16x2(((nibbles >> (4 * j)) & 0x000f000f) | 0x43004300 | upper[j], offset);
}
#define OFFSET_0 0xc300c300   // -128
#define OFFSET_8 0xc308c308   // -136
#define OFFSET_16 0xc310c310  // -144
#define OFFSET_32 0xc320c320  // -160

// One upper bit per code, as a byte (pair j is bits j and j + 4).
DEVICE void upper_1(u32 byte, u32 upper[4]) {
    u32 spread = (byte & 0x0f) | (byte & 0xf0) << 12;
    upper[0] = (spread << 4) & 0x00100010;
    upper[1] = (spread << 3) & 0x00100010;
    upper[2] = (spread << 2) & 0x00100010;
    upper[3] = (spread << 1) & 0x00100010;
}
// Two upper bits per code, as 16 bits (pair j is bits 2j.. and 8 + 2j..).
DEVICE void upper_2(u32 bits, u32 upper[4]) {
    u32 spread = (bits & 0xff) | (bits & 0xff00) << 8;
    upper[0] = (spread << 4) & 0x00300030;
    upper[1] = (spread << 2) & 0x00300030;
    upper[2] = spread & 0x00300030;
    upper[3] = (spread >> 2) & 0x00300030;
}
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
// One of the four f16 of a row of a tile.
DEVICE float scale_of(uint2 four, int block) {
    u32 both = block < 2 ? four.x : four.y;
    return f16_to_f32(block % 2 ? both >> 16 : both & 0xffff);
}
