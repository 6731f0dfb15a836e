// Convolutions with one result pixel: tiles and scratch of drivers/dot.h (forward) and drivers/rows.h (gradients).
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
  int64_t lanes, width, element_size, storage_size;
  int64_t single_rows;    // rows times one source vector
  int64_t rows, columns;  // rows times several
};
// A work item: `rows` weight rows times `images`, walking over K in blocks of `depth` (whole chains).
struct DotTiling {
  int64_t images, rows, blocks_n, blocks_m, depth, padded_rows;
  int64_t items(int64_t groups) const { return groups * blocks_n * blocks_m; }
};
DotTiling tile_dot(const ConvGemm& gemm, const DotBlocking& k, const DotKernelShape& shape, int num_threads);

struct DotScratch {
  int64_t bias, lanes, patches, rows, bytes;
};
DotScratch lay_out_scratch(const DotTiling& tiling, const DotKernelShape& shape);

// Whether every tap meets the source, and whether strides make (c, i, j) one run of consecutive elements.
bool taps_are_inside(const ConvGemm& gemm);
bool dot_is_dense(const ConvGemm& gemm, int64_t stride_c, int64_t stride_i, int64_t stride_j);

// ---- gradients -----------------------------------------------------------------------------------------------------

// result[g, r, lane] = bias[lane] + sum over k of factor[g, r, k] * row[g, k, lane], with consecutive lanes in the
// result. Of rows either lanes are consecutive, for drivers/rows.h, or (lane_step is not 1) steps of k, for
// drivers/columns.h. k counts pairs of elements where the GEMM does. Summed as the GEMM drivers do: segments of
// `segment` products (the last may be shorter), in chains of `chain`, and chunks of segments.
struct RowProducts {
  int64_t groups, results, depth, lanes;
  int64_t segment, chain, segments_per_chunk;
  const void* factor;
  int64_t factor_g, factor_r, factor_k;
  const void* rows;
  int64_t rows_g, rows_k, lane_step = 1;
  void* result;
  int64_t result_g, result_r;
  const void* bias = nullptr;  // or one for each lane; the same for all groups
  int64_t bias_step = 0;
};

// A work item: so many of a group's results and lanes.
struct RowTiling {
  int64_t results, lanes, blocks_r, blocks_l;
  int64_t items(int64_t groups) const { return groups * blocks_r * blocks_l; }
};
RowTiling tile_rows(const RowProducts& products, int num_threads);

// Results that a micro-kernel takes at once, of `results`: near-equal steps of 1, 2, 3, 4 or 6; and the vectors of
// lanes it takes then: accumulators are 12 of 16 registers, with AVX-512 24 (or 16) of 32.
int64_t row_results(int64_t results);
constexpr int64_t row_vectors(int64_t vector_bytes, int64_t results) {
  if (vector_bytes < 64) return 12 / results;
  return results == 1 ? 16 : 24 / results;
}
int64_t row_scratch_bytes(const RowProducts& products, const RowTiling& tiling, int64_t results, int64_t element_size);

// The same of drivers/columns.h, whose kernels take 1, 2, 4 or 8 results.
constexpr int64_t kMostColumnResults = 8;
int64_t column_results(int64_t results);
struct ColumnScratch {
  int64_t factors, sums, totals, lost, bias, bytes;
  int64_t pitch, factor_pitch;  // of the sums, and of the factors of a chunk
};
ColumnScratch lay_out_column_scratch(const RowProducts& products, const RowTiling& tiling, int64_t element_size);

// A GEMM of the input gradient, or of few rows of a matrix, as rows times factors.
RowProducts row_products(const ConvGemm& gemm, const ChainLimits& limits);

// The weight's gradient of one output pixel as such products.
RowProducts row_products(const Call& call, const ChainLimits& limits);

}  // namespace conv2d_ext::cpu
