// Attention of each token's queries over its sequence's pages of f32, without matrix instructions. Compiled for one head size
// (DIM) and number of query heads per K/V head (GROUP); for scores with a cap (CAPPED), a logit of each head that adds
// nothing (SINKS), and queries that see what comes behind them, too (BOTH).
//
// Keys are taken in tiles of 64, aligned to absolute positions: each tile has its own softmax, and tiles are merged in
// order. What a query sees of a tile depends on its own position alone, so a token's result is the same bits whichever
// tokens are computed beside it, and whether one block does all tiles (grid (kv heads, tokens)) or each tile has its own
// (grid (kv heads, tokens, tiles)): then the blocks merge them as a cluster, or the last one to arrive does, or where they
// are many `merge_tiles`.
// Where every row of the step is one token, the kernel angles queries and keys itself and stores the new keys and values.
// In a tile, four lanes share a key for all query heads; then DIM / 4 threads share a key's values, and what the groups
// of threads have is added in their order.
#include "activation.cuh"
#include "kv.cuh"
#include "rope.cuh"

#define TILE 64
#define OUTPUTS (GROUP * DIM)
#define THREADS 256
#define PER_THREAD ((OUTPUTS + THREADS - 1) / THREADS)
#define LOADS ((OUTPUTS + 2 * DIM + THREADS - 1) / THREADS)
// Threads that share a key's values, four each; and how many such groups: as many as there are threads for, and as 32 KB
// hold results of.
#define LANES ((DIM + 3) / 4)
#define GROUPS_THREADS (THREADS / LANES)
#define GROUPS_ROOM (8192 / OUTPUTS < 1 ? 1 : 8192 / OUTPUTS)
#define GROUPS (GROUPS_THREADS < GROUPS_ROOM ? GROUPS_THREADS : GROUPS_ROOM)
// Bytes of a key and of a value where they are staged: eight keys apart are read at once.
#define VALUE_BYTES (DIM * 4)
#define KEY_BYTES (VALUE_BYTES + 32)
#define STAGED_BYTES (TILE * (KEY_BYTES + VALUE_BYTES))
#define PARTS_BYTES (GROUPS * OUTPUTS * 4)
#define HEADS ((GROUP + 3) / 4 * 4)  // weights of a key lie together

#define CLUSTER_MAX 8
#define MERGED_HERE 32  // tiles that the last block merges: one for each lane

struct Attention {
    int query, kv, group, window;  // a window of 0 sees all
    float scale;
    int tiles;        // how many blocks share a token's tiles: 1, or as many as there may be
    float* partials;  // (token, kv head, tile, GROUP x (DIM + 2)) where tiles have their own blocks
    u32* tickets;     // (token, kv head) blocks that have arrived, 0 between launches; null: another kernel merges
    int clusters, pad;  // whether the tiles of a token are a cluster
    Rotation rope;    // no frequencies: queries are rotated and keys are stored already
    const float* sinks;  // (query heads)
    float cap;
    int pad2;
};

// The last place that a token sees.
DEVICE int last_seen(const Step& step, int r) { return step.places[BOTH ? step.lasts[r] : r]; }
// What softmax starts from: a sink has a share and no value.
DEVICE float first_max(const Attention& a, int head) { return SINKS ? a.sinks[head] : -INFINITY_F; }
#define FIRST_SUM (SINKS ? 1.0f : 0.0f)

// Takes a later tile (max, sum) into those before it: what both are multiplied by. Written out, so that every caller
// rounds alike.
DEVICE float merged_sum(float sum, float rescale, float later_sum, float later_rescale) {
    return __fadd_rn(__fmul_rn(sum, rescale), __fmul_rn(later_sum, later_rescale));
}

#define PIECE 16  // bytes that are copied at once: four values

// Loops are rolled up: a step runs this code once, so what is fetched counts more than what is executed.
KERNEL __launch_bounds__(THREADS) attention(Step step, Attention a, const float* qkv, Stored* pages, float* out) {
    // Keys and values of a tile, later what the groups have; then queries; then a cluster's block's partial result.
    DYNAMIC_SHARED(uint4, smem);
    u8* staged = (u8*)smem;
    float4* parts = (float4*)smem;
    float* query = (float*)(staged + (STAGED_BYTES > PARTS_BYTES ? STAGED_BYTES : PARTS_BYTES));
    float* own = query + OUTPUTS;
    __shared__ float2 angles[DIM / 2 + 1];
    __shared__ float fresh[2 * DIM];  // the new key and value
    __shared__ float4 scores4[TILE * HEADS / 4];
    __shared__ float maxima[GROUP], sums[GROUP], rescales[GROUP], later_rescales[GROUP];
    __shared__ float total_max[GROUP], total_sum[GROUP];
    __shared__ int table[TILE / PAGE_TOKENS];
    __shared__ float tile_rescales[GROUP][MERGED_HERE], tile_later[GROUP][MERGED_HERE], tile_sums[GROUP][CLUSTER_MAX];
    __shared__ int is_last;
    float* scores = (float*)scores4;  // (key, head)
    let_next_start();
    // Positions and page tables are there before a step's first kernel; so are the keys and values of earlier steps.
    const int r = blockIdx.y, kv = blockIdx.x;
    const bool in_step = r < step_rows(step, 0);
    const int position = in_step ? step.places[r] : 0, last = in_step ? last_seen(step, r) : 0;
    const int first_seen = a.window ? max(position + 1 - a.window, 0) : 0;
    const int first_tile = first_seen / TILE, last_tile = last / TILE;
    const int mine = a.tiles == 1 ? first_tile : first_tile + blockIdx.z;
    const int end = a.tiles == 1 ? last_tile : mine;
    const bool works = in_step && mine <= last_tile, rotates = a.rope.frequencies;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    auto find_pages = [&](int tile) {
        if (threadIdx.x < TILE / PAGE_TOKENS && tile * TILE + (int)threadIdx.x * PAGE_TOKENS <= last)
            table[threadIdx.x] = page_of(step, r, a.group, tile * TILE + threadIdx.x * PAGE_TOKENS);
    };
    // All keys and values of a tile that are seen but for one that is not stored yet.
    auto stage = [&](int tile) {
        const int from = max(first_seen - tile * TILE, 0), to = min(last + (rotates ? 0 : 1) - tile * TILE, TILE);
        const int pieces = VALUE_BYTES / PIECE;
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * TILE * pieces; i += THREADS) {
            const int v = i / (TILE * pieces), key = i / pieces % TILE, piece = i % pieces * PIECE;
            if (key >= from && key < to)
                copy_async<16>(shared_address(staged + (v ? TILE * KEY_BYTES + key * VALUE_BYTES : key * KEY_BYTES) + piece),
                                 (const u8*)(pages + page_values(table[key / PAGE_TOKENS], v, kv, a.kv, DIM) +
                                             key % PAGE_TOKENS * DIM) + piece);
        }
        copy_commit();
    };
    // The new key and value among those of the last tile; and to their page, last of all: nothing waits for that.
    auto put_fresh = [&]() {
        const int key = position % TILE;
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * DIM; i += THREADS)
            ((Stored*)(staged + (i / DIM ? TILE * KEY_BYTES + key * VALUE_BYTES : key * KEY_BYTES)))[i % DIM] = stored(fresh[i]);
    };
    auto store_fresh = [&]() {
        const int page = table[position % TILE / PAGE_TOKENS];
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * DIM; i += THREADS)
            pages[page_values(page, i / DIM, kv, a.kv, DIM) + position % PAGE_TOKENS * DIM + i % DIM] = stored(fresh[i]);
    };
    if (works) find_pages(mine);
    __syncthreads();
    if (works && rotates) {
        stage(mine);
#pragma unroll 1
        for (int i = threadIdx.x; i < a.rope.pairs; i += THREADS) angles[i] = rotation_of(a.rope, (float)step.positions[r], i);
    }
    wait_for_inputs();
    if (!in_step || (!works && !a.clusters)) return;

    // Queries, and the new key and value: all loads at once, then rotated where they lie.
    const int columns = (a.query + 2 * a.kv) * DIM;
    const bool stores = rotates && works && end == last_tile;
    if (works) {
        const float* q = qkv + (long)r * columns;
        const int wanted = OUTPUTS + (stores ? 2 * DIM : 0);
        float loaded[LOADS];
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = n * THREADS + threadIdx.x, o = i - OUTPUTS;
            const int from = o < 0 ? kv * OUTPUTS + i : (a.query + kv) * DIM + (o < DIM ? o : o + (a.kv - 1) * DIM);
            loaded[n] = i < wanted ? load_l2(q + from) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = n * THREADS + threadIdx.x;
            if (i < OUTPUTS) query[i] = loaded[n];
            else if (i < wanted) fresh[i - OUTPUTS] = loaded[n];
        }
    }
    if (works && rotates) {
        __syncthreads();
        // A thread per pair of every query head, and of the key.
#pragma unroll 1
        for (int i = threadIdx.x; i < (GROUP + 1) * (DIM / 2); i += THREADS) {
            const int h = i / (DIM / 2), d = i % (DIM / 2);
            if (d >= a.rope.pairs) continue;
            float* head = h < GROUP ? query + h * DIM : fresh;
            const float2 both = rotated(angles[d], head[d], head[d + a.rope.pairs]);
            head[d] = both.x;
            head[d + a.rope.pairs] = both.y;
        }
        __syncthreads();
        if (stores && mine == last_tile) put_fresh();
    }
    float total[PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++) total[i] = 0.0f;
    if (threadIdx.x < GROUP) {
        total_max[threadIdx.x] = first_max(a, kv * GROUP + threadIdx.x);
        total_sum[threadIdx.x] = FIRST_SUM;
    }

#pragma unroll 1
    for (int tile = mine; works && tile <= end; tile++) {
        const int start = tile * TILE, from = max(first_seen - start, 0), to = min(last + 1 - start, TILE);
        if (tile > mine) {
            __syncthreads();
            find_pages(tile);
            __syncthreads();
        }
        if (tile > mine || !rotates) {
            stage(tile);
            // The new one, where it was not in the first tile.
            if (rotates && tile == last_tile) put_fresh();
        }
        copy_wait<0>();
        __syncthreads();
        // Scores: 8 warps x 8 keys, four lanes for each. Keys that are not seen may hold anything.
        {
            const int key = warp * 8 + lane / 4, sub = lane % 4;
            float dots[GROUP];
            for (int h = 0; h < GROUP; h++) dots[h] = 0.0f;
#pragma unroll 1
            for (int d = sub * 4; d < DIM; d += 16) {
                const float4 values = *(const float4*)(staged + key * KEY_BYTES + d * 4);
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    const float4 four = *(const float4*)(query + h * DIM + d);
                    dots[h] = __fmaf_rn(four.x, values.x, dots[h]);
                    dots[h] = __fmaf_rn(four.y, values.y, dots[h]);
                    dots[h] = __fmaf_rn(four.z, values.z, dots[h]);
                    dots[h] = __fmaf_rn(four.w, values.w, dots[h]);
                }
            }
            const bool seen = key >= from && key < to;
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                dots[h] += __shfl_xor_sync(ALL_LANES, dots[h], 1);
                dots[h] += __shfl_xor_sync(ALL_LANES, dots[h], 2);
                float score = dots[h] * a.scale;
                if (CAPPED) score = soft_cap(score, a.cap);
                if (sub == h % 4) scores[key * HEADS + h] = seen ? score : -INFINITY_F;
            }
        }
        __syncthreads();
        // Softmax of the tile: a warp per head.
#pragma unroll 1
        for (int h = warp; h < GROUP; h += THREADS / WARP) {
            float s0 = scores[lane * HEADS + h], s1 = scores[(lane + 32) * HEADS + h];
            float most = fmaxf(s0, s1);
            for (int s = 16; s > 0; s /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, s));
            float w0 = expf(s0 - most), w1 = expf(s1 - most);
            scores[lane * HEADS + h] = w0;
            scores[(lane + 32) * HEADS + h] = w1;
            float sum = warp_sum(w0 + w1);
            if (lane == 0) {
                maxima[h] = most;
                sums[h] = sum;
                if (a.tiles == 1) {
                    float all = fmaxf(total_max[h], most);
                    rescales[h] = expf(total_max[h] - all);
                    later_rescales[h] = expf(most - all);
                    total_sum[h] = merged_sum(total_sum[h], rescales[h], sum, later_rescales[h]);
                    total_max[h] = all;
                }
            }
        }
        __syncthreads();
        // Values: group g takes keys g, g + GROUPS, ...; a thread four neighbouring values of all heads.
        const int group = threadIdx.x / LANES, four = threadIdx.x % LANES;
        float acc[HEADS][4];
        for (int h = 0; h < HEADS; h++)
            for (int j = 0; j < 4; j++) acc[h][j] = 0.0f;
        if (group < GROUPS) {
#pragma unroll 1
            for (int key = from + (group + GROUPS * TILE - from) % GROUPS; key < to; key += GROUPS) {
                const float4 stored_four = *(const float4*)(staged + TILE * KEY_BYTES + key * VALUE_BYTES + four * 16);
                const float values[4] = {stored_four.x, stored_four.y, stored_four.z, stored_four.w};
#pragma unroll
                for (int h = 0; h < HEADS; h += 4) {
                    const float4 w = scores4[(key * HEADS + h) / 4];
                    for (int j = 0; j < 4; j++) {
                        acc[h][j] = __fmaf_rn(w.x, values[j], acc[h][j]);
                        acc[h + 1][j] = __fmaf_rn(w.y, values[j], acc[h + 1][j]);
                        acc[h + 2][j] = __fmaf_rn(w.z, values[j], acc[h + 2][j]);
                        acc[h + 3][j] = __fmaf_rn(w.w, values[j], acc[h + 3][j]);
                    }
                }
            }
        }
        __syncthreads();
        if (group < GROUPS)
#pragma unroll
            for (int h = 0; h < GROUP; h++)
                parts[(group * GROUP + h) * LANES + four] = make_float4(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
        __syncthreads();
        float* partial = a.clusters ? own : a.partials + (((long)r * a.kv + kv) * a.tiles + blockIdx.z) * GROUP * (DIM + 2);
        auto sum_of = [&](int o) {
            float value = 0.0f;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) value = __fadd_rn(value, ((const float*)parts)[g * OUTPUTS + o]);
            return value;
        };
        if (a.tiles > 1) {
#pragma unroll 1
            for (int o = threadIdx.x; o < OUTPUTS; o += THREADS) partial[o] = sum_of(o);
        } else {
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                const int o = i * THREADS + threadIdx.x;
                if (o < OUTPUTS) total[i] = merged_sum(total[i], rescales[o / DIM], sum_of(o), later_rescales[o / DIM]);
            }
        }
        if (a.tiles > 1 && threadIdx.x < GROUP) {
            partial[OUTPUTS + threadIdx.x] = maxima[threadIdx.x];
            partial[OUTPUTS + GROUP + threadIdx.x] = sums[threadIdx.x];
        }
    }
    if (a.clusters) {
        // Each block merges a share of the outputs. The blocks stay until the last one has read.
        const int tiles = last_tile - first_tile + 1, share = (OUTPUTS + a.tiles - 1) / a.tiles;
        const int o = blockIdx.z * share + threadIdx.x;
        const bool merges = threadIdx.x < share && o < OUTPUTS;
        cluster_sync();
        float value[CLUSTER_MAX];
#pragma unroll
        for (int t = 0; t < CLUSTER_MAX; t++) value[t] = merges && t < tiles ? load_from_block(own + o, t) : 0.0f;
        // What each tile is multiplied by: a thread per head and tile. The largest up to a tile is exact in any order.
        if (threadIdx.x < GROUP * CLUSTER_MAX) {
            const int h = threadIdx.x / CLUSTER_MAX, t = threadIdx.x % CLUSTER_MAX;
            float most[CLUSTER_MAX], mine_max = -INFINITY_F, earlier = first_max(a, kv * GROUP + h);
#pragma unroll
            for (int i = 0; i < CLUSTER_MAX; i++) most[i] = i < tiles ? load_from_block(own + OUTPUTS + h, i) : -INFINITY_F;
#pragma unroll
            for (int i = 0; i < CLUSTER_MAX; i++) {
                if (i < t) earlier = fmaxf(earlier, most[i]);
                if (i == t) mine_max = most[i];
            }
            const float now = fmaxf(earlier, mine_max);
            tile_rescales[h][t] = expf(earlier - now);
            tile_later[h][t] = expf(mine_max - now);
            tile_sums[h][t] = t < tiles ? load_from_block(own + OUTPUTS + GROUP + h, t) : 0.0f;
        }
        __syncthreads();
        if (merges) {
            const int h = o / DIM;
            float all = 0.0f, sum = FIRST_SUM;
#pragma unroll
            for (int t = 0; t < CLUSTER_MAX; t++)
                if (t < tiles) {
                    sum = merged_sum(sum, tile_rescales[h][t], tile_sums[h][t], tile_later[h][t]);
                    all = merged_sum(all, tile_rescales[h][t], value[t], tile_later[h][t]);
                }
            out[((long)r * a.kv + kv) * OUTPUTS + o] = __fmul_rn(all, 1.0f / sum);
        }
        if (stores) store_fresh();
        cluster_sync_relaxed();
        return;
    }
    if (stores) store_fresh();
    if (a.tiles > 1) {
        if (!a.tickets) return;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            u32* ticket = a.tickets + (long)r * a.kv + kv;
            is_last = atomicAdd(ticket, 1) == last_tile - first_tile;
            if (is_last) *ticket = 0;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        const int tiles = last_tile - first_tile + 1;
        const float* from = a.partials + ((long)r * a.kv + kv) * a.tiles * GROUP * (DIM + 2);
        // A warp per head, a lane per tile. The largest up to each tile is exact in any order.
        for (int h = warp; h < GROUP; h += THREADS / WARP) {
            const float* tile = from + (long)lane * GROUP * (DIM + 2) + OUTPUTS + h;
            const float own = lane < tiles ? load_l2(tile) : -INFINITY_F;
            const float own_sum = lane < tiles ? load_l2(tile + GROUP) : 0.0f;
            float now = own;
            for (int s = 1; s < WARP; s *= 2) {
                const float before = __shfl_up_sync(ALL_LANES, now, s);
                if (lane >= s) now = fmaxf(now, before);
            }
            now = fmaxf(now, first_max(a, kv * GROUP + h));
            float earlier = __shfl_up_sync(ALL_LANES, now, 1);
            if (lane == 0) earlier = first_max(a, kv * GROUP + h);
            const float rescale = expf(earlier - now), later = expf(own - now);
            tile_rescales[h][lane] = rescale;
            tile_later[h][lane] = later;
            float sum = FIRST_SUM;
            for (int i = 0; i < tiles; i++)
                sum = merged_sum(sum, __shfl_sync(ALL_LANES, rescale, i), __shfl_sync(ALL_LANES, own_sum, i),
                                 __shfl_sync(ALL_LANES, later, i));
            if (lane == 0) total_sum[h] = sum;
        }
        __syncthreads();
        // Four tiles are under way at once.
        for (int start = 0; start < tiles; start += 4) {
            float some[4][PER_THREAD];
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++) {
                    const int o = i * THREADS + threadIdx.x;
                    if (start + t < tiles && o < OUTPUTS)
                        some[t][i] = load_l2(from + (long)(start + t) * GROUP * (DIM + 2) + o);
                }
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++) {
                    const int o = i * THREADS + threadIdx.x;
                    if (start + t < tiles && o < OUTPUTS)
                        total[i] = merged_sum(total[i], tile_rescales[o / DIM][start + t], some[t][i], tile_later[o / DIM][start + t]);
                }
        }
    }
    for (int i = 0; i < PER_THREAD; i++) {
        const int o = i * THREADS + threadIdx.x;
        if (o < OUTPUTS) out[((long)r * a.kv + kv) * OUTPUTS + o] = __fmul_rn(total[i], 1.0f / total_sum[o / DIM]);
    }
}

#define MERGED 256  // tiles that are looked at together
#define MERGE_THREADS ((DIM + 31) / 32 * 32)

// Merges the tiles of each token in order: grid (query heads, tokens), a thread per value of the head.
KERNEL __launch_bounds__(MERGE_THREADS) merge_tiles(Step step, Attention a, float* out) {
    __shared__ float maxima[MERGED], sums[MERGED], rescales[MERGED], later_rescales[MERGED];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, kv = blockIdx.x / GROUP, h = blockIdx.x % GROUP;
    if (r >= step_rows(step, 0)) return;
    const int position = step.places[r];
    const int first_seen = a.window ? max(position + 1 - a.window, 0) : 0;
    const int tiles = last_seen(step, r) / TILE - first_seen / TILE + 1;
    const float* partials = a.partials + ((long)r * a.kv + kv) * a.tiles * GROUP * (DIM + 2);
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
            rescales[i] = expf(earlier - now);
            later_rescales[i] = expf(from[(long)i * GROUP * (DIM + 2) + OUTPUTS + h] - now);
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < count; i++) {
            sum = merged_sum(sum, rescales[i], sums[i], later_rescales[i]);
            float value = d < DIM ? from[(long)i * GROUP * (DIM + 2) + h * DIM + d] : 0.0f;
            total = merged_sum(total, rescales[i], value, later_rescales[i]);
        }
        before = fmaxf(maxima[count - 1], before);
    }
    if (d < DIM) out[((long)r * a.query + blockIdx.x) * DIM + d] = __fmul_rn(total, 1.0f / sum);
}
