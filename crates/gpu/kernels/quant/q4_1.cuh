// Q4_1: see blocks32.cuh.
#pragma once
#include "quant/blocks32.cuh"
typedef Blocks32<4, 0, true> Quant;
