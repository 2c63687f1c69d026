#include "../delta.cuh"

namespace fa2::sm80 {

#define FA2_INSTANTIATE(kHeadDim)                                                                 \
  template cudaError_t launch_delta<DType::kFloat16, kHeadDim>(const DeltaParams&, cudaStream_t); \
  template const void* delta_function<DType::kFloat16, kHeadDim>();

FA2_INSTANTIATE(64)
FA2_INSTANTIATE(128)
FA2_INSTANTIATE(256)

}  // namespace fa2::sm80
