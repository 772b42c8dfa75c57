// Attention over pages of f32 keys and values: the reference precision, so plain CUDA cores and no tuning. Compiled for
// one head size (DIM) and GQA group (GROUP: query heads of a K/V head); soft-capped scores (CAPPED), attention sinks
// (SINKS), and queries that also see later tokens of their sequence (BOTH). See docs/kernels.md#attention_f32.
//
// Grid (kv heads, tokens): a block has the GROUP query heads of one K/V head of one token and takes its keys in tiles
// of 64, aligned to absolute positions, with an online softmax. Every sum has one order, so a token's bits do not
// depend on the batch.
//   scores   a thread per key and head, over the head's values in order
//   softmax  a warp per head
//   values   a thread per output, over the keys in order
// With `rope` set, every row of the step is one token: the kernel rotates queries and the new key and stores key and
// value. Reads qkv (tokens, (query + 2 kv) x DIM, or queries alone) and pages; writes out (tokens, query x DIM) and, with
// `rope`, pages.
#include "activation.cuh"
#include "kv.cuh"
#include "rope.cuh"

#define TILE 64
#define THREADS 256
#define OUTPUTS (GROUP * DIM)
#define PER_THREAD ((OUTPUTS + THREADS - 1) / THREADS)

struct Attention {
    int query, kv, group, window;  // a window of 0 sees all
    float scale, cap;
    Rotation rope;       // no frequencies: queries are rotated and keys are stored already
    const float* sinks;  // (query heads)
    int columns;         // of a row: queries, keys and values, or queries alone where keys are stored already
    int chunk;           // nothing before a token's chunk of so many places is seen; 0: there are none
};

KERNEL __launch_bounds__(THREADS) attention(Step step, Attention a, const float* qkv, Stored* pages, float* out) {
    __shared__ float query[OUTPUTS], fresh[2 * DIM];  // queries; the new key, then the new value
    __shared__ float scores[TILE * GROUP];            // (key, head), later weights
    __shared__ float maxima[GROUP], sums[GROUP], rescale[GROUP];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, kv = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (r >= step_rows(step, 0)) return;
    const int position = step.places[r], last = step.places[BOTH ? step.lasts[r] : r];
    const int near = a.window ? max(position + 1 - a.window, 0) : 0;
    const int first = a.chunk ? max(near, position / a.chunk * a.chunk) : near;
    const bool rotates = a.rope.frequencies;

    const float* row = qkv + (long)r * a.columns;
    for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) query[i] = row[kv * OUTPUTS + i];
    for (int i = threadIdx.x; rotates && i < 2 * DIM; i += THREADS) fresh[i] = row[(a.query + i / DIM * a.kv + kv) * DIM + i % DIM];
    __syncthreads();
    // A thread per pair of each query head, and of the new key.
    for (int i = threadIdx.x; rotates && i < (GROUP + 1) * a.rope.pairs; i += THREADS) {
        const int h = i / a.rope.pairs, d = i % a.rope.pairs;
        float* head = h < GROUP ? query + h * DIM : fresh;
        const float2 both = rotated(rotation_of(a.rope, (float)step.positions[r], d), head[d], head[d + a.rope.pairs]);
        head[d] = both.x;
        head[d + a.rope.pairs] = both.y;
    }
    if (threadIdx.x < GROUP) {
        // A sink has a share of the softmax and no value.
        maxima[threadIdx.x] = SINKS ? a.sinks[kv * GROUP + threadIdx.x] : -INFINITY_F;
        sums[threadIdx.x] = SINKS ? 1.0f : 0.0f;
    }
    // The key (v is 0) or value of a place. The new one is not in its page yet.
    auto stored_at = [&](int v, int place) -> Stored* {
        return pages + page_values(page_of(step, r, a.group, place), v, kv, a.kv, DIM) + place % PAGE_TOKENS * DIM;
    };
    auto values_at = [&](int v, int place) -> const float* { return rotates && place == position ? fresh + v * DIM : stored_at(v, place); };

    float total[PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++) total[i] = 0.0f;
    for (int tile = first / TILE; tile <= last / TILE; tile++) {
        const int from = max(first - tile * TILE, 0), to = min(last + 1 - tile * TILE, TILE);
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * GROUP; i += THREADS) {
            const int key = i / GROUP, h = i % GROUP;
            float score = -INFINITY_F;
            if (key >= from && key < to) {
                const float* values = values_at(0, tile * TILE + key);
                float dot = 0.0f;
                for (int d = 0; d < DIM; d++) dot = __fmaf_rn(query[h * DIM + d], values[d], dot);
                score = CAPPED ? soft_cap(dot * a.scale, a.cap) : dot * a.scale;
            }
            scores[i] = score;
        }
        __syncthreads();
        for (int h = warp; h < GROUP; h += THREADS / WARP) {
            const float s0 = scores[lane * GROUP + h], s1 = scores[(lane + WARP) * GROUP + h], before = maxima[h];
            float most = fmaxf(before, fmaxf(s0, s1));
            for (int by = WARP / 2; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, by));
            const float w0 = expf(s0 - most), w1 = expf(s1 - most), sum = warp_sum(w0 + w1);
            scores[lane * GROUP + h] = w0;
            scores[(lane + WARP) * GROUP + h] = w1;
            // Every lane has read the maximum before one writes it.
            __syncwarp();
            if (lane > 0) continue;
            rescale[h] = expf(before - most);
            sums[h] = __fmaf_rn(sums[h], rescale[h], sum);
            maxima[h] = most;
        }
        __syncthreads();
        for (int i = 0; i < PER_THREAD; i++) {
            const int o = i * THREADS + threadIdx.x, h = o / DIM;
            if (o >= OUTPUTS) break;
            float sum = 0.0f;
            for (int key = from; key < to; key++)
                sum = __fmaf_rn(scores[key * GROUP + h], values_at(1, tile * TILE + key)[o % DIM], sum);
            total[i] = __fmaf_rn(total[i], rescale[h], sum);
        }
    }
    for (int i = 0; i < PER_THREAD; i++) {
        const int o = i * THREADS + threadIdx.x;
        if (o < OUTPUTS) out[((long)r * a.kv + kv) * OUTPUTS + o] = __fmul_rn(total[i], 1.0f / sums[o / DIM]);
    }
    for (int i = threadIdx.x; rotates && i < 2 * DIM; i += THREADS) stored_at(i / DIM, position)[i % DIM] = fresh[i];
}
