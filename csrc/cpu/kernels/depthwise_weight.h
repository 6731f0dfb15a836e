// The micro-kernels of grad_weight for depthwise problems whose channels are innermost.
//
//   C[i][j][lane]  =  (C if accumulate) + sum over pixels k of A[k][lane] * B[k_offset[k] + i * tap_row + j * tap_col]
//
// The sums and their order are gemm_ukernel's (chains of pixels, each from zero). Its rows are one or more rows of
// taps: their addresses follow from one table entry, and TI * TJ chains keep the FMA units busy.
//
// A chain whose pixels lie in several places is taken in pieces: between them its sums wait in `pieces`.
#pragma once

#include "gemm.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class T>
struct DepthwiseWeightOperands {
  int64_t depth, chain;
  const T* a;  // grad_output's pixels, a_pitch apart
  int64_t a_pitch;
  const T* b;  // the patch, at the first tap
  const int64_t* k_offset;
  int64_t tap_row, tap_col;
  T* c;
  bool accumulate;
  // C's size. The pixels are part of one chain, which goes on from there (resumes) or to there (pauses).
  T* pieces = nullptr;
  bool resumes = false, pauses = false;
};

template <class T, int TI, int TJ>
void depthwise_weight_ukernel(const DepthwiseWeightOperands<T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  const T* a = operands.a;
  const int64_t* k_offset = operands.k_offset;
  const int64_t* const k_end = k_offset + operands.depth;
  const int64_t tap_row = operands.tap_row, tap_col = operands.tap_col;
  bool accumulate = operands.accumulate;
  while (k_offset != k_end) {
    const int64_t* const chain_end = k_end - k_offset > operands.chain ? k_offset + operands.chain : k_end;
    reg acc[TI][TJ];
#pragma GCC unroll 8
    for (int i = 0; i < TI; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < TJ; ++j) {
        acc[i][j] = operands.resumes ? V::load(operands.pieces + (i * TJ + j) * V::kLanes) : V::zero();
      }
    }
    for (const int64_t a_pitch = operands.a_pitch; k_offset != chain_end; ++k_offset, a += a_pitch) {
      const reg av = V::load(a);
      const T* row = operands.b + *k_offset;
#pragma GCC unroll 8
      for (int i = 0; i < TI; ++i, row += tap_row) {
        const T* tap = row;
#pragma GCC unroll 8
        for (int j = 0; j < TJ; ++j) {
          acc[i][j] = V::fma(av, V::load(tap), acc[i][j]);
          tap += tap_col;
          __asm__("" : "+r"(tap));  // as in depthwise_ukernel
        }
      }
    }
    const bool adds = accumulate && !operands.pauses;
    T* c = operands.pauses ? operands.pieces : operands.c;
#pragma GCC unroll 8
    for (int i = 0; i < TI; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < TJ; ++j, c += V::kLanes) V::store(c, adds ? V::add(V::load(c), acc[i][j]) : acc[i][j]);
    }
    accumulate = true;
  }
}

template <class T>
using DepthwiseWeightUkernel = void (*)(const DepthwiseWeightOperands<T>&);

// The micro-kernel for as many of `rows` rows of taps as fit one, and how many those are.
template <class T, int TJ>
CONV2D_INLINE int64_t choose_depthwise_weight_ukernel(int64_t rows, DepthwiseWeightUkernel<T>& ukernel) {
  constexpr int kMost = int(min64(depthwise_weight_rows(TJ, Vec<T>::kMaxVectors * kMR), 4));
  const int64_t taken = min64(rows, kMost);
  with_constant<1, int(min64(2, kMost)), int(min64(3, kMost)), kMost>(
      taken, [&](auto ti) { ukernel = depthwise_weight_ukernel<T, decltype(ti)::value, TJ>; });
  return taken;
}

// C for all taps of a vector of groups. element_offsets: of the taps in the patch; zeros: a vector.
template <class T>
void depthwise_weight_panel(int64_t tap_rows, int64_t tap_cols, const int64_t* element_offsets, const T* zeros,
                            DepthwiseWeightOperands<T> operands) {
  constexpr int L = Vec<T>::kLanes;
  if (!has_depthwise_weight_ukernel(tap_cols)) {
    GemmOperands<T> gemm{};
    gemm.depth = operands.depth;
    gemm.chain = operands.chain;
    gemm.a = operands.a;
    gemm.a_pitch = operands.a_pitch;
    gemm.b = operands.b - element_offsets[0];
    gemm.j_offset = element_offsets;
    gemm.k_offset = operands.k_offset;
    gemm.start = zeros;
    gemm.c = operands.c;
    gemm.c_pitch = L;
    gemm.accumulate = operands.accumulate;
    gemm_panel<true, T>(tap_rows * tap_cols, 1, gemm);
    return;
  }
  for (int64_t i = 0; i < tap_rows;) {
    DepthwiseWeightUkernel<T> ukernel;
    const int64_t rows = tap_cols == 3   ? choose_depthwise_weight_ukernel<T, 3>(tap_rows - i, ukernel)
                         : tap_cols == 5 ? choose_depthwise_weight_ukernel<T, 5>(tap_rows - i, ukernel)
                                         : choose_depthwise_weight_ukernel<T, 7>(tap_rows - i, ukernel);
    ukernel(operands);
    operands.b += rows * operands.tap_row;
    operands.c += rows * tap_cols * L;
    if (operands.pieces != nullptr) operands.pieces += rows * tap_cols * L;
    i += rows;
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
