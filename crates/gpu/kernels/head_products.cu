// out[r][head][n] = sum over k of x[r][head][column + k] * weight[head][n][k]: a matrix for each head, in weights of one
// format (QUANT names its header). See docs/kernels.md#head_products.
//
// Grid (tiles of a head's rows, heads, runs of ROWS tokens). A block brings its head's share of its rows of activations
// into shared memory, as f16 with a power of two for each (form.cuh); a warp has a tile of 16 rows of weights, which come
// through a ring of its own, STAGES - 1 steps ahead. A sum goes through all columns in order, so an output's bits do not
// depend on the batch.
#include QUANT
#include "form.cuh"
#include "head_products.cuh"

#define THREADS 256
#define WARPS (THREADS / WARP)
#define BYTES Quant::Bytes::BYTES
#define NT (ROWS / 8)  // times eight rows of activations

KERNEL __launch_bounds__(THREADS) head_products(Part part, Step step, HeadProducts a) {
    // Rows of activations, then (warp, stage) steps of weights.
    DYNAMIC_SHARED(uint4, smem);
    __shared__ float factors[ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, tiles = (part.rows + 15) / 16;
    const int steps = part.groups * BLOCK / Quant::STEP, tile = blockIdx.x * WARPS + warp, head = a.head + blockIdx.y;
    // So far apart that eight lanes read from all banks.
    const int row_bytes = part.groups * BLOCK * 2 + 64;
    u8 *x = (u8*)smem, *ring = x + ROWS * row_bytes + warp * STAGES * BYTES;
    const float unscale = Quant::unscale(part);
    let_next_start();
    // Weights nobody writes.
    auto fetch = [&](int at) {
        if (at < steps && tile < tiles)
            Quant::Bytes::fetch(part, (u32)(blockIdx.y * tiles + tile) * steps + at, shared_address(ring + at % STAGES * BYTES) + lane * 16, lane);
        copy_commit();
    };
    for (int at = 0; at < STAGES - 1; at++) fetch(at);
    wait_for_inputs();
    const int first = blockIdx.z * ROWS, count = min(ROWS, step_rows(step, 0) - first);
    for (int row = warp; row < ROWS; row += WARPS) {
        const float* from = a.x + (long)(first + min(row, max(count - 1, 0))) * a.x_columns + head * a.each + a.column;
        auto load = [&](int group, float v[4]) {
            if (row >= count) v[0] = v[1] = v[2] = v[3] = 0.0f;
            else if (a.fours) load_four<true>(from, group * BLOCK + lane * 4, part.columns, v);
            else load_four<false>(from, group * BLOCK + lane * 4, part.columns, v);
        };
        float v[4];
        u32 most = 0;
        for (int group = 0; group < part.groups; group++) {
            load(group, v);
            most = max(most, max_magnitude(v));
        }
        most = warp_max(most);
        for (int group = 0; group < part.groups; group++) {
            load(group, v);
            *(uint2*)(x + row * row_bytes + group * BLOCK * 2 + lane * 8) = scaled_f16x4(v, 1.0f, row_scale(most));
        }
        if (lane == 0) factors[row] = row_unscale(most);
    }
    __syncthreads();
    float acc[NT][4];
#pragma unroll
    for (int i = 0; i < NT * 4; i++) acc[i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (int at = 0; at < steps; at++) {
        copy_wait<STAGES - 2>();
        // What lanes have copied for each other; and nobody reads the stage that is filled next.
        __syncwarp();
        fetch(at + STAGES - 1);
        if (tile >= tiles) continue;
        const u8* mine = x + lane / 4 * row_bytes + lane % 4 * 16 + at * (Quant::STEP * 2);
        uint4 b[NT];
        Quant::fragments(ring + at % STAGES * BYTES, lane, [&](int k, const u32 m[4]) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                if (k % 2 == 0) b[nt] = *(const uint4*)(mine + nt * 8 * row_bytes + k * 32);
                mma_f16(acc[nt], m, k % 2 ? b[nt].z : b[nt].x, k % 2 ? b[nt].w : b[nt].y);
            }
        });
    }
    copy_wait<0>();
    if (tile >= tiles) return;
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, n = tile * 16 + lane / 4 + i % 4 / 2 * 8;
        if (row < count && n < part.rows)
            a.out[(long)(first + row) * a.out_columns + head * a.rows + a.first + n] = unscaled(acc[i / 4][i % 4], factors[row], unscale);
    }
}
