// After the backward: dq = accumulator * scale, rounded, of the rows that the backward did not write itself.
// Memory-bound.
// The accumulator's order within 16 columns is that of an mma fragment, four values a lane: lane t's are the
// columns 2t, 2t + 1, 8 + 2t, 9 + 2t. The backward adds them with one instruction. Where the backward is
// sm90's, groups of 16 columns change places, two by two, in rows of odd number.
#pragma once
#include <cstdint>

#include "../params.h"
#include "../ptx/mma.cuh"
#include "../ptx/warpgroup.cuh"
#include "../tile/fragment.cuh"
#include "bwd_preprocess.cuh"

namespace fa2::sm80 {

// Four lanes convert 16 columns; a thread takes kConvertSteps of them, of several heads where there are many
// blocks: where the rows lie is asked once, and there may be nothing to convert.
constexpr int kConvertThreads = 256, kConvertSteps = 4, kConvertGroups = kConvertThreads / 4 * kConvertSteps;
constexpr int kConvertHeads = 4, kConvertManyBlocks = 8192;

// grid = batch * head_slots * ceil(rows * kHeadDim / 16 / kConvertGroups); a block takes every head_slots-th
// head.
template <class Element, class Config>
__global__ void __launch_bounds__(kConvertThreads)
    bwd_convert_dq(__grid_constant__ const BwdParams p, int rows, int head_slots) {
  if constexpr (Config::kStartsEarly) ptx::wait_for_previous_kernel();
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kGroupsPerRow = kHeadDim / 16;
  const unsigned blocks_per_head =
      (static_cast<int64_t>(rows) * kGroupsPerRow + kConvertGroups - 1) / kConvertGroups;
  const unsigned index = blockIdx.x / head_slots, bidb = index / blocks_per_head;
  const int64_t first_group = static_cast<int64_t>(index % blocks_per_head) * kConvertGroups;
  const int64_t first = first_group + threadIdx.x / 4;
  const unsigned t = threadIdx.x % 4;

  // One thread of each row asks where its dq is.
  constexpr int kRows = kConvertGroups / kGroupsPerRow + 2;
  __shared__ bool accumulated[kRows];
  const int64_t first_row = first_group / kGroupsPerRow;
  bool mine = false;
  if (threadIdx.x < kRows && first_row + threadIdx.x < rows)
    accumulated[threadIdx.x] = mine =
        dq_source<Config>(p, static_cast<int>(first_row) + threadIdx.x) != DqSource::kDirect;
  if (!__syncthreads_or(mine)) return;

  for (int head = blockIdx.x % head_slots; head < p.nheads_q; head += head_slots) {
    const auto* accum =
        reinterpret_cast<const float4*>(p.dq_accum + (bidb * p.lse_batch + head * p.lse_head) * kHeadDim);
    auto* dq = static_cast<Element*>(p.dq) + bidb * p.dq_strides.batch + head * p.dq_strides.head;
    float4 x[kConvertSteps];
    bool exists[kConvertSteps];
#pragma unroll
    for (int i = 0; i < kConvertSteps; ++i) {
      const int64_t group = first + i * (kConvertThreads / 4), row = group / kGroupsPerRow;
      const int64_t alternates = Config::kAlternates ? row & 1 : 0;
      exists[i] =
          row < rows && (group % kGroupsPerRow ^ alternates) * 16 < p.headdim && accumulated[row - first_row];
      x[i] = exists[i] ? accum[group * 4 + t] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < kConvertSteps; ++i) {
      const int64_t group = first + i * (kConvertThreads / 4), row = group / kGroupsPerRow;
      int column;
      const uint2 values = gather_columns<Element>(column, x[i].x * p.softmax_scale, x[i].y * p.softmax_scale,
                                                   x[i].z * p.softmax_scale, x[i].w * p.softmax_scale);
      const int alternates = Config::kAlternates ? static_cast<int>(row & 1) : 0;
      column += (static_cast<int>(group % kGroupsPerRow) ^ alternates) * 16;
      if (exists[i] && column < p.headdim)
        *reinterpret_cast<uint2*>(dq + row * p.dq_strides.row + column) = values;
    }
  }
}

}  // namespace fa2::sm80
