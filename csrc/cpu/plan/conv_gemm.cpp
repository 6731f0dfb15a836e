#include "conv_gemm.h"

#include <cfenv>
#include <utility>

#include "../base/limits.h"
#include "patch_axis.h"
#include "summation_order.h"

namespace conv2d_ext::cpu {

namespace {

template <class Before>
void sort_three(SharedDimension (&d)[3], Before before) {
  if (before(d[1], d[0])) std::swap(d[0], d[1]);
  if (before(d[2], d[1])) std::swap(d[1], d[2]);
  if (before(d[1], d[0])) std::swap(d[0], d[1]);
}

void drop_unused_steps(ConvGemm& g) {
  drop_unused_step(g.rows, g.axis_h.step, 1);
  drop_unused_step(g.cols, g.axis_w.step, 1);
  drop_unused_step(g.taps_h, g.axis_h.tap, 1);
  drop_unused_step(g.taps_w, g.axis_w.tap, 1);
  drop_unused_step(g.rows, g.destination_row);
  drop_unused_step(g.cols, g.destination_col);
  drop_unused_step(g.taps_h, g.weight_i);
  drop_unused_step(g.taps_w, g.weight_j);
}

}  // namespace

ConvGemm in_steps(const ConvGemm& gemm, int64_t channels) {
  ConvGemm stepped = gemm;
  stepped.per_step = channels;
  stepped.channels = div_up(gemm.channels, channels);
  stepped.missing = stepped.channels * channels - gemm.channels;
  stepped.source_c = saturating_mul(gemm.source_c, channels);
  stepped.weight_c = saturating_mul(gemm.weight_c, channels);
  return stepped;
}

ConvGemm in_blocks(const ConvGemm& gemm) {
  ConvGemm stepped = in_steps(gemm, kBlockChannels);
  const int64_t columns = columns_per_step(gemm, gemm.axis_w);
  if (columns == 1) return stepped;
  if (gemm.axis_w.tap < 0) {
    stepped.axis_w = ascending(gemm.axis_w, gemm.taps_w);
    stepped.weight = behind(gemm.weight, (gemm.taps_w - 1) * gemm.weight_j, DType::kBFloat16);
    stepped.weight_j = -gemm.weight_j;
  }
  stepped.columns = columns;
  stepped.taps_w = div_up(gemm.taps_w, columns);
  stepped.missing_columns = stepped.taps_w * columns - gemm.taps_w;
  stepped.axis_w.tap = columns;
  stepped.weight_j = saturating_mul(stepped.weight_j, columns);
  return stepped;
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

bool meets_no_padding(const ConvGemm& gemm) {
  return are_inside(gathered_rows(gemm)) && are_inside(gathered_cols(gemm));
}

bool source_is_patch(const ConvGemm& gemm) {
  const int64_t step = gemm.per_step;
  return gemm.taps() == 1 && gemm.missing == 0 && gemm.source_c == step && meets_no_padding(gemm) &&
         gemm.source_n % step == 0 && gemm.source_row % step == 0 && gemm.source_col % step == 0;
}

bool reads_whole_planes(const ConvGemm& gemm) {
  return gemm.taps() == 1 && gemm.rows == 1 && gemm.source_col == 1 && gemm.axis_w.step == 1 &&
         gemm.axis_h.source(0, 0) == 0 && gemm.axis_w.source(0, 0) == 0 && gemm.cols == gemm.source_w;
}

namespace {

// Those taps that some position meets, and between them; three where there are as many, so that a sum of both axes'
// taps stays one that its bias is added to (starts_from_bias).
Interval met_taps(const GatherAxis& axis, int64_t taps, int64_t positions, int64_t size) {
  constexpr int64_t kLeastTaps = 3;
  const auto meets = [&](int64_t tap) {
    return indices_inside(axis.source(0, tap), axis.step, positions, size).count() > 0;
  };
  Interval met{0, taps};
  while (met.count() > kLeastTaps && !meets(met.begin)) ++met.begin;
  while (met.count() > kLeastTaps && !meets(met.end - 1)) --met.end;
  return met;
}

// Whether each sum is one chain that products with zeros don't change, as far as the geometry tells. (Rounding down,
// they may change the sign of a sum that is zero.)
bool zeros_are_nothing(const ConvGemm& gemm, const ChainLimits& limits) {
  const bool one_chain = gemm.channels == 1 && gemm.taps() <= block_k(gemm, limits).chain;
  return one_chain && !gemm.starts_from_bias() && std::fegetround() != FE_DOWNWARD;
}

// Whether so many products are worth a look at all weights, which takes the time of some products of each.
bool pays_for_looking(const ConvGemm& gemm, double products_of_group) {
  return products_of_group >= double(limits::depthwise::kFiniteProducts * gemm.taps());
}

}  // namespace

ConvGemm without_unmet_taps(const ConvGemm& gemm, DType dtype, const ChainLimits& limits) {
  if (!zeros_are_nothing(gemm, limits)) return gemm;
  const Interval h = met_taps(gemm.axis_h, gemm.taps_h, gemm.rows, gemm.source_h);
  const Interval w = met_taps(gemm.axis_w, gemm.taps_w, gemm.cols, gemm.source_w);
  ConvGemm met = gemm;
  met.taps_h = h.count();
  met.taps_w = w.count();
  met.axis_h.origin = gemm.axis_h.source(0, h.begin);
  met.axis_w.origin = gemm.axis_w.source(0, w.begin);
  met.weight = behind(gemm.weight, h.begin * gemm.weight_i + w.begin * gemm.weight_j, dtype);
  const double saved = double(gemm.batch) * double(gemm.rows * gemm.cols) * double(gemm.taps() - met.taps());
  return pays_for_looking(gemm, saved) && !met.starts_from_bias() ? met : gemm;
}

bool may_leave_out_rows(const ConvGemm& gemm, const ChainLimits& limits) {
  if (!zeros_are_nothing(gemm, limits)) return false;
  int64_t beside = 0;
  for (int64_t i = 0; i < gemm.taps_h; ++i) {
    beside += gemm.rows - indices_inside(gemm.axis_h.source(0, i), gemm.axis_h.step, gemm.rows, gemm.source_h).count();
  }
  return pays_for_looking(gemm, double(gemm.batch) * double(beside) * double(gemm.cols * gemm.taps_w));
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
  joined.count = joined.count == 0 ? 1 : joined.count;
  sort_three(joined.dimension, by_size);
  return joined;
}

namespace {

// What the GEMMs of forward and grad_input have in common.
ConvGemm gemm_of(const Call& call) {
  ConvGemm g{};
  g.batch = call.problem.batch;
  g.groups = call.problem.groups;
  g.source = call.a.data;
  g.source_n = call.a.stride[0];
  g.source_c = call.a.stride[1];
  g.source_row = call.a.stride[2];
  g.source_col = call.a.stride[3];
  g.weight = call.b.data;
  g.weight_g = call.problem.out_channels_per_group() * call.b.stride[0];
  g.destination = call.result.data;
  g.destination_n = call.result.stride[0];
  g.destination_m = call.result.stride[1];
  g.destination_row = call.result.stride[2];
  g.destination_col = call.result.stride[3];
  return g;
}

}  // namespace

ConvGemm forward_gemm(const Call& call) {
  const Conv2dProblem& p = call.problem;
  ConvGemm g = gemm_of(call);
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
  g.weight_m = call.b.stride[0];
  g.weight_c = call.b.stride[1];
  g.weight_i = call.b.stride[2];
  g.weight_j = call.b.stride[3];
  g.bias = call.bias.data;
  g.bias_stride = call.bias.stride;
  g.is_matmul = call.is_matmul;
  drop_unused_steps(g);
  return g;
}

bool for_each_band(const ConvGemm& whole, DType dtype, const GemmVisitor& visit) {
  const GatheredAxis h = gathered_rows(whole), w = gathered_cols(whole);
  if (!cuts_bands(h, w)) {
    visit(whole);
    return false;
  }
  BandWalk rows(h);
  for (Band row{}; rows.next(row);) {
    BandWalk cols(w);
    for (Band col{}; cols.next(col);) {
      const bool met = row.taps > 0 && col.taps > 0;
      ConvGemm g = whole;
      g.taps_h = met ? row.taps : 0;
      g.taps_w = met ? col.taps : 0;
      g.rows = row.positions;
      g.cols = col.positions;
      g.axis_h.origin = h.axis.source(row.first, row.first_tap);
      g.axis_w.origin = w.axis.source(col.first, col.first_tap);
      g.weight = behind(g.weight, row.first_tap * g.weight_i + col.first_tap * g.weight_j, dtype);
      g.destination = behind(g.destination, row.first * g.destination_row + col.first * g.destination_col, dtype);
      drop_unused_steps(g);
      visit(g);
    }
  }
  return true;
}

namespace {

// The phases of rows times those of columns: calls visit(phase of the rows, phase of the columns).
template <class Visit>
void for_each_phase(const PhasedAxis& rows, const PhasedAxis& cols, const Visit& visit) {
  for (int64_t tap_h = 0; tap_h < rows.first_taps(); ++tap_h) {
    const GradInputPhase h = rows.phase(tap_h);
    for (int64_t tap_w = 0; h.positions > 0 && tap_w < cols.first_taps(); ++tap_w) {
      const GradInputPhase w = cols.phase(tap_w);
      if (w.positions > 0) visit(h, w);
    }
  }
}

// What the GEMMs of grad_input have in common.
ConvGemm grad_input_gemm(const Call& call) {
  ConvGemm g = gemm_of(call);
  g.m = call.problem.in_channels_per_group();
  g.channels = call.problem.out_channels_per_group();
  g.source_h = call.problem.out_h;
  g.source_w = call.problem.out_w;
  g.weight_m = call.b.stride[1];
  g.weight_c = call.b.stride[0];
  g.is_gradient = true;
  return g;
}

// The same of one tap, which meets one position.
ConvGemm one_tap_gemm(const Call& call) {
  ConvGemm g = grad_input_gemm(call);
  g.taps_h = g.taps_w = g.rows = g.cols = 1;
  g.axis_h = g.axis_w = {1, 0, 1};
  return g;
}

// The GEMM without products, which writes zeros to all of grad_input.
void visit_zeros(const Call& call, const GemmVisitor& visit) {
  ConvGemm g = grad_input_gemm(call);
  g.rows = call.problem.in_h;
  g.cols = call.problem.in_w;
  visit(g);
}

// One output pixel. A tap meets one input position, where no other tap is summed: each tap is a 1 x 1 convolution of
// its own. Taps and channels with the same order in weight and result become channels of one GEMM.
void visit_one_pixel_gemms(const Call& call, const GemmVisitor& visit) {
  const Conv2dProblem& p = call.problem;
  const int64_t *const w = call.b.stride, *const gi = call.result.stride;
  const Interval taps_h = taps_inside(p.rows(), p.kernel_h, p.in_h), taps_w = taps_inside(p.cols(), p.kernel_w, p.in_w);
  const int64_t taps = taps_h.count() * taps_w.count();
  if (taps < p.in_h * p.in_w) visit_zeros(call, visit);
  if (taps == 0) return;
  ConvGemm g = one_tap_gemm(call);
  const SharedDimension channels{g.m, w[1], gi[1]}, tap_rows{taps_h.count(), w[2], saturating_mul(gi[2], p.dilation_h)},
      tap_cols{taps_w.count(), w[3], saturating_mul(gi[3], p.dilation_w)};
  // Groups of one channel that lie side by side are lanes themselves, where there are more of them than taps.
  const bool over_groups = g.m == 1 && g.channels == 1 && g.groups > taps && gi[1] == 1;
  const SharedDimensions lanes =
      over_groups ? SharedDimensions{{channels, tap_cols, tap_rows}, 3} : join_dimensions(channels, tap_rows, tap_cols);
  const SharedDimension &inner = lanes.dimension[0], &middle = lanes.dimension[1], &outer = lanes.dimension[2];
  const int64_t group_destination = g.m * gi[1];
  const int64_t first_weight = taps_h.begin * w[2] + taps_w.begin * w[3];
  const int64_t first_destination = p.rows().source(0, taps_h.begin) * gi[2] + p.cols().source(0, taps_w.begin) * gi[3];
  g.m = inner.size;
  g.weight_m = inner.stride_a;
  g.destination_m = inner.stride_b;
  g.destination_row = g.destination_col = 0;
  // Groups whose results don't follow one another are visited one by one.
  const bool together = g.groups == 1 || group_destination == inner.size * inner.stride_b;
  const int64_t visits = together ? 1 : g.groups;
  if (!together) g.groups = 1;
  for (int64_t group = 0; group < visits; ++group) {
    g.source = behind(call.a.data, group * g.channels * g.source_c, call.dtype);
    for (int64_t x = 0; x < outer.size; ++x) {
      for (int64_t y = 0; y < middle.size; ++y) {
        const int64_t weight = group * g.weight_g + x * outer.stride_a + y * middle.stride_a;
        const int64_t destination = group * group_destination + x * outer.stride_b + y * middle.stride_b;
        g.weight = behind(call.b.data, first_weight + weight, call.dtype);
        g.destination = behind(call.result.data, first_destination + destination, call.dtype);
        visit(g);
      }
    }
  }
}

void visit_patch_layer(const Call& call, const GemmVisitor& visit) {
  const Conv2dProblem& p = call.problem;
  if (count_met(p.rows(), p.kernel_h, p.out_h, p.in_h) < p.in_h ||
      count_met(p.cols(), p.kernel_w, p.out_w, p.in_w) < p.in_w) {
    visit_zeros(call, visit);
  }
  ConvGemm g = one_tap_gemm(call);
  g.m *= p.taps();
  g.rows = p.out_h;
  g.cols = p.out_w;
  g.result_taps_h = p.kernel_h;
  g.result_taps_w = p.kernel_w;
  g.weight_result_i = call.b.stride[2];
  g.weight_result_j = call.b.stride[3];
  g.place_h = p.rows();
  g.place_w = p.cols();
  g.destination_h = p.in_h;
  g.destination_w = p.in_w;
  visit(g);
}

void visit_phases(const Call& call, const GemmVisitor& visit) {
  const Conv2dProblem& p = call.problem;
  const int64_t *const w = call.b.stride, *const gi = call.result.stride;
  const PhasedAxis rows = phased_rows(p), cols = phased_cols(p);
  const bool meets_all = rows.meets_all() && cols.meets_all();
  if (!meets_all) visit_zeros(call, visit);
  ConvGemm g = grad_input_gemm(call);
  g.destination_row = saturating_mul(gi[2], p.stride_h);
  g.destination_col = saturating_mul(gi[3], p.stride_w);
  g.is_phase = meets_all && (p.stride_h > 1 || p.stride_w > 1);
  // Phases run one after the other.
  g.owns_columns_between = p.stride_w == 2 && gi[3] == 1;
  for_each_phase(rows, cols, [&](const GradInputPhase& h, const GradInputPhase& v) {
    ConvGemm phase = g;
    phase.taps_h = h.taps;
    phase.taps_w = v.taps;
    phase.rows = h.positions;
    phase.cols = v.positions;
    phase.axis_h = h.axis;
    phase.axis_w = v.axis;
    phase.weight_i = saturating_mul(h.tap_step, w[2]);
    phase.weight_j = saturating_mul(v.tap_step, w[3]);
    phase.weight = behind(call.b.data, h.first_tap * w[2] + v.first_tap * w[3], call.dtype);
    phase.destination = behind(call.result.data, h.phase * gi[2] + v.phase * gi[3], call.dtype);
    drop_unused_steps(phase);
    for_each_band(phase, call.dtype, visit);
  });
}

}  // namespace

bool grad_input_cuts_bands(const Conv2dProblem& p) {
  const PhasedAxis rows = phased_rows(p), cols = phased_cols(p);
  bool any = false;
  for_each_phase(rows, cols, [&](const GradInputPhase& h, const GradInputPhase& w) {
    any = any || cuts_bands(rows.gathered(h), cols.gathered(w));
  });
  return any;
}

ConvGemm patch_gemm(const Call& call) {
  ConvGemm g = one_tap_gemm(call);
  g.m *= call.problem.taps();
  g.weight_m = 1;
  return g;
}

void for_each_grad_input_gemm(const Call& call, const GemmVisitor& visit) {
  const Conv2dProblem& p = call.problem;
  if (p.out_pixels() == 1) {
    visit_one_pixel_gemms(call, visit);
  } else if (is_patch_layer(p)) {
    visit_patch_layer(call, visit);
  } else {
    visit_phases(call, visit);
  }
}

bool lanes_are_groups(int64_t groups, int64_t m, int64_t channels, const VectorShape& vector) {
  // Share of the lanes at work. A single vector of result channels leaves the micro-kernel six chains of additions
  // where the FMA units want eight.
  if (groups < 2 || channels > 16) return false;
  const double lone = m <= vector.lanes && vector.max_vectors > 1 ? 0.75 : 1.0;
  return vector.filled(groups) > vector.filled(m) * lone;
}

bool fills_wide_vectors(int64_t groups, int64_t m, int64_t taps, bool side_by_side, const VectorShape& vector) {
  if (!vector.is_wide() || m % vector.lanes != 0) return false;
  const int64_t lanes = round_up(groups, vector.lanes), idle = lanes - groups;
  return side_by_side ? taps <= 1 || !can_interleave(m) || idle > lanes / 8 : idle > 0;
}

bool occupies(int num_threads, int64_t groups, int64_t pixels, const VectorShape& vector) {
  constexpr int64_t kLeastPixels = 64;
  return saturating_mul(div_up(groups, vector.lanes), div_up(pixels, kLeastPixels)) >= num_threads;
}

}  // namespace conv2d_ext::cpu
