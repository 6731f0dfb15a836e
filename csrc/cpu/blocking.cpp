#include "blocking.h"

namespace conv2d_ext::cpu {

namespace {

// Result channels that vectors over them should have, for bfloat16 pairs to pay.
constexpr int64_t kLeastPairsChannels = 6;
// A sum so short that the transposition of results takes a good part of the time.
constexpr int64_t kShortSum = 64;

}  // namespace

void cut_taps(int64_t taps_h, int64_t taps_w, int64_t limit, int64_t& rows, int64_t& cols) {
  cols = even_piece(taps_w, limit);
  rows = taps_w > limit ? 1 : even_piece(taps_h, limit / taps_w);
}

KBlocking block_k(const ConvGemm& gemm, const ChainLimits& limits) {
  KBlocking k{};
  const int64_t channels = gemm.channels, taps_h = gemm.taps_h, taps_w = gemm.taps_w, taps = taps_h * taps_w;
  // 1x1: every product reads its own cache line of a planar source, and 128 of them fit L1 beside the panel.
  const int64_t limit = taps == 1 ? min64(limits.segment, kMaxSegment / 2) : limits.segment;
  if (taps <= limit) {
    k.segment_channels = even_piece(channels, limit / max64(taps, 1));
    k.tap_rows = taps_h;
    k.tap_cols = taps_w;
  } else {
    k.segment_channels = 1;
    cut_taps(taps_h, taps_w, limit, k.tap_rows, k.tap_cols);
  }
  k.blocks_c = div_up(channels, k.segment_channels);
  k.blocks_h = taps_h ? div_up(taps_h, k.tap_rows) : 0;
  k.blocks_w = taps_w ? div_up(taps_w, k.tap_cols) : 0;
  // A sum of up to `products` is one segment. Where it runs over the taps of one channel F.conv2d has no shorter
  // chains.
  const bool is_short = gemm.is_gradient && channels > 1 && k.segments() == 1 && k.max_depth() <= limits.products;
  k.chain = even_piece(k.max_depth(), is_short ? limits.short_gradient : limits.products);
  return k;
}

PixelBlocking block_pixels(int64_t batch, int64_t out_h, int64_t out_w, const ChainLimits& limits) {
  PixelBlocking b{};
  const int64_t image = out_h * out_w;
  b.images = 1;
  if (image <= kMaxSegment) {
    b.images = max64(1, kMaxSegment / max64(image, 1));
    b.rows = max64(out_h, 1);
    b.cols = max64(out_w, 1);
  } else {
    b.cols = even_piece(out_w, kMaxSegment);
    b.rows = b.cols < out_w ? 1 : even_piece(out_h, kMaxSegment / out_w);
  }
  b.chain = even_piece(b.images * b.rows * b.cols, limits.pixels);
  b.blocks_n = div_up(batch, b.images);
  b.blocks_h = div_up(out_h, b.rows);
  b.blocks_w = div_up(out_w, b.cols);
  return b;
}

PatchAxis make_patch_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0, int64_t taps) {
  // The taps lie in the padded source together, as the positions do, but one beyond the other need not.
  const int64_t reach = (taps - 1) * (gather.tap < 0 ? -gather.tap : gather.tap);
  const int64_t dense = saturating_add(saturating_mul(positions - 1, gather.step), reach + 1);
  const int64_t expanded = saturating_mul(positions, taps);
  const int64_t first = gather.source(position0, tap0);
  PatchAxis axis{};
  if (dense <= expanded) {
    axis.size = dense;
    axis.position_pitch = gather.step;
    axis.tap_pitch = gather.tap;
    axis.shift = gather.tap < 0 ? reach : 0;
    axis.runs = 1;
    axis.run_length = dense;
    axis.run_step = 1;
    axis.run_shift = 0;
    axis.first = first - axis.shift;
  } else {
    axis.size = expanded;
    axis.position_pitch = 1;
    axis.tap_pitch = positions;
    axis.shift = 0;
    axis.runs = taps;
    axis.run_length = positions;
    axis.run_step = gather.step;
    axis.run_shift = gather.tap;
    axis.first = first;
  }
  return axis;
}

bool lanes_are_groups(int64_t groups, int64_t m, int64_t channels, const VectorShape& vector) {
  // Share of the lanes at work. A single vector of result channels leaves the micro-kernel six chains of additions
  // where the FMA units want eight.
  const int64_t lanes = vector.lanes;
  if (groups < 2 || lanes < 2 || channels > 16) return false;
  double over_m = double(m) / double(round_up(m, lanes));
  if (m <= lanes && vector.max_vectors > 1) over_m *= 0.75;
  return double(groups) / double(round_up(groups, lanes)) > over_m;
}

bool takes_pairs(const ConvGemm& gemm, const VectorShape& vector) {
  // Few result channels are better off with vectors over pixels; patch layers' gradients and images of one pixel have
  // kernels of their own, which don't take pairs.
  return gemm.channels > 1 && gemm.rows * gemm.cols > 1 && gemm.m >= kLeastPairsChannels && gemm.result_taps() == 1 &&
         !lanes_are_groups(gemm, vector);
}

ConvGemm in_pairs(const ConvGemm& gemm) {
  ConvGemm paired = gemm;
  paired.pairs = true;
  paired.lone = gemm.channels % 2 != 0;
  paired.channels = div_up(gemm.channels, 2);
  paired.source_c = 2 * gemm.source_c;
  paired.weight_c = 2 * gemm.weight_c;
  return paired;
}

ConvGemm join_rows_of_planes(const ConvGemm& gemm) {
  ConvGemm g = gemm;
  const bool whole_planes = g.taps() == 1 && g.result_taps() == 1 && g.axis_h.step == 1 && g.axis_w.step == 1 &&
                            g.axis_h.source(0, 0) == 0 && g.axis_w.source(0, 0) == 0 && g.rows == g.source_h &&
                            g.cols == g.source_w;
  if (!whole_planes || g.source_row != g.source_col * g.cols || g.destination_row != g.destination_col * g.cols) {
    return g;
  }
  g.cols *= g.rows;
  g.source_w = g.cols;
  g.rows = g.source_h = 1;
  return g;
}

bool reads_whole_planes(const ConvGemm& gemm) {
  return gemm.taps() == 1 && gemm.rows == 1 && gemm.source_col == 1 && gemm.axis_w.step == 1 &&
         gemm.axis_h.source(0, 0) == 0 && gemm.axis_w.source(0, 0) == 0 && gemm.cols == gemm.source_w;
}

bool vectors_are_pixels(const ConvGemm& gemm, const VectorShape& vector) {
  // Along a row the pixels of a patch are neighbours unless there are taps that a stride skips between.
  const bool neighbours = gemm.axis_w.step == 1 || gemm.taps_w == 1;
  const int64_t depth = gemm.channels * gemm.taps();
  if (vector.max_vectors < 2 || !neighbours || depth == 0 || gemm.result_taps() != 1) return false;
  const auto filled = [&](int64_t n) { return double(n) / double(round_up(n, vector.lanes)); };
  const bool pointwise = gemm.taps() == 1;
  const double over_pixels = filled(pointwise ? gemm.rows * gemm.cols : gemm.cols);
  // A single vector of result channels leaves six chains of additions where the FMA units want eight.
  const double over_channels = filled(gemm.m) * (gemm.m <= vector.lanes ? 0.75 : 1.0);
  if (gemm.source_c == 1 && gemm.channels > 1 && gemm.source_col != 1) {
    // Where a pixel's channels lie together, as in channels_last, a planar patch is a transposition: it takes the time
    // of one product for about 8 bytes of a vector, and all taps share it. Measured for 1x1 and 3x3 kernels.
    const double transposition = double(vector.lanes * vector.element_size) / 8.0 / filled(gemm.channels);
    return double(gemm.m) / (over_pixels * 0.85) + transposition / double(gemm.taps()) < double(gemm.m) / over_channels;
  }
  // Vectors over pixels pack no weights and transpose no results, which counts where sums are short or a weight is
  // used for few pixels; with several taps they load across cache lines, and reload what neighbouring taps share.
  const double advantage = pointwise || depth <= kShortSum ? 1.1 : 0.9;
  return over_pixels * advantage > over_channels;
}

}  // namespace conv2d_ext::cpu
