// LoRA: out[r] += scale * up (down x[r]) for each change (pair of matrices) of the adapter that row r's sequence uses.
// Rows without an adapter are left alone. Every sum has one order, whatever else is in the step. See
// docs/kernels.md#low_rank.
#include "prelude.cuh"

// One pair of matrices. As in low_rank.rs, and so is how many a launch takes.
#define CHANGES_MAX 32
struct Change {
    const float* down;  // (rank, in)
    const float* up;    // (columns, rank)
    int adapter;
    int rank;
    int column, columns;  // of the product
    int place;            // where a row's inner values of it begin
    float scale;
};
struct Changes {
    Change each[CHANGES_MAX];
    const float* x;  // (rows, in)
    float* inner;    // (rows from `first` on, stride)
    float* out;      // (rows, columns)
    int count, in, stride, columns;
    int first, pad;
};

// inner = down x: grid (inner values, rows, changes), a warp per value; lane l sums columns l, l + 32, ... and the
// lanes are added by a fixed tree.
KERNEL low_rank_down(Step step, const __grid_constant__ Changes changes) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, own = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const long r = changes.first + blockIdx.y;
    const Change& change = changes.each[blockIdx.z];
    if (r >= step_rows(step, 0) || own >= change.rank || step.adapters[r] != change.adapter) return;
    const float* row = change.down + (long)own * changes.in;
    const float* x = changes.x + r * changes.in;
    float sum = 0.0f;
    for (int k = lane; k < changes.in; k += WARP) sum = __fmaf_rn(row[k], x[k], sum);
    sum = warp_sum(sum);
    if (lane == 0) changes.inner[blockIdx.y * (long)changes.stride + change.place + own] = sum;
}

// out += scale * up inner: grid (columns, rows), a thread per value, which sums in order.
KERNEL low_rank_up(Step step, const __grid_constant__ Changes changes) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = changes.first + blockIdx.y;
    if (k >= changes.columns || r >= step_rows(step, 0)) return;
    const int adapter = step.adapters[r];
    if (adapter < 0) return;
    const float* inner = changes.inner + blockIdx.y * (long)changes.stride;
    float* out = changes.out + r * changes.columns + k;
    for (int c = 0; c < changes.count; c++) {
        const Change& change = changes.each[c];
        const int own = k - change.column;
        if (change.adapter != adapter || own < 0 || own >= change.columns) continue;
        const float* row = change.up + (long)own * change.rank;
        float sum = 0.0f;
        for (int i = 0; i < change.rank; i++) sum = __fmaf_rn(row[i], inner[change.place + i], sum);
        *out = __fmaf_rn(change.scale, sum, *out);
    }
}
