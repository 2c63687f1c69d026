// Two or more thread blocks that run together and reach each other's shared memory (PTX ISA 5.1.5
// and 9.7.13.4, barrier.cluster; 9.7.9.23, mapa). An address "of the cluster" names a block's shared memory
// for all of them.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "tma.cuh"

namespace fa2::ptx {

// This block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks that have not ended meet here; what they wrote before is seen after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Where block `rank` has what this block has at `shared`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

__device__ __forceinline__ void store_cluster_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Arrives at any block's barrier; what this thread wrote into that block before is seen by who waits with
// mbarrier_wait_cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t address) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// The same for who has only read: it publishes nothing, and costs no fence.
__device__ __forceinline__ void mbarrier_arrive_cluster_done(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// mbarrier_wait that also sees what other blocks' threads wrote before they arrived.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra ready;\n\t"
      "bra again;\n\t"
      "ready:\n\t"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The tile copy of tma.cuh into the same place of every block of `blocks`, a bit each; the bytes count on the
// barrier in the same place of each.
__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                                   const Coordinates& at, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "r"(at.c[4]),
      "h"(blocks)
      : "memory");
}

// This block's shared memory into another's; the bytes count on a barrier of that block (PTX ISA 9.7.9.25,
// cp.async.bulk).
__device__ __forceinline__ void copy_to_block(uint32_t target, uint32_t shared, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          target),
      "r"(shared), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace fa2::ptx
