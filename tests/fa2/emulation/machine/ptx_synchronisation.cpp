// mbarrier, barrier, elect, fences, griddepcontrol, and the instructions that only tune (setmaxnreg,
// prefetch).
#include <map>
#include <stdexcept>

#include "machine.h"
#include "ptx.h"

namespace fa2::emulation {
namespace {

Block& block() {
  return *current().block;
}

void init(const Call& call) {
  mbarrier_init(static_cast<uint32_t>(call.address(0)), static_cast<int>(call.u32(1)));
}

void arrive(const Call& call) {
  const Place place = place_of(static_cast<uint32_t>(call.address(1)));
  mbarrier_arrive(place.block, place.address, 0);
}

void arrive_expect(const Call& call) {
  const uint32_t bytes = call.u32(2);
  if (bytes >= 1u << 20) fail("mbarrier.arrive.expect_tx: %u bytes, the limit is 2^20 - 1", bytes);
  const Place place = place_of(static_cast<uint32_t>(call.address(1)));
  mbarrier_arrive(place.block, place.address, bytes);
}

void expect(const Call& call) {
  mbarrier_at(block(), static_cast<uint32_t>(call.address(0))).bytes += call.u32(1);
}

// Suspends for as long as it takes: a try_wait that fails is followed by another one.
void try_wait(const Call& call) {
  mbarrier_wait(static_cast<uint32_t>(call.address(1)), call.u32(2));
  call.set(0, uint64_t{1});
}

void test_wait(const Call& call) {
  call.set(0, uint64_t{mbarrier_has_ended(static_cast<uint32_t>(call.address(1)), call.u32(2))});
}

void barrier_sync(const Call& call) {
  barrier(static_cast<int>(call.u32(0)),
          call.statement.arguments.size() > 1 ? static_cast<int>(call.u32(1)) : -1, true);
}

void barrier_arrive(const Call& call) {
  barrier(static_cast<int>(call.u32(0)), static_cast<int>(call.u32(1)), false);
}

void map_address(const Call& call) {
  call.set(0, cluster_address(call.u32(1), call.u32(2)));
}

void arrive_in_cluster(const Call&) {
  cluster_arrive();
}

void wait_in_cluster(const Call&) {
  cluster_wait();
}

// Which lane is not said, only that it is always the same: here the seed chooses it.
void elect(const Call& call) {
  if (call.u32(1) != kFullWarp) fail("elect.sync: not for the whole warp");
  together(&call.statement, "elect.sync", const_cast<Call*>(&call), [&](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane)
      static_cast<const Call*>(warp.arguments[lane])
          ->set(0, uint64_t{lane == static_cast<int>(options.seed % 32)});
  });
}

void fence_async(const Call&) {
  Thread& thread = current();
  thread.async_fences.push_back(thread.block->races->now(thread.warp->actor));
}

void aligned_nothing(const Call& call) {
  together(&call.statement, call.statement.text.c_str(), nullptr, [](Warp&) {});
}

void fence_init(const Call&) {
  fence_mbarrier_init();
}

void wait_for_previous(const Call&) {
  try {
    wait_for_previous_launch();
  } catch (const std::exception& error) {
    fail("%s", error.what());
  }
}

void nothing(const Call&) {}

}  // namespace

Handler find_synchronisation(const std::string& opcode) {
  static const std::map<std::string, Handler> known = {
      {"mbarrier.init.shared::cta.b64", init},
      {"mbarrier.arrive.shared::cta.b64", arrive},
      {"mbarrier.arrive.expect_tx.shared::cta.b64", arrive_expect},
      {"mbarrier.expect_tx.relaxed.cta.shared::cta.b64", expect},
      {"mbarrier.arrive.release.cluster.shared::cluster.b64", arrive},
      {"mbarrier.arrive.shared::cluster.b64", arrive},
      {"mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64", arrive_expect},
      {"mbarrier.try_wait.parity.shared::cta.b64", try_wait},
      {"mbarrier.test_wait.parity.shared::cta.b64", test_wait},
      {"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", try_wait},
      {"barrier.cluster.arrive.release", arrive_in_cluster},
      {"barrier.cluster.arrive.release.aligned", arrive_in_cluster},
      {"barrier.cluster.wait.acquire", wait_in_cluster},
      {"barrier.cluster.wait.acquire.aligned", wait_in_cluster},
      {"mapa.shared::cluster.u32", map_address},
      {"bar.sync", barrier_sync},
      {"bar.arrive", barrier_arrive},
      {"barrier.cta.sync", barrier_sync},
      {"barrier.cta.arrive", barrier_arrive},
      {"elect.sync", elect},
      {"fence.proxy.async.shared::cta", fence_async},
      {"fence.proxy.async", fence_async},
      {"fence.proxy.async.global", nothing},
      {"fence.mbarrier_init.release.cluster", fence_init},
      {"fence.acq_rel.gpu", nothing},
      {"fence.acq_rel.cta", nothing},
      {"setmaxnreg.inc.sync.aligned.u32", aligned_nothing},
      {"setmaxnreg.dec.sync.aligned.u32", aligned_nothing},
      {"griddepcontrol.wait", wait_for_previous},
      {"griddepcontrol.launch_dependents", nothing},
      {"prefetch.tensormap", nothing},
  };
  const auto found = known.find(opcode);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace fa2::emulation
