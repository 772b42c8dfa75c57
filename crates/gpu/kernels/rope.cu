// Rotation of query and key heads, and the writing of keys and values into their pages.
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
        const float2 both = turned(turn_of(rope, position, i), head[i], head[i + rope.pairs]);
        head[i] = both.x;
        head[i + rope.pairs] = both.y;
    }
}

// Grid (kv heads, tokens), a thread per value of the head.
KERNEL kv_write(Step step, HeadCounts heads, int group, const float* qkv, Stored* pages) {
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, head = blockIdx.x;
    if (r >= step_rows(step, 0)) return;
    const int place = step.places[r];
    const int page = page_of(step, r, group, place);
    const float* key = qkv + (long)r * (heads.query + 2 * heads.kv) * heads.dim + (heads.query + head) * heads.dim;
    const float* value = key + heads.kv * heads.dim;
    const long at = place % PAGE_TOKENS * heads.dim;
    for (int i = threadIdx.x; i < heads.dim; i += blockDim.x) {
        pages[page_values(page, 0, head, heads.kv, heads.dim) + at + i] = stored(key[i]);
        pages[page_values(page, 1, head, heads.kv, heads.dim) + at + i] = stored(value[i]);
    }
}

// Both at once, for a step's way through a layer: grid (query + 2 kv heads, tokens).
KERNEL rope_and_write(Step step, HeadCounts heads, Rotation rope, int group, float* qkv, Stored* pages) {
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.y, head = blockIdx.x;
    if (r >= step_rows(step, 0)) return;
    float* values = qkv + (long)r * (heads.query + 2 * heads.kv) * heads.dim + head * heads.dim;
    Stored* to = 0;
    if (head >= heads.query) {
        const int place = step.places[r];
        const int page = page_of(step, r, group, place);
        const int v = head >= heads.query + heads.kv, kv = (head - heads.query) % heads.kv;
        to = pages + page_values(page, v, kv, heads.kv, heads.dim) + place % PAGE_TOKENS * heads.dim;
    }
    const bool turns = head < heads.query + heads.kv;
    const float position = (float)step.positions[r];
    for (int i = threadIdx.x; turns && i < rope.pairs; i += blockDim.x) {
        const float2 both = turned(turn_of(rope, position, i), values[i], values[i + rope.pairs]);
        values[i] = both.x;
        values[i + rope.pairs] = both.y;
        if (to) {
            to[i] = stored(both.x);
            to[i + rope.pairs] = stored(both.y);
        }
    }
    for (int i = (turns ? 2 * rope.pairs : 0) + threadIdx.x; to && i < heads.dim; i += blockDim.x) to[i] = stored(values[i]);
}
