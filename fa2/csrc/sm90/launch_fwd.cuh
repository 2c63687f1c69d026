// Host side of the sm90 forward: (varlen) the list of tiles, tensor maps, the kernel. Included by
// inst/fwd_*.cu alone.
#pragma once

#include <algorithm>

#include "../tile/schedule.cuh"
#include "attention.h"
#include "fwd.cuh"
#include "launch.cuh"

namespace fa2::sm90 {

template <class Element, class Config>
cudaError_t launch_fwd_tiles(const FwdParams& p, cudaStream_t stream) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  static std::atomic<uint64_t> devices;
  cudaError_t error = allow_shared_memory(attention_fwd<Element, Config>, Config::kShared_bytes, devices);
  int sms = 0;
  if (error == cudaSuccess) error = multiprocessors(&sms);
  if (error != cudaSuccess) return error;

  FwdArguments a;
  a.p = p;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int batch = varlen ? -1 : p.batch;
  const int rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
  constexpr int kWidth = Config::Slab::kWidth;
  error = make_tensor_map(&a.q, p.q, p.q_strides, {p.headdim, rows_q, p.nheads_q, batch, kWidth, kBlockM});
  if (error == cudaSuccess)
    error = make_tensor_map(&a.out, p.out, p.out_strides, {p.headdim, rows_q, p.nheads_q, batch, kWidth, 64});
  // Without a single key only rows past the end are read, which are zeros: any address will do.
  const bool keys = rows_k > 0;
  const TensorMapShape shape_k = {p.headdim, keys ? rows_k : 1, p.nheads_kv, batch, kWidth, kBlockN};
  if (error == cudaSuccess)
    error = make_tensor_map(&a.k, keys ? p.k : p.q, keys ? p.k_strides : p.q_strides, shape_k);
  if (error == cudaSuccess)
    error = make_tensor_map(&a.v, keys ? p.v : p.q, keys ? p.v_strides : p.q_strides, shape_k);
  if (error != cudaSuccess) return error;

  const int64_t tiles =
      (varlen ? tile_capacity(p.total_q, p.batch, kBlockM) : p.batch * ceil_div(p.seqlen_q, kBlockM)) *
      p.nheads_q;
  const int places = sms * Config::kBlocks;
  if (tiles > 0x7fffffff - places) return cudaErrorInvalidConfiguration;  // they are counted in an int
  // Dense tiles need no queue when they are alike, under a full mask, or when each block has one.
  if (!varlen && (tiles <= places || (p.window_left < 0 && p.window_right < 0))) a.p.tiles = nullptr;
  if (varlen) {
    error = launch(schedule_tiles<kBlockM, true, 90>, 1, kScheduleThreads, 0, stream, p.cu_seqlens_q,
                   p.cu_seqlens_k, p.total_q, p.batch, p.tiles);
  } else if (a.p.tiles != nullptr) {
    error = launch(reset_handed_out, 1, 1, 0, stream, a.p.tiles);
  }
  if (error != cudaSuccess) return error;

  a.key_bytes = static_cast<float>(4 * kHeadDim) * p.nheads_kv / p.nheads_q;
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, places));
  if (a.p.tiles == nullptr)
    return launch(attention_fwd<Element, Config>, blocks, Config::kThreads, Config::kShared_bytes, stream, a);
  return launch_early(attention_fwd<Element, Config>, 1, blocks, Config::kThreads, Config::kShared_bytes,
                      stream, a);
}

template <DType kDType, int kHeadDim>
cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream) {
  return launch_fwd_tiles<Element<kDType>, FwdConfig<kHeadDim>>(p, stream);
}

template <DType kDType, int kHeadDim>
const void* fwd_function() {
  return reinterpret_cast<const void*>(attention_fwd<Element<kDType>, FwdConfig<kHeadDim>>);
}

#define FA2_INSTANTIATE_FWD(kDType, kHeadDim)                                        \
  template cudaError_t launch_fwd<kDType, kHeadDim>(const FwdParams&, cudaStream_t); \
  template const void* fwd_function<kDType, kHeadDim>();

}  // namespace fa2::sm90
