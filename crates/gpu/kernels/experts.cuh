// MoE: which rows belong to which expert. A pair is a token and one of its experts. Pairs have places in which those of
// one expert are contiguous, in the order of tokens; the rows of activations that experts make lie in the same order. A
// product goes through an expert's weights once for each group of GROUP_ROWS of its rows.
#pragma once
#include "prelude.cuh"

#define EXPERTS_MAX 1024

struct Stack {
    const float* chosen;  // (tokens of the step, 2 each) numbers of experts, then their weights
    const int* starts;    // (all experts + 1) where each one's places begin, and the end
    const int* list;      // (places) pair * 8 + the place among its expert's, modulo 8
    const int* places;    // (pairs), or null where they are in order
    int token, limit;     // the first token of the step that has places, and how many have at most
    int each;             // experts of a token
    int first, count;     // experts that the weight has
    int gathers;          // whether rows of activations are tokens', not places'
    int known;            // whether `chosen` was written before the previous kernel began
    int pad;
};

DEVICE int stack_tokens(const Step& step, const Stack& stack) { return max(min(step_rows(step, 0) - stack.token, stack.limit), 0); }

// before[e]: how many groups of this many rows the weight's experts have before e. A warp.
template <int GROUP_ROWS> DEVICE void count_groups(const Stack& stack, int* before) {
    const int lane = threadIdx.x % WARP;
    const int* starts = stack.starts + stack.first;
    int sum = 0;
    if (lane == 0) before[0] = 0;
    for (int first = 0; first < stack.count; first += WARP) {
        const int e = first + lane;
        int groups = e < stack.count ? (starts[e + 1] - starts[e] + GROUP_ROWS - 1) / GROUP_ROWS : 0;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, groups, step);
            if (lane >= step) groups += other;
        }
        if (e < stack.count) before[e + 1] = sum + groups;
        sum += __shfl_sync(ALL_LANES, groups, WARP - 1);
    }
}

// Some rows of weights of one expert, and some of its rows of activations.
struct Item {
    int expert;      // among those of the weight
    int tile;        // of weights
    int place, end;  // its first row of activations, and behind the last of its expert's
};
// Items that share rows of weights are consecutive. `tiles`: of an expert.
template <int GROUP_ROWS> DEVICE Item item_of(const Stack& stack, const int* before, int at, int tiles) {
    int low = 0, high = stack.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (before[middle] * tiles <= at) low = middle;
        else high = middle;
    }
    const int within = at - before[low] * tiles, groups = before[low + 1] - before[low];
    const int* starts = stack.starts + stack.first + low;
    Item item;
    item.expert = low;
    item.tile = within / groups;
    item.place = starts[0] + within % groups * GROUP_ROWS;
    item.end = starts[1];
    return item;
}
