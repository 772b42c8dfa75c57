// Converts rows of activations for products (form.cuh) in steps of several rows: a block per row, a warp for 128
// columns at a time. Reads x (rows, columns); writes f16 values, and for each row the inverse of its scale. Values are
// (rows, columns rounded up to 128) for gemv.cu. For gemm.cu they are activation tiles as wgmma reads them, with a
// capacity of a multiple of 8 rows: (64 columns, capacity, 128 bytes), columns permuted as weights are dequantised
// (quant/tile.cuh), and swizzled. With FLOATS8 values are 8-bit floats, in tiles of (128 columns, capacity, 128 bytes) for
// gemm.cu alone. FOURS: columns are a multiple of four. EXPERTS: rows of experts. See docs/kernels.md#form.
#include "bulk.cuh"
#include "experts.cuh"
#include "form.cuh"

#define FOURS_THREADS 512  // of a block of `form_fours`
#define FOURS_KEPT 2       // times 128 columns that a warp of it keeps in registers
#define STREAM_MAX 8       // rows in flight
#define STREAM_KEPT 5      // times 128 columns of a warp

// Where a converted row goes, and its block's shared memory.
struct RowTarget {
    u8* values;
    float* factors;
    int capacity, row;
    int swizzle;        // its number among the eight rows that are swizzled together
    float* squares;  // of each 128 columns
    u32* maxima;      // of each warp
};

// Converts one row, whose columns `four` loads four at a time. A warp keeps KEPT x 128 columns in registers and loads
// the rest a second time. `loaded` is called when all that is kept has been loaded.
template <int KEPT, class Four, class Loaded>
DEVICE void convert_row(Four four, const float* norm, float eps, int columns, const RowTarget& to, Loaded loaded) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int blocks = (columns + BLOCK - 1) / BLOCK;
    auto load = [&](int at, float v[4], bool again) {
        four(at * BLOCK + lane * 4, v);
        if (!norm) return;
        float weight[4];
        load_four<FOURS>(norm, at * BLOCK + lane * 4, columns, weight);
        const float sum = take_norm(v, weight);
        if (lane == 0 && !again) to.squares[at] = sum;
    };
    u32 most = 0;
    float kept[KEPT][4];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        if (warp + i * warps >= blocks) break;
        load(warp + i * warps, kept[i], false);
        most = max(most, max_magnitude(kept[i]));
    }
#pragma unroll 4
    for (int at = warp + KEPT * warps; at < blocks; at += warps) {
        float v[4];
        load(at, v, false);
        most = max(most, max_magnitude(v));
    }
    most = warp_max(most);
    if (lane == 0) to.maxima[warp] = most;
    __syncthreads();
    loaded();
    const float inverse = norm ? inverse_norm<false>(to.squares, blocks, columns, eps) : 1.0f;
    most = max_magnitude_normed(warp_max(lane < warps ? to.maxima[lane] : 0), inverse);
    const float scale = row_scale(most);
#if FLOATS8
    // Of 32 columns a lane has the first or the last four of an octet: its word of a piece of 16 bytes.
    u8* place = to.values + (long)to.row * 128 + ((lane / 8 * 2 + lane % 2) ^ to.swizzle) * 16 + lane % 8 / 2 * 4;
    auto store = [&](int at, const float v[4]) {
        *(u32*)(place + (long)at * to.capacity * 128) = scaled_floats8x4(v, inverse, scale);
    };
#else
    // Of 32 columns eight lanes have four each, of which two are of one piece of 16 bytes and two of the next. Four
    // lanes exchange them so that each has eight bytes of a piece.
    const int t = lane % 8 / 2, piece = lane / 8 % 2 * 4 + lane % 2 * 2 + t / 2;
    u8* place = to.values + ((long)(lane / 16) * to.capacity + to.row) * 128 + (piece ^ to.swizzle) * 16 + t % 2 * 8;
    auto store = [&](int at, const float v[4]) {
        const uint2 two = scaled_f16x4(v, inverse, scale);
        if (to.capacity) {
            const u32 other = __shfl_xor_sync(ALL_LANES, t < 2 ? two.y : two.x, 4);
            const u32 low = t < 2 ? two.x : other, high = t < 2 ? other : two.y;
            const u32 next = __shfl_xor_sync(ALL_LANES, t % 2 ? low : high, 2);
            *(uint2*)(place + (long)at * 2 * to.capacity * 128) = t % 2 ? make_uint2(next, high) : make_uint2(low, next);
        } else {
            *(uint2*)(to.values + ((long)to.row * blocks + at) * (BLOCK * 2) + lane * 8) = two;
        }
    };
#endif
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (warp + i * warps < blocks) store(warp + i * warps, kept[i]);
#pragma unroll 4
    for (int at = warp + KEPT * warps; at < blocks; at += warps) {
        float v[4];
        load(at, v, true);
        store(at, v);
    }
    if (threadIdx.x == 0) to.factors[to.row] = row_unscale(most);
}

template <int KEPT>
DEVICE void convert(const float* x, const float* norm, float eps, int columns, const Step& step, int wanted, int first, u8* values,
                 float* factors, int capacity, const Stack* stack = nullptr) {
    __shared__ float squares[2048];  // as many as the longest row has
    __shared__ u32 maxima[WARP];
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.x;
    if (stack ? row >= stack_tokens(step, *stack) * stack->each : first + row >= step_rows(step, wanted)) return;
    int source = first + row, swizzle = row % 8;
    if (stack) {
        // A row for each place; eight of one expert are swizzled together.
        const int entry = capacity ? stack->list[row] : row;
        source = stack->gathers ? first + (entry >> 3) / stack->each : row;
        swizzle = entry % 8;
    }
    const float* from = x + (long)source * columns;
    auto four = [&](int column, float v[4]) { load_four<FOURS>(from, column, columns, v); };
    convert_row<KEPT>(four, norm, eps, columns, RowTarget{values, factors, capacity, row, swizzle, squares, maxima}, [] {});
}
#if EXPERTS && FOURS
KERNEL __launch_bounds__(1024, 2) form_experts_fours(const float* x, const float* norm, float eps, int columns, Step step,
                                                     Stack stack, u8* values, float* factors, int capacity) {
    convert<2>(x, norm, eps, columns, step, 0, stack.token, values, factors, capacity, &stack);
}
#elif EXPERTS
KERNEL __launch_bounds__(1024, 2) form_experts_any(const float* x, const float* norm, float eps, int columns, Step step,
                                                   Stack stack, u8* values, float* factors, int capacity) {
    convert<2>(x, norm, eps, columns, step, 0, stack.token, values, factors, capacity, &stack);
}
#elif FOURS
KERNEL __launch_bounds__(FOURS_THREADS, 4) form_fours(const float* x, const float* norm, float eps, int columns, Step step, int wanted,
                                                      int first, u8* values, float* factors, int capacity) {
    convert<FOURS_KEPT>(x, norm, eps, columns, step, wanted, first, values, factors, capacity);
}
// Few rows: more threads for each.
KERNEL __launch_bounds__(1024, 1) form_few(const float* x, const float* norm, float eps, int columns, Step step, int wanted, int first,
                                           u8* values, float* factors, int capacity) {
    convert<5>(x, norm, eps, columns, step, wanted, first, values, factors, capacity);
}
// Many long rows, on Hopper: a persistent block takes one row after another while the next `stages` are copied into
// shared memory, so that each is read once. Behind the ring lie squares, double-buffered.
KERNEL __launch_bounds__(1024, 1) form_stream(const float* x, const float* norm, float eps, int columns, Step step, int wanted, int first,
                                              u8* values, float* factors, int capacity, int rows, int stages) {
#if HAS_WGMMA
    DYNAMIC_SHARED(float4, ring);
    __shared__ u64 full[STREAM_MAX];
    __shared__ u32 maxima[2][WARP];
    const int bytes = columns * 4, blocks = (columns + BLOCK - 1) / BLOCK;
    float* squares = (float*)ring + (long)stages * columns;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) mbarrier_init(full + i, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_inputs();
    rows = min(rows, step_rows(step, wanted) - first);
    // The block's rows are gridDim.x apart.
    auto request = [&](int row, int stage) {
        if (threadIdx.x > 0 || row >= rows) return;
        mbarrier_expect(full + stage, bytes);
        copy_bulk(shared_address(ring) + stage * bytes, (const u8*)(x + (long)(first + row) * columns), bytes, shared_address(full + stage));
    };
    for (int i = 0; i < stages; i++) request(blockIdx.x + i * gridDim.x, i);
    int stage = 0, parity = 0, half = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x, half ^= 1) {
        mbarrier_wait(full + stage, parity);
        const float* staged = (const float*)ring + (long)stage * columns;
        auto four = [&](int column, float v[4]) {
            const float4 all = column < columns ? *(const float4*)(staged + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[0] = all.x; v[1] = all.y; v[2] = all.z; v[3] = all.w;
        };
        const RowTarget to{values, factors, capacity, row, row % 8, squares + half * blocks, maxima[half]};
        // Everything kept is loaded: the next row may overwrite it.
        const bool kept = blocks <= STREAM_KEPT * (int)(blockDim.x / WARP);
        auto loaded = [&] { if (kept) request(row + stages * gridDim.x, stage); };
        convert_row<STREAM_KEPT>(four, norm, eps, columns, to, loaded);
        if (!kept) {
            __syncthreads();
            request(row + stages * gridDim.x, stage);
        }
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
#endif
}
#else
KERNEL __launch_bounds__(1024, 2) form_any(const float* x, const float* norm, float eps, int columns, Step step, int wanted, int first,
                                           u8* values, float* factors, int capacity) {
    convert<2>(x, norm, eps, columns, step, wanted, first, values, factors, capacity);
}
#endif
