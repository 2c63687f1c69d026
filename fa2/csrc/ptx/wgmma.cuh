// Tensor-core products of a warpgroup, 64 x N x 16 a step (PTX ISA 9.7.15, wgmma). They run asynchronously:
// their registers belong to the tensor core from the first instruction after wgmma_fence() until
// wgmma_wait(). Accumulators are fp32; a thread's share of one is that of mma.m16n8k16 (mma.cuh), warp w
// holding rows 16 w to 16 w + 15.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fa2::ptx {

// Orders this warpgroup's accesses to registers, and to shared memory, before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of this warpgroup's newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across this point: it takes a wgmma's result for
// ready when the instruction is issued.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void wgmma_pin(float (&acc)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(acc[i][j][e])::"memory");
}

template <int kRowTiles, int kSteps>
__device__ __forceinline__ void wgmma_pin(uint32_t (&a_frag)[kRowTiles][kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(a_frag[i][j][e])::"memory");
}

// Before a product that does not accumulate: the old values are of no use. Without it they would keep their
// registers until here, because a wgmma reads and writes its accumulator as far as the compiler knows.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void wgmma_discard(float (&acc)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "=f"(acc[i][j][e])::"memory");
}

// The compiler no longer knows where this value came from: what is made of it is made here.
__device__ __forceinline__ void forget(uint32_t& value) {
  asm volatile("" : "+r"(value));
}

// How a matrix operand lies in shared memory (PTX ISA 9.7.15.5.1, matrix descriptor): swizzled rows of
// kRowBytes, 128 or 64. `across`: the distance in bytes between slabs of that width, used where the operand
// is stored [K][outer].
template <int kRowBytes>
__device__ __forceinline__ uint64_t shared_matrix(uint32_t address, int across) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "the swizzles that are in use");
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr uint64_t kEightRows = 8 * kRowBytes;
  return kSwizzle << 62 | kEightRows / 16 << 32 | static_cast<uint64_t>(across / 16) << 16 |
         (address & 0x3ffff) / 16;
}

// Registers as text and as operands, eight (16 columns) a step.
// clang-format off
#define FA2_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FA2_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FA2_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FA2_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FA2_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FA2_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FA2_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FA2_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FA2_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FA2_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FA2_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FA2_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FA2_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FA2_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FA2_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FA2_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FA2_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3]), "+f"(d[j + 1][0]), "+f"(d[j + 1][1]), "+f"(d[j + 1][2]), "+f"(d[j + 1][3])
#define FA2_REGISTERS_16 FA2_R0
#define FA2_OUTPUTS_16 FA2_D(0)
#define FA2_REGISTERS_32 FA2_REGISTERS_16 ", " FA2_R1
#define FA2_OUTPUTS_32 FA2_OUTPUTS_16, FA2_D(2)
#define FA2_REGISTERS_48 FA2_REGISTERS_32 ", " FA2_R2
#define FA2_OUTPUTS_48 FA2_OUTPUTS_32, FA2_D(4)
#define FA2_REGISTERS_64 FA2_REGISTERS_48 ", " FA2_R3
#define FA2_OUTPUTS_64 FA2_OUTPUTS_48, FA2_D(6)
#define FA2_REGISTERS_80 FA2_REGISTERS_64 ", " FA2_R4
#define FA2_OUTPUTS_80 FA2_OUTPUTS_64, FA2_D(8)
#define FA2_REGISTERS_96 FA2_REGISTERS_80 ", " FA2_R5
#define FA2_OUTPUTS_96 FA2_OUTPUTS_80, FA2_D(10)
#define FA2_REGISTERS_112 FA2_REGISTERS_96 ", " FA2_R6
#define FA2_OUTPUTS_112 FA2_OUTPUTS_96, FA2_D(12)
#define FA2_REGISTERS_128 FA2_REGISTERS_112 ", " FA2_R7
#define FA2_OUTPUTS_128 FA2_OUTPUTS_112, FA2_D(14)
#define FA2_REGISTERS_144 FA2_REGISTERS_128 ", " FA2_R8
#define FA2_OUTPUTS_144 FA2_OUTPUTS_128, FA2_D(16)
#define FA2_REGISTERS_160 FA2_REGISTERS_144 ", " FA2_R9
#define FA2_OUTPUTS_160 FA2_OUTPUTS_144, FA2_D(18)
#define FA2_REGISTERS_176 FA2_REGISTERS_160 ", " FA2_R10
#define FA2_OUTPUTS_176 FA2_OUTPUTS_160, FA2_D(20)
#define FA2_REGISTERS_192 FA2_REGISTERS_176 ", " FA2_R11
#define FA2_OUTPUTS_192 FA2_OUTPUTS_176, FA2_D(22)
#define FA2_REGISTERS_208 FA2_REGISTERS_192 ", " FA2_R12
#define FA2_OUTPUTS_208 FA2_OUTPUTS_192, FA2_D(24)
#define FA2_REGISTERS_224 FA2_REGISTERS_208 ", " FA2_R13
#define FA2_OUTPUTS_224 FA2_OUTPUTS_208, FA2_D(26)
#define FA2_REGISTERS_240 FA2_REGISTERS_224 ", " FA2_R14
#define FA2_OUTPUTS_240 FA2_OUTPUTS_224, FA2_D(28)
#define FA2_REGISTERS_256 FA2_REGISTERS_240 ", " FA2_R15
#define FA2_OUTPUTS_256 FA2_OUTPUTS_240, FA2_D(30)
// clang-format on

#define FA2_WGMMA_SS(N, TYPE, A, B, ACCUMULATE, TRANSPOSED_A, TRANSPOSED_B)                                \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ACCUMULATE                                          \
               ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                     \
               " {" FA2_REGISTERS_##N "}, " A ", " B ", p, 1, 1, " TRANSPOSED_A ", " TRANSPOSED_B ";\n\t}" \
               : FA2_OUTPUTS_##N                                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposedA ? 1 : 0),             \
                 "n"(kTransposedB ? 1 : 0))

#define FA2_WGMMA_RS(N, TYPE, A0, A1, A2, A3, B, ACCUMULATE, TRANSPOSED)                                 \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ACCUMULATE                                        \
               ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                   \
               " {" FA2_REGISTERS_##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, " TRANSPOSED \
                                      ";\n\t}"                                                           \
               : FA2_OUTPUTS_##N                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),  \
                 "n"(kTransposedB ? 1 : 0))

// d (64 x N) = a (64 x 16) * b^T (b is N x 16), + d if `accumulate`. Both in shared memory; kTransposedA: a
// is stored [16][64]; kTransposedB: b is stored [16][N].
template <class Element, bool kTransposedA, bool kTransposedB, int kColumnTiles>
__device__ __forceinline__ void wgmma(float (&d)[kColumnTiles][4], uint64_t a, uint64_t b, bool accumulate) {
  constexpr int N = kColumnTiles * 8;
  constexpr bool kHalf = std::is_same_v<Element, __half>;
  // clang-format off
  if constexpr (N == 32) { if constexpr (kHalf) FA2_WGMMA_SS(32, "f16", "%16", "%17", "%18", "%19", "%20"); else FA2_WGMMA_SS(32, "bf16", "%16", "%17", "%18", "%19", "%20"); }
  else if constexpr (N == 48) { if constexpr (kHalf) FA2_WGMMA_SS(48, "f16", "%24", "%25", "%26", "%27", "%28"); else FA2_WGMMA_SS(48, "bf16", "%24", "%25", "%26", "%27", "%28"); }
  else if constexpr (N == 64) { if constexpr (kHalf) FA2_WGMMA_SS(64, "f16", "%32", "%33", "%34", "%35", "%36"); else FA2_WGMMA_SS(64, "bf16", "%32", "%33", "%34", "%35", "%36"); }
  else if constexpr (N == 80) { if constexpr (kHalf) FA2_WGMMA_SS(80, "f16", "%40", "%41", "%42", "%43", "%44"); else FA2_WGMMA_SS(80, "bf16", "%40", "%41", "%42", "%43", "%44"); }
  else if constexpr (N == 96) { if constexpr (kHalf) FA2_WGMMA_SS(96, "f16", "%48", "%49", "%50", "%51", "%52"); else FA2_WGMMA_SS(96, "bf16", "%48", "%49", "%50", "%51", "%52"); }
  else if constexpr (N == 112) { if constexpr (kHalf) FA2_WGMMA_SS(112, "f16", "%56", "%57", "%58", "%59", "%60"); else FA2_WGMMA_SS(112, "bf16", "%56", "%57", "%58", "%59", "%60"); }
  else if constexpr (N == 128) { if constexpr (kHalf) FA2_WGMMA_SS(128, "f16", "%64", "%65", "%66", "%67", "%68"); else FA2_WGMMA_SS(128, "bf16", "%64", "%65", "%66", "%67", "%68"); }
  else if constexpr (N == 160) { if constexpr (kHalf) FA2_WGMMA_SS(160, "f16", "%80", "%81", "%82", "%83", "%84"); else FA2_WGMMA_SS(160, "bf16", "%80", "%81", "%82", "%83", "%84"); }
  else if constexpr (N == 192) { if constexpr (kHalf) FA2_WGMMA_SS(192, "f16", "%96", "%97", "%98", "%99", "%100"); else FA2_WGMMA_SS(192, "bf16", "%96", "%97", "%98", "%99", "%100"); }
  else if constexpr (N == 256) { if constexpr (kHalf) FA2_WGMMA_SS(256, "f16", "%128", "%129", "%130", "%131", "%132"); else FA2_WGMMA_SS(256, "bf16", "%128", "%129", "%130", "%131", "%132"); }
  else static_assert(N == 0, "an instruction of this width is not wrapped");
  // clang-format on
}

// The same with a in registers: the packed accumulator of an earlier product.
template <class Element, bool kTransposedB, int kColumnTiles>
__device__ __forceinline__ void wgmma(float (&d)[kColumnTiles][4], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  constexpr int N = kColumnTiles * 8;
  constexpr bool kHalf = std::is_same_v<Element, __half>;
  // clang-format off
  if constexpr (N == 64) { if constexpr (kHalf) FA2_WGMMA_RS(64, "f16", "%32", "%33", "%34", "%35", "%36", "%37", "%38"); else FA2_WGMMA_RS(64, "bf16", "%32", "%33", "%34", "%35", "%36", "%37", "%38"); }
  else if constexpr (N == 80) { if constexpr (kHalf) FA2_WGMMA_RS(80, "f16", "%40", "%41", "%42", "%43", "%44", "%45", "%46"); else FA2_WGMMA_RS(80, "bf16", "%40", "%41", "%42", "%43", "%44", "%45", "%46"); }
  else if constexpr (N == 96) { if constexpr (kHalf) FA2_WGMMA_RS(96, "f16", "%48", "%49", "%50", "%51", "%52", "%53", "%54"); else FA2_WGMMA_RS(96, "bf16", "%48", "%49", "%50", "%51", "%52", "%53", "%54"); }
  else if constexpr (N == 112) { if constexpr (kHalf) FA2_WGMMA_RS(112, "f16", "%56", "%57", "%58", "%59", "%60", "%61", "%62"); else FA2_WGMMA_RS(112, "bf16", "%56", "%57", "%58", "%59", "%60", "%61", "%62"); }
  else if constexpr (N == 128) { if constexpr (kHalf) FA2_WGMMA_RS(128, "f16", "%64", "%65", "%66", "%67", "%68", "%69", "%70"); else FA2_WGMMA_RS(128, "bf16", "%64", "%65", "%66", "%67", "%68", "%69", "%70"); }
  else if constexpr (N == 160) { if constexpr (kHalf) FA2_WGMMA_RS(160, "f16", "%80", "%81", "%82", "%83", "%84", "%85", "%86"); else FA2_WGMMA_RS(160, "bf16", "%80", "%81", "%82", "%83", "%84", "%85", "%86"); }
  else if constexpr (N == 192) { if constexpr (kHalf) FA2_WGMMA_RS(192, "f16", "%96", "%97", "%98", "%99", "%100", "%101", "%102"); else FA2_WGMMA_RS(192, "bf16", "%96", "%97", "%98", "%99", "%100", "%101", "%102"); }
  else if constexpr (N == 256) { if constexpr (kHalf) FA2_WGMMA_RS(256, "f16", "%128", "%129", "%130", "%131", "%132", "%133", "%134"); else FA2_WGMMA_RS(256, "bf16", "%128", "%129", "%130", "%131", "%132", "%133", "%134"); }
  else static_assert(N == 0, "an instruction of this width is not wrapped");
  // clang-format on
}

#undef FA2_WGMMA_SS
#undef FA2_WGMMA_RS
#undef FA2_D
#undef FA2_R0
#undef FA2_R1
#undef FA2_R2
#undef FA2_R3
#undef FA2_R4
#undef FA2_R5
#undef FA2_R6
#undef FA2_R7
#undef FA2_R8
#undef FA2_R9
#undef FA2_R10
#undef FA2_R11
#undef FA2_R12
#undef FA2_R13
#undef FA2_R14
#undef FA2_R15
#undef FA2_REGISTERS_16
#undef FA2_OUTPUTS_16
#undef FA2_REGISTERS_32
#undef FA2_OUTPUTS_32
#undef FA2_REGISTERS_48
#undef FA2_OUTPUTS_48
#undef FA2_REGISTERS_64
#undef FA2_OUTPUTS_64
#undef FA2_REGISTERS_80
#undef FA2_OUTPUTS_80
#undef FA2_REGISTERS_96
#undef FA2_OUTPUTS_96
#undef FA2_REGISTERS_112
#undef FA2_OUTPUTS_112
#undef FA2_REGISTERS_128
#undef FA2_OUTPUTS_128
#undef FA2_REGISTERS_144
#undef FA2_OUTPUTS_144
#undef FA2_REGISTERS_160
#undef FA2_OUTPUTS_160
#undef FA2_REGISTERS_176
#undef FA2_OUTPUTS_176
#undef FA2_REGISTERS_192
#undef FA2_OUTPUTS_192
#undef FA2_REGISTERS_208
#undef FA2_OUTPUTS_208
#undef FA2_REGISTERS_224
#undef FA2_OUTPUTS_224
#undef FA2_REGISTERS_240
#undef FA2_OUTPUTS_240
#undef FA2_REGISTERS_256
#undef FA2_OUTPUTS_256

}  // namespace fa2::ptx
