// Global loads. PTX ISA, "Data Movement and Conversion Instructions: ld.global.nc".
#pragma once

#include <cuda_runtime.h>

namespace fa2::ptx {

// 16 bytes that are read once: not kept in L1. `address` must be a multiple of 16 and constant during the
// kernel.
__device__ __forceinline__ void load_streaming_b128(uint4& value, const void* address) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
}

}  // namespace fa2::ptx
