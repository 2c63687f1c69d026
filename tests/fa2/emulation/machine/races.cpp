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
void Races::each(uint32_t address, uint32_t bytes, const Visit& visit) {
  const uint32_t first = (address - kSharedBase) / 16, last = (address - kSharedBase + bytes - 1) / 16;
  for (uint32_t i = first; i <= last; ++i) visit(granules_[i], i, kSharedBase + i * 16);
}

void Races::check_written(const Thread& thread, const Granule& granule, uint32_t address, const char* what) const {
  const int warp = thread.warp->index;
  if (granule.writer < 0 || granule.writer == warp || knows(warp, granule.writer, granule.written)) return;
  if (granule.writer < warps_)
    fail("race: %s shared memory at %u, which warp %d writes, with no order between them", what, address,
         granule.writer);
  fail("race: %s shared memory at %u, into which a copy goes, with no wait for it", what, address);
}

void Races::check_read(const Thread& thread, size_t granule, uint32_t address, const char* what) const {
  const int warp = thread.warp->index;
  const uint32_t* times = &reads_[granule * warps_ * 3];
  for (int i = 0; i < warps_ * 3; ++i) {
    // A warp's own ordinary reads come before its next access.
    if (times[i] <= clocks_[warp][i / 3] || i == warp * 3 + kOrdinary) continue;
    fail("race: %s shared memory at %u, which %s of warp %d reads, with no order between them", what, address,
         i % 3 == kWgmma ? "a wgmma" : i % 3 == kBulk ? "a bulk store" : "a load", i / 3);
  }
}

void Races::read(const Thread& thread, uint32_t address, uint32_t bytes) {
  each(address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, "a load from");
    read_time(i, thread.warp->index, kOrdinary) = now(thread.warp->index);
  });
}

void Races::write(const Thread& thread, uint32_t address, uint32_t bytes) {
  each(address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, "a store to");
    check_read(thread, i, at, "a store to");
    granule = {thread.warp->index, now(thread.warp->index), &thread, static_cast<uint32_t>(thread.async_fences.size())};
  });
}

void Races::begin_read(const Thread& thread, Engine engine, uint32_t address, uint32_t bytes, uint64_t group) {
  const int warp = thread.warp->index;
  const char* const what = engine == kWgmma ? "a wgmma reads" : "a bulk store reads";
  each(address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, what);
    // The writer fences, and then the barrier: the fence is known to the reader.
    if (const Thread* writer = granule.generic_writer) {
      if (writer->async_fences.size() <= granule.fences ||
          (writer->warp->index != warp && !knows(warp, writer->warp->index, writer->async_fences[granule.fences])))
        fail("%s shared memory at %u that warp %d, lane %d wrote, with no fence.proxy.async by it in between", what,
             at, writer->warp->index, writer->lane);
    }
    read_time(i, warp, engine) = kPending | static_cast<uint32_t>(group);
  });
}

void Races::end_read(int warp, Engine engine, uint32_t address, uint32_t bytes, uint64_t group) {
  each(address, bytes, [&](Granule&, uint32_t i, uint32_t) {
    uint32_t& time = read_time(i, warp, engine);
    if (time == (kPending | static_cast<uint32_t>(group))) time = now(warp);
  });
}

void Races::begin_write(const Thread& thread, uint32_t address, uint32_t bytes, int actor, uint32_t time) {
  each(address, bytes, [&](Granule& granule, uint32_t i, uint32_t at) {
    check_written(thread, granule, at, "a copy to");
    check_read(thread, i, at, "a copy to");
    granule = {actor, time, nullptr, 0};
  });
}

void Races::begin_cp_async(const Thread& thread, uint32_t address, uint32_t bytes) {
  write(thread, address, bytes);
  each(address, bytes, [&](Granule& granule, uint32_t, uint32_t) { granule.written = kPending; });
}

void Races::end_cp_async(const Thread& thread, uint32_t address, uint32_t bytes) {
  each(address, bytes, [&](Granule& granule, uint32_t, uint32_t) {
    if (granule.written == kPending && granule.writer == thread.warp->index) granule.written = now(thread.warp->index);
  });
}

}  // namespace fa2::emulation
