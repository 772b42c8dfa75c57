// out[r][n] = sum over k of x[r][k] * weight[n][k], for weights of one format (QUANT names its header).
//
// Weights are the 16 rows of the matrix instruction, one f16 for each value (quant/tile.cuh); rows of activations its eight
// columns, one f16 for each value (form.cuh). The columns of a tile of 16 rows are cut into slices: slice s of S takes the
// steps (128 or 256 columns) from s * steps / S on. A slice's sum begins at zero and goes through its columns in their order;
// slices are added in their order. S depends on the weight alone, so an output's order of summation does not depend on the
// batch. A warp has a slice of a tile; where rows are gates, their counterparts have warps of their own. Warps of a tile meet
// in shared memory.
// One row of activations (`gemv_one`) is brought into form by the block itself, a norm of it included; weights come through a
// ring of each warp's own, STAGES steps ahead, the first of them before the activations are there.
// Several rows (`gemv_several`: up to ROWS) come in that form and go through shared memory with the weights, a step at a time:
// a block's warps read them together.
// Reads weight planes and activations; writes out (rows, columns) at out.first.
#include QUANT
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
// The warps of a tile wait for each other.
DEVICE void team_wait(int team) {
    if (TEAM == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM * WARP) : "memory");
}

// Weights on their way to a warp: for each of its tiles, each step of its slice.
struct Ring {
    u32 first, to;
    const u8* start;
    const u8* staged;
    int tile, tiles, tile_step, below;
    u32 at, begin, end, steps;

    DEVICE_METHOD void fetch(const Part& part, int lane) {
        if (tile < tiles) {
            Quant::Bytes::fetch(part, (tile + below) * steps + at, to, lane);
            to = to == first + (STAGES - 1) * BYTES ? first : to + BYTES;
            if (++at == end) {
                at = begin;
                tile += tile_step;
            }
        }
        copy_group();
    }
    // Multiplies the oldest step with the same columns of a row in shared memory, and fetches another in its place.
    DEVICE_METHOD void multiply(const Part& part, const u8* x, int lane, float acc[4]) {
        copy_wait<STAGES - 1>();
        __syncwarp();
        uint4 b;
        Quant::fragments(staged, lane, [&](int k, const u32 a[4]) {
            if (k % 2 == 0) b = *(const uint4*)(x + k * 32);
            mma_f16(acc, a, k % 2 ? b.z : b.x, k % 2 ? b.w : b.y);
        });
        __syncwarp();
        fetch(part, lane);
        staged = staged == start + (STAGES - 1) * BYTES ? start : staged + BYTES;
    }
};

// EACH: times 128 columns that a warp brings into form, at most. Code that runs once is fetched once: what is rolled up here
// starts sooner.
KERNEL __launch_bounds__(THREADS, 1) gemv_one(Part part, Step step, int wanted, Inputs in, Result out) {
    // The row; (warp, stage) steps; sums, in two places by turns: (warp, 16); squares of each 128 columns.
    extern __shared__ uint4 room[];
    __shared__ u32 mosts[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int team = warp / TEAM, teams = warps / TEAM, slice = warp % TEAM / SIDES, side = warp % SIDES;
    const u32 steps = part.groups * BLOCK / Quant::STEP;
    u8* row = (u8*)room;
    u8* rings = row + part.groups * BLOCK * 2;
    float* sums = (float*)(rings + warps * STAGES * BYTES);
    float* squares = sums + 2 * warps * 16;
    const int tile_first = blockIdx.x * teams + team, tile_step = gridDim.x * teams;
    Ring ring;
    ring.start = ring.staged = rings + warp * STAGES * BYTES;
    ring.first = ring.to = (u32)__cvta_generic_to_shared(ring.start) + lane * 16;
    ring.tile = tile_first;
    ring.tiles = in.tiles;
    ring.tile_step = tile_step;
    ring.below = side ? out.pairs : 0;
    ring.at = ring.begin = slice * steps / SLICES;
    ring.end = (slice + 1) * steps / SLICES;
    ring.steps = steps;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) ring.fetch(part, lane);
    let_next_start();

    // The counts of a step are there before its first kernel, and so is what a model is made of.
    const int count = min(step_rows(step, wanted) - in.first, in.limit), columns = part.columns;
    const float unscale = Quant::unscale(part);
    float v[EACH][4], weight[EACH][4];
    if (in.norm && EACH <= 4) {
#pragma unroll
        for (int i = 0; i < EACH; i++) load_four<FOURS>(in.norm, (warp + i * warps) * BLOCK + lane * 4, columns, weight[i]);
    }
    wait_for_inputs();
    if (count <= 0) return;
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
        most = max(most, most_of(v[i]));
    }
    most = warp_most(most);
    if (lane == 0) mosts[warp] = most;
    __syncthreads();
    const float norm = in.norm ? inverse_norm(squares, part.groups, columns, in.eps) : 1.0f;
    most = most_normed(warp_most(lane < warps ? mosts[lane] : 0), norm);
    const float scale = row_scale(most);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = warp + i * warps;
        if (at < part.groups) *(uint2*)(row + at * BLOCK * 2 + lane * 8) = formed(v[i], norm, scale);
    }
    __syncthreads();

    const u8* mine = row + lane % 4 * 16;
    int turn = 0;
#pragma unroll 1
    for (int tile = tile_first; tile < in.tiles; tile += tile_step) {
        // Thread i of a tile's ends row i.
        const int n = tile * 16 + lane;
        const bool ends = warp % TEAM == 0 && lane < 16 && n < part.rows;
        float bias = 0.0f, before = 0.0f;
        if (ends) {
            if (out.bias) bias = out.bias[out.first + n];
            if (!GATES && out.adds) before = load_fresh(out.values + (long)in.first * out.columns + out.first + n);
        }
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (u32 at = ring.begin; at < ring.end; at++) ring.multiply(part, mine + at * (Quant::STEP * 2), lane, acc);
        // One place is read while the other is written.
        float* place = sums + (turn * warps + warp) * 16;
        if (lane % 4 == 0) {
            place[lane / 4] = acc[0];
            place[lane / 4 + 8] = acc[2];
        }
        team_wait(team);
        if (ends) {
            float sum = place[lane], other = GATES ? place[16 + lane] : 0.0f;
#pragma unroll
            for (int s = 1; s < SLICES; s++) {
                sum = __fadd_rn(sum, place[s * SIDES * 16 + lane]);
                if (GATES) other = __fadd_rn(other, place[(s * SIDES + 1) * 16 + lane]);
            }
            const float inverse = row_unscale(most);
            put(out, in.first, n, meant(sum, inverse, unscale), meant(other, inverse, unscale), bias, before);
        }
        turn ^= 1;
    }
}
#else
// Rows of STEP columns in shared memory lie so far apart that eight lanes read from all banks.
#define ROW_BYTES (Quant::STEP * 2 + 64)

#define NT (ROWS / 8)  // times eight rows of activations

// A block has `across` tiles at a time, all of their slices.
KERNEL __launch_bounds__(THREADS, 1) gemv_several(Part part, Step step, int wanted, Inputs in, Result out) {
    const int CHUNKS = Quant::STEP / 8;  // of 16 bytes
    // (stage): (slice, row) activations, (warp) weights; then sums: (slice, row, across, 16).
    extern __shared__ uint4 room[];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, across = warps / SLICES;
    const int slice = warp % SLICES, column = warp / SLICES;
    const u32 steps = part.groups * BLOCK / Quant::STEP, begin = slice * steps / SLICES, end = (slice + 1) * steps / SLICES;
    const int stage_x = SLICES * ROWS * ROW_BYTES, stage = stage_x + warps * BYTES;
    u8* base = (u8*)room;
    float* sums = (float*)(base + STAGES * stage);
    const int first = blockIdx.y * ROWS;
    const int length = (steps + SLICES - 1) / SLICES;  // of the longest slice
    const int turns = (in.tiles - (int)blockIdx.x * across + (int)gridDim.x * across - 1) / ((int)gridDim.x * across);
    const int total = turns * length;

    auto fetch_weights = [&](int index) {
        const int tile = ((int)blockIdx.x + index / length * (int)gridDim.x) * across + column;
        const u32 at = begin + index % length;
        if (index < total && tile < in.tiles && at < end) {
            const u32 to = (u32)__cvta_generic_to_shared(base + index % STAGES * stage + stage_x + warp * BYTES);
            Quant::Bytes::fetch(part, tile * steps + at, to + lane * 16, lane);
        }
    };
    const int count = min(step_rows(step, wanted) - in.first, in.limit) - first;
    auto fetch_x = [&](int index) {
        if (index < total) {
            const u32 to = (u32)__cvta_generic_to_shared(base + index % STAGES * stage);
            const long stride = (long)part.groups * (BLOCK * 2);
            for (int i = threadIdx.x; i < SLICES * ROWS * CHUNKS; i += blockDim.x) {
                const int chunk = i % CHUNKS, r = i / CHUNKS % ROWS;
                const u32 s = i / (CHUNKS * ROWS), at = s * steps / SLICES + index % length;
                // Beyond the last row any: its results are unused.
                if (at < (s + 1) * steps / SLICES)
                    copy_begin<0, 0>(to + (s * ROWS + r) * ROW_BYTES + chunk * 16,
                                     in.values + (first + min(r, count - 1)) * stride + at * (Quant::STEP * 2) + chunk * 16);
            }
        }
        copy_group();
    };
    // Ahead of what is multiplied; where there is room for one step alone, nothing.
#define AHEAD (STAGES - 1)
#pragma unroll 1
    for (int index = 0; index < AHEAD; index++) fetch_weights(index);
    let_next_start();
    const float unscale = Quant::unscale(part);
    wait_for_inputs();
    if (count <= 0) return;
#pragma unroll 1
    for (int index = 0; index < AHEAD; index++) fetch_x(index);

    auto finish = [&](int r, int n, float sum) {
        if (n >= part.rows || r >= count) return;
        const long to = in.first + first + r;
        const float bias = out.bias ? out.bias[out.first + n] : 0.0f;
        const float before = out.adds ? out.values[to * out.columns + out.first + n] : 0.0f;
        put(out, to, n, meant(sum, in.factors[first + r], unscale), 0.0f, bias, before);
    };
    float acc[NT][4];
    int index = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        const int tile = ((int)blockIdx.x + turn * (int)gridDim.x) * across + column;
#pragma unroll
        for (int i = 0; i < NT * 4; i++) acc[i / 4][i % 4] = 0.0f;
#pragma unroll 1
        for (u32 at = begin; at < begin + length; at++, index++) {
            if (AHEAD > 0) copy_wait<(AHEAD > 0 ? AHEAD - 1 : 0)>();
            __syncthreads();
            fetch_weights(index + AHEAD);
            fetch_x(index + AHEAD);
            if (AHEAD == 0) {
                copy_wait<0>();
                __syncthreads();
            }
            if (at >= end || tile >= in.tiles) continue;
            const u8* staged = base + index % STAGES * stage;
            const u8* x = staged + (slice * ROWS + lane / 4) * ROW_BYTES + lane % 4 * 16;
            uint4 b[NT];
            Quant::fragments(staged + stage_x + warp * BYTES, lane, [&](int k, const u32 a[4]) {
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    if (k % 2 == 0) b[nt] = *(const uint4*)(x + nt * 8 * ROW_BYTES + k * 32);
                    mma_f16(acc[nt], a, k % 2 ? b[nt].z : b[nt].x, k % 2 ? b[nt].w : b[nt].y);
                }
            });
        }
        if (SLICES == 1) {
#pragma unroll
            for (int i = 0; i < NT * 4; i++)
                finish(i / 4 * 8 + lane % 4 * 2 + i % 2, tile * 16 + lane / 4 + i % 4 / 2 * 8, acc[i / 4][i % 4]);
        } else {
#pragma unroll
            for (int i = 0; i < NT * 4; i++) {
                const int r = i / 4 * 8 + lane % 4 * 2 + i % 2;
                sums[((slice * ROWS + r) * across + column) * 16 + lane / 4 + i % 4 / 2 * 8] = acc[i / 4][i % 4];
            }
            __syncthreads();
            for (int i = threadIdx.x; i < ROWS * across * 16; i += blockDim.x) {
                float sum = sums[i];
#pragma unroll
                for (int s = 1; s < SLICES; s++) sum = __fadd_rn(sum, sums[s * ROWS * across * 16 + i]);
                finish(i / (across * 16), (tile - column) * 16 + i % (across * 16), sum);
            }
        }
    }
}

#endif
