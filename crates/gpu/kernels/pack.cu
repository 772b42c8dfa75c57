// Packs stored rows into the planes of `layout.rs`, which says what lies where; `Format::pack_row` there is the
// specification. See docs/kernels.md#pack.
//
// Grid (tiles of 128 columns, groups of 16 rows), 64 threads: thread 4 row + t has octet t of each 32 columns of its
// row. Source rows are contiguous, as in a file; blocks are a multiple of two bytes. Every byte of a tile is written:
// zeros where rows or columns are missing.
#include "prelude.cuh"

// What FORMAT is defined as, with MINS and BITS.
#define F32 0
#define HALVES 1  // F16, and with BITS BF16
#define Q8_0 2  // and with BITS MXFP8, whose codes stay as they are
#define BLOCKS32 3  // Q4_0, Q4_1, Q5_0 and Q5_1: MINS and BITS say which
#define SUPERBLOCKS 4  // Q4_K, and with BITS Q5_K
#define Q6_K 5
#define FP8_128 7
#define CODED 6  // runs of 16 values as `layout.rs` makes them of the rarer formats, with MINS or without

struct Rows {
    const u8* stored;  // (rows, bytes)
    int bytes, rows, columns, pad;
};

DEVICE u64 load_8(const u8* at) {
    const u16* from = (const u16*)at;
    return (u64)from[0] | (u64)from[1] << 16 | (u64)from[2] << 32 | (u64)from[3] << 48;
}
DEVICE u32 load_4(const u8* at) {
    const u16* from = (const u16*)at;
    return (u32)from[0] | (u32)from[1] << 16;
}
// Eight codes of four bits, at the bottom of a byte each, in one word: neighbours 16 bits apart, pair behind pair.
DEVICE u32 octet(u64 bytes) {
    u32 word = 0;
    for (int i = 0; i < 8; i++) word |= (u32)(bytes >> 8 * i & 15) << (i % 2 * 16 + i / 2 * 4);
    return word;
}
// The upper bits of eight codes, where `upper_rotation` of tile.cuh says.
DEVICE u32 upper_bits(u32 bits, int block) {
    u32 word = 0;
    for (int i = 0; i < 8; i++) {
        const int two = block * 2 + i / 4;
        word |= (bits >> i & 1) << (6 + i / 2 % 2 * 4 + i % 2 * 16 + two % 4 + two / 4 * 8) % 32;
    }
    return word;
}

// The same of two bits each, at the bottom of a byte, where `rotation` of q6_k.cuh says.
DEVICE u32 upper_pairs(u64 bytes, int block) {
    u32 word = 0;
    for (int i = 0; i < 8; i++)
        word |= (u32)(bytes >> 8 * i & 3) << (4 + i / 2 % 2 * 4 + i % 2 * 16 + i / 4 * 2 + block % 2 * 8) % 32;
    return word;
}

// Words of codes that are rotated left by two bits: see `two_low_codes`.
DEVICE void rotate_left(u32 codes[4]) {
    for (int i = 0; i < 4; i++) codes[i] = codes[i] << 2 | codes[i] >> 30;
}

// What a part keeps of itself as a whole, behind one of its planes (`Format::part_plane`): the largest magnitude's
// bits, and the inverse of the power of two that its values are multiplied by.
DEVICE u32* whole_of(const Part& part) {
#if FORMAT == Q6_K
    return (u32*)(part.mins + (long)row_tiles_left(part) * part.groups * 16);
#elif FORMAT == SUPERBLOCKS || FORMAT == Q8_0 || FORMAT == BLOCKS32
    return (u32*)part.mins;
#else
    return (u32*)part.scales;
#endif
}
DEVICE void leave_most(const Part& part, u32 most) {
    most = warp_max(most);
    if (threadIdx.x % WARP == 0) atomicMax(whole_of(part), most);
}

KERNEL __launch_bounds__(64) pack(Part part, Rows rows) {
    let_next_start();
    wait_for_inputs();
    const int row = threadIdx.x / 4, t = threadIdx.x % 4, half = row / 8, lane = row % 8 * 4 + t;
    const long tile = (long)blockIdx.y * part.groups + blockIdx.x;
    const bool here = blockIdx.y * 16 + row < rows.rows;
    const u8* stored = rows.stored + (long)(blockIdx.y * 16 + row) * rows.bytes;
    const int column = blockIdx.x * 128;
#if FORMAT == F32
    u32* to = (u32*)(part.codes + tile * 8192 + row * 512);
    for (int i = 0; i < 32; i++) {
        const int at = t * 32 + i;
        to[at] = here && column + at < rows.columns ? load_4(stored + (column + at) * 4) : 0;
    }
#elif FORMAT == HALVES
    u32 most = 0;
    for (int block = 0; block < 4; block++) {
        u16 values[8];
        for (int i = 0; i < 8; i++) {
            const int at = column + block * 32 + t * 8 + i;
            values[i] = here && at < rows.columns ? ((const u16*)stored)[at] : 0;
            most = max(most, (u32)values[i] & 0x7fff);
        }
        *(uint4*)(part.codes + tile * 4096 + block * 1024 + half * 512 + lane * 16) =
            make_uint4(pair(values[0], values[1]), pair(values[2], values[3]), pair(values[4], values[5]),
                       pair(values[6], values[7]));
    }
    if (BITS) leave_most(part, most);
#elif FORMAT == Q8_0 || FORMAT == BLOCKS32
    const int block_bytes = FORMAT == Q8_0 ? 34 : 2 + 2 * MINS + 4 * BITS + 16;
    u32 codes[4] = {0, 0, 0, 0}, high = 0;
    const u64 higher = BITS ? 0 : 0x8080808080808080;
    u64 octets[4] = {higher, higher, higher, higher};
    u16 scales[4] = {0, 0, 0, 0}, mins[4] = {0, 0, 0, 0};
    for (int block = 0; block < 4; block++) {
        if (!here || column + block * 32 >= rows.columns) continue;
        const u8* from = stored + (column / 32 + block) * block_bytes;
        scales[block] = *(const u16*)from;
        if (MINS) mins[block] = *(const u16*)(from + 2);
        const u8* bits = from + 2 + 2 * MINS;
        const u8* low = bits + (FORMAT == Q8_0 ? 0 : 4 * BITS);
        if (FORMAT == Q8_0) {
            octets[block] = load_8(low + t * 8) ^ higher;
        } else {
            // Low halves are the first 16 values, high halves the others.
            codes[block] = octet(load_8(low + t % 2 * 8) >> (t / 2 * 4));
            if (BITS) high |= upper_bits(load_4(bits) >> 8 * t & 0xff, block);
        }
    }
    if (FORMAT == Q8_0) {
        for (int two = 0; two < 2; two++)
            *(uint4*)(part.codes + tile * 2048 + two * 1024 + half * 512 + lane * 16) =
                make_uint4((u32)octets[2 * two], (u32)(octets[2 * two] >> 32), (u32)octets[2 * two + 1],
                           (u32)(octets[2 * two + 1] >> 32));
    } else {
        if (!MINS) rotate_left(codes);
        *(uint4*)(part.codes + tile * 1024 + half * 512 + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        if (BITS) *(u32*)(part.high + tile * 256 + half * 128 + lane * 4) = high;
    }
    if (t == 0) {
        *(uint2*)(part.scales + tile * 128 + row * 8) = make_uint2(pair(scales[0], scales[1]), pair(scales[2], scales[3]));
        if (MINS)
            *(uint2*)(part.mins + tile * 128 + row * 8) = make_uint2(pair(mins[0], mins[1]), pair(mins[2], mins[3]));
    }
    if (FORMAT == Q8_0 ? !BITS : !MINS) {
        u32 most = 0;
        for (int block = 0; block < 4; block++) most = max(most, (u32)scales[block] & 0x7fff);
        leave_most(part, most);
    }
#elif FORMAT == FP8_128
    const u8* from = stored + (long)blockIdx.x * 132;
    u64 octets[4] = {0, 0, 0, 0};
    if (here)
        for (int block = 0; block < 4; block++) octets[block] = load_8(from + 4 + block * 32 + t * 8);
    for (int two = 0; two < 2; two++)
        *(uint4*)(part.codes + tile * 2048 + two * 1024 + half * 512 + lane * 16) =
            make_uint4((u32)octets[2 * two], (u32)(octets[2 * two] >> 32), (u32)octets[2 * two + 1], (u32)(octets[2 * two + 1] >> 32));
    if (t == 0) *(u32*)(part.scales + tile * 64 + row * 4) = here ? load_4(from) : 0;
#elif FORMAT == SUPERBLOCKS
    const int block_bytes = 16 + 32 * BITS + 128, first = blockIdx.x % 2 * 4;
    const u8* from = stored + (long)(blockIdx.x / 2) * block_bytes;
    u32 codes[4] = {0, 0, 0, 0}, high = 0;
    for (int i = 0; i < 4; i++) {
        const int block = first + i;
        if (!here || column >= rows.columns) continue;
        codes[i] = octet(load_8(from + 16 + 32 * BITS + block / 2 * 32 + t * 8) >> (block % 2 * 4));
        if (BITS) {
            const u64 bits = load_8(from + 16 + t * 8) >> block & 0x0101010101010101;
            // Byte i's bit becomes bit i of the top byte.
            high |= upper_bits((u32)(bits * 0x0102040810204080 >> 56), i);
        }
    }
    rotate_left(codes);
    *(uint4*)(part.codes + tile * 1024 + half * 512 + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    if (BITS) *(u32*)(part.high + tile * 256 + half * 128 + lane * 4) = high;
    // Two tiles share the headers of their superblocks.
    if (first == 0) {
        const u32 word = here && column < rows.columns ? load_4(from + t * 4) : 0;
        *(u32*)(part.scales + tile / 2 * 256 + row * 16 + t * 4) = word;
        // Minima are eight times as large as scales.
        leave_most(part, t ? 0 : (u32)max((int)(word & 0x7fff), (int)(word >> 16 & 0x7fff) - 0xc00));
    }
#elif FORMAT == Q6_K
    const int first = blockIdx.x % 2 * 4;
    const u8* from = stored + (long)(blockIdx.x / 2) * 210;
    u32 codes[4] = {0, 0, 0, 0}, high[2] = {0, 0};
    for (int i = 0; i < 4; i++) {
        const int block = first + i, side = block / 4, within = block % 4 * 32;
        if (!here || column >= rows.columns) continue;
        codes[i] = octet(load_8(from + side * 64 + within % 64 + 8 * t) >> (within / 64 * 4));
        high[i / 2] |= upper_pairs(load_8(from + 128 + side * 32 + 8 * t) >> (within / 32 * 2), i);
    }
    *(uint4*)(part.codes + tile * 1024 + half * 512 + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    *(uint2*)(part.high + tile * 512 + half * 256 + lane * 8) = make_uint2(high[0], high[1]);
    if (first == 0) {
        const bool some = here && column < rows.columns;
        *(u32*)(part.scales + tile / 2 * 256 + row * 16 + t * 4) = some ? load_4(from + 192 + t * 4) : 0;
        const u16 scale = some ? *(const u16*)(from + 208) : 0;
        if (t == 0) *(u16*)(part.mins + tile / 2 * 32 + row * 2) = scale;
        leave_most(part, scale & 0x7fff);
    }
#elif FORMAT == CODED
    const int run_bytes = 12 + 4 * MINS;
    u32 codes[4] = {0, 0, 0, 0}, scales[2] = {0, 0}, mins[2] = {0, 0};
    for (int run = 0; run < 8; run++) {
        if (!here || column + run * 16 >= rows.columns) continue;
        const u8* from = stored + (long)(column / 16 + run) * run_bytes;
        // Eight codes in the halves of four bytes: this thread's if its octet lies in this run.
        if (run % 2 == t / 2) {
            const u32 eight = load_4(from + t % 2 * 4);
            for (int i = 0; i < 8; i++) codes[run / 2] |= (eight >> 4 * i & 15) << (i % 2 * 16 + i / 2 * 4);
        }
        if (run / 2 == t) {
            scales[run % 2] = load_4(from + 8);
            if (MINS) mins[run % 2] = load_4(from + 12);
        }
    }
    *(uint4*)(part.codes + tile * 1024 + half * 512 + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    *(uint2*)(part.scales + tile * 512 + row * 32 + t * 8) = make_uint2(scales[0], scales[1]);
    if (MINS) *(uint2*)(part.mins + tile * 512 + row * 32 + t * 8) = make_uint2(mins[0], mins[1]);
#endif
}

#if FORMAT == HALVES && BITS
// BF16 values of a whole part, packed, become f16: times a power of two that brings the largest to [2^13, 2^14), whose
// inverse is left behind the largest. Grid and block: any; a thread has eight values at a time.
KERNEL to_f16(Part part) {
    let_next_start();
    wait_for_inputs();
    const u32* most = whole_of(part);
    // The exponent of the largest; a part of zeros stays as it is, and so does one with infinities.
    const int exponent = (int)(*most >> 7);
    const int up = exponent == 0 || exponent == 255 ? 0 : min(140 - exponent, 126);
    const float by = __uint_as_float((u32)(127 + up) << 23);
    uint4* values = (uint4*)part.codes;
    const long eights = (long)((part.rows + 15) / 16) * part.groups * 256;
    for (long at = blockIdx.x * (long)blockDim.x + threadIdx.x; at < eights; at += gridDim.x * (long)blockDim.x) {
        const uint4 v = values[at];
        auto two = [&](u32 both) {
            return pack_f16x2(__fmul_rn(__uint_as_float(both << 16), by), __fmul_rn(__uint_as_float(both & 0xffff0000), by));
        };
        values[at] = make_uint4(two(v.x), two(v.y), two(v.z), two(v.w));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) ((float*)whole_of(part))[1] = __uint_as_float((u32)(127 - up) << 23);
}
#elif FORMAT == SUPERBLOCKS || FORMAT == Q6_K || FORMAT == Q8_0 || FORMAT == BLOCKS32
// Scales of a whole part, packed, are multiplied by the power of two that superblocks.cuh, q6_k.cuh, q8_0.cuh and
// blocks32.cuh ask for. Grid and block: any; a thread has a superblock, or four blocks, at a time.
KERNEL to_f16(Part part) {
    let_next_start();
    wait_for_inputs();
    // Scales are to be below 2^BELOW; values come out 2^DOWN times as small.
    const bool FOURS = FORMAT == Q8_0 || FORMAT == BLOCKS32;
    const int BELOW = FOURS ? 15 : FORMAT == Q6_K ? 5 : 6;
    const int DOWN = FORMAT == Q8_0 ? 24 : FORMAT == BLOCKS32 ? 22 : FORMAT == Q6_K ? 20 : 18;
    const u32* most = whole_of(part);
    // The largest is below 2^(exponent - 14). Where it needs to be made smaller, products are NaN.
    const int exponent = (int)(*most >> 10), up = max(BELOW + 14 - exponent, 0);
    auto power = [](int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); };
    const float by = power(up);
    auto scaled = [&](u32 both, float second) {
        return pack_f16x2(__fmul_rn(f16_to_f32((u16)both), by), __fmul_rn(f16_to_f32((u16)(both >> 16)), second));
    };
    const long count = (long)((part.rows + 15) / 16) * part.groups * (FOURS ? 16 : 8);
    for (long at = blockIdx.x * (long)blockDim.x + threadIdx.x; at < count; at += gridDim.x * (long)blockDim.x) {
#if FORMAT == Q8_0 || FORMAT == BLOCKS32
        uint2* four = (uint2*)part.scales + at;
        *four = make_uint2(scaled(four->x, by), scaled(four->y, by));
#elif FORMAT == Q6_K
        u16* scale = (u16*)part.mins + at;
        *scale = (u16)scaled(*scale, by);
#else
        u32* both = (u32*)(part.scales + at * 16);
        *both = scaled(*both, -64.0f * by);
#endif
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) ((float*)whole_of(part))[1] = power(DOWN - up);
}
#endif
