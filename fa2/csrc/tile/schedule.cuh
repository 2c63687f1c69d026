// Varlen's list of tiles, made on the device by one thread block before the attention kernel: sequences in
// descending order of work (in classes a quarter of a power of two wide), the tiles of one sequence side by
// side and in order. Deterministic sums rely on that last part alone. Read next: scheduler.cuh, which reads
// the list.
#pragma once
#include <cstdint>

#include "../params.h"
#include "../ptx/warpgroup.cuh"

namespace fa2 {

constexpr int kScheduleThreads = 1024;

// The most tiles there can be: every sequence, and the tokens past the last one, may have one partial tile.
inline __host__ __device__ int tile_capacity(int total, int batch, int block) {
  return total / block + batch + 1;
}

// 0 for no work, then a quarter of a power of two each; at most 124.
inline __host__ __device__ int work_class(unsigned work) {
  if (work < 4) return work;
  int log2 = 2;
  while (work >> (log2 + 1)) ++log2;
  return log2 * 4 + static_cast<int>(work >> (log2 - 2) & 3) - 4;
}

// tiles[0] becomes the count, tiles[1] 0 (persistent kernels count there what was handed out), tiles[2] the
// length of the longest "other" sequence; entry i, a pair (sequence, block), lies at tiles[4 + 2 * i]. side
// "own": the tokens that the tiles cut; "other": those that each tile loops over. A sequence with at most
// kWalk tokens on either side gets one tile.
// kSm: the family that launches it. From 90 on the kernel behind it may start early. (Two families must not
// share a function: each is compiled for other architectures, and the linker keeps one.)
template <int kBlock, bool kReversed, int kSm, int kWalk = 0>
__global__ void __launch_bounds__(kScheduleThreads)
    schedule_tiles(const int* cu_seqlens_own, const int* cu_seqlens_other, int total_own, int batch,
                   int* tiles) {
  if constexpr (kSm >= 90) ptx::let_next_kernel_start();  // it waits for the list by itself
  constexpr int kClasses = 128;
  __shared__ int next[kClasses], longest;
  const int lane = threadIdx.x % 32;

  const auto count_tiles = [&](int sequence, int& work) {
    const int begin = cu_seqlens_own[sequence];
    const int end = sequence == batch ? total_own : cu_seqlens_own[sequence + 1];
    work = sequence == batch ? 0 : max(0, cu_seqlens_other[sequence + 1] - cu_seqlens_other[sequence]);
    if (kWalk > 0 && max(work, end - begin) <= kWalk) return end > begin ? 1 : 0;
    return max(0, end - begin + kBlock - 1) / kBlock;
  };

  if (threadIdx.x < kClasses) next[threadIdx.x] = 0;
  if (threadIdx.x == 0) longest = 0;
  __syncthreads();
  int longest_of_mine = 0;
  for (int sequence = threadIdx.x; sequence <= batch; sequence += kScheduleThreads) {
    int work;
    const int count = count_tiles(sequence, work);
    if (count > 0) atomicAdd(&next[work_class(work)], count), longest_of_mine = max(longest_of_mine, work);
  }
  longest_of_mine = __reduce_max_sync(0xffffffffu, longest_of_mine);
  if (lane == 0 && longest_of_mine > 0) atomicMax(&longest, longest_of_mine);
  __syncthreads();
  // Each class's first slot: the sum over the heavier classes. One warp, four classes a lane.
  if (threadIdx.x < 32) {
    int sums[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = sum, sum += next[kClasses - 1 - (lane * 4 + i)];
    int before = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, distance);
      if (lane >= distance) before += other;
    }
    if (lane == 31)
      tiles[0] = min(before, tile_capacity(total_own, batch, kBlock)), tiles[1] = 0, tiles[2] = longest;
    before -= sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) next[kClasses - 1 - (lane * 4 + i)] = before + sums[i];
  }
  __syncthreads();
  const int capacity = tile_capacity(total_own, batch, kBlock);
  int2* const entries = reinterpret_cast<int2*>(tiles) + 2;
  for (int first = threadIdx.x - lane; first <= batch; first += kScheduleThreads) {
    const int sequence = first + lane;
    int work = 0, count = 0, slot = 0;
    if (sequence <= batch) count = count_tiles(sequence, work);
    if (count > 0) slot = atomicAdd(&next[work_class(work)], count);
    // Short sequences one lane each, long ones the whole warp together.
    constexpr int kAlone = 4;
    const auto write = [&](int sequence, int slot, int count, int i) {
      if (slot + i < capacity) entries[slot + i] = make_int2(sequence, kReversed ? count - 1 - i : i);
    };
    for (int i = 0; i < min(count, kAlone); ++i) write(sequence, slot, count, i);
    for (unsigned todo = __ballot_sync(0xffffffffu, count > kAlone); todo != 0; todo &= todo - 1) {
      const int source = __ffs(todo) - 1;
      const int its_count = __shfl_sync(0xffffffffu, count, source);
      const int its_slot = __shfl_sync(0xffffffffu, slot, source);
      for (int i = kAlone + lane; i < its_count; i += 32) write(first + source, its_slot, its_count, i);
    }
  }
}

}  // namespace fa2
