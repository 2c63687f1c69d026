// What the emulated cuTensorMapEncodeTiled leaves in a CUtensorMap.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace fa2::emulation {

struct TensorMap {
  static constexpr uint64_t kMagic = 0x6661325f746d6170;
  uint64_t magic, base;
  uint64_t strides[4];  // bytes, of dimensions 1 to rank - 1
  uint32_t last[5];     // size - 1
  uint16_t box[5];
  uint8_t rank, element_bytes, swizzle_bytes, is_float;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

}  // namespace fa2::emulation
