// What the prelude gives to a kernel of the running thread: its indices, and its block's shared memory.
#pragma once
#include <vector_types.h>

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace fa2::emulation {
extern unsigned char* shared_memory;
}
