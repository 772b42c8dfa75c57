// Q5_K: see superblocks.cuh.
#pragma once
#include "quant/superblocks.cuh"
typedef SuperBlocks<5> Quant;
