// Rows of activations in the form that products read (form.cuh), for steps of several rows: a block per row, a warp for 128
// columns at a time. Reads x (rows, columns); writes values and for each row the inverse of its power of two. Values are
// (rows, columns rounded up to 128) for gemv.cu, or with room for so many rows, a multiple of 8, the columns of wgmma for
// gemm.cu: (64 columns, room, 128 bytes), in the order of columns that weights are unpacked in (quant/tile.cuh), swizzled.
#include "experts.cuh"
#include "form.cuh"

// KEPT times 128 columns stay with a warp; what is more is read again.
template <bool FOURS, int KEPT>
DEVICE void form(const float* x, const float* norm, float eps, int columns, const Step& step, int wanted, int first, u8* values,
                 float* factors, int room, const Stack* stack = nullptr) {
    __shared__ float squares[2048];  // as many as the longest row has
    __shared__ u32 mosts[WARP];
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int row = blockIdx.x, blocks = (columns + BLOCK - 1) / BLOCK;
    if (stack ? row >= stack_tokens(step, *stack) * stack->each : first + row >= step_rows(step, wanted)) return;
    int source = first + row, turn = row % 8;
    if (stack) {
        // A row for each place; eight of one expert are swizzled together.
        const int entry = room ? stack->list[row] : row;
        source = stack->gathers ? first + (entry >> 3) / stack->each : row;
        turn = entry % 8;
    }
    const float* from = x + (long)source * columns;
    auto load = [&](int at, float v[4], bool again) {
        load_four<FOURS>(from, at * BLOCK + lane * 4, columns, v);
        if (!norm) return;
        float weight[4];
        load_four<FOURS>(norm, at * BLOCK + lane * 4, columns, weight);
        const float sum = take_norm(v, weight);
        if (lane == 0 && !again) squares[at] = sum;
    };
    u32 most = 0;
    float kept[KEPT][4];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        if (warp + i * warps >= blocks) break;
        load(warp + i * warps, kept[i], false);
        most = max(most, most_of(kept[i]));
    }
#pragma unroll 4
    for (int at = warp + KEPT * warps; at < blocks; at += warps) {
        float v[4];
        load(at, v, false);
        most = max(most, most_of(v));
    }
    most = warp_most(most);
    if (lane == 0) mosts[warp] = most;
    __syncthreads();
    const float inverse = norm ? inverse_norm(squares, blocks, columns, eps) : 1.0f;
    most = most_normed(warp_most(lane < warps ? mosts[lane] : 0), inverse);
    const float scale = row_scale(most);
    // Of 32 columns eight lanes have four each, of which two are of one piece of 16 bytes and two of the next. Four lanes
    // exchange them so that each has eight bytes of a piece.
    const int t = lane % 8 / 2, piece = lane / 8 % 2 * 4 + lane % 2 * 2 + t / 2;
    u8* place = values + ((long)(lane / 16) * room + row) * 128 + (piece ^ turn) * 16 + t % 2 * 8;
    auto store = [&](int at, const float v[4]) {
        const uint2 two = formed(v, inverse, scale);
        if (room) {
            const u32 other = __shfl_xor_sync(0xffffffff, t < 2 ? two.y : two.x, 4);
            const u32 low = t < 2 ? two.x : other, high = t < 2 ? other : two.y;
            const u32 next = __shfl_xor_sync(0xffffffff, t % 2 ? low : high, 2);
            *(uint2*)(place + (long)at * 2 * room * 128) = t % 2 ? make_uint2(next, high) : make_uint2(low, next);
        } else {
            *(uint2*)(values + ((long)row * blocks + at) * (BLOCK * 2) + lane * 8) = two;
        }
    };
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (warp + i * warps < blocks) store(warp + i * warps, kept[i]);
#pragma unroll 4
    for (int at = warp + KEPT * warps; at < blocks; at += warps) {
        float v[4];
        load(at, v, true);
        store(at, v);
    }
    if (threadIdx.x == 0) factors[row] = row_unscale(most);
}
KERNEL __launch_bounds__(512, 4) form_fours(const float* x, const float* norm, float eps, int columns, Step step, int wanted, int first,
                                            u8* values, float* factors, int room) {
    form<true, 2>(x, norm, eps, columns, step, wanted, first, values, factors, room);
}
// Few rows: more threads for each.
KERNEL __launch_bounds__(1024, 1) form_few(const float* x, const float* norm, float eps, int columns, Step step, int wanted, int first,
                                           u8* values, float* factors, int room) {
    form<true, 5>(x, norm, eps, columns, step, wanted, first, values, factors, room);
}
KERNEL __launch_bounds__(1024, 2) form_any(const float* x, const float* norm, float eps, int columns, Step step, int wanted, int first,
                                           u8* values, float* factors, int room) {
    form<false, 2>(x, norm, eps, columns, step, wanted, first, values, factors, room);
}
KERNEL __launch_bounds__(1024, 2) form_experts_fours(const float* x, const float* norm, float eps, int columns, Step step,
                                                     Stack stack, u8* values, float* factors, int room) {
    form<true, 2>(x, norm, eps, columns, step, 0, stack.token, values, factors, room, &stack);
}
KERNEL __launch_bounds__(1024, 2) form_experts_any(const float* x, const float* norm, float eps, int columns, Step step,
                                                   Stack stack, u8* values, float* factors, int room) {
    form<false, 2>(x, norm, eps, columns, step, 0, stack.token, values, factors, room, &stack);
}
