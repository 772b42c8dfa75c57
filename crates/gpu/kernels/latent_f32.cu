// Attention over latent rows of f32: the reference precision, so plain CUDA cores and no tuning. Compiled for one width of
// rows (LATENT + TURNED). See docs/kernels.md#latent_f32.
//
// Grid (query heads, tokens): a block takes its rows in pages of 32, aligned to absolute places, with an online softmax.
// Every sum has one order, so a token's bits do not depend on the batch.
//   scores   a warp per row: lane l sums values l, l + 32, ..., and the lanes are added by a fixed tree
//   softmax  a warp, a lane per row
//   values   a thread per output, over the rows in order
#include "kv.cuh"

#define THREADS 256
#define WIDTH (LATENT + TURNED)
#define PER_THREAD ((LATENT + THREADS - 1) / THREADS)

struct LatentRows {
    int heads, each;    // query heads; columns of a head's share of `queries`
    int group, window;  // of pages; a window of 0 sees all
    float scale;
    int pad;
};

KERNEL __launch_bounds__(THREADS) latent_attention(Step step, LatentRows a, const float* absorbed, const float* queries, const Stored* pages, float* out) {
    __shared__ float query[WIDTH], scores[PAGE_TOKENS];  // scores become weights
    __shared__ float rescale, inverse;
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, head = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (r >= step_rows(step, 0)) return;
    const int last = step.places[r], first = a.window ? max(last + 1 - a.window, 0) : 0;
    const long own = (long)r * a.heads + head;
    for (int i = threadIdx.x; i < WIDTH; i += THREADS) query[i] = i < LATENT ? absorbed[own * LATENT + i] : queries[own * a.each + i - LATENT];
    // The softmax so far, in the first warp.
    float most = -INFINITY_F, sum = 0.0f, total[PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++) total[i] = 0.0f;
    for (int page = first / PAGE_TOKENS; page <= last / PAGE_TOKENS; page++) {
        const int from = max(first - page * PAGE_TOKENS, 0), to = min(last + 1 - page * PAGE_TOKENS, PAGE_TOKENS);
        const Stored* rows = pages + (long)page_of(step, r, a.group, page * PAGE_TOKENS) * PAGE_TOKENS * WIDTH;
        __syncthreads();
        for (int key = warp; key < PAGE_TOKENS; key += THREADS / WARP) {
            float score = -INFINITY_F;
            if (key >= from && key < to) {
                float dot = 0.0f;
                for (int i = lane; i < WIDTH; i += WARP) dot = __fmaf_rn(query[i], rows[key * WIDTH + i], dot);
                score = __fmul_rn(warp_sum(dot), a.scale);
            }
            if (lane == 0) scores[key] = score;
        }
        __syncthreads();
        if (warp == 0) {
            const float score = scores[lane];
            float all = fmaxf(most, score);
            for (int by = WARP / 2; by > 0; by /= 2) all = fmaxf(all, __shfl_xor_sync(ALL_LANES, all, by));
            const float weight = expf(score - all), shrink = expf(most - all);
            sum = __fmaf_rn(sum, shrink, warp_sum(weight));
            most = all;
            scores[lane] = weight;
            if (lane == 0) rescale = shrink, inverse = 1.0f / sum;
        }
        __syncthreads();
        for (int i = 0; i < PER_THREAD; i++) {
            const int column = i * THREADS + threadIdx.x;
            if (column >= LATENT) break;
            float read = 0.0f;
            for (int key = from; key < to; key++) read = __fmaf_rn(scores[key], rows[key * WIDTH + column], read);
            total[i] = __fmaf_rn(total[i], rescale, read);
        }
    }
    for (int i = 0; i < PER_THREAD; i++) {
        const int column = i * THREADS + threadIdx.x;
        if (column < LATENT) out[own * LATENT + column] = __fmul_rn(total[i], inverse);
    }
}
