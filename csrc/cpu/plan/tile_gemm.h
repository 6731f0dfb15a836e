// Tiles and scratch layout of the GEMM drivers (drivers/gemm.h, drivers/grad_weight.h) and of
// drivers/depthwise_weight.h. No tile border changes a bit, so tilings may read anything, threads and memory layout
// too.
#pragma once

#include <cstdint>

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "padding_classes.h"
#include "patch_axis.h"
#include "summation_order.h"
#include "tile_grid.h"

namespace conv2d_ext::cpu {

// Tiles of the driver for ConvGemm.
struct ConvTiling : TileGrid {
  int64_t block_channels;           // channels whose patch lies in scratch together (whole segments)
  int64_t chunk_vectors, chunks_m;  // result channels of a work item, in vectors
  int64_t patch_elements;           // scratch for the patch
  bool one_block;                   // the whole of K passes in one block of channels, and panels are stored one by one
  int64_t segments_at_once;         // whose weights are one panel
  int64_t kept_panels;              // of a chunk: their packed weights stay in scratch for the thread's next items
  PaddingRule padding;              // which products with it are left out
  bool groups_first;                // a tile's groups are neighbouring items, rather than a group's tiles
  bool interleaved;                 // lanes are groups, and all result channels of them are stored together
  int64_t items(int64_t groups) const { return groups * chunks_m * tiles(); }  // groups: or vectors of them
};
ConvTiling tile_conv(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, bool lanes_are_groups,
                     int num_threads);

// Tiles of the driver for grad_weight: a work item owns chunk_vectors vectors of output channels times a block of
// input channels (or, for kernels of many taps, a rectangle of one channel's taps, or of all where they are few).
struct WeightTiling {
  int64_t chunk_vectors, chunks_m;
  int64_t block_channels, tap_rows, tap_cols;
  int64_t blocks_c, blocks_h, blocks_w;
  int64_t patch_elements;
  // Where lanes are kInnerGroups: whole vectors of groups in an item (what is left for the last one is one more vector,
  // which overlaps the one before), else 0; and how many such items there are.
  int64_t group_vectors, group_blocks;
  int64_t groups_in_turn;  // groups of an item, which walks over the pixels once; where lanes are groups 1
  int64_t patch_segments;  // segments, rows of one image below one another, that a patch serves: they share its rows
  PaddingRule padding;     // as above
  int64_t slots;  // chunks of pixels summed in parallel, each into a partial of its own; 1: one after the other
  int64_t max_elements() const { return block_channels * tap_rows * tap_cols; }
  int64_t tiles() const { return chunks_m * blocks_c * blocks_h * blocks_w; }
  int64_t items() const { return tiles() * group_blocks; }  // of one slot
  int64_t tile_size(int64_t lanes) const {
    return chunk_vectors * lanes * max_elements() * (group_vectors > 0 ? group_vectors + 1 : groups_in_turn);
  }
};
enum class WeightLanes { kChannels, kGroups, kInnerGroups };  // the last: Driver::kWeightDepthwise
WeightTiling tile_grad_weight(const Call& call, const PixelBlocking& pixels, const VectorShape& vector,
                              WeightLanes lanes, int num_threads);

// Bytes of the call's workspace, where chunks of pixels are summed in parallel: a partial of each tile in each slot,
// its total, and what that lost. At most limits::tiling::kPartialBytes a thread.
int64_t partial_bytes(const WeightTiling& tiling, const VectorShape& vector);

// A thread's scratch: offsets in bytes.
struct ConvScratch : ScratchLayout {
  int64_t position_offsets, tap_offsets, zeros, bias, panel, patch, kept;
  SumsLayout c_tile;
  int64_t listed_offsets, listed_numbers, listed_places, listed_steps;  // drivers/listed_steps.h
  int64_t kept_pitch;  // elements from a kept panel, of all of K, to the next one
};
ConvScratch lay_out_scratch(const ConvTiling& tiling, const KBlocking& k, const VectorShape& vector);
constexpr int64_t kWeightRunBytes = 56;  // a WeightRun (kernels/depthwise_weight.h)
struct WeightScratch : ScratchLayout {
  int64_t element_offsets, pixel_offsets, listed_offsets, listed_numbers, listed_steps, runs, zeros, panel, patch, rows;
  SumsLayout tile;  // unused where slots have partials of their own
};
WeightScratch lay_out_scratch(const WeightTiling& tiling, const PixelBlocking& pixels, const VectorShape& vector);

}  // namespace conv2d_ext::cpu
