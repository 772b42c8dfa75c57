// `form.cu` and `gemv.cu` for one format, against products in f64 of what `Quant::value` reads: one row, with a norm where columns allow
// it, and several. Bits are the same whenever copies complete, and for one row and several.
#include "compare.h"
#include "prelude.cuh"

#define EXPERTS 0
// A header of form.cu has a parameter of this name.
#pragma push_macro("STAGES")
#undef STAGES
#include "form.cu"
#pragma pop_macro("STAGES")
#include "gemv.cu"

static const int WEIGHT_ROWS = 60, GROUPS = 8, COLUMNS = GROUPS * 128 - 4, TILES = 4, X_ROWS = 11, WARPS = THREADS / WARP;
static const long CODES = (long)TILES * GROUPS * 4096, PLANE = (long)TILES * GROUPS * 512;
// Everything that asynchronous copies may read.
static u8* arena;
static Part part;
static Step step;
static Inputs in;
static Result result;
static std::vector<float> x(X_ROWS* COLUMNS), norm(COLUMNS), bias(WEIGHT_ROWS), out, factors(X_ROWS + 8), partials(SLICES * 64 * TILES * 16);
static std::vector<int> tickets(64);

static void fill_step(int rows) { step = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, rows, rows, 0, 0}; }
static double right(int r, int n, bool normed) {
    double squares = 0, sum = 0;
    for (int k = 0; k < COLUMNS; k++) squares += (double)x[r * COLUMNS + k] * x[r * COLUMNS + k];
    for (int k = 0; k < COLUMNS; k++) sum += (double)x[r * COLUMNS + k] * (normed ? norm[k] / sqrt(squares / COLUMNS + 1e-5f) : 1) * Quant::value(part, n, k);
    return sum + bias[n];
}
static void check(const char* what, int rows, bool normed) {
    Error error;
    for (int i = 0; i < rows * WEIGHT_ROWS; i++) error.add(out[i], right(i / WEIGHT_ROWS, i % WEIGHT_ROWS, normed));
    error.check(what, 3e-7);
    for (size_t i = rows * WEIGHT_ROWS; i < out.size(); i++) expect(std::isnan(out[i]), "written behind the rows");
}

#if ONE_ROW
static void run() {
    emulated::shared_bytes = GROUPS * 256 + WARPS * STAGES * BYTES + 2 * WARPS * 16 * 4 + (GROUPS + 1) / 2 * 8 + WARPS * STAGES * 8;
    gridDim = {2, 1, 1};
    out.assign(2 * WEIGHT_ROWS, NAN);
    result.values = out.data();
    for (int b = 0; b < 2; b++) emulated::run({b, 0, 0}, 1, THREADS, [] { gemv_one(part, step, 0, in, result); });
}
static void check_all() {
    fill_step(1);
    for (const float* weight : {(const float*)nullptr, (const float*)norm.data()}) {
        in = {x.data(), nullptr, nullptr, weight, nullptr, nullptr, 0, 1, 1e-5f, TILES};
        std::vector<float> first;
        for (auto copies : {emulated::COPIES_LATE, emulated::COPIES_EARLY, emulated::COPIES_ANY}) {
            emulated::copies = copies;
            run();
            check("gemv_one", 1, weight);
            if (first.empty()) first = out;
            expect(!memcmp(first.data(), out.data(), WEIGHT_ROWS * 4), "other bits when copies complete otherwise");
        }
    }
}
#else
static void check_all() {
    u8* values = arena + CODES + 2 * PLANE;
    std::vector<float> first;
    for (int rows : {X_ROWS, 1}) {
        fill_step(rows);
        static u8* to;
        to = values;
        emulated::shared_bytes = 0;
        gridDim = {X_ROWS, 1, 1};
        for (int r = 0; r < X_ROWS; r++)
            emulated::run({r, 0, 0}, 1, 96, [] { form_fours(x.data(), nullptr, 0.0f, COLUMNS, step, 0, 0, to, factors.data(), 0); });
        in = {nullptr, values, factors.data(), nullptr, partials.data(), tickets.data(), 0, X_ROWS, 0.0f, TILES};
        for (auto copies : {emulated::COPIES_LATE, emulated::COPIES_EARLY, emulated::COPIES_ANY}) {
            emulated::copies = copies;
            emulated::shared_bytes = STAGES * (ROWS * ROW_BYTES + WARPS * BYTES);
            gridDim = {(TILES + WARPS - 1) / WARPS, (X_ROWS + ROWS - 1) / ROWS, SLICES};
            out.assign((X_ROWS + 1) * WEIGHT_ROWS, NAN);
            result.values = out.data();
            for (int i = 0; i < gridDim.x * gridDim.y * gridDim.z; i++)
                emulated::run({i % gridDim.x, i / gridDim.x % gridDim.y, i / gridDim.x / gridDim.y}, 1, THREADS, [] { gemv_several(part, step, 0, in, result); });
            check("gemv_several", rows, false);
            for (int ticket : tickets) expect(ticket == 0, "a ticket is left for the next kernel");
            if (first.empty()) first = out;
            expect(!memcmp(first.data(), out.data(), rows * WEIGHT_ROWS * 4), "other bits when copies complete otherwise, or of one row alone");
        }
    }
}
#endif

int main() {
    const long bytes = CODES + 2 * PLANE + (X_ROWS + 8) * GROUPS * 256;
    arena = (u8*)aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
    emulated::copied_begin = arena, emulated::copied_end = arena + bytes;
    for (auto* all : {&x, &norm, &bias})
        for (auto& one : *all) one = random_value();
    // Codes that are f16 have small exponents; any byte is a code of Q8_0, and scales are between 2^9 and 2^13.
    for (long i = 0; i < CODES; i++) arena[i] = F16_CODES && i % 2 ? 0x28 + emulated::chance(8) + emulated::chance(2) * 128 : emulated::chance(256);
    for (long i = 0; i < PLANE; i++) arena[CODES + i] = i % 2 ? 0x60 + emulated::chance(16) : emulated::chance(256);
#ifdef F32_SCALES
    for (long i = 0; i < PLANE; i += 4) {
        const float scale = (1 + (float)fabs(random_value())) / 64 * (emulated::chance(2) ? 1 : -1);
        memcpy(arena + CODES + i, &scale, 4);
    }
#endif
    const float largest_and_unscale[2] = {1.0f, 1.0f};
    memcpy(arena + CODES + PLANE, largest_and_unscale, 8);
    part = {arena, arena, arena + CODES, arena + CODES + PLANE, WEIGHT_ROWS, COLUMNS, GROUPS, 0};
    result = {nullptr, bias.data(), WEIGHT_ROWS, 0, 0, 0, nullptr};
    // Biases of the size of sums.
    for (auto& one : bias) one *= F16_CODES ? 1.0f : 0.1f;
    check_all();
}
