#include "../launch_fwd.cuh"

namespace fa2::sm80 {

FA2_INSTANTIATE_FWD(DType::kBFloat16, 192, 227)
FA2_INSTANTIATE_FWD(DType::kBFloat16, 192, 163)
FA2_INSTANTIATE_FWD(DType::kBFloat16, 192, 99)

}  // namespace fa2::sm80
