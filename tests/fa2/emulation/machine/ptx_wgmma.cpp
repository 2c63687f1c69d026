// wgmma (PTX ISA, "Asynchronous warpgroup-level matrix instructions"), by warps: warp w % 4 makes rows 16 w
// to 16 w + 15 of the 64. An instruction is remembered with the addresses of its registers and carried out
// later; until then the accumulators hold NaN, where it does not add to them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "machine.h"
#include "number.h"
#include "ptx.h"

namespace fa2::emulation {

struct Wgmma {
  int n = 0;
  bool half = false, accumulate = false, a_in_registers = false, transposed_a = false, transposed_b = false;
  uint64_t a_matrix = 0, b_matrix = 0, group = 0;
  float* d[32] = {};
  const uint32_t* a[32] = {};
  uint32_t issued = 0;

  bool same_as(const Wgmma& other) const {
    return n == other.n && half == other.half && accumulate == other.accumulate &&
           a_matrix == other.a_matrix && a_in_registers == other.a_in_registers &&
           transposed_a == other.transposed_a && transposed_b == other.transposed_b &&
           b_matrix == other.b_matrix && group == other.group;
  }
};

namespace {

// Matrix descriptor (PTX ISA, "Matrix descriptor format") of an operand with `outer` rows (M or N) and 16 of
// K. The address of an element is linear in pieces; the swizzle then exchanges bits of it.
struct SharedMatrix {
  uint32_t start, leading, stride;
  int swizzle_bytes;  // 16: none
  bool transposed;    // MN-major

  SharedMatrix(uint64_t descriptor, bool transposed_) : transposed(transposed_) {
    start = static_cast<uint32_t>(descriptor & 0x3fff) * 16;
    leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) * 16;
    stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) * 16;
    constexpr int kBytes[4] = {16, 128, 64, 32};
    swizzle_bytes = kBytes[descriptor >> 62];
    if (descriptor >> 49 & 7)
      fail("wgmma: base offset %d, emulated is 0", static_cast<int>(descriptor >> 49 & 7));
    if (!transposed && swizzle_bytes > 16 &&
        start % swizzle_bytes + 32 > static_cast<unsigned>(swizzle_bytes))
      fail("wgmma: 16 elements of K from address %u cross a row of %d bytes", start, swizzle_bytes);
  }

  uint32_t address(int outer, int k) const {
    uint32_t linear;
    if (!transposed && swizzle_bytes == 16) {
      linear = start + outer / 8 * stride + k / 8 * leading + outer % 8 * 16 + k % 8 * 2;
    } else if (!transposed) {
      linear = start + outer / 8 * stride + outer % 8 * swizzle_bytes + k * 2;
    } else if (swizzle_bytes == 16) {
      linear = start + outer / 8 * stride + k / 8 * leading + k % 8 * 16 + outer % 8 * 2;
    } else {
      const int width = swizzle_bytes / 2;
      linear = start + outer / width * leading + k / 8 * stride + k % 8 * swizzle_bytes + outer % width * 2;
    }
    // 128: bits 4-6 by 7-9; 64: 4-5 by 7-8; 32: 4 by 7.
    return linear ^ (linear >> 7 & (swizzle_bytes / 16 - 1)) << 4;
  }
};

// visit(address, i, k) for the 16 bytes of each eight elements of [first, first + count) and all of K: they
// lie together along K, or along outer.
template <class Visit>
void for_each_piece(const SharedMatrix& matrix, int first, int count, const Visit& visit) {
  for (int i = 0; i < count; i += matrix.transposed ? 8 : 1)
    for (int k = 0; k < 16; k += matrix.transposed ? 1 : 8) visit(matrix.address(first + i, k), i, k);
}

// Elements [first, first + count) of `outer`, all 16 of K, as out[k][outer].
template <int kWidth>
void read_matrix(Block& block, const SharedMatrix& matrix, bool half, int first, int count,
                 float (*out)[kWidth]) {
  for_each_piece(matrix, first, count, [&](uint32_t address, int i, int k) {
    uint16_t bits[8];
    std::memcpy(bits, shared_pointer(block, address, 16), 16);
    for (int e = 0; e < 8; ++e) {
      const float x = from_16(bits[e], half);
      if (matrix.transposed) {
        out[k][i + e] = x;
      } else {
        out[k + e][i] = x;
      }
    }
  });
}

float a_rows[16][16];   // [k][row]
float b_rows[16][256];  // [k][column]
float product[16][256];

// What the text of an instruction says, read once.
const Wgmma& decode(const Statement& statement) {
  static std::unordered_map<const Statement*, Wgmma> known;
  const auto found = known.find(&statement);
  if (found != known.end()) return found->second;
  const std::string& opcode = statement.opcode;
  Wgmma wgmma;
  wgmma.n = std::stoi(opcode.substr(opcode.find(".m64n") + 5));
  const std::string shape = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(wgmma.n) + "k16.f32.";
  wgmma.half = opcode == shape + "f16.f16";
  if (!wgmma.half && opcode != shape + "bf16.bf16") fail("the emulator does not know %s", opcode.c_str());
  if (wgmma.n % 8 != 0 || wgmma.n < 8 || wgmma.n > 256) fail("wgmma: N = %d", wgmma.n);
  wgmma.a_in_registers = statement.arguments.at(1).kind == Argument::kList;
  if (statement.arguments.size() != (wgmma.a_in_registers ? 7 : 8)) fail("wgmma: wrong number of operands");
  return known.emplace(&statement, wgmma).first->second;
}

// The registers of a list, which must be one array in order.
template <class T>
T* registers(const Call& call, size_t list, size_t count) {
  if (call.count(list) != count) fail("wgmma: %zu registers, should be %zu", call.count(list), count);
  T* const first = static_cast<T*>(call.variable(call.part(list, 0)));
  for (size_t i = 1; i < count && current().lane == 0; ++i)
    if (call.variable(call.part(list, i)) != first + i)
      fail("wgmma: the registers are not one array, in order");
  return first;
}

// The operands are in use until the warp waits; all 64 rows of A, for an instruction is the warpgroup's.
void note_reads(const Thread& thread, const Wgmma& wgmma) {
  auto& reads = thread.warp->wgmma_reads.emplace_back(wgmma.group, std::vector<Piece>());
  const auto note = [&](uint32_t address, int, int) {
    shared_pointer(*thread.block, address, 16);
    thread.block->races->begin_read(thread, Races::kWgmma, address, 16, wgmma.group);
    reads.second.push_back({address, 16});
  };
  if (!wgmma.a_in_registers) for_each_piece(SharedMatrix(wgmma.a_matrix, wgmma.transposed_a), 0, 64, note);
  for_each_piece(SharedMatrix(wgmma.b_matrix, wgmma.transposed_b), 0, wgmma.n, note);
}

void issue(const Call& call) {
  Thread& thread = current();
  Warp& warp = *thread.warp;
  Wgmma wgmma = decode(call.statement);
  if (!wgmma.a_in_registers) wgmma.a_matrix = call.value(1);
  wgmma.b_matrix = call.value(2);
  wgmma.accumulate = call.value(3) != 0;
  if (call.value(4) != 1 || call.value(5) != 1) fail("wgmma: negated operands are not emulated");
  if (!wgmma.a_in_registers) wgmma.transposed_a = call.value(6) != 0;
  wgmma.transposed_b = call.value(wgmma.a_in_registers ? 6 : 7) != 0;
  wgmma.group = thread.wgmma_groups;
  if (!thread.wgmma_fenced) fail("wgmma after a wait needs a wgmma.fence: registers have been accessed");

  // The lanes come one after the other; the first one's instruction is the warp's, the first warp's is the
  // warpgroup's.
  const uint64_t number = thread.wgmmas++, at = number - warp.wgmmas_executed;
  if (at == warp.wgmmas.size()) {
    warp.wgmmas.push_back(std::make_shared<Wgmma>(wgmma));
    auto& log = thread.block->wgmma_log[warp.index / 4];
    if (number == log.size()) {
      log.push_back(warp.wgmmas.back());
    } else if (!log[number]->same_as(wgmma)) {
      fail("wgmma number %llu is not the same for all warps of warpgroup %d",
           static_cast<unsigned long long>(number), warp.index / 4);
    }
  }
  Wgmma& its = *warp.wgmmas.at(at);
  if (!its.same_as(wgmma)) fail("wgmma: the lanes of the warp issue different instructions");
  its.d[thread.lane] = registers<float>(call, 0, its.n / 2);
  if (its.a_in_registers) its.a[thread.lane] = registers<uint32_t>(call, 1, 4);
  if (!its.accumulate) std::fill_n(its.d[thread.lane], its.n / 2, std::numeric_limits<float>::quiet_NaN());
  its.issued |= 1u << thread.lane;
  if (its.issued != kFullWarp) return;
  note_reads(thread, its);
  if (options.policy == Policy::kEarly) execute_wgmma(warp);
  if (options.policy == Policy::kRandom) note_busy(warp);
}

void fence(const Call& call) {
  current().wgmma_fenced = true;
  together(&call.statement, "wgmma.fence", nullptr, [](Warp&) {});
}

void commit(const Call& call) {
  ++current().wgmma_groups;
  together(&call.statement, "wgmma.commit_group", nullptr, [](Warp&) {});
}

void wait(const Call& call) {
  Thread& thread = current();
  const uint64_t pending = call.value(0);
  thread.wgmma_fenced = false;
  together(&call.statement, "wgmma.wait_group", nullptr, [&](Warp& warp) {
    while (!warp.wgmmas.empty() && warp.wgmmas.front()->group + pending < thread.wgmma_groups)
      if (!execute_wgmma(warp)) fail("wgmma: not all lanes of the warp have issued it");
    auto& reads = warp.wgmma_reads;
    for (; !reads.empty() && reads.front().first + pending < thread.wgmma_groups; reads.pop_front())
      for (const Piece& piece : reads.front().second)
        warp.block->races->end_read(thread, Races::kWgmma, piece.address, piece.bytes, reads.front().first);
  });
}

}  // namespace

bool execute_wgmma(Warp& warp) {
  if (warp.wgmmas.empty() || warp.wgmmas.front()->issued != kFullWarp) return false;
  const std::shared_ptr<Wgmma> wgmma = warp.wgmmas.front();
  warp.wgmmas.pop_front();
  ++warp.wgmmas_executed;
  Block& block = *warp.block;
  const int n = wgmma->n;
  if (wgmma->a_in_registers) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
          a_rows[lane % 4 * 2 + i / 2 * 8 + e][lane / 4 + i % 2 * 8] =
              from_16(static_cast<uint16_t>(wgmma->a[lane][i] >> 16 * e), wgmma->half);
  } else {
    read_matrix(block, SharedMatrix(wgmma->a_matrix, wgmma->transposed_a), wgmma->half, warp.index % 4 * 16,
                16, a_rows);
  }
  read_matrix(block, SharedMatrix(wgmma->b_matrix, wgmma->transposed_b), wgmma->half, 0, n, b_rows);
  for (int i = 0; i < 16; ++i) {
    float* row = product[i];
    std::fill_n(row, n, 0.f);
    for (int k = 0; k < 16; ++k) {
      const float x = a_rows[k][i];
      const float* b = b_rows[k];
      for (int j = 0; j < n; ++j) row[j] += x * b[j];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* d = wgmma->d[lane];
    for (int j = 0; j < n / 8; ++j)
      for (int e = 0; e < 4; ++e) {
        const float x = product[lane / 4 + e / 2 * 8][j * 8 + lane % 4 * 2 + e % 2];
        d[j * 4 + e] = wgmma->accumulate ? d[j * 4 + e] + x : x;
      }
  }
  return true;
}

Handler find_wgmma(const std::string& opcode) {
  if (opcode == "wgmma.fence.sync.aligned") return fence;
  if (opcode == "wgmma.commit_group.sync.aligned") return commit;
  if (opcode == "wgmma.wait_group.sync.aligned") return wait;
  if (opcode.rfind("wgmma.mma_async.sync.aligned.m64n", 0) == 0) return issue;
  return nullptr;
}

}  // namespace fa2::emulation
