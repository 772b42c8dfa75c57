// Attention of single tokens over their sequences' pages: all query heads of a K/V head are the rows of one matrix
// instruction. Grid (kv heads, tokens, blocks that share a token's tiles). One block takes all tiles in turn and merges them in
// registers; those of a cluster send what they have of each tile to the block that merges it, each a share of the outputs;
// without clusters, and for long contexts, each tile has a block and `merge_tiles` comes behind.
// Four warps: each has a quarter of a tile's keys, then a quarter of the head's values. With one tile in shared memory keys and values
// are copied apart: the next tile's as soon as all warps are done with those in their place.
// Where every row of the step is one token, the kernel turns queries and keys itself and stores the new keys and values.
#include "attention.cuh"

#define THREADS 128
#define WARPS 4
// Rows of the matrix instruction that a lane has: one of the first eight, and one of the others where there are as many heads.
#define OWN ((SHARED + 7) / 8)
#define QUERIES (8 * OWN)
// What warps bring into form: queries, the new key and the new value.
#define ITEMS ((SHARED + 2 + WARPS - 1) / WARPS)
// Times 16 values of the head that a warp has.
#define CHUNKS ((STEPS + WARPS - 1) / WARPS)
#define CLUSTER_TILES 32  // that a cluster merges: one for each lane
// On a multiprocessor, as far as registers go.
#define BLOCKS (DIM <= 64 ? 6 : DIM <= 128 ? 4 : 2)

// Shared memory: tiles of keys and values, queries, weights; in a cluster what each tile ends with (the largest score
// and the sum), and what the blocks send of it: (tile, share of outputs).
KERNEL __launch_bounds__(THREADS, BLOCKS) attention(Step step, Attention a, const float* qkv, Stored* pages, float* out) {
    extern __shared__ uint4 room[];
    u8* staged = (u8*)room;
    u8* queries = staged + TILES_BYTES(a.stages);
    u32* weights = (u32*)(queries + PARTS * QUERIES * STRIDE);             // (warp, part, lane, 2 x OWN)
    float2* tile_ends = (float2*)(weights + WARPS * PARTS * WARP * 2 * OWN);  // (head, tile)
    float* sent = (float*)(tile_ends + SHARED * CLUSTER_TILES);
    __shared__ float2 turns[DIM / 2 + 1];
    __shared__ u64 arrived;  // that everything has been sent
    __shared__ float factors[QUERIES], maxima[WARPS][QUERIES];
    let_next_start();
    // Positions and page tables are there before a step's first kernel; so are the keys and values of earlier steps.
    const int r = a.first + blockIdx.y, kv = blockIdx.x, blocks = gridDim.z;
    if (r >= step_rows(step, 0)) return wait_for_inputs();
    const int place = step.places[r], last = last_seen(step, r), from = first_seen(a, place);
    const int first_tile = from / TILE, last_tile = last / TILE;
    const int mine = first_tile + blockIdx.z, count = mine > last_tile ? 0 : (last_tile - mine) / blocks + 1;
    const bool turns_here = a.rope.frequencies, stores = turns_here && count > 0 && mine + (count - 1) * blocks == last_tile;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int* table = step.tables + step.tables[a.group * step.stride + r];
    const u32 staged_at = shared_address(staged), queries_at = shared_address(queries);
    // Outputs that a block of a cluster merges: pairs stay together.
    const int share = (OUTPUTS + 2 * blocks - 1) / (2 * blocks) * 2, tiles = last_tile - first_tile + 1;
    if (a.clusters) {
        const int merged = min(share, OUTPUTS - (int)blockIdx.z * share);
        if (threadIdx.x == 0) expect_sent(&arrived, tiles * (max(merged, 0) * 4 + SHARED * 8));
        cluster_arrive();
    }

    const bool apart = !KV_F8 && a.stages == 1;
    auto stage_keys = [&](int i) {
        if (i < count)
            stage_tile<THREADS, KEYS>(a, staged_at, pages, table, kv, mine + i * blocks, from, last, turns_here ? place : -1);
        copy_group();
    };
    auto stage_values = [&](int i) {
        if (i < count)
            stage_tile<THREADS, VALUES>(a, staged_at, pages, table, kv, mine + i * blocks, from, last, turns_here ? place : -1);
        copy_group();
    };
    auto stage = [&](int i) {
        if (apart) {
            stage_keys(i);
            return stage_values(i);
        }
        if (i < count)
            stage_tile<THREADS>(a, stage_at(staged_at, i % a.stages), pages, table, kv, mine + i * blocks, from, last, turns_here ? place : -1);
        copy_group();
    };
    // Until all but the youngest copies are there.
    auto await_oldest = [&] {
        if (KV_F8 && a.stages == 1) copy_wait<0>();
        else copy_wait<1>();
    };
    if (count > 0) {
        clear_padding<THREADS>(staged_at, TILES * 2 * TILE);
        clear_padding<THREADS>(queries_at, PARTS * QUERIES);
    }
    // Without turning, a kernel of this step has just stored keys.
    if (turns_here) {
        for (int i = 0; i < a.stages; i++) stage(i);
        if (count > 0)
            for (int i = threadIdx.x; i < a.rope.pairs; i += THREADS) turns[i] = turn_of(a.rope, (float)step.positions[r], i);
    }
    __syncthreads();
    wait_for_inputs();
    if (!turns_here)
        for (int i = 0; i < a.stages; i++) stage(i);
    if (count == 0 && !a.clusters) return;

    const int pairs = turns_here ? a.rope.pairs : 0;
    float2 items[ITEMS][HEAD_PAIRS];
    if (count > 0) {
        // A warp has a head; all its loads are under way at once.
        const float* q = qkv + (long)r * (a.query + 2 * a.kv) * DIM;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * WARPS + warp;
            if (item >= (stores ? SHARED + 2 : SHARED)) break;
            const float* head = q + (item < SHARED ? kv * SHARED + item : a.query + (item - SHARED) * a.kv + kv) * DIM;
#pragma unroll
            for (int n = 0; n < HEAD_PAIRS; n++) {
                const int j = n * WARP + lane;
                const bool there = DIM / 2 % WARP == 0 || j < DIM / 2;
                items[i][n].x = there ? load_fresh(head + pair_first(j, pairs)) : 0.0f;
                items[i][n].y = there ? load_fresh(head + pair_second(j, pairs)) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * WARPS + warp;
            if (item >= (stores ? SHARED + 2 : SHARED)) break;
            if (turns_here && item <= SHARED) turn_pairs(items[i], turns, pairs, lane);
            if (item < SHARED) put_query(a, queries, QUERIES, factors, item, items[i], pairs, lane);
        }
    }
    // The new key and value: among those of their tile, or to their page. That is last of all: nothing waits for it.
    auto put_fresh = [&](bool to_page) {
        u8* tile = staged + (count - 1) % TILES * 2 * TILE_BYTES;
        Stored* page = pages + page_values(table[place / PAGE_TOKENS], 0, kv, a.kv, DIM);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int v = i * WARPS + warp - SHARED;
            if (v < 0 || v >= 2) continue;
            Stored* head = page + (long)v * a.kv * head_values(DIM);
#if KV_F8
            u32 largest = 0;
#pragma unroll
            for (int n = 0; n < HEAD_PAIRS; n++) {
                largest = max(largest, __float_as_uint(items[i][n].x) & 0x7fffffff);
                largest = max(largest, __float_as_uint(items[i][n].y) & 0x7fffffff);
            }
            const u32 exponent = float8_exponent(warp_most(largest)), factor = float8_factor(exponent);
            if (to_page && lane == 0) head[PAGE_TOKENS * DIM + place % PAGE_TOKENS] = (u8)exponent;
#endif
#pragma unroll
            for (int n = 0; n < HEAD_PAIRS * 2; n++) {
                const int j = n / 2 * WARP + lane, d = n % 2 ? pair_second(j, pairs) : pair_first(j, pairs);
                if (j >= DIM / 2) continue;
                const float fresh = n % 2 ? items[i][n / 2].y : items[i][n / 2].x;
#if KV_F8
                const Stored value = float8_code(fresh, exponent);
                const u16 in_tile = (u16)mul_f16x2(two_floats8(value, 0x4404), factor);
#else
                const Stored value = stored(fresh), in_tile = value;
#endif
                if (to_page) head[place % PAGE_TOKENS * DIM + d] = value;
                else *(u16*)(tile + v * TILE_BYTES + at_row(place % TILE, d * 2 & ~15) + (d * 2 & 15)) = in_tile;
            }
        }
    };

    // Of the rows g and g + 8: the largest so far, sums, results.
    float most[OWN], sum[OWN], total[CHUNKS][2][2 * OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        most[i] = g + i * 8 < SHARED ? first_max(a, kv * SHARED + g + i * 8) : -INFINITY_F;
        sum[i] = FIRST_SUM;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        for (int i = 0; i < 4 * OWN; i++) total[c][i / (2 * OWN)][i % (2 * OWN)] = 0.0f;
    if (a.clusters) cluster_await();

#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const int tile = mine + i * blocks;
        const u32 keys = staged_at + i % TILES * 2 * TILE_BYTES, values = keys + TILE_BYTES;
        // The new one: its place in the tile is nobody else's.
        if (stores && i == count - 1) put_fresh(false);
        await_oldest();
        __syncthreads();
#if KV_F8
        widen_tile<THREADS>(staged, staged + stage_at(0, i % a.stages), tile, from, last, turns_here ? place : -1);
        __syncthreads();
        if (i + 1 < count) stage(i + a.stages);
#endif
        float s[2][4];
        for (int j = 0; j < 8; j++) s[j / 4][j % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 b[4];
            load_keys(b, keys, warp * 16, k, lane);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                u32 q[4];
                if (OWN > 1) load_queries(q, queries_at + p * QUERIES * STRIDE, 0, k, lane);
                else load_eight_queries(q, queries_at + p * QUERIES * STRIDE, k, lane);
                mma_stored(s[0], q, b[0], b[1]);
                mma_stored(s[1], q, b[2], b[3]);
            }
        }
        float factor[OWN], here[OWN];
#pragma unroll
        for (int row = 0; row < OWN; row++) {
            factor[row] = factors[g + row * 8];
            here[row] = -INFINITY_F;
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int e = 0; e < 2 * OWN; e++) {
                const int key = tile * TILE + warp * 16 + j * 8 + t * 2 + e % 2;
                s[j][e] = key >= from && key <= last ? capped(a, s[j][e], factor[e / 2]) : -INFINITY_F;
                here[e / 2] = fmaxf(here[e / 2], s[j][e]);
            }
#pragma unroll
        for (int row = 0; row < OWN; row++) {
            here[row] = fmaxf(here[row], __shfl_xor_sync(0xffffffff, here[row], 1));
            here[row] = fmaxf(here[row], __shfl_xor_sync(0xffffffff, here[row], 2));
            if (t == 0) maxima[warp][g + row * 8] = here[row];
        }
        __syncthreads();
        if (apart) stage_keys(i + 1);
#pragma unroll
        for (int row = 0; row < OWN; row++) {
            for (int w = 0; w < WARPS; w++) here[row] = fmaxf(here[row], maxima[w][g + row * 8]);
        }
        // Weights of 16 keys are one step of the next product: all warps need those of all.
        {
            u32 w[2 * OWN][PARTS];
#pragma unroll
            for (int e = 0; e < 2 * OWN; e++) {
                const int j = e / OWN, row = e % OWN;
                rounded_pair(weight_of(s[j][row * 2], factor[row], here[row]), weight_of(s[j][row * 2 + 1], factor[row], here[row]), w[e]);
            }
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                u32* to = weights + ((warp * PARTS + p) * WARP + lane) * 2 * OWN;
                if (OWN > 1) *(uint4*)to = make_uint4(w[0][p], w[1][p], w[2 * OWN - 2][p], w[2 * OWN - 1][p]);
                else *(uint2*)to = make_uint2(w[0][p], w[1][p]);
            }
            for (int row = 0; row < OWN; row++) here[row] = largest_power(here[row], factor[row]);
        }
        if (apart) await_oldest();
        __syncthreads();
        float tile_sum[4] = {0, 0, 0, 0}, acc[CHUNKS][2][4];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            for (int e = 0; e < 8; e++) acc[c][e / 4][e % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            u32 w[PARTS][4];
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const u32* from = weights + ((k * PARTS + p) * WARP + lane) * 2 * OWN;
                if (OWN > 1) {
                    const uint4 four = *(const uint4*)from;
                    w[p][0] = four.x; w[p][1] = four.y; w[p][2] = four.z; w[p][3] = four.w;
                } else {
                    const uint2 two = *(const uint2*)from;
                    w[p][0] = two.x; w[p][2] = two.y; w[p][1] = w[p][3] = 0;
                }
                mma_stored(tile_sum, w[p], ONES, ONES);
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int chunk = c * WARPS + warp;
                if (STEPS % WARPS && chunk >= STEPS) break;
                u32 b[4];
                load_values(b, values, k * 16, chunk, lane);
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    mma_stored(acc[c][0], w[p], b[0], b[1]);
                    mma_stored(acc[c][1], w[p], b[2], b[3]);
                }
            }
        }
        if (blocks == 1) {
#pragma unroll
            for (int row = 0; row < OWN; row++) {
                const float all = fmaxf(most[row], here[row]), shrink = shrink_of(most[row], all), later = shrink_of(here[row], all);
                most[row] = all;
                sum[row] = merged_sum(sum[row], shrink, tile_sum[row * 2], later);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float& value = total[c][j / 2][row * 2 + j % 2];
                        value = merged_sum(value, shrink, acc[c][j / 2][row * 2 + j % 2], later);
                    }
            }
        } else {
            float* partial = a.partials + (((long)blockIdx.y * a.kv + kv) * blocks + blockIdx.z) * SHARED * (DIM + 2);
#pragma unroll
            for (int row = 0; row < OWN; row++) {
                const int h = g + row * 8;
                if (h >= SHARED) continue;
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int d = (c * WARPS + warp) * 16 + j * 8 + t * 2, o = h * DIM + d;
                        if (d >= DIM) continue;
                        const float2 both = make_float2(acc[c][j][row * 2], acc[c][j][row * 2 + 1]);
                        if (a.clusters) send_to_block((float2*)(sent + (tile - first_tile) * share + o % share), &arrived, o / share, both);
                        else *(float2*)(partial + o) = both;
                    }
                const float2 ends = make_float2(here[row], tile_sum[row * 2]);
                if (a.clusters) {
                    if (t == 0)
                        for (int to = warp; to < blocks; to += WARPS) send_to_block(tile_ends + h * CLUSTER_TILES + tile - first_tile, &arrived, to, ends);
                } else if (warp == 0 && t == 0) {
                    partial[OUTPUTS + h] = ends.x;
                    partial[OUTPUTS + SHARED + h] = ends.y;
                }
            }
        }
        // The tile after the next takes this one's place, where the next one's keys have not already.
        if (i + 1 < count) {
            __syncthreads();
            if (apart) stage_values(i + 1);
            else if (!KV_F8) stage(i + a.stages);
        }
    }
    if (stores) put_fresh(true);
    if (blocks == 1) {
#pragma unroll
        for (int row = 0; row < OWN; row++) {
            if (g + row * 8 >= SHARED) continue;
            const float inverse = 1.0f / sum[row];
            float* to = out + ((long)r * a.kv + kv) * OUTPUTS + (g + row * 8) * DIM;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int d = (c * WARPS + warp) * 16 + j * 8 + t * 2;
                    if (d < DIM) *(float2*)(to + d) = make_float2(__fmul_rn(total[c][j][row * 2], inverse), __fmul_rn(total[c][j][row * 2 + 1], inverse));
                }
        }
    }
    if (!a.clusters) return;
    await_sent(&arrived);
    for (int i = threadIdx.x; i < share; i += THREADS) {
        const int o = blockIdx.z * share + i, h = o / DIM;
        if (o >= OUTPUTS) break;
        float all = 0.0f, sum = FIRST_SUM, most = first_max(a, kv * SHARED + h);
#pragma unroll 4
        for (int n = 0; n < tiles; n++) {
            const float2 ends = tile_ends[h * CLUSTER_TILES + n];
            const float now = fmaxf(most, ends.x), shrink = shrink_of(most, now), later = shrink_of(ends.x, now);
            sum = merged_sum(sum, shrink, ends.y, later);
            all = merged_sum(all, shrink, sent[n * share + i], later);
            most = now;
        }
        out[((long)r * a.kv + kv) * OUTPUTS + o] = __fmul_rn(all, 1.0f / sum);
    }
}

#define MERGED 256  // tiles that are looked at together
#define AHEAD 32
#define MERGE_THREADS ((DIM + 31) / 32 * 32)

// Merges the tiles of each token in order: grid (query heads, tokens), a thread per value of the head.
KERNEL __launch_bounds__(MERGE_THREADS) merge_tiles(Step step, Attention a, float* out) {
    __shared__ float maxima[MERGED], sums[MERGED], shrinks[MERGED], later_shrinks[MERGED];
    let_next_start();
    wait_for_inputs();
    const int r = a.first + blockIdx.y, kv = blockIdx.x / SHARED, h = blockIdx.x % SHARED;
    if (r >= step_rows(step, 0)) return;
    const int tiles = last_seen(step, r) / TILE - first_seen(a, step.places[r]) / TILE + 1;
    const float* partials = a.partials + ((long)blockIdx.y * a.kv + kv) * a.tiles * SHARED * (DIM + 2);
    const int d = threadIdx.x;
    float total = 0.0f, sum = FIRST_SUM, before = first_max(a, blockIdx.x);
    for (int start = 0; start < tiles; start += MERGED) {
        const int count = min(tiles - start, MERGED);
        const float* from = partials + (long)start * SHARED * (DIM + 2);
        __syncthreads();
        for (int i = d; i < count; i += MERGE_THREADS) {
            maxima[i] = from[(long)i * SHARED * (DIM + 2) + OUTPUTS + h];
            sums[i] = from[(long)i * SHARED * (DIM + 2) + OUTPUTS + SHARED + h];
        }
        __syncthreads();
        // The largest up to each tile: doubling steps, exact in any order.
        for (int step = 1; step < count; step *= 2) {
            float most[(MERGED + MERGE_THREADS - 1) / MERGE_THREADS];
            for (int i = d, n = 0; i < count; i += MERGE_THREADS, n++) most[n] = i >= step ? fmaxf(maxima[i], maxima[i - step]) : maxima[i];
            __syncthreads();
            for (int i = d, n = 0; i < count; i += MERGE_THREADS, n++) maxima[i] = most[n];
            __syncthreads();
        }
        for (int i = d; i < count; i += MERGE_THREADS) {
            float earlier = i > 0 ? fmaxf(maxima[i - 1], before) : before, now = fmaxf(maxima[i], before);
            shrinks[i] = shrink_of(earlier, now);
            later_shrinks[i] = shrink_of(from[(long)i * SHARED * (DIM + 2) + OUTPUTS + h], now);
        }
        __syncthreads();
        // Many loads are under way at once.
        for (int some = 0; some < count; some += AHEAD) {
            float values[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                values[i] = some + i < count && d < DIM ? from[(long)(some + i) * SHARED * (DIM + 2) + h * DIM + d] : 0.0f;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (some + i >= count) break;
                sum = merged_sum(sum, shrinks[some + i], sums[some + i], later_shrinks[some + i]);
                total = merged_sum(total, shrinks[some + i], values[i], later_shrinks[some + i]);
            }
        }
        before = fmaxf(maxima[count - 1], before);
    }
    if (d < DIM) out[((long)r * a.query + blockIdx.x) * DIM + d] = __fmul_rn(total, 1.0f / sum);
}
