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
#include "../pack/patch.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct StridedCall {
  static constexpr int L = Vec<T>::kLanes;
  const Conv2dProblem& problem;
  const ConstTensorView grad_output, weight;
  const TensorView result;
  const StridedTiling tiling;
  const StridedScratch layout;
  GradInputPhase even, odd;  // the phases of the columns

  StridedCall(const Call& call, int num_threads)
      : problem(call.problem),
        grad_output(call.a),
        weight(call.b),
        result(call.result),
        tiling(tile_strided(problem, vector_shape<T>(), num_threads)),
        layout(lay_out_scratch(tiling, problem, vector_shape<T>())) {
    const Conv2dProblem& p = problem;
    even = grad_input_phase(0, p.in_w, p.kernel_w, 2, p.pad_left, p.dilation_w);
    odd = grad_input_phase(1, p.in_w, p.kernel_w, 2, p.pad_left, p.dilation_w);
    if (even.phase != 0) std::swap(even, odd);
  }

  int64_t items() const { return problem.batch * problem.groups * tiling.tiles(); }

  void work(int64_t item) const {
    const Conv2dProblem& p = problem;
    const int64_t tile = item % tiling.tiles(), group = item / tiling.tiles() % p.groups;
    const int64_t image = item / tiling.tiles() / p.groups;
    const int64_t row0 = tile / tiling.tiles_w * tiling.tile_rows, rows = min64(tiling.tile_rows, p.in_h - row0);
    const int64_t pair0 = tile % tiling.tiles_w * tiling.tile_pairs;
    const int64_t columns = min64(2 * tiling.tile_pairs, p.in_w - 2 * pair0), pairs = div_up(columns, 2);

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    T* const weights = reinterpret_cast<T*>(memory);
    T* const patch_data = reinterpret_cast<T*>(memory + layout.patch);

    // Lanes beyond the last pair are computed and not stored; what they read lies in the patch, too.
    const MetOutputs met_h = met_outputs(p.rows(), p.kernel_h, row0, rows);
    const MetOutputs met_w = met_outputs(p.cols(), p.kernel_w, 2 * pair0, 2 * round_up(pairs, L));
    const int64_t pitch = met_w.size;
    const int64_t *const w = weight.stride, *const gi = result.stride;
    pack(image, group, met_h, met_w, patch_data);

    S* const dst = static_cast<S*>(result.data) + image * gi[0] + group * gi[1] + row0 * gi[2] + 2 * pair0;
    const Panels panels = cut_panels(div_up(pairs, L), kStridedVectors);
    for (int64_t tap = 0; tap < p.stride_h; ++tap) {
      const GradInputPhase h = grad_input_phase(tap, p.in_h, p.kernel_h, p.stride_h, p.pad_top, p.dilation_h);
      // Tiles begin with whole rounds of the phases.
      const int64_t position = row0 / p.stride_h;
      const int64_t phase_rows = h.phase < rows ? (rows - 1 - h.phase) / p.stride_h + 1 : 0;
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
      o.odd = odd.axis.source(pair0, 0) - even.axis.source(pair0, 0);
      o.position_row = pitch;
      o.tap_row = h.axis.tap * pitch;
      o.tap_col = even.axis.tap;
      o.taps_h = h.taps;
      o.even_taps = even.taps;
      o.odd_taps = odd.taps;
      o.weights = weights;
      o.dst_row = p.stride_h * gi[2];
      const T* const source =
          patch_data + (h.axis.source(position, 0) - met_h.first) * pitch + even.axis.source(pair0, 0) - met_w.first;
      for (int64_t panel = 0; panel < panels.count; ++panel) {
        const int64_t start = panels.start(panel) * L, most = strided_rows(panels.size(panel));
        const StridedUkernels<S, T>& ukernels = strided_ukernels<S, T>(panels.size(panel));
        o.columns = columns - 2 * start;
        for (int64_t r = 0; r < phase_rows;) {
          const bool several = phase_rows - r >= most;
          o.source = source + r * pitch + start;
          o.dst = dst + h.phase * gi[2] + r * o.dst_row + 2 * start;
          (several ? ukernels.several : ukernels.one)(o);
          r += several ? most : 1;
        }
      }
    }
  }

  // The outputs that a tile meets, with zeros around them.
  void pack(int64_t image, int64_t group, const MetOutputs& rows, const MetOutputs& cols, T* patch) const {
    const int64_t* const go = grad_output.stride;
    const S* const plane = static_cast<const S*>(grad_output.data) + image * go[0] + group * go[1];
    const Interval in_h = indices_inside(rows.first, 1, rows.size, problem.out_h);
    const Interval in_w = indices_inside(cols.first, 1, cols.size, problem.out_w);
    fill_zero(patch, rows.size * cols.size);
    if (in_w.count() == 0) return;
    for (int64_t row = in_h.begin; row < in_h.end; ++row) {
      copy_run(plane + (rows.first + row) * go[2] + (cols.first + in_w.begin) * go[3], go[3], in_w.count(),
               patch + row * cols.size + in_w.begin, false);
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
