// After the backward: dq = accumulator * scale, rounded. Memory-bound.
// The accumulator's order within 16 columns is that of an mma fragment, four values a lane: lane t's are the
// columns 2t, 2t + 1, 8 + 2t, 9 + 2t. The backward adds them with one instruction.
#pragma once
#include <cstdint>

#include "../params.h"
#include "../ptx/mma.cuh"

namespace fa2::sm80 {

// Four lanes convert 16 columns; a thread takes kConvertSteps of them.
constexpr int kConvertThreads = 256, kConvertSteps = 4, kConvertGroups = kConvertThreads / 4 * kConvertSteps;

// grid = batch * nheads_q * ceil(rows * kHeadDim / 16 / kConvertGroups).
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kConvertThreads)
    bwd_convert_dq(__grid_constant__ const BwdParams p, int rows) {
  constexpr int kGroupsPerRow = kHeadDim / 16;
  const unsigned blocks_per_head =
      (static_cast<int64_t>(rows) * kGroupsPerRow + kConvertGroups - 1) / kConvertGroups;
  const unsigned index = blockIdx.x / p.nheads_q;
  const int head = blockIdx.x % p.nheads_q, bidb = index / blocks_per_head;
  const int64_t first = static_cast<int64_t>(index % blocks_per_head) * kConvertGroups + threadIdx.x / 4;
  const unsigned quad = threadIdx.x % 32 & ~3u, t = threadIdx.x % 4;

  const auto* accum =
      reinterpret_cast<const float4*>(p.dq_accum + (bidb * p.lse_batch + head * p.lse_head) * kHeadDim);
  auto* dq = static_cast<Element*>(p.dq) + bidb * p.dq_strides.batch + head * p.dq_strides.head;
  float4 x[kConvertSteps];
  bool exists[kConvertSteps];
#pragma unroll
  for (int i = 0; i < kConvertSteps; ++i) {
    const int64_t group = first + i * (kConvertThreads / 4), row = group / kGroupsPerRow;
    exists[i] = row < rows && group % kGroupsPerRow * 16 < p.headdim;
    x[i] = exists[i] ? accum[group * 4 + t] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int i = 0; i < kConvertSteps; ++i) {
    const int64_t group = first + i * (kConvertThreads / 4), row = group / kGroupsPerRow;
    const int column = static_cast<int>(group % kGroupsPerRow) * 16 + t * 4;
    const uint32_t low = ptx::pack<Element>(x[i].x * p.softmax_scale, x[i].y * p.softmax_scale);
    const uint32_t high = ptx::pack<Element>(x[i].z * p.softmax_scale, x[i].w * p.softmax_scale);
    // Lane t stores columns 4t to 4t + 3: pairs 2t and 2t + 1 of the low half, then of the high half.
    const uint32_t low0 = __shfl_sync(0xffffffffu, low, quad + t * 2 % 4),
                   low1 = __shfl_sync(0xffffffffu, low, quad + t * 2 % 4 + 1);
    const uint32_t high0 = __shfl_sync(0xffffffffu, high, quad + t * 2 % 4),
                   high1 = __shfl_sync(0xffffffffu, high, quad + t * 2 % 4 + 1);
    if (exists[i] && column < p.headdim)
      *reinterpret_cast<uint2*>(dq + row * p.dq_strides.row + column) =
          t < 2 ? make_uint2(low0, low1) : make_uint2(high0, high1);
  }
}

}  // namespace fa2::sm80
