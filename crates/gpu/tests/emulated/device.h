// CUDA C++ on a CPU: what the language and the runtime give a kernel. Every thread of a block is a fiber; barriers and
// warp operations switch between fibers. Which warps stall, and when asynchronous copies complete, is random, so that a
// missing barrier or wait shows. The chip's own instructions are in chip.h. Both end the program where a chip would
// fail: at an address that is misaligned or out of bounds.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <array>
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
#define __grid_constant__
// A section of their own, so that each block of a cluster can have its own in turn.
#define __shared__ static __attribute__((section("block_variables")))
// Weak, for kernels without any.
extern "C" __attribute__((weak)) char __start_block_variables[], __stop_block_variables[];

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct Dim3 { int x, y, z; };
static Dim3 gridDim, blockDim;

static float __uint_as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static uint32_t __float_as_uint(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static int __float2int_rn(float value) { return (int)lrintf(value); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fsub_rn(float a, float b) { return a - b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static float __double2float_rn(double value) { return (float)value; }
static float __double2float_ru(double value) {
    const float near = (float)value;
    return near < value ? nextafterf(near, INFINITY) : near;
}
static unsigned long long __double2ull_rn(double value) { return (unsigned long long)llrint(value); }
static unsigned long long __double2ull_rz(double value) { return (unsigned long long)value; }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
static int __float_as_int(float value) { return (int)__float_as_uint(value); }
static int __ffs(uint32_t bits) { return __builtin_ffs((int)bits); }
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }
static float rsqrtf(float value) { return (float)(1.0 / sqrt((double)value)); }
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
    return (uint32_t)((low | (uint64_t)high << 32) >> (by & 31));
}
static int __clzll(unsigned long long bits) { return bits ? __builtin_clzll(bits) : 64; }
static unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
static long max(long a, long b) { return a > b ? a : b; }
static long min(long a, long b) { return a < b ? a : b; }
static uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
static unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = low | (uint64_t)high << 32;
    uint32_t chosen = 0;
    for (int i = 0; i < 4; i++) chosen |= (uint32_t)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return chosen;
}

// Leaves a stack for another, until somebody comes back. `swapcontext` would call the system each time.
extern "C" void change_stack(void** left, void* next);
asm(R"(.text
change_stack:
    push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx
    ret
)");

namespace emulated {
enum { LANES = 32, THREADS_MAX = 1024, WARPS_MAX = THREADS_MAX / LANES, BLOCKS_MAX = 8, STACK = 64 << 10 };
// Shared memory of a block, and what is looked at behind it: nobody may write there.
enum { SHARED_MAX = 227 << 10, BEHIND = 4 << 10 };
// When asynchronous copies complete: when they are waited for, at once, or at random one or the other.
enum Copies { COPIES_LATE, COPIES_EARLY, COPIES_ANY };
static Copies copies;
// What copies may read, and how much shared memory a block has.
static const uint8_t *copied_begin, *copied_end;
static uint32_t shared_bytes;

struct Barrier { int come = 0; uint64_t phase = 0; };
struct Warp {
    Barrier come;
    alignas(16) uint8_t exchanged[2][LANES * 96];
};
struct Block {
    Dim3 place;
    Barrier come, sent;  // the second: once all that others send is there
    Barrier named[16];
    uint32_t bytes_sent, bytes_expected;
    uint64_t stalled;  // warps that do not run, a bit for each
    Warp warps[WARPS_MAX];
    uint8_t* shared;
    std::vector<char> variables;
    int any[2];  // of __syncthreads_or
};
struct Copy { uint32_t to; const uint8_t* from; int bytes; bool there; };
struct Fiber {
    char* stack;
    void* stopped;
    bool done;
    // It can go on once this barrier has gone on to its next phase.
    const Barrier* waits_for;
    uint64_t phase;
    Block* block;
    Dim3 thread;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
static Fiber fibers[BLOCKS_MAX][THREADS_MAX], *current;
static Block blocks[BLOCKS_MAX];
static Barrier of_cluster;
static int cluster_blocks;
static void* scheduler;
static void (*kernel)();

template <class... Values> [[noreturn]] static void fail(const char* what, Values... values) {
    printf(what, values...);
    exit(1);
}
static uint32_t chance(uint32_t below) {
    static uint64_t state = 88172645463325252ull;
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return (uint32_t)(state >> 16) % below;
}
// Any set of warps.
static uint64_t random_warps() { return (uint64_t)chance(1 << 16) | (uint64_t)chance(1 << 16) << 16; }
static void wait_for_phase(const Barrier& barrier, uint64_t phase) {
    current->waits_for = &barrier;
    current->phase = phase;
    while (barrier.phase == phase) change_stack(&current->stopped, scheduler);
}
static void arrive(Barrier& barrier, int all) {
    if (++barrier.come < all) return;
    barrier.come = 0;
    barrier.phase++;
}
static void wait(Barrier& barrier, int all) {
    const uint64_t phase = barrier.phase;
    arrive(barrier, all);
    wait_for_phase(barrier, phase);
}
static int lane() { return current->thread.x % LANES; }
// What every lane has of something. Of two places they take turns: nobody is two exchanges ahead of another.
template <class T> static const T* exchange(const T& own) {
    Warp& warp = current->block->warps[current->thread.x / LANES];
    static_assert(sizeof(T) * LANES <= sizeof warp.exchanged[0]);
    T* all = (T*)warp.exchanged[warp.come.phase % 2];
    all[lane()] = own;
    wait(warp.come, min(LANES, blockDim.x - current->thread.x / LANES * LANES));
    return all;
}

static uint8_t* shared() { return current->block->shared; }

static void start(Fiber& fiber, Block& block, int thread) {
    if (!fiber.stack) fiber.stack = (char*)aligned_alloc(16, STACK);
    // What `change_stack` takes from a stack: six registers, and where to go on.
    void** top = (void**)(fiber.stack + STACK) - 8;
    top[6] = (void*)+[] {
        kernel();
        current->done = true;
        change_stack(&current->stopped, scheduler);
    };
    fiber.stopped = top;
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.block = &block;
    fiber.thread = {thread, 0, 0};
    fiber.groups.clear();
    fiber.open.clear();
}
// Lets every thread of a block that can run do so, in random order, except those of stalled warps.
struct Round { int left, could, did; };
static void run_round(Block& block, Fiber* threads, Round& round) {
    const size_t bytes = block.variables.size();
    memcpy(__start_block_variables, block.variables.data(), bytes);
    int order[THREADS_MAX];
    for (int i = 0; i < blockDim.x; i++) {
        const int other = chance(i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    for (int i = 0; i < blockDim.x; i++) {
        Fiber& fiber = threads[order[i]];
        if (fiber.done || (fiber.waits_for && fiber.waits_for->phase == fiber.phase)) continue;
        round.could++;
        if (block.stalled >> order[i] / LANES & 1) continue;
        round.did++;
        current = &fiber;
        change_stack(&scheduler, fiber.stopped);
        round.left -= fiber.done;
    }
    memcpy(block.variables.data(), __start_block_variables, bytes);
}
// Runs `body` for every thread of `count` blocks from `first` on, concurrently: a cluster where they are several.
// Stalled warps stay so until no other can run.
static void run(Dim3 first, int count, int threads, void (*body)()) {
    kernel = body;
    of_cluster = Barrier();
    cluster_blocks = count;
    blockDim = {threads, 1, 1};
    if (shared_bytes > SHARED_MAX) fail("no block has %u bytes of shared memory\n", shared_bytes);
    for (int b = 0; b < count; b++) {
        Block& block = blocks[b];
        block.place = {first.x, first.y, first.z + b};
        block.come = block.sent = Barrier();
        std::fill_n(block.named, 16, Barrier());
        block.bytes_sent = block.bytes_expected = block.any[0] = block.any[1] = 0;
        block.stalled = random_warps();
        for (auto& warp : block.warps) warp.come = Barrier();
        if (!block.shared) block.shared = (uint8_t*)aligned_alloc(1024, SHARED_MAX + BEHIND);
        // NaN in every type.
        memset(block.shared, 0xff, shared_bytes + BEHIND);
        block.variables.assign(__stop_block_variables - __start_block_variables, (char)0xff);
        for (int i = 0; i < threads; i++) start(fibers[b][i], block, i);
    }
    for (Round round = {count * threads}; round.left > 0;) {
        round.could = round.did = 0;
        for (int i = 0, b = chance(count); i < count; i++, b = (b + 1) % count) run_round(blocks[b], fibers[b], round);
        if (round.could == 0) fail("threads wait for each other for ever\n");
        if (round.did > 0) continue;
        for (int b = 0; b < count; b++) blocks[b].stalled = random_warps();
    }
    for (int b = 0; b < count; b++) {
        const Block& block = blocks[b];
        if (block.bytes_sent != block.bytes_expected) fail("%u bytes are sent of %u\n", block.bytes_sent, block.bytes_expected);
        const uint8_t* behind = block.shared + shared_bytes;
        if (behind[0] != 0xff || memcmp(behind, behind + 1, BEHIND - 1)) fail("written behind %u bytes of shared memory\n", shared_bytes);
    }
}
}  // namespace emulated

#define threadIdx (emulated::current->thread)
#define blockIdx (emulated::current->block->place)
static void __syncthreads() { emulated::wait(emulated::current->block->come, blockDim.x); }
static int __syncthreads_or(int value) {
    emulated::Block& block = *emulated::current->block;
    const int at = block.come.phase % 2;
    block.any[at] |= value != 0;
    __syncthreads();
    const int any = block.any[at];
    __syncthreads();
    block.any[at] = 0;
    return any;
}
static void __syncwarp() { emulated::exchange(0); }
static void __threadfence() {}
template <class T> static T __shfl_sync(uint32_t, T value, int lane) { return emulated::exchange(value)[lane % emulated::LANES]; }
template <class T> static T __shfl_xor_sync(uint32_t, T value, int step) { return emulated::exchange(value)[emulated::lane() ^ step]; }
template <class T> static T __shfl_up_sync(uint32_t, T value, int step) {
    const T* all = emulated::exchange(value);
    return emulated::lane() >= step ? all[emulated::lane() - step] : value;
}
static uint32_t __ballot_sync(uint32_t, bool value) {
    const bool* all = emulated::exchange(value);
    uint32_t bits = 0;
    for (int i = 0; i < emulated::LANES; i++) bits |= (uint32_t)all[i] << i;
    return bits;
}
static bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }
template <class T> static T __reduce_add_sync(uint32_t, T value) {
    const T* all = emulated::exchange(value);
    T sum = 0;
    for (int i = 0; i < emulated::LANES; i++) sum += all[i];
    return sum;
}
template <class T> static T __reduce_min_sync(uint32_t, T value) {
    const T* all = emulated::exchange(value);
    return *std::min_element(all, all + emulated::LANES);
}
template <class T> static void atomicMin(T* at, T value) { *at = std::min(*at, value); }
// Fibers are switched at barriers only, so nothing comes between.
template <class T, class V> static T atomicAdd(T* at, V value) {
    const T before = *at;
    *at += value;
    return before;
}
