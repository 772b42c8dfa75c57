// NVIDIA chips from sm_80 on: every instruction that CUDA C++ has no name for, one function each. No other file of
// kernels/ contains inline assembly (but nvidia_wgmma.cuh beside it), and none asks which chip it is compiled for: it
// asks HAS_BULK, HAS_CLUSTERS or HAS_WGMMA. The emulation for CPUs (tests/emulated/chip.h) implements the same names;
// so would another vendor.
//
// An operand that must be known at compile time is a template parameter, whose name is none of the -D
// defines. Addresses in shared memory are 32-bit offsets (`shared_address`), as the instructions take them.
#pragma once

#define WARP 32
typedef u32 LaneMask;  // a bit for each lane of a warp
#define ALL_LANES 0xffffffffu

// Hopper and later: bulk copies by the copy engine (TMA) with mbarriers, thread-block clusters, programmatic dependent
// launch.
#define HAS_BULK (__CUDA_ARCH__ >= 900)
#define HAS_CLUSTERS (__CUDA_ARCH__ >= 900)
// Hopper alone: asynchronous tensor-core instructions of a warpgroup.
#define HAS_WGMMA (__CUDA_ARCH__ == 900)
// As the host takes the chip to be, which chooses kernels by it (`Abilities` in driver/table.rs).
static_assert(HAS_BULK == ABLE_BULK && HAS_CLUSTERS == ABLE_CLUSTERS && HAS_WGMMA == ABLE_WGMMA, "the host's abilities");

// Dynamic shared memory of a kernel.
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]

// Programmatic dependent launch. Every kernel waits on every path before it touches what another kernel writes;
// before that it may read weights, which nobody writes.
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- Numbers ----

// f16 and bf16 as bits.
DEVICE float f16_to_f32(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
DEVICE u16 f32_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE u16 f32_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// Two f16 in a register: a + b, a * b, a * b + c, each rounded once.
DEVICE u32 add_f16x2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// Two f32 rounded to f16.
DEVICE u32 pack_f16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// Two f32 rounded to 8-bit floats (e4m3); beyond their range the largest.
DEVICE u16 pack_floats8x2(float low, float high) {
    u16 d = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
#endif
    return d;
}
// One f16 of a word in both halves of another. Written so, ptxas turns it into a qualifier of the operand that takes
// it.
DEVICE u32 broadcast_f16(u32 word, int upper) {
    u32 d;
    if (upper) asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};}" : "=r"(d) : "r"(word));
    else asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};}" : "=r"(d) : "r"(word));
    return d;
}
// (word & mask) | other in one instruction: with two constants the compiler takes two.
DEVICE u32 and_or(u32 word, u32 mask, u32 other) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(other));
    return d;
}
// 2^x and 1 / x by the special-function units, relative error about 2^-22; denormals are zero.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- Tensor cores ----

// d += a * b: a is 16 rows x 16 columns in bf16 (lane 4g + t holds rows g and g + 8), b is 16 x 8, d is 16 x 8 in f32.
// Which of the 16 columns is which does not matter as long as a and b agree.
DEVICE void mma_bf16(float d[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same in f16.
DEVICE void mma_f16(float d[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same for 32 columns of bytes, a signed and b not; sums wrap mod 2^32.
DEVICE void mma_s8_u8(int d[4], const uint4& a, uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
// Four 8 x 8 matrices of 16-bit values as operands of `mma_*`: lanes 8j to 8j + 7 give the addresses of matrix j's
// rows.
DEVICE void load_matrices(u32 m[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}
DEVICE void load_matrices_transposed(u32 m[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}

// ---- Warps and blocks ----

DEVICE u32 warp_max(u32 value) {
    u32 max;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(max) : "r"(value));
    return max;
}
// True in exactly one lane of a warp, which acts for all.
DEVICE bool elect_one() {
    u32 is;
    asm volatile("{.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;}" : "=r"(is));
    return is;
}
// A barrier of COUNT of the block's threads; barrier 0 is `__syncthreads`.
template <int COUNT> DEVICE void named_barrier_sync(u32 id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory"); }
template <int ID, int COUNT> DEVICE void named_barrier_sync() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory"); }
// Moves registers between the warpgroups of a block: a producer warpgroup gives up some, consumer warpgroups take them.
template <int COUNT> DEVICE void registers_give_up() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- Memory ----

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
DEVICE void store_shared_zeros(u32 to) { asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(to), "r"(0) : "memory"); }

// Asynchronous copies (cp.async) from global into shared memory. Groups complete in the order they were committed.
template <int BYTES> DEVICE void copy_async(u32 to, const u8* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
// The same where `there`, else zeros; nothing is read then.
template <int BYTES> DEVICE void copy_async_or_zeros(u32 to, const u8* from, bool there) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}
// 16 bytes, at constant distances from both addresses.
template <int TO, int FROM> DEVICE void copy_async_at(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(to), "l"(from), "n"(TO), "n"(FROM) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread are incomplete.
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// What another block has written during this launch: from L2, not from this multiprocessor's L1.
DEVICE float load_l2(const float* at) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}
DEVICE float2 load_l2(const float2* at) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at) : "memory");
    return v;
}
DEVICE float4 load_l2(const float4* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}
// What is read once: it takes no place in L1.
DEVICE uint4 load_streaming(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
// A counter in global memory by which blocks hand over data: what was written before the add is seen after the load.
DEVICE void add_release(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE u32 load_acquire(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// ---- Thread-block clusters and their distributed shared memory ----

// Waits for all threads of a cluster, and sees what they wrote.
DEVICE void cluster_sync() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The same without memory order: only that no block has exited, or that every block has started.
DEVICE void cluster_sync_relaxed() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// The relaxed one in two halves.
DEVICE void cluster_arrive_relaxed() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait_relaxed() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// Blocks of a cluster send one of them `bytes` in all, and its mbarrier completes when they have arrived. One thread
// prepares the mbarrier before other blocks may send. A sender need not stay until what it has sent arrives.
DEVICE void cluster_expect(u64* barrier, u32 bytes) {
#if HAS_CLUSTERS
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
DEVICE void cluster_send(float2* at, u64* barrier, int rank, float2 value) {
#if HAS_CLUSTERS
    asm volatile("{.reg .u32 there, arrived;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 arrived, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [arrived];}"
                 ::"r"(shared_address(at)), "r"(shared_address(barrier)), "r"(rank), "f"(value.x), "f"(value.y) : "memory");
#endif
}
DEVICE void cluster_receive(u64* barrier) {
#if HAS_CLUSTERS
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n@!done bra again;}"
                 ::"r"(shared_address(barrier)) : "memory");
#endif
}
// The same place in the shared memory of another block of the cluster.
DEVICE u32 shared_address_of(const void* p, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
    return there;
}
DEVICE float4 load_from_block(const float4* at, int rank) {
    float4 v;
    asm volatile("{.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(at)), "r"(rank) : "memory");
    return v;
}

// ---- Bulk copies by the copy engine (TMA), and the mbarriers that count their bytes ----

DEVICE void mbarrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// After `mbarrier_init`, before other threads or the copy engine use the barriers.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Waits for the phase with this parity to complete.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}"
                 ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void mbarrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// Arrives, and expects this many bytes to be copied.
DEVICE void mbarrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at the barrier of another block of the cluster (`shared_address_of`). Without `release.cluster`: the thread
// has only read, and every arrival would wait for all that it has written.
DEVICE void mbarrier_arrive_remote(u32 barrier) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory"); }

DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// The same for what is read once: L2 evicts it first.
DEVICE void copy_bulk_streaming(u32 to, const u8* from, u32 bytes, u32 barrier) {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// To the same place in all BLOCKS of a cluster; each one's barrier counts the bytes.
template <int BLOCKS> DEVICE void copy_bulk_multicast(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)((1 << BLOCKS) - 1)) : "memory");
}
// What this thread wrote to shared memory is seen by the asynchronous proxy: bulk copies and wgmma.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
