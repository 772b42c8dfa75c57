// out[r][n] = sum over k of x[r][k] * weight[n][k], for weights of one format (QUANT names its header).
//
// A block owns 16 rows of the weight and 4 x NT rows of activations. Its warps share the columns: warp w takes
// steps w, w + W, ... (a step is 128 or 256 columns), and their sums are added in the order of warps. How many warps there
// are depends on the weight alone, so an output's order of summation does not depend on the batch. Many warps are
// resident at once, so that while some wait for weights others multiply; the first step's weights are on their way
// before the activations are there. Activations come split in two (`split.cuh`).
// Reads weight planes, split activations; writes out (rows, out_columns) at out_first.
#include QUANT
#include "result.cuh"

struct Inputs {
    const u8* x;     // (rows, padded columns) split values
    const u8* sums;  // (rows, padded columns / 32) split sums
    int first, limit;  // the first row of the step that `x` holds, and how many it holds at most
};
template <int NT>
DEVICE void gemv(const Part& part, const Step& step, int wanted, const Inputs& in, const Result& out) {
    extern __shared__ float sums[];  // (warp, nt, 4 rows of activations, 16 rows of weights)
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int steps = part.groups * 128 / Quant::STEP;
    let_next_start();
    typename Quant::Loaded now;
    if (warp < steps) now = Quant::load(part, (long)blockIdx.x * steps + warp, lane);
    wait_for_inputs();

    const int first = blockIdx.y * 4 * NT;
    const int count = min(step_rows(step, wanted) - in.first, in.limit) - first;
    if (count <= 0) return;
    Columns<NT> x;
    for (int nt = 0; nt < NT; nt++) {
        int row = nt * 4 + lane / 8, rest = lane / 4 % 2;
        x.x[nt] = row < count ? in.x + (long)(first + row) * part.groups * 512 + rest * 16 : 0;
        x.sums[nt] = row < count ? in.sums + (long)(first + row) * part.groups * 32 + rest * 4 : 0;
    }
    const long base = (long)blockIdx.x * steps;
    float acc[NT][4];
    for (int nt = 0; nt < NT; nt++)
        for (int i = 0; i < 4; i++) acc[nt][i] = 0.0f;
    for (int at = warp; at < steps; at += warps) {
        if (at != warp) now = Quant::load(part, base + at, lane);
        Quant::template multiply<NT>(now, x, at, lane, acc);
    }

    // Value and rest of a row are neighbours in a lane.
    for (int nt = 0; nt < NT; nt++)
        for (int h = 0; h < 2; h++)
            sums[((warp * NT + nt) * 4 + lane % 4) * 16 + lane / 4 + 8 * h] = acc[nt][2 * h] + acc[nt][2 * h + 1];
    __syncthreads();
    for (int at = threadIdx.x; at < NT * 64; at += blockDim.x) {
        int row = blockIdx.x * 16 + at % 16, r = at / 16;
        if (row >= part.rows || r >= count) continue;
        float sum = 0.0f;
        for (int w = 0; w < warps; w++) sum += sums[w * NT * 64 + at];
        put(out, in.first + first + r, row, sum);
    }
}

KERNEL __launch_bounds__(512, 2) gemv_1(Part part, Step step, int wanted, Inputs in, Result out) {
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
