// The driver of depthwise input gradients in planes, where the stride along a row is 2 (plan/candidates.cpp says
// which).
//
//   grad_input[n, g, y, x] = sum over (i, j) of weight[g, i, j] * grad_output[n, g, row(y, i), col(x, j)]
//
// over the taps of y's and x's phases. Columns of even and of odd number are different phases: vectors hold
// neighbouring positions of one of them, both are summed side by side, interleaved in registers and stored, so that
// every row is written once and whole. grad_output is copied into a zero-padded patch that all phases share.
//
// The order of summation is the canonical one (plan/summation_order.h): one chain of fused multiply-adds from zero,
// taps ascending.
#pragma once

#include "../kernels/strided.h"
#include "../kernels/vector_shape.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct StridedCall {
  static constexpr int L = Vec<T>::kLanes;
  const Conv2dProblem& problem;
  const ConstTensorView grad_output, weight;
  const TensorView result;
  const StridedTiling tiling;
  const StridedScratch layout;
  GradInputPhase even, odd;      // the phases of the columns
  GradInputPhase row_phases[2];  // the first ones, of most strides all

  // A work item's part of a plane, and the outputs that it meets.
  struct PlaneTile {
    int64_t row, rows, pair, columns;
    Interval met_h, met_w;
  };
  PlaneTile first;

  StridedCall(const Call& call, int num_threads)
      : problem(call.problem),
        grad_output(call.a),
        weight(call.b),
        result(call.result),
        tiling(tile_strided(problem, vector_shape<T>(), num_threads)),
        layout(lay_out_scratch(tiling, problem, vector_shape<T>())),
        first(tile_at(0)) {
    const Conv2dProblem& p = problem;
    even = grad_input_phase(0, p.in_w, p.kernel_w, 2, p.pad_left, p.dilation_w);
    odd = grad_input_phase(1, p.in_w, p.kernel_w, 2, p.pad_left, p.dilation_w);
    if (even.phase != 0) std::swap(even, odd);
    for (int64_t tap = 0; tap < min64(p.stride_h, 2); ++tap) row_phases[tap] = row_phase(tap);
  }

  int64_t items() const { return tiling.items(problem); }

  GradInputPhase row_phase(int64_t tap) const {
    const Conv2dProblem& p = problem;
    return grad_input_phase(tap, p.in_h, p.kernel_h, p.stride_h, p.pad_top, p.dilation_h);
  }

  PlaneTile tile_at(int64_t number) const {
    const Conv2dProblem& p = problem;
    PlaneTile tile{};
    tile.row = number / tiling.tiles_w * tiling.tile_rows;
    tile.rows = min64(tiling.tile_rows, p.in_h - tile.row);
    tile.pair = number % tiling.tiles_w * tiling.tile_pairs;
    tile.columns = min64(2 * tiling.tile_pairs, p.in_w - 2 * tile.pair);
    // Lanes beyond the last pair are computed and not stored; what they read lies in the patch, too.
    const int64_t pairs = round_up(div_up(tile.columns, 2), L);
    tile.met_h = met_outputs(p.rows(), p.kernel_h, tile.row, tile.rows);
    tile.met_w = met_outputs(p.cols(), p.kernel_w, 2 * tile.pair, 2 * pairs);
    return tile;
  }

  void work(int64_t item) const {
    const Conv2dProblem& p = problem;
    const int64_t number = item % tiling.tiles(), group = item / tiling.tiles() % p.groups;
    const int64_t image = item / tiling.tiles() / p.groups;
    const PlaneTile tile = number == 0 ? first : tile_at(number);

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    T* const weights = reinterpret_cast<T*>(memory);
    T* const patch_data = reinterpret_cast<T*>(memory + layout.patch);
    const int64_t pitch = tile.met_w.count(), columns = tile.columns;
    const int64_t *const w = weight.stride, *const gi = result.stride;
    pack(image, group, tile, patch_data);

    S* const dst = static_cast<S*>(result.data) + image * gi[0] + group * gi[1] + tile.row * gi[2] + 2 * tile.pair;
    const Panels panels = cut_panels(div_up(columns, 2 * L), kStridedVectors);
    for (int64_t tap = 0; tap < p.stride_h; ++tap) {
      const GradInputPhase h = tap < 2 ? row_phases[tap] : row_phase(tap);
      // Tiles begin with whole rounds of the phases.
      const int64_t position = tile.row / p.stride_h;
      const int64_t phase_rows = h.phase < tile.rows ? (tile.rows - 1 - h.phase) / p.stride_h + 1 : 0;
      if (phase_rows == 0) continue;
      T* to = weights;
      const S* const from = static_cast<const S*>(weight.data) + group * w[0];
      for (int64_t i = 0; i < h.taps; ++i) {
        const S* const tap_row = from + (h.first_tap + i * h.tap_step) * w[2];
        copy_run(tap_row + even.first_tap * w[3], 2 * w[3], even.taps, to, false);
        copy_run(tap_row + odd.first_tap * w[3], 2 * w[3], odd.taps, to + even.taps, false);
        to += even.taps + odd.taps;
      }
      StridedOperands<S, T> o{};
      o.odd = odd.axis.source(tile.pair, 0) - even.axis.source(tile.pair, 0);
      o.position_row = pitch;
      o.tap_row = h.axis.tap * pitch;
      o.tap_col = even.axis.tap;
      o.taps_h = h.taps;
      o.even_taps = even.taps;
      o.odd_taps = odd.taps;
      o.weights = weights;
      o.dst_row = p.stride_h * gi[2];
      const T* const phase = patch_data + (h.axis.source(position, 0) - tile.met_h.begin) * pitch +
                             even.axis.source(tile.pair, 0) - tile.met_w.begin;
      for (int64_t panel = 0; panel < panels.count; ++panel) {
        const int64_t start = panels.start(panel) * L, most = strided_rows(panels.size(panel));
        const StridedUkernels<S, T>& ukernels = strided_ukernels<S, T>(panels.size(panel));
        o.columns = columns - 2 * start;
        for (int64_t r = 0; r < phase_rows;) {
          // What is left overlaps the rows before: computed twice, to the same bits.
          if (phase_rows >= most) r = min64(r, phase_rows - most);
          const bool several = phase_rows - r >= most;
          o.source = phase + r * pitch + start;
          o.dst = dst + h.phase * gi[2] + r * o.dst_row + 2 * start;
          (several ? ukernels.several : ukernels.one)(o);
          r += several ? most : 1;
        }
      }
    }
  }

  // The outputs that a tile meets, with zeros around them.
  void pack(int64_t image, int64_t group, const PlaneTile& tile, T* patch) const {
    const Interval &rows = tile.met_h, &cols = tile.met_w;
    const int64_t* const go = grad_output.stride;
    const S* const plane = static_cast<const S*>(grad_output.data) + image * go[0] + group * go[1];
    const Interval in_h = indices_inside(rows.begin, 1, rows.count(), problem.out_h);
    const Interval in_w = indices_inside(cols.begin, 1, cols.count(), problem.out_w);
    fill_zero(patch, rows.count() * cols.count());
    if (in_w.count() == 0) return;
    for (int64_t row = in_h.begin; row < in_h.end; ++row) {
      copy_run(plane + (rows.begin + row) * go[2] + (cols.begin + in_w.begin) * go[3], go[3], in_w.count(),
               patch + row * cols.count() + in_w.begin, false);
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
