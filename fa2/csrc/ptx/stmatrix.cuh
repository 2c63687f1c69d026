// Warp-wide store of four 8x8 matrices of 16-bit elements (PTX ISA 9.7.14.5.16, stmatrix; sm_90). Lane l
// names row l % 8 of matrix l / 8; its registers are laid out as those that ldmatrix fills.
#pragma once
#include <cstdint>

namespace fa2::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace fa2::ptx
