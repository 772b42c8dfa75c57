// Attention of many tokens of a sequence (prefill) over its pages by wgmma, for heads of 64 and 128 values of 16 bits.
// Hopper only. Its results have the bits of attention_rows.cu: the same products of each row in the same order
// (attention.cuh). See docs/kernels.md#attention_wgmma.
//
// A block has one K/V head and the queries of neighbouring tokens, all query heads of the group one after another: 128
// rows. Grid (kv heads, blocks of tokens, the last first: they see the most keys). Warp-specialised: the producer
// warpgroup copies tiles of keys and values into a ring; two consumer warpgroups have 64 rows each and alternate
// (ping-pong). Scores of the next tile are in flight while a tile is merged. Tokens of several sequences in one block
// are done one sequence after another. With ROTATES queries are rotated here.
#define HALVES 1
#include "attention.cuh"
#include "bulk.cuh"
#include "chip/nvidia_wgmma.cuh"

#define COPIERS 128
#define THREADS (3 * COPIERS)
#define ROWS (2 * TILE)
#define TOKENS (ROWS / GROUP)
#define WARPS 8     // consumers
#define AHEAD 2     // tiles requested before the first is waited for
#define WIDE 64     // columns of values whose sums are merged at once
#define PIECES (DIM / WIDE)
#define GATHERED 8  // query heads whose loads are in flight at once
#define ONES_BYTES 2048
#define QUERIES_BYTES (PARTS * TILE * STRIDE)  // of a warpgroup

#if HAS_WGMMA
// A warp-uniform value, in a form that lets the compiler know that it is.
DEVICE u32 of_warp(u32 value) { return warp_max(value); }

// Shared memory: the ring (eight rows start at a multiple of 1024 bytes), queries, 16 rows of ones, and rotations.
KERNEL __launch_bounds__(THREADS, 1) attention_wgmma(Step step, Attention a, const float* qkv, const Stored* pages, float* out, int alone) {
    DYNAMIC_SHARED(u8, smem);
    __shared__ u64 full[RING], empty[RING], order[2];
    __shared__ float factors[ROWS];
    const u32 ring = (shared_address(smem) + 1023) & ~1023u;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int kv = blockIdx.x, begin = (gridDim.y - 1 - blockIdx.y) * TOKENS;
    const int tokens = min(begin + TOKENS, step_rows(step, 0));
    let_next_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) {
            mbarrier_init(full + i, COPIERS / WARP);
            mbarrier_init(empty + i, WARPS);
        }
        for (int i = 0; i < 2; i++) mbarrier_init(order + i, WARPS / 2);
        mbarrier_init_fence();
    }
    __syncthreads();
    RingPosition<RING> slot;

    if (threadIdx.x < COPIERS) {
        registers_give_up<40>();
        wait_for_inputs();
        RingPosition<RING> arrived;
        int waiting = 0;
        auto arrive = [&] {
            // wgmma reads what these threads have copied.
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(full + arrived.stage);
            arrived.move();
        };
#pragma unroll 1
        for (int first = begin, next; first < tokens; first = next) {
            const int final = step.lasts[first];
            next = min(final + 1, tokens);
            if (alone && step.firsts[first] == final) continue;
            const int last = last_seen(step, next - 1), from = first_seen(a, step.places[first]);
            const int* table = step.tables + step.tables[a.group * step.stride + first];
#pragma unroll 1
            for (int tile = from / TILE; tile <= last / TILE; tile++) {
                const TilePages two = pages_of(table, tile, last);
                mbarrier_wait(empty + slot.stage, slot.parity ^ 1);
                stage_tile<COPIERS>(a, ring + slot.stage * 2 * TILE_BYTES, pages, two, kv, tile, from, last, -1);
                copy_commit();
                slot.move();
                if (waiting < AHEAD) {
                    waiting++;
                    continue;
                }
                copy_wait<AHEAD>();
                arrive();
            }
        }
        copy_wait<0>();
        for (; waiting > 0; waiting--) arrive();
        return;
    }

    registers_take<232>();
    const int group = warp / 4 - 1, g = lane / 4, t = lane % 4, own_warp = warp % 4 * 16;
    const int columns = a.columns;
    const u32 queries_at = ring + RING * 2 * TILE_BYTES + group * QUERIES_BYTES;
    u8* queries = smem + (queries_at - shared_address(smem));
    u8* ones = queries + (2 - group) * QUERIES_BYTES;
    const u32 ones_at = ring + RING * 2 * TILE_BYTES + 2 * QUERIES_BYTES;
    for (int i = threadIdx.x - COPIERS; i < ONES_BYTES / 4; i += WARPS * WARP) ((u32*)ones)[i] = ONES;
#if ROTATES
    float2* rotations = (float2*)(ones + ONES_BYTES);  // (token, pair)
#endif
    typedef WgmmaOf<TILE, KV_BF16> Scores;
    typedef WgmmaOf<WIDE, KV_BF16> Sums;
    const int pairs = ROTATES ? a.rope.pairs : 0;
#if ROTATES
    // Each angle of a token once.
    for (int i = threadIdx.x - COPIERS; i < (tokens - begin) * pairs; i += WARPS * WARP)
        rotations[i] = rotation_of(a.rope, (float)step.positions[begin + i / pairs], i % pairs);
#endif
    // wgmma reads the ones.
    fence_async_proxy();
    named_barrier_sync<3, WARPS * WARP>();
    wait_for_inputs();

    int order_phase = 0;
    // Warpgroups issue products alternately, so that one multiplies while the other does softmax.
    auto order_wait = [&] { mbarrier_wait(order + group, (order_phase + group + 1) % 2); };
    auto order_pass = [&] {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(order + 1 - group);
        order_phase++;
    };
#pragma unroll 1
    for (int first = begin, next; first < tokens; first = next) {
        const int final = step.lasts[first];
        next = min(final + 1, tokens);
        // With `alone`, single tokens of other sequences are left to attention.cu.
        if (alone && step.firsts[first] == final) continue;
        const int count = (next - first) * GROUP, place = step.places[first];
        const int last = last_seen(step, next - 1), from = first_seen(a, place);
        const int first_tile = from / TILE, last_tile = last / TILE;
        // Places that some row of this warpgroup sees, and that all rows of this warp see.
        auto token_of = [&](int row) { return min(group * TILE + row, count - 1) / GROUP; };
        const int some_to = BOTH ? last : place + token_of(TILE - 1);
        const int all_to = BOTH ? last : place + token_of(own_warp), all_from = first_seen(a, place + token_of(own_warp + 15));
        const int end_tile = group * TILE < count ? min(some_to / TILE, last_tile) : first_tile - 1;

        if (end_tile >= first_tile) {
            // Each warp converts its own queries.
#pragma unroll 1
            for (int start = 0; start < 16; start += GATHERED) {
                float4 heads[GATHERED][HEAD_FOURS];
#pragma unroll
                for (int i = 0; i < GATHERED; i++) {
                    const int row = min(group * TILE + own_warp + start + i, count - 1);
                    const float* head = qkv + (long)(first + row / GROUP) * columns + (kv * GROUP + row % GROUP) * DIM;
                    load_head(heads[i], head, pairs, lane);
                }
#pragma unroll
                for (int i = 0; i < GATHERED; i++) {
                    const int row = own_warp + start + i;
#if ROTATES
                    const float4* angles = (const float4*)(rotations + (first - begin + token_of(row)) * pairs);
#pragma unroll
                    for (int n = 0; n < HEAD_FOURS; n++)
                        if ((n * WARP + lane) * 2 < pairs) heads[i][n] = rotated_four(angles[n * WARP + lane], heads[i][n]);
#endif
                    put_query(a, queries, TILE, factors + group * TILE, row, heads[i], pairs, lane);
                }
            }
            fence_async_proxy();
            named_barrier_sync<COPIERS>(group + 1);
        }
        // Rows of this lane: g and g + 8 of the warp's.
        float factor[2], row_max[2], sum[2], s[TILE / 2], total[PIECES][WIDE / 2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = own_warp + i * 8 + g;
            factor[i] = factors[group * TILE + row];
            row_max[i] = first_max(a, kv * GROUP + min(group * TILE + row, count - 1) % GROUP);
            sum[i] = FIRST_SUM;
        }
#pragma unroll
        for (int n = 0; n < PIECES; n++)
            for (int i = 0; i < WIDE / 2; i++) total[n][i] = 0.0f;
        const u32 rows = of_warp(wgmma_descriptor_low(queries_at));
        auto begin_scores = [&](const RingPosition<RING>& at) {
            mbarrier_wait(full + at.stage, at.parity);
            const u32 keys = of_warp(wgmma_descriptor_low(ring + at.stage * 2 * TILE_BYTES));
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < STEPS; k++)
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    const int step_at = (k / 4 * (TILE * 128) + k % 4 * 32) / 16;
                    Scores::multiply_shared(s, wgmma_descriptor_of(rows + p * (TILE * STRIDE / 16) + step_at), wgmma_descriptor_of(keys + step_at), k + p > 0);
                }
            wgmma_commit();
        };
        // Takes a tile whose scores are in flight; with `more`, issues the next one's.
        auto take = [&](int tile, bool more) __attribute__((always_inline)) {
            wgmma_wait<0>();
            wgmma_fence_operands(s);
            if (CAPPED)
#pragma unroll
                for (int n = 0; n < TILE / 2; n++) s[n] = capped(a, s[n], factor[n / 2 % 2]);
            const bool masked = tile * TILE < all_from || tile * TILE + TILE - 1 > all_to;
            if (masked)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int own = place + token_of(own_warp + i * 8 + g);
                    // Counted from this lane's first key of the tile.
                    const int to = (BOTH ? last : own) - tile * TILE - t * 2, begins = first_seen(a, own) - tile * TILE - t * 2;
#pragma unroll
                    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (n * 8 + e < begins || n * 8 + e > to) s[n * 4 + i * 2 + e] = -INFINITY_F;
                }
            float tile_max[2] = {-INFINITY_F, -INFINITY_F}, rescale[2], tile_rescale[2];
#pragma unroll
            for (int n = 0; n < TILE / 2; n++) tile_max[n / 2 % 2] = fmaxf(tile_max[n / 2 % 2], s[n]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(ALL_LANES, tile_max[i], 1));
                tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(ALL_LANES, tile_max[i], 2));
                const float power = largest_power(tile_max[i], factor[i]), all = fmaxf(row_max[i], power);
                rescale[i] = rescale_of(row_max[i], all);
                tile_rescale[i] = rescale_of(power, all);
                row_max[i] = all;
            }
            u32 weights[TILE / 16][PARTS][4];
#pragma unroll
            for (int k = 0; k < TILE / 16; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int n = (k * 2 + i / 2) * 4 + i % 2 * 2, row = i % 2;
                    u32 parts[PARTS];
                    rounded_pair(weight_of(s[n], factor[row], tile_max[row]), weight_of(s[n + 1], factor[row], tile_max[row]), parts);
                    for (int p = 0; p < PARTS; p++) weights[k][p][i] = parts[p];
                }
            const u32 values = ring + slot.stage * 2 * TILE_BYTES + TILE_BYTES;
            order_wait();
            float acc[PIECES][WIDE / 2], tile_sum[4];
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < PIECES; c++) {
                // Behind the last columns are ones: their products are the sum of weights.
                const u32 at = values + c * (TILE * 128), low = of_warp(wgmma_descriptor_low(at));
                const u32 apart = of_warp(ones_at - at);
#pragma unroll
                for (int k = 0; k < TILE / 16; k++)
#pragma unroll
                    for (int p = 0; p < PARTS; p++) {
                        if (c + 1 < PIECES) Sums::multiply_transposed(acc[c], weights[k][p], wgmma_descriptor_of(low + k * 128), k + p > 0);
                        else Sums::multiply_transposed_more(acc[c], tile_sum, weights[k][p], wgmma_descriptor_strided(low + k * 128, apart - k * 2048), k + p > 0);
                    }
                wgmma_commit();
            }
            RingPosition<RING> following = slot;
            following.move();
            if (more) begin_scores(following);
            order_pass();
#pragma unroll
            for (int c = 0; c < PIECES; c++) {
                if (c + 1 < PIECES) {
                    if (more) wgmma_wait<2>();
                    else wgmma_wait<1>();
                } else {
                    if (more) wgmma_wait<1>();
                    else wgmma_wait<0>();
                    wgmma_fence_operands(tile_sum);
                }
                wgmma_fence_operands(acc[c]);
                // A row that sees nothing of the tile takes nothing from it, even if the values are not finite.
                if (masked)
#pragma unroll
                    for (int n = 0; n < WIDE / 2; n++)
                        if (tile_max[n / 2 % 2] == -INFINITY_F) acc[c][n] = 0.0f;
#pragma unroll
                for (int n = 0; n < WIDE / 2; n++) total[c][n] = merged_sum(total[c][n], rescale[n / 2 % 2], acc[c][n], tile_rescale[n / 2 % 2]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) sum[i] = merged_sum(sum[i], rescale[i], tile_sum[i * 2], tile_rescale[i]);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty + slot.stage);
            slot = following;
        };
        if (first_tile <= end_tile) {
            order_wait();
            begin_scores(slot);
            order_pass();
#pragma unroll 1
            for (int tile = first_tile; tile < end_tile; tile++) take(tile, true);
            take(end_tile, false);
        }
        // Tiles that only the other warpgroup sees: released unread.
#pragma unroll 1
        for (int tile = max(end_tile + 1, first_tile); tile <= last_tile; tile++) {
            mbarrier_wait(full + slot.stage, slot.parity);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty + slot.stage);
            slot.move();
            order_wait();
            order_pass();
        }
        if (first_tile > end_tile) {
            order_wait();
            order_pass();
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = group * TILE + own_warp + i * 8 + g;
            if (row >= count) continue;
            const float inverse = 1.0f / sum[i];
            float* to = out + ((long)(first + row / GROUP) * a.query + kv * GROUP + row % GROUP) * DIM;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                const float* pair = total[n * 8 / WIDE] + n * 8 % WIDE / 2 + i * 2;
                *(float2*)(to + n * 8 + t * 2) = make_float2(__fmul_rn(pair[0], inverse), __fmul_rn(pair[1], inverse));
            }
        }
    }
}
#endif
