// out[r][n] = sum over k of x[r][k] * weight[n][k], for weights of one format (QUANT names its header).
//
// The columns of a tile of 16 rows are shared out in slices: slice s of S takes steps s, s + S, ... (a step is 128 or 256
// columns), and the slices' sums are added in their order. How many slices there are depends on the weight alone, so an
// output's order of summation does not depend on the batch. A warp's weights come through a ring of its own in shared
// memory, STAGES steps ahead; the first are on their way before the activations are there.
// One row of activations (`gemv_one`) is brought into the form of split.cuh by the block itself, a norm of it included. A
// unit is TILES tiles; where rows are gates, also their counterparts. A warp is a slice; where a weight has many units
// (WIDE is the number of slices, else 0) a block has several of them, otherwise one after the other.
// Several rows (`gemv_1` to `gemv_8`: up to four times as many) come in that form. A unit is a tile; a warp has one for
// itself (WIDE), or takes slices of its block's.
// Reads weight planes and activations; writes out (rows, columns) at out.first.
#include QUANT
#include "result.cuh"

#define SIDES (GATES ? 2 : 1)
#define PARTS (SIDES * TILES)  // tiles of 16 rows that a unit has
#define BYTES Quant::Bytes::BYTES
#define RECORDS (Quant::STEP / BLOCK)  // of a step

struct Inputs {
    const float* x;     // (rows, columns), for one row; else null
    const u8* records;  // (rows, records), else
    const float* norm;  // the weight of the norm that is due, or null
    int first, limit;   // the first row of the step that it holds, and how many it holds at most
    float eps;          // of the norm
    int tiles, slices;  // times 16 rows (where they are gates, without their counterparts); slices of each
    int pad;
};

// Stores one output, and where it is a gate also its counterpart's.
DEVICE void put(const Result& out, long r, int row, float sum, float other, float bias, float before) {
    const long to = r * out.columns + out.first + row;
    sum = __fadd_rn(sum, bias);
#if GATES
    const int below = out.pairs * 16;
    if (out.bias) other = __fadd_rn(other, out.bias[out.first + row + below]);
    out.values[to] = sum;
    out.values[to + below] = other;
    out.gated[r * below + row] = __fmul_rn(silu(sum), other);
#else
    out.values[to] = out.adds ? __fadd_rn(before, sum) : sum;
#endif
}

// Weights on their way to a warp: what is fetched next. `Next` moves it on; beyond the last there is nothing.
template <class Next> struct Ring {
    u32 first, to;
    const u8* start;
    const u8* staged;
    Next next;

    DEVICE_METHOD Ring(u8* ring, int lane, const Next& next) : start(ring), staged(ring), next(next) {
        first = to = (u32)__cvta_generic_to_shared(ring) + lane * 16;
    }
    DEVICE_METHOD void fetch(const Part& part, int lane) {
        if (next.has()) {
            Quant::Bytes::fetch(part, next.place(), to, lane);
            to = to == first + (STAGES - 1) * BYTES ? first : to + BYTES;
            next.move();
        }
        copy_group();
    }
    // Multiplies with the oldest, and fetches another in its place.
    template <class X> DEVICE_METHOD void multiply(const Part& part, const X& x, u32 step, int lane, float acc[X::N]) {
        copy_wait<STAGES - 1>();
        __syncwarp();
        Quant::template multiply<X>(staged, x, step, lane, acc);
        __syncwarp();
        fetch(part, lane);
        staged = staged == start + (STAGES - 1) * BYTES ? start : staged + BYTES;
    }
};

#if ONE_ROW
// Brings 128 columns into the form that products read, and leaves the sum of squares where a norm is due.
DEVICE void put_record(u8* record, float v[4], const float* norm, const float weight[4], float* squares, int lane) {
    if (norm) {
        const float sum = take_norm(v, weight);
        if (lane == 0) *squares = sum;
    }
    if (Quant::FLOATS) put_floats(record, v, lane);
    else put_digits<Quant::SUMS>(record, v, lane);
}

// For each unit, each step of the slice, each tile. Beyond the last tile, the last one again.
struct Order {
    int unit, units, unit_step, tiles, pairs, at_part;
    u32 at, slice, slices, steps;

    DEVICE_METHOD bool has() const { return unit < units; }
    DEVICE_METHOD u32 place() const {
        return (min(unit * TILES + at_part % TILES, tiles - 1) + (at_part >= TILES ? pairs : 0)) * steps + at;
    }
    DEVICE_METHOD void move() {
        if (PARTS > 1 && ++at_part < PARTS) return;
        at_part = 0;
        at += slices;
        if (at < steps) return;
        at = slice;
        unit += unit_step;
    }
};

template <bool FLOATS> struct One { typedef OneRow Columns; };
template <> struct One<true> { typedef Rows<1, true> Columns; };

// Code that runs once is fetched once: what is rolled up here starts sooner.
KERNEL __launch_bounds__(THREADS, BLOCKS) gemv_one(Part part, Step step, int wanted, Inputs in, Result out) {
    typedef One<Quant::FLOATS>::Columns X;
    // Records of the row: all (WIDE), or those of a step for each warp; (warp, stage) tiles; sums, in two places by turns:
    // (warp, side, tile, 16); squares: (records).
    extern __shared__ uint4 room[];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int slices = WIDE ? WIDE : warps, slice = warp % slices, group = warp / slices, groups = warps / slices;
    const u32 steps = part.groups / RECORDS;
    const int units = (in.tiles + TILES - 1) / TILES;
    u8* records = (u8*)room + (WIDE ? 0 : warp * RECORDS * RECORD);
    u8* rings = (u8*)room + (WIDE ? part.groups : warps * RECORDS) * RECORD;
    float* sums = (float*)(rings + warps * STAGES * BYTES);
    float* squares = sums + 2 * warps * PARTS * 16;
    const int unit_first = blockIdx.x * groups + group, unit_step = gridDim.x * groups;
    Ring<Order> ring(rings + warp * STAGES * BYTES, lane,
                     Order{slice < steps ? unit_first : units, units, unit_step, in.tiles, out.pairs, 0, (u32)slice, (u32)slice,
                           (u32)slices, steps});
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) ring.fetch(part, lane);
    let_next_start();

    // The counts of a step are there before its first kernel, and so is what a model is made of.
    const int count = min(step_rows(step, wanted) - in.first, in.limit), columns = part.columns;
    float v[4], weight[4];  // of the next record
    auto load_norm = [&](u32 at) { load_four<!Quant::FLOATS>(in.norm, at * BLOCK + lane * 4, columns, weight); };
    auto load_x = [&](u32 at) { load_four<!Quant::FLOATS>(in.x, at * BLOCK + lane * 4, columns, v); };
    const u32 record_first = WIDE ? warp : slice * RECORDS;
    if (in.norm && record_first < part.groups) load_norm(record_first);
    wait_for_inputs();
    if (count <= 0) return;

    if (record_first < part.groups) load_x(record_first);
    float scale = 1.0f;  // of the norm, for warps that end rows
    if (WIDE) {
#pragma unroll 1
        for (int at = warp; at < part.groups; at += warps) {
            u8* record = records + at * RECORD;
            put_record(record, v, in.norm, weight, (float*)(record + RECORD_SQUARES), lane);
            const int next = at + warps;
            if (next < part.groups) {
                load_x(next);
                if (in.norm) load_norm(next);
            }
        }
        __syncthreads();
        if (in.norm) scale = inverse_norm((float*)(records + RECORD_SQUARES), RECORD / 4, part.groups, columns, in.eps);
    }
    const X x(records, 0, 1, lane);
    int turn = 0;
#pragma unroll 1
    for (int unit = unit_first; unit < units; unit += unit_step) {
        // Thread i of a unit's ends row i, tile after tile.
        const int end_at = threadIdx.x % (slices * WARP), row = unit * TILES * 16 + end_at;
        const bool ends = end_at < TILES * 16 && row < part.rows && row < in.tiles * 16;
        float bias = 0.0f, before = 0.0f;
        if (ends) {
            if (out.bias) bias = out.bias[out.first + row];
            if (!GATES && out.adds) before = load_fresh(out.values + (long)in.first * out.columns + out.first + row);
        }
        float acc[PARTS][X::N];
        for (int i = 0; i < PARTS; i++)
            for (int n = 0; n < X::N; n++) acc[i][n] = 0.0f;
#pragma unroll 1
        for (u32 at = slice; at < steps; at += slices) {
            // A warp of one step has it already.
            if (!WIDE && (unit == unit_first || steps > slices)) {
#pragma unroll 1
                for (int i = 0; i < RECORDS; i++) {
                    const u32 now = at * RECORDS + i;
                    put_record(records + i * RECORD, v, in.norm, weight, squares + now, lane);
                    const u32 next = i + 1 < RECORDS ? now + 1 : (at + slices < steps ? at + slices : slice) * RECORDS;
                    load_x(next);
                    if (in.norm) load_norm(next);
                }
            }
            // Turned round instead of indexed: the code is there once.
#pragma unroll 1
            for (int i = 0; i < PARTS; i++) {
                ring.multiply(part, x, WIDE ? at : 0, lane, acc[0]);
#pragma unroll
                for (int n = 0; n < X::N; n++) {
                    const float done = acc[0][n];
#pragma unroll
                    for (int j = 0; j + 1 < PARTS; j++) acc[j][n] = acc[j + 1][n];
                    acc[PARTS - 1][n] = done;
                }
            }
        }
        // One place is read while the other is written.
        float* mine = sums + (turn * groups + group) * slices * PARTS * 16;
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < PARTS * 2; i++) {
            const float sum = x.total(acc[i / 2], 0, i % 2);
            if (lane % 4 == 0) mine[(slice * PARTS + i / 2) * 16 + lane / 4 + 8 * (i % 2)] = sum;
        }
        if (WIDE) asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(WIDE * WARP) : "memory");
        else __syncthreads();
        if (!WIDE && in.norm && warp * WARP < TILES * 16 && unit == unit_first)
            scale = inverse_norm(squares, 1, part.groups, columns, in.eps);
        if (!ends) continue;
        float sum = 0.0f, other = 0.0f;
#pragma unroll 2
        for (int w = 0; w < slices; w++) {
            sum = __fadd_rn(sum, mine[w * PARTS * 16 + end_at]);
            if (GATES) other = __fadd_rn(other, mine[(w * PARTS + TILES) * 16 + end_at]);
        }
        put(out, in.first, row, __fmul_rn(sum, scale), __fmul_rn(other, scale), bias, before);
    }
}
#else
// For each unit, each slice, each step.
struct Order {
    int unit, units, unit_step;
    u32 at, slice, slice_first, slice_step, slices, steps;

    DEVICE_METHOD bool has() const { return unit < units; }
    DEVICE_METHOD u32 place() const { return unit * steps + at; }
    DEVICE_METHOD void move() {
        at += slices;
        if (at < steps) return;
        slice += slice_step;
        // Slices beyond the steps are empty.
        if (slice >= slices || slice >= steps) {
            slice = slice_first;
            unit += unit_step;
        }
        at = slice;
    }
};

template <int NT> DEVICE void gemv(const Part& part, const Step& step, int wanted, const Inputs& in, const Result& out) {
    typedef Rows<NT, Quant::FLOATS> X;
    // (warp, stage) tiles; sums: (slice, row of activations, 16)
    extern __shared__ uint4 room[];
    __shared__ float inverse[X::ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const u32 steps = part.groups / RECORDS, slices = in.slices;
    const u32 slice_first = WIDE ? 0 : warp, slice_step = WIDE ? 1 : warps;
    float* sums = (float*)((u8*)room + warps * STAGES * BYTES);
    const int unit_first = WIDE ? blockIdx.x * warps + warp : blockIdx.x, unit_step = gridDim.x * (WIDE ? warps : 1);
    const bool idle = slice_first >= slices || slice_first >= steps;
    Ring<Order> ring((u8*)room + warp * STAGES * BYTES, lane,
                     Order{idle ? in.tiles : unit_first, in.tiles, unit_step, slice_first, slice_first, slice_first, slice_step,
                           slices, steps});
    for (int stage = 0; stage < STAGES; stage++) ring.fetch(part, lane);
    const int first = blockIdx.y * X::ROWS;
    const int count = min(step_rows(step, wanted) - in.first, in.limit) - first;
    wait_for_inputs();
    if (count <= 0) return;
    const long stride = (long)part.groups * RECORD;
    if (in.norm) {
        for (int r = warp; r < min(count, X::ROWS); r += warps) {
            const float* from = (const float*)(in.records + (first + r) * stride + RECORD_SQUARES);
            const float scale = inverse_norm(from, RECORD / 4, part.groups, part.columns, in.eps);
            if (lane == 0) inverse[r] = scale;
        }
        __syncthreads();
    }
    const X x(in.records + first * stride, stride, count, lane);
    auto finish = [&](int r, int row, float sum) {
        if (row >= part.rows || r >= count) return;
        const long to = in.first + first + r;
        const float bias = out.bias ? out.bias[out.first + row] : 0.0f;
        const float before = out.adds ? out.values[to * out.columns + out.first + row] : 0.0f;
        put(out, to, row, __fmul_rn(sum, in.norm ? inverse[r] : 1.0f), 0.0f, bias, before);
    };
#pragma unroll 1
    for (int unit = unit_first; unit < in.tiles; unit += unit_step) {
        float totals[NT * 2];
        for (int i = 0; i < NT * 2; i++) totals[i] = 0.0f;
#pragma unroll 1
        for (u32 slice = slice_first; slice < slices; slice += slice_step) {
            float acc[X::N];
            for (int n = 0; n < X::N; n++) acc[n] = 0.0f;
#pragma unroll 1
            for (u32 at = slice; at < steps; at += slices) ring.multiply(part, x, at, lane, acc);
#pragma unroll
            for (int i = 0; i < NT * 2; i++) {
                const float sum = x.total(acc, i / 2, i % 2);
                if (WIDE) totals[i] = __fadd_rn(totals[i], sum);
                else sums[(slice * X::ROWS + i / 2 * 4 + lane % 4) * 16 + lane / 4 + 8 * (i % 2)] = sum;
            }
        }
        if (unit + unit_step >= in.tiles) let_next_start();
#if WIDE
#pragma unroll
        for (int i = 0; i < NT * 2; i++) finish(i / 2 * 4 + lane % 4, unit * 16 + lane / 4 + 8 * (i % 2), totals[i]);
#else
        __syncthreads();
#pragma unroll 1
        for (int at = threadIdx.x; at < X::ROWS * 16; at += blockDim.x) {
            float sum = 0.0f;
#pragma unroll 4
            for (u32 s = 0; s < slices; s++) sum = __fadd_rn(sum, sums[s * X::ROWS * 16 + at]);
            finish(at / 16, unit * 16 + at % 16, sum);
        }
        __syncthreads();
#endif
    }
    if (unit_first >= in.tiles) let_next_start();
}

KERNEL __launch_bounds__(THREADS, 1) gemv_1(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<1>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(THREADS, 1) gemv_2(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<2>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(THREADS, 1) gemv_4(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<4>(part, step, wanted, in, out);
}
KERNEL __launch_bounds__(THREADS, 1) gemv_8(Part part, Step step, int wanted, Inputs in, Result out) {
    gemv<8>(part, step, wanted, in, out);
}
#endif
