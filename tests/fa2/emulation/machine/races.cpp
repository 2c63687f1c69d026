#include "races.h"

#include <algorithm>

#include "machine.h"

namespace fa2::emulation {

constexpr int kOrdinary = 2;
constexpr int kMostBarriers = 96;

Races::Races(int blocks, int warps_each, uint32_t shared_bytes)
    : warps_each_(warps_each),
      warps_(blocks * warps_each),
      actors_(warps_),
      granules_each_(shared_bytes / 16 + 1),
      clocks_(warps_, Clock(warps_ + kMostBarriers)),
      granules_(granules_each_ * blocks),
      reads_(granules_.size() * warps_ * 3) {
  for (int i = 0; i < warps_; ++i) clocks_[i][i] = 1;
}

int Races::add_actor() {
  if (actors_ == warps_ + kMostBarriers) fail("more than %d mbarriers", kMostBarriers);
  return actors_++;
}

void Races::release(int warp, Clock& clock) {
  clock.resize(clocks_[warp].size());
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], clocks_[warp][i]);
  ++clocks_[warp][warp];
}

void Races::acquire(int warp, const Clock& clock) {
  for (size_t i = 0; i < clock.size(); ++i) clocks_[warp][i] = std::max(clocks_[warp][i], clock[i]);
}

template <class Visit>
void Races::each(const Block& block, uint32_t address, uint32_t bytes, const Visit& visit) {
  const uint32_t first = (address - kSharedBase) / 16, last = (address - kSharedBase + bytes - 1) / 16;
  const size_t base = block.rank * granules_each_;
  for (uint32_t i = first; i <= last; ++i) visit(granules_[base + i], base + i, kSharedBase + i * 16);
}

std::string Races::name(int warp) const {
  std::string text = "warp " + std::to_string(warp % warps_each_);
  return warps_ > warps_each_ ? text + " of the cluster's block " + std::to_string(warp / warps_each_) : text;
}

void Races::check_written(const Thread& thread, const Granule& granule, uint32_t address,
                          const char* what) const {
  const int warp = thread.warp->actor;
  if (granule.writer < 0 || granule.writer == warp || knows(warp, granule.writer, granule.written)) return;
  if (granule.writer < warps_)
    fail("race: %s shared memory at %u, which %s writes, with no order between them", what, address,
         name(granule.writer).c_str());
  fail("race: %s shared memory at %u, into which a copy goes, with no wait for it", what, address);
}

void Races::check_read(const Thread& thread, size_t granule, uint32_t address, const char* what) const {
  const int warp = thread.warp->actor;
  const uint32_t* times = &reads_[granule * warps_ * 3];
  for (int i = 0; i < warps_ * 3; ++i) {
    // A warp's own ordinary reads come before its next access.
    if (times[i] <= clocks_[warp][i / 3] || i == warp * 3 + kOrdinary) continue;
    fail("race: %s shared memory at %u, which %s of %s reads, with no order between them", what, address,
         i % 3 == kWgmma  ? "a wgmma"
         : i % 3 == kBulk ? "a bulk store"
                          : "a load",
         name(i / 3).c_str());
  }
  const Granule& its = granules_[granule];
  if (its.copier >= 0 && !knows(warp, its.copier, its.copied))
    fail("race: %s shared memory at %u, from which a copy goes, with no wait for it", what, address);
}

// The writer fences, and then comes the barrier: the fence is known to the reader.
void Races::check_fenced(const Thread& thread, const Granule& granule, uint32_t address,
                         const char* what) const {
  const Thread* const writer = granule.generic_writer;
  if (writer == nullptr) return;
  const int warp = writer->warp->actor;
  if (writer->async_fences.size() <= granule.fences ||
      (warp != thread.warp->actor && !knows(thread.warp->actor, warp, writer->async_fences[granule.fences])))
    fail("%s shared memory at %u that %s, lane %d wrote, with no fence.proxy.async by it in between", what,
         address, name(warp).c_str(), writer->lane);
}

void Races::read(const Thread& thread, const Block& block, uint32_t address, uint32_t bytes) {
  each(block, address, bytes, [&](Granule& granule, size_t i, uint32_t at) {
    check_written(thread, granule, at, "a load from");
    read_time(i, thread.warp->actor, kOrdinary) = now(thread.warp->actor);
  });
}

void Races::write(const Thread& thread, const Block& block, uint32_t address, uint32_t bytes) {
  each(block, address, bytes, [&](Granule& granule, size_t i, uint32_t at) {
    check_written(thread, granule, at, "a store to");
    check_read(thread, i, at, "a store to");
    granule = {thread.warp->actor, now(thread.warp->actor), &thread,
               static_cast<uint32_t>(thread.async_fences.size())};
  });
}

void Races::begin_read(const Thread& thread, Engine engine, uint32_t address, uint32_t bytes,
                       uint64_t group) {
  const char* const what = engine == kWgmma ? "a wgmma reads" : "a bulk store reads";
  each(*thread.block, address, bytes, [&](Granule& granule, size_t i, uint32_t at) {
    check_written(thread, granule, at, what);
    check_fenced(thread, granule, at, what);
    read_time(i, thread.warp->actor, engine) = kPending | static_cast<uint32_t>(group);
  });
}

void Races::end_read(const Thread& thread, Engine engine, uint32_t address, uint32_t bytes, uint64_t group) {
  each(*thread.block, address, bytes, [&](Granule&, size_t i, uint32_t) {
    uint32_t& time = read_time(i, thread.warp->actor, engine);
    if (time == (kPending | static_cast<uint32_t>(group))) time = now(thread.warp->actor);
  });
}

void Races::begin_copy_from(const Thread& thread, uint32_t address, uint32_t bytes, int actor,
                            uint32_t time) {
  each(*thread.block, address, bytes, [&](Granule& granule, size_t, uint32_t at) {
    check_written(thread, granule, at, "a copy reads");
    check_fenced(thread, granule, at, "a copy reads");
    granule.copier = actor, granule.copied = time;
  });
}

void Races::begin_copy_to(const Thread& thread, const Block& block, uint32_t address, uint32_t bytes,
                          int actor, uint32_t time) {
  each(block, address, bytes, [&](Granule& granule, size_t i, uint32_t at) {
    check_written(thread, granule, at, "a copy to");
    check_read(thread, i, at, "a copy to");
    granule = {actor, time, nullptr, 0};
  });
}

void Races::begin_cp_async(const Thread& thread, uint32_t address, uint32_t bytes) {
  write(thread, *thread.block, address, bytes);
  each(*thread.block, address, bytes,
       [&](Granule& granule, size_t, uint32_t) { granule.written = kPending; });
}

void Races::end_cp_async(const Thread& thread, uint32_t address, uint32_t bytes) {
  each(*thread.block, address, bytes, [&](Granule& granule, size_t, uint32_t) {
    if (granule.written == kPending && granule.writer == thread.warp->actor)
      granule.written = now(thread.warp->actor);
  });
}

}  // namespace fa2::emulation
