#include "races.h"

#include <algorithm>

#include "machine.h"

namespace fa2::emulation {

constexpr int kOrdinary = 2;
constexpr int kMostBarriers = 96;

Races::Races(int warps, uint32_t shared_bytes)
    : warps_(warps),
      actors_(warps),
      clocks_(warps, Clock(warps + kMostBarriers)),
      granules_(shared_bytes / 16 + 1),
      reads_(granules_.size() * warps * 3) {
  for (int i = 0; i < warps; ++i) clocks_[i][i] = 1;
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
  for (uint32_t i = first; i <= last; ++i)
    visit(granules_[block.place / 16 + i], block.place / 16 + i, kSharedBase + i * 16);
}

void Races::check_written(const Thread& thread, const Granule& granule, uint32_t address, const char* what) const {
  const int warp = thread.warp->actor;
  if (granule.writer < 0 || granule.writer == warp || knows(warp, granule.writer, granule.written)) return;
  if (granule.writer < warps_)
    fail("race: %s shared memory at %u, which warp %d writes, with no order between them", what, address,
         granule.writer);
  fail("race: %s shared memory at %u, into which a copy goes, with no wait for it", what, address);
}

void Races::check_read(const Thread& thread, const Granule& granule, size_t i_granule, uint32_t address,
                       const char* what) const {
  const int warp = thread.warp->actor;
  if (granule.copy_reader >= 0 && !knows(warp, granule.copy_reader, granule.copy_read))
    fail("race: %s shared memory at %u, which a copy to another block reads, with no order between them", what,
         address);
  const uint32_t* times = &reads_[i_granule * warps_ * 3];
  for (int i = 0; i < warps_ * 3; ++i) {
    // A warp's own ordinary reads come before its next access.
    if (times[i] <= clocks_[warp][i / 3] || i == warp * 3 + kOrdinary) continue;
    fail("race: %s shared memory at %u, which %s of warp %d reads, with no order between them", what, address,
         i % 3 == kWgmma ? "a wgmma" : i % 3 == kBulk ? "a bulk store" : "a load", i / 3);
  }
}

void Races::read(const Thread& thread, uint32_t address, uint32_t bytes) {
  each(*thread.block, address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, "a load from");
    read_time(i, thread.warp->actor, kOrdinary) = now(thread.warp->actor);
  });
}

void Races::write(const Thread& thread, uint32_t address, uint32_t bytes) {
  each(*thread.block, address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, "a store to");
    check_read(thread, granule, i, at, "a store to");
    granule = {thread.warp->actor, now(thread.warp->actor), &thread, static_cast<uint32_t>(thread.async_fences.size())};
  });
}

// Generic writes that the async proxy reads: the writer fences, and then the barrier, so the fence is known to the
// reader.
void Races::check_async_source(const Thread& thread, const Granule& granule, uint32_t address,
                               const char* what) const {
  const Thread* const writer = granule.generic_writer;
  if (writer == nullptr) return;
  const int warp = thread.warp->actor;
  if (writer->async_fences.size() <= granule.fences ||
      (writer->warp->actor != warp && !knows(warp, writer->warp->actor, writer->async_fences[granule.fences])))
    fail("%s shared memory at %u that warp %d, lane %d wrote, with no fence.proxy.async by it in between", what,
         address, writer->warp->actor, writer->lane);
}

void Races::begin_read(const Thread& thread, Engine engine, uint32_t address, uint32_t bytes, uint64_t group) {
  const int warp = thread.warp->actor;
  const char* const what = engine == kWgmma ? "a wgmma reads" : "a bulk store reads";
  each(*thread.block, address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, what);
    check_async_source(thread, granule, at, what);
    read_time(i, warp, engine) = kPending | static_cast<uint32_t>(group);
  });
}

void Races::end_read(const Warp& warp, Engine engine, uint32_t address, uint32_t bytes, uint64_t group) {
  each(*warp.block, address, bytes, [&](Granule&, uint32_t i, uint32_t) {
    uint32_t& time = read_time(i, warp.actor, engine);
    if (time == (kPending | static_cast<uint32_t>(group))) time = now(warp.actor);
  });
}

void Races::begin_write(const Thread& thread, const Block& target, uint32_t address, uint32_t bytes, int actor,
                        uint32_t time) {
  each(target, address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, "a copy to");
    check_read(thread, granule, i, at, "a copy to");
    granule = {actor, time};
  });
}

void Races::begin_copy_read(const Thread& thread, uint32_t address, uint32_t bytes, int actor, uint32_t time) {
  each(*thread.block, address, bytes, [&](Granule& granule, uint32_t, uint32_t at) {
    check_written(thread, granule, at, "a copy from");
    check_async_source(thread, granule, at, "a copy reads");
    granule.copy_reader = actor;
    granule.copy_read = time;
  });
}

void Races::begin_cp_async(const Thread& thread, uint32_t address, uint32_t bytes) {
  write(thread, address, bytes);
  each(*thread.block, address, bytes, [&](Granule& granule, uint32_t, uint32_t) { granule.written = kPending; });
}

void Races::end_cp_async(const Thread& thread, uint32_t address, uint32_t bytes) {
  each(*thread.block, address, bytes, [&](Granule& granule, uint32_t, uint32_t) {
    if (granule.written == kPending && granule.writer == thread.warp->actor) granule.written = now(thread.warp->actor);
  });
}

}  // namespace fa2::emulation
