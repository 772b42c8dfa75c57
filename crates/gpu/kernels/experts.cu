// MoE beside the products: routing, the assignment of rows to places (experts.cuh), and the weighted sum of what the
// chosen experts return. A row of `chosen` is a token's expert numbers, ascending, then their weights; pair (token,
// choice) has the number token * each + choice. See docs/kernels.md#experts.
#include "experts.cuh"

#define EACH_MAX 64

// Larger logits first, then lower numbers, as one number each. A NaN is above all others: it becomes the weights.
DEVICE u64 rank(float logit, int expert) {
    const u32 bits = __float_as_uint(logit + 0.0f);
    return (u64)(bits & 0x80000000 ? ~bits : bits | 0x80000000) << 32 | (0xffffffffu - expert);
}
DEVICE u64 warp_max_64(u64 value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(ALL_LANES, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// Grid (tokens), a warp each. Sums in the same order whatever the batch.
KERNEL __launch_bounds__(WARP) route(Step step, const float* logits, int experts, int each, int of_all, float* chosen) {
    __shared__ int numbers[EACH_MAX];
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.x, lane = threadIdx.x;
    if (r >= step_rows(step, 0)) return;
    const float* from = logits + (long)r * experts;
    float* to = chosen + (long)r * 2 * each;
    u64 last = ~0ull;
    for (int i = 0; i < each; i++) {
        u64 best = 0;
        for (int expert = lane; expert < experts; expert += WARP) {
            const u64 own = rank(from[expert], expert);
            if (own < last && own > best) best = own;
        }
        last = warp_max_64(best);
        if (lane == 0) {
            // Among those before it, in their order.
            const int number = (int)(0xffffffffu - (u32)last);
            int at = i;
            while (at > 0 && numbers[at - 1] > number) {
                numbers[at] = numbers[at - 1];
                at--;
            }
            numbers[at] = number;
        }
    }
    __syncwarp();
    float most = -INFINITY_F;
    for (int i = 0; i < each; i++) most = fmaxf(most, from[numbers[i]]);
    float sum = 0.0f;
    if (of_all) {
        for (int expert = lane; expert < experts; expert += WARP) sum += expf(from[expert] - most);
        sum = warp_sum(sum);
    } else {
        for (int i = 0; i < each; i++) sum += expf(from[numbers[i]] - most);
    }
    for (int i = lane; i < each; i += WARP) {
        to[i] = (float)numbers[i];
        to[each + i] = __fdiv_rn(expf(from[numbers[i]] - most), sum);
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

// residual += the weighted sum of a token's rows, in the order of its experts: grid (columns, tokens), a thread per
// value.
KERNEL combine(Step step, Stack stack, const float* rows, float* residual, int columns) {
    let_next_start();
    wait_for_inputs();
    const int k = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y, each = stack.each;
    if (k >= columns || r >= stack_tokens(step, stack)) return;
    const long token = stack.token + r;
    float sum = 0.0f;
    for (int i = 0; i < each; i++) {
        const long place = stack.places ? stack.places[r * each + i] : r * each + i;
        sum = __fmaf_rn(stack.chosen[token * 2 * each + each + i], rows[place * columns + k], sum);
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
