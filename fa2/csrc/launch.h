// From a table row to a running kernel: the facts about a GPU that are asked once, and launch failures in
// words. Nothing here exits or falls back; api.cpp throws what comes back.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <string>

#include "dispatch.h"

namespace fa2 {

constexpr int kMaxDevices = 64;

// Compute capability, 10 * major + minor; kept after the first call, because a launch asks each time. The
// table is filled with one value from any thread, so relaxed order suffices.
inline cudaError_t compute_capability(int device, int* sm) {
  static std::array<std::atomic<int>, kMaxDevices> known{};
  if (device < kMaxDevices && (*sm = known[device].load(std::memory_order_relaxed)) != 0) return cudaSuccess;
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return error;
  *sm = 10 * major + minor;
  if (device < kMaxDevices) known[device].store(*sm, std::memory_order_relaxed);
  return cudaSuccess;
}

// Shared memory that a thread block may opt in to, in bytes. FA2_MAX_SHARED_BYTES lowers it, so that a large
// GPU can run (and test) the tiles of a small one; read each time, because tests change it.
inline cudaError_t shared_memory_limit(int device, int* bytes) {
  static std::array<std::atomic<int>, kMaxDevices> known{};
  *bytes = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (*bytes == 0) {
    const cudaError_t error = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices) known[device].store(*bytes, std::memory_order_relaxed);
  }
  if (const char* chosen = std::getenv("FA2_MAX_SHARED_BYTES")) *bytes = std::min(*bytes, std::atoi(chosen));
  return cudaSuccess;
}

// A sentence for a failure of the runtime; the two that a user can mend are named.
inline std::string describe(cudaError_t error, int sm) {
  if (error == cudaErrorInsufficientDriver || error == cudaErrorSystemDriverMismatch) {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no NVIDIA driver is loaded";
    const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
    return "the NVIDIA driver must support CUDA " + version(CUDART_VERSION) +
           ", which the extension was built with, got a driver for CUDA " + version(driver);
  }
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidKernelImage) {
    return "the extension holds no code for this GPU (sm_" + std::to_string(sm) +
           "); rebuild it with python -m fa2.build";
  }
  return std::string("CUDA error: ") + cudaGetErrorString(error);
}

// Why no kernel of the extension can run on this device; empty when they can. The device must be current.
inline std::string problem_on(int device) {
  int sm = 0;
  cudaError_t error = compute_capability(device, &sm);
  if (error != cudaSuccess) return describe(error, sm);
  const Kernel* kernel = any_kernel(sm);
  if (kernel == nullptr)
    return "the GPU must be of compute capability 8.0 or later, got sm_" + std::to_string(sm);
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kernel->function);
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // the failure is reported here and must not surface in somebody else's next call
  return describe(error, sm);
}

}  // namespace fa2
