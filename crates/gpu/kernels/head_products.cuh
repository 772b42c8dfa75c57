// A matrix for each head: which share of a row it multiplies, and where the result goes.
#pragma once
#include "prelude.cuh"

struct HeadProducts {
    const float* x;
    float* out;
    int x_columns, each, column;   // of a row; of a head's share of it, and where in that it begins
    int out_columns, rows, first;  // of a row; of a head's share of it, and where in that the part begins
    int head, fours;               // the part's first head; whether shares are aligned to four values
};
