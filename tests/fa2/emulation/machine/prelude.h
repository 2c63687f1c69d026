// Included before a kernel source: what nvcc would provide to device code, in terms of the machine. The
// sources themselves are translated (translate.py): inline assembly to execute(), launches to launch().
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

#include <cstdint>
#include <cstring>

#include "kernel_scope.h"
#include "launch.h"
#include "ptx.h"

#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#undef __CUDA_ARCH__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // kernels that have such run one block at a time
#define __CUDA_ARCH__ FA2_EMULATED_ARCH

#define cudaLaunchKernelEx ::fa2::emulation::launch_extended

template <class... Parameters>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                        int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline unsigned __float_as_uint(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) {
  return __uint_as_float(static_cast<unsigned>(x));
}
inline int __float_as_int(float x) {
  return static_cast<int>(__float_as_uint(x));
}
inline float __logf(float x) {
  return logf(x);
}
inline float __expf(float x) {
  return expf(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline int __ffs(unsigned x) {
  return __builtin_ffs(static_cast<int>(x));
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __clz(unsigned x) {
  return x == 0 ? 32 : __builtin_clz(x);
}
template <class T>
inline T __ldg(const T* p) {
  return *p;
}

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return fa2::emulation::to_shared(pointer);
}

inline void __syncthreads() {
  fa2::emulation::sync_threads();
}
inline int __syncthreads_or(int vote) {
  return fa2::emulation::sync_threads_or(vote);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  fa2::emulation::shuffle(mask, 0, 0, fa2::emulation::Shuffle::kNone);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {
  fa2::emulation::nanosleep();
}
[[noreturn]] inline void __trap() {
  fa2::emulation::trap();
}

// Shuffles of 32-bit values; all of the warp takes part.
#define FA2_SHUFFLE(name, kind)                                                          \
  template <class T>                                                                     \
  inline T name(unsigned mask, T value, int argument) {                                  \
    static_assert(sizeof(T) == 4);                                                       \
    uint32_t bits;                                                                       \
    std::memcpy(&bits, &value, 4);                                                       \
    bits = fa2::emulation::shuffle(mask, bits, argument, fa2::emulation::Shuffle::kind); \
    std::memcpy(&value, &bits, 4);                                                       \
    return value;                                                                        \
  }
FA2_SHUFFLE(__shfl_sync, kIndex)
FA2_SHUFFLE(__shfl_xor_sync, kXor)
FA2_SHUFFLE(__shfl_up_sync, kUp)
FA2_SHUFFLE(__shfl_down_sync, kDown)
#undef FA2_SHUFFLE

inline unsigned __ballot_sync(unsigned mask, int vote) {
  return fa2::emulation::shuffle(mask, vote != 0, 0, fa2::emulation::Shuffle::kBallot);
}
inline int __any_sync(unsigned mask, int vote) {
  return __ballot_sync(mask, vote) != 0;
}
inline int __all_sync(unsigned mask, int vote) {
  return __ballot_sync(mask, !vote) == 0;
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return static_cast<int>(
      fa2::emulation::shuffle(mask, static_cast<uint32_t>(value), 0, fa2::emulation::Shuffle::kMax));
}

template <class T>
inline T atomicAdd(T* target, T value) {
  fa2::emulation::hesitate();
  const T before = *target;
  *target = before + value;
  return before;
}
template <class T>
inline T atomicMax(T* target, T value) {
  fa2::emulation::hesitate();
  const T before = *target;
  *target = before < value ? value : before;
  return before;
}
template <class T>
inline T atomicExch(T* target, T value) {
  fa2::emulation::hesitate();
  const T before = *target;
  *target = value;
  return before;
}
