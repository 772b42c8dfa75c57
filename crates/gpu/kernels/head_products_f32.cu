// A matrix for each head in F32: a warp per output, lane l sums columns l, l + 32, ... in f32, and the lanes are added by a
// fixed tree. See docs/kernels.md#head_products.
#include "head_products.cuh"
#include "quant/f32.cuh"

// Grid (rows of a head, heads, tokens).
KERNEL head_products_f32(Part part, Step step, HeadProducts a) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, head = a.head + blockIdx.y;
    const long r = blockIdx.z;
    if (row >= part.rows || r >= step_rows(step, 0)) return;
    const float* from = a.x + r * a.x_columns + head * a.each + a.column;
    // Each head begins with 16 rows of its own.
    const int at = blockIdx.y * ((part.rows + 15) / 16 * 16) + row;
    float sum = 0.0f;
    for (int k = lane; k < part.columns; k += WARP) sum = __fmaf_rn(Quant::value(part, at, k), from[k], sum);
    sum = warp_sum(sum);
    if (lane == 0) a.out[r * a.out_columns + head * a.rows + a.first + row] = sum;
}
