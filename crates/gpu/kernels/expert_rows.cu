// The experts of each token for few rows per expert and weights of one format (QUANT names its header): the product of
// gemv.cu's `gemv_several`, with the same bits, for one expert after another.
//
// A persistent kernel: blocks take items in turn, as many tiles of 16 rows of an expert's weights as a block has warps,
// and up to ROWS of its rows of activations. Both go through shared memory a step at a time, STAGES - 1 steps ahead,
// across the ends of items. A warp has a tile and adds its split-K slices in order. SHARERS blocks are resident on a
// multiprocessor. Reads weight planes and converted rows (form.cu, row after row); writes out (places, columns) at
// out.first. See docs/kernels.md#expert_rows.
#include QUANT
#include "experts.cuh"
#include "form.cuh"
#include "result.cuh"

#define BYTES Quant::Bytes::BYTES
// Rows of STEP columns in shared memory lie so far apart that eight lanes read from all banks.
#define ROW_BYTES (Quant::STEP * 2 + 64)
#define NT (ROWS / 8)  // times eight rows of activations

KERNEL __launch_bounds__(THREADS, SHARERS) expert_rows(Part part, Stack stack, const u8* values, const float* factors, Result out) {
    const int CHUNKS = Quant::STEP / 8;  // of 16 bytes
    // (stage): (row) activations, (warp) weights.
    DYNAMIC_SHARED(uint4, smem);
    __shared__ int before[EXPERTS_MAX + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int steps = part.groups * BLOCK / Quant::STEP, tiles = (part.rows + 15) / 16, across = (tiles + warps - 1) / warps;
    const int stage = ROWS * ROW_BYTES + warps * BYTES;
    u8* base = (u8*)smem;
    const float unscale = Quant::unscale(part);
    let_next_start();
    wait_for_inputs();
    if (warp == 0) count_groups<ROWS>(stack, before);
    __syncthreads();
    const int total = before[stack.count] * across;
    auto source = [&](int place) { return stack.gathers ? (stack.list[place] >> 3) / stack.each : place; };

    // What is fetched next.
    int next_at = blockIdx.x, next_step = 0, next_stage = 0;
    Item next;
    if (next_at < total) next = item_of<ROWS>(stack, before, next_at, across);
    auto fetch = [&] {
        if (next_at < total) {
            const u32 to = shared_address(base + next_stage * stage);
            const int tile = next.tile * warps + warp;
            if (tile < tiles) {
                const u32 from = (u32)(next.expert * tiles + tile) * steps + next_step;
                Quant::Bytes::fetch(part, from, to + ROWS * ROW_BYTES + warp * BYTES + lane * 16, lane);
            }
            const long stride = (long)part.groups * (BLOCK * 2);
            // Beyond the last row is anything: its results are unused.
            for (int i = threadIdx.x; i < min(ROWS, next.end - next.place) * CHUNKS; i += blockDim.x) {
                const int chunk = i % CHUNKS, r = i / CHUNKS;
                const u8* from = values + source(next.place + r) * stride + next_step * (Quant::STEP * 2) + chunk * 16;
                copy_async<16>(to + r * ROW_BYTES + chunk * 16, from);
            }
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
            if (++next_step == steps) {
                next_step = 0;
                next_at += gridDim.x;
                if (next_at < total) next = item_of<ROWS>(stack, before, next_at, across);
            }
        }
        copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) fetch();

    int now = 0;
#pragma unroll 1
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const Item item = item_of<ROWS>(stack, before, at, across);
        const int tile = item.tile * warps + warp;
        float sum[NT][4];
#pragma unroll 1
        for (int slice = 0; slice < SLICES; slice++) {
            float acc[NT][4];
#pragma unroll
            for (int i = 0; i < NT * 4; i++) acc[i / 4][i % 4] = 0.0f;
            const int length = (slice + 1) * steps / SLICES - slice * steps / SLICES;
#pragma unroll 1
            for (int k_step = 0; k_step < length; k_step++) {
                copy_wait<STAGES - 2>();
                __syncthreads();
                fetch();
                const u8* staged = base + now * stage;
                now = now + 1 == STAGES ? 0 : now + 1;
                if (tile >= tiles) continue;
                const u8* x = staged + lane / 4 * ROW_BYTES + lane % 4 * 16;
                uint4 b[NT];
                Quant::fragments(staged + ROWS * ROW_BYTES + warp * BYTES, lane, [&](int k, const u32 a[4]) {
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) {
                        if (k % 2 == 0) b[nt] = *(const uint4*)(x + nt * 8 * ROW_BYTES + k * 32);
                        mma_f16(acc[nt], a, k % 2 ? b[nt].z : b[nt].x, k % 2 ? b[nt].w : b[nt].y);
                    }
                });
            }
#pragma unroll
            for (int i = 0; i < NT * 4; i++)
                sum[i / 4][i % 4] = slice == 0 ? acc[i / 4][i % 4] : __fadd_rn(sum[i / 4][i % 4], acc[i / 4][i % 4]);
        }
#pragma unroll
        for (int i = 0; i < NT * 4; i++) {
            const int place = item.place + i / 4 * 8 + lane % 4 * 2 + i % 2, n = tile * 16 + lane / 4 + i % 4 / 2 * 8;
            if (place >= item.end || n >= part.rows) continue;
            const int to = out.first + n;
            const float bias = out.bias ? out.bias[(long)item.expert * out.columns + to] : 0.0f;
            const float value = unscaled(sum[i / 4][i % 4], factors[source(place)], unscale);
            out.values[(long)place * out.columns + to] = __fadd_rn(value, bias);
        }
    }
}
