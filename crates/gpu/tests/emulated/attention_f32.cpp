// `attention_f32.cu` against attention in f64, with and without rotation, for whole and sliding windows. Keys and values that a token
// does not see are NaN, and a token's bits are the same alone and beside others.
#include "prelude.cuh"

#include "attention_f32.cu"
#include "compare.h"

static const int KV_HEADS = 2, TOKENS = 4, QUERY_HEADS = KV_HEADS * GROUP, COLUMNS = (QUERY_HEADS + 2 * KV_HEADS) * DIM;
static const int PLACES[TOKENS] = {0, 63, 64, 130}, PAGES_EACH = 5;

static Step step;
static Attention params;
static std::vector<float> qkv(TOKENS* COLUMNS), pages(TOKENS* PAGES_EACH * 2 * KV_HEADS * PAGE_TOKENS * DIM), out;

static float* stored(int token, int v, int kv, int place) {
    return &pages[page_values(token * PAGES_EACH + place / PAGE_TOKENS, v, kv, KV_HEADS, DIM) + place % PAGE_TOKENS * DIM];
}
static std::vector<double> head_of(int token, int head, bool rotates) {
    const float* from = &qkv[token * COLUMNS + head * DIM];
    std::vector<double> to(from, from + DIM);
    for (int i = 0; rotates && i < params.rope.pairs; i++) {
        const double angle = PLACES[token] * params.rope.frequencies[i], a = from[i], b = from[i + params.rope.pairs];
        to[i] = a * cos(angle) - b * sin(angle), to[i + params.rope.pairs] = b * cos(angle) + a * sin(angle);
    }
    return to;
}
static void run(int first, int count) {
    gridDim = {KV_HEADS, TOKENS, 1};
    for (int token = first; token < first + count; token++)
        for (int kv = 0; kv < KV_HEADS; kv++)
            emulated::run({kv, token, 0}, 1, THREADS, [] { attention(step, params, qkv.data(), pages.data(), out.data()); });
}

int main() {
    std::vector<float> frequencies(DIM / 2), sinks(QUERY_HEADS);
    for (auto& one : qkv) one = random_value();
    for (auto& one : sinks) one = random_value();
    for (int i = 0; i < DIM / 2; i++) frequencies[i] = powf(1e4f, -2.0f * i / DIM);
    std::vector<int> tables(TOKENS);
    for (int token = 0; token < TOKENS; token++) {
        tables[token] = (int)tables.size();
        for (int i = 0; i < PAGES_EACH; i++) tables.push_back(token * PAGES_EACH + i);
    }
    const int own[TOKENS] = {0, 1, 2, 3};
    step = {nullptr, nullptr, PLACES, PLACES, nullptr, own, own, nullptr, tables.data(), TOKENS, TOKENS, TOKENS, 0};
    for (int window : {0, 1, 40, 70})
        for (int pairs : {0, DIM / 2, 2}) {
            const bool rotates = pairs > 0;
            params = {QUERY_HEADS, KV_HEADS, 0, window, 1.0f / sqrtf(DIM), 1.5f, {rotates ? frequencies.data() : nullptr, pairs, 1.0f}, sinks.data(), COLUMNS, 0};
            for (auto& one : pages) one = NAN;
            for (int token = 0; token < TOKENS; token++)
                for (int at = max(0, window ? PLACES[token] + 1 - window : 0); at <= PLACES[token] - rotates; at++)
                    for (int i = 0; i < 2 * KV_HEADS * DIM; i++) stored(token, i / DIM % 2, i / DIM / 2, at)[i % DIM] = random_value();
            out.assign(TOKENS * QUERY_HEADS * DIM, NAN);
            run(0, TOKENS);
            // The new key and value are in their pages now.
            Error error, stored_error;
            for (int token = 0; token < TOKENS; token++)
                for (int head = 0; head < QUERY_HEADS; head++) {
                    const int kv = head / GROUP, from = max(0, window ? PLACES[token] + 1 - window : 0);
                    const auto query = head_of(token, head, rotates);
                    double sum = SINKS ? exp((double)sinks[head]) : 0;
                    std::vector<double> right(DIM);
                    for (int at = from; at <= PLACES[token]; at++) {
                        double score = 0;
                        for (int d = 0; d < DIM; d++) score += query[d] * stored(token, 0, kv, at)[d];
                        score *= params.scale;
                        const double weight = exp(CAPPED ? params.cap * tanh(score / params.cap) : score);
                        sum += weight;
                        for (int d = 0; d < DIM; d++) right[d] += weight * stored(token, 1, kv, at)[d];
                    }
                    for (int d = 0; d < DIM; d++) error.add(out[(token * QUERY_HEADS + head) * DIM + d], right[d] / sum);
                    for (int v = 0; rotates && v < 2; v++) {
                        const auto fresh = head_of(token, QUERY_HEADS + v * KV_HEADS + kv, v == 0);
                        for (int d = 0; d < DIM; d++) stored_error.add(stored(token, v, kv, PLACES[token])[d], fresh[d]);
                    }
                }
            error.check("attention", 1e-11), stored_error.check("new keys and values", 1e-11);
            const auto together = out;
            out.assign(out.size(), NAN);
            for (int token = TOKENS - 1; token >= 0; token--) run(token, 1);
            expect(!memcmp(together.data(), out.data(), out.size() * 4), "a token has other bits alone");
        }
}
