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

// delta = rowsum(dout * out), fp32: (batch, nheads, rows), for varlen (nheads, total_q).
struct DeltaParams {
  const void* dout;
  const void* out;
  float* delta;
  // Device address of cu_seqlens_q[-1]: rows at or past it get 0 and are not read. Null for dense.
  const int32_t* rows_end;
  Strides dout_strides, out_strides;
  int batch, rows, nheads, headdim;
};

}  // namespace fa2
