// Every tuned number of the sm80 kernels, on one page.
#pragma once

namespace fa2::sm80 {

// delta: bound by memory, so nothing but whole 128-byte lines per request matters. A row of kHeadDim 16-bit
// numbers is read by kHeadDim / 8 lanes of 16 bytes; at headdim 64 that is one line.
template <int kHeadDim>
struct DeltaConfig {
  static constexpr int kThreads = 256;
  static constexpr int kLanes = kHeadDim / 8;
  static constexpr int kRows = kThreads / kLanes;
  static_assert(kLanes == 8 || kLanes == 16 || kLanes == 32, "a row must fill a power-of-two part of a warp");
};

}  // namespace fa2::sm80
