// F32: values as they are, rows of a tile one after the other. Multiplied in f32 (`gemv_f32.cu`): few models hold large
// matrices of it.
#pragma once
#include "quant/tile.cuh"

struct Quant {
    DEVICE_METHOD static float value(const Part& part, int row, int column) {
        long tile = (long)(row / 16) * part.groups + column / 128;
        return ((const float*)part.codes)[tile * 2048 + row % 16 * 128 + column % 128];
    }
};
