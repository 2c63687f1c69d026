// Host entry of the delta kernel; inst/ holds the instantiations.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace fa2::sm80 {

template <DType kDType, int kHeadDim>
cudaError_t launch_delta(const DeltaParams& params, cudaStream_t stream);

template <DType kDType, int kHeadDim>
const void* delta_function();

}  // namespace fa2::sm80
