// Q4_0: see blocks32.cuh.
#pragma once
#include "quant/blocks32.cuh"
typedef Blocks32<4, 8, false> Quant;
