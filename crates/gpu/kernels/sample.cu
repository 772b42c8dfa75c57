// Sampling a token for each row, as `compute::sample` specifies it. See docs/kernels.md#sample.
//
// `adjust` (a block per row) changes single logits in place (penalties, biases), and `restore` undoes it. `scan`: grid
// (stretches of the vocabulary, rows); a block holds its stretch in registers: the largest logit that the mask allows,
// the weight of the allowed relative to it, and what a log-probability needs where one is asked for. `draw`, a block
// per row, has the token of a greedy row from that, and of another the stretch, which it goes through; it leaves the
// token in its slot for the next step and the result for the host. Rows with top-k or top-p have their cut found in
// between: `weigh` adds up weights in bins by a logit's distance to the largest, and `cut`, a block per row, looks for
// the last that is kept in one of them. Where anything was cut, by min-p too, `keep` weighs the stretches anew. Weights
// are whole numbers (`whole.rs`): their sums are the same in any order. With CUTS the file is `weigh` and `cut`, which
// take the longest to compile, without it the others.
#include "prelude.cuh"

#define STRETCH 4096
#define STRETCHES 64      // two for each lane of a warp
#define THREADS 256       // of a block that holds a stretch
#define QUADS 4           // four logits each of a thread of it
#define BINS 1024         // as many as `cut` has threads
#define BIN_WIDTH 32.0f   // bins of a unit of logits
#define LISTED 4096       // keys that `cut` holds
#define ID_BITS 18
#define LOWEST __uint_as_float(0xff7fffff)

struct Row {
    int wanted, slot, vocab, mask_words;  // mask_words 0: no mask
    const u32* mask;
    u64 random;
    double top_p;      // 1: all
    double log_min_p;  // minus infinity: all
    float halvings;    // of a weight for a unit of logits; 0: greedy
    int top_k;         // 0: all
    int changes, changes_end;
    int logprob;  // whether it is asked for
    int pad;
};
// What is done to a logit; those of a token lie together, in their order.
struct Change {
    int token, kind;  // 0: a is added; 1: divided by a where positive, else multiplied; 2: a and then b are subtracted
    float before;     // the logit as it was, in a token's first
    int pad;
    double a, b;
};
// Of one row. Totals are all zero between launches.
struct Bins {
    u64 plain[BINS];  // weights at temperature 1 where top-p asks for them
    u64 total;        // of all candidates
    u64 cut;          // the key of the last that is kept
    u32 count[BINS];  // where top-k asks for them
};
struct Stretch {
    u64 total;       // weights of what may be drawn, relative to `best`
    float best;      // of the allowed; minus infinity: none
    float max, sum;  // of all: the maximum, and the sum of exponentials relative to it
    int id;          // the lowest with `best`, of greedy rows
    int broken, pad;
};
struct Chosen {
    int token, fault;  // 0 none, 1 logits, 2 nothing allowed
    float logprob;
    int pad;
};

// 2^40 times 2^x, where x is by how many halvings a logit is below the largest. `whole.rs` has the same operations.
DEVICE float unrounded(float logit, float largest, float halvings) {
    const float to_integer = 12582912.0f;
    const float x = fmaxf(__fmul_rn(__fsub_rn(logit, largest), halvings), -64.0f);
    const float shifted = __fadd_rn(x, to_integer);
    const float rest = __fsub_rn(x, __fsub_rn(shifted, to_integer));
    float power = __uint_as_float(0x3aaddd06);
    power = __fadd_rn(__fmul_rn(power, rest), __uint_as_float(0x3c1e7544));
    power = __fadd_rn(__fmul_rn(power, rest), __uint_as_float(0x3d635ba9));
    power = __fadd_rn(__fmul_rn(power, rest), __uint_as_float(0x3e75fcde));
    power = __fadd_rn(__fmul_rn(power, rest), __uint_as_float(0x3f317215));
    const float mantissa = __fadd_rn(__fmul_rn(power, rest), 1.0f);
    return __uint_as_float(__float_as_uint(mantissa) + (__float_as_uint(shifted) << 23) + (40u << 23));
}
// A sum of weights, less than 4096 of them: how often 2^20, and what is left of each, which is at most half of that.
struct Sum {
    u32 high;
    int low;

    DEVICE_METHOD void add(float weight) {
        // Added to a smaller number each rounds it, the first to a multiple of 2^20.
        const float to_high = 13194139533312.0f, to_integer = 12582912.0f;
        const float high_part = __fadd_rn(weight, to_high);
        const float rest = __fsub_rn(weight, __fsub_rn(high_part, to_high));
        high += __float_as_uint(high_part) - __float_as_uint(to_high);
        low += __float_as_int(__fadd_rn(rest, to_integer)) - __float_as_int(to_integer);
    }
    DEVICE_METHOD u64 whole() const { return ((u64)high << 20) + (u64)(long long)low; }
    // Of a warp, for each lane.
    DEVICE_METHOD u64 of_warp() const {
        return Sum{__reduce_add_sync(ALL_LANES, high), __reduce_add_sync(ALL_LANES, low)}.whole();
    }
};
// The weight of one logit.
DEVICE u64 weight(float logit, float largest, float halvings) {
    Sum sum = {0, 0};
    sum.add(unrounded(logit, largest, halvings));
    return sum.whole();
}
#define HALVINGS_OF_1 1.442695040888963387f

// Numbers whose order is that of floats.
DEVICE u32 ascending(float value) {
    const u32 bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
DEVICE float from_ascending(u32 bits) { return __uint_as_float(bits >> 31 ? bits & 0x7fffffff : ~bits); }
// Over a block of `THREADS`; every thread gets the result.
DEVICE u32 block_max(u32 value, u32* room) {
    value = warp_max(value);
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = value;
    __syncthreads();
    for (int w = 0; w < THREADS / WARP; w++) value = max(value, room[w]);
    return value;
}

// A stretch of a row's logits as a block of `THREADS` holds it; minus infinity for what may not be drawn.
struct Held {
    float logits[QUADS][4];
    int first;  // the thread's first id

    // The ids of a thread: every 4 * THREADS, so that a warp reads what lies together, or one after the other.
    template <bool APART> DEVICE_METHOD int id(int quad) const { return first + quad * (APART ? 4 * THREADS : 4); }
    template <bool APART> DEVICE_METHOD void load(const float* from, int columns, int vocab, int stretch) {
        first = stretch * STRETCH + threadIdx.x * (APART ? 4 : 4 * QUADS);
        if (columns % 4 == 0 && (stretch + 1) * STRETCH <= vocab) {
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                const float4 v = *(const float4*)(from + id<APART>(q));
                logits[q][0] = v.x; logits[q][1] = v.y; logits[q][2] = v.z; logits[q][3] = v.w;
            }
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; q++)
                for (int i = 0; i < 4; i++) logits[q][i] = id<APART>(q) + i < vocab ? from[id<APART>(q) + i] : -INFINITY_F;
        }
    }
    // Minus infinity below the vocabulary's end is broken too.
    template <bool APART> DEVICE_METHOD bool broken(int vocab, int stretch) const {
        const bool whole = (stretch + 1) * STRETCH <= vocab;
        float sum = 0.0f;
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            for (int i = 0; i < 4; i++)
                if (whole || id<APART>(q) + i < vocab) sum = fmaf(logits[q][i], 0.0f, sum);
        return sum != 0.0f;
    }
    template <bool APART> DEVICE_METHOD void allow(const Row& row) {
        if (!row.mask_words) return;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int at = id<APART>(q);
            const u32 bits = at / 32 < row.mask_words ? row.mask[at / 32] >> at % 32 : 0;
            for (int i = 0; i < 4; i++)
                if (!(bits >> i & 1)) logits[q][i] = -INFINITY_F;
        }
    }
    // Takes away what is below `floor`, and what comes behind the last that is kept: smaller, or as large with a larger
    // id.
    template <bool APART> DEVICE_METHOD void keep(float floor, float last, int last_id) {
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            for (int i = 0; i < 4; i++) {
                const float logit = logits[q][i];
                const bool kept = logit >= floor && (logit > last || (logit == last && id<APART>(q) + i <= last_id));
                if (!kept) logits[q][i] = -INFINITY_F;
            }
    }
    DEVICE_METHOD float largest() const {
        float most = -INFINITY_F;
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            for (int i = 0; i < 4; i++) most = fmaxf(most, logits[q][i]);
        return most;
    }
    DEVICE_METHOD Sum weight(float largest, float halvings) const {
        Sum sum = {0, 0};
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            for (int i = 0; i < 4; i++) sum.add(unrounded(logits[q][i], largest, halvings));
        return sum;
    }
};

DEVICE bool is_cut(const Row& row) { return row.top_k > 0 || row.top_p < 1.0; }
DEVICE bool is_filtered(const Row& row) { return is_cut(row) || row.log_min_p > -(double)INFINITY_F; }
// The lowest logit that min-p keeps, and never minus infinity.
DEVICE float floor_of(const Row& row, float largest) {
    return fmaxf(__double2float_ru(__dadd_rn((double)largest, row.log_min_p)), LOWEST);
}

#if !CUTS
KERNEL __launch_bounds__(THREADS) scan(const float* logits, int columns, const Row* rows, Stretch* stretches) {
    __shared__ u32 bests[THREADS / WARP], maxima[THREADS / WARP], ids[THREADS / WARP];
    __shared__ u64 totals[THREADS / WARP];
    __shared__ float sums[WARP];
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.y];
    if (blockIdx.x * STRETCH >= row.vocab) return;
    const float* from = logits + (long)row.wanted * columns;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Held held;
    held.load<true>(from, columns, row.vocab, blockIdx.x);
    Stretch out = {0, 0.0f, 0.0f, 0.0f, 0, 0, 0};
    out.broken = __syncthreads_or(held.broken<true>(row.vocab, blockIdx.x));
    if (row.logprob) {
        out.max = from_ascending(block_max(ascending(held.largest()), maxima));
        float sum = 0.0f;
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            for (int i = 0; i < 4; i++) sum += expf(held.logits[q][i] - out.max);
        out.sum = block_sum(sum, sums);
    }
    held.allow<true>(row);
    out.best = from_ascending(block_max(ascending(held.largest()), bests));
    if (row.halvings == 0.0f) {
        u32 lowest = 0x7fffffff;
#pragma unroll
        for (int q = QUADS - 1; q >= 0; q--)
            for (int i = 3; i >= 0; i--)
                if (held.logits[q][i] == out.best) lowest = held.id<true>(q) + i;
        lowest = __reduce_min_sync(ALL_LANES, lowest);
        if (lane == 0) ids[warp] = lowest;
        __syncthreads();
        for (int w = 0; w < THREADS / WARP; w++) lowest = min(lowest, ids[w]);
        out.id = lowest;
    } else if (!is_filtered(row) && out.best > -INFINITY_F) {
        const u64 total = held.weight(out.best, row.halvings).of_warp();
        if (lane == 0) totals[warp] = total;
        __syncthreads();
        for (int w = 0; w < THREADS / WARP; w++) out.total += totals[w];
    }
    if (threadIdx.x == 0) stretches[blockIdx.y * STRETCHES + blockIdx.x] = out;
}

// Weighs what is left of a stretch of rows from which something was cut.
KERNEL __launch_bounds__(THREADS) keep(const float* logits, int columns, const Row* rows, Stretch* stretches, const Bins* bins) {
    __shared__ u64 totals[THREADS / WARP];
    __shared__ u32 maxima[THREADS / WARP];
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.y];
    if (blockIdx.x * STRETCH >= row.vocab || row.halvings == 0.0f || !is_filtered(row)) return;
    Stretch* own = stretches + blockIdx.y * STRETCHES;
    const int count = (row.vocab + STRETCH - 1) / STRETCH;
    const float mine = threadIdx.x < count ? own[threadIdx.x].best : -INFINITY_F;
    const float largest = from_ascending(block_max(ascending(mine), maxima));
    const float best = own[blockIdx.x].best, floor = floor_of(row, largest);
    const u64 key = is_cut(row) ? bins[blockIdx.y].cut : ~0ull;
    const u32 bits = (u32)(key >> ID_BITS);
    const float last = key == ~0ull ? -INFINITY_F : __uint_as_float(bits >> 31 ? bits : ~bits & 0x7fffffff);
    const int last_id = (int)(key & ((1 << ID_BITS) - 1));
    u64 total = 0;
    if (best >= floor && best >= last) {
        Held held;
        held.load<true>(logits + (long)row.wanted * columns, columns, row.vocab, blockIdx.x);
        held.allow<true>(row);
        held.keep<true>(floor, last, last_id);
        const u64 of_warp = held.weight(best, row.halvings).of_warp();
        if (threadIdx.x % WARP == 0) totals[threadIdx.x / WARP] = of_warp;
        __syncthreads();
        for (int w = 0; w < THREADS / WARP; w++) total += totals[w];
    }
    if (threadIdx.x == 0) own[blockIdx.x].total = total;
}
#endif

// What is known of a row once it was scanned; every lane of every warp gets it.
struct Known {
    float largest;
    bool broken, nothing;
    int chosen;  // the first stretch that has the largest
};
DEVICE Known known(const Row& row, const Stretch* own) {
    const int lane = threadIdx.x % WARP, count = (row.vocab + STRETCH - 1) / STRETCH;
    const bool has[2] = {lane < count, lane + WARP < count};
    const float best[2] = {has[0] ? own[lane].best : -INFINITY_F, has[1] ? own[lane + WARP].best : -INFINITY_F};
    const bool broken = (has[0] && own[lane].broken) || (has[1] && own[lane + WARP].broken);
    Known all;
    all.largest = from_ascending(warp_max(ascending(fmaxf(best[0], best[1]))));
    all.broken = __any_sync(ALL_LANES, broken);
    all.nothing = !(all.largest > -INFINITY_F);
    const u32 first = __ballot_sync(ALL_LANES, best[0] == all.largest);
    const u32 second = __ballot_sync(ALL_LANES, best[1] == all.largest);
    all.chosen = first ? __ffs(first) - 1 : WARP + __ffs(second) - 1;
    return all;
}

// What may be drawn of a row with top-k or top-p.
struct Candidates {
    Row row;
    float largest, floor;

    DEVICE_METHOD u64 plain(float logit) const { return weight(logit, largest, HALVINGS_OF_1); }
    // The larger the logit, the lower the bin.
    DEVICE_METHOD int bin(float logit) const { return min(BINS - 1, (int)((largest - logit) * BIN_WIDTH)); }
    // Ascending keys are descending logits, then ascending ids.
    DEVICE_METHOD static u64 key(float logit, int id) {
        const u32 bits = __float_as_uint(__fadd_rn(logit, 0.0f));
        return (u64)(bits >> 31 ? bits : ~bits & 0x7fffffff) << ID_BITS | id;
    }
    DEVICE_METHOD static float logit(u64 key) {
        const u32 bits = (u32)(key >> ID_BITS);
        return __uint_as_float(bits >> 31 ? bits : ~bits & 0x7fffffff);
    }
};

// Totals of as many bins as `cut` has threads. Shared memory adds 32 bits at a time.
struct Totals {
    u32 low[BINS], high[BINS], count[BINS];

    DEVICE_METHOD void clear() {
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) low[i] = high[i] = count[i] = 0;
    }
    DEVICE_METHOD void add(bool counted, int at, u64 weight) {
        if (counted) atomicAdd(&count[at], 1);
        if (weight) {
            const u32 part = (u32)weight;
            const u32 carry = atomicAdd(&low[at], part) > ~part;
            const u32 more = (u32)(weight >> 32) + carry;
            if (more) atomicAdd(&high[at], more);
        }
    }
};

#if CUTS
// Grid (any number of blocks, rows).
KERNEL __launch_bounds__(THREADS) weigh(const float* logits, int columns, const Row* rows, const Stretch* stretches, Bins* bins) {
    __shared__ Totals totals;
    __shared__ u64 all_total;
    let_next_start();
    totals.clear();
    if (threadIdx.x == 0) all_total = 0;
    wait_for_inputs();
    const Row row = rows[blockIdx.y];
    if (row.halvings == 0.0f || !is_cut(row)) return;
    const Known all = known(row, stretches + blockIdx.y * STRETCHES);
    if (all.broken || all.nothing) return;
    const Candidates of = {row, all.largest, floor_of(row, all.largest)};
    __syncthreads();
    u64 mine = 0;
    const int count = (row.vocab + STRETCH - 1) / STRETCH;
    for (int stretch = blockIdx.x; stretch < count; stretch += gridDim.x) {
        Held held;
        held.load<true>(logits + (long)row.wanted * columns, columns, row.vocab, stretch);
        held.allow<true>(row);
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            for (int i = 0; i < 4; i++) {
                const float logit = held.logits[q][i];
                const u64 weight = row.top_p < 1.0 ? of.plain(logit) : 0;
                mine += weight;
                if (logit >= of.floor) totals.add(row.top_k > 0, of.bin(logit), weight);
            }
    }
    for (int step = WARP / 2; step > 0; step /= 2) mine += __shfl_xor_sync(ALL_LANES, mine, step);
    if (threadIdx.x % WARP == 0 && mine) atomicAdd(&all_total, mine);
    __syncthreads();
    Bins* to = bins + blockIdx.y;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) {
        const u64 plain = (u64)totals.high[i] << 32 | totals.low[i];
        if (plain) atomicAdd(&to->plain[i], plain);
        if (totals.count[i]) atomicAdd(&to->count[i], totals.count[i]);
    }
    if (threadIdx.x == 0 && all_total) atomicAdd(&to->total, all_total);
}

// A number for each thread of `cut`, and the totals up to them.
struct Running {
    u64 plain[BINS];
    u32 count[BINS];

    // Every thread brings its own.
    DEVICE_METHOD void run(u64 plain_own, u32 count_own, u64 (*warps)[2]) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        for (int step = 1; step < WARP; step *= 2) {
            const u64 before = __shfl_up_sync(ALL_LANES, plain_own, step);
            const u32 count_before = __shfl_up_sync(ALL_LANES, count_own, step);
            if (lane >= step) {
                plain_own += before;
                count_own += count_before;
            }
        }
        __syncthreads();
        if (lane == WARP - 1) {
            warps[warp][0] = plain_own;
            warps[warp][1] = count_own;
        }
        __syncthreads();
        for (int w = 0; w < warp; w++) {
            plain_own += warps[w][0];
            count_own += (u32)warps[w][1];
        }
        plain[threadIdx.x] = plain_own;
        count[threadIdx.x] = count_own;
        __syncthreads();
    }
};

// What a block of `cut` works with.
struct Search {
    Candidates of;
    double enough;
    const float* from;  // the row's logits
    int columns;
    Totals* parts;
    Running* running;
    u64* keys;  // `LISTED`
    u64 (*warps)[2];
    int *found, *listed, *looked_at;
    int stretches;  // how many of `looked_at`

    // What is left to look through, and the totals before it.
    u64 low, high, plain;
    u32 count;

    DEVICE_METHOD bool holds(u32 count, u64 plain) const {
        return (of.row.top_k > 0 && count >= (u32)of.row.top_k) || (of.row.top_p < 1.0 && (double)plain >= enough);
    }
    // The first thread for which something holds; BINS if for none.
    DEVICE_METHOD int first(bool holds) const {
        __syncthreads();
        if (threadIdx.x == 0) *found = BINS;
        __syncthreads();
        const u32 lanes = __ballot_sync(ALL_LANES, holds);
        if (lanes && threadIdx.x % WARP == 0) atomicMin(found, (int)threadIdx.x + __ffs(lanes) - 1);
        __syncthreads();
        return *found;
    }
    // Every candidate of a bin between `low` and `high`.
    template <class Body> DEVICE_METHOD void each(int bin, const Body& body) const {
        const bool whole = columns % 4 == 0;
        const Row& row = of.row;
#pragma unroll 4
        for (int s = 0; s < stretches; s++) {
            const int id = looked_at[s] * STRETCH + threadIdx.x * 4;
            float four[4];
            if (whole && id + 4 <= row.vocab) {
                const float4 v = *(const float4*)(from + id);
                four[0] = v.x; four[1] = v.y; four[2] = v.z; four[3] = v.w;
            } else {
                for (int i = 0; i < 4; i++) four[i] = id + i < row.vocab ? from[id + i] : -INFINITY_F;
            }
            for (int i = 0; i < 4; i++) {
                if (!(four[i] >= of.floor) || of.bin(four[i]) != bin) continue;
                const int word = (id + i) / 32;
                if (row.mask_words && (word >= row.mask_words || !(row.mask[word] >> (id + i) % 32 & 1))) continue;
                const u64 key = of.key(four[i], id + i);
                if (key >= low && key <= high) body(key, four[i]);
            }
        }
    }
    // The same of the first `n` of `keys`.
    template <class Body> DEVICE_METHOD void each_listed(int n, const Body& body) const {
        for (int i = threadIdx.x; i < n; i += BINS)
            if (keys[i] >= low && keys[i] <= high) body(keys[i], of.logit(keys[i]));
    }
    // Goes on with the part in which `holds` becomes true, of those in `keys` or, where n is 0, of all in the bin. How
    // many are left.
    DEVICE_METHOD u32 narrow(int bin, int n) {
        const int shift = max(0, 64 - __clzll(high - low) - 10);
        parts->clear();
        __syncthreads();
        const auto add = [&](u64 key, float logit) {
            parts->add(true, (int)((key - low) >> shift), of.row.top_p < 1.0 ? of.plain(logit) : 0);
        };
        if (n) each_listed(n, add);
        else each(bin, add);
        __syncthreads();
        const int t = threadIdx.x;
        running->run((u64)parts->high[t] << 32 | parts->low[t], parts->count[t], warps);
        const int part = first(holds(count + running->count[t], plain + running->plain[t]));
        u32 left = running->count[part];
        if (part) {
            left -= running->count[part - 1];
            count += running->count[part - 1];
            plain += running->plain[part - 1];
        }
        low += (u64)part << shift;
        high = low + (1ull << shift) - 1;
        __syncthreads();
        return left;
    }
    // The candidates between `low` and `high` in `keys`, if they have room there: how many. `low` and `high` move to
    // the first and the last of them.
    DEVICE_METHOD u32 list(int bin) {
        __syncthreads();
        if (threadIdx.x == 0) *listed = 0;
        __syncthreads();
        u64 least = ~0ull, most = 0;
        each(bin, [&](u64 key, float) {
            const int at = atomicAdd(listed, 1);
            if (at < LISTED) keys[at] = key;
            least = min(least, key);
            most = max(most, key);
        });
        for (int step = WARP / 2; step > 0; step /= 2) {
            least = min(least, __shfl_xor_sync(ALL_LANES, least, step));
            most = max(most, __shfl_xor_sync(ALL_LANES, most, step));
        }
        if (threadIdx.x % WARP == 0) {
            warps[threadIdx.x / WARP][0] = least;
            warps[threadIdx.x / WARP][1] = most;
        }
        __syncthreads();
        for (int w = 0; w < WARP; w++) {
            least = min(least, warps[w][0]);
            most = max(most, warps[w][1]);
        }
        low = least;
        high = most;
        __syncthreads();
        return *listed;
    }
    // The key of the last that is kept, of a bin in which that is.
    DEVICE_METHOD u64 last_kept(int bin) {
        u32 left = list(bin);
        while (left > LISTED) {
            narrow(bin, 0);
            left = list(bin);
        }
        const int n = left;
        while (left > WARP) left = narrow(bin, n);
        // The few that are left: a lane each.
        __syncthreads();
        if (threadIdx.x == 0) *listed = 0;
        __syncthreads();
        u64* few = &warps[0][0];
        each_listed(n, [&](u64 key, float) { few[atomicAdd(listed, 1)] = key; });
        __syncthreads();
        u64 last = ~0ull;
        if (threadIdx.x < left) {
            const u64 mine = few[threadIdx.x];
            u32 up_to = 0;
            u64 sum = 0;
            for (int i = 0; i < left; i++)
                if (few[i] <= mine) {
                    up_to++;
                    if (of.row.top_p < 1.0) sum += of.plain(of.logit(few[i]));
                }
            if (holds(count + up_to, plain + sum)) last = mine;
        }
        for (int step = WARP / 2; step > 0; step /= 2) last = min(last, __shfl_xor_sync(ALL_LANES, last, step));
        return last;  // of the first warp
    }
};

// Grid (rows), a thread for each bin.
KERNEL __launch_bounds__(BINS, 2) cut(const float* logits, int columns, const Row* rows, const Stretch* stretches, Bins* bins) {
    DYNAMIC_SHARED(uint4, room);
    __shared__ u64 warps[WARP][2];
    __shared__ int found, listed, looked_at[STRETCHES];
    __shared__ u32 looked_lanes[STRETCHES / WARP];
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.x];
    if (row.halvings == 0.0f || !is_cut(row)) return;
    const Stretch* scanned = stretches + blockIdx.x * STRETCHES;
    const Known all = known(row, scanned);
    if (all.broken || all.nothing) return;
    const int t = threadIdx.x;
    Bins* own = bins + blockIdx.x;
    const double enough = row.top_p * (double)own->total;
    const u64 plain = own->plain[t];
    const u32 count = own->count[t];
    __syncthreads();
    own->plain[t] = 0;
    own->count[t] = 0;
    if (t == 0) own->total = 0;
    Totals* parts = (Totals*)room;
    Running* running = (Running*)(parts + 1);
    Search search = {{row, all.largest, floor_of(row, all.largest)}, enough, logits + (long)row.wanted * columns, columns,
                     parts, running, (u64*)(running + 1), warps, &found, &listed, looked_at, 0, 0, 0, 0, 0};
    running->run(plain, count, warps);
    const int bin = search.first(search.holds(running->count[t], running->plain[t]));
    if (bin == BINS) {
        if (t == 0) own->cut = ~0ull;
        return;
    }
    if (bin) {
        search.count = running->count[bin - 1];
        search.plain = running->plain[bin - 1];
    }
    search.high = (1ull << (32 + ID_BITS)) - 1;
    // Stretches whose largest logit is in a bin behind have nothing in this one.
    const int lane = t % WARP;
    const float best = t < STRETCHES && t * STRETCH < row.vocab ? scanned[t].best : -INFINITY_F;
    const bool looked = best > -INFINITY_F && search.of.bin(best) <= bin;
    const u32 lanes = __ballot_sync(ALL_LANES, looked);
    if (t < STRETCHES && lane == 0) looked_lanes[t / WARP] = lanes;
    __syncthreads();
    const int before = t < WARP ? 0 : __popc(looked_lanes[0]);
    if (looked) looked_at[before + __popc(lanes & ((1u << lane) - 1))] = t;
    __syncthreads();
    search.stretches = __popc(looked_lanes[0]) + __popc(looked_lanes[1]);
    const u64 key = search.last_kept(bin);
    if (t == 0) own->cut = key;
}
#else

// Grid (rows), a block that holds a stretch.
KERNEL __launch_bounds__(THREADS) draw(const float* logits, int columns, const Row* rows, const Stretch* stretches,
                                       const Bins* bins, int* sampled, Chosen* chosen) {
    __shared__ u64 totals[THREADS / WARP], beyond_shared;
    __shared__ int stretch_shared, token;
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.x];
    const Stretch* own = stretches + blockIdx.x * STRETCHES;
    const float* from = logits + (long)row.wanted * columns;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Known all = known(row, own);
    const int fault = all.broken ? 1 : all.nothing ? 2 : 0;
    if (fault || row.halvings == 0.0f) {
        if (threadIdx.x == 0) token = fault ? 0 : own[all.chosen].id;
    } else {
        if (warp == 0) {
            // Two stretches for a lane.
            const int count = (row.vocab + STRETCH - 1) / STRETCH;
            u64 total[2] = {0, 0}, share[2];
            for (int i = 0; i < 2; i++) {
                const int at = 2 * lane + i;
                if (at < count) total[i] = own[at].total;
                share[i] = 0;
                if (total[i]) {
                    const double by = (double)unrounded(own[at].best, all.largest, row.halvings);
                    share[i] = __double2ull_rn(__dmul_rn(__dmul_rn((double)total[i], by), 1.0 / 1099511627776.0));
                }
            }
            u64 running = share[0] + share[1];
            for (int step = 1; step < WARP; step *= 2) {
                const u64 before = __shfl_up_sync(ALL_LANES, running, step);
                if (lane >= step) running += before;
            }
            const u64 wanted = __umul64hi(row.random, __shfl_sync(ALL_LANES, running, WARP - 1));
            const u64 starts[2] = {running - share[0] - share[1], running - share[1]};
            for (int i = 0; i < 2; i++) {
                if (wanted < starts[i] || wanted - starts[i] >= share[i]) continue;
                const double left = (double)(wanted - starts[i]);
                const u64 beyond = __double2ull_rz(__dmul_rn(left, __ddiv_rn((double)total[i], (double)share[i])));
                beyond_shared = min(beyond, total[i] - 1);
                stretch_shared = 2 * lane + i;
            }
        }
        __syncthreads();
        const int stretch = stretch_shared;
        const u64 beyond = beyond_shared;
        const float best = own[stretch].best;
        Held held;
        held.load<false>(from, columns, row.vocab, stretch);
        held.allow<false>(row);
        if (is_filtered(row)) {
            const u64 key = is_cut(row) ? bins[blockIdx.x].cut : ~0ull;
            const float last = key == ~0ull ? -INFINITY_F : Candidates::logit(key);
            held.keep<false>(floor_of(row, all.largest), last, (int)(key & ((1 << ID_BITS) - 1)));
        }
        const u64 mine = held.weight(best, row.halvings).whole();
        u64 running = mine;
        for (int step = 1; step < WARP; step *= 2) {
            const u64 before = __shfl_up_sync(ALL_LANES, running, step);
            if (lane >= step) running += before;
        }
        if (lane == WARP - 1) totals[warp] = running;
        __syncthreads();
        for (int w = 0; w < warp; w++) running += totals[w];
        u64 sum = running - mine;
        if (beyond >= sum && beyond < running) {
            bool found = false;
#pragma unroll
            for (int q = 0; q < QUADS; q++)
                for (int i = 0; i < 4; i++) {
                    sum += weight(held.logits[q][i], best, row.halvings);
                    if (!found && sum > beyond) {
                        found = true;
                        token = held.id<false>(q) + i;
                    }
                }
        }
    }
    __syncthreads();
    if (warp > 0) return;
    Chosen result = {token, fault, 0.0f, 0};
    if (row.logprob && !fault) {
        const int count = (row.vocab + STRETCH - 1) / STRETCH;
        const float max[2] = {lane < count ? own[lane].max : -INFINITY_F, lane + WARP < count ? own[lane + WARP].max : -INFINITY_F};
        const float most = from_ascending(warp_max(ascending(fmaxf(max[0], max[1]))));
        float sum = lane < count ? own[lane].sum * expf(max[0] - most) : 0.0f;
        if (lane + WARP < count) sum += own[lane + WARP].sum * expf(max[1] - most);
        result.logprob = from[token] - most - logf(warp_sum(sum));
    }
    if (lane == 0) {
        chosen[blockIdx.x] = result;
        sampled[row.slot] = result.token;
    }
}

KERNEL adjust(float* logits, int columns, const Row* rows, Change* changes) {
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.x];
    for (int i = row.changes + threadIdx.x; i < row.changes_end; i += blockDim.x) {
        const int token = changes[i].token;
        if (i > row.changes && changes[i - 1].token == token) continue;
        float* at = logits + (long)row.wanted * columns + token;
        float logit = *at;
        changes[i].before = logit;
        if (!(fabsf(logit) < INFINITY_F)) continue;  // for `scan` to find
        for (int j = i; j < row.changes_end && changes[j].token == token; j++) {
            const Change change = changes[j];
            double to = logit;
            if (change.kind == 0) to = __dadd_rn(to, change.a);
            else if (change.kind == 1) to = to > 0.0 ? __ddiv_rn(to, change.a) : __dmul_rn(to, change.a);
            else to = __dsub_rn(__dsub_rn(to, change.a), change.b);
            // What would leave the finite numbers stops at the last of them.
            logit = fminf(fmaxf(__double2float_rn(to), LOWEST), -LOWEST);
        }
        *at = logit;
    }
}

KERNEL restore(float* logits, int columns, const Row* rows, const Change* changes) {
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.x];
    for (int i = row.changes + threadIdx.x; i < row.changes_end; i += blockDim.x)
        if (i == row.changes || changes[i - 1].token != changes[i].token)
            logits[(long)row.wanted * columns + changes[i].token] = changes[i].before;
}
#endif
