// What formats share. A tile is 16 rows x 128 columns; lane 4g + t of a warp holds rows g and g + 8 of it, and of each
// 32 columns the eight from 8t on ("octet").
//
// A format says what lies where (`Bytes`), what one value is (`value`, in f32, as stored), and how values become
// operands of the tensor cores (`fragments`): one f16 for each value, by the same roundings wherever they are
// multiplied. `fragments(staged, lane, use)` goes through a step's sixteens of columns in order and calls use(k, a):
// a[0] and a[1] are two columns of rows g and g + 8, a[2] and a[3] the next two. Of 32 columns, k even takes 8t to 8t +
// 3, k odd 8t + 4 to 8t + 7. Sums are to be multiplied by `unscale(part)`, a power of two.
#pragma once
#include "prelude.cuh"

// A step of a product takes 128 or 256 columns of 16 rows. Its bytes lie one plane after the other where a warp has
// copied them; each plane's are contiguous in memory.
template <int CODES_, int HIGH_, int SCALES_, int MINS_> struct Staged {
    static const int CODES = 0, HIGH = CODES_, SCALES = HIGH + HIGH_, MINS = SCALES + SCALES_, BYTES = MINS + MINS_;
    static const int PIECES = (CODES_ > 0) + (HIGH_ > 0) + (SCALES_ > 0) + (MINS_ > 0);

    template <int TO, int COUNT, int AT> DEVICE_METHOD static void copy(u32 to, const u8* from, int lane) {
        if constexpr (AT < COUNT) {
            if (COUNT - AT >= 512 || lane * 16 < COUNT - AT) copy_async_at<TO + AT, AT>(to, from);
            copy<TO, COUNT, AT + 512>(to, from, lane);
        }
    }
    // Begins to copy one step; `to` is this lane's place.
    DEVICE_METHOD static void fetch(const Part& part, u32 step, u32 to, int lane) { Cursor(part, step, lane).fetch(to, lane); }

    // The same by the copy engine, for one thread: a barrier sees all bytes come.
    DEVICE_METHOD static void fetch_bulk(const Part& part, u32 step, u32 to, u32 barrier) {
        mbarrier_expect(barrier, BYTES);
        bulk<CODES_>(to, part.codes, step, barrier);
        bulk<HIGH_>(to + HIGH, part.high, step, barrier);
        bulk<SCALES_>(to + SCALES, part.scales, step, barrier);
        bulk<MINS_>(to + MINS, part.mins, step, barrier);
    }
    template <int COUNT> DEVICE_METHOD static void bulk(u32 to, const u8* plane, u32 step, u32 barrier) {
        if constexpr (COUNT > 0) copy_bulk(to, plane + (u64)step * COUNT, COUNT, barrier);
    }
    // Where a lane reads next, step after step.
    struct Cursor {
        const u8 *codes, *high, *scales, *mins;

        DEVICE_METHOD Cursor(const Part& part, u32 step, int lane)
            : codes(part.codes + (long)step * CODES_ + lane * 16), high(part.high + (long)step * HIGH_ + lane * 16),
              scales(part.scales + (long)step * SCALES_ + lane * 16), mins(part.mins + (long)step * MINS_ + lane * 16) {}
        DEVICE_METHOD void fetch(u32 to, int lane) const {
            copy<CODES, CODES_, 0>(to, codes, lane);
            if (HIGH_) copy<HIGH, HIGH_, 0>(to, high, lane);
            if (SCALES_) copy<SCALES, SCALES_, 0>(to, scales, lane);
            if (MINS_) copy<MINS, MINS_, 0>(to, mins, lane);
        }
        DEVICE_METHOD void move(int steps) {
            codes += (long)steps * CODES_;
            if (HIGH_) high += (long)steps * HIGH_;
            if (SCALES_) scales += (long)steps * SCALES_;
            if (MINS_) mins += (long)steps * MINS_;
        }
    };
};

DEVICE u32 word_of(const uint4& v, int index) {
    return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}
// A word's bits moved up, or down where negative.
DEVICE u32 moved(u32 word, int up) { return up >= 0 ? word << up : word >> -up; }
DEVICE u32 byte_of(u32 word, int index) { return (word >> (8 * index)) & 0xff; }

// Upper bits of 32 codes of a lane, four octets, in a word: rotated right by `rotation`, those of pairs p and p + 1 (p
// even) of an octet are where the codes want them, at bits 6 and 10 and 16 further up.
DEVICE int upper_rotation(int block, int p) {
    const int two = block * 2 + p / 2;
    return two % 4 + two / 4 * 8;
}
DEVICE u32 rotate_right(u32 word, int by) { return by ? __funnelshift_r(word, word, by) : word; }

// Codes of an octet: two neighbours, 2p and 2p + 1, have their four low bits at bits 4p and 16 + 4p of a word, so that
// one mask puts both into the low bits of 1024. Returns two codes, exact in f16.
template <bool FIVE> DEVICE u32 two_codes(u32 word, u32 upper, int block, int p) {
    // Odd pairs are read four bits further up, which is sixteen times as much.
    const int at = p % 2 * 4;
    u32 bits = and_or(moved(word, -(p / 2 * 8)), 0x000f000fu << at, 0x64006400);
    if (FIVE) bits = and_or(rotate_right(upper, upper_rotation(block, p) + 2), 0x00010001u << (4 + at), bits);
    // 1024 and 64 are exact: so are differences.
    if (at == 0) return add_f16x2(bits, 0xe400e400u);
    return fma_f16x2(bits, 0x2c002c00, 0xd400d400u);
}
// The same in words that are rotated left by two bits: codes are read at bits 2 and 6, and are the low bits of an f16,
// which is then a whole number times 2^-24; below 2^11 an f16's bits count. Returns two codes times 2^-22 (of even
// pairs), or times 2^-18.
template <bool FIVE> DEVICE u32 two_low_codes(u32 word, u32 upper, int block, int p) {
    const int at = 2 + p % 2 * 4;
    const u32 rotated = p / 2 ? __byte_perm(word, 0, 0x0321) : word;
    const u32 bits = rotated & 0x000f000fu << at;
    return FIVE ? and_or(rotate_right(upper, upper_rotation(block, p)), 0x00010001u << (4 + at), bits) : bits;
}
// A byte of a word in the low bits of 1024, twice.
DEVICE u32 byte_above_1024(u32 word, u32 index) { return __byte_perm(word, 0x64006400, 0x5050 + index * 0x0101); }

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
    return word >> (16 * (p.i % 2) + 4 * (p.i / 2)) & 15;
}
// The same where words are rotated left by two bits.
DEVICE u32 rotated_nibble_at(const Part& part, const Place& p) {
    const u32 word = *(const u32*)(part.codes + p.tile * 1024 + p.half * 512 + p.lane * 16 + p.block * 4);
    return rotate_right(word, 2) >> (16 * (p.i % 2) + 4 * (p.i / 2)) & 15;
}
DEVICE u32 upper_bit_at(const Part& part, const Place& p) {
    u32 word = *(const u32*)(part.high + p.tile * 256 + p.half * 128 + p.lane * 4);
    return rotate_right(word, upper_rotation(p.block, p.i / 2)) >> (6 + p.i / 2 % 2 * 4 + p.i % 2 * 16) & 1;
}
// The f16 of a 32-column block: (tile, row, block).
DEVICE float block_f16(const u8* plane, long tile, int row, int block) {
    return f16_to_f32(*(const u16*)(plane + tile * 128 + row % 16 * 8 + block * 2));
}
