// FP8_A8: the bytes of FP8_128, multiplied as they are by activations in 8-bit floats.
#pragma once
#define FLOATS8 1
#include "quant/fp8_128.cuh"
