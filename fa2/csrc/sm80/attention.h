// Host entries of the sm80 attention kernels; inst/ holds the instantiations. kGrantKB: the shared memory
// that a GPU must grant a thread block, which chooses the tiles (config.h).
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace fa2::sm80 {

template <DType kDType, int kHeadDim, int kGrantKB>
cudaError_t launch_fwd(const FwdParams& params, cudaStream_t stream);

template <DType kDType, int kHeadDim, int kGrantKB>
const void* fwd_function();

template <DType kDType, int kHeadDim, int kGrantKB>
cudaError_t launch_bwd(const BwdParams& params, cudaStream_t stream);

template <DType kDType, int kHeadDim, int kGrantKB>
const void* bwd_function();

}  // namespace fa2::sm80
