// out = x / sqrt(mean(x^2) + eps) * weight: one block per row, up to 8 values a thread at once.
#include "prelude.cuh"

#define AT_ONCE 8

KERNEL __launch_bounds__(1024) rms_norm(Step step, int wanted, const float* weight, float eps, const float* x, float* out,
                                        int columns) {
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
    }
    for (int k = AT_ONCE * blockDim.x + threadIdx.x; k < columns; k += blockDim.x)
        out[r * columns + k] = from[k] * inverse * weight[k];
}
