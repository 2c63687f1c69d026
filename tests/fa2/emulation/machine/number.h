// 16-bit floating-point numbers as floats.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace fa2::emulation {

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline float from_fp16(uint16_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> numbers(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) {
      __half_raw raw;
      raw.x = static_cast<uint16_t>(i);
      numbers[i] = __half2float(__half(raw));
    }
    return numbers;
  }();
  return table[bits];
}

inline float from_16(uint16_t bits, bool half) {
  return half ? from_fp16(bits) : from_bf16(bits);
}

}  // namespace fa2::emulation
