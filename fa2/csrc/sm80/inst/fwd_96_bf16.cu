#include "../launch_fwd.cuh"

namespace fa2::sm80 {

FA2_INSTANTIATE_FWD(DType::kBFloat16, 96, 163)
FA2_INSTANTIATE_FWD(DType::kBFloat16, 96, 99)

}  // namespace fa2::sm80
