#include "../launch_fwd.cuh"

namespace fa2::sm90 {

FA2_INSTANTIATE_FWD(DType::kFloat16, 80)

}  // namespace fa2::sm90
