// The C functions that a test calls, one pair for each library: they fill the kernel's arguments as api.cpp
// does. Compiled together with one instantiation: FA2_FAMILY, FA2_DTYPE, FA2_HEADDIM, and the backward if
// FA2_BWD.
#include FA2_LAUNCH_HEADER

#include <cstring>

namespace {

// A (batch, row, head, headdim) tensor; its strides in elements.
struct Tensor {
  void* data;
  int64_t strides[3];
};

struct Call {
  int32_t batch, nheads_q, nheads_kv, headdim, seqlen_q, seqlen_k, total_q, total_k;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  double softmax_scale;
  int32_t window_left, window_right;
  int64_t lse_batch, lse_head;
  int32_t* tiles;
  Tensor q, k, v, out;
  float* softmax_lse;
  // backward
  Tensor dout, dq, dk, dv;
  float *lse_log2, *delta, *dq_accum;
  int32_t* dq_semaphore;
  void* conversions;
};

fa2::Strides strides(const Tensor& x) {
  return {x.strides[0], x.strides[1], x.strides[2]};
}

void fill(fa2::Problem& p, const Call& call) {
  p.batch = call.batch;
  p.nheads_q = call.nheads_q;
  p.nheads_kv = call.nheads_kv;
  p.headdim = call.headdim;
  p.seqlen_q = call.seqlen_q;
  p.seqlen_k = call.seqlen_k;
  p.total_q = call.total_q;
  p.total_k = call.total_k;
  p.cu_seqlens_q = call.cu_seqlens_q;
  p.cu_seqlens_k = call.cu_seqlens_k;
  p.softmax_scale = static_cast<float>(call.softmax_scale);
  p.window_left = call.window_left;
  p.window_right = call.window_right;
  p.lse_batch = call.lse_batch;
  p.lse_head = call.lse_head;
  p.tiles = call.tiles;
}

}  // namespace

extern "C" int emulation_finish();

extern "C" int emulation_run(const Call* call) {
#ifdef FA2_BWD
  fa2::BwdParams p{};
  fill(p, *call);
  p.q = call->q.data, p.q_strides = strides(call->q);
  p.k = call->k.data, p.k_strides = strides(call->k);
  p.v = call->v.data, p.v_strides = strides(call->v);
  p.out = call->out.data, p.out_strides = strides(call->out);
  p.dout = call->dout.data, p.dout_strides = strides(call->dout);
  p.dq = call->dq.data, p.dq_strides = strides(call->dq);
  p.dk = call->dk.data, p.dk_strides = strides(call->dk);
  p.dv = call->dv.data, p.dv_strides = strides(call->dv);
  p.softmax_lse = call->softmax_lse;
  p.lse_log2 = call->lse_log2;
  p.delta = call->delta;
  p.dq_accum = call->dq_accum;
  p.dq_semaphore = call->dq_semaphore;
  const int64_t tokens = p.cu_seqlens_q != nullptr ? p.total_q : static_cast<int64_t>(p.batch) * p.seqlen_q;
  p.conversions = fa2::conversion_queue(tokens, p.batch, p.nheads_q, p.nheads_kv);
  p.conversions.place(call->conversions);
  const int error = fa2::FA2_FAMILY::launch_bwd<fa2::DType::FA2_DTYPE, FA2_HEADDIM FA2_GRANT>(p, nullptr);
#else
  fa2::FwdParams p{};
  fill(p, *call);
  p.q = call->q.data, p.q_strides = strides(call->q);
  p.k = call->k.data, p.k_strides = strides(call->k);
  p.v = call->v.data, p.v_strides = strides(call->v);
  p.out = call->out.data, p.out_strides = strides(call->out);
  p.softmax_lse = call->softmax_lse;
  const int error = fa2::FA2_FAMILY::launch_fwd<fa2::DType::FA2_DTYPE, FA2_HEADDIM FA2_GRANT>(p, nullptr);
#endif
  const int finished = emulation_finish();
  return error != 0 ? error : finished;
}

extern "C" int64_t emulation_tile_list_size(int64_t total, int64_t batch) {
  return fa2::tile_list_size(total, batch);
}

extern "C" int64_t emulation_conversions(int64_t tokens, int64_t batch, int64_t nheads_q, int64_t nheads_kv) {
  return fa2::conversion_queue(tokens, batch, nheads_q, nheads_kv).numbers;
}

extern "C" int64_t emulation_semaphores(int64_t tokens, int64_t batch, int64_t nheads) {
  return fa2::semaphores(tokens, batch, nheads);
}
