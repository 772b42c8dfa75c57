// What goes through a sequence token by token and keeps a state of it: short convolutions, the gated delta rule and the
// selective scans. How a state lies is said in crates/compute/src/recurrence.rs. See docs/kernels.md#recurrence.
#include "activation.cuh"

// What a row of the step does with its state in one group of states; they lie behind the page tables.
struct RowState {
    int first, tokens;  // its first token in the step, and how many it has
    int from, to;       // the state before them (-1: none, all zeros), and where the state after them is left
    int saves, count;   // checkpoints: where they begin, counted from `Step::tables`, and how many there are
};
// A checkpoint is two words: after how many of the row's tokens, and to which state.
#define SAVE_WORDS 2

// One layer's states.
struct States {
    float* values;
    int each;  // values of a state
    int at;    // where the rows of its group begin, counted from `Step::tables`
    int rows;  // how many rows there are; negative where every row is one token and a recorded step may have others
    int pad;
};
DEVICE int state_rows(const Step& step, const States& states) { return states.rows >= 0 ? states.rows : step_rows(step, 0); }
DEVICE RowState row_state(const Step& step, const States& states, int r) { return ((const RowState*)(step.tables + states.at))[r]; }
DEVICE float* state_at(const States& states, int state) { return states.values + (long)state * states.each; }

// ---- Short convolution: grid (channels, rows, runs of TOKENS_EACH tokens), a thread per channel ----

#define TAPS_MAX 8
#define TOKENS_EACH 32

struct ShortConv {
    States states;
    const float* x;       // (tokens, columns)
    const float* weight;  // (taps, channels), the oldest input's first
    const float* bias;    // (channels), or null
    float* out;           // (tokens, channels)
    int channels, taps, columns;
    int gated;  // a row is b, c and x; else it begins with the channels
};

KERNEL __launch_bounds__(128) short_conv(Step step, ShortConv a) {
    let_next_start();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    float weights[TAPS_MAX];
#pragma unroll
    for (int i = 0; i < TAPS_MAX; i++) {
        const int tap = i - (TAPS_MAX - a.taps);
        weights[i] = tap >= 0 && channel < a.channels ? a.weight[(long)tap * a.channels + channel] : 0.0f;
    }
    const float bias = a.bias && channel < a.channels ? a.bias[channel] : 0.0f;
    wait_for_inputs();
    if ((int)blockIdx.y >= state_rows(step, a.states) || channel >= a.channels) return;
    const RowState row = row_state(step, a.states, blockIdx.y);
    const int start = blockIdx.z * TOKENS_EACH, end = min(start + TOKENS_EACH, row.tokens), before = a.taps - 1;
    if (start >= row.tokens) return;
    // Its input at a token of the row; before the first at what the state has.
    auto input = [&](int token) {
        if (token < 0) return row.from < 0 ? 0.0f : state_at(a.states, row.from)[(long)(before + token) * a.channels + channel];
        const float* x = a.x + (long)(row.first + token) * a.columns + channel;
        return a.gated ? __fmul_rn(x[0], x[2 * a.channels]) : x[0];
    };
    // The newest is the last; none is older than the taps.
    float seen[TAPS_MAX];
#pragma unroll
    for (int i = 1; i < TAPS_MAX; i++) seen[i] = i > TAPS_MAX - a.taps ? input(start + i - TAPS_MAX) : 0.0f;
    for (int token = start; token < end; token++) {
#pragma unroll
        for (int i = 1; i < TAPS_MAX; i++) seen[i - 1] = seen[i];
        seen[TAPS_MAX - 1] = input(token);
        float sum = bias;
#pragma unroll
        for (int i = 0; i < TAPS_MAX; i++)
            if (i >= TAPS_MAX - a.taps) sum = __fadd_rn(sum, __fmul_rn(weights[i], seen[i]));
        const long t = row.first + token;
        a.out[t * a.channels + channel] = a.gated ? __fmul_rn(sum, a.x[t * a.columns + a.channels + channel]) : silu(sum);
    }
    if (start > 0) return;
    // The states after some of the tokens, then the one after all, which may lie where the one before them did: what is
    // read of it is never behind what is written.
    auto leave = [&](float* state, int tokens) {
        for (int i = 0; i < before; i++) state[(long)i * a.channels + channel] = input(tokens - before + i);
    };
    const int* saves = step.tables + row.saves;
    for (int i = 0; i < row.count; i++) leave(state_at(a.states, saves[i * SAVE_WORDS + 1]), saves[i * SAVE_WORDS]);
    leave(state_at(a.states, row.to), row.tokens);
}

// ---- The gated delta rule: grid (blocks of COLUMNS columns of each head's matrix, rows) ----
//
// With known = S'k and read = S'q of the matrix as it was, and `kept` the share of itself that it keeps,
//   change = (v - kept known) learned;  S = kept S + k change';  out = S'q = kept read + change (k'q).
// So both sums over a matrix's rows are known at once, and a token has one reduction.
//
// A warp has 8 columns: lane 2p + c has the columns 4c to 4c + 3 of rows p, p + 16, ...; its share of the matrix stays
// in registers through all tokens of the row. One more warp runs ahead: it brings queries, keys and values of `chunk`
// tokens into shared memory, normalised, with what depends on the token alone.

#define STATE_LANES 16  // columns that lie side by side
#define PARTS 16        // lanes that share a column's rows
#define COMPUTE_WARPS 4
#define COLUMNS (8 * COMPUTE_WARPS)
#define DELTA_THREADS ((COMPUTE_WARPS + 1) * WARP)
// What a token takes in shared memory beside its keys and queries: values, then kept, learned, k'q.
#define TOKEN_REST (COLUMNS + 4)

struct DeltaRule {
    States states;
    const float* qkv;    // (tokens, queries, keys, values)
    const float* mixed;  // (tokens, mixed_columns): the last are betas, then decays
    const float* rate;   // (value heads)
    const float* bias;   // (value heads)
    float* out;          // (tokens, value heads x dim_v)
    int key, value, dim_k, dim_v;
    int turns;  // value heads take turns with key heads; else neighbours share one
    int before;  // values of a state before its matrices
    int mixed_columns;
    int chunk;  // at most a warp's lanes
};

// Brings `count` tokens from `first` on into a stage of the ring. The sums have one order, whatever else is in it.
template <int ROWS> DEVICE void bring(const DeltaRule& a, float* stage, int first, int count, int head, int column, int lane) {
    constexpr int PADDED = PARTS * ROWS, EACH = (PADDED + WARP - 1) / WARP, TOKEN = 2 * PADDED + TOKEN_REST, AT_ONCE = EACH > 4 ? 4 : 8;
    const int key_head = a.turns ? head % a.key : head / (a.value / a.key);
    const long columns = 2 * a.key * a.dim_k + a.value * a.dim_v;
    const float root = 1.0f / sqrtf((float)a.dim_k);
    float kept = 0.0f, learned = 0.0f;
    if (lane < count) {
        const float* shares = a.mixed + (long)(first + lane + 1) * a.mixed_columns - 2 * a.value + head;
        learned = sigmoid(shares[0]);
        kept = expf(__fmul_rn(a.rate[head], softplus(__fadd_rn(shares[a.value], a.bias[head]))));
    }
    for (int start = 0; start < count; start += AT_ONCE) {
        float q[AT_ONCE][EACH], k[AT_ONCE][EACH], v[AT_ONCE];
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
            const float* row = a.qkv + (first + min(start + t, count - 1)) * columns;
#pragma unroll
            for (int m = 0; m < EACH; m++) {
                const int i = lane + m * WARP;
                q[t][m] = i < a.dim_k ? row[key_head * a.dim_k + i] : 0.0f;
                k[t][m] = i < a.dim_k ? row[(a.key + key_head) * a.dim_k + i] : 0.0f;
            }
            v[t] = lane < COLUMNS && column + lane < a.dim_v ? row[2 * a.key * a.dim_k + head * a.dim_v + column + lane] : 0.0f;
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
            float queries = 0.0f, keys = 0.0f, both = 0.0f;
#pragma unroll
            for (int m = 0; m < EACH; m++) {
                queries = __fmaf_rn(q[t][m], q[t][m], queries);
                keys = __fmaf_rn(k[t][m], k[t][m], keys);
                both = __fmaf_rn(q[t][m], k[t][m], both);
            }
            queries = warp_sum(queries), keys = warp_sum(keys), both = warp_sum(both);
            const float of_query = __fmul_rn(__fdiv_rn(1.0f, sqrtf(__fadd_rn(queries, 1e-6f))), root);
            const float of_key = __fdiv_rn(1.0f, sqrtf(__fadd_rn(keys, 1e-6f)));
            float* token = stage + (start + t) * TOKEN;
            if (start + t < count) {
#pragma unroll
                for (int m = 0; m < EACH; m++) {
                    const int i = lane + m * WARP;
                    if (i < PADDED) ((float2*)token)[i] = make_float2(__fmul_rn(k[t][m], of_key), __fmul_rn(q[t][m], of_query));
                }
                if (lane < COLUMNS) token[2 * PADDED + lane] = v[t];
                if (lane == start + t)
                    *(float4*)(token + 2 * PADDED + COLUMNS) = make_float4(kept, learned, __fmul_rn(__fmul_rn(both, of_query), of_key), 0.0f);
            }
        }
    }
}

// A lane's share of a matrix, from memory and to it: rows of 16 columns, of which it has four.
template <int ROWS> DEVICE void load_share(float share[ROWS][4], const float* at, int part, int rows) {
    const bool aligned = (u64)at % 16 == 0;
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        const int row = part + j * PARTS;
        const float* from = at + row * STATE_LANES;
        if (row < rows && aligned) {
            const float4 four = *(const float4*)from;
            share[j][0] = four.x, share[j][1] = four.y, share[j][2] = four.z, share[j][3] = four.w;
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) share[j][c] = row < rows ? from[c] : 0.0f;
        }
    }
}
template <int ROWS> DEVICE void store_share(const float share[ROWS][4], float* at, int part, int rows) {
    const bool aligned = (u64)at % 16 == 0;
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        const int row = part + j * PARTS;
        float* to = at + row * STATE_LANES;
        if (row >= rows) continue;
        if (aligned) {
            *(float4*)to = make_float4(share[j][0], share[j][1], share[j][2], share[j][3]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) to[c] = share[j][c];
        }
    }
}

template <int ROWS> DEVICE void delta_rule(const Step& step, const DeltaRule& a) {
    constexpr int PADDED = PARTS * ROWS, TOKEN = 2 * PADDED + TOKEN_REST;
    DYNAMIC_SHARED(float4, ring);
    let_next_start();
    if ((int)blockIdx.y >= state_rows(step, a.states)) return wait_for_inputs();
    const RowState row = row_state(step, a.states, blockIdx.y);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int blocks = (a.dim_v + COLUMNS - 1) / COLUMNS, head = blockIdx.x / blocks, column = blockIdx.x % blocks * COLUMNS;
    const int chunks = (row.tokens + a.chunk - 1) / a.chunk;
    auto stage_of = [&](int chunk) { return (float*)ring + chunk % 2 * a.chunk * TOKEN; };

    if (warp == COMPUTE_WARPS) {
        wait_for_inputs();
        bring<ROWS>(a, stage_of(0), row.first, min(a.chunk, row.tokens), head, column, lane);
        __syncthreads();
        for (int chunk = 1; chunk <= chunks; chunk++) {
            const int start = chunk * a.chunk;
            if (chunk < chunks) bring<ROWS>(a, stage_of(chunk), row.first + start, min(a.chunk, row.tokens - start), head, column, lane);
            __syncthreads();
        }
        return;
    }

    const int quad = lane % 2, part = lane / 2, own = column + warp * 8 + quad * 4;
    const int lanes_blocks = (a.dim_v + STATE_LANES - 1) / STATE_LANES;
    const bool there = own < lanes_blocks * STATE_LANES;
    const long at = a.before + ((long)head * lanes_blocks + own / STATE_LANES) * a.dim_k * STATE_LANES + own % STATE_LANES;
    float share[ROWS][4];
    // No kernel of this step writes the matrices of this layer but this one, and no other block of it these columns of
    // the row; those of steps before have ended, for a copy to the device is between.
    if (there && row.from >= 0) {
        load_share<ROWS>(share, state_at(a.states, row.from) + at, part, a.dim_k);
    } else {
#pragma unroll
        for (int j = 0; j < ROWS; j++) share[j][0] = share[j][1] = share[j][2] = share[j][3] = 0.0f;
    }
    wait_for_inputs();
    const int* saves = step.tables + row.saves;
    int saved = 0, due = row.count > 0 ? saves[0] : -1;
    // After the reduction a lane has one sum: `known` in the first half of the warp, `read` in the second, of this
    // column.
    const int mine = lane / 8 % 2 * 2 + lane / 4 % 2;
    const bool reads = lane >= 16, writes = reads && lane % 4 < 2 && own + mine < a.dim_v;
    float* out = a.out + ((long)row.first * a.value + head) * a.dim_v + own + mine;
    __syncthreads();
    for (int chunk = 0; chunk < chunks; chunk++) {
        const float* stage = stage_of(chunk);
        const int start = chunk * a.chunk, count = there ? min(a.chunk, row.tokens - start) : 0;
        float2 next[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            if (count > 0) next[j] = ((const float2*)stage)[part + j * PARTS];
        for (int t = 0; t < count; t++) {
            const float* token = stage + t * TOKEN;
            const float4 shares = *(const float4*)(token + 2 * PADDED + COLUMNS);
            const float kept = shares.x, learned = shares.y;
            const float v = token[2 * PADDED + warp * 8 + quad * 4 + mine];
            float keys[ROWS], known[4] = {}, read[4] = {};
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                keys[j] = next[j].x;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    known[c] = __fmaf_rn(share[j][c], next[j].x, known[c]);
                    read[c] = __fmaf_rn(share[j][c], next[j].y, read[c]);
                    share[j][c] = __fmul_rn(share[j][c], kept);
                }
            }
            // The next token's, while the sums go through the warp.
            const float* following = stage + min(t + 1, count - 1) * TOKEN;
#pragma unroll
            for (int j = 0; j < ROWS; j++) next[j] = ((const float2*)following)[part + j * PARTS];
            // Halves of the warp keep one kind of sum, quarters two columns of it, eighths one.
            float four[4], two[2];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float other = __shfl_xor_sync(ALL_LANES, reads ? known[c] : read[c], 16);
                four[c] = __fadd_rn(reads ? read[c] : known[c], other);
            }
            const bool second = lane / 8 % 2, odd = lane / 4 % 2;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float other = __shfl_xor_sync(ALL_LANES, second ? four[c] : four[c + 2], 8);
                two[c] = __fadd_rn(second ? four[c + 2] : four[c], other);
            }
            const float other = __shfl_xor_sync(ALL_LANES, odd ? two[0] : two[1], 4);
            float sum = __fadd_rn(odd ? two[1] : two[0], other);
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
            const float change = __fmul_rn(__fsub_rn(v, __fmul_rn(kept, sum)), learned);
            float changes[4];
#pragma unroll
            for (int c = 0; c < 4; c++) changes[c] = __shfl_sync(ALL_LANES, change, quad + c % 2 * 4 + c / 2 * 8);
            const float of_column = __shfl_sync(ALL_LANES, change, lane % 16);
            if (writes) *out = __fmaf_rn(kept, sum, __fmul_rn(of_column, shares.z));
            out += (long)a.value * a.dim_v;
#pragma unroll
            for (int j = 0; j < ROWS; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) share[j][c] = __fmaf_rn(keys[j], changes[c], share[j][c]);
            if (start + t + 1 == due) {
                store_share<ROWS>(share, state_at(a.states, saves[saved * SAVE_WORDS + 1]) + at, part, a.dim_k);
                saved++;
                due = saved < row.count ? saves[saved * SAVE_WORDS] : -1;
            }
        }
        __syncthreads();
    }
    if (there) store_share<ROWS>(share, state_at(a.states, row.to) + at, part, a.dim_k);
}

// By the rows of a matrix that a lane has.
KERNEL __launch_bounds__(DELTA_THREADS) delta_rule_1(Step step, const __grid_constant__ DeltaRule rule) { delta_rule<1>(step, rule); }
KERNEL __launch_bounds__(DELTA_THREADS) delta_rule_2(Step step, const __grid_constant__ DeltaRule rule) { delta_rule<2>(step, rule); }
KERNEL __launch_bounds__(DELTA_THREADS) delta_rule_4(Step step, const __grid_constant__ DeltaRule rule) { delta_rule<4>(step, rule); }
KERNEL __launch_bounds__(DELTA_THREADS, 3) delta_rule_8(Step step, const __grid_constant__ DeltaRule rule) { delta_rule<8>(step, rule); }
KERNEL __launch_bounds__(DELTA_THREADS) delta_rule_16(Step step, const __grid_constant__ DeltaRule rule) { delta_rule<16>(step, rule); }

// ---- The selective scan: grid (blocks of COLUMNS columns of each head's matrix, rows) ----
//
// As the delta rule, but a matrix takes in a token's values as they are, so there is one reduction and nothing waits for it:
//   S = kept S + k (step v)';  out = S'q + skip v

struct SelectiveScan {
    States states;
    const float* x;      // (tokens, values, keys, queries)
    const float* mixed;  // (tokens, mixed_columns): the last are steps
    const float* rate;   // (heads)
    const float* bias;   // (heads)
    const float* skip;   // (heads)
    float* out;          // (tokens, heads x dim)
    int heads, groups, dim, state;
    int before;  // values of a state before its matrices
    int mixed_columns;
    int chunk;  // at most a warp's lanes
    int pad;
};

// Brings `count` tokens from `first` on into a stage: keys beside queries, values, then kept and the step.
template <int ROWS> DEVICE void bring_scan(const SelectiveScan& a, float* stage, int first, int count, int head, int column, int lane) {
    constexpr int PADDED = PARTS * ROWS, TOKEN = 2 * PADDED + TOKEN_REST;
    const long columns = a.heads * a.dim + 2 * a.groups * a.state;
    const int key = a.heads * a.dim + head / (a.heads / a.groups) * a.state;
    if (lane < count) {
        const float asked = a.mixed[(long)(first + lane + 1) * a.mixed_columns - a.heads + head];
        const float length = softplus(__fadd_rn(asked, a.bias[head]));
        float* token = stage + lane * TOKEN;
        token[2 * PADDED + COLUMNS] = expf(__fmul_rn(a.rate[head], length)), token[2 * PADDED + COLUMNS + 1] = length;
    }
#pragma unroll 4
    for (int t = 0; t < count; t++) {
        const float* row = a.x + (first + t) * columns;
        float* token = stage + t * TOKEN;
        for (int i = lane; i < PADDED; i += WARP) {
            const bool is_row = i < a.state;
            ((float2*)token)[i] = make_float2(is_row ? row[key + i] : 0.0f, is_row ? row[key + a.groups * a.state + i] : 0.0f);
        }
        if (lane < COLUMNS) token[2 * PADDED + lane] = column + lane < a.dim ? row[head * a.dim + column + lane] : 0.0f;
    }
}

template <int ROWS> DEVICE void selective_scan(const Step& step, const SelectiveScan& a) {
    constexpr int PADDED = PARTS * ROWS, TOKEN = 2 * PADDED + TOKEN_REST;
    DYNAMIC_SHARED(float4, ring);
    let_next_start();
    if ((int)blockIdx.y >= state_rows(step, a.states)) return wait_for_inputs();
    const RowState row = row_state(step, a.states, blockIdx.y);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int blocks = (a.dim + COLUMNS - 1) / COLUMNS, head = blockIdx.x / blocks, column = blockIdx.x % blocks * COLUMNS;
    const int chunks = (row.tokens + a.chunk - 1) / a.chunk;
    auto stage_of = [&](int chunk) { return (float*)ring + (chunk & 1) * a.chunk * TOKEN; };

    if (warp == COMPUTE_WARPS) {
        wait_for_inputs();
        bring_scan<ROWS>(a, stage_of(0), row.first, min(a.chunk, row.tokens), head, column, lane);
        __syncthreads();
        for (int chunk = 1; chunk <= chunks; chunk++) {
            const int start = chunk * a.chunk;
            if (chunk < chunks) bring_scan<ROWS>(a, stage_of(chunk), row.first + start, min(a.chunk, row.tokens - start), head, column, lane);
            __syncthreads();
        }
        return;
    }

    const int quad = lane % 2, part = lane / 2, own = column + warp * 8 + quad * 4;
    const int lanes_blocks = (a.dim + STATE_LANES - 1) / STATE_LANES;
    const bool there = own < lanes_blocks * STATE_LANES;
    const long at = a.before + ((long)head * lanes_blocks + own / STATE_LANES) * a.state * STATE_LANES + own % STATE_LANES;
    float share[ROWS][4];
    // What is read here no other kernel of this step writes, as in the delta rule.
    if (there && row.from >= 0) {
        const float* from = state_at(a.states, row.from) + at;
        load_share<ROWS>(share, from, part, a.state);
    } else {
#pragma unroll
        for (int j = 0; j < ROWS; j++) share[j][0] = share[j][1] = share[j][2] = share[j][3] = 0.0f;
    }
    const float skip = a.skip[head];
    wait_for_inputs();
    const int* saves = step.tables + row.saves;
    int saved = 0, due = row.count > 0 ? saves[0] : -1;
    // After the reduction a lane has the sum of this column of its four.
    const int mine = lane / 16 * 2 + lane / 8 % 2;
    const bool high = lane >= 16, odd = lane / 8 % 2, writes = lane % 8 < 2 && own + mine < a.dim;
    float* out = a.out + ((long)row.first * a.heads + head) * a.dim + own + mine;
    __syncthreads();
    for (int chunk = 0; chunk < chunks; chunk++) {
        const float* stage = stage_of(chunk);
        const int start = chunk * a.chunk, count = there ? min(a.chunk, row.tokens - start) : 0;
        for (int t = 0; t < count; t++) {
            const float* token = stage + t * TOKEN;
            const float kept = token[2 * PADDED + COLUMNS], length = token[2 * PADDED + COLUMNS + 1];
            const float4 values = *(const float4*)(token + 2 * PADDED + warp * 8 + quad * 4);
            const float changes[4] = {__fmul_rn(values.x, length), __fmul_rn(values.y, length), __fmul_rn(values.z, length), __fmul_rn(values.w, length)};
            float sums[4] = {};
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                const float2 both = ((const float2*)token)[part + j * PARTS];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    share[j][c] = __fmaf_rn(both.x, changes[c], __fmul_rn(share[j][c], kept));
                    sums[c] = __fmaf_rn(share[j][c], both.y, sums[c]);
                }
            }
            // Halves of the warp keep two columns, quarters one.
            float two[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float other = __shfl_xor_sync(ALL_LANES, high ? sums[c] : sums[c + 2], 16);
                two[c] = __fadd_rn(high ? sums[c + 2] : sums[c], other);
            }
            const float other = __shfl_xor_sync(ALL_LANES, odd ? two[0] : two[1], 8);
            float sum = __fadd_rn(odd ? two[1] : two[0], other);
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 4));
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
            const float value = high ? (odd ? values.w : values.z) : (odd ? values.y : values.x);
            if (writes) *out = __fmaf_rn(value, skip, sum);
            out += (long)a.heads * a.dim;
            if (due == start + t + 1) {
                store_share<ROWS>(share, state_at(a.states, saves[saved * SAVE_WORDS + 1]) + at, part, a.state);
                saved++;
                due = saved < row.count ? saves[saved * SAVE_WORDS] : -1;
            }
        }
        __syncthreads();
    }
    // What is left is where the next step goes on.
    if (there) store_share<ROWS>(share, state_at(a.states, row.to) + at, part, a.state);
}

// By the rows of a matrix that a lane has.
KERNEL __launch_bounds__(DELTA_THREADS) selective_scan_1(Step step, const __grid_constant__ SelectiveScan scan) { selective_scan<1>(step, scan); }
KERNEL __launch_bounds__(DELTA_THREADS) selective_scan_2(Step step, const __grid_constant__ SelectiveScan scan) { selective_scan<2>(step, scan); }
KERNEL __launch_bounds__(DELTA_THREADS) selective_scan_4(Step step, const __grid_constant__ SelectiveScan scan) { selective_scan<4>(step, scan); }
KERNEL __launch_bounds__(DELTA_THREADS) selective_scan_8(Step step, const __grid_constant__ SelectiveScan scan) { selective_scan<8>(step, scan); }
KERNEL __launch_bounds__(DELTA_THREADS) selective_scan_16(Step step, const __grid_constant__ SelectiveScan scan) { selective_scan<16>(step, scan); }

// ---- The selective scan of Mamba-1: grid (channels, rows), a thread per channel ----
//
// A channel's column of the matrix stays in registers through all tokens of the row.

struct ChannelScan {
    States states;
    const float* x;        // (tokens, channels)
    const float* keys;     // (tokens, state)
    const float* queries;  // (tokens, state)
    const float* steps;    // (tokens, channels)
    const float* rates;    // (state, channels)
    const float* bias;     // (channels)
    const float* skip;     // (channels)
    float* out;            // (tokens, channels)
    int channels, state;
    int before;  // values of a state before its matrix
    int pad;
};

template <int ROWS> DEVICE void channel_scan(const Step& step, const ChannelScan& a) {
    let_next_start();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_inputs();
    if ((int)blockIdx.y >= state_rows(step, a.states) || channel >= a.channels) return;
    const RowState row = row_state(step, a.states, blockIdx.y);
    const long at = a.before + (long)(channel / STATE_LANES) * a.state * STATE_LANES + channel % STATE_LANES;
    float share[ROWS], rates[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const bool there = i < a.state;
        share[i] = there && row.from >= 0 ? state_at(a.states, row.from)[at + i * STATE_LANES] : 0.0f;
        rates[i] = there ? a.rates[(long)i * a.channels + channel] : 0.0f;
    }
    const float bias = a.bias[channel], skip = a.skip[channel];
    const int* saves = step.tables + row.saves;
    int saved = 0, due = row.count > 0 ? saves[0] : -1;
    auto leave = [&](int state) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (i < a.state) state_at(a.states, state)[at + i * STATE_LANES] = share[i];
    };
    // The next token's, while this one is computed.
    float next_x = a.x[(long)row.first * a.channels + channel], next_step = a.steps[(long)row.first * a.channels + channel];
    for (int t = 0; t < row.tokens; t++) {
        const long token = row.first + t;
        const float x = next_x, length = softplus(__fadd_rn(next_step, bias)), change = __fmul_rn(x, length);
        if (t + 1 < row.tokens) next_x = a.x[(token + 1) * a.channels + channel], next_step = a.steps[(token + 1) * a.channels + channel];
        const float *keys = a.keys + token * a.state, *queries = a.queries + token * a.state;
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i >= a.state) break;
            share[i] = __fmaf_rn(keys[i], change, __fmul_rn(share[i], expf(__fmul_rn(rates[i], length))));
            sums[i % 4] = __fmaf_rn(share[i], queries[i], sums[i % 4]);
        }
        const float sum = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
        a.out[token * a.channels + channel] = __fmaf_rn(x, skip, sum);
        if (due == t + 1) {
            leave(saves[saved * SAVE_WORDS + 1]);
            saved++;
            due = saved < row.count ? saves[saved * SAVE_WORDS] : -1;
        }
    }
    leave(row.to);
}

// By the most rows of the matrix.
KERNEL __launch_bounds__(128) channel_scan_16(Step step, const __grid_constant__ ChannelScan scan) { channel_scan<16>(step, scan); }
KERNEL __launch_bounds__(128) channel_scan_32(Step step, const __grid_constant__ ChannelScan scan) { channel_scan<32>(step, scan); }
