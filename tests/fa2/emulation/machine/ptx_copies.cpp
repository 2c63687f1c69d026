// The bulk copy engine: cp.async.bulk and cp.reduce.async.bulk, of contiguous bytes or of a tensor map's
// boxes (PTX ISA, "Data movement: asynchronous copy"). What it does is put in a queue; a store reads shared
// memory at one moment and writes global memory at a later one.
#include <algorithm>
#include <map>

#include "machine.h"
#include "ptx.h"
#include "tensor_map.h"

namespace fa2::emulation {
namespace {

const TensorMap& map_at(uint64_t address) {
  const auto& map = *reinterpret_cast<const TensorMap*>(address);
  if (map.magic != TensorMap::kMagic) fail("a tensor map that cuTensorMapEncodeTiled has not made");
  if (address % 64 != 0) fail("a tensor map must be aligned to 64 bytes");
  return map;
}

// Calls piece(shared address, global address or null, bytes) for each 16 bytes of a box: contiguous in both;
// null is outside of the tensor. `inside`: bytes that are inside, fewer at the end of the first dimension.
template <class Piece>
void for_each_piece(const TensorMap& map, uint32_t shared, const int* at, const Piece& piece) {
  const int row_bytes = map.box[0] * map.element_bytes;
  int box[5] = {1, 1, 1, 1, 1};
  for (int d = 0; d < map.rank; ++d) box[d] = map.box[d];
  uint32_t row = 0;
  int i[5];
  for (i[4] = 0; i[4] < box[4]; ++i[4])
    for (i[3] = 0; i[3] < box[3]; ++i[3])
      for (i[2] = 0; i[2] < box[2]; ++i[2])
        for (i[1] = 0; i[1] < box[1]; ++i[1], ++row) {
          bool inside = true;
          uint64_t address = map.base;
          for (int d = 1; d < map.rank; ++d) {
            const int64_t coordinate = int64_t{at[d]} + i[d];
            inside = inside && coordinate >= 0 && coordinate <= map.last[d];
            address += static_cast<uint64_t>(coordinate) * map.strides[d - 1];  // modulo 2^64
          }
          for (int byte = 0; byte < row_bytes; byte += 16) {
            uint32_t to = shared + row * row_bytes + byte;
            to ^= (to >> 7 & (map.swizzle_bytes / 16 - 1)) << 4;
            const int64_t first = int64_t{at[0]} * map.element_bytes + byte;
            const int64_t end = (int64_t{map.last[0]} + 1) * map.element_bytes;
            const int bytes =
                first < 0 || !inside
                    ? 0
                    : static_cast<int>(std::min<int64_t>(16, std::max<int64_t>(0, end - first)));
            piece(to, reinterpret_cast<unsigned char*>(address + static_cast<uint64_t>(first)), bytes);
          }
        }
}

uint32_t box_bytes(const TensorMap& map) {
  uint32_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

void check_shared(Block& block, uint32_t shared, const TensorMap& map) {
  if (shared % 128 != 0) fail("TMA: shared memory at %u is not aligned to 128 bytes", shared);
  shared_pointer(block, shared, 16);
  shared_pointer(block, shared + box_bytes(map) - 16, 16);
}

struct Box {
  const TensorMap& map;
  int at[5] = {};
};

// [map, {c0, c1, ..}]
Box box_of(const Call& call, size_t i) {
  const Argument& argument = call.argument(i);
  Box box{map_at(call.value(argument.parts.at(0)))};
  const auto& coordinates = argument.parts.at(1).parts;
  if (coordinates.size() != box.map.rank ||
      !call.statement.has((std::to_string(coordinates.size()) + "d").c_str()))
    fail("TMA: a map of %d dimensions, %zu coordinates, %s", box.map.rank, coordinates.size(),
         call.statement.opcode.c_str());
  for (size_t d = 0; d < coordinates.size(); ++d)
    box.at[d] = static_cast<int>(static_cast<uint32_t>(call.value(coordinates[d])));
  return box;
}

// To the thread's own block, to another by an address of the cluster, or to the same place of several.
void load_box(const Call& call) {
  const Box box = box_of(call, 1);
  const TensorMap map = box.map;
  const Place to = place_of(static_cast<uint32_t>(call.address(0)));
  const Place barrier = place_of(static_cast<uint32_t>(call.address(2)));
  if (&to.block != &barrier.block) fail("TMA: the mbarrier is in another block than the target");
  std::vector<Block*> targets = {&to.block};
  if (call.statement.has("multicast::cluster")) {
    targets.clear();
    auto& blocks = to.block.cluster->blocks;
    for (size_t i = 0; i < 16; ++i)
      if (call.u32(3) >> i & 1) targets.push_back(i < blocks.size() ? blocks[i] : nullptr);
    if (targets.empty() || targets.back() == nullptr)
      fail("TMA: multicast to %x of %zu blocks", call.u32(3), blocks.size());
  }
  for (Block* target : targets) {
    if (target->alive == 0) fail("TMA: a copy to block %u, which has ended", target->index.x);
    check_shared(*target, to.address, map);
    const MBarrier& its = visible_mbarrier_at(*target, barrier.address);
    target->races->begin_copy_to(current(), *target, to.address, box_bytes(map), its.actor, its.phase + 1);
  }
  for (Block* target : targets) {
    auto copy = std::make_shared<Copy>();
    copy->read = [=, shared = to.address, barrier = barrier.address] {
      for_each_piece(map, shared, box.at, [&](uint32_t place, unsigned char* from, int bytes) {
        unsigned char* memory = shared_pointer(*target, place, 16);
        std::memset(memory, 0, 16);
        if (bytes == 0) return;
        check_global(from, bytes, "a TMA load");
        std::memcpy(memory, from, bytes);
      });
      mbarrier_complete(*target, barrier, box_bytes(map));
    };
    start(copy);
  }
}

void put(unsigned char* to, const unsigned char* from, int bytes, bool add, int element_bytes) {
  check_global(to, bytes, "a bulk store");
  if (!add) {
    std::memcpy(to, from, bytes);
    return;
  }
  if (element_bytes != 4) fail("bulk reductions are emulated for fp32");
  for (int i = 0; i < bytes; i += 4) {
    float x, y;
    std::memcpy(&x, to + i, 4);
    std::memcpy(&y, from + i, 4);
    x += y;
    std::memcpy(to + i, &x, 4);
  }
}

// Until the thread has waited for it.
void begin_store(Thread& thread, Copy& copy, uint32_t shared, uint32_t bytes) {
  copy.source = {{shared, bytes}};
  thread.block->races->begin_read(thread, Races::kBulk, shared, bytes, thread.bulk_groups_begun);
}

struct Sixteen {
  unsigned char* to;
  int bytes;
  unsigned char data[16];
};

void store_box(const Call& call) {
  Thread& thread = current();
  Block& block = *thread.block;
  const Box box = box_of(call, 0);
  const uint32_t shared = static_cast<uint32_t>(call.address(1));
  const bool add = call.statement.has("add");
  check_shared(block, shared, box.map);
  if (add && !box.map.is_float) fail("a bulk reduction through a tensor map that is not of fp32");
  const TensorMap map = box.map;
  auto copy = std::make_shared<Copy>();
  auto pieces = std::make_shared<std::vector<Sixteen>>();
  copy->read = [=, &block] {
    for_each_piece(map, shared, box.at, [&](uint32_t from, unsigned char* to, int bytes) {
      if (bytes == 0) return;
      Sixteen piece{to, bytes, {}};
      std::memcpy(piece.data, shared_pointer(block, from, 16), 16);
      pieces->push_back(piece);
    });
  };
  begin_store(thread, *copy, shared, box_bytes(map));
  copy->write = [=] {
    for (const Sixteen& piece : *pieces) put(piece.to, piece.data, piece.bytes, add, map.element_bytes);
  };
  thread.bulk.push_back(copy);
  start(copy);
}

uint32_t bulk_bytes(const Call& call, size_t i, uint64_t global, uint32_t shared) {
  const uint32_t bytes = call.u32(i);
  if (bytes == 0 || bytes % 16 != 0 || global % 16 != 0 || shared % 16 != 0)
    fail("%s: %u bytes, shared memory at %u, global at %llx: all must be multiples of 16",
         call.statement.opcode.c_str(), bytes, shared, static_cast<unsigned long long>(global));
  return bytes;
}

// cp.async.bulk [shared], [global or this block's shared], bytes, [mbarrier]
void load_bytes(const Call& call) {
  Block& own = *current().block;
  const Place to = place_of(static_cast<uint32_t>(call.address(0)));
  const Place barrier = place_of(static_cast<uint32_t>(call.address(3)));
  if (&to.block != &barrier.block) fail("a bulk copy's mbarrier is in another block than the target");
  const bool from_shared = !call.statement.has("global");
  const uint32_t bytes = bulk_bytes(call, 2, call.address(1), to.address);
  shared_pointer(to.block, to.address, bytes);
  const MBarrier& its = visible_mbarrier_at(to.block, barrier.address);
  to.block.races->begin_copy_to(current(), to.block, to.address, bytes, its.actor, its.phase + 1);
  const auto shared = static_cast<uint32_t>(call.address(1));
  if (from_shared) own.races->begin_copy_from(current(), shared, bytes, its.actor, its.phase + 1);
  const auto* const global = reinterpret_cast<const unsigned char*>(call.address(1));
  auto copy = std::make_shared<Copy>();
  copy->read = [=, &own, &target = to.block, place = to.address, barrier = barrier.address] {
    if (!from_shared) check_global(global, bytes, "a bulk load");
    std::memcpy(shared_pointer(target, place, bytes),
                from_shared ? shared_pointer(own, shared, bytes) : global, bytes);
    mbarrier_complete(target, barrier, bytes);
  };
  start(copy);
}

// cp.async.bulk [global], [shared], bytes, and the same with an addition
void store_bytes(const Call& call) {
  Thread& thread = current();
  Block& block = *thread.block;
  auto* global = reinterpret_cast<unsigned char*>(call.address(0));
  const uint32_t shared = static_cast<uint32_t>(call.address(1));
  const uint32_t bytes = bulk_bytes(call, 2, call.address(0), shared);
  const bool add = call.statement.has("add");
  auto copy = std::make_shared<Copy>();
  auto data = std::make_shared<std::vector<unsigned char>>(bytes);
  copy->read = [=, &block] { std::memcpy(data->data(), shared_pointer(block, shared, bytes), bytes); };
  begin_store(thread, *copy, shared, bytes);
  copy->write = [=] { put(global, data->data(), static_cast<int>(bytes), add, 4); };
  thread.bulk.push_back(copy);
  start(copy);
}

void commit(const Call&) {
  Thread& thread = current();
  thread.bulk_groups.push_back({thread.bulk_groups_begun++, std::exchange(thread.bulk, {})});
}

// All but the newest `pending` groups have ended, or have read their source.
void wait(const Call& call) {
  Thread& thread = current();
  auto& groups = thread.bulk_groups;
  const bool read_only = call.statement.has("read");
  const size_t pending = call.u32(0);
  for (size_t i = 0; i + pending < groups.size(); ++i)
    for (const auto& copy : groups[i].second) {
      read_only ? copy->finish_read() : copy->finish();
      for (const Piece& piece : std::exchange(copy->source, {}))
        thread.block->races->end_read(thread, Races::kBulk, piece.address, piece.bytes, groups[i].first);
    }
  const auto done = [](const auto& group) {
    return std::all_of(group.second.begin(), group.second.end(),
                       [](const auto& copy) { return !copy->read && !copy->write && copy->source.empty(); });
  };
  while (groups.size() > pending && done(groups.front())) groups.pop_front();
}

}  // namespace

Handler find_copies(const std::string& opcode) {
  static const std::map<std::string, Handler> known = {
      {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", load_bytes},
      {"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes", load_bytes},
      {"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", load_bytes},
      {"cp.async.bulk.global.shared::cta.bulk_group", store_bytes},
      {"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", store_bytes},
      {"cp.async.bulk.commit_group", commit},
      {"cp.async.bulk.wait_group", wait},
      {"cp.async.bulk.wait_group.read", wait},
  };
  const auto found = known.find(opcode);
  if (found != known.end()) return found->second;
  for (int d = 1; d <= 5; ++d) {
    const std::string rank = std::to_string(d) + "d.";
    if (opcode ==
            "cp.async.bulk.tensor." + rank + "shared::cluster.global.tile.mbarrier::complete_tx::bytes" ||
        opcode == "cp.async.bulk.tensor." + rank + "shared::cluster.global.mbarrier::complete_tx::bytes" ||
        opcode == "cp.async.bulk.tensor." + rank +
                      "shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster")
      return load_box;
    if (opcode == "cp.async.bulk.tensor." + rank + "global.shared::cta.tile.bulk_group" ||
        opcode == "cp.async.bulk.tensor." + rank + "global.shared::cta.bulk_group" ||
        opcode == "cp.reduce.async.bulk.tensor." + rank + "global.shared::cta.add.tile.bulk_group" ||
        opcode == "cp.reduce.async.bulk.tensor." + rank + "global.shared::cta.add.bulk_group")
      return store_box;
  }
  return nullptr;
}

}  // namespace fa2::emulation
