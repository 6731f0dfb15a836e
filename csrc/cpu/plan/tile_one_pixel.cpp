#include "tile_one_pixel.h"

#include "../base/limits.h"
#include "patch_axis.h"

namespace conv2d_ext::cpu {

namespace limit = limits::one_pixel;

namespace {

// Items that there should be for the threads to share, where each then has products enough.
int64_t worthwhile_items(double products, int num_threads) {
  // Clamped before it is an integer: expanded tensors have more products than one holds.
  const double worthwhile = products / double(limit::kThreadProducts), most = 4.0 * num_threads;
  return num_threads == 1 ? 1 : int64_t(worthwhile < most ? worthwhile : most);
}

}  // namespace

bool is_small(const Conv2dProblem& p) {
  return p.out_h == 1 && p.out_w == 1 &&
         double(p.batch) * double(p.out_channels) * double(p.gemm_k()) < double(limit::kSmallProducts);
}

DotTiling tile_dot(const ConvGemm& gemm, const DotBlocking& k, const DotKernelShape& shape, int num_threads) {
  DotTiling t{};
  t.blocks_n = div_up(gemm.batch, limit::kDotImages);
  t.images = div_up(gemm.batch, t.blocks_n);
  const int64_t step = t.images == 1 ? shape.single_rows : shape.rows;

  // As many rows as fit, fewer where threads would idle.
  int64_t blocks_m = div_up(gemm.m, max64(limit::kDotResults / t.images, step));
  const int64_t others = gemm.groups * t.blocks_n;
  const double products = double(gemm.m) * double(k.products) * double(t.images) * double(others);
  const int64_t wanted = worthwhile_items(products, num_threads);
  if (others * blocks_m < wanted) {
    blocks_m = min64(div_up(gemm.m, step), round_up(div_up(wanted, others), num_threads));
  }
  t.rows = min64(gemm.m, round_up(div_up(gemm.m, blocks_m), step));
  t.blocks_m = div_up(gemm.m, t.rows);
  // The micro-kernels' surplus rows and the last vector of results.
  t.padded_rows = t.rows + max64(shape.single_rows, shape.lanes);

  const int64_t chain = k.chain * shape.width;
  t.packs_rows = !dot_is_dense(gemm, gemm.weight_c, gemm.weight_i, gemm.weight_j);
  const int64_t packed = limit::kDotPackedBytes / div_up(t.images, limit::kDotPackedImages);
  const int64_t bytes = t.packs_rows                ? max64(packed, limit::kDotBlockBytes)
                        : t.images <= shape.columns ? limit::kDotStreamBytes
                                                    : limit::kDotBlockBytes;
  t.depth = min64(chain * max64(1, bytes / (chain * shape.element_size)), round_up(k.products, shape.width));
  return t;
}

DotScratch lay_out_scratch(const DotTiling& t, const DotKernelShape& shape) {
  // The micro-kernels' surplus columns have lanes too.
  const int64_t lane_columns = t.images == 1 ? 1 : round_up(t.images, shape.columns);
  DotScratch s{};
  s.bias = s.take(t.padded_rows * shape.element_size);
  s.lanes = s.take(lane_columns * t.padded_rows * shape.width * shape.element_size);
  s.patches = s.take(t.images * t.depth * shape.element_size);
  s.rows = s.take(t.packs_rows ? max64(shape.single_rows, shape.rows) * t.depth * shape.element_size : 0);
  return s;
}

bool dot_is_dense(const ConvGemm& g, int64_t stride_c, int64_t stride_i, int64_t stride_j) {
  return (g.taps_w == 1 || stride_j == 1) && (g.taps_h == 1 || stride_i == g.taps_w) &&
         (g.channels == 1 || stride_c == g.taps());
}

RowTiling tile_rows(const RowProducts& p, int num_threads) {
  RowTiling t{};
  t.blocks_l = div_up(p.lanes, limit::kRowLanes);
  t.blocks_r = 1;
  const double products = double(p.groups) * double(p.results) * double(p.depth) * double(p.lanes);
  const int64_t wanted = worthwhile_items(products, num_threads);
  if (p.groups * t.blocks_l < wanted) {
    // Results where there are many (grad_weight), else lanes, in pieces of whole cache lines.
    const int64_t pieces = div_up(wanted, p.groups * t.blocks_l);
    if (p.results >= 8 * pieces) {
      t.blocks_r = pieces;
    } else {
      t.blocks_l = min64(t.blocks_l * pieces, div_up(p.lanes, 64));
    }
  }
  t.results = div_up(p.results, t.blocks_r);
  t.blocks_r = div_up(p.results, t.results);
  t.lanes = min64(p.lanes, round_up(div_up(p.lanes, t.blocks_l), 64));
  t.blocks_l = div_up(p.lanes, t.lanes);
  return t;
}

int64_t row_results(int64_t results, Along along) {
  if (along == Along::kK) return results <= 2 ? results : results <= 4 ? 4 : results <= 6 ? 6 : kMostColumnResults;
  const int64_t step = div_up(results, max64(div_up(results, kMostRowResults), 1));
  return step == 5 ? kMostRowResults : step;
}

RowScratch lay_out_scratch(const RowProducts& p, const RowTiling& t, int64_t element_size) {
  // Work items of fewer results may take more of them at once.
  const int64_t results = p.along == Along::kK ? row_results(t.results, p.along)
                          : t.results <= 4     ? t.results
                                               : kMostRowResults;
  RowScratch s{};
  s.pitch = round_up(t.lanes, 16);
  s.factor_pitch = p.along == Along::kK ? min64(p.chunk(), p.depth) : p.chain;
  s.factors = s.take(s.factor_pitch * results * element_size);
  s.sums = s.take_sums(s.pitch * results * element_size, p.has_chunks());
  s.bias = s.take(s.pitch * element_size);
  const int64_t placed = p.placed == Placed::kNothing ? 0 : p.placed == Placed::kRows ? p.depth : results;
  s.placed = s.take(placed * s.pitch * element_size);
  return s;
}

RowProducts row_products(const ConvGemm& g, const ChainLimits& limits, Along along) {
  const KBlocking k = block_k(g, limits);
  RowProducts p{};
  p.along = along;
  p.groups = g.groups;
  // Rows of a matrix are the pixels of one image, or images of one pixel.
  p.results = g.batch * g.cols;
  p.depth = g.channels;
  p.lanes = g.m;
  p.segment = k.segment_channels;
  p.chain = k.chain;
  p.segments_per_chunk = kSegmentsPerChunk;
  p.factor = g.source;
  p.factor_g = g.channels * g.source_c;
  p.factor_r = g.cols == 1 ? g.source_n : g.source_col;
  p.factor_k = g.source_c;
  p.rows = g.weight;
  p.rows_g = g.weight_g;
  p.rows_k = g.weight_c;
  p.lane_step = g.weight_m;
  p.result = g.destination;
  p.result_g = g.m;
  p.result_r = g.cols == 1 ? g.destination_n : g.destination_col;
  p.bias = g.bias;
  p.bias_step = g.bias_stride;
  return p;
}

bool has_dense_rows(const Conv2dProblem& p, const int64_t* weight) {
  const SharedDimensions lanes =
      join_dimensions({p.in_channels_per_group(), weight[1], weight[1]}, {p.kernel_h, weight[2], weight[2]},
                      {p.kernel_w, weight[3], weight[3]});
  return lanes.count == 1 && lanes.dimension[0].stride_a == 1;
}

bool lies_as_a_row(const Conv2dProblem& p, const int64_t* image, const int64_t* weight) {
  if (!are_inside(p.rows(), p.kernel_h, 1, p.in_h) || !are_inside(p.cols(), p.kernel_w, 1, p.in_w)) return false;
  const SharedDimensions lanes = join_dimensions({p.in_channels_per_group(), weight[1], image[1]},
                                                 {p.kernel_h, weight[2], image[2] * p.dilation_h},
                                                 {p.kernel_w, weight[3], image[3] * p.dilation_w});
  return lanes.count == 1 && lanes.dimension[0].stride_a == 1 && lanes.dimension[0].stride_b == 1;
}

RowProducts weight_row_products(const Call& call, const ChainLimits& limits) {
  const Conv2dProblem& problem = call.problem;
  const int64_t *const grad_output = call.a.stride, *const input = call.b.stride;
  const PixelBlocking pixels = block_pixels(problem, limits);
  RowProducts p{};
  p.along = Along::kLanes;
  p.groups = problem.groups;
  p.results = problem.out_channels_per_group();
  p.depth = problem.batch;
  p.lanes = problem.gemm_k();
  p.segment = pixels.images;
  p.chain = pixels.chain;
  p.segments_per_chunk = kPixelSegmentsPerChunk;
  p.factor = call.a.data;
  p.factor_g = p.results * grad_output[1];
  p.factor_r = grad_output[1];
  p.factor_k = grad_output[0];
  p.rows = call.b.data;
  p.rows_g = problem.in_channels_per_group() * input[1];
  p.rows_k = input[0];
  if (!lies_as_a_row(problem, input, call.result.stride)) {
    p.placed = Placed::kRows;
    p.patch = {&problem, input, call.result.stride};
  }
  p.result = call.result.data;
  p.result_g = p.results * call.result.stride[0];
  p.result_r = call.result.stride[0];
  return p;
}

RowProducts input_row_products(const Call& call, const ConvGemm& patches, const ChainLimits& limits) {
  const int64_t *const weight = call.b.stride, *const input = call.result.stride;
  RowProducts p = row_products(patches, limits, Along::kLanes);
  p.placed = Placed::kResults;
  p.patch = {&call.problem, input, weight};
  p.result_g = call.problem.in_channels_per_group() * input[1];
  return p;
}

}  // namespace conv2d_ext::cpu
