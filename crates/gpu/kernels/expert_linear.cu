// What each token's experts make of it, for weights of one format (QUANT names its header): a warp per output, lane l sums
// columns l, l + 32, ... in f32, and the lanes are added by a fixed tree. An expert's weights are read by every token that
// chose it.
#include QUANT

struct ExpertRows {
    const float* chosen;  // (tokens, 2 each)
    const float* x;       // (tokens, columns), or (tokens x each, columns) where `apart`
    const float* bias;    // (experts x rows), or null
    float* out;           // (tokens x each, rows)
    int each, apart;
    int rows;             // of one expert
    int first;            // where this part begins among those of all experts
};

// Grid (rows of an expert, tokens x each).
KERNEL expert_linear(Part part, Step step, ExpertRows e) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, own = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const long pair = blockIdx.y;
    const int token = pair / e.each;
    if (own >= e.rows || token >= step_rows(step, 0)) return;
    const int expert = (int)e.chosen[(long)token * 2 * e.each + pair % e.each];
    const int row = expert * e.rows + own - e.first;
    if (row < 0 || row >= part.rows) return;
    const float* from = e.x + (e.apart ? pair : token) * part.columns;
    float sum = 0.0f;
    for (int k = lane; k < part.columns; k += WARP) sum = __fmaf_rn(Quant::value(part, row, k), from[k], sum);
    sum = warp_sum(sum);
    if (lane == 0) e.out[pair * e.rows + own] = e.bias ? __fadd_rn(sum, e.bias[expert * e.rows + own]) : sum;
}
