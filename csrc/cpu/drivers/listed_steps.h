// A panel times a patch without the products of values and zeros of the padding (plan/padding_classes.h).
//
// The rows of C, pixels or (grad_weight) weight elements, lie in scratch class after class, and each class has a list
// of the steps of k that it takes. The class that takes all steps is computed first; where none does, one result is
// computed with all steps. An infinite factor, or NaN, makes these sums so. Then, as then alone, products with zeros
// count, and the other classes take all steps, too.
#pragma once

#include "../kernels/gemm.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// So many rectangles, one like the other, of results or of steps.
struct Rectangles {
  int64_t count, rows, cols;
  int64_t size() const { return rows * cols; }
};

template <class T>
struct ListedSteps {
  // Whether a type's sums may leave products out. (Those of pairs flush denormal sums: even zeros change them.)
  static constexpr bool kExists = kHasTranspose<T> && !kTakesPairs<T> && !kTakesBlocks<T>;

  PaddingClasses padding;  // count 0: no product is left out, and nothing else is set
  int64_t chain;
  Rectangles results, all_steps;
  int64_t* b_offsets;  // of the results
  int64_t* steps;      // two numbers each, as GemmOperands has them
  int64_t pitch;       // numbers from one class's list to the next one's

  // visit(number, n, row, col): of each result, where it lies among all.
  template <class Visit>
  CONV2D_INLINE void for_each_result(const Visit& visit) const {
    int64_t at = 0;
    for (int c = 0; c < padding.count; ++c) {
      const PaddingClass& of = padding.classes[c];
      for (int64_t n = 0; n < results.count; ++n) {
        for (int64_t row = of.row; row < of.row + of.rows; ++row) {
          for (int64_t col = of.col; col < of.col + of.cols; ++col) visit(at++, n, row, col);
        }
      }
    }
  }

  // offset(n, row, col): of a step, in B.
  template <class Offset>
  CONV2D_INLINE void fill_steps(const Offset& offset) const {
    constexpr int64_t L = Vec<T>::kLanes;
    const int64_t next = all_steps.count > 1 ? offset(1, 0, 0) - offset(0, 0, 0) : 0;
    for (int c = 0; c < padding.lists(); ++c) {
      const PaddingClass of = padding.classes[c];
      int64_t* step = steps + c * pitch;
      for (int64_t row = of.step_row; row < of.step_row + of.step_rows; ++row) {
        for (int64_t col = of.step_col; col < of.step_col + of.step_cols; ++col) {
          *step++ = offset(0, row, col);
          *step++ = (row * all_steps.cols + col) * L;
        }
      }
      const int64_t numbers = 2 * of.steps();
      for (int64_t left = (all_steps.count - 1) * numbers; left > 0; left -= 2, step += 2) {
        step[0] = step[-numbers] + next;
        step[1] = step[1 - numbers] + all_steps.size() * L;
      }
    }
  }

  // As gemm_panel, whose passes it has; `c_offset`: of the results. The operands are of no use afterwards.
  template <class Before>
  void multiply(int64_t vectors, GemmOperands<T>& operands, const Before& before_block) const {
    const Ukernels<T> ukernels = ukernels_for<T, false, true>(vectors);
    const int64_t depth = operands.depth, at_once = pass_depth(chain);
    const int whole = padding.whole_list();
    const int64_t* const c_offset = operands.c_offset;
    const T* const bias = operands.bias;
    int64_t ends[kPassDepth];
    operands.chain_ends = ends;
    // Results [first, first + count) of a pass.
    const auto compute = [&](int number, int64_t k, int64_t end, int64_t first, int64_t count) {
      const int64_t before = steps_before(number, k);
      operands.k_offset = steps + number * pitch + 2 * before;
      for (int64_t i = 0; i < operands.chains; ++i) {
        ends[i] = steps_before(number, min64(k + (i + 1) * chain, end)) - before;
      }
      const Panels blocks = cut_panels(count, ukernels.rows);
      for (int64_t block = 0; block < blocks.count; ++block) {
        operands.j_offset = b_offsets + first + blocks.start(block);
        operands.c_offset = c_offset + first + blocks.start(block);
        before_block(blocks.size(block));
        ukernels.by_rows[blocks.size(block) - 1](operands);
      }
    };
    for (int64_t k = 0; k < depth; k += at_once, operands.accumulate = true) {
      const int64_t end = min64(k + at_once, depth);
      operands.chains = div_up(end - k, chain);
      operands.bias = end == depth ? bias : nullptr;
      // The results that show whether factors are finite.
      const int64_t shown = padding.has_whole ? results.count * padding.classes[0].results() : 1;
      compute(whole, k, end, 0, shown);
      const bool leaves_out = are_finite<T, T>(operands.c + c_offset[0] * operands.c_pitch, vectors * Vec<T>::kLanes);
      int64_t first = 0, from = shown;
      for (int c = 0; c < padding.count; ++c) {
        first += results.count * padding.classes[c].results();
        if (first > from) compute(leaves_out ? c : whole, k, end, from, first - from);
        from = first;
      }
    }
    operands.chain_ends = nullptr;
  }

 private:
  // How many of the first k steps a class takes.
  int64_t steps_before(int number, int64_t k) const {
    const PaddingClass& of = padding.classes[number];
    const int64_t within = k % all_steps.size();
    const int64_t row = within / all_steps.cols - of.step_row, col = within % all_steps.cols - of.step_col;
    const int64_t whole = k / all_steps.size() * of.steps() + max64(min64(row, of.step_rows), 0) * of.step_cols;
    return row < 0 || row >= of.step_rows ? whole : whole + max64(min64(col, of.step_cols), 0);
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
