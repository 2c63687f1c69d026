// What producers and consumers of the sm90 kernels agree on: work tiles, slots of ring buffers, coordinates
// of a sequence's rows. Read next: fwd.cuh, bwd.cuh.
#pragma once
#include <cstdint>

#include "../ptx/tma.cuh"
#include "../tile/scheduler.cuh"
#include "tensor_map.h"

namespace fa2::sm90 {

// What a tile is, decoded once by the producer.
struct Work {
  WorkTile tile;  // block < 0: there is no more
  int bidb, first_q, first_k, seqlen_q, seqlen_k;
};

// A slot of a ring buffer, and the parity of the round.
template <int kStages>
struct Slot {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// Where row 0 of a sequence lies in a tensor map.
struct Rows {
  int row, x, y;
  // first_dense: the first of a dense sequence's rows that counts.
  __device__ __forceinline__ Rows(bool varlen, int bidb, int first, int seqlen, int first_dense = 0)
      : row(varlen ? kRagged - seqlen : first_dense),
        x(varlen ? first + seqlen : bidb),
        y(varlen ? kRagged : 0) {}
  __device__ __forceinline__ ptx::Coordinates at(int column, int i, int head) const {
    return {{column, row + i, head, x, y}};
  }
};

}  // namespace fa2::sm90
