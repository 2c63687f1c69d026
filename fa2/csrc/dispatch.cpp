// The table of all kernels, and what is derived from it. A new kernel is one row here.
#include "dispatch.h"

#include <cstring>
#include <sstream>
#include <tuple>
#include <vector>

#ifdef FA2_SM80
#include "sm80/attention.h"
#include "sm80/config.h"
#endif
#ifdef FA2_SM90
#include "sm90/attention.h"
#endif

namespace fa2 {
namespace {

// The table holds one type of entry; the parameters' real type is fixed where the row is written.
template <typename Params, cudaError_t (*kLaunch)(const Params&, cudaStream_t)>
cudaError_t erased(const void* params, cudaStream_t stream) {
  return kLaunch(*static_cast<const Params*>(params), stream);
}

#ifdef FA2_SM80
template <DType kDType, int kHeadDim, int kGrantKB>
Kernel fwd_row() {
  return {Op::kFwd,
          "sm80",
          kDType,
          kHeadDim,
          80,
          kAnyLaterSm,
          kGrantKB * 1024,
          erased<FwdParams, sm80::launch_fwd<kDType, kHeadDim, kGrantKB>>,
          sm80::fwd_function<kDType, kHeadDim, kGrantKB>()};
}

template <DType kDType, int kHeadDim, int kGrantKB>
Kernel bwd_row() {
  return {Op::kBwd,
          "sm80",
          kDType,
          kHeadDim,
          80,
          kAnyLaterSm,
          kGrantKB * 1024,
          erased<BwdParams, sm80::launch_bwd<kDType, kHeadDim, kGrantKB>>,
          sm80::bwd_function<kDType, kHeadDim, kGrantKB>()};
}

template <DType kDType, int... kHeadDims>
void append_attention(std::vector<Kernel>& kernels) {
  for (const Kernel& row : {fwd_row<kDType, kHeadDims, 163>()..., fwd_row<kDType, kHeadDims, 99>()...,
                            bwd_row<kDType, kHeadDims, 163>()..., bwd_row<kDType, kHeadDims, 99>()...,
                            fwd_row<kDType, 192, 227>(), bwd_row<kDType, 192, 227>(),
                            fwd_row<kDType, 256, 227>(), bwd_row<kDType, 256, 227>()})
    kernels.push_back(row);
}
#endif

#ifdef FA2_SM90
template <DType kDType, int kHeadDim, typename Params, cudaError_t (*kLaunch)(const Params&, cudaStream_t)>
Kernel hopper_row(Op op, const void* function) {
  return {op, "sm90", kDType, kHeadDim, 90, 90, 227 * 1024, erased<Params, kLaunch>, function};
}

template <DType kDType, int kHeadDim>
Kernel hopper_fwd_row() {
  return hopper_row<kDType, kHeadDim, FwdParams, sm90::launch_fwd<kDType, kHeadDim>>(
      Op::kFwd, sm90::fwd_function<kDType, kHeadDim>());
}

template <DType kDType, int kHeadDim>
Kernel hopper_bwd_row() {
  return hopper_row<kDType, kHeadDim, BwdParams, sm90::launch_bwd<kDType, kHeadDim>>(
      Op::kBwd, sm90::bwd_function<kDType, kHeadDim>());
}

template <DType kDType, int... kHeadDims>
void append_hopper(std::vector<Kernel>& kernels) {
  for (const Kernel& row : {hopper_fwd_row<kDType, kHeadDims>()..., hopper_bwd_row<kDType, kHeadDims>()...})
    kernels.push_back(row);
}
#endif

std::vector<Kernel> make_table() {
  std::vector<Kernel> kernels;
#ifdef FA2_SM90
  append_hopper<DType::kFloat16, 64, 80, 96, 128, 192, 256>(kernels);
  append_hopper<DType::kBFloat16, 64, 80, 96, 128, 192, 256>(kernels);
#endif
#ifdef FA2_SM80
  append_attention<DType::kFloat16, 64, 96, 128, 192, 256>(kernels);
  append_attention<DType::kBFloat16, 64, 96, 128, 192, 256>(kernels);
#endif
  return kernels;
}

const std::vector<Kernel>& table() {
  static const std::vector<Kernel> kernels = make_table();
  return kernels;
}

const char* name(Op op) {
  switch (op) {
    case Op::kFwd:
      return "fwd";
    case Op::kBwd:
      return "bwd";
  }
  return "?";
}

const char* name(DType dtype) {
  return dtype == DType::kFloat16 ? "float16" : "bfloat16";
}

bool runs_on(const Kernel& kernel, int sm) {
  return kernel.min_sm <= sm && sm <= kernel.max_sm;
}

}  // namespace

const Kernel* find_kernel(Op op, DType dtype, int headdim, int sm, int shared_bytes, const char* family) {
  const Kernel* best = nullptr;
  for (const Kernel& kernel : table()) {
    if (family != nullptr && std::strcmp(kernel.family, family) != 0) continue;
    if (kernel.op != op || kernel.dtype != dtype || kernel.max_headdim < headdim || !runs_on(kernel, sm) ||
        kernel.shared_bytes > shared_bytes)
      continue;
    const auto rank = [](const Kernel& k) {
      return std::make_tuple(-k.min_sm, k.max_headdim, -k.shared_bytes);
    };
    if (best == nullptr || rank(kernel) < rank(*best)) best = &kernel;
  }
  return best;
}

std::string no_kernel_message(Op op, DType dtype, int headdim, int sm, const char* family) {
  std::ostringstream text;
  text << "no kernel for " << name(op) << ", " << name(dtype) << ", headdim " << headdim << " on sm_" << sm;
  if (family != nullptr) text << " in family " << family << ", which FA2_ARCH asks for";
  text << "; have ";
  const char* separator = "";
  for (const Kernel& kernel : table()) {
    if (kernel.op != op) continue;
    text << separator << kernel.family << " " << name(kernel.dtype) << " headdim <= " << kernel.max_headdim;
    text << " on sm_" << kernel.min_sm << (kernel.max_sm == kernel.min_sm ? "" : " and later");
    separator = ", ";
  }
  if (*separator == '\0') text << "none of this operator";
  return text.str();
}

const std::string& kernels_json() {
  static const std::string json = [] {
    std::ostringstream text;
    const char* separator = "";
    text << "[";
    for (const Kernel& kernel : table()) {
      text << separator << "{\"op\": \"" << name(kernel.op) << "\", \"family\": \"" << kernel.family
           << "\", \"dtype\": \"" << name(kernel.dtype) << "\", \"max_headdim\": " << kernel.max_headdim
           << ", \"shared_bytes\": " << kernel.shared_bytes << ", \"min_sm\": " << kernel.min_sm
           << ", \"max_sm\": " << kernel.max_sm << "}";
      separator = ", ";
    }
    text << "]";
    return text.str();
  }();
  return json;
}

const Kernel* any_kernel(int sm) {
  const Kernel* best = nullptr;
  for (const Kernel& kernel : table()) {
    if (runs_on(kernel, sm) && (best == nullptr || kernel.min_sm > best->min_sm)) best = &kernel;
  }
  return best;
}

}  // namespace fa2
