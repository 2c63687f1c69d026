// The emulated GPU: thread blocks of warps of threads, each thread a fiber; a scheduler that runs them in an
// order chosen by the seed; and an engine for what is asynchronous (TMA, wgmma), whose work happens at a
// moment chosen by the seed, at the latest when something waits for it.
//
// Threads change over only where the GPU synchronises them: what lies between is one step. Read next: ptx.h,
// the instructions.
#pragma once
#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fiber.h"
#include "races.h"

namespace fa2::emulation {

constexpr uint32_t kSharedBase = 1024;  // a block's first address: the KB below it is the system's, on Hopper
constexpr int kSharedLimit = 227 * 1024;
constexpr uint32_t kFullWarp = 0xffffffffu;

// When asynchronous work happens: at a random moment, at once, or only when something waits for it.
enum class Policy : int { kRandom, kEarly, kLate };

struct Options {
  uint64_t seed = 0;
  Policy policy = Policy::kRandom;
  int multiprocessors = 4;
};
extern Options options;

// Ends the launch with an error that names the current thread. Allowed anywhere.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Thread;
struct Warp;
struct Block;

// A shared-memory barrier of mbarrier.* (PTX ISA, mbarrier): a phase ends when neither arrivals nor bytes are
// outstanding.
struct MBarrier {
  int expected = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  std::vector<Thread*> waiting;
  int actor = 0, made_by = 0;  // for races: the copies that complete here, the warp that initialised it
  uint32_t made_at = 0;
  bool visible = false;      // to copies and other blocks, by fence.mbarrier_init
  Clock arrived, completed;  // in this phase, in the last one
};

// A barrier of barrier.cta.*.
struct NamedBarrier {
  int threads = 0, arrived = 0;
  std::vector<Thread*> waiting;
  Clock clock;
};

// A piece of shared memory.
struct Piece {
  uint32_t address, bytes;
};

// A copy by cp.async, of at most 16 bytes; `work` is empty when done.
struct CpAsync {
  Piece target;
  std::function<void()> work;
};

// A copy by the TMA or the bulk engine: it reads its source, and later writes its target. Empty when done.
struct Copy {
  std::function<void()> read, write;
  std::vector<Piece> source;  // in shared memory
  void finish_read() {
    if (auto work = std::exchange(read, nullptr)) work();
  }
  void finish() {
    finish_read();
    if (auto work = std::exchange(write, nullptr)) work();
  }
};

// What a thread stands at, for the report of a deadlock.
struct Wait {
  const char* what = "";
  uint32_t address = 0, parity = 0;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int index = 0, lane = 0;
  bool done = false, polling = false;
  Wait wait;
  std::vector<uint32_t> async_fences;     // the warp's time at each fence.proxy.async
  uint64_t wgmmas = 0, wgmma_groups = 0;  // issued, committed
  bool wgmma_fenced = false;
  uint32_t cluster_phase = 0;               // of the cluster's barrier, that the thread has arrived in
  std::vector<std::shared_ptr<Copy>> bulk;  // not yet committed
  std::deque<std::pair<uint64_t, std::vector<std::shared_ptr<Copy>>>> bulk_groups;  // numbered, oldest first
  uint64_t bulk_groups_begun = 0;
  std::vector<CpAsync> cp_async;
  std::deque<std::vector<CpAsync>> cp_async_groups;
};

// One warp's share, 16 rows, of a wgmma instruction (wgmma.cpp).
struct Wgmma;

struct Warp {
  Block* block = nullptr;
  int index = 0, actor = 0;    // in the block; among the cluster's, for races
  uint32_t lanes = kFullWarp;  // that exist
  uint32_t ready = 0;
  int place = -1;  // in the scheduler's list
  Thread* threads = nullptr;
  // The instruction that the whole warp executes together, as far as its lanes have come.
  const void* at = nullptr;
  uint32_t arrived = 0;
  void* arguments[32] = {};
  std::deque<std::shared_ptr<Wgmma>> wgmmas;  // issued and not executed, oldest first
  uint64_t wgmmas_executed = 0;
  std::deque<std::pair<uint64_t, std::vector<Piece>>> wgmma_reads;  // not waited for: group, operands
};

// The barrier of barrier.cluster.*: arriving and waiting are two steps.
struct ClusterBarrier {
  int arrived = 0;
  uint32_t phase = 0;
  std::vector<Thread*> waiting;
  Clock clock, completed;
};

// Thread blocks that run together and reach each other's shared memory; mostly one alone.
struct Cluster {
  std::vector<Block*> blocks;
  std::unique_ptr<Races> races;
  ClusterBarrier barrier;
};

struct Block {
  uint3 index = {};
  Cluster* cluster = nullptr;
  int rank = 0;  // in the cluster
  dim3 size;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::unique_ptr<void, void (*)(void*)> shared_memory{nullptr, std::free};
  unsigned char* shared = nullptr;  // the same
  uint32_t shared_bytes = 0;
  int alive = 0;
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  NamedBarrier barriers[16];
  Clock last_barrier;      // what those who waited at the barrier that ended last now know
  int or_votes = 0;        // __syncthreads_or
  Races* races = nullptr;  // the cluster's
  std::vector<std::vector<std::shared_ptr<Wgmma>>> wgmma_log;  // by warpgroup: what its n-th wgmma is
};

Thread& current();
bool in_thread();  // and not in the scheduler
uint64_t random_number();
bool chance(int one_in);

// The current thread stops until wake().
void suspend(const Wait& wait);
void wake(Thread& thread);
// Lets others run; for loops that poll memory.
void poll();
// Lets others run now and then: where threads that do not wait for each other meet, such as an atomic
// addition.
void hesitate();

// Blocks until every lane of the warp is at `at`. The last to come calls work(warp), which finds each lane's
// `argument` in warp.arguments.
template <class Work>
void together(const void* at, const char* name, void* argument, const Work& work);

// A place in the shared memory of a block of the current thread's cluster. Addresses "of the cluster", by
// mapa, name the block in their upper bits; others are the thread's own block's.
struct Place {
  Block& block;
  uint32_t address;
};
Place place_of(uint32_t cluster_address);
uint32_t cluster_address(uint32_t address, uint32_t rank);

// The block's shared memory at an address, checked.
unsigned char* shared_pointer(Block& block, uint32_t address, uint32_t bytes);
// Global memory, checked against what the caller of the kernel said exists.
void check_global(const void* pointer, uint64_t bytes, const char* what);
void allow_global(const void* pointer, uint64_t bytes);
void forget_global();

// mbarrier.
void mbarrier_init(uint32_t address, int arrivals);
void fence_mbarrier_init();
MBarrier& mbarrier_at(Block& block, uint32_t address);
// The same for one that a copy is to complete on, or that another block arrives at.
MBarrier& visible_mbarrier_at(Block& block, uint32_t address);
void mbarrier_arrive(Block& block, uint32_t address, int64_t expect_bytes);
void mbarrier_complete(Block& block, uint32_t address, int64_t bytes);
void mbarrier_wait(uint32_t address, uint32_t parity);
bool mbarrier_has_ended(uint32_t address, uint32_t parity);

// barrier.cta; threads < 0: all of the block.
void barrier(int id, int threads, bool wait);

void thread_left(Block& block);  // one that has ended

void cluster_arrive();
void cluster_wait();

// Asynchronous copies.
void start(std::shared_ptr<Copy> copy);

// Runs a grid to its end, or throws std::runtime_error.
void run_grid(const std::function<void()>& kernel, dim3 grid, dim3 size, size_t shared, unsigned cluster);

// Kernels in the order of their launches; each runs when the next one is launched, or at finish_launches. One
// that is launched `early` begins before the one before it, which runs when the first thread waits for it.
void launch_in_order(std::function<void()> run, bool early);
void finish_launches();
void wait_for_previous_launch();

// One warp's next wgmma, if all its lanes have issued it.
bool execute_wgmma(Warp& warp);
void note_busy(Warp& warp);  // it has one

// --- implementation of together()

void finish_together(Warp& warp);

template <class Work>
void together(const void* at, const char* name, void* argument, const Work& work) {
  Thread& thread = current();
  Warp& warp = *thread.warp;
  if (warp.arrived != 0 && warp.at != at)
    fail("%s: the lanes of the warp are at different instructions", name);
  warp.at = at;
  warp.arguments[thread.lane] = argument;
  warp.arrived |= 1u << thread.lane;
  if (warp.arrived != warp.lanes) {
    suspend({name, 0, 0});
    return;
  }
  work(warp);
  finish_together(warp);
}

}  // namespace fa2::emulation
