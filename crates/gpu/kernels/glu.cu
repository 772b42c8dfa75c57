// out = silu(gate) * up, where a row of gate_up is all gates, then all ups: a thread per value.
#include "prelude.cuh"

KERNEL silu(const Step* step, const float* gate_up, float* out, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step->tokens) return;
    float gate = gate_up[r * 2 * columns + k];
    out[r * columns + k] = gate / (1.0f + expf(-gate)) * gate_up[r * 2 * columns + columns + k];
}
