// The only file that knows torch: CUDA implementations of the operators whose schemas fa2/ops.py defines,
// through the stable ABI (torch >= 2.11, any Python). It checks tensors, fills params.h's structs and throws
// failures.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "dispatch.h"
#include "launch.h"
#include "params.h"

// CPU builds of torch lack this symbol: weak, so that the library loads there. The link line names
// libtorch_cpu with
// --no-as-needed, otherwise the symbol would stay null on a CUDA build too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace fa2 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string show(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + ")";
}

DType kernel_dtype(const char* argument, const Tensor& x) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Half || type == ScalarType::BFloat16, "fa2: ", argument,
                  " must be float16 or bfloat16, got ", torch::headeronly::toString(type));
  return type == ScalarType::Half ? DType::kFloat16 : DType::kBFloat16;
}

int as_int(const char* argument, int64_t value) {
  STD_TORCH_CHECK(value <= std::numeric_limits<int>::max(), "fa2: ", argument,
                  " must be less than 2^31, got ", value);
  return static_cast<int>(value);
}

// Kernels load 16 bytes at a time: a contiguous last dimension, base and strides multiples of 16 bytes. What
// is not so (a transposed or expanded gradient, an odd storage offset) is copied once.
Tensor vectorizable(const Tensor& x) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  const int64_t last = x.dim() - 1;
  bool ok = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && (sizes[last] == 1 || strides[last] == 1);
  for (int64_t i = 0; i < last; ++i) ok = ok && (sizes[i] == 1 || strides[i] % 8 == 0);
  if (ok || x.numel() == 0) return x;
  // clone keeps the layout of a dense tensor, so a contiguous one with an odd offset needs it, others
  // contiguous.
  return x.is_contiguous() ? torch::stable::clone(x) : torch::stable::contiguous(x);
}

// A (rows, heads, headdim) tensor counts as batch 1.
Strides strides_of(const Tensor& x) {
  return x.dim() == 4 ? Strides{x.stride(0), x.stride(1), x.stride(2)} : Strides{0, x.stride(0), x.stride(1)};
}

void launch(Op op, DType dtype, int headdim, int device, const void* params) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "fa2: torch must be a CUDA build, got a CPU build");
  int sm = 0;
  cudaError_t error = compute_capability(device, &sm);
  STD_TORCH_CHECK(error == cudaSuccess, "fa2: ", describe(error, sm));
  const Kernel* kernel = find_kernel(op, dtype, headdim, sm);
  STD_TORCH_CHECK(kernel != nullptr, "fa2: ", no_kernel_message(op, dtype, headdim, sm));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  error = kernel->launch(params, static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "fa2: ", describe(error, sm));
}

Tensor run_delta(Tensor dout, Tensor out, const Tensor* cu_seqlens_q) {
  const int64_t dims = cu_seqlens_q != nullptr ? 3 : 4;
  const char* layout = dims == 3 ? "(total_q, nheads, headdim)" : "(batch, seqlen_q, nheads, headdim)";
  STD_TORCH_CHECK(out.dim() == dims, "fa2: out must be of shape ", layout, ", got ", show(out.sizes()));
  const auto sizes = out.sizes();
  STD_TORCH_CHECK(dout.dim() == dims && std::equal(sizes.begin(), sizes.end(), dout.sizes().begin()),
                  "fa2: dout must be of out's shape ", show(sizes), ", got ", show(dout.sizes()));
  const DType dtype = kernel_dtype("out", out);
  STD_TORCH_CHECK(dout.scalar_type() == out.scalar_type(), "fa2: dout must be of out's dtype, got ",
                  torch::headeronly::toString(dout.scalar_type()));
  const int device = out.get_device_index();
  STD_TORCH_CHECK(dout.get_device_index() == device, "fa2: dout must be on out's device ", device, ", got ",
                  dout.get_device_index());
  const int headdim = as_int("headdim", sizes[dims - 1]);
  STD_TORCH_CHECK(headdim > 0 && headdim % 8 == 0, "fa2: headdim must be a positive multiple of 8, got ",
                  headdim);

  DeltaParams params{};
  params.batch = dims == 4 ? as_int("batch", sizes[0]) : 1;
  params.rows = as_int(dims == 4 ? "seqlen_q" : "total_q", sizes[dims - 3]);
  params.nheads = as_int("nheads", sizes[dims - 2]);
  params.headdim = headdim;
  if (cu_seqlens_q != nullptr) {
    const Tensor& cu = *cu_seqlens_q;
    STD_TORCH_CHECK(cu.scalar_type() == ScalarType::Int, "fa2: cu_seqlens_q must be int32, got ",
                    torch::headeronly::toString(cu.scalar_type()));
    STD_TORCH_CHECK(cu.is_cuda() && cu.get_device_index() == device,
                    "fa2: cu_seqlens_q must be on out's device");
    STD_TORCH_CHECK(cu.dim() == 1 && cu.numel() >= 1 && cu.is_contiguous(),
                    "fa2: cu_seqlens_q must be of shape (batch + 1,) and contiguous, got ", show(cu.sizes()));
    params.rows_end = static_cast<const int32_t*>(cu.data_ptr()) + (cu.numel() - 1);
  }

  const torch::stable::accelerator::DeviceGuard guard(device);
  std::vector<int64_t> shape = {params.nheads, params.rows};
  if (dims == 4) shape.insert(shape.begin(), params.batch);
  Tensor delta = torch::stable::new_empty(out, shape, ScalarType::Float);
  if (delta.numel() == 0) return delta;
  dout = vectorizable(dout);
  out = vectorizable(out);
  params.dout = dout.data_ptr();
  params.out = out.data_ptr();
  params.delta = static_cast<float*>(delta.data_ptr());
  params.dout_strides = strides_of(dout);
  params.out_strides = strides_of(out);
  launch(Op::kDelta, dtype, headdim, device, &params);
  return delta;
}

Tensor delta(Tensor dout, Tensor out) {
  return run_delta(dout, out, nullptr);
}

Tensor delta_varlen(Tensor dout, Tensor out, Tensor cu_seqlens_q) {
  return run_delta(dout, out, &cu_seqlens_q);
}

}  // namespace
}  // namespace fa2

STABLE_TORCH_LIBRARY_IMPL(fa2, CUDA, library) {
  library.impl("delta", TORCH_BOX(&fa2::delta));
  library.impl("delta_varlen", TORCH_BOX(&fa2::delta_varlen));
}

// Called through ctypes by fa2/extension.py; they touch no tensor.
extern "C" __attribute__((visibility("default"))) const char* fa2_kernels() {
  return fa2::kernels_json().c_str();
}

// Writes why the kernels cannot run on this device, or nothing; returns the length of the whole text.
extern "C" __attribute__((visibility("default"))) int fa2_problem_on(int device, char* text, int capacity) {
  const std::string problem = fa2::problem_on(device);
  if (capacity > 0) {
    const size_t n = std::min(problem.size(), static_cast<size_t>(capacity) - 1);
    std::memcpy(text, problem.data(), n);
    text[n] = '\0';
  }
  return static_cast<int>(problem.size());
}
