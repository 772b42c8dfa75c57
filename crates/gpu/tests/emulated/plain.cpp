// Kernels that multiply in f32 or look rows up, against f64: products with F32 weights (`gemv_f32.cu`,
// `expert_f32.cu`), embedding, positions and rows read back (`embed.cu`), and adapters (`low_rank.cu`). Rows that are
// not in the step stay as they are.
#include "compare.h"
#include "prelude.cuh"

#define QUANT "quant/f32.cuh"
#include "embed.cu"
#include "expert_f32.cu"
#include "gemv_f32.cu"
#include "low_rank.cu"

// None of these kernels has shared variables, and the emulation looks for where they are.
__attribute__((used)) __shared__ int no_variable;

static const int ROWS = 37, COLUMNS = 200, GROUPS = (COLUMNS + 127) / 128, TOKENS = 4, WANTED = 2, ROWS_MAX = 6, THREADS = 64;
static const int EXPERTS = 3, EACH = 2;
// Each expert begins with 16 rows of its own.
static const int TILES = (ROWS + 15) / 16;
static std::vector<float> weight(EXPERTS* TILES * 16 * GROUPS * 128);
static Part part = {(u8*)weight.data(), nullptr, nullptr, nullptr, ROWS, COLUMNS, GROUPS, 0};
static int ids[TOKENS] = {36, 0, -2, 7}, positions[TOKENS] = {5, 36, 0, 40}, adapters[TOKENS] = {1, -1, 0, 1}, sampled[2] = {9, 20};
static Step step = {nullptr, ids, positions, nullptr, nullptr, nullptr, nullptr, adapters, nullptr, ROWS_MAX, TOKENS, WANTED, 0};

static float* at(int row, int column) { return &weight[((long)(row / 16) * GROUPS + column / 128) * 2048 + row % 16 * 128 + column % 128]; }

static void products() {
    const auto x = random_values(ROWS_MAX * COLUMNS), bias = random_values(ROWS + 3), before = random_values(ROWS_MAX * (ROWS + 3));
    auto dot = [&](const float* row, int n) {
        double sum = 0;
        for (int k = 0; k < COLUMNS; k++) sum += (double)*at(n, k) * row[k];
        return sum;
    };
    for (int adds = 0; adds < 2; adds++) {
        for (int wanted = 0; wanted < 2; wanted++) {
            auto out = before;
            // The part's rows are the columns from 3 on.
            Result result = {out.data(), bias.data(), ROWS + 3, 3, adds, 0, nullptr};
            launch((ROWS + 1) / 2, ROWS_MAX, 1, THREADS, [&] { gemv_f32(part, step, wanted, x.data(), result); });
            check("gemv_f32", out, before, wanted ? WANTED : TOKENS, ROWS + 3, [&](int r, int n) {
                if (n < 3) return (double)before[r * (ROWS + 3) + n];
                return dot(&x[r * COLUMNS], n - 3) + bias[n] + (adds ? before[r * (ROWS + 3) + n] : 0);
            });
        }
    }
    // Two experts of three for each token, whose rows are at places of their own.
    const float chosen[TOKENS * 2 * EACH] = {0, 2, 0, 0, 1, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0};
    const int places[TOKENS * EACH] = {0, 5, 3, 6, 1, 4, 2, 7};
    const auto biases = random_values(EXPERTS * ROWS), rows_before = random_values(TOKENS * EACH * ROWS);
    auto out = rows_before;
    Stack stack = {chosen, nullptr, nullptr, places, 0, TOKENS, EACH, 0, EXPERTS, 1, 0, 0};
    Result result = {out.data(), biases.data(), ROWS, 0, 0, 0, nullptr};
    launch(TOKENS * EACH, (ROWS + 1) / 2, 1, THREADS, [&] { expert_f32(part, step, stack, x.data(), result); });
    Error error;
    for (int pair = 0; pair < TOKENS * EACH; pair++) {
        const int token = pair / EACH, expert = (int)chosen[token * 2 * EACH + pair % EACH];
        for (int n = 0; n < ROWS; n++) error.add(out[places[pair] * ROWS + n], dot(&x[token * COLUMNS], expert * TILES * 16 + n) + biases[expert * ROWS + n]);
    }
    error.check("expert_f32", 1e-12);
}

static void lookups() {
    const auto before = random_values(ROWS_MAX * COLUMNS);
    auto value = [&](int row, int k) { return (double)*at(row, k); };
    auto out = before;
    launch(ROWS_MAX, 1, 1, THREADS, [&] { embed(part, 0, step, sampled, out.data(), COLUMNS); });
    // The third token is what was sampled last into slot 1.
    check("embed", out, before, TOKENS, COLUMNS, [&](int r, int k) { return value(r == 2 ? 20 : ids[r], k); });
    out = before;
    launch(ROWS_MAX, 1, 1, THREADS, [&] { add_positions(part, 0, step, out.data(), COLUMNS); });
    check("add_positions", out, before, TOKENS, COLUMNS, [&](int r, int k) {
        return before[r * COLUMNS + k] + (positions[r] < ROWS ? value(positions[r], k) : 0);
    });
    out = before;
    // Rows 30 and 35; the next one would be behind the part.
    launch(3, 1, 1, THREADS, [&] { rows_of(part, 30, 5, out.data(), COLUMNS); });
    check("rows_of", out, before, 2, COLUMNS, [&](int r, int k) { return value(30 + 5 * r, k); });
}

static void changes() {
    const int RANK = 5, OUT = 90, STRIDE = 2 * RANK;
    const auto x = random_values(ROWS_MAX * COLUMNS), before = random_values(ROWS_MAX * OUT);
    const std::vector<float> down[2] = {random_values(RANK * COLUMNS), random_values(RANK * COLUMNS)};
    const std::vector<float> up[2] = {random_values(40 * RANK), random_values(60 * RANK)};
    // What was there before belongs to other rows.
    auto inner = random_values(ROWS_MAX * STRIDE);
    auto out = before;
    Changes all = {};
    // Adapter 0 changes 40 columns from 10 on, adapter 1 the last 60.
    all.each[0] = {down[0].data(), up[0].data(), 0, RANK, 10, 40, 0, 0.5f};
    all.each[1] = {down[1].data(), up[1].data(), 1, RANK, 30, 60, RANK, 2.0f};
    all.x = x.data(), all.inner = inner.data(), all.out = out.data();
    all.count = 2, all.in = COLUMNS, all.stride = STRIDE, all.columns = OUT, all.first = 0;
    launch((RANK + 1) / 2, ROWS_MAX, 2, THREADS, [&] { low_rank_down(step, all); });
    launch((OUT + THREADS - 1) / THREADS, ROWS_MAX, 1, THREADS, [&] { low_rank_up(step, all); });
    check("low_rank", out, before, TOKENS, OUT, [&](int r, int k) {
        double sum = before[r * OUT + k];
        const int adapter = adapters[r];
        if (adapter < 0) return sum;
        const Change& change = all.each[adapter];
        if (k < change.column || k >= change.column + change.columns) return sum;
        for (int i = 0; i < RANK; i++) {
            double value = 0;
            for (int c = 0; c < COLUMNS; c++) value += (double)down[adapter][i * COLUMNS + c] * x[r * COLUMNS + c];
            sum += change.scale * value * up[adapter][(k - change.column) * RANK + i];
        }
        return sum;
    });
    for (int k = 0; k < OUT; k++) expect(out[OUT + k] == before[OUT + k], "a row without an adapter is changed");
}

int main() {
    for (auto& one : weight) one = random_value();
    products();
    lookups();
    changes();
}
