// Depthwise problems: tiles and scratch of drivers/depthwise.h (channels innermost in source and destination) and of
// drivers/strided.h (planes, stride 2). plan/candidates.cpp says which problems they take.
#pragma once

#include <numeric>

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "patch_axis.h"
#include "summation_order.h"
#include "tile_grid.h"

namespace conv2d_ext::cpu {

// Pixels that the widest micro-kernel of the driver takes: widths of 7 * 2^n are common, and 7 accumulators leave
// AVX2's 16 registers room for the weights of a row of 7 taps.
constexpr int kDepthwisePixels = 7;

// How a row of pixels goes through a micro-kernel whose columns of the source are one tap apart: in `runs` runs in
// turn, each of every runs-th pixel (dilation spreads the taps of neighbours, not those of a run's), which are `step`
// taps apart.
struct DepthwiseRow {
  int64_t step, runs;
};
// By the distances of positions and of taps, of which there are taps_w.
inline DepthwiseRow depthwise_row(int64_t taps_w, int64_t position, int64_t tap) {
  if (taps_w == 1) return {1, 1};
  const int64_t distance = tap < 0 ? -tap : tap, common = std::gcd(position, distance);
  return {position / common, distance / common};
}
inline DepthwiseRow depthwise_row(const ConvGemm& gemm) {
  return depthwise_row(gemm.taps_w, gemm.axis_w.step, gemm.axis_w.tap);
}
// The rows of taps that depthwise_ukernel is compiled for. Others go through gemm_ukernel, as do rows whose runs have
// too few of the `cols` pixels for accumulators that don't wait for one another.
constexpr bool has_depthwise_ukernel(int64_t taps_w, int64_t step) {
  if (taps_w == 3 || taps_w == 5 || taps_w == 7) return step == 1 || step == 2;
  return step == 1 && (taps_w == 1 || taps_w == 2 || taps_w == 4);
}
inline bool has_depthwise_ukernel(int64_t taps_w, const DepthwiseRow& row, int64_t cols) {
  return has_depthwise_ukernel(taps_w, row.step) && (row.runs == 1 || cols / row.runs >= 4);
}

// The taps that depthwise_weight_ukernel takes at once: of `taps_w` columns so many, and of `taps_h` rows of as many
// one, two, three or the most for which there are accumulators; and the pixels' step, if they share columns, or 0.
constexpr int64_t depthwise_weight_cols(int64_t taps_w) {
  return taps_w >= 7 ? 7 : taps_w == 6 ? 3 : taps_w == 4 ? 2 : taps_w;
}
constexpr int64_t most_depthwise_weight_rows(int64_t cols, int64_t accumulators) {
  return max64(1, min64(accumulators / cols, cols == 1 ? 8 : 4));
}
constexpr int64_t depthwise_weight_rows(int64_t taps_h, int64_t most) {
  return taps_h >= most ? most : min64(taps_h, 3);
}
constexpr int64_t depthwise_weight_step(int64_t cols, int64_t stride, int64_t dilation) {
  return cols > 1 && stride == dilation ? 1 : cols > 2 && stride == 2 * dilation ? 2 : 0;
}

// Phases of an input gradient that run in turn at most: a stride of 2 has four. More run four at a time.
constexpr int kMostDepthwiseGemms = 4;

struct DepthwiseTiling : TileGrid {
  int64_t block_vectors;  // whole vectors of groups in a block; the last block takes what is left, too
  int64_t blocks;
  // The source is read as it lies, and not from a patch: by micro-kernels of rows of taps, and where no pixel meets the
  // padding and nothing is widened by gemm_ukernel, too. (Each row of taps widens 16-bit types anew. On CPUs where that
  // delays the multiply-adds, a patch is cheaper for many rows.)
  bool in_place;
  bool streams;             // in place, from a source that the caches don't hold
  bool prefetches_results;  // of the next row, beside its source; only where it streams
  int64_t patch_elements;
  int64_t image_pixels() const { return tile_rows * tile_cols; }  // which are computed at a time
  int64_t items() const { return tiles() * blocks; }
};
DepthwiseTiling tile_depthwise(const ConvGemm& gemm, const VectorShape& vector, int64_t storage_size, int num_threads);

struct DepthwiseScratch : ScratchLayout {
  int64_t position_offsets, tap_offsets, start, bias, weights, c_tile, patch;
};
DepthwiseScratch lay_out_scratch(const DepthwiseTiling& tiling, const ConvGemm& gemm, const VectorShape& vector);

// Depthwise input gradients in planes with a stride of 2 along the row (drivers/strided.h): the two phases of
// a row's columns are computed together, so that rows are written whole. Vectors run over positions of both.

// Vectors of each phase in the widest panel, and rows that the micro-kernel for `vectors` of them takes: up to four
// accumulators of each phase.
constexpr int kStridedVectors = 4;
constexpr int strided_rows(int64_t vectors) { return vectors == 1 ? 4 : vectors == 2 ? 2 : 1; }

// A work item is a tile of rows and of pairs of columns of one channel's plane.
struct StridedTiling {
  int64_t tile_rows, tile_pairs;
  int64_t tiles_h, tiles_w;
  int64_t patch_rows, patch_pitch;
  int64_t tiles() const { return tiles_h * tiles_w; }
  int64_t items(const Conv2dProblem& problem) const { return problem.batch * problem.groups * tiles(); }
};
StridedTiling tile_strided(const Conv2dProblem& problem, const VectorShape& vector, int num_threads);

struct StridedScratch : ScratchLayout {
  int64_t patch;  // weights come first
};
StridedScratch lay_out_scratch(const StridedTiling& tiling, const Conv2dProblem& problem, const VectorShape& vector);

// A run of outputs that holds all that `size` input coordinates from `first` on meet along an axis.
Interval met_outputs(const GatherAxis& axis, int64_t kernel, int64_t first, int64_t size);

}  // namespace conv2d_ext::cpu
