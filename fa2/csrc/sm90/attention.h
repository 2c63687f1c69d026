// Host entries of the sm90 attention kernels; inst/ holds the instantiations.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace fa2::sm90 {

template <DType kDType, int kHeadDim>
cudaError_t launch_fwd(const FwdParams& params, cudaStream_t stream);

template <DType kDType, int kHeadDim>
const void* fwd_function();

template <DType kDType, int kHeadDim>
cudaError_t launch_bwd(const BwdParams& params, cudaStream_t stream);

template <DType kDType, int kHeadDim>
const void* bwd_function();

}  // namespace fa2::sm90
