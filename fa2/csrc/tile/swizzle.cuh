// How a tile of 16-bit elements lies in shared memory so that neither its rows nor its columns collide in the
// banks. Pure index arithmetic, host and device (tests check it on the CPU). Read next: tile/fragment.cuh.
#pragma once
#include <cstdint>

namespace fa2 {

// Row-major, kColumns elements a row, cut into chunks of 16 bytes. Chunk c of row r is stored at c ^ x(r):
// * rows of a multiple of 128 bytes: x = r % 8, so eight rows of one chunk fill all 32 banks;
// * rows of an odd multiple of 64 bytes: neighbours are already half a bank cycle apart, x = (r / 2) % 4 does
// the rest.
template <int kColumns>
struct Swizzle {
  static_assert(kColumns % 32 == 0, "a row is a multiple of 64 bytes");
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kMask = kRowBytes % 128 == 0 ? 7 : 3;

  static __host__ __device__ constexpr int row_xor(int row) { return kMask == 7 ? row & 7 : (row >> 1) & 3; }

  // Byte offset of a chunk.
  static __host__ __device__ constexpr int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ row_xor(row)) << 4);
  }

  // From the address of (row, c0) to that of (row + rows, c0 ^ chunks), rows a multiple of 8 and c0, chunks
  // without a common bit (so ^ is +): one xor, and a constant that fits the load's immediate. `address` needs
  // a tile base that is a multiple of 128 bytes.
  static __host__ __device__ constexpr uint32_t advance(uint32_t address, int rows, int chunks) {
    return (address ^ ((chunks & kMask) << 4)) + (chunks & ~kMask) * 16 + rows * kRowBytes;
  }
};

}  // namespace fa2
