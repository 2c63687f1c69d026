// mma.sync.m16n8k16, and the conversions that pack its operands. The layout of fragments: PTX ISA, "Matrix
// fragments for mma.m16n8k16".
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <map>

#include "machine.h"
#include "number.h"
#include "ptx.h"

namespace fa2::emulation {
namespace {

void multiply(const Call& call) {
  const bool half = call.statement.has("f16");
  together(&call.statement, call.statement.text.c_str(), const_cast<Call*>(&call), [&](Warp& warp) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Call& its = *static_cast<const Call*>(warp.arguments[lane]);
      const int row = lane / 4, column = lane % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = static_cast<uint32_t>(its.value(its.part(1, i)));
        for (int e = 0; e < 2; ++e)
          a[row + i % 2 * 8][column + i / 2 * 8 + e] = from_16(static_cast<uint16_t>(bits >> 16 * e), half);
      }
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = static_cast<uint32_t>(its.value(its.part(2, i)));
        for (int e = 0; e < 2; ++e)
          b[column + i * 8 + e][row] = from_16(static_cast<uint16_t>(bits >> 16 * e), half);
      }
    }
    float d[16][8] = {};
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < 16; ++k)
        for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    for (int lane = 0; lane < 32; ++lane) {
      const Call& its = *static_cast<const Call*>(warp.arguments[lane]);
      for (int i = 0; i < 4; ++i) {
        // d and c are the same registers, as every wrapper has them.
        auto* acc = static_cast<float*>(its.variable(its.part(0, i)));
        if (its.variable(its.part(3, i)) != acc) fail("mma: the accumulators differ");
        *acc += d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
      }
    }
  });
}

// cvt d, high, low.
void pack_bf16(const Call& call) {
  const __nv_bfloat16_raw high = __float2bfloat16_rn(call.f32(1)), low = __float2bfloat16_rn(call.f32(2));
  call.set(0, static_cast<uint32_t>(high.x) << 16 | low.x);
}

void pack_fp16(const Call& call) {
  const __half_raw high = __float2half_rn(call.f32(1)), low = __float2half_rn(call.f32(2));
  call.set(0, static_cast<uint32_t>(high.x) << 16 | low.x);
}

}  // namespace

Handler find_mma(const std::string& opcode) {
  static const std::map<std::string, Handler> known = {
      {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", multiply},
      {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", multiply},
      {"cvt.rn.bf16x2.f32", pack_bf16},
      {"cvt.rn.f16x2.f32", pack_fp16},
  };
  const auto found = known.find(opcode);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace fa2::emulation
