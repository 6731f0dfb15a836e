// Tiles of the driver with vectors over pixels (drivers/pixels.h), and their scratch.
#pragma once

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "patch_axis.h"
#include "summation_order.h"
#include "tile_grid.h"

namespace conv2d_ext::cpu {

// Vectors of the widest panel of its micro-kernels, and the most rows of any of them.
constexpr int64_t kMaxPanelVectors = 4, kMaxPixelRows = 8;

// Rows (result channels) of its micro-kernels. With 16 registers 4 x 3 accumulators: 7 loads for 12 multiply-adds,
// where 6 x 2 take 8, and a weight serves half as many pixels more. With 32 registers 8 x 3, since channels come in
// multiples of eight.
constexpr int64_t pixel_rows(const VectorShape& vector) {
  return vector.max_vectors >= kMaxPanelVectors ? kMaxPixelRows : 4;
}

// Vectors of the widest panel for blocks of up to `rows` result channels: what registers hold, for eight accumulators
// and more.
constexpr int64_t pixel_panel_vectors(int64_t rows, const VectorShape& vector) {
  return rows <= (vector.max_vectors >= kMaxPanelVectors ? 6 : 2) ? kMaxPanelVectors : 3;
}

// The most result channels of a 1x1 kernel that goes by columns.
constexpr int64_t kMostPixelColumnResults = 6;

// Whether panels of a 1x1 kernel's pixels take all of K at once where a tile's sums are direct: source and result are
// planes, of a vector of pixels or more.
bool takes_whole_planes(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size);

// Whether the pixels of a 1x1 kernel are read where they lie, full panels of them.
bool reads_pixels_in_place(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size);

// Whether a 1x1 kernel to few channels goes by columns: where pixels have their channels side by side. Chunks, padding
// and a bias that is added first are left to the other micro-kernels.
bool goes_by_columns(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size);

// Tiles of the driver with vectors over pixels: of one image each.
struct PixelTiling : TileGrid {
  int64_t block_channels;
  int64_t chunk_m, chunks_m;  // result channels of a work item
  int64_t patch_elements, c_elements;
  bool join_rows;        // the tile's rows continue one another in the patch
  bool source_in_place;  // full panels are read from the source tensor
  bool by_columns;       // pixels are transposed in registers (kernels/columns.h): there is no patch
  int64_t weight_depth;  // of a result channel's weights in scratch
  bool direct;           // full panels are summed in the result tensor
  bool whole_planes;     // each panel takes all of K at once; source_in_place and direct
  // Of whole planes: panels that meet all result channels before the next ones, and whether a step asks for the same
  // plane's next panel, or for the planes of steps to come.
  int64_t panels_at_once;
  bool asks_next_panel;

  bool weight_in_place() const { return weight_depth == 0; }
  int64_t items(int64_t groups) const { return groups * chunks_m * tiles(); }
};
PixelTiling tile_pixel_conv(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size,
                            int num_threads);

// The panels of a run of pixels, for blocks of up to `rows` result channels. The last panel of whole_planes overlaps
// the one before; so there are two where the pixels exceed one vector and don't fill the last one.
Panels cut_run(const PixelTiling& tiling, int64_t run, int64_t rows, const VectorShape& vector);

// A thread's scratch: offsets in bytes.
struct PixelScratch : ScratchLayout {
  int64_t tap_offsets, channel_offsets, zeros, bias, weight, patch;
  SumsLayout c;
};
PixelScratch lay_out_scratch(const PixelTiling& tiling, const KBlocking& k, const VectorShape& vector);

}  // namespace conv2d_ext::cpu
