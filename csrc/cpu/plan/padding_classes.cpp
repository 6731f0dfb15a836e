#include "padding_classes.h"

namespace conv2d_ext::cpu {

namespace {

constexpr int kMost = PaddingClasses::kMost;

// The bands of an axis.
struct AxisBands {
  Band bands[kMost];
  int count = 0, whole = -1;  // whole: the one that meets all taps; -1: there is none, or there are too many bands

  explicit AxisBands(const GatheredAxis& axis) {
    BandWalk walk(axis);
    for (Band band{}; walk.next(band); bands[count++] = band) {
      if (count == kMost) {
        whole = -1;
        return;
      }
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

// Of results that are the axes' positions, and steps that are their taps.
PaddingClasses padding_classes(const GatheredAxis& h, const GatheredAxis& w, int64_t permille) {
  PaddingClasses c{};
  const AxisBands rows(h), cols(w);
  if (rows.whole < 0 || cols.whole < 0 || rows.count + cols.count - 1 > kMost) return c;
  double products = 0;
  const auto add = [&](const Band& row, const Band& col) {
    const PaddingClass& added = c.classes[c.count++] = PaddingClass{
        row.first, row.positions, col.first, col.positions, row.first_tap, row.taps, col.first_tap, col.taps};
    products += double(added.results()) * double(added.steps());
  };
  const Band& whole_row = rows.bands[rows.whole];
  add(whole_row, cols.bands[cols.whole]);
  for (int f = 0; f < cols.count; ++f) {
    if (f != cols.whole) add(whole_row, cols.bands[f]);
  }
  // Where these would be too many classes, the others take all columns.
  const bool crosses = rows.count * cols.count <= kMost;
  for (int r = 0; r < rows.count; ++r) {
    if (r == rows.whole) continue;
    if (!crosses) add(rows.bands[r], Band{0, w.positions, 0, w.taps});
    for (int f = 0; crosses && f < cols.count; ++f) add(rows.bands[r], cols.bands[f]);
  }
  const double all = double(h.positions) * double(w.positions) * double(h.taps) * double(w.taps);
  if ((all - products) * 1000 < all * double(permille)) c.count = 0;
  return c;
}

}  // namespace

PaddingClasses padding_classes(const ConvGemm& gemm, const Tile& tile, int64_t permille) {
  return padding_classes({axis_from(gemm.axis_h, tile.row), gemm.taps_h, tile.rows, gemm.source_h},
                         {axis_from(gemm.axis_w, tile.col), gemm.taps_w, tile.cols, gemm.source_w}, permille);
}

PaddingClasses padding_classes(const Conv2dProblem& p, const Tile& segment, const TapRectangle& taps,
                               int64_t permille) {
  return padding_classes({exchanged(p.rows(), segment.row, taps.i0), segment.rows, taps.tap_rows, p.in_h},
                         {exchanged(p.cols(), segment.col, taps.j0), segment.cols, taps.tap_cols, p.in_w}, permille);
}

}  // namespace conv2d_ext::cpu
