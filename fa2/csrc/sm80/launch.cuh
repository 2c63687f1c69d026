// Host side of the sm80 kernels: grids, shared memory, the order of launches. Included by the units in inst/ alone.
// Every failure is returned; api.cpp throws it.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../tile/schedule.cuh"
#include "bwd.cuh"
#include "bwd_convert.cuh"
#include "bwd_preprocess.cuh"
#include "fwd.cuh"

namespace fa2::sm80 {

// Beyond 48 KB a kernel must opt in to its dynamic shared memory, once per device.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes, std::atomic<bool> (&done)[64]) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (device < 64 && done[device].load(std::memory_order_relaxed))) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < 64) done[device].store(true, std::memory_order_relaxed);
  return error;
}

inline unsigned ceil_div(int64_t a, int64_t b) { return static_cast<unsigned>((a + b - 1) / b); }

template <class Element, class Config>
cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream) {
  constexpr int kBlockM = Config::kBlockM;
  static std::atomic<bool> allowed[64];
  const auto kernel = attention_fwd<Element, Config>;
  const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), Config::kShared_bytes, allowed);
  if (error != cudaSuccess) return error;
  const bool varlen = p.cu_seqlens_q != nullptr;
  if (varlen)
    schedule_tiles<kBlockM, true>
        <<<1, kScheduleThreads, 0, stream>>>(p.cu_seqlens_q, p.cu_seqlens_k, p.total_q, p.batch, p.tiles);
  const int64_t tiles = varlen ? tile_capacity(p.total_q, p.batch, kBlockM)
                               : static_cast<int64_t>(p.batch) * ceil_div(p.seqlen_q, kBlockM);
  if (tiles * p.nheads_q == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(tiles * p.nheads_q), Config::kThreads, Config::kShared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class Element, class Config>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  static std::atomic<bool> allowed[64];
  const auto kernel = attention_bwd<Element, Config>;
  const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), Config::kShared_bytes, allowed);
  if (error != cudaSuccess) return error;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int rows = varlen ? p.total_q : p.seqlen_q;
  const int64_t heads = static_cast<int64_t>(varlen ? 1 : p.batch) * p.nheads_q;
  const int semaphores = p.dq_semaphore == nullptr ? 0
                         : varlen ? tile_capacity(p.total_q, p.batch, kBlockM) * p.nheads_q
                                  : static_cast<int>(heads * ceil_div(rows, kBlockM));
  if (rows * heads != 0)
    bwd_preprocess<Element, kHeadDim><<<static_cast<unsigned>(heads * ceil_div(rows, kPreprocessRows)),
                                        kPreprocessThreads, 0, stream>>>(p, rows, semaphores);
  if (varlen)
    schedule_tiles<kBlockN, false>
        <<<1, kScheduleThreads, 0, stream>>>(p.cu_seqlens_k, p.cu_seqlens_q, p.total_k, p.batch, p.tiles);
  const int64_t tiles = varlen ? tile_capacity(p.total_k, p.batch, kBlockN)
                               : static_cast<int64_t>(p.batch) * ceil_div(p.seqlen_k, kBlockN);
  if (tiles * p.nheads_kv != 0)
    kernel<<<static_cast<unsigned>(tiles * p.nheads_kv), Config::kThreads, Config::kShared_bytes, stream>>>(p);
  if (rows * heads != 0)
    bwd_convert_dq<Element, kHeadDim>
        <<<static_cast<unsigned>(heads * ceil_div(static_cast<int64_t>(rows) * (kHeadDim / 16), kConvertThreads)),
           kConvertThreads, 0, stream>>>(p, rows);
  return cudaGetLastError();
}

}  // namespace fa2::sm80
