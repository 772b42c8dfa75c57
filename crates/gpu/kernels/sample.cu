// Choosing a token of each row, as `compute::sample` specifies it.
//
// `adjust` (a block per row) changes single logits where they lie, and `restore` changes them back. `scan`: grid (SCANS,
// rows); each block takes a contiguous stretch of the vocabulary: the largest logit that the mask allows, the lowest id
// among equals, and what its log-probability needs. Greedy rows need no more: `choose`, one warp per row, merges the
// stretches in order, leaves the token in its slot for the next step and the result for the host.
// For the others `weigh`, in the same grid, adds up weights in bins by a logit's distance to the largest, and `draw`, a block
// per row, finds first where the candidates are cut and then the token: the bin, the part of the bin where it holds too
// many, then the place among the few left, sorted. Weights are whole numbers, the largest logit's 2^45: their sums are
// the same in any order.
#include "prelude.cuh"

#define SCANS 32         // as many as a warp has lanes
#define BINS 1024        // as many as `draw` has threads
#define BIN_WIDTH 16.0f  // bins of a unit of logits
#define ID_BITS 18

struct Row {
    int wanted, slot, vocab, mask_words;  // mask_words 0: no mask
    const u32* mask;
    double random;     // in [0, 1)
    double coldness;   // one divided by the temperature; 0: greedy
    double top_p;      // 1: all
    double log_min_p;  // minus infinity: all
    int top_k;         // 0: all
    int changes, changes_end;
    int pad;
};
// What is done to a logit; those of a token lie together, in their order.
struct Change {
    int token, kind;  // 0: a is added; 1: divided by a where positive, else multiplied; 2: a and then b are subtracted
    float before;     // the logit as it was, in a token's first
    int pad;
    double a, b;
};
// Running totals of one row, all zero between launches.
struct Bins {
    u64 hot[BINS], plain[BINS];  // weights at the temperature, and at temperature 1 where top-p asks for them
    u64 total;                   // of all candidates, at temperature 1
    u32 count[BINS];
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

KERNEL scan(const float* logits, int columns, const Row* rows, Scan* scans) {
    __shared__ Scan parts[32];
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.y];
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

// All stretches of a row together: a warp, every lane of which gets them.
DEVICE Scan merged(const Scan* scans) {
    Scan all = scans[threadIdx.x % WARP];
    for (int step = WARP / 2; step > 0; step /= 2) {
        float best = __shfl_xor_sync(0xffffffff, all.best, step);
        int id = __shfl_xor_sync(0xffffffff, all.id, step);
        if (better(all.best, all.id, best, id)) {
            all.best = best;
            all.id = id;
        }
        float max = __shfl_xor_sync(0xffffffff, all.max, step), sum = __shfl_xor_sync(0xffffffff, all.sum, step);
        float most = fmaxf(all.max, max);
        if (most > -INFINITY_F) all.sum = all.sum * expf(all.max - most) + sum * expf(max - most);
        all.max = most;
        all.broken |= __shfl_xor_sync(0xffffffff, all.broken, step);
    }
    return all;
}

DEVICE void put(const float* from, const Row& row, const Scan& all, int id, int* sampled, Chosen* chosen) {
    Chosen result;
    result.fault = all.broken ? 1 : all.id < 0 ? 2 : 0;
    result.token = result.fault ? 0 : id;
    result.logprob = result.fault ? 0.0f : from[id] - all.max - logf(all.sum);
    result.pad = 0;
    *chosen = result;
    sampled[row.slot] = result.token;
}

KERNEL choose(const float* logits, int columns, const Row* rows, const Scan* scans, int* sampled, Chosen* chosen) {
    let_next_start();
    wait_for_inputs();
    const Row row = rows[blockIdx.x];
    const Scan all = merged(scans + blockIdx.x * SCANS);
    if (threadIdx.x == 0) put(logits + (long)row.wanted * columns, row, all, all.id, sampled, chosen + blockIdx.x);
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
            const float most = __uint_as_float(0x7f7fffff);
            logit = fminf(fmaxf(__double2float_rn(to), -most), most);
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

// What may be drawn of a row.
struct Candidates {
    Row row;
    float largest;

    DEVICE_METHOD bool allowed(int id) const {
        return !row.mask_words || (id / 32 < row.mask_words && (row.mask[id / 32] >> (id % 32) & 1));
    }
    DEVICE_METHOD bool above_floor(float logit) const { return (double)logit >= __dadd_rn((double)largest, row.log_min_p); }
    DEVICE_METHOD u64 weight(float logit, double coldness) const {
        return (u64)(exp(__dmul_rn((double)logit - (double)largest, coldness)) * 35184372088832.0 + 0.5);
    }
    DEVICE_METHOD u64 plain(float logit) const { return row.top_p < 1.0 ? weight(logit, 1.0) : 0; }
    DEVICE_METHOD u64 hot(float logit) const { return weight(logit, row.coldness); }
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

KERNEL __launch_bounds__(512) weigh(const float* logits, int columns, const Row* rows, const Scan* scans, Bins* bins) {
    __shared__ u64 hot[BINS], plain[BINS];
    __shared__ u32 count[BINS];
    __shared__ u64 total;
    let_next_start();
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) {
        hot[i] = plain[i] = 0;
        count[i] = 0;
    }
    if (threadIdx.x == 0) total = 0;
    wait_for_inputs();
    const Scan all = merged(scans + blockIdx.y * SCANS);
    const Candidates of = {rows[blockIdx.y], all.best};
    if (of.row.coldness == 0.0 || all.broken || all.id < 0) return;
    __syncthreads();
    const float* from = logits + (long)of.row.wanted * columns;
    const int length = (of.row.vocab + SCANS - 1) / SCANS;
    const int start = blockIdx.x * length, end = min(start + length, of.row.vocab);
    u64 mine = 0;
    for (int id = start + threadIdx.x; id < end; id += blockDim.x) {
        const float logit = from[id];
        if (!of.allowed(id)) continue;
        const u64 weight = of.plain(logit);
        mine += weight;
        if (!of.above_floor(logit)) continue;
        const int bin = of.bin(logit);
        atomicAdd(&count[bin], 1);
        if (weight) atomicAdd(&plain[bin], weight);
        atomicAdd(&hot[bin], of.hot(logit));
    }
    if (mine) atomicAdd(&total, mine);
    __syncthreads();
    Bins* to = bins + blockIdx.y;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) {
        if (!count[i]) continue;
        atomicAdd(&to->count[i], count[i]);
        atomicAdd(&to->plain[i], plain[i]);
        atomicAdd(&to->hot[i], hot[i]);
    }
    if (threadIdx.x == 0 && total) atomicAdd(&to->total, total);
}

// Running totals of as many numbers as the block has threads, where they lie.
struct Sums {
    u64 hot[BINS], plain[BINS];
    u32 count[BINS];

    DEVICE_METHOD void clear() {
        hot[threadIdx.x] = plain[threadIdx.x] = 0;
        count[threadIdx.x] = 0;
        __syncthreads();
    }
    // Replaces numbers by the totals up to them.
    DEVICE_METHOD void run(u64 (*warps)[3]) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        __syncthreads();
        u64 own[3] = {hot[threadIdx.x], plain[threadIdx.x], count[threadIdx.x]};
        for (int step = 1; step < WARP; step *= 2)
            for (int i = 0; i < 3; i++) {
                const u64 before = __shfl_up_sync(0xffffffff, own[i], step);
                if (lane >= step) own[i] += before;
            }
        if (lane == WARP - 1)
            for (int i = 0; i < 3; i++) warps[warp][i] = own[i];
        __syncthreads();
        for (int w = 0; w < warp; w++)
            for (int i = 0; i < 3; i++) own[i] += warps[w][i];
        hot[threadIdx.x] = own[0];
        plain[threadIdx.x] = own[1];
        count[threadIdx.x] = (u32)own[2];
        __syncthreads();
    }
};

// What a block that draws works with.
struct Search {
    Candidates of;
    const float* from;  // the row's logits
    int columns;
    Sums* bins;   // all of them
    Sums* parts;  // of one bin, later of the sorted list
    u64 *keys, *sorted;
    u64 (*warps)[3];
    int *first_found, *listed;

    // The first thread for which something holds; BINS if for none.
    DEVICE_METHOD int first(bool holds) const {
        __syncthreads();
        if (threadIdx.x == 0) *first_found = BINS;
        __syncthreads();
        if (holds) atomicMin(first_found, (int)threadIdx.x);
        __syncthreads();
        return *first_found;
    }
    // Every candidate of a bin between two keys.
    template <class Body> DEVICE_METHOD void each(int bin, u64 low, u64 high, const Body& body) const {
        const bool whole = columns % 4 == 0;
        const int vocab = of.row.vocab;
#pragma unroll 4
        for (int id = threadIdx.x * 4; id < vocab; id += BINS * 4) {
            float four[4];
            if (whole) {
                const float4 v = *(const float4*)(from + id);
                four[0] = v.x; four[1] = v.y; four[2] = v.z; four[3] = v.w;
            } else {
                for (int i = 0; i < 4; i++) four[i] = id + i < vocab ? from[id + i] : 0.0f;
            }
            for (int i = 0; i < 4; i++) {
                if (id + i >= vocab || of.bin(four[i]) != bin || !of.allowed(id + i) || !of.above_floor(four[i])) continue;
                const u64 key = of.key(four[i], id + i);
                if (key >= low && key <= high) body(key, four[i]);
            }
        }
    }
    // The first candidate at which `holds(count, plain, hot)`, the totals up to it, is true, and its total of hot; false
    // where there is none.
    template <class Holds> DEVICE_METHOD bool find(const Holds& holds, u64& key, u64& reached) const {
        const int t = threadIdx.x;
        const int bin = first(holds(bins->count[t], bins->plain[t], bins->hot[t]));
        if (bin == BINS) return false;
        u64 hot = bin ? bins->hot[bin - 1] : 0, plain = bin ? bins->plain[bin - 1] : 0;
        u32 count = bin ? bins->count[bin - 1] : 0, left = bins->count[bin] - count;
        u64 low = 0, high = (1ull << (32 + ID_BITS)) - 1;
        while (left > BINS) {
            const int shift = max(0, 64 - __clzll(high - low) - 10);
            parts->clear();
            each(bin, low, high, [&](u64 key, float logit) {
                const u32 part = (u32)((key - low) >> shift);
                atomicAdd(&parts->count[part], 1);
                atomicAdd(&parts->plain[part], of.plain(logit));
                atomicAdd(&parts->hot[part], of.hot(logit));
            });
            parts->run(warps);
            const int part = first(holds(count + parts->count[t], plain + parts->plain[t], hot + parts->hot[t]));
            const u32 before = part ? parts->count[part - 1] : 0;
            left = parts->count[part] - before;
            count += before;
            plain += part ? parts->plain[part - 1] : 0;
            hot += part ? parts->hot[part - 1] : 0;
            low += (u64)part << shift;
            high = low + (1ull << shift) - 1;
            __syncthreads();
        }
        if (t == 0) *listed = 0;
        __syncthreads();
        each(bin, low, high, [&](u64 key, float) { keys[atomicAdd(listed, 1)] = key; });
        __syncthreads();
        const int n = *listed;
        if (t < n) {
            const u64 mine = keys[t];
            int rank = 0;
            for (int i = 0; i < n; i++) rank += keys[i] < mine;
            sorted[rank] = mine;
        }
        __syncthreads();
        const float logit = t < n ? of.logit(sorted[t]) : 0.0f;
        parts->hot[t] = t < n ? of.hot(logit) : 0;
        parts->plain[t] = t < n ? of.plain(logit) : 0;
        parts->count[t] = t < n;
        parts->run(warps);
        const int place =
            first(t < n && holds(count + parts->count[t], plain + parts->plain[t], hot + parts->hot[t]));
        key = sorted[place];
        reached = hot + parts->hot[place];
        return true;
    }
};

// Grid (rows), a thread for each bin.
KERNEL __launch_bounds__(BINS) draw(const float* logits, int columns, const Row* rows, const Scan* scans, Bins* bins,
                                    int* sampled, Chosen* chosen) {
    extern __shared__ uint4 room[];
    __shared__ u64 warps[WARP][3];
    __shared__ int first_found, listed;
    let_next_start();
    wait_for_inputs();
    const Scan all = merged(scans + blockIdx.x * SCANS);
    const Row row = rows[blockIdx.x];
    const float* from = logits + (long)row.wanted * columns;
    if (row.coldness == 0.0 || all.broken || all.id < 0) {
        if (threadIdx.x == 0) put(from, row, all, all.id, sampled, chosen + blockIdx.x);
        return;
    }
    Sums* sums = (Sums*)room;
    u64* keys = (u64*)(sums + 2);
    const Search search = {{row, all.best}, from, columns, sums, sums + 1, keys, keys + BINS, warps, &first_found, &listed};
    Bins* own = bins + blockIdx.x;
    const u64 total = own->total;
    sums->hot[threadIdx.x] = own->hot[threadIdx.x];
    sums->plain[threadIdx.x] = own->plain[threadIdx.x];
    sums->count[threadIdx.x] = own->count[threadIdx.x];
    __syncthreads();
    own->hot[threadIdx.x] = own->plain[threadIdx.x] = 0;
    own->count[threadIdx.x] = 0;
    if (threadIdx.x == 0) own->total = 0;
    sums->run(warps);

    u64 key = 0, kept = sums->hot[BINS - 1], reached = 0;
    if (row.top_k > 0 || row.top_p < 1.0) {
        const double enough = row.top_p * (double)total;
        const bool cut = search.find(
            [&](u32 count, u64 plain, u64) {
                return (row.top_k > 0 && count >= (u32)row.top_k) || (row.top_p < 1.0 && (double)plain >= enough);
            },
            key, reached);
        if (cut) kept = reached;
    }
    // Rounded up to the total it would be nobody's.
    const double wanted = fmin(row.random * (double)kept, (double)kept * (1.0 - 2.3e-16));
    search.find([&](u32, u64, u64 hot) { return (double)hot > wanted; }, key, reached);
    const int id = (int)(key & ((1 << ID_BITS) - 1));
    if (threadIdx.x == 0) put(from, row, all, id, sampled, chosen + blockIdx.x);
}
