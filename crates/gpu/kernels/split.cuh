// Activations split in two for the matrix instruction: x = value in bf16 + rest in bf16, 16 bits together. Each 16
// columns also leave their sum, for formats whose codes carry an offset, and where a norm is due the sum of squares of
// what it norms. NaN and infinity stay what they are.
#pragma once
#include "prelude.cuh"

struct Split {
    u8* x;           // (rows, padded) octets of (8 values, 8 rests); null: nothing is asked for
    float* sums;     // (rows, padded / 16)
    float* squares;  // (rows, padded / 16), or null: the values are as they are
    int padded, pad;  // columns rounded up to 128
};

// Sixteen neighbouring lanes; each of them gets the result.
DEVICE float sum_of_16(float value) {
    for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}
// One value of a row, and what it was before a norm's weight. Sixteen neighbouring lanes hold 16 columns from a multiple
// of 16 on, all of them in the row or none; beyond the row's end they hold zeros. Every lane of the warp takes part.
DEVICE void split_value(const Split& out, long row, int column, bool in_row, float value, float before) {
    // The sum is that of what is left of the values: what codes carry too much then cancels.
    u16 bits = f32_to_bf16(value);
    float high = bf16_to_f32(bits);
    u16 rest = f32_to_bf16(value - high);
    float sum = sum_of_16(high + bf16_to_f32(rest)), squares = sum_of_16(__fmul_rn(before, before));
    if (!in_row || column >= out.padded) return;
    u16* to = (u16*)(out.x + row * out.padded * 4 + column / 8 * 32) + column % 8;
    to[0] = bits;
    to[8] = rest;
    if (column % 16 == 0) {
        long at = row * (out.padded / 16) + column / 16;
        out.sums[at] = sum;
        if (out.squares) out.squares[at] = squares;
    }
}
// Zeros from `column` on in steps of 16 to the end of a row, one column for each of sixteen lanes.
DEVICE void zero_split(const Split& out, long row, int column) {
    for (; column < out.padded; column += 16) {
        u16* to = (u16*)(out.x + row * out.padded * 4 + column / 8 * 32) + column % 8;
        to[0] = to[8] = 0;
        const long at = row * (out.padded / 16) + column / 16;
        out.sums[at] = 0.0f;
        if (out.squares) out.squares[at] = 0.0f;
    }
}
DEVICE void split_value(const Split& out, long row, int column, float value) {
    split_value(out, row, column, true, value, 0.0f);
}
// What a row is multiplied by, from the sums of squares that it left: a warp, every lane gets the result.
DEVICE float inverse_norm(const float* squares, int columns, float eps) {
    float sum = 0.0f;
    // Eight loads under way at once.
    for (int start = threadIdx.x % WARP; start < columns / 16; start += 8 * WARP) {
        float some[8];
#pragma unroll
        for (int i = 0; i < 8; i++) some[i] = start + i * WARP < columns / 16 ? squares[start + i * WARP] : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += some[i];
    }
    return 1.0f / sqrtf(warp_sum(sum) / (float)columns + eps);
}
