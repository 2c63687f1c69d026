// Dispatch is data: one table of the kernels that exist (dispatch.cpp). The look-up, the text of the error
// when nothing fits, and what Python lists as fa2.kernels() all come from it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "params.h"

namespace fa2 {

enum class Op : int { kFwd, kBwd };

constexpr int kAnyLaterSm = 1000;

struct Kernel {
  Op op;
  const char* family;  // the folder it lives in
  DType dtype;
  int max_headdim;     // serves every multiple of 8 up to this
  int min_sm, max_sm;  // compute capability, 10 * major + minor, both inclusive
  int shared_bytes;    // shared memory that the GPU must grant a thread block; the kernel may use less
  cudaError_t (*launch)(const void* params, cudaStream_t stream);
  const void* function;  // the __global__ function: tells whether code for a GPU is there
};

// The kernel of the smallest headdim that fits, the latest family and the largest tiles first; null when
// there is none. shared_bytes is what a thread block may have; family: of this one alone, null for any.
const Kernel* find_kernel(Op op, DType dtype, int headdim, int sm, int shared_bytes, const char* family);

// "no kernel for fwd, float16, headdim 512 on sm_75; have ..."
std::string no_kernel_message(Op op, DType dtype, int headdim, int sm, const char* family);

// The table as JSON, a list of objects.
const std::string& kernels_json();

// Any one kernel that should run on this GPU, null when there is none.
const Kernel* any_kernel(int sm);

}  // namespace fa2
