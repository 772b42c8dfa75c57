// F16: see halves.cuh.
#pragma once
#include "quant/halves.cuh"
typedef Halves<false> Quant;
