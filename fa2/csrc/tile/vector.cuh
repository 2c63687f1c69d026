// Eight 16-bit numbers as one 16-byte register group.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../params.h"

namespace fa2::tile {

template <DType kDType>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kDType == DType::kFloat16) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
}

// Products and sums in fp32.
template <DType kDType>
__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) {
  const uint32_t lhs[4] = {a.x, a.y, a.z, a.w}, rhs[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack<kDType>(lhs[i]), y = unpack<kDType>(rhs[i]);
    sum = fmaf(x.x, y.x, sum);
    sum = fmaf(x.y, y.y, sum);
  }
  return sum;
}

// Sum over aligned groups of kLanes neighbouring lanes; each of them gets it. All 32 lanes must take part.
template <int kLanes>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

}  // namespace fa2::tile
