// out[r][n] = sum over k of x[r][k] * weight[n][k] for one row or few, for weights of one format (QUANT names its
// header). See docs/kernels.md#gemv.
//
// Weights are the 16 rows of the tensor-core instruction, dequantised to one f16 for each value (quant/tile.cuh); rows
// of activations are its eight columns, one f16 for each value (form.cuh). The columns of a weight are split into
// slices (split-K): slice s of S takes the steps (128 or 256 columns) from s * steps / S on. A slice's sum starts at
// zero and goes through its columns in order; slices are added in order. S depends on the weight alone, so an output's
// order of summation does not depend on the batch. A warp has a slice of a tile. One row (`gemv_one`) is converted by
// the block itself, a fused norm included. Weights come through a ring of each warp's own, STAGES steps ahead; the
// first stages are requested before the activations are ready. Where rows are gates, their counterparts have warps of
// their own; the warps of a tile (a team) combine their sums in shared memory. Several rows (`gemv_several`: up to
// ROWS) are converted before (form.cu) and go through shared memory with the weights, a step at a time: all warps of a
// block read them. With EXPERTS the grid's y is a token and one of its experts: every such pair is a product of one
// row. Reads weight planes and activations; writes out (rows, columns) at out.first.
#include QUANT
#if EXPERTS
#include "experts.cuh"
#define STACK , Stack stack
#else
#define STACK
#endif
#include "form.cuh"
#include "result.cuh"

#define SIDES (GATES ? 2 : 1)
#define TEAM (SLICES * SIDES)  // warps of a tile
#define BYTES Quant::Bytes::BYTES

struct Inputs {
    const float* x;         // (rows, columns), for one row; else null
    const u8* values;       // (rows, columns rounded up to 128) else: f16
    const float* factors;   // (rows) what their sums are multiplied by
    const float* norm;      // the weight of the norm that is due, or null
    float* partials;        // of several rows: the sums of slices: (slices, rows, tiles x 16)
    int* tickets;           // counts of blocks that have left theirs, zero between kernels
    int first, limit;       // the first row of the step that it holds, and how many it holds at most
    float eps;              // of the norm
    int tiles;              // times 16 rows (where they are gates, without their counterparts)
};

// Stores one output, and where it is a gate also its counterpart's.
DEVICE void put(const Result& out, long r, int row, float sum, float other, float bias, float before) {
    const long to = r * out.columns + out.first + row;
    sum = __fadd_rn(sum, bias);
#if GATES
    const int below = out.pairs * 16;
    if (out.bias) other = __fadd_rn(other, out.bias[out.first + row + below]);
    out.values[to] = sum;
    out.values[to + below] = other;
    out.gated[r * below + row] = __fmul_rn(silu(sum), other);
#else
    out.values[to] = out.adds ? __fadd_rn(before, sum) : sum;
#endif
}
#if ONE_ROW
// A barrier of the warps of a tile.
DEVICE void team_sync(int team) {
    if (TEAM == 1) __syncwarp();
    else named_barrier_sync<TEAM * WARP>(1 + team);
}

// A warp's ring of weights: for each of its tiles, each step of its slice. A new step is fetched into the stage that
// was multiplied last, unless there is a stage for every step (ALL_AHEAD). The copy engine fetches, or where a format
// has more than two planes and the copies would be small, all lanes do (cp.async).
struct Ring {
    static const bool BULK = HAS_BULK && Quant::Bytes::PIECES <= 2;
    u8* start;
    u32 barriers;  // of each stage: that its copy has arrived
    u32 stage, parity;
    u32 next;  // the step that is fetched next
    Quant::Bytes::Cursor from;
    int left, length, rounds, leap;  // steps left of this tile, steps of each, tiles left, steps between two tiles

    // Stages and barriers belong to one warp.
    DEVICE_METHOD Ring(u8* ring, u64* barriers, const Part& part, int lane, u32 next, int length, int rounds, int leap)
        : start(ring), barriers(shared_address(barriers)), stage(0), parity(0), next(next), from(part, next, lane), left(length),
          length(length), rounds(rounds), leap(leap) {
        if constexpr (BULK) {
            if (lane == 0) {
                for (int i = 0; i < STAGES; i++) mbarrier_init(this->barriers + i * 8, 1);
                mbarrier_init_fence();
            }
            __syncwarp();
        }
    }
    DEVICE_METHOD void skip(int steps) {
        if constexpr (BULK) next += steps;
        else from.move(steps);
    }
    DEVICE_METHOD void fetch(const Part& part, int lane) {
        if (rounds > 0) {
            const u32 to = shared_address(start + stage * BYTES);
            if constexpr (BULK) {
                if (elect_one()) Quant::Bytes::fetch_bulk(part, next, to, barriers + stage * 8);
            } else {
                from.fetch(to + lane * 16, lane);
            }
            skip(1);
            if (--left == 0) {
                left = length;
                rounds--;
                skip(leap);
            }
        }
        if constexpr (!BULK) copy_commit();
    }
    DEVICE_METHOD void move() {
        if (++stage == STAGES && !ALL_AHEAD) {
            stage = 0;
            parity ^= 1;
        }
    }
    DEVICE_METHOD void await() const {
        if constexpr (BULK) {
            mbarrier_wait(barriers + stage * 8, parity);
        } else if (!ALL_AHEAD) {
            copy_wait<STAGES - 1>();
            __syncwarp();
        }
    }
    // Multiplies the oldest step with the same columns of a row in shared memory, and fetches another in its place.
    DEVICE_METHOD void multiply(const Part& part, const u8* x, int lane, float acc[4]) {
        await();
        uint4 b;
        Quant::fragments(start + stage * BYTES, lane, [&](int k, const u32 a[4]) {
            if (k % 2 == 0) b = *(const uint4*)(x + k * 32);
            mma_f16(acc, a, k % 2 ? b.z : b.x, k % 2 ? b.w : b.y);
        });
        if (!ALL_AHEAD) {
            __syncwarp();
            fetch(part, lane);
        }
        move();
    }
};

// EACH: how many runs of 128 columns a warp converts at most. Loops are not unrolled where that saves instruction
// fetches: most of this code runs once.
KERNEL __launch_bounds__(THREADS, 1) gemv_one(Part part, Step step, int wanted, Inputs in, Result out STACK) {
    // The row; (warp, stage) steps; sums, double-buffered: (2, warp, 16); squares of each 128 columns.
    DYNAMIC_SHARED(uint4, smem);
    __shared__ u32 maxima[WARP];
    // Through a shuffle, so that the compiler knows that it is uniform.
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), warps = blockDim.x / WARP;
    const int team = warp / TEAM, teams = warps / TEAM, slice = warp % TEAM / SIDES, side = warp % SIDES;
    // EARLY: for short kernels, the next one's blocks should be resident when this one ends. Otherwise they must not
    // start before all weights of this one are requested.
    if (EARLY) let_next_start();
    const u32 steps = part.groups * BLOCK / Quant::STEP;
    u32 above = 0;  // tiles of the experts before
#if EXPERTS
    if (!stack.known) wait_for_inputs();
    const int pair = blockIdx.y, token = pair / stack.each;
    if (token >= stack_tokens(step, stack)) return wait_for_inputs();
    const int expert = (int)load_l2(stack.chosen + (long)token * 2 * stack.each + pair % stack.each) - stack.first;
    if (expert < 0 || expert >= stack.count) return wait_for_inputs();
    above = expert * ((part.rows + 15) / 16);
    in.x += (long)(stack.gathers ? token : pair) * part.columns;
    out.values += (long)pair * out.columns;
    out.gated += (long)pair * out.pairs * 16;
    if (out.bias) out.bias += (long)expert * out.columns;
#endif
    u8* row = (u8*)smem;
    u8* rings = row + part.groups * BLOCK * 2;
    float* sums = (float*)(rings + warps * STAGES * BYTES);
    float* squares = sums + 2 * warps * 16;
    u64* barriers = (u64*)(squares + (part.groups + 1) / 2 * 2) + warp * STAGES;
    // A block's tiles are contiguous; blocks differ by at most one tile.
    const int tile_first = (int)((long)blockIdx.x * in.tiles / gridDim.x) + team;
    const int tile_end = (int)((long)(blockIdx.x + 1) * in.tiles / gridDim.x);
    const u32 begin = slice * steps / SLICES, end = (slice + 1) * steps / SLICES;
    const int rounds = (tile_end - tile_first + teams - 1) / teams;
    Ring ring(rings + warp * STAGES * BYTES, barriers, part, lane, (above + tile_first + (side ? out.pairs : 0)) * steps + begin,
              end - begin, rounds, teams * steps - (end - begin));
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        ring.fetch(part, lane);
        ring.move();
    }
    ring.stage = ring.parity = 0;
    if (!EARLY) let_next_start();

    // The counts of a step, and weights, are written before its first kernel: they may be read before
    // `wait_for_inputs`.
    const int count = min(step_rows(step, wanted) - in.first, in.limit), columns = part.columns;
    const float unscale = Quant::unscale(part);
    float v[EACH][4], weight[EACH][4];
    if (in.norm && EACH <= 4) {
#pragma unroll
        for (int i = 0; i < EACH; i++) load_four<FOURS>(in.norm, (warp + i * warps) * BLOCK + lane * 4, columns, weight[i]);
    }
    wait_for_inputs();
    if (count <= 0) {
        // No copy may be in flight to a block that has exited.
        if constexpr (Ring::BULK) {
            for (int stage = 0; stage < min(STAGES, rounds * (int)(end - begin)); stage++) {
                ring.await();
                ring.move();
            }
        }
        return;
    }
    const float* x = in.x + (long)in.first * columns;
#pragma unroll
    for (int i = 0; i < EACH; i++) load_four<FOURS>(x, (warp + i * warps) * BLOCK + lane * 4, columns, v[i]);
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = warp + i * warps;
        if (in.norm) {
            if (EACH > 4) load_four<FOURS>(in.norm, at * BLOCK + lane * 4, columns, weight[i]);
            const float sum = take_norm(v[i], weight[i]);
            if (lane == 0 && at < part.groups) squares[at] = sum;
        }
        most = max(most, max_magnitude(v[i]));
    }
    most = warp_max(most);
    if (lane == 0) maxima[warp] = most;
    __syncthreads();
    const float norm = in.norm ? inverse_norm<FEW_GROUPS>(squares, part.groups, columns, in.eps) : 1.0f;
    most = max_magnitude_normed(warp_max(lane < warps ? maxima[lane] : 0), norm);
    const float scale = row_scale(most);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = warp + i * warps;
        if (at < part.groups) *(uint2*)(row + at * BLOCK * 2 + lane * 8) = scaled_f16x4(v[i], norm, scale);
    }
    // What lanes have copied for each other.
    if (ALL_AHEAD && !Ring::BULK) copy_wait<0>();
    __syncthreads();

    const u8* mine = row + lane % 4 * 16;
    int round = 0;
#pragma unroll 1
    for (int tile = tile_first; tile < tile_end; tile += teams) {
        // Lane i of a tile's first warp stores row i.
        const int n = tile * 16 + lane;
        const bool ends = warp % TEAM == 0 && lane < 16 && n < part.rows;
        float bias = 0.0f, before = 0.0f;
        if (ends) {
            if (out.bias) bias = out.bias[out.first + n];
            if (!GATES && out.adds) before = load_l2(out.values + (long)in.first * out.columns + out.first + n);
        }
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (u32 at = begin; at < end; at++) ring.multiply(part, mine + at * (Quant::STEP * 2), lane, acc);
        // Double-buffered: one half is read while the other is written.
        float* place = sums + (round * warps + warp) * 16;
        if (lane % 4 == 0) {
            place[lane / 4] = acc[0];
            place[lane / 4 + 8] = acc[2];
        }
        team_sync(team);
        if (ends) {
            float sum = place[lane], other = GATES ? place[16 + lane] : 0.0f;
#pragma unroll
            for (int s = 1; s < SLICES; s++) {
                sum = __fadd_rn(sum, place[s * SIDES * 16 + lane]);
                if (GATES) other = __fadd_rn(other, place[(s * SIDES + 1) * 16 + lane]);
            }
            const float inverse = row_unscale(most);
            put(out, in.first, n, unscaled(sum, inverse, unscale), unscaled(other, inverse, unscale), bias, before);
        }
        round ^= 1;
    }
}
#else
// Rows of STEP columns in shared memory lie so far apart that eight lanes read from all banks.
#define ROW_BYTES (Quant::STEP * 2 + 64)
#define NT (ROWS / 8)       // times eight rows of activations
#define AHEAD (STAGES - 1)  // steps on their way while one is multiplied

// A block has one slice (the grid's z) of as many tiles as it has warps; with a single slice, then of the next ones.
// Slices leave their sums in memory, and the last block to finish adds them up.
KERNEL __launch_bounds__(THREADS, 1) gemv_several(Part part, Step step, int wanted, Inputs in, Result out) {
    const int CHUNKS = Quant::STEP / 8;  // of 16 bytes
    // (stage): (row) activations, (warp) weights.
    DYNAMIC_SHARED(uint4, smem);
    __shared__ int arrived;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const u32 steps = part.groups * BLOCK / Quant::STEP;
    const int begin = blockIdx.z * steps / SLICES, length = (int)((blockIdx.z + 1) * steps / SLICES) - begin;
    const int stage = ROWS * ROW_BYTES + warps * BYTES;
    u8* base = (u8*)smem;
    const int first = blockIdx.y * ROWS, tile_step = gridDim.x * warps;
    const int rounds = (in.tiles - (int)blockIdx.x * warps + tile_step - 1) / tile_step, total = rounds * length;

    // What is fetched next, by all and by this warp.
    int next_at = 0, next_tile = blockIdx.x * warps + warp, next_stage = 0, fetched = 0;
    auto fetch_weights = [&] {
        if (fetched < total && next_tile < in.tiles) {
            const u32 to = shared_address(base + next_stage * stage + ROWS * ROW_BYTES + warp * BYTES);
            Quant::Bytes::fetch(part, next_tile * steps + begin + next_at, to + lane * 16, lane);
        }
    };
    auto move = [&] {
        fetched++;
        next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        if (++next_at == length) {
            next_at = 0;
            next_tile += tile_step;
        }
    };
    const int count = min(step_rows(step, wanted) - in.first, in.limit) - first;
    auto fetch_x = [&] {
        if (fetched < total) {
            const u32 to = shared_address(base + next_stage * stage);
            const long stride = (long)part.groups * (BLOCK * 2);
            const u8* from = in.values + first * stride + (begin + next_at) * (Quant::STEP * 2);
            for (int i = threadIdx.x; i < ROWS * CHUNKS; i += blockDim.x) {
                const int chunk = i % CHUNKS, r = i / CHUNKS;
                // Beyond the last row any: its results are unused.
                copy_async<16>(to + r * ROW_BYTES + chunk * 16, from + min(r, count - 1) * stride + chunk * 16);
            }
        }
        copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) {
        fetch_weights();
        move();
    }
    let_next_start();
    const float unscale = Quant::unscale(part);
    wait_for_inputs();
    if (count <= 0) return;
    next_at = next_stage = fetched = 0;
    next_tile = blockIdx.x * warps + warp;
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) {
        fetch_x();
        move();
    }

    auto finish = [&](int r, int n, float sum) {
        if (n >= part.rows || r >= count) return;
        const long to = in.first + first + r;
        const float bias = out.bias ? out.bias[out.first + n] : 0.0f;
        const float before = out.adds ? out.values[to * out.columns + out.first + n] : 0.0f;
        put(out, to, n, unscaled(sum, in.factors[first + r], unscale), 0.0f, bias, before);
    };
    float acc[NT][4];
    int now = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int tile = blockIdx.x * warps + warp + round * tile_step;
#pragma unroll
        for (int i = 0; i < NT * 4; i++) acc[i / 4][i % 4] = 0.0f;
#pragma unroll 1
        for (int at = 0; at < length; at++) {
            if (AHEAD > 0) copy_wait<(AHEAD > 0 ? AHEAD - 1 : 0)>();
            __syncthreads();
            fetch_weights();
            fetch_x();
            move();
            if (AHEAD == 0) {
                copy_wait<0>();
                __syncthreads();
            }
            const u8* staged = base + now * stage;
            now = now + 1 == STAGES ? 0 : now + 1;
            if (tile >= in.tiles) continue;
            const u8* x = staged + lane / 4 * ROW_BYTES + lane % 4 * 16;
            uint4 b[NT];
            Quant::fragments(staged + ROWS * ROW_BYTES + warp * BYTES, lane, [&](int k, const u32 a[4]) {
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    if (k % 2 == 0) b[nt] = *(const uint4*)(x + nt * 8 * ROW_BYTES + k * 32);
                    mma_f16(acc[nt], a, k % 2 ? b[nt].z : b[nt].x, k % 2 ? b[nt].w : b[nt].y);
                }
            });
        }
#if SLICES == 1
#pragma unroll
        for (int i = 0; i < NT * 4; i++)
            finish(i / 4 * 8 + lane % 4 * 2 + i % 2, tile * 16 + lane / 4 + i % 4 / 2 * 8, acc[i / 4][i % 4]);
#else
        // (slice, row, output); one round.
        const long width = (long)in.tiles * 16, height = (long)gridDim.y * ROWS;
        if (tile < in.tiles) {
#pragma unroll
            for (int i = 0; i < NT * 4; i++) {
                const int r = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
                in.partials[(blockIdx.z * height + r) * width + tile * 16 + lane / 4 + i % 4 / 2 * 8] = acc[i / 4][i % 4];
            }
        }
        __threadfence();
        __syncthreads();
        int* ticket = in.tickets + blockIdx.y * gridDim.x + blockIdx.x;
        if (threadIdx.x == 0) arrived = atomicAdd(ticket, 1);
        __syncthreads();
        if (arrived < SLICES - 1) return;
        __threadfence();
        const int n_first = blockIdx.x * warps * 16, n_count = min(warps * 16, in.tiles * 16 - n_first);
        for (int i = threadIdx.x; i < min(ROWS, count) * n_count; i += blockDim.x) {
            const int r = i / n_count, n = n_first + i % n_count;
            const float* from = in.partials + (first + r) * width + n;
            float parts[SLICES];
#pragma unroll
            for (int s = 0; s < SLICES; s++) parts[s] = load_l2(from + s * height * width);
            float sum = parts[0];
#pragma unroll
            for (int s = 1; s < SLICES; s++) sum = __fadd_rn(sum, parts[s]);
            finish(r, n, sum);
        }
        if (threadIdx.x == 0) *ticket = 0;
#endif
    }
}
#endif
