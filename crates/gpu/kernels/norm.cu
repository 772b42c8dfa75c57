// out = x / sqrt(mean(x^2) + eps) * weight. Once with the result: one block per row, up to 8 values a thread at once. Where a split is asked
// for, the result is also left in the form that matrix products read, which saves them a pass.
#include "split.cuh"

#define AT_ONCE 8

KERNEL __launch_bounds__(1024) rms_norm(Step step, int wanted, const float* weight, float eps, const float* x, float* out,
                                        int columns, Split split) {
    __shared__ float room[WARP];
    let_next_start();
    const long r = blockIdx.x;
    float weights[AT_ONCE], values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int k = i * blockDim.x + threadIdx.x;
        weights[i] = k < columns ? weight[k] : 0.0f;
    }
    wait_for_inputs();
    if (r >= step_rows(step, wanted)) return;
    const float* from = x + r * columns;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int k = i * blockDim.x + threadIdx.x;
        values[i] = k < columns ? from[k] : 0.0f;
        squares = __fmaf_rn(values[i], values[i], squares);
    }
    for (int k = AT_ONCE * blockDim.x + threadIdx.x; k < columns; k += blockDim.x) squares = __fmaf_rn(from[k], from[k], squares);
    const float inverse = 1.0f / sqrtf(block_sum(squares, room) / (float)columns + eps);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int k = i * blockDim.x + threadIdx.x;
        float value = values[i] * inverse * weights[i];
        if (k < columns) out[r * columns + k] = value;
        if (split.x) split_value(split, r, k, k < columns ? value : 0.0f);
    }
    for (int start = AT_ONCE * blockDim.x; start < max(columns, split.padded); start += blockDim.x) {
        int k = start + threadIdx.x;
        float value = k < columns ? from[k] * inverse * weight[k] : 0.0f;
        if (k < columns) out[r * columns + k] = value;
        if (split.x) split_value(split, r, k, value);
    }
}

// The same norm left undone for a product that does it: the values times the weight in the form that products read, and
// the sums of squares. A thread per value.
KERNEL norm_split(Step step, int wanted, const float* weight, const float* x, int columns, Split split) {
    let_next_start();
    const long r = blockIdx.y;
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const float scale = k < columns ? weight[k] : 0.0f;
    wait_for_inputs();
    if (r >= step_rows(step, wanted)) return;
    const float value = k < columns ? x[r * columns + k] : 0.0f;
    split_value(split, r, k, true, k < columns ? __fmul_rn(value, scale) : 0.0f, value);
}
