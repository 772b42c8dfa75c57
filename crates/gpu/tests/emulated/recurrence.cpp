// Kernels that keep a state of a sequence, against f64 token by token: what comes out, where states and checkpoints are
// left, and that nothing else is touched. A sequence has the same bits in whatever chunks it comes, and going on from a
// checkpoint.
#include "compare.h"
#include "prelude.cuh"

#include "recurrence.cu"

static const int PAGES = 9, SPARE = 3;
// One sequence's part of a step: `tokens` of its positions from `start` on.
struct Share {
    int sequence, start, tokens, from, to;
    std::vector<std::array<int, 2>> saves;
};
// The parts as a step has them, behind three words that are somebody else's.
struct Batch {
    std::vector<int> words;
    Step step;
    int tokens = 0, longest = 0;
    Batch(const std::vector<Share>& parts) : words(3 + parts.size() * sizeof(RowState) / 4, -7) {
        std::vector<RowState> rows;
        for (auto& part : parts) {
            rows.push_back({tokens, part.tokens, part.from, part.to, (int)words.size(), (int)part.saves.size()});
            for (auto& save : part.saves) words.insert(words.end(), save.begin(), save.end());
            tokens += part.tokens;
            longest = std::max(longest, part.tokens);
        }
        memcpy(&words[3], rows.data(), rows.size() * sizeof(RowState));
        step = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, words.data(), 1, tokens, 0, 0};
    }
};

// What is put through the kernels: values of every position of every sequence, and one layer's states.
static const int SEQUENCES = 3, LENGTH = 75;
struct Layer {
    int columns, out_columns, each, mixed_columns = 0;
    std::vector<float> x, mixed, states;
    // What a position yields, and the state after this many positions; of f64.
    std::vector<std::vector<double>> out[SEQUENCES], after[SEQUENCES];
    std::vector<float> rows_of(const std::vector<float>& all, int width, const std::vector<Share>& parts) const {
        std::vector<float> rows;
        for (auto& part : parts)
            rows.insert(rows.end(), &all[(part.sequence * LENGTH + part.start) * width], &all[(part.sequence * LENGTH + part.start + part.tokens) * width]);
        return rows;
    }
    // Runs a step, and says what came out.
    virtual std::vector<float> run(const Batch& batch, const std::vector<float>& x, const std::vector<float>& mixed, int rows) = 0;
    std::vector<float> check(const std::vector<Share>& parts) {
        const auto before = states;
        Batch batch(parts);
        auto out_rows = run(batch, rows_of(x, columns, parts), rows_of(mixed, mixed_columns, parts), parts.size());
        Error error;
        size_t at = 0;
        std::vector<bool> written(PAGES);
        for (auto& part : parts) {
            for (int t = part.start; t < part.start + part.tokens; t++)
                for (double right : out[part.sequence][t]) error.add(out_rows[at++], right);
            auto left = part.saves;
            left.push_back({part.tokens, part.to});
            for (auto& [tokens, page] : left) {
                written[page] = true;
                for (int i = 0; i < each; i++) {
                    const double right = after[part.sequence][part.start + tokens][i];
                    if (std::isnan(right)) expect(states[page * each + i] == before[page * each + i], "another's part of a state was written");
                    else error.add(states[page * each + i], right);
                }
            }
        }
        error.check("a step", 1e-11);
        for (int page = 0; page < PAGES; page++)
            expect(written[page] || !memcmp(&states[page * each], &before[page * each], each * 4), "a state that nobody named was written");
        for (; at < out_rows.size(); at++) expect(out_rows[at] == 7.0f, "a row behind the step's was written");
        return out_rows;
    }
    // All the ways through three sequences.
    void everything() {
        states = random_values(PAGES * each);
        // Together: from nothing, in place, with checkpoints; on from a checkpoint into another place.
        const auto whole = check({{0, 0, LENGTH, -1, 1, {{32, 4}, {33, 5}, {64, 6}}}});
        check({{1, 0, 2, -1, 2, {}}});
        check({{0, 64, 1, 6, 7, {{1, 8}}}, {1, 2, 40, 2, 2, {{30, 5}}}, {2, 0, 1, -1, 3, {}}});
        // One by one, and in other chunks: the same bits.
        for (int chunk : {1, 7, 33}) {
            std::vector<float> pieces;
            for (int start = 0; start < LENGTH; start += chunk) {
                const int from = start == 0 ? -1 : 1 + start / chunk % 2, to = 2 - start / chunk % 2;
                const auto piece = check({{0, start, std::min(chunk, LENGTH - start), from, to, {}}});
                pieces.insert(pieces.end(), piece.begin(), piece.end() - SPARE);
            }
            expect(pieces == std::vector<float>(whole.begin(), whole.end() - SPARE), "other bits in chunks");
        }
        states = random_values(PAGES * each);
        check({{0, 0, 32, -1, 1, {}}});
        const auto rest = check({{0, 32, LENGTH - 32, 1, 1, {}}});
        expect(std::equal(rest.begin(), rest.end() - SPARE, whole.begin() + 32 * out_columns), "other bits going on");
    }
};

struct Convolution : Layer {
    ShortConv a;
    std::vector<float> weight, bias;
    Convolution(int channels, int taps, int gated, bool biased = false) {
        columns = (gated ? 3 : 1) * channels + 1, out_columns = channels, each = (taps - 1) * channels + 2;
        x = random_values(SEQUENCES * LENGTH * columns), weight = random_values(taps * channels), bias = random_values(channels);
        if (!biased) bias.assign(channels, 0.0f);
        a = {{}, nullptr, weight.data(), biased ? bias.data() : nullptr, nullptr, channels, taps, columns, gated};
        for (int s = 0; s < SEQUENCES; s++) {
            auto input = [&](int t, int c) {
                const float* row = &x[(s * LENGTH + t) * columns];
                return t < 0 ? 0.0 : gated ? (double)row[c] * row[2 * channels + c] : row[c];
            };
            for (int t = 0; t <= LENGTH; t++) {
                std::vector<double> state(each, NAN), y(channels);
                for (int i = 0; i < (taps - 1) * channels; i++) state[i] = input(t - (taps - 1) + i / channels, i % channels);
                after[s].push_back(state);
                for (int c = 0; c < channels && t < LENGTH; c++) {
                    y[c] = bias[c];
                    for (int tap = 0; tap < taps; tap++) y[c] += weight[tap * channels + c] * input(t - taps + 1 + tap, c);
                    y[c] *= gated ? x[(s * LENGTH + t) * columns + channels + c] : 1 / (1 + exp(-y[c]));
                }
                out[s].push_back(y);
            }
        }
        everything();
    }
    std::vector<float> run(const Batch& batch, const std::vector<float>& x, const std::vector<float>&, int rows) override {
        std::vector<float> out_rows((size_t)batch.tokens * a.channels + SPARE, 7.0f);
        a.states = {states.data(), each, 3, rows, 0}, a.x = x.data(), a.out = out_rows.data();
        launch((a.channels + 127) / 128, rows + 1 - (rows > 1), (batch.longest + TOKENS_EACH - 1) / TOKENS_EACH, 128, [&] { short_conv(batch.step, a); });
        return out_rows;
    }
};

template <int ROWS> struct Delta : Layer {
    DeltaRule a;
    std::vector<float> rate, bias;
    Delta(int key, int value, int dim_k, int dim_v, int turns, int before) {
        const int lanes_blocks = (dim_v + 15) / 16;
        columns = 2 * key * dim_k + value * dim_v, mixed_columns = 5 + 2 * value, out_columns = value * dim_v;
        each = before + value * lanes_blocks * 16 * dim_k;
        x = random_values(SEQUENCES * LENGTH * columns), mixed = random_values(SEQUENCES * LENGTH * mixed_columns);
        rate = random_values(value), bias = random_values(value);
        for (auto& one : rate) one = -fabsf(one);
        a = {{}, nullptr, nullptr, rate.data(), bias.data(), nullptr, key, value, dim_k, dim_v, turns, before, mixed_columns, 0};
        for (int s = 0; s < SEQUENCES; s++) {
            std::vector<double> state(each);
            for (int t = 0; t <= LENGTH; t++) {
                auto now = state;
                std::fill_n(now.begin(), before, NAN);
                after[s].push_back(now);
                if (t == LENGTH) break;
                const float *row = &x[(s * LENGTH + t) * columns], *shares = &mixed[(s * LENGTH + t + 1) * mixed_columns - 2 * value];
                std::vector<double> y(out_columns);
                for (int h = 0; h < value; h++) {
                    const int head = turns ? h % key : h / (value / key);
                    std::vector<double> q(row + head * dim_k, row + (head + 1) * dim_k), k(row + (key + head) * dim_k, row + (key + head + 1) * dim_k);
                    double qq = 1e-6, kk = 1e-6;
                    for (double one : q) qq += one * one;
                    for (double one : k) kk += one * one;
                    for (auto& one : q) one /= sqrt(qq) * sqrt(dim_k);
                    for (auto& one : k) one /= sqrt(kk);
                    const double kept = exp(rate[h] * log1p(exp((double)shares[value + h] + bias[h]))), learned = 1 / (1 + exp(-(double)shares[h]));
                    for (int c = 0; c < dim_v; c++) {
                        double* column = &state[before + (h * lanes_blocks + c / 16) * dim_k * 16 + c % 16];
                        double known = 0;
                        for (int i = 0; i < dim_k; i++) known += (column[i * 16] *= kept) * k[i];
                        for (int i = 0; i < dim_k; i++) {
                            column[i * 16] += k[i] * (row[2 * key * dim_k + h * dim_v + c] - known) * learned;
                            y[h * dim_v + c] += column[i * 16] * q[i];
                        }
                    }
                }
                out[s].push_back(y);
            }
        }
        everything();
    }
    std::vector<float> run(const Batch& batch, const std::vector<float>& x, const std::vector<float>& mixed, int rows) override {
        std::vector<float> out_rows((size_t)batch.tokens * out_columns + SPARE, 7.0f);
        // However many tokens are brought at once.
        const int most = std::array<int, 4>{1, 3, 16, 32}[emulated::chance(4)];
        a.chunk = std::min(most, batch.longest);
        emulated::shared_bytes = (batch.longest > a.chunk ? 2 : 1) * a.chunk * (2 * PARTS * ROWS + TOKEN_REST) * 4;
        a.states = {states.data(), each, 3, rows, 0}, a.qkv = x.data(), a.mixed = mixed.data(), a.out = out_rows.data();
        launch((a.dim_v + COLUMNS - 1) / COLUMNS * a.value, rows, 1, DELTA_THREADS, [&] { delta_rule<ROWS>(batch.step, a); });
        return out_rows;
    }
};

template <int ROWS> struct Scan : Layer {
    SelectiveScan a;
    std::vector<float> rate, bias, skip;
    Scan(int heads, int groups, int dim, int size, int before) {
        const int lanes_blocks = (dim + 15) / 16;
        columns = heads * dim + 2 * groups * size, mixed_columns = 5 + heads, out_columns = heads * dim;
        each = before + heads * lanes_blocks * 16 * size;
        x = random_values(SEQUENCES * LENGTH * columns), mixed = random_values(SEQUENCES * LENGTH * mixed_columns);
        rate = random_values(heads), bias = random_values(heads), skip = random_values(heads);
        for (auto& one : rate) one = -fabsf(one);
        a = {{}, nullptr, nullptr, rate.data(), bias.data(), skip.data(), nullptr, heads, groups, dim, size, before, mixed_columns, 0, 0};
        for (int s = 0; s < SEQUENCES; s++) {
            std::vector<double> state(each);
            for (int t = 0; t <= LENGTH; t++) {
                auto now = state;
                std::fill_n(now.begin(), before, NAN);
                after[s].push_back(now);
                if (t == LENGTH) break;
                const float *row = &x[(s * LENGTH + t) * columns], *steps = &mixed[(s * LENGTH + t + 1) * mixed_columns - heads];
                std::vector<double> y(out_columns);
                for (int h = 0; h < heads; h++) {
                    const float* k = row + heads * dim + h / (heads / groups) * size;
                    const float* q = k + groups * size;
                    const double length = log1p(exp((double)steps[h] + bias[h]));
                    for (int c = 0; c < dim; c++) {
                        double* column = &state[before + (h * lanes_blocks + c / 16) * size * 16 + c % 16];
                        const double v = row[h * dim + c];
                        for (int i = 0; i < size; i++) {
                            column[i * 16] = column[i * 16] * exp(rate[h] * length) + k[i] * v * length;
                            y[h * dim + c] += column[i * 16] * q[i];
                        }
                        y[h * dim + c] += v * skip[h];
                    }
                }
                out[s].push_back(y);
            }
        }
        everything();
    }
    std::vector<float> run(const Batch& batch, const std::vector<float>& x, const std::vector<float>& mixed, int rows) override {
        std::vector<float> out_rows((size_t)batch.tokens * out_columns + SPARE, 7.0f);
        const int most = std::array<int, 4>{1, 3, 16, 32}[emulated::chance(4)];
        a.chunk = std::min(most, batch.longest);
        emulated::shared_bytes = (batch.longest > a.chunk ? 2 : 1) * a.chunk * (2 * PARTS * ROWS + TOKEN_REST) * 4;
        a.states = {states.data(), each, 3, rows, 0}, a.x = x.data(), a.mixed = mixed.data(), a.out = out_rows.data();
        launch((a.dim + COLUMNS - 1) / COLUMNS * a.heads, rows, 1, DELTA_THREADS, [&] { selective_scan<ROWS>(batch.step, a); });
        return out_rows;
    }
};

// One matrix with a column for each channel; keys, queries and steps lie apart.
template <int ROWS> struct ByChannel : Layer {
    ChannelScan a;
    std::vector<float> rates, bias, skip;
    ByChannel(int channels, int size, int before) {
        columns = channels + 2 * size, mixed_columns = channels, out_columns = channels;
        each = before + (channels + 15) / 16 * 16 * size;
        x = random_values(SEQUENCES * LENGTH * columns), mixed = random_values(SEQUENCES * LENGTH * mixed_columns);
        rates = random_values(size * channels), bias = random_values(channels), skip = random_values(channels);
        for (auto& one : rates) one = -fabsf(one);
        a = {{}, nullptr, nullptr, nullptr, nullptr, rates.data(), bias.data(), skip.data(), nullptr, channels, size, before, 0};
        for (int s = 0; s < SEQUENCES; s++) {
            std::vector<double> state(each, NAN);
            for (int c = 0; c < channels; c++)
                for (int i = 0; i < size; i++) state[before + (c / 16 * size + i) * 16 + c % 16] = 0;
            for (int t = 0; t <= LENGTH; t++) {
                after[s].push_back(state);
                if (t == LENGTH) break;
                const float *row = &x[(s * LENGTH + t) * columns], *k = row + channels, *q = k + size;
                std::vector<double> y(channels);
                for (int c = 0; c < channels; c++) {
                    const double length = log1p(exp((double)mixed[(s * LENGTH + t) * channels + c] + bias[c]));
                    for (int i = 0; i < size; i++) {
                        double& value = state[before + (c / 16 * size + i) * 16 + c % 16];
                        value = value * exp(rates[i * channels + c] * length) + k[i] * row[c] * length;
                        y[c] += value * q[i];
                    }
                    y[c] += row[c] * skip[c];
                }
                out[s].push_back(y);
            }
        }
        everything();
    }
    std::vector<float> run(const Batch& batch, const std::vector<float>& x, const std::vector<float>& mixed, int rows) override {
        std::vector<float> out_rows((size_t)batch.tokens * out_columns + SPARE, 7.0f), parts[3];
        const int ends[] = {a.channels, a.channels + a.state, columns};
        for (int t = 0; t < batch.tokens; t++)
            for (int p = 0; p < 3; p++) parts[p].insert(parts[p].end(), &x[t * columns] + (p ? ends[p - 1] : 0), &x[t * columns] + ends[p]);
        a.states = {states.data(), each, 3, rows, 0}, a.x = parts[0].data(), a.keys = parts[1].data(), a.queries = parts[2].data();
        a.steps = mixed.data(), a.out = out_rows.data();
        launch((a.channels + 31) / 32, rows, 1, 32, [&] { channel_scan<ROWS>(batch.step, a); });
        return out_rows;
    }
};

int main() {
    ByChannel<16>(40, 16, 6), ByChannel<16>(21, 13, 0), ByChannel<32>(16, 20, 3);
    Convolution(70, 4, 0, true);
    Scan<1>(3, 1, 21, 13, 6), Scan<2>(4, 2, 32, 32, 8), Scan<8>(2, 2, 40, 128, 0);
    Convolution(130, 4, 0), Convolution(20, 3, 1), Convolution(9, 1, 1), Convolution(5, 8, 0);
    Delta<1>(1, 3, 13, 21, 0, 6), Delta<2>(2, 4, 32, 32, 1, 8), Delta<4>(2, 4, 64, 16, 0, 4), Delta<8>(1, 1, 128, 40, 0, 0);
}
