// Attention of many tokens of a sequence (prefill) over its pages, by mma.sync. See docs/kernels.md#attention_rows.
//
// A block has one K/V head and the queries of neighbouring tokens, all query heads of the group one after another (row
// i is head i % GROUP of token i / GROUP), so that a tile of keys and values is read once for them. Grid (kv heads,
// blocks of tokens, the last first: they see the most keys). A warp has 16 of the rows and all keys of a tile. Tokens
// of several sequences in one block are done one sequence after another.
#include "attention.cuh"

#define WARPS 4
#define THREADS (WARPS * WARP)
#define ROWS (WARPS * 16)
#define TOKENS (ROWS / GROUP)
// Runs of 16 of a head's values in flight at once: enough independent products.
#define TOGETHER (STEPS % 2 == 0 ? 2 : 1)
#define GATHERED 4  // query heads whose loads are in flight at once

// Shared memory: tiles of keys and values, then queries.
KERNEL __launch_bounds__(THREADS, 2) attention_rows(Step step, Attention a, const float* qkv, const Stored* pages, float* out, int alone) {
    DYNAMIC_SHARED(uint4, smem);
    u8* staged = (u8*)smem;
    u8* queries = staged + TILES_BYTES(a.stages);
    __shared__ float factors[ROWS];
    const u32 staged_at = shared_address(staged), queries_at = shared_address(queries);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int kv = blockIdx.x, columns = a.columns;
    const int begin = (gridDim.y - 1 - blockIdx.y) * TOKENS;
    const int tokens = min(begin + TOKENS, step_rows(step, 0));
    let_next_start();
    clear_padding<THREADS>(staged_at, TILES * 2 * TILE);
    clear_padding<THREADS>(queries_at, PARTS * ROWS);
    wait_for_inputs();

    int next;
#pragma unroll 1
    for (int first = begin; first < tokens; first = next) {
        const int final = step.lasts[first];
        next = min(final + 1, tokens);
        // With `alone`, single tokens of other sequences are left to attention.cu.
        if (alone && step.firsts[first] == final) continue;
        const int count = (next - first) * GROUP, place = step.places[first];
        const int last = last_seen(step, next - 1), from = first_seen(a, place);
        const int first_tile = from / TILE, last_tile = last / TILE;
        const int* table = step.tables + step.tables[a.group * step.stride + first];
        auto stage = [&](int tile) {
            if (tile <= last_tile)
                stage_tile<THREADS>(a, stage_at(staged_at, (tile - first_tile) & (a.stages - 1)), pages, pages_of(table, tile, last), kv, tile, from, last, -1);
            copy_commit();
        };
        __syncthreads();
        for (int i = 0; i < a.stages; i++) stage(first_tile + i);
        // Each warp converts its own queries.
#pragma unroll 1
        for (int start = 0; start < 16; start += GATHERED) {
            float4 heads[GATHERED][HEAD_FOURS];
#pragma unroll
            for (int i = 0; i < GATHERED; i++) {
                const int row = min(warp * 16 + start + i, count - 1);
                const float* head = qkv + (long)(first + row / GROUP) * columns + (kv * GROUP + row % GROUP) * DIM;
                load_head(heads[i], head, 0, lane);
            }
#pragma unroll
            for (int i = 0; i < GATHERED; i++) put_query(a, queries, ROWS, factors, warp * 16 + start + i, heads[i], 0, lane);
        }
        __syncwarp();
        // Rows of this lane: g and g + 8 of the warp's.
        float factor[2], row_max[2], sum[2], total[STEPS * 2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            factor[i] = factors[warp * 16 + i * 8 + g];
            row_max[i] = first_max(a, kv * GROUP + min(warp * 16 + i * 8 + g, count - 1) % GROUP);
            sum[i] = FIRST_SUM;
        }
#pragma unroll
        for (int n = 0; n < STEPS * 2; n++)
            for (int i = 0; i < 4; i++) total[n][i] = 0.0f;
        // Places that some row of this warp sees, and that all of its rows see.
        const int warp_first = place + min(warp * 16, count - 1) / GROUP, warp_last = place + min(warp * 16 + 15, count - 1) / GROUP;
        const int some_to = BOTH ? last : warp_last, all_to = BOTH ? last : warp_first, all_from = first_seen(a, warp_last);
        const bool busy = warp * 16 < count;

#pragma unroll 1
        for (int tile = first_tile; tile <= last_tile; tile++) {
            const u32 keys = staged_at + ((tile - first_tile) & (TILES - 1)) * 2 * TILE_BYTES, values = keys + TILE_BYTES;
            if (a.stages > 1) copy_wait<1>();
            else copy_wait<0>();
            __syncthreads();
#if KV_F8
            widen_tile<THREADS>(staged, staged + stage_at(0, (tile - first_tile) & (a.stages - 1)), tile, from, last, -1);
            __syncthreads();
            stage(tile + a.stages);
#endif
            if (busy && tile * TILE <= some_to) {
                float s[TILE / 8][4];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
                    for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    u32 q[PARTS][4];
#pragma unroll
                    for (int p = 0; p < PARTS; p++) load_rows(q[p], queries_at + p * ROWS * STRIDE, warp * 16, k, lane);
#pragma unroll
                    for (int n = 0; n < TILE / 16; n++) {
                        u32 b[4];
                        load_keys(b, keys, n * 16, k, lane);
#pragma unroll
                        for (int p = 0; p < PARTS; p++) {
                            mma_stored(s[n * 2], q[p], b[0], b[1]);
                            mma_stored(s[n * 2 + 1], q[p], b[2], b[3]);
                        }
                    }
                }
                if (CAPPED)
#pragma unroll
                    for (int n = 0; n < TILE / 8; n++)
                        for (int i = 0; i < 4; i++) s[n][i] = capped(a, s[n][i], factor[i / 2]);
                if (tile * TILE < all_from || tile * TILE + TILE - 1 > all_to)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int own = place + min(warp * 16 + i * 8 + g, count - 1) / GROUP;
                        // Counted from this lane's first key of the tile.
                        const int to = (BOTH ? last : own) - tile * TILE - t * 2, begins = first_seen(a, own) - tile * TILE - t * 2;
#pragma unroll
                        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (n * 8 + e < begins || n * 8 + e > to) s[n][i * 2 + e] = -INFINITY_F;
                    }
                float tile_max[2] = {-INFINITY_F, -INFINITY_F}, rescale[2], tile_rescale[2];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) tile_max[i / 2] = fmaxf(tile_max[i / 2], s[n][i]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(ALL_LANES, tile_max[i], 1));
                    tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(ALL_LANES, tile_max[i], 2));
                    const float power = largest_power(tile_max[i], factor[i]), all = fmaxf(row_max[i], power);
                    rescale[i] = rescale_of(row_max[i], all);
                    tile_rescale[i] = rescale_of(power, all);
                    row_max[i] = all;
                }
                float tile_sum[4] = {0, 0, 0, 0};
                u32 weights[TILE / 16][PARTS][4];
#pragma unroll
                for (int k = 0; k < TILE / 16; k++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int n = k * 2 + i / 2, row = i % 2;
                        u32 parts[PARTS];
                        rounded_pair(weight_of(s[n][row * 2], factor[row], tile_max[row]), weight_of(s[n][row * 2 + 1], factor[row], tile_max[row]), parts);
                        for (int p = 0; p < PARTS; p++) weights[k][p][i] = parts[p];
                    }
#pragma unroll
                    for (int p = 0; p < PARTS; p++) mma_stored(tile_sum, weights[k][p], ONES, ONES);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) sum[i] = merged_sum(sum[i], rescale[i], tile_sum[i * 2], tile_rescale[i]);
#pragma unroll
                for (int c = 0; c < STEPS; c += TOGETHER) {
                    float acc[TOGETHER * 2][4];
#pragma unroll
                    for (int n = 0; n < TOGETHER * 2; n++)
                        for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
#pragma unroll
                    for (int k = 0; k < TILE / 16; k++) {
                        u32 b[TOGETHER][4];
#pragma unroll
                        for (int n = 0; n < TOGETHER; n++) load_values(b[n], values, k * 16, c + n, lane);
#pragma unroll
                        for (int p = 0; p < PARTS; p++)
#pragma unroll
                            for (int n = 0; n < TOGETHER; n++) {
                                mma_stored(acc[n * 2], weights[k][p], b[n][0], b[n][1]);
                                mma_stored(acc[n * 2 + 1], weights[k][p], b[n][2], b[n][3]);
                            }
                    }
#pragma unroll
                    for (int n = 0; n < TOGETHER * 2; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            total[c * 2 + n][i] = merged_sum(total[c * 2 + n][i], rescale[i / 2], acc[n][i], tile_rescale[i / 2]);
                }
            }
            // The tile after the next goes to this one's stage.
            __syncthreads();
            if (!KV_F8) stage(tile + a.stages);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = warp * 16 + i * 8 + g;
            if (row >= count) continue;
            const float inverse = 1.0f / sum[i];
            float* to = out + ((long)(first + row / GROUP) * a.query + kv * GROUP + row % GROUP) * DIM;
#pragma unroll
            for (int n = 0; n < STEPS * 2; n++)
                if (n * 8 + t * 2 < DIM)
                    *(float2*)(to + n * 8 + t * 2) = make_float2(__fmul_rn(total[n][i * 2], inverse), __fmul_rn(total[n][i * 2 + 1], inverse));
        }
    }
}
