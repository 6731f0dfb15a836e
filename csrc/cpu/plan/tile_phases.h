// Input gradients whose phases run together (drivers/phases.h): which ones, their tiles and scratch.
#pragma once

#include <cstdint>

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "patch_axis.h"
#include "tile_grid.h"

namespace conv2d_ext::cpu {

// A convolution's phases (for_each_grad_input_gemm), which share grad_output and, each its own taps, the weight.
struct JoinedPhases {
  static constexpr int kMost = 16;
  static constexpr int64_t kMostTaps = 128;

  const Call* call;
  // A stride leads from tap to tap of a phase. Phase f begins with tap (f / stride_w, f % stride_w).
  int count;
  ConvGemm gemm[kMost];  // `weight`: the whole kernel's

  // Coordinates of grad_output that any tap of any phase meets: the first n rows of every phase meet n + row_reach
  // rows, from first_row on; columns: all that are met.
  int64_t first_row, row_reach, first_col, cols;
  // In planes whose rows follow one another, the sums of all phases are kept and stored together, as runs of pixels.
  // There the result's pixel (y, x) is number y * in_w + x, and the first one of phase f is number first_pixel[f].
  bool whole_rows;
  int64_t first_pixel[kMost];
  // Vectors run over groups, as in drivers/gemm.h.
  bool over_groups;

  const Conv2dProblem& problem() const { return call->problem; }
  // Rows of the phase that has most of them.
  int64_t most_rows() const { return div_up(problem().in_h, problem().stride_h); }
  // Pixels of one image, in up to `rows` rows of the largest phase.
  int64_t most_pixels(int64_t rows) const {
    return min64(most_rows(), rows) * div_up(problem().in_w, problem().stride_w);
  }
  // Those whose sums are kept at once.
  int64_t kept_pixels(int64_t rows) const {
    const Conv2dProblem& p = problem();
    return whole_rows ? min64(saturating_mul(rows, p.stride_h), p.in_h) * p.in_w : most_pixels(rows);
  }
};

// Joins the phases of grad_input where there are so few pixels that packing weights takes the time, where whole rows of
// planes, or all channels of groups, are stored together, and returns nullptr; else why not.
// The choice changes no bit.
const char* join_phases(const Call& call, const VectorShape& vector, int num_threads, JoinedPhases& phases);

// A work item: of some images the same rows of every phase, for a chunk of a group's result channels, or for all those
// of a vector of groups.
struct PhasesTiling {
  int64_t tile_images, tiles_n, tile_rows, tiles_h;
  int64_t group_blocks;             // groups, or vectors of them
  int64_t panel_vectors;            // the widest panel
  int64_t chunk_vectors, chunks_m;  // as in ConvTiling
  int64_t patch_elements;
  bool groups_first;  // as in ConvTiling
  int64_t tiles() const { return tiles_n * tiles_h; }
  int64_t parts() const { return group_blocks * chunks_m; }
  int64_t items() const { return tiles() * parts(); }
};
PhasesTiling tile_phases(const JoinedPhases& phases, const VectorShape& vector, int num_threads);

// A thread's scratch: offsets in bytes, each part on a cache line of its own.
struct PhasesScratch : ScratchLayout {
  int64_t position_offsets, tap_offsets, places, zeros, taps, panel, patch;
  SumsLayout c_tile;
};
PhasesScratch lay_out_scratch(const PhasesTiling& tiling, const JoinedPhases& phases, const VectorShape& vector);

}  // namespace conv2d_ext::cpu
