// MoE beside the products: routing, the assignment of rows to places (experts.cuh), and the weighted sum of what the
// chosen experts return. A row of `chosen` is a token's expert numbers, ascending, then their weights; pair (token,
// choice) has the number token * each + choice. See docs/kernels.md#experts.
#include "activation.cuh"
#include "experts.cuh"

#define EACH_MAX 64

// Larger values first, then lower numbers, as one number each. A NaN is above all others: it becomes the weights.
DEVICE u64 rank(float value, int number) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return (u64)(bits & 0x80000000 ? ~bits : bits | 0x80000000) << 32 | (0xffffffffu - number);
}
DEVICE int ranked(u64 rank) { return (int)(0xffffffffu - (u32)rank); }
DEVICE u64 warp_max_64(u64 value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(ALL_LANES, value, step);
        value = other > value ? other : value;
    }
    return value;
}
// The best that comes after `last`.
DEVICE u64 next_best(const float* values, int count, u64 last) {
    u64 best = 0;
    for (int i = threadIdx.x; i < count; i += WARP) {
        const u64 own = rank(values[i], i);
        if (own < last && own > best) best = own;
    }
    return warp_max_64(best);
}

enum Scores { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };
struct Route {
    int experts, each;
    int scores;                         // what logits become
    int groups, groups_chosen, by_two;  // groups of experts, or 0; whether a group is as good as its two best together
    int by_score, by_all, of_all;       // whether scores choose; whether weights take all logits; are shares of all
    float added, least, scale;          // to what weights are divided by; its least; times the weights
};

// A score that looks at no other logit.
DEVICE float alone(int scores, float logit) { return scores == SQRT_SOFTPLUS ? sqrtf(softplus(logit)) : sigmoid(logit); }
DEVICE float most_of(const float* from, int count, float most) {
    for (int i = threadIdx.x; i < count; i += WARP) most = fmaxf(most, from[i]);
    for (int step = WARP / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
    return most;
}
DEVICE float powers_of(const float* from, int count, float most) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += WARP) sum += expf(from[i] - most);
    return warp_sum(sum);
}
// What experts are chosen by: scores with the correction, and minus infinity outside the token's groups.
DEVICE void rank_by_score(const Route& route, const float* from, const float* correction, float* to, float* groups) {
    const int lane = threadIdx.x, softmax = route.scores == SOFTMAX;
    const float most = softmax ? most_of(from, route.experts, -INFINITY_F) : 0.0f;
    const float all = softmax ? powers_of(from, route.experts, most) : 1.0f;
    for (int e = lane; e < route.experts; e += WARP) {
        const float score = softmax ? __fdiv_rn(expf(from[e] - most), all) : alone(route.scores, from[e]);
        to[e] = correction ? __fadd_rn(score, correction[e]) : score;
    }
    __syncwarp();
    if (route.groups == 0) return;
    const int size = route.experts / route.groups;
    for (int g = lane; g < route.groups; g += WARP) {
        u64 best = 0, second = 0;
        for (int i = 0; i < size; i++) {
            const u64 own = rank(to[g * size + i], i);
            if (own > second) second = own;
            if (second > best) second = best, best = own;
        }
        groups[g] = to[g * size + ranked(best)];
        if (route.by_two) groups[g] = __fadd_rn(groups[g], to[g * size + ranked(second)]);
    }
    __syncwarp();
    u64 last = ~0ull;
    for (int i = 0; i < route.groups_chosen; i++) last = next_best(groups, route.groups, last);
    for (int e = lane; e < route.experts; e += WARP)
        if (rank(groups[e / size], e / size) < last) to[e] = -INFINITY_F;
    __syncwarp();
}

// Grid (tokens), a warp each. Sums in the same order whatever the batch.
KERNEL __launch_bounds__(WARP) route(Step step, Route route, const float* logits, const float* correction, float* chosen) {
    __shared__ int numbers[EACH_MAX];
    __shared__ float scored[EXPERTS_MAX], groups[EXPERTS_MAX];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.x, lane = threadIdx.x, experts = route.experts, each = route.each;
    if (r >= step_rows(step, 0)) return;
    const float* from = logits + (long)r * experts;
    float* to = chosen + (long)r * 2 * each;
    if (route.by_score) rank_by_score(route, from, correction, scored, groups);
    // The larger logit has the larger score.
    const float* values = route.by_score ? scored : from;
    u64 last = ~0ull;
    for (int i = 0; i < each; i++) {
        last = next_best(values, experts, last);
        if (lane == 0) {
            // Among those before it, in their order.
            const int number = ranked(last);
            int at = i;
            while (at > 0 && numbers[at - 1] > number) {
                numbers[at] = numbers[at - 1];
                at--;
            }
            numbers[at] = number;
        }
    }
    __syncwarp();
    const bool softmax = route.scores == SOFTMAX;
    float most = -INFINITY_F, all = 1.0f, sum = 0.0f;
    if (softmax) {
        for (int i = 0; i < each; i++) most = fmaxf(most, from[numbers[i]]);
        if (route.by_all) {
            most = most_of(from, experts, most);
            all = powers_of(from, experts, most);
        }
    }
    auto score = [&](int i) {
        const float logit = from[numbers[i]];
        return softmax ? expf(logit - most) : alone(route.scores, logit);
    };
    if (route.of_all) {
        sum = all;
    } else {
        for (int i = 0; i < each; i++) sum += score(i);
        sum = __fadd_rn(sum, __fmul_rn(route.added, all));
        const float least = __fmul_rn(route.least, all);
        if (sum < least) sum = least;
    }
    for (int i = lane; i < each; i += WARP) {
        to[i] = (float)numbers[i];
        to[each + i] = __fmul_rn(__fdiv_rn(score(i), sum), route.scale);
    }
}

// A counting sort: gives every pair its place. Grid (experts); each thread of an expert's block looks through a
// contiguous run of pairs. Reads chosen; writes starts, list and places.
KERNEL __launch_bounds__(1024) deal(Step step, Stack stack, int* starts, int* list, int* places) {
    __shared__ int lesses[WARP], owns[WARP];
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, expert = blockIdx.x;
    const int pairs = stack_tokens(step, stack) * stack.each, share = (pairs + blockDim.x - 1) / blockDim.x;
    const int begin = min((int)threadIdx.x * share, pairs), end = min(begin + share, pairs);
    const float* chosen = stack.chosen + (long)stack.token * 2 * stack.each;
    // Even a broken expert number gets a place within bounds.
    auto number = [&](int pair) {
        const int token = pair / stack.each;
        return min(max((int)chosen[(long)token * 2 * stack.each + pair - token * stack.each], 0), stack.count - 1);
    };
    int less = 0, own = 0;
    for (int pair = begin; pair < end; pair++) {
        less += number(pair) < expert;
        own += number(pair) == expert;
    }
    // Those of the threads before.
    int at = own;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, at, step);
        if (lane >= step) at += other;
        less += __shfl_xor_sync(ALL_LANES, less, step);
    }
    if (lane == WARP - 1) {
        lesses[warp] = less;
        owns[warp] = at;
    }
    __syncthreads();
    int start = 0, all = 0;
    at -= own;
    for (int w = 0; w < warps; w++) {
        start += lesses[w];
        all += owns[w];
        if (w < warp) at += owns[w];
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert == stack.count - 1) starts[expert + 1] = start + all;
    }
    if (own == 0) return;
    for (int pair = begin; pair < end; pair++) {
        if (number(pair) != expert) continue;
        list[start + at] = pair * 8 + at % 8;
        places[pair] = start + at;
        at++;
    }
}

// What each pair's expert reads, where weights multiply that and not what it makes of it: grid (columns, pairs), a
// thread per value.
KERNEL weigh_inputs(Step step, Stack stack, const float* x, float* rows, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x, pair = blockIdx.y, each = stack.each;
    if (k >= columns || pair / each >= stack_tokens(step, stack)) return;
    const long token = stack.token + pair / each, place = stack.places ? stack.places[pair] : pair;
    rows[place * columns + k] = __fmul_rn(x[token * columns + k], stack.chosen[token * 2 * each + each + pair % each]);
}

// residual += the sum of a token's rows, weighted where it is not what they were made of that was (`weighs`), in the
// order of its experts: grid (columns, tokens), a thread per value.
KERNEL combine(Step step, Stack stack, int weighs, const float* rows, float* residual, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y, each = stack.each;
    if (k >= columns || r >= stack_tokens(step, stack)) return;
    const long token = stack.token + r;
    float sum = 0.0f;
    for (int i = 0; i < each; i++) {
        const long place = stack.places ? stack.places[r * each + i] : r * each + i;
        const float weight = weighs ? stack.chosen[token * 2 * each + each + i] : 1.0f;
        sum = __fmaf_rn(weight, rows[place * columns + k], sum);
    }
    residual[token * columns + k] += sum;
}

// x += sigmoid(gate) * y: grid (columns, tokens), a thread per value; a gate for each row.
KERNEL add_gated(Step step, const float* gate, const float* y, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    const long r = blockIdx.y;
    if (k >= columns || r >= step_rows(step, 0)) return;
    const float share = __fdiv_rn(1.0f, 1.0f + expf(-gate[r]));
    x[r * columns + k] = __fmaf_rn(share, y[r * columns + k], x[r * columns + k]);
}
