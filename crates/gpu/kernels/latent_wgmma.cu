// Attention over latent rows of f16 by wgmma. Hopper only. See docs/kernels.md#latent_wgmma.
//
// A block has 64 queries (latent.cuh) and takes 64 rows at once, two pages. Grid (groups of heads, blocks of tokens, spans).
// Warp-specialised: the producer warpgroup copies rows into a ring of two; two consumer warpgroups have all queries and half
// of the values each. Both compute all scores: that is cheaper than to hand them over, and the weights stay in registers,
// where the second product wants them. While one warpgroup weighs, the other multiplies.
#define HALVES 1
#define ROWS 64
#include "latent.cuh"
#include "bulk.cuh"
#include "chip/nvidia_wgmma.cuh"

#define TILE 64
#define COPIERS 128
#define THREADS (3 * COPIERS)
#define WARPS 8  // consumers
#define RING 2
#define BLOCK_BYTES (TILE * 128)  // 64 columns of all rows
#define TILE_BYTES (WIDTH / 64 * BLOCK_BYTES)
#define WIDE 64  // columns that are multiplied at once
#define PIECES (LATENT / 2 / WIDE)
// Eight rows start at a multiple of 1024 bytes.
#define SHARED_BYTES (1024 + (RING + 1) * TILE_BYTES)
#ifdef HOST_SHARED_BYTES
static_assert(SHARED_BYTES == HOST_SHARED_BYTES, "the shared memory that a launch asks for");
#endif
static_assert(WIDTH % 64 == 0 && LATENT % (2 * WIDE) == 0 && KV_BYTES == 2 && !KV_BF16, "rows that wgmma takes");

#if HAS_WGMMA
// A warp-uniform value, in a form that lets the compiler know that it is.
DEVICE u32 of_warp(u32 value) { return warp_max(value); }

KERNEL __launch_bounds__(THREADS, 1) latent_wgmma(Step step, Latent a, const float* absorbed, const float* queries, const Stored* pages, float* out) {
    DYNAMIC_SHARED(u8, smem);
    __shared__ u64 full[RING], empty[RING];
    __shared__ float factors[ROWS];
    const u32 ring = (shared_address(smem) + 1023) & ~1023u;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int head = blockIdx.x * a.block_heads, heads = min(a.block_heads, a.heads - head);
    // The last tokens see the most: they begin.
    const int begin = a.first + (gridDim.y - 1 - blockIdx.y) * a.tokens;
    const int tokens = min(min(begin + a.tokens, a.first + a.limit), step_rows(step, 0));
    let_next_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) {
            mbarrier_init(full + i, COPIERS / WARP);
            mbarrier_init(empty + i, WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    RingPosition<RING> slot;
    // The spans of a sequence's tokens that this block has.
    auto spans_of = [&](int from, int last, int& span, int& last_span) {
        span = from / SPAN, last_span = last / SPAN;
        if (!a.spans) return true;
        const bool own = (int)blockIdx.z >= span && (int)blockIdx.z <= last_span;
        span = last_span = blockIdx.z;
        return own;
    };

    if (threadIdx.x < COPIERS) {
        registers_give_up<56>();
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
            next = min(step.lasts[first] + 1, tokens);
            const int last = step.places[next - 1], from = first_seen(a, step.places[first]);
            const int* table = step.tables + step.tables[a.group * step.stride + first];
            int span, last_span;
            if (!spans_of(from, last, span, last_span)) continue;
            const int first_tile = max(span * SPAN, from) / TILE, last_tile = min(last_span * SPAN + SPAN - 1, last) / TILE;
#pragma unroll 1
            for (int tile = first_tile; tile <= last_tile; tile++) {
                const Stored* page[2];
                for (int i = 0; i < 2; i++) page[i] = pages + (long)table[min(tile * 2 + i, last / PAGE_TOKENS)] * head_values(WIDTH);
                mbarrier_wait(empty + slot.stage, slot.parity ^ 1);
                const u32 to = ring + slot.stage * TILE_BYTES;
                constexpr int pieces = WIDTH / 8;
#pragma unroll 4
                for (int i = threadIdx.x; i < TILE * pieces; i += COPIERS) {
                    const int row = i / pieces, byte = i % pieces * 16, place = tile * TILE + row;
                    const u8* at = (const u8*)(page[row / PAGE_TOKENS] + row % PAGE_TOKENS * WIDTH) + byte;
                    copy_async_or_zeros<16>(to + at_row(row, byte), at, place >= from && place <= last);
                }
                copy_commit();
                slot.move();
                if (waiting == 0) {
                    waiting++;
                    continue;
                }
                copy_wait<1>();
                arrive();
            }
        }
        copy_wait<0>();
        for (; waiting > 0; waiting--) arrive();
        return;
    }

    registers_take<224>();
    const int half = warp / 4 - 1, g = lane / 4, t = lane % 4, own_warp = warp % 4 * 16;
    const u32 queries_at = ring + RING * TILE_BYTES;
    u8* query_at = smem + (queries_at - shared_address(smem));
    typedef WgmmaOf<WIDE, false> Products;
    wait_for_inputs();
#pragma unroll 1
    for (int first = begin, next; first < tokens; first = next) {
        next = min(step.lasts[first] + 1, tokens);
        const int count = (next - first) * heads, place = step.places[first], last = step.places[next - 1];
        const int from = first_seen(a, place), first_span = from / SPAN;
        int span, last_span;
        if (!spans_of(from, last, span, last_span)) continue;
        // Nobody reads the queries before any more.
        named_barrier_sync<3, WARPS * WARP>();
#pragma unroll 1
        for (int row = warp - 4; row < ROWS; row += WARPS) {
            const long own = min(row, count - 1), token = first + own / heads, h = head + own % heads;
            put_query(a, query_at, factors, row, absorbed + (token * a.heads + h) * LATENT, queries + (token * a.heads + h) * a.each, lane);
        }
        fence_async_proxy();
        named_barrier_sync<3, WARPS * WARP>();
        // Queries of this lane: g and g + 8 of the warp's.
        int own[2], own_from[2];
        float factor[2], before_max[2], before_sum[2], total[PIECES][WIDE / 2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            own[i] = place + min(own_warp + i * 8 + g, count - 1) / heads;
            own_from[i] = first_seen(a, own[i]);
            factor[i] = factors[own_warp + i * 8 + g];
            before_max[i] = -INFINITY_F;
            before_sum[i] = 0.0f;
        }
        // Places that all queries of this warp see.
        const int all_to = place + min(own_warp, count - 1) / heads, all_from = first_seen(a, place + min(own_warp + 15, count - 1) / heads);
        const u32 rows = of_warp(wgmma_descriptor_low(queries_at));
#pragma unroll 1
        for (; span <= last_span; span++) {
            const int first_tile = max(span * SPAN, from) / TILE, last_tile = min(span * SPAN + SPAN - 1, last) / TILE;
            // The sums of this lane's share of the weights.
            float most[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int n = 0; n < PIECES; n++)
#pragma unroll
                for (int i = 0; i < WIDE / 2; i++) total[n][i] = 0.0f;
#pragma unroll 1
            for (int tile = first_tile; tile <= last_tile; tile++) {
                float s[TILE / 2];
                mbarrier_wait(full + slot.stage, slot.parity);
                const u32 keys = of_warp(wgmma_descriptor_low(ring + slot.stage * TILE_BYTES));
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < WIDTH / 16; k++) {
                    const int step_at = (k / 4 * BLOCK_BYTES + k % 4 * 32) / 16;
                    Products::multiply_shared(s, wgmma_descriptor_of(rows + step_at), wgmma_descriptor_of(keys + step_at), k > 0);
                }
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_fence_operands(s);
                const bool masked = tile * TILE < all_from || tile * TILE + TILE - 1 > all_to;
                float tile_max[2] = {-INFINITY_F, -INFINITY_F}, rescale[2], base[2];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& score = s[n * 4 + i];
                        score = __fmul_rn(score, factor[i / 2]);
                        const int key = tile * TILE + n * 8 + t * 2 + i % 2;
                        if (masked && (key < own_from[i / 2] || key > own[i / 2])) score = -INFINITY_F;
                        tile_max[i / 2] = fmaxf(tile_max[i / 2], score);
                    }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(ALL_LANES, tile_max[i], 1));
                    tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(ALL_LANES, tile_max[i], 2));
                    const float all = fmaxf(most[i], tile_max[i]);
                    rescale[i] = rescale_of(most[i], all);
                    most[i] = all;
                    base[i] = all == -INFINITY_F ? 0.0f : all;
                    sum[i] = __fmul_rn(sum[i], rescale[i]);
                }
                u32 weights[TILE / 16][4];
#pragma unroll
                for (int k = 0; k < TILE / 16; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int n = (k * 2 + i / 2) * 4 + i % 2 * 2, row = i % 2;
                        const u32 both = pack_f16x2(exp2_approx(s[n] - base[row]), exp2_approx(s[n + 1] - base[row]));
                        weights[k][i] = both;
                        // As they are multiplied.
                        sum[row] = __fadd_rn(sum[row], __fadd_rn(f16_to_f32((u16)both), f16_to_f32((u16)(both >> 16))));
                    }
                // Times one changes nothing.
                if (__any_sync(ALL_LANES, rescale[0] != 1.0f || rescale[1] != 1.0f))
#pragma unroll
                    for (int c = 0; c < PIECES; c++)
#pragma unroll
                        for (int n = 0; n < WIDE / 2; n++) total[c][n] = __fmul_rn(total[c][n], rescale[n / 2 % 2]);
                const u32 values = ring + slot.stage * TILE_BYTES + half * PIECES * BLOCK_BYTES;
                wgmma_fence();
#pragma unroll
                for (int c = 0; c < PIECES; c++) {
                    const u32 low = of_warp(wgmma_descriptor_low(values + c * BLOCK_BYTES));
#pragma unroll
                    for (int k = 0; k < TILE / 16; k++) Products::multiply_transposed(total[c], weights[k], wgmma_descriptor_of(low + k * 128), 1);
                }
                wgmma_commit();
                wgmma_wait<0>();
#pragma unroll
                for (int c = 0; c < PIECES; c++) wgmma_fence_operands(total[c]);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(empty + slot.stage);
                slot.move();
            }
            // The span is merged into those before it, or left to latent_merge.
            const bool starts = span == first_span, ends = span == last_span;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(ALL_LANES, sum[i], 1));
                sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(ALL_LANES, sum[i], 2));
                const float all = fmaxf(before_max[i], most[i]), earlier = rescale_of(before_max[i], all), later = rescale_of(most[i], all);
                before_sum[i] = merged_sum(before_sum[i], earlier, sum[i], later);
                before_max[i] = all;
                const int row = own_warp + i * 8 + g;
                if (row >= count) continue;
                const long query = (long)(first + row / heads) * a.heads + head + row % heads;
                float* to = a.spans ? a.partials + ((query - (long)a.first * a.heads) * a.spans + span) * (LATENT + 2) : out + query * LATENT;
                if (a.spans && half == 0 && t == 0) to[LATENT] = most[i], to[LATENT + 1] = sum[i];
                const float inverse = 1.0f / before_sum[i];
                to += half * (LATENT / 2) + t * 2;
#pragma unroll
                for (int c = 0; c < PIECES; c++)
#pragma unroll
                    for (int n = 0; n < WIDE / 8; n++) {
                        float2* pair = (float2*)(to + c * WIDE + n * 8);
                        float2 value = make_float2(total[c][n * 4 + i * 2], total[c][n * 4 + i * 2 + 1]);
                        if (!a.spans) {
                            const float2 before = starts ? make_float2(0.0f, 0.0f) : *pair;
                            value = make_float2(merged_sum(before.x, earlier, value.x, later), merged_sum(before.y, earlier, value.y, later));
                            if (ends) value = make_float2(__fmul_rn(value.x, inverse), __fmul_rn(value.y, inverse));
                        }
                        *pair = value;
                    }
            }
        }
    }
}
#endif
