// delta = rowsum(dout * out) in fp32, the backward's preprocessing (FlashAttention-2, arXiv 2307.08691,
// algorithm 2).
//
//   block (m_block, bidh, bidb), kLanes lanes per row:
//     row at or past rows_end: 0, nothing read (what lies there may be NaN)
//     else: each lane multiplies 8 pairs, the lanes of the row add up, the first one writes
//
// One flat grid, because batch * nheads may exceed the 65535 of gridDim.y.
#pragma once

#include "../params.h"
#include "../ptx/load.cuh"
#include "../tile/vector.cuh"
#include "config.h"
#include "delta.h"

namespace fa2::sm80 {

template <DType kDType, int kHeadDim>
__global__ void __launch_bounds__(DeltaConfig<kHeadDim>::kThreads) delta_kernel(const DeltaParams params) {
  using Config = DeltaConfig<kHeadDim>;
  const int m_blocks = (params.rows + Config::kRows - 1) / Config::kRows;
  const int m_block = blockIdx.x % m_blocks;
  const int bidh = blockIdx.x / m_blocks % params.nheads;
  const int bidb = blockIdx.x / m_blocks / params.nheads;
  const int row = m_block * Config::kRows + threadIdx.x / Config::kLanes;
  const int column = threadIdx.x % Config::kLanes * 8;

  const int rows_end = params.rows_end != nullptr ? *params.rows_end : params.rows;
  float sum = 0.f;
  if (row < params.rows && row < rows_end && column < params.headdim) {
    const auto offset = [&](const Strides& s) {
      // Elements are 2 bytes wide whatever their type.
      return 2 * (bidb * s.batch + row * s.row + bidh * s.head + column);
    };
    uint4 dout, out;
    ptx::load_streaming_b128(dout, static_cast<const char*>(params.dout) + offset(params.dout_strides));
    ptx::load_streaming_b128(out, static_cast<const char*>(params.out) + offset(params.out_strides));
    sum = tile::dot8<kDType>(dout, out);
  }
  sum = tile::sum_lanes<Config::kLanes>(sum);
  if (column == 0 && row < params.rows) {
    params.delta[(static_cast<int64_t>(bidb) * params.nheads + bidh) * params.rows + row] = sum;
  }
}

template <DType kDType, int kHeadDim>
cudaError_t launch_delta(const DeltaParams& params, cudaStream_t stream) {
  using Config = DeltaConfig<kHeadDim>;
  const int64_t m_blocks = (params.rows + int64_t{Config::kRows} - 1) / Config::kRows;
  const int64_t blocks = m_blocks * params.nheads * params.batch;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  delta_kernel<kDType, kHeadDim><<<static_cast<unsigned>(blocks), Config::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <DType kDType, int kHeadDim>
const void* delta_function() {
  return reinterpret_cast<const void*>(delta_kernel<kDType, kHeadDim>);
}

}  // namespace fa2::sm80
