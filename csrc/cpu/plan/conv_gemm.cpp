#include "conv_gemm.h"

#include <utility>

namespace conv2d_ext::cpu {

namespace {

template <class Before>
void sort_three(SharedDimension (&d)[3], Before before) {
  if (before(d[1], d[0])) std::swap(d[0], d[1]);
  if (before(d[2], d[1])) std::swap(d[1], d[2]);
  if (before(d[1], d[0])) std::swap(d[0], d[1]);
}

// A step along a dimension of one element is never taken. Where it is huge its products overflow: it gets a harmless
// value. No step that is taken is as long, since the memory it would span is not there.
void drop_unused(int64_t size, int64_t& step, int64_t harmless = 0) {
  constexpr int64_t kLongest = int64_t{1} << 40;
  if (size <= 1 && (step > kLongest || step < -kLongest)) step = harmless;
}

void drop_unused_steps(ConvGemm& g) {
  drop_unused(g.rows, g.axis_h.step, 1);
  drop_unused(g.cols, g.axis_w.step, 1);
  drop_unused(g.taps_h, g.axis_h.tap, 1);
  drop_unused(g.taps_w, g.axis_w.tap, 1);
  drop_unused(g.rows, g.destination_row);
  drop_unused(g.cols, g.destination_col);
  drop_unused(g.taps_h, g.weight_i);
  drop_unused(g.taps_w, g.weight_j);
}

}  // namespace

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

SharedDimensions join_dimensions(SharedDimension c, SharedDimension i, SharedDimension j) {
  const auto by_stride = [](const SharedDimension& x, const SharedDimension& y) { return x.stride_a < y.stride_a; };
  const auto by_size = [](const SharedDimension& x, const SharedDimension& y) { return x.size > y.size; };
  SharedDimension sorted[3] = {c, i, j};
  sort_three(sorted, by_stride);
  SharedDimensions joined{};
  for (const SharedDimension& next : sorted) {
    if (next.size == 1) continue;
    SharedDimension* const last = joined.count == 0 ? nullptr : &joined.dimension[joined.count - 1];
    if (last != nullptr && next.stride_a == last->stride_a * last->size &&
        next.stride_b == last->stride_b * last->size) {
      last->size *= next.size;
    } else {
      joined.dimension[joined.count++] = next;
    }
  }
  // What isn't there is a dimension of size 1.
  for (int at = joined.count; at < 3; ++at) joined.dimension[at] = {1, 1, 1};
  joined.count = joined.count == 0 ? 1 : joined.count;
  sort_three(joined.dimension, by_size);
  return joined;
}

MetTaps met_taps(const GatherAxis& axis, int64_t kernel, int64_t size) {
  const int64_t first = min64(axis.origin < 0 ? div_up(-axis.origin, axis.tap) : 0, kernel);
  const int64_t end = min64(size > axis.origin ? div_up(size - axis.origin, axis.tap) : 0, kernel);
  return {first, max64(end - first, 0)};
}

void drop_unused_strides(int64_t (&stride)[4], int64_t n, int64_t c, int64_t h, int64_t w) {
  drop_unused(n, stride[0]);
  drop_unused(c, stride[1]);
  drop_unused(h, stride[2]);
  drop_unused(w, stride[3]);
}

ConvGemm forward_gemm(const Conv2dProblem& p, ConstTensorView input, ConstTensorView weight, const void* bias,
                      int64_t bias_stride, TensorView output) {
  ConvGemm g{};
  g.batch = p.batch;
  g.groups = p.groups;
  g.m = p.out_channels_per_group();
  g.channels = p.in_channels_per_group();
  g.taps_h = p.kernel_h;
  g.taps_w = p.kernel_w;
  g.rows = p.out_h;
  g.cols = p.out_w;
  g.source_h = p.in_h;
  g.source_w = p.in_w;
  g.axis_h = p.rows();
  g.axis_w = p.cols();
  g.source = input.data;
  g.source_n = input.stride[0];
  g.source_c = input.stride[1];
  g.source_row = input.stride[2];
  g.source_col = input.stride[3];
  g.weight = weight.data;
  g.weight_g = p.out_channels_per_group() * weight.stride[0];
  g.weight_m = weight.stride[0];
  g.weight_c = weight.stride[1];
  g.weight_i = weight.stride[2];
  g.weight_j = weight.stride[3];
  g.bias = bias;
  g.bias_stride = bias_stride;
  g.destination = output.data;
  g.destination_n = output.stride[0];
  g.destination_m = output.stride[1];
  g.destination_row = output.stride[2];
  g.destination_col = output.stride[3];
  drop_unused_steps(g);
  return g;
}

namespace {

// The GEMM without products that writes zeros to all of grad_input.
ConvGemm zero_gemm(const Conv2dProblem& p, const ConvGemm& any, const int64_t* gi) {
  ConvGemm zeros = any;
  zeros.taps_h = zeros.taps_w = 0;
  zeros.rows = p.in_h;
  zeros.cols = p.in_w;
  zeros.destination_row = gi[2];
  zeros.destination_col = gi[3];
  return zeros;
}

// The GEMMs of grad_input for one output pixel. A tap meets one input position, where no other tap is summed: each tap
// is a 1 x 1 convolution of its own. Taps and channels with the same order in weight and result become channels of one
// GEMM.
void visit_one_pixel_gemms(const Conv2dProblem& p, ConvGemm g, const int64_t* w, const int64_t* gi,
                           const GemmVisitor& visit) {
  const MetTaps h = met_taps(p.rows(), p.kernel_h, p.in_h), v = met_taps(p.cols(), p.kernel_w, p.in_w);
  if (h.count * v.count < p.in_h * p.in_w) {
    ConvGemm zeros = zero_gemm(p, g, gi);
    visit(zeros, {0, 0, 0});
  }
  if (h.count * v.count == 0) return;
  const SharedDimensions lanes =
      join_dimensions({g.m, w[1], gi[1]}, {h.count, w[2], saturating_mul(gi[2], p.dilation_h)},
                      {v.count, w[3], saturating_mul(gi[3], p.dilation_w)});
  const SharedDimension &inner = lanes.dimension[0], &middle = lanes.dimension[1], &outer = lanes.dimension[2];
  const int64_t group_destination = g.m * gi[1];
  const int64_t weight_offset = h.first * w[2] + v.first * w[3];
  const int64_t destination_offset = p.rows().source(0, h.first) * gi[2] + p.cols().source(0, v.first) * gi[3];
  g.taps_h = g.taps_w = 1;
  g.rows = g.cols = 1;
  g.axis_h = g.axis_w = {1, 0, 1};
  g.m = inner.size;
  g.weight_m = inner.stride_a;
  g.destination_m = inner.stride_b;
  // Groups whose results don't follow one another are visited one by one.
  const bool together = g.groups == 1 || group_destination == inner.size * inner.stride_b;
  const int64_t visits = together ? 1 : g.groups;
  if (!together) g.groups = 1;
  for (int64_t group = 0; group < visits; ++group) {
    for (int64_t x = 0; x < outer.size; ++x) {
      for (int64_t y = 0; y < middle.size; ++y) {
        visit(g, {group * g.channels * g.source_c,
                  weight_offset + group * g.weight_g + x * outer.stride_a + y * middle.stride_a,
                  destination_offset + group * group_destination + x * outer.stride_b + y * middle.stride_b});
      }
    }
  }
}

GatheredAxis gathered(const GradInputPhase& phase, int64_t out_size) {
  return {phase.axis, phase.taps, phase.positions, out_size};
}
GatheredAxis forward_rows(const Conv2dProblem& p) { return {p.rows(), p.kernel_h, p.out_h, p.in_h}; }
GatheredAxis forward_cols(const Conv2dProblem& p) { return {p.cols(), p.kernel_w, p.out_w, p.in_w}; }

// A GEMM whole, or one for each pair of bands, without the taps that lie outside there. g.weight_i, weight_j,
// destination_row and destination_col are the steps from tap to tap and from position to position; `offsets`: where the
// first tap's weight and the first position's result are.
void visit_band_gemms(ConvGemm& g, const GatheredAxis& h, const GatheredAxis& v, const GemmOffsets& offsets, bool cut,
                      const GemmVisitor& visit) {
  const auto visit_pair = [&](const Band& row, const Band& col) {
    const bool met = row.taps > 0 && col.taps > 0;
    g.taps_h = met ? row.taps : 0;
    g.taps_w = met ? col.taps : 0;
    g.rows = row.positions;
    g.cols = col.positions;
    g.axis_h = {h.axis.step, h.axis.source(row.first, row.first_tap), h.axis.tap};
    g.axis_w = {v.axis.step, v.axis.source(col.first, col.first_tap), v.axis.tap};
    drop_unused_steps(g);
    visit(g, {offsets.source, offsets.weight + row.first_tap * g.weight_i + col.first_tap * g.weight_j,
              offsets.destination + row.first * g.destination_row + col.first * g.destination_col});
  };
  if (!cut) {
    visit_pair({0, h.positions, 0, h.taps}, {0, v.positions, 0, v.taps});
    return;
  }
  BandWalk rows(h);
  for (Band row{}; rows.next(row);) {
    BandWalk cols(v);
    for (Band col{}; cols.next(col);) visit_pair(row, col);
  }
}

GradInputPhase row_phase(const Conv2dProblem& p, int64_t first_tap) {
  return grad_input_phase(first_tap, p.in_h, p.kernel_h, p.stride_h, p.pad_top, p.dilation_h);
}
GradInputPhase col_phase(const Conv2dProblem& p, int64_t first_tap) {
  return grad_input_phase(first_tap, p.in_w, p.kernel_w, p.stride_w, p.pad_left, p.dilation_w);
}
// The phases of an axis that taps meet are those of its first taps.
int64_t first_taps(int64_t kernel, int64_t stride, int64_t dilation) {
  return min64(grad_input_tap_step(stride, dilation), kernel);
}

}  // namespace

bool forward_cuts_bands(const Conv2dProblem& p) { return cuts_bands(forward_rows(p), forward_cols(p)); }

void visit_forward_gemms(const Conv2dProblem& p, const ConvGemm& whole, const GemmVisitor& visit) {
  ConvGemm g = whole;
  visit_band_gemms(g, forward_rows(p), forward_cols(p), {0, 0, 0}, true, visit);
}

bool grad_input_cuts_bands(const Conv2dProblem& p) {
  const int64_t first_taps_h = first_taps(p.kernel_h, p.stride_h, p.dilation_h);
  const int64_t first_taps_w = first_taps(p.kernel_w, p.stride_w, p.dilation_w);
  for (int64_t tap_h = 0; tap_h < first_taps_h; ++tap_h) {
    const GradInputPhase h = row_phase(p, tap_h);
    for (int64_t tap_w = 0; h.positions > 0 && tap_w < first_taps_w; ++tap_w) {
      const GradInputPhase v = col_phase(p, tap_w);
      if (v.positions > 0 && cuts_bands(gathered(h, p.out_h), gathered(v, p.out_w))) return true;
    }
  }
  return false;
}

void visit_grad_input_gemms(const Conv2dProblem& p, const int64_t* go, const int64_t* w, const int64_t* gi,
                            const GemmVisitor& visit) {
  ConvGemm g{};
  g.batch = p.batch;
  g.groups = p.groups;
  g.m = p.in_channels_per_group();
  g.channels = p.out_channels_per_group();
  g.source_h = p.out_h;
  g.source_w = p.out_w;
  g.source_n = go[0];
  g.source_c = go[1];
  g.source_row = go[2];
  g.source_col = go[3];
  g.weight_g = p.out_channels_per_group() * w[0];
  g.weight_m = w[1];
  g.weight_c = w[0];
  g.conj_weight = g.is_gradient = true;
  g.destination_n = gi[0];
  g.destination_m = gi[1];

  const auto fill_zero = [&] {
    ConvGemm zeros = zero_gemm(p, g, gi);
    visit(zeros, {0, 0, 0});
  };

  if (p.out_h == 1 && p.out_w == 1) {
    visit_one_pixel_gemms(p, g, w, gi, visit);
    return;
  }

  if (is_patch_layer({p.kernel_h, p.kernel_w, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w})) {
    if (count_met(p.rows(), p.kernel_h, p.out_h, p.in_h) < p.in_h ||
        count_met(p.cols(), p.kernel_w, p.out_w, p.in_w) < p.in_w) {
      fill_zero();
    }
    g.m *= p.taps();
    g.taps_h = g.taps_w = 1;
    g.rows = p.out_h;
    g.cols = p.out_w;
    g.axis_h = g.axis_w = {1, 0, 0};
    g.result_taps_h = p.kernel_h;
    g.result_taps_w = p.kernel_w;
    g.weight_result_i = w[2];
    g.weight_result_j = w[3];
    g.place_h = p.rows();
    g.place_w = p.cols();
    g.destination_h = p.in_h;
    g.destination_w = p.in_w;
    g.destination_row = gi[2];
    g.destination_col = gi[3];
    visit(g, {0, 0, 0});
    return;
  }

  const int64_t first_taps_h = first_taps(p.kernel_h, p.stride_h, p.dilation_h);
  const int64_t first_taps_w = first_taps(p.kernel_w, p.stride_w, p.dilation_w);
  int64_t met_h = 0, met_w = 0;
  for (int64_t tap = 0; tap < first_taps_h; ++tap) met_h += row_phase(p, tap).positions > 0;
  for (int64_t tap = 0; tap < first_taps_w; ++tap) met_w += col_phase(p, tap).positions > 0;
  if (met_h < min64(p.stride_h, p.in_h) || met_w < min64(p.stride_w, p.in_w)) fill_zero();

  g.destination_row = saturating_mul(gi[2], p.stride_h);
  g.destination_col = saturating_mul(gi[3], p.stride_w);
  // Phases run one after the other.
  g.owns_columns_between = p.stride_w == 2 && gi[3] == 1;
  for (int64_t tap_h = 0; tap_h < first_taps_h; ++tap_h) {
    const GradInputPhase h = row_phase(p, tap_h);
    if (h.positions == 0) continue;
    for (int64_t tap_w = 0; tap_w < first_taps_w; ++tap_w) {
      const GradInputPhase v = col_phase(p, tap_w);
      if (v.positions == 0) continue;
      g.weight_i = saturating_mul(h.tap_step, w[2]);
      g.weight_j = saturating_mul(v.tap_step, w[3]);
      const GatheredAxis rows = gathered(h, p.out_h), cols = gathered(v, p.out_w);
      visit_band_gemms(g, rows, cols, {0, h.first_tap * w[2] + v.first_tap * w[3], h.phase * gi[2] + v.phase * gi[3]},
                       cuts_bands(rows, cols), visit);
    }
  }
}

}  // namespace conv2d_ext::cpu
