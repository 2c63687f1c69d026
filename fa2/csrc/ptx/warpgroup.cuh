// What warps of one thread block do among themselves on Hopper: named barriers (PTX ISA 9.7.13.1, barrier),
// register shares (9.7.19.5, setmaxnreg), and the order of dependent launches (9.7.13.13, griddepcontrol).
#pragma once
#include <cstdint>

namespace fa2::ptx {

// `threads` in all arrive or wait at barrier `id`; id 0 is __syncthreads.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// One thread of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.b32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Everything that the kernel before this one in the stream wrote is visible after it. Returns at once when
// this kernel was launched the ordinary way.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel in the stream may start its prologue.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// threadIdx.x % 32, in a register for good: what comes from threadIdx the compiler reads again wherever it is
// short of registers, and each read waits behind the matrix descriptors in the queue of special instructions.
__device__ __forceinline__ int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace fa2::ptx
