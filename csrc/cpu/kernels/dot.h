// The micro-kernels of dot products along the rows of a weight.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// dot_ukernel_<dtype>_<MR>x<NC>__<isa>
//
//   lanes[c][r][l]  =  (lanes[c][r][l] if accumulate) + sum over s of rows[r][s * W + l] * source[c][s * W + l]
//
// for 0 <= r < MR, 0 <= c < NC, 0 <= l < W, where W = kDotWidth<T> is 64 bytes of T and the last step, `tail` elements
// long, is filled up with zeros. A chain of `chain` steps is summed from zero by fused multiply-adds, chains are added
// to `lanes` in order. Of the MR rows and NC source vectors `valid_rows` and `valid_sources` exist; the others stand
// for the last that does, and their sums go into lanes that nobody reads.
//
// Registers: MR * NC * W / (lanes of a vector) accumulators, a source vector for each column, one of a row. Bound: the
// weight's way from L2 or beyond while there are few columns, then two loads a cycle.
template <class S, class T>
struct DotOperands {
  int64_t steps, tail, chain;
  const S* rows;
  int64_t row_pitch, valid_rows;
  const T* source;
  int64_t source_pitch, valid_sources;
  T* lanes;
  int64_t lane_pitch;  // from one source vector's lanes to the next one's; a row's are kDotWidth apart
  bool accumulate;
};

template <class S, class T, int MR, int NC>
void dot_ukernel(const DotOperands<S, T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int L = V::kLanes, W = int(kDotWidth<T>), NV = W / L;
  const S* row[MR];
  const T* source[NC];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) row[r] = operands.rows + min64(r, operands.valid_rows - 1) * operands.row_pitch;
#pragma GCC unroll 8
  for (int c = 0; c < NC; ++c) {
    source[c] = operands.source + min64(c, operands.valid_sources - 1) * operands.source_pitch;
  }
  const int64_t full = operands.tail != 0 ? operands.steps - 1 : operands.steps;
  bool accumulate = operands.accumulate;

  for (int64_t step = 0; step < operands.steps;) {
    const int64_t chain_end = min64(step + operands.chain, operands.steps);
    const int64_t full_end = min64(chain_end, full);
    reg acc[MR][NC][NV] = {};

    // A step from element k on, all of it or its first n elements.
    const auto add_step = [&](auto is_whole, int64_t k, int64_t n) CONV2D_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v, k += L) {
        const int lanes = int(min64(max64(n - v * L, 0), L));
        reg x[NC];
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) x[c] = is_whole ? V::load(source[c] + k) : V::load_partial(source[c] + k, lanes);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          reg w = is_whole ? load_as(row[r] + k) : load_as_partial(row[r] + k, lanes);
          if constexpr (NC > 1) load_once(w);
#pragma GCC unroll 8
          for (int c = 0; c < NC; ++c) acc[r][c][v] = V::fma(w, x[c], acc[r][c][v]);
        }
      }
    };
    for (int64_t k = step * W, end = full_end * W; k < end; k += W) add_step(std::true_type(), k, W);
    if (full_end != chain_end) add_step(std::false_type(), full_end * W, operands.tail);
    step = chain_end;

#pragma GCC unroll 8
    for (int c = 0; c < NC; ++c) {
      T* lanes = operands.lanes + c * operands.lane_pitch;
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r, lanes += W) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          V::store(lanes + v * L, accumulate ? V::add(V::load(lanes + v * L), acc[r][c][v]) : acc[r][c][v]);
        }
      }
    }
    accumulate = true;
  }
}

// The shapes that fill the registers: rows times one source vector; rows times columns, or few columns, of several.
template <class T>
constexpr DotKernelShape dot_shape() {
  constexpr int64_t L = Vec<T>::kLanes, size = sizeof(T), W = kDotWidth<T>;
  if (L * size == 64) return {L, W, size, 8, 6, 4, 2};
  return L * size == 32 ? DotKernelShape{L, W, size, 6, 3, 2, 2} : DotKernelShape{L, W, size, 3, 3, 1, 1};
}

// The sums of L results' lanes, each in its place: lane l is added to lane l + W/2, then W/4 of these, and so on.
template <class T>
CONV2D_INLINE typename Vec<T>::reg add_dot_lanes(const T* lanes) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int L = V::kLanes, NV = int(kDotWidth<T>) / L;
  reg sums[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    reg part[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) part[v] = V::load(lanes + (i * NV + v) * L);
#pragma GCC unroll 4
    for (int n = NV / 2; n > 0; n /= 2) {
#pragma GCC unroll 4
      for (int v = 0; v < n; ++v) part[v] = V::add(part[v], part[v + n]);
    }
    sums[i] = part[0];
  }
  return V::sum_each(sums);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
