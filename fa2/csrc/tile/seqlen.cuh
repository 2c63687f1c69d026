// Where one sequence of the batch lies. The only place that turns (sequence, head) into offsets; all of them
// 64-bit. Varlen has one more sequence than the batch: the tokens at or past cu_seqlens[-1]. Queries there
// see no key, and keys no query, so that the ordinary code writes their zeros (and -inf).
#pragma once
#include <cstdint>

#include "../params.h"

namespace fa2 {

struct Sequence {
  int bidb;                  // 0 in varlen: the batch strides of token tensors are then not used
  int64_t first_q, first_k;  // first token, within the batch element
  int seqlen_q, seqlen_k;

  // for_queries: which side's tail the extra sequence is.
  __device__ __forceinline__ Sequence(const Problem& p, int bidb_, bool for_queries) {
    if (p.cu_seqlens_q == nullptr) {
      bidb = bidb_;
      first_q = first_k = 0;
      seqlen_q = p.seqlen_q;
      seqlen_k = p.seqlen_k;
    } else {
      bidb = 0;
      const bool tail = bidb_ == p.batch;
      first_q = p.cu_seqlens_q[bidb_];
      first_k = p.cu_seqlens_k[bidb_];
      seqlen_q = tail ? (for_queries ? p.total_q - static_cast<int>(first_q) : 0)
                      : p.cu_seqlens_q[bidb_ + 1] - static_cast<int>(first_q);
      seqlen_k = tail ? (for_queries ? 0 : p.total_k - static_cast<int>(first_k))
                      : p.cu_seqlens_k[bidb_ + 1] - static_cast<int>(first_k);
    }
  }

  __device__ __forceinline__ int64_t query_offset(const Strides& stride, int head) const {
    return bidb * stride.batch + first_q * stride.row + head * stride.head;
  }
  __device__ __forceinline__ int64_t key_offset(const Strides& stride, int head) const {
    return bidb * stride.batch + first_k * stride.row + head * stride.head;
  }
  // In every fp32 array of one value a query and head: lse, delta, and (times its columns) the dq
  // accumulator.
  __device__ __forceinline__ int64_t row_offset(const Problem& p, int head) const {
    return bidb * p.lse_batch + head * p.lse_head + first_q;
  }
  // A number for this sequence's first query tile such that no two sequences' tiles share one: at most
  // total_q / kBlock + batch + 1 of them in varlen.
  __device__ __forceinline__ int64_t query_tile(const Problem& p, int bidb_, int kBlock) const {
    const int before = p.cu_seqlens_q == nullptr ? (p.seqlen_q + kBlock - 1) / kBlock * bidb_
                                                 : static_cast<int>(first_q) / kBlock + bidb_;
    return before;
  }
};

// The sequence that a token belongs to; batch for those at or past cu_seqlens[batch]. For kernels that go by
// rows.
__device__ __forceinline__ int sequence_of(const int32_t* cu_seqlens, int batch, int token) {
  int first = 0, last = batch;  // the answer lies in [first, last]
  while (first < last) {
    const int middle = (first + last) / 2;
    if (cu_seqlens[middle + 1] > token)
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

}  // namespace fa2
