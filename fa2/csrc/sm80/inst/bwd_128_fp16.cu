#include "../launch_bwd.cuh"

namespace fa2::sm80 {

FA2_INSTANTIATE_BWD(DType::kFloat16, 128, 163)
FA2_INSTANTIATE_BWD(DType::kFloat16, 128, 99)

}  // namespace fa2::sm80
