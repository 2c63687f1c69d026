// After the backward: dq = accumulator * scale, rounded. Memory-bound: one thread 16 columns of a row.
// The accumulator's order within 16 columns is that of an mma fragment, four values a lane: lane t's are the columns
// 2t, 2t + 1, 8 + 2t, 9 + 2t. The backward adds them with one instruction.
#pragma once
#include <cstdint>

#include "../ptx/mma.cuh"
#include "../params.h"

namespace fa2::sm80 {

constexpr int kConvertThreads = 256;

// grid = batch * nheads_q * ceil(rows * kHeadDim / 16 / kConvertThreads).
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kConvertThreads) bwd_convert_dq(__grid_constant__ const BwdParams p, int rows) {
  constexpr int kGroups = kHeadDim / 16;
  const unsigned blocks_per_head = (static_cast<int64_t>(rows) * kGroups + kConvertThreads - 1) / kConvertThreads;
  const unsigned index = blockIdx.x / blocks_per_head;
  const int head = index % p.nheads_q, bidb = index / p.nheads_q;
  const int64_t item = static_cast<int64_t>(blockIdx.x % blocks_per_head) * kConvertThreads + threadIdx.x;
  const int64_t row = item / kGroups;
  const int group = static_cast<int>(item % kGroups);
  if (row >= rows || group * 16 >= p.headdim) return;

  const auto* accum = reinterpret_cast<const float4*>(
      p.dq_accum + (bidb * p.lse_batch + head * p.lse_head + row) * kHeadDim + group * 16);
  uint32_t low[4], high[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float4 x = accum[t];
    low[t] = ptx::pack<Element>(x.x * p.softmax_scale, x.y * p.softmax_scale);
    high[t] = ptx::pack<Element>(x.z * p.softmax_scale, x.w * p.softmax_scale);
  }
  auto* dq = static_cast<Element*>(p.dq) + bidb * p.dq_strides.batch + row * p.dq_strides.row +
             head * p.dq_strides.head + group * 16;
  *reinterpret_cast<uint4*>(dq) = make_uint4(low[0], low[1], low[2], low[3]);
  if (group * 16 + 8 < p.headdim) *reinterpret_cast<uint4*>(dq + 8) = make_uint4(high[0], high[1], high[2], high[3]);
}

}  // namespace fa2::sm80
