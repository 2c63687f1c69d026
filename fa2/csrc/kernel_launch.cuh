// What all launches share. Every failure is returned; api.cpp throws it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "params.h"

namespace fa2 {

template <DType kDType>
using Element = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Beyond 48 KB a kernel must opt in to its dynamic shared memory, once per device.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int bytes, std::atomic<uint64_t>& devices) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (error != cudaSuccess || (device < 64 && (devices.load(std::memory_order_relaxed) & bit))) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < 64) devices.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Of the current device; kept after the first call.
inline cudaError_t multiprocessors(int* count) {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int>, kMaxDevices> known{};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kMaxDevices && (*count = known[device].load(std::memory_order_relaxed)) != 0)
    return cudaSuccess;
  error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && device < kMaxDevices) known[device].store(*count, std::memory_order_relaxed);
  return error;
}

// A flat grid: batch * nheads may exceed the 65535 of gridDim.y. Nothing to do is no launch.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace fa2
