// Tiles, warps, stages and the shared-memory plan of the sm80 kernels, each on one page.
// kGrantKB: the shared memory that a GPU must grant a thread block: 227 KB sm_90, 163 KB sm_80, 99 KB sm_86,
// 89, 120. The dispatch takes the largest that fits. A headdim has a 227 KB row only where that measured
// faster. Read next: fwd.cuh, bwd.cuh.
#pragma once

namespace fa2::sm80 {

// Forward: kWarps share the queries, 16 * kRowTiles each. K and V stages hold key blocks in flight.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_, int kMinBlocks_>
struct FwdTile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRowTiles = kBlockM / kWarps / 16;

  // O leaves through Q's rows: each warp overwrites only the rows that it alone read.
  static constexpr int kQ_bytes = kBlockM * kHeadDim * 2;
  static constexpr int kKV_bytes = kBlockN * kHeadDim * 2;
  static constexpr int kQ = 0, kK = kQ_bytes, kV = kK + kStages * kKV_bytes;
  static constexpr int kShared_bytes = kV + kStages * kKV_bytes;
  static_assert(kBlockM == kWarps * kRowTiles * 16, "every warp has whole tiles of 16 queries");
};

template <int kHeadDim, int kGrantKB>
struct FwdConfig;
// Two blocks per multiprocessor where they fit in 227 KB. Figures: H200, against the tile that it replaced.
// clang-format off
template <> struct FwdConfig<64, 163> : FwdTile<64, 128, 128, 4, 2, 2> {};   // 80 KB x 2; 7 to 13% over 128x64
template <> struct FwdConfig<96, 163> : FwdTile<96, 128, 64, 4, 2, 2> {};    // 72 KB x 2
template <> struct FwdConfig<128, 163> : FwdTile<128, 128, 64, 4, 2, 2> {};  // 96 KB x 2 (one block on sm_80)
template <> struct FwdConfig<192, 227> : FwdTile<192, 128, 96, 8, 2, 1> {};  // 192 KB; 4 to 7% over 64 keys
template <> struct FwdConfig<192, 163> : FwdTile<192, 128, 64, 8, 2, 1> {};  // 144 KB
template <> struct FwdConfig<256, 227> : FwdTile<256, 128, 64, 8, 2, 1> {};  // 192 KB; 6% over one stage
template <> struct FwdConfig<256, 163> : FwdTile<256, 128, 64, 8, 1, 1> {};  // 128 KB
template <> struct FwdConfig<64, 99> : FwdTile<64, 128, 64, 4, 2, 2> {};     // 48 KB x 2
template <> struct FwdConfig<96, 99> : FwdTile<96, 64, 64, 4, 1, 2> {};      // 36 KB x 2
template <> struct FwdConfig<128, 99> : FwdTile<128, 64, 64, 4, 1, 2> {};    // 48 KB x 2
template <> struct FwdConfig<192, 99> : FwdTile<192, 64, 64, 4, 1, 1> {};    // 72 KB
template <> struct FwdConfig<256, 99> : FwdTile<256, 64, 64, 4, 1, 1> {};    // 96 KB
// clang-format on

// Backward: kWarps as kWarpRows x (kWarps / kWarpRows), for dK and dV (rows are keys) and for dQ (queries).
// Warps that have the same keys share the queries when they make S and dP. Square warp tiles read the least
// shared memory. dQ's columns are made in kDqParts parts, one after the other, where all at once would not
// fit in the registers.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_, int kWarpRowsDkv_,
          int kWarpRowsDq_, int kMinBlocks_, int kDqParts_ = 1>
struct BwdTile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRowsDkv = kWarpRowsDkv_, kWarpColumnsDkv = kWarps / kWarpRowsDkv;
  static constexpr int kWarpRowsDq = kWarpRowsDq_, kWarpColumnsDq = kWarps / kWarpRowsDq;
  static constexpr int kRowTilesDkv = kBlockN / kWarpRowsDkv / 16,
                       kColumnTilesDkv = kHeadDim / kWarpColumnsDkv / 8;
  static constexpr int kRowTilesDq = kBlockM / kWarpRowsDq / 16, kDqParts = kDqParts_;
  static constexpr int kColumnTilesDq = kHeadDim / kWarpColumnsDq / 8 / kDqParts;
  // Groups of 16 queries that are a warp's own in S and dP, and how many of them it takes at a time: two, for
  // S, dP, dK and dV fill the registers.
  static constexpr int kOwn16s = kBlockM / kWarpColumnsDkv / 16, kPass16s = kOwn16s > 1 ? 2 : 1;
  static_assert(kRowTilesDkv * kWarpRowsDkv * 16 == kBlockN &&
                    kColumnTilesDkv * kWarpColumnsDkv * 8 == kHeadDim &&
                    kOwn16s * kWarpColumnsDkv * 16 == kBlockM && kOwn16s % kPass16s == 0 &&
                    kRowTilesDq * kWarpRowsDq * 16 == kBlockM &&
                    kColumnTilesDq * kDqParts * kWarpColumnsDq * 8 == kHeadDim && kColumnTilesDkv % 2 == 0 &&
                    kColumnTilesDq % 2 == 0,
                "every product divides into 16x16 blocks over the warps");

  // Blocks at a sequence's end or on the diagonal run with half of the queries, of the keys, or of both,
  // where every warp has an even number of each.
  static constexpr bool kHalves =
      kHeadDim <= 128 && kRowTilesDkv % 2 == 0 && kRowTilesDq % 2 == 0 && kOwn16s % 2 == 0;

  // One thread block takes all key tiles of a sequence of at most kWalk queries and keys, one after the
  // other: see BwdShortConfig.
  static constexpr int kWalk = 0;
  // What the sm90 backward does otherwise, see there.
  static constexpr bool kSkipsUnseeing = false, kAlternates = false, kStartsEarly = false,
                        kConvertsDq = false;

  // dK and dV leave through K's and V's space.
  static constexpr int kQ_bytes = kBlockM * kHeadDim * 2, kKV_bytes = kBlockN * kHeadDim * 2;
  static constexpr int kP_bytes = kBlockM * kBlockN * 2, kRow_bytes = kBlockM * 4;
  static constexpr int kK = 0, kV = kK + kKV_bytes;
  static constexpr int kQ = kV + kKV_bytes, kDo = kQ + kStages * kQ_bytes;
  static constexpr int kP = kDo + kStages * kQ_bytes, kDs = kP + (kWarpColumnsDkv > 1 ? kP_bytes : 0);
  static constexpr int kLse = kDs + kP_bytes, kDelta = kLse + kStages * kRow_bytes;
  static constexpr int kShared_bytes = kDelta + kStages * kRow_bytes;
};

template <int kHeadDim, int kGrantKB>
struct BwdConfig;
// clang-format off
template <> struct BwdConfig<64, 163> : BwdTile<64, 64, 128, 4, 2, 4, 2, 2> {};        // 81 KB x 2; 18 to 28% over 64x64 x 3
template <> struct BwdConfig<96, 163> : BwdTile<96, 64, 128, 8, 2, 4, 4, 1> {};         // 129 KB
template <> struct BwdConfig<128, 163> : BwdTile<128, 64, 128, 8, 2, 4, 2, 1> {};       // 161 of 163 KB
template <> struct BwdConfig<192, 227> : BwdTile<192, 64, 96, 8, 2, 2, 2, 1> {};        // 193 KB; 15 to 17% over 64 keys
template <> struct BwdConfig<192, 163> : BwdTile<192, 64, 64, 8, 2, 2, 2, 1> {};        // 161 of 163 KB
template <> struct BwdConfig<256, 227> : BwdTile<256, 128, 64, 8, 1, 2, 4, 1, 2> {};    // 225 KB; 7 to 14% over 64x64, 2 stages
template <> struct BwdConfig<256, 163> : BwdTile<256, 64, 64, 8, 1, 2, 2, 1> {};        // 145 KB
template <> struct BwdConfig<64, 99> : BwdTile<64, 64, 128, 8, 2, 4, 4, 1> {};          // 97 KB
template <> struct BwdConfig<96, 99> : BwdTile<96, 64, 64, 4, 2, 2, 4, 1> {};           // 89 KB
template <> struct BwdConfig<128, 99> : BwdTile<128, 64, 64, 8, 1, 2, 2, 1> {};         // 81 KB
template <> struct BwdConfig<192, 99> : BwdTile<192, 32, 64, 8, 1, 4, 2, 1> {};         // 80 KB
template <> struct BwdConfig<256, 99> : BwdTile<256, 32, 32, 4, 1, 2, 2, 1> {};         // 68 KB
// clang-format on

// Where the sequences have fewer than kBelow keys on average, tiles that leave less of themselves empty, and
// two blocks of them a multiprocessor, so that one computes while the other loads or stores. dk and dv come
// out bit for bit the same; dq does not, so a deterministic backward keeps the other tiles. Fewer than
// kManyBlocks sequences times kv heads would leave multiprocessors idle while others walk.
template <int kHeadDim, int kGrantKB>
struct BwdShortConfig {
  static constexpr int kBelow = 0;
};
template <>
struct BwdShortConfig<128, 163> : BwdTile<128, 64, 64, 4, 1, 2, 2, 2> {  // 81 KB x 2; 9% over 64x128
  static constexpr int kBelow = 256, kWalk = 512, kManyBlocks = 256;
};

template <class Config>
constexpr bool walks(int seqlen_q, int seqlen_k) {
  return Config::kWalk > 0 && seqlen_q <= Config::kWalk && seqlen_k <= Config::kWalk;
}

}  // namespace fa2::sm80
