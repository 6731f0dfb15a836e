#include "summation_order.h"

#include <utility>

#include "../base/numeric.h"

namespace conv2d_ext::cpu {

namespace {

// Results that vectors over them should have, for bfloat16 pairs to pay, and tiles of very few source channels.
constexpr int64_t kLeastResults = 6;
// Results in a vector of the kernels that take pairs.
constexpr int64_t kPairLanes = 16;
// Channels of a group, source and result, that fill enough of a tile, or of the rows of pairs in grad_weight. Without
// groups there is no better kernel for any number of result channels, nor for as few source channels as these.
constexpr int64_t kLeastAmxChannels = 16, kFewestAmxChannels = 4;
// Of so many channels a step of AMX tiles takes four columns of the kernel or more; of two it would gain too little.
constexpr int64_t kMostFoldedChannels = 8;
// Below these the GEMM driver is as fast. Of short sums it is the faster one at large batches, since adding up the
// lanes of a dot product costs as much as some hundred products, and the slower one at batch 1, where packing weights
// that are used once is what costs.
constexpr int64_t kDotProducts = 16;
constexpr int64_t kDotWeights = 1024;

// The share of (position, tap) pairs that lie inside.
double share_inside(const GatheredAxis& a) {
  GatherAxis axis = ascending(a.axis, a.taps);
  int64_t taps = a.taps, positions = a.positions;
  // What is counted knows no difference between positions and taps.
  if (positions < taps) {
    std::swap(positions, taps);
    std::swap(axis.step, axis.tap);
  }
  return double(count_met(axis, taps, positions, a.size)) / (double(a.positions) * double(a.taps));
}

// The number of bands, as far as it is no more than `most`.
int64_t count_bands(const GatheredAxis& a, int64_t most) {
  BandWalk walk(a);
  Band band{};
  int64_t count = 0;
  while (count <= most && walk.next(band)) ++count;
  return count;
}

// What the bands of an axis have together.
struct BandSizes {
  int64_t taps = 0, products = 0;
  bool has_single = false;  // one of a single position
};
BandSizes sizes_of_bands(const GatheredAxis& a) {
  BandSizes sizes;
  BandWalk walk(a);
  for (Band band{}; walk.next(band);) {
    sizes.taps += band.taps;
    sizes.products += band.positions * band.taps;
    sizes.has_single = sizes.has_single || (band.positions == 1 && band.taps > 0);
  }
  return sizes;
}

}  // namespace

void cut_rectangle(int64_t height, int64_t width, int64_t limit, int64_t& rows, int64_t& cols) {
  cols = even_piece(width, limit);
  rows = width > limit ? 1 : even_piece(height, limit / width);
}

KBlocking block_k(const ImageGemm& gemm, const ChainLimits& limits) {
  KBlocking k{};
  const int64_t channels = gemm.channels, taps_h = gemm.taps_h, taps_w = gemm.taps_w, taps = taps_h * taps_w;
  // 1x1: every product reads its own cache line of a planar source, and 128 of them fit L1 beside the panel.
  const int64_t limit = taps == 1 ? min64(limits.segment, kMaxSegment / 2) : limits.segment;
  k.segment_channels = even_piece(channels, limit / max64(taps, 1));
  k.tap_rows = taps_h;
  k.tap_cols = taps_w;
  if (taps > limit) cut_rectangle(taps_h, taps_w, limit, k.tap_rows, k.tap_cols);
  k.blocks_c = div_up(channels, k.segment_channels);
  k.blocks_h = taps_h ? div_up(taps_h, k.tap_rows) : 0;
  k.blocks_w = taps_w ? div_up(taps_w, k.tap_cols) : 0;
  // A sum of up to `products` is one segment. Where it runs over the taps of one channel F.conv2d has no shorter
  // chains.
  const bool is_short = gemm.is_gradient && channels > 1 && k.segments() == 1 && k.max_depth() <= limits.products;
  k.chain = even_piece(k.max_depth(), is_short ? limits.short_gradient : limits.products);
  return k;
}

PixelBlocking block_pixels(const Conv2dProblem& p, const ChainLimits& limits) {
  PixelBlocking b{};
  b.images = max64(kMaxSegment / max64(p.out_h * p.out_w, 1), 1);
  cut_rectangle(max64(p.out_h, 1), max64(p.out_w, 1), kMaxSegment, b.rows, b.cols);
  const bool are_few = 4 * b.rows * b.cols < 3 * limits.pixels;  // pieces of images that are cut have more
  const bool is_short = are_few || p.in_channels_per_group() == 1;
  b.chain = even_piece(b.images * b.rows * b.cols, is_short ? limits.few_pixels : limits.pixels);
  b.blocks_n = div_up(p.batch, b.images);
  b.blocks_h = div_up(p.out_h, b.rows);
  b.blocks_w = div_up(p.out_w, b.cols);
  return b;
}

bool takes_pairs(const ImageGemm& gemm) {
  // Few result channels are better off with vectors over pixels or groups; patch layers' gradients and images of one
  // pixel have kernels of their own, which don't take pairs.
  if (gemm.is_matmul) return gemm.channels > 1;
  // Phases that run together (drivers/phases.h), with vectors over groups, save more than pairs that leave half of the
  // lanes empty.
  const bool over_groups = gemm.groups >= kPairLanes && gemm.channels <= kPairLanes && 2 * gemm.m <= kPairLanes;
  if (gemm.is_phase && over_groups) return false;
  return gemm.channels > 1 && gemm.pixels() > 1 && gemm.m >= kLeastResults && gemm.result_taps() == 1;
}

int64_t columns_per_step(const ImageGemm& gemm, const GatherAxis& axis_w) {
  if (gemm.channels > kMostFoldedChannels || gemm.taps_w < 2 || (axis_w.tap != 1 && axis_w.tap != -1)) return 1;
  // A column's words are a power of two, and pairs stay together.
  int64_t words = 2;
  while (words < gemm.channels) words *= 2;
  return kBlockChannels / words;
}

bool takes_amx(const ImageGemm& gemm, const GatherAxis& axis_w) {
  if (gemm.is_matmul) return gemm.channels >= kLeastAmxChannels;
  const int64_t columns = min64(columns_per_step(gemm, axis_w), gemm.taps_w);
  const bool together = gemm.channels * columns >= kFewestAmxChannels && gemm.m >= kLeastResults;
  const bool enough = gemm.groups == 1 ? gemm.channels >= kFewestAmxChannels || together
                                       : gemm.channels >= kLeastAmxChannels && gemm.m >= kLeastAmxChannels;
  return enough && gemm.pixels() > 1 && gemm.taps() > 0 && gemm.result_taps() == 1;
}

bool takes_amx_weight(const Conv2dProblem& p) {
  return p.out_channels_per_group() >= kLeastAmxChannels &&
         saturating_mul(p.in_channels_per_group(), p.taps()) >= kLeastAmxChannels && p.out_pixels() > 1;
}

bool takes_pairs_weight(const Conv2dProblem& p) {
  // Each group's pixels are packed for it alone, which few channels don't make up for.
  const int64_t least = p.groups == 1 ? kLeastAmxChannels : 2 * kLeastAmxChannels;
  return p.out_channels_per_group() >= least && takes_amx_weight(p);
}

bool is_patch_layer(const Conv2dProblem& p) {
  // With fewer taps in a row, planes written with gaps cost less than pieces of rows so short.
  constexpr int64_t kLeastTapsOfRow = 4;
  return p.kernel_w >= kLeastTapsOfRow && grad_input_tap_step(p.stride_h, p.dilation_h) >= p.kernel_h &&
         grad_input_tap_step(p.stride_w, p.dilation_w) >= p.kernel_w;
}

bool sums_as_dots(const ImageGemm& gemm, DType dtype) {
  const int64_t products = gemm.channels * gemm.taps();
  return !gemm.is_matmul && gemm.rows == 1 && gemm.cols == 1 && is_floating(dtype) && products >= kDotProducts &&
         gemm.m >= div_up(kDotWeights, products);
}

DotBlocking block_dot(const ImageGemm& gemm, int64_t width, const ChainLimits& limits) {
  DotBlocking k{};
  k.products = gemm.channels * gemm.taps();
  k.steps = div_up(k.products, width);
  k.chain = div_up(k.steps, div_up(k.steps, limits.products));
  return k;
}

int64_t count_met(const GatherAxis& axis, int64_t taps, int64_t positions, int64_t size) {
  int64_t met = 0;
  for (int64_t tap = 0; tap < taps; ++tap) {
    met = saturating_add(met, indices_inside(axis.source(0, tap), axis.step, positions, size).count());
  }
  return met;
}

bool cuts_bands(const GatheredAxis& h, const GatheredAxis& w) {
  constexpr double kShareInside = 0.85;
  constexpr int64_t kBandPixels = 64;
  const int64_t most = h.positions * w.positions / kBandPixels;
  if (most == 0 || h.taps * w.taps == 0) return false;
  if (share_inside(h) * share_inside(w) >= kShareInside) return false;
  const int64_t rows = max64(count_bands(h, most), 1);
  return rows <= most && count_bands(w, most / rows) <= most / rows;
}

bool multiplies_padding(const ImageGemm& whole, const GatheredAxis& h, const GatheredAxis& w) {
  // Pixels that are multiplied by a weight in the time that packing it takes.
  constexpr int64_t kPackedPixels = 128;
  if (!takes_amx(whole, w.axis) || columns_per_step(whole, w.axis) != 1 || !cuts_bands(h, w)) return false;
  ImageGemm blocks = whole;
  blocks.channels = div_up(whole.channels, kBlockChannels);
  const KBlocking k = block_k(blocks, amx_limits());
  if (k.has_chunks() || !k.takes_all_taps()) return false;
  const BandSizes rows = sizes_of_bands(h), cols = sizes_of_bands(w);
  if (rows.has_single && cols.has_single) return false;
  // Exact up to 2^53, which the products of a tensor in memory don't reach.
  const double packed = double(rows.taps) * double(cols.taps) - double(whole.taps());
  const double left_out = double(whole.taps()) * double(whole.pixels()) - double(rows.products) * double(cols.products);
  return packed * kPackedPixels > left_out;
}

}  // namespace conv2d_ext::cpu
