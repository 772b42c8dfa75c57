// Operations value by value: grid (columns, rows), a thread per value.
#include "prelude.cuh"

// x += y; a vector is the same for every row.
KERNEL add(Step step, int wanted, const float* y, int y_stride, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, wanted)) return;
    x[r * columns + k] += y[r * y_stride + k];
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
