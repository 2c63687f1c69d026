// Attention backward on Hopper for wide heads: a cluster of two thread blocks shares a tile of 128 keys.
//
// clang-format off
//   producer, a warp each, for each work tile:     first consumer:                   second consumer:
//     hand the tile to both blocks                   start S^T = K Q[0]^T              start dP^T = V dO[0]^T
//     TMA K, V, and for each query block half        for each query block:             for each query block:
//       of Q and dO, to both blocks                    P = exp2(S ..), to shared         dS = P * (dP - delta)
//     lse and delta of each query block                start dV += P^T dO                dS to shared memory, and
//                                                      start the next S^T                  to the other block
//                                                      wait for both blocks' dS          start dK += dS^T Q
//                                                      start its share of dQ             start the next dP^T
//                                                      add dQ to an fp32 accumulator     its share of dQ likewise
//                                                        in global memory, or write dq
//                                                    dv = dV                           dk = dK * scale
// clang-format on
//
// At headdim 256 dK and dV of 64 keys fill the registers of two warpgroups, one each; 64 keys a block would
// add 64 KB to dQ for each 10 MFLOP, more than L2 can take. So two blocks with the same queries exchange dS
// (8 KB, by a copy into the other's shared memory), and each makes one half of dQ's columns over the 128
// keys: half the additions, and Q and dO are fetched once for both. Before this kernel
// sm80/bwd_preprocess.cuh has made lse_log2, delta and a zeroed accumulator; after it sm80/bwd_convert.cuh
// makes the rest of dq. Shapes: Q, dO, dQ kBlockM x kHeadDim; K, V, dK, dV 64 x kHeadDim a block; S^T, dS^T
// 64 x kBlockM a block. Read first: config.h, bwd.cuh, ptx/cluster.cuh.
#pragma once
#include <type_traits>

#include "../ptx/cluster.cuh"
#include "../ptx/global.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/mask.cuh"
#include "../tile/softmax.cuh"
#include "bwd_parts.cuh"
#include "config.h"
#include "pipeline.cuh"

namespace fa2::sm90 {

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_bwd_pair(__grid_constant__ const BwdArguments a) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  constexpr int kStages = Config::kStages, kKeys = Config::kKeys, kHalf = Config::kHalf;
  using Slab = typename Config::Slab;
  using Barrier = typename Config::Barrier;
  const BwdParams& p = a.p;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int group = p.nheads_q / p.nheads_kv;

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  const auto barrier = [&](int index) { return shared + Config::kBarriers + index * 8; };
  BwdWork* const shared_work = reinterpret_cast<BwdWork*>(shared_memory + Config::kWork);
  static_assert(sizeof(BwdWork) <= Config::kWork_bytes && sizeof(BwdWork) % 4 == 0);
  const int rank = ptx::cluster_rank(), other = rank ^ 1;

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kTileFull + i), 1);
      ptx::mbarrier_init(barrier(Barrier::kTileEmpty + i), 2 * (2 * 4 + 2));
    }
    ptx::mbarrier_init(barrier(Barrier::kKFull), 1);
    ptx::mbarrier_init(barrier(Barrier::kVFull), 1);
    ptx::mbarrier_init(barrier(Barrier::kKVEmpty), 2);
    ptx::mbarrier_init(barrier(Barrier::kPFull), 4);
    ptx::mbarrier_init(barrier(Barrier::kDsFull), 4);
    ptx::mbarrier_init(barrier(Barrier::kOtherFull), 1);
    ptx::mbarrier_init(barrier(Barrier::kDsEmpty), 2 * 2 * 4);
    ptx::mbarrier_init(barrier(Barrier::kLoaded), 1);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kQFull + i), 1);
      ptx::mbarrier_init(barrier(Barrier::kDoFull + i), 2);
      ptx::mbarrier_init(barrier(Barrier::kQEmpty + i), 2 * 2 * 4);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();

  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32 % 4, 0);
  const int lane = ptx::lane_index();
  Slot<2> work_slot;
  Slot<kStages> slot;

  // The tile stays in both blocks' shared memory until all of both have ended it.
  const auto next_work = [&]() -> const BwdWork& {
    ptx::mbarrier_wait_cluster(barrier(Barrier::kTileFull + work_slot.index), work_slot.parity);
    return shared_work[work_slot.index];
  };
  const auto end_work = [&] {
    ptx::mbarrier_arrive_cluster(ptx::cluster_address(barrier(Barrier::kTileEmpty + work_slot.index), 0));
    work_slot.next();
  };

  if (warpgroup == 0) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (warp == 0 && rank == 0 && ptx::elect_one()) {  // hands out the work, to both blocks
      ptx::wait_for_previous_kernel();
      const int blocks = blocks_of_a_head<kBlockN>(p);
      const HeadOrder order(a, blocks, gridDim.x / 2);
      uint32_t loaded_parity = 1;  // the first tile waits for nothing
      for (;;) {
        // Taken when the one before is about to end, and no sooner: others may wait for what it adds, or have
        // nothing to do.
        ptx::mbarrier_wait(barrier(Barrier::kLoaded), loaded_parity);
        loaded_parity ^= 1;
        const BwdWork work = decode<kBlockM, kBlockN>(p, atomicAdd(p.tiles + 1, 1), blocks, order);
        // Everyone has ended the tile before the last.
        ptx::mbarrier_wait_cluster(barrier(Barrier::kTileEmpty + work_slot.index), work_slot.parity ^ 1);
        shared_work[work_slot.index] = work;
        ptx::mbarrier_arrive(barrier(Barrier::kTileFull + work_slot.index));
        const uint32_t copy = ptx::cluster_address(ptx::shared_address(&shared_work[work_slot.index]), 1);
        const int* const words = reinterpret_cast<const int*>(&shared_work[work_slot.index]);
#pragma unroll 1
        for (int i = 0; i < static_cast<int>(sizeof(BwdWork) / 4); ++i)
          ptx::store_cluster_4(copy + i * 4, words[i]);
        ptx::mbarrier_arrive_cluster(ptx::cluster_address(barrier(Barrier::kTileFull + work_slot.index), 1));
        work_slot.next();
        if (work.tile.block < 0) break;
      }
    } else if (warp == 1 && ptx::elect_one()) {  // loads
      ptx::tma_prefetch_map(&a.q);
      ptx::tma_prefetch_map(&a.dout);
      ptx::tma_prefetch_map(&a.k);
      ptx::tma_prefetch_map(&a.v);
      uint32_t kv_parity = 0;
      const auto load_keys = [&](const CUtensorMap* map, int buffer, int full, const Rows& rows, int first,
                                 int head, int slab, int slabs) {
#pragma unroll 1
        for (int i = 0; i < slabs; ++i)
          ptx::tma_load(shared + buffer + i * kKeys * Slab::kRow_bytes, map, barrier(full),
                        rows.at((slab + i) * Slab::kWidth, first, head));
      };
      for (;;) {
        const BwdWork& work = next_work();
        if (work.tile.block < 0) break;
        const Rows rows_q(varlen, work.bidb, work.first_q, work.seqlen_q, work.unseeing);
        QuerySteps steps(work, group);
        // This block's half of the rows, to both.
        const auto load_half = [&](const CUtensorMap* map, int buffer, int full) {
          ptx::mbarrier_arrive_expect(barrier(full + slot.index), Config::kQ_bytes);
#pragma unroll 1
          for (int i = 0; i < Slab::kCount; ++i)
            ptx::tma_load_multicast(
                shared + buffer + slot.index * Config::kQ_bytes +
                    (i * kBlockM + rank * Config::kQueryBox) * Slab::kRow_bytes,
                map, barrier(full + slot.index),
                rows_q.at(i * Slab::kWidth, steps.m_block * kBlockM + rank * Config::kQueryBox, steps.head),
                3);
        };
        const auto load_queries = [&] {
          // In both blocks.
          ptx::mbarrier_wait(barrier(Barrier::kQEmpty + slot.index), slot.parity ^ 1);
          load_half(&a.q, Config::kQ, Barrier::kQFull);
          load_half(&a.dout, Config::kDo, Barrier::kDoFull);
          slot.next();
          steps.next(work, group);
        };
        const bool any = steps.left > 0;
        if (any) load_queries();  // before the last tile's dK and dV have left
        ptx::mbarrier_wait(barrier(Barrier::kKVEmpty), kv_parity ^ 1);
        kv_parity ^= 1;
        if (any) {
          const Rows rows_k(varlen, work.bidb, work.first_k, work.seqlen_k);
          const int n_first = work.tile.block * kBlockN, head = work.tile.bidh;
          ptx::mbarrier_arrive_expect(barrier(Barrier::kKFull), Config::kKV_bytes);
          load_keys(&a.k, Config::kK, Barrier::kKFull, rows_k, n_first + rank * kKeys, head, 0, Slab::kCount);
          ptx::mbarrier_arrive_expect(barrier(Barrier::kVFull), Config::kKV_bytes + Config::kOther_bytes);
          load_keys(&a.v, Config::kV, Barrier::kVFull, rows_k, n_first + rank * kKeys, head, 0, Slab::kCount);
          load_keys(&a.k, Config::kOther, Barrier::kVFull, rows_k, n_first + other * kKeys, head,
                    rank * Slab::kCount / 2, Slab::kCount / 2);
        } else {
          ptx::mbarrier_arrive(barrier(Barrier::kKFull));
          ptx::mbarrier_arrive(barrier(Barrier::kVFull));
        }
#pragma unroll 1
        while (steps.left > 0) load_queries();
        if (rank == 0) ptx::mbarrier_arrive(barrier(Barrier::kLoaded));
        end_work();
      }
    } else if (warp == 2) {  // lse and delta, and what each step is
      for (;;) {
        const BwdWork& work = next_work();
        if (work.tile.block < 0) break;
#pragma unroll 1
        for (QuerySteps steps(work, group); steps.left > 0; steps.next(work, group)) {
          const RowValues<kBlockM> values(p, work, steps, lane);
          const BwdStep step = BwdStep::of<kBlockM, kBlockN>(p, work, steps);
          ptx::mbarrier_wait(barrier(Barrier::kQEmpty + slot.index), slot.parity ^ 1);
          const uint32_t place = shared + slot.index * Config::kRow_bytes;
          values.store(place + Config::kLse, place + Config::kDelta, lane);
          if (lane == 0) step.store(shared + Config::kStep + slot.index * Config::kStep_bytes);
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDoFull + slot.index));
          slot.next();
        }
        __syncwarp();
        if (lane == 0) {
          end_work();
        } else {
          work_slot.next();
        }
      }
    }
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    const bool leader = warp == 0 && lane == 0;
    const auto sync_warpgroup = [&] { ptx::barrier_sync(1 + warpgroup, 128); };
    const SharedMatrix<Slab::kRow_bytes> matrix_k(shared + Config::kK, 0);
    const SharedMatrix<Slab::kRow_bytes> matrix_v(shared + Config::kV, 0);
    const SharedMatrix<Slab::kRow_bytes> matrix_q(shared + Config::kQ, 0);
    const SharedMatrix<Slab::kRow_bytes> matrix_do(shared + Config::kDo, 0);
    const SharedMatrix<Slab::kRow_bytes> transposed_q(shared + Config::kQ, kBlockM * Slab::kRow_bytes);
    const SharedMatrix<Slab::kRow_bytes> transposed_do(shared + Config::kDo, kBlockM * Slab::kRow_bytes);
    const SharedMatrix<128> transposed_ds(shared + Config::kDs, 0);
    const SharedMatrix<128> other_ds(shared + Config::kOtherDs, 0);
    // K's columns of this consumer's share of dQ, of this block's keys and of the other's.
    const int share = warpgroup == 1 ? 0 : Config::kDqFirst / Slab::kWidth;
    const SharedMatrix<Slab::kRow_bytes> transposed_k(
        shared + Config::kK + (rank * Slab::kCount / 2 + share) * kKeys * Slab::kRow_bytes,
        kKeys * Slab::kRow_bytes);
    const SharedMatrix<Slab::kRow_bytes> transposed_other(
        shared + Config::kOther + share * kKeys * Slab::kRow_bytes, kKeys * Slab::kRow_bytes);
    // A warp's 16 keys of P, and then of dS, are the same 2 KB: the first consumer's warp writes P there, in
    // the order of its registers, and the second's of the same number reads it and writes dS.
    const uint32_t p_place = shared + Config::kDs + warp * 2048 + lane * 16;
    static_assert(kBlockM == 64, "four registers a lane and row of the 2 KB");

    float acc_sum[1][kHeadDim / 8][4];   // dV or dK
    float acc_score[1][kBlockM / 8][4];  // S, P or dP
    uint32_t frag[1][kBlockM / 16][4];   // P or dS
    uint32_t kv_parity = 0, ds_parity = 0, other_parity = 0;
    const float scale_log2 = p.softmax_scale * 1.4426950408889634f;

    const auto stage_of = [&](SharedMatrix<Slab::kRow_bytes> matrix, int stage) {
      return matrix + stage * Config::kQ_bytes;
    };
    const auto wait_q = [&] { ptx::mbarrier_wait(barrier(Barrier::kQFull + slot.index), slot.parity); };
    const auto wait_do = [&] { ptx::mbarrier_wait(barrier(Barrier::kDoFull + slot.index), slot.parity); };
    // Of what has been read: there is nothing to publish.
    const auto arrive_in_both = [&](int index) {
      if (lane == 0) {
        ptx::mbarrier_arrive(barrier(index));
        ptx::mbarrier_arrive_cluster_done(ptx::cluster_address(barrier(index), other));
      }
    };
    const auto release = [&](int stage) {
      __syncwarp();
      arrive_in_both(Barrier::kQEmpty + stage);
    };
    const auto start_dq = [&](auto& acc) {
      ptx::wgmma_discard(acc);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        ptx::wgmma<Element, true, true>(acc[0], transposed_ds + k * 16 * 128,
                                        transposed_k + k * 16 * Slab::kRow_bytes, k > 0);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        ptx::wgmma<Element, true, true>(acc[0], other_ds + k * 16 * 128,
                                        transposed_other + k * 16 * Slab::kRow_bytes, true);
      ptx::wgmma_commit();
    };
    // Deterministic: the turn of a query block moves on a step later, when the additions have long arrived.
    int* turn_to_pass = nullptr;
    const auto pass_turn = [&] {
      if (turn_to_pass == nullptr) return;
      __threadfence();  // this thread's additions come before
      sync_warpgroup();
      if (leader) ptx::red_release_add(turn_to_pass, 1);
      turn_to_pass = nullptr;
    };
    // This consumer's share of the block's columns of dQ goes out.
    const auto finish_dq = [&](auto& acc, const BwdWork& work, const BwdStep& step) {
      constexpr int kGroups = std::extent_v<std::remove_reference_t<decltype(acc)>, 1> / 2;
      const int column = rank * kHalf + (warpgroup == 1 ? 0 : Config::kDqFirst);
      const int row = warp * 16 + lane / 4;  // and the eighth after it
      if (step.direct()) {
        write_dq<Element, kGroups>(p, work, step.head, step.m_block * kBlockM + row, column, p.headdim, acc);
        return;
      }
      if (p.dq_semaphore != nullptr) {
        // Key blocks add to a query block in descending order; each is four consumers.
        int* const turn = turn_counter(p, work, step.m_block, step.head);
        const int own = turn_of<kBlockM, kBlockN>(work.mask(p), step.m_block, work.tile.block);
        if (leader)
          while (ptx::load_acquire(turn) / 4 != own) __nanosleep(32);
        sync_warpgroup();
        turn_to_pass = turn;
      }
      float* const accum =
          p.dq_accum + (static_cast<int64_t>(step.first_row) + row) * kHeadDim + column + lane % 4 * 4;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (row + r * 8 < step.rows())
#pragma unroll
          for (int j = 0; j < kGroups; ++j)
            ptx::red_add_4(accum + r * 8 * kHeadDim + j * 16, acc[0][2 * j][r * 2], acc[0][2 * j][r * 2 + 1],
                           acc[0][2 * j + 1][r * 2], acc[0][2 * j + 1][r * 2 + 1]);
    };
    const auto hide = [&](const BwdWork& work, const BwdStep& step, float hidden) {
      if (!step.masked()) return;
      const int key = work.tile.block * kBlockN + rank * kKeys + warp * 16 + lane / 4;
      work.mask(p).template apply_transposed<1, 1>(acc_score, key, step.m_block * kBlockM + lane % 4 * 2,
                                                   hidden);
    };
    // What comes with dO of the stage that `slot` stands at.
    const auto load_step = [&] {
      return BwdStep::load(shared + Config::kStep + slot.index * Config::kStep_bytes);
    };
    const auto row_values = [&] { return shared + slot.index * Config::kRow_bytes + lane % 4 * 8; };

    for (;;) {
      const BwdWork& work = next_work();
      if (work.tile.block < 0) break;
      clear(acc_sum);

      if (work.steps > 0 && warpgroup == 1) {
        float acc_dq[1][Config::kDqFirst / 8][4];
        const auto make_p = [&](const BwdStep& step) {
          hide(work, step, -INFINITY);
          probabilities(acc_score, row_values() + Config::kLse, scale_log2);
          to_operand<Element>(frag, acc_score);
        };
        const auto hand_p_over = [&] {
          // Both consumers, and the other block, have finished with the last dS.
          ptx::mbarrier_wait(barrier(Barrier::kDsEmpty), ds_parity ^ 1);
#pragma unroll
          for (int j = 0; j < kBlockM / 16; ++j)
            ptx::store_shared_16(p_place + j * 512, __uint_as_float(frag[0][j][0]),
                                 __uint_as_float(frag[0][j][1]), __uint_as_float(frag[0][j][2]),
                                 __uint_as_float(frag[0][j][3]));
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kPFull));
        };
        ptx::mbarrier_wait(barrier(Barrier::kKFull), kv_parity);
        wait_q();
        start_scores<Element, Slab, kKeys, kBlockM, kHeadDim / 16>(acc_score, matrix_k,
                                                                   stage_of(matrix_q, slot.index));
        ptx::mbarrier_wait(barrier(Barrier::kVFull), kv_parity);
        kv_parity ^= 1;
        wait_do();
        BwdStep step = load_step();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(acc_score);
        make_p(step);
        start_sum<Element, Slab>(acc_sum, frag, stage_of(transposed_do, slot.index));
        hand_p_over();
        for (;;) {
          const int stage = slot.index;
          slot.next();
          // What is in flight must not depend on data: after the last step a piece of a product starts, of
          // keys with keys, and is dropped.
          if (!step.last()) {
            wait_q();
            start_scores<Element, Slab, kKeys, kBlockM, kHeadDim / 16>(acc_score, matrix_k,
                                                                       stage_of(matrix_q, slot.index));
          } else {
            start_scores<Element, Slab, kKeys, kBlockM, 1>(acc_score, matrix_k, matrix_k);
          }
          pass_turn();
          ptx::mbarrier_wait(barrier(Barrier::kDsFull), ds_parity);
          ptx::mbarrier_wait(barrier(Barrier::kOtherFull), other_parity);
          ds_parity ^= 1;
          other_parity ^= 1;
          start_dq(acc_dq);
          BwdStep next = step;
          if (!step.last()) {
            wait_do();  // lse comes with it
            next = load_step();
          }
          ptx::wgmma_wait<1>();  // dV and S
          ptx::wgmma_pin(acc_sum);
          ptx::wgmma_pin(frag);
          ptx::wgmma_pin(acc_score);
          release(stage);
          if (!step.last()) make_p(next);
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(acc_dq);
          arrive_in_both(Barrier::kDsEmpty);
          if (step.last()) {
            finish_dq(acc_dq, work, step);
            break;
          }
          start_sum<Element, Slab>(acc_sum, frag, stage_of(transposed_do, slot.index));
          hand_p_over();  // first, because the other consumer waits for it
          finish_dq(acc_dq, work, step);
          step = next;
        }
      } else if (work.steps > 0) {
        float acc_dq[1][Config::kDqSecond / 8][4];
        BwdStep step;
        const auto start_dp = [&] {
          wait_do();
          begin_with_delta(acc_score, row_values() + Config::kDelta);
          start_scores<Element, Slab, kKeys, kBlockM, kHeadDim / 16, true>(acc_score, matrix_v,
                                                                           stage_of(matrix_do, slot.index));
        };
        ptx::mbarrier_wait(barrier(Barrier::kKFull), kv_parity);
        ptx::mbarrier_wait(barrier(Barrier::kVFull), kv_parity);
        kv_parity ^= 1;
        start_dp();
        step = load_step();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(acc_score);
        for (;;) {
          const int stage = slot.index;
          hide(work, step, 0.f);  // a hidden NaN must not meet P = 0
          ptx::mbarrier_wait(barrier(Barrier::kPFull), ds_parity);
          ds_parity ^= 1;
#pragma unroll
          for (int j = 0; j < kBlockM / 16; ++j) {
            const uint4 packed = ptx::load_shared_16(p_place + j * 512);
            const uint32_t probability[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // of tile 2 j + i / 2, the row i % 2 * 8 further
              const float2 x = ptx::unpack<Element>(probability[i]);
              float* const dp = &acc_score[0][2 * j + i / 2][i % 2 * 2];
              dp[0] *= x.x;
              dp[1] *= x.y;
            }
          }
          to_operand<Element>(frag, acc_score);
          __syncwarp();  // all lanes have read P
#pragma unroll
          for (int j = 0; j < kBlockM / 16; ++j)
            ptx::stmatrix_x4(
                shared + Config::kDs + Swizzle<64>::offset(warp * 16 + lane % 16, j * 2 + lane / 16),
                frag[0][j]);
          wait_q();
          start_sum<Element, Slab>(acc_sum, frag, stage_of(transposed_q, stage));
          ptx::fence_async_proxy();
          sync_warpgroup();  // dS is complete
          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDsFull));
          if (leader) {
            ptx::mbarrier_arrive_expect(barrier(Barrier::kOtherFull), Config::kDs_bytes);
            // The other block has finished with the last one: kDsEmpty, before P was written.
            ptx::copy_to_block(ptx::cluster_address(shared + Config::kOtherDs, other), shared + Config::kDs,
                               Config::kDs_bytes, ptx::cluster_address(barrier(Barrier::kOtherFull), other));
          }
          slot.next();
          BwdStep next = step;
          if (!step.last()) {
            start_dp();
            next = load_step();
          } else {
            start_scores<Element, Slab, kKeys, kBlockM, 1>(acc_score, matrix_v, matrix_v);
          }
          pass_turn();
          ptx::mbarrier_wait(barrier(Barrier::kOtherFull), other_parity);
          other_parity ^= 1;
          start_dq(acc_dq);
          ptx::wgmma_wait<1>();  // dK and dP
          ptx::wgmma_pin(acc_sum);
          ptx::wgmma_pin(frag);
          ptx::wgmma_pin(acc_score);
          release(stage);
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(acc_dq);
          arrive_in_both(Barrier::kDsEmpty);
          finish_dq(acc_dq, work, step);
          if (step.last()) break;
          step = next;
        }
      } else {
        // No keys come, but their turn: else this tile could end before the loads have waited for the one
        // before.
        ptx::mbarrier_wait(barrier(Barrier::kKFull), kv_parity);
        ptx::mbarrier_wait(barrier(Barrier::kVFull), kv_parity);
        kv_parity ^= 1;
      }

      pass_turn();
      ptx::barrier_sync(1, 256);  // both consumers have finished with K and V
      const uint32_t place = shared + (warpgroup == 1 ? Config::kV : Config::kK);
      store_sum<Element, Slab, kKeys>(place, warp * 16, acc_sum, warpgroup == 1 ? 1.f : p.softmax_scale);
      ptx::fence_async_proxy();
      sync_warpgroup();
      if (leader) {
        const Rows rows_k(varlen, work.bidb, work.first_k, work.seqlen_k);
#pragma unroll
        for (int i = 0; i < Slab::kCount; ++i)
          ptx::tma_store(
              warpgroup == 1 ? &a.dv : &a.dk, place + i * kKeys * Slab::kRow_bytes,
              rows_k.at(i * Slab::kWidth, work.tile.block * kBlockN + rank * kKeys, work.tile.bidh));
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(barrier(Barrier::kKVEmpty));
      }
      __syncwarp();
      if (lane == 0) {
        end_work();
      } else {
        work_slot.next();
      }
    }
  }
  ptx::cluster_sync();  // the other block may still write into this one's shared memory
}

}  // namespace fa2::sm90
