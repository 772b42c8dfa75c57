// What the attention kernels over pages of 16-bit and 8-bit keys and values share. Compiled for one head size (DIM),
// GQA group (GROUP: query heads of a K/V head) and storage type; soft-capped scores (CAPPED), attention sinks (SINKS),
// queries that also see later tokens of their sequence (BOTH), and sequences in chunks (CHUNKED).
//
// Keys are taken in tiles of 64, aligned to absolute places. Each tile has its own softmax, and tiles are merged in
// order, so a token's result has the same bits whichever tokens are computed beside it, and whether one block does all
// its tiles or each tile has its own. Every kernel does the following for a tile, in this order of sums:
//   scores   16 queries x 8 keys by mma.sync, over the head's values in steps of 16. A query's value is two numbers of the
//            stored type (hi and lo), after scaling by a power of two that brings the row's largest into
//            [2^13, 2^14): one number alone costs 1e-7 to 5e-7 of a row's mean square, as it would for the weights.
//   weights  2^(score - the row's maximum), as hi and lo again;
//   sums     weights x values, and weights x 1, by mma.sync over the keys in steps of 16.
// 8-bit floats are copied as they are stored and widened to f16 tile by tile, which is exact where f16 has the value:
// everything else is as with f16. What a row does not see of a tile has a weight of zero. A value that is not finite
// therefore spoils every row of the same sequence that shares its tile; never another sequence.
#pragma once
#include "activation.cuh"
#include "kv.cuh"
#include "rope.cuh"

#ifndef CHUNKED
#define CHUNKED 0
#endif
#define TILE 64
#define OUTPUTS (GROUP * DIM)
#define LOG2_E 1.4426950408889634f
// Rows of keys, values and queries in shared memory, swizzled or padded: eight rows at one column are in different
// banks.
#define DIM_PADDED ((DIM + 15) / 16 * 16)
#define STEPS (DIM_PADDED / 16)
#define ROW_BYTES (DIM_PADDED * 2)
#define SWIZZLED (ROW_BYTES % 128 == 0)
#define STRIDE (SWIZZLED ? ROW_BYTES : ROW_BYTES + 16)
#define TILE_BYTES (TILE * STRIDE)
#define PARTS 2  // hi and lo of a query's value, and of a weight

struct Attention {
    int query, kv, group, window;  // a window of 0 sees all
    float scale;
    int first;        // the first token of the launch
    int stages;       // tiles in shared memory at once: 1 or 2, so that tile i is at `i & (stages - 1)`
    int clusters;     // whether the blocks of a token are a cluster
    float* partials;  // (token, kv head, tile, GROUP x (DIM + 2)) where each tile has a block and another kernel merges
    Rotation rope;    // no frequencies: queries are rotated and keys are stored already
    const float* sinks;  // (query heads)
    float cap;
    int tiles;        // of each token, in `partials`
    int columns;  // of a row: queries, keys and values, or queries alone where keys are stored already
    int chunk;    // with CHUNKED: nothing before a token's chunk of so many places is seen
};

// The last place that a token sees, and the first.
DEVICE int last_seen(const Step& step, int r) { return step.places[BOTH ? step.lasts[r] : r]; }
DEVICE int first_seen(const Attention& a, int place) {
    const int near = a.window ? max(place + 1 - a.window, 0) : 0;
    return CHUNKED ? max(near, place / a.chunk * a.chunk) : near;
}
// What the softmax starts from: a sink has a share and no value. Maxima are in units of log2.
DEVICE float first_max(const Attention& a, int head) { return SINKS ? __fmul_rn(a.sinks[head], LOG2_E) : -INFINITY_F; }
#define FIRST_SUM (SINKS ? 1.0f : 0.0f)

// The online-softmax rescale factor of a sum whose maximum was `own` where the maximum is now `all`.
DEVICE float rescale_of(float own, float all) { return own == -INFINITY_F ? 0.0f : exp2_approx(own - all); }
// Merges a later tile into those before it. Rounded once, so that every caller gets the same bits.
DEVICE float merged_sum(float sum, float rescale, float later_sum, float later_rescale) {
    return __fmaf_rn(later_sum, later_rescale, __fmul_rn(sum, rescale));
}

// Where 16 bytes of a row lie in a tile. For wgmma (HALVES) 64 columns of all rows lie before the next 64.
#ifndef HALVES
#define HALVES 0
#endif
DEVICE u32 at_row(int row, int byte) {
    if (HALVES) return byte / 128 * (TILE * 128) + row * 128 + (byte % 128 ^ (row & 7) << 4);
    return row * STRIDE + (SWIZZLED ? byte ^ (row & 7) << 4 : byte);
}

// 16 rows of queries, or of keys, x 16 of their values as the first operand: step k of the rows from `row` on.
DEVICE void load_rows(u32 m[4], u32 rows, int row, int k, int lane) {
    load_matrices(m, rows + at_row(row + lane % 16, k * 32 + lane / 16 * 16));
}
// 16 keys x 16 of their values as the second operand of two products: m[0], m[1] are the first eight keys'.
DEVICE void load_keys(u32 m[4], u32 keys, int key, int k, int lane) {
    load_matrices(m, keys + at_row(key + lane / 16 * 8 + lane % 8, k * 32 + lane / 8 % 2 * 16));
}
// 16 values of 16 keys as the second operand of two products: m[0], m[1] are the first eight values'.
DEVICE void load_values(u32 m[4], u32 values, int key, int chunk, int lane) {
    load_matrices_transposed(m, values + at_row(key + lane / 8 % 2 * 8 + lane % 8, chunk * 32 + lane / 16 * 16));
}

#if KV_BF16
#define ONES 0x3f803f80
DEVICE void mma_stored(float d[4], const u32 a[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
// Two values as hi and lo: both hi, then both lo.
DEVICE void rounded_pair(float x, float y, u32 parts[2]) {
    const u16 a = f32_to_bf16(x), b = f32_to_bf16(y);
    parts[0] = pair(a, b);
    parts[1] = pair(f32_to_bf16(x - bf16_to_f32(a)), f32_to_bf16(y - bf16_to_f32(b)));
}
#else
#define ONES 0x3c003c00
DEVICE void mma_stored(float d[4], const u32 a[4], u32 b0, u32 b1) { mma_f16(d, a, b0, b1); }
DEVICE void rounded_pair(float x, float y, u32 parts[2]) {
    parts[0] = pack_f16x2(x, y);
    parts[1] = pack_f16x2(x - f16_to_f32((u16)parts[0]), y - f16_to_f32((u16)(parts[0] >> 16)));
}
#endif

// The two pages of a tile. Only their numbers: the copying thread computes addresses, so nobody waits for this load.
struct TilePages {
    int page[2];
};
DEVICE TilePages pages_of(const int* table, int tile, int last) {
    return {{table[min(tile * 2, last / PAGE_TOKENS)], table[min(tile * 2 + 1, last / PAGE_TOKENS)]}};
}

#if KV_F8
// Keys, or values, of a tile as they are stored: codes, then exponents. One tile is widened to f16 at a time; `stages`
// are as stored.
#define CODES_BYTES (TILE * DIM)
#define STORED_BYTES (CODES_BYTES + TILE)
#define TILES 1
#define TILES_BYTES(stages) (2 * TILE_BYTES + (stages) * 2 * STORED_BYTES)
DEVICE u32 stage_at(u32 staged, int stage) { return staged + 2 * TILE_BYTES + stage * 2 * STORED_BYTES; }

#define PIECE (DIM % 16 == 0 ? 16 : DIM % 8 == 0 ? 8 : 4)
// Starts copying a whole tile, keys and values, whatever of it is seen.
template <int THREADS>
DEVICE void stage_tile(const Attention& a, u32 to, const Stored* pages, const TilePages& two, int kv, int, int, int, int) {
    const int pieces = PAGE_TOKENS * DIM / PIECE;
    const long values = (long)a.kv * head_values(DIM);
    for (int half = 0; half < 2; half++) {
        const u8* base = pages + page_values(two.page[half], 0, kv, a.kv, DIM);
        const u32 codes = to + half * PAGE_TOKENS * DIM, exponents = to + CODES_BYTES + half * PAGE_TOKENS;
#pragma unroll 4
        for (int i = threadIdx.x; i < pieces; i += THREADS) {
            copy_async<PIECE>(codes + i * PIECE, base + i * PIECE);
            copy_async<PIECE>(codes + STORED_BYTES + i * PIECE, base + values + i * PIECE);
        }
        // Of keys, then of values.
        const int v = threadIdx.x / (PAGE_TOKENS / 4), four = threadIdx.x % (PAGE_TOKENS / 4) * 4;
        if (v < 2) copy_async<4>(exponents + v * STORED_BYTES + four, base + v * values + PAGE_TOKENS * DIM + four);
    }
}
// Widens a tile to f16. What lies outside of places from..last becomes zero, so that a weight of zero adds nothing;
// place `fresh` is left to the caller.
#define WIDENED (DIM % 8 == 0 ? 8 : 4)  // codes that a thread takes at once
template <int THREADS> DEVICE void widen_tile(u8* tiles, const u8* stage, int tile, int from, int last, int fresh) {
    const int pieces = DIM / WIDENED;
#pragma unroll 2
    for (int i = threadIdx.x; i < 2 * TILE * pieces; i += THREADS) {
        const int v = i / (TILE * pieces), key = i / pieces % TILE, at = i % pieces * WIDENED, place = tile * TILE + key;
        if (place == fresh) continue;
        const u8* stored = stage + v * STORED_BYTES;
        const u32 factor = float8_factor(stored[CODES_BYTES + key]);
        const bool there = place >= from && place <= last;
        u32 wide[WIDENED / 2];
#pragma unroll
        for (int w = 0; w < WIDENED / 4; w++) {
            const u32 codes = *(const u32*)(stored + key * DIM + at + w * 4);
            for (int last_two = 0; last_two < 2; last_two++)
                wide[w * 2 + last_two] = there ? mul_f16x2(two_floats8_of(codes, last_two), factor) : 0;
        }
        u8* to = tiles + v * TILE_BYTES + at_row(key, at * 2 / 16 * 16) + at * 2 % 16;
#if DIM % 8 == 0
        *(uint4*)to = make_uint4(wide[0], wide[1], wide[2], wide[3]);
#else
        *(uint2*)to = make_uint2(wide[0], wide[1]);
#endif
    }
}
#else
// Tiles of keys and values, `stages` of them.
#define TILES a.stages
#define TILES_BYTES(stages) ((stages) * 2 * TILE_BYTES)
DEVICE u32 stage_at(u32 staged, int stage) { return staged + stage * 2 * TILE_BYTES; }

// Copies of 16 bytes, or of 8 where rows are not a multiple of 16.
#define PIECE (DIM * 2 % 16 == 0 ? 16 : 8)
// Starts copying the keys of a tile of one K/V head, or its values (`v` is 1). What lies outside of places from..last
// becomes zero, so that a weight of zero adds nothing; place `fresh` is left to the caller.
template <int THREADS>
DEVICE void stage_half(const Attention& a, u32 to, const Stored* pages, const TilePages& two, int kv, int v, int tile, int from, int last, int fresh) {
    constexpr int pieces = DIM * 2 / PIECE, apart = THREADS / pieces;
    const int begins = tile * TILE;
    const u8* base[2];
    for (int i = 0; i < 2; i++) base[i] = (const u8*)(pages + page_values(two.page[i], v, kv, a.kv, DIM));
    to += v * TILE_BYTES;
    auto there = [&](int place) { return place >= from && place <= last; };
    if constexpr (THREADS % pieces == 0 && PAGE_TOKENS % apart == 0) {
        // A thread has the same piece of every `apart`-th key: every address is a constant distance from the first.
        const int key = threadIdx.x / pieces, byte = threadIdx.x % pieces * PIECE;
        const u8* at[2] = {base[0] + key * (DIM * 2) + byte, base[1] + key * (DIM * 2) + byte};
        auto copy = [&](int i, bool is_there) {
            // Rows eight apart have the same swizzle.
            const u32 here = apart % 8 ? at_row(key + i, byte / 16 * 16) : at_row(key, byte / 16 * 16) + at_row(i, 0);
            copy_async_or_zeros<PIECE>(to + here + byte % 16, at[i / PAGE_TOKENS] + i % PAGE_TOKENS * (DIM * 2), is_there);
        };
        if (begins >= from && begins + TILE - 1 <= last && (fresh < begins || fresh >= begins + TILE)) {
#pragma unroll
            for (int i = 0; i < TILE; i += apart) copy(i, true);
        } else {
#pragma unroll
            for (int i = 0; i < TILE; i += apart)
                if (begins + key + i != fresh) copy(i, there(begins + key + i));
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < TILE * pieces; i += THREADS) {
            const int key = i / pieces, byte = i % pieces * PIECE;
            if (begins + key == fresh) continue;
            const u8* at = (key < PAGE_TOKENS ? base[0] : base[1]) + key % PAGE_TOKENS * (DIM * 2) + byte;
            copy_async_or_zeros<PIECE>(to + at_row(key, byte / 16 * 16) + byte % 16, at, there(begins + key));
        }
    }
}
template <int THREADS>
DEVICE void stage_tile(const Attention& a, u32 to, const Stored* pages, const TilePages& two, int kv, int tile, int from, int last, int fresh) {
#pragma unroll
    for (int v = 0; v < 2; v++) stage_half<THREADS>(a, to, pages, two, kv, v, tile, from, last, fresh);
}
#endif
#ifdef HOST_TILES_BYTES
static_assert(TILES_BYTES(1) == HOST_TILES_BYTES, "the shared memory that a launch asks for");
#endif
// Zeros the padding columns, once.
template <int THREADS> DEVICE void clear_padding(u32 to, int rows) {
#if DIM != DIM_PADDED
    for (int i = threadIdx.x; i < rows * (DIM_PADDED - DIM) / 4; i += THREADS) {
        const int row = i / ((DIM_PADDED - DIM) / 4), byte = DIM * 2 + i % ((DIM_PADDED - DIM) / 4) * 8;
        store_shared_zeros(to + at_row(row, byte / 16 * 16) + byte % 16);
    }
#endif
}

// A warp loads a head of a row so that each lane can rotate its own values. Of two rotary pairs j and j + 1 (j = 2 x
// lane, 2 x lane + 64, ...) a lane has the first values, then the second, which lie `pairs` behind; of the values that
// are not rotated, four neighbours. `pairs` is even.
#define HEAD_FOURS ((DIM / 4 + WARP - 1) / WARP)
DEVICE int four_first(int j, int pairs) { return j < pairs ? j : 2 * j; }
DEVICE int four_second(int j, int pairs) { return j < pairs ? j + pairs : 2 * j + 2; }
DEVICE void load_head(float4 values[HEAD_FOURS], const float* head, int pairs, int lane) {
#pragma unroll
    for (int n = 0; n < HEAD_FOURS; n++) {
        const int j = (n * WARP + lane) * 2;
        values[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (DIM / 4 % WARP && j >= DIM / 2) continue;
        const float2 x = load_l2((const float2*)(head + four_first(j, pairs))), y = load_l2((const float2*)(head + four_second(j, pairs)));
        values[n] = make_float4(x.x, x.y, y.x, y.y);
    }
}
// Rotates two pairs by (sine, cosine) of each.
DEVICE float4 rotated_four(float4 angles, float4 values) {
    const float2 x = rotated(make_float2(angles.x, angles.y), values.x, values.z), y = rotated(make_float2(angles.z, angles.w), values.y, values.w);
    return make_float4(x.x, y.x, x.y, y.y);
}
DEVICE u32 largest_of(const float4 values[HEAD_FOURS]) {
    u32 largest = 0;
#pragma unroll
    for (int n = 0; n < HEAD_FOURS; n++) {
        largest = max(largest, max(__float_as_uint(values[n].x) & 0x7fffffff, __float_as_uint(values[n].y) & 0x7fffffff));
        largest = max(largest, max(__float_as_uint(values[n].z) & 0x7fffffff, __float_as_uint(values[n].w) & 0x7fffffff));
    }
    return warp_max(largest);
}
// Stores a query as hi and lo in its row (PARTS x rows apart). The factor that its scores are multiplied by goes to
// `factors`.
DEVICE void put_query(const Attention& a, u8* queries, int rows, float* factors, int row, const float4 values[HEAD_FOURS], int pairs, int lane) {
    // Zeros, infinity and NaN are not scaled; a tiny maximum is scaled as far as a power of two goes.
    const int exponent = largest_of(values) >> 23;
    const int up = exponent == 0 || exponent == 255 ? 127 : min(267 - exponent, 253);
    const float scale = __uint_as_float((u32)up << 23), inverse = __uint_as_float((u32)(254 - up) << 23);
#pragma unroll
    for (int n = 0; n < HEAD_FOURS; n++) {
        const int j = (n * WARP + lane) * 2;
        if (DIM / 4 % WARP && j >= DIM / 2) break;
        u32 first[PARTS], second[PARTS];
        rounded_pair(__fmul_rn(values[n].x, scale), __fmul_rn(values[n].y, scale), first);
        rounded_pair(__fmul_rn(values[n].z, scale), __fmul_rn(values[n].w, scale), second);
        const int x = four_first(j, pairs) * 2, y = four_second(j, pairs) * 2;
        for (int p = 0; p < PARTS; p++) {
            u8* to = queries + p * rows * STRIDE;
            *(u32*)(to + at_row(row, x & ~15) + (x & 15)) = first[p];
            *(u32*)(to + at_row(row, y & ~15) + (y & 15)) = second[p];
        }
    }
    if (lane == 0) factors[row] = CAPPED ? __fmul_rn(a.scale, inverse) : __fmul_rn(__fmul_rn(a.scale, LOG2_E), inverse);
}

// A raw score of the product. With a cap it is in units of log2 from here on, else after `factor`.
DEVICE float capped(const Attention& a, float score, float factor) {
    return CAPPED ? __fmul_rn(soft_cap(__fmul_rn(score, factor), a.cap), LOG2_E) : score;
}
#define POWER_FACTOR(factor) (CAPPED ? 1.0f : (factor))
// A row's maximum in units of log2.
DEVICE float largest_power(float most, float factor) { return __fmul_rn(most, POWER_FACTOR(factor)); }
// The weight of a score where `most` is the maximum: its own is exactly 1, so a query that sees one key returns its
// value.
DEVICE float weight_of(float score, float factor, float most) {
    return exp2_approx(__fmul_rn(score - (most == -INFINITY_F ? 0.0f : most), POWER_FACTOR(factor)));
}
