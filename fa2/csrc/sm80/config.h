// Tiles, warps, stages and the shared-memory plan of the sm80 kernels, each on one page.
// "large" fits a GPU that gives a block 163 KB or more (sm_80, sm_90), "small" one that gives 99 KB (sm_86, 89, 120).
// Read next: fwd.cuh, bwd.cuh.
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

template <int kHeadDim, bool kSmall>
struct FwdConfig;
// kernel-notes.md's FlashAttention-2 tiles, with two stages where two blocks per multiprocessor still fit in 227 KB.
template <> struct FwdConfig<64, false> : FwdTile<64, 128, 64, 4, 2, 2> {};    // 48 KB x 2
template <> struct FwdConfig<96, false> : FwdTile<96, 128, 64, 4, 2, 2> {};    // 72 KB x 2
template <> struct FwdConfig<128, false> : FwdTile<128, 128, 64, 4, 2, 2> {};  // 96 KB x 2 (one block on sm_80)
template <> struct FwdConfig<192, false> : FwdTile<192, 128, 64, 8, 2, 1> {};  // 144 KB
template <> struct FwdConfig<256, false> : FwdTile<256, 128, 64, 8, 1, 1> {};  // 128 KB
template <> struct FwdConfig<64, true> : FwdTile<64, 128, 64, 4, 2, 2> {};     // 48 KB x 2
template <> struct FwdConfig<96, true> : FwdTile<96, 64, 64, 4, 1, 2> {};      // 36 KB x 2
template <> struct FwdConfig<128, true> : FwdTile<128, 64, 64, 4, 1, 2> {};    // 48 KB x 2
template <> struct FwdConfig<192, true> : FwdTile<192, 64, 64, 4, 1, 1> {};    // 72 KB
template <> struct FwdConfig<256, true> : FwdTile<256, 64, 64, 4, 1, 1> {};    // 96 KB

// Backward: kWarps as kWarpRows x (kWarps / kWarpRows), for S and dP (rows are queries), for dK and dV (keys), for dQ
// (queries). Square warp tiles read the least shared memory.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_, int kWarpRowsS_, int kWarpRowsDkv_,
          int kWarpRowsDq_, int kMinBlocks_>
struct BwdTile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRowsS = kWarpRowsS_, kWarpColumnsS = kWarps / kWarpRowsS;
  static constexpr int kWarpRowsDkv = kWarpRowsDkv_, kWarpColumnsDkv = kWarps / kWarpRowsDkv;
  static constexpr int kWarpRowsDq = kWarpRowsDq_, kWarpColumnsDq = kWarps / kWarpRowsDq;
  static constexpr int kRowTilesS = kBlockM / kWarpRowsS / 16, kColumnTilesS = kBlockN / kWarpColumnsS / 8;
  static constexpr int kRowTilesDkv = kBlockN / kWarpRowsDkv / 16, kColumnTilesDkv = kHeadDim / kWarpColumnsDkv / 8;
  static constexpr int kRowTilesDq = kBlockM / kWarpRowsDq / 16, kColumnTilesDq = kHeadDim / kWarpColumnsDq / 8;
  static_assert(kRowTilesS * kWarpRowsS * 16 == kBlockM && kColumnTilesS * kWarpColumnsS * 8 == kBlockN &&
                    kRowTilesDkv * kWarpRowsDkv * 16 == kBlockN && kColumnTilesDkv * kWarpColumnsDkv * 8 == kHeadDim &&
                    kRowTilesDq * kWarpRowsDq * 16 == kBlockM && kColumnTilesDq * kWarpColumnsDq * 8 == kHeadDim &&
                    kColumnTilesS % 2 == 0 && kColumnTilesDkv % 2 == 0 && kColumnTilesDq % 2 == 0,
                "every product divides into 16x16 blocks over the warps");

  // dK and dV leave through K's and V's space.
  static constexpr int kQ_bytes = kBlockM * kHeadDim * 2, kKV_bytes = kBlockN * kHeadDim * 2;
  static constexpr int kP_bytes = kBlockM * kBlockN * 2, kRow_bytes = kBlockM * 4;
  static constexpr int kK = 0, kV = kK + kKV_bytes;
  static constexpr int kQ = kV + kKV_bytes, kDo = kQ + kStages * kQ_bytes;
  static constexpr int kP = kDo + kStages * kQ_bytes, kDs = kP + kP_bytes;
  static constexpr int kLse = kDs + kP_bytes, kDelta = kLse + kStages * kRow_bytes;
  static constexpr int kShared_bytes = kDelta + kStages * kRow_bytes;
};

template <int kHeadDim, bool kSmall>
struct BwdConfig;
template <> struct BwdConfig<64, false> : BwdTile<64, 128, 128, 8, 2, 4, 4, 4, 1> {};   // 162 of 163 KB
template <> struct BwdConfig<96, false> : BwdTile<96, 64, 128, 8, 2, 2, 4, 4, 1> {};    // 129 KB
template <> struct BwdConfig<128, false> : BwdTile<128, 64, 128, 8, 2, 2, 4, 2, 1> {};  // 161 of 163 KB
template <> struct BwdConfig<192, false> : BwdTile<192, 64, 64, 8, 2, 4, 2, 2, 1> {};   // 161 of 163 KB
template <> struct BwdConfig<256, false> : BwdTile<256, 64, 64, 8, 1, 4, 2, 2, 1> {};   // 145 KB
template <> struct BwdConfig<64, true> : BwdTile<64, 64, 128, 8, 2, 2, 4, 4, 1> {};     // 97 KB
template <> struct BwdConfig<96, true> : BwdTile<96, 64, 64, 4, 2, 2, 2, 4, 1> {};      // 89 KB
template <> struct BwdConfig<128, true> : BwdTile<128, 64, 64, 8, 1, 2, 2, 2, 1> {};    // 81 KB
template <> struct BwdConfig<192, true> : BwdTile<192, 32, 64, 8, 1, 2, 4, 2, 1> {};    // 80 KB
template <> struct BwdConfig<256, true> : BwdTile<256, 32, 32, 4, 1, 2, 2, 2, 1> {};    // 68 KB

// delta: bound by memory, so nothing but whole 128-byte lines per request matters. A row of kHeadDim 16-bit
// numbers is read by kHeadDim / 8 lanes of 16 bytes; at headdim 64 that is one line.
template <int kHeadDim>
struct DeltaConfig {
  static constexpr int kThreads = 256;
  static constexpr int kLanes = kHeadDim / 8;
  static constexpr int kRows = kThreads / kLanes;
  static_assert(kLanes == 8 || kLanes == 16 || kLanes == 32, "a row must fill a power-of-two part of a warp");
};

}  // namespace fa2::sm80
