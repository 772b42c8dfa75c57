// Activations in the form that products read: records of 128 columns.
//
// For weights of codes a record has one scale: x = scale * q, where q is a whole number below 2^20 in size, in four
// digits (14.., 10..13, 4..9 and 0..3: signed bytes) or in two halves (q = 1024 h + l, each exact in f16). Products of
// codes and digits, or of codes and halves, are added as whole numbers without rounding, so both give the same bits. For
// weights of floats a record holds each value as bf16 and the rest of it as bf16, 16 bits together. Each record also
// leaves the sum of squares, where a norm is due. NaN and infinity make the scale NaN.
#pragma once
#include "prelude.cuh"

#define BLOCK 128
#define RECORD 640  // bytes: 512 of values; then as below
#define RECORD_PARTS 512  // sums of q of each 32 columns as f16, for the minima of superblocks
#define RECORD_SUMS 576   // (32 columns, h and l) the same as f32
#define RECORD_SCALE 608
#define RECORD_SQUARES 612

#define Q_MOST 1047552.0f        // 1023 * 1024: the upper half stays below 1024
#define WHOLE_F 12582912.0f      // 1.5 * 2^23: added to a number below 2^22, its last bits are the number
#define WHOLE_BITS 0x4b400000

// Four neighbouring columns of a lane, the warp's 128 together: their q, in the last 22 bits; and the scale.
DEVICE float whole_numbers(const float v[4], u32 q[4]) {
    u32 most = 0;
    for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffff);
    most = warp_most(most);
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(__uint_as_float(most)));
    // What is smaller than 2^-100 is nothing.
    inverse = most < 0x0d800000 ? 0.0f : __fmul_rn(inverse, Q_MOST);
    for (int i = 0; i < 4; i++) q[i] = __float_as_uint(__fmaf_rn(v[i], inverse, WHOLE_F));
    return most >= 0x7f800000 ? __uint_as_float(0x7fffffff) : __fmul_rn(__uint_as_float(most), 1.0f / Q_MOST);
}
DEVICE int whole_number(u32 q) { return (int)(q << 10) >> 10; }
// The sum over the eight lanes that have 32 columns.
DEVICE int sum_of_8(int value) {
    for (int step = 4; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

// Writes the digits: (64 columns, digit, octet of 32, 32 columns, 8), so that a lane of a product has 16 bytes of a digit.
template <bool SUMS> DEVICE void put_digits(u8* record, const float v[4], int lane) {
    u32 q[4];
    const float scale = whole_numbers(v, q);
    const u32 low = __byte_perm(q[0], q[1], 0x5140), high = __byte_perm(q[2], q[3], 0x5140);
    const u32 byte0 = __byte_perm(low, high, 0x5410), byte1 = __byte_perm(low, high, 0x7632);
    const u32 byte2 = __byte_perm(__byte_perm(q[0], q[1], 0x0062), __byte_perm(q[2], q[3], 0x0062), 0x5410);
    u32 digits[4];
    digits[0] = (byte1 >> 6 & 0x03030303) | (byte2 << 2 & 0xfcfcfcfc);
    digits[1] = byte1 >> 2 & 0x0f0f0f0f;
    digits[2] = (byte0 >> 4 & 0x0f0f0f0f) | (byte1 << 4 & 0x30303030);
    digits[3] = byte0 & 0x0f0f0f0f;
    u32* to = (u32*)(record + lane / 16 * 256 + lane % 8 / 2 * 16 + lane / 8 % 2 * 8 + lane % 2 * 4);
    for (int i = 0; i < 4; i++) to[i * 16] = digits[i];
    if (lane == 0) *(float*)(record + RECORD_SCALE) = scale;
    if (SUMS) {
        // Two digits' sums in one number: below 2^11 in size.
        int h = __dp4a((int)digits[0], 0x01010101, 0) * 65536 + __dp4a((int)digits[1], 0x01010101, 0);
        int l = __dp4a((int)digits[2], 0x01010101, 0) * 65536 + __dp4a((int)digits[3], 0x01010101, 0);
        h = sum_of_8(h);
        l = sum_of_8(l);
        const int both = lane & 2 ? l : h, upper = both >> 16, lower = both & 0xffff;
        if (lane % 8 < 4) {
            ((u32*)(record + RECORD_PARTS))[lane / 8 * 4 + lane % 4] = f32_to_f16((float)(lane & 1 ? lower : upper));
            if (!(lane & 1)) ((float*)(record + RECORD_SUMS))[lane / 8 * 2 + lane / 2 % 2] = (float)(upper * 16 + lower);
        }
    }
}
// Writes the halves: octets of (8 h, 8 l).
DEVICE void put_halves(u8* record, const float v[4], int lane) {
    u32 q[4];
    const float scale = whole_numbers(v, q);
    int h = 0, l = 0;
    u16* to = (u16*)(record + lane / 2 * 32 + lane % 2 * 8);
    for (int i = 0; i < 4; i++) {
        const int upper = whole_number(q[i]) >> 10, lower = q[i] & 1023;
        to[i] = f32_to_f16((float)upper);
        to[i + 8] = f32_to_f16((float)lower);
        h += upper;
        l += lower;
    }
    h = sum_of_8(h);
    l = sum_of_8(l);
    if (lane == 0) *(float*)(record + RECORD_SCALE) = scale;
    if (lane % 8 < 2) {
        // In two parts that f16 holds.
        const int sum = lane % 2 ? l : h, rest = sum & 31;
        ((u32*)(record + RECORD_PARTS))[lane / 8 * 2 + lane % 2] = pair(f32_to_f16((float)(sum - rest)), f32_to_f16((float)rest));
        ((float*)(record + RECORD_SUMS))[lane / 8 * 2 + lane % 2] = (float)sum;
    }
}
// Writes values and rests: octets of (8 values, 8 rests).
DEVICE void put_floats(u8* record, const float v[4], int lane) {
    u16 value[4], rest[4];
    for (int i = 0; i < 4; i++) {
        value[i] = f32_to_bf16(v[i]);
        rest[i] = f32_to_bf16(v[i] - bf16_to_f32(value[i]));
    }
    uint2* to = (uint2*)(record + lane / 2 * 32 + lane % 2 * 8);
    to[0] = make_uint2(pair(value[0], value[1]), pair(value[2], value[3]));
    to[2] = make_uint2(pair(rest[0], rest[1]), pair(rest[2], rest[3]));
}
// Four columns of a row that another kernel has written; zeros behind its end. Rows of whole fours lie at whole fours.
template <bool WHOLE> DEVICE void load_four(const float* row, int column, int columns, float v[4]) {
    if (WHOLE || columns % 4 == 0) {
        float4 four = column < columns ? load_fresh((const float4*)(row + column)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v[0] = four.x; v[1] = four.y; v[2] = four.z; v[3] = four.w;
    } else {
        for (int i = 0; i < 4; i++) v[i] = column + i < columns ? load_fresh(row + column + i) : 0.0f;
    }
}
// The sum of squares of 128 columns, in every lane; and the values times the norm's weight.
DEVICE float take_norm(float v[4], const float weight[4]) {
    float squares = 0.0f;
    for (int i = 0; i < 4; i++) squares = __fmaf_rn(v[i], v[i], squares);
    for (int i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], weight[i]);
    return warp_sum(squares);
}
// What a row is multiplied by, from the sums of squares of its records, `stride` words apart: a warp.
DEVICE float inverse_norm(const float* squares, int stride, int records, int columns, float eps) {
    float sum = 0.0f;
    for (int i = threadIdx.x % WARP; i < records; i += WARP) sum += squares[i * stride];
    return 1.0f / sqrtf(warp_sum(sum) / (float)columns + eps);
}
