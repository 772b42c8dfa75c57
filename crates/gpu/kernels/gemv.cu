// out[r][n] = sum over k of x[r][k] * weight[n][k], for weights of one format (QUANT names its header).
//
// A block owns 16 rows of the weight at a time (where rows are gates, also their 16 counterparts) and 4 x NT rows of
// activations. Its warps share the columns: warp w takes steps w, w + W, ... (a step is 128 or 256 columns), and their
// sums are added in the order of warps. How many warps there are depends on the weight alone, so an output's order of
// summation does not depend on the batch. A warp's weights come through a ring of its own in shared memory, STAGES steps
// ahead, across the rows that its block does one after the other; the first are on their way before the activations are
// there. Activations come split in two (`split.cuh`); where a norm of them is due, the results are normed.
// Reads weight planes, split activations; writes out (rows, columns) at out.first, and what the next kernel reads.
#include QUANT
#include "result.cuh"

// What is done with a result beside storing it: nothing, the split for a norm, or the gated activation.
#define PLAIN 0
#define NORMS 1
#define GATES 2
#if MODE == GATES
#define SIDES 2
#else
#define SIDES 1
#endif
#define BYTES Quant::Bytes::BYTES

struct Inputs {
    Split split;
    int first, limit;  // the first row of the step that it holds, and how many it holds at most
    float eps;         // of the norm that is due where there are squares
    int units;         // times 16 rows (and 16 counterparts) that there are
};

// The sum over warps of one output.
DEVICE float total_of(const float* sums, int at, int slices, int stride) {
    float sum = 0.0f;
#pragma unroll 4
    for (int w = 0; w < slices; w++) sum += sums[w * stride + at];
    return sum;
}

template <int NT>
DEVICE void gemv(const Part& part, const Step& step, int wanted, const Inputs& in, const Result& out) {
    // (warp, stage) steps; then sums: (warp, nt, 4 rows of activations, 16 of weights)
    extern __shared__ uint4 room[];
    __shared__ float inverse[4 * NT];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int slices = warps / SIDES, side = warp % SIDES, slice = warp / SIDES;
    const int steps = part.groups * 128 / Quant::STEP;
    u8* ring = (u8*)room + warp * STAGES * BYTES;
    float* sums = (float*)((u8*)room + warps * STAGES * BYTES);
    // What is fetched next: a step of a unit, from its side's rows.
    int fetch_unit = blockIdx.x, fetch_at = slice;
    const u32 fetch_first = (u32)__cvta_generic_to_shared(ring) + lane * 16;
    u32 fetch_to = fetch_first;
    typename Quant::Bytes next;
    auto seek = [&]() {
        next.seek(part, ((long)fetch_unit + (SIDES == 2 && side ? out.pairs : 0)) * steps + slice, lane);
    };
    auto fetch = [&]() {
        if (fetch_unit < in.units) {
            next.fetch(fetch_to, lane);
            fetch_to = fetch_to == fetch_first + (STAGES - 1) * BYTES ? fetch_first : fetch_to + BYTES;
            fetch_at += slices;
            next.skip(slices);
            if (fetch_at >= steps) {
                fetch_at = slice;
                fetch_unit += gridDim.x;
                seek();
            }
        }
        copy_group();
    };
    // A warp without any step has nothing to fetch.
    if (slice >= steps) fetch_unit = in.units;
    seek();
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) fetch();
    // The counts of a step are there before its first kernel.
    const int first = blockIdx.y * 4 * NT;
    const int count = min(step_rows(step, wanted) - in.first, in.limit) - first;
    wait_for_inputs();
    if (count <= 0) return;

    if (in.split.squares)
#pragma unroll 1
        for (int r = warps - 1 - warp; r < min(count, 4 * NT); r += warps) {
            float scale = inverse_norm(in.split.squares + (long)(first + r) * (in.split.padded / 16), part.columns, in.eps);
            if (lane == 0) inverse[r] = scale;
        }
    Columns<NT> x;
    x.rest = lane / 4 % 2;
    for (int nt = 0; nt < NT; nt++) {
        const int r = min(nt * 4 + lane / 8, count - 1);
        x.x[nt] = in.split.x + (long)(first + r) * in.split.padded * 4 + x.rest * 16;
        x.sums[nt] = in.split.sums + (long)(first + r) * (in.split.padded / 16);
    }
    int turn = 0;
    const u8* staged = ring;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < in.units; unit += gridDim.x, turn++) {
        // The warps take turns in ending a unit. Sixteen lanes have the 16 rows of the weight for one row of activations.
        const int at_first = (threadIdx.x + (warps - turn % warps) * WARP) % blockDim.x;
        const int row = unit * 16 + lane % 16, column = out.first + row;
        const bool ends = at_first < NT * 64 && row < part.rows && at_first / 16 < count;
        float bias = 0.0f, norm = 0.0f, before = 0.0f;
        if (ends && out.bias) bias = out.bias[column];
        if (MODE == NORMS && ends) norm = out.norm[column];
        if (MODE != GATES && ends && out.adds)
            before = out.values[(long)(in.first + first + at_first / 16) * out.columns + column];

        float acc[NT][4];
        for (int nt = 0; nt < NT; nt++)
            for (int i = 0; i < 4; i++) acc[nt][i] = 0.0f;
#pragma unroll 1
        for (int at = slice; at < steps; at += slices) {
            copy_wait<STAGES - 1>();
            __syncwarp();
            Quant::template multiply<NT>(staged, x, at, lane, acc);
            __syncwarp();
            fetch();
            staged = staged == ring + (STAGES - 1) * BYTES ? ring : staged + BYTES;
        }

        // Not earlier: blocks of the next kernel would take room from warps that still multiply.
        if (unit + gridDim.x >= in.units) let_next_start();
        // Value and rest of a row are neighbours in a lane. For few rows there are sums for two units, so that one is read
        // while the next is written.
        float* mine = sums + (NT == 1 ? turn % 2 * warps * NT * 64 : 0);
        if (NT > 1) __syncthreads();
        for (int nt = 0; nt < NT; nt++)
            for (int h = 0; h < 2; h++)
                mine[((warp * NT + nt) * 4 + lane % 4) * 16 + lane / 4 + 8 * h] = acc[nt][2 * h] + acc[nt][2 * h + 1];
        __syncthreads();
#pragma unroll 1
        for (int at = at_first; at < NT * 64 && at / 32 * 2 < count; at += blockDim.x) {
            const int r = at / 16;
            const bool valid = row < part.rows && r < count;
            const long to = (long)(in.first + first + r) * out.columns + column;
            const float scale = in.split.squares ? inverse[min(r, count - 1)] : 1.0f;
            float sum = total_of(mine, at, slices, SIDES * NT * 64);
            sum = __fadd_rn(__fmul_rn(sum, scale), bias);
#if MODE == GATES
            float other = total_of(mine + NT * 64, at, slices, SIDES * NT * 64);
            const int below = out.pairs * 16;
            other = __fmul_rn(other, scale);
            if (out.bias && valid) other = __fadd_rn(other, out.bias[column + below]);
            float value = __fmul_rn(silu(sum), other);
            if (valid) {
                out.values[to] = sum;
                out.values[to + below] = other;
                out.gated[(long)(in.first + first + r) * below + row] = value;
            }
            split_value(out.split, first + r, row, r < count, valid ? value : 0.0f, 0.0f);
#else
            if (out.adds) {
                if (at != at_first) before = valid ? out.values[to] : 0.0f;
                sum = __fadd_rn(before, sum);
            }
            if (valid) out.values[to] = sum;
#if MODE == NORMS
            if (!valid) sum = 0.0f;
            split_value(out.split, first + r, row, r < count, __fmul_rn(sum, norm), sum);
#endif
#endif
#if MODE != PLAIN
            // Whatever lies between the last row and the end of a split row is zero.
            if (unit == in.units - 1 && r < count) zero_split(out.split, first + r, unit * 16 + 16 + lane % 16);
#endif
        }
    }
}

KERNEL __launch_bounds__(512, Quant::BLOCKS) gemv_1(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<1>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(512, 1) gemv_2(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<2>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(512, 1) gemv_4(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<4>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(512, 1) gemv_8(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<8>(part, step, wanted, in, out);
}
