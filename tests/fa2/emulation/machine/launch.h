// Kernel launches: kernel<<<grid, block, shared, stream>>>(arguments) is translated to
// launch(grid, block, shared, stream)(kernel, arguments). A launch has ended when it returns.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

namespace fa2::emulation {

// Runs the grid; an error is kept for cudaGetLastError and emulation_error.
cudaError_t launch_grid(const void* function, const std::function<void()>& kernel, dim3 grid, dim3 block,
                        size_t shared, unsigned cluster);

struct launch {
  dim3 grid, block;
  size_t shared;
  unsigned cluster = 1;  // blocks that run together
  launch(dim3 grid_, dim3 block_, size_t shared_ = 0, cudaStream_t = nullptr)
      : grid(grid_), block(block_), shared(shared_) {}

  template <class... Parameters, class... Arguments>
  cudaError_t operator()(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    return launch_grid(
        reinterpret_cast<const void*>(kernel), [&] { kernel(static_cast<Parameters>(arguments)...); }, grid,
        block, shared, cluster);
  }
};

template <class... Parameters, class... Arguments>
cudaError_t launch_extended(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                            const Arguments&... arguments) {
  launch call(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      call.cluster = config->attrs[i].val.clusterDim.x;
  return call(kernel, arguments...);
}

// What the prelude's functions are made of.
enum class Shuffle { kNone, kIndex, kXor, kUp, kDown, kBallot, kMax };
uint32_t shuffle(uint32_t mask, uint32_t value, int argument, Shuffle kind);
uint64_t to_shared(const void* pointer);
void sync_threads();
int sync_threads_or(int vote);
void nanosleep();
[[noreturn]] void trap();

}  // namespace fa2::emulation
