// Tensor maps: what TMA is told about a tensor, made on the host for each call and passed by value.
//
// Five dimensions serve dense and varlen: (headdim, row, head, x, y).
// * dense: x is the batch, y nothing. Rows past the end of a sequence are past the end of the dimension.
// * varlen: a sequence starts and ends anywhere, but TMA clips only at the end of a dimension. So there are
//   kRagged rows, and row i of a sequence of n has the coordinate kRagged - n + i, which is inside exactly
//   when i < n. x = first + n, a row apart, and y = kRagged, minus a row apart (2^64 wraps around), bring the
//   address back: kRagged - n + i + first + n - kRagged = first + i.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "../params.h"

namespace fa2::sm90 {

constexpr int kRagged = 1 << 30;

// cuTensorMapEncodeTiled is the driver's: asked for at run time, because the library links no libcuda.
inline cudaError_t find_encode(PFN_cuTensorMapEncodeTiled_v12000* encode) {
  static std::atomic<PFN_cuTensorMapEncodeTiled_v12000> known{
      nullptr};  // racing threads store the same value
  *encode = known.load(std::memory_order_relaxed);
  if (*encode == nullptr) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorInsufficientDriver;
    *encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    known.store(*encode, std::memory_order_relaxed);
  }
  return cudaSuccess;
}

// A tensor of 16-bit elements, its copies in boxes of box_rows x box_columns. batch < 0: varlen.
struct TensorMapShape {
  int headdim, rows, nheads, batch;
  int box_columns, box_rows;
};

inline cudaError_t make_tensor_map(CUtensorMap* map, const void* base, const Strides& strides,
                                   const TensorMapShape& shape) {
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  const cudaError_t error = find_encode(&encode);
  if (error != cudaSuccess) return error;
  const bool varlen = shape.batch < 0;
  // A dimension of one may have any stride; the map wants a multiple of 16 bytes.
  const auto bytes = [](int64_t stride, int size) -> cuuint64_t { return size == 1 ? 16 : stride * 2; };
  const cuuint64_t row_bytes = bytes(strides.row, shape.rows);
  const cuuint64_t sizes[5] = {
      static_cast<cuuint64_t>(shape.headdim), static_cast<cuuint64_t>(varlen ? kRagged : shape.rows),
      static_cast<cuuint64_t>(shape.nheads), static_cast<cuuint64_t>(varlen ? 0x7fff0000 : shape.batch),
      static_cast<cuuint64_t>(varlen ? 0x7fff0000 : 1)};
  const cuuint64_t gaps[4] = {row_bytes, bytes(strides.head, shape.nheads),
                              varlen ? row_bytes : bytes(strides.batch, shape.batch),
                              varlen ? (cuuint64_t{1} << 34) - row_bytes : 16};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(shape.box_columns),
                             static_cast<cuuint32_t>(shape.box_rows), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  // Elements are moved, never read as numbers: one type serves bf16 and fp16.
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(base), sizes, gaps, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             shape.box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace fa2::sm90
