// out = silu(gate) * up, where a row of gate_up is all gates, then all ups: a thread per value.
#include "result.cuh"

KERNEL glu_silu(Step step, const float* gate_up, float* out, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (r >= step_rows(step, 0)) return;
    if (k < columns)
        out[r * columns + k] = __fmul_rn(silu(gate_up[r * 2 * columns + k]), gate_up[r * 2 * columns + columns + k]);
}
