// Q5_K: see superblocks.cuh.
#pragma once
#include "quant/superblocks.cuh"
#define ACTIVATIONS_BF16 0
typedef SuperBlocks<5> Quant;
