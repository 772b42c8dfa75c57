// Routing, the dealing of rows to experts and the sum of what they return, against plain code.
#include "compare.h"
#include "prelude.cuh"

#include "experts.cu"

static const int TOKENS = 37, EXPERTS = 13, EACH = 4, COLUMNS = 70;
static Step step = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, TOKENS, TOKENS, 0, 0};
static std::vector<float> logits(TOKENS* EXPERTS), chosen, rows, residual;
static std::vector<int> starts, list, places;
static Stack stack;
static bool of_all;
static int threads;

static void check_route() {
    chosen.assign(TOKENS * 2 * EACH, NAN);
    for (int r = 0; r < TOKENS; r++)
        emulated::run({r, 0, 0}, 1, WARP, [] { route(step, logits.data(), EXPERTS, EACH, of_all, chosen.data()); });
    Error error;
    for (int r = 0; r < TOKENS; r++) {
        const float* from = &logits[r * EXPERTS];
        std::vector<int> order(EXPERTS);
        for (int e = 0; e < EXPERTS; e++) order[e] = e;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return from[a] > from[b]; });
        std::sort(order.begin(), order.begin() + EACH);
        double sum = 0;
        for (int i = 0; i < (of_all ? EXPERTS : EACH); i++) sum += exp((double)from[order[i]]);
        for (int i = 0; i < EACH; i++) {
            expect(chosen[r * 2 * EACH + i] == order[i], "another expert is chosen");
            error.add(chosen[r * 2 * EACH + EACH + i], exp((double)from[order[i]]) / sum);
        }
    }
    error.check("weights of experts", 1e-12);
}
static void check_deal() {
    starts.assign(EXPERTS + 1, -1), list.assign(TOKENS * EACH, -1), places.assign(TOKENS * EACH, -1);
    stack = {chosen.data(), nullptr, nullptr, nullptr, 0, TOKENS, EACH, 0, EXPERTS, 0, 0, 0};
    gridDim = {EXPERTS, 1, 1};
    for (int e = 0; e < EXPERTS; e++)
        emulated::run({e, 0, 0}, 1, threads, [] { deal(step, stack, starts.data(), list.data(), places.data()); });
    int at = 0;
    for (int e = 0; e < EXPERTS; e++) {
        expect(starts[e] == at, "an expert's places begin elsewhere");
        for (int pair = 0, own = 0; pair < TOKENS * EACH; pair++) {
            if (chosen[pair / EACH * 2 * EACH + pair % EACH] != e) continue;
            expect(list[at] == pair * 8 + own % 8 && places[pair] == at, "a pair has another place");
            at++, own++;
        }
    }
    expect(starts[EXPERTS] == at, "places end elsewhere");
}
static void check_combine() {
    rows.resize(TOKENS * EACH * COLUMNS), residual.resize(TOKENS * COLUMNS);
    for (auto& one : rows) one = random_value();
    for (auto& one : residual) one = random_value();
    const auto before = residual;
    stack.places = places.data();
    for (int i = 0; i < 2 * TOKENS; i++)
        emulated::run({i % 2, i / 2, 0}, 1, 64, [] { combine(step, stack, rows.data(), residual.data(), COLUMNS); });
    Error error;
    for (int i = 0; i < TOKENS * COLUMNS; i++) {
        const int r = i / COLUMNS;
        double sum = before[i];
        for (int e = 0; e < EACH; e++) sum += (double)chosen[r * 2 * EACH + EACH + e] * rows[places[r * EACH + e] * COLUMNS + i % COLUMNS];
        error.add(residual[i], sum);
    }
    error.check("the sum of experts", 1e-12);
    const auto unshared = residual;
    for (int i = 0; i < 2 * TOKENS; i++)
        emulated::run({i % 2, i / 2, 0}, 1, 64, [] { add_gated(step, logits.data(), rows.data(), residual.data(), COLUMNS); });
    Error gated;
    for (int i = 0; i < TOKENS * COLUMNS; i++) gated.add(residual[i], unshared[i] + rows[i] / (1 + exp(-(double)logits[i / COLUMNS])));
    gated.check("the shared expert", 1e-12);
}
int main() {
    // Few values, so that some are equal: then lower numbers are chosen.
    for (auto& one : logits) one = (int)emulated::chance(9) * 0.5f - 2;
    for (int all = 0; all < 2; all++) of_all = all, check_route();
    for (int count : {64, 96, 256}) threads = count, check_deal();
    check_combine();
}
