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
#define INFINITY_F __int_as_float(0x7f800000)

// The chip's instructions: a file of chip/, or what the emulation names.
#ifndef CHIP
#define CHIP "chip/nvidia.cuh"
#endif
#include CHIP

DEVICE float bf16_to_f32(u16 bits) { return __uint_as_float((u32)bits << 16); }
DEVICE u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

// Reductions whose order depends on the block's shape only.
DEVICE float warp_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
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
