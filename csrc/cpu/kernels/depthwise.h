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
  // While a block is computed, what the row of pixels below it reads and writes is prefetched: `rows_ahead` rows of
  // taps of the source, from `ahead` beyond the block's source on, and results, from dst_ahead beyond the block's on.
  // Neither where rows_ahead is 0.
  int64_t rows_ahead, ahead, dst_ahead;
};

// `count` steps on. The address may be any that is not read: beside the source, or beyond what memory there can be.
template <class P>
CONV2D_INLINE P* moved(P* p, int64_t step, int64_t count = 1) {
  const uint64_t address = reinterpret_cast<uint64_t>(p) + uint64_t(step) * uint64_t(count) * sizeof(P);
  return reinterpret_cast<P*>(address);  // NOLINT(performance-no-int-to-ptr): of no object, and so no offset in one
}

// Asks L2 for a pixel's groups. (L1 would lose them: pixels that lie a power of two apart share few of its sets.)
template <class P>
CONV2D_INLINE void prefetch_pixel(const P* pixel, int64_t groups) {
  for (int64_t g = 0; g < groups; g += 64 / int64_t(sizeof(P))) __builtin_prefetch(moved(pixel, g), 0, 2);
}

// What the row of pixels below a block of MR will read first, and write: asked for while the block is computed, a few
// pixels with each of its vectors. Whole pixels, ascending in memory: hardware prefetchers follow such requests, and
// they do not follow the micro-kernel's own, which skip from pixel to pixel.
template <class P, class S, int MR, int STEP>
struct PixelsAhead {
  const DepthwiseOperands<P, S>& operands;
  const P* source;
  S* dst;
  int64_t due = 0;  // pixels, times the vectors

  // Of a block at these places.
  CONV2D_INLINE PixelsAhead(const DepthwiseOperands<P, S>& of, const P* block_source, S* block_dst)
      : operands(of), source(moved(block_source, of.ahead)), dst(moved(block_dst, of.dst_ahead)) {
    if (of.tap_col < 0) source = moved(source, of.tap_col, MR * STEP - 1);
    if (of.dst_step < 0) dst = moved(dst, of.dst_step, MR - 1);
  }
  CONV2D_INLINE void ask_some() {
    const int64_t groups = operands.last_lane + Vec<ComputeType<S>>::kLanes;
    for (due += MR; due >= operands.vectors; due -= operands.vectors) {
      for (int column = 0; column < STEP; ++column) {
        for (int64_t row = 0; row < operands.rows_ahead; ++row) {
          prefetch_pixel(moved(source, operands.tap_row, row), groups);
        }
        source = moved(source, operands.tap_col, operands.tap_col < 0 ? -1 : 1);
      }
      prefetch_pixel(dst, groups);
      dst = moved(dst, operands.dst_step, operands.dst_step < 0 ? -1 : 1);
    }
  }
};

// The micro-kernel family depthwise_ukernel_<dtype>_<MR>x<KW>s<STEP>__<isa>: rows of KW taps, positions STEP taps
// apart. Each column of the source is loaded once and meets every (pixel, tap) pair it belongs to. Columns ascend, so
// each pixel meets its taps in ascending order. EDGES: what lies above, below and beside the source is read from a
// vector of zeros.
//
// Registers: MR accumulators, KW weights, one column: at most 7 + 7 + 1 of AVX2's 16. Bound: MR * KW FMAs (2 a cycle)
// against KW + (MR - 1) * STEP + KW loads (2 a cycle). A column of 16 bits takes one or two instructions more, where
// FMAs go, for each row of taps that meets it; one at edges a test of a bit and a conditional move.
template <class P, class S, int MR, int KW, int STEP, bool EDGES>
void depthwise_ukernel(const DepthwiseOperands<P, S>& operands) {
  using T = ComputeType<S>;
  using V = Vec<T>;
  using reg = typename V::reg;
  alignas(64) static const P kZeros[V::kLanes] = {};
  const int64_t tap_row = operands.tap_row, tap_col = operands.tap_col, dst_step = operands.dst_step;
  const int64_t depth = operands.taps_h * KW * V::kLanes, last = operands.vectors - 1;
  const Interval taken = EDGES ? operands.rows_taken : Interval{0, operands.taps_h};
  const P* block_source = operands.source;
  S* block_dst = operands.dst;
  for (int64_t block = operands.blocks; block > 0; --block) {
    PixelsAhead<P, S, MR, STEP> ahead(operands, block_source, block_dst);
    for (int64_t v = 0; v <= last; ++v) {
      const int64_t lane = v < last ? v * V::kLanes : operands.last_lane;
      reg acc[MR];
#pragma GCC unroll 8
      for (int q = 0; q < MR; ++q) acc[q] = V::load(operands.start + v * V::kLanes);
      const P* row = moved(moved(block_source, lane), tap_row, taken.begin);
      if (operands.rows_ahead > 0) ahead.ask_some();
      const T* weights = operands.weights + v * depth + taken.begin * KW * V::kLanes;
      [[maybe_unused]] int64_t i = taken.begin;
      for (const T* const weights_end = weights + taken.count() * KW * V::kLanes; weights != weights_end;
           row = moved(row, tap_row), weights += KW * V::kLanes, ++i) {
        reg w[KW];
#pragma GCC unroll 8
        for (int j = 0; j < KW; ++j) w[j] = V::load(weights + j * V::kLanes);
        [[maybe_unused]] const uint32_t inside = operands.rows_inside.contains(i) ? operands.columns_inside : 0;
        const P* column = row;
#pragma GCC unroll 32
        for (int x = 0; x < (MR - 1) * STEP + KW; ++x) {
          reg s = load_as(EDGES ? if_bit(inside, x, column, kZeros) : column);
          load_once(s);  // compilers would rather make the load a part of each multiply-add
#pragma GCC unroll 8
          for (int j = 0; j < KW; ++j) {
            const int q = (x - j) / STEP;
            if (x >= j && q * STEP == x - j && q < MR) acc[q] = V::fma(w[j], s, acc[q]);
          }
          column = moved(column, tap_col);
          // Kept as one pointer that advances: as many multiples of tap_col would not fit the registers.
          __asm__("" : "+r"(column));
        }
      }
      const reg bias = V::load(operands.bias + v * V::kLanes);
      S* dst = block_dst + lane;
#pragma GCC unroll 8
      for (int q = 0; q < MR; ++q, dst = moved(dst, dst_step)) store_as(dst, V::add(acc[q], bias));
    }
    block_source = moved(block_source, operands.position, MR);
    block_dst = moved(block_dst, operands.dst_position, MR);
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
  switch (taps_w) {
    case 1:
      return kDepthwiseUkernels<P, S, 1, 1>;
    case 2:
      return kDepthwiseUkernels<P, S, 2, 1>;
    case 3:
      return step == 1 ? kDepthwiseUkernels<P, S, 3, 1> : kDepthwiseUkernels<P, S, 3, 2>;
    case 4:
      return kDepthwiseUkernels<P, S, 4, 1>;
    case 5:
      return step == 1 ? kDepthwiseUkernels<P, S, 5, 1> : kDepthwiseUkernels<P, S, 5, 2>;
    default:
      return step == 1 ? kDepthwiseUkernels<P, S, 7, 1> : kDepthwiseUkernels<P, S, 7, 2>;
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
