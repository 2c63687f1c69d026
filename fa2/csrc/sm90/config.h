// Tiles, warpgroups, stages and the shared-memory plan of the sm90 kernels, on one page. Read next: fwd.cuh.
#pragma once

namespace fa2::sm90 {

// How an operand tile lies in shared memory: slabs of kWidth columns side by side, each slab its rows one
// after the other, swizzled as TMA and wgmma agree on. 80 and 96 columns are no multiple of 64, so they take
// the narrower swizzle. Of 80 the last slab is half empty: TMA fills it with zeros and stores nothing of it,
// and no product reads it.
template <int kHeadDim>
struct Slabs {
  static constexpr int kWidth = kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kCount = (kHeadDim + kWidth - 1) / kWidth;
  static constexpr int kColumns = kCount * kWidth;
  static constexpr int kRow_bytes = kWidth * 2;
};

// The kernel's mbarriers, each one 8 bytes.
template <int kQStages, int kStages>
struct Barriers {
  static constexpr int kTileFull = 0, kTileEmpty = 1;  // one work tile is handed out ahead
  static constexpr int kQFull = 2, kQEmpty = kQFull + kQStages;
  static constexpr int kKFull = kQEmpty + kQStages, kKEmpty = kKFull + kStages;
  static constexpr int kVFull = kKEmpty + kStages, kVEmpty = kVFull + kStages;
  static constexpr int kCount = kVEmpty + kStages;
};

// Forward: kBlockM / 64 consumer warpgroups, one producer. O leaves through its tile's Q, so a second Q stage
// lets the next tile begin before this one has ended.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_, int kQStages_, int kBlocks_ = 1>
struct FwdTile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kStages = kStages_, kQStages = kQStages_;
  static constexpr int kBlocks = kBlocks_;  // of one multiprocessor
  static constexpr int kConsumers = kBlockM / 64, kThreads = (kConsumers + 1) * 128;
  // 64 K registers a multiprocessor: the producer needs few.
  static constexpr int kProducerRegisters = kConsumers == 1 ? 24 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  using Slab = Slabs<kHeadDim>;
  using Barrier = Barriers<kQStages, kStages>;

  static constexpr int kQ_bytes = kBlockM * Slab::kColumns * 2, kKV_bytes = kBlockN * Slab::kColumns * 2;
  static constexpr int kQ = 0, kK = kQ + kQStages * kQ_bytes, kV = kK + kStages * kKV_bytes;
  static constexpr int kWork = kV + kStages * kKV_bytes, kWork_bytes = 64;
  static constexpr int kBarriers = kWork + kWork_bytes;
  static constexpr int kShared_bytes = kBarriers + Barrier::kCount * 8;
  static_assert(kBlocks * (kShared_bytes + 1024) <= 228 * 1024,
                "a multiprocessor has 228 KB, 1 of a block the system's");
  static_assert(kBlockN % 16 == 0 && kBlockM % 64 == 0 && kKV_bytes / Slab::kCount % 1024 == 0,
                "wgmma takes 64 queries, 16 keys a step, and slabs aligned to their swizzle");
};

template <int kHeadDim>
struct FwdConfig;
// clang-format off
template <> struct FwdConfig<64> : FwdTile<64, 192, 128, 2, 2> {};    // 112 KB
template <> struct FwdConfig<80> : FwdTile<80, 128, 160, 2, 2> {};    // 168 KB
template <> struct FwdConfig<96> : FwdTile<96, 128, 160, 2, 2> {};    // 168 KB
template <> struct FwdConfig<128> : FwdTile<128, 128, 128, 2, 2> {};  // 192 KB
template <> struct FwdConfig<192> : FwdTile<192, 128, 112, 2, 1> {};  // 216 KB
template <> struct FwdConfig<256> : FwdTile<256, 128, 80, 2, 1> {};   // 224 KB
// clang-format on

// Backward: kBlockN / 64 consumer warpgroups, 64 keys each, and one producer. Each consumer makes its keys'
// S, dP, dV and dK, and its share of dQ: 64 of the queries where there are 128, else about half of the
// columns.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_>
struct BwdTile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_;
  static constexpr int kConsumers = kBlockN / 64, kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Slab = Slabs<kHeadDim>;

  // What bwd_preprocess.cuh and bwd_convert.cuh ask: rows that see no key are no part of any tile; in the dQ
  // accumulator the groups of 16 columns change places, two by two, in rows of odd number, so that a warp's
  // stores of two neighbouring rows meet different banks (rows of 80 columns lie so that they do anyway). The
  // preprocessing is launched as launch.cuh's launch_early says.
  static constexpr int kWalk = 0;
  static constexpr bool kSkipsUnseeing = true, kAlternates = kHeadDim % 32 == 0, kStartsEarly = true;
  static constexpr bool kConvertsDq = true;  // the kernel itself

  // A product of dQ is 64 x kDqColumns. The second consumer's begins at a slab: with 96 columns at 32, and a
  // third of it is made twice and stored once, by the first; with 80 columns too, and it is the second that
  // stores what both have made.
  static constexpr bool kDqByRows = kBlockM == 64 * kConsumers;
  static constexpr int kDqColumns = kHeadDim == 80 ? 48 : 64;
  static constexpr int kDqStored = kDqByRows ? kHeadDim : (kHeadDim / 16 + 1) / kConsumers * 16;  // at most
  static constexpr int kDqOfFirst = kDqByRows ? kHeadDim : kHeadDim - kDqStored;
  static_assert(kConsumers == 2 && (kDqByRows ? kHeadDim == 64 : kBlockM == 64 && kHeadDim <= 128),
                "the consumers share dQ");

  static constexpr int kQ_bytes = kBlockM * Slab::kColumns * 2, kKV_bytes = kBlockN * Slab::kColumns * 2;
  static constexpr int kDs_bytes = kBlockM * kBlockN * 2, kDq_bytes = kBlockM * Slab::kColumns * 4;
  static constexpr int kRow_bytes = kBlockM * 4;
  // dK and dV leave through dQ's and dS's space. dS and dQ have two buffers each: the consumers are half a
  // step apart, and to add dQ to the accumulator takes most of a step.
  static constexpr int kDsStages = 2, kDqStages = 2;
  static constexpr int kK = 0, kV = kK + kKV_bytes, kQ = kV + kKV_bytes, kDo = kQ + kStages * kQ_bytes;
  static constexpr int kDs = kDo + kStages * kQ_bytes, kDq = kDs + kDsStages * kDs_bytes;
  static constexpr int kLse = kDq + kDqStages * kDq_bytes, kDelta = kLse + kStages * kRow_bytes;
  static constexpr int kSteps = 4;  // a BwdStep is still needed for dQ, which is a step behind
  static constexpr int kStep = kDelta + kStages * kRow_bytes, kStep_bytes = 16;
  static constexpr int kWork = kStep + kSteps * kStep_bytes, kWork_bytes = 64;
  static constexpr int kBarriers = kWork + 2 * kWork_bytes;

  struct Barrier {
    static constexpr int kTileFull = 0,
                         kTileEmpty = 2;  // one work tile is handed out ahead of the current one
    static constexpr int kKFull = 4, kVFull = 5, kKVEmpty = 6;
    // Deterministic: the turn of a step's dQ has come (empty: that has been seen), dQ has been added.
    static constexpr int kTurnFull = 7, kTurnEmpty = 8, kAddedFull = 9, kAddedEmpty = 10;
    static constexpr int kDqFull = 11, kDqEmpty = kDqFull + kDqStages;
    static constexpr int kDsFull = kDqEmpty + kDqStages, kDsEmpty = kDsFull + kDsStages;
    static constexpr int kQFull = kDsEmpty + kDsStages;  // a stage's Q
    static constexpr int kDoFull = kQFull + kStages;     // its dO, lse, delta and BwdStep
    static constexpr int kQEmpty = kDoFull + kStages;    // all of them have been read
    static constexpr int kNearEnd = kQEmpty + kStages;   // few of the tile's loads are left
    static constexpr int kCount = kNearEnd + 1;
  };
  static constexpr int kShared_bytes = kBarriers + Barrier::kCount * 8;
  static_assert(kShared_bytes <= 227 * 1024, "a thread block has 227 KB");

  // Rows of a copy of Q or dO, of K or V.
  static constexpr int kQueryBox = kBlockM, kKeyBox = kBlockN, kCluster = 1;
};

// Backward of the wide headdims: two thread blocks, a cluster, share a tile of 128 keys, 64 each, and each
// adds up half of dQ's columns over all of them. In a block one consumer makes P and dV, the other dS and dK.
template <int kHeadDim_>
struct BwdPairTile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = 64, kBlockN = 128, kStages = 2;
  static constexpr int kThreads = 3 * 128, kCluster = 2, kKeys = 64;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  // Half of the columns are whole slabs.
  struct Slab {
    static constexpr int kWidth = kHeadDim % 128 == 0 ? 64 : 32, kCount = kHeadDim / kWidth,
                         kRow_bytes = kWidth * 2;
  };
  static constexpr int kWalk = 0;
  static constexpr bool kSkipsUnseeing = true, kAlternates = false, kStartsEarly = true, kConvertsDq = false;

  // Of the block's half of dQ, the first consumer makes 64 columns and the second the rest.
  static constexpr int kHalf = kHeadDim / 2, kDqFirst = 64, kDqSecond = kHalf - kDqFirst;
  static_assert(kHalf % Slab::kWidth == 0 && kDqSecond % Slab::kWidth == 0 && kDqSecond > 0,
                "halves in slabs");

  static constexpr int kQ_bytes = kBlockM * kHeadDim * 2, kKV_bytes = kKeys * kHeadDim * 2;
  static constexpr int kOther_bytes = kKeys * kHalf * 2, kDs_bytes = kBlockM * kKeys * 2;
  static constexpr int kRow_bytes = kBlockM * 4;
  // Other: of the other block's keys, K in this block's half of dQ's columns. P takes dS's place until dS is
  // made.
  static constexpr int kK = 0, kV = kK + kKV_bytes, kOther = kV + kKV_bytes, kQ = kOther + kOther_bytes;
  static constexpr int kDo = kQ + kStages * kQ_bytes, kDs = kDo + kStages * kQ_bytes,
                       kOtherDs = kDs + kDs_bytes;
  static constexpr int kLse = kOtherDs + kDs_bytes, kDelta = kLse + kStages * kRow_bytes;
  static constexpr int kStep = kDelta + kStages * kRow_bytes, kStep_bytes = 16;
  static constexpr int kWork = kStep + kStages * kStep_bytes, kWork_bytes = 64;
  static constexpr int kBarriers = kWork + 2 * kWork_bytes;

  struct Barrier {
    static constexpr int kTileFull = 0,
                         kTileEmpty = 2;          // one tile ahead; empty: of both blocks, in the first
    static constexpr int kKFull = 4, kVFull = 5;  // with V the other block's K
    static constexpr int kKVEmpty = 6;
    static constexpr int kPFull = 7, kDsFull = 8;  // in the one place
    static constexpr int kOtherFull = 9;           // the other block's dS has arrived
    static constexpr int kDsEmpty = 10;            // dS has been read, here and in the other block
    static constexpr int kLoaded = 11;             // the tile's loads have begun
    static constexpr int kQFull = 12, kDoFull = kQFull + kStages;
    static constexpr int kQEmpty = kDoFull + kStages;  // read in both blocks, because copies go to both
    static constexpr int kCount = kQEmpty + kStages;
  };
  static constexpr int kShared_bytes = kBarriers + Barrier::kCount * 8;
  static_assert(kShared_bytes <= 227 * 1024, "a thread block has 227 KB");
  static constexpr int kQueryBox = kBlockM / kCluster, kKeyBox = kKeys;
};

template <int kHeadDim>
struct BwdConfig;
// clang-format off
template <> struct BwdConfig<64> : BwdTile<64, 128, 128, 2> {};   // 194 KB
template <> struct BwdConfig<80> : BwdTile<80, 64, 128, 2> {};    // 153 KB
template <> struct BwdConfig<96> : BwdTile<96, 64, 128, 2> {};    // 153 KB
template <> struct BwdConfig<128> : BwdTile<128, 64, 128, 2> {};  // 193 KB
template <> struct BwdConfig<192> : BwdPairTile<192> {};          // 174 KB
template <> struct BwdConfig<256> : BwdPairTile<256> {};          // 226 KB
// clang-format on

}  // namespace fa2::sm90
