// Q4_K: see superblocks.cuh.
#pragma once
#include "quant/superblocks.cuh"
typedef SuperBlocks<4> Quant;
