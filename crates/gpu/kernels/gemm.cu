// out[r][n] = sum over k of x[r][k] * weight[n][k] for many rows r, by wgmma: weights of one format (QUANT names its header) are
// unpacked into the registers of the matrix instruction's rows, activations (form.cu) are its columns. Hopper only.
//
// A block has 128 rows of a weight and WIDTH rows of activations at a time; its first two warpgroups multiply, 64 rows each.
// Of the third one warp copies weights, a step of all rows at once, and another activations, 64 columns at once, each
// through a ring of its own. Where rows are gates (GATES), the second 64 rows are the counterparts of the first.
// Sums are those of gemv.cu in the same order, and have the same bits: slices of contiguous steps, each from zero, added in
// their order. A block takes all slices of a tile (SLICED: more than one), or the blocks of a cluster take a slice each and
// add what they have through each other's shared memory (SPLIT).
// With EXPERTS rows of activations are those of one expert after the other (experts.cuh), each times its own weights.
// Reads weight planes and activations; writes out (rows, columns) at out.first; of gates only what they let through.
#include QUANT
#include "bulk.cuh"
#include "experts.cuh"
#include "form.cuh"
#if EXPERTS
#define STACK , Stack stack
#else
#define STACK
#endif
#include "result.cuh"
#include "wgmma.cuh"

struct Inputs {
    const u8* values;      // (64 columns, rows, 128 bytes)
    const float* factors;  // (rows) what a row's sums are multiplied by
    int first, limit;      // the first row of the step that it holds, and how many it holds at most
    int rows;              // that it has room for: a multiple of 8
    int tiles;             // of a block's rows, below each other
    int slices, pad;
};

#define WARPS 8         // that multiply
#define ROW_TILES 8     // of 16 rows
#define OUTPUTS (WIDTH / 2)  // sums of a lane: 16 rows x WIDTH of a warp
#define STAGE_A (ROW_TILES * Quant::Bytes::BYTES)
#define STAGE_B (WIDTH * 128)
#define GROUP (2048 / WIDTH)  // tiles of activations that stay in the cache: 15 MB of 3584 columns
#define PASSED 16       // sums of a lane that warpgroups pass to each other at once

#if __CUDA_ARCH__ == 900
struct Barriers {
    u64 full_a[STAGES_A], empty_a[STAGES_A], full_b[STAGES_B], empty_b[STAGES_B];
};

// The warps that multiply wait for each other.
DEVICE void multipliers_wait() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * WARP) : "memory"); }

KERNEL __launch_bounds__(384, 1) gemm(Part part, Step step, int wanted, Inputs in, Result out STACK) {
    // Rings of activations, where eight rows begin at 1024 bytes, and of weights; what is passed.
    extern __shared__ u8 room[];
    __shared__ Barriers barriers;
    __shared__ float factors[2][WIDTH];
    const u32 ring_b = (shared_at(room) + 1023) & ~1023u, ring_a = ring_b + STAGES_B * STAGE_B;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES_A; i++) {
            barrier_init(barriers.full_a + i, 1);
            barrier_init(barriers.empty_a + i, WARPS);
        }
        for (int i = 0; i < STAGES_B; i++) {
            barrier_init(barriers.full_b + i, 1);
            barrier_init(barriers.empty_b + i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if EXPERTS
    __shared__ int before[EXPERTS_MAX + 1];
    wait_for_inputs();
    if (warp == 0) count_groups<WIDTH>(stack, before);
#endif
    __syncthreads();
    const u32 steps = part.groups * 128 / Quant::STEP, slices = in.slices;
#if EXPERTS
    const int tiles = before[stack.count] * in.tiles;
    auto place_of = [&](int at) { return item_of<WIDTH>(stack, before, at, in.tiles); };
#else
    const int count = min(step_rows(step, wanted) - in.first, in.limit);
    const int across = max(count + WIDTH - 1, 0) / WIDTH, tiles = across * in.tiles;
    // Tiles that share rows of the weight are neighbours, so that these are read once from memory, and as many rows of
    // activations go through the whole weight as a cache holds: a block's at-th tile.
    auto place_of = [&](int at) {
        const int group = at / (GROUP * in.tiles), within = at - group * GROUP * in.tiles;
        const int wide = min(GROUP, across - group * GROUP);
        return Item{0, within / wide, (group * GROUP + within % wide) * WIDTH, count};
    };
#endif
    const u32 slice_first = SPLIT ? blockIdx.z : 0, slice_end = SPLIT ? blockIdx.z + 1 : slices;
    const u32 begin = slice_first * steps / slices, end = slice_end * steps / slices;
    const int row_tiles = GATES ? out.pairs : (part.rows + 15) / 16;
    // The first of a block's times 16 rows that is this warp's or lane's.
    auto tile_of = [&](int tile, int i) { return GATES ? tile * (ROW_TILES / 2) + i % (ROW_TILES / 2) : tile * ROW_TILES + i; };

    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == WARPS) {
            // A lane for each 16 rows; beyond the last the last again.
            Turn<STAGES_A> turn;
            for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
                const int below = GATES && lane >= ROW_TILES / 2 ? out.pairs : 0;
                const Item item = place_of(at);
                const int above = item.expert * ((part.rows + 15) / 16);
                const long base = (long)(above + min(tile_of(item.tile, lane), row_tiles - 1) + below) * steps;
                for (u32 s = begin; s < end; s++) {
                    u64* full = barriers.full_a + turn.stage;
                    barrier_wait(barriers.empty_a + turn.stage, turn.parity ^ 1);
                    if (lane == 0) barrier_expect(full, STAGE_A);
                    __syncwarp();
                    if (lane < ROW_TILES)
                        copy_step<Quant::Bytes>(part, base + s, ring_a + turn.stage * STAGE_A + lane * Quant::Bytes::BYTES, full);
                    turn.move();
                }
            }
        } else if (warp == WARPS + 1 && lane == 0) {
            wait_for_inputs();
            Turn<STAGES_B> turn;
            for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
                const int token = place_of(at).place;
                const u32 bytes = min(WIDTH, in.rows - token) * 128;
                for (u32 k = begin * (Quant::STEP / 64); k < end * (Quant::STEP / 64); k++) {
                    u64* full = barriers.full_b + turn.stage;
                    barrier_wait(barriers.empty_b + turn.stage, turn.parity ^ 1);
                    barrier_expect(full, bytes);
                    copy_bulk(ring_b + turn.stage * STAGE_B, in.values + ((long)k * in.rows + token) * 128, bytes, full);
                    turn.move();
                }
            }
        }
#if SPLIT
        // All of a cluster's threads meet twice.
        __syncwarp();
        cluster_wait();
        cluster_wait();
#endif
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int t = lane % 4;
    const u8* staged = room + (ring_a - shared_at(room)) + warp * Quant::Bytes::BYTES;
    const float unscale = Quant::unscale(part);
    Turn<STAGES_A> turn_a;
    Turn<STAGES_B> turn_b;
    int half = 0;
    wait_for_inputs();
    for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
        const Item item = place_of(at);
        const int tile = item.tile, token = item.place, end_row = item.end;
        const float* biases = out.bias ? out.bias + (long)item.expert * out.columns + out.first : nullptr;
        if (at + gridDim.x >= tiles) let_next_start();
        // Powers of two: one product has the bits of `meant`.
        for (int i = threadIdx.x; i < min(WIDTH, end_row - token); i += WARPS * WARP)
            factors[half][i] = __fmul_rn(in.factors[token + i], unscale);
        float acc[OUTPUTS];
#if SLICED
        float sum[OUTPUTS];
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) sum[i] = 0.0f;
#endif
        u32 last = STAGES_B;  // a stage of activations that is free when the next product has begun
#pragma unroll 1
        for (u32 slice = slice_first; slice < slice_end; slice++) {
            const u32 from = slice * steps / slices, to = (slice + 1) * steps / slices;
#pragma unroll 1
            for (u32 s = from; s < to; s++) {
                barrier_wait(barriers.full_a + turn_a.stage, turn_a.parity);
                u64 columns = 0;
                u32 first[4];
                Quant::fragments(staged + turn_a.stage * STAGE_A, lane, [&](int k, const u32 a[4]) {
                    // Two at a time.
                    if (k % 2 == 0) {
#pragma unroll
                        for (int i = 0; i < 4; i++) first[i] = a[i];
                        return;
                    }
                    if (k % 4 == 1) {
                        barrier_wait(barriers.full_b + turn_b.stage, turn_b.parity);
                        columns = wgmma_columns(ring_b + turn_b.stage * STAGE_B);
                    }
                    wgmma_fence();
                    Wgmma<WIDTH>::multiply(acc, first, columns + 2 * (k % 4 - 1), s != from || k != 1);
                    Wgmma<WIDTH>::multiply(acc, a, columns + 2 * (k % 4), 1);
                    wgmma_commit();
                    // What comes next is unpacked while these two are under way.
                    wgmma_wait<1>();
                    if (k % 4 == 1) {
                        if (last < STAGES_B && lane == 0) barrier_arrive(barriers.empty_b + last);
                        last = turn_b.stage;
                        turn_b.move();
                    }
                });
                __syncwarp();
                if (lane == 0) barrier_arrive(barriers.empty_a + turn_a.stage);
                turn_a.move();
            }
            wgmma_wait<0>();
#if SLICED
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++) sum[i] = __fadd_rn(sum[i], acc[i]);
#endif
        }
        if (last < STAGES_B && lane == 0) barrier_arrive(barriers.empty_b + last);
        multipliers_wait();

        // Sum i of a lane is of its row, or of the eighth below (i / 2 % 2), and of this token of the tile.
        const int row = tile_of(tile, warp) * 16 + lane / 4;
        auto token_of = [&](int i) { return i / 4 * 8 + t * 2 + i % 2; };
        auto ended = [&](int i, float value, float bias) {
            return __fadd_rn(__fmul_rn(value, factors[half][token_of(i)]), bias);
        };
#if SLICED
#define SUMS sum
#else
#define SUMS acc
#endif
#if GATES
        // Each warpgroup ends half of the tokens: it has gates or counterparts of them, and is passed the others.
        const int below = out.pairs * 16, side = warp / (WARPS / 2);
        float* passed = (float*)(room + (ring_a - shared_at(room)) + STAGES_A * STAGE_A) + threadIdx.x % (WARPS / 2 * WARP);
        float bias[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
        for (int h = 0; h < 4; h++)
            if (biases && row + h % 2 * 8 < below) bias[h / 2][h % 2] = biases[row + h % 2 * 8 + h / 2 * below];
        const int mine = side ? OUTPUTS / 2 : 0, left = end_row - token - token_of(mine);
        float* to = out.gated + (long)(in.first + token + token_of(mine)) * below + row;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 2; j += PASSED) {
#pragma unroll
            for (int i = 0; i < PASSED; i++)
                passed[((1 - side) * PASSED + i) * (WARPS / 2 * WARP)] = side ? SUMS[j + i] : SUMS[OUTPUTS / 2 + j + i];
            multipliers_wait();
#pragma unroll
            for (int i = 0; i < PASSED; i++) {
                const float own = side ? SUMS[OUTPUTS / 2 + j + i] : SUMS[j + i];
                const float other = passed[(side * PASSED + i) * (WARPS / 2 * WARP)];
                const int h = i / 2 % 2;
                const float gate = ended(mine + j + i, side ? other : own, bias[0][h]);
                const float value = __fmul_rn(silu(gate), ended(mine + j + i, side ? own : other, bias[1][h]));
                if ((j + i) / 4 * 8 + i % 2 < left && row + h * 8 < below) to[i % 2 * below + h * 8] = value;
                if (i % 4 == 3) to += 8L * below;
            }
            multipliers_wait();
        }
#else
        float bias[2] = {0.0f, 0.0f};
        for (int h = 0; h < 2; h++)
            if (biases && row + h * 8 < part.rows) bias[h] = biases[row + h * 8];
        float* to = out.values + out.first + row + (long)(in.first + token) * out.columns;
#if SPLIT
        auto here = [&](int i) { return row + i / 2 % 2 * 8 < part.rows && token + token_of(i) < end_row; };
        auto place = [&](int i) { return to + (long)token_of(i) * out.columns + i / 2 % 2 * 8; };
        // A block has one tile: its rings are free. Each of the cluster's ends some of the tokens.
        float4* fours = (float4*)room + threadIdx.x;
#pragma unroll
        for (int i = 0; i < OUTPUTS / 4; i++)
            fours[i * (WARPS * WARP)] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        cluster_wait();
        const int end_of_share = (blockIdx.z + 1) * (OUTPUTS / 4) / slices;
        for (int j = blockIdx.z * (OUTPUTS / 4) / slices; j < end_of_share; j += 4) {
            // Loads of four at once; beyond the share, the last again.
            float4 whole[4];
            for (int s = 0; s < slices; s++) {
                float4 more[4];
#pragma unroll
                for (int i = 0; i < 4; i++) more[i] = load_from_block(fours + min(j + i, end_of_share - 1) * (WARPS * WARP), s);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    whole[i] = s == 0 ? more[i]
                                      : make_float4(__fadd_rn(whole[i].x, more[i].x), __fadd_rn(whole[i].y, more[i].y),
                                                    __fadd_rn(whole[i].z, more[i].z), __fadd_rn(whole[i].w, more[i].w));
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int index = 4 * j + i;
                if (j + i / 4 >= end_of_share || !here(index)) continue;
                const float4 four = whole[i / 4];
                const float value = ended(index, i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w,
                                          bias[i / 2 % 2]);
                *place(index) = out.adds ? __fadd_rn(load_fresh(place(index)), value) : value;
            }
        }
        cluster_wait();
#else
        const int left = end_row - token - 2 * t;
        to += 2L * t * out.columns;
#pragma unroll
        for (int j = 0; j < OUTPUTS; j += 16) {
            // All loads before the first store.
            float before[16];
            auto near = [&](int i) { return to + (i / 4 * 8 + i % 2) * (long)out.columns + i / 2 % 2 * 8; };
            auto is = [&](int i) { return (j + i) / 4 * 8 + i % 2 < left && row + i / 2 % 2 * 8 < part.rows; };
            if (out.adds) {
#pragma unroll
                for (int i = 0; i < 16; i++) before[i] = is(i) ? *near(i) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float value = ended(j + i, SUMS[j + i], bias[i / 2 % 2]);
                if (is(i)) *near(i) = out.adds ? __fadd_rn(before[i], value) : value;
            }
            to += 32L * out.columns;
        }
#endif
#endif
        half ^= 1;
    }
#if SPLIT
    if (blockIdx.x >= tiles) {
        cluster_wait();
        cluster_wait();
    }
#endif
}
#endif
