// Splits rows of activations (see split.cuh): one block per row, a thread per value.
#include "split.cuh"

KERNEL split(const float* x, int columns, Step step, int wanted, int first, Split out) {
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.y, k = blockIdx.x * blockDim.x + threadIdx.x;
    if (first + row >= step_rows(step, wanted)) return;
    split_value(out, row, k, k < columns ? x[(long)(first + row) * columns + k] : 0.0f);
}
