// RoPE of query and key heads, and the writing of keys and values, or of latent rows, into their pages. See
// docs/kernels.md#rope.
#include "kv.cuh"
#include "rope.cuh"

struct HeadCounts {
    int query, kv, dim;
};
// In place: grid (query + kv heads, tokens), a thread per pair.
KERNEL rope(Step step, HeadCounts heads, Rotation rope, float* qkv) {
    let_next_start();
    wait_for_inputs();
    const long r = blockIdx.y;
    if (r >= step_rows(step, 0)) return;
    float* head = qkv + r * (heads.query + 2 * heads.kv) * heads.dim + blockIdx.x * heads.dim;
    float position = (float)step.positions[r];
    for (int i = threadIdx.x; i < rope.pairs; i += blockDim.x) {
        const float2 both = rotated(rotation_of(rope, position, i), head[i], head[i + rope.pairs]);
        head[i] = both.x;
        head[i + rope.pairs] = both.y;
    }
}

// Grid (kv heads, tokens), a thread per value of the head; of 8-bit floats a warp for the keys and one for the values.
KERNEL kv_write(Step step, HeadCounts heads, int group, const float* qkv, Stored* pages) {
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, head = blockIdx.x;
    if (r >= step_rows(step, 0)) return;
    const int place = step.places[r];
    const int page = page_of(step, r, group, place);
    const float* key = qkv + (long)r * (heads.query + 2 * heads.kv) * heads.dim + (heads.query + head) * heads.dim;
    const float* value = key + heads.kv * heads.dim;
#if KV_F8
    for (int v = threadIdx.x / WARP; v < 2; v += blockDim.x / WARP)
        store_head(pages + page_values(page, v, head, heads.kv, heads.dim), place % PAGE_TOKENS, v ? value : key, heads.dim, threadIdx.x % WARP);
#else
    const long at = place % PAGE_TOKENS * heads.dim;
    for (int i = threadIdx.x; i < heads.dim; i += blockDim.x) {
        pages[page_values(page, 0, head, heads.kv, heads.dim) + at + i] = stored(key[i]);
        pages[page_values(page, 1, head, heads.kv, heads.dim) + at + i] = stored(value[i]);
    }
#endif
}

// Both fused, as a layer needs it: a block per token, which computes each angle once; a warp per head. With `keys`
// attention rotates the queries: qkv is not written, only pages are.
#define PAIRS_AT_ONCE 256
KERNEL __launch_bounds__(256) rope_and_write(Step step, HeadCounts heads, Rotation rope, int group, float* qkv, Stored* pages, int keys) {
    __shared__ float2 angles[PAIRS_AT_ONCE];
    let_next_start();
    const int r = blockIdx.x;
    if (r >= step_rows(step, 0)) return wait_for_inputs();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int place = step.places[r], page = page_of(step, r, group, place);
    const float position = (float)step.positions[r];
    float* token = qkv + (long)r * (heads.query + 2 * heads.kv) * heads.dim;
    auto stored_at = [&](int head) {
        const int v = head >= heads.query + heads.kv, kv = (head - heads.query) % heads.kv;
        return pages + page_values(page, v, kv, heads.kv, heads.dim) + (KV_F8 ? 0 : place % PAGE_TOKENS * heads.dim);
    };
    for (int start = 0; start == 0 || start < rope.pairs; start += PAIRS_AT_ONCE) {
        const int end = min(rope.pairs, start + PAIRS_AT_ONCE);
        __syncthreads();
        for (int i = start + threadIdx.x; i < end; i += blockDim.x) angles[i - start] = rotation_of(rope, position, i);
        __syncthreads();
        if (start == 0) wait_for_inputs();
        for (int head = (keys ? heads.query : 0) + warp; head < heads.query + heads.kv; head += warps) {
            float* values = token + head * heads.dim;
#if !KV_F8
            Stored* to = head < heads.query ? 0 : stored_at(head);
#endif
            for (int i = start + lane; i < end; i += WARP) {
                const float2 both = rotated(angles[i - start], values[i], values[i + rope.pairs]);
                if (!keys) {
                    values[i] = both.x;
                    values[i + rope.pairs] = both.y;
                }
#if !KV_F8
                if (to) {
                    to[i] = stored(both.x);
                    to[i + rope.pairs] = stored(both.y);
                }
#endif
            }
        }
    }
#if KV_F8
    // A whole head at a time, whichever warps have rotated it.
    __syncthreads();
    for (int head = heads.query + warp; head < heads.query + 2 * heads.kv; head += warps)
        store_head(stored_at(head), place % PAGE_TOKENS, token + head * heads.dim, heads.dim, lane);
#else
    // What is not rotated: the rest of keys, and values.
    for (int head = heads.query + warp; head < heads.query + 2 * heads.kv; head += warps) {
        const float* values = token + head * heads.dim;
        Stored* to = stored_at(head);
        for (int i = (head < heads.query + heads.kv ? 2 * rope.pairs : 0) + lane; i < heads.dim; i += WARP) to[i] = stored(values[i]);
    }
#endif
}

// A token's latent row: the latent values, then the turned ones. Grid (tokens), a thread per value; of 8-bit floats one
// warp finds what they share. `row` is (latent + turned) floats of shared memory.
KERNEL latent_write(Step step, int group, int latent, int turned, const float* latents, const float* turneds, Stored* pages) {
    DYNAMIC_SHARED(float, row);
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.x, width = latent + turned;
    if (r >= step_rows(step, 0)) return;
    const int place = step.places[r];
    Stored* page = pages + (long)page_of(step, r, group, place) * head_values(width);
    auto value = [&](int i) { return i < latent ? latents[(long)r * latent + i] : turneds[(long)r * turned + i - latent]; };
#if KV_F8
    for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] = value(i);
    __syncthreads();
    if (threadIdx.x < WARP) store_head(page, place % PAGE_TOKENS, row, width, threadIdx.x);
#else
    for (int i = threadIdx.x; i < width; i += blockDim.x) page[(long)(place % PAGE_TOKENS) * width + i] = stored(value(i));
#endif
}
