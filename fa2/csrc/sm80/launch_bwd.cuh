// Host side of the backward: preprocessing, (varlen) the list of tiles, the kernel, dq's conversion. Included
// by inst/bwd_*.cu alone.
#pragma once

#include "../kernel_launch.cuh"
#include "../tile/schedule.cuh"
#include "attention.h"
#include "bwd.cuh"
#include "bwd_convert.cuh"
#include "bwd_preprocess.cuh"

namespace fa2::sm80 {

template <class Element, class Config>
cudaError_t launch_bwd_tiles(const BwdParams& p, cudaStream_t stream) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  static_assert(kBlockM >= kSmallestBlock && kBlockN >= kSmallestBlock,
                "scratch is counted with kSmallestBlock");
  static std::atomic<uint64_t> devices;
  cudaError_t error = allow_shared_memory(attention_bwd<Element, Config>, Config::kShared_bytes, devices);
  if (error != cudaSuccess) return error;

  const bool varlen = p.cu_seqlens_q != nullptr;
  const int rows = varlen ? p.total_q : p.seqlen_q;
  const int64_t heads = static_cast<int64_t>(varlen ? 1 : p.batch) * p.nheads_q;
  const int64_t turns =
      varlen ? tile_capacity(p.total_q, p.batch, kBlockM) : p.batch * ceil_div(rows, kBlockM);
  error = launch(bwd_preprocess<Element, Config>, heads * ceil_div(rows, kPreprocessRows), kPreprocessThreads,
                 0, stream, p, rows, p.dq_semaphore == nullptr ? 0 : turns * p.nheads_q);
  if (error == cudaSuccess && varlen)
    error = launch(schedule_tiles<kBlockN, false, 80, Config::kWalk>, 1, kScheduleThreads, 0, stream,
                   p.cu_seqlens_k, p.cu_seqlens_q, p.total_k, p.batch, p.tiles);
  if (error != cudaSuccess) return error;
  const int64_t tiles =
      varlen ? tile_capacity(p.total_k, p.batch, kBlockN)
             : p.batch * (walks<Config>(p.seqlen_q, p.seqlen_k) ? 1 : ceil_div(p.seqlen_k, kBlockN));
  error = launch(attention_bwd<Element, Config>, tiles * p.nheads_kv, Config::kThreads, Config::kShared_bytes,
                 stream, p);
  if (error != cudaSuccess) return error;
  const int64_t groups = static_cast<int64_t>(rows) * (kHeadDim / 16);
  const int64_t chunks = ceil_div(groups, kConvertGroups) * (varlen ? 1 : p.batch);
  const bool many = chunks * p.nheads_q >= kConvertManyBlocks;
  const int head_slots = many ? static_cast<int>(ceil_div(p.nheads_q, kConvertHeads)) : p.nheads_q;
  return launch(bwd_convert_dq<Element, Config>, chunks * head_slots, kConvertThreads, 0, stream, p, rows,
                head_slots);
}

template <DType kDType, int kHeadDim, int kGrantKB>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream) {
  static_assert(BwdConfig<kHeadDim, kGrantKB>::kShared_bytes <= kGrantKB * 1024, "the tiles fit the grant");
  using Short = BwdShortConfig<kHeadDim, kGrantKB>;
  if constexpr (Short::kBelow > 0) {
    const int64_t keys = p.cu_seqlens_k != nullptr ? p.total_k : int64_t{p.seqlen_k} * p.batch;
    const bool is_short = keys < int64_t{Short::kBelow} * p.batch;
    if (is_short && int64_t{p.batch} * p.nheads_kv >= Short::kManyBlocks && p.dq_semaphore == nullptr)
      return launch_bwd_tiles<Element<kDType>, Short>(p, stream);
  }
  return launch_bwd_tiles<Element<kDType>, BwdConfig<kHeadDim, kGrantKB>>(p, stream);
}

template <DType kDType, int kHeadDim, int kGrantKB>
const void* bwd_function() {
  return reinterpret_cast<const void*>(attention_bwd<Element<kDType>, BwdConfig<kHeadDim, kGrantKB>>);
}

#define FA2_INSTANTIATE_BWD(kDType, kHeadDim, kGrantKB)                                        \
  template cudaError_t launch_bwd<kDType, kHeadDim, kGrantKB>(const BwdParams&, cudaStream_t); \
  template const void* bwd_function<kDType, kHeadDim, kGrantKB>();

}  // namespace fa2::sm80
