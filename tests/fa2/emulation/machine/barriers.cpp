// mbarriers, named barriers and the cluster's barrier: who waits, who wakes whom, and what becomes known by
// it.
#include <utility>

#include "machine.h"

namespace fa2::emulation {
namespace {

void end_barrier(Block& block, NamedBarrier& barrier) {
  barrier.arrived = 0;
  block.last_barrier = std::exchange(barrier.clock, {});
  for (Thread* waiting : std::exchange(barrier.waiting, {})) {
    block.races->acquire(waiting->warp->actor, block.last_barrier);
    wake(*waiting);
  }
}

void end_cluster_barrier_if_complete(Cluster& cluster) {
  ClusterBarrier& barrier = cluster.barrier;
  int alive = 0;
  for (const Block* block : cluster.blocks) alive += block->alive;
  if (barrier.arrived == 0 || barrier.arrived < alive) return;
  barrier.arrived = 0;
  ++barrier.phase;
  barrier.completed = std::exchange(barrier.clock, {});
  for (Thread* thread : std::exchange(barrier.waiting, {})) wake(*thread);
}

}  // namespace

MBarrier& mbarrier_at(Block& block, uint32_t address) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("mbarrier at %u: not initialised", address);
  MBarrier& barrier = found->second;
  if (in_thread() && current().warp->actor != barrier.made_by &&
      !block.races->knows(current().warp->actor, barrier.made_by, barrier.made_at))
    fail("race: the mbarrier at %u is used, with no order after its initialisation", address);
  return barrier;
}

MBarrier& visible_mbarrier_at(Block& block, uint32_t address) {
  MBarrier& barrier = mbarrier_at(block, address);
  if (!barrier.visible) fail("mbarrier at %u: no fence.mbarrier_init after its initialisation", address);
  return barrier;
}

void fence_mbarrier_init() {
  for (auto& [address, barrier] : current().block->mbarriers)
    if (barrier.made_by == current().warp->actor) barrier.visible = true;
}

void mbarrier_init(uint32_t address, int arrivals) {
  Block& block = *current().block;
  shared_pointer(block, address, 8);
  if (arrivals < 1 || arrivals >= 1 << 20) fail("mbarrier.init: %d arrivals", arrivals);
  if (block.mbarriers.count(address)) fail("mbarrier at %u: initialised twice", address);
  MBarrier& barrier = block.mbarriers[address];
  barrier.expected = barrier.pending = arrivals;
  barrier.actor = block.races->add_actor();
  barrier.made_by = current().warp->actor;
  barrier.made_at = block.races->now(barrier.made_by);
}

namespace {
void end_phase_if_complete(MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  // The copies of this phase have arrived, too.
  barrier.completed = std::exchange(barrier.arrived, {});
  barrier.completed[barrier.actor] = barrier.phase;
  for (Thread* thread : std::exchange(barrier.waiting, {})) wake(*thread);
}
}  // namespace

void mbarrier_arrive(Block& block, uint32_t address, int64_t expect_bytes) {
  MBarrier& barrier =
      &block == current().block ? mbarrier_at(block, address) : visible_mbarrier_at(block, address);
  barrier.bytes += expect_bytes;
  block.races->release(current().warp->actor, barrier.arrived);
  if (--barrier.pending < 0)
    fail("mbarrier at %u: more than its %d arrivals in one phase", address, barrier.expected);
  end_phase_if_complete(barrier);
}

void mbarrier_complete(Block& block, uint32_t address, int64_t bytes) {
  MBarrier& barrier = mbarrier_at(block, address);
  barrier.bytes -= bytes;
  if (barrier.bytes < 0 && barrier.pending == 0)
    fail("mbarrier at %u: %lld more bytes than announced", address, static_cast<long long>(-barrier.bytes));
  end_phase_if_complete(barrier);
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  Block& block = *current().block;
  MBarrier& barrier = mbarrier_at(block, address);
  while ((barrier.phase & 1) == (parity & 1)) {
    barrier.waiting.push_back(&current());
    suspend({"mbarrier", address, parity});
  }
  block.races->acquire(current().warp->actor, barrier.completed);
  hesitate();
}

bool mbarrier_has_ended(uint32_t address, uint32_t parity) {
  hesitate();
  Block& block = *current().block;
  MBarrier& barrier = mbarrier_at(block, address);
  if ((barrier.phase & 1) == (parity & 1)) return false;
  block.races->acquire(current().warp->actor, barrier.completed);
  return true;
}

void barrier(int id, int threads, bool wait) {
  if (id < 0 || id > 15) fail("barrier %d: there are 16", id);
  Block& block = *current().block;
  NamedBarrier& barrier = block.barriers[id];
  if (threads >= 0 && (threads == 0 || threads % 32 != 0 || threads > static_cast<int>(block.threads.size())))
    fail("barrier %d: %d threads is no whole number of the block's warps", id, threads);
  if (barrier.arrived > 0 && barrier.threads != threads)
    fail("barrier %d: for %d threads, but others are there for %d", id, threads, barrier.threads);
  barrier.threads = threads;
  block.races->release(current().warp->actor, barrier.clock);
  if (++barrier.arrived < (threads < 0 ? block.alive : threads)) {
    if (wait) {
      barrier.waiting.push_back(&current());
      suspend({"barrier", 0, static_cast<uint32_t>(id)});
    }
    return;
  }
  end_barrier(block, barrier);
  if (wait) block.races->acquire(current().warp->actor, block.last_barrier);
}

void cluster_arrive() {
  Cluster& cluster = *current().block->cluster;
  if (current().cluster_phase != cluster.barrier.phase)
    fail("barrier.cluster: arrives again without a wait in between");
  ++current().cluster_phase;
  cluster.races->release(current().warp->actor, cluster.barrier.clock);
  ++cluster.barrier.arrived;
  end_cluster_barrier_if_complete(cluster);
}

void cluster_wait() {
  Cluster& cluster = *current().block->cluster;
  while (cluster.barrier.phase != current().cluster_phase) {
    cluster.barrier.waiting.push_back(&current());
    suspend({"barrier.cluster.wait", 0, 0});
  }
  cluster.races->acquire(current().warp->actor, cluster.barrier.completed);
}

// Barriers of a whole block or cluster count the threads that are left.
void thread_left(Block& block) {
  NamedBarrier& all = block.barriers[0];
  if (all.threads < 0 && all.arrived > 0 && all.arrived == block.alive) end_barrier(block, all);
  end_cluster_barrier_if_complete(*block.cluster);
}

}  // namespace fa2::emulation
