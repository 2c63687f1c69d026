// The online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1) over a warp's accumulator rows.
// Maxima are of raw scores; scores become exponents by one FMA with softmax_scale * log2(e). Sums stay per
// lane until the end. Knows nothing of memory or masks: a hidden score is -inf.
#pragma once
#include <cmath>

#include "../ptx/math.cuh"

namespace fa2 {

constexpr unsigned kFullWarp = 0xffffffffu;

// Over the four lanes that share an accumulator row.
template <class Operation>
__device__ __forceinline__ float quad_reduce(float x, Operation operation) {
  x = operation(x, __shfl_xor_sync(kFullWarp, x, 1));
  return operation(x, __shfl_xor_sync(kFullWarp, x, 2));
}

template <int kRowTiles>
struct OnlineSoftmax {
  // A stale maximum is as exact as the true one while exponents stay small: 2^8 times a probability costs
  // fp32 sums and 16-bit P nothing. Rescaling only beyond it skips most of the rescales after the first
  // blocks.
  static constexpr float kStaleLog2 = 8.f;
  static constexpr int kRows = kRowTiles * 2;

  float row_max[kRows], row_sum[kRows], row_scale[kRows];
  float scale_log2;

  __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2_) : scale_log2(scale_log2_) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = -INFINITY, row_sum[r] = 0.f;
  }

  // Scores to unnormalised probabilities. Returns whether any of the warp's rows needs rescale().
  template <int kColumnTiles>
  __device__ __forceinline__ bool update(float (&acc_s)[kRowTiles][kColumnTiles][4]) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float largest = row_max[r];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
        largest = fmaxf(largest, fmaxf(acc_s[r / 2][j][(r % 2) * 2], acc_s[r / 2][j][(r % 2) * 2 + 1]));
      largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
      // False for -inf - -inf (nothing seen yet): the maximum stays -inf.
      const bool moved = (largest - row_max[r]) * scale_log2 > kStaleLog2;
      row_scale[r] = moved ? ptx::exp2_approx((row_max[r] - largest) * scale_log2) : 1.f;
      row_max[r] = moved ? largest : row_max[r];
      any |= moved;
      row_sum[r] *= row_scale[r];
      // A row that has seen no key: exponents -inf - 0, so that hidden scores give 0 and not NaN.
      const float offset = row_max[r] == -INFINITY ? 0.f : row_max[r] * scale_log2;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = acc_s[r / 2][j][(r % 2) * 2 + e];
          s = ptx::exp2_approx(fmaf(s, scale_log2, -offset));
          row_sum[r] += s;
        }
    }
    return __any_sync(kFullWarp, any);
  }

  template <int kColumnTiles>
  __device__ __forceinline__ void rescale(float (&acc_o)[kRowTiles][kColumnTiles][4]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) acc_o[r / 2][j][(r % 2) * 2 + e] *= row_scale[r];
  }

  // Completes the sums and normalises the output. A row that saw no key becomes 0, whatever P = 0 met in V: 0
  // * inf is NaN.
  template <int kColumnTiles>
  __device__ __forceinline__ void finalize(float (&acc_o)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = quad_reduce(row_sum[r], [](float a, float b) { return a + b; });
      row_scale[r] = 1.f / row_sum[r];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& o = acc_o[r / 2][j][(r % 2) * 2 + e];
          o = row_sum[r] == 0.f ? 0.f : o * row_scale[r];
        }
  }

  // Natural log of the sum of exponentials of row r; after finalize. -inf where nothing was seen.
  __device__ __forceinline__ float lse(int r) const {
    constexpr float kLn2 = 0.6931471805599453f;
    return row_sum[r] == 0.f ? -INFINITY : row_max[r] * scale_log2 * kLn2 + __logf(row_sum[r]);
  }
};

}  // namespace fa2
