// dQ's sums become dq inside the backward kernel, while it runs: a queue of what is ready (ConversionQueue in
// params.h; sm80/bwd_preprocess.cuh sets it to 0). Read first: bwd_parts.cuh; next: bwd.cuh, which uses it.
#pragma once
#include "../params.h"
#include "../ptx/global.cuh"
#include "../tile/fragment.cuh"
#include "../tile/mask.cuh"
#include "bwd_parts.cuh"

namespace fa2::sm90 {

// The conversion of dQ: dq = accumulator * scale, rounded, of the rows that no tile has written itself. When
// all tiles of a sequence's key head have added to them, they are put into a queue, from which any warp that
// has time takes them.
template <class Element, class Config>
struct Conversion {
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  // A piece: its head (of all batch elements) and number of rows in the lower half, its first row above.
  static constexpr uint64_t kNotYet = 0, kIsPiece = uint64_t{1} << 63, kNoMore = 1;
  static_assert(kBlockM % kConversionRows == 0 && kConversionRows == 32, "a piece for each lane");

  const BwdParams& p;
  int tiles;       // of all heads
  int taken = -1;  // the place in the queue that this warp has taken

  // blocks: of key tiles in a head.
  __device__ __forceinline__ Conversion(const BwdParams& p_, int blocks) : p(p_) {
    tiles = blocks * p.nheads_kv * (p.cu_seqlens_q != nullptr ? 1 : p.batch);
  }

  // Without a query nobody has set the counters to 0.
  static __device__ __forceinline__ bool needed(const BwdParams& p) {
    return (p.cu_seqlens_q != nullptr ? p.total_q : p.seqlen_q) > 0;
  }

  // A tile's last addition is complete, and visible to this warp's lane 0.
  static __device__ __forceinline__ void end_tile(const BwdParams& p, const BwdWork& work, int lane) {
    if (!needed(p)) return;
    int32_t* const counters = p.conversions.counters;
    const int tiles_here = (work.seqlen_k + kBlockN - 1) / kBlockN;
    int done = 1;
    if (lane == 0 && tiles_here > 1) {
      __threadfence();
      done =
          1 +
          atomicAdd(counters + ConversionQueue::kCounters + work.tile.bidb * p.nheads_kv + work.tile.bidh, 1);
    }
    if (__shfl_sync(kFullWarp, done, 0) != tiles_here) return;
    if (tiles_here > 1) __threadfence();  // what all tiles added comes before what says so
    const Mask mask = work.mask(p);
    const int group = p.nheads_q / p.nheads_kv;
#pragma unroll 1
    for (int first = 0; first < work.seqlen_q; first += 32 * kConversionRows) {
      const int row = first + lane * kConversionRows;
      const bool wanted = row < work.seqlen_q && !writes_dq<kBlockM, kBlockN>(mask, row / kBlockM);
      const uint32_t all = __ballot_sync(kFullWarp, wanted);
      if (all == 0) continue;
      const int count = __popc(all);
      int place = 0;
      if (lane == 0) place = atomicAdd(counters + ConversionQueue::kReady, count * group);
      place = __shfl_sync(kFullWarp, place, 0) + __popc(all & ((1u << lane) - 1));
      if (wanted)
#pragma unroll 1
        for (int i = 0; i < group; ++i) {
          const uint32_t head = work.bidb * p.nheads_q + work.tile.bidh * group + i;
          const uint32_t rows = min(kConversionRows, work.seqlen_q - row);
          const uint64_t piece =
              kIsPiece | static_cast<uint64_t>(work.first_q + row) << 32 | head * kConversionRows + rows - 1;
          *const_cast<volatile uint64_t*>(p.conversions.pieces + place + i * count) = piece;
        }
    }
    __syncwarp();
    if (lane == 0) ptx::red_release_add(counters + ConversionQueue::kTilesDone, tiles_here);
  }

  // The piece at this warp's place in the queue, or kNotYet, or kNoMore when there will be none.
  __device__ __forceinline__ uint64_t look(int lane) {
    if (!needed(p)) return kNoMore;
    if (taken < 0) {
      if (lane == 0) taken = atomicAdd(p.conversions.counters + ConversionQueue::kTaken, 1);
      taken = __shfl_sync(kFullWarp, taken, 0);
    }
    uint64_t piece = kNotYet;
    if (lane == 0) {
      const auto read = [&] {
        return taken < p.conversions.capacity ? ptx::load_acquire(p.conversions.pieces + taken) : kNotYet;
      };
      piece = read();
      // Whoever says that the last tile is done has put the last piece into the queue before.
      if (piece == kNotYet &&
          ptx::load_acquire(p.conversions.counters + ConversionQueue::kTilesDone) == tiles) {
        piece = read();
        if (piece == kNotYet) piece = kNoMore;
      }
    }
    const uint32_t low = __shfl_sync(kFullWarp, static_cast<uint32_t>(piece), 0);
    const uint32_t high = __shfl_sync(kFullWarp, static_cast<uint32_t>(piece >> 32), 0);
    return static_cast<uint64_t>(high) << 32 | low;
  }

  // kAtOnce: loads of 16 bytes in flight. between(): called behind each round of them.
  template <int kAtOnce, class Between>
  __device__ __forceinline__ void convert(uint64_t piece, int lane, const Between& between) {
    constexpr int kLanesPerRow = kHeadDim / 4;
    static_assert(kLanesPerRow % kAtOnce == 0, "whole rounds");
    __syncwarp();  // lane 0 has seen that all is there
    taken = -1;
    const uint32_t low = static_cast<uint32_t>(piece);
    const int rows = low % kConversionRows + 1, first = static_cast<int>((piece & ~kIsPiece) >> 32);
    const int bidb = low / kConversionRows / p.nheads_q, head = low / kConversionRows % p.nheads_q;
    const auto* accum = reinterpret_cast<const float4*>(
        p.dq_accum + (bidb * p.lse_batch + head * p.lse_head + first) * kHeadDim);
    auto* dq = static_cast<Element*>(p.dq) + bidb * p.dq_strides.batch + head * p.dq_strides.head +
               first * p.dq_strides.row;
#pragma unroll 1
    for (int round = 0; round < kLanesPerRow * rows; round += kAtOnce * 32) {
      const int begin = round + lane;
      float4 x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        x[j] = begin + j * 32 < kLanesPerRow * rows ? ptx::load_l2_16(accum + begin + j * 32)
                                                    : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int row = (begin + j * 32) / kLanesPerRow;
        int column;
        const uint2 values =
            gather_columns<Element>(column, x[j].x * p.softmax_scale, x[j].y * p.softmax_scale,
                                    x[j].z * p.softmax_scale, x[j].w * p.softmax_scale);
        // In odd rows groups of 16 columns may have changed places, see config.h.
        const int odd = Config::kAlternates ? (first + row) & 1 : 0;
        column += ((begin + j * 32) % kLanesPerRow / 4 ^ odd) * 16;
        if (row < rows && column < p.headdim)
          *reinterpret_cast<uint2*>(dq + row * p.dq_strides.row + column) = values;
      }
      between();
    }
  }

  // Converts until there is nothing left to.
  template <int kAtOnce>
  __device__ __forceinline__ void convert_the_rest(int lane) {
    for (;;) {
      const uint64_t piece = look(lane);
      if (piece == kNoMore) return;
      if (piece == kNotYet) {
        __nanosleep(128);
      } else {
        convert<kAtOnce>(piece, lane, [] {});
      }
    }
  }
};

}  // namespace fa2::sm90
