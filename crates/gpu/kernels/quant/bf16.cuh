// BF16: see halves.cuh.
#pragma once
#include "quant/halves.cuh"
typedef Halves<true> Quant;
