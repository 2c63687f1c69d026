// Tiles of rows between global and shared memory. The only place that knows which thread moves which 16
// bytes. Rows past the end of a sequence and columns past the headdim arrive as zeros and are never written:
// a neighbour's rows (and a NaN in them) are not read at all. Read next: sm80/fwd.cuh.
#pragma once
#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/shared.cuh"
#include "swizzle.cuh"

namespace fa2 {

template <int kRows, int kColumns, int kThreads>
struct TileCopy {
  using Tile = Swizzle<kColumns>;
  static constexpr int kThreadsPerRow = Tile::kMask + 1;  // 128 or 64 contiguous bytes of global memory
  static constexpr int kChunkSteps = Tile::kChunks / kThreadsPerRow;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kRows % kRowsPerPass == 0, "every thread moves the same number of rows");
  static_assert(kRowsPerPass % 8 == 0, "a thread's rows share one swizzle");

  int row, chunk;
  uint32_t shared_offset;

  __device__ __forceinline__ TileCopy()
      : row(threadIdx.x / kThreadsPerRow),
        chunk(threadIdx.x % kThreadsPerRow),
        shared_offset(Tile::offset(row, chunk)) {}

  // This thread's first 16 bytes of the tile that starts at `tile`.
  template <class Element>
  __device__ __forceinline__ const Element* source(const Element* tile, int64_t row_stride) const {
    return tile + row * row_stride + chunk * 8;
  }

  // Starts copying; `source` is what source() gave, rows [first_row, rows) and chunks say how much of the
  // tile exists.
  template <class Element>
  __device__ __forceinline__ void load(uint32_t tile_base, const Element* source, int64_t row_stride,
                                       int rows, int chunks, int first_row = 0) const {
    const uint32_t shared = tile_base + shared_offset;
    if (rows >= kRows && chunks == Tile::kChunks && first_row <= 0) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step)
          ptx::cp_async_16(Tile::advance(shared, pass * kRowsPerPass, step * kThreadsPerRow),
                           source + step * kThreadsPerRow * 8);
        source += kRowsPerPass * row_stride;
      }
    } else {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const bool row_exists = row + pass * kRowsPerPass < rows && row + pass * kRowsPerPass >= first_row;
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step)
          ptx::cp_async_16(Tile::advance(shared, pass * kRowsPerPass, step * kThreadsPerRow),
                           source + step * kThreadsPerRow * 8,
                           row_exists && chunk + step * kThreadsPerRow < chunks);
        source += kRowsPerPass * row_stride;
      }
    }
  }

  // Writes the part of the tile that exists.
  template <class Element>
  __device__ __forceinline__ void store(uint32_t tile_base, Element* global, int64_t row_stride, int rows,
                                        int chunks) const {
    const uint32_t shared = tile_base + shared_offset;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int step = 0; step < kChunkSteps; ++step)
        if (row + pass * kRowsPerPass < rows && chunk + step * kThreadsPerRow < chunks)
          *reinterpret_cast<uint4*>(global + (row + pass * kRowsPerPass) * row_stride +
                                    (chunk + step * kThreadsPerRow) * 8) =
              ptx::load_shared_16(Tile::advance(shared, pass * kRowsPerPass, step * kThreadsPerRow));
  }
};

}  // namespace fa2
