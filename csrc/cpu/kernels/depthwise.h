// The micro-kernels of depthwise problems whose channels are innermost.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// A micro-kernel's operands: `blocks` blocks of MR neighbouring pixels, in all vectors of a block of groups. The source
// is the tensor's own (S) or a widened patch; results are narrowed as they are stored.
template <class P, class S>
struct DepthwiseOperands {
  using T = ComputeType<S>;
  const P* source;  // the first pixel's first tap, the first group
  int64_t position, tap_row, tap_col;
  int64_t taps_h;
  // Of a block at the source's edges: which rows of taps lie in the source, and which columns that its pixels meet, a
  // bit for each; and which rows of taps are taken at all: where zeros change nothing, those in the source.
  Interval rows_inside, rows_taken;
  uint32_t columns_inside;
  const T* weights;       // [vector][i][j][lane]
  const T *start, *bias;  // [vector][lane], added first and last
  int64_t vectors;
  int64_t last_lane;  // of the first group of the last vector; the others are whole vectors from zero on
  S* dst;
  int64_t dst_position, dst_step;  // between pixels of successive blocks, and of one
  int64_t blocks;
};

// `count` steps on. The address may be any that is not read: beside the source, or beyond what memory there can be.
template <class P>
CONV2D_INLINE P* moved(P* p, int64_t step, int64_t count = 1) {
  const uint64_t address = reinterpret_cast<uint64_t>(p) + uint64_t(step) * uint64_t(count) * sizeof(P);
  return reinterpret_cast<P*>(address);  // NOLINT(performance-no-int-to-ptr): of no object, and so no offset in one
}

// Vectors of groups that a micro-kernel takes at once, where there are registers for them (GCC spills one where it
// widens the columns of wide rows): hardware prefetchers follow pixels of which a line or two are read in turn, and
// hardly those of which each vector is read by itself. Where kHasEvenOdd, all take two.
template <class P, class T, int MR, int KW>
constexpr int kDepthwiseVectors = kHasEvenOdd<P>                                      ? 2
                                  : MR != kDepthwisePixels || Vec<T>::kMaxVectors < 4 ? 1
                                  : KW <= 3 || std::is_same_v<P, T>                   ? 2
                                                                                      : 1;

// Of vectors of L groups, those that lie side by side: not a last one that overlaps the one before it. Where
// kHasEvenOdd, of two such vectors, number 2 * i and the next one, the first holds the even groups, the second the odd
// ones.
template <int64_t L>
CONV2D_INLINE int64_t vectors_side_by_side(int64_t vectors, int64_t last_lane) {
  return vectors - int64_t(last_lane != (vectors - 1) * L);
}

// MR pixels in NV vectors of groups, which lie side by side: number v and the next ones.
template <class P, class S, int MR, int KW, int STEP, bool EDGES, int NV>
CONV2D_INLINE void depthwise_vectors(const DepthwiseOperands<P, S>& operands, int64_t v, const P* source, S* results) {
  using T = ComputeType<S>;
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int64_t L = V::kLanes;
  constexpr bool kSplit = NV == 2 && kHasEvenOdd<P>;
  alignas(64) static const P kZeros[NV * L] = {};
  const int64_t tap_row = operands.tap_row, tap_col = operands.tap_col;
  const int64_t depth = operands.taps_h * KW * L;
  const Interval taken = EDGES ? operands.rows_taken : Interval{0, operands.taps_h};
  reg acc[NV][MR];
#pragma GCC unroll 2
  for (int n = 0; n < NV; ++n) {
#pragma GCC unroll 8
    for (int q = 0; q < MR; ++q) acc[n][q] = V::load(operands.start + (v + n) * L);
  }
  const P* row = moved(source, tap_row, taken.begin);
  const T* weights = operands.weights + v * depth + taken.begin * KW * L;
  [[maybe_unused]] int64_t i = taken.begin;
  for (const T* const weights_end = weights + taken.count() * KW * L; weights != weights_end;
       row = moved(row, tap_row), weights += KW * L, ++i) {
    reg w[NV][KW];
#pragma GCC unroll 2
    for (int n = 0; n < NV; ++n) {
#pragma GCC unroll 8
      for (int j = 0; j < KW; ++j) w[n][j] = V::load(weights + n * depth + j * L);
    }
    [[maybe_unused]] const uint32_t inside = operands.rows_inside.contains(i) ? operands.columns_inside : 0;
    const P* column = row;
#pragma GCC unroll 32
    for (int x = 0; x < (MR - 1) * STEP + KW; ++x) {
      const P* const groups = EDGES ? if_bit(inside, x, column, kZeros) : column;
      reg s[NV];
      if constexpr (kSplit) {
        widen_even_odd(groups, s[0], s[1]);
      } else {
#pragma GCC unroll 2
        for (int n = 0; n < NV; ++n) s[n] = load_as(groups + n * L);
      }
#pragma GCC unroll 2
      for (int n = 0; n < NV; ++n) {
        load_once(s[n]);  // compilers would rather make the load a part of each multiply-add
#pragma GCC unroll 8
        for (int j = 0; j < KW; ++j) {
          const int q = (x - j) / STEP;
          if (x >= j && q * STEP == x - j && q < MR) acc[n][q] = V::fma(w[n][j], s[n], acc[n][q]);
        }
      }
      column = moved(column, tap_col);
      // Kept as one pointer that advances: as many multiples of tap_col would not fit the registers.
      __asm__("" : "+r"(column));
    }
  }
  reg bias[NV];
#pragma GCC unroll 2
  for (int n = 0; n < NV; ++n) bias[n] = V::load(operands.bias + (v + n) * L);
  [[maybe_unused]] S* dst = results;
#pragma GCC unroll 8
  for (int q = 0; q < MR; ++q, dst = moved(dst, operands.dst_step)) {
#pragma GCC unroll 2
    for (int n = 0; n < NV; ++n) {
      acc[n][q] = V::add(acc[n][q], bias[n]);
      if constexpr (!kSplit) store_as(dst + n * L, acc[n][q]);
    }
  }
  if constexpr (kSplit) narrow_even_odd(results, operands.dst_step, acc[0], acc[1]);
}

// The micro-kernel family depthwise_ukernel_<dtype>_<MR>x<KW>s<STEP>__<isa>: rows of KW taps, positions STEP taps
// apart. Each column of the source is loaded once and meets every (pixel, tap) pair it belongs to. Columns ascend, so
// each pixel meets its taps in ascending order. EDGES: what lies above, below and beside the source is read from a
// vector of zeros.
//
// Registers: MR accumulators, KW weights, one column: at most 7 + 7 + 1 of AVX2's 16; of AVX-512's 32 for two vectors
// 14 + 14 + 2, and a mask for bfloat16. Bound, of each vector: MR * KW FMAs (2 a cycle) against
// KW + (MR - 1) * STEP + KW loads (2 a cycle). To widen a column takes one or two instructions more, where FMAs go, for
// each row of taps that meets it; at edges it takes a test of a bit and a conditional move.
template <class P, class S, int MR, int KW, int STEP, bool EDGES>
void depthwise_ukernel(const DepthwiseOperands<P, S>& operands) {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  constexpr int NV = kDepthwiseVectors<P, T, MR, KW>;
  const int64_t last = operands.vectors - 1;
  // Where many columns descend, prefetchers follow single vectors better. (What lies split is taken so.)
  const bool in_pairs = kHasEvenOdd<P> || KW <= 3 || operands.tap_col > 0;
  const int64_t side_by_side = in_pairs ? vectors_side_by_side<L>(operands.vectors, operands.last_lane) : 0;
  const P* source = operands.source;
  S* dst = operands.dst;
  for (int64_t block = operands.blocks; block > 0; --block) {
    int64_t v = 0;
    if constexpr (NV > 1) {
      for (; v + NV <= side_by_side; v += NV) {
        depthwise_vectors<P, S, MR, KW, STEP, EDGES, NV>(operands, v, moved(source, v * L), dst + v * L);
      }
    }
    for (; v <= last; ++v) {
      const int64_t lane = v < last ? v * L : operands.last_lane;
      depthwise_vectors<P, S, MR, KW, STEP, EDGES, 1>(operands, v, moved(source, lane), dst + lane);
    }
    source = moved(source, operands.position, MR);
    dst = moved(dst, operands.dst_position, MR);
  }
}

template <class P, class S>
using DepthwiseUkernel = void (*)(const DepthwiseOperands<P, S>&);

// For pixels all of whose taps lie inside the source, and for all others. (A patch holds its zeros: its pixels are all
// inside.)
template <class P, class S>
struct DepthwiseUkernelPair {
  DepthwiseUkernel<P, S> inside, at_edges;
};
template <class P, class S, int MR, int KW, int STEP>
constexpr DepthwiseUkernelPair<P, S> kDepthwiseUkernelPair = {
    depthwise_ukernel<P, S, MR, KW, STEP, false>, depthwise_ukernel<P, S, MR, KW, STEP, std::is_same_v<P, S>>};

// The micro-kernels of one kind of row: for 7, 4 and 1 pixels.
template <class P, class S>
struct DepthwiseUkernels {
  DepthwiseUkernelPair<P, S> by_seven, by_four, one;
};
template <class P, class S, int KW, int STEP>
constexpr DepthwiseUkernels<P, S> kDepthwiseUkernels = {kDepthwiseUkernelPair<P, S, kDepthwisePixels, KW, STEP>,
                                                        kDepthwiseUkernelPair<P, S, 4, KW, STEP>,
                                                        kDepthwiseUkernelPair<P, S, 1, KW, STEP>};

// For rows that has_depthwise_ukernel (plan/tile_depthwise.h).
template <class P, class S>
const DepthwiseUkernels<P, S>& depthwise_ukernels(int64_t taps_w, int64_t step) {
  return *with_constant<1, 2, 3, 4, 5, 7>(taps_w, [&](auto cols) {
    constexpr int KW = decltype(cols)::value;
    if constexpr (has_depthwise_ukernel(KW, 2)) {
      if (step == 2) return &kDepthwiseUkernels<P, S, KW, 2>;
    }
    return &kDepthwiseUkernels<P, S, KW, 1>;
  });
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
