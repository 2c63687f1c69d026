// Host side of the sm90 backward: preprocessing, (varlen) the list of tiles, tensor maps, the kernel, and
// where that does not convert dq itself, its conversion. Included by inst/bwd_*.cu alone.
#pragma once

#include <algorithm>

#include "../sm80/bwd_convert.cuh"
#include "../sm80/bwd_preprocess.cuh"
#include "../tile/schedule.cuh"
#include "attention.h"
#include "bwd.cuh"
#include "bwd_pair.cuh"
#include "launch.cuh"

namespace fa2::sm90 {

template <class Element, class Config>
constexpr auto bwd_kernel() {
  if constexpr (Config::kCluster == 1) {
    return attention_bwd<Element, Config>;
  } else {
    return attention_bwd_pair<Element, Config>;
  }
}

// dK, dV and what is added to dQ, of all tiles of keys.
template <class Element, class Config>
cudaError_t launch_bwd_tiles(const BwdParams& p, cudaStream_t stream) {
  constexpr int kBlockN = Config::kBlockN, kCluster = Config::kCluster;
  constexpr auto kernel = bwd_kernel<Element, Config>();
  static std::atomic<uint64_t> devices;
  cudaError_t error = allow_shared_memory(kernel, Config::kShared_bytes, devices);
  int sms = 0;
  if (error == cudaSuccess) error = multiprocessors(&sms);
  if (error != cudaSuccess) return error;

  const bool varlen = p.cu_seqlens_q != nullptr;
  const int64_t tiles =
      (varlen ? tile_capacity(p.total_k, p.batch, kBlockN) : p.batch * ceil_div(p.seqlen_k, kBlockN)) *
      p.nheads_kv;
  const int rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
  if (tiles == 0 || rows_k == 0) return cudaSuccess;
  // They are counted in ints.
  if (std::max(tiles, p.conversions.capacity) > 0x7fffffff - 64 * sms) return cudaErrorInvalidConfiguration;

  BwdArguments a;
  a.p = p;
  const int batch = varlen ? -1 : p.batch;
  constexpr int kWidth = Config::Slab::kWidth;
  // Without a single query nothing is read of q and dout: any address will do.
  const bool queries = rows_q > 0;
  const TensorMapShape shape_q = {p.headdim, queries ? rows_q : 1, queries ? p.nheads_q : p.nheads_kv, batch,
                                  kWidth,    Config::kQueryBox};
  const TensorMapShape shape_k = {p.headdim, rows_k, p.nheads_kv, batch, kWidth, Config::kKeyBox};
  const TensorMapShape shape_dk = {p.headdim, rows_k, p.nheads_kv, batch, kWidth, 64};
  error = make_tensor_map(&a.q, queries ? p.q : p.k, queries ? p.q_strides : p.k_strides, shape_q);
  if (error == cudaSuccess)
    error = make_tensor_map(&a.dout, queries ? p.dout : p.k, queries ? p.dout_strides : p.k_strides, shape_q);
  if (error == cudaSuccess) error = make_tensor_map(&a.k, p.k, p.k_strides, shape_k);
  if (error == cudaSuccess) error = make_tensor_map(&a.v, p.v, p.v_strides, shape_k);
  if (error == cudaSuccess) error = make_tensor_map(&a.dk, p.dk, p.dk_strides, shape_dk);
  if (error == cudaSuccess) error = make_tensor_map(&a.dv, p.dv, p.dv_strides, shape_dk);
  if (error != cudaSuccess) return error;

  // A query's q and dout, and its dq twice as long, once for each head of the group.
  a.query_bytes = static_cast<float>(8 * Config::kHeadDim) * p.nheads_q / p.nheads_kv;
  const int64_t blocks = std::min<int64_t>(tiles, std::max(1, sms / kCluster)) * kCluster;
  return launch_early(kernel, kCluster, blocks, Config::kThreads, Config::kShared_bytes, stream, a);
}

template <class Element, class Config>
cudaError_t launch_bwd_all(const BwdParams& p, cudaStream_t stream) {
  constexpr int kBlockM = Config::kBlockM, kHeadDim = Config::kHeadDim;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int rows = varlen ? p.total_q : p.seqlen_q;
  const int64_t heads = static_cast<int64_t>(varlen ? 1 : p.batch) * p.nheads_q;
  const int64_t turns =
      varlen ? tile_capacity(p.total_q, p.batch, kBlockM) : p.batch * ceil_div(rows, kBlockM);
  // Dense: the preprocessing also sets the queue to its start. Varlen: the list of tiles is made beside it,
  // and who waits for the preprocessing waits for the list. (It may start early only behind a kernel of
  // ours.)
  const int64_t blocks = heads * ceil_div(rows, sm80::kPreprocessRows);
  const int64_t semaphores = p.dq_semaphore == nullptr ? 0 : turns * p.nheads_q;
  constexpr auto preprocess = sm80::bwd_preprocess<Element, Config>;
  cudaError_t error = cudaSuccess;
  if (varlen) {
    error = launch(schedule_tiles<Config::kBlockN, false, 90>, 1, kScheduleThreads, 0, stream, p.cu_seqlens_k,
                   p.cu_seqlens_q, p.total_k, p.batch, p.tiles);
    if (error == cudaSuccess)
      error = launch_early(preprocess, 1, blocks, sm80::kPreprocessThreads, 0, stream, p, rows, semaphores);
  } else if (rows > 0) {
    error = launch(preprocess, blocks, sm80::kPreprocessThreads, 0, stream, p, rows, semaphores);
  } else {
    error = launch(reset_handed_out, 1, 1, 0, stream, p.tiles);
  }
  if (error == cudaSuccess) error = launch_bwd_tiles<Element, Config>(p, stream);
  if constexpr (!Config::kConvertsDq) {
    if (error != cudaSuccess) return error;
    const int64_t groups = static_cast<int64_t>(rows) * (kHeadDim / 16);
    const int64_t chunks = ceil_div(groups, sm80::kConvertGroups) * (varlen ? 1 : p.batch);
    const bool many = chunks * p.nheads_q >= sm80::kConvertManyBlocks;
    const int head_slots = many ? static_cast<int>(ceil_div(p.nheads_q, sm80::kConvertHeads)) : p.nheads_q;
    error = launch_early(sm80::bwd_convert_dq<Element, Config>, 1, chunks * head_slots, sm80::kConvertThreads,
                         0, stream, p, rows, head_slots);
  }
  return error;
}

template <DType kDType, int kHeadDim>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream) {
  return launch_bwd_all<Element<kDType>, BwdConfig<kHeadDim>>(p, stream);
}

template <DType kDType, int kHeadDim>
const void* bwd_function() {
  return reinterpret_cast<const void*>(bwd_kernel<Element<kDType>, BwdConfig<kHeadDim>>());
}

#define FA2_INSTANTIATE_BWD(kDType, kHeadDim)                                        \
  template cudaError_t launch_bwd<kDType, kHeadDim>(const BwdParams&, cudaStream_t); \
  template const void* bwd_function<kDType, kHeadDim>();

}  // namespace fa2::sm90
