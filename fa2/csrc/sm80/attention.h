// Host entries of the sm80 attention kernels; inst/ holds the instantiations. kSmall: the tiles for GPUs that give a
// thread block 99 KB of shared memory (config.h).
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace fa2::sm80 {

template <DType kDType, int kHeadDim, bool kSmall>
cudaError_t launch_fwd(const FwdParams& params, cudaStream_t stream);

template <DType kDType, int kHeadDim, bool kSmall>
const void* fwd_function();

template <DType kDType, int kHeadDim, bool kSmall>
cudaError_t launch_bwd(const BwdParams& params, cudaStream_t stream);

template <DType kDType, int kHeadDim, bool kSmall>
const void* bwd_function();

}  // namespace fa2::sm80
