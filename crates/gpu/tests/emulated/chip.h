// The functions of kernels/chip/nvidia.cuh on a CPU, for one thread of a block at a time (device.h): the same names
// with the same meaning. What a chip does behind a program's back, copies that complete late and blocks that send to
// each other, happens here as late or as early as it may.
#pragma once
#include "device.h"

#define WARP 32
typedef u32 LaneMask;
#define ALL_LANES 0xffffffffu
#define HAS_BULK 0
#define HAS_CLUSTERS 1
#define HAS_WGMMA 0
#define DYNAMIC_SHARED(type, name) type* name = (type*)emulated::shared()

// Kernels run one after the other.
static void let_next_start() {}
static void wait_for_inputs() {}

static float f16_to_f32(u16 bits) { return _cvtsh_ss(bits); }
static u16 f32_to_f16(float value) { return _cvtss_sh(value, 0); }
static u16 f32_to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    return std::isnan(value) ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static u32 pack_f16x2(float low, float high) { return f32_to_f16(low) | (u32)f32_to_f16(high) << 16; }
// The nearest 8-bit float (e4m3) among all of them, ties to the even one.
static u8 f32_to_float8(float value) {
    auto of = [](int code) { return code < 8 ? std::ldexp((double)code, -9) : std::ldexp(8.0 + code % 8, code / 8 - 10); };
    const double magnitude = std::fabs((double)value);
    int best = 0;
    for (int code = 1; code < 127; code++) {
        const double was = std::fabs(of(best) - magnitude), is = std::fabs(of(code) - magnitude);
        if (is < was || (is == was && code % 2 == 0)) best = code;
    }
    return (u8)(std::isnan(value) ? 127 : best | (std::signbit(value) ? 128 : 0));
}
static u16 pack_floats8x2(float low, float high) { return (u16)(f32_to_float8(low) | f32_to_float8(high) << 8); }
// A sum and a product of f16 are exact in f64, so the only rounding is to f16; from f64 directly, which f32 in between
// would not be.
static u16 f64_to_f16(double value) {
    if (!(std::fabs(value) < 65520.0)) return f32_to_f16((float)value);
    const int exponent = std::max(std::ilogb(value == 0 ? 1.0 : value), -14);
    return f32_to_f16((float)std::ldexp(std::nearbyint(std::ldexp(value, 10 - exponent)), exponent - 10));
}
template <class Of> static u32 each_f16(u32 a, u32 b, u32 c, Of of) {
    auto half = [&](int by) { return f64_to_f16(of(f16_to_f32((u16)(a >> by)), f16_to_f32((u16)(b >> by)), f16_to_f32((u16)(c >> by)))); };
    return half(0) | (u32)half(16) << 16;
}
static u32 add_f16x2(u32 a, u32 b) { return each_f16(a, b, 0, [](double x, double y, double) { return x + y; }); }
static u32 mul_f16x2(u32 a, u32 b) { return each_f16(a, b, 0, [](double x, double y, double) { return x * y; }); }
static u32 fma_f16x2(u32 a, u32 b, u32 c) { return each_f16(a, b, c, [](double x, double y, double z) { return x * y + z; }); }
static u32 broadcast_f16(u32 word, int upper) { return (upper ? word >> 16 : word & 0xffff) * 0x00010001u; }
static u32 and_or(u32 word, u32 mask, u32 other) { return (word & mask) | other; }
static float exp2_approx(float x) { return exp2f(x); }
static float reciprocal_approx(float x) { return 1.0f / x; }

// `mma.sync` m16n8k16; sums of 16 products are rounded once.
template <float (*WIDENED)(u16)> static void mma_16(float d[4], const u32 a[4], u32 b0, u32 b1) {
    const u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    struct Pair { double first, second; };
    std::array<Pair, 6> own;
    for (int i = 0; i < 6; i++) own[i] = {WIDENED((u16)words[i]), WIDENED(words[i] >> 16)};
    const auto* all = emulated::exchange(own);
    const int g = emulated::lane() / 4, t = emulated::lane() % 4;
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
static float widened_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
static void mma_f16(float d[4], const u32 a[4], u32 b0, u32 b1) { mma_16<f16_to_f32>(d, a, b0, b1); }
static void mma_bf16(float d[4], const u32 a[4], u32 b0, u32 b1) { mma_16<widened_bf16>(d, a, b0, b1); }
// m16n8k32 of bytes, a signed and b not. Word w of lane 4g + t is row g + 8 (w % 2), columns 16 (w / 2) + 4t to 4t + 3.
static void mma_s8_u8(int d[4], const uint4& a, uint2 b) {
    const std::array<u32, 6> own = {a.x, a.y, a.z, a.w, b.x, b.y};
    const auto* all = emulated::exchange(own);
    const int g = emulated::lane() / 4, t = emulated::lane() % 4;
    for (int e = 0; e < 4; e++) {
        u32 sum = (u32)d[e];
        for (int k = 0; k < 32; k++) {
            const u32 left = all[g * 4 + k % 16 / 4][k / 16 * 2 + e / 2], right = all[(t * 2 + e % 2) * 4 + k % 16 / 4][4 + k / 16];
            sum += (u32)((int)(signed char)(left >> k % 4 * 8) * (int)(u8)(right >> k % 4 * 8));
        }
        d[e] = (int)sum;
    }
}

static u32 warp_max(u32 value) {
    const u32* all = emulated::exchange(value);
    return *std::max_element(all, all + WARP);
}
static bool elect_one() { return emulated::exchange(0), emulated::lane() == 0; }
// Barriers that some of a block's threads meet at.
template <int COUNT> static void named_barrier_sync(u32 id) { emulated::wait(emulated::current->block->named[id], COUNT); }
template <int ID, int COUNT> static void named_barrier_sync() { named_barrier_sync<COUNT>(ID); }

namespace emulated {
// `bytes` of shared memory, aligned to their own number.
static u32 within_shared(const char* what, u32 at, u32 bytes) {
    if (at % bytes || at + bytes > shared_bytes) fail("%s of %u bytes at %u of %u in shared memory\n", what, bytes, at, shared_bytes);
    return at;
}
static void finish(const Copy& copy) {
    if (copy.there) memcpy(shared() + copy.to, copy.from, copy.bytes);
    else memset(shared() + copy.to, 0, copy.bytes);
}
// `ldmatrix`.
static void load(u32 m[4], bool transposed, u32 at) {
    std::array<u16, 8> own;
    memcpy(own.data(), shared() + within_shared("a row", at, 16), 16);
    const auto* rows = exchange(own);
    const int g = lane() / 4, t = lane() % 4 * 2;
    for (int j = 0; j < 4; j++, rows += 8)
        m[j] = transposed ? rows[t][g] | (u32)rows[t + 1][g] << 16 : rows[g][t] | (u32)rows[g][t + 1] << 16;
}
}  // namespace emulated
static u32 shared_address(const void* at) { return emulated::within_shared("an address", (u32)((const u8*)at - emulated::shared()), 1); }
static void store_shared_zeros(u32 to) { memset(emulated::shared() + emulated::within_shared("zeros", to, 8), 0, 8); }
static void load_matrices(u32 m[4], u32 at) { emulated::load(m, false, at); }
static void load_matrices_transposed(u32 m[4], u32 at) { emulated::load(m, true, at); }
template <int BYTES> static void copy_async_or_zeros(u32 to, const u8* from, bool there) {
    using namespace emulated;
    if ((uintptr_t)from % BYTES || (there && (from < copied_begin || from + BYTES > copied_end)))
        fail("a copy of %d bytes from %td\n", BYTES, from - copied_begin);
    const Copy copy = {within_shared("a copy", to, BYTES), from, BYTES, there};
    if (copies == COPIES_EARLY || (copies == COPIES_ANY && chance(2))) finish(copy);
    else current->open.push_back(copy);
}
template <int BYTES> static void copy_async(u32 to, const u8* from) { copy_async_or_zeros<BYTES>(to, from, true); }
template <int TO, int FROM> static void copy_async_at(u32 to, const u8* from) { copy_async<16>(to + TO, from + FROM); }
static void copy_commit() {
    emulated::current->groups.push_back(std::move(emulated::current->open));
    emulated::current->open.clear();
}
template <int PENDING> static void copy_wait() {
    auto& groups = emulated::current->groups;
    while (groups.size() > PENDING) {
        for (auto& copy : groups.front()) emulated::finish(copy);
        groups.erase(groups.begin());
    }
}
template <class T> static T load_l2(const T* at) { return *at; }
static uint4 load_streaming(const uint4* at) { return *at; }

static void cluster_arrive_relaxed() { emulated::arrive(emulated::of_cluster, emulated::cluster_blocks * blockDim.x); }
static void cluster_wait_relaxed() { emulated::wait_for_phase(emulated::of_cluster, 0); }
static void cluster_expect(const void*, u32 bytes) { emulated::current->block->bytes_expected = bytes; }
static void cluster_send(const void* at, const void*, int rank, float2 value) {
    using namespace emulated;
    const u32 to = within_shared("what is sent", shared_address(at), 8);
    if (of_cluster.phase == 0) fail("sent before all blocks are there\n");
    if (rank < 0 || rank >= cluster_blocks) fail("sent to block %d of %d\n", rank, cluster_blocks);
    Block& block = blocks[rank];
    memcpy(block.shared + to, &value, 8);
    block.bytes_sent += 8;
    if (block.bytes_sent > block.bytes_expected) fail("more is sent than %u bytes\n", block.bytes_expected);
    if (block.bytes_sent == block.bytes_expected) block.sent.phase++;
}
static void cluster_receive(const void*) { emulated::wait_for_phase(emulated::current->block->sent, 0); }

// Without HAS_BULK no kernel gets here.
static void mbarrier_init(u32, int) { emulated::fail("no copy engine\n"); }
static void mbarrier_init_fence() { emulated::fail("no copy engine\n"); }
static void mbarrier_wait(u32, u32) { emulated::fail("no copy engine\n"); }
static void mbarrier_arrive(u32) { emulated::fail("no copy engine\n"); }
static void mbarrier_expect(u32, u32) { emulated::fail("no copy engine\n"); }
static void copy_bulk(u32, const u8*, u32, u32) { emulated::fail("no copy engine\n"); }
static void copy_bulk_streaming(u32, const u8*, u32, u32) { emulated::fail("no copy engine\n"); }
