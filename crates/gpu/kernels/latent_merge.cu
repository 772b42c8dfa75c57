// Spans that blocks of attention over latent rows have left, merged in order (latent.cuh). See docs/kernels.md#latent.
#ifndef ROWS
#define ROWS 1
#endif
#include "latent.cuh"

// Merges the spans of a token's query: grid (query heads, tokens of the launch), a thread per value.
KERNEL latent_merge(Step step, Latent a, float* out) {
    let_next_start();
    wait_for_inputs();
    const int r = a.first + blockIdx.y, head = blockIdx.x;
    if ((int)blockIdx.y >= a.limit || r >= step_rows(step, 0)) return;
    const int place = step.places[r];
    const float* partials = a.partials + ((long)blockIdx.y * a.heads + head) * a.spans * (LATENT + 2);
    for (int column = threadIdx.x; column < LATENT; column += blockDim.x) {
        float most = -INFINITY_F, sum = 0.0f, total = 0.0f;
        // The block of several tokens began where its first one sees; so do its spans.
        for (int span = first_seen(a, place) / SPAN; span <= place / SPAN; span++) {
            const float* from = partials + (long)span * (LATENT + 2);
            const float all = fmaxf(most, from[LATENT]), earlier = rescale_of(most, all), later = rescale_of(from[LATENT], all);
            total = merged_sum(total, earlier, from[column], later);
            sum = merged_sum(sum, earlier, from[LATENT + 1], later);
            most = all;
        }
        out[((long)r * a.heads + head) * LATENT + column] = __fmul_rn(total, 1.0f / sum);
    }
}
