// Attention backward with mma.sync and cp.async: one thread block owns kBlockN keys of one key/value head,
// and sums dK and dV on chip over all the query heads of its group.
//
//   load K, V
//   for each query head of the group, for each m_block that sees these keys:
//     wait for Q, dO, lse, delta[m_block]; start loading the next
//     S = Q K^T;  dP = dO V^T
//     P = exp2(S * scale_log2 - lse_log2);  dS = P * (dP - delta);  both to shared memory, rounded
//     dV += P^T dO;  dK += dS^T Q
//     dQ accumulator += dS K                fp32, global memory; in a fixed order when deterministic
//   dk = dK * scale, dv = dV
//
// Before it bwd_preprocess.cuh has made lse_log2, delta and a zeroed accumulator; after it bwd_convert.cuh
// makes dq.
// Shapes: Q, dO kBlockM x kHeadDim; K, V, dK, dV kBlockN x kHeadDim; S, P, dP, dS kBlockM x kBlockN.
// Read first: config.h.
#pragma once
#include <type_traits>

#include "../ptx/global.cuh"
#include "../ptx/math.cuh"
#include "../tile/copy.cuh"
#include "../tile/fragment.cuh"
#include "../tile/mask.cuh"
#include "../tile/scheduler.cuh"
#include "../tile/seqlen.cuh"
#include "config.h"

namespace fa2::sm80 {

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    attention_bwd(__grid_constant__ const BwdParams p) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  constexpr int kStages = Config::kStages, kThreads = Config::kThreads;

  WorkTile tile;
  if (!find_tile(tile, p, p.nheads_kv, (p.seqlen_k + kBlockN - 1) / kBlockN, false)) return;
  const Sequence sequence(p, tile.bidb, false);
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right);
  const BlockRange blocks = mask.query_blocks<kBlockM, kBlockN>(tile.block);

  const int group = p.nheads_q / p.nheads_kv;
  const int n_first = tile.block * kBlockN;
  const int chunks = p.headdim / 8;
  const int first_query = mask.first_query();
  const int columns = sequence.seqlen_k - n_first;  // keys of this tile that exist, if fewer than kBlockN

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  const uint32_t sK = shared + Config::kK, sV = shared + Config::kV;
  const uint32_t sQ = shared + Config::kQ, sDo = shared + Config::kDo;
  const uint32_t sP = shared + Config::kP, sDs = shared + Config::kDs;
  const uint32_t sLse = shared + Config::kLse, sDelta = shared + Config::kDelta;
  TileCopy<kBlockM, kHeadDim, kThreads> const copy_q;
  TileCopy<kBlockN, kHeadDim, kThreads> const copy_kv;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Corners of this warp's share of S and dP, of dK and dV (rows interleaved over the warps, so that 96 keys
  // divide), and of dQ.
  const int s_row = warp / Config::kWarpColumnsS * Config::kRowTilesS * 16;
  const int s_column = warp % Config::kWarpColumnsS * 16;
  const int dkv_row = warp / Config::kWarpColumnsDkv * 16;
  const int dkv_column = warp % Config::kWarpColumnsDkv * 16;
  const int dq_row = warp / Config::kWarpColumnsDq * Config::kRowTilesDq * 16;
  const int dq_column = warp % Config::kWarpColumnsDq * 16;

  const Operand<Role::kA, kHeadDim, false> s_q(sQ, s_row, 0);
  const Operand<Role::kB, kHeadDim, false> s_k(sK, s_column, 0);
  const Operand<Role::kA, kBlockN, true> dkv_p(sP, 0, dkv_row);
  const Operand<Role::kB, kHeadDim, true> dkv_q(sQ, 0, dkv_column);
  const Operand<Role::kA, kBlockN, false> dq_ds(sDs, dq_row, 0);
  const Operand<Role::kB, kHeadDim, true> dq_k(sK, 0, dq_column);
  const auto s_do = s_q.shifted(Config::kDo - Config::kQ);
  const auto s_v = s_k.shifted(Config::kV - Config::kK);
  const auto dkv_ds = dkv_p.shifted(Config::kDs - Config::kP);
  const auto dkv_do = dkv_q.shifted(Config::kDo - Config::kQ);

  const float scale_log2 = p.softmax_scale * 1.4426950408889634f;

  float acc_dk[Config::kRowTilesDkv][Config::kColumnTilesDkv][4];
  float acc_dv[Config::kRowTilesDkv][Config::kColumnTilesDkv][4];
  clear(acc_dk);
  clear(acc_dv);

  // This thread's part of the next query block: pointers that walk down the sequence, and jump back at a new
  // head.
  const Element *source_q, *source_do;
  const float* source_row;
  static_assert(2 * kBlockM <= kThreads, "one thread for each lse and each delta");
  const bool has_row = threadIdx.x < 2 * kBlockM;
  const int row_of_thread = threadIdx.x % kBlockM;
  const uint32_t row_target = (threadIdx.x < kBlockM ? sLse : sDelta) + row_of_thread * 4;

  const auto point_at = [&](int head) {
    const int64_t first = static_cast<int64_t>(blocks.first) * kBlockM;
    const auto* gQ = static_cast<const Element*>(p.q) + sequence.query_offset(p.q_strides, head);
    const auto* gDo = static_cast<const Element*>(p.dout) + sequence.query_offset(p.dout_strides, head);
    source_q = copy_q.source(gQ + first * p.q_strides.row, p.q_strides.row);
    source_do = copy_q.source(gDo + first * p.dout_strides.row, p.dout_strides.row);
    source_row =
        (threadIdx.x < kBlockM ? p.lse_log2 : p.delta) + sequence.row_offset(p, head) + first + row_of_thread;
  };
  const auto load_queries = [&](int m_block, int stage) {
    const int rows = sequence.seqlen_q - m_block * kBlockM;
    const int first = first_query - m_block * kBlockM;
    copy_q.load(sQ + stage * Config::kQ_bytes, source_q, p.q_strides.row, rows, chunks, first);
    copy_q.load(sDo + stage * Config::kQ_bytes, source_do, p.dout_strides.row, rows, chunks, first);
    // Rows past the end: lse 0, delta 0, so P = 1, dS = 0, and dO = 0 keeps them out of dV. Rows that see no
    // key are not read either: a NaN there would come through, 0 * NaN.
    if (has_row)
      ptx::cp_async_4(row_target + stage * Config::kRow_bytes, source_row,
                      row_of_thread < rows && row_of_thread >= first);
    ptx::cp_async_commit();
    source_q += kBlockM * p.q_strides.row;
    source_do += kBlockM * p.dout_strides.row;
    source_row += kBlockM;
  };
  int head = tile.bidh * group, m_block = blocks.first;
  int steps = group * max(0, blocks.last - blocks.first);
  if (steps > 0) {
    const auto* gK = static_cast<const Element*>(p.k) + sequence.key_offset(p.k_strides, tile.bidh);
    const auto* gV = static_cast<const Element*>(p.v) + sequence.key_offset(p.v_strides, tile.bidh);
    copy_kv.load(sK, copy_kv.source(gK + n_first * p.k_strides.row, p.k_strides.row), p.k_strides.row,
                 columns, chunks);
    copy_kv.load(sV, copy_kv.source(gV + n_first * p.v_strides.row, p.v_strides.row), p.v_strides.row,
                 columns, chunks);
    point_at(head);
    load_queries(m_block, 0);
  }

  int stage = 0;
  for (; steps > 0; --steps) {
    const uint32_t q_offset = stage * Config::kQ_bytes, row_offset = stage * Config::kRow_bytes;
    const bool wraps = m_block + 1 == blocks.last;
    const int next_head = wraps ? head + 1 : head, next_m_block = wraps ? blocks.first : m_block + 1;
    const auto load_next = [&](int next_stage) {
      if (wraps) point_at(next_head);
      load_queries(next_m_block, next_stage);
    };

    // Q, dO, lse and delta have arrived for every thread. Every warp has finished the last step: its Q and dO
    // (the next copies overwrite them) and its P and dS.
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages > 1) {
      if (steps > 1) load_next(stage ^ 1);
    }

    {
      float acc_s[Config::kRowTilesS][Config::kColumnTilesS][4];
      float acc_dp[Config::kRowTilesS][Config::kColumnTilesS][4];
      clear(acc_s);
      clear(acc_dp);
      gemm<Element, kHeadDim / 16, Config::kWarpColumnsS>(acc_s, s_q, q_offset, s_k, 0);
      gemm<Element, kHeadDim / 16, Config::kWarpColumnsS>(acc_dp, s_do, q_offset, s_v, 0);
      if (!blocks.is_full(m_block)) {
        const int row = m_block * kBlockM + s_row + lane / 4, column = n_first + s_column + lane % 4 * 2;
        mask.apply<Config::kWarpColumnsS>(acc_s, row, column, -INFINITY);
        mask.apply<Config::kWarpColumnsS>(acc_dp, row, column, 0.f);  // a hidden NaN must not meet P = 0
      }
#pragma unroll
      for (int r = 0; r < Config::kRowTilesS * 2; ++r) {
        const uint32_t row = (s_row + r * 8 + lane / 4) * 4 + row_offset;
        const float lse_log2 = ptx::load_shared_float(sLse + row);
        const float delta = ptx::load_shared_float(sDelta + row);
#pragma unroll
        for (int j = 0; j < Config::kColumnTilesS; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = acc_s[r / 2][j][r % 2 * 2 + e];
            float& dp = acc_dp[r / 2][j][r % 2 * 2 + e];
            s = ptx::exp2_approx(fmaf(s, scale_log2, -lse_log2));
            dp = s * (dp - delta);
          }
      }
      store_shared<Element, kBlockN, Config::kWarpColumnsS>(sP, s_row, s_column, acc_s);
      store_shared<Element, kBlockN, Config::kWarpColumnsS>(sDs, s_row, s_column, acc_dp);
    }
    __syncthreads();  // all of P and dS is written

    gemm<Element, kBlockM / 16, Config::kWarpColumnsDkv, 0, Config::kWarpRowsDkv>(acc_dv, dkv_p, 0, dkv_do,
                                                                                  q_offset);
    gemm<Element, kBlockM / 16, Config::kWarpColumnsDkv, 0, Config::kWarpRowsDkv>(acc_dk, dkv_ds, 0, dkv_q,
                                                                                  q_offset);
    if constexpr (kStages == 1) {
      __syncthreads();  // every warp has finished with Q and dO
      if (steps > 1) load_next(0);
    }

    int* turn = nullptr;
    if (p.dq_semaphore != nullptr) {
      // Key blocks add to a query block in ascending order; each waits only for blocks handed out before it.
      const int before = tile.block - mask.key_blocks<kBlockM, kBlockN>(m_block).first;
      turn = p.dq_semaphore + (sequence.query_tile(p, tile.bidb, kBlockM) + m_block) * p.nheads_q + head;
      if (threadIdx.x == 0)
        while (ptx::load_acquire(turn) != before) __nanosleep(64);
      __syncthreads();
    }
    const int row = m_block * kBlockM + dq_row + lane / 4;
    const auto make_dq = [&](auto part) {
      constexpr int kFirst = decltype(part)::value * Config::kColumnTilesDq / 2;
      float acc_dq[Config::kRowTilesDq][Config::kColumnTilesDq][4];
      clear(acc_dq);
      gemm<Element, kBlockN / 16, Config::kWarpColumnsDq, kFirst>(acc_dq, dq_ds, 0, dq_k, 0);
      // A lane's four values of a row and 16 columns lie side by side: see bwd_convert.cuh for the order.
      const int column = dq_column + kFirst * Config::kWarpColumnsDq * 16;
      float* gAccum = p.dq_accum + (sequence.row_offset(p, head) + row) * kHeadDim + column + lane % 4 * 4;
      const auto add = [&](int r) {
#pragma unroll
        for (int j = 0; j < Config::kColumnTilesDq / 2; ++j)
          ptx::red_add_4(gAccum + r * 8 * kHeadDim + j * Config::kWarpColumnsDq * 16,
                         acc_dq[r / 2][2 * j][r % 2 * 2], acc_dq[r / 2][2 * j][r % 2 * 2 + 1],
                         acc_dq[r / 2][2 * j + 1][r % 2 * 2], acc_dq[r / 2][2 * j + 1][r % 2 * 2 + 1]);
      };
      if ((m_block + 1) * kBlockM <= sequence.seqlen_q) {
#pragma unroll
        for (int r = 0; r < Config::kRowTilesDq * 2; ++r) add(r);
      } else {  // the rows past the end are a neighbour's
#pragma unroll
        for (int r = 0; r < Config::kRowTilesDq * 2; ++r)
          if (row + r * 8 < sequence.seqlen_q) add(r);
      }
    };
    make_dq(std::integral_constant<int, 0>{});
    if constexpr (Config::kDqParts > 1) make_dq(std::integral_constant<int, 1>{});
    if (turn != nullptr) {
      __threadfence();  // this thread's additions come before the turn moves on
      __syncthreads();
      if (threadIdx.x == 0) ptx::red_release_add(turn, 1);
    }
    head = next_head;
    m_block = next_m_block;
    stage ^= kStages - 1;
  }

#pragma unroll
  for (int i = 0; i < Config::kRowTilesDkv; ++i)
#pragma unroll
    for (int j = 0; j < Config::kColumnTilesDkv; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_dk[i][j][e] *= p.softmax_scale;
  __syncthreads();  // every warp has finished with K and V
  store_shared<Element, kHeadDim, Config::kWarpColumnsDkv, Config::kWarpRowsDkv>(sK, dkv_row, dkv_column,
                                                                                 acc_dk);
  store_shared<Element, kHeadDim, Config::kWarpColumnsDkv, Config::kWarpRowsDkv>(sV, dkv_row, dkv_column,
                                                                                 acc_dv);
  __syncthreads();  // dK and dV are complete in shared memory
  copy_kv.store(
      sK,
      static_cast<Element*>(p.dk) + sequence.key_offset(p.dk_strides, tile.bidh) + n_first * p.dk_strides.row,
      p.dk_strides.row, columns, chunks);
  copy_kv.store(
      sV,
      static_cast<Element*>(p.dv) + sequence.key_offset(p.dv_strides, tile.bidh) + n_first * p.dv_strides.row,
      p.dv_strides.row, columns, chunks);
}

}  // namespace fa2::sm80
