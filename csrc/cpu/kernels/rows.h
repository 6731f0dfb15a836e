// The micro-kernels of gradients of one pixel and of products of matrices with few rows: rows of a matrix times
// factors.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// row_ukernel_<dtype>_<MR>x<NR>__<isa>
//
//   sum[r][0:NR]  =  sum over k of factors[k][r] * rows[k][0:NR]
//
// for 0 <= r < MR: one chain of `depth` fused multiply-adds from zero. It is added to sums[r] unless it is the first of
// its chunk, and goes into sums[r] or, if it is the last of the only chunk, has the bias added and is rounded and
// stored: sums of one product are as long as writing them takes. Of the MR results valid_results exist. With kPartial
// NR is less than a vector: `lanes` elements.
//
// Registers: MR * NV accumulators, a vector of the row, MR broadcasts.
template <class S, class T>
struct RowOperands {
  int64_t depth;
  const T* factors;  // [k][MR]
  const S* rows;
  int64_t row_pitch;
  T* sums;
  int64_t sum_pitch;
  S* result;
  int64_t result_pitch, valid_results;
  bool first, last;
  const T* bias = nullptr;  // NR elements; nullptr stands for zeros
};

template <class S, class T, int MR, int NV, bool kPartial>
CONV2D_INLINE void row_ukernel(const RowOperands<S, T>& operands, int lanes) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int L = V::kLanes;
  reg acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) acc[r][v] = V::zero();
  }
  const S* row = operands.rows;
  const T* factors = operands.factors;
  const int64_t row_pitch = operands.row_pitch;
  for (const T* const end = factors + operands.depth * MR; factors != end; factors += MR, row += row_pitch) {
    // Of the two operands the fewer vectors stay in registers.
    if constexpr (MR <= NV) {
      reg f[MR];
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) f[r] = V::broadcast(factors + r);
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        reg x = kPartial ? load_as_partial(row, lanes) : load_as(row + v * L);
        if constexpr (MR > 1) load_once(x);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) acc[r][v] = V::fma(x, f[r], acc[r][v]);
      }
    } else {
      reg x[NV];
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        x[v] = kPartial ? load_as_partial(row, lanes) : load_as(row + v * L);
        load_once(x[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        const reg f = V::broadcast(factors + r);
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) acc[r][v] = V::fma(x[v], f, acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    if (r >= operands.valid_results) break;
    T* const sums = operands.sums + r * operands.sum_pitch;
    S* const result = operands.result + r * operands.result_pitch;
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      reg sum = operands.first ? acc[r][v] : V::add(V::load(sums + v * L), acc[r][v]);
      if (!operands.last) {
        V::store(sums + v * L, sum);
        continue;
      }
      sum = V::add(sum, operands.bias != nullptr ? V::load(operands.bias + v * L) : V::zero());
      store_first(result + v * L, sum, kPartial ? lanes : L);
    }
  }
}

// The widest panel, a function of its own: inlined beside the others its accumulators spill.
template <class S, class T, int MR, int NV>
__attribute__((noinline)) void widest_row_ukernel(const RowOperands<S, T>& operands) {
  row_ukernel<S, T, MR, NV, false>(operands, Vec<T>::kLanes);
}

// A chain of any number of lanes: NV vectors at a time, then half as many, and the lanes left over.
template <class S, class T, int MR, int NV, bool kWidest>
CONV2D_INLINE void row_panels(RowOperands<S, T> operands, int64_t lanes) {
  constexpr int L = Vec<T>::kLanes;
  for (; lanes >= NV * L; lanes -= NV * L) {
    if constexpr (kWidest) {
      // A copy, since what is passed by address lives in memory from then on.
      const RowOperands<S, T> now = operands;
      widest_row_ukernel<S, T, MR, NV>(now);
    } else {
      row_ukernel<S, T, MR, NV, false>(operands, L);
    }
    operands.rows += NV * L;
    operands.sums += NV * L;
    operands.result += NV * L;
    if (operands.bias != nullptr) operands.bias += NV * L;
  }
  if constexpr (NV > 1) {
    row_panels<S, T, MR, NV / 2, false>(operands, lanes);
  } else if (lanes > 0) {
    row_ukernel<S, T, MR, 1, true>(operands, int(lanes));
  }
}
template <class S, class T, int MR>
void row_chain(const RowOperands<S, T>& operands, int64_t lanes) {
  row_panels<S, T, MR, int(row_vectors(Vec<T>::kLanes * int64_t(sizeof(T)), MR)), true>(operands, lanes);
}
// Of as many results as row_results() says.
template <class S, class T>
CONV2D_INLINE void row_chain(int64_t results, const RowOperands<S, T>& operands, int64_t lanes) {
  with_constant<1, 2, 3, 4, kMostRowResults>(results,
                                             [&](auto r) { row_chain<S, T, decltype(r)::value>(operands, lanes); });
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
