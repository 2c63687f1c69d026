// The CUDA runtime and driver functions that the launches call, and what the prelude's device functions do.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstring>
#include <stdexcept>
#include <unordered_map>

#include "kernel_scope.h"
#include "launch.h"
#include "machine.h"
#include "tensor_map.h"

namespace fa2::emulation {

namespace {
std::string last_error;
std::unordered_map<const void*, int> shared_allowed;  // beyond 48 KB, by kernel

std::string name_of(const void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0 || info.dli_sname == nullptr) return "kernel";
  int status;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  const std::string text = name ? name.get() : info.dli_sname;
  return text.substr(0, text.rfind('('));
}
}  // namespace

void seed_generator();

namespace {
template <class Work>
cudaError_t synchronise(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    last_error = error.what();
    return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}
}  // namespace

cudaError_t launch_grid(const void* function, std::function<void()> kernel, const launch& how) {
  const auto allowed = shared_allowed.find(function);
  const dim3 grid = how.grid, block = how.block;
  if (grid.x == 0 || how.cluster == 0 || how.cluster > 8 || grid.x % how.cluster != 0 || block.x == 0 ||
      block.x > 1024 || grid.y * grid.z * block.y * block.z != 1 ||
      how.shared > (allowed == shared_allowed.end() ? 48u * 1024 : static_cast<size_t>(allowed->second))) {
    last_error = name_of(function) + ": grid, block or shared memory is not possible";
    return cudaErrorInvalidConfiguration;
  }
  const auto run = [=, kernel = std::move(kernel)] {
    try {
      run_grid(kernel, grid, block, how.shared, how.cluster);
    } catch (const std::exception& error) {
      throw std::runtime_error(name_of(function) + ": " + error.what());
    }
  };
  return synchronise([&] { launch_in_order(run, how.early); });
}

// One lane's part in a shuffle.
struct Lane {
  uint32_t value;
  int argument;
  uint32_t result;
};

uint32_t shuffle(uint32_t mask, uint32_t value, int argument, Shuffle kind) {
  static const char at[8] = {};  // each kind is an instruction
  if (mask != kFullWarp) fail("shuffles of a part of a warp are not emulated");
  Lane mine{value, argument, 0};
  together(&at[static_cast<int>(kind)], "a shuffle or __syncwarp", &mine, [&](Warp& warp) {
    const auto lane = [&](int i) -> Lane& { return *static_cast<Lane*>(warp.arguments[i]); };
    uint32_t votes = 0;
    int32_t largest = static_cast<int32_t>(mine.value);
    for (int i = 0; i < 32; ++i)
      if (warp.lanes >> i & 1) {
        votes |= (lane(i).value != 0) << i;
        largest = std::max(largest, static_cast<int32_t>(lane(i).value));
      }
    for (int i = 0; i < 32; ++i) {
      if (!(warp.lanes >> i & 1)) continue;
      Lane& its = lane(i);
      const int source = kind == Shuffle::kIndex  ? its.argument & 31
                         : kind == Shuffle::kXor  ? i ^ its.argument
                         : kind == Shuffle::kUp   ? i - its.argument
                         : kind == Shuffle::kDown ? i + its.argument
                                                  : i;
      const bool exists = source >= 0 && source < 32 && (warp.lanes >> source & 1);
      its.result = kind == Shuffle::kBallot ? votes
                   : kind == Shuffle::kMax  ? static_cast<uint32_t>(largest)
                                            : lane(exists ? source : i).value;
    }
  });
  return mine.result;
}

uint64_t to_shared(const void* pointer) {
  const Block& block = *current().block;
  const auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte < block.shared || byte >= block.shared + block.shared_bytes)
    fail("a pointer outside of shared memory");
  return kSharedBase + static_cast<uint64_t>(byte - block.shared);
}

void sync_threads() {
  barrier(0, -1, true);
}

int sync_threads_or(int vote) {
  Block& block = *current().block;
  block.or_votes |= vote != 0;
  barrier(0, -1, true);
  const int result = block.or_votes;
  barrier(0, -1, true);  // all have read it
  block.or_votes = 0;
  barrier(0, -1, true);  // before the next votes
  return result;
}

void nanosleep() {
  poll();
}

void trap() {
  fail("trap");
}

namespace {

// cuTensorMapEncodeTiled with the constraints that the driver states.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap result = {};
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      result.element_bytes = 2;
      break;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      result.is_float = 1;
      [[fallthrough]];
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
      result.element_bytes = 4;
      break;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      result.swizzle_bytes = 16;
      break;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      result.swizzle_bytes = 32;
      break;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      result.swizzle_bytes = 64;
      break;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      result.swizzle_bytes = 128;
      break;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  bool valid = rank >= 1 && rank <= 5 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
               fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && reinterpret_cast<uintptr_t>(map) % 64 == 0 &&
               reinterpret_cast<uintptr_t>(base) % 16 == 0;
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t inner_bytes = uint64_t{box[0]} * result.element_bytes;
  valid = inner_bytes % 16 == 0 && (result.swizzle_bytes == 16 || inner_bytes <= result.swizzle_bytes);
  for (cuuint32_t d = 0; d < rank; ++d) {
    valid = valid && sizes[d] >= 1 && sizes[d] <= uint64_t{1} << 32 && box[d] >= 1 && box[d] <= 256 &&
            steps[d] == 1;
    result.last[d] = static_cast<uint32_t>(sizes[d] - 1);
    result.box[d] = static_cast<uint16_t>(box[d]);
    if (d == 0) continue;
    valid = valid && strides[d - 1] % 16 == 0 && strides[d - 1] < uint64_t{1} << 40;
    result.strides[d - 1] = strides[d - 1];
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  result.magic = TensorMap::kMagic;
  result.base = reinterpret_cast<uint64_t>(base);
  result.rank = static_cast<uint8_t>(rank);
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &result, sizeof result);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace fa2::emulation

using namespace fa2::emulation;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = options.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedLimit;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > kSharedLimit) return cudaErrorInvalidValue;
  shared_allowed[function] = value;
  return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
  return last_error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  const cudaError_t error = synchronise(finish_launches);
  std::memset(target, value, bytes);
  return error;
}

static cudaError_t find_function(const char* name, void** function, cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  if (known) *function = reinterpret_cast<void*>(&encode_tiled);
  if (found != nullptr) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

#undef cudaGetDriverEntryPoint
#undef cudaGetDriverEntryPointByVersion
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  return find_function(name, function, found);
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
  return find_function(name, function, found);
}

// --- for entry.cpp's caller

void emulation_start(uint64_t seed, int policy, int multiprocessors) {
  options = {seed, static_cast<Policy>(policy), multiprocessors};
  last_error.clear();
  forget_global();
  seed_generator();
}

void emulation_allow(const void* pointer, uint64_t bytes) {
  allow_global(pointer, bytes);
}

int emulation_finish() {
  return synchronise(finish_launches);
}

const char* emulation_error() {
  return last_error.c_str();
}
}
