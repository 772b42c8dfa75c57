// Greedy choice: the largest logit that the mask allows, the lowest id among equals, and what its log-probability needs.
//
// `scan`: grid (SCANS, rows); each block takes a contiguous stretch of the vocabulary. `choose`: one warp per row
// merges the stretches in order, leaves the token in its slot for the next step and the result for the host.
#include "prelude.cuh"

#define SCANS 32

struct GreedyRow {
    int wanted, slot, vocab, mask_words;  // mask_words 0: no mask
    const u32* mask;
};
struct Scan {
    float best, max, sum;  // of the allowed; of all: the maximum, and the sum of exponentials relative to it
    int id, broken;
};
struct Chosen {
    int token, fault;  // 0 none, 1 logits, 2 nothing allowed
    float logprob;
    int pad;
};

DEVICE bool better(float best, int id, float other, int other_id) {
    return other_id >= 0 && (id < 0 || other > best || (other == best && other_id < id));
}

KERNEL scan(const float* logits, int columns, const GreedyRow* rows, Scan* scans) {
    __shared__ Scan parts[32];
    let_next_start();
    wait_for_inputs();
    const GreedyRow row = rows[blockIdx.y];
    const float* from = logits + (long)row.wanted * columns;
    const int length = (row.vocab + SCANS - 1) / SCANS;
    const int start = blockIdx.x * length, end = min(start + length, row.vocab);
    Scan mine = {-INFINITY_F, -INFINITY_F, 0.0f, -1, 0};
    for (int id = start + threadIdx.x; id < end; id += blockDim.x) {
        float logit = from[id];
        if (!(fabsf(logit) < INFINITY_F)) mine.broken = 1;
        if (logit > mine.max) {
            mine.sum = mine.sum * expf(mine.max - logit) + 1.0f;
            mine.max = logit;
        } else {
            mine.sum += expf(logit - mine.max);
        }
        bool allowed = !row.mask_words || (id / 32 < row.mask_words && (row.mask[id / 32] >> (id % 32) & 1));
        if (allowed && better(mine.best, mine.id, logit, id)) {
            mine.best = logit;
            mine.id = id;
        }
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        float best = __shfl_down_sync(0xffffffff, mine.best, step);
        int id = __shfl_down_sync(0xffffffff, mine.id, step);
        if (better(mine.best, mine.id, best, id)) {
            mine.best = best;
            mine.id = id;
        }
        float max = __shfl_down_sync(0xffffffff, mine.max, step), sum = __shfl_down_sync(0xffffffff, mine.sum, step);
        float most = fmaxf(mine.max, max);
        if (most > -INFINITY_F) mine.sum = mine.sum * expf(mine.max - most) + sum * expf(max - most);
        mine.max = most;
        mine.broken |= __shfl_down_sync(0xffffffff, mine.broken, step);
    }
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < blockDim.x / WARP; w++) {
        if (better(mine.best, mine.id, parts[w].best, parts[w].id)) {
            mine.best = parts[w].best;
            mine.id = parts[w].id;
        }
        float most = fmaxf(mine.max, parts[w].max);
        if (most > -INFINITY_F) mine.sum = mine.sum * expf(mine.max - most) + parts[w].sum * expf(parts[w].max - most);
        mine.max = most;
        mine.broken |= parts[w].broken;
    }
    scans[blockIdx.y * SCANS + blockIdx.x] = mine;
}

KERNEL choose(const float* logits, int columns, const GreedyRow* rows, const Scan* scans, int* sampled, Chosen* chosen) {
    let_next_start();
    wait_for_inputs();
    if (threadIdx.x > 0) return;
    const GreedyRow row = rows[blockIdx.x];
    Scan all = scans[blockIdx.x * SCANS];
    for (int i = 1; i < SCANS; i++) {
        Scan part = scans[blockIdx.x * SCANS + i];
        if (better(all.best, all.id, part.best, part.id)) {
            all.best = part.best;
            all.id = part.id;
        }
        float most = fmaxf(all.max, part.max);
        if (most > -INFINITY_F) all.sum = all.sum * expf(all.max - most) + part.sum * expf(part.max - most);
        all.max = most;
        all.broken |= part.broken;
    }
    Chosen result;
    result.fault = all.broken ? 1 : all.id < 0 ? 2 : 0;
    result.token = result.fault ? 0 : all.id;
    result.logprob = result.fault ? 0.0f : logits[(long)row.wanted * columns + all.id] - all.max - logf(all.sum);
    result.pad = 0;
    chosen[blockIdx.x] = result;
    sampled[row.slot] = result.token;
}
