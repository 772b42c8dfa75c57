// Routing, the dealing of rows to experts and the sum of what they return, against plain code.
#include "compare.h"
#include "prelude.cuh"

#include "experts.cu"

static const int TOKENS = 37, EXPERTS = 15, EACH = 4, COLUMNS = 70;
static Step step = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, TOKENS, TOKENS, 0, 0};
static std::vector<float> logits(TOKENS* EXPERTS), chosen, rows, residual;
static std::vector<int> starts, list, places;
static Stack stack;
static int threads;
static Route routing;
static const float* correction;

static Route plain(bool of_all) { return {EXPERTS, EACH, SOFTMAX, 0, 0, 0, 0, of_all, of_all, 0, 0, 1}; }

static void check_route(const char* what) {
    chosen.assign(TOKENS * 2 * EACH, NAN);
    for (int r = 0; r < TOKENS; r++)
        emulated::run({r, 0, 0}, 1, WARP, [] { route(step, routing, logits.data(), correction, chosen.data()); });
    Error error;
    for (int r = 0; r < TOKENS; r++) {
        const float* from = &logits[r * EXPERTS];
        double all = 0;
        for (int e = 0; e < EXPERTS; e++) all += exp((double)from[e]);
        std::vector<double> scores(EXPERTS), ranked(EXPERTS);
        for (int e = 0; e < EXPERTS; e++) {
            const double power = exp((double)from[e]);
            scores[e] = routing.scores == SOFTMAX ? power / all : routing.scores == SIGMOID ? power / (1 + power) : sqrt(log1p(power));
            // Rounded, so that what is equal in exact arithmetic alone stays equal.
            ranked[e] = (float)(scores[e] + (correction ? correction[e] : 0));
        }
        if (routing.groups) {
            const int size = EXPERTS / routing.groups;
            std::vector<double> good;
            std::vector<int> groups;
            for (int g = 0; g < routing.groups; g++) {
                std::vector<double> own(ranked.begin() + g * size, ranked.begin() + (g + 1) * size);
                std::sort(own.rbegin(), own.rend());
                good.push_back(own[0] + (routing.by_two ? own[1] : 0));
                groups.push_back(g);
            }
            std::stable_sort(groups.begin(), groups.end(), [&](int a, int b) { return good[a] > good[b]; });
            for (int i = routing.groups_chosen; i < routing.groups; i++)
                for (int e = 0; e < size; e++) ranked[groups[i] * size + e] = -1e9;
        }
        std::vector<int> order(EXPERTS);
        for (int e = 0; e < EXPERTS; e++) order[e] = e;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ranked[a] > ranked[b]; });
        std::sort(order.begin(), order.begin() + EACH);
        double sum = 0;
        for (int i = 0; i < EACH; i++) sum += scores[order[i]];
        sum = routing.of_all ? 1 : fmax(sum + routing.added, routing.least);
        for (int i = 0; i < EACH; i++) {
            expect(chosen[r * 2 * EACH + i] == order[i], what);
            error.add(chosen[r * 2 * EACH + EACH + i], scores[order[i]] / sum * routing.scale);
        }
    }
    error.check("weights of experts", 1e-12);
}
static void check_routes() {
    for (bool of_all : {false, true}) routing = plain(of_all), check_route("another expert is chosen");
    // No two sums of a score and one of these are closer than what rounding moves.
    static float corrections[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) corrections[e] = (e * 4 % EXPERTS) * 0.0371f - 0.2f;
    correction = corrections;
    for (int scores : {SOFTMAX, SIGMOID, SQRT_SOFTPLUS}) {
        routing = plain(false);
        routing.scores = scores, routing.by_score = routing.by_all = 1;
        routing.added = 0.25f, routing.scale = 2.5f;
        check_route("a correction chooses another expert");
        routing.added = 0, routing.least = 1.5f;
        routing.groups = 3, routing.groups_chosen = 2, routing.by_two = 1;
        check_route("an expert of another group is chosen");
        routing.of_all = 1, routing.by_two = 0, routing.groups_chosen = 1;
        check_route("groups are ranked by two");
    }
    correction = nullptr, routing = plain(false);
    check_route("another expert is chosen");
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
        emulated::run({i % 2, i / 2, 0}, 1, 64, [] { combine(step, stack, 1, rows.data(), residual.data(), COLUMNS); });
    Error error;
    for (int i = 0; i < TOKENS * COLUMNS; i++) {
        const int r = i / COLUMNS;
        double sum = before[i];
        for (int e = 0; e < EACH; e++) sum += (double)chosen[r * 2 * EACH + EACH + e] * rows[places[r * EACH + e] * COLUMNS + i % COLUMNS];
        error.add(residual[i], sum);
    }
    error.check("the sum of experts", 1e-12);
    // Where inputs were weighted, nothing else is.
    residual = before;
    for (int i = 0; i < 2 * TOKENS; i++)
        emulated::run({i % 2, i / 2, 0}, 1, 64, [] { combine(step, stack, 0, rows.data(), residual.data(), COLUMNS); });
    Error unweighted, inputs;
    for (int i = 0; i < TOKENS * COLUMNS; i++) {
        double sum = before[i];
        for (int e = 0; e < EACH; e++) sum += rows[places[i / COLUMNS * EACH + e] * COLUMNS + i % COLUMNS];
        unweighted.add(residual[i], sum);
    }
    unweighted.check("the sum of experts whose inputs were weighted", 1e-12);
    static std::vector<float> weighted;
    weighted.assign(rows.size(), NAN);
    for (int i = 0; i < 2 * TOKENS * EACH; i++)
        emulated::run({i % 2, i / 2, 0}, 1, 64, [] { weigh_inputs(step, stack, residual.data(), weighted.data(), COLUMNS); });
    for (int pair = 0; pair < TOKENS * EACH; pair++)
        for (int k = 0; k < COLUMNS; k++)
            inputs.add(weighted[places[pair] * COLUMNS + k], (double)residual[pair / EACH * COLUMNS + k] * chosen[pair / EACH * 2 * EACH + EACH + pair % EACH]);
    inputs.check("what experts read", 1e-12);
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
    check_routes();
    for (int count : {64, 96, 256}) threads = count, check_deal();
    check_combine();
}
