// Causal attention of each token's queries over its sequence's pages. Compiled for one head size (DIM), number of query
// heads per K/V head (SHARED) and storage type.
//
// Grid (kv heads, tokens, splits). Keys are taken in fixed splits of 512, aligned to absolute positions; within a split
// tiles of 64 in order, with a running softmax; splits are then merged in order. What a query sees of a split depends
// on its own position alone, so a token's result is the same bits whichever tokens are computed beside it, and whether
// one block does all splits or each has its own.
// In a tile, four lanes share a key for all query heads; then threads divide (head, dim) and go through the values.
#include "kv.cuh"

#define TILE 64
#define SPLIT_KEYS 512
#define OUTPUTS (SHARED * DIM)
#define THREADS 256
#define PER_THREAD ((OUTPUTS + THREADS - 1) / THREADS)

struct Attention {
    int query, kv, group, window;  // a window of 0 sees all
    float scale;
    float* partials;  // (token, kv head, split, SHARED x (DIM + 2)) where splits have their own blocks
    int splits;       // how many blocks share a token's splits: 1, or as many as there may be
};

// Takes a later part of a softmax (max, sum, values) into an earlier one. Written out, so that every caller rounds
// alike.
DEVICE void merge(float& max, float& sum, float later_max, float later_sum, float& shrink, float& later_shrink) {
    float most = fmaxf(max, later_max);
    shrink = expf(max - most);
    later_shrink = expf(later_max - most);
    sum = __fadd_rn(__fmul_rn(sum, shrink), __fmul_rn(later_sum, later_shrink));
    max = most;
}

KERNEL __launch_bounds__(THREADS) attention(const Step* step, Attention a, const float* qkv, const Stored* pages, float* out) {
    __shared__ float query[OUTPUTS];
    __shared__ float scores[SHARED][TILE];
    __shared__ float maxima[SHARED], sums[SHARED], shrinks[SHARED];
    __shared__ float total_max[SHARED], total_sum[SHARED], total_shrink[SHARED], split_shrink[SHARED];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, kv = blockIdx.x;
    if (r >= step->tokens) return;
    const int row = step_array(step, step->token_rows)[r], position = step_array(step, step->token_places)[r];
    const int first_seen = a.window ? max(position + 1 - a.window, 0) : 0;
    const int first_split = first_seen / SPLIT_KEYS, last_split = position / SPLIT_KEYS;
    const int mine = a.splits == 1 ? first_split : first_split + blockIdx.z;
    const int end = a.splits == 1 ? last_split : mine;
    if (mine > last_split) return;

    const int columns = (a.query + 2 * a.kv) * DIM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float* q = qkv + (long)r * columns + kv * OUTPUTS;
    for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) query[i] = q[i];
    float total[PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++) total[i] = 0.0f;
    if (threadIdx.x < SHARED) {
        total_max[threadIdx.x] = -INFINITY_F;
        total_sum[threadIdx.x] = 0.0f;
    }

    for (int split = mine; split <= end; split++) {
        float acc[PER_THREAD];
        for (int i = 0; i < PER_THREAD; i++) acc[i] = 0.0f;
        __syncthreads();
        if (threadIdx.x < SHARED) {
            maxima[threadIdx.x] = -INFINITY_F;
            sums[threadIdx.x] = 0.0f;
        }
        for (int tile = split * SPLIT_KEYS; tile < min((split + 1) * SPLIT_KEYS, position + 1); tile += TILE) {
            const int from = max(first_seen - tile, 0), to = min(position + 1 - tile, TILE);
            if (to <= from) continue;
            __syncthreads();
            // Scores: 8 warps x 8 keys.
            {
                const int key = warp * 8 + lane / 4, sub = lane % 4;
                float dots[SHARED];
                for (int h = 0; h < SHARED; h++) dots[h] = 0.0f;
                const bool seen = key >= from && key < to;
                if (seen) {
                    const int place = tile + key;
                    const Stored* k = pages + page_values(page_of(step, row, a.group, place), 0, kv, a.kv, DIM) + place % PAGE_TOKENS * DIM;
#if DIM % 16 == 0
#pragma unroll
                    for (int i = 0; i < DIM / 16; i++) {
                        float values[4];
                        const int d = i * 16 + sub * 4;
#if KV_BYTES == 4
                        float4 four = *(const float4*)(k + d);
                        values[0] = four.x; values[1] = four.y; values[2] = four.z; values[3] = four.w;
#else
                        uint2 four = *(const uint2*)(k + d);
                        values[0] = widened(four.x & 0xffff); values[1] = widened(four.x >> 16);
                        values[2] = widened(four.y & 0xffff); values[3] = widened(four.y >> 16);
#endif
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
            // Softmax: a warp per head.
            for (int h = warp; h < SHARED; h += THREADS / WARP) {
                float s0 = scores[h][lane], s1 = scores[h][lane + 32];
                float most = fmaxf(s0, s1);
                for (int s = 16; s > 0; s /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, s));
                most = fmaxf(most, maxima[h]);
                float w0 = expf(s0 - most), w1 = expf(s1 - most);
                scores[h][lane] = w0;
                scores[h][lane + 32] = w1;
                float sum = warp_sum(w0 + w1);
                if (lane == 0) {
                    float shrink = expf(maxima[h] - most);
                    shrinks[h] = shrink;
                    sums[h] = __fmaf_rn(sums[h], shrink, sum);
                    maxima[h] = most;
                }
            }
            __syncthreads();
            // Values: threads divide (head, dim); keys in order. Keys that are not seen may never have been written.
            for (int i = 0; i < PER_THREAD; i++) {
                const int o = i * THREADS + threadIdx.x;
                if (o >= OUTPUTS) break;
                const int h = o / DIM, d = o % DIM;
                float value = acc[i] * shrinks[h];
                for (int half = 0; half < TILE / PAGE_TOKENS; half++) {
                    const int low = max(from, half * PAGE_TOKENS), high = min(to, (half + 1) * PAGE_TOKENS);
                    if (high <= low) continue;
                    const Stored* v = pages + page_values(page_of(step, row, a.group, tile + low), 1, kv, a.kv, DIM) + d;
                    for (int key = low; key < high; key++) {
                        value = __fmaf_rn(scores[h][key], widened(v[(key % PAGE_TOKENS) * DIM]), value);
                    }
                }
                acc[i] = value;
            }
        }
        __syncthreads();
        if (a.splits > 1) {
            float* to = a.partials + (((long)r * a.kv + kv) * a.splits + blockIdx.z) * SHARED * (DIM + 2);
            for (int i = 0; i < PER_THREAD; i++) {
                const int o = i * THREADS + threadIdx.x;
                if (o < OUTPUTS) to[o] = acc[i];
            }
            if (threadIdx.x < SHARED) {
                to[OUTPUTS + threadIdx.x] = maxima[threadIdx.x];
                to[OUTPUTS + SHARED + threadIdx.x] = sums[threadIdx.x];
            }
            return;
        }
        if (threadIdx.x < SHARED) {
            const int h = threadIdx.x;
            merge(total_max[h], total_sum[h], maxima[h], sums[h], total_shrink[h], split_shrink[h]);
        }
        __syncthreads();
        for (int i = 0; i < PER_THREAD; i++) {
            const int o = i * THREADS + threadIdx.x;
            if (o < OUTPUTS) {
                total[i] = __fadd_rn(__fmul_rn(total[i], total_shrink[o / DIM]), __fmul_rn(acc[i], split_shrink[o / DIM]));
            }
        }
    }
    for (int i = 0; i < PER_THREAD; i++) {
        const int o = i * THREADS + threadIdx.x;
        if (o < OUTPUTS) out[(long)r * a.query * DIM + kv * OUTPUTS + o] = __fmul_rn(total[i], 1.0f / total_sum[o / DIM]);
    }
}

// Merges the splits of each token in order: grid (kv heads, tokens).
KERNEL __launch_bounds__(THREADS) merge_splits(const Step* step, Attention a, float* out) {
    __shared__ float total_max[SHARED], total_sum[SHARED], total_shrink[SHARED], split_shrink[SHARED];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, kv = blockIdx.x;
    if (r >= step->tokens) return;
    const int position = step_array(step, step->token_places)[r];
    const int first_seen = a.window ? max(position + 1 - a.window, 0) : 0;
    const int splits = position / SPLIT_KEYS - first_seen / SPLIT_KEYS + 1;
    float total[PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++) total[i] = 0.0f;
    if (threadIdx.x < SHARED) {
        total_max[threadIdx.x] = -INFINITY_F;
        total_sum[threadIdx.x] = 0.0f;
    }
    for (int split = 0; split < splits; split++) {
        const float* from = a.partials + (((long)r * a.kv + kv) * a.splits + split) * SHARED * (DIM + 2);
        __syncthreads();
        if (threadIdx.x < SHARED) {
            const int h = threadIdx.x;
            merge(total_max[h], total_sum[h], from[OUTPUTS + h], from[OUTPUTS + SHARED + h], total_shrink[h], split_shrink[h]);
        }
        __syncthreads();
        for (int i = 0; i < PER_THREAD; i++) {
            const int o = i * THREADS + threadIdx.x;
            if (o < OUTPUTS) {
                total[i] = __fadd_rn(__fmul_rn(total[i], total_shrink[o / DIM]), __fmul_rn(from[o], split_shrink[o / DIM]));
            }
        }
    }
    for (int i = 0; i < PER_THREAD; i++) {
        const int o = i * THREADS + threadIdx.x;
        if (o < OUTPUTS) out[(long)r * a.query * DIM + kv * OUTPUTS + o] = __fmul_rn(total[i], 1.0f / total_sum[o / DIM]);
    }
}
