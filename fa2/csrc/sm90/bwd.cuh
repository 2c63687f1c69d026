// Attention backward on Hopper: persistent thread blocks, each a producer warpgroup and two consumers. A
// block owns kBlockN keys of one key/value head, and sums dK and dV on chip over all the query heads of its
// group.
//
// clang-format off
//   producer, a warp each, for each work tile:     consumer warpgroup, 64 keys:
//     hand the tile to everyone                      wait for K, Q[0];  start S^T = K Q^T
//     TMA Q[0], dO[0], K, V, then Q[i], dO[i]        for each query block that sees these keys, of each head:
//     lse and delta of each query block                start dP^T = V dO^T
//     dQ[i] from shared memory, added to an            wait for S;  P = exp2(S * scale_log2 - lse_log2)
//       fp32 accumulator in global memory, in          start dV += P^T dO
//       a fixed order when deterministic               wait for dP;  dS = P * (dP - delta), to shared memory
//                                                      start dK += dS^T Q
//                                                      when both consumers have written dS: start dQ = dS K
//                                                      start the next block's S^T
//                                                      wait for dQ; hand it to the producer, or write dq
//                                                        where no other key block sees these queries
//                                                    dk = dK * scale, dv = dV
// clang-format on
//
// S, P, dP and dS are transposed: an accumulator has the layout of an A operand in registers, so P and dS are
// used at once for dV and dK. Only dS goes through shared memory, because dQ sums over the keys of both
// consumers. Before this kernel sm80/bwd_preprocess.cuh has made lse_log2, delta and a zeroed accumulator;
// after it sm80/bwd_convert.cuh makes the rest of dq.
// Shapes: Q, dO, dQ kBlockM x kHeadDim; K, V kBlockN x kHeadDim; S^T, dS^T 64 x kBlockM a consumer.
// Read first: config.h, pipeline.cuh, fwd.cuh.
#pragma once
#include "../ptx/global.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/mask.cuh"
#include "../tile/scheduler.cuh"
#include "../tile/seqlen.cuh"
#include "../tile/softmax.cuh"
#include "bwd_parts.cuh"
#include "config.h"
#include "pipeline.cuh"

namespace fa2::sm90 {

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_bwd(__grid_constant__ const BwdArguments a) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  constexpr int kStages = Config::kStages, kConsumers = Config::kConsumers;
  using Slab = typename Config::Slab;
  using Barrier = typename Config::Barrier;
  const BwdParams& p = a.p;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int group = p.nheads_q / p.nheads_kv;

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  const auto barrier = [&](int index) { return shared + Config::kBarriers + index * 8; };
  BwdWork* const shared_work = reinterpret_cast<BwdWork*>(shared_memory + Config::kWork);
  static_assert(sizeof(BwdWork) <= Config::kWork_bytes);

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kTileFull + i), 1);
      ptx::mbarrier_init(barrier(Barrier::kTileEmpty + i), kConsumers * 4 + 3);
    }
    ptx::mbarrier_init(barrier(Barrier::kKFull), 1);
    ptx::mbarrier_init(barrier(Barrier::kVFull), 1);
    ptx::mbarrier_init(barrier(Barrier::kKVEmpty), kConsumers * 4);
    ptx::mbarrier_init(barrier(Barrier::kDqFull), kConsumers * 4);
    ptx::mbarrier_init(barrier(Barrier::kDqEmpty), 1);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kQFull + i), 1);
      ptx::mbarrier_init(barrier(Barrier::kDoFull + i), 2);
      ptx::mbarrier_init(barrier(Barrier::kQEmpty + i), kConsumers * 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  Slot<2> work_slot;
  Slot<kStages> slot;

  // The tile stays in shared memory, and is read there, until all have ended it.
  const auto next_work = [&]() -> const BwdWork& {
    ptx::mbarrier_wait(barrier(Barrier::kTileFull + work_slot.index), work_slot.parity);
    return shared_work[work_slot.index];
  };
  const auto end_work = [&] {
    ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty + work_slot.index));
    work_slot.next();
  };

  if (warpgroup == 0) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (warp == 0) {  // hands out the work
      if (!ptx::elect_one()) return;
      ptx::wait_for_previous_kernel();
      const int heads = heads_side_by_side(a);
      for (;;) {
        // Also the first one comes from the counter: a tile may wait for the dQ of those before it, so they
        // must have been taken by blocks that run.
        const BwdWork work = decode<kBlockM, kBlockN>(p, atomicAdd(p.tiles + 1, 1), heads);
        // Everyone has ended the tile before the last.
        ptx::mbarrier_wait(barrier(Barrier::kTileEmpty + work_slot.index), work_slot.parity ^ 1);
        shared_work[work_slot.index] = work;
        ptx::mbarrier_arrive(barrier(Barrier::kTileFull + work_slot.index));
        work_slot.next();
        if (work.tile.block < 0) return;
      }
    }

    if (warp == 1) {  // loads Q, dO, K, V
      if (!ptx::elect_one()) return;
      ptx::tma_prefetch_map(&a.q);
      ptx::tma_prefetch_map(&a.dout);
      ptx::tma_prefetch_map(&a.k);
      ptx::tma_prefetch_map(&a.v);
      uint32_t kv_parity = 0;
      const auto load = [&](const CUtensorMap* map, int buffer, int full, int bytes, int block_bytes,
                            const Rows& rows, int first, int head) {
        ptx::mbarrier_arrive_expect(barrier(full), bytes);
#pragma unroll
        for (int i = 0; i < Slab::kCount; ++i)
          ptx::tma_load(shared + buffer + i * block_bytes, map, barrier(full),
                        rows.at(i * Slab::kWidth, first, head));
      };
      for (;;) {
        const BwdWork& work = next_work();
        if (work.tile.block < 0) return;
        const Rows rows_q(varlen, work.bidb, work.first_q, work.seqlen_q, work.unseeing);
        QuerySteps steps(work, group);
        const auto load_queries = [&] {
          ptx::mbarrier_wait(barrier(Barrier::kQEmpty + slot.index), slot.parity ^ 1);
          load(&a.q, Config::kQ + slot.index * Config::kQ_bytes, Barrier::kQFull + slot.index,
               Config::kQ_bytes, kBlockM * Slab::kRow_bytes, rows_q, steps.m_block * kBlockM, steps.head);
          load(&a.dout, Config::kDo + slot.index * Config::kQ_bytes, Barrier::kDoFull + slot.index,
               Config::kQ_bytes, kBlockM * Slab::kRow_bytes, rows_q, steps.m_block * kBlockM, steps.head);
          slot.next();
          steps.next(work);
        };
        // A tile without queries takes no part in the turns of K and V: its consumers wait for no keys, and
        // could end it before this has waited for the tile before.
        if (steps.left > 0) {
          load_queries();  // before the last tile's keys are done with
          ptx::mbarrier_wait(barrier(Barrier::kKVEmpty), kv_parity ^ 1);
          kv_parity ^= 1;
          const Rows rows_k(varlen, work.bidb, work.first_k, work.seqlen_k);
          const int n_first = work.tile.block * kBlockN;
          load(&a.k, Config::kK, Barrier::kKFull, Config::kKV_bytes, kBlockN * Slab::kRow_bytes, rows_k,
               n_first, work.tile.bidh);
          load(&a.v, Config::kV, Barrier::kVFull, Config::kKV_bytes, kBlockN * Slab::kRow_bytes, rows_k,
               n_first, work.tile.bidh);
        }
#pragma unroll 1
        while (steps.left > 0) load_queries();
        end_work();
      }
    }

    if (warp == 2) {  // loads lse and delta
      for (;;) {
        const BwdWork& work = next_work();
        if (work.tile.block < 0) return;
#pragma unroll 1
        for (QuerySteps steps(work, group); steps.left > 0; steps.next(work)) {
          const RowValues<kBlockM> values(p, work, steps, lane);
          ptx::mbarrier_wait(barrier(Barrier::kQEmpty + slot.index), slot.parity ^ 1);
          const uint32_t place = shared + slot.index * Config::kRow_bytes;
          values.store(place + Config::kLse, place + Config::kDelta, lane);
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDoFull + slot.index));
          slot.next();
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty + work_slot.index));
        work_slot.next();
      }
    }

    // Warp 3 adds dQ to the accumulator.
    if (!ptx::elect_one()) return;
    uint32_t dq_parity = 0;
    for (;;) {
      const BwdWork& work = next_work();
      if (work.tile.block < 0) return;
#pragma unroll 1
      for (QuerySteps steps(work, group); steps.left > 0; steps.next(work)) {
        BlockRange keys;
        if (writes_dq<kBlockM, kBlockN>(work.mask(p), steps.m_block, &keys)) continue;
        const int first = steps.m_block * kBlockM;
        // Key blocks add to a query block in ascending order.
        int* turn = nullptr;
        if (p.dq_semaphore != nullptr)
          turn = p.dq_semaphore + (static_cast<int64_t>(work.first_turn) + steps.m_block) * p.nheads_q +
                 steps.head;
        ptx::mbarrier_wait(barrier(Barrier::kDqFull), dq_parity);  // both consumers have written it
        dq_parity ^= 1;
        if (turn != nullptr) {
          while (ptx::load_acquire(turn) != work.tile.block - keys.first) __nanosleep(64);
          ptx::fence_async_proxy_global();
        }
        // Rows past the end are a neighbour's.
        ptx::bulk_add(
            p.dq_accum +
                (work.bidb * p.lse_batch + steps.head * p.lse_head + work.first_q + first) * kHeadDim,
            shared + Config::kDq, min(kBlockM, work.seqlen_q - first) * kHeadDim * 4);
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(barrier(Barrier::kDqEmpty));
        if (turn != nullptr) {
          ptx::tma_store_wait();
          ptx::fence_async_proxy_global();
          __threadfence();  // the additions come before the turn moves on
          ptx::red_release_add(turn, 1);
        }
      }
      end_work();
    }
  }

  ptx::take_registers<Config::kConsumerRegisters>();
  const int consumer = warpgroup - 1;
  const int warp_row = warp * 16;  // of the consumer's 64
  const bool leader = warp == 0 && lane == 0;
  const auto sync_consumers = [&] { ptx::barrier_sync(1, kConsumers * 128); };
  const auto sync_warpgroup = [&] { ptx::barrier_sync(2 + consumer, 128); };

  // A operands: this consumer's keys of K and V, its dS. B operands: Q and dO, as they lie (for S and dP) and
  // transposed (for dK and dV), and K transposed.
  const int own_keys = consumer * 64 * Slab::kRow_bytes;
  const SharedMatrix<Slab::kRow_bytes> matrix_k(shared + Config::kK + own_keys, 0);
  const SharedMatrix<Slab::kRow_bytes> matrix_v(shared + Config::kV + own_keys, 0);
  const SharedMatrix<Slab::kRow_bytes> matrix_q(shared + Config::kQ, 0);
  const SharedMatrix<Slab::kRow_bytes> matrix_do(shared + Config::kDo, 0);
  const SharedMatrix<Slab::kRow_bytes> transposed_q(shared + Config::kQ, kBlockM * Slab::kRow_bytes);
  const SharedMatrix<Slab::kRow_bytes> transposed_do(shared + Config::kDo, kBlockM * Slab::kRow_bytes);
  // dS lies in slabs of 64 queries, each kBlockN keys of 128 bytes.
  constexpr int kDsSlab_bytes = kBlockN * 128;
  const int dq_row = Config::kDqByRows ? consumer * 64 : 0;
  const int dq_slab = Config::kDqByRows ? 0 : (kHeadDim - Config::kDqColumns) / Slab::kWidth * consumer;
  const SharedMatrix<128> transposed_ds(
      shared + Config::kDs + (Config::kDqByRows ? consumer * kDsSlab_bytes : 0), 0);
  const SharedMatrix<Slab::kRow_bytes> transposed_k(
      shared + Config::kK + dq_slab * kBlockN * Slab::kRow_bytes, kBlockN * Slab::kRow_bytes);

  float acc_s[1][kBlockM / 8][4], acc_dp[1][kBlockM / 8][4];
  float acc_dk[1][kHeadDim / 8][4], acc_dv[1][kHeadDim / 8][4];
  float acc_dq[1][Config::kDqColumns / 8][4];
  uint32_t p_frag[1][kBlockM / 16][4], ds_frag[1][kBlockM / 16][4];

  const float scale_log2 = p.softmax_scale * 1.4426950408889634f;
  uint32_t kv_parity = 0, dq_parity = 0;
  int ds_buffer = 0;

  for (;;) {
    const BwdWork& work = next_work();
    if (work.tile.block < 0) break;
    QuerySteps steps(work, group);
    clear(acc_dk);
    clear(acc_dv);
    // The last tile's dK and dV have left dQ's and dS's space.
    if (leader) ptx::tma_store_wait_read();
    sync_consumers();

    if (steps.left > 0) {
      const auto stage_of = [&](SharedMatrix<Slab::kRow_bytes> matrix) {
        return matrix + slot.index * Config::kQ_bytes;
      };
      ptx::mbarrier_wait(barrier(Barrier::kKFull), kv_parity);
      ptx::mbarrier_wait(barrier(Barrier::kQFull + slot.index), slot.parity);
      start_scores<Element, Slab, kBlockN, kBlockM, kHeadDim / 16>(acc_s, matrix_k, stage_of(matrix_q));
      ptx::mbarrier_wait(barrier(Barrier::kVFull), kv_parity);
      kv_parity ^= 1;
      do {
        const int stage = slot.index;
        ptx::mbarrier_wait(barrier(Barrier::kDoFull + stage), slot.parity);
        ptx::wgmma_wait<0>();  // S
        start_scores<Element, Slab, kBlockN, kBlockM, kHeadDim / 16>(acc_dp, matrix_v, stage_of(matrix_do));

        const uint32_t row_values = shared + stage * Config::kRow_bytes + lane % 4 * 8;
        ptx::wgmma_pin(acc_s);
        const bool masked = !work.blocks.is_full(steps.m_block);
        const auto hide = [&](float (&acc)[1][kBlockM / 8][4], float hidden) {
          const int key = work.tile.block * kBlockN + consumer * 64 + warp_row + lane / 4;
          work.mask(p).template apply_transposed<1, 1>(acc, key, steps.m_block * kBlockM + lane % 4 * 2,
                                                       hidden);
        };
        if (masked) hide(acc_s, -INFINITY);
        probabilities(acc_s, row_values + Config::kLse, scale_log2);
        to_operand<Element>(p_frag, acc_s);
        start_sum<Element, Slab>(acc_dv, p_frag, stage_of(transposed_do));

        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(acc_dp);
        // A hidden NaN must not meet P = 0.
        if (masked) hide(acc_dp, 0.f);
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
          const float2 delta = ptx::load_shared_float2(row_values + Config::kDelta + j * 32);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            acc_dp[0][j][e] = acc_s[0][j][e] * (acc_dp[0][j][e] - (e % 2 ? delta.y : delta.x));
        }
        to_operand<Element>(ds_frag, acc_dp);
        start_sum<Element, Slab>(acc_dk, ds_frag, stage_of(transposed_q));

        const uint32_t sDs = shared + Config::kDs + ds_buffer * Config::kDs_bytes;
        const auto this_ds = transposed_ds + ds_buffer * Config::kDs_bytes;
        ds_buffer ^= 1;
#pragma unroll
        for (int j = 0; j < kBlockM / 16; ++j)
          ptx::stmatrix_x4(
              sDs + j / 4 * kDsSlab_bytes +
                  Swizzle<64>::offset(consumer * 64 + warp_row + lane % 16, j % 4 * 2 + lane / 16),
              ds_frag[0][j]);
        ptx::fence_async_proxy();
        sync_consumers();      // both have written dS; both have finished with the other buffer
        ptx::wgmma_wait<1>();  // dV: P's registers are free
        ptx::wgmma_pin(p_frag);
        ptx::wgmma_discard(acc_dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k)
          ptx::wgmma<Element, true, true>(acc_dq[0], this_ds + k * 16 * 128,
                                          transposed_k + k * 16 * Slab::kRow_bytes, k > 0);
        ptx::wgmma_commit();

        BlockRange keys;
        const bool direct = writes_dq<kBlockM, kBlockN>(work.mask(p), steps.m_block, &keys);
        const int m_first = steps.m_block * kBlockM, head = steps.head;
        slot.next();
        steps.next(work);
        // What is in flight must not depend on data: after the last step a piece of a product starts, of keys
        // with keys, and is dropped.
        if (steps.left > 0) {
          ptx::mbarrier_wait(barrier(Barrier::kQFull + slot.index), slot.parity);
          start_scores<Element, Slab, kBlockN, kBlockM, kHeadDim / 16>(acc_s, matrix_k, stage_of(matrix_q));
        } else {
          start_scores<Element, Slab, kBlockN, kBlockM, 1>(acc_s, matrix_k, matrix_k + -own_keys);
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(acc_dq);
        ptx::wgmma_pin(acc_dk);
        ptx::wgmma_pin(acc_dv);
        __syncwarp();  // lse and delta, too, have been read by all lanes
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kQEmpty + stage));

        // This lane's rows of dQ are dq_row + warp_row + lane / 4 and the eighth after it; its columns as in
        // an accumulator, in groups of 16.
        const int row = dq_row + warp_row + lane / 4;
        constexpr int kGroups = Config::kDqStored / 16;
        // The first group that this consumer stores: in dQ's columns, and among those that it has made.
        const int first_group = Config::kDqByRows ? 0 : consumer * kGroups;
        // With 96 columns the second consumer has made the groups 2 to 5 and stores 3 to 5.
        constexpr int kShift = Config::kDqColumns / 16 - kGroups;
        if (kShift > 0 && consumer > 0)
#pragma unroll
          for (int j = 0; j < kGroups * 2; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_dq[0][j][e] = acc_dq[0][j + 2 * kShift][e];
        if (direct) {
          write_dq<Element, kGroups>(p, work, head, m_first + row, first_group * 16, acc_dq);
        } else {
          ptx::mbarrier_wait(barrier(Barrier::kDqEmpty), dq_parity ^ 1);  // the last one has left
          dq_parity ^= 1;
          // Odd rows of the accumulator, see config.h; a lane's two rows are alike.
          const int odd = (work.first_q + m_first + row) & 1;
          const uint32_t sDq = shared + Config::kDq + row * kHeadDim * 4 + lane % 4 * 16;
#pragma unroll
          for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int j = 0; j < kGroups; ++j)
              ptx::store_shared_16(sDq + r * 8 * kHeadDim * 4 + ((first_group + j) ^ odd) * 64,
                                   acc_dq[0][2 * j][r * 2], acc_dq[0][2 * j][r * 2 + 1],
                                   acc_dq[0][2 * j + 1][r * 2], acc_dq[0][2 * j + 1][r * 2 + 1]);
          ptx::fence_async_proxy();
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDqFull));
        }
      } while (steps.left > 0);
      ptx::wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kKVEmpty));
    }
    // dK leaves through dQ's space and dV through dS's, so that the next tile's keys come at once.
    static_assert(Config::kKV_bytes <= Config::kDq_bytes && Config::kKV_bytes <= 2 * Config::kDs_bytes);
    const int own_row = consumer * 64 + warp_row;
    sync_consumers();  // both have finished with dS
    store_sum<Element, Slab, kBlockN>(shared + Config::kDs, own_row, acc_dv, 1.f);
    ptx::mbarrier_wait(barrier(Barrier::kDqEmpty), dq_parity ^ 1);  // the last dQ has left
    store_sum<Element, Slab, kBlockN>(shared + Config::kDq, own_row, acc_dk, p.softmax_scale);
    ptx::fence_async_proxy();
    sync_warpgroup();
    if (leader) {
      const Rows rows_k(varlen, work.bidb, work.first_k, work.seqlen_k);
#pragma unroll
      for (int i = 0; i < Slab::kCount; ++i) {
        const uint32_t slab = shared + i * kBlockN * Slab::kRow_bytes + own_keys;
        const ptx::Coordinates at =
            rows_k.at(i * Slab::kWidth, work.tile.block * kBlockN + consumer * 64, work.tile.bidh);
        ptx::tma_store(&a.dk, slab + Config::kDq, at);
        ptx::tma_store(&a.dv, slab + Config::kDs, at);
      }
      ptx::tma_store_commit();
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty + work_slot.index));
    work_slot.next();
  }
  if (leader) ptx::tma_store_wait_read();  // shared memory must outlive the last store
}

}  // namespace fa2::sm90
