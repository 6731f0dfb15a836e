#include "padding_classes.h"

#include "patch_axis.h"

namespace conv2d_ext::cpu {

namespace {

constexpr int kMost = PaddingClasses::kMost;

// The bands of an axis.
struct AxisBands {
  Band bands[kMost];
  int count = 0, whole = -1;  // whole: the one that meets all taps; -1: there is none
  bool too_many = false;

  explicit AxisBands(const GatheredAxis& axis) {
    BandWalk walk(axis);
    for (Band band{}; walk.next(band); bands[count++] = band) {
      too_many = count == kMost;
      if (too_many) return;
      if (band.taps == axis.taps) whole = count;
    }
  }
};

// An axis from position `first` on.
GatherAxis axis_from(const GatherAxis& axis, int64_t first) { return {axis.step, axis.source(first, 0), axis.tap}; }

// An axis with its positions and taps exchanged, from one of each on.
GatherAxis exchanged(const GatherAxis& axis, int64_t position, int64_t tap) {
  return {axis.tap, axis.source(position, tap), axis.step};
}

// Results cut into classes, and the products of these, each class's rows no fewer than a micro-kernel's time is worth.
struct Cut {
  PaddingClasses classes{};
  double cost = 0, listed = 0;

  void add(const Band& row, const Band& col, int64_t times, int64_t least_rows) {
    const PaddingClass& added = classes.classes[classes.count++] = PaddingClass{
        row.first, row.positions, col.first, col.positions, row.first_tap, row.taps, col.first_tap, col.taps};
    listed += double(added.steps());
    cost += double(added.steps()) * double(max64(saturating_mul(added.results(), times), least_rows));
  }
};

// Of results that are the axes' positions, `times` of each, and steps that are their taps.
PaddingClasses padding_classes(const GatheredAxis& h, const GatheredAxis& w, int64_t times, const PaddingRule& rule) {
  if (are_inside(h) && are_inside(w)) return {};
  const AxisBands rows(h), cols(w);
  if (rows.too_many || cols.too_many) return {};
  const bool has_whole = rows.whole >= 0 && cols.whole >= 0;
  const double steps = double(h.taps) * double(w.taps);
  // Each row's columns by themselves, or those of the row that meets all taps alone. The whole class comes first.
  Cut crossed, banded;
  crossed.classes.has_whole = banded.classes.has_whole = has_whole;
  const int first_row = has_whole ? rows.whole : 0, first_col = has_whole ? cols.whole : 0;
  const bool crosses = rows.count * cols.count + (has_whole ? 0 : 1) <= kMost;
  const bool has_bands = has_whole && rows.count + cols.count - 1 <= kMost;
  for (int r = 0; r < rows.count; ++r) {
    const Band& row = rows.bands[r == 0 ? first_row : r <= first_row ? r - 1 : r];
    for (int c = 0; c < cols.count; ++c) {
      const Band& col = cols.bands[c == 0 ? first_col : c <= first_col ? c - 1 : c];
      if (crosses) crossed.add(row, col, times, rule.least_rows);
      if (has_bands && r == 0) banded.add(row, col, times, rule.least_rows);
    }
    if (has_bands && r > 0) banded.add(row, Band{0, w.positions, 0, w.taps}, times, rule.least_rows);
  }
  if (crosses && !has_whole) {
    crossed.cost += steps * double(rule.least_rows);  // of the result that takes all steps
    crossed.classes.classes[crossed.classes.count] = {0, 0, 0, 0, 0, h.taps, 0, w.taps};
  }
  const Cut& cut = crosses && (!has_bands || crossed.cost <= banded.cost) ? crossed : banded;
  const double all = double(h.positions) * double(w.positions) * double(times) * steps, left_out = all - cut.cost;
  const bool saves = cut.classes.count > 0 && left_out * 1000 >= all * double(rule.permille);
  const bool pays = left_out >= cut.listed * double(rule.listing);
  return saves && pays ? cut.classes : PaddingClasses{};
}

}  // namespace

PaddingClasses padding_classes(const ConvGemm& gemm, const Tile& tile, const PaddingRule& rule) {
  return padding_classes({axis_from(gemm.axis_h, tile.row), gemm.taps_h, tile.rows, gemm.source_h},
                         {axis_from(gemm.axis_w, tile.col), gemm.taps_w, tile.cols, gemm.source_w}, tile.images, rule);
}

PaddingClasses padding_classes(const Conv2dProblem& p, const Tile& segment, const TapRectangle& taps,
                               const PaddingRule& rule) {
  return padding_classes({exchanged(p.rows(), segment.row, taps.i0), segment.rows, taps.tap_rows, p.in_h},
                         {exchanged(p.cols(), segment.col, taps.j0), segment.cols, taps.tap_cols, p.in_w},
                         taps.channels, rule);
}

}  // namespace conv2d_ext::cpu
