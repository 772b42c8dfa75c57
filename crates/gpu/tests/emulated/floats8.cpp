// Rows of 8-bit floats that form.cu makes, and weights of FP8_A8, as wgmma reads them: their products against f64. Which
// byte an instruction takes for which row and column is written here as the PTX manual has it, not as the kernels do.
#include "compare.h"
#define EXPERTS 0
#define FOURS 1
#include "quant/fp8_a8.cuh"
#include "form.cu"

static const int GROUPS = 3, COLUMNS = GROUPS * 128, X_ROWS = 11, CAPACITY = 16;
static std::vector<u8> codes(GROUPS * 2048), values(GROUPS * CAPACITY * 128);
static std::vector<float> x(X_ROWS* COLUMNS), norm(COLUMNS), scales(GROUPS * 16), factors(CAPACITY);
static Step step;

static double value_of(u8 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 128 ? -magnitude : magnitude;
}
// Byte k of 128 of a row of activations, in the 128-byte swizzle.
static u8 byte_of_row(int group, int r, int k) {
    return values[((long)group * CAPACITY + r) * 128 + ((k / 16) ^ r % 8) * 16 + k % 16];
}
// What m64nNk32 makes of a warp's 16 rows: register i of lane 4g + t holds row g + 8 (i % 2), k from 16 (i / 2) + 4t on.
static double product(const u8* staged, int group, int n, int r) {
    double sum = 0;
    for (int t = 0; t < 4; t++)
        Quant::floats8(staged, n % 8 * 4 + t, [&](int step, const u32 a[4]) {
            for (int half = 0; half < 2; half++)
                for (int j = 0; j < 4; j++)
                    sum += value_of((u8)(a[half * 2 + n / 8] >> 8 * j)) * value_of(byte_of_row(group, r, step * 32 + half * 16 + t * 4 + j));
        });
    return sum;
}
// Each row alone: its largest magnitude is in [2^7, 2^8), every value is a 16th of itself away at most, and sums are those
// of the values.
static void check_rows(const float* normed) {
    Error error;
    const Part part = {codes.data(), nullptr, (const u8*)scales.data(), nullptr, 16, COLUMNS, GROUPS, 0};
    for (int r = 0; r < X_ROWS; r++) {
        double squares = 0, most = 0, largest = 0;
        for (int k = 0; k < COLUMNS; k++) squares += (double)x[r * COLUMNS + k] * x[r * COLUMNS + k];
        std::vector<double> row(COLUMNS);
        for (int k = 0; k < COLUMNS; k++) {
            row[k] = x[r * COLUMNS + k] * (normed ? norm[k] / sqrt(squares / COLUMNS + 1e-5f) : 1);
            most = std::max(most, fabs(row[k]));
        }
        for (int k = 0; k < COLUMNS; k++) largest = std::max(largest, fabs(value_of(byte_of_row(k / 128, r, k % 128))));
        expect(largest >= 128 && largest <= 256, "a row's largest value");
        expect(fabs(largest * factors[r] / most - 1) <= 1.0 / 16, "a row's factor");
        for (int n = 0; n < 16; n++) {
            double sum = 0, right = 0;
            for (int group = 0; group < GROUPS; group++) {
                std::vector<u8> staged(2048 + 64);
                memcpy(staged.data(), &codes[group * 2048], 2048);
                memcpy(staged.data() + 2048, &scales[group * 16], 64);
                sum += product(staged.data(), group, n, r) * Quant::step_scale(staged.data(), n % 8 * 4, n / 8);
            }
            for (int k = 0; k < COLUMNS; k++) {
                const float scaled = (float)(row[k] / factors[r]);
                right += Quant::value(part, n, k) * value_of(f32_to_float8(scaled)) * factors[r];
            }
            error.add(sum * factors[r], right);
        }
    }
    // A value of a row that is half-way between two may go either way behind a norm.
    error.check("products of 8-bit floats", normed ? 2e-5 : 1e-12);
}

int main() {
    for (auto& one : x) one = random_value();
    for (auto& one : norm) one = random_value();
    // Rows of several sizes.
    for (int r = 0; r < X_ROWS; r++)
        for (int k = 0; k < COLUMNS; k++) x[r * COLUMNS + k] = ldexp(x[r * COLUMNS + k], 3 * r - 15);
    for (auto& one : scales) one = (1 + (float)fabs(random_value())) / 64 * (emulated::chance(2) ? 1 : -1);
    for (auto& one : codes) one = (u8)(emulated::chance(127) + 128 * emulated::chance(2));
    step = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, X_ROWS, X_ROWS, 0, 0};
    for (const float* weight : {(const float*)nullptr, (const float*)norm.data()}) {
        std::vector<u8> first;
        for (int few : {0, 1}) {
            values.assign(values.size(), 0x7f);
            launch(X_ROWS, 1, 1, 96, [&] {
                if (few) form_few(x.data(), weight, 1e-5f, COLUMNS, step, 0, 0, values.data(), factors.data(), CAPACITY);
                else form_fours(x.data(), weight, 1e-5f, COLUMNS, step, 0, 0, values.data(), factors.data(), CAPACITY);
            });
            check_rows(weight);
            if (first.empty()) first = values;
            expect(first == values, "other bits by another kernel");
        }
    }
}
