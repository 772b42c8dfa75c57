// Where a product stores its outputs.
#pragma once
#include "activation.cuh"

struct Result {
    float* values;
    const float* bias;   // one per column, or null
    int columns, first;  // columns of a row, and where this part begins
    int adds;            // whether to add to what is there
    int pairs;           // how many tiles of 16 rows below a gate its counterpart lies; 0: rows are no gates
    float* gated;        // (rows, columns / 2): where rows are gates, activation(gate) * counterpart
};
