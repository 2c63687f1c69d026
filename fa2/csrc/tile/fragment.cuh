// One warp's matrix operands in shared memory and its products of 16x16x16 blocks.
// An accumulator is float acc[kRowTiles][kColumnTiles][4]: tiles of 16 rows x 8 columns; lane l holds, of
// rows l / 4 and l / 4 + 8, the columns 2 * (l % 4) and the next:
// {(r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1)}.
// When kWarps share the columns of a product, each takes every kWarps-th group of 16 ("interleaved"):
// any headdim that is a multiple of 16 * kWarps then divides evenly, and the swizzle stays one xor.
#pragma once
#include <cstdint>

#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/shared.cuh"
#include "swizzle.cuh"

namespace fa2 {

enum class Role { kA, kB };

// A matrix operand in a swizzled tile of kColumns per row. kA is M x K, kB is N x K; "outer" is M or N.
// kTransposed: the tile is stored [K][outer] instead of [outer][K].
template <Role kRole, int kColumns, bool kTransposed>
struct Operand {
  using Tile = Swizzle<kColumns>;
  uint32_t lane_address;
  uint32_t constant = 0;

  // tile_base: shared address of the tile; (row, column): the warp's corner in it, multiples of 16.
  __device__ __forceinline__ Operand(uint32_t tile_base, int row, int column) {
    const int lane = threadIdx.x % 32;
    // The four 8x8 matrices of a block in the order in which mma wants them: A goes down first, B along K
    // first.
    constexpr bool kDownFirst = (kRole == Role::kA) != kTransposed;
    const int lane_row = kDownFirst ? lane % 16 : lane % 8 + (lane / 16) * 8;
    const int lane_chunk = kDownFirst ? lane / 16 : (lane / 8) % 2;
    lane_address = tile_base + Tile::offset(row + lane_row, column / 8 + lane_chunk);
  }

  // The same corner of another tile, a compile-time constant of bytes further: the lane addresses are shared.
  __device__ __forceinline__ Operand shifted(int bytes) const {
    Operand other = *this;
    other.constant = constant + bytes;
    return other;
  }

  // The corner moved from the group of 16 columns g to g ^ `groups`: one xor, as the swizzle is. For tiles
  // that are not transposed, and less than 64 columns.
  __device__ __forceinline__ Operand exchanged(int groups) const {
    Operand other = *this;
    other.lane_address = lane_address ^ (groups << 5);
    return other;
  }

  // The 16x16 block at (outer, k) from the corner; compile-time constants after unrolling.
  __device__ __forceinline__ void load(uint32_t (&r)[4], int outer, int k, uint32_t stage_offset = 0) const {
    const uint32_t address = lane_address + stage_offset;
    if constexpr (kTransposed) {
      ptx::ldmatrix_x4_trans(r, Tile::advance(address, k, outer / 8) + constant);
    } else {
      ptx::ldmatrix_x4(r, Tile::advance(address, outer, k / 8) + constant);
    }
  }
};

// acc += A * B^T over kSteps groups of 16 of K, kStepStride apart, both from shared memory. B's groups of 16
// are kInterleave groups apart, the first is number kFirst; A's groups are kRowInterleave apart, and
// kUsedRows of them are taken (0: as many as acc has).
template <class Element, int kSteps, int kInterleave, int kFirst = 0, int kRowInterleave = 1,
          int kUsedRows = 0, int kStepStride = 1, int kRowTiles, int kColumnTiles, class A, class B>
__device__ __forceinline__ void gemm(float (&acc)[kRowTiles][kColumnTiles][4], const A& a, uint32_t a_offset,
                                     const B& b, uint32_t b_offset) {
  constexpr int kRows = kUsedRows == 0 ? kRowTiles : kUsedRows;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int k = step * kStepStride * 16;
    uint32_t a_frag[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) a.load(a_frag[i], i * kRowInterleave * 16, k, a_offset);
#pragma unroll
    for (int j = 0; j < kColumnTiles / 2; ++j) {
      uint32_t b_frag[4];
      b.load(b_frag, (kFirst + j) * kInterleave * 16, k, b_offset);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::mma_m16n8k16<Element>(acc[i][2 * j], a_frag[i], b_frag[0], b_frag[1]);
        ptx::mma_m16n8k16<Element>(acc[i][2 * j + 1], a_frag[i], b_frag[2], b_frag[3]);
      }
    }
  }
}

// The same with A in registers: the packed accumulator of an earlier product, whose layout is A's operand
// layout. acc may have more rows than A.
template <class Element, int kInterleave = 1, int kStepStride = 1, int kSteps, int kUsedRows, int kRowTiles,
          int kColumnTiles, class B>
__device__ __forceinline__ void gemm(float (&acc)[kRowTiles][kColumnTiles][4],
                                     const uint32_t (&a_frag)[kUsedRows][kSteps][4], const B& b,
                                     uint32_t b_offset) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int j = 0; j < kColumnTiles / 2; ++j) {
      uint32_t b_frag[4];
      b.load(b_frag, j * kInterleave * 16, step * kStepStride * 16, b_offset);
#pragma unroll
      for (int i = 0; i < kUsedRows; ++i) {
        ptx::mma_m16n8k16<Element>(acc[i][2 * j], a_frag[i][step], b_frag[0], b_frag[1]);
        ptx::mma_m16n8k16<Element>(acc[i][2 * j + 1], a_frag[i][step], b_frag[2], b_frag[3]);
      }
    }
  }
}

template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void clear(float (&acc)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.f;
}

// Rounds an accumulator to A operands: two tiles of 8 columns make one step of 16.
template <class Element, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void to_operand(uint32_t (&a_frag)[kRowTiles][kColumnTiles / 2][4],
                                           const float (&acc)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a_frag[i][j / 2][(j % 2) * 2 + half] =
            ptx::pack<Element>(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
}

// Rounds an accumulator into a swizzled tile, the warp's corner at (row, column). Free of bank conflicts.
template <class Element, int kColumns, int kInterleave, int kRowInterleave = 1, int kRowTiles,
          int kColumnTiles>
__device__ __forceinline__ void store_shared(uint32_t tile_base, int row, int column,
                                             const float (&acc)[kRowTiles][kColumnTiles][4]) {
  using Tile = Swizzle<kColumns>;
  const int lane = threadIdx.x % 32;
  const uint32_t lane_address = tile_base + Tile::offset(row + lane / 4, column / 8) + (lane % 4) * 4;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunks = (j / 2) * kInterleave * 2 + j % 2;
        const uint32_t address = Tile::advance(lane_address, i * kRowInterleave * 16 + half * 8, chunks);
        ptx::store_shared_4(address, ptx::pack<Element>(acc[i][j][2 * half], acc[i][j][2 * half + 1]));
      }
}

// The same from an accumulator that to_operand has rounded already.
template <int kColumns, int kInterleave, int kRowInterleave, int kRowTiles, int kSteps>
__device__ __forceinline__ void store_shared(uint32_t tile_base, int row, int column,
                                             const uint32_t (&a_frag)[kRowTiles][kSteps][4]) {
  using Tile = Swizzle<kColumns>;
  const int lane = threadIdx.x % 32;
  const uint32_t lane_address = tile_base + Tile::offset(row + lane / 4, column / 8) + (lane % 4) * 4;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kSteps * 2; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::store_shared_4(Tile::advance(lane_address, i * kRowInterleave * 16 + half * 8,
                                          (j / 2) * kInterleave * 2 + j % 2),
                            a_frag[i][j / 2][(j % 2) * 2 + half]);
}

// One row's 16 columns, as the four lanes of a quad hold them in two accumulator tiles (2t, 2t + 1 and 8 +
// 2t, 9 + 2t), rounded: every lane gets four columns that lie side by side, from `column` on.
template <class Element>
__device__ __forceinline__ uint2 gather_columns(int& column, float x0, float x1, float x2, float x3) {
  const int t = threadIdx.x % 4;
  const uint32_t low = ptx::pack<Element>(x0, x1), high = ptx::pack<Element>(x2, x3);
  const uint32_t other = __shfl_xor_sync(0xffffffffu, t % 2 ? low : high, 1);
  column = t % 2 ? t * 2 + 6 : t * 2;
  return t % 2 ? make_uint2(other, high) : make_uint2(low, other);
}

}  // namespace fa2
