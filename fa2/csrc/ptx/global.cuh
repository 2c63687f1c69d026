// Reductions and ordered accesses to global memory (PTX ISA 9.7.13.7 red, 9.7.9.8 ld.acquire).
#pragma once
#include <cstdint>

namespace fa2::ptx {

// target[0..3] += value, without returning anything. One instruction from sm_90 on, four before.
__device__ __forceinline__ void red_add_4(float* target, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + 1), "f"(y) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + 2), "f"(z) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + 3), "f"(w) : "memory");
#endif
}

__device__ __forceinline__ int load_acquire(const int* source) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* source) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}

// From L2, past an L1 that may hold something older.
__device__ __forceinline__ float4 load_l2_16(const float4* source) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(source)
               : "memory");
  return x;
}

// Everything this thread wrote or observed before is visible to whoever acquires the new value.
__device__ __forceinline__ void red_release_add(int* target, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

}  // namespace fa2::ptx
