// out[r][n] = sum over k of x[r][k] * weight[n][k] for F32 weights: a warp per output, lane l sums columns l, l + 32,
// ... in f32, and the lanes are added by a fixed tree. See docs/kernels.md#gemv_f32.
#include "quant/f32.cuh"
#include "result.cuh"

KERNEL gemv_f32(Part part, Step step, int wanted, const float* x, Result out) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP;
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int r = blockIdx.y;
    if (row >= part.rows || r >= step_rows(step, wanted)) return;
    float sum = 0.0f;
    for (int k = lane; k < part.columns; k += WARP) {
        sum = __fmaf_rn(Quant::value(part, row, k), x[(long)r * part.columns + k], sum);
    }
    sum = warp_sum(sum);
    if (lane > 0) return;
    const long to = (long)r * out.columns + out.first + row;
    if (out.bias) sum += out.bias[out.first + row];
    out.values[to] = out.adds ? out.values[to] + sum : sum;
}
