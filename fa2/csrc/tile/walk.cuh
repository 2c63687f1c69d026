// Which sequences the backward "walks": one thread block takes all their key tiles in turn, in ascending order, so that
// it alone makes their dq and writes it directly. That spares the fp32 accumulator's way through memory, which is most
// of the traffic of short documents. The sums are those of the deterministic mode, bit for bit.
// One rule for the four kernels that must agree on it. Read next: sm80/bwd.cuh.
#pragma once
#include "../params.h"

namespace fa2 {

struct Walk {
  int tile_keys, keys;  // at most so many keys: one tile; several tiles, which the block takes one after the other
  int right;            // the mask's

  __host__ __device__ explicit Walk(const BwdParams& p) : tile_keys(p.walk_tile_keys), keys(p.walk_keys), right(p.window_right) {}

  // Every query must see a key: nobody else writes zeros to dq. Many queries are better shared by several blocks.
  __host__ __device__ bool covers(int seqlen_q, int seqlen_k) const {
    return seqlen_k > 0 && (seqlen_k <= tile_keys || (seqlen_k <= keys && seqlen_q <= 2 * keys)) &&
           (right < 0 || seqlen_q - seqlen_k <= right);
  }

  // The same of the sequence that query token `row` belongs to; never for tokens past the last one.
  __device__ __forceinline__ bool covers_row(const Problem& p, int row) const {
    if (p.cu_seqlens_q == nullptr) return covers(p.seqlen_q, p.seqlen_k);
    int low = 0, high = p.batch;  // the last sequence that starts at or before the row
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.cu_seqlens_q[middle] <= row) low = middle;
      else high = middle - 1;
    }
    return low < p.batch && covers(p.cu_seqlens_q[low + 1] - p.cu_seqlens_q[low],
                                   p.cu_seqlens_k[low + 1] - p.cu_seqlens_k[low]);
  }
};

}  // namespace fa2
