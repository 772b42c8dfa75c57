// out[r][n] = sum over k of x[r][k] * weight[n][k], for weights of one format (QUANT names its header).
//
// A block owns 16 rows of the weight and 8 x NT rows of activations. Its warps share the columns: warp w takes steps
// w, w + W, ... (a step is 128 or 256 columns), and their sums are added in the order of warps. How many warps there
// are depends on the weight alone, so an output's order of summation does not depend on the batch. Each warp loads
// its next step while it multiplies the present one. Activations come split in two halves (`split.cu`): with both, a
// product is as good as one in f32.
// Reads weight planes, split activations; writes out (rows, out_columns) at out_first.
#include QUANT

struct Inputs {
    const u8* x;         // (rows, padded columns) split values
    const u8* sums;      // (rows, padded columns / 32) split sums
    const float* factors;  // (rows) what the split divided a row by
    int first, limit;    // the first row of the step that `x` holds, and how many it holds at most
};
struct Result {
    float* values;
    const float* bias;   // one per column of out, or null
    const float* residual;  // as `values`, added where not null
    int columns, first;  // columns of a row, and where this part begins
};

template <int NT>
DEVICE void gemv(const Part& part, const Step* step, int wanted, const Inputs& in, const Result& out) {
    extern __shared__ float sums[];  // (warp, nt, 16 x 8)
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int steps = part.groups * 128 / Quant::STEP;
    const long base = (long)blockIdx.x * steps;
    let_next_start();
    typename Quant::Loaded now;
    if (warp < steps) now = Quant::load(part, base + warp, lane);
    wait_for_inputs();

    const int first = blockIdx.y * 8 * NT;
    const int count = min(step_rows(step, wanted) - in.first, in.limit) - first;
    if (count <= 0) return;
    Columns<NT> x;
    for (int nt = 0; nt < NT; nt++) {
        int row = nt * 8 + lane / 4;
        x.x[nt] = row < count ? in.x + (long)(first + row) * part.groups * 512 : 0;
        x.sums[nt] = row < count ? in.sums + (long)(first + row) * part.groups * 16 : 0;
    }
    float acc[NT][4];
    for (int nt = 0; nt < NT; nt++)
        for (int i = 0; i < 4; i++) acc[nt][i] = 0.0f;
    for (int at = warp; at < steps; at += warps) {
        typename Quant::Loaded next;
        if (at + warps < steps) next = Quant::load(part, base + at + warps, lane);
        Quant::template multiply<NT>(now, x, at, lane, acc);
        now = next;
    }

    for (int nt = 0; nt < NT; nt++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            sums[((warp * NT + nt) * 8 + column) * 16 + row] = acc[nt][i];
        }
    __syncthreads();
    for (int at = threadIdx.x; at < NT * 128; at += blockDim.x) {
        int row = blockIdx.x * 16 + at % 16, r = at / 16;
        if (row >= part.rows || r >= count) continue;
        float sum = 0.0f;
        for (int w = 0; w < warps; w++) sum += sums[w * NT * 128 + at];
        sum *= in.factors[first + r];
        long to = (long)(in.first + first + r) * out.columns + out.first + row;
        if (out.bias) sum += out.bias[out.first + row];
        if (out.residual) sum += out.residual[to];
        out.values[to] = sum;
    }
}

KERNEL __launch_bounds__(512) gemv_1(Part part, const Step* step, int wanted, Inputs in, Result out) {
    gemv<1>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(512) gemv_2(Part part, const Step* step, int wanted, Inputs in, Result out) {
    gemv<2>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(512) gemv_4(Part part, const Step* step, int wanted, Inputs in, Result out) {
    gemv<4>(part, step, wanted, in, out);
}
