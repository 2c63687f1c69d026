// Single instructions of the special function unit (PTX ISA 9.7.3.21, ex2).
#pragma once

namespace fa2::ptx {

// 2^x; -inf gives 0, results below 2^-126 are flushed to 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fa2::ptx
