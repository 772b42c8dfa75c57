// `latent.cu` (or over f32 rows `latent_f32.cu`) against attention in f64, for whole and sliding windows, over spans that one
// block has and that blocks share: a sequence whole and in chunks, beside others and alone, has the same bits. What a token
// does not see is NaN.
#include "compare.h"
#include "prelude.cuh"

#if KV_BYTES == 4
#include "latent_f32.cu"
#else
#include "latent.cu"

#include "latent_merge.cu"
#endif

static const float SCALE = 1.0f / sqrtf(LATENT + TURNED);
static const int HEADS = 5, EACH = TURNED + 3, PAGES = 128;
static std::vector<Stored> pages(PAGES * head_values(LATENT + TURNED));

// Of a sequence: what is stored, and the queries of each of its tokens.
struct Sequence {
    int length;
    std::vector<int> table;
    std::vector<double> rows;
    std::vector<float> absorbed, queries;
};
static std::vector<Sequence> sequences;
static int page_next = 0;
// Stores a value, and says what it is then.
static double put(int page, int token, int i, float value) {
    Stored* at = &pages[(long)page * head_values(LATENT + TURNED)];
#if KV_F8
    // One power of two for all.
    at[PAGE_TOKENS * (LATENT + TURNED) + token] = 120;
    const u8 code = float8_code(value, 120);
    at[token * (LATENT + TURNED) + i] = code;
    return float8_value(code, 120);
#else
    return widened(at[token * (LATENT + TURNED) + i] = stored(value));
#endif
}
static void add_sequence(int length) {
    Sequence made;
    made.length = length;
    for (int i = 0; i < (length + 31) / 32; i++) made.table.push_back(page_next++);
    for (int at = 0; at < length; at++)
        for (int i = 0; i < LATENT + TURNED; i++) made.rows.push_back(put(made.table[at / 32], at % 32, i, random_value()));
    made.absorbed = random_values(length * HEADS * LATENT), made.queries = random_values(length * HEADS * EACH);
    sequences.push_back(made);
}

// Some tokens of a sequence.
struct Share {
    int sequence, start, tokens;
};
static std::vector<float> run(const std::vector<Share>& shares, int window, int limit, int spans, int tokens, int block_heads) {
    std::vector<int> places, lasts, where, tables;
    std::vector<float> absorbed, queries;
    for (auto& share : shares)
        for (int t = 0; t < share.tokens; t++) {
            places.push_back(share.start + t);
            lasts.push_back((int)places.size() - 1 + share.tokens - 1 - t);
            auto& own = sequences[share.sequence];
            absorbed.insert(absorbed.end(), &own.absorbed[(share.start + t) * HEADS * LATENT], &own.absorbed[(share.start + t) * HEADS * LATENT] + HEADS * LATENT);
            queries.insert(queries.end(), &own.queries[(share.start + t) * HEADS * EACH], &own.queries[(share.start + t) * HEADS * EACH] + HEADS * EACH);
        }
    const int count = places.size();
    tables.resize(count);
    int at = 0;
    for (auto& share : shares) {
        for (int t = 0; t < share.tokens; t++) tables[at++] = (int)tables.size();
        auto& table = sequences[share.sequence].table;
        tables.insert(tables.end(), table.begin(), table.end());
    }
    std::vector<float> out((count + 1) * HEADS * LATENT, NAN);
    Step step = {nullptr, nullptr, nullptr, places.data(), nullptr, nullptr, lasts.data(), nullptr, tables.data(), count, count, count, 0};
    emulated::copied_begin = (const u8*)pages.data(), emulated::copied_end = (const u8*)(pages.data() + pages.size());
#if KV_BYTES == 4
    LatentRows a = {HEADS, EACH, 0, window, SCALE, 0};
    launch(HEADS, count + 1, 1, THREADS, [&] { latent_attention(step, a, absorbed.data(), queries.data(), pages.data(), out.data()); });
#else
    std::vector<float> partials((size_t)limit * HEADS * std::max(spans, 1) * (LATENT + 2), NAN);
    emulated::shared_bytes = SHARED_BYTES;
    for (int first = 0; first < count; first += limit) {
        Latent a = {HEADS, EACH, 0, window, SCALE, block_heads, tokens, first, spans, std::min(limit, count + 1 - first), partials.data()};
        launch((HEADS + block_heads - 1) / block_heads, (a.limit + tokens - 1) / tokens, std::max(spans, 1), THREADS,
               [&] { latent_attention(step, a, absorbed.data(), queries.data(), pages.data(), out.data()); });
        if (spans) launch(HEADS, a.limit, 1, 96, [&] { latent_merge(step, a, out.data()); });
    }
#endif
    for (int i = 0; i < HEADS * LATENT; i++) expect(std::isnan(out[count * HEADS * LATENT + i]), "a row behind the step's was written");
    out.resize(count * HEADS * LATENT);
    return out;
}

static void check(const std::vector<Share>& shares, int window, const std::vector<float>& out) {
    Error error;
    size_t to = 0;
    for (auto& share : shares)
        for (int t = share.start; t < share.start + share.tokens; t++)
            for (int h = 0; h < HEADS; h++, to += LATENT) {
                auto& own = sequences[share.sequence];
                std::vector<double> right(LATENT);
                double sum = 0;
                for (int at = window ? std::max(0, t + 1 - window) : 0; at <= t; at++) {
                    const double* row = &own.rows[at * (LATENT + TURNED)];
                    double score = 0;
                    for (int i = 0; i < LATENT + TURNED; i++)
                        score += row[i] * (i < LATENT ? own.absorbed[(t * HEADS + h) * LATENT + i] : own.queries[(t * HEADS + h) * EACH + i - LATENT]);
                    const double weight = exp(score * SCALE);
                    sum += weight;
                    for (int i = 0; i < LATENT; i++) right[i] += weight * row[i];
                }
                for (int i = 0; i < LATENT; i++) error.add(out[to + i], right[i] / sum);
            }
    error.check("latent attention", KV_BYTES == 4 ? 1e-11 : 1e-7);
}

int main() {
    // What no token of these has is NaN.
    for (auto& one : pages) one = KV_BYTES == 1 ? (Stored)0xff : KV_BYTES == 2 ? (Stored)0x7fff : (Stored)NAN;
    for (int length : {1, 33, 70, LONG}) add_sequence(length);
    for (int window : {0, 1, 40}) {
        const std::vector<Share> shares = {{1, 0, 33}, {0, 0, 1}, {2, 65, 1}, {2, 0, 0}, {2, 30, 12}};
        const auto together = run(shares, window, 100, 0, 3, 5);
        check(shares, window, together);
        std::vector<float> alone;
        for (auto& share : shares)
            for (int t = 0; t < share.tokens; t++) {
                const auto one = run({{share.sequence, share.start + t, 1}}, window, 1, 0, 1, 2);
                alone.insert(alone.end(), one.begin(), one.end());
            }
        expect(!memcmp(alone.data(), together.data(), alone.size() * 4), "other bits alone");
    }
    // Beyond a span: by one block, and by a block for each, some tokens at a time.
    for (int window : {0, 900}) {
        const std::vector<Share> shares = {{3, LONG - 3, 3}, {1, 31, 2}};
        const auto whole = run(shares, window, 100, 0, 3, 5);
        check(shares, window, whole);
        expect(run(shares, window, 100, (LONG + 1023) / 1024, 3, 5) == whole, "other bits where blocks share spans");
        expect(run(shares, window, 2, (LONG + 1023) / 1024, 1, 3) == whole, "other bits in several launches");
    }
}
