// Attention backward on Hopper: persistent thread blocks, each a producer warpgroup and two consumers. A
// block owns kBlockN keys of one key/value head, and sums dK and dV on chip over all the query heads of its
// group.
//
// clang-format off
//   producer, a warp each, for each work tile:     consumer warpgroup, 64 keys:
//     hand the tile to everyone                      wait for K, Q[0];  start S^T = K Q^T
//     TMA Q[0], dO[0], K, V, then Q[i], dO[i]        for each query block i that sees these keys, of each head:
//     lse, delta and a BwdStep for each query          wait for S;  start dP^T = V dO^T
//       block; deterministic: dQ's turn                P = exp2(S * scale_log2 - lse_log2)
//     dQ[i] from shared memory, added to an            start dV += P^T dO
//       fp32 accumulator in global memory, in          wait for dP;  dS = P * (dP - delta), to shared memory
//       a fixed order when deterministic               start dK += dS^T Q
//                                                      start dQ = dS K of block i - 1, over both consumers' keys
//                                                      start the next block's S^T
//                                                      wait for dQ; hand it to the producer, or write dq
//                                                        where no other key block sees these queries
//                                                    dk = dK * scale, dv = dV
// clang-format on
//
// S, P, dP and dS are transposed: an accumulator has the layout of an A operand in registers, so P and dS are
// used at once for dV and dK. Only dS goes through shared memory, because dQ sums over the keys of both
// consumers. dQ is a block behind, so that neither consumer has to wait for the other's dS: the second one
// stays half a block behind the first, and its products run while the first makes exponentials, and the other
// way round. Before this kernel sm80/bwd_preprocess.cuh has made lse_log2, delta and a zeroed accumulator.
// What is summed there becomes dq when all tiles of a sequence's key head are done: the warp that hands out
// the tiles converts it meanwhile (not when deterministic), and the consumers what is left behind their last
// tile. Shapes: Q, dO, dQ kBlockM x kHeadDim; K, V kBlockN x kHeadDim; S^T, dS^T 64 x kBlockM a consumer.
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
#include "bwd_queue.cuh"
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
    for (int single : {Barrier::kTurnFull, Barrier::kTurnEmpty, Barrier::kAddedFull, Barrier::kAddedEmpty,
                       Barrier::kNearEnd})
      ptx::mbarrier_init(barrier(single), 1);
    for (int i = 0; i < Config::kDqStages; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kDqFull + i), kConsumers * 4);
      ptx::mbarrier_init(barrier(Barrier::kDqEmpty + i), 1);
    }
    for (int i = 0; i < Config::kDsStages; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kDsFull + i), kConsumers * 4);
      ptx::mbarrier_init(barrier(Barrier::kDsEmpty + i), kConsumers * 4);
    }
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
  const int lane = ptx::lane_index();
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

  // A step's BwdStep lies in a ring of its own.
  const auto step_place = [&](uint32_t count) {
    return shared + Config::kStep + count % Config::kSteps * Config::kStep_bytes;
  };

  if (warpgroup == 0) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (warp == 0) {  // hands out the work, and passes the turns of dQ on, or else converts it
      ptx::wait_for_previous_kernel();
      const int blocks = blocks_of_a_head<kBlockN>(p);
      const HeadOrder order(a, blocks, gridDim.x);
      // Also the first one comes from the counter: a tile may wait for the dQ of those before it, so they
      // must have been taken by blocks that run.
      const auto take_tile = [&] {
        return decode<kBlockM, kBlockN>(p, atomicAdd(p.tiles + 1, 1), blocks, order);
      };
      const auto hand_out = [&](const BwdWork& work) -> const BwdWork& {
        // Everyone has ended the tile before the last.
        ptx::mbarrier_wait(barrier(Barrier::kTileEmpty + work_slot.index), work_slot.parity ^ 1);
        BwdWork& handed_out = shared_work[work_slot.index];
        handed_out = work;
        ptx::mbarrier_arrive(barrier(Barrier::kTileFull + work_slot.index));
        work_slot.next();
        return handed_out;
      };
      if (p.dq_semaphore == nullptr) {
        // The next tile is taken when the one before is nearly loaded: early enough, and no sooner, because
        // who takes one early may keep it from a block that has nothing to do. In between there is time. One
        // lane looks at the barriers: the others might see them at another moment.
        Conversion<Element, Config> conversion(p, blocks);
        BwdWork tile;
        bool taken = true, more = true;
        uint32_t near_end_parity = 0;
        if (lane == 0) tile = take_tile();
        const auto hand_out_in_time = [&] {
          if (lane == 0 && more) {
            if (!taken && ptx::mbarrier_test(barrier(Barrier::kNearEnd), near_end_parity)) {
              near_end_parity ^= 1;
              tile = take_tile();
              taken = true;
            }
            if (taken &&
                ptx::mbarrier_test(barrier(Barrier::kTileEmpty + work_slot.index), work_slot.parity ^ 1)) {
              more = hand_out(tile).tile.block >= 0;
              taken = false;
            }
          }
          more = __shfl_sync(kFullWarp, static_cast<int>(more), 0) != 0;
        };
        for (;;) {
          hand_out_in_time();
          if (!more) break;
          const uint64_t piece = conversion.look(lane);
          if (piece & conversion.kIsPiece) {
            conversion.template convert<4>(piece, lane, hand_out_in_time);
          } else {
            __nanosleep(128);
          }
        }
        conversion.template convert_the_rest<4>(lane);
        return;
      }
      if (!ptx::elect_one()) return;
      // A tile that others wait for is not kept back: it is taken when the one before is about to end.
      constexpr int kAhead = 3;
      uint32_t added_parity = 0;
      const BwdWork* work = &hand_out(take_tile());
      while (work->tile.block >= 0) {
        const BwdWork* next = nullptr;
#pragma unroll 1
        for (QuerySteps steps(*work, group);; steps.next(*work, group)) {
          if (next == nullptr && steps.left <= kAhead) next = &hand_out(take_tile());
          if (steps.left == 0) break;
          if (writes_dq<kBlockM, kBlockN>(work->mask(p), steps.m_block)) continue;
          ptx::mbarrier_wait(barrier(Barrier::kAddedFull), added_parity);
          added_parity ^= 1;
          ptx::mbarrier_arrive(barrier(Barrier::kAddedEmpty));
          ptx::red_release_add(turn_counter(p, *work, steps.m_block, steps.head), 1);
        }
        work = next;
      }
      return;
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
        constexpr int kNear = 2;
        bool near_end = false;
        const auto say_when_near_the_end = [&] {
          if (!near_end && steps.left <= kNear) {
            near_end = true;
            ptx::mbarrier_arrive(barrier(Barrier::kNearEnd));
          }
        };
        say_when_near_the_end();
        const auto load_queries = [&] {
          ptx::mbarrier_wait(barrier(Barrier::kQEmpty + slot.index), slot.parity ^ 1);
          load(&a.q, Config::kQ + slot.index * Config::kQ_bytes, Barrier::kQFull + slot.index,
               Config::kQ_bytes, kBlockM * Slab::kRow_bytes, rows_q, steps.m_block * kBlockM, steps.head);
          load(&a.dout, Config::kDo + slot.index * Config::kQ_bytes, Barrier::kDoFull + slot.index,
               Config::kQ_bytes, kBlockM * Slab::kRow_bytes, rows_q, steps.m_block * kBlockM, steps.head);
          slot.next();
          steps.next(work, group);
          say_when_near_the_end();
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

    if (warp == 2) {  // loads lse and delta, says what each step is, and waits for the turns of dQ
      uint32_t turn_parity = 0;
      int step_count = 0;
      for (;;) {
        const BwdWork& work = next_work();
        if (work.tile.block < 0) return;
        // A step's turn is waited for while the next step's lse and delta are on their way already.
        const int* turn = nullptr;
        int own_turn = 0;
        const auto wait_for_turn = [&] {
          if (turn != nullptr && lane == 0) {
            while (ptx::load_acquire(turn) != own_turn) __nanosleep(32);
            ptx::mbarrier_wait(barrier(Barrier::kTurnEmpty), turn_parity ^ 1);
            ptx::mbarrier_arrive(barrier(Barrier::kTurnFull));
          }
          if (turn != nullptr) turn_parity ^= 1;
          turn = nullptr;
        };
#pragma unroll 1
        for (QuerySteps steps(work, group); steps.left > 0; steps.next(work, group)) {
          const RowValues<kBlockM> values(p, work, steps, lane);
          const BwdStep step = BwdStep::of<kBlockM, kBlockN>(p, work, steps);
          ptx::mbarrier_wait(barrier(Barrier::kQEmpty + slot.index), slot.parity ^ 1);
          const uint32_t place = shared + slot.index * Config::kRow_bytes;
          values.store(place + Config::kLse, place + Config::kDelta, lane);
          if (lane == 0) step.store(step_place(step_count));
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDoFull + slot.index));
          slot.next();
          ++step_count;
          wait_for_turn();
          if (p.dq_semaphore != nullptr && !step.direct()) {
            turn = turn_counter(p, work, steps.m_block, steps.head);
            own_turn = turn_of<kBlockM, kBlockN>(work.mask(p), steps.m_block, work.tile.block);
          }
        }
        wait_for_turn();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty + work_slot.index));
        work_slot.next();
      }
    }

    // Warp 3 adds dQ to the accumulator.
    uint32_t turn_parity = 0;
    Slot<Config::kDqStages> slot_dq;
    const auto add_tile = [&](const BwdWork& work) {
#pragma unroll 1
      for (QuerySteps steps(work, group); steps.left > 0; steps.next(work, group)) {
        if (writes_dq<kBlockM, kBlockN>(work.mask(p), steps.m_block)) continue;
        const int first = steps.m_block * kBlockM;
        if (p.dq_semaphore != nullptr) {
          ptx::mbarrier_wait(barrier(Barrier::kTurnFull), turn_parity);
          ptx::mbarrier_arrive(barrier(Barrier::kTurnEmpty));
          ptx::fence_async_proxy_global();
        }
        // Both consumers have written it.
        ptx::mbarrier_wait(barrier(Barrier::kDqFull + slot_dq.index), slot_dq.parity);
        // Rows past the end are a neighbour's.
        ptx::bulk_add(
            p.dq_accum +
                (work.bidb * p.lse_batch + steps.head * p.lse_head + work.first_q + first) * kHeadDim,
            shared + Config::kDq + slot_dq.index * Config::kDq_bytes,
            min(kBlockM, work.seqlen_q - first) * kHeadDim * 4);
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(barrier(Barrier::kDqEmpty + slot_dq.index));
        slot_dq.next();
        if (p.dq_semaphore != nullptr) {
          ptx::tma_store_wait();
          ptx::fence_async_proxy_global();
          ptx::mbarrier_wait(barrier(Barrier::kAddedEmpty), turn_parity ^ 1);
          ptx::mbarrier_arrive(barrier(Barrier::kAddedFull));
          turn_parity ^= 1;
        }
      }
      ptx::tma_store_wait();  // all has been added
      ptx::fence_async_proxy_global();
    };
    for (;;) {
      const BwdWork& work = next_work();
      if (work.tile.block < 0) return;
      if (lane == 0) add_tile(work);
      Conversion<Element, Config>::end_tile(p, work, lane);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty + work_slot.index));
      work_slot.next();
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
  uint32_t kv_parity = 0;
  int step_count = 0, dq_count = 0;  // of this thread block; dS and dQ number i lie in their buffers i % 2

  for (;;) {
    const BwdWork& work = next_work();
    if (work.tile.block < 0) break;
    clear(acc_dk);
    clear(acc_dv);
    // The last tile's dK and dV have left dQ's and dS's space.
    if (leader) ptx::tma_store_wait_read();
    sync_consumers();

    if (work.steps > 0) {
      const auto stage_of = [&](SharedMatrix<Slab::kRow_bytes> matrix) {
        return matrix + slot.index * Config::kQ_bytes;
      };
      const auto hide = [&](float (&acc)[1][kBlockM / 8][4], const BwdStep& step, float hidden) {
        if (!step.masked()) return;
        const int key = work.tile.block * kBlockN + consumer * 64 + warp_row + lane / 4;
        work.mask(p).template apply_transposed<1, 1>(acc, key, step.m_block * kBlockM + lane % 4 * 2, hidden);
      };
      // The oldest dS: dQ = dS K.
      const auto start_dq = [&](int count) {
        const auto ds = transposed_ds + count % 2 * Config::kDs_bytes;
        const auto keys = transposed_k.made_here();
        ptx::mbarrier_wait(barrier(Barrier::kDsFull) + count % 2 * 8, count / 2 % 2);
        ptx::wgmma_discard(acc_dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k)
          ptx::wgmma<Element, true, true>(acc_dq[0], ds + k * 16 * 128, keys + k * 16 * Slab::kRow_bytes,
                                          k > 0);
        ptx::wgmma_commit();
      };
      bool dq_is_stored = false;
      // This lane's rows of dQ are dq_row + warp_row + lane / 4 and the eighth after it; its columns as in
      // an accumulator, in groups of 16.
      const auto finish_dq = [&](int count, int flags) {
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDsEmpty) + count % 2 * 8);
        const int row = dq_row + warp_row + lane / 4;
        constexpr int kGroups = Config::kDqStored / 16, kOfFirst = Config::kDqOfFirst / 16;
        // The first group that this consumer stores: in dQ's columns, and among those that it has made.
        const int first_group = Config::kDqByRows ? 0 : consumer * kOfFirst;
        // With 80 columns the first consumer stores one less than the second.
        const bool all_groups = kOfFirst == kGroups || consumer > 0;
        // With 96 columns the second consumer has made the groups 2 to 5 and stores 3 to 5.
        constexpr int kShift = Config::kDqColumns / 16 - kGroups;
        if (kShift > 0 && consumer > 0)
#pragma unroll
          for (int j = 0; j < kGroups * 2; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_dq[0][j][e] = acc_dq[0][j + 2 * kShift][e];
        if (BwdStep{flags}.direct()) {
          const BwdStep step = BwdStep::load(step_place(count));
          write_dq<Element, kGroups>(p, work, step.head, step.m_block * kBlockM + row, first_group * 16,
                                     all_groups ? p.headdim : min(p.headdim, Config::kDqOfFirst), acc_dq);
          return;
        }
        // The last but one has been added, and a tile's dK has left.
        ptx::mbarrier_wait(barrier(Barrier::kDqEmpty) + dq_count % 2 * 8, dq_count / 2 % 2 ^ 1);
        dq_is_stored = true;
        // Odd rows of the accumulator, see config.h; a lane's two rows are alike.
        const int odd = Config::kAlternates ? (BwdStep{flags}.odd_row() + row) & 1 : 0;
        const uint32_t sDq =
            shared + Config::kDq + dq_count % 2 * Config::kDq_bytes + row * kHeadDim * 4 + lane % 4 * 16;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int j = 0; j < kGroups; ++j)
            if (j < kOfFirst || all_groups)
              ptx::store_shared_16(sDq + r * 8 * kHeadDim * 4 + ((first_group + j) ^ odd) * 64,
                                   acc_dq[0][2 * j][r * 2], acc_dq[0][2 * j][r * 2 + 1],
                                   acc_dq[0][2 * j + 1][r * 2], acc_dq[0][2 * j + 1][r * 2 + 1]);
      };
      // To the producer, a little later: by then the stores have arrived, and the fence has little to wait
      // for.
      const auto hand_dq_over = [&] {
        if (!dq_is_stored) return;
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDqFull) + dq_count % 2 * 8);
        ++dq_count;
        dq_is_stored = false;
      };

      ptx::mbarrier_wait(barrier(Barrier::kKFull), kv_parity);
      ptx::mbarrier_wait(barrier(Barrier::kQFull + slot.index), slot.parity);
      // The second consumer begins half a step later, and stays behind: the one makes its products while the
      // other is busy with exponentials.
      if (consumer == 1) ptx::barrier_sync(2 + kConsumers, kConsumers * 128);
      start_scores<Element, Slab, kBlockN, kBlockM, kHeadDim / 16>(acc_s, matrix_k, stage_of(matrix_q));
      ptx::mbarrier_wait(barrier(Barrier::kVFull), kv_parity);
      kv_parity ^= 1;
      bool first = true, last;
      int flags_before = 0;  // of the step before; the rest of its BwdStep is seldom needed
      do {
        const int stage = slot.index;
        const uint32_t row_values = shared + stage * Config::kRow_bytes + lane % 4 * 8;
        float2 lse_log2[kBlockM / 8];  // fetched before S has arrived, where there are registers for it
        constexpr bool kFetchesLse = kBlockM == 64;
        ptx::mbarrier_wait(barrier(Barrier::kDoFull + stage), slot.parity);
        const BwdStep step = BwdStep::load(step_place(step_count));
        if constexpr (kFetchesLse) load_lse(lse_log2, row_values + Config::kLse);
        begin_with_delta(acc_dp, row_values + Config::kDelta);
        last = step.last();
        ptx::wgmma_wait<0>();  // S
        start_scores<Element, Slab, kBlockN, kBlockM, kHeadDim / 16, true>(acc_dp, matrix_v.made_here(),
                                                                           stage_of(matrix_do));
        hand_dq_over();
        ptx::wgmma_pin(acc_s);
        hide(acc_s, step, -INFINITY);
        if constexpr (kFetchesLse) {
          probabilities(acc_s, lse_log2, scale_log2);
        } else {
          probabilities(acc_s, row_values + Config::kLse, scale_log2);
        }
        to_operand<Element>(p_frag, acc_s);
        start_sum<Element, Slab>(acc_dv, p_frag, stage_of(transposed_do));
        if (first && consumer == 0) ptx::barrier_arrive(2 + kConsumers, kConsumers * 128);

        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(acc_dp);
        hide(acc_dp, step, 0.f);  // a hidden NaN must not meet P = 0
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc_dp[0][j][e] *= acc_s[0][j][e];
        to_operand<Element>(ds_frag, acc_dp);

        // Both consumers have made dQ of what lay there.
        ptx::mbarrier_wait(barrier(Barrier::kDsEmpty) + step_count % 2 * 8, step_count / 2 % 2 ^ 1);
        const uint32_t sDs = shared + Config::kDs + step_count % 2 * Config::kDs_bytes;
#pragma unroll
        for (int j = 0; j < kBlockM / 16; ++j)
          ptx::stmatrix_x4(
              sDs + j / 4 * kDsSlab_bytes +
                  Swizzle<64>::offset(consumer * 64 + warp_row + lane % 16, j % 4 * 2 + lane / 16),
              ds_frag[0][j]);
        start_sum<Element, Slab>(acc_dk, ds_frag, stage_of(transposed_q));
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDsFull) + step_count % 2 * 8);
        ptx::wgmma_wait<1>();  // dV: P's registers are free
        ptx::wgmma_pin(p_frag);
        // dQ is a step behind, so that neither consumer waits for the other's dS. What is in flight must not
        // depend on data: in the first step, and of S after the last, a piece of a product starts, of keys
        // with keys, and is dropped.
        if (!first) {
          start_dq(step_count - 1);
        } else {
          ptx::wgmma_discard(acc_dq);
          ptx::wgmma_fence();
          ptx::wgmma<Element, true, true>(acc_dq[0], transposed_k, transposed_k, false);
          ptx::wgmma_commit();
        }
        slot.next();
        if (!last) {
          ptx::mbarrier_wait(barrier(Barrier::kQFull + slot.index), slot.parity);
          start_scores<Element, Slab, kBlockN, kBlockM, kHeadDim / 16>(acc_s, matrix_k.made_here(),
                                                                       stage_of(matrix_q));
        } else {
          start_scores<Element, Slab, kBlockN, kBlockM, 1>(acc_s, matrix_k, matrix_k + -own_keys);
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(acc_dq);
        ptx::wgmma_pin(acc_dk);
        ptx::wgmma_pin(acc_dv);
        __syncwarp();  // lse and delta, too, have been read by all lanes
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kQEmpty + stage));
        if (!first) finish_dq(step_count - 1, flags_before);
        flags_before = step.flags;
        ++step_count;
        first = false;
      } while (!last);
      ptx::wgmma_wait<0>();  // the piece of S
      start_dq(step_count - 1);
      hand_dq_over();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dq);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kKVEmpty));
      finish_dq(step_count - 1, flags_before);
      hand_dq_over();
    }
    // dK leaves through the buffer of dQ that is next, and dV through dS's, so that the next tile's keys come
    // at once.
    static_assert(Config::kKV_bytes <= Config::kDq_bytes && Config::kKV_bytes <= 2 * Config::kDs_bytes);
    const int own_row = consumer * 64 + warp_row;
    sync_consumers();  // both have finished with dS
    store_sum<Element, Slab, kBlockN>(shared + Config::kDs, own_row, acc_dv, 1.f);
    const int dk_place = Config::kDq + dq_count % 2 * Config::kDq_bytes;
    ptx::mbarrier_wait(barrier(Barrier::kDqEmpty) + dq_count % 2 * 8, dq_count / 2 % 2 ^ 1);  // it is free
    store_sum<Element, Slab, kBlockN>(shared + dk_place, own_row, acc_dk, p.softmax_scale);
    ptx::fence_async_proxy();
    sync_warpgroup();
    if (leader) {
      const Rows rows_k(varlen, work.bidb, work.first_k, work.seqlen_k);
#pragma unroll
      for (int i = 0; i < Slab::kCount; ++i) {
        const uint32_t slab = shared + i * kBlockN * Slab::kRow_bytes + own_keys;
        const ptx::Coordinates at =
            rows_k.at(i * Slab::kWidth, work.tile.block * kBlockN + consumer * 64, work.tile.bidh);
        ptx::tma_store(&a.dk, slab + dk_place, at);
        ptx::tma_store(&a.dv, slab + Config::kDs, at);
      }
      ptx::tma_store_commit();
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty + work_slot.index));
    work_slot.next();
  }
  Conversion<Element, Config>(p, blocks_of_a_head<kBlockN>(p))
      .template convert_the_rest<kHeadDim % 64 == 0 ? 16 : kHeadDim / 8>(lane);
  if (leader) ptx::tma_store_wait_read();  // shared memory must outlive the last store
}

}  // namespace fa2::sm90
