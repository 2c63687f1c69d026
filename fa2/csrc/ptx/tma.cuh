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

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// This thread's stores have read their shared memory: it may be written again.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Ordinary writes to shared memory before this are seen by copies and wgmma issued after it (and after a
// barrier, when other threads wrote).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fa2::ptx
