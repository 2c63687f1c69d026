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
  BlockRange blocks;

  __device__ __forceinline__ Mask mask(const BwdParams& p) const {
    return Mask(seqlen_q, seqlen_k, p.window_left, p.window_right);
  }
};

// The query blocks of a tile, over all heads of the group, one after the other.
struct QuerySteps {
  int left, head, m_block;
  __device__ __forceinline__ QuerySteps(const BwdWork& work, int group)
      : left(work.steps), head(work.tile.bidh * group), m_block(work.blocks.first) {}
  __device__ __forceinline__ void next(const BwdWork& work) {
    --left;
    if (++m_block == work.blocks.last) m_block = work.blocks.first, ++head;
  }
};

// Whether one key block alone sees these queries: it writes their dq.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ bool writes_dq(const Mask& mask, int m_block, BlockRange* keys) {
  *keys = mask.key_blocks<kBlockM, kBlockN>(m_block);
  return keys->last - keys->first == 1;
}

// Decodes tile `index` of those that the device hands out; block < 0 past the last one. `heads`: of so many
// key heads the tiles alternate.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ BwdWork decode(const BwdParams& p, int index, int heads) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int blocks = (p.seqlen_k + kBlockN - 1) / kBlockN;
  const int count = varlen ? p.tiles[0] * p.nheads_kv : p.batch * p.nheads_kv * blocks;
  BwdWork work;
  work.tile.block = -1;
  if (index >= count) return work;
  find_tile(work.tile, index, p, p.nheads_kv, blocks, false, heads);
  const Sequence sequence(p, work.tile.bidb, false);
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right);
  work.bidb = sequence.bidb;
  work.unseeing = min(mask.first_query(), sequence.seqlen_q);
  work.first_q = static_cast<int>(sequence.first_q) + work.unseeing;
  work.first_k = static_cast<int>(sequence.first_k);
  work.seqlen_q = sequence.seqlen_q - work.unseeing;
  work.seqlen_k = sequence.seqlen_k;
  work.first_turn = static_cast<int>(sequence.query_tile(p, work.tile.bidb, kBlockM));
  work.blocks = work.mask(p).template query_blocks<kBlockM, kBlockN>(work.tile.block);
  work.steps = p.nheads_q / p.nheads_kv * max(0, work.blocks.last - work.blocks.first);
  return work;
}

// As in the forward: few heads side by side, so that what all their tiles read and add to stays in L2.
__device__ __forceinline__ int heads_side_by_side(const BwdArguments& a) {
  const BwdParams& p = a.p;
  const bool varlen = p.cu_seqlens_q != nullptr;
  if (!varlen && p.window_left < 0 && p.window_right < 0) return 1;  // all tiles are alike
  constexpr float kL2_bytes = 32 << 20;
  const float fitting = kL2_bytes / (a.query_bytes * max(1, varlen ? p.tiles[2] : p.seqlen_q));
  const int all_heads = varlen ? p.nheads_kv : p.batch * p.nheads_kv;
  return max(1, static_cast<int>(fminf(fitting, all_heads)));
}

// A warp's share of a query block's lse and delta. They begin anywhere, so that no bulk copy can bring them.
template <int kBlockM>
struct RowValues {
  float lse_log2[kBlockM / 32], delta[kBlockM / 32];

  __device__ __forceinline__ RowValues(const BwdParams& p, const BwdWork& work, const QuerySteps& steps,
                                       int lane) {
    const int64_t first = work.bidb * p.lse_batch + steps.head * p.lse_head + work.first_q;
#pragma unroll
    for (int i = 0; i < kBlockM / 32; ++i) {
      const int row = steps.m_block * kBlockM + i * 32 + lane;
      // Past the end: probabilities of 0.
      lse_log2[i] = row < work.seqlen_q ? p.lse_log2[first + row] : INFINITY;
      delta[i] = row < work.seqlen_q ? p.delta[first + row] : 0.f;
    }
  }
  __device__ __forceinline__ void store(uint32_t shared_lse, uint32_t shared_delta, int lane) const {
#pragma unroll
    for (int i = 0; i < kBlockM / 32; ++i) {
      ptx::store_shared_4(shared_lse + (i * 32 + lane) * 4, __float_as_uint(lse_log2[i]));
      ptx::store_shared_4(shared_delta + (i * 32 + lane) * 4, __float_as_uint(delta[i]));
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
  __device__ __forceinline__ operator uint64_t() const {
    return (ptx::shared_matrix<kRow_bytes>(0, 0) & ~uint64_t{0xffffffff}) | low;
  }
};

// Starts S or dP (64 keys x kQueries) = a (64 x 16 kProducts) * b^T, both as they lie: tiles of kKeys and
// kQueries rows.
template <class Element, class Slab, int kKeys, int kQueries, int kProducts>
__device__ __forceinline__ void start_scores(float (&acc)[1][kQueries / 8][4],
                                             SharedMatrix<Slab::kRow_bytes> a,
                                             SharedMatrix<Slab::kRow_bytes> b) {
  ptx::wgmma_discard(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kProducts; ++k) {
    constexpr int kSteps = Slab::kWidth / 16;
    const int offset = k % kSteps * 32, slab = k / kSteps;
    ptx::wgmma<Element, false, false>(acc[0], a + (slab * kKeys * Slab::kRow_bytes + offset),
                                      b + (slab * kQueries * Slab::kRow_bytes + offset), k > 0);
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

// P = exp2(S * scale_log2 - lse_log2), in place. lse_log2: shared address of the first, and
// lane % 4 * 8 bytes further.
template <int kColumnTiles>
__device__ __forceinline__ void probabilities(float (&acc_s)[1][kColumnTiles][4], uint32_t lse_log2,
                                              float scale_log2) {
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
    const float2 lse = ptx::load_shared_float2(lse_log2 + j * 32);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& s = acc_s[0][j][e];
      s = ptx::exp2_approx(fmaf(s, scale_log2, -(e % 2 ? lse.y : lse.x)));
    }
  }
}

// dq of a query block that nothing else adds to: kGroups times 16 columns, from `column` on. row: this lane's
// first of the sequence, the other is the eighth after it.
template <class Element, int kGroups, int kColumnTiles>
__device__ __forceinline__ void write_dq(const BwdParams& p, const BwdWork& work, int head, int row,
                                         int column, const float (&acc)[1][kColumnTiles][4]) {
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
      if (row + r * 8 < work.seqlen_q && column + j * 16 + place < p.headdim)
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
