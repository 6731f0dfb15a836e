// Convolutions with one result pixel, and products of matrices with few rows: tiles and scratch of drivers/dot.h
// (forward) and drivers/rows.h (gradients, products).
#pragma once

#include <cstdint>

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "summation_order.h"

namespace conv2d_ext::cpu {

// Whether a problem with one result pixel has so few products that waking a thread would take longer.
bool is_small(const Conv2dProblem& problem);

// What a compiled dot micro-kernel takes at once.
struct DotKernelShape {
  int64_t lanes, width, element_size;
  int64_t single_rows;    // rows times one source vector
  int64_t rows, columns;  // rows times several
  int64_t few_columns;    // the same of so many, where no more are left
};
// A work item: `rows` weight rows times `images`, walking over K in blocks of `depth` (whole chains).
struct DotTiling {
  int64_t images, rows, blocks_n, blocks_m, depth, padded_rows;
  bool packs_rows;  // the weight's, which don't lie in the order of k
  int64_t items(int64_t groups) const { return groups * blocks_n * blocks_m; }
};
DotTiling tile_dot(const ConvGemm& gemm, const DotBlocking& k, const DotKernelShape& shape, int num_threads);

struct DotScratch : ScratchLayout {
  int64_t bias, lanes, patches, rows;
};
DotScratch lay_out_scratch(const DotTiling& tiling, const DotKernelShape& shape);

// Whether strides make (c, i, j) one run of consecutive elements.
bool dot_is_dense(const ConvGemm& gemm, int64_t stride_c, int64_t stride_i, int64_t stride_j);

// ---- rows times factors --------------------------------------------------------------------------------------------

// What of the second factor lies side by side: lanes, or steps of k.
enum class Along { kLanes, kK };

// One pixel's patch, whose elements lie otherwise in the image than in a row of the weight. In the row, which is one
// run, an element's lane is where the weight's strides lead from the row's begin; in the image it is where the problem
// says. What it points to lives as long as the call.
struct PatchLanes {
  const Conv2dProblem* problem;
  const int64_t *image, *weight;  // strides
};
// Which operand of RowProducts is such a patch: the rows, which an item gathers, or the results, which it scatters.
enum class Placed { kNothing, kRows, kResults };

// result[g, r, lane] = bias[lane] + sum over k of factor[g, r, k] * row[g, k, lane], with consecutive lanes in the
// result. (Of what is placed the pointer and the strides are the image's.) k counts pairs of elements where the GEMM
// does. Summed as the GEMM drivers do: segments of `segment` products (the last may be shorter), in chains of `chain`,
// and chunks of segments.
struct RowProducts {
  Along along;
  int64_t groups, results, depth, lanes;
  int64_t segment, chain, segments_per_chunk;
  const void* factor;
  int64_t factor_g, factor_r, factor_k;
  const void* rows;
  int64_t rows_g, rows_k, lane_step = 1;
  Placed placed = Placed::kNothing;
  PatchLanes patch{};
  void* result;
  int64_t result_g, result_r;
  const void* bias = nullptr;  // or one for each lane; the same for all groups
  int64_t bias_step = 0;

  int64_t chunk() const { return segments_per_chunk * segment; }
  bool has_chunks() const { return depth > chunk(); }
};

// A work item: so many of a group's results and lanes.
struct RowTiling {
  int64_t results, lanes, blocks_r, blocks_l;
  int64_t items(int64_t groups) const { return groups * blocks_r * blocks_l; }
};
RowTiling tile_rows(const RowProducts& products, int num_threads);

// Results that a micro-kernel takes at once, of `results`. Along lanes: near-equal steps of 1, 2, 3, 4 or 6, and the
// vectors of lanes it takes then, since accumulators are 12 of 16 registers, with AVX-512 24 (or 16) of 32. Along k: 1,
// 2, 4, 6 or 8, and one vector.
int64_t row_results(int64_t results, Along along);
constexpr int64_t row_vectors(int64_t vector_bytes, int64_t results) {
  if (vector_bytes < 64) return 12 / results;
  return results == 1 ? 16 : 24 / results;
}
constexpr int64_t kMostRowResults = 6, kMostColumnResults = 8;

struct RowScratch : ScratchLayout {
  int64_t factors, bias, placed;
  SumsLayout sums;
  int64_t pitch, factor_pitch;  // of a result's sums; of its factors, of a chain (kLanes) or a chunk (kK)
};
RowScratch lay_out_scratch(const RowProducts& products, const RowTiling& tiling, int64_t element_size);

// A GEMM of the input gradient, or of few rows of a matrix, as rows times factors.
RowProducts row_products(const ConvGemm& gemm, const ChainLimits& limits, Along along);

// Whether a row of a weight with these strides, all channels and taps of a group, is one run; and whether the one
// output pixel's patch lies in the image as such a row does, and all of it.
bool has_dense_rows(const Conv2dProblem& problem, const int64_t* weight);
bool lies_as_a_row(const Conv2dProblem& problem, const int64_t* image, const int64_t* weight);

// The gradients of one output pixel as such products: the weight's, whose rows are placed where they have to be, and
// the input's, from patch_gemm's, whose results are.
RowProducts weight_row_products(const Call& call, const ChainLimits& limits);
RowProducts input_row_products(const Call& call, const ConvGemm& patches, const ChainLimits& limits);

}  // namespace conv2d_ext::cpu
