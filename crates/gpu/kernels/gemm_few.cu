// out[r][n] = sum over k of x[r][k] * weight[n][k] for few rows r (up to WIDTH, all at once), by wgmma as in gemm.cu.
// Hopper only. See docs/kernels.md#gemm_few.
//
// Reading the weight takes the time, so every block gets the same number of its rows: a share of all tiles of 16 rows
// (of pairs, where rows are gates), at most TILES of them at a time. A warp has a tile: WARPGROUPS warpgroups are
// consumers, and where there are fewer tiles than warps, the last ones repeat the last tile. In one producer warpgroup
// a warp copies weights, a step of all tiles at once, and another activations, PIECES x 64 columns at once. Sums are
// those of gemv.cu in the same order, and have the same bits: with several split-K slices (SLICES), the blocks of a
// cluster have one each of the same tiles and add them up through distributed shared memory. With FLOATS8 weights and
// activations are 8-bit floats, summed as in gemm.cu, one row too: every block converts that itself (ONE: the
// most groups of 128 columns of a slice). Reads weight planes and activations; writes out (rows, columns) at out.first; of gates only silu(gate) * up.
#include QUANT
#include "bulk.cuh"
#include "form.cuh"
#include "result.cuh"
#include "chip/nvidia_wgmma.cuh"

struct Inputs {
    const u8* values;      // (PIECE columns, rows, 128 bytes)
    const float* factors;  // (rows) what a row's sums are multiplied by
    int first, limit;      // the first row of the step that it holds, and how many it holds at most
    int rows;              // its capacity: a multiple of 8
    int units;             // tiles of 16 rows, or of gates
    float eps;             // of the norm
    int pad;
    const float* x;        // with ONE the row instead of `values`,
    const float* norm;     // and the weight of the norm that is due, or null
};

#define WARPS (WARPGROUPS * 4)  // consumers
#define UNIT (GATES ? 2 : 1)
#define OUTPUTS (WIDTH / 2)  // sums of a lane: 16 rows x WIDTH of a warp
#define PIECE (FLOATS8 ? 128 : 64)  // columns of 128 bytes of activations
#define PIECES (WIDTH < 64 && !FLOATS8 ? 2 : 1)
#ifndef ONE
#define ONE 0
#endif
#define STAGE_A (TILES * Quant::Bytes::BYTES)
#define STAGE_B (PIECES * WIDTH * 128)
#define ENDED (OUTPUTS / 2)              // sums of a lane's that it ends, where others are gates'
#define PASSED (ENDED < 8 ? ENDED : 8)   // and that it passes on at once
// Registers of a thread after they are redistributed.
#define REGISTERS_PRODUCER (WARPGROUPS == 2 || WARPGROUPS == 5 ? 40 : 32)
#define REGISTERS_CONSUMER (WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 160 : WARPGROUPS == 4 ? 112 : 88)

#if HAS_WGMMA
// A barrier of the consumers.
DEVICE void consumers_sync() { named_barrier_sync<1, WARPS * WARP>(); }

#if ONE
// Converts the row that all blocks multiply by: the columns from group `begin` to `end` go to shared memory as eight rows
// would lie there, of which the others are never looked at. Returns what sums are multiplied by. Bits are those of
// form.cu.
DEVICE float convert_one(const Inputs& in, int columns, int begin, int end, u8* to) {
    __shared__ float squares[1024];
    __shared__ u32 maxima[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, groups = columns / BLOCK;
    const float* row = in.x + (long)in.first * columns;
    auto load = [&](int at, float v[4], bool again) {
        load_four<true>(row, at * BLOCK + lane * 4, columns, v);
        if (!in.norm) return;
        float weight[4];
        load_four<true>(in.norm, at * BLOCK + lane * 4, columns, weight);
        const float sum = take_norm(v, weight);
        if (lane == 0 && !again) squares[at] = sum;
    };
    u32 most = 0;
#pragma unroll 4
    for (int at = warp; at < groups; at += WARPS) {
        float v[4];
        load(at, v, false);
        most = max(most, max_magnitude(v));
    }
    most = warp_max(most);
    if (lane == 0) maxima[warp] = most;
    consumers_sync();
    const float inverse = in.norm ? inverse_norm<false>(squares, groups, columns, in.eps) : 1.0f;
    most = max_magnitude_normed(warp_max(lane < WARPS ? maxima[lane] : 0), inverse);
    const float scale = row_scale(most);
    to += (lane / 8 * 2 + lane % 2) * 16 + lane % 8 / 2 * 4;
#pragma unroll 4
    for (int at = begin + warp; at < end; at += WARPS) {
        float v[4];
        load(at, v, true);
        *(u32*)(to + (at - begin) * 1024) = scaled_floats8x4(v, inverse, scale);
    }
    fence_async_proxy();
    consumers_sync();
    return row_unscale(most);
}
#endif

KERNEL __launch_bounds__((WARPGROUPS + 1) * 128, 1) gemm_few(Part part, Step step, int wanted, Inputs in, Result out) {
    // Rings of activations, where eight rows begin at 1024 bytes, and of weights; what is passed. Sums of slices take
    // their place.
    DYNAMIC_SHARED(u8, smem);
    __shared__ Barriers<STAGES_A> barriers_a;
    __shared__ Barriers<STAGES_B> barriers_b;
    __shared__ float factors[WIDTH];
    const u32 ring_b = (shared_address(smem) + 1023) & ~1023u, ring_a = ring_b + (ONE ? ONE * 1024 : STAGES_B * STAGE_B);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        barriers_a.init(WARPS * WARP);
        barriers_b.init(WARPS);
        mbarrier_init_fence();
    }
    __syncthreads();
    const u32 steps = part.groups * 128 / Quant::STEP, slice = blockIdx.z;
    const u32 begin = slice * steps / SLICES, end = (slice + 1) * steps / SLICES;
    // This block's share of all units, and the rounds it is done in.
    const int share_first = (long)blockIdx.x * in.units / gridDim.x, share = (long)(blockIdx.x + 1) * in.units / gridDim.x - share_first;
    const int rounds = (share + TILES / UNIT - 1) / (TILES / UNIT);
    auto first_of = [&](int round) { return share_first + round * share / rounds; };

    if (warp >= WARPS) {
#if WARPGROUPS > 1
        registers_give_up<REGISTERS_PRODUCER>();
#endif
        if (warp == WARPS) {
            // A lane for each tile.
            RingPosition<STAGES_A> at;
            for (int round = 0; round < rounds; round++) {
                const int units = first_of(round + 1) - first_of(round), other = GATES && lane >= units ? out.pairs - units : 0;
                const long base = (long)(first_of(round) + lane + other) * steps;
                for (u32 s = begin; s < end; s++) {
                    u64* full = barriers_a.full + at.stage;
                    mbarrier_wait(barriers_a.empty + at.stage, at.parity ^ 1);
                    if (lane == 0) mbarrier_expect(full, units * UNIT * Quant::Bytes::BYTES);
                    __syncwarp();
                    if (lane < units * UNIT)
                        copy_step<Quant::Bytes, true>(part, base + s, ring_a + at.stage * STAGE_A + lane * Quant::Bytes::BYTES, full);
                    at.move();
                }
            }
        } else if (!ONE && warp == WARPS + 1 && lane == 0) {
            wait_for_inputs();
            RingPosition<STAGES_B> at;
            const u32 bytes = min(WIDTH, in.rows) * 128;
            for (int round = 0; round < rounds; round++) {
                for (u32 k = begin * (Quant::STEP / PIECE); k < end * (Quant::STEP / PIECE); k += PIECES) {
                    u64* full = barriers_b.full + at.stage;
                    mbarrier_wait(barriers_b.empty + at.stage, at.parity ^ 1);
                    mbarrier_expect(full, PIECES * bytes);
#pragma unroll
                    for (int i = 0; i < PIECES; i++)
                        copy_bulk(ring_b + at.stage * STAGE_B + i * (WIDTH * 128), in.values + (long)(k + i) * in.rows * 128, bytes, shared_address(full));
                    at.move();
                }
            }
        }
#if SLICES > 1
        // All of a cluster's threads meet broadcast_f16.
        __syncwarp();
        cluster_sync();
        cluster_sync();
#endif
        return;
    }

#if WARPGROUPS > 1
    registers_take<REGISTERS_CONSUMER>();
#endif
    const u8* weights = smem + (ring_a - shared_address(smem));
    const int count = min(step_rows(step, wanted) - in.first, in.limit);
    RingPosition<STAGES_A> slot_a;
    RingPosition<STAGES_B> slot_b;
    wait_for_inputs();
#if ONE
    const float factor = convert_one(in, part.columns, begin, end, smem + (ring_b - shared_address(smem)));
    if (threadIdx.x == 0) factors[0] = factor;
#else
    // Powers of two: one product has the bits of `unscaled`.
    for (int i = threadIdx.x; i < min(WIDTH, count); i += WARPS * WARP) factors[i] = __fmul_rn(in.factors[i], Quant::unscale(part));
#endif
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int first = first_of(round), units = first_of(round + 1) - first;
        const u8* staged = weights + min(warp, units * UNIT - 1) * Quant::Bytes::BYTES;
        if (round + 1 == rounds) let_next_start();
        float acc[OUTPUTS];
#if FLOATS8
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) acc[i] = 0.0f;
#pragma unroll 1
        for (u32 s = begin; s < end; s++) {
            const u8* step = staged + slot_a.stage * STAGE_A;
            mbarrier_wait(barriers_a.full + slot_a.stage, slot_a.parity);
            if (!ONE) mbarrier_wait(barriers_b.full + slot_b.stage, slot_b.parity);
            const u64 columns = wgmma_descriptor(ring_b + (ONE ? (s - begin) * 1024 : slot_b.stage * STAGE_B));
            float products[OUTPUTS];
            wgmma_fence();
            Quant::floats8(step, lane, [&](int k, const u32 a[4]) { WgmmaFloats8<WIDTH>::multiply(products, a, columns + 2 * k, k > 0); });
            wgmma_commit();
            const float scales[2] = {Quant::step_scale(step, lane, 0), Quant::step_scale(step, lane, 1)};
            wgmma_wait<0>();
            wgmma_fence_operands(products);
            // Every lane arrives for itself, as below.
            mbarrier_arrive(barriers_a.empty + slot_a.stage);
            if (!ONE && lane == 0) mbarrier_arrive(barriers_b.empty + slot_b.stage);
            slot_a.move();
            slot_b.move();
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++) acc[i] = __fmaf_rn(products[i], scales[i / 2 % 2], acc[i]);
        }
#else
        u32 last = STAGES_B;  // a stage of activations that is free when the next product has begun
#pragma unroll 1
        for (u32 s = begin; s < end; s++) {
            mbarrier_wait(barriers_a.full + slot_a.stage, slot_a.parity);
            u64 columns = 0;
            u32 before[4];
            Quant::fragments(staged + slot_a.stage * STAGE_A, lane, [&](int k, const u32 a[4]) {
                // Two at a time.
                if (k % 2 == 0) {
#pragma unroll
                    for (int i = 0; i < 4; i++) before[i] = a[i];
                    return;
                }
                const int within = k % (4 * PIECES);
                if (within == 1) {
                    mbarrier_wait(barriers_b.full + slot_b.stage, slot_b.parity);
                    columns = wgmma_descriptor(ring_b + slot_b.stage * STAGE_B);
                }
                const u64 at = columns + within / 4 * (WIDTH * 8) + 2 * (within % 4 - 1);
                wgmma_fence();
                Wgmma<WIDTH>::multiply(acc, before, at, s != begin || k != 1);
                Wgmma<WIDTH>::multiply(acc, a, at + 2, 1);
                wgmma_commit();
                // The next fragments are dequantised while these two are in flight.
                wgmma_wait<1>();
                if (within == 1) {
                    if (last < STAGES_B && lane == 0) mbarrier_arrive(barriers_b.empty + last);
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
        if (last < STAGES_B && lane == 0) mbarrier_arrive(barriers_b.empty + last);
#endif
        consumers_sync();

        // Sum i of a lane is of its tile's row g, or of the eighth below, and of this token.
        auto token_of = [](int i, int t) { return i / 4 * 8 + t * 2 + i % 2; };
        auto ended = [&](float sum, int token, float bias) { return __fadd_rn(__fmul_rn(sum, factors[token]), bias); };
#if GATES
        // A tile's gates and their counterparts belong to two warps. Each finishes half of the tokens and is passed the
        // other's sums.
        const int side = warp >= units, below = out.pairs * 16;
        const bool busy = warp < 2 * units;
        const int row = (first + warp - side * units) * 16 + lane / 4;
        float* passed = (float*)(smem + (ring_a - shared_address(smem)) + STAGES_A * STAGE_A) + lane;
        float* own_place = passed + warp * PASSED * WARP;
        const float* other_place = passed + (busy ? warp + (side ? -units : units) : warp) * PASSED * WARP;
        float bias[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
        for (int h = 0; h < 4; h++)
            if (out.bias && busy && row + h % 2 * 8 < below) bias[h / 2][h % 2] = out.bias[out.first + row + h % 2 * 8 + h / 2 * below];
#pragma unroll
        for (int j = 0; j < ENDED; j += PASSED) {
#pragma unroll
            for (int i = 0; i < PASSED; i++) own_place[i * WARP] = side ? acc[j + i] : acc[ENDED + j + i];
            consumers_sync();
#pragma unroll
            for (int i = 0; i < PASSED; i++) {
                const float own = side ? acc[ENDED + j + i] : acc[j + i], other = other_place[i * WARP];
                const int token = token_of(side ? ENDED + j + i : j + i, lane % 4), h = (side ? ENDED + j + i : j + i) / 2 % 2;
                const float gate = ended(side ? other : own, token, h ? bias[0][1] : bias[0][0]);
                const float value = __fmul_rn(silu(gate), ended(side ? own : other, token, h ? bias[1][1] : bias[1][0]));
                if (busy && token < count && row + h * 8 < below) out.gated[(long)(in.first + token) * below + row + h * 8] = value;
            }
            consumers_sync();
        }
#elif SLICES > 1
        // A block has one round: its rings are free. Each of the cluster's ends some of the sums, four at once.
        float4* fours = (float4*)(smem + (ring_b - shared_address(smem)));
#pragma unroll
        for (int i = 0; i < OUTPUTS / 4; i++)
            fours[i * (WARPS * WARP) + threadIdx.x] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        cluster_sync();
        const int lanes = units * WARP, all = OUTPUTS / 4 * lanes;
        for (int at = slice * all / SLICES + threadIdx.x; at < (int)(slice + 1) * all / SLICES; at += WARPS * WARP) {
            const int i = at / lanes, of = at % lanes, row = (first + of / WARP) * 16 + of % WARP / 4;
            float4 parts[SLICES];
#pragma unroll
            for (int s = 0; s < SLICES; s++) parts[s] = load_from_block(fours + i * (WARPS * WARP) + of, s);
            float4 sum = parts[0];
#pragma unroll
            for (int s = 1; s < SLICES; s++)
                sum = make_float4(__fadd_rn(sum.x, parts[s].x), __fadd_rn(sum.y, parts[s].y), __fadd_rn(sum.z, parts[s].z),
                                  __fadd_rn(sum.w, parts[s].w));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int n = row + j / 2 * 8, token = token_of(4 * i + j, of % 4);
                if (n >= part.rows || token >= count) continue;
                float* to = out.values + (long)(in.first + token) * out.columns + out.first + n;
                const float value = ended(j == 0 ? sum.x : j == 1 ? sum.y : j == 2 ? sum.z : sum.w, token, out.bias ? out.bias[out.first + n] : 0.0f);
                *to = out.adds ? __fadd_rn(load_l2(to), value) : value;
            }
        }
        cluster_sync();
#else
        const int row = (first + warp) * 16 + lane / 4;
        const bool busy = warp < units;
        float bias[2] = {0.0f, 0.0f};
        for (int h = 0; h < 2; h++)
            if (out.bias && busy && row + h * 8 < part.rows) bias[h] = out.bias[out.first + row + h * 8];
        const int left = busy ? count - lane % 4 * 2 : 0;
        float* to = out.values + (long)(in.first + lane % 4 * 2) * out.columns + out.first + row;
#pragma unroll
        for (int j = 0; j < OUTPUTS; j += 4) {
            // Loads before the first store.
            float before[4];
            auto near = [&](int i) { return to + i % 2 * (long)out.columns + i / 2 * 8; };
            auto is = [&](int i) { return j * 2 + i % 2 < left && row + i / 2 * 8 < part.rows; };
            if (out.adds) {
#pragma unroll
                for (int i = 0; i < 4; i++) before[i] = is(i) ? *near(i) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float value = ended(acc[j + i], token_of(j + i, lane % 4), bias[i / 2]);
                if (is(i)) *near(i) = out.adds ? __fadd_rn(before[i], value) : value;
            }
            to += 8L * out.columns;
        }
#endif
    }
}
#endif
