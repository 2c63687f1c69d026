// Order between accesses to the shared memory of a cluster's blocks (happens-before, by vector clocks): an
// access that conflicts with an earlier one must come after it by a chain of barriers, whatever the order in
// which they ran here.
//
// Actors are the cluster's warps, whose clocks tick when they arrive at a barrier, and the mbarriers, which
// stand for the copies that complete on them. An asynchronous read (wgmma, a store by TMA) lasts until its
// warp has waited for it, and nobody may write there before. What kernels do through plain pointers is not
// seen.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fa2::emulation {

struct Block;
struct Thread;

using Clock = std::vector<uint32_t>;  // by actor: how much of what it did is known

class Races {
 public:
  // Asynchronous readers of a warp that are waited for apart from each other.
  enum Engine { kWgmma = 0, kBulk = 1 };

  Races(int blocks, int warps_each, uint32_t shared_bytes);

  int add_actor();  // an mbarrier; warps have the numbers before
  uint32_t now(int warp) const { return clocks_[warp][warp]; }
  bool knows(int warp, int actor, uint32_t time) const { return clocks_[warp][actor] >= time; }

  // What this warp knows, and its own deeds up to now, become known to those who acquire `clock`.
  void release(int warp, Clock& clock);
  void acquire(int warp, const Clock& clock);

  // Ordinary accesses by the thread.
  void read(const Thread& thread, const Block& block, uint32_t address, uint32_t bytes);
  void write(const Thread& thread, const Block& block, uint32_t address, uint32_t bytes);

  // Asynchronous accesses, from the instruction on. Reads by the async proxy also need fence.proxy.async.
  void begin_read(const Thread& thread, Engine engine, uint32_t address, uint32_t bytes, uint64_t group);
  void end_read(const Thread& thread, Engine engine, uint32_t address, uint32_t bytes, uint64_t group);
  // By a copy that completes on an mbarrier, in its phase `time`.
  void begin_copy_from(const Thread& thread, uint32_t address, uint32_t bytes, int actor, uint32_t time);
  void begin_copy_to(const Thread& thread, const Block& block, uint32_t address, uint32_t bytes, int actor,
                     uint32_t time);
  // cp.async: known to others once the thread has waited for it and arrived somewhere.
  void begin_cp_async(const Thread& thread, uint32_t address, uint32_t bytes);
  void end_cp_async(const Thread& thread, uint32_t address, uint32_t bytes);

 private:
  static constexpr uint32_t kPending = 0x80000000;  // later than all that anyone can know

  struct Granule {    // 16 bytes
    int writer = -1;  // actor
    uint32_t written = 0;
    const Thread* generic_writer = nullptr;  // through the generic proxy
    uint32_t fences = 0;                     // that this thread had executed before
    int copier = -1;                         // reads it, until this actor's time `copied`
    uint32_t copied = 0;
  };

  template <class Visit>
  void each(const Block& block, uint32_t address, uint32_t bytes, const Visit& visit);
  std::string name(int warp) const;
  void check_fenced(const Thread& thread, const Granule& granule, uint32_t address, const char* what) const;
  void check_written(const Thread& thread, const Granule& granule, uint32_t address, const char* what) const;
  void check_read(const Thread& thread, size_t granule, uint32_t address, const char* what) const;
  uint32_t& read_time(size_t granule, int warp, int engine) {
    return reads_[(granule * warps_ + warp) * 3 + engine];
  }

  int warps_each_, warps_, actors_;
  size_t granules_each_;
  std::vector<Clock> clocks_;  // by warp
  std::vector<Granule> granules_;
  std::vector<uint32_t> reads_;  // by granule, warp, and engine (kWgmma, kBulk, ordinary)
};

}  // namespace fa2::emulation
