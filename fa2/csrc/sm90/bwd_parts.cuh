// What the two sm90 backward kernels have in common: their arguments, a work tile and its query blocks, and
// how products start. Read next: bwd.cuh (headdim up to 128), bwd_pair.cuh (192 and 256).
#pragma once
#include "../ptx/math.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/mask.cuh"
#include "../tile/scheduler.cuh"
#include "../tile/seqlen.cuh"
#include "config.h"
#include "pipeline.cuh"
#include "tensor_map.h"

namespace fa2::sm90 {

struct BwdArguments {
  BwdParams p;
  CUtensorMap q, k, v, dout, dk, dv;
  float query_bytes;  // of one query, its dO and its dQ, of all the heads that share a key head
};

// A tile of keys. The sequence's queries begin with the first one that sees a key: the rest take no part.
struct BwdWork : Work {
  int unseeing;    // queries left out: first_q lies behind them, seqlen_q is without them
  int first_turn;  // deterministic: number of the sequence's first query block among all
  int steps;       // query blocks, over all heads of the group
  bool upwards;    // in which order they are taken
  BlockRange blocks;

  __device__ __forceinline__ Mask mask(const BwdParams& p) const {
    return Mask(seqlen_q, seqlen_k, p.window_left, p.window_right);
  }
};

// The query blocks of a tile, each with all heads of the group before the next one.
//
// Downwards where several heads share the keys: whatever a mask hides, all tiles then begin at the last
// queries, and those that run at the same time find the group's Q and dO, and the dQ that they add to, in L2.
// Upwards where dQ is summed in turns: causal, a tile begins at its first query, which the later keys' tiles
// have left behind them. (One head alone fits into L2, and upwards is 2% faster.)
struct QuerySteps {
  int left, head, m_block;
  __device__ __forceinline__ QuerySteps(const BwdWork& work, int group)
      : left(work.steps),
        head(work.tile.bidh * group),
        m_block(work.upwards ? work.blocks.first : work.blocks.last - 1) {}
  __device__ __forceinline__ void next(const BwdWork& work, int group) {
    --left;
    if (++head == (work.tile.bidh + 1) * group) head -= group, m_block += work.upwards ? 1 : -1;
  }
};

// Whether one key block alone sees these queries: it writes their dq.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ bool writes_dq(const Mask& mask, int m_block) {
  const BlockRange keys = mask.key_blocks<kBlockM, kBlockN>(m_block);
  return keys.last - keys.first == 1;
}

// Deterministic: how many key blocks have added to a query block's dQ is counted in dq_semaphore.
__device__ __forceinline__ int* turn_counter(const BwdParams& p, const BwdWork& work, int m_block, int head) {
  return p.dq_semaphore + (static_cast<int64_t>(work.first_turn) + m_block) * p.nheads_q + head;
}

// And so many do it before this one, see decode().
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int turn_of(const Mask& mask, int m_block, int n_block) {
  return mask.key_blocks<kBlockM, kBlockN>(m_block).last - 1 - n_block;
}

// What the consumers must know of a step. The warp that loads lse and delta decides it, ahead of time, and
// leaves it beside them: to read the tile's own fields in each step would cost their latency each time.
struct BwdStep {
  static constexpr int kMasked = 1, kDirect = 2, kLast = 4, kOddRow = 8, kRowsShift = 8;
  int flags, m_block, head;
  int first_row;  // of the dQ accumulator, lse and delta

  template <int kBlockM, int kBlockN>
  static __device__ __forceinline__ BwdStep of(const BwdParams& p, const BwdWork& work,
                                               const QuerySteps& steps) {
    const int first = steps.m_block * kBlockM;
    BwdStep step;
    step.flags = (work.blocks.is_full(steps.m_block) ? 0 : kMasked) |
                 (writes_dq<kBlockM, kBlockN>(work.mask(p), steps.m_block) ? kDirect : 0) |
                 (steps.left == 1 ? kLast : 0) | ((work.first_q + first) % 2 != 0 ? kOddRow : 0) |
                 min(kBlockM, work.seqlen_q - first) << kRowsShift;
    step.m_block = steps.m_block;
    step.head = steps.head;
    step.first_row =
        static_cast<int>(work.bidb * p.lse_batch + steps.head * p.lse_head + work.first_q + first);
    return step;
  }
  __device__ __forceinline__ bool masked() const { return flags & kMasked; }
  __device__ __forceinline__ bool direct() const { return flags & kDirect; }  // writes_dq
  __device__ __forceinline__ bool last() const { return flags & kLast; }      // of the tile
  // Whether the block begins at an odd row among all tokens.
  __device__ __forceinline__ int odd_row() const { return flags / kOddRow & 1; }
  // Rows of the sequence, in the block.
  __device__ __forceinline__ int rows() const { return flags >> kRowsShift; }

  __device__ __forceinline__ void store(uint32_t shared) const {
    ptx::store_shared_16(shared, __int_as_float(flags), __int_as_float(m_block), __int_as_float(head),
                         __int_as_float(first_row));
  }
  static __device__ __forceinline__ BwdStep load(uint32_t shared) {
    const uint4 words = ptx::load_shared_16(shared);
    return {static_cast<int>(words.x), static_cast<int>(words.y), static_cast<int>(words.z),
            static_cast<int>(words.w)};
  }
};

// In which order the heads' tiles are handed out.
struct HeadOrder {
  int side_by_side;  // so many heads' tiles alternate
  int first_last;    // from this head on all of them

  // As in the forward: few heads side by side, so that what all their tiles read and add to stays in L2. But
  // at the end there must be enough short tiles to fill up behind the long ones. blocks: of key tiles in a
  // head, workers: that take tiles.
  __device__ __forceinline__ HeadOrder(const BwdArguments& a, int blocks, int workers) {
    const BwdParams& p = a.p;
    const bool varlen = p.cu_seqlens_q != nullptr;
    const int all_heads = varlen ? p.nheads_kv : p.batch * p.nheads_kv;
    side_by_side = 1;
    if (varlen || p.window_left >= 0 || p.window_right >= 0) {  // else all tiles are alike
      // A group's tiles go through the queries together, see QuerySteps, so that they need no more.
      const bool together = p.nheads_q > p.nheads_kv && p.dq_semaphore == nullptr;
      const float kL2_bytes = together ? INFINITY : 32 << 20;
      const float fitting = kL2_bytes / (a.query_bytes * max(1, varlen ? p.tiles[2] : p.seqlen_q));
      side_by_side = max(1, static_cast<int>(fminf(fitting, all_heads)));
    }
    const int last = max(side_by_side, (workers + workers / 2 + blocks - 1) / max(1, blocks));
    first_last = max(0, all_heads - last) / side_by_side * side_by_side;
  }
};

// Key tiles of a head.
template <int kBlockN>
__device__ __forceinline__ int blocks_of_a_head(const BwdParams& p) {
  return p.cu_seqlens_q != nullptr ? p.tiles[0] : (p.seqlen_k + kBlockN - 1) / kBlockN;
}

// Decodes tile `index` of those that the device hands out; block < 0 past the last one.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ BwdWork decode(const BwdParams& p, int index, int blocks, const HeadOrder& order) {
  const int all_heads = p.cu_seqlens_q != nullptr ? p.nheads_kv : p.batch * p.nheads_kv;
  BwdWork work;
  work.tile.block = -1;
  if (index >= all_heads * blocks) return work;
  const bool at_the_end = index >= order.first_last * blocks;
  find_tile(work.tile, at_the_end ? index - order.first_last * blocks : index, p, p.nheads_kv, blocks, false,
            at_the_end ? all_heads - order.first_last : order.side_by_side,
            at_the_end ? order.first_last : 0);
  const Sequence sequence(p, work.tile.bidb, false);
  // Key blocks that add to dQ in turn go from the last to the first. Causal: each begins at its first query
  // while the later blocks are already behind it, so that none waits.
  if (p.dq_semaphore != nullptr) work.tile.block = (sequence.seqlen_k - 1) / kBlockN - work.tile.block;
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right);
  work.bidb = sequence.bidb;
  work.unseeing = min(mask.first_query(), sequence.seqlen_q);
  work.first_q = static_cast<int>(sequence.first_q) + work.unseeing;
  work.first_k = static_cast<int>(sequence.first_k);
  work.seqlen_q = sequence.seqlen_q - work.unseeing;
  work.seqlen_k = sequence.seqlen_k;
  work.upwards = p.dq_semaphore != nullptr || p.nheads_q == p.nheads_kv;
  work.first_turn = static_cast<int>(sequence.query_tile(p, work.tile.bidb, kBlockM));
  work.blocks = work.mask(p).template query_blocks<kBlockM, kBlockN>(work.tile.block);
  work.steps = p.nheads_q / p.nheads_kv * max(0, work.blocks.last - work.blocks.first);
  return work;
}

// A warp's share of a query block's lse and -delta. They begin anywhere, so that no bulk copy can bring them.
template <int kBlockM>
struct RowValues {
  float lse_log2[kBlockM / 32], minus_delta[kBlockM / 32];

  __device__ __forceinline__ RowValues(const BwdParams& p, const BwdWork& work, const QuerySteps& steps,
                                       int lane) {
    const int64_t first = work.bidb * p.lse_batch + steps.head * p.lse_head + work.first_q;
#pragma unroll
    for (int i = 0; i < kBlockM / 32; ++i) {
      const int row = steps.m_block * kBlockM + i * 32 + lane;
      // Past the end: probabilities of 0.
      lse_log2[i] = row < work.seqlen_q ? p.lse_log2[first + row] : INFINITY;
      minus_delta[i] = row < work.seqlen_q ? -p.delta[first + row] : 0.f;
    }
  }
  __device__ __forceinline__ void store(uint32_t shared_lse, uint32_t shared_delta, int lane) const {
#pragma unroll
    for (int i = 0; i < kBlockM / 32; ++i) {
      ptx::store_shared_4(shared_lse + (i * 32 + lane) * 4, __float_as_uint(lse_log2[i]));
      ptx::store_shared_4(shared_delta + (i * 32 + lane) * 4, __float_as_uint(minus_delta[i]));
    }
  }
};

// A matrix descriptor of which only the lower half is kept in a register: the upper half is a constant.
template <int kRow_bytes>
struct SharedMatrix {
  uint32_t low;

  __device__ __forceinline__ SharedMatrix(uint32_t address, int across)
      : low(static_cast<uint32_t>(ptx::shared_matrix<kRow_bytes>(address, across))) {}
  // The matrix so many bytes further.
  __device__ __forceinline__ SharedMatrix operator+(int bytes) const {
    SharedMatrix moved = *this;
    moved.low += bytes / 16;
    return moved;
  }
  // The same, made anew: else the compiler makes the descriptors of all of a product's steps before the loop,
  // and spills them.
  __device__ __forceinline__ SharedMatrix made_here() const {
    SharedMatrix matrix = *this;
    ptx::forget(matrix.low);
    return matrix;
  }
  __device__ __forceinline__ operator uint64_t() const {
    return (ptx::shared_matrix<kRow_bytes>(0, 0) & ~uint64_t{0xffffffff}) | low;
  }
};

// Starts S or dP (64 keys x kQueries) = a (64 x 16 kProducts) * b^T, both as they lie: tiles of kKeys and
// kQueries rows. kAdds: it is added to what acc holds.
template <class Element, class Slab, int kKeys, int kQueries, int kProducts, bool kAdds = false>
__device__ __forceinline__ void start_scores(float (&acc)[1][kQueries / 8][4],
                                             SharedMatrix<Slab::kRow_bytes> a,
                                             SharedMatrix<Slab::kRow_bytes> b) {
  if constexpr (kAdds) {
    ptx::wgmma_pin(acc);
  } else {
    ptx::wgmma_discard(acc);
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kProducts; ++k) {
    constexpr int kSteps = Slab::kWidth / 16;
    const int offset = k % kSteps * 32, slab = k / kSteps;
    ptx::wgmma<Element, false, false>(acc[0], a + (slab * kKeys * Slab::kRow_bytes + offset),
                                      b + (slab * kQueries * Slab::kRow_bytes + offset), kAdds || k > 0);
  }
  ptx::wgmma_commit();
}

// Starts dV or dK (64 keys x columns) += a (64 keys x 16 kSteps queries) * b, which lies as [query][column].
template <class Element, class Slab, int kColumnTiles, int kSteps>
__device__ __forceinline__ void start_sum(float (&acc)[1][kColumnTiles][4], uint32_t (&a)[1][kSteps][4],
                                          SharedMatrix<Slab::kRow_bytes> b) {
  ptx::wgmma_pin(acc);
  ptx::wgmma_pin(a);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    ptx::wgmma<Element, true>(acc[0], a[0][k], b + k * 16 * Slab::kRow_bytes, true);
  ptx::wgmma_commit();
}

// Each query's -delta in all of its scores: dP added to it is dP - delta. shared: of this lane's first pair.
template <int kColumnTiles>
__device__ __forceinline__ void begin_with_delta(float (&acc)[1][kColumnTiles][4], uint32_t shared) {
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
    const float2 minus_delta = ptx::load_shared_float2(shared + j * 32);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[0][j][e] = e % 2 ? minus_delta.y : minus_delta.x;
  }
}

// This lane's queries' lse, a pair for each tile of 8 queries. shared: of the first pair.
template <int kColumnTiles>
__device__ __forceinline__ void load_lse(float2 (&lse_log2)[kColumnTiles], uint32_t shared) {
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) lse_log2[j] = ptx::load_shared_float2(shared + j * 32);
}

// P = exp2(S * scale_log2 - lse_log2), in place.
template <int kColumnTiles>
__device__ __forceinline__ void probabilities(float (&acc_s)[1][kColumnTiles][4],
                                              const float2 (&lse_log2)[kColumnTiles], float scale_log2) {
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& s = acc_s[0][j][e];
      s = ptx::exp2_approx(fmaf(s, scale_log2, -(e % 2 ? lse_log2[j].y : lse_log2[j].x)));
    }
}

// The same; shared: as load_lse.
template <int kColumnTiles>
__device__ __forceinline__ void probabilities(float (&acc_s)[1][kColumnTiles][4], uint32_t shared,
                                              float scale_log2) {
  float2 lse_log2[kColumnTiles];
  load_lse(lse_log2, shared);
  probabilities(acc_s, lse_log2, scale_log2);
}

// dq of a query block that nothing else adds to: kGroups times 16 columns, from `column` on and before `end`.
// row: this lane's first of the sequence, the other is the eighth after it.
template <class Element, int kGroups, int kColumnTiles>
__device__ __forceinline__ void write_dq(const BwdParams& p, const BwdWork& work, int head, int row,
                                         int column, int end, const float (&acc)[1][kColumnTiles][4]) {
  auto* const gDq = static_cast<Element*>(p.dq) + work.bidb * p.dq_strides.batch +
                    static_cast<int64_t>(work.first_q + row) * p.dq_strides.row + head * p.dq_strides.head +
                    column;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const float* const left = &acc[0][2 * j][r * 2];
      const float* const right = &acc[0][2 * j + 1][r * 2];
      int place;
      const uint2 values =
          gather_columns<Element>(place, left[0] * p.softmax_scale, left[1] * p.softmax_scale,
                                  right[0] * p.softmax_scale, right[1] * p.softmax_scale);
      if (row + r * 8 < work.seqlen_q && column + j * 16 + place < end)
        *reinterpret_cast<uint2*>(gDq + r * 8 * p.dq_strides.row + j * 16 + place) = values;
    }
}

// dK or dV of 64 keys, times `scale`, rounded, into a tile of kRows in shared memory; row: the warp's first
// there.
template <class Element, class Slab, int kRows, int kColumnTiles>
__device__ __forceinline__ void store_sum(uint32_t tile, int row, const float (&acc)[1][kColumnTiles][4],
                                          float scale) {
  using Tile = Swizzle<Slab::kWidth>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kColumnTiles / 2; ++j) {
    uint32_t frag[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      frag[e] = ptx::pack<Element>(acc[0][2 * j + e / 2][e % 2 * 2] * scale,
                                   acc[0][2 * j + e / 2][e % 2 * 2 + 1] * scale);
    ptx::stmatrix_x4(tile + j * 16 / Slab::kWidth * kRows * Slab::kRow_bytes +
                         Tile::offset(row + lane % 16, j * 16 % Slab::kWidth / 8 + lane / 16),
                     frag);
  }
}

}  // namespace fa2::sm90
