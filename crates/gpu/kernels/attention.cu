// Causal attention of each token's queries over its sequence's pages. Compiled for one head size (DIM), number of query
// heads per K/V head (SHARED) and storage type.
//
// Keys are taken in tiles of 64, aligned to absolute positions: each tile has its own softmax, and tiles are merged in
// order. What a query sees of a tile depends on its own position alone, so a token's result is the same bits whichever
// tokens are computed beside it, and whether one block does all tiles (grid (kv heads, tokens)) or each tile has its own
// (grid (kv heads, tokens, tiles)): then the last block to arrive merges them, or where they are many `merge_tiles`.
// Where every row of the step is one token, the kernel turns queries and keys itself and stores the new keys and values.
// In a tile, four lanes share a key for all query heads; then DIM / 4 threads share a key's values, and what the groups
// of threads have is added in their order.
#include "kv.cuh"
#include "rope.cuh"
#include "split.cuh"

#define TILE 64
#define OUTPUTS (SHARED * DIM)
#define THREADS 256
#define PER_THREAD ((OUTPUTS + THREADS - 1) / THREADS)
#define NEW_PER_THREAD ((2 * DIM + THREADS - 1) / THREADS)
// Threads that share a key's values, four each; and how many such groups: as many as there are threads for, and as 32 KB
// hold results of.
#define LANES ((DIM + 3) / 4)
#define GROUPS_THREADS (THREADS / LANES)
#define GROUPS_ROOM (8192 / OUTPUTS < 1 ? 1 : 8192 / OUTPUTS)
#define GROUPS (GROUPS_THREADS < GROUPS_ROOM ? GROUPS_THREADS : GROUPS_ROOM)
#define KEYS_PER_GROUP ((TILE + GROUPS - 1) / GROUPS)

#define MERGED_HERE 32  // tiles that the last block merges: one for each lane

struct Attention {
    int query, kv, group, window;  // a window of 0 sees all
    float scale;
    int tiles;        // how many blocks share a token's tiles: 1, or as many as there may be
    float* partials;  // (token, kv head, tile, SHARED x (DIM + 2)) where tiles have their own blocks
    u32* tickets;     // (token, kv head) blocks that have arrived, 0 between launches; null: another kernel merges
    Split split;      // where the result is also left in the form that matrix products read
    Rotation rope;    // no frequencies: queries are turned and keys are stored already
};

// Takes a later tile (max, sum) into those before it: what both are multiplied by. Written out, so that every caller
// rounds alike.
DEVICE float merged_sum(float sum, float shrink, float later_sum, float later_shrink) {
    return __fadd_rn(__fmul_rn(sum, shrink), __fmul_rn(later_sum, later_shrink));
}

// Writes one output; the lanes of a warp hold neighbours.
DEVICE void put(const Attention& a, float* out, int r, int column, float value) {
    const int columns = a.query * DIM;
    out[(long)r * columns + column] = value;
    if (a.split.x) split_value(a.split, r, column, value);
}
// Zeros behind the last column.
DEVICE void put_padding(const Attention& a, int r, int thread) {
    const int columns = a.query * DIM;
    for (int start = columns; a.split.x && start < a.split.padded; start += WARP)
        if (thread < WARP) split_value(a.split, r, start + thread, 0.0f);
}

// Four neighbouring stored values.
#if KV_BYTES == 4
typedef float4 StoredFour;
DEVICE void widened_four(const StoredFour& four, float values[4]) {
    values[0] = four.x; values[1] = four.y; values[2] = four.z; values[3] = four.w;
}
#else
typedef uint2 StoredFour;
DEVICE void widened_four(const StoredFour& four, float values[4]) {
    values[0] = widened(four.x & 0xffff); values[1] = widened(four.x >> 16);
    values[2] = widened(four.y & 0xffff); values[3] = widened(four.y >> 16);
}
#endif

KERNEL __launch_bounds__(THREADS) attention(Step step, Attention a, const float* qkv, Stored* pages, float* out) {
    __shared__ float query[OUTPUTS];
    __shared__ float2 turns[DIM / 2 + 1];
    __shared__ float fresh[2 * DIM];  // the new key and value
    __shared__ float scores[SHARED][TILE];
    __shared__ float maxima[SHARED], sums[SHARED], shrinks[SHARED], later_shrinks[SHARED];
    __shared__ float total_max[SHARED], total_sum[SHARED];
    __shared__ float4 parts[GROUPS * SHARED * LANES];
    __shared__ int table[TILE / PAGE_TOKENS];
    __shared__ float tile_shrinks[SHARED][MERGED_HERE], tile_later[SHARED][MERGED_HERE];
    __shared__ int is_last;
    let_next_start();
    // Positions and page tables are there before a step's first kernel; so are the keys and values of earlier steps.
    const int r = blockIdx.y, kv = blockIdx.x;
    const bool in_step = r < step_rows(step, 0);
    const int position = in_step ? step.places[r] : 0;
    const int first_seen = a.window ? max(position + 1 - a.window, 0) : 0;
    const int first_tile = first_seen / TILE, last_tile = position / TILE;
    const int mine = a.tiles == 1 ? first_tile : first_tile + blockIdx.z;
    const int end = a.tiles == 1 ? last_tile : mine;
    const bool works = in_step && mine <= last_tile;
    const int new_page = works && a.rope.frequencies ? page_of(step, r, a.group, position) : 0;
    if (works && threadIdx.x < TILE / PAGE_TOKENS && mine * TILE + (int)threadIdx.x * PAGE_TOKENS <= position)
        table[threadIdx.x] = page_of(step, r, a.group, mine * TILE + threadIdx.x * PAGE_TOKENS);
    if (works && a.tiles > 1) {
        const int lines = (DIM * KV_BYTES + 127) / 128;
        for (int i = threadIdx.x; i < 2 * TILE * lines; i += THREADS) {
            const int v = i / (TILE * lines), place = mine * TILE + i % (TILE * lines) / lines;
            if (place < position)
                prefetch((const u8*)(pages + page_values(page_of(step, r, a.group, place), v, kv, a.kv, DIM) +
                                     place % PAGE_TOKENS * DIM) + i % lines * 128);
        }
    }
    if (works && a.rope.frequencies)
        for (int i = threadIdx.x; i < a.rope.pairs; i += THREADS) turns[i] = turn_of(a.rope, (float)step.positions[r], i);
    __syncthreads();
    wait_for_inputs();
    if (!works) return;

    // Queries, and the new key and value: all loads at once, then turned where they lie.
    const int columns = (a.query + 2 * a.kv) * DIM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float* q = qkv + (long)r * columns + kv * OUTPUTS;
    const bool stores = a.rope.frequencies && end == last_tile;
    {
        const float* k = qkv + (long)r * columns + (a.query + kv) * DIM;
        float loaded[PER_THREAD], pair[NEW_PER_THREAD];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int o = i * THREADS + threadIdx.x;
            loaded[i] = o < OUTPUTS ? q[o] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < NEW_PER_THREAD; i++) {
            const int o = i * THREADS + threadIdx.x;
            pair[i] = stores && o < 2 * DIM ? k[o < DIM ? o : o + (a.kv - 1) * DIM] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            if (i * THREADS + threadIdx.x < OUTPUTS) query[i * THREADS + threadIdx.x] = loaded[i];
#pragma unroll
        for (int i = 0; i < NEW_PER_THREAD; i++)
            if (i * THREADS + threadIdx.x < 2 * DIM) fresh[i * THREADS + threadIdx.x] = pair[i];
    }
    if (a.rope.frequencies) {
        __syncthreads();
        // A thread per pair of every query head, and of the key.
        for (int i = threadIdx.x; i < (SHARED + 1) * (DIM / 2); i += THREADS) {
            const int h = i / (DIM / 2), d = i % (DIM / 2);
            if (d >= a.rope.pairs) continue;
            float* head = h < SHARED ? query + h * DIM : fresh;
            const float2 both = turned(turns[d], head[d], head[d + a.rope.pairs]);
            head[d] = both.x;
            head[d + a.rope.pairs] = both.y;
        }
        __syncthreads();
        for (int i = threadIdx.x; stores && i < 2 * DIM; i += THREADS)
            pages[page_values(new_page, i / DIM, kv, a.kv, DIM) + position % PAGE_TOKENS * DIM + i % DIM] = stored(fresh[i]);
    }
    float total[PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++) total[i] = 0.0f;
    if (threadIdx.x < SHARED) {
        total_max[threadIdx.x] = -INFINITY_F;
        total_sum[threadIdx.x] = 0.0f;
    }

    for (int tile = mine; tile <= end; tile++) {
        const int start = tile * TILE, from = max(first_seen - start, 0), to = min(position + 1 - start, TILE);
        __syncthreads();
        if (tile > mine) {
            if (threadIdx.x < TILE / PAGE_TOKENS && (int)threadIdx.x * PAGE_TOKENS < to)
                table[threadIdx.x] = page_of(step, r, a.group, start + threadIdx.x * PAGE_TOKENS);
            __syncthreads();
        }
        // Values: group g takes keys g, g + GROUPS, ...; a thread four neighbouring values of all heads. They are on their
        // way while the scores are made.
        const int group = threadIdx.x / LANES, four = threadIdx.x % LANES;
        StoredFour values_of[KEYS_PER_GROUP];
#pragma unroll
        for (int i = 0; i < KEYS_PER_GROUP; i++) {
            const int key = group + i * GROUPS;
            if (group < GROUPS && key >= from && key < to)
                values_of[i] = *(const StoredFour*)(pages + page_values(table[key / PAGE_TOKENS], 1, kv, a.kv, DIM) +
                                                    key % PAGE_TOKENS * DIM + four * 4);
        }
        // Scores: 8 warps x 8 keys. Keys that are not seen may never have been written.
        {
            const int key = warp * 8 + lane / 4, sub = lane % 4;
            float dots[SHARED];
            for (int h = 0; h < SHARED; h++) dots[h] = 0.0f;
            const bool seen = key >= from && key < to;
            if (seen) {
                const Stored* k = pages + page_values(table[key / PAGE_TOKENS], 0, kv, a.kv, DIM) + key % PAGE_TOKENS * DIM;
#if DIM % 16 == 0
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    float values[4];
                    const int d = i * 16 + sub * 4;
                    widened_four(*(const StoredFour*)(k + d), values);
                    for (int h = 0; h < SHARED; h++)
                        for (int j = 0; j < 4; j++) dots[h] = __fmaf_rn(query[h * DIM + d + j], values[j], dots[h]);
                }
#else
                for (int d = sub; d < DIM; d += 4) {
                    float value = widened(k[d]);
                    for (int h = 0; h < SHARED; h++) dots[h] = __fmaf_rn(query[h * DIM + d], value, dots[h]);
                }
#endif
            }
            for (int h = 0; h < SHARED; h++) {
                dots[h] += __shfl_xor_sync(0xffffffff, dots[h], 1);
                dots[h] += __shfl_xor_sync(0xffffffff, dots[h], 2);
                if (sub == 0) scores[h][key] = seen ? dots[h] * a.scale : -INFINITY_F;
            }
        }
        __syncthreads();
        // Softmax of the tile: a warp per head.
        for (int h = warp; h < SHARED; h += THREADS / WARP) {
            float s0 = scores[h][lane], s1 = scores[h][lane + 32];
            float most = fmaxf(s0, s1);
            for (int s = 16; s > 0; s /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, s));
            float w0 = expf(s0 - most), w1 = expf(s1 - most);
            scores[h][lane] = w0;
            scores[h][lane + 32] = w1;
            float sum = warp_sum(w0 + w1);
            if (lane == 0) {
                maxima[h] = most;
                sums[h] = sum;
                float all = fmaxf(total_max[h], most);
                shrinks[h] = expf(total_max[h] - all);
                later_shrinks[h] = expf(most - all);
                total_sum[h] = merged_sum(total_sum[h], shrinks[h], sum, later_shrinks[h]);
                total_max[h] = all;
            }
        }
        __syncthreads();
        if (group < GROUPS) {
            float acc[SHARED][4];
            for (int h = 0; h < SHARED; h++)
                for (int j = 0; j < 4; j++) acc[h][j] = 0.0f;
#pragma unroll
            for (int i = 0; i < KEYS_PER_GROUP; i++) {
                const int key = group + i * GROUPS;
                if (key < from || key >= to) continue;
                float values[4];
                widened_four(values_of[i], values);
                for (int h = 0; h < SHARED; h++)
                    for (int j = 0; j < 4; j++) acc[h][j] = __fmaf_rn(scores[h][key], values[j], acc[h][j]);
            }
            for (int h = 0; h < SHARED; h++)
                parts[(group * SHARED + h) * LANES + four] = make_float4(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
        }
        __syncthreads();
        float* partial = a.partials + (((long)r * a.kv + kv) * a.tiles + blockIdx.z) * SHARED * (DIM + 2);
        for (int i = 0; i < PER_THREAD; i++) {
            const int o = i * THREADS + threadIdx.x;
            if (o >= OUTPUTS) break;
            float value = 0.0f;
            for (int g = 0; g < GROUPS; g++) value = __fadd_rn(value, ((const float*)parts)[g * OUTPUTS + o]);
            if (a.tiles > 1) partial[o] = value;
            else total[i] = merged_sum(total[i], shrinks[o / DIM], value, later_shrinks[o / DIM]);
        }
        if (a.tiles > 1 && threadIdx.x < SHARED) {
            partial[OUTPUTS + threadIdx.x] = maxima[threadIdx.x];
            partial[OUTPUTS + SHARED + threadIdx.x] = sums[threadIdx.x];
        }
    }
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
        const float* from = a.partials + ((long)r * a.kv + kv) * a.tiles * SHARED * (DIM + 2);
        // A warp per head, a lane per tile. The largest up to each tile is exact in any order.
        for (int h = warp; h < SHARED; h += THREADS / WARP) {
            const float* tile = from + (long)lane * SHARED * (DIM + 2) + OUTPUTS + h;
            const float own = lane < tiles ? load_fresh(tile) : -INFINITY_F;
            const float own_sum = lane < tiles ? load_fresh(tile + SHARED) : 0.0f;
            float now = own;
            for (int s = 1; s < WARP; s *= 2) {
                const float before = __shfl_up_sync(0xffffffff, now, s);
                if (lane >= s) now = fmaxf(now, before);
            }
            float earlier = __shfl_up_sync(0xffffffff, now, 1);
            if (lane == 0) earlier = -INFINITY_F;
            const float shrink = expf(earlier - now), later = expf(own - now);
            tile_shrinks[h][lane] = shrink;
            tile_later[h][lane] = later;
            float sum = 0.0f;
            for (int i = 0; i < tiles; i++)
                sum = merged_sum(sum, __shfl_sync(0xffffffff, shrink, i), __shfl_sync(0xffffffff, own_sum, i),
                                 __shfl_sync(0xffffffff, later, i));
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
                        some[t][i] = load_fresh(from + (long)(start + t) * SHARED * (DIM + 2) + o);
                }
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++) {
                    const int o = i * THREADS + threadIdx.x;
                    if (start + t < tiles && o < OUTPUTS)
                        total[i] = merged_sum(total[i], tile_shrinks[o / DIM][start + t], some[t][i], tile_later[o / DIM][start + t]);
                }
        }
    }
    for (int i = 0; i < PER_THREAD; i++) {
        const int o = i * THREADS + threadIdx.x;
        if (o < OUTPUTS) put(a, out, r, kv * OUTPUTS + o, __fmul_rn(total[i], 1.0f / total_sum[o / DIM]));
    }
    if (kv == 0) put_padding(a, r, threadIdx.x);
}

#define MERGED 256  // tiles that are looked at together
#define MERGE_THREADS ((DIM + 31) / 32 * 32)

// Merges the tiles of each token in order: grid (query heads, tokens), a thread per value of the head.
KERNEL __launch_bounds__(MERGE_THREADS) merge_tiles(Step step, Attention a, float* out) {
    __shared__ float maxima[MERGED], sums[MERGED], shrinks[MERGED], later_shrinks[MERGED];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, kv = blockIdx.x / SHARED, h = blockIdx.x % SHARED;
    if (r >= step_rows(step, 0)) return;
    const int position = step.places[r];
    const int first_seen = a.window ? max(position + 1 - a.window, 0) : 0;
    const int tiles = position / TILE - first_seen / TILE + 1;
    const float* partials = a.partials + ((long)r * a.kv + kv) * a.tiles * SHARED * (DIM + 2);
    const int d = threadIdx.x;
    float total = 0.0f, sum = 0.0f, before = -INFINITY_F;
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
            shrinks[i] = expf(earlier - now);
            later_shrinks[i] = expf(from[(long)i * SHARED * (DIM + 2) + OUTPUTS + h] - now);
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < count; i++) {
            sum = merged_sum(sum, shrinks[i], sums[i], later_shrinks[i]);
            float value = d < DIM ? from[(long)i * SHARED * (DIM + 2) + h * DIM + d] : 0.0f;
            total = merged_sum(total, shrinks[i], value, later_shrinks[i]);
        }
        before = fmaxf(maxima[count - 1], before);
    }
    if (d < DIM) put(a, out, r, blockIdx.x * DIM + d, __fmul_rn(total, 1.0f / sum));
    if (blockIdx.x == 0) put_padding(a, r, d);
}
