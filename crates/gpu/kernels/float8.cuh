// Floats of 8 bits (e4m3), of which several share a power of two: its exponent + 127, a byte; 255 is NaN.
#pragma once
#include "prelude.cuh"

// The bytes of a word that `selector` names, one in the upper half of each f16 (and zeros below), as f16: 2^8 too
// small, exact.
DEVICE u32 two_floats8(u32 word, u32 selector) {
    const u32 both = __byte_perm(word, 0, selector);
    return (both >> 1 & 0x3f803f80) | (both & 0x80008000);
}
// Two bytes of a word, the first or the last.
DEVICE u32 two_floats8_of(u32 word, int last) { return two_floats8(word, last ? 0x3424 : 0x1404); }

// 2^8 times the power of two that an exponent stands for, in both halves: infinite from 2^16 on, zero below what f16
// has.
DEVICE u32 float8_factor(u32 exponent) {
    const int power = (int)exponent - 119;
    u32 bits = power < -24 ? 0 : power < -14 ? 1u << (power + 24) : power < 16 ? (u32)(power + 15) << 10 : exponent == 255 ? 0x7e00 : 0x7c00;
    return bits * 0x00010001u;
}
// The exponent that values share whose largest magnitude has these bits: the smallest whose 448-fold none exceeds.
DEVICE u32 float8_exponent(u32 most) {
    if (most >= 0x7f800000) return 255;
    return (u32)max((int)(most >> 23) + (int)((most & 0x007fffff) > 0x00600000) - 8, 1);
}
// The nearest code beside an exponent, ties to even.
DEVICE u8 float8_code(float value, u32 exponent) {
    if (exponent == 255) return 0;
    const u32 bits = __float_as_uint(__fmul_rn(value, __uint_as_float((254 - exponent) << 23)));
    const u32 magnitude = bits & 0x7fffffff;
    // Below 2^-6 in steps of 2^-9.
    const u32 code = magnitude < 0x3c800000 ? (u32)__float2int_rn(__uint_as_float(magnitude) * 512.0f)
                                            : ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    return (u8)(code | bits >> 24 & 0x80);
}
