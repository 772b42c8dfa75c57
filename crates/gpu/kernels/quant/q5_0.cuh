// Q5_0: see blocks32.cuh.
#pragma once
#include "quant/blocks32.cuh"
typedef Blocks32<5, 16, false> Quant;
