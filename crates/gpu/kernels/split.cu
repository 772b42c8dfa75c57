// Splits rows of activations (see split.cuh): one block per row, a thread per octet.
#include "split.cuh"

KERNEL split(const float* x, int columns, const Step* step, int wanted, int first, Split out) {
    __shared__ u32 room[WARP];
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.x;
    if (first + row >= step_rows(step, wanted)) return;
    const float* from = x + (long)(first + row) * columns;
    u32 largest = 0;
    if (!out.bf16) {
        for (int k = threadIdx.x; k < columns; k += blockDim.x) largest = max(largest, __float_as_uint(from[k]) & 0x7fffffff);
        largest = block_max(largest, room);
    }
    const float scale = split_scale(largest, out.bf16);
    if (threadIdx.x == 0) out.factors[row] = 1.0f / scale;
    const int octets = out.padded / 8;
    for (int start = 0; start < octets; start += blockDim.x) {
        int octet = start + threadIdx.x;
        float v[8];
        for (int i = 0; i < 8; i++) v[i] = octet * 8 + i < columns ? from[octet * 8 + i] : 0.0f;
        split_octet(out, row, octet, v, scale);
    }
}
