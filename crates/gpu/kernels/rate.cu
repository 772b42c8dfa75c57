// The peak rate of this chip's tensor cores: f16 times f16 with f32 sums, over and over, with operands that stay in
// place. Nothing is loaded or stored meanwhile, so no product of a model reaches it. The values are random: zeros would
// draw less power and run at a higher clock. See docs/kernels.md#rate.
#include "chip/nvidia_wgmma.cuh"

#define THREADS 256

DEVICE u32 random_pair(u32 at) {
    at = (at ^ 61u ^ at >> 16) * 0x9e3779b9u;
    at ^= at >> 15;
    // Signs and fractions are random, magnitudes in [0.5, 1).
    return (at & 0x83ff83ffu) | 0x38003800u;
}

#if HAS_WGMMA
// A round of a warpgroup: 64 rows times 256 columns over a depth of 64, as two halves that do not wait for each other.
KERNEL matrix_rate(float* out, int rounds) {
    __shared__ __align__(1024) u32 left[2][64 * 32], right[256 * 32];
    for (int i = threadIdx.x; i < 256 * 32; i += THREADS) right[i] = random_pair(i);
    for (int i = threadIdx.x; i < 2 * 64 * 32; i += THREADS) left[0][i] = random_pair(i + 0x10000);
    fence_async_proxy();
    __syncthreads();
    auto descriptor = [](const u32* tile) { return wgmma_descriptor(shared_address(tile)); };
    const u64 a = descriptor(left[threadIdx.x / 128]), b = descriptor(right), c = descriptor(right + 128 * 32);
    float d[2][64] = {};
    for (int round = 0; round < rounds; ++round) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            wgmma_m64n128_shared(d[0], a + 2 * k, b + 2 * k);
            wgmma_m64n128_shared(d[1], a + 2 * k, c + 2 * k);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum += d[0][i] + d[1][i];
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
}

#else

// A round of a warp: sixteen products of 16 x 16 and 16 x 8, none of which waits for another.
KERNEL matrix_rate(float* out, int rounds) {
    u32 a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = random_pair(threadIdx.x * 4 + i);
    for (int i = 0; i < 2; ++i) b[i] = random_pair(threadIdx.x * 2 + i + 0x10000);
    float d[16][4] = {};
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 16; ++i) mma_f16(d[i], a, b[0], b[1]);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
}

#endif
