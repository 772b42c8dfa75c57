// Rows of activations in the form that products read (form.cuh), for steps of several rows: a block per row, a warp for 128
// columns at a time. Reads x (rows, columns); writes values (rows, columns rounded up to 128) and for each row the inverse of
// its power of two.
#include "form.cuh"

template <bool FOURS>
DEVICE void form(const float* x, const float* norm, float eps, int columns, const Step& step, int wanted, int first, u8* values,
                 float* factors) {
    __shared__ float squares[2048];  // as many as the longest row has
    __shared__ u32 mosts[WARP];
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int row = blockIdx.x, blocks = (columns + BLOCK - 1) / BLOCK;
    if (first + row >= step_rows(step, wanted)) return;
    const float* from = x + (long)(first + row) * columns;
    u32 most = 0;
#pragma unroll 5
    for (int at = warp; at < blocks; at += warps) {
        float v[4], weight[4];
        load_four<FOURS>(from, at * BLOCK + lane * 4, columns, v);
        if (norm) {
            load_four<FOURS>(norm, at * BLOCK + lane * 4, columns, weight);
            const float sum = take_norm(v, weight);
            if (lane == 0) squares[at] = sum;
        }
        most = max(most, most_of(v));
    }
    most = warp_most(most);
    if (lane == 0) mosts[warp] = most;
    __syncthreads();
    const float inverse = norm ? inverse_norm(squares, blocks, columns, eps) : 1.0f;
    most = most_normed(warp_most(lane < warps ? mosts[lane] : 0), inverse);
    const float scale = row_scale(most);
#pragma unroll 5
    for (int at = warp; at < blocks; at += warps) {
        float v[4], weight[4];
        load_four<FOURS>(from, at * BLOCK + lane * 4, columns, v);
        if (norm) {
            load_four<FOURS>(norm, at * BLOCK + lane * 4, columns, weight);
            for (int i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], weight[i]);
        }
        *(uint2*)(values + ((long)row * blocks + at) * (BLOCK * 2) + lane * 8) = formed(v, inverse, scale);
    }
    if (threadIdx.x == 0) factors[row] = row_unscale(most);
}
KERNEL __launch_bounds__(1024) form_fours(const float* x, const float* norm, float eps, int columns, Step step, int wanted,
                                          int first, u8* values, float* factors) {
    form<true>(x, norm, eps, columns, step, wanted, first, values, factors);
}
KERNEL __launch_bounds__(1024) form_any(const float* x, const float* norm, float eps, int columns, Step step, int wanted,
                                        int first, u8* values, float* factors) {
    form<false>(x, norm, eps, columns, step, wanted, first, values, factors);
}
