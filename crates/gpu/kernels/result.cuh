// Where a product goes.
#pragma once
#include "prelude.cuh"

struct Result {
    float* values;
    const float* bias;   // one per column, or null
    int columns, first;  // columns of a row, and where this part begins
    int adds, pad;       // whether to add to what is there
};

DEVICE void put(const Result& out, long r, int row, float sum) {
    long to = r * out.columns + out.first + row;
    if (out.bias) sum += out.bias[out.first + row];
    out.values[to] = out.adds ? out.values[to] + sum : sum;
}
