// Before the backward: delta = rowsum(dout * out), lse in log2 units, and zeros in the dq accumulator where
// it is used (and in the semaphores of the deterministic mode). Memory-bound: 8 lanes a row, 16 bytes a lane
// and load, heads side by side as they lie in memory.
#pragma once
#include <cmath>
#include <cstdint>

#include "../params.h"
#include "../ptx/mma.cuh"
#include "../ptx/warpgroup.cuh"
#include "../tile/mask.cuh"
#include "../tile/seqlen.cuh"
#include "config.h"

namespace fa2::sm80 {

constexpr int kPreprocessThreads = 256, kPreprocessRows = kPreprocessThreads / 8;

// Where a row's dq comes from. kDirect: the backward writes it itself, because one key block, or one thread
// block that walks over them, sees all of its query block; the accumulator is then not used, or not read
// before it is written. kZero: the row is in no query block that a tile could belong to.
enum class DqSource { kAccumulator, kDirect, kZero };

// `row` counts within the batch element.
template <class Config>
__device__ __forceinline__ DqSource dq_source(const BwdParams& p, int row) {
  int seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
  if (p.cu_seqlens_q != nullptr) {
    const int bidb = sequence_of(p.cu_seqlens_q, p.batch, row);
    if (bidb == p.batch) return DqSource::kZero;
    const int first = p.cu_seqlens_q[bidb];
    seqlen_q = p.cu_seqlens_q[bidb + 1] - first;
    seqlen_k = p.cu_seqlens_k[bidb + 1] - p.cu_seqlens_k[bidb];
    row -= first;
  }
  if (seqlen_k == 0) return DqSource::kZero;
  if constexpr (Config::kSkipsUnseeing) {
    const int unseeing = Mask(seqlen_q, seqlen_k, p.window_left, p.window_right).first_query();
    if (row < unseeing) return DqSource::kZero;
    seqlen_q -= unseeing;
    row -= unseeing;
  }
  const BlockRange keys = Mask(seqlen_q, seqlen_k, p.window_left, p.window_right)
                              .key_blocks<Config::kBlockM, Config::kBlockN>(row / Config::kBlockM);
  const bool direct =
      walks<Config>(seqlen_q, seqlen_k) ? keys.first < keys.last : keys.last - keys.first == 1;
  return direct ? DqSource::kDirect : DqSource::kAccumulator;
}

// One thread block: kPreprocessRows rows of one head. grid = batch * nheads_q * ceil(rows / kPreprocessRows);
// varlen is one batch element of total_q rows, documents do not matter here. `rows` is lse_head's stride,
// too.
template <class Element, class Config>
__global__ void __launch_bounds__(kPreprocessThreads)
    bwd_preprocess(__grid_constant__ const BwdParams p, int rows, int64_t semaphores) {
  constexpr int kHeadDim = Config::kHeadDim;
  const unsigned blocks_per_head = (rows + kPreprocessRows - 1) / kPreprocessRows;
  const unsigned index = blockIdx.x / p.nheads_q;
  const int head = blockIdx.x % p.nheads_q, bidb = index / blocks_per_head;
  const int row = index % blocks_per_head * kPreprocessRows + threadIdx.x / 8;
  const int lane = threadIdx.x % 8;

  if constexpr (Config::kStartsEarly) {
    ptx::let_next_kernel_start();  // it waits for all of this by itself
    if (p.cu_seqlens_q == nullptr && blockIdx.x == 0 && threadIdx.x == 0) p.tiles[1] = 0;
  }
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kPreprocessThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPreprocessThreads + threadIdx.x; i < semaphores;
       i += threads)
    p.dq_semaphore[i] = 0;
  if constexpr (Config::kConvertsDq) {
    auto* const numbers = reinterpret_cast<int32_t*>(p.conversions.pieces);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPreprocessThreads + threadIdx.x;
         i < p.conversions.numbers; i += threads)
      numbers[i] = 0;
  }

  float sum = 0.f;
  if (row < rows) {
    const auto* out = static_cast<const Element*>(p.out) + bidb * p.out_strides.batch +
                      static_cast<int64_t>(row) * p.out_strides.row + head * p.out_strides.head;
    const auto* dout = static_cast<const Element*>(p.dout) + bidb * p.dout_strides.batch +
                       static_cast<int64_t>(row) * p.dout_strides.row + head * p.dout_strides.head;
    float* accum = p.dq_accum + (bidb * p.lse_batch + head * p.lse_head + row) * kHeadDim;
    uint4 a[(kHeadDim + 63) / 64], b[(kHeadDim + 63) / 64];
#pragma unroll
    for (int i = 0; i < (kHeadDim + 63) / 64; ++i) {
      const bool exists = (i * 8 + lane) * 8 < p.headdim;
      a[i] = exists ? *reinterpret_cast<const uint4*>(out + (i * 8 + lane) * 8) : make_uint4(0, 0, 0, 0);
      b[i] = exists ? *reinterpret_cast<const uint4*>(dout + (i * 8 + lane) * 8) : make_uint4(0, 0, 0, 0);
    }
    const DqSource source = dq_source<Config>(p, row);
    if (Config::kConvertsDq && source == DqSource::kZero) {
      auto* dq = static_cast<Element*>(p.dq) + bidb * p.dq_strides.batch +
                 static_cast<int64_t>(row) * p.dq_strides.row + head * p.dq_strides.head;
#pragma unroll
      for (int i = 0; i < (kHeadDim + 63) / 64; ++i)
        if ((i * 8 + lane) * 8 < p.headdim)
          *reinterpret_cast<uint4*>(dq + (i * 8 + lane) * 8) = make_uint4(0, 0, 0, 0);
    } else if (source != DqSource::kDirect) {
#pragma unroll
      for (int i = 0; i < (kHeadDim + 31) / 32; ++i)
        if (kHeadDim % 32 == 0 || (i * 8 + lane) * 4 < kHeadDim)
          *reinterpret_cast<float4*>(accum + (i * 8 + lane) * 4) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < (kHeadDim + 63) / 64; ++i) {
      const uint32_t* x = reinterpret_cast<const uint32_t*>(&a[i]);
      const uint32_t* y = reinterpret_cast<const uint32_t*>(&b[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 u = ptx::unpack<Element>(x[e]), v = ptx::unpack<Element>(y[e]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
      }
    }
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0 && row < rows) {
    const int64_t offset = bidb * p.lse_batch + head * p.lse_head + row;
    const float lse = p.softmax_lse[offset];
    // A row that saw no key: exponents of -inf, so that its probabilities come out as 0 and not as NaN.
    p.lse_log2[offset] = lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
    p.delta[offset] = sum;
  }
  // Who waits for this kernel also waits for the one before, the list of tiles.
  if constexpr (Config::kStartsEarly) ptx::wait_for_previous_kernel();
}

}  // namespace fa2::sm80
