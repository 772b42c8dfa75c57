// Attention over latent rows of 16-bit and 8-bit values: a token's row is a key that all heads share, and its first LATENT
// values are the value that they share. Compiled for one width of rows (LATENT + TURNED) and storage type. See
// docs/kernels.md#latent.
//
// A block has ROWS queries (row i is head i % heads of the block's heads, of token i / heads) of neighbouring tokens of a
// sequence, and takes the rows of a page at once. Grid (groups of heads, blocks of tokens, spans). Eight warps:
//   scores   each warp a quarter of a row's values (QUARTERS), for half of the queries and all keys, or for all queries and
//            half of the keys; the four sums meet in shared memory, in order
//   softmax  four lanes a query, eight keys each
//   values   each warp 16 queries and a stretch of the values
// What holds for all such kernels is said in latent.cuh.
#include "latent.cuh"

#define THREADS 256
#define WARPS (THREADS / WARP)
#define VALUE_STEPS ((LATENT + 15) / 16)
#define PAGE_BYTES (PAGE_TOKENS * STRIDE)
#define PADDING (ROW_BYTES / 2 - WIDTH)  // columns that no row has
#define ROW_GROUPS (ROWS / 16)
#define COLUMN_GROUPS (WARPS / ROW_GROUPS)
#define VALUES_EACH ((VALUE_STEPS + COLUMN_GROUPS - 1) / COLUMN_GROUPS)
#define QUARTERS 4
// Of a warp in the products of queries and keys: times 16 queries, times 16 keys.
#define OWN_ROWS (ROWS >= 32 ? ROW_GROUPS / 2 : 1)
#define OWN_KEYS (ROWS >= 32 ? 2 : 1)
// A query's scores of a page, a quarter of the sum each; then its weights, hi before lo.
#define SCORES 36
#define SCORE_BYTES (ROWS * SCORES * 4)
// 8-bit floats as they are stored: codes, then exponents. One page is widened at a time.
#define STORED_BYTES (PAGE_TOKENS * (WIDTH + 1))
#define STAGED_BYTES (KV_F8 ? STORED_BYTES : PAGE_BYTES)
// Queries, pages, scores, and what is known of each query.
#define SHARED_BYTES (PARTS * ROWS * STRIDE + STAGES * STAGED_BYTES + (KV_F8 ? PAGE_BYTES : 0) + QUARTERS * SCORE_BYTES + 4 * ROWS * 4)
#ifdef HOST_SHARED_BYTES
static_assert(SHARED_BYTES == HOST_SHARED_BYTES, "the shared memory that a launch asks for");
#endif
static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64, "warps have whole groups of queries");

#if KV_BF16
DEVICE void mma_stored(float d[4], const u32 a[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
#else
DEVICE void mma_stored(float d[4], const u32 a[4], u32 b0, u32 b1) { mma_f16(d, a, b0, b1); }
#endif

// Starts copying a page. What lies outside of places from..last becomes zero.
DEVICE void stage_page(u32 to, u8* at, const Stored* stored, int begins, int from, int last) {
#if KV_F8
    // As a page lies, and it is aligned to its 32 tokens.
    const u8* page = (const u8*)stored;
    for (int i = threadIdx.x * 16; i < STORED_BYTES; i += THREADS * 16) copy_async<16>(to + i, page + i);
#else
    if constexpr (WIDTH % 8 == 0) {
        constexpr int pieces = WIDTH / 8;
#pragma unroll 4
        for (int i = threadIdx.x; i < PAGE_TOKENS * pieces; i += THREADS) {
            const int row = i / pieces, byte = i % pieces * 16, place = begins + row;
            copy_async_or_zeros<16>(to + at_row(row, byte), (const u8*)(stored + row * WIDTH) + byte, place >= from && place <= last);
        }
    } else {
        for (int i = threadIdx.x; i < PAGE_TOKENS * WIDTH; i += THREADS) {
            const int row = i / WIDTH, column = i % WIDTH, place = begins + row;
            *(u16*)(at + at_row(row, column * 2 & ~15) + (column * 2 & 15)) = place >= from && place <= last ? stored[i] : 0;
        }
    }
#endif
}
#if KV_F8
// Widens a page to f16.
DEVICE void widen_page(u8* to, const u8* staged, int begins, int from, int last) {
    for (int i = threadIdx.x; i < PAGE_TOKENS * ((WIDTH + 1) / 2); i += THREADS) {
        const int row = i / ((WIDTH + 1) / 2), column = i % ((WIDTH + 1) / 2) * 2, place = begins + row;
        const u32 factor = float8_factor(staged[PAGE_TOKENS * WIDTH + row]);
        const u8* codes = staged + row * WIDTH + column;
        const u32 both = codes[0] | (column + 1 < WIDTH ? (u32)codes[1] << 8 : 0);
        const u32 wide = place >= from && place <= last ? mul_f16x2(two_floats8_of(both, 0), factor) : 0;
        *(u32*)(to + at_row(row, column * 2 & ~15) + (column * 2 & 15)) = wide;
    }
}
#endif

// The scores of a page: this warp's share of them, a quarter of each sum.
DEVICE void score_page(u32 queries, u32 keys, float* scores, int warp, int lane) {
    const int quarter = warp % QUARTERS, half = warp / QUARTERS, g = lane / 4, t = lane % 4;
    const int first_row = ROWS >= 32 ? half * OWN_ROWS * 16 : 0, first_key = ROWS >= 32 ? 0 : half * 16;
    float s[OWN_ROWS][OWN_KEYS * 2][4];
#pragma unroll
    for (int i = 0; i < OWN_ROWS * OWN_KEYS * 8; i++) s[i / (OWN_KEYS * 8)][i / 4 % (OWN_KEYS * 2)][i % 4] = 0.0f;
#pragma unroll 3
    for (int k = quarter * K_STEPS / QUARTERS; k < (quarter + 1) * K_STEPS / QUARTERS; k++) {
        u32 b[OWN_KEYS][4];
#pragma unroll
        for (int n = 0; n < OWN_KEYS; n++)
            load_matrices(b[n], keys + at_row(first_key + n * 16 + lane / 16 * 8 + lane % 8, k * 32 + lane / 8 % 2 * 16));
#pragma unroll
        for (int m = 0; m < OWN_ROWS; m++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                u32 q[4];
                load_matrices(q, queries + p * ROWS * STRIDE + at_row(first_row + m * 16 + lane % 16, k * 32 + lane / 16 * 16));
#pragma unroll
                for (int n = 0; n < OWN_KEYS; n++) {
                    mma_stored(s[m][n * 2], q, b[n][0], b[n][1]);
                    mma_stored(s[m][n * 2 + 1], q, b[n][2], b[n][3]);
                }
            }
    }
#pragma unroll
    for (int m = 0; m < OWN_ROWS; m++)
#pragma unroll
        for (int n = 0; n < OWN_KEYS * 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* to = scores + quarter * ROWS * SCORES + (first_row + m * 16 + i * 8 + g) * SCORES + first_key + n * 8 + t * 2;
                *(float2*)to = make_float2(s[m][n][i * 2], s[m][n][i * 2 + 1]);
            }
}

KERNEL __launch_bounds__(THREADS, 1) latent_attention(Step step, Latent a, const float* absorbed, const float* queries, const Stored* pages, float* out) {
    DYNAMIC_SHARED(uint4, smem);
    u8* query_at = (u8*)smem;
    u8* staged = query_at + PARTS * ROWS * STRIDE;
    u8* wide = staged + STAGES * STAGED_BYTES;
    float* scores = (float*)(wide + (KV_F8 ? PAGE_BYTES : 0));
    float* factors = scores + QUARTERS * ROWS * SCORES;
    float *rescales = factors + ROWS, *laters = rescales + ROWS, *inverses = laters + ROWS;
    const u32 queries_at = shared_address(query_at), staged_at = shared_address(staged), scores_at = shared_address(scores);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int row_group = warp % ROW_GROUPS, column_group = warp / ROW_GROUPS;
    // The query whose softmax this thread has a part of, and its keys of a page.
    const int softmax_row = threadIdx.x / 4, softmax_key = threadIdx.x % 4 * 8;
    const bool weighs = softmax_row < ROWS;
    const int head = blockIdx.x * a.block_heads, heads = min(a.block_heads, a.heads - head);
    let_next_start();
    wait_for_inputs();
    // The last tokens see the most: they begin.
    const int begin = a.first + (gridDim.y - 1 - blockIdx.y) * a.tokens;
    const int tokens = min(min(begin + a.tokens, a.first + a.limit), step_rows(step, 0));
    if (PADDING > 0) {
        u8* at = KV_F8 ? wide : staged;
        for (int i = threadIdx.x; i < (KV_F8 ? 1 : STAGES) * PAGE_TOKENS * PADDING; i += THREADS) {
            const int row = i / max(PADDING, 1), byte = (WIDTH + i % max(PADDING, 1)) * 2;
            *(u16*)(at + row / PAGE_TOKENS * PAGE_BYTES + at_row(row % PAGE_TOKENS, byte & ~15) + (byte & 15)) = 0;
        }
    }

    int next;
#pragma unroll 1
    for (int first = begin; first < tokens; first = next) {
        next = min(step.lasts[first] + 1, tokens);
        const int count = (next - first) * heads, place = step.places[first], last = step.places[next - 1];
        const int from = first_seen(a, place);
        const int* table = step.tables + step.tables[a.group * step.stride + first];
        int span = from / SPAN, last_span = last / SPAN;
        if (a.spans) {
            if ((int)blockIdx.z < span || (int)blockIdx.z > last_span) continue;
            span = last_span = blockIdx.z;
        }
        __syncthreads();
#pragma unroll 1
        for (int row = warp; row < ROWS; row += WARPS) {
            const long own = min(row, count - 1), token = first + own / heads, h = head + own % heads;
            put_query(a, query_at, factors, row, absorbed + (token * a.heads + h) * LATENT, queries + (token * a.heads + h) * a.each, lane);
        }
        // Of all spans before: of this thread's query.
        float before_max = -INFINITY_F, before_sum = 0.0f;
        // The place of this thread's query, and the first that it sees.
        const int own = place + min(softmax_row, count - 1) / heads, own_from = first_seen(a, own);
#pragma unroll 1
        for (; span <= last_span; span++) {
            const int first_page = max(span * SPAN, from) / PAGE_TOKENS, last_page = min(span * SPAN + SPAN - 1, last) / PAGE_TOKENS;
            auto stage = [&](int page) {
                const int at = (page - first_page) % STAGES;
                if (page <= last_page)
                    stage_page(staged_at + at * STAGED_BYTES, staged + at * STAGED_BYTES, pages + (long)table[page] * head_values(WIDTH), page * PAGE_TOKENS, from, last);
                copy_commit();
            };
            float most = -INFINITY_F, sum = 0.0f, total[VALUES_EACH * 2][4];
#pragma unroll
            for (int n = 0; n < VALUES_EACH * 2; n++)
                for (int i = 0; i < 4; i++) total[n][i] = 0.0f;
            __syncthreads();
            for (int i = 0; i < STAGES - 1; i++) stage(first_page + i);
#pragma unroll 1
            for (int page = first_page; page <= last_page; page++) {
                // Nobody reads the page before any more, nor its weights.
                if (STAGES == 1) {
                    __syncthreads();
                    stage(page);
                }
                copy_wait<STAGES == 1 ? 0 : STAGES - 2>();
                __syncthreads();
                if (STAGES > 1) stage(page + STAGES - 1);
                const int at = (page - first_page) % STAGES, begins = page * PAGE_TOKENS;
#if KV_F8
                widen_page(wide, staged + at * STAGED_BYTES, begins, from, last);
                __syncthreads();
                const u32 keys = shared_address(wide);
#else
                const u32 keys = staged_at + at * STAGED_BYTES;
#endif
                score_page(queries_at, keys, scores, warp, lane);
                __syncthreads();
                if (weighs) {
                    const float* from_scores = scores + softmax_row * SCORES + softmax_key;
                    float s[8];
                    // The quarters in order.
#pragma unroll
                    for (int q = 0; q < QUARTERS; q++)
#pragma unroll
                        for (int i = 0; i < 8; i += 4) {
                            const float4 four = *(const float4*)(from_scores + q * ROWS * SCORES + i);
                            s[i] = q ? __fadd_rn(s[i], four.x) : four.x;
                            s[i + 1] = q ? __fadd_rn(s[i + 1], four.y) : four.y;
                            s[i + 2] = q ? __fadd_rn(s[i + 2], four.z) : four.z;
                            s[i + 3] = q ? __fadd_rn(s[i + 3], four.w) : four.w;
                        }
                    const float factor = factors[softmax_row];
                    float page_max = -INFINITY_F;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const int key = begins + softmax_key + i;
                        s[i] = key < own_from || key > own ? -INFINITY_F : __fmul_rn(s[i], factor);
                        page_max = fmaxf(page_max, s[i]);
                    }
                    page_max = fmaxf(page_max, __shfl_xor_sync(ALL_LANES, page_max, 1));
                    page_max = fmaxf(page_max, __shfl_xor_sync(ALL_LANES, page_max, 2));
                    const float all = fmaxf(most, page_max), rescale = rescale_of(most, all), base = all == -INFINITY_F ? 0.0f : all;
                    most = all;
                    // Lanes of a query read its scores before one of them writes weights over them.
                    __syncwarp();
                    float page_sum = 0.0f;
                    u8* to = (u8*)(scores + softmax_row * SCORES) + softmax_key * 2;
#pragma unroll
                    for (int i = 0; i < 8; i += 2) {
                        const float x = exp2_approx(s[i] - base), y = exp2_approx(s[i + 1] - base);
                        u32 parts[PARTS];
                        rounded_pair(x, y, parts);
#if KV_BF16
                        page_sum = __fadd_rn(page_sum, __fadd_rn(x, y));
#else
                        // As they are multiplied.
                        page_sum = __fadd_rn(page_sum, __fadd_rn(f16_to_f32((u16)parts[0]), f16_to_f32((u16)(parts[0] >> 16))));
#endif
#pragma unroll
                        for (int p = 0; p < PARTS; p++) *(u32*)(to + p * PAGE_TOKENS * 2 + i * 2) = parts[p];
                    }
                    page_sum = __fadd_rn(page_sum, __shfl_xor_sync(ALL_LANES, page_sum, 1));
                    page_sum = __fadd_rn(page_sum, __shfl_xor_sync(ALL_LANES, page_sum, 2));
                    sum = __fmaf_rn(sum, rescale, page_sum);
                    if (softmax_key == 0) rescales[softmax_row] = rescale;
                }
                __syncthreads();
                const float rescale[2] = {rescales[row_group * 16 + g], rescales[row_group * 16 + g + 8]};
                // Times one changes nothing.
                if (__any_sync(ALL_LANES, rescale[0] != 1.0f || rescale[1] != 1.0f))
#pragma unroll
                    for (int n = 0; n < VALUES_EACH * 2; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) total[n][i] = __fmul_rn(total[n][i], rescale[i / 2]);
#pragma unroll
                for (int k = 0; k < PAGE_TOKENS / 16; k++) {
                    u32 weights[PARTS][4];
#pragma unroll
                    for (int p = 0; p < PARTS; p++)
                        load_matrices(weights[p], scores_at + (row_group * 16 + lane % 16) * (SCORES * 4) + p * PAGE_TOKENS * 2 + k * 32 + lane / 16 * 16);
#pragma unroll
                    for (int n = 0; n < VALUES_EACH; n++) {
                        const int chunk = column_group * VALUES_EACH + n;
                        if (VALUE_STEPS % COLUMN_GROUPS && chunk >= VALUE_STEPS) break;
                        u32 b[4];
                        load_matrices_transposed(b, keys + at_row(k * 16 + lane / 8 % 2 * 8 + lane % 8, chunk * 32 + lane / 16 * 16));
#pragma unroll
                        for (int p = 0; p < PARTS; p++) {
                            mma_stored(total[n * 2], weights[p], b[0], b[1]);
                            mma_stored(total[n * 2 + 1], weights[p], b[2], b[3]);
                        }
                    }
                }
            }
            // The span is merged into those before it, or left to latent_merge.
            __syncthreads();
            if (weighs) {
                const float all = fmaxf(before_max, most), earlier = rescale_of(before_max, all), later = rescale_of(most, all);
                before_sum = merged_sum(before_sum, earlier, sum, later);
                before_max = all;
                if (softmax_key == 0) rescales[softmax_row] = earlier, laters[softmax_row] = later, inverses[softmax_row] = 1.0f / before_sum;
            }
            __syncthreads();
            const bool starts = span == from / SPAN, ends = span == last_span;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = row_group * 16 + g + i * 8;
                if (row >= count) continue;
                const long query = (long)(first + row / heads) * a.heads + head + row % heads;
                float* to = a.spans ? a.partials + ((query - (long)a.first * a.heads) * a.spans + span) * (LATENT + 2) : out + query * LATENT;
                const float earlier = rescales[row], later = laters[row], inverse = inverses[row];
#pragma unroll
                for (int n = 0; n < VALUES_EACH * 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = column_group * VALUES_EACH * 16 + n * 8 + t * 2 + e;
                        if (column >= LATENT) continue;
                        const float value = total[n][i * 2 + e];
                        if (a.spans) {
                            to[column] = value;
                        } else {
                            const float merged = merged_sum(starts ? 0.0f : to[column], earlier, value, later);
                            to[column] = ends ? __fmul_rn(merged, inverse) : merged;
                        }
                    }
            }
            if (a.spans && weighs && softmax_key == 0 && softmax_row < count) {
                const long query = (long)(first - a.first + softmax_row / heads) * a.heads + head + softmax_row % heads;
                float* to = a.partials + (query * a.spans + span) * (LATENT + 2) + LATENT;
                to[0] = most, to[1] = sum;
            }
        }
    }
    copy_wait<0>();
}
