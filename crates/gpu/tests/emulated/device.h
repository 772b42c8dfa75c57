// Blocks of a CUDA kernel on a CPU: a fiber for each thread, barriers and operations of a warp as switches between them. Which
// warps stand still, and when copies into shared memory are done, is left to chance, so that a barrier or a wait that is
// missing is seen. Functions that kernels write in the chip's own instructions have stand-ins here, by their names; they
// end the program where the chip would fail: at an address that is not aligned, or not within what it should be.
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
// A section of their own, so that each block of a cluster can have its own in turn.
#define __shared__ static __attribute__((section("block_variables")))
extern "C" char __start_block_variables[], __stop_block_variables[];

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct Place { int x, y, z; };
static Place gridDim, blockDim;

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
enum { LANES = 32, THREADS_MAX = 128, WARPS_MAX = THREADS_MAX / LANES, BLOCKS_MAX = 8, STACK = 64 << 10 };
// Shared memory of a block, and what is looked at behind it: nobody may write there.
enum { SHARED_MAX = 227 << 10, BEHIND = 4 << 10 };
// When copies are done: once they are waited for, at once, or now this, now that.
enum Copies { LATE, EARLY, ANY };
static Copies copies;
// What copies may read, and how much shared memory a block has.
static const uint8_t *copied_begin, *copied_end;
static uint32_t shared_bytes;

struct Barrier { int come = 0; uint64_t turn = 0; };
struct Warp {
    Barrier come;
    alignas(16) uint8_t exchanged[2][LANES * 96];
};
struct Block {
    Place place;
    Barrier come, sent;  // the second: once all that others send is there
    uint32_t bytes_sent, bytes_expected;
    int still;  // warps that stand still, a bit for each
    Warp warps[WARPS_MAX];
    uint8_t* shared;
    std::vector<char> variables;
};
struct Copy { uint32_t to; const uint8_t* from; int bytes; bool there; };
struct Fiber {
    char* stack;
    void* stopped;
    bool done;
    // It can go on once this barrier has had its turn.
    const Barrier* waits_for;
    uint64_t turn;
    Block* block;
    Place thread;
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
static void wait_for_turn(const Barrier& barrier, uint64_t turn) {
    current->waits_for = &barrier;
    current->turn = turn;
    while (barrier.turn == turn) change_stack(&current->stopped, scheduler);
}
static void arrive(Barrier& barrier, int all) {
    if (++barrier.come < all) return;
    barrier.come = 0;
    barrier.turn++;
}
static void wait(Barrier& barrier, int all) {
    const uint64_t turn = barrier.turn;
    arrive(barrier, all);
    wait_for_turn(barrier, turn);
}
static int lane() { return current->thread.x % LANES; }
// What every lane has of something. Of two places they take turns: nobody is two exchanges ahead of another.
template <class T> static const T* exchange(const T& own) {
    Warp& warp = current->block->warps[current->thread.x / LANES];
    static_assert(sizeof(T) * LANES <= sizeof warp.exchanged[0]);
    T* all = (T*)warp.exchanged[warp.come.turn % 2];
    all[lane()] = own;
    wait(warp.come, LANES);
    return all;
}

// Kernels run one after the other.
static void let_next_start() {}
static void wait_for_inputs() {}
static float f16_to_f32(uint16_t bits) { return _cvtsh_ss(bits); }
static uint16_t f32_to_f16(float value) { return _cvtss_sh(value, 0); }
static uint32_t f16_pair(float x, float y) { return f32_to_f16(x) | (uint32_t)f32_to_f16(y) << 16; }
static uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    return f16_pair(f16_to_f32((uint16_t)a) * f16_to_f32((uint16_t)b), f16_to_f32(a >> 16) * f16_to_f32(b >> 16));
}
static float bf16_to_f32(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
static uint16_t f32_to_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    return std::isnan(value) ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float power_of_two(float x) { return exp2f(x); }
template <class T> static T load_fresh(const T* at) { return *at; }
static uint32_t warp_most(uint32_t value) {
    const uint32_t* all = exchange(value);
    return *std::max_element(all, all + LANES);
}

static uint8_t* shared() { return current->block->shared; }
// So many bytes of shared memory, which have to begin at a whole times their number.
static uint32_t within_shared(const char* what, uint32_t at, uint32_t bytes) {
    if (at % bytes || at + bytes > shared_bytes) fail("%s of %u bytes at %u of %u in shared memory\n", what, bytes, at, shared_bytes);
    return at;
}
static uint32_t shared_address(const void* at) { return within_shared("an address", (uint32_t)((const uint8_t*)at - shared()), 1); }
static void store_zeros(uint32_t to) { memset(shared() + within_shared("zeros", to, 8), 0, 8); }
static void finish(const Copy& copy) {
    if (copy.there) memcpy(shared() + copy.to, copy.from, copy.bytes);
    else memset(shared() + copy.to, 0, copy.bytes);
}
template <int BYTES> static void copy_piece(uint32_t to, const uint8_t* from, bool there = true) {
    if ((uintptr_t)from % BYTES || (there && (from < copied_begin || from + BYTES > copied_end)))
        fail("a copy of %d bytes from %td\n", BYTES, from - copied_begin);
    const Copy copy = {within_shared("a copy", to, BYTES), from, BYTES, there};
    if (copies == EARLY || (copies == ANY && chance(2))) finish(copy);
    else current->open.push_back(copy);
}
static void copy_group() { current->groups.push_back(std::move(current->open)); current->open.clear(); }
template <int GROUPS> static void copy_wait() {
    while (current->groups.size() > GROUPS) {
        for (auto& copy : current->groups.front()) finish(copy);
        current->groups.erase(current->groups.begin());
    }
}

// `ldmatrix`: lanes 8j to 8j + 7 say where the rows of matrix j are.
static void load(uint32_t m[4], bool turned, uint32_t at) {
    std::array<uint16_t, 8> own;
    memcpy(own.data(), shared() + within_shared("a row", at, 16), 16);
    const auto* rows = exchange(own);
    const int g = lane() / 4, t = lane() % 4 * 2;
    for (int j = 0; j < 4; j++, rows += 8)
        m[j] = turned ? rows[t][g] | (uint32_t)rows[t + 1][g] << 16 : rows[g][t] | (uint32_t)rows[g][t + 1] << 16;
}
static void load_matrices(uint32_t m[4], uint32_t at) { load(m, false, at); }
static void load_turned_matrices(uint32_t m[4], uint32_t at) { load(m, true, at); }
// `mma.sync` m16n8k16; sums of 16 products are rounded once.
template <float (*WIDENED)(uint16_t)> static void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    struct Pair { double first, second; };
    std::array<Pair, 6> own;
    for (int i = 0; i < 6; i++) own[i] = {WIDENED((uint16_t)words[i]), WIDENED(words[i] >> 16)};
    const auto* all = exchange(own);
    const int g = lane() / 4, t = lane() % 4;
    for (int e = 0; e < 4; e++) {
        const auto *left = all + g * 4, *right = all + (t * 2 + e % 2) * 4;
        double sum = 0;
        for (int k = 0; k < 8; k++) {
            const Pair &x = left[k % 4][k / 4 * 2 + e / 2], &y = right[k % 4][4 + k / 4];
            sum += x.first * y.first + x.second * y.second;
        }
        d[e] = (float)(d[e] + sum);
    }
}
static void mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma<f16_to_f32>(d, a, b0, b1); }
static void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma<bf16_to_f32>(d, a, b0, b1); }

static void cluster_arrive() { arrive(of_cluster, cluster_blocks * blockDim.x); }
static void cluster_await() { wait_for_turn(of_cluster, 0); }
static void expect_sent(const void*, uint32_t bytes) { current->block->bytes_expected = bytes; }
static void send_to_block(const void* at, const void*, int rank, float2 value) {
    const uint32_t to = within_shared("what is sent", shared_address(at), 8);
    if (of_cluster.turn == 0) fail("sent before all blocks are there\n");
    if (rank < 0 || rank >= cluster_blocks) fail("sent to block %d of %d\n", rank, cluster_blocks);
    Block& block = blocks[rank];
    memcpy(block.shared + to, &value, 8);
    block.bytes_sent += 8;
    if (block.bytes_sent > block.bytes_expected) fail("more is sent than %u bytes\n", block.bytes_expected);
    if (block.bytes_sent == block.bytes_expected) block.sent.turn++;
}
static void await_sent(const void*) { wait_for_turn(current->block->sent, 0); }

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
// Lets every thread of a block that can go on do so, in any order, but for warps that stand still.
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
        if (fiber.done || (fiber.waits_for && fiber.waits_for->turn == fiber.turn)) continue;
        round.could++;
        if (block.still >> order[i] / LANES & 1) continue;
        round.did++;
        current = &fiber;
        change_stack(&scheduler, fiber.stopped);
        round.left -= fiber.done;
    }
    memcpy(block.variables.data(), __start_block_variables, bytes);
}
// Runs `body` for every thread of so many blocks from `first` on, all at once: a cluster where they are several. Warps that stand
// still do so until the others can do no more.
static void run(Place first, int count, int threads, void (*body)()) {
    kernel = body;
    of_cluster = Barrier();
    cluster_blocks = count;
    blockDim = {threads, 1, 1};
    if (shared_bytes > SHARED_MAX) fail("no block has %u bytes of shared memory\n", shared_bytes);
    for (int b = 0; b < count; b++) {
        Block& block = blocks[b];
        block.place = {first.x, first.y, first.z + b};
        block.come = block.sent = Barrier();
        block.bytes_sent = block.bytes_expected = 0;
        block.still = chance(1 << threads / LANES);
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
        for (int b = 0; b < count; b++) blocks[b].still = chance(1 << threads / LANES);
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
static float __shfl_xor_sync(uint32_t, float value, int step) { return emulated::exchange(value)[emulated::lane() ^ step]; }
static unsigned long __cvta_generic_to_shared(const void* at) { return emulated::shared_address(at); }
