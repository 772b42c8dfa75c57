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
