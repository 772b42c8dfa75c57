// Sampling against a plain softmax in f64: greedy rows, rows drawn with and without top-k, top-p and min-p under a
// mask, broken rows, log-probabilities, and changes of logits and their undoing. A draw's random number is the middle
// of the interval that the wanted token has, so that no rounding decides.
#include "compare.h"
#include "prelude.cuh"

namespace others {
#define CUTS 0
#include "sample.cu"
#undef CUTS
}  // namespace others
namespace cuts {
#define CUTS 1
#include "sample.cu"
}  // namespace cuts
using others::Row;

static const int VOCAB = 9001, COLUMNS = 9004, WORDS = (VOCAB + 31) / 32, SLOTS = 4, COUNT = (VOCAB + STRETCH - 1) / STRETCH;
static std::vector<float> logits(SLOTS* COLUMNS);
static std::vector<u32> mask(WORDS);
static Row row;
static std::vector<others::Stretch> stretches(STRETCHES);
static others::Bins bins;
static int sampled[SLOTS];
static others::Chosen chosen;
static others::Change changes[3];

static void launch(int blocks, int threads, u32 shared, void (*body)()) {
    emulated::shared_bytes = shared;
    gridDim = {blocks, 1, 1};
    for (int i = 0; i < blocks; i++) emulated::run({i, 0, 0}, 1, threads, body);
}
static void sample() {
    launch(COUNT, THREADS, 0, [] { others::scan(logits.data(), COLUMNS, &row, stretches.data()); });
    auto* scanned = (cuts::Stretch*)stretches.data();
    static cuts::Stretch* found;
    found = scanned;
    launch(2, THREADS, 0, [] { cuts::weigh(logits.data(), COLUMNS, (cuts::Row*)&row, found, (cuts::Bins*)&bins); });
    launch(1, BINS, sizeof(cuts::Totals) + sizeof(cuts::Running) + LISTED * 8, [] { cuts::cut(logits.data(), COLUMNS, (cuts::Row*)&row, found, (cuts::Bins*)&bins); });
    launch(COUNT, THREADS, 0, [] { others::keep(logits.data(), COLUMNS, &row, stretches.data(), &bins); });
    launch(1, THREADS, 0, [] { others::draw(logits.data(), COLUMNS, &row, stretches.data(), &bins, sampled, &chosen); });
}
static bool allowed(int id) { return !row.mask_words || mask[id / 32] >> id % 32 & 1; }
static const float* own() { return &logits[row.wanted * COLUMNS]; }
// Allowed ids, the likeliest first; of equal ones the lowest.
static std::vector<int> in_order() {
    std::vector<int> ids;
    for (int id = 0; id < VOCAB; id++)
        if (allowed(id)) ids.push_back(id);
    std::stable_sort(ids.begin(), ids.end(), [](int a, int b) { return own()[a] > own()[b]; });
    return ids;
}
static void check_draws(double temperature, int top_k, double top_p, double min_p) {
    row.halvings = (float)(1 / (log(2.0) * temperature)), row.top_k = top_k, row.top_p = top_p, row.log_min_p = log(min_p);
    const auto ids = in_order();
    const double largest = own()[ids[0]];
    double plain = 0, up_to = 0, total = 0, before = 0, all = 0;
    auto is_likely = [&](int id) { return own()[id] >= largest + log(min_p); };
    for (int id : ids)
        if (is_likely(id)) plain += exp(own()[id] - largest);
    std::vector<int> kept;
    for (int id : ids) {
        if (!is_likely(id) || (top_k && (int)kept.size() == top_k) || (top_p < 1 && up_to >= top_p * plain)) break;
        kept.push_back(id), up_to += exp(own()[id] - largest);
    }
    const std::vector<int> likeliest(kept.begin(), kept.begin() + std::min<size_t>(kept.size(), 4));
    std::sort(kept.begin(), kept.end());
    for (int id : kept) total += exp((own()[id] - largest) / temperature);
    for (int id = 0; id < VOCAB; id++) all += exp(own()[id] - largest);
    for (int id : kept) {
        const double weight = exp((own()[id] - largest) / temperature);
        if (std::find(likeliest.begin(), likeliest.end(), id) != likeliest.end()) {
            row.random = (u64)ldexp((before + weight / 2) / total, 64);
            sample();
            if (chosen.token != id || chosen.fault || sampled[row.slot] != id) emulated::fail("token %d is drawn for %d\n", chosen.token, id);
            expect(fabs(chosen.logprob - (own()[id] - largest - log(all))) < 2e-5, "another log-probability");
        }
        before += weight;
    }
    // Whatever is drawn, it was kept.
    for (u64 random : {0ull, ~0ull}) {
        row.random = random;
        sample();
        expect(chosen.token == (random ? kept.back() : kept.front()), "the first or the last that is kept is not drawn");
    }
}

int main() {
    for (auto& one : logits) one = random_value() * 5;
    for (auto& one : mask) one = emulated::chance(1 << 16) | emulated::chance(1 << 16) << 16;
    // Equal ones in two stretches.
    logits[2 * COLUMNS + 5000] = logits[2 * COLUMNS + 4300] = logits[2 * COLUMNS + 11] = 9.5f;
    mask[11 / 32] &= ~(1u << 11 % 32), mask[4300 / 32] |= 1u << 4300 % 32;
    for (int masked = 0; masked < 2; masked++) {
        row = {2, 3, VOCAB, masked ? WORDS : 0, mask.data(), 0, 1.0, -INFINITY, 0.0f, 0, 0, 0, 1, 0};
        sample();
        expect(chosen.token == (masked ? 4300 : 11) && !chosen.fault, "greedy takes another");
        check_draws(0.7, 0, 1.0, 0.0);
        check_draws(1.3, 5, 1.0, 0.0);
        check_draws(0.9, 0, 0.4, 0.0);
        check_draws(0.9, 300, 0.7, 0.01);
        check_draws(1.1, 0, 1.0, 0.2);
    }
    // Penalties of a token lie together, in their order.
    const auto before = logits;
    changes[0] = {11, 0, 0.0f, 0, 1.5, 0.0}, changes[1] = {11, 1, 0.0f, 0, 2.0, 0.0}, changes[2] = {40, 2, 0.0f, 0, 0.25, 3.0};
    row.changes_end = 3;
    launch(1, 32, 0, [] { others::adjust(logits.data(), COLUMNS, &row, changes); });
    expect(own()[11] == (9.5f + 1.5f) / 2 && own()[40] == before[2 * COLUMNS + 40] - 0.25f - 3.0f, "logits are changed otherwise");
    launch(1, 32, 0, [] { others::restore(logits.data(), COLUMNS, &row, changes); });
    expect(logits == before, "changes are not undone");
    logits[2 * COLUMNS + 8000] = NAN;
    sample();
    expect(chosen.fault == 1, "a broken row is not seen");
    logits = before;
    std::fill(mask.begin(), mask.end(), 0);
    sample();
    expect(chosen.fault == 2, "that nothing is allowed is not seen");
}
