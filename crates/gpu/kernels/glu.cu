// out = activation(gate) * up, where a row of gate_up is all gates, then all ups: a thread per value.
#include "activation.cuh"

template <class Function> DEVICE void glu(const Step& step, const float* gate_up, float* out, int columns, Function function) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, 0)) return;
    out[r * columns + k] = __fmul_rn(function(gate_up[r * 2 * columns + k]), gate_up[r * 2 * columns + columns + k]);
}
KERNEL glu_silu(Step step, const float* gate_up, float* out, int columns) {
    glu(step, gate_up, out, columns, [](float gate) { return silu(gate); });
}
KERNEL glu_gelu(Step step, const float* gate_up, float* out, int columns) {
    glu(step, gate_up, out, columns, [](float gate) { return gelu(gate); });
}
KERNEL glu_gelu_tanh(Step step, const float* gate_up, float* out, int columns) {
    glu(step, gate_up, out, columns, [](float gate) { return gelu_tanh(gate); });
}
