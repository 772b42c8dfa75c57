// The experts of each token for F32 weights: a warp per output, lane l sums columns l, l + 32, ... in f32, and the
// lanes are added by a fixed tree. An expert's weights are read by every token that chose it. See
// docs/kernels.md#expert_f32.
#include "experts.cuh"
#include "quant/f32.cuh"
#include "result.cuh"

// Grid (tokens x each, rows of an expert).
KERNEL expert_f32(Part part, Step step, Stack stack, const float* x, Result out) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, row = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int pair = blockIdx.x, token = pair / stack.each;
    if (row >= part.rows || token >= stack_tokens(step, stack)) return;
    const int expert = (int)stack.chosen[(long)(stack.token + token) * 2 * stack.each + pair % stack.each] - stack.first;
    if (expert < 0 || expert >= stack.count) return;
    const long place = stack.places ? stack.places[pair] : pair;
    const float* from = x + (stack.gathers ? stack.token + token : place) * part.columns;
    // Each expert begins with 16 rows of its own.
    const int at = expert * ((part.rows + 15) / 16 * 16) + row;
    float sum = 0.0f;
    for (int k = lane; k < part.columns; k += WARP) sum = __fmaf_rn(Quant::value(part, at, k), from[k], sum);
    sum = warp_sum(sum);
    if (lane > 0) return;
    const int to = out.first + row;
    out.values[place * out.columns + to] = __fadd_rn(sum, out.bias ? out.bias[(long)expert * out.columns + to] : 0.0f);
}
