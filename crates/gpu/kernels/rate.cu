// What the matrix units of this chip do at most: f16 times f16 with sums in f32, over and over, with operands that stay where
// they are. Nothing is loaded or stored meanwhile, so no product of a model gets there. The values are random: zeros would
// draw less power and run at a higher clock.
#include "prelude.cuh"

#define THREADS 256

DEVICE u32 random_pair(u32 at) {
    at = (at ^ 61u ^ at >> 16) * 0x9e3779b9u;
    at ^= at >> 15;
    // Signs and fractions are random, magnitudes in [0.5, 1).
    return (at & 0x83ff83ffu) | 0x38003800u;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Rows of 64 columns in the 128-byte swizzle: groups of eight rows are 1024 bytes apart.
DEVICE u64 descriptor(const void* tile) {
    u64 address = (u64)__cvta_generic_to_shared(tile);
    return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define TEN(n) "%" #n "0,%" #n "1,%" #n "2,%" #n "3,%" #n "4,%" #n "5,%" #n "6,%" #n "7,%" #n "8,%" #n "9"

DEVICE void wgmma_64x128x16(float d[64], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) ",%60,%61,%62,%63}, "
        "%64, %65, 1, 1, 1, 0, 0;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b));
}

// A round of a warpgroup: 64 rows times 256 columns over a depth of 64, as two halves that do not wait for each other.
KERNEL matrix_rate(float* out, int rounds) {
    __shared__ __align__(1024) u32 left[2][64 * 32], right[256 * 32];
    for (int i = threadIdx.x; i < 256 * 32; i += THREADS) right[i] = random_pair(i);
    for (int i = threadIdx.x; i < 2 * 64 * 32; i += THREADS) left[0][i] = random_pair(i + 0x10000);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u64 a = descriptor(left[threadIdx.x / 128]), b = descriptor(right), c = descriptor(right + 128 * 32);
    float d[2][64] = {};
    for (int round = 0; round < rounds; ++round) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            wgmma_64x128x16(d[0], a + 2 * k, b + 2 * k);
            wgmma_64x128x16(d[1], a + 2 * k, c + 2 * k);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
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
        for (int i = 0; i < 16; ++i) {
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
}

#endif
