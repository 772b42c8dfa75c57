// What every kernel starts from: types, conversions, reductions, the matrix instruction, and every difference between
// vendors. No toolkit header is included: a machine with a driver and NVRTC alone can compile everything here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define WARP 32
#define INFINITY_F __int_as_float(0x7f800000)

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
DEVICE float bf16_to_f32(u16 bits) { return __uint_as_float((u32)bits << 16); }
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
// Two f32 as f16.
DEVICE u32 pair_f16(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

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
// The largest of a warp's numbers.
DEVICE u32 warp_most(u32 value) {
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(value));
    return most;
}

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
// Copies of 16 bytes into shared memory that go on while the thread does, from and to what lies behind two addresses.
// Groups end in the order they were begun.
template <int TO, int FROM> DEVICE void copy_begin(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(to), "l"(from), "n"(TO), "n"(FROM) : "memory");
}
DEVICE void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most so many groups are under way.
template <int GROUPS> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }
// What another block has written in this launch: not from a cache of this multiprocessor.
DEVICE float load_fresh(const float* at) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}
DEVICE float2 load_fresh(const float2* at) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at) : "memory");
    return v;
}
DEVICE float4 load_fresh(const float4* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}
// Blocks of a cluster: waits for all of them, and reads another's shared memory.
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The same where nothing has to be seen: only that nobody goes.
DEVICE void cluster_stay() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// In two steps, before anything is sent: that all blocks are there.
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_await() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// What blocks of a cluster send to one of them, so many bytes, is there when its barrier says so. It is made by one thread, before
// the others know that the block is there; nobody has to stay until what it has sent arrives.
DEVICE void expect_sent(u64* barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
DEVICE void send_to_block(float2* at, u64* barrier, int rank, float2 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .u32 there, arrived;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 arrived, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [arrived];}"
                 ::"r"(shared_address(at)), "r"(shared_address(barrier)), "r"(rank), "f"(value.x), "f"(value.y) : "memory");
#endif
}
DEVICE void await_sent(u64* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n@!done bra again;}"
                 ::"r"(shared_address(barrier)) : "memory");
#endif
}
DEVICE float load_from_block(const float* at, int rank) {
    float value = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];}"
                 : "=f"(value) : "r"((u32)__cvta_generic_to_shared(at)), "r"(rank) : "memory");
#endif
    return value;
}

// Reductions whose order depends on the block's shape only.
DEVICE float warp_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}
// Over the whole block (at most 1024 threads); every thread gets the result. `room` is 32 words of shared memory.
DEVICE float block_sum(float value, float* room) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = threadIdx.x % WARP < blockDim.x / WARP ? room[threadIdx.x % WARP] : 0.0f;
    return warp_sum(sum);
}

// What varies from step to step, as `step.rs` lays it out. The addresses are the same in all steps that a recording is for, so its
// kernels hold them; what lies there is the present step's.
struct Step {
    const int* counts;     // tokens, tokens that want logits
    const int* ids;        // (tokens) a negative id is a slot: the token last sampled there
    const int* positions;  // (tokens) what each is rotated by
    const int* places;     // (tokens) its absolute position
    const int* wanted;     // the tokens that want logits
    const int* firsts;     // (tokens) the first token of its sequence in this step
    const int* lasts;      // (tokens) and the last
    const int* adapters;   // (tokens) the adapter of its sequence, or -1
    const int* tables;     // (group, stride): where each token's page table begins, counted from here; then the tables
    int stride;
    // The counts where the host knows them, else negative: a load less on the way.
    int known_tokens, known_wanted, pad;
};
// How many rows an operation runs over: every token, or those that want logits.
DEVICE int step_rows(const Step& step, int wanted) {
    // Not an array: indexed by a variable, the whole structure would be copied to memory.
    int known = wanted ? step.known_wanted : step.known_tokens;
    return known >= 0 ? known : step.counts[wanted];
}
// The page that holds `place` of token r's sequence in a group.
DEVICE int page_of(const Step& step, int r, int group, int place) {
    return step.tables[step.tables[group * step.stride + r] + place / 32];
}

// One part of a weight in the planes that `layout.rs` describes.
struct Part {
    const u8* codes;
    const u8* high;
    const u8* scales;
    const u8* mins;
    int rows, columns, groups;
    int row_tile;  // times 16 rows that `rows` are more than there are from the planes' beginnings on
};
// Times 16 rows from the planes' beginnings to the ends of the part, which may have several experts.
DEVICE int row_tiles_left(const Part& part) { return (part.rows + 15) / 16 - part.row_tile; }
