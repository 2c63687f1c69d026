// Attention forward with mma.sync and cp.async: one thread block owns kBlockM queries of one head.
//
//   load Q, K[last], V[last]
//   for n_block = last .. first:            right to left, so that the masked blocks come first
//     wait for K, V[n_block]; start loading K, V[n_block - 1]
//     S = Q K^T;  hide what the mask hides, in the blocks that it crosses
//     P = exp2(S * scale_log2 - max);  O = O * (correction) + P V
//   out = O / sum, lse = max + log(sum)
//
// Shapes: Q, O kBlockM x kHeadDim; K, V kBlockN x kHeadDim; S, P kBlockM x kBlockN. A warp owns 16 *
// kRowTiles rows of all of them, so S never leaves its registers. Read first: config.h, tile/softmax.cuh.
#pragma once
#include "../tile/copy.cuh"
#include "../tile/fragment.cuh"
#include "../tile/mask.cuh"
#include "../tile/scheduler.cuh"
#include "../tile/seqlen.cuh"
#include "../tile/softmax.cuh"
#include "config.h"

namespace fa2::sm80 {

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    attention_fwd(__grid_constant__ const FwdParams p) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  constexpr int kRowTiles = Config::kRowTiles, kStages = Config::kStages, kKV_bytes = Config::kKV_bytes;

  WorkTile tile;
  if (!find_tile(tile, p, p.nheads_q, (p.seqlen_q + kBlockM - 1) / kBlockM, true)) return;
  const Sequence sequence(p, tile.bidb, true);
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right);
  const BlockRange blocks = mask.key_blocks<kBlockM, kBlockN>(tile.block);

  const int bidh_kv = tile.bidh / (p.nheads_q / p.nheads_kv);
  const int m_first = tile.block * kBlockM;
  const int rows = min(kBlockM, sequence.seqlen_q - m_first);
  const int chunks = p.headdim / 8;
  const auto* gQ = static_cast<const Element*>(p.q) + sequence.query_offset(p.q_strides, tile.bidh) +
                   m_first * p.q_strides.row;
  const auto* gK = static_cast<const Element*>(p.k) + sequence.key_offset(p.k_strides, bidh_kv);
  const auto* gV = static_cast<const Element*>(p.v) + sequence.key_offset(p.v_strides, bidh_kv);

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  const uint32_t sQ = shared + Config::kQ, sK = shared + Config::kK, sV = shared + Config::kV;
  TileCopy<kBlockM, kHeadDim, Config::kThreads> const copy_q;
  TileCopy<kBlockN, kHeadDim, Config::kThreads> const copy_kv;

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kRowTiles * 16;
  Operand<Role::kA, kHeadDim, false> const operand_q(sQ, warp_row, 0);
  Operand<Role::kB, kHeadDim, false> const operand_k(sK, 0, 0);
  Operand<Role::kB, kHeadDim, true> const operand_v(sV, 0, 0);

  float acc_o[kRowTiles][kHeadDim / 8][4];
  clear(acc_o);
  OnlineSoftmax<kRowTiles> softmax(p.softmax_scale * 1.4426950408889634f);

  const auto load_k = [&](int n_block, int stage) {
    const auto* tile_k = gK + static_cast<int64_t>(n_block) * kBlockN * p.k_strides.row;
    copy_kv.load(sK + stage * kKV_bytes, copy_kv.source(tile_k, p.k_strides.row), p.k_strides.row,
                 sequence.seqlen_k - n_block * kBlockN, chunks);
  };
  const auto load_v = [&](int n_block, int stage) {
    const auto* tile_v = gV + static_cast<int64_t>(n_block) * kBlockN * p.v_strides.row;
    copy_kv.load(sV + stage * kKV_bytes, copy_kv.source(tile_v, p.v_strides.row), p.v_strides.row,
                 sequence.seqlen_k - n_block * kBlockN, chunks);
  };

  if (blocks.last > blocks.first) {
    copy_q.load(sQ, copy_q.source(gQ, p.q_strides.row), p.q_strides.row, rows, chunks);
    load_k(blocks.last - 1, 0);
    if constexpr (kStages > 1) load_v(blocks.last - 1, 0);
    ptx::cp_async_commit();
  }

  // This warp's share of the keys: the blocks in which none of its rows sees one are only passed through.
  const int warp_first = m_first + warp_row,
            warp_last = min(warp_first + kRowTiles * 16, sequence.seqlen_q) - 1;
  const int warp_key_begin = warp_last < warp_first ? Mask::kUnbounded : mask.key_begin(warp_first);
  const int warp_key_end = mask.key_end(warp_last);

  int stage = 0;
  for (int n_block = blocks.last - 1; n_block >= blocks.first; --n_block) {
    const bool active = n_block * kBlockN < warp_key_end && (n_block + 1) * kBlockN > warp_key_begin;
    const uint32_t stage_offset = stage * kKV_bytes;

    // K[n_block] (and with two stages V[n_block]) has arrived for every thread; with two stages every warp
    // has also finished with the other stage, which the next block's copies overwrite.
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages > 1) {
      if (n_block > blocks.first) {
        load_k(n_block - 1, stage ^ 1);
        load_v(n_block - 1, stage ^ 1);
        ptx::cp_async_commit();
      }
    } else {
      load_v(n_block, 0);  // the barrier above: every warp has finished with V[n_block + 1]
      ptx::cp_async_commit();
    }

    float acc_s[kRowTiles][kBlockN / 8][4];
    uint32_t p_frag[kRowTiles][kBlockN / 16][4];
    if (active) {
      clear(acc_s);
      gemm<Element, kHeadDim / 16, 1>(acc_s, operand_q, 0, operand_k, stage_offset);
    }
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // V[n_block] has arrived; every warp has finished with K[n_block]
      if (n_block > blocks.first) {
        load_k(n_block - 1, 0);
        ptx::cp_async_commit();
      }
    }
    if (active) {
      if (!blocks.is_full(n_block))
        mask.apply<1>(acc_s, warp_first + lane / 4, n_block * kBlockN + lane % 4 * 2, -INFINITY);
      if (softmax.update(acc_s)) softmax.rescale(acc_o);
      to_operand<Element>(p_frag, acc_s);
      gemm<Element>(acc_o, p_frag, operand_v, stage_offset);
    }
    stage ^= kStages - 1;
  }

  softmax.finalize(acc_o);
  if (lane % 4 == 0) {
    float* gLse = p.softmax_lse + sequence.row_offset(p, tile.bidh) + m_first;
#pragma unroll
    for (int r = 0; r < kRowTiles * 2; ++r) {
      const int row = warp_row + r * 8 + lane / 4;
      if (row < rows) gLse[row] = softmax.lse(r);
    }
  }
  // Each warp turns its own rows of sQ into out's; then all threads write whole rows.
  store_shared<Element, kHeadDim, 1>(sQ, warp_row, 0, acc_o);
  __syncthreads();
  auto* gO = static_cast<Element*>(p.out) + sequence.query_offset(p.out_strides, tile.bidh) +
             m_first * p.out_strides.row;
  copy_q.store(sQ, gO, p.out_strides.row, rows, chunks);
}

}  // namespace fa2::sm80
