// What the launches of the sm90 kernels share.
#pragma once
#include "../kernel_launch.cuh"
#include "../ptx/warpgroup.cuh"

namespace fa2::sm90 {

// A kernel that may start while the one before it ends; it waits for that one's results itself. `cluster` of
// its blocks, one after the other, run together.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), int cluster, int64_t blocks, int threads,
                         int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Dense tiles need no list, only the count of those handed out.
static __global__ void reset_handed_out(int32_t* tiles) {
  ptx::let_next_kernel_start();
  tiles[1] = 0;
}

}  // namespace fa2::sm90
