// Winograd's F(2 x 2, 3 x 3): which GEMMs it takes, their tiles, and scratch (drivers/winograd.h).
#pragma once

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "patch_axis.h"
#include "summation_order.h"
#include "tile_grid.h"

namespace conv2d_ext::cpu {

// The products that stand for a tile of 2 x 2 results, of 4 x 4 sources: one for each element of the transformed tile.
constexpr int64_t kWinogradProducts = 16;

// Why not, or nullptr. Geometry and dtype alone decide, since sums have an order of their own.
const char* refuse_winograd(const ConvGemm& gemm, DType dtype);

// Squares of 2 x 2 results along an axis, counted from its first position.
inline int64_t winograd_squares(int64_t positions) { return div_up(positions, 2); }
inline int64_t winograd_squares(const Tile& tile) {
  return tile.images * winograd_squares(tile.rows) * winograd_squares(tile.cols);
}

// Tiles, of whole squares but for the image's last row and column. A work item takes `run` of them, one after the
// other, and a chunk of result channels.
struct WinogradTiling : TileGrid {
  int64_t squares;                  // of a full tile
  int64_t run, runs;                // tiles of a work item, and how many items they make
  int64_t chunk_vectors, chunks_m;  // result channels of a work item, in vectors
  int64_t chain;                    // products in a chain
  int64_t block_channels;           // channels whose weights are transformed at once: whole chains
  int64_t staged_channels;          // channels that wait in scratch to be transformed: whole vectors, or all
  bool keeps_weights;               // all transformed weights of an item stay in scratch
  int64_t items(int64_t groups) const { return groups * chunks_m * runs; }
};
WinogradTiling tile_winograd(const ConvGemm& gemm, const VectorShape& vector, int num_threads);

// Squares that are computed again directly together.
constexpr int64_t kWinogradAgain = 16;

// A thread's scratch: offsets in bytes. Pitches, in elements, lead from one of the 16 products to the next.
struct WinogradScratch : ScratchLayout {
  int64_t square_offsets, channel_offsets, zeros, bias, source, weight, sums, pixels, staged;
  int64_t again_panel, again_patch, again_offsets;
  SumsLayout again;
  int64_t source_pitch, weight_pitch, sums_pitch;
  int64_t channel_pitch;  // of transformed sources whose channels are inner: from square to square
  int64_t block_weights;  // elements of a transformed block of weights
};
WinogradScratch lay_out_scratch(const WinogradTiling& tiling, const ConvGemm& gemm, const VectorShape& vector);

}  // namespace conv2d_ext::cpu
