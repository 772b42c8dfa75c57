// BF16: see halves.cuh.
#pragma once
#include "quant/halves.cuh"
#define ACTIVATIONS_BF16 1
typedef Halves<true> Quant;
