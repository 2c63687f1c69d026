// Attention forward on Hopper: persistent thread blocks, each one producer warpgroup and kBlockM / 64
// consumers.
//
// clang-format off
//   producer, three threads, for each work tile:        consumer warpgroup, 64 queries:
//     hand the tile to everyone                           wait for the tile, Q, K[last]
//     TMA K[last], Q, K[last - 1] .. K[first]             S = Q K[last]^T;  P = softmax step (S)
//     TMA V[last] .. V[first]                             for n = last - 1 .. first:
//                                                           start S = Q K[n]^T  and  O += P V[n + 1]
//                                                           wait for S; softmax step, while O's product runs
//                                                           wait for O; rescale O; P = S rounded
//                                                         O += P V[first];  out = O / sum, lse
// clang-format on
//
// Consumers take turns at starting their products (ping-pong), so that one's softmax runs beside another's
// products. Shapes: Q, O kBlockM x kHeadDim; K, V kBlockN x kHeadDim. A warp holds 16 rows of S, P and O in
// registers. Read first: config.h, tensor_map.h, tile/softmax.cuh.
#pragma once
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
#include "config.h"
#include "pipeline.cuh"
#include "tensor_map.h"

namespace fa2::sm90 {

struct FwdArguments {
  FwdParams p;
  CUtensorMap q, k, v, out;
  float key_bytes;  // of one key and its value, shared out over the query heads that use them
};

// The key blocks of a tile. A tile that sees no key gets one that lies past every end: it arrives as zeros,
// all of it is hidden, and out becomes 0 and lse -inf by the ordinary path.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ BlockRange key_blocks(const Mask& mask, const Work& work) {
  constexpr int kNowhere = 1 << 20;
  const BlockRange range = mask.key_blocks<kBlockM, kBlockN>(work.tile.block);
  return range.last > range.first ? range : BlockRange{kNowhere, kNowhere + 1, kNowhere, kNowhere};
}

// Of these, what one consumer's 64 queries see: at least one block; of the last ones at most one is missing.
template <int kConsumers, int kBlockN>
__device__ __forceinline__ BlockRange own_blocks(const Mask& mask, const Work& work, int consumer,
                                                 const BlockRange& all) {
  static_assert(64 * (kConsumers - 1) <= kBlockN);
  const int m_block = work.tile.block * kConsumers + consumer;
  const BlockRange own = mask.key_blocks<64, kBlockN>(m_block);
  return own.last > own.first && m_block * 64 < work.seqlen_q
             ? own
             : BlockRange{all.last - 1, all.last, all.last, all.last};
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    attention_fwd(__grid_constant__ const FwdArguments a) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  constexpr int kStages = Config::kStages, kConsumers = Config::kConsumers;
  using Slab = typename Config::Slab;
  using Barrier = typename Config::Barrier;
  const FwdParams& p = a.p;
  const bool varlen = p.cu_seqlens_q != nullptr;

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  const auto barrier = [&](int index) { return shared + Config::kBarriers + index * 8; };
  Work* const shared_work = reinterpret_cast<Work*>(shared_memory + Config::kWork);
  static_assert(sizeof(Work) <= Config::kWork_bytes);

  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier(Barrier::kTileFull), 1);
    ptx::mbarrier_init(barrier(Barrier::kTileEmpty), kConsumers * 4 + 2);
    for (int i = 0; i < Config::kQStages; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kQFull + i), 1);
      ptx::mbarrier_init(barrier(Barrier::kQEmpty + i), kConsumers);
    }
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barrier(Barrier::kKFull + i), 1);
      ptx::mbarrier_init(barrier(Barrier::kVFull + i), 1);
      ptx::mbarrier_init(barrier(Barrier::kKEmpty + i), kConsumers * 4);
      ptx::mbarrier_init(barrier(Barrier::kVEmpty + i), kConsumers * 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32 % 4, 0);
  Slot<1> work_slot;
  Slot<Config::kQStages> q_slot;

  if (warpgroup == 0) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) {  // hands out the work
      ptx::wait_for_previous_kernel();
      const int blocks = (p.seqlen_q + kBlockM - 1) / kBlockM;
      const int count = varlen ? p.tiles[0] * p.nheads_q : p.batch * p.nheads_q * blocks;
      // Few heads side by side, so that their K and V stay in L2, but with tiles enough for the longest to go
      // first. Under a full mask all dense tiles are alike: one head after the other.
      constexpr float kL2_bytes = 32 << 20;
      const int longest = varlen ? p.tiles[2] : p.seqlen_k;
      const float fitting = kL2_bytes / (a.key_bytes * max(1, longest));
      const int all_heads = varlen ? p.nheads_q : p.batch * p.nheads_q;
      const int heads = p.tiles == nullptr ? 1 : max(1, static_cast<int>(fminf(fitting, all_heads)));
      for (int index = blockIdx.x;;) {
        Work work;
        work.tile.block = -1;
        if (index < count) {
          find_tile(work.tile, index, p, p.nheads_q, blocks, true, heads);
          const Sequence sequence(p, work.tile.bidb, true);
          work.bidb = sequence.bidb;
          work.first_q = static_cast<int>(sequence.first_q);
          work.first_k = static_cast<int>(sequence.first_k);
          work.seqlen_q = sequence.seqlen_q;
          work.seqlen_k = sequence.seqlen_k;
        }
        ptx::mbarrier_wait(barrier(Barrier::kTileEmpty),
                           work_slot.parity ^ 1);  // everyone has read the last one
        *shared_work = work;
        ptx::mbarrier_arrive(barrier(Barrier::kTileFull));
        work_slot.next();
        if (work.tile.block < 0) return;
        index = p.tiles != nullptr ? gridDim.x + atomicAdd(p.tiles + 1, 1) : index + gridDim.x;
      }
    }
    const bool loads_k = warp == 1;  // and Q; warp 2 loads V
    if (warp == 0 || warp == 3 || !ptx::elect_one()) return;
    const CUtensorMap* const map = loads_k ? &a.k : &a.v;
    const uint32_t buffer = shared + (loads_k ? Config::kK : Config::kV);
    const uint32_t full = barrier(loads_k ? Barrier::kKFull : Barrier::kVFull);
    const uint32_t empty = barrier(loads_k ? Barrier::kKEmpty : Barrier::kVEmpty);
    ptx::tma_prefetch_map(map);
    if (loads_k) ptx::tma_prefetch_map(&a.q);
    Slot<kStages> slot;
    for (;;) {
      ptx::mbarrier_wait(barrier(Barrier::kTileFull), work_slot.parity);
      const Work work = *shared_work;
      ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty));
      work_slot.next();
      if (work.tile.block < 0) return;
      const Mask mask(work.seqlen_q, work.seqlen_k, p.window_left, p.window_right);
      const BlockRange range = key_blocks<kBlockM, kBlockN>(mask, work);
      const Rows rows(varlen, work.bidb, work.first_k, work.seqlen_k);
      const int bidh_kv = work.tile.bidh / (p.nheads_q / p.nheads_kv);
      const auto load = [&](int n_block) {
        ptx::mbarrier_wait(empty + slot.index * 8, slot.parity ^ 1);  // every consumer warp has read it
        ptx::mbarrier_arrive_expect(full + slot.index * 8, Config::kKV_bytes);
#pragma unroll
        for (int i = 0; i < Slab::kCount; ++i)
          ptx::tma_load(buffer + slot.index * Config::kKV_bytes + i * kBlockN * Slab::kRow_bytes, map,
                        full + slot.index * 8, rows.at(i * Slab::kWidth, n_block * kBlockN, bidh_kv));
        slot.next();
      };
      load(range.last - 1);
      if (loads_k) {
        const Rows rows_q(varlen, work.bidb, work.first_q, work.seqlen_q);
        const uint32_t q_full = barrier(Barrier::kQFull + q_slot.index);
        ptx::mbarrier_wait(barrier(Barrier::kQEmpty + q_slot.index),
                           q_slot.parity ^ 1);  // O has left through it
        ptx::mbarrier_arrive_expect(q_full, Config::kQ_bytes);
#pragma unroll
        for (int i = 0; i < Slab::kCount; ++i)
          ptx::tma_load(
              shared + Config::kQ + q_slot.index * Config::kQ_bytes + i * kBlockM * Slab::kRow_bytes, &a.q,
              q_full, rows_q.at(i * Slab::kWidth, work.tile.block * kBlockM, work.tile.bidh));
        q_slot.next();
      }
      for (int n_block = range.last - 2; n_block >= range.first; --n_block) load(n_block);
    }
  }

  ptx::take_registers<Config::kConsumerRegisters>();
  const int consumer = warpgroup - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = consumer * 64 + warp * 16;
  const bool leader = warp == 0 && lane == 0;

  // Named barriers: turns of the consumers, and one for each consumer's own four warps.
  const auto my_turn = [&] {
    if constexpr (kConsumers > 1) ptx::barrier_sync(1 + consumer, 256);
  };
  const auto your_turn = [&] {
    if constexpr (kConsumers > 1) ptx::barrier_arrive(1 + (consumer + 1) % kConsumers, 256);
  };
  const auto sync_warpgroup = [&] { ptx::barrier_sync(1 + kConsumers + consumer, 128); };
  if (consumer == kConsumers - 1) your_turn();

  const uint64_t matrix_q =
      ptx::shared_matrix<Slab::kRow_bytes>(shared + Config::kQ + consumer * 64 * Slab::kRow_bytes, 0);
  const uint64_t matrix_k = ptx::shared_matrix<Slab::kRow_bytes>(shared + Config::kK, 0);
  const uint64_t matrix_v =
      ptx::shared_matrix<Slab::kRow_bytes>(shared + Config::kV, kBlockN * Slab::kRow_bytes);
  Slot<kStages> k_slot, v_slot;

  float acc_o[1][kHeadDim / 8][4];
  float acc_s[1][kBlockN / 8][4];
  uint32_t p_frag[1][kBlockN / 16][4];

  const auto next_work = [&] {
    ptx::mbarrier_wait(barrier(Barrier::kTileFull), work_slot.parity);
    const Work work = *shared_work;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kTileEmpty));
    work_slot.next();
    return work;
  };
  const auto wait_q = [&] { ptx::mbarrier_wait(barrier(Barrier::kQFull + q_slot.index), q_slot.parity); };
  const auto wait_k = [&] { ptx::mbarrier_wait(barrier(Barrier::kKFull + k_slot.index), k_slot.parity); };
  const auto wait_v = [&] { ptx::mbarrier_wait(barrier(Barrier::kVFull + v_slot.index), v_slot.parity); };
  const auto start_s = [&] {
    my_turn();
    ptx::wgmma_pin(acc_s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      constexpr int kSteps = Slab::kWidth / 16;
      const int offset = k % kSteps * 32, slab = k / kSteps;
      ptx::wgmma<Element, false, false>(
          acc_s[0],
          matrix_q + (q_slot.index * Config::kQ_bytes + slab * kBlockM * Slab::kRow_bytes + offset) / 16,
          matrix_k + (k_slot.index * Config::kKV_bytes + slab * kBlockN * Slab::kRow_bytes + offset) / 16,
          k > 0);
    }
    ptx::wgmma_commit();
  };
  const auto start_o = [&](bool accumulate) {
    wait_v();
    ptx::wgmma_pin(acc_o);
    ptx::wgmma_pin(p_frag);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      ptx::wgmma<Element, true>(
          acc_o[0], p_frag[0][k],
          matrix_v + (v_slot.index * Config::kKV_bytes + k * 16 * Slab::kRow_bytes) / 16,
          k > 0 || accumulate);
    ptx::wgmma_commit();
  };
  const auto release = [&](int empty, Slot<kStages>& slot) {
    if (lane == 0) ptx::mbarrier_arrive(barrier(empty + slot.index));
    slot.next();
  };
  // Blocks that other consumers need and this one does not.
  const auto skip_k = [&] {
    wait_k();
    my_turn();
    your_turn();
    release(Barrier::kKEmpty, k_slot);
  };
  const auto skip_v = [&] {
    wait_v();
    release(Barrier::kVEmpty, v_slot);
  };

  int q_to_release = -1;  // leader: the Q stage through which the last tile's O is leaving
  const auto release_q = [&] {
    if (leader && q_to_release >= 0) {
      ptx::tma_store_wait_read();
      ptx::mbarrier_arrive(barrier(Barrier::kQEmpty + q_to_release));
      q_to_release = -1;
    }
  };

  Work work = next_work();
  BlockRange range, own;
  const auto find_blocks = [&] {
    const Mask mask(work.seqlen_q, work.seqlen_k, p.window_left, p.window_right);
    range = key_blocks<kBlockM, kBlockN>(mask, work);
    own = own_blocks<kConsumers, kBlockN>(mask, work, consumer, range);
  };
  const auto start_tile = [&] {
    wait_q();
    if (own.last < range.last) skip_k();
    wait_k();
  };
  // With two Q stages a tile's first product starts before the tile before it has ended. After the last tile
  // one starts too, over whatever is there, and is dropped: what is in flight at a point of the program must
  // not depend on data.
  constexpr bool kAhead = Config::kQStages > 1;
  if (work.tile.block >= 0) {
    find_blocks();
    if constexpr (kAhead) {
      start_tile();
      start_s();
      your_turn();
    }
  }
  while (work.tile.block >= 0) {
    const Mask mask(work.seqlen_q, work.seqlen_k, p.window_left, p.window_right);
    const int m_first = work.tile.block * kBlockM;
    const int row = m_first + warp_row + lane / 4;
    const int q_index = q_slot.index;
    OnlineSoftmax<1> softmax(p.softmax_scale * 1.4426950408889634f);

    if constexpr (!kAhead) {
      start_tile();
      start_s();
      your_turn();
    }
    if (own.last < range.last) skip_v();
    int n_block = own.last - 1;
    const auto probabilities = [&](auto masked) {
      if constexpr (decltype(masked)::value) {
        const int column = n_block * kBlockN + lane % 4 * 2;
        if (n_block >= own.full_first) {
          mask.apply<1, false>(acc_s, row, column, -INFINITY);
        } else {
          mask.apply<1>(acc_s, row, column, -INFINITY);
        }
      }
      return softmax.update(acc_s);
    };
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_s);
    release(Barrier::kKEmpty, k_slot);
    // A sequence's last tile may have no query for this warpgroup: it only keeps the others company.
    const bool active = m_first + consumer * 64 < work.seqlen_q;
    if (active) {
      if (own.is_full(n_block)) {
        probabilities(std::false_type{});
      } else {
        probabilities(std::true_type{});
      }
      to_operand<Element>(p_frag, acc_s);
    }
    if constexpr (kAhead) release_q();

    bool accumulate = false;
    const auto step = [&](auto masked) {
      --n_block;
      wait_k();
      start_s();
      start_o(accumulate);
      accumulate = true;
      your_turn();
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(acc_s);
      release(Barrier::kKEmpty, k_slot);
      const bool rescale = probabilities(masked);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_o);
      release(Barrier::kVEmpty, v_slot);
      to_operand<Element>(p_frag, acc_s);
      if (rescale) softmax.rescale(acc_o);
    };
    // Right to left: blocks that the diagonal or the sequence's end crosses, whole ones, those at a window's
    // left edge.
    while (n_block > own.first && n_block > own.full_last) step(std::true_type{});
    while (n_block > own.first && n_block > own.full_first) step(std::false_type{});
    while (n_block > own.first) step(std::true_type{});

    start_o(accumulate);
    const int rest = own.first - range.first;
    if (rest > 0) {
      // In the order in which the others use them: K and V held back would stop their loads, and theirs ours.
      ptx::wgmma_wait<0>();
      release(Barrier::kVEmpty, v_slot);
      for (int i = 0; i < rest; ++i) {
        skip_k();
        skip_v();
      }
    }
    q_slot.next();
    const Work ended = work;
    if constexpr (kAhead) {
      work = next_work();
      if (work.tile.block >= 0) {
        find_blocks();
        start_tile();
      }
      start_s();
      your_turn();
      ptx::wgmma_wait<1>();
    } else {
      ptx::wgmma_wait<0>();
    }
    ptx::wgmma_pin(acc_o);
    if (rest == 0) release(Barrier::kVEmpty, v_slot);

    sync_warpgroup();  // this warpgroup's products have read Q
    if (active) {
      softmax.finalize(acc_o);
      if (lane % 4 == 0) {
        float* const gLse =
            p.softmax_lse + ended.bidb * p.lse_batch + ended.tile.bidh * p.lse_head + ended.first_q;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (row + half * 8 < ended.seqlen_q) gLse[row + half * 8] = softmax.lse(half);
      }
      using Tile = Swizzle<Slab::kWidth>;
      const uint32_t sO = shared + Config::kQ + q_index * Config::kQ_bytes;
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j) {
        uint32_t out_frag[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          out_frag[e] =
              ptx::pack<Element>(acc_o[0][2 * j + e / 2][e % 2 * 2], acc_o[0][2 * j + e / 2][e % 2 * 2 + 1]);
        const int slab = j * 16 / Slab::kWidth, chunk = j * 16 % Slab::kWidth / 8;
        ptx::stmatrix_x4(
            sO + slab * kBlockM * Slab::kRow_bytes + Tile::offset(warp_row + lane % 16, chunk + lane / 16),
            out_frag);
      }
      ptx::fence_async_proxy();
      sync_warpgroup();
      if (leader) {
        const Rows rows_o(varlen, ended.bidb, ended.first_q, ended.seqlen_q);
#pragma unroll
        for (int i = 0; i < Slab::kCount; ++i)
          ptx::tma_store(&a.out, sO + (i * kBlockM + consumer * 64) * Slab::kRow_bytes,
                         rows_o.at(i * Slab::kWidth, m_first + consumer * 64, ended.tile.bidh));
        ptx::tma_store_commit();
      }
    }
    if (leader) q_to_release = q_index;
    if constexpr (!kAhead) {
      release_q();
      work = next_work();
      if (work.tile.block >= 0) find_blocks();
    }
  }
  ptx::wgmma_wait<0>();
  if (leader) ptx::tma_store_wait_read();  // shared memory must outlive the last store
}

}  // namespace fa2::sm90
