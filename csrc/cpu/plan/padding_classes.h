// Which products of a GEMM are values times zeros of the padding, and are left out.
//
// Adding a finite value times zero changes no sum, but for the sign of one that is zero, which ends as +0 all the same
// (but where rounding is downward, or the bias is -0). So leaving such products out changes no bit, where a chain ends
// as it does with them. A 3 x 3 kernel has 9 % less of them at 14 x 14, and 18 % less at 7 x 7.
#pragma once

#include "tile_grid.h"

namespace conv2d_ext::cpu {

// A rectangle of results whose sums take the same rectangle of steps: pixels that meet the same taps, or (grad_weight)
// taps that meet the same pixels. The other steps are zeros at all of them; of those that are taken some may be.
struct PaddingClass {
  int64_t row, rows, col, cols;
  int64_t step_row, step_rows, step_col, step_cols;
  int64_t results() const { return rows * cols; }
  int64_t steps() const { return step_rows * step_cols; }
};

// Each result is in one class.
struct PaddingClasses {
  static constexpr int kMost = 26;
  int count = 0;   // 0: nothing is left out
  bool has_whole;  // those of the first class take all steps; otherwise none do, as where a kernel is larger than its
                   // map
  PaddingClass classes[kMost];
  // Lists of steps: the classes', and one of all steps, which stands behind them as a class without results.
  int lists() const { return count + (has_whole ? 0 : 1); }
  int whole_list() const { return has_whole ? 0 : count; }
};
// When products are left out: where they are at least so many of a thousand, and more than the list of the others'
// steps costs. A micro-kernel of fewer than `least_rows` rows is taken to need the time of one with as many.
struct PaddingRule {
  int64_t permille;  // 0: nothing is left out
  int64_t least_rows;
  int64_t listing;  // a step of a list, in products
};
// Of a tile.
PaddingClasses padding_classes(const ConvGemm& gemm, const Tile& tile, const PaddingRule& rule);

// Of a kernel's taps [i0, i0 + tap_rows) x [j0, j0 + tap_cols) of so many channels, and one image of a segment's
// pixels.
struct TapRectangle {
  int64_t i0, tap_rows, j0, tap_cols, channels;
};
PaddingClasses padding_classes(const Conv2dProblem& problem, const Tile& segment, const TapRectangle& taps,
                               const PaddingRule& rule);

}  // namespace conv2d_ext::cpu
