// Activations as the columns of the matrix instruction, and a product's sums. Formats are written once against what both
// kinds have: `block_32` and `block_16` multiply signed bytes of 16 rows and add the result, a whole number, times a scale
// of each row; `minima` multiplies the sums of four blocks. A lane's sums are N numbers, of row g of the weight's tile or
// of row g + 8.
#pragma once
#include "split.cuh"

// One row of activations in four digits, a column each (the other four columns repeat them). Even t have the upper half of
// q, odd t the lower.
struct OneRow {
    static const int N = 2, ROWS = 1;
    const u8* records;  // in shared memory
    int digit, t;

    DEVICE_METHOD OneRow(const u8* records, long, int, int lane) : records(records), digit(lane / 4 % 4), t(lane % 4) {}
    DEVICE_METHOD static int half_of(int n) { return n; }
    DEVICE_METHOD const u8* record(int n, int at) const { return records + at * RECORD; }

    // Both digits of this half of q together; the second came with WHOLE_BITS.
    DEVICE_METHOD static void add(const int d[4], float scale0, float scale1, float sum[N]) {
        sum[0] = __fmaf_rn(scale0, __int_as_float(d[0] * 16 + d[1]) - WHOLE_F, sum[0]);
        sum[1] = __fmaf_rn(scale1, __int_as_float(d[2] * 16 + d[3]) - WHOLE_F, sum[1]);
    }
    // The four columns from 8t on are in a[0] and a[1], the next four in a[2] and a[3].
    DEVICE_METHOD void block_32(int at, int block, const u32 a[4], float scale0, float scale1, float sum[N]) const {
        const uint4 x = *(const uint4*)(record(0, at) + block / 2 * 256 + digit * 64 + t * 16);
        int d[4];
        mma_s8(d, a, block % 2 ? x.z : x.x, block % 2 ? x.w : x.y, 0, WHOLE_BITS);
        add(d, scale0, scale1, sum);
    }
    // Sixteen columns, of which four from 4t on.
    DEVICE_METHOD void block_16(int at, int block, const u32 a[2], float scale0, float scale1, float sum[N]) const {
        const u32 x = *(const u32*)(record(0, at) + block / 4 * 256 + digit * 64 + (block % 2 * 2 + t / 2) * 16 +
                                    block / 2 % 2 * 8 + t % 2 * 4);
        int d[4];
        mma_s8_16(d, a, x, 0, WHOLE_BITS);
        add(d, scale0, scale1, sum);
    }
    // m0 and m1: the minimum of block t in both halves of a word.
    DEVICE_METHOD void minima(int at, u32 m0, u32 m1, float sum[N]) const {
        float d[4];
        mma_f16_8(d, m0, m1, ((const u32*)(record(0, at) + RECORD_PARTS))[t * 4 + digit]);
        sum[0] = __fmaf_rn(16.0f, d[0], d[1]);
        sum[1] = __fmaf_rn(16.0f, d[2], d[3]);
    }
    // The sum of q over 32 columns.
    DEVICE_METHOD float sum_of(int n, int at, int block) const {
        return ((const float*)(record(0, at) + RECORD_SUMS))[block * 2 + t % 2];
    }
    DEVICE_METHOD float scale(int n, int at) const { return *(const float*)(record(0, at) + RECORD_SCALE); }
    DEVICE_METHOD float total(const float acc[N], int nt, int half) const {
        const float other = __shfl_xor_sync(0xffffffff, acc[half], 1);
        return t % 2 ? __fmaf_rn(1024.0f, other, acc[half]) : __fmaf_rn(1024.0f, acc[half], other);
    }
};

// Up to 4 x NT rows, each as two columns: the halves of q in f16, or a value and its rest in bf16. Lane 4g + t reads
// column g, which is row g / 2, and gets results of row t.
template <int NT, bool FLOATS> struct Rows {
    static const int N = 4 * NT, ROWS = 4 * NT;
    const u8* records;
    u32 stride;
    int last, t;

    // `stride` bytes from row to row, of which there are `count`. Addresses are made anew from few registers: sums take
    // the others.
    DEVICE_METHOD Rows(const u8* records, long stride, int count, int lane)
        : records(records), stride((u32)stride), last(count - 1), t(lane % 4) {}
    // This lane's column in a group of eight; beyond the last row any, its results are unused.
    DEVICE_METHOD const u8* column(int nt) const {
        const int lane = threadIdx.x % WARP;
        return records + min(nt * 4 + lane / 8, last) * stride + lane / 4 % 2 * 16 + t * 32;
    }
    // The row that this lane has results of.
    DEVICE_METHOD const u8* row(int nt) const { return records + min(nt * 4 + t, last) * stride; }
    DEVICE_METHOD static int half_of(int n) { return n % 4 / 2; }
    DEVICE_METHOD uint4 octet(int nt, int at, int block) const {
        return *(const uint4*)(column(nt) + at * RECORD + block * 128);
    }
    // Four signed bytes as two pairs of f16: 1024 + 128 + code in the low bits of 0x6400, less what is too much.
    DEVICE_METHOD static void widen(u32 bytes, u32* a) {
        a[0] = add_f16x2(__byte_perm(bytes ^ 0x80808080, 0x64646464, 0x4140), 0xe480e480);
        a[2] = add_f16x2(__byte_perm(bytes ^ 0x80808080, 0x64646464, 0x4342), 0xe480e480);
    }
    DEVICE_METHOD static void add(const float d[4], float scale0, float scale1, float* sum) {
        for (int i = 0; i < 4; i++) sum[i] = __fmaf_rn(i < 2 ? scale0 : scale1, d[i], sum[i]);
    }
    DEVICE_METHOD void block_32(int at, int block, const u32 a[4], float scale0, float scale1, float sum[N]) const {
        u32 wide[8];
        for (int i = 0; i < 4; i++) widen(a[i], wide + i / 2 * 4 + i % 2);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const uint4 x = octet(nt, at, block);
            float d[4];
            mma_f16_first(d, wide, x.x, x.y);
            mma_f16(d, wide + 4, x.z, x.w);
            add(d, scale0, scale1, sum + nt * 4);
        }
    }
    DEVICE_METHOD void block_16(int at, int block, const u32 a[2], float scale0, float scale1, float sum[N]) const {
        u32 wide[4];
        for (int i = 0; i < 2; i++) widen(a[i], wide + i);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const int octet = block * 2 + t / 2;
            const uint2 x = *(const uint2*)(column(nt) - t * 32 + at * RECORD + octet * 32 + t % 2 * 8);
            float d[4];
            mma_f16_first(d, wide, x.x, x.y);
            add(d, scale0, scale1, sum + nt * 4);
        }
    }
    DEVICE_METHOD void minima(int at, u32 m0, u32 m1, float sum[N]) const {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            // Two parts of a sum lie in a word for block t and this lane's column: 32 t is counted in `column`.
            const u8* record = column(nt) - t * 32 + at * RECORD;
            const u32 limb = threadIdx.x / 4 % 2;
            mma_f16_8(sum + nt * 4, m0, m1, *(const u32*)(record - limb * 16 + RECORD_PARTS + (t * 2 + limb) * 4));
        }
    }
    DEVICE_METHOD float sum_of(int n, int at, int block) const {
        return ((const float*)(row(n / 4) + at * RECORD + RECORD_SUMS))[block * 2 + n % 2];
    }
    DEVICE_METHOD float scale(int n, int at) const { return *(const float*)(row(n / 4) + at * RECORD + RECORD_SCALE); }
    DEVICE_METHOD float total(const float acc[N], int nt, int half) const {
        const float* both = acc + nt * 4 + half * 2;
        return FLOATS ? both[0] + both[1] : __fmaf_rn(1024.0f, both[0], both[1]);
    }
};
