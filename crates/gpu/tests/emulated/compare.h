// What programs of this folder compare with.
#pragma once
#include "device.h"

static float random_value() { return ((int)emulated::chance(20001) - 10000) / 6000.0f; }
static void expect(bool right, const char* otherwise) {
    if (!right) emulated::fail("%s\n", otherwise);
}
// Mean square error, relative to mean squares. A NaN is an infinite one.
struct Error {
    double of = 0, all = 0;
    void add(double is, double right) { of += (is - right) * (is - right), all += right * right; }
    double relative() const { return std::isnan(of) ? INFINITY : all == 0 ? of : of / all; }
    void check(const char* what, double most) const {
        if (!(relative() <= most)) emulated::fail("%s: error %.1e\n", what, relative());
    }
};
// A float of 8 bits as it is defined, beside what its neighbours share.
static double float8_value(uint8_t code, uint8_t exponent) {
    const int digits = code & 7, power = code >> 3 & 15;
    return (code & 0x80 ? -1 : 1) * (power ? ldexp(8 + digits, power - 10) : ldexp(digits, -9)) * ldexp(1, exponent - 127);
}
static std::vector<float> random_values(long count) {
    std::vector<float> made(count);
    for (auto& one : made) one = random_value();
    return made;
}
// Every block of a grid, one after the other.
template <class Body> static void launch(int x, int y, int z, int threads, Body body) {
    static Body* kernel;
    kernel = &body;
    gridDim = {x, y, z};
    for (int i = 0; i < x * y * z; i++) emulated::run({i % x, i / x % y, i / x / y}, 1, threads, [] { (*kernel)(); });
}
// The first `rows` rows are what `right` says for each value, and nothing behind them was touched.
template <class Right> static void check(const char* what, const std::vector<float>& is, const std::vector<float>& before, int rows, int columns, Right right) {
    Error error;
    for (int i = 0; i < rows * columns; i++) error.add(is[i], right(i / columns, i % columns));
    error.check(what, 1e-12);
    expect(!memcmp(is.data() + rows * columns, before.data() + rows * columns, (is.size() - rows * columns) * 4), what);
}
