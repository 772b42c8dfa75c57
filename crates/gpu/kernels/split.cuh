// Activations split in two for the matrix instruction: x = value in bf16 + rest in bf16, 16 bits together. Each 32
// columns also leave their sum, in two parts that tf32 holds, for formats whose blocks carry an offset. NaN and infinity
// stay what they are.
#pragma once
#include "prelude.cuh"

struct Split {
    u8* x;     // null: nothing is asked for
    u8* sums;
    int padded, pad;  // columns rounded up to 128
};

// One value of a row. The lanes of a warp hold 32 columns from a multiple of 32 on, all of them or none below `padded`;
// beyond the row's end they hold zeros.
DEVICE void split_value(const Split& out, long row, int column, float value) {
    float sum = warp_sum(value);
    if (column >= out.padded) return;
    u16 bits = f32_to_bf16(value);
    u16* to = (u16*)(out.x + row * out.padded * 4 + column / 8 * 32) + column % 8;
    to[0] = bits;
    to[8] = f32_to_bf16(value - bf16_to_f32(bits));
    if (column % 32 == 0) {
        float high = __uint_as_float(__float_as_uint(sum) & 0xffffe000);
        *(float2*)(out.sums + row * (out.padded / 4) + column / 4) = make_float2(high, sum - high);
    }
}
