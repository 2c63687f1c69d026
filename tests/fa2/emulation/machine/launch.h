// Kernel launches: kernel<<<grid, block, shared, stream>>>(arguments) is translated to
// launch(grid, block, shared, stream)(kernel, arguments). What it does, it does later:
// see stream.cpp.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <tuple>

namespace fa2::emulation {

struct launch;

// An error is kept for cudaGetLastError and emulation_error.
cudaError_t launch_grid(const void* function, std::function<void()> kernel, const launch& how);

struct launch {
  dim3 grid, block;
  size_t shared;
  unsigned cluster = 1;  // blocks that run together
  bool early = false;    // may start before the kernel before it has ended
  launch(dim3 grid_, dim3 block_, size_t shared_ = 0, cudaStream_t = nullptr)
      : grid(grid_), block(block_), shared(shared_) {}

  template <class... Parameters, class... Arguments>
  cudaError_t operator()(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    const std::tuple<Parameters...> copies(arguments...);
    return launch_grid(reinterpret_cast<const void*>(kernel), [=] { std::apply(kernel, copies); }, *this);
  }
};

template <class... Parameters, class... Arguments>
cudaError_t launch_extended(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                            const Arguments&... arguments) {
  launch how(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) how.cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      how.early = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  return how(kernel, arguments...);
}

// What the prelude's functions are made of.
enum class Shuffle { kNone, kIndex, kXor, kUp, kDown, kBallot, kMax };
uint32_t shuffle(uint32_t mask, uint32_t value, int argument, Shuffle kind);
uint64_t to_shared(const void* pointer);
void sync_threads();
int sync_threads_or(int vote);
void nanosleep();
void hesitate();
[[noreturn]] void trap();

}  // namespace fa2::emulation
