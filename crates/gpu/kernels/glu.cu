// out = silu(gate) * up, where a row of gate_up is all gates, then all ups: a thread per value. Where a split is asked
// for, the result is also left in the form that matrix products read.
#include "result.cuh"

KERNEL glu_silu(Step step, const float* gate_up, float* out, int columns, Split split) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (r >= step_rows(step, 0)) return;
    float value = 0.0f;
    if (k < columns) {
        value = __fmul_rn(silu(gate_up[r * 2 * columns + k]), gate_up[r * 2 * columns + columns + k]);
        out[r * columns + k] = value;
    }
    if (split.x) split_value(split, r, k, value);
}
