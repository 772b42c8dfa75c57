// F16: see halves.cuh.
#pragma once
#include "quant/halves.cuh"
#define ACTIVATIONS_BF16 0
typedef Halves<false> Quant;
