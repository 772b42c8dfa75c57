// out[r][n] = sum over k of x[r][k] * weight[n][k] for many rows r, by wgmma: weights of one format (QUANT names its
// header) are dequantised into the register operand, activations (form.cu) are the operand in shared memory. Hopper
// only. See docs/kernels.md#gemm.
//
// A persistent, warp-specialised kernel. An output tile is 128 or 192 rows of a weight x WIDTH rows of activations.
// WARPGROUPS consumer warpgroups multiply, 64 rows each. In one producer warpgroup a warp copies weights, a step of all
// rows at once, and another copies activations, 64 columns at once, each through a ring of its own. Where rows are
// gates (GATES), the second half of a tile's rows are the counterparts of the first. Sums are those of gemv.cu in the
// same order, and have the same bits: split-K slices of contiguous steps, each from zero, added in order. Either a
// block takes all slices of a tile (SLICED: more than one), or all steps of all slices are dealt out evenly (stream-K;
// STREAM_K: the number of slices). Where a share ends within a slice, the next block continues its sums, which pass
// through global memory, and blocks that have slices of a tile add them there. With EXPERTS rows of activations are
// those of one expert after another (experts.cuh), each times its own weights. Where all rows of activations are one
// tile, weights are read once (READ_ONCE) and evicted from L2 first. The TALL blocks of a cluster have tiles below each
// other and the same rows of activations: each copies a part of those and multicasts it to all, so that L2 is read
// once. With FLOATS8 (quant/fp8_a8.cuh) weights and activations are 8-bit floats: the products of a step are summed from
// zero by the tensor cores, then multiplied by the scale of the weight's row and added in f32. Reads weight planes and
// activations; writes out (rows, columns) at out.first; of gates only silu(gate) * up.
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
#include "chip/nvidia_wgmma.cuh"

struct Inputs {
    const u8* values;      // (PIECE columns, rows, 128 bytes)
    const float* factors;  // (rows) what a row's sums are multiplied by
    int first, limit;      // the first row of the step that it holds, and how many it holds at most
    int rows;              // its capacity: a multiple of 8
    int tiles;             // of a block's rows, below each other
    int slices, pad;
    float4* partials;      // stream-K: the sums that blocks pass on, or those of each slice
    u32* tickets;          // who has left some there: zero between kernels
};

#define WARPS (WARPGROUPS * 4)  // consumers
#define ROW_TILES WARPS         // of 16 rows
#define OUTPUTS (WIDTH / 2)  // sums of a lane: 16 rows x WIDTH of a warp
#define STAGE_A (ROW_TILES * Quant::Bytes::BYTES)
#define PIECE (FLOATS8 ? 128 : 64)  // columns of 128 bytes of activations
#define SHARES (WIDTH > 192 || (SLICED && WIDTH > 128) ? 2 : 1)  // of a block's rows whose 8-bit products are in registers at once
#define STAGE_B (WIDTH * 128)
#define RASTER (2048 / WIDTH)  // tiles of activations that stay in the cache: 15 MB of 3584 columns
#define PASSED (WARPGROUPS == 2 && WIDTH % 64 == 0 ? 16 : 8)  // sums of a lane that warps pass to each other at once
#define ADDED (STREAM_K > 4 ? 2 : 4)  // fours of sums that a lane adds at once
#define SUMS_FOURS (ROW_TILES * 16 * WIDTH / 4)  // sums of a block, in fours
// Registers of a thread after they are redistributed.
#define REGISTERS_PRODUCER (WARPGROUPS == 2 ? 40 : 32)
#define REGISTERS_CONSUMER (WARPGROUPS == 2 ? 232 : 160)

#if HAS_WGMMA
// A barrier of the consumers.
DEVICE void consumers_sync() { named_barrier_sync<1, WARPS * WARP>(); }

#if STREAM_K
// Says that this warp has left something in memory. Every lane's is seen by who waits for it.
DEVICE void ticket_give(u32* ticket) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) add_release(ticket);
}
DEVICE void ticket_wait(const u32* ticket, u32 count) {
    u32 there = 0;
    if (threadIdx.x % WARP == 0) {
        do there = load_acquire(ticket);
        while (there < count);
    }
    __syncwarp();
}
#endif

// Some steps of a tile, of one slice or of all.
struct Piece {
    Item item;
    u32 unit, from, to;  // a unit is a slice of a tile
    bool takes, passes;  // whether another block has begun the slice, or ends it
};

KERNEL __launch_bounds__((WARPGROUPS + 1) * 128, 1) gemm(Part part, Step step, int wanted, Inputs in, Result out STACK) {
    // Rings of activations, where eight rows begin at 1024 bytes, and of weights; what is passed.
    DYNAMIC_SHARED(u8, smem);
    __shared__ Barriers<STAGES_A> barriers_a;
    __shared__ Barriers<STAGES_B> barriers_b;
#if STREAM_K < 2
    __shared__ float factors[2][WIDTH];
#endif
    const u32 ring_b = (shared_address(smem) + 1023) & ~1023u, ring_a = ring_b + STAGES_B * STAGE_B;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // This block's place in its cluster.
    const int rank = blockIdx.z;
    if (threadIdx.x == 0) {
        barriers_a.init(WARPS * WARP);
        barriers_b.init(WARPS * TALL);
        mbarrier_init_fence();
    }
#if EXPERTS
    __shared__ int before[EXPERTS_MAX + 1];
    wait_for_inputs();
    if (warp == 0) count_groups<WIDTH>(stack, before);
#endif
    if (TALL > 1) cluster_sync_relaxed();
    else __syncthreads();
    const u32 steps = part.groups * 128 / Quant::STEP, slices = in.slices;
#if EXPERTS
    const int tiles = before[stack.count] * in.tiles;
    auto place_of = [&](int at) { return item_of<WIDTH>(stack, before, at, in.tiles); };
#else
    const int count = min(step_rows(step, wanted) - in.first, in.limit);
    const int across = max(count + WIDTH - 1, 0) / WIDTH, deep = in.tiles / TALL, tiles = across * deep;
    // The raster: consecutive tiles share rows of the weight, so that these are read once from memory, for as many rows
    // of activations as L2 holds. With stream-K shares start far apart, so the weight is walked once for each tile of
    // activations; other blocks are at the same rows at about the same time.
    auto place_of = [&](int at) {
        if (STREAM_K) return Item{0, at % deep * TALL + rank, at / deep * WIDTH, count};
        const int group = at / (RASTER * deep), within = at - group * RASTER * deep;
        const int wide = min(RASTER, across - group * RASTER);
        return Item{0, within / wide * TALL + rank, (group * RASTER + within % wide) * WIDTH, count};
    };
#endif
    // This block's pieces, in order. With stream-K some may be empty.
#if STREAM_K
    // All units count as long as the longest. A block starts with its last one: the block that continues it does so at
    // its own end.
    const u32 longest = (steps + STREAM_K - 1) / STREAM_K;
    const u64 all = (u64)tiles * STREAM_K * longest;
    const u32 share = blockIdx.x * all / gridDim.x, share_end = (blockIdx.x + 1) * all / gridDim.x;
    const int unit_first = share / longest, unit_last = share_end / longest, pieces = unit_last - unit_first + 1;
    auto piece_of = [&](int i) {
        const int unit = unit_last - i;
        const u32 slice = unit % STREAM_K, above = slice * steps / STREAM_K, whole = (slice + 1) * steps / STREAM_K - above;
        const u32 from = unit == unit_first ? min(share - unit * longest, whole) : 0, to = min(share_end - unit * longest, whole);
        return Piece{place_of(unit / STREAM_K), (u32)unit, above + from, above + to, from > 0, to < whole};
    };
#else
    const int pieces = ((int)tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    auto piece_of = [&](int i) { return Piece{place_of(blockIdx.x + i * gridDim.x), 0, 0, steps, false, false}; };
#endif
    const int row_tiles = GATES ? out.pairs : (part.rows + 15) / 16;
    // The first of a block's times 16 rows that is this warp's or lane's.
    auto tile_of = [&](int tile, int i) { return GATES ? tile * (ROW_TILES / 2) + i % (ROW_TILES / 2) : tile * ROW_TILES + i; };

    if (warp >= WARPS) {
        registers_give_up<REGISTERS_PRODUCER>();
        if (warp == WARPS) {
            // A lane for each 16 rows; beyond the last the last again.
            RingPosition<STAGES_A> slot;
            for (int i = 0; i < pieces; i++) {
                const Piece piece = piece_of(i);
                const int below = GATES && lane >= ROW_TILES / 2 ? out.pairs : 0;
                const int above = piece.item.expert * ((part.rows + 15) / 16);
                const long base = (long)(above + min(tile_of(piece.item.tile, lane), row_tiles - 1) + below) * steps;
                for (u32 s = piece.from; s < piece.to; s++) {
                    u64* full = barriers_a.full + slot.stage;
                    mbarrier_wait(barriers_a.empty + slot.stage, slot.parity ^ 1);
                    if (lane == 0) mbarrier_expect(full, STAGE_A);
                    __syncwarp();
                    if (lane < ROW_TILES)
                        copy_step<Quant::Bytes, READ_ONCE>(part, base + s, ring_a + slot.stage * STAGE_A + lane * Quant::Bytes::BYTES, full);
                    slot.move();
                }
            }
        } else if (warp == WARPS + 1 && lane == 0) {
            wait_for_inputs();
            RingPosition<STAGES_B> slot;
            for (int i = 0; i < pieces; i++) {
                const Piece piece = piece_of(i);
                const int token = piece.item.place;
                const int rows = min(WIDTH, in.rows - token);
                // Of those of a cluster each block copies some, eight at a time.
                const int first = TALL > 1 ? rows / 8 * rank / TALL * 8 : 0;
                const int own = (TALL > 1 ? rows / 8 * (rank + 1) / TALL * 8 : rows) - first;
                for (u32 k = piece.from * (Quant::STEP / PIECE); k < piece.to * (Quant::STEP / PIECE); k++) {
                    u64* full = barriers_b.full + slot.stage;
                    mbarrier_wait(barriers_b.empty + slot.stage, slot.parity ^ 1);
                    mbarrier_expect(full, rows * 128);
                    const u32 to = ring_b + slot.stage * STAGE_B + first * 128;
                    const u8* from = in.values + ((long)k * in.rows + token + first) * 128;
                    if (TALL == 1) copy_bulk(to, from, own * 128, shared_address(full));
                    else if (own > 0) copy_bulk_multicast<TALL>(to, from, own * 128, shared_address(full));
                    slot.move();
                }
            }
        }
        return;
    }

    registers_take<REGISTERS_CONSUMER>();
    const int t = lane % 4;
    const u8* staged = smem + (ring_a - shared_address(smem)) + warp * Quant::Bytes::BYTES;
    const float unscale = Quant::unscale(part);
    // Stages of activations are given back to every block that copies into them.
    const u32 empty_b = TALL > 1 ? shared_address_of(barriers_b.empty, lane % TALL) : 0;
    auto activations_done = [&](u32 stage) {
        if (stage == STAGES_B || lane >= TALL) return;
        if (TALL > 1) mbarrier_arrive_remote(empty_b + stage * 8);
        else mbarrier_arrive(barriers_b.empty + stage);
    };
    auto token_of = [&](int i) { return i / 4 * 8 + t * 2 + i % 2; };
    RingPosition<STAGES_A> slot_a;
    RingPosition<STAGES_B> slot_b;
    int half = 0;
    wait_for_inputs();
    for (int at = 0; at < pieces; at++) {
        const Piece piece = piece_of(at);
        if (at + 1 == pieces) let_next_start();
        if (STREAM_K && piece.from >= piece.to) continue;
#if STREAM_K < 2
        const Item& item = piece.item;
        const int tile = item.tile, token = item.place, end_row = item.end;
        const float* biases = out.bias ? out.bias + (long)item.expert * out.columns + out.first : nullptr;
        // Powers of two: one product has the bits of `unscaled`.
        for (int i = threadIdx.x; i < min(WIDTH, end_row - token); i += WARPS * WARP)
            factors[half][i] = __fmul_rn(in.factors[token + i], unscale);
#endif
        float acc[OUTPUTS];
        u32 last = STAGES_B;  // a stage of activations that is free when the next product has begun
        // Adds steps to sums, or begins anew.
        auto multiply = [&](u32 from, u32 to, bool anew) {
#if FLOATS8
            if (anew) {
#pragma unroll
                for (int i = 0; i < OUTPUTS; i++) acc[i] = 0.0f;
            }
#pragma unroll 1
            for (u32 s = from; s < to; s++) {
                const u8* step = staged + slot_a.stage * STAGE_A;
                mbarrier_wait(barriers_a.full + slot_a.stage, slot_a.parity);
                mbarrier_wait(barriers_b.full + slot_b.stage, slot_b.parity);
                const u64 columns = wgmma_descriptor(ring_b + slot_b.stage * STAGE_B);
                float products[OUTPUTS / SHARES];
                u32 rows[4][4];
                Quant::floats8(step, lane, [&](int k, const u32 a[4]) {
#pragma unroll
                    for (int i = 0; i < 4; i++) rows[k][i] = a[i];
                });
                const float scales[2] = {Quant::step_scale(step, lane, 0), Quant::step_scale(step, lane, 1)};
#pragma unroll
                for (int share = 0; share < SHARES; share++) {
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        WgmmaFloats8<WIDTH / SHARES>::multiply(products, rows[k], columns + share * (WIDTH / SHARES * 8) + 2 * k, k > 0);
                    wgmma_commit();
                    wgmma_wait<0>();
                    wgmma_fence_operands(products);
                    if (share == SHARES - 1) {
                        // Every lane arrives for itself, as below.
                        mbarrier_arrive(barriers_a.empty + slot_a.stage);
                        activations_done(slot_b.stage);
                        slot_a.move();
                        slot_b.move();
                    }
#pragma unroll
                    for (int i = 0; i < OUTPUTS / SHARES; i++) {
                        float& sum = acc[share * (OUTPUTS / SHARES) + i];
                        sum = __fmaf_rn(products[i], scales[i / 2 % 2], sum);
                    }
                }
            }
#else
#pragma unroll 1
            for (u32 s = from; s < to; s++) {
                mbarrier_wait(barriers_a.full + slot_a.stage, slot_a.parity);
                u64 columns = 0;
                u32 first[4];
                Quant::fragments(staged + slot_a.stage * STAGE_A, lane, [&](int k, const u32 a[4]) {
                    // Two at a time.
                    if (k % 2 == 0) {
#pragma unroll
                        for (int i = 0; i < 4; i++) first[i] = a[i];
                        return;
                    }
                    if (k % 4 == 1) {
                        mbarrier_wait(barriers_b.full + slot_b.stage, slot_b.parity);
                        columns = wgmma_descriptor(ring_b + slot_b.stage * STAGE_B);
                    }
                    wgmma_fence();
                    Wgmma<WIDTH>::multiply(acc, first, columns + 2 * (k % 4 - 1), !anew || s != from || k != 1);
                    Wgmma<WIDTH>::multiply(acc, a, columns + 2 * (k % 4), 1);
                    wgmma_commit();
                    // The next fragments are dequantised while these two are in flight.
                    wgmma_wait<1>();
                    if (k % 4 == 1) {
                        activations_done(last);
                        last = slot_b.stage;
                        slot_b.move();
                    }
                });
                // Every lane arrives for itself: the compiler drops a __syncwarp here, and racecheck would see one lane
                // only.
                mbarrier_arrive(barriers_a.empty + slot_a.stage);
                slot_a.move();
            }
            wgmma_wait<0>();
#endif
        };
#if SLICED
        float sum[OUTPUTS];
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) sum[i] = 0.0f;
#pragma unroll 1
        for (u32 slice = 0; slice < slices; slice++) {
            multiply(slice * steps / slices, (slice + 1) * steps / slices, true);
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++) sum[i] = __fadd_rn(sum[i], acc[i]);
        }
#else
#if STREAM_K
        // Passed sums are at the index of the block that passes them; with several slices, of the unit.
        auto sums_at = [&](u32 block) { return in.partials + (long)((STREAM_K > 1 ? piece.unit : block) * TALL + rank) * SUMS_FOURS + threadIdx.x; };
        if (piece.takes) {
            u32* ticket = in.tickets + ((blockIdx.x - 1) * TALL + rank) * WARPS + warp;
            ticket_wait(ticket, 1);
            if (lane == 0) *ticket = 0;
            const float4* from = sums_at(blockIdx.x - 1);
#pragma unroll
            for (int i = 0; i < OUTPUTS / 4; i++) {
                const float4 four = load_l2(from + i * (WARPS * WARP));
                acc[4 * i] = four.x; acc[4 * i + 1] = four.y; acc[4 * i + 2] = four.z; acc[4 * i + 3] = four.w;
            }
        }
#endif
        multiply(piece.from, piece.to, !piece.takes);
#endif
        activations_done(last);
#if STREAM_K
        if (piece.passes || STREAM_K > 1) {
            float4* to = sums_at(blockIdx.x);
#pragma unroll
            for (int i = 0; i < OUTPUTS / 4; i++)
                to[i * (WARPS * WARP)] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
            ticket_give(in.tickets + ((piece.passes ? blockIdx.x : gridDim.x + piece.unit / STREAM_K) * TALL + rank) * WARPS + warp);
            continue;
        }
#endif
#if STREAM_K < 2
        consumers_sync();

        // Sum i of a lane is of its row, or of the eighth below (i / 2 % 2), and of this token of the tile.
        const int row = tile_of(tile, warp) * 16 + lane / 4;
        auto ended = [&](int i, float value, float bias) {
            return __fadd_rn(__fmul_rn(value, factors[half][token_of(i)]), bias);
        };
#if SLICED
#define SUMS sum
#else
#define SUMS acc
#endif
#if GATES
        // Each warpgroup finishes half of the tokens: it has their gates or their counterparts, and is passed the
        // other.
        const int below = out.pairs * 16, side = warp / (WARPS / 2);
        float* passed = (float*)(smem + (ring_a - shared_address(smem)) + STAGES_A * STAGE_A) + threadIdx.x % (WARPS / 2 * WARP);
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
            consumers_sync();
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
            consumers_sync();
        }
#else
        float bias[2] = {0.0f, 0.0f};
        for (int h = 0; h < 2; h++)
            if (biases && row + h * 8 < part.rows) bias[h] = biases[row + h * 8];
        float* to = out.values + out.first + row + (long)(in.first + token) * out.columns;
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
        half ^= 1;
#endif
    }
#if STREAM_K > 1
    // Every block that has finished a slice of a tile adds an equal share of the tile's sums.
    for (int at = 0; at < pieces; at++) {
        const Piece piece = piece_of(at);
        if (piece.from >= piece.to || piece.passes) continue;
        const Item& item = piece.item;
        u32* ticket = in.tickets + ((gridDim.x + piece.unit / STREAM_K) * TALL + rank) * WARPS + warp;
        ticket_wait(ticket, STREAM_K);
        const int slice = piece.unit % STREAM_K, row = tile_of(item.tile, warp) * 16 + lane / 4;
        const float4* fours = in.partials + (long)((piece.unit - slice) * TALL + rank) * SUMS_FOURS + threadIdx.x;
        float bias[2] = {0.0f, 0.0f};
        for (int h = 0; h < 2; h++)
            if (out.bias && row + h * 8 < part.rows) bias[h] = out.bias[out.first + row + h * 8];
        const int end = (slice + 1) * (OUTPUTS / 4) / STREAM_K;
        for (int j = slice * (OUTPUTS / 4) / STREAM_K; j < end; j += ADDED) {
            // All loads before the first store; beyond the share, the last again.
            float4 parts[ADDED][STREAM_K];
#pragma unroll
            for (int i = 0; i < ADDED; i++) {
#pragma unroll
                for (int s = 0; s < STREAM_K; s++) parts[i][s] = load_l2(fours + (long)s * TALL * SUMS_FOURS + min(j + i, end - 1) * (WARPS * WARP));
            }
            auto here = [&](int i) {
                return j + i / 4 < end && row + i / 2 % 2 * 8 < part.rows && item.place + token_of(4 * j + i) < item.end;
            };
            auto place = [&](int i) {
                return out.values + (long)(in.first + item.place + token_of(4 * j + i)) * out.columns + out.first + row + i / 2 % 2 * 8;
            };
            float before[4 * ADDED], by[4 * ADDED];
#pragma unroll
            for (int i = 0; i < 4 * ADDED; i++) {
                before[i] = out.adds && here(i) ? load_l2(place(i)) : 0.0f;
                by[i] = here(i) ? in.factors[item.place + token_of(4 * j + i)] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 4 * ADDED; i++) {
                auto part_of = [&](int s) {
                    const float4& four = parts[i / 4][s];
                    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
                };
                float sum = part_of(0);
#pragma unroll
                for (int s = 1; s < STREAM_K; s++) sum = __fadd_rn(sum, part_of(s));
                // Powers of two: one product has the bits of `unscaled`.
                const float value = __fadd_rn(__fmul_rn(sum, __fmul_rn(by[i], unscale)), bias[i / 2 % 2]);
                if (here(i)) *place(i) = out.adds ? __fadd_rn(before[i], value) : value;
            }
        }
        // The last one resets it.
        if (lane == 0 && atomicAdd(ticket, 1) == 2 * STREAM_K - 1) *ticket = 0;
    }
#endif
    // Other blocks of the cluster still arrive at this block's barriers.
    if (TALL > 1) cluster_sync_relaxed();
}
#endif
