// A matrix for each head, in Q8_0 and in f32, against f64: any share of a row, heads of several pieces of a weight, and the same
// bits however many rows come together.
#include "compare.h"
#include "prelude.cuh"

#define QUANT "quant/q8_0.cuh"
#define STAGES 3
#define ROWS 8
#include "head_products.cu"

static const int HEADS = 3, ROWS_OF = 40, COLUMNS = 160, GROUPS = 2, EACH = COLUMNS + 8, COLUMN = 4, TOKENS = 19, TILES = (ROWS_OF + 15) / 16;
// Of 16 rows x 128 columns: codes, and scales of f16.
static std::vector<u8> codes(HEADS* TILES* GROUPS * 2048);
static std::vector<u16> scales(HEADS* TILES* GROUPS * 64);
// Scales are kept times 2^20, and 2^(24 - 20) beside them.
static float of_part[2] = {0, 16};
static Part part = {codes.data(), nullptr, (u8*)scales.data(), (u8*)of_part, ROWS_OF, COLUMNS, GROUPS, 0};

static std::vector<float> run(const std::vector<float>& x, int first, int tokens) {
    Step step = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, tokens, tokens, tokens, 0};
    std::vector<float> out((tokens + 1) * HEADS * ROWS_OF, 7.0f);
    HeadProducts a = {&x[first * HEADS * EACH], out.data(), HEADS * EACH, EACH, COLUMN, HEADS * ROWS_OF, ROWS_OF, 0, 0, 1};
    emulated::copied_begin = std::min((const u8*)codes.data(), (const u8*)scales.data());
    emulated::copied_end = std::max(codes.data() + codes.size(), (u8*)(scales.data() + scales.size()));
    emulated::shared_bytes = ROWS * (GROUPS * BLOCK * 2 + 64) + WARPS * STAGES * BYTES;
    launch((TILES + WARPS - 1) / WARPS, HEADS, (tokens + ROWS) / ROWS, THREADS, [&] { head_products(part, step, a); });
    for (int i = 0; i < HEADS * ROWS_OF; i++) expect(out[tokens * HEADS * ROWS_OF + i] == 7.0f, "a row behind the step's was written");
    out.resize(tokens * HEADS * ROWS_OF);
    return out;
}

int main() {
    for (auto& one : codes) one = emulated::chance(256);
    for (auto& one : scales) one = f32_to_f16(random_value() * 6000);
    // What lies behind the last column is zeros, as it is packed.
    const auto x = random_values(TOKENS * HEADS * EACH);
    std::vector<float> wanted;
    for (int copies : {0, 1, 2}) {
        emulated::copies = (emulated::Copies)copies;
        const auto out = run(x, 0, TOKENS);
        Error error;
        for (int r = 0; r < TOKENS; r++)
            for (int h = 0; h < HEADS; h++)
                for (int n = 0; n < ROWS_OF; n++) {
                    double sum = 0;
                    for (int k = 0; k < COLUMNS; k++) sum += (double)Quant::value(part, h * TILES * 16 + n, k) * x[(r * HEADS + h) * EACH + COLUMN + k];
                    error.add(out[(r * HEADS + h) * ROWS_OF + n], sum);
                }
        error.check("head_products", 1e-7);
        for (int r = 0; r < TOKENS; r++) {
            const auto one = run(x, r, 1);
            expect(!memcmp(one.data(), &out[r * HEADS * ROWS_OF], one.size() * 4), "other bits alone");
        }
    }
}
