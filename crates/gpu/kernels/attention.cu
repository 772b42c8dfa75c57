// Causal attention of each token's queries over its sequence's pages. Compiled for one head size (DIM), number of query
// heads per K/V head (SHARED) and storage type.
//
// Keys are taken in tiles of 64, aligned to absolute positions: each tile has its own softmax, and tiles are merged in
// order. What a query sees of a tile depends on its own position alone, so a token's result is the same bits whichever
// tokens are computed beside it, and whether one block does all tiles (grid (kv heads, tokens)) or each tile has its own
// (grid (kv heads, tokens, tiles), then `merge_tiles`).
// In a tile, four lanes share a key for all query heads; then DIM / 4 threads share a key's values, and what the groups
// of threads have is added in their order.
#include "kv.cuh"
#include "split.cuh"

#define TILE 64
#define OUTPUTS (SHARED * DIM)
#define THREADS 256
#define PER_THREAD ((OUTPUTS + THREADS - 1) / THREADS)
// Threads that share a key's values, four each; and how many such groups: as many as there are threads for, and as 32 KB
// hold results of.
#define LANES ((DIM + 3) / 4)
#define GROUPS_THREADS (THREADS / LANES)
#define GROUPS_ROOM (8192 / OUTPUTS < 1 ? 1 : 8192 / OUTPUTS)
#define GROUPS (GROUPS_THREADS < GROUPS_ROOM ? GROUPS_THREADS : GROUPS_ROOM)

struct Attention {
    int query, kv, group, window;  // a window of 0 sees all
    float scale;
    float* partials;  // (token, kv head, tile, SHARED x (DIM + 2)) where tiles have their own blocks
    int tiles;        // how many blocks share a token's tiles: 1, or as many as there may be
    Split split;      // where the result is also left in the form that matrix products read
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
DEVICE void load_four(const Stored* from, float values[4]) {
#if KV_BYTES == 4
    float4 four = *(const float4*)from;
    values[0] = four.x; values[1] = four.y; values[2] = four.z; values[3] = four.w;
#else
    uint2 four = *(const uint2*)from;
    values[0] = widened(four.x & 0xffff); values[1] = widened(four.x >> 16);
    values[2] = widened(four.y & 0xffff); values[3] = widened(four.y >> 16);
#endif
}

KERNEL __launch_bounds__(THREADS) attention(Step step, Attention a, const float* qkv, const Stored* pages, float* out) {
    __shared__ float query[OUTPUTS];
    __shared__ float scores[SHARED][TILE];
    __shared__ float maxima[SHARED], sums[SHARED], shrinks[SHARED], later_shrinks[SHARED];
    __shared__ float total_max[SHARED], total_sum[SHARED];
    __shared__ float4 parts[GROUPS * SHARED * LANES];
    __shared__ int table[TILE / PAGE_TOKENS];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, kv = blockIdx.x;
    if (r >= step_rows(step, 0)) return;
    const int position = step.places[r];
    const int first_seen = a.window ? max(position + 1 - a.window, 0) : 0;
    const int first_tile = first_seen / TILE, last_tile = position / TILE;
    const int mine = a.tiles == 1 ? first_tile : first_tile + blockIdx.z;
    const int end = a.tiles == 1 ? last_tile : mine;
    if (mine > last_tile) return;

    const int columns = (a.query + 2 * a.kv) * DIM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float* q = qkv + (long)r * columns + kv * OUTPUTS;
    for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) query[i] = q[i];
    float total[PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++) total[i] = 0.0f;
    if (threadIdx.x < SHARED) {
        total_max[threadIdx.x] = -INFINITY_F;
        total_sum[threadIdx.x] = 0.0f;
    }

    for (int tile = mine; tile <= end; tile++) {
        const int start = tile * TILE, from = max(first_seen - start, 0), to = min(position + 1 - start, TILE);
        __syncthreads();
        if (threadIdx.x < TILE / PAGE_TOKENS && (int)threadIdx.x * PAGE_TOKENS < to)
            table[threadIdx.x] = page_of(step, r, a.group, start + threadIdx.x * PAGE_TOKENS);
        __syncthreads();
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
                    load_four(k + d, values);
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
        // Values: group g takes keys g, g + GROUPS, ...; a thread four neighbouring values of all heads.
        const int group = threadIdx.x / LANES, four = threadIdx.x % LANES;
        if (group < GROUPS) {
            float acc[SHARED][4];
            for (int h = 0; h < SHARED; h++)
                for (int j = 0; j < 4; j++) acc[h][j] = 0.0f;
#pragma unroll 4
            for (int key = group; key < TILE; key += GROUPS) {
                if (key < from || key >= to) continue;
                const Stored* v = pages + page_values(table[key / PAGE_TOKENS], 1, kv, a.kv, DIM) + key % PAGE_TOKENS * DIM + four * 4;
                float values[4];
                load_four(v, values);
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
        if (a.tiles > 1) {
            if (threadIdx.x < SHARED) {
                partial[OUTPUTS + threadIdx.x] = maxima[threadIdx.x];
                partial[OUTPUTS + SHARED + threadIdx.x] = sums[threadIdx.x];
            }
            return;
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
