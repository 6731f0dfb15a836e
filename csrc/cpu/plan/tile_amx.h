// Tiles and scratch layout of drivers/amx.h: GEMMs whose steps are blocks of 32 channels. No tile border changes a bit.
#pragma once

#include <cstdint>

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "patch_axis.h"
#include "summation_order.h"
#include "tile_grid.h"

namespace conv2d_ext::cpu {

// Sums at once whose epilogue may run between the multiplications of the next ones (pack/line_stores.h), and those of
// two vectors that a micro-kernel takes.
constexpr int64_t kMostStoredBetween = 64, kSumsOfKernel = 2 * kAmxTileRows;

struct AmxTiling : TileGrid {
  bool expands;  // each tap along a row has a copy of the tile's columns
  int64_t sums;  // of a tile, with those of no pixel; whole tiles of 16
  int64_t sums_at_once;
  int64_t block_channels;           // channels whose patch lies in scratch together (whole segments)
  int64_t chunk_vectors, chunks_m;  // result channels of a work item, in vectors
  int64_t patch_elements;
  bool one_block;        // the whole of K passes in one block of channels, and panels are stored one by one
  bool stores_between;   // ... while those of the next one are multiplied
  int64_t shared_bytes;  // of the call: all weights, packed once for all work items; or 0
  int64_t items(int64_t groups) const { return groups * chunks_m * tiles(); }
};
AmxTiling tile_amx(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int num_threads);

// The axes of a patch. Where neighbouring columns of the result are neighbours in the source the columns are those of
// the source, and all taps of a row share them; with a stride there is such a run for each of its phases, if taps are
// neighbours. The sums between the end of one row and the begin of the next one are of no pixel. Else, and where these
// would be too many, each tap has columns of its own. In either case a row follows the one before at a distance of
// run_length.
inline PatchAxis amx_patch_axis(const GatherAxis& axis, int64_t position0, int64_t positions, int64_t tap0,
                                int64_t taps) {
  if (axis.step == 1) return make_patch_axis(axis, position0, positions, tap0, taps);
  return axis.tap == 1 ? make_phased_axis(axis, position0, positions, tap0, taps)
                       : make_expanded_axis(axis, position0, positions, tap0, taps);
}
inline PatchAxis amx_patch_rows(const ConvGemm& gemm, const Tile& tile, int64_t tap0, int64_t taps) {
  return amx_patch_axis(gemm.axis_h, tile.row, tile.rows, tap0, taps);
}
inline PatchAxis amx_patch_cols(const ConvGemm& gemm, bool expands, const Tile& tile, int64_t tap0, int64_t taps) {
  return expands ? make_expanded_axis(gemm.axis_w, tile.col, tile.cols, tap0, taps)
                 : amx_patch_axis(gemm.axis_w, tile.col, tile.cols, tap0, taps);
}
// How the sums of a tile are numbered whose rows follow one another at this distance. Images begin with a tile of sums,
// but for those of a single tap, which have no border.
inline SumPitches amx_sum_pitches(const ConvGemm& gemm, const Tile& tile, int64_t row) {
  const int64_t sums = (tile.rows - 1) * row + tile.cols;
  return {row, gemm.taps() == 1 ? sums : round_up(sums, kAmxTileRows)};
}

// Blocks of a weight of result channels that make a tile's columns.
inline int64_t shared_blocks(const ConvGemm& gemm) { return gemm.channels * gemm.taps() * (kBlockChannels / 2); }

// A thread's scratch: offsets in bytes.
struct AmxScratch : ScratchLayout {
  int64_t row_tiles, position_offsets, tap_offsets, bias, panel, patch, row;
  SumsLayout c_tile;
};
AmxScratch lay_out_scratch(const AmxTiling& tiling, const KBlocking& k, const VectorShape& vector);

}  // namespace conv2d_ext::cpu
