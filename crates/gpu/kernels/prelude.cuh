// What every kernel starts from: types, the chip's instructions (chip/), reductions, and the structures of a step and
// of a weight. No toolkit header is included: a machine with a driver and NVRTC alone can compile everything here.
//
// Glossary. The field's words mean here what they mean elsewhere; these are the ones with a meaning of their own.
//   step               one forward pass over a batch of tokens; its operands are in `Step`
//   row                one token's activations, or one output row of a weight; r counts the first, n the second
//   place, position    a token's index in its sequence; the position that RoPE rotates by (they differ in few models)
//   wanted             the tokens whose logits are asked for
//   page               32 tokens of the K/V cache of one layer (kv.cuh); a page table maps places to pages
//   part               a run of rows of a weight in one format; Q, K and V are parts of one weight
//   plane              the codes, upper bits, scales or mins of a part: each is contiguous, in the order products read it
//   tile (weights)     16 rows x 128 columns, in the fragment order of mma.m16n8k16
//   tile (attention)   64 keys, aligned to absolute places
//   step (products)    128 or 256 columns of a tile: what is copied and multiplied at once
//   fragment           a lane's registers of a tensor-core operand (`Quant::fragments` dequantises into them)
//   lane 4g + t        how m16n8k16 numbers lanes: row g (and g + 8), columns 2t, 2t + 1 (and + 8)
//   octet              eight neighbouring columns of a row, a lane's share of 32
//   activation tile    rows of activations as f16, scaled by a power of two (form.cuh), in the layout that a product reads
//   unscale, factors   the powers of two that undo the scaling of weights and of rows of activations
//   slice, split-K     a contiguous range of a weight's columns; SLICES depends on the weight's shape alone, never on the batch
//   stream-K           all slices' steps dealt out evenly to persistent blocks (STREAM_K: the number of slices)
//   persistent kernel  as many blocks as fit; each takes several tiles or items in turn
//   raster             the order in which persistent blocks visit output tiles (RASTER: activation tiles kept in L2)
//   TALL               blocks of a cluster, one below the other, that share one copy of the activations (multicast)
//   ring, stage        a circular buffer in shared memory, and one of its entries; `RingPosition` is stage and parity
//   producer, consumer the warps that copy into a ring, and those that multiply from it
//   swizzle            16-byte pieces of a row permuted by the row's number, so that eight rows are in different banks
//   padding            columns or rows added so that sizes are whole tiles: zeros, or results that nobody stores
//   gate, pair         rows of gate_up: a gate and its up counterpart lie `pairs` tiles apart; out = silu(gate) * up (GLU)
//   GQA group          the query heads of one K/V head (GROUP)
//   hi and lo          a value as two 16-bit numbers, the second the rounding error of the first (PARTS)
//   online softmax     running maximum and sum; `rescale` is exp(old maximum - new maximum)
//   soft cap, sink     cap * tanh(score / cap); a logit per head that takes a share of the softmax and has no value
//   partial            a tile's unnormalised result with its maximum and sum, for another block to merge
//   rotate             apply RoPE to pairs (i, i + pairs) of a head; of bits: rotate a word
//   transpose          swap rows and columns of a matrix fragment
//   expert, place      of MoE: each (token, chosen expert) has a row, at a place where rows of one expert are contiguous
//   deal               the counting sort that assigns those places
//   gather             read rows through an index (`wanted`, or an expert's list)
//   LoRA               low-rank adapters: out += scale * up (down x)
//   ticket             a counter in global memory by which the last of several blocks knows that it is last
//   PDL                programmatic dependent launch: `let_next_start`, `wait_for_inputs`
//   L2 load            `load_l2` reads what another block or a kernel before has written, past a stale L1
//   sharer             blocks that are resident on one multiprocessor together
//   rounded once       an operation written as an intrinsic (__fmul_rn, __fmaf_rn), so that no caller fuses it differently
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
// Over the whole block (at most 1024 threads); every thread gets the result. `scratch` is 32 words of shared memory.
DEVICE float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = threadIdx.x % WARP < blockDim.x / WARP ? scratch[threadIdx.x % WARP] : 0.0f;
    return warp_sum(sum);
}

// What varies from step to step, as `step.rs` lays it out. The addresses are the same in all steps that a recording is
// for, so its kernels hold them; what lies there is the present step's.
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
    int row_tile;  // tiles of 16 rows of `rows` less those from the planes' beginnings on
};
// Tiles of 16 rows from the planes' beginnings to the end of the part, which may have several experts.
DEVICE int row_tiles_left(const Part& part) { return (part.rows + 15) / 16 - part.row_tile; }
