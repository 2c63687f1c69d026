// Loads and stores of one thread or one warp: ld, st, red, cp.async, ldmatrix, stmatrix.
#include <algorithm>
#include <map>

#include "machine.h"
#include "ptx.h"

namespace fa2::emulation {
namespace {

// ld.shared, st.shared; vectors are {a, b, ..}.
void load_shared(const Call& call) {
  const int count = static_cast<int>(call.count(0));
  const uint32_t address = static_cast<uint32_t>(call.address(1));
  const unsigned char* from = shared_pointer(*current().block, address, count * 4);
  current().block->races->read(current(), *current().block, address, count * 4);
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i * 4, 4);
    call.set(call.part(0, i), bits);
  }
}

void store_shared(const Call& call) {
  const int count = static_cast<int>(call.count(1));
  const auto [block, address] = place_of(static_cast<uint32_t>(call.address(0)));
  unsigned char* to = shared_pointer(block, address, count * 4);
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(call.value(call.part(1, i)));
    std::memcpy(to + i * 4, &bits, 4);
  }
  block.races->write(current(), block, address, count * 4);
}

void red_add_float(const Call& call) {
  auto* target = reinterpret_cast<float*>(call.address(0));
  const int count = static_cast<int>(call.count(1));
  check_global(target, count * 4, "red");
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(call.value(call.part(1, i)));
    float x;
    std::memcpy(&x, &bits, 4);
    target[i] += x;
  }
}

void red_add_int(const Call& call) {
  auto* target = reinterpret_cast<int*>(call.address(0));
  check_global(target, 4, "red");
  *target += static_cast<int>(call.u32(1));
}

template <class T>
void load_acquire(const Call& call) {
  auto* source = reinterpret_cast<const T*>(call.address(1));
  check_global(source, sizeof(T), "ld.acquire");
  poll();
  call.set(0, *source);
}

void load_floats(const Call& call) {
  auto* source = reinterpret_cast<const float*>(call.address(1));
  check_global(source, 16, "ld");
  for (size_t i = 0; i < call.count(0); ++i) call.set(call.part(0, i), source[i]);
}

// cp.async [shared], [global], bytes {, bytes that are read; the rest becomes zeros}: done at once or when
// the thread waits for its group.
void cp_async(const Call& call) {
  Thread& thread = current();
  const uint32_t to = static_cast<uint32_t>(call.address(0));
  const auto* from = reinterpret_cast<const unsigned char*>(call.address(1));
  const uint32_t bytes = call.u32(2), read = call.statement.arguments.size() > 3 ? call.u32(3) : bytes;
  unsigned char* target = shared_pointer(*thread.block, to, bytes);
  if (read > bytes) fail("cp.async reads more than it writes");
  if (read > 0) check_global(from, read, "cp.async");
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
    fail("cp.async from %p: not aligned to %u bytes", from, bytes);
  thread.block->races->begin_cp_async(thread, to, bytes);
  std::function<void()> work = [=] {
    std::memset(target, 0, bytes);
    std::memcpy(target, from, read);
  };
  if (options.policy == Policy::kEarly || (options.policy == Policy::kRandom && chance(2)))
    std::exchange(work, {})();
  thread.cp_async.push_back({{to, bytes}, std::move(work)});
}

void cp_async_commit(const Call&) {
  Thread& thread = current();
  thread.cp_async_groups.push_back(std::exchange(thread.cp_async, {}));
}

void cp_async_wait(const Call& call) {
  Thread& thread = current();
  auto& groups = thread.cp_async_groups;
  for (; groups.size() > call.u32(0); groups.pop_front())
    for (const CpAsync& copy : groups.front()) {
      if (copy.work) copy.work();
      thread.block->races->end_cp_async(thread, copy.target.address, copy.target.bytes);
    }
}

// ldmatrix, stmatrix (PTX ISA, "Matrix load/store"): lane 8 i + r names row r of matrix i; lane l holds of
// row l / 4 the elements 2 (l % 4) and the next. .trans exchanges rows and columns of the registers' side.
void move_matrices(const Call& call) {
  const bool store = call.statement.opcode[0] == 's';
  const size_t list = store ? 1 : 0, address = store ? 0 : 1;
  const bool trans = call.statement.has("trans");
  const int count = call.statement.has("x4") ? 4 : call.statement.has("x2") ? 2 : 1;
  if (static_cast<int>(call.count(list)) != count)
    fail("%s: wrong number of registers", call.statement.opcode.c_str());
  together(&call.statement, call.statement.text.c_str(), const_cast<Call*>(&call), [&](Warp& warp) {
    const auto lane_call = [&](int lane) -> const Call& {
      return *static_cast<const Call*>(warp.arguments[lane]);
    };
    for (int i = 0; i < count; ++i) {
      uint16_t matrix[8][8];
      const auto element = [&](int lane, int e) -> uint16_t& {
        return trans ? matrix[lane % 4 * 2 + e][lane / 4] : matrix[lane / 4][lane % 4 * 2 + e];
      };
      if (store)
        for (int lane = 0; lane < 32; ++lane) {
          const uint32_t bits = static_cast<uint32_t>(lane_call(lane).value(lane_call(lane).part(list, i)));
          element(lane, 0) = static_cast<uint16_t>(bits),
                        element(lane, 1) = static_cast<uint16_t>(bits >> 16);
        }
      for (int row = 0; row < 8; ++row) {
        const uint32_t at = static_cast<uint32_t>(lane_call(i * 8 + row).address(address));
        unsigned char* memory = shared_pointer(*warp.block, at, 16);
        if (store) {
          std::memcpy(memory, matrix[row], 16);
          warp.block->races->write(warp.threads[i * 8 + row], *warp.block, at, 16);
        } else {
          warp.block->races->read(warp.threads[i * 8 + row], *warp.block, at, 16);
          std::memcpy(matrix[row], memory, 16);
        }
      }
      if (!store)
        for (int lane = 0; lane < 32; ++lane)
          lane_call(lane).set(lane_call(lane).part(list, i),
                              element(lane, 0) | static_cast<uint32_t>(element(lane, 1)) << 16);
    }
  });
}

}  // namespace

Handler find_shared_memory(const std::string& opcode) {
  static const std::map<std::string, Handler> known = {
      {"ld.shared.b32", load_shared},
      {"ld.shared.f32", load_shared},
      {"ld.shared.u32", load_shared},
      {"ld.shared.v2.f32", load_shared},
      {"ld.shared.v2.b32", load_shared},
      {"ld.shared.v4.f32", load_shared},
      {"ld.shared.v4.b32", load_shared},
      {"st.shared.b32", store_shared},
      {"st.shared::cluster.b32", store_shared},
      {"st.shared::cluster.v4.b32", store_shared},
      {"st.shared::cluster.v4.f32", store_shared},
      {"st.shared.f32", store_shared},
      {"st.shared.u32", store_shared},
      {"st.shared.v2.f32", store_shared},
      {"st.shared.v2.b32", store_shared},
      {"st.shared.v4.f32", store_shared},
      {"st.shared.v4.b32", store_shared},
      {"red.relaxed.gpu.global.add.f32", red_add_float},
      {"red.relaxed.gpu.global.add.v2.f32", red_add_float},
      {"red.relaxed.gpu.global.add.v4.f32", red_add_float},
      {"red.release.gpu.global.add.s32", red_add_int},
      {"red.relaxed.gpu.global.add.s32", red_add_int},
      {"ld.acquire.gpu.global.s32", load_acquire<int>},
      {"ld.acquire.gpu.global.u64", load_acquire<uint64_t>},
      {"ld.global.cg.v4.f32", load_floats},
      {"cp.async.cg.shared.global.L2::128B", cp_async},
      {"cp.async.cg.shared.global", cp_async},
      {"cp.async.ca.shared.global", cp_async},
      {"cp.async.commit_group", cp_async_commit},
      {"cp.async.wait_group", cp_async_wait},
      {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", move_matrices},
      {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", move_matrices},
      {"ldmatrix.sync.aligned.m8n8.x2.shared.b16", move_matrices},
      {"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16", move_matrices},
      {"stmatrix.sync.aligned.m8n8.x4.shared.b16", move_matrices},
      {"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", move_matrices},
      {"stmatrix.sync.aligned.m8n8.x2.shared.b16", move_matrices},
      {"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16", move_matrices},
  };
  const auto found = known.find(opcode);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace fa2::emulation
