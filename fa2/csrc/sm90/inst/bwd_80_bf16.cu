#include "../launch_bwd.cuh"

namespace fa2::sm90 {

FA2_INSTANTIATE_BWD(DType::kBFloat16, 80)

}  // namespace fa2::sm90
