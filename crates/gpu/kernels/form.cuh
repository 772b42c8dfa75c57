// Activations as the tensor cores multiply them: one f16 for each value. A row is scaled by a power of two that brings
// its largest magnitude into [2^13, 2^14): rounding then costs every value that matters at most 2^-12 of itself, and
// nothing overflows. The inverse, which is exact, multiplies the sums. Where an RMS norm is fused, values are first
// multiplied by its weight and by 1 / rms. A NaN or an infinity in a row makes its inverse NaN. With FLOATS8 rows become
// 8-bit floats (e4m3), and the largest magnitude comes into [2^7, 2^8).
#pragma once
#include "prelude.cuh"

#ifndef FLOATS8
#define FLOATS8 0
#endif
#define ROW_TOP (FLOATS8 ? 7 : 13)  // the exponent of a row's largest magnitude

#define BLOCK 128  // columns that a warp handles at once: four neighbours in each lane

// Four columns of a row that another kernel has written; zeros after its end. WHOLE: columns are a multiple of four, so
// rows are aligned.
template <bool WHOLE> DEVICE void load_four(const float* row, int column, int columns, float v[4]) {
    if (WHOLE) {
        float4 four = column < columns ? load_l2((const float4*)(row + column)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v[0] = four.x; v[1] = four.y; v[2] = four.z; v[3] = four.w;
    } else {
        for (int i = 0; i < 4; i++) v[i] = column + i < columns ? load_l2(row + column + i) : 0.0f;
    }
}
// The sum of squares of 128 columns, in every lane; and the values times the norm's weight.
DEVICE float take_norm(float v[4], const float weight[4]) {
    float squares = 0.0f;
    for (int i = 0; i < 4; i++) squares = __fmaf_rn(v[i], v[i], squares);
    for (int i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], weight[i]);
    return warp_sum(squares);
}
// What a row is multiplied by, from the sums of squares of each 128 columns: a warp. FEW: there are at most eight, and
// every lane adds them up by itself, as a warp does where the other lanes have zeros.
template <bool FEW> DEVICE float inverse_norm(const float* squares, int blocks, int columns, float eps) {
    float sum = 0.0f;
    if (FEW) {
        float s[8];
#pragma unroll
        for (int i = 0; i < 8; i++) s[i] = i < blocks ? squares[i] : 0.0f;
        sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    } else {
        for (int i = threadIdx.x % WARP; i < blocks; i += WARP) sum += squares[i];
        sum = warp_sum(sum);
    }
    // The reciprocal of `columns` does not depend on the sum.
    return rsqrtf(__fmaf_rn(sum, 1.0f / (float)columns, eps));
}
// The largest magnitude of four values, as bits: NaN is above all.
DEVICE u32 max_magnitude(const float v[4]) {
    u32 most = 0;
    for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffff);
    return most;
}
// The power of two for a row whose largest magnitude has these bits, and its inverse.
DEVICE int row_exponent(u32 most) { return min(127 + ROW_TOP - (int)(most >> 23), 126); }
DEVICE float row_scale(u32 most) { return __uint_as_float((u32)(127 + row_exponent(most)) << 23); }
DEVICE float row_unscale(u32 most) {
    return most >= 0x7f800000 ? __uint_as_float(0x7fffffff) : __uint_as_float((u32)(127 - row_exponent(most)) << 23);
}
// The largest magnitude after the norm: rounding keeps the order.
DEVICE u32 max_magnitude_normed(u32 most, float norm) { return __float_as_uint(__fmul_rn(__uint_as_float(most), norm)); }
// Four values, times 1 / rms or 1, as f16.
DEVICE uint2 scaled_f16x4(const float v[4], float norm, float scale) {
    float y[4];
    for (int i = 0; i < 4; i++) y[i] = __fmul_rn(__fmul_rn(v[i], norm), scale);
    return make_uint2(pack_f16x2(y[0], y[1]), pack_f16x2(y[2], y[3]));
}
// The same as 8-bit floats.
DEVICE u32 scaled_floats8x4(const float v[4], float norm, float scale) {
    float y[4];
    for (int i = 0; i < 4; i++) y[i] = __fmul_rn(__fmul_rn(v[i], norm), scale);
    return pair(pack_floats8x2(y[0], y[1]), pack_floats8x2(y[2], y[3]));
}
// A sum of scaled products with both scales undone.
DEVICE float unscaled(float sum, float row, float part) { return __fmul_rn(__fmul_rn(sum, row), part); }
