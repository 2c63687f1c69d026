// Tile copies by the tensor memory accelerator (PTX ISA 9.7.9.27, cp.async.bulk.tensor). The tensor map says
// where a tensor lies, how a box of it lies in shared memory, and where it ends: elements outside arrive as
// zeros and are never written. One thread issues a copy.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace fa2::ptx {

// The five coordinates of a box's first element, fastest first.
struct Coordinates {
  int c[5];
};

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Global to shared; the bytes of the whole box, zeros included, count on the mbarrier.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                         const Coordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "r"(at.c[4])
      : "memory");
}

// Shared to global, in this thread's bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t shared, const Coordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "r"(at.c[4])
      : "memory");
}

// target[0 .. bytes / 4) += the floats at `shared`, in this thread's bulk group; 16-byte aligned both (PTX
// ISA 9.7.9.25, cp.reduce.async.bulk).
__device__ __forceinline__ void bulk_add(float* target, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
               "r"(shared), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// This thread's stores have read their shared memory: it may be written again.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// This thread's stores and additions are complete: what they wrote is in global memory.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Accesses to global memory by this thread's bulk copies and by its ordinary instructions keep their order
// across this.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Ordinary writes to shared memory before this are seen by copies and wgmma issued after it (and after a
// barrier, when other threads wrote).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fa2::ptx
