// Host side of the forward: (varlen) the list of tiles, then the kernel. Included by inst/fwd_*.cu alone.
#pragma once

#include "../kernel_launch.cuh"
#include "../tile/schedule.cuh"
#include "attention.h"
#include "fwd.cuh"

namespace fa2::sm80 {

template <class Element, class Config>
cudaError_t launch_fwd_tiles(const FwdParams& p, cudaStream_t stream) {
  constexpr int kBlockM = Config::kBlockM;
  static_assert(kBlockM >= kSmallestBlock, "scratch sizes are counted with kSmallestBlock");
  static std::atomic<uint64_t> devices;
  cudaError_t error = allow_shared_memory(attention_fwd<Element, Config>, Config::kShared_bytes, devices);
  const bool varlen = p.cu_seqlens_q != nullptr;
  if (error == cudaSuccess && varlen)
    error = launch(schedule_tiles<kBlockM, true, 80>, 1, kScheduleThreads, 0, stream, p.cu_seqlens_q,
                   p.cu_seqlens_k, p.total_q, p.batch, p.tiles);
  if (error != cudaSuccess) return error;
  const int64_t tiles =
      varlen ? tile_capacity(p.total_q, p.batch, kBlockM) : p.batch * ceil_div(p.seqlen_q, kBlockM);
  return launch(attention_fwd<Element, Config>, tiles * p.nheads_q, Config::kThreads, Config::kShared_bytes,
                stream, p);
}

template <DType kDType, int kHeadDim, int kGrantKB>
cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream) {
  static_assert(FwdConfig<kHeadDim, kGrantKB>::kShared_bytes <= kGrantKB * 1024, "the tiles fit the grant");
  return launch_fwd_tiles<Element<kDType>, FwdConfig<kHeadDim, kGrantKB>>(p, stream);
}

template <DType kDType, int kHeadDim, int kGrantKB>
const void* fwd_function() {
  return reinterpret_cast<const void*>(attention_fwd<Element<kDType>, FwdConfig<kHeadDim, kGrantKB>>);
}

#define FA2_INSTANTIATE_FWD(kDType, kHeadDim, kGrantKB)                                        \
  template cudaError_t launch_fwd<kDType, kHeadDim, kGrantKB>(const FwdParams&, cudaStream_t); \
  template const void* fwd_function<kDType, kHeadDim, kGrantKB>();

}  // namespace fa2::sm80
