// The micro-kernels of depthwise input gradients with a stride of 2 along the row.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// A micro-kernel's operands: MR rows of one phase.
template <class S, class T>
struct StridedOperands {
  const T* source;       // the patch, at the first position of an even column's first tap in the first row
  int64_t odd;           // from there to the first tap of the column beside it
  int64_t position_row;  // from row to row of the phase
  int64_t tap_row, tap_col;
  int64_t taps_h, even_taps, odd_taps;
  const T* weights;  // [i][taps of even columns, then of odd ones]
  S* dst;            // the first even column
  int64_t dst_row;
  int64_t columns;  // that are stored, at most 2 * NV vectors
};

// The micro-kernel family strided_ukernel_<dtype>_<MR>x<NR>__<isa>: MR rows of NV vectors of positions in both phases,
// which are NR = 2 * NV * kLanes columns.
//
// Registers: 2 * MR * NV <= 8 accumulators, a broadcast weight. Bound: one load for each multiply-add (2 a cycle).
template <class S, class T, int MR, int NV>
void strided_ukernel(const StridedOperands<S, T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int L = V::kLanes;
  reg even[MR][NV] = {}, odd[MR][NV] = {};
  const T* row = operands.source;
  const T* weight = operands.weights;
  const int64_t position_row = operands.position_row, tap_col = operands.tap_col;
  const auto add_taps = [&](const T* tap, int64_t taps, reg(&acc)[MR][NV]) CONV2D_INLINE_LAMBDA {
    for (const T* const end = weight + taps; weight != end; ++weight, tap += tap_col) {
      const reg w = V::broadcast(weight);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = V::fma(w, V::load(tap + r * position_row + v * L), acc[r][v]);
      }
    }
  };
  for (int64_t i = operands.taps_h; i > 0; --i, row += operands.tap_row) {
    add_taps(row, operands.even_taps, even);
    add_taps(row + operands.odd, operands.odd_taps, odd);
  }
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) {
    S* const dst = operands.dst + r * operands.dst_row;
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      // As with every other result a bias, here none, is added last.
      reg low, high;
      V::zip(V::add(even[r][v], V::zero()), V::add(odd[r][v], V::zero()), low, high);
      const int64_t left = operands.columns - 2 * v * L;
      S* const to = dst + 2 * v * L;
      store_first(to, low, left);
      store_first(to + L, high, left - L);
    }
  }
}

template <class S, class T>
using StridedUkernel = void (*)(const StridedOperands<S, T>&);

// The micro-kernels for `vectors` vectors: of as many rows as the registers hold, and of one.
template <class S, class T>
struct StridedUkernels {
  StridedUkernel<S, T> several, one;
};
template <class S, class T>
const StridedUkernels<S, T>& strided_ukernels(int64_t vectors) {
  static constexpr StridedUkernels<S, T> kUkernels[] = {
      {strided_ukernel<S, T, strided_rows(1), 1>, strided_ukernel<S, T, 1, 1>},
      {strided_ukernel<S, T, strided_rows(2), 2>, strided_ukernel<S, T, 1, 2>},
      {strided_ukernel<S, T, 1, 3>, strided_ukernel<S, T, 1, 3>},
      {strided_ukernel<S, T, 1, 4>, strided_ukernel<S, T, 1, 4>}};
  return kUkernels[vectors - 1];
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
