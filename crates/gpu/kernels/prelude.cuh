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

// Two halves in a register: a * b + c, rounded once.
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

// d += a * b: a is 16 rows x 16 columns in halves (lane 4g + t holds rows g and g + 8), b is 16 x 8, d is 16 x 8 in
// f32. Which of the 16 columns is which does not matter as long as a and b agree.
DEVICE void mma_f16(float d[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float d[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same over 8 columns.
DEVICE void mma_f16_k8(float d[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// 16 bytes of weights: read once, so they need not stay in any cache.
DEVICE uint4 load_weights(const u8* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
DEVICE uint2 load_weights8(const u8* at) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}

// Reductions whose order depends on the block's shape only.
DEVICE float warp_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}
DEVICE u32 warp_max(u32 value) {
    for (int step = WARP / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(0xffffffff, value, step));
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
DEVICE u32 block_max(u32 value, u32* room) {
    value = warp_max(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = value;
    __syncthreads();
    u32 most = threadIdx.x % WARP < blockDim.x / WARP ? room[threadIdx.x % WARP] : 0;
    return warp_max(most);
}

// What varies from step to step, as `step.rs` lays it out.
struct Step {
    int tokens, wanted, rows, groups;
    // Where the arrays begin, in words from the start of the step.
    int token_ids, positions, token_rows, token_places, wanted_tokens, table_starts, pages, pad;
};
DEVICE const int* step_array(const Step* step, int start) { return (const int*)step + start; }
// How many rows an operation runs over: every token, or those that want logits.
DEVICE int step_rows(const Step* step, int wanted) { return wanted ? step->wanted : step->tokens; }
// The page that holds `place` of `row` in a group.
DEVICE int page_of(const Step* step, int row, int group, int place) {
    int start = step_array(step, step->table_starts)[row * step->groups + group];
    return step_array(step, step->pages)[start + place / 32];
}

// One part of a weight in the planes that `layout.rs` describes.
struct Part {
    const u8* codes;
    const u8* high;
    const u8* scales;
    const u8* mins;
    int rows, columns, groups, pad;
};
