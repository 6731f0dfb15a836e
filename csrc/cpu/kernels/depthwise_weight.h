// The micro-kernels of grad_weight for depthwise problems whose channels are innermost.
//
//   C[i][j][lane]  =  (C if accumulate) + sum over pixels k of A[k][lane] * B[k][i][j][lane]
//
// The pixels are one accumulation chain, from zero and in ascending order as gemm_ukernel's. They come in runs, which
// are neighbours in one row of the result: pixel k of a run lies in A k * a_pitch, in B k * position beyond the first.
//
// Where a run's taps overlap (position is STEP * tap_col, STEP 1 or 2) each column of B is loaded once: grad_output's
// last elements stay in registers and meet it from the oldest on, so that each tap meets its pixels in ascending order.
//
// Registers: TI * TJ accumulators, TJ / STEP of grad_output, one column: all of AVX2's 16 for 2 x 5 and 4 x 3. Bound:
// TI * TJ FMAs (2 a cycle) against 1 + TI * STEP loads (2 a cycle); without sharing columns, against 1 + TI * TJ loads,
// which with their addresses cost about 1.4 times the FMAs.
#pragma once

#include "gemm.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Neighbouring pixels of one row of the result.
template <class S>
struct WeightRun {
  int64_t count;
  const S* a;                // grad_output's first pixel
  const S* b;                // the first pixel's first tap
  int64_t position;          // of B: between pixels,
  int64_t tap_row, tap_col;  // and between rows and columns of taps
  int64_t chain_runs;        // of a chain's first run: how many the chain has
};

template <class S, class T>
struct DepthwiseWeightOperands {
  const WeightRun<S>* runs;
  int64_t count;           // of them: one chain
  int64_t a_pitch;         // between pixels of A
  int64_t lane, row, col;  // the micro-kernel's first lane, and its first tap
  int64_t tap_cols;        // all of C's
  T* c;                    // [i][j][lane]
  bool accumulate;
};

// One step of a run whose columns are shared: STEP columns of B, which meet grad_output's elements of `newest` to
// `oldest` pixels before the step's. At the ends of a run there are none of newer, or of older, pixels.
template <class S, class T, int TI, int TJ, int STEP, int WINDOW>
CONV2D_INLINE void take_columns(int newest, int oldest, const S* b, int64_t tap_row, int64_t tap_col,
                                const typename Vec<T>::reg (&window)[WINDOW], typename Vec<T>::reg (&acc)[TI][TJ]) {
  using V = Vec<T>;
#pragma GCC unroll 2
  for (int r = 0; r < STEP; ++r, b += tap_col) {
    if (r + newest * STEP >= TJ) break;
    const S* column = b;
#pragma GCC unroll 8
    for (int i = 0; i < TI; ++i, column += tap_row) {
      typename V::reg x = load_as(column);
      load_once(x);
#pragma GCC unroll 8
      for (int u = 0; u < WINDOW; ++u) {
        const int j = r + u * STEP;
        if (u >= newest && u <= oldest && j < TJ) acc[i][j] = V::fma(window[u], x, acc[i][j]);
      }
    }
  }
}

// The micro-kernel family depthwise_weight_ukernel_<dtype>_<TI>x<TJ>s<STEP>__<isa>. STEP 0 reads each tap where it is.
template <class S, class T, int TI, int TJ, int STEP>
void depthwise_weight_ukernel(const DepthwiseWeightOperands<S, T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  // Pixels whose taps share a step's columns.
  constexpr int kWindow = STEP == 0 ? 1 : (TJ + STEP - 1) / (STEP == 0 ? 1 : STEP);
  const int64_t a_pitch = operands.a_pitch;
  reg acc[TI][TJ] = {};
  const WeightRun<S>* const end = operands.runs + operands.count;
  for (const WeightRun<S>* run = operands.runs; run != end; ++run) {
    const int64_t tap_row = run->tap_row, tap_col = run->tap_col, position = run->position;
    const S* a = run->a + operands.lane;
    const S* b = run->b + operands.row * tap_row + operands.col * tap_col + operands.lane;
    int64_t left = run->count;
    if constexpr (STEP > 0) {
      if (left >= kWindow && position == STEP * tap_col) {
        reg window[kWindow];
        // A step, which begins a pixel unless it comes after the last one.
        const auto take = [&](int newest, int oldest) CONV2D_INLINE_LAMBDA {
#pragma GCC unroll 8
          for (int u = oldest; u > 0; --u) window[u] = window[u - 1];
          if (newest == 0) {
            window[0] = load_as(a);
            a += a_pitch;
          }
          take_columns<S, T, TI, TJ, STEP, kWindow>(newest, oldest, b, tap_row, tap_col, window, acc);
          b += position;
        };
#pragma GCC unroll 8
        for (int q = 0; q + 1 < kWindow; ++q) take(0, q);
        for (left -= kWindow - 1; left > 0; --left) take(0, kWindow - 1);
#pragma GCC unroll 8
        for (int q = 1; q < kWindow; ++q) take(q, kWindow - 1);
      }
    }
    for (; left > 0; --left, a += a_pitch, b += position) {
      const reg g = load_as(a);
      const S* row = b;
#pragma GCC unroll 8
      for (int i = 0; i < TI; ++i, row += tap_row) {
        const S* tap = row;
#pragma GCC unroll 8
        for (int j = 0; j < TJ; ++j, tap += tap_col) acc[i][j] = V::fma(g, load_as(tap), acc[i][j]);
      }
    }
  }
  T* c = operands.c + (operands.row * operands.tap_cols + operands.col) * V::kLanes;
#pragma GCC unroll 8
  for (int i = 0; i < TI; ++i, c += operands.tap_cols * V::kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < TJ; ++j) {
      T* const to = c + j * V::kLanes;
      V::store(to, operands.accumulate ? V::add(V::load(to), acc[i][j]) : acc[i][j]);
    }
  }
}

// The micro-kernel for TJ columns of as many of `rows` rows of taps as fit one.
template <class S, class T, int TJ, int STEP>
CONV2D_INLINE int64_t take_weight_rows(int64_t rows, const DepthwiseWeightOperands<S, T>& operands) {
  constexpr int kMost = int(most_depthwise_weight_rows(TJ, Vec<T>::kMaxVectors * kMR));
  const int64_t taken = depthwise_weight_rows(rows, kMost);
  with_constant<1, int(min64(2, kMost)), int(min64(3, kMost)), kMost>(
      taken, [&](auto ti) { depthwise_weight_ukernel<S, T, decltype(ti)::value, TJ, STEP>(operands); });
  return taken;
}

template <class S, class T, int TJ>
CONV2D_INLINE int64_t take_weight_cols(int64_t step, int64_t rows, const DepthwiseWeightOperands<S, T>& operands) {
  // A step that shares nothing between pixels is none.
  constexpr int kOne = int(depthwise_weight_step(TJ, 1, 1)), kTwo = int(depthwise_weight_step(TJ, 2, 1));
  if (step == 1) return take_weight_rows<S, T, TJ, kOne>(rows, operands);
  if (step == 2) return take_weight_rows<S, T, TJ, kTwo>(rows, operands);
  return take_weight_rows<S, T, TJ, 0>(rows, operands);
}

// C for all taps of a vector of groups.
template <class S, class T>
void depthwise_weight_panel(int64_t tap_rows, int64_t tap_cols, int64_t step, DepthwiseWeightOperands<S, T>& operands) {
  operands.tap_cols = tap_cols;
  for (operands.col = 0; operands.col < tap_cols;) {
    const int64_t cols = depthwise_weight_cols(tap_cols - operands.col);
    for (operands.row = 0; operands.row < tap_rows;) {
      const int64_t rows = tap_rows - operands.row;
      operands.row += with_constant<7, 5, 3, 2, 1>(cols, [&](auto tj) CONV2D_INLINE_LAMBDA {
        return take_weight_cols<S, T, decltype(tj)::value>(step, rows, operands);
      });
    }
    operands.col += cols;
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
