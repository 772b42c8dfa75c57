// out = x / sqrt(mean(x^2) + eps) * weight: one block per row. Where `split.x` is not null the result is also left in
// the form that matrix products read, which saves them a pass.
#include "split.cuh"

KERNEL rms_norm(const Step* step, int wanted, const float* weight, float eps, const float* x, float* out, int columns,
                Split split) {
    __shared__ float room[WARP];
    let_next_start();
    wait_for_inputs();
    const long r = blockIdx.x;
    if (r >= step_rows(step, wanted)) return;
    const float* from = x + r * columns;
    float squares = 0.0f;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) squares = __fmaf_rn(from[k], from[k], squares);
    const float inverse = 1.0f / sqrtf(block_sum(squares, room) / (float)columns + eps);
    u32 largest = 0;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) {
        float value = from[k] * inverse * weight[k];
        out[r * columns + k] = value;
        largest = max(largest, __float_as_uint(value) & 0x7fffffff);
    }
    if (!split.x) return;
    largest = block_max(largest, (u32*)room);
    const float scale = split_scale(largest, split.bf16);
    if (threadIdx.x == 0) split.factors[r] = 1.0f / scale;
    const int octets = split.padded / 8;
    for (int start = 0; start < octets; start += blockDim.x) {
        int octet = start + threadIdx.x;
        float v[8];
        for (int i = 0; i < 8; i++) {
            int k = octet * 8 + i;
            v[i] = k < columns ? from[k] * inverse * weight[k] : 0.0f;
        }
        split_octet(split, r, octet, v, scale);
    }
}
