// Exact products of bytes and words mod 2^32, for private inference. See docs/kernels.md#ring.
//
// A word is four unsigned bytes (limbs); the tensor cores multiply them with the signed bytes of the weights, and their
// sums may wrap mod 2^32. A tile of weights is 16 rows x 32 columns, 16 bytes for each lane: word w of lane 4g + t is
// row g + 8 (w % 2), columns 16 (w / 2) + 4t to 4t + 3. The eight columns of the instruction are the four limbs of two
// tokens. Nothing depends on the order of summation, so warps split the columns and add up as they finish.
#include "prelude.cuh"

// Words into limbs: 32 columns of a token are 128 bytes, in which lane 4g + t finds both of its words, those of limb g
// % 4 of columns 4t and 16 + 4t, side by side. Grid (32 columns, tokens), a thread for each word of the result.
KERNEL ring_limbs(const u32* x, int columns, int tiles, u32* limbs) {
    let_next_start();
    wait_for_inputs();
    const int half = threadIdx.x % 2, limb = threadIdx.x / 2 % 4, quad = threadIdx.x / 8;
    const int first = blockIdx.x * 32 + 16 * half + 4 * quad;
    const u32* from = x + (long)blockIdx.y * columns;
    u32 bytes = 0;
    for (int i = 0; i < 4; i++)
        if (first + i < columns) bytes |= (from[first + i] >> 8 * limb & 0xff) << 8 * i;
    limbs[((long)blockIdx.y * tiles + blockIdx.x) * 32 + threadIdx.x] = bytes;
}

// The words that two lanes hold the limbs of. Lanes with even t: row g; with odd t: row g + 8; of token t / 2.
DEVICE u32 words(const int d[4], int t) {
    u32 upper = (u32)d[0] + ((u32)d[1] << 8), lower = (u32)d[2] + ((u32)d[3] << 8);
    if (t % 2) {
        upper <<= 16;
        lower <<= 16;
    }
    upper += __shfl_xor_sync(ALL_LANES, upper, 1);
    lower += __shfl_xor_sync(ALL_LANES, lower, 1);
    return t % 2 ? lower : upper;
}

// Few tokens: a block has 16 rows and all tokens, its warps share the columns. N is pairs of tokens.
template <int N> DEVICE void few(const uint4* weights, const u32* limbs, int rows, int tiles, int tokens, u32* out) {
    constexpr int AHEAD = 4;
    __shared__ u32 sums[16 * 2 * N];
    let_next_start();
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const uint4* tile = weights + (long)blockIdx.x * tiles * WARP + lane;
    for (int i = threadIdx.x; i < 16 * 2 * N; i += blockDim.x) sums[i] = 0;
    __syncthreads();
    int d[N][4] = {};
    bool waited = false;
    for (int first = warp; first < tiles; first += warps * AHEAD) {
        uint4 a[AHEAD];
        for (int i = 0; i < AHEAD; i++) {
            int at = first + i * warps;
            // L1 is for the limbs.
            a[i] = at < tiles ? load_streaming(tile + (long)at * WARP) : make_uint4(0, 0, 0, 0);
        }
        if (!waited) wait_for_inputs();
        waited = true;
        for (int i = 0; i < AHEAD; i++) {
            int at = min(first + i * warps, tiles - 1);
            for (int n = 0; n < N; n++) {
                int token = 2 * n + g / 4;
                uint2 b = make_uint2(0, 0);
                if (token < tokens)
                    b = *(const uint2*)(limbs + ((long)token * tiles + at) * 32 + t * 8 + g % 4 * 2);
                mma_s8_u8(d[n], a[i], b);
            }
        }
    }
    if (!waited) wait_for_inputs();
    for (int n = 0; n < N; n++) atomicAdd(&sums[(2 * n + t / 2) * 16 + g + 8 * (t % 2)], words(d[n], t));
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 2 * N; i += blockDim.x) {
        int token = i / 16, row = blockIdx.x * 16 + i % 16;
        if (token < tokens && row < rows) out[(long)token * rows + row] = sums[i];
    }
}
KERNEL __launch_bounds__(512) ring_2(const uint4* weights, const u32* limbs, int rows, int tiles, int tokens, u32* out) {
    few<1>(weights, limbs, rows, tiles, tokens, out);
}
KERNEL __launch_bounds__(512) ring_4(const uint4* weights, const u32* limbs, int rows, int tiles, int tokens, u32* out) {
    few<2>(weights, limbs, rows, tiles, tokens, out);
}
KERNEL __launch_bounds__(512) ring_8(const uint4* weights, const u32* limbs, int rows, int tiles, int tokens, u32* out) {
    few<4>(weights, limbs, rows, tiles, tokens, out);
}
KERNEL __launch_bounds__(512) ring_16(const uint4* weights, const u32* limbs, int rows, int tiles, int tokens, u32* out) {
    few<8>(weights, limbs, rows, tiles, tokens, out);
}

// Many tokens: a warp has 32 rows and 16 tokens, and all columns. Grid (blocks of warps, 16 tokens).
KERNEL __launch_bounds__(128) ring_many(const uint4* weights, const u32* limbs, int rows, int tiles, int tokens, u32* out) {
    constexpr int N = 8, M = 2;
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int row_tiles = (rows + 15) / 16;
    const int row_tile = (blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * M, first = blockIdx.y * 2 * N;
    if (row_tile >= row_tiles) return;
    const uint4* tile[M];
    for (int m = 0; m < M; m++) tile[m] = weights + (long)min(row_tile + m, row_tiles - 1) * tiles * WARP + lane;
    // A token beyond the last is the last again, and is not stored.
    const u32* from[N];
    for (int n = 0; n < N; n++)
        from[n] = limbs + (long)min(first + 2 * n + g / 4, tokens - 1) * tiles * 32 + t * 8 + g % 4 * 2;
    int d[M][N][4] = {};
    uint4 next[M];
    for (int m = 0; m < M; m++) next[m] = tile[m][0];
    for (int at = 0; at < tiles; at++) {
        uint4 a[M];
        for (int m = 0; m < M; m++) {
            a[m] = next[m];
            next[m] = tile[m][(long)min(at + 1, tiles - 1) * WARP];
        }
        for (int n = 0; n < N; n++) {
            uint2 b = *(const uint2*)(from[n] + (long)at * 32);
            for (int m = 0; m < M; m++) mma_s8_u8(d[m][n], a[m], b);
        }
    }
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            u32 word = words(d[m][n], t);
            int token = first + 2 * n + t / 2, row = (row_tile + m) * 16 + g + 8 * (t % 2);
            if (token < tokens && row < rows) out[(long)token * rows + row] = word;
        }
    }
}
