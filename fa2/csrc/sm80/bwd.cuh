// Attention backward with mma.sync and cp.async: one thread block owns kBlockN keys of one key/value head,
// and sums dK and dV on chip over all the query heads of its group.
//
//   load K, V
//   for each query head of the group, for each m_block that sees these keys:
//     wait for Q, dO, lse, delta[m_block]; start loading the next
//     S^T = K Q^T;  dP^T = V dO^T       a warp: the keys of its dK and dV, its share of the queries
//     P = exp2(S * scale_log2 - lse_log2);  dS = P * (dP - delta);  rounded, and to shared memory
//     dV += P^T dO;  dK += dS^T Q       its own queries from registers, then the others' from shared memory
//     dQ = dS K                         into dq, where no other key block sees these queries; else added to
//                                       an fp32 accumulator, in a fixed order when deterministic
//   dk = dK * scale, dv = dV
//
// S, P, dP, dS are transposed: an accumulator has the layout of an A operand, so a warp uses at once what it
// made. Shared memory is the limit (it gives 80 of its 128 bytes a clock here): operands that stay in
// registers are not read from it.
//
// Before it bwd_preprocess.cuh has made lse_log2, delta and a zeroed accumulator; after it bwd_convert.cuh
// makes the rest of dq.
// Shapes: Q, dO kBlockM x kHeadDim; K, V, dK, dV kBlockN x kHeadDim; S^T, P^T, dP^T, dS^T kBlockN x kBlockM.
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

// One key block: all of the above. `walk`: this thread block takes the sequence's key blocks one after the
// other, in ascending order.
template <class Element, class Config>
__device__ __forceinline__ void backward_of_keys(const BwdParams& p, const Sequence& sequence,
                                                 const Mask& mask, const WorkTile& tile, int n_block,
                                                 bool walk) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  constexpr int kStages = Config::kStages, kThreads = Config::kThreads;

  const BlockRange blocks = mask.query_blocks<kBlockM, kBlockN>(n_block);
  const int group = p.nheads_q / p.nheads_kv;
  const int n_first = n_block * kBlockN;
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

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  // Corners of this warp's share of dK and dV, whose rows of S and dP are its own too, and of dQ. Rows and
  // columns are interleaved over the warps, so that a short block shortens every warp's work (and 96 keys
  // divide).
  constexpr int kSharers = Config::kWarpColumnsDkv;
  const int dkv_row = warp / kSharers * 16, own_16s = warp % kSharers;
  const int dq_row = warp / Config::kWarpColumnsDq * 16;
  const int dq_column = warp % Config::kWarpColumnsDq * 16;

  const Operand<Role::kA, kHeadDim, false> s_k(sK, dkv_row, 0);
  const Operand<Role::kB, kHeadDim, false> s_q(sQ, own_16s * 16, 0);
  const Operand<Role::kA, kBlockM, false> dkv_p(sP, dkv_row, own_16s * 16);
  const Operand<Role::kB, kHeadDim, true> dkv_q(sQ, 0, own_16s * 16);
  const Operand<Role::kA, kBlockM, true> dq_ds(sDs, 0, dq_row);
  const Operand<Role::kB, kHeadDim, true> dq_k(sK, 0, dq_column);
  const auto s_v = s_k.shifted(Config::kV - Config::kK);
  const auto s_do = s_q.shifted(Config::kDo - Config::kQ);
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

    // The step on the block's first kBlockM / kQueryParts queries and kBlockN / kKeyParts keys: the rest of
    // it is past the sequence's end, or hidden.
    const auto work = [&](auto query_parts, auto key_parts) {
      constexpr int kQueryParts = decltype(query_parts)::value, kKeyParts = decltype(key_parts)::value;
      constexpr int kRowsDkv = Config::kRowTilesDkv / kKeyParts, kRowsDq = Config::kRowTilesDq / kQueryParts;
      constexpr int kOwn16s = Config::kOwn16s / kQueryParts;
      constexpr int kPass16s = kOwn16s < Config::kPass16s ? kOwn16s : Config::kPass16s;
      // In Q and dO, from one 16 queries of a warp's own to the next.
      constexpr int kStride16_bytes = kSharers * 16 * kHeadDim * 2;
#pragma unroll
      for (int first = 0; first < kOwn16s; first += kPass16s) {
        float acc_s[kRowsDkv][kPass16s * 2][4];
        float acc_dp[kRowsDkv][kPass16s * 2][4];
        clear(acc_s);
        clear(acc_dp);
        const uint32_t pass_offset = q_offset + first * kStride16_bytes;
        gemm<Element, kHeadDim / 16, kSharers, 0, Config::kWarpRowsDkv>(acc_s, s_k, 0, s_q, pass_offset);
        gemm<Element, kHeadDim / 16, kSharers, 0, Config::kWarpRowsDkv>(acc_dp, s_v, 0, s_do, pass_offset);
        const int query =
            (first * kSharers + own_16s) * 16 + lane % 4 * 2;  // this lane's first, in the block
        if (!blocks.is_full(m_block)) {
          const int row = n_first + dkv_row + lane / 4, column = m_block * kBlockM + query;
          mask.apply_transposed<kSharers, Config::kWarpRowsDkv>(acc_s, row, column, -INFINITY);
          // A hidden NaN must not meet P = 0.
          mask.apply_transposed<kSharers, Config::kWarpRowsDkv>(acc_dp, row, column, 0.f);
        }
#pragma unroll
        for (int j = 0; j < kPass16s * 2; ++j) {
          const uint32_t place = (query + (j / 2) * kSharers * 16 + (j % 2) * 8) * 4 + row_offset;
          const float2 lse_log2 = ptx::load_shared_float2(sLse + place);
          const float2 delta = ptx::load_shared_float2(sDelta + place);
#pragma unroll
          for (int i = 0; i < kRowsDkv; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& s = acc_s[i][j][e];
              float& dp = acc_dp[i][j][e];
              s = ptx::exp2_approx(fmaf(s, scale_log2, -(e % 2 ? lse_log2.y : lse_log2.x)));
              dp = s * (dp - (e % 2 ? delta.y : delta.x));
            }
        }
        uint32_t p_frag[kRowsDkv][kPass16s][4], ds_frag[kRowsDkv][kPass16s][4];
        to_operand<Element>(p_frag, acc_s);
        to_operand<Element>(ds_frag, acc_dp);
        const int column = (first * kSharers + own_16s) * 16;
        if constexpr (kSharers > 1)
          store_shared<kBlockM, kSharers, Config::kWarpRowsDkv>(sP, dkv_row, column, p_frag);
        store_shared<kBlockM, kSharers, Config::kWarpRowsDkv>(sDs, dkv_row, column, ds_frag);
        const uint32_t own_offset = pass_offset + own_16s * 16 * kHeadDim * 2;
        gemm<Element, kSharers, kSharers>(acc_dv, p_frag, dkv_do, own_offset);
        gemm<Element, kSharers, kSharers>(acc_dk, ds_frag, dkv_q, own_offset);
      }
      __syncthreads();  // all of P and dS is written, for dK, dV and dQ

      // The key blocks that add to this query block's dq. The last one that a walk comes to writes dq, and so
      // does one that is alone.
      const BlockRange keys = mask.key_blocks<kBlockM, kBlockN>(m_block);
      const bool direct = walk ? n_block == keys.last - 1 : keys.last - keys.first == 1;
      const int row = m_block * kBlockM + dq_row + lane / 4;
      const int rows = sequence.seqlen_q - row;  // of the sequence, from this lane's first one on
      float acc_dq[kRowsDq][Config::kColumnTilesDq][4];
      const auto column_of = [&](auto part) {
        return dq_column + decltype(part)::value * Config::kColumnTilesDq / 2 * Config::kWarpColumnsDq * 16;
      };
      // A lane's four values of a row and 16 columns lie side by side: see bwd_convert.cuh for the order.
      const auto accum = [&](auto part) {
        return p.dq_accum + (sequence.row_offset(p, head) + row) * kHeadDim + column_of(part) + lane % 4 * 4;
      };
      const auto each = [&](auto use) {
#pragma unroll
        for (int r = 0; r < kRowsDq * 2; ++r)
#pragma unroll
          for (int j = 0; j < Config::kColumnTilesDq / 2; ++j)
            use(r / 2 * Config::kWarpRowsDq * 16 + r % 2 * 8, j * Config::kWarpColumnsDq * 16,
                acc_dq[r / 2][2 * j][r % 2 * 2], acc_dq[r / 2][2 * j][r % 2 * 2 + 1],
                acc_dq[r / 2][2 * j + 1][r % 2 * 2], acc_dq[r / 2][2 * j + 1][r % 2 * 2 + 1]);
      };
      const auto start_dq = [&](auto part) {
        clear(acc_dq);
        if (walk && n_block > keys.first) {  // what this same thread wrote a key block earlier
          const float* gAccum = accum(part);
          each([&](int r, int c, float& x0, float& x1, float& x2, float& x3) {
            if (r >= rows) return;
            const float4 x = *reinterpret_cast<const float4*>(gAccum + r * kHeadDim + c);
            x0 = x.x, x1 = x.y, x2 = x.z, x3 = x.w;
          });
        }
      };
      constexpr std::integral_constant<int, 0> kPart0{};
      if constexpr (Config::kWalk > 0) start_dq(kPart0);  // in flight while dK and dV are made
#pragma unroll
      for (int other = 1; other < kSharers; ++other) {
        const uint32_t offset = q_offset + (own_16s ^ other) * 16 * kHeadDim * 2;
        gemm<Element, kOwn16s, kSharers, 0, Config::kWarpRowsDkv, kRowsDkv, kSharers>(
            acc_dv, dkv_p.exchanged(other), 0, dkv_do, offset);
        gemm<Element, kOwn16s, kSharers, 0, Config::kWarpRowsDkv, kRowsDkv, kSharers>(
            acc_dk, dkv_ds.exchanged(other), 0, dkv_q, offset);
      }
      if constexpr (kStages == 1) {
        __syncthreads();  // every warp has finished with Q and dO
        if (steps > 1) load_next(0);
      }

      int* turn = nullptr;
      if (p.dq_semaphore != nullptr && !direct) {
        // Key blocks add to a query block in ascending order; each waits only for blocks handed out before
        // it.
        const int before = n_block - keys.first;
        turn = p.dq_semaphore + (sequence.query_tile(p, tile.bidb, kBlockM) + m_block) * p.nheads_q + head;
        if (threadIdx.x == 0)
          while (ptx::load_acquire(turn) != before) __nanosleep(64);
        __syncthreads();
      }
      const auto finish_dq = [&](auto part) {
        constexpr int kFirst = decltype(part)::value * Config::kColumnTilesDq / 2;
        gemm<Element, kBlockN / kKeyParts / 16, Config::kWarpColumnsDq, kFirst, Config::kWarpRowsDq>(
            acc_dq, dq_ds, 0, dq_k, 0);
        if (direct) {
          auto* gDq = static_cast<Element*>(p.dq) + sequence.query_offset(p.dq_strides, head) +
                      row * p.dq_strides.row + column_of(part);
          each([&](int r, int c, float x0, float x1, float x2, float x3) {
            int place;
            const uint2 values = gather_columns<Element>(place, x0 * p.softmax_scale, x1 * p.softmax_scale,
                                                         x2 * p.softmax_scale, x3 * p.softmax_scale);
            if (r < rows && column_of(part) + c + place < p.headdim)
              *reinterpret_cast<uint2*>(gDq + r * p.dq_strides.row + c + place) = values;
          });
          return;
        }
        float* gAccum = accum(part);
        if (walk) {
          each([&](int r, int c, float x0, float x1, float x2, float x3) {
            if (r < rows) *reinterpret_cast<float4*>(gAccum + r * kHeadDim + c) = make_float4(x0, x1, x2, x3);
          });
          return;
        }
        const auto add = [&](int r, int c, float x0, float x1, float x2, float x3) {
          ptx::red_add_4(gAccum + r * kHeadDim + c, x0, x1, x2, x3);
        };
        if ((m_block + 1) * kBlockM <= sequence.seqlen_q) {
          each(add);
        } else {  // the rows past the end are a neighbour's
          each([&](int r, int c, float x0, float x1, float x2, float x3) {
            if (r < rows) add(r, c, x0, x1, x2, x3);
          });
        }
      };
      if constexpr (Config::kWalk == 0) start_dq(kPart0);
      finish_dq(kPart0);
      if constexpr (Config::kDqParts > 1) {
        constexpr std::integral_constant<int, 1> kPart1{};
        start_dq(kPart1);
        finish_dq(kPart1);
      }
      if (turn != nullptr) {
        __threadfence();  // this thread's additions come before the turn moves on
        __syncthreads();
        if (threadIdx.x == 0) ptx::red_release_add(turn, 1);
      }
    };
    constexpr std::integral_constant<int, 1> kWhole{};
    if constexpr (Config::kHalves) {
      constexpr std::integral_constant<int, 2> kHalf{};
      const int last_query = min((m_block + 1) * kBlockM, sequence.seqlen_q) - 1;
      const bool half_queries = last_query < m_block * kBlockM + kBlockM / 2;
      const bool half_keys = mask.key_end(last_query) <= n_first + kBlockN / 2;
      if (!half_queries && !half_keys)
        work(kWhole, kWhole);
      else if (!half_queries)
        work(kWhole, kHalf);
      else if (!half_keys)
        work(kHalf, kWhole);
      else
        work(kHalf, kHalf);
    } else {
      work(kWhole, kWhole);
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
  store_shared<Element, kHeadDim, Config::kWarpColumnsDkv, Config::kWarpRowsDkv>(sK, dkv_row, own_16s * 16,
                                                                                 acc_dk);
  store_shared<Element, kHeadDim, Config::kWarpColumnsDkv, Config::kWarpRowsDkv>(sV, dkv_row, own_16s * 16,
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

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    attention_bwd(__grid_constant__ const BwdParams p) {
  constexpr int kBlockN = Config::kBlockN;
  WorkTile tile;
  const int n_blocks = walks<Config>(p.seqlen_q, p.seqlen_k) ? 1 : (p.seqlen_k + kBlockN - 1) / kBlockN;
  if (!find_tile(tile, p, p.nheads_kv, n_blocks, false)) return;
  const Sequence sequence(p, tile.bidb, false);
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right);
  const bool walk = walks<Config>(sequence.seqlen_q, sequence.seqlen_k);
  const int n_last = walk ? (sequence.seqlen_k + kBlockN - 1) / kBlockN : tile.block + 1;
  for (int n_block = tile.block;;) {
    backward_of_keys<Element, Config>(p, sequence, mask, tile, n_block, walk);
    if (Config::kWalk == 0 || ++n_block >= n_last) break;
    __syncthreads();  // every thread has read its part of dK and dV: the next K and V may overwrite them
  }
}

}  // namespace fa2::sm80
