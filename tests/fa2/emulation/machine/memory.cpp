// Addresses: shared memory of the block and of its cluster, and what global memory exists.
#include <algorithm>
#include <map>

#include "machine.h"

namespace fa2::emulation {

namespace {
std::map<const unsigned char*, uint64_t> global_memory;
}

uint32_t cluster_address(uint32_t address, uint32_t rank) {
  const Cluster& cluster = *current().block->cluster;
  if (rank >= cluster.blocks.size()) fail("mapa: block %u of a cluster of %zu", rank, cluster.blocks.size());
  return (address & 0xffffff) | (rank + 1) << 24;
}

Place place_of(uint32_t address) {
  if (address >> 24 == 0) return {*current().block, address};
  Block& block = *current().block->cluster->blocks.at((address >> 24) - 1);
  if (block.alive == 0) fail("shared memory of block %u, which has ended", block.index.x);
  return {block, address & 0xffffff};
}

unsigned char* shared_pointer(Block& block, uint32_t address, uint32_t bytes) {
  if (address < kSharedBase || address + bytes > kSharedBase + block.shared_bytes)
    fail("shared memory at %u, %u bytes: outside of the block's %u to %u", address, bytes, kSharedBase,
         kSharedBase + block.shared_bytes);
  if (address % std::min<uint32_t>(bytes, 16) != 0)
    fail("shared memory at %u: not aligned to %u bytes", address, bytes);
  return block.shared + (address - kSharedBase);
}

void allow_global(const void* pointer, uint64_t bytes) {
  if (bytes == 0) return;
  uint64_t& known = global_memory[static_cast<const unsigned char*>(pointer)];
  known = std::max(known, bytes);
}

void forget_global() {
  global_memory.clear();
}

void check_global(const void* pointer, uint64_t bytes, const char* what) {
  const auto* begin = static_cast<const unsigned char*>(pointer);
  auto found = global_memory.upper_bound(begin);
  while (found != global_memory.begin()) {
    --found;
    if (begin + bytes <= found->first + found->second) return;
  }
  fail("%s touches global memory at %p, %llu bytes, which belongs to no tensor", what, pointer,
       static_cast<unsigned long long>(bytes));
}

}  // namespace fa2::emulation
