// What the host hands to a kernel, and nothing else: plain structs, no torch, no CUDA headers.
// Offsets are counted in elements and in 64 bits: a tensor may hold more than 2^31 of them.
// Read next: dispatch.h (which kernels exist), sm80/config.h.
#pragma once

#include <cstdint>

namespace fa2 {

enum class DType : int { kFloat16, kBFloat16 };

// Strides of a (batch, row, head, headdim) tensor whose last dimension is contiguous. Varlen has batch 1.
struct Strides {
  int64_t batch, row, head;
};

// One attention problem, forward or backward. Dense: every sequence has seqlen_q queries and seqlen_k keys.
// Varlen: sequence i holds the tokens cu_seqlens[i] to cu_seqlens[i + 1], and tokens past the last one are
// nobody's. Tensors are (batch, row, head, headdim) with strides, fp32 arrays (lse and the like) have
// lse_batch and lse_head.
struct Problem {
  int batch, nheads_q, nheads_kv, headdim;
  int seqlen_q, seqlen_k;       // dense
  int total_q, total_k;         // varlen
  const int32_t* cu_seqlens_q;  // null: dense
  const int32_t* cu_seqlens_k;
  float softmax_scale;
  int window_left, window_right;  // -1: unbounded; causal is (-1, 0)
  int64_t lse_batch, lse_head;
  int32_t* tiles;  // scratch for tile/schedule.cuh: varlen tile_list_size() numbers, dense kTileListHead
};

struct FwdParams : Problem {
  const void *q, *k, *v;
  void* out;
  float* softmax_lse;
  Strides q_strides, k_strides, v_strides, out_strides;
};

// Scratch of a backward that converts dQ's sums to dq itself: what is ready for it. A piece is at most
// kConversionRows rows of one head. numbers: of all that is set to 0 before, from `pieces` on.
struct ConversionQueue {
  enum Counter { kTaken, kReady, kTilesDone, kCounters };
  uint64_t* pieces;   // in the order in which they became ready; 0: not yet
  int32_t* counters;  // behind the pieces; behind these the tiles done of each sequence's key heads
  int64_t capacity, numbers;

  void place(void* scratch) {
    pieces = static_cast<uint64_t*>(scratch);
    counters = reinterpret_cast<int32_t*>(pieces + capacity);
  }
};

struct BwdParams : Problem {
  const void *q, *k, *v, *out, *dout;
  void *dq, *dk, *dv;
  const float* softmax_lse;
  float *lse_log2, *delta;  // scratch, like softmax_lse
  float* dq_accum;          // scratch, like softmax_lse times the kernel's headdim
  int32_t* dq_semaphore;    // deterministic: scratch, semaphores() numbers; else null
  ConversionQueue conversions;
  Strides q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides;
};

// Scratch sizes that serve every kernel: no tile has fewer than kSmallestBlock rows.
constexpr int kSmallestBlock = 32;
constexpr int kTileListHead = 4;
inline int64_t tile_list_size(int64_t total, int64_t batch) {
  return kTileListHead + 2 * (total / kSmallestBlock + batch + 1);
}
inline int64_t semaphores(int64_t tokens, int64_t batch, int64_t nheads) {
  return (tokens / kSmallestBlock + batch + 1) * nheads;
}

constexpr int kConversionRows = 32;
// Not placed yet: it needs 4 bytes for each of its `numbers`.
inline ConversionQueue conversion_queue(int64_t tokens, int64_t batch, int64_t nheads_q, int64_t nheads_kv) {
  const int64_t pieces = (tokens / kConversionRows + batch) * nheads_q;
  // Varlen has one more sequence than the batch.
  const int64_t counters = ConversionQueue::kCounters + (batch + 1) * nheads_kv;
  return {nullptr, nullptr, pieces, 2 * pieces + counters};
}

}  // namespace fa2
