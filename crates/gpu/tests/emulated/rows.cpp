// Kernels that go through rows value by value, norms, gated units, rotation and the writing of pages, each against f64.
// Rows that are not in the step stay as they are.
#include "compare.h"
#include "prelude.cuh"

#include "glu.cu"
#include "norm.cu"
#include "rope.cu"
#include "rows.cu"

static const int TOKENS = 5, WANTED = 2, ROWS_MAX = 7;
static const int positions[TOKENS] = {0, 3, 31, 32, 70}, places[TOKENS] = {1, 2, 30, 33, 65}, wanted[WANTED] = {2, 4};
static const int firsts[TOKENS] = {0, 0, 0, 3, 3}, lasts[TOKENS] = {2, 2, 2, 4, 4};
static std::vector<int> tables;
static Step step = {nullptr, nullptr, positions, places, wanted, firsts, lasts, nullptr, nullptr, ROWS_MAX, TOKENS, WANTED, 0};

static std::vector<float> random_rows(int columns) { return random_values(ROWS_MAX * columns); }

static void norms(int columns, int threads) {
    const auto x = random_rows(columns), weight = random_rows(columns), bias = random_rows(columns);
    auto of = [&](const float* from, int count, int k, bool centred, bool biased, const float* weights, const float* biases) {
        double mean = 0, squares = 0;
        for (int i = 0; centred && i < count; i++) mean += from[i] / (double)count;
        for (int i = 0; i < count; i++) squares += (from[i] - mean) * (from[i] - mean);
        return (from[k] - mean) / sqrt(squares / count + 1e-5f) * weights[k] + (biased ? biases[k] : 0);
    };
    auto out = x;
    launch(ROWS_MAX, 1, 1, threads, [&] { rms_norm(step, 0, weight.data(), 1e-5f, x.data(), out.data(), columns); });
    check("rms_norm", out, x, TOKENS, columns, [&](int r, int k) { return of(&x[r * columns], columns, k, false, false, weight.data(), nullptr); });
    for (int kind = 0; kind < 4; kind++) {
        const Norm norm = {weight.data(), kind & 1 ? bias.data() : nullptr, 1e-5f, kind >> 1, columns, 0};
        out = x;
        launch(ROWS_MAX, 1, 1, threads, [&] { any_norm(step, 0, norm, x.data(), out.data()); });
        check("any_norm", out, x, TOKENS, columns, [&](int r, int k) { return of(&x[r * columns], columns, k, kind >> 1, kind & 1, weight.data(), bias.data()); });
    }
    // Two query heads, a key head and a value head of a quarter of the columns each.
    const int dim = columns / 4;
    const Norm query = {weight.data(), nullptr, 1e-5f, 0, dim, 0}, key = {bias.data(), nullptr, 1e-5f, 0, dim, 0};
    const std::vector<float> ones(dim, 1.0f);
    const Norm value = {ones.data(), nullptr, 1e-5f, 0, dim, 0};
    for (int blocks : {3, 4}) {
        auto qkv = x;
        launch(blocks, ROWS_MAX, 1, threads, [&] { qk_norm(step, query, key, value, 2 * dim, dim, columns, qkv.data()); });
        check(blocks == 3 ? "qk_norm" : "qk_norm and values", qkv, x, TOKENS, columns, [&](int r, int k) {
            if (k / dim >= blocks) return (double)x[r * columns + k];
            const float* weights = k < 2 * dim ? weight.data() : k < 3 * dim ? bias.data() : ones.data();
            return of(&x[r * columns + k / dim * dim], dim, k % dim, false, false, weights, nullptr);
        });
    }
}

// Groups of some of the columns, with gates behind others of a wider row.
static void gated(int columns, int group) {
    const int before = 3, gate_columns = columns + 5;
    const auto x = random_rows(columns), gates = random_rows(gate_columns), weight = random_rows(group);
    const Norm norm = {weight.data(), nullptr, 1e-5f, 0, group, 0};
    auto out = x;
    launch((columns / group + 3) / 4, ROWS_MAX, 1, 128, [&] { gated_norm(step, norm, gates.data() + before, gate_columns, out.data(), columns); });
    check("gated_norm", out, x, TOKENS, columns, [&](int r, int k) {
        double squares = 0;
        for (int i = 0; i < group; i++) squares += x[r * columns + k / group * group + i] * (double)x[r * columns + k / group * group + i];
        const double gate = gates[r * gate_columns + before + k];
        return x[r * columns + k] / sqrt(squares / group + 1e-5f) * weight[k % group] * gate / (1 + exp(-gate));
    });
}

// The same in either order, with weights of each group or of the row, and without a norm.
static void group_gated(int columns, int group, int threads) {
    const int before = 3, gate_columns = columns + 5;
    const auto x = random_rows(columns), gates = random_rows(gate_columns), weight = random_rows(columns);
    for (int kind = 0; kind < 5; kind++) {
        const bool first = kind & 1, own = kind & 2, none = kind == 4;
        const Norm norm = {none ? nullptr : weight.data(), nullptr, 1e-5f, 0, own ? columns : group, 0};
        auto out = x;
        launch((columns + group - 1) / group, ROWS_MAX, 1, threads,
               [&] { gated_group_norm(step, norm, group, first, gates.data() + before, gate_columns, out.data(), columns); });
        check("gated_group_norm", out, x, TOKENS, columns, [&](int r, int k) {
            auto gate = [&](int k) { const double gate = gates[r * gate_columns + before + k]; return gate / (1 + exp(-gate)); };
            if (none) return x[r * columns + k] * gate(k);
            double squares = 0;
            for (int i = k / group * group; i < k / group * group + group; i++) squares += pow(x[r * columns + i] * (first ? gate(i) : 1.0), 2);
            return x[r * columns + k] * gate(k) / sqrt(squares / group + 1e-5f) * weight[own ? k : k % group];
        });
    }
}

static void elementwise(int columns) {
    const int threads = 64, blocks = (columns + threads - 1) / threads;
    const auto x = random_rows(columns), y = random_rows(columns), both = random_rows(2 * columns);
    auto out = x;
    launch(blocks, ROWS_MAX, 1, threads, [&] { add(step, 0, y.data(), columns, out.data(), columns); });
    check("add", out, x, TOKENS, columns, [&](int r, int k) { return (double)x[r * columns + k] + y[r * columns + k]; });
    out = x;
    launch(blocks, ROWS_MAX, 1, threads, [&] { add(step, 1, y.data(), 0, out.data(), columns); });
    check("add of a vector", out, x, WANTED, columns, [&](int r, int k) { return (double)x[r * columns + k] + y[k]; });
    out = x;
    launch(blocks, ROWS_MAX, 1, threads, [&] { sigmoid_gate(step, y.data(), out.data(), columns); });
    check("sigmoid_gate", out, x, TOKENS, columns, [&](int r, int k) { return x[r * columns + k] / (1 + exp(-(double)y[r * columns + k])); });
    out = x;
    launch(blocks, ROWS_MAX, 1, threads, [&] { gather(step, y.data(), out.data(), columns); });
    check("gather", out, x, WANTED, columns, [&](int r, int k) { return (double)y[wanted[r] * columns + k]; });
    out = x;
    launch(blocks, ROWS_MAX, 1, threads, [&] { scale_columns(step, y.data(), out.data(), columns); });
    check("scale_columns", out, x, TOKENS, columns, [&](int r, int k) { return (double)x[r * columns + k] * y[k]; });
    auto gelu_of = [](double v) { return 0.5 * v * erfc(-v / sqrt(2.0)); };
    auto gelu_tanh_of = [](double v) { return 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))); };
    for (int function = 0; function < 7; function++) {
        out = x;
        // Of the last, what it is about: squares, an exponential, the value itself, and up to where.
        const float4 parameters = function < 6 ? make_float4(1.5f, 0, 0, 0) : make_float4(0.7f, 0.9f, 0.5f, -0.1f);
        launch(blocks, ROWS_MAX, 1, threads, [&] { pointwise(step, 0, function, parameters, out.data(), columns); });
        check("pointwise", out, x, TOKENS, columns, [&](int r, int k) {
            const double v = x[r * columns + k];
            return function == 0 ? v * 1.5
                : function == 1  ? 1.5 * tanh(v / 1.5)
                : function == 2  ? gelu_of(v)
                : function == 3  ? gelu_tanh_of(v)
                : function == 6  ? (v > 0 ? 0.7f * v * v : (exp(fmin(v, -0.1f)) - 1 - v) * 0.9f) + 0.5f * v
                : v <= 0         ? 0.0
                : function == 4  ? v
                                 : v * v;
        });
    }
    out = x;
    const int length = 4, offset = 1;
    launch(blocks, ROWS_MAX, 1, threads, [&] { scale_by_position(step, 0.3f, length, offset, columns - 5, out.data(), columns); });
    check("scale_by_position", out, x, TOKENS, columns, [&](int r, int k) {
        return x[r * columns + k] * (k < columns - 5 ? 1 + 0.3f * log(1.0 + (positions[r] + offset) / length) : 1.0);
    });
    for (int kind = 0; kind < 3; kind++) {
        out = x;
        launch(blocks, ROWS_MAX, 1, threads, [&] { pool(step, kind, y.data(), out.data(), columns); });
        check("pool", out, x, WANTED, columns, [&](int r, int k) {
            const int first = firsts[wanted[r]], last = lasts[wanted[r]];
            double mean = 0;
            for (int at = first; at <= last; at++) mean += y[at * columns + k] / (double)(last - first + 1);
            return kind == 0 ? mean : (double)y[(kind == 1 ? first : last) * columns + k];
        });
    }
    for (int kind = 0; kind < 4; kind++) {
        out = x;
        launch(blocks, ROWS_MAX, 1, threads, [&] {
            (kind == 0 ? glu_silu : kind == 1 ? glu_gelu : kind == 2 ? glu_gelu_tanh : glu_clamped)(step, 1, both.data(), out.data(), columns);
        });
        check("glu", out, x, TOKENS, columns, [&](int r, int k) {
            const double gate = both[r * 2 * columns + k], up = both[r * 2 * columns + columns + k];
            return kind == 0 ? gate / (1 + exp(-gate)) * up : kind == 1 ? gelu_of(gate) * up : kind == 2 ? gelu_tanh_of(gate) * up
                                                           : gate / (1 + exp(-1.702f * gate)) * (up + 1);
        });
    }
}

// A row of the latent values, then the turned ones, in the page of its token.
static void latent_rows(int latent, int turned) {
    const int width = latent + turned;
    const auto latents = random_rows(latent), turneds = random_rows(turned);
    std::vector<Stored> rows(64 * head_values(width), (Stored)7);
    const auto before = rows;
    emulated::shared_bytes = width * 4;
    launch(ROWS_MAX, 1, 1, 64, [&] { latent_write(step, 0, latent, turned, latents.data(), turneds.data(), rows.data()); });
    auto rest = rows;
    Error error;
    for (int r = 0; r < TOKENS; r++) {
        const long page = (long)page_of(step, r, 0, places[r]) * head_values(width);
        const int token = places[r] % PAGE_TOKENS;
        for (int i = 0; i < width; i++) {
            const long at = page + token * width + i;
#if KV_F8
            const double is = float8_value(rows[at], rows[page + PAGE_TOKENS * width + token]);
#else
            const double is = widened(rows[at]);
#endif
            rest[at] = before[at];
            error.add(is, i < latent ? latents[r * latent + i] : turneds[r * turned + i - latent]);
        }
        if (KV_F8) rest[page + PAGE_TOKENS * width + token] = before[page + PAGE_TOKENS * width + token];
    }
    error.check("latent_write", KV_F8 ? 2e-3 : KV_BF16 ? 5e-6 : KV_BYTES == 2 ? 1e-7 : 1e-12);
    expect(rest == before, "latent_write");
}

static void rotation(int dim, int pairs, bool keys) {
    const HeadCounts heads = {3, 2, dim};
    const int columns = (heads.query + 2 * heads.kv) * dim, pages_each = 3;
    std::vector<float> frequencies(pairs);
    for (int i = 0; i < pairs; i++) frequencies[i] = powf(1e4f, -1.0f * i / pairs);
    const Rotation rope_of = {frequencies.data(), pairs, 1.25f};
    tables.assign(ROWS_MAX, 0);
    for (int r = 0; r < TOKENS; r++) {
        tables[r] = (int)tables.size();
        for (int i = 0; i < pages_each; i++) tables.push_back(r * pages_each + i);
    }
    step.tables = tables.data();
    const auto before = random_rows(columns);
    auto rotated_value = [&](int r, int k) -> double {
        const int head = k / dim, i = k % dim;
        const float* from = &before[r * columns + head * dim];
        if (head >= heads.query + heads.kv || i >= 2 * pairs) return from[i];
        const double angle = positions[r] * frequencies[i % pairs], a = from[i % pairs], b = from[i % pairs + pairs];
        return 1.25 * (i < pairs ? a * cos(angle) - b * sin(angle) : b * cos(angle) + a * sin(angle));
    };
    auto qkv = before;
    launch(heads.query + heads.kv, ROWS_MAX, 1, 32, [&] { rope(step, heads, rope_of, qkv.data()); });
    check("rope", qkv, before, TOKENS, columns, rotated_value);
    auto check_pages = [&](const char* what, const std::vector<Stored>& pages, const std::vector<Stored>& pages_before, bool as_rotated) {
        auto rest = pages;
        Error error;
        for (int r = 0; r < TOKENS; r++)
            for (int i = 0; i < 2 * heads.kv * dim; i++) {
                const int v = i / dim % 2, kv = i / dim / 2, k = (heads.query + v * heads.kv + kv) * dim + i % dim;
                const long head = page_values(r * pages_each + places[r] / PAGE_TOKENS, v, kv, heads.kv, dim), at = head + places[r] % PAGE_TOKENS * dim + i % dim;
#if KV_F8
                const double is = float8_value(pages[at], pages[head + PAGE_TOKENS * dim + places[r] % PAGE_TOKENS]);
                rest[head + PAGE_TOKENS * dim + places[r] % PAGE_TOKENS] = pages_before[head + PAGE_TOKENS * dim + places[r] % PAGE_TOKENS];
#else
                const double is = widened(pages[at]);
#endif
                rest[at] = pages_before[at];
                error.add(is, as_rotated ? rotated_value(r, k) : before[r * columns + k]);
            }
        error.check(what, KV_F8 ? 2e-3 : KV_BF16 ? 5e-6 : KV_BYTES == 2 ? 1e-7 : 1e-12);
        expect(rest == pages_before, what);
    };
    const std::vector<Stored> empty(TOKENS * pages_each * 2 * heads.kv * head_values(dim), (Stored)7);
    auto pages = empty;
    launch(heads.kv, ROWS_MAX, 1, 64, [&] { kv_write(step, heads, 0, before.data(), pages.data()); });
    check_pages("kv_write", pages, empty, false);
    // 8-bit keys are stored from rotated rows, so those are written back there.
    if (keys && KV_F8) return;
    latent_rows(heads.query * dim, 5);
    pages = empty, qkv = before;
    launch(ROWS_MAX, 1, 1, 256, [&] { rope_and_write(step, heads, rope_of, 0, qkv.data(), pages.data(), keys); });
    check_pages("rope_and_write", pages, empty, true);
    check("rope_and_write", qkv, before, TOKENS, columns, [&](int r, int k) { return keys ? (double)before[r * columns + k] : rotated_value(r, k); });
}

int main() {
    norms(96, 64), norms(1000, 96);
    gated(17, 17), gated(6 * 20, 20), gated(2 * 300, 300);
    group_gated(3 * 50, 50, 32), group_gated(300, 300, 96), group_gated(60, 20, 32);
    elementwise(70);
    for (int keys = 0; keys < 2; keys++) rotation(64, 32, keys), rotation(40, 7, keys);
}
