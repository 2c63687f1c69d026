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
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "launch.h"
#include "params.h"

// CPU builds of torch lack this symbol: weak, so that the library loads there. The link line names
// libtorch_cpu with --no-as-needed, otherwise the symbol would stay null on a CUDA build too.
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

// Three lengths and bounds of a mask must fit an int together (tile/mask.cuh).
int as_length(const char* argument, int64_t value) {
  STD_TORCH_CHECK(value < (int64_t{1} << 29), "fa2: ", argument, " must be less than 2^29, got ", value);
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

const Kernel& kernel_for(Op op, DType dtype, int headdim, int device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "fa2: torch must be a CUDA build, got a CPU build");
  int sm = 0, shared_bytes = 0;
  cudaError_t error = compute_capability(device, &sm);
  if (error == cudaSuccess) error = shared_memory_limit(device, &shared_bytes);
  STD_TORCH_CHECK(error == cudaSuccess, "fa2: ", describe(error, sm));
  const char* family = std::getenv("FA2_ARCH");  // read each time: tests and comparisons change it
  if (family != nullptr && *family == '\0') family = nullptr;
  STD_TORCH_CHECK(family == nullptr || std::strcmp(family, "sm80") == 0 || std::strcmp(family, "sm90") == 0,
                  "fa2: FA2_ARCH must be sm80 or sm90, got ", family);
  const Kernel* kernel = find_kernel(op, dtype, headdim, sm, shared_bytes, family);
  STD_TORCH_CHECK(kernel != nullptr, "fa2: ", no_kernel_message(op, dtype, headdim, sm, family));
  return *kernel;
}

void launch(const Kernel& kernel, int device, const void* params) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const cudaError_t error = kernel.launch(params, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return;
  cudaGetLastError();  // thrown here, it must not surface in the next call
  int sm = 0;
  compute_capability(device, &sm);
  STD_TORCH_CHECK(false, "fa2: ", describe(error, sm));
}

// --- attention. The public functions have checked what the user gave (fa2/checks.py); here is what would
// make a kernel read or write outside its tensors.

struct Lengths {
  Tensor cu_seqlens_q, cu_seqlens_k;
};

const int32_t* offsets(const char* argument, const Tensor& cu_seqlens, int device) {
  STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Int, "fa2: ", argument, " must be int32, got ",
                  torch::headeronly::toString(cu_seqlens.scalar_type()));
  STD_TORCH_CHECK(cu_seqlens.is_cuda() && cu_seqlens.get_device_index() == device, "fa2: ", argument,
                  " must be on q's device");
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1 && cu_seqlens.is_contiguous(),
                  "fa2: ", argument, " must be of shape (batch + 1,) and contiguous, got ",
                  show(cu_seqlens.sizes()));
  return static_cast<const int32_t*>(cu_seqlens.data_ptr());
}

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

bool same_sizes(Sizes a, Sizes b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

void check_same(const char* argument, const Tensor& x, const char* other, const Tensor& y, bool shape) {
  STD_TORCH_CHECK(x.dim() == y.dim() && (!shape || same_sizes(x.sizes(), y.sizes())), "fa2: ", argument,
                  " must be of ", other, "'s shape ", show(y.sizes()), ", got ", show(x.sizes()));
  STD_TORCH_CHECK(x.scalar_type() == y.scalar_type(), "fa2: ", argument, " must be of ", other,
                  "'s dtype, got ", torch::headeronly::toString(x.scalar_type()));
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == y.get_device_index(), "fa2: ", argument,
                  " must be on ", other, "'s device");
}

// What forward and backward have in common; checks q, k and v.
void fill(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, const Lengths* lengths,
          double softmax_scale, int64_t window_left, int64_t window_right) {
  const int64_t dims = lengths != nullptr ? 3 : 4;
  STD_TORCH_CHECK(q.dim() == dims, "fa2: q must have ", dims, " dimensions, got ", show(q.sizes()));
  check_same("k", k, "q", q, false);
  check_same("v", v, "k", k, true);
  p.nheads_q = as_int("nheads_q", q.size(dims - 2));
  p.nheads_kv = as_int("nheads_kv", k.size(dims - 2));
  p.headdim = as_int("headdim", q.size(dims - 1));
  STD_TORCH_CHECK(p.nheads_kv > 0 && p.nheads_q > 0 && p.nheads_q % p.nheads_kv == 0,
                  "fa2: nheads_q must be a positive multiple of nheads_kv (", p.nheads_kv, "), got ",
                  p.nheads_q);
  STD_TORCH_CHECK(p.headdim > 0 && p.headdim % 8 == 0, "fa2: headdim must be a positive multiple of 8, got ",
                  p.headdim);
  STD_TORCH_CHECK(k.size(dims - 1) == p.headdim, "fa2: k must be of q's headdim ", p.headdim, ", got ",
                  k.size(dims - 1));
  STD_TORCH_CHECK(std::isfinite(softmax_scale) && softmax_scale > 0,
                  "fa2: softmax_scale must be a finite number greater than 0, got ", softmax_scale);
  p.softmax_scale = static_cast<float>(softmax_scale);
  constexpr int64_t kUnbounded = std::numeric_limits<int>::max();
  p.window_left = static_cast<int>(std::clamp(window_left, int64_t{-1}, kUnbounded));
  p.window_right = static_cast<int>(std::clamp(window_right, int64_t{-1}, kUnbounded));
  const int64_t rows = q.size(dims - 3);
  if (lengths == nullptr) {
    p.batch = as_int("batch", q.size(0));
    p.seqlen_q = as_length("seqlen_q", rows);
    p.seqlen_k = as_length("seqlen_k", k.size(1));
    STD_TORCH_CHECK(k.size(0) == p.batch, "fa2: k must be of q's batch ", p.batch, ", got ", k.size(0));
    p.lse_batch = rows * p.nheads_q;
  } else {
    p.cu_seqlens_q = offsets("cu_seqlens_q", lengths->cu_seqlens_q, q.get_device_index());
    p.cu_seqlens_k = offsets("cu_seqlens_k", lengths->cu_seqlens_k, q.get_device_index());
    p.batch = as_int("batch", lengths->cu_seqlens_q.numel() - 1);
    STD_TORCH_CHECK(lengths->cu_seqlens_k.numel() == p.batch + 1,
                    "fa2: cu_seqlens_k must be of cu_seqlens_q's shape (", p.batch + 1, ",), got ",
                    show(lengths->cu_seqlens_k.sizes()));
    p.total_q = as_length("total_q", rows);
    p.total_k = as_length("total_k", k.size(0));
  }
  p.lse_head = rows;
}

// --- memory. A call of these operators is short, so its tensors are made by the shim's own functions:
// torch::stable's new_empty and select find aten's operator by name and box their arguments, 1 µs more each.

constexpr int64_t kMaxDims = 5;  // qkv, dense

// A shape, and the strides of a contiguous tensor of it.
struct Layout {
  explicit Layout(Sizes of) : sizes(of) {
    int64_t stride = 1;
    for (size_t i = of.size(); i-- > 0; stride *= std::max<int64_t>(of[i], 1)) strides[i] = stride;
  }
  int64_t dims() const { return static_cast<int64_t>(sizes.size()); }

  Sizes sizes;
  int64_t strides[kMaxDims];
};

// On x's device.
Tensor empty_beside(const Tensor& x, Sizes sizes, int32_t dtype) {
  const Layout layout(sizes);
  int32_t device_type = 0;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(layout.dims(), sizes.data(), layout.strides, dtype,
                                                  device_type, x.get_device_index(), &made));
  return Tensor(made);
}

Tensor empty_as(const Tensor& x) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return empty_beside(x, x.sizes(), dtype);
}

// x's memory in another shape, from element `offset` on.
Tensor view(const Tensor& x, Sizes sizes, const int64_t* strides, int64_t offset) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), static_cast<int64_t>(sizes.size()),
                                                        sizes.data(), strides, offset, &made));
  return Tensor(made);
}

// x's i-th slice along `dim`.
Tensor slice(const Tensor& x, int64_t dim, int64_t i) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  std::vector<int64_t> strides(x.strides().begin(), x.strides().end());
  sizes.erase(sizes.begin() + dim);
  strides.erase(strides.begin() + dim);
  return view(x, sizes, strides.data(), i * x.stride(dim));
}

// Several arrays in one allocation of fp32 numbers, each aligned to 256 bytes.
struct Scratch {
  int64_t bytes = 0;
  int64_t take(int64_t size) { return std::exchange(bytes, bytes + (size + 255) / 256 * 256); }
  Tensor beside(const Tensor& x) const {
    const int64_t n = bytes / 4;
    return empty_beside(x, Sizes(&n, 1), aoti_torch_dtype_float32());
  }
};

// (nheads, total) or (batch, nheads, seqlen), of q's (total, nheads, headdim) or (batch, seqlen, nheads,
// headdim).
std::vector<int64_t> lse_shape(const Tensor& q) {
  const auto s = q.sizes();
  return s.size() == 3 ? std::vector<int64_t>{s[1], s[0]} : std::vector<int64_t>{s[0], s[2], s[1]};
}

std::tuple<Tensor, Tensor> run_fwd(Tensor q, Tensor k, Tensor v, const Lengths* lengths, double softmax_scale,
                                   int64_t window_left, int64_t window_right) {
  FwdParams p{};
  const DType dtype = kernel_dtype("q", q);
  fill(p, q, k, v, lengths, softmax_scale, window_left, window_right);
  const int device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Kernel& kernel = kernel_for(Op::kFwd, dtype, p.headdim, device);
  Tensor out = empty_as(q);
  // The list of tiles (dense: its head alone) lies behind lse, in the same allocation: T / 4 bytes more, and
  // 1 µs less.
  const std::vector<int64_t> rows = lse_shape(q);
  Scratch scratch;
  scratch.take(q.numel() / p.headdim * 4);
  const int64_t tiles =
      scratch.take((lengths != nullptr ? tile_list_size(p.total_q, p.batch) : kTileListHead) * 4);
  const Tensor buffer = scratch.beside(q);
  Tensor lse = view(buffer, rows, Layout(rows).strides, 0);
  if (lse.numel() == 0) return {out, lse};
  q = vectorizable(q);
  k = vectorizable(k);
  v = vectorizable(v);
  p.tiles = reinterpret_cast<int32_t*>(static_cast<char*>(buffer.data_ptr()) + tiles);
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  p.out = out.data_ptr();
  p.softmax_lse = static_cast<float*>(lse.data_ptr());
  p.q_strides = strides_of(q);
  p.k_strides = strides_of(k);
  p.v_strides = strides_of(v);
  p.out_strides = strides_of(out);
  launch(kernel, device, &p);
  return {out, lse};
}

// Gradients of q, k and v: three tensors, or the three parts of one.
struct Gradients {
  Tensor dq, dk, dv;
};

void run_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, const Tensor& lse, const Gradients& to,
             const Lengths* lengths, double softmax_scale, int64_t window_left, int64_t window_right,
             bool deterministic) {
  BwdParams p{};
  const DType dtype = kernel_dtype("q", q);
  fill(p, q, k, v, lengths, softmax_scale, window_left, window_right);
  check_same("dout", dout, "q", q, true);
  check_same("out", out, "q", q, true);
  const std::vector<int64_t> rows = lse_shape(q);
  STD_TORCH_CHECK(
      lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && same_sizes(lse.sizes(), rows),
      "fa2: softmax_lse must be what the forward returned, got ", show(lse.sizes()));
  if (q.numel() == 0 && k.numel() == 0) return;
  const int device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Kernel& kernel = kernel_for(Op::kBwd, dtype, p.headdim, device);
  dout = vectorizable(dout);
  q = vectorizable(q);
  k = vectorizable(k);
  v = vectorizable(v);
  out = vectorizable(out);
  const int64_t tokens = q.dim() == 3 ? q.size(0) : q.size(0) * q.size(1);
  Scratch scratch;
  const int64_t lse_log2 = scratch.take(lse.numel() * 4), delta = scratch.take(lse.numel() * 4);
  const int64_t dq_accum = scratch.take(lse.numel() * kernel.max_headdim * 4);
  const int64_t tiles =
      scratch.take((lengths != nullptr ? tile_list_size(p.total_k, p.batch) : kTileListHead) * 4);
  const int64_t semaphore = scratch.take(deterministic ? semaphores(tokens, p.batch, p.nheads_q) * 4 : 0);
  p.conversions = conversion_queue(tokens, p.batch, p.nheads_q, p.nheads_kv);
  const int64_t conversions = scratch.take(p.conversions.numbers * 4);
  Tensor buffer = scratch.beside(q);
  char* const base = static_cast<char*>(buffer.data_ptr());
  p.lse_log2 = reinterpret_cast<float*>(base + lse_log2);
  p.delta = reinterpret_cast<float*>(base + delta);
  p.dq_accum = reinterpret_cast<float*>(base + dq_accum);
  p.tiles = reinterpret_cast<int32_t*>(base + tiles);
  p.dq_semaphore = deterministic ? reinterpret_cast<int32_t*>(base + semaphore) : nullptr;
  p.conversions.place(base + conversions);
  p.softmax_lse = static_cast<const float*>(lse.data_ptr());
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  p.out = out.data_ptr();
  p.dout = dout.data_ptr();
  p.dq = to.dq.data_ptr();
  p.dk = to.dk.data_ptr();
  p.dv = to.dv.data_ptr();
  p.q_strides = strides_of(q);
  p.k_strides = strides_of(k);
  p.v_strides = strides_of(v);
  p.out_strides = strides_of(out);
  p.dout_strides = strides_of(dout);
  p.dq_strides = strides_of(to.dq);
  p.dk_strides = strides_of(to.dk);
  p.dv_strides = strides_of(to.dv);
  launch(kernel, device, &p);
}

std::tuple<Tensor, Tensor, Tensor> run_bwd_apart(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                                                 Tensor lse, const Lengths* lengths, double softmax_scale,
                                                 int64_t window_left, int64_t window_right,
                                                 bool deterministic) {
  const Gradients to{empty_as(q), empty_as(k), empty_as(v)};
  run_bwd(dout, q, k, v, out, lse, to, lengths, softmax_scale, window_left, window_right, deterministic);
  return {to.dq, to.dk, to.dv};
}

// qkv (..., 3, nheads, headdim): the gradient is one tensor of that shape, whose parts the kernel writes in
// place.
Tensor run_bwd_packed(Tensor dout, Tensor qkv, Tensor out, Tensor lse, const Lengths* lengths,
                      double softmax_scale, int64_t window_left, int64_t window_right, bool deterministic) {
  const int64_t dims = lengths != nullptr ? 4 : 5;
  STD_TORCH_CHECK(qkv.dim() == dims && qkv.size(dims - 3) == 3,
                  "fa2: qkv must be of shape (..., 3, nheads, headdim) with ", dims, " dimensions, got ",
                  show(qkv.sizes()));
  const auto part = [dims](const Tensor& packed, int64_t i) { return slice(packed, dims - 3, i); };
  Tensor dqkv = empty_as(qkv);
  const Gradients to{part(dqkv, 0), part(dqkv, 1), part(dqkv, 2)};
  run_bwd(dout, part(qkv, 0), part(qkv, 1), part(qkv, 2), out, lse, to, lengths, softmax_scale, window_left,
          window_right, deterministic);
  return dqkv;
}

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, double softmax_scale, int64_t window_left,
                               int64_t window_right) {
  return run_fwd(q, k, v, nullptr, softmax_scale, window_left, window_right);
}

// max_seqlen plays no part: the kernels work by the true lengths.
std::tuple<Tensor, Tensor> fwd_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                      int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_k*/,
                                      double softmax_scale, int64_t window_left, int64_t window_right) {
  const Lengths lengths{cu_seqlens_q, cu_seqlens_k};
  return run_fwd(q, k, v, &lengths, softmax_scale, window_left, window_right);
}

std::tuple<Tensor, Tensor, Tensor> bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                                       double softmax_scale, int64_t window_left, int64_t window_right,
                                       bool deterministic) {
  return run_bwd_apart(dout, q, k, v, out, lse, nullptr, softmax_scale, window_left, window_right,
                       deterministic);
}

std::tuple<Tensor, Tensor, Tensor> bwd_varlen(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                                              Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                              int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_k*/,
                                              double softmax_scale, int64_t window_left, int64_t window_right,
                                              bool deterministic) {
  const Lengths lengths{cu_seqlens_q, cu_seqlens_k};
  return run_bwd_apart(dout, q, k, v, out, lse, &lengths, softmax_scale, window_left, window_right,
                       deterministic);
}

Tensor bwd_qkvpacked(Tensor dout, Tensor qkv, Tensor out, Tensor lse, double softmax_scale,
                     int64_t window_left, int64_t window_right, bool deterministic) {
  return run_bwd_packed(dout, qkv, out, lse, nullptr, softmax_scale, window_left, window_right,
                        deterministic);
}

Tensor bwd_varlen_qkvpacked(Tensor dout, Tensor qkv, Tensor out, Tensor lse, Tensor cu_seqlens,
                            int64_t /*max_seqlen*/, double softmax_scale, int64_t window_left,
                            int64_t window_right, bool deterministic) {
  const Lengths lengths{cu_seqlens, cu_seqlens};
  return run_bwd_packed(dout, qkv, out, lse, &lengths, softmax_scale, window_left, window_right,
                        deterministic);
}

}  // namespace
}  // namespace fa2

STABLE_TORCH_LIBRARY_IMPL(fa2, CUDA, library) {
  library.impl("fwd", TORCH_BOX(&fa2::fwd));
  library.impl("fwd_varlen", TORCH_BOX(&fa2::fwd_varlen));
  library.impl("bwd", TORCH_BOX(&fa2::bwd));
  library.impl("bwd_varlen", TORCH_BOX(&fa2::bwd_varlen));
  library.impl("bwd_qkvpacked", TORCH_BOX(&fa2::bwd_qkvpacked));
  library.impl("bwd_varlen_qkvpacked", TORCH_BOX(&fa2::bwd_varlen_qkvpacked));
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
