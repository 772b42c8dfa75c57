// What formats share. A tile is 16 rows x 128 columns; lane 4g + t of a warp holds rows g and g + 8 of it, and of each
// 32 columns the eight from 8t on ("octet"), unless its format says otherwise.
#pragma once
#include "quant/columns.cuh"

// A step of a product takes 128 or 256 columns of 16 rows. Its bytes lie one plane after the other where a warp has
// copied them; each plane's are contiguous in memory.
template <int CODES_, int HIGH_, int SCALES_, int MINS_> struct Staged {
    static const int CODES = 0, HIGH = CODES_, SCALES = HIGH + HIGH_, MINS = SCALES + SCALES_, BYTES = MINS + MINS_;

    template <int TO, int COUNT, int AT> DEVICE_METHOD static void copy(u32 to, const u8* from, int lane) {
        if constexpr (AT < COUNT) {
            if (COUNT - AT >= 512 || lane * 16 < COUNT - AT) copy_begin<TO + AT, AT>(to, from);
            copy<TO, COUNT, AT + 512>(to, from, lane);
        }
    }
    // Begins to copy one step; `to` is this lane's place.
    DEVICE_METHOD static void fetch(const Part& part, u32 step, u32 to, int lane) {
        copy<CODES, CODES_, 0>(to, part.codes + (long)step * CODES_ + lane * 16, lane);
        if (HIGH_) copy<HIGH, HIGH_, 0>(to, part.high + (long)step * HIGH_ + lane * 16, lane);
        if (SCALES_) copy<SCALES, SCALES_, 0>(to, part.scales + (long)step * SCALES_ + lane * 16, lane);
        if (MINS_) copy<MINS, MINS_, 0>(to, part.mins + (long)step * MINS_ + lane * 16, lane);
    }
};

// Eight codes of four bits: value i below 4 is the low half of byte i, value 4 + i the high half.
DEVICE u32 low_nibbles(u32 word) { return word & 0x0f0f0f0f; }
DEVICE u32 high_nibbles(u32 word) { return word >> 4 & 0x0f0f0f0f; }
// A word's bits moved up, or down where negative.
DEVICE u32 moved(u32 word, int up) { return up >= 0 ? word << up : word >> -up; }
// Four 4-bit codes of a word's low (`which` 0) or high halves with a fifth bit each above them: bit q of each byte of
// `upper` for group q of four. At bit `at` of each byte.
DEVICE u32 five_bits(u32 word, int which, u32 upper, int q, int at) {
    const u32 low = moved(word, at - 4 * which) & (0x01010101u * (15 << at));
    return low | (moved(upper, at + 4 - q) & (0x01010101u << (at + 4)));
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
