// Which tile a thread block works on. Dense: arithmetic. Varlen: a list of the tiles that exist, which
// schedule.cuh writes on the device before the kernel, heaviest sequences first. Where each block has one
// tile (sm80), the grid is the bound total / kBlock + batch + 1, so max_seqlen plays no part, and blocks past
// the list's end return at once, at most batch + 1 of them a head.
#pragma once
#include "../params.h"

namespace fa2 {

struct WorkTile {
  int bidb, bidh, block;
};

// Heads that run side by side: few enough that every head has several tiles in flight, which share its K and
// V in L2.
constexpr int kHeadsInFlight = 32;

// `reversed`: the last block first. Causal: the forward's last query block and the backward's first key block
// are the longest, and the longest go first, so that the short ones fill the end. first_head: index counts
// from its first tile on.
__device__ __forceinline__ bool find_tile(WorkTile& tile, unsigned index, const Problem& p, int nheads,
                                          int blocks, bool reversed, unsigned heads_in_flight,
                                          unsigned first_head = 0) {
  if (p.cu_seqlens_q == nullptr) {
    const unsigned all_heads = p.batch * nheads - first_head;
    const unsigned group = index / (heads_in_flight * blocks);
    const unsigned in_group = index - group * (heads_in_flight * blocks);
    const unsigned width = min(heads_in_flight, all_heads - group * heads_in_flight);
    const unsigned rank = in_group / width;
    const unsigned head = first_head + group * heads_in_flight + in_group - rank * width;
    tile.bidb = head / nheads;
    tile.bidh = head - tile.bidb * nheads;
    tile.block = reversed ? blocks - 1 - rank : rank;
    return true;
  }
  const unsigned tiles = p.tiles[0];
  if (index >= tiles * (nheads - first_head)) return false;
  const unsigned group = index / (heads_in_flight * tiles);
  const unsigned in_group = index - group * (heads_in_flight * tiles);
  const unsigned width = min(heads_in_flight, nheads - first_head - group * heads_in_flight);
  const unsigned rank = in_group / width;
  const int2 entry = reinterpret_cast<const int2*>(p.tiles)[2 + rank];
  tile.bidb = entry.x;
  tile.bidh = first_head + group * heads_in_flight + in_group - rank * width;
  tile.block = entry.y;
  return true;
}

// The tile of this thread block, where each block has one.
__device__ __forceinline__ bool find_tile(WorkTile& tile, const Problem& p, int nheads, int blocks,
                                          bool reversed) {
  return find_tile(tile, blockIdx.x, p, nheads, blocks, reversed,
                   p.cu_seqlens_q == nullptr ? kHeadsInFlight : nheads);
}

}  // namespace fa2
