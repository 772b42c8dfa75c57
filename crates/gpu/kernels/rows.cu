// Elementwise operations: grid (columns, rows), a thread per value. See docs/kernels.md#rows.
#include "activation.cuh"

// x += y; a vector is the same for every row.
KERNEL add(Step step, int wanted, const float* y, int y_stride, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, wanted)) return;
    x[r * columns + k] += y[r * y_stride + k];
}

// x *= factors, column by column
KERNEL scale_columns(Step step, const float* factors, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, 0)) return;
    x[r * columns + k] = __fmul_rn(x[r * columns + k], factors[k]);
}

// x *= sigmoid(gates)
KERNEL sigmoid_gate(Step step, const float* gates, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, 0)) return;
    x[r * columns + k] = __fmul_rn(x[r * columns + k], sigmoid(gates[r * columns + k]));
}

// gate = activation(gate) * up, where rows of `up` are `up_columns` apart; activations are numbered as in rows.rs.
KERNEL glu_beside(Step step, int kind, const float* up, int up_columns, float* gate, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, 0)) return;
    const float value = gate[r * columns + k], other = up[r * up_columns + k];
    float opened = value;
    switch (kind) {
        case 0: opened = silu(value); break;
        case 1: opened = gelu(value); break;
        case 2: opened = gelu_tanh(value); break;
    }
    gate[r * columns + k] = __fmul_rn(opened, other);
}

// The first `count` columns of each row times 1 + beta ln(1 + n), where n is how many whole lengths fit into the row's
// position and the offset.
KERNEL scale_by_position(Step step, float beta, int length, int offset, int count, float* x, int columns) {
    __shared__ float factor;
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (r >= step_rows(step, 0)) return;
    if (threadIdx.x == 0) {
        const u64 lengths = ((u64)(u32)step.positions[r] + (u32)offset) / (u32)length;
        factor = __double2float_rn(1.0 + (double)beta * log1p((double)lengths));
    }
    __syncthreads();
    if (k < count) x[r * columns + k] = __fmul_rn(x[r * columns + k], factor);
}

// Rows of `chosen` are numbers of experts, then as many weights, which are multiplied by the experts' scales.
KERNEL scale_chosen(Step step, const float* scales, int experts, float* chosen, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x, each = columns / 2;
    const long r = blockIdx.y;
    if (k >= each || r >= step_rows(step, 0)) return;
    float* row = chosen + r * columns;
    row[each + k] = __fmul_rn(row[each + k], scales[min(max((int)row[k], 0), experts - 1)]);
}

// out[r] = x[the r-th token that wants logits]
KERNEL gather(Step step, const float* x, float* out, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, 1)) return;
    out[r * columns + k] = x[(long)step.wanted[r] * columns + k];
}

// x = a function of each value.
KERNEL pointwise(Step step, int wanted, int function, float4 parameters, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, wanted)) return;
    x[r * columns + k] = of_value(function, parameters, x[r * columns + k]);
}

enum Pooling { MEAN, FIRST, LAST };

// out[r] = what becomes of all rows of the sequence that the r-th wanted token is of.
KERNEL pool(Step step, int kind, const float* x, float* out, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, 1)) return;
    const int token = step.wanted[r], first = step.firsts[token], last = step.lasts[token];
    float value = 0.0f;
    if (kind == MEAN) {
        for (long at = first; at <= last; at++) value = __fadd_rn(value, x[at * columns + k]);
        value = __fdiv_rn(value, (float)(last - first + 1));
    } else {
        value = x[(long)(kind == FIRST ? first : last) * columns + k];
    }
    out[r * columns + k] = value;
}
