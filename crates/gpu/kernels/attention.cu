// Attention of single tokens (decode) over their sequences' pages. The query heads of a K/V head are columns of the
// tensor-core instruction, eight at a time; its 16 rows are keys, then values of the head. See
// docs/kernels.md#attention.
//
// Grid (kv heads, tokens, blocks that share a token's tiles). A single block takes all tiles in turn and merges them in
// registers. Blocks of a cluster send their partial of each tile to the block that merges it (distributed shared
// memory), each a share of the outputs. Without clusters, and for long contexts, each tile has a block and
// `merge_tiles` follows. Four warps: each has a quarter of a tile's keys, then a quarter of the head's values. With one
// stage, keys and values are copied separately: the next tile's as soon as all warps are done with the current ones.
// Where every row of the step is one token, the kernel rotates queries and keys itself and stores the new keys and
// values.
#include "attention.cuh"

#define THREADS 128
#define WARPS 4
// Query heads in eights; a lane has two of each eight.
#define EIGHTS ((GROUP + 7) / 8)
#define QUERIES (8 * EIGHTS)
// What warps load and convert: queries, the new key and the new value.
#define ITEMS ((GROUP + 2 + WARPS - 1) / WARPS)
// Times 16 values of the head that a warp has.
#define CHUNKS ((STEPS + WARPS - 1) / WARPS)
#define CLUSTER_TILES 32  // the most that a cluster merges
// Blocks on a multiprocessor, as registers allow.
#define BLOCKS (DIM <= 64 ? (EIGHTS > 1 ? 4 : KV_F8 ? 5 : 6) : DIM <= 128 ? 4 : 2)

// A lane has one value of each of two heads: two lanes exchange one, so that each has two neighbours of one head. Calls
// use(head, index of the first value, both).
template <class Use> DEVICE void for_pairs(const float results[CHUNKS][EIGHTS][4], Use use) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4, odd = g % 2;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float x = results[c][n][j * 2], y = results[c][n][j * 2 + 1], other = __shfl_xor_sync(ALL_LANES, odd ? x : y, 4);
                const int h = n * 8 + t * 2 + odd, d = (c * WARPS + warp) * 16 + j * 8 + g - odd;
                if (h < GROUP && d < DIM) use(h, d, odd ? make_float2(other, y) : make_float2(x, other));
            }
}

// Shared memory: tiles of keys and values, queries, weights; in a cluster what each tile ends with (the largest score
// and the sum), and what the blocks send of it: (tile, share of outputs).
KERNEL __launch_bounds__(THREADS, BLOCKS) attention(Step step, Attention a, const float* qkv, Stored* pages, float* out) {
    DYNAMIC_SHARED(uint4, smem);
    u8* staged = (u8*)smem;
    u8* queries = staged + TILES_BYTES(a.stages);
    u32* weights = (u32*)(queries + PARTS * QUERIES * STRIDE);           // (part, eight heads, key, two heads)
    float2* tile_ends = (float2*)(weights + PARTS * EIGHTS * TILE * 4);  // (head, tile)
    float* sent = (float*)(tile_ends + GROUP * CLUSTER_TILES);
    __shared__ u64 arrived;  // that everything has been sent
    __shared__ float2 factors[QUERIES / 2], maxima[WARPS][QUERIES / 2];  // of two heads
    let_next_start();
    // Positions, page tables and the keys and values of earlier steps are written before a step's first kernel.
    const int r = a.first + blockIdx.y, kv = blockIdx.x, blocks = gridDim.z;
    if (r >= step_rows(step, 0)) return wait_for_inputs();
    const bool rotates = a.rope.frequencies;
    const int pairs = rotates ? a.rope.pairs : 0, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    // Asked for together: what copies wait for, and what the rotation waits for.
    float2 frequencies[HEAD_FOURS];
#pragma unroll
    for (int n = 0; n < HEAD_FOURS; n++)
        if ((n * WARP + lane) * 2 < pairs) frequencies[n] = *(const float2*)(a.rope.frequencies + (n * WARP + lane) * 2);
    const int place = step.places[r], position = step.positions[r], begins = step.tables[a.group * step.stride + r];
    const int last = last_seen(step, r), from = first_seen(a, place);
    const int first_tile = from / TILE, last_tile = last / TILE;
    const int mine = first_tile + blockIdx.z, count = mine > last_tile ? 0 : (last_tile - mine) / blocks + 1;
    const bool stores = rotates && count > 0 && mine + (count - 1) * blocks == last_tile;
    const int* table = step.tables + begins;
    const u32 staged_at = shared_address(staged), queries_at = shared_address(queries);
    // Outputs that a block of a cluster merges: pairs stay together.
    const int share = (OUTPUTS + 2 * blocks - 1) / (2 * blocks) * 2, tiles = last_tile - first_tile + 1;
    if (a.clusters) {
        const int merged = min(share, OUTPUTS - (int)blockIdx.z * share);
        if (threadIdx.x == 0) cluster_expect(&arrived, tiles * (max(merged, 0) * 4 + GROUP * 8));
        cluster_arrive_relaxed();
    }

    const bool apart = !KV_F8 && a.stages == 1;
    const int fresh = rotates ? place : -1;
    // Of a tile that there is not, those of the last.
    auto pages_at = [&](int i) { return pages_of(table, min(mine + i * blocks, last_tile), last); };
#if !KV_F8
    auto stage_one = [&](int i, const TilePages& two, int v) {
        if (i < count) stage_half<THREADS>(a, staged_at, pages, two, kv, v, mine + i * blocks, from, last, fresh);
        copy_commit();
    };
    auto stage_keys = [&](int i, const TilePages& two) { stage_one(i, two, 0); };
    auto stage_values = [&](int i, const TilePages& two) { stage_one(i, two, 1); };
#endif
    auto stage = [&](int i, const TilePages& two) {
        if (i < count) stage_tile<THREADS>(a, stage_at(staged_at, i & (a.stages - 1)), pages, two, kv, mine + i * blocks, from, last, fresh);
        copy_commit();
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
    // Without rotation here, a kernel of this step has just stored keys.
    if (!rotates) wait_for_inputs();
    TilePages two = pages_at(0);
    const TilePages next_two = pages_at(1);
#if !KV_F8
    if (apart) {
        stage_keys(0, two);
        stage_values(0, two);
    } else
#endif
#pragma unroll 1
        for (int i = 0; i < a.stages; i++) {
            stage(i, two);
            two = next_two;
        }
    float4 angles[HEAD_FOURS];
#pragma unroll
    for (int n = 0; n < HEAD_FOURS; n++) {
        if (count == 0 || (n * WARP + lane) * 2 >= pairs) continue;
        const float2 x = rotation_by(a.rope, (float)position, frequencies[n].x), y = rotation_by(a.rope, (float)position, frequencies[n].y);
        angles[n] = make_float4(x.x, x.y, y.x, y.y);
    }
    if (rotates) wait_for_inputs();
    if (count == 0 && !a.clusters) return;

    float4 items[ITEMS][HEAD_FOURS];
    if (count > 0) {
        // A warp has a head; all its loads are in flight at once.
        const float* q = qkv + (long)r * a.columns;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * WARPS + warp;
            if (item >= (stores ? GROUP + 2 : GROUP)) break;
            load_head(items[i], q + (item < GROUP ? kv * GROUP + item : a.query + (item - GROUP) * a.kv + kv) * DIM, pairs, lane);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * WARPS + warp;
            if (item >= (stores ? GROUP + 2 : GROUP)) break;
#pragma unroll
            for (int n = 0; n < HEAD_FOURS; n++)
                if (item <= GROUP && (n * WARP + lane) * 2 < pairs) items[i][n] = rotated_four(angles[n], items[i][n]);
            if (item < GROUP) put_query(a, queries, QUERIES, (float*)factors, item, items[i], pairs, lane);
        }
    }
    // The new key and value: into their tile, or into their page. The page is written last: nothing waits for it.
    auto put_fresh = [&](bool to_page) {
        u8* tile = staged + ((count - 1) & (TILES - 1)) * 2 * TILE_BYTES;
        Stored* page = pages + page_values(table[place / PAGE_TOKENS], 0, kv, a.kv, DIM);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int v = i * WARPS + warp - GROUP;
            if (v < 0 || v >= 2) continue;
            Stored* head = page + (long)v * a.kv * head_values(DIM);
#if KV_F8
            const u32 exponent = float8_exponent(largest_of(items[i])), factor = float8_factor(exponent);
            if (to_page && lane == 0) head[PAGE_TOKENS * DIM + place % PAGE_TOKENS] = (u8)exponent;
#endif
#pragma unroll
            for (int n = 0; n < 2 * HEAD_FOURS; n++) {
                const int j = (n / 2 * WARP + lane) * 2, d = n % 2 ? four_second(j, pairs) : four_first(j, pairs);
                if (DIM / 4 % WARP && j >= DIM / 2) continue;
                const float4& four = items[i][n / 2];
                const float2 two = n % 2 ? make_float2(four.z, four.w) : make_float2(four.x, four.y);
#if KV_F8
                const u16 codes = float8_code(two.x, exponent) | float8_code(two.y, exponent) << 8;
                const u32 in_tile = mul_f16x2(two_floats8_of(codes, 0), factor);
                typedef u16 Two;
#else
                const u32 codes = pair(stored(two.x), stored(two.y)), in_tile = codes;
                typedef u32 Two;
#endif
                if (to_page) *(Two*)(head + place % PAGE_TOKENS * DIM + d) = codes;
                else *(u32*)(tile + v * TILE_BYTES + at_row(place % TILE, d * 2 & ~15) + (d * 2 & 15)) = in_tile;
            }
        }
    };

    // Of the heads t * 2 and t * 2 + 1 of each eight: the largest so far, sums, and of the values g and g + 8 of 16
    // results.
    float row_max[EIGHTS][2], sum[EIGHTS][2], total[CHUNKS][EIGHTS][4];
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int h = n * 8 + t * 2 + e;
            row_max[n][e] = h < GROUP ? first_max(a, kv * GROUP + h) : -INFINITY_F;
            sum[n][e] = FIRST_SUM;
        }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        for (int i = 0; i < 4 * EIGHTS; i++) total[c][i / 4][i % 4] = 0.0f;
    if (a.clusters) cluster_wait_relaxed();

#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const int tile = mine + i * blocks;
        const u32 keys = staged_at + (i & (TILES - 1)) * 2 * TILE_BYTES, values = keys + TILE_BYTES;
#if !KV_F8
        // The page numbers are loaded before the copy may start.
        const TilePages following = pages_at(i + a.stages);
#endif
        // The new key and value: no copy writes to their place in the tile.
        if (stores && i == count - 1) put_fresh(false);
        await_oldest();
        __syncthreads();
#if KV_F8
        widen_tile<THREADS>(staged, staged + stage_at(0, i & (a.stages - 1)), tile, from, last, fresh);
        __syncthreads();
        if (i + 1 < count) stage(i + a.stages, pages_at(i + a.stages));
#endif
        float s[EIGHTS][4];
#pragma unroll
        for (int j = 0; j < 4 * EIGHTS; j++) s[j / 4][j % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 rows[4];
            load_rows(rows, keys, warp * 16, k, lane);
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
                u32 q[2 * PARTS];
                load_matrices(q, queries_at + lane / 16 * (QUERIES * STRIDE) + at_row(n * 8 + lane % 8, k * 32 + lane / 8 % 2 * 16));
#pragma unroll
                for (int p = 0; p < PARTS; p++) mma_stored(s[n], rows, q[p * 2], q[p * 2 + 1]);
            }
        }
        float factor[EIGHTS][2], tile_max[EIGHTS][2];
        const int key = tile * TILE + warp * 16 + g;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
            factor[n][0] = factors[n * 4 + t].x;
            factor[n][1] = factors[n * 4 + t].y;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int at = key + e / 2 * 8;
                s[n][e] = at >= from && at <= last ? capped(a, s[n][e], factor[n][e % 2]) : -INFINITY_F;
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                tile_max[n][e] = fmaxf(s[n][e], s[n][e + 2]);
                for (int step = 4; step < WARP; step *= 2) tile_max[n][e] = fmaxf(tile_max[n][e], __shfl_xor_sync(ALL_LANES, tile_max[n][e], step));
            }
            if (g == 0) maxima[warp][n * 4 + t] = make_float2(tile_max[n][0], tile_max[n][1]);
        }
        __syncthreads();
#if !KV_F8
        if (apart) stage_keys(i + 1, following);
#endif
        // Weights of 16 keys are one k-step of the next product: every warp needs all of them.
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
            for (int w = 0; w < WARPS; w++) {
                const float2 theirs = maxima[w][n * 4 + t];
                tile_max[n][0] = fmaxf(tile_max[n][0], theirs.x);
                tile_max[n][1] = fmaxf(tile_max[n][1], theirs.y);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 w[PARTS];
                rounded_pair(weight_of(s[n][j * 2], factor[n][0], tile_max[n][0]), weight_of(s[n][j * 2 + 1], factor[n][1], tile_max[n][1]), w);
#pragma unroll
                for (int p = 0; p < PARTS; p++) weights[((p * EIGHTS + n) * TILE + warp * 16 + j * 8 + g) * 4 + t] = w[p];
            }
            for (int e = 0; e < 2; e++) tile_max[n][e] = largest_power(tile_max[n][e], factor[n][e]);
        }
        if (apart) await_oldest();
        __syncthreads();
        const u32 ones[4] = {ONES, ONES, ONES, ONES};
        float tile_sum[EIGHTS][4], acc[CHUNKS][EIGHTS][4];
#pragma unroll
        for (int j = 0; j < 4 * EIGHTS; j++) {
            tile_sum[j / 4][j % 4] = 0.0f;
            for (int c = 0; c < CHUNKS; c++) acc[c][j / 4][j % 4] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            u32 w[EIGHTS][2 * PARTS];
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
                load_matrices_transposed(w[n], shared_address(weights) + ((lane / 16 * EIGHTS + n) * TILE + k * 16 + lane % 16) * 16);
#pragma unroll
                for (int p = 0; p < PARTS; p++) mma_stored(tile_sum[n], ones, w[n][p * 2], w[n][p * 2 + 1]);
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int chunk = c * WARPS + warp;
                if (STEPS % WARPS && chunk >= STEPS) break;
                // 16 of the head's values, of 16 keys.
                u32 rows[4];
                load_matrices_transposed(rows, values + at_row(k * 16 + lane / 16 * 8 + lane % 8, chunk * 32 + lane / 8 % 2 * 16));
#pragma unroll
                for (int n = 0; n < EIGHTS; n++)
#pragma unroll
                    for (int p = 0; p < PARTS; p++) mma_stored(acc[c][n], rows, w[n][p * 2], w[n][p * 2 + 1]);
            }
        }
        if (blocks == 1) {
#pragma unroll
            for (int n = 0; n < EIGHTS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float all = fmaxf(row_max[n][e], tile_max[n][e]), rescale = rescale_of(row_max[n][e], all), tile_rescale = rescale_of(tile_max[n][e], all);
                    row_max[n][e] = all;
                    sum[n][e] = merged_sum(sum[n][e], rescale, tile_sum[n][e], tile_rescale);
#pragma unroll
                    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                        for (int j = e; j < 4; j += 2) total[c][n][j] = merged_sum(total[c][n][j], rescale, acc[c][n][j], tile_rescale);
                }
        } else {
            float* partial = a.partials + (((long)blockIdx.y * a.kv + kv) * blocks + blockIdx.z) * GROUP * (DIM + 2);
            for_pairs(acc, [&](int h, int d, float2 both) {
                const int o = h * DIM + d;
                if (a.clusters) cluster_send((float2*)(sent + (tile - first_tile) * share + o % share), &arrived, o / share, both);
                else *(float2*)(partial + o) = both;
            });
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
                const int odd = g % 2, h = n * 8 + t * 2 + odd;
                if (g >= 2 || h >= GROUP) continue;
                const float2 ends = odd ? make_float2(tile_max[n][1], tile_sum[n][1]) : make_float2(tile_max[n][0], tile_sum[n][0]);
                if (a.clusters) {
                    for (int to = warp; to < blocks; to += WARPS) cluster_send(tile_ends + h * CLUSTER_TILES + tile - first_tile, &arrived, to, ends);
                } else if (warp == 0) {
                    partial[OUTPUTS + h] = ends.x;
                    partial[OUTPUTS + GROUP + h] = ends.y;
                }
            }
        }
        // The tile after the next goes to this one's stage, unless the next one's keys already have.
        if (i + 1 < count) {
            __syncthreads();
#if !KV_F8
            if (apart) stage_values(i + 1, following);
            else stage(i + a.stages, following);
#endif
        }
    }
    if (stores) put_fresh(true);
    if (blocks == 1) {
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float inverse = 1.0f / sum[n][e];
                for (int c = 0; c < CHUNKS; c++)
                    for (int j = e; j < 4; j += 2) total[c][n][j] = __fmul_rn(total[c][n][j], inverse);
            }
        for_pairs(total, [&](int h, int d, float2 both) { *(float2*)(out + ((long)r * a.kv + kv) * OUTPUTS + h * DIM + d) = both; });
    }
    if (!a.clusters) return;
    cluster_receive(&arrived);
    for (int i = threadIdx.x; i < share; i += THREADS) {
        const int o = blockIdx.z * share + i, h = o / DIM;
        if (o >= OUTPUTS) break;
        float all = 0.0f, sum = FIRST_SUM, row_max = first_max(a, kv * GROUP + h);
#pragma unroll 4
        for (int n = 0; n < tiles; n++) {
            const float2 ends = tile_ends[h * CLUSTER_TILES + n];
            const float now = fmaxf(row_max, ends.x), rescale = rescale_of(row_max, now), tile_rescale = rescale_of(ends.x, now);
            sum = merged_sum(sum, rescale, ends.y, tile_rescale);
            all = merged_sum(all, rescale, sent[n * share + i], tile_rescale);
            row_max = now;
        }
        out[((long)r * a.kv + kv) * OUTPUTS + o] = __fmul_rn(all, 1.0f / sum);
    }
}

#define MERGED 256  // tiles merged at once
#define AHEAD 32
#define MERGE_THREADS ((DIM + 31) / 32 * 32)

// Merges the tiles of each token in order: grid (query heads, tokens), a thread per value of the head.
KERNEL __launch_bounds__(MERGE_THREADS) merge_tiles(Step step, Attention a, float* out) {
    __shared__ float maxima[MERGED], sums[MERGED], rescales[MERGED], later_rescales[MERGED];
    let_next_start();
    wait_for_inputs();
    const int r = a.first + blockIdx.y, kv = blockIdx.x / GROUP, h = blockIdx.x % GROUP;
    if (r >= step_rows(step, 0)) return;
    const int tiles = last_seen(step, r) / TILE - first_seen(a, step.places[r]) / TILE + 1;
    const float* partials = a.partials + ((long)blockIdx.y * a.kv + kv) * a.tiles * GROUP * (DIM + 2);
    const int d = threadIdx.x;
    float total = 0.0f, sum = FIRST_SUM, before = first_max(a, blockIdx.x);
    for (int start = 0; start < tiles; start += MERGED) {
        const int count = min(tiles - start, MERGED);
        const float* from = partials + (long)start * GROUP * (DIM + 2);
        __syncthreads();
        for (int i = d; i < count; i += MERGE_THREADS) {
            maxima[i] = from[(long)i * GROUP * (DIM + 2) + OUTPUTS + h];
            sums[i] = from[(long)i * GROUP * (DIM + 2) + OUTPUTS + GROUP + h];
        }
        __syncthreads();
        // A prefix maximum over tiles by doubling steps: exact in any order.
        for (int step = 1; step < count; step *= 2) {
            float row_max[(MERGED + MERGE_THREADS - 1) / MERGE_THREADS];
            for (int i = d, n = 0; i < count; i += MERGE_THREADS, n++) row_max[n] = i >= step ? fmaxf(maxima[i], maxima[i - step]) : maxima[i];
            __syncthreads();
            for (int i = d, n = 0; i < count; i += MERGE_THREADS, n++) maxima[i] = row_max[n];
            __syncthreads();
        }
        for (int i = d; i < count; i += MERGE_THREADS) {
            float earlier = i > 0 ? fmaxf(maxima[i - 1], before) : before, now = fmaxf(maxima[i], before);
            rescales[i] = rescale_of(earlier, now);
            later_rescales[i] = rescale_of(from[(long)i * GROUP * (DIM + 2) + OUTPUTS + h], now);
        }
        __syncthreads();
        // Many loads in flight at once.
        for (int some = 0; some < count; some += AHEAD) {
            float values[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                values[i] = some + i < count && d < DIM ? from[(long)(some + i) * GROUP * (DIM + 2) + h * DIM + d] : 0.0f;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (some + i >= count) break;
                sum = merged_sum(sum, rescales[some + i], sums[some + i], later_rescales[some + i]);
                total = merged_sum(total, rescales[some + i], values[i], later_rescales[some + i]);
            }
        }
        before = fmaxf(maxima[count - 1], before);
    }
    if (d < DIM) out[((long)r * a.query + blockIdx.x) * DIM + d] = __fmul_rn(total, 1.0f / sum);
}
