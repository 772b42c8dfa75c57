// A block of a CUDA kernel on a CPU: a fiber for each thread, barriers and operations of a warp as switches between them. Which
// warps stand still, and when copies into shared memory are done, is left to chance, so that a barrier or a wait that is
// missing is seen. Functions that kernels write in the chip's own instructions have stand-ins here, by their names.
#pragma once
#include <immintrin.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct Place { int x, y, z; };
static Place blockIdx, gridDim, blockDim;

static float __uint_as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static uint32_t __float_as_uint(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static int __float2int_rn(float value) { return (int)lrintf(value); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static int max(int a, int b) { return a > b ? a : b; }
static uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }
// 8-bit floats are not emulated.
static uint32_t __byte_perm(uint32_t, uint32_t, uint32_t) { abort(); }

namespace emulated {
enum { THREADS = 128, LANES = 32, WARPS = THREADS / LANES, STACK = 256 << 10, SHARED_BYTES = 220 << 10 };
static const Place BLOCK = {THREADS, 1, 1};
// When copies are done: once they are waited for, at once, or now this, now that.
enum Copies { LATE, EARLY, ANY };
static Copies copies;

struct Copy { uint32_t to; const uint8_t* from; int bytes; bool there; };
struct Fiber {
    ucontext_t context;
    char* stack;
    bool done;
    Place thread;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
struct Barrier { int come = 0; uint64_t turn = 0; };

static Fiber fibers[THREADS], *current;
static ucontext_t scheduler;
static Barrier of_block, of_warp[WARPS];
static uint32_t exchanged[WARPS][LANES][8];
static uint8_t* shared = (uint8_t*)aligned_alloc(1024, SHARED_BYTES);

static uint32_t chance(uint32_t below) {
    static uint64_t state = 88172645463325252ull;
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return (uint32_t)(state >> 16) % below;
}
static void wait(Barrier& barrier, int all) {
    const uint64_t turn = barrier.turn;
    if (++barrier.come == all) {
        barrier.come = 0;
        barrier.turn++;
        return;
    }
    while (barrier.turn == turn) swapcontext(&current->context, &scheduler);
}
static int lane() { return current->thread.x % LANES; }
static int warp() { return current->thread.x / LANES; }
static void wait_for_warp() { wait(of_warp[warp()], LANES); }
// What every lane has of something.
template <int COUNT> static void exchange(const uint32_t (&own)[COUNT], uint32_t (&all)[LANES][COUNT]) {
    std::copy_n(own, COUNT, exchanged[warp()][lane()]);
    wait_for_warp();
    for (int i = 0; i < LANES; i++) std::copy_n(exchanged[warp()][i], COUNT, all[i]);
    wait_for_warp();
}

// Kernels run one after the other, and heads whose columns are whole times 16 have no padding.
static void let_next_start() {}
static void wait_for_inputs() {}
static void clear_padding(uint32_t, int) {}
static float f16_to_f32(uint16_t bits) { return _cvtsh_ss(bits); }
static uint16_t f32_to_f16(float value) { return _cvtss_sh(value, 0); }
static uint32_t f16_pair(float x, float y) { return f32_to_f16(x) | (uint32_t)f32_to_f16(y) << 16; }
static float power_of_two(float x) { return exp2f(x); }
template <class T> static T load_fresh(const T* at) { return *at; }
static uint32_t shared_address(const void* at) { return (uint32_t)((const uint8_t*)at - shared); }
static uint32_t warp_most(uint32_t value) {
    uint32_t all[LANES][1], most = 0;
    exchange<1>({value}, all);
    for (auto& one : all) most = std::max(most, one[0]);
    return most;
}

static void finish(const Copy& copy) {
    if (copy.there) memcpy(shared + copy.to, copy.from, copy.bytes);
    else memset(shared + copy.to, 0, copy.bytes);
}
static void copy_piece(uint32_t to, const uint8_t* from, bool there) {
    const Copy copy = {to, from, 16, there};
    if (copies == EARLY || (copies == ANY && chance(2))) finish(copy);
    else current->open.push_back(copy);
}
static void copy_group() { current->groups.push_back(std::move(current->open)); current->open.clear(); }
static void copy_wait(size_t left) {
    while (current->groups.size() > left) {
        for (auto& copy : current->groups.front()) finish(copy);
        current->groups.erase(current->groups.begin());
    }
}

// `ldmatrix`: lanes 8j to 8j + 7 say where the rows of matrix j are.
static void load(uint32_t* m, int matrices, bool turned, uint32_t at) {
    uint32_t all[LANES][1];
    exchange<1>({at}, all);
    for (int j = 0; j < matrices; j++) {
        auto value = [&](int row, int column) -> uint32_t {
            uint16_t bits;
            memcpy(&bits, shared + all[j * 8 + row][0] + column * 2, 2);
            return bits;
        };
        const int g = lane() / 4, t = lane() % 4 * 2;
        m[j] = turned ? value(t, g) | value(t + 1, g) << 16 : value(g, t) | value(g, t + 1) << 16;
    }
    wait_for_warp();
}
static void load_matrices(uint32_t m[4], uint32_t at) { load(m, 4, false, at); }
static void load_turned_matrices(uint32_t m[4], uint32_t at) { load(m, 4, true, at); }
// `mma.sync` m16n8k16; sums of 16 products are rounded once.
static void mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    uint32_t all[LANES][6];
    exchange<6>({a[0], a[1], a[2], a[3], b0, b1}, all);
    auto half = [](uint32_t word, int which) { return (double)f16_to_f32((uint16_t)(word >> 16 * which)); };
    for (int e = 0; e < 4; e++) {
        const int row = lane() / 4 + e / 2 * 8, column = lane() % 4 * 2 + e % 2;
        double sum = 0;
        for (int k = 0; k < 16; k++) {
            const uint32_t left = all[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8], right = all[column * 4 + k % 8 / 2][4 + k / 8];
            sum += half(left, k % 2) * half(right, k % 2);
        }
        d[e] = (float)(d[e] + sum);
    }
}

// Runs `thread` for every thread of a block. Some warps stand still until the others can do no more.
static void run_block(Place block, void (*thread)()) {
    blockIdx = block;
    memset(shared, 0xff, SHARED_BYTES);
    of_block = Barrier();
    std::fill_n(of_warp, (int)WARPS, Barrier());
    static void (*body)();
    body = thread;
    for (int i = 0; i < THREADS; i++) {
        Fiber& fiber = fibers[i];
        fiber.done = false;
        fiber.thread = {i, 0, 0};
        fiber.groups.clear();
        fiber.open.clear();
        if (!fiber.stack) fiber.stack = (char*)malloc(STACK);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, [] {
            body();
            current->done = true;
            swapcontext(&current->context, &scheduler);
        }, 0);
    }
    int order[THREADS], left = THREADS, still = chance((1 << WARPS) - 1);
    for (int i = 0; i < THREADS; i++) order[i] = i;
    int stuck = 0;
    for (uint64_t before = 0; left > 0;) {
        for (int i = THREADS - 1; i > 0; i--) std::swap(order[i], order[chance(i + 1)]);
        for (int i : order) {
            if (fibers[i].done || still >> i / LANES & 1) continue;
            current = &fibers[i];
            swapcontext(&scheduler, &current->context);
            left -= current->done;
        }
        uint64_t now = of_block.turn * 257 + of_block.come + left * 65537ull;
        for (auto& barrier : of_warp) now = now * 31 + barrier.turn * 64 + barrier.come;
        stuck = now == before ? stuck + 1 : 0;
        if (stuck > 0) still = chance((1 << WARPS) - 1);
        if (stuck > 10000) {
            printf("threads wait for each other for ever\n");
            exit(1);
        }
        before = now;
    }
}
}  // namespace emulated

#define threadIdx (emulated::current->thread)
static void __syncthreads() { emulated::wait(emulated::of_block, emulated::THREADS); }
static float __shfl_xor_sync(uint32_t, float value, int step) {
    uint32_t all[emulated::LANES][1];
    emulated::exchange<1>({__float_as_uint(value)}, all);
    return __uint_as_float(all[emulated::lane() ^ step][0]);
}
static unsigned long __cvta_generic_to_shared(const void* at) { return emulated::shared_address(at); }
