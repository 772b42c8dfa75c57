// RMS and layer norms of rows, and of heads inside them: a block for each vector that is normalised. See
// docs/kernels.md#norm.
#include "activation.cuh"

#define AT_ONCE 8

// out = x / sqrt(mean(x^2) + eps) * weight, up to 8 values a thread at once.
KERNEL __launch_bounds__(1024) rms_norm(Step step, int wanted, const float* weight, float eps, const float* x, float* out,
                                        int columns) {
    __shared__ float scratch[WARP];
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
    const float inverse = 1.0f / sqrtf(block_sum(squares, scratch) / (float)columns + eps);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int k = i * blockDim.x + threadIdx.x;
        float value = values[i] * inverse * weights[i];
        if (k < columns) out[r * columns + k] = value;
    }
    for (int k = AT_ONCE * blockDim.x + threadIdx.x; k < columns; k += blockDim.x)
        out[r * columns + k] = from[k] * inverse * weight[k];
}

// What a norm is made of, beside what it is of.
struct Norm {
    const float* weight;  // (columns)
    const float* bias;    // (columns), or null
    float eps;
    int centred;          // whether the mean is taken away first
    int columns, pad;
};
// In place or not: every thread writes only what it has read.
DEVICE void normalize(const Norm& norm, const float* x, float* out, float* scratch) {
    float mean = 0.0f, squares = 0.0f;
    if (norm.centred) {
        for (int k = threadIdx.x; k < norm.columns; k += blockDim.x) mean += x[k];
        mean = block_sum(mean, scratch) / (float)norm.columns;
    }
    for (int k = threadIdx.x; k < norm.columns; k += blockDim.x) squares = __fmaf_rn(x[k] - mean, x[k] - mean, squares);
    const float inverse = 1.0f / sqrtf(block_sum(squares, scratch) / (float)norm.columns + norm.eps);
    for (int k = threadIdx.x; k < norm.columns; k += blockDim.x) {
        const float value = (x[k] - mean) * inverse * norm.weight[k];
        out[k] = norm.bias ? __fadd_rn(value, norm.bias[k]) : value;
    }
}

// Norms that are centred, or have a bias: grid (rows).
KERNEL __launch_bounds__(1024) any_norm(Step step, int wanted, Norm norm, const float* x, float* out) {
    __shared__ float scratch[WARP];
    let_next_start();
    wait_for_inputs();
    const long r = blockIdx.x;
    if (r >= step_rows(step, wanted)) return;
    normalize(norm, x + r * norm.columns, out + r * norm.columns, scratch);
}

// Queries and keys of fused rows, and perhaps values, in place: as many values at once as there are weights. Grid
// (stretches of queries, then of keys, then of values; tokens).
KERNEL __launch_bounds__(1024) qk_norm(Step step, Norm query, Norm key, Norm value, int queries, int keys, int columns, float* qkv) {
    __shared__ float scratch[WARP];
    let_next_start();
    wait_for_inputs();
    const long r = blockIdx.y;
    if (r >= step_rows(step, 0)) return;
    int stretch = blockIdx.x, begins = 0;
    const Norm* norm = &query;
    if (stretch >= queries / query.columns) {
        stretch -= queries / query.columns;
        begins = queries;
        norm = &key;
        if (stretch >= keys / key.columns) {
            stretch -= keys / key.columns;
            begins += keys;
            norm = &value;
        }
    }
    float* at = qkv + r * columns + begins + stretch * norm->columns;
    normalize(*norm, at, at, scratch);
}

// x = the RMS norm of each group of its values, times silu of the gates: grid (groups, tokens), a warp for each group.
KERNEL gated_norm(Step step, Norm norm, const float* gates, int gate_columns, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, group = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const long r = blockIdx.y;
    if (r >= step_rows(step, 0) || group * norm.columns >= columns) return;
    float* at = x + r * columns + group * norm.columns;
    const float* gate = gates + r * gate_columns + group * norm.columns;
    float values[AT_ONCE], opened[AT_ONCE], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int k = i * WARP + lane;
        values[i] = k < norm.columns ? at[k] : 0.0f;
        opened[i] = k < norm.columns ? gate[k] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) squares = __fmaf_rn(values[i], values[i], squares);
    for (int k = AT_ONCE * WARP + lane; k < norm.columns; k += WARP) squares = __fmaf_rn(at[k], at[k], squares);
    const float inverse = 1.0f / sqrtf(warp_sum(squares) / (float)norm.columns + norm.eps);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int k = i * WARP + lane;
        if (k < norm.columns) at[k] = __fmul_rn(values[i] * inverse * norm.weight[k], silu(opened[i]));
    }
    for (int k = AT_ONCE * WARP + lane; k < norm.columns; k += WARP) at[k] = __fmul_rn(at[k] * inverse * norm.weight[k], silu(gate[k]));
}

// The same where gates may come first, groups may be as wide as a row and have weights of their own; without weights x is
// gated alone. Grid (groups, tokens), a block for each group.
KERNEL __launch_bounds__(1024) gated_group_norm(Step step, Norm norm, int group, int gates_first, const float* gates, int gate_columns,
                                                float* x, int columns) {
    __shared__ float scratch[WARP];
    let_next_start();
    wait_for_inputs();
    const long r = blockIdx.y;
    if (r >= step_rows(step, 0)) return;
    const int start = blockIdx.x * group, width = min(group, columns - start);
    float* at = x + r * columns + start;
    const float* gate = gates + r * gate_columns + start;
    if (!norm.weight) {
        for (int k = threadIdx.x; k < width; k += blockDim.x) at[k] = __fmul_rn(at[k], silu(gate[k]));
        return;
    }
    const float* weight = norm.weight + (norm.columns > group ? start : 0);
    float squares = 0.0f;
    for (int k = threadIdx.x; k < width; k += blockDim.x) {
        const float value = gates_first ? __fmul_rn(at[k], silu(gate[k])) : at[k];
        squares = __fmaf_rn(value, value, squares);
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares, scratch) / (float)width + norm.eps);
    for (int k = threadIdx.x; k < width; k += blockDim.x) {
        // One product after the other, in the order that was asked for.
        const float opened = silu(gate[k]);
        at[k] = gates_first ? __fmul_rn(at[k], opened) * inverse * weight[k] : __fmul_rn(at[k] * inverse * weight[k], opened);
    }
}
