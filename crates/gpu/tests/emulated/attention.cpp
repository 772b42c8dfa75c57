// `attention.cu` for one shape of heads and one way of storing, against attention in f64: one block for all tiles of a token, a block
// for each tile and `merge_tiles` behind them, clusters; one and two tiles in shared memory; whenever copies are done.
// All of them give the same bits. Keys and values that a token does not see are NaN, and page tables lead nowhere
// outside of what it has.
#include "compare.h"
#include "prelude.cuh"

#include "attention.cu"

// Tokens of one key, of whole tiles and of one key more, and of several tiles; blocks of a cluster are left without a
// tile.
static const int KV_HEADS = 2, TOKENS = 4, QUERY_HEADS = KV_HEADS * GROUP, COLUMNS = (QUERY_HEADS + 2 * KV_HEADS) * DIM;
static const int PLACES[TOKENS] = {0, 63, 128, 330}, POSITIONS[TOKENS] = {3, 60, 128, 331};
// Mean square errors, relative to mean squares: of results, and of new keys and values, which are rounded to what is
// stored.
static const double RESULT_ERROR = 1e-9, STORED_ERROR = KV_F8 ? 2e-3 : KV_BF16 ? 5e-6 : 1e-7;

static Step step;
static Attention shape;
static std::vector<float> qkv(TOKENS* COLUMNS), frequencies(DIM / 2), sinks(QUERY_HEADS), partials, out;
static std::vector<int> tables(TOKENS);
static std::vector<Stored> pages;

static int first_place(int token) { return first_seen(shape, PLACES[token]); }
// Where a head's keys, or values, are in the page that has a place of a token.
static Stored* head_in_page(std::vector<Stored>& pages, int token, int at, int v, int kv) {
    return &pages[page_values(tables[tables[token] + at / PAGE_TOKENS], v, kv, KV_HEADS, DIM)];
}
static double stored_value(int token, int at, int v, int kv, int d) {
    const Stored* head = head_in_page(pages, token, at, v, kv);
    const Stored code = head[at % PAGE_TOKENS * DIM + d];
#if KV_F8
    const int exponent = code >> 3 & 15, digits = code & 7, shared_exponent = head[PAGE_TOKENS * DIM + at % PAGE_TOKENS];
    if (shared_exponent == 255) return NAN;
    return (code & 0x80 ? -1 : 1) * (exponent ? ldexp(8 + digits, exponent - 10) : ldexp(digits, -9)) * ldexp(1, shared_exponent - 127);
#else
    return widened(code);
#endif
}
static void store_nan(std::vector<Stored>& pages, int token, int at) {
    for (int i = 0; i < 2 * KV_HEADS; i++) {
        Stored* head = head_in_page(pages, token, at, i % 2, i / 2);
        std::fill_n(head + at % PAGE_TOKENS * DIM, DIM, (Stored)0x7fff);
        if (KV_F8) head[PAGE_TOKENS * DIM + at % PAGE_TOKENS] = 255;
    }
}

// Head `head` of a token's row with its first pairs rotated, as the kernel rotates them.
static std::vector<double> rotated_head(int token, int head, int pairs) {
    const float* from = &qkv[token * COLUMNS + head * DIM];
    std::vector<double> to(from, from + DIM);
    for (int i = 0; i < pairs; i++) {
        const double angle = POSITIONS[token] * frequencies[i], a = from[i], b = from[i + pairs];
        to[i] = a * cos(angle) - b * sin(angle);
        to[i + pairs] = b * cos(angle) + a * sin(angle);
    }
    return to;
}
// The largest error of a new key and its value.
static double stored_error(int pairs) {
    double worst = 0;
    for (int i = 0; i < TOKENS * KV_HEADS; i++) {
        const int token = i / KV_HEADS, kv = i % KV_HEADS;
        Error error;
        for (int v = 0; v < 2; v++) {
            const std::vector<double> right = rotated_head(token, QUERY_HEADS + v * KV_HEADS + kv, v ? 0 : pairs);
            for (int d = 0; d < DIM; d++) error.add(stored_value(token, PLACES[token], v, kv, d), right[d]);
        }
        worst = std::max(worst, error.relative());
    }
    return worst;
}
// The largest error of a head's result, from what is stored.
static double result_error(int pairs) {
    double worst = 0;
    for (int i = 0; i < TOKENS * QUERY_HEADS; i++) {
        const int token = i / QUERY_HEADS, head = i % QUERY_HEADS, kv = head / GROUP;
        const std::vector<double> query = rotated_head(token, head, pairs);
        std::vector<double> scores, wanted(DIM);
        for (int at = first_place(token); at <= PLACES[token]; at++) {
            double score = 0;
            for (int d = 0; d < DIM; d++) score += query[d] * stored_value(token, at, 0, kv, d);
            score *= shape.scale;
            scores.push_back(CAPPED ? shape.cap * tanh(score / shape.cap) : score);
        }
        const double most = std::max(*std::max_element(scores.begin(), scores.end()), SINKS ? (double)sinks[head] : -INFINITY);
        double sum = SINKS ? exp(sinks[head] - most) : 0;
        for (size_t n = 0; n < scores.size(); n++) {
            const double weight = exp(scores[n] - most);
            sum += weight;
            for (int d = 0; d < DIM; d++) wanted[d] += weight * stored_value(token, first_place(token) + n, 1, kv, d);
        }
        Error error;
        for (int d = 0; d < DIM; d++) error.add(out[i * DIM + d], wanted[d] / sum);
        worst = std::max(worst, error.relative());
    }
    return worst;
}

// The kernels, so many blocks for a token.
static void run(int blocks, bool clusters, int tiles) {
    partials.assign(TOKENS * KV_HEADS * blocks * GROUP * (DIM + 2), NAN);
    shape.partials = partials.data();
    shape.clusters = clusters;
    shape.tiles = blocks;
    const int share = (OUTPUTS + 2 * blocks - 1) / (2 * blocks) * 2, tiles_sent = (tiles + blocks - 1) / blocks * blocks;
    const int sent = GROUP * CLUSTER_TILES * (int)sizeof(float2) + tiles_sent * share * 4;
    emulated::shared_bytes = TILES_BYTES(shape.stages) + PARTS * QUERIES * (STRIDE + TILE * 2) + (clusters ? sent : 0);
    gridDim = {KV_HEADS, TOKENS, blocks};
    auto body = [] { attention(step, shape, qkv.data(), pages.data(), out.data()); };
    const int together = clusters ? blocks : 1;
    for (int token = 0; token < TOKENS; token++)
        for (int kv = 0; kv < KV_HEADS; kv++)
            for (int z = 0; z < blocks; z += together) emulated::run({kv, token, z}, together, THREADS, body);
    if (clusters || blocks == 1) return;
    emulated::shared_bytes = 0;
    gridDim = {QUERY_HEADS, TOKENS, 1};
    for (int i = 0; i < QUERY_HEADS * TOKENS; i++)
        emulated::run({i % QUERY_HEADS, i / QUERY_HEADS, 0}, 1, MERGE_THREADS, [] { merge_tiles(step, shape, out.data()); });
}

int main() {
    for (auto& one : qkv) one = random_value();
    for (auto& one : sinks) one = random_value();
    for (int i = 0; i < DIM / 2; i++) frequencies[i] = powf(1e4f, -2.0f * i / DIM);
    int page_count = 0;
    for (int place : PLACES) page_count += place / PAGE_TOKENS + 1;
    const std::vector<int> nowhere(3, 1 << 24);
    for (int token = 0, page = 0; token < TOKENS; token++) {
        tables.insert(tables.end(), nowhere.begin(), nowhere.end());
        tables[token] = (int)tables.size();
        for (int i = 0; i <= PLACES[token] / PAGE_TOKENS; i++) tables.push_back(page++ * 7 % page_count);
    }
    tables.insert(tables.end(), nowhere.begin(), nowhere.end());
    std::vector<Stored> stored_before(page_count * 2 * KV_HEADS * head_values(DIM));
    for (size_t i = 0; i < stored_before.size(); i++) {
#if KV_F8
        // Codes up to 1.75, and exponents that differ from key to key.
        const bool is_code = i % head_values(DIM) < PAGE_TOKENS * DIM;
        stored_before[i] = is_code ? emulated::chance(64) | emulated::chance(2) << 7 : 125 + emulated::chance(4);
#else
        stored_before[i] = stored(random_value());
#endif
    }
    const int own[TOKENS] = {0, 1, 2, 3};
    step = {nullptr, nullptr, POSITIONS, PLACES, nullptr, own, own, nullptr, tables.data(), TOKENS, TOKENS, TOKENS, 0};
    // How many pairs are rotated (none: queries are rotated and keys are stored already), and windows.
    const struct { int pairs, window; } cases[] = {{0, 0}, {DIM / 2, 0}, {DIM / 8 * 2, 100}, {2, 1}, {0, 33}};
    for (auto [pairs, window] : cases) {
        const bool rotates = pairs > 0;
        const Rotation rope = {rotates ? frequencies.data() : nullptr, pairs, 1.0f};
        shape = {QUERY_HEADS, KV_HEADS, 0, window, 1.0f / sqrtf(DIM), 0, 1, 0, nullptr, rope, sinks.data(), 1.5f, 1, COLUMNS, 0};
        std::vector<Stored> before = stored_before, first_pages;
        std::vector<float> first;
        double error = 0, new_error = 0;
        int tiles = 0;
        for (int token = 0; token < TOKENS; token++) {
            const int place = PLACES[token], from = first_place(token);
            tiles = max(tiles, place / TILE - from / TILE + 1);
            for (int at = 0; at < (place / PAGE_TOKENS + 1) * PAGE_TOKENS; at++)
                if (at < from || at > place || (rotates && at == place)) store_nan(before, token, at);
        }
        const struct { int blocks; bool clusters; } ways[] = {{1, false}, {tiles, false}, {2, true}, {8, true}};
        for (auto [blocks, clusters] : ways)
            for (int stages : {1, 2})
                for (auto copies : {emulated::COPIES_LATE, emulated::COPIES_EARLY, emulated::COPIES_ANY}) {
                    emulated::copies = copies;
                    pages = before;
                    emulated::copied_begin = (const u8*)pages.data();
                    emulated::copied_end = (const u8*)(pages.data() + pages.size());
                    out.assign(TOKENS * QUERY_HEADS * DIM, NAN);
                    shape.stages = stages;
                    run(blocks, clusters, tiles);
                    if (first.empty()) {
                        first = out, first_pages = pages;
                        error = result_error(pairs), new_error = rotates ? stored_error(pairs) : 0;
                    }
                    const bool same = !memcmp(first.data(), out.data(), out.size() * 4) && first_pages == pages;
                    // Nothing but what is new is stored.
                    for (int token = 0; rotates && token < TOKENS; token++) store_nan(pages, token, PLACES[token]);
                    if (error < RESULT_ERROR && new_error < STORED_ERROR && same && pages == before) continue;
                    printf("%d pairs rotated, window %d, %d blocks (clusters: %d), %d tiles", pairs, window, blocks, clusters, stages);
                    printf(", copies %d: error %.1e, of what is new %.1e, %s bits\n", copies, error, new_error, same ? "same" : "other");
                    return 1;
                }
    }
}
