#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>

#include "kernel_scope.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace fa2::emulation {

Options options;
unsigned char* shared_memory = nullptr;

namespace {

constexpr size_t kStack_bytes = 128 * 1024;

std::mt19937_64 generator;

// Of the grid that runs. A kernel that waits for the one before it lets that one run in between.
struct State {
  Fiber scheduler;
  Thread* running = nullptr;
  std::string failure;  // of the running thread
  const std::function<void()>* kernel = nullptr;
  std::vector<Warp*> ready;
  std::vector<Thread*> polling;
  std::vector<std::shared_ptr<Copy>> copies;
  std::vector<Warp*> busy;  // with wgmmas to execute
  int64_t idle_polls = 0;   // in a row, while nothing else happened
  int64_t poll_rounds = 0;  // while no asynchronous work happened: who polls may do more than that
  size_t stacks = 0;        // in use, by outer grids too
  dim3 size, grid;
};
State state;
Thread*& running = state.running;

char* stack(size_t i) {
  static size_t count = 0;
  static std::vector<char*> chunks;
  constexpr size_t kChunk = 256;
  while (i >= count) {
    void* memory = mmap(nullptr, kChunk * kStack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for the threads' stacks");
    chunks.push_back(static_cast<char*>(memory));
    count += kChunk;
  }
  return chunks[i / kChunk] + i % kChunk * kStack_bytes;
}

std::string describe(const Thread& thread) {
  char text[160];
  const Block& block = *thread.block;
  std::snprintf(text, sizeof text, "block %u, warp %d, lane %d", block.index.x, thread.warp->index,
                thread.lane);
  return text;
}

[[noreturn]] void thread_main() {
  (*state.kernel)();
  Thread& thread = *running;
  thread.done = true;
  Block& block = *thread.block;
  --block.alive;
  if (!thread.bulk.empty()) fail("the thread ends with a bulk copy that it has not committed");
  for (const auto& [number, group] : thread.bulk_groups)
    for (const auto& copy : group)
      if (!copy->source.empty()) fail("the thread ends before its bulk store has read its shared memory");
  if (!thread.cp_async.empty() || std::any_of(thread.cp_async_groups.begin(), thread.cp_async_groups.end(),
                                              [](const auto& group) { return !group.empty(); }))
    fail("the thread ends with a cp.async in flight");
  if (!thread.warp->wgmmas.empty() && thread.warp->lanes == kFullWarp &&
      std::all_of(thread.warp->threads, thread.warp->threads + 32, [](const Thread& t) { return t.done; }))
    fail("the warp ends with a wgmma in flight");
  thread_left(block);
  switch_fiber(thread.fiber, state.scheduler);
  __builtin_unreachable();
}

void enlist(Warp& warp) {
  if (warp.place >= 0) return;
  warp.place = static_cast<int>(state.ready.size());
  state.ready.push_back(&warp);
}

void delist(Warp& warp) {
  state.ready[warp.place] = state.ready.back();
  state.ready[warp.place]->place = warp.place;
  state.ready.pop_back();
  warp.place = -1;
}

void enter_thread(Thread& thread) {
  running = &thread;
  threadIdx = {static_cast<unsigned>(thread.index), 0, 0};
  blockIdx = thread.block->index;
  shared_memory = thread.block->shared;
}

void resume(Thread& thread) {
  Warp& warp = *thread.warp;
  warp.ready &= ~(1u << thread.lane);
  if (warp.ready == 0) delist(warp);
  enter_thread(thread);
  thread.polling = false;
  switch_fiber(state.scheduler, thread.fiber);
  running = nullptr;
  if (!state.failure.empty()) throw std::runtime_error(state.failure);
  if (!thread.polling) state.idle_polls = 0;
}

// Takes out one element by putting the last one in its place.
template <class T>
void take_out(std::vector<T>& list, size_t i) {
  std::swap(list[i], list.back());
  list.pop_back();
}

// Some piece of asynchronous work, if there is any: half of a store, a load, a warp's next wgmma.
bool run_async() {
  while (!state.copies.empty() || !state.busy.empty()) {
    const size_t i = random_number() % (state.copies.size() + state.busy.size());
    bool done_any;
    if (i < state.copies.size()) {
      const std::shared_ptr<Copy> copy = state.copies[i];
      done_any = copy->read || copy->write;  // else something has waited for it
      copy->read ? copy->finish_read() : copy->finish();
      if (!copy->read && !copy->write) take_out(state.copies, i);
    } else {
      Warp& warp = *state.busy[i - state.copies.size()];
      done_any = execute_wgmma(warp);
      if (!done_any) take_out(state.busy, i - state.copies.size());
    }
    if (!done_any) continue;
    state.idle_polls = 0;
    return true;
  }
  return false;
}

std::string describe_wait(const Block& block, const Wait& wait) {
  char text[200];
  if (std::strcmp(wait.what, "barrier") == 0) {
    const NamedBarrier& b = block.barriers[wait.parity];
    std::snprintf(text, sizeof text, "barrier %u: %d of %d threads there", wait.parity, b.arrived,
                  b.threads < 0 ? block.alive : b.threads);
    return text;
  }
  const auto found = block.mbarriers.find(wait.address);
  if (found == block.mbarriers.end()) return wait.what;
  const auto before = std::count_if(block.mbarriers.begin(), block.mbarriers.end(),
                                    [&](const auto& other) { return other.first < wait.address; });
  const MBarrier& b = found->second;
  std::snprintf(
      text, sizeof text,
      "mbarrier at %u (number %d of the block's), parity %u: phase %u, %d of %d arrivals and %lld bytes "
      "outstanding",
      wait.address, static_cast<int>(before), wait.parity, b.phase, b.pending, b.expected,
      static_cast<long long>(b.bytes));
  return text;
}

[[noreturn]] void report_deadlock(const std::vector<std::unique_ptr<Block>>& blocks) {
  std::string text = "deadlock: nothing can run.";
  for (const auto& block : blocks)
    for (const Warp& warp : block->warps) {
      std::map<std::string, int> lanes;
      for (int lane = 0; lane < 32; ++lane)
        if ((warp.lanes >> lane & 1) && !warp.threads[lane].done)
          ++lanes[describe_wait(*block, warp.threads[lane].wait)];
      for (const auto& [wait, count] : lanes)
        text += "\n  block " + std::to_string(block->index.x) + ", warp " + std::to_string(warp.index) +
                ": " + wait + " (" + std::to_string(count) + " lanes)";
    }
  throw std::runtime_error(text);
}

void run_blocks(std::vector<std::unique_ptr<Block>>& blocks) {
  const auto alive = [&] {
    return std::any_of(blocks.begin(), blocks.end(), [](const auto& b) { return b->alive > 0; });
  };
  while (true) {
    if (options.policy == Policy::kRandom && (!state.copies.empty() || !state.busy.empty()) && chance(4)) {
      run_async();
      continue;
    }
    if (state.ready.empty()) {
      if (!state.polling.empty()) {
        for (Thread* thread : std::exchange(state.polling, {})) wake(*thread);
        const bool more = (++state.idle_polls % 16 == 0 || ++state.poll_rounds % 64 == 0) && run_async();
        if (more) state.poll_rounds = 0;
        if ((state.idle_polls > 1000 || state.poll_rounds > 100000) && !more) report_deadlock(blocks);
        continue;
      }
      if (!alive()) return;
      if (!run_async()) report_deadlock(blocks);
      continue;
    }
    if (!state.polling.empty() && chance(16)) {
      for (Thread* thread : std::exchange(state.polling, {})) wake(*thread);
    }
    Warp& warp = *state.ready[random_number() % state.ready.size()];
    uint32_t lanes = warp.ready;
    // Mostly all lanes that can, in either order; now and then one runs ahead of the others.
    const uint64_t how = random_number() % 16;
    if (how == 0) {
      int skip = static_cast<int>(random_number() % __builtin_popcount(lanes));
      while (skip-- > 0) lanes &= lanes - 1;
      lanes &= -lanes;
    }
    while (lanes != 0) {
      const int lane = how % 2 ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes);
      lanes &= ~(1u << lane);
      if (warp.ready >> lane & 1) resume(warp.threads[lane]);
    }
  }
}

std::unique_ptr<Block> make_block(unsigned index, Cluster& cluster, dim3 size, size_t shared_bytes,
                                  size_t first_stack) {
  auto block = std::make_unique<Block>();
  block->index = {index, 0, 0};
  block->cluster = &cluster;
  block->rank = static_cast<int>(cluster.blocks.size());
  cluster.blocks.push_back(block.get());
  block->races = cluster.races.get();
  block->size = size;
  const int threads = static_cast<int>(size.x);
  block->threads.resize(threads);
  block->warps.resize((threads + 31) / 32);
  block->alive = threads;
  block->shared_bytes = static_cast<uint32_t>(shared_bytes);
  block->shared_memory.reset(std::aligned_alloc(1024, (shared_bytes + 2047) / 1024 * 1024));
  block->shared = static_cast<unsigned char*>(block->shared_memory.get());
  std::memset(block->shared, 0xff, shared_bytes);  // NaN, whatever the type
  block->wgmma_log.resize(threads / 128 + 1);
  for (int i = 0; i < threads; ++i) {
    Thread& thread = block->threads[i];
    thread.block = block.get();
    thread.warp = &block->warps[i / 32];
    thread.index = i;
    thread.lane = i % 32;
    // Stacks that begin at different cache lines: otherwise all would meet in the same sets.
    prepare(thread.fiber, stack(first_stack + i), kStack_bytes - (i % 61) * 64, thread_main);
  }
  for (size_t i = 0; i < block->warps.size(); ++i) {
    Warp& warp = block->warps[i];
    const int lanes = std::min(32, threads - static_cast<int>(i) * 32);
    warp.block = block.get();
    warp.index = static_cast<int>(i);
    warp.actor = block->rank * static_cast<int>(block->warps.size()) + warp.index;
    warp.lanes = lanes == 32 ? kFullWarp : (1u << lanes) - 1;
    warp.threads = &block->threads[i * 32];
    warp.ready = warp.lanes;
    enlist(warp);
  }
  return block;
}

}  // namespace

void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (running == nullptr) throw std::runtime_error(text);
  state.failure = describe(*running) + ": " + text;
  switch_fiber(running->fiber, state.scheduler);  // for ever
  __builtin_unreachable();
}

Thread& current() {
  return *running;
}

bool in_thread() {
  return running != nullptr;
}

uint64_t random_number() {
  return generator();
}

bool chance(int one_in) {
  return generator() % one_in == 0;
}

void suspend(const Wait& wait) {
  running->wait = wait;
  switch_fiber(running->fiber, state.scheduler);
}

void wake(Thread& thread) {
  thread.warp->ready |= 1u << thread.lane;
  enlist(*thread.warp);
}

void poll() {
  running->polling = true;
  state.polling.push_back(running);
  suspend({"a poll of global memory", 0, 0});
}

void hesitate() {
  if (!chance(2)) return;
  wake(*running);
  suspend({"its turn", 0, 0});
}

void finish_together(Warp& warp) {
  warp.arrived = 0;
  for (uint32_t others = warp.lanes & ~(1u << running->lane); others != 0; others &= others - 1)
    wake(warp.threads[__builtin_ctz(others)]);
}

void start(std::shared_ptr<Copy> copy) {
  if (options.policy == Policy::kEarly) return copy->finish();
  state.copies.push_back(std::move(copy));
}

void note_busy(Warp& warp) {
  if (std::find(state.busy.begin(), state.busy.end(), &warp) == state.busy.end()) state.busy.push_back(&warp);
}

void run_grid(const std::function<void()>& kernel, dim3 grid, dim3 size, size_t shared, unsigned cluster) {
  State outer;
  std::swap(state, outer);
  const auto enter = [&] { blockDim = state.size, gridDim = state.grid; };
  state.kernel = &kernel;
  state.size = size, state.grid = grid;
  const size_t stacks = outer.stacks;
  enter();
  // A grid that fits runs at once, as persistent kernels count on; another one block after the other.
  const bool at_once = shared > 0 && grid.x <= static_cast<unsigned>(options.multiprocessors);
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Cluster>> clusters;
  const auto end_blocks = [&] {
    blocks.clear();
    clusters.clear();
    state.copies.clear();
    state.stacks = stacks;
  };
  const auto leave = [&] {
    end_blocks();
    std::swap(state, outer);
    enter();
    if (running != nullptr) enter_thread(*running);
  };
  try {
    for (unsigned i = 0; i < grid.x; ++i) {
      if (i % cluster == 0) {
        clusters.push_back(std::make_unique<Cluster>());
        clusters.back()->races = std::make_unique<Races>(cluster, (size.x + 31) / 32, shared);
      }
      blocks.push_back(make_block(i, *clusters.back(), size, shared, stacks + blocks.size() * size.x));
      state.stacks = stacks + blocks.size() * size.x;
      if (i + 1 < grid.x && (at_once || (i + 1) % cluster != 0)) continue;
      run_blocks(blocks);
      for (const auto& copy : state.copies)
        if (copy->read) fail("the block ends with a copy to or from its shared memory in flight");
      for (auto& copy : state.copies) copy->finish();  // what needs no wait: the writes of stores
      end_blocks();
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void seed_generator() {
  generator.seed(options.seed * 0x9e3779b97f4a7c15u + 1);
}

}  // namespace fa2::emulation
