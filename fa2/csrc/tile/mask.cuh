// The one definition of which query sees which key, and of the tiles that follow from it.
// Query i sees key j when i + diagonal - left <= j <= i + diagonal + right: aligned to the bottom right
// corner. Host and device: tests compare every count with a brute-force loop. Knows no registers but the
// accumulator's layout.
#pragma once
#include <cmath>

namespace fa2 {

struct BlockRange {
  int first, last;            // blocks [first, last) have something to do
  int full_first, full_last;  // of these, [full_first, full_last) need no mask

  __host__ __device__ bool is_full(int block) const { return block >= full_first && block < full_last; }
};

struct Mask {
  static constexpr int kUnbounded = 1 << 29;  // far beyond any sequence, and three of them still fit an int
  int seqlen_q, seqlen_k, diagonal, left, right;

  __host__ __device__ Mask(int seqlen_q_, int seqlen_k_, int window_left, int window_right)
      : seqlen_q(seqlen_q_),
        seqlen_k(seqlen_k_),
        diagonal(seqlen_k_ - seqlen_q_),
        left(window_left < 0 || window_left > kUnbounded ? kUnbounded : window_left),
        right(window_right < 0 || window_right > kUnbounded ? kUnbounded : window_right) {}

  static __host__ __device__ int at_least_0(int x) { return x > 0 ? x : 0; }
  static __host__ __device__ int min_of(int a, int b) { return a < b ? a : b; }

  // Keys [begin, end) that query i may see; empty when end <= begin.
  __host__ __device__ int key_begin(int i) const { return i + diagonal - left; }
  __host__ __device__ int key_end(int i) const { return min_of(seqlen_k, i + diagonal + right + 1); }

  // The queries before this one see no key, because they lie too far before the first one.
  __host__ __device__ int first_query() const { return at_least_0(-diagonal - right); }

  // Key blocks of kBlockN that queries [i0, i0 + rows) touch.
  template <int kBlockM, int kBlockN>
  __host__ __device__ BlockRange key_blocks(int m_block) const {
    const int i_first = m_block * kBlockM;
    const int i_last = min_of(i_first + kBlockM, seqlen_q) - 1;
    BlockRange range;
    range.first = at_least_0(key_begin(i_first)) / kBlockN;
    range.last = (at_least_0(key_end(i_last)) + kBlockN - 1) / kBlockN;
    range.full_first = (at_least_0(key_begin(i_last)) + kBlockN - 1) / kBlockN;
    range.full_last = at_least_0(key_end(i_first)) / kBlockN;
    return range;
  }

  // Query blocks of kBlockM that touch keys [j0, j0 + columns): the same relation, read the other way.
  // Rows past the end of the sequence need no mask: the backward reads them as zeros.
  template <int kBlockM, int kBlockN>
  __host__ __device__ BlockRange query_blocks(int n_block) const {
    const int j_first = n_block * kBlockN;
    const int j_end = j_first + kBlockN;
    const int j_last = min_of(j_end, seqlen_k) - 1;
    BlockRange range;
    range.first = at_least_0(j_first - diagonal - right) / kBlockM;
    range.last = (at_least_0(min_of(seqlen_q, j_last - diagonal + left + 1)) + kBlockM - 1) / kBlockM;
    // Full: the first row sees the last key, the last row sees the first.
    range.full_first = (at_least_0(j_end - 1 - diagonal - right) + kBlockM - 1) / kBlockM;
    range.full_last = at_least_0(j_first - diagonal + left + 1) / kBlockM;
    if (j_end > seqlen_k) range.full_last = range.full_first;  // the block's tail is no key at all
    return range;
  }

  // Sets hidden scores to `hidden`. (row, column) is what this lane's first element is; tiles as in
  // fragment.cuh. kLeft = false: no row begins after this block's first key, which saves a third of the work.
  template <int kInterleave, bool kLeft = true, int kRowTiles, int kColumnTiles>
  __device__ __forceinline__ void apply(float (&acc)[kRowTiles][kColumnTiles][4], int row, int column,
                                        float hidden) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = row + i * 16 + half * 8;
        const int begin = key_begin(query);
        const unsigned count = at_least_0(key_end(query) - begin);
        const int end = key_end(query) - column;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int offset = (j / 2) * kInterleave * 16 + (j % 2) * 8 + e;
            const bool hides =
                kLeft ? static_cast<unsigned>(column + offset - begin) >= count : offset >= end;
            if (hides) acc[i][j][half * 2 + e] = hidden;
          }
      }
  }

  // The same for scores whose rows are keys and whose columns are queries.
  template <int kInterleave, int kRowInterleave, int kRowTiles, int kColumnTiles>
  __device__ __forceinline__ void apply_transposed(float (&acc)[kRowTiles][kColumnTiles][4], int row,
                                                   int column, float hidden) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = row + i * kRowInterleave * 16 + half * 8;
        const int begin = key - diagonal - right;  // queries [begin, begin + count) see this key
        const unsigned count = key < seqlen_k ? left + right + 1 : 0;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int query = column + (j / 2) * kInterleave * 16 + (j % 2) * 8 + e;
            if (static_cast<unsigned>(query - begin) >= count) acc[i][j][half * 2 + e] = hidden;
          }
      }
  }
};

}  // namespace fa2
