// out = activation(gate) * up, where a row of gate_up is all gates, then all ups: a thread per value. A token has
// `each` rows. See docs/kernels.md#glu.
#include "activation.cuh"

template <class Function> DEVICE void glu(const Step& step, int each, const float* gate_up, float* out, int columns, Function function) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= (long)step_rows(step, 0) * each) return;
    out[r * columns + k] = function(gate_up[r * 2 * columns + k], gate_up[r * 2 * columns + columns + k]);
}
KERNEL glu_silu(Step step, int each, const float* gate_up, float* out, int columns) {
    glu(step, each, gate_up, out, columns, [](float gate, float up) { return __fmul_rn(silu(gate), up); });
}
KERNEL glu_gelu(Step step, int each, const float* gate_up, float* out, int columns) {
    glu(step, each, gate_up, out, columns, [](float gate, float up) { return __fmul_rn(gelu(gate), up); });
}
KERNEL glu_gelu_tanh(Step step, int each, const float* gate_up, float* out, int columns) {
    glu(step, each, gate_up, out, columns, [](float gate, float up) { return __fmul_rn(gelu_tanh(gate), up); });
}

KERNEL glu_clamped(Step step, int each, const float* gate_up, float* out, int columns) {
    glu(step, each, gate_up, out, columns, [](float gate, float up) {
        // Not fminf and fmaxf, which make numbers of NaN.
        gate = gate > 7.0f ? 7.0f : gate;
        up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
        return __fmul_rn(__fdiv_rn(gate, 1.0f + expf(-1.702f * gate)), up + 1.0f);
    });
}

// x = a function of each value, for what has no gates.
KERNEL of_values(Step step, int each, int number, float4 parameters, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= (long)step_rows(step, 0) * each) return;
    x[r * columns + k] = of_value(number, parameters, x[r * columns + k]);
}
