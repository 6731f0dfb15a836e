// The forward of convolutions with one result pixel: the product of a matrix and a few vectors. At small batches it is
// bound by reading the weight once, so nothing of it is packed where its rows lie in the order of k; vectors lie along
// them. Of channels_last weights blocks of a few rows are transposed into that order.
//
//   output[n, m] = bias[m] + sum over k of weight[m, k] * patch[n, k]      k = (c, i, j)
//
// Its order of summation is its own (DotBlocking, plan/summation_order.h). So it runs here whatever the batch and the
// strides: float, double and the 16-bit types, which are widened as they are loaded. Complex and integer types go
// through the GEMM drivers.
#pragma once

#include "../kernels/dot.h"
#include "../kernels/vector_shape.h"
#include "../pack/lanes.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S>
struct DotCall {
  using T = ComputeType<S>;
  static constexpr int L = Vec<T>::kLanes;
  static constexpr int64_t W = kDotWidth<T>;
  static constexpr DotKernelShape kShape = dot_shape<T>();

  const ConvGemm& gemm;
  const int num_threads;
  const DotBlocking k = block_dot(gemm, W, vector_shape<T>().limits);
  const DotTiling tiling = tile_dot(gemm, k, kShape, num_threads);
  const DotScratch layout = lay_out_scratch(tiling, kShape);
  const bool source_is_dense =
      sizeof(S) == sizeof(T) && meets_no_padding(gemm) &&
      dot_is_dense(gemm, gemm.source_c, (gemm.source_row * gemm.axis_h.tap), (gemm.source_col * gemm.axis_w.tap));

  int64_t items() const { return tiling.items(gemm.groups); }

  void work(int64_t item) const {
    // Images vary fastest: neighbouring items share weights.
    const int64_t image0 = item % tiling.blocks_n * tiling.images;
    const int64_t m0 = item / tiling.blocks_n % tiling.blocks_m * tiling.rows;
    const int64_t group = item / tiling.blocks_n / tiling.blocks_m;
    const int64_t images = min64(tiling.images, gemm.batch - image0);
    const int64_t rows = min64(tiling.rows, gemm.m - m0);
    const S* const source = static_cast<const S*>(gemm.source) + image0 * gemm.source_n + group * gemm.source_g();
    const S* const weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g + m0 * gemm.weight_m;

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    T* const bias = part<T>(memory, layout.bias);
    T* const lanes = part<T>(memory, layout.lanes);
    T* const patches = part<T>(memory, layout.patches);
    T* const packed_rows = part<T>(memory, layout.rows);
    const int64_t lane_pitch = tiling.padded_rows * W;

    for (int64_t k0 = 0; k0 < k.products; k0 += tiling.depth) {
      const int64_t depth = min64(tiling.depth, k.products - k0);
      Block block{patches, depth, images, k0, depth, lanes, lane_pitch};
      if (!source_is_dense) {
        for (int64_t n = 0; n < images; ++n) {
          gather(patch_at(source + n * gemm.source_n), k0, depth, patches + n * depth);
        }
      } else if constexpr (sizeof(S) == sizeof(T)) {
        block.source = source + gemm.axis_h.origin * gemm.source_row + gemm.axis_w.origin * gemm.source_col + k0;
        block.source_pitch = gemm.source_n;
      }
      const int64_t step = images == 1 ? kShape.single_rows : kShape.rows;
      for (int64_t r = 0; r < rows; r += step, block.lanes += step * W) {
        const int64_t valid = min64(step, rows - r);
        if (!tiling.packs_rows) {
          multiply(block, weight + r * gemm.weight_m + k0, gemm.weight_m, valid);
        } else {
          for (int64_t i = 0; i < valid; ++i) {
            gather(row_at(weight + (r + i) * gemm.weight_m), k0, depth, packed_rows + i * depth);
          }
          multiply(block, packed_rows, depth, valid);
        }
      }
    }

    load_bias<S>(gemm, group, m0, rows, bias);
    fill_zero(bias + rows, tiling.padded_rows - rows);
    S* const destination =
        static_cast<S*>(gemm.destination) + image0 * gemm.destination_n + (group * gemm.m + m0) * gemm.destination_m;
    for (int64_t n = 0; n < images; ++n) {
      for (int64_t r = 0; r < rows; r += L) {
        const typename Vec<T>::reg sums =
            Vec<T>::add(add_dot_lanes<T>(lanes + n * lane_pitch + r * W), Vec<T>::load(bias + r));
        store(sums, int(min64(rows - r, L)), destination + n * gemm.destination_n + r * gemm.destination_m);
      }
    }
  }

  void store(typename Vec<T>::reg sums, int n, S* destination) const {
    if (gemm.destination_m == 1) {
      if (n == L) {
        store_as(destination, sums);
      } else {
        store_as_partial(destination, sums, n);
      }
      return;
    }
    T values[L];
    Vec<T>::store(values, sums);
    for (int i = 0; i < n; ++i) destination[i * gemm.destination_m] = Narrow<S>::from(values[i]);
  }

  // A block of K: the images' patches, and the lanes of the first row's results.
  struct Block {
    const T* source;
    int64_t source_pitch, images;
    int64_t k0, depth;
    T* lanes;
    int64_t lane_pitch;
  };
  // Rows of the weight, as they lie or packed, times all images.
  template <class R>
  CONV2D_INLINE void multiply(const Block& block, const R* rows, int64_t row_pitch, int64_t valid_rows) const {
    DotOperands<R, T> operands{};
    operands.steps = div_up(block.depth, W);
    operands.tail = block.depth % W;
    operands.chain = k.chain;
    operands.rows = rows;
    operands.row_pitch = row_pitch;
    operands.valid_rows = valid_rows;
    operands.source_pitch = block.source_pitch;
    operands.lane_pitch = block.lane_pitch;
    operands.accumulate = block.k0 != 0;
    for (int64_t n = 0; n < block.images; n += kShape.columns) {
      operands.source = block.source + n * block.source_pitch;
      operands.valid_sources = min64(kShape.columns, block.images - n);
      operands.lanes = block.lanes + n * block.lane_pitch;
      if (block.images == 1) {
        dot_ukernel<R, T, kShape.single_rows, 1>(operands);
      } else if (block.images - n <= kShape.few_columns) {
        dot_ukernel<R, T, kShape.rows, kShape.few_columns>(operands);
      } else {
        dot_ukernel<R, T, kShape.rows, kShape.columns>(operands);
      }
    }
  }

  // Channels times taps, in memory: element (c, i, j) of the taps inside, zeros of the others.
  struct TapElements {
    const S* data;  // of channel 0 and the first tap inside
    int64_t channel, row, col;
    Interval rows, cols;  // the taps inside

    S at(int64_t c, int64_t i, int64_t j) const {
      return data[c * channel + (i - rows.begin) * row + (j - cols.begin) * col];
    }
  };
  TapElements row_at(const S* weight) const {
    return {weight, gemm.weight_c, gemm.weight_i, gemm.weight_j, {0, gemm.taps_h}, {0, gemm.taps_w}};
  }
  TapElements patch_at(const S* source) const {
    const GatherAxis &h = gemm.axis_h, &w = gemm.axis_w;
    TapElements e{source, gemm.source_c, 0, 0, {0, 0}, {0, 0}};
    const Interval rows = indices_inside(h.origin, h.tap, gemm.taps_h, gemm.source_h);
    const Interval cols = indices_inside(w.origin, w.tap, gemm.taps_w, gemm.source_w);
    if (rows.count() == 0 || cols.count() == 0) return e;
    e.rows = rows;
    e.cols = cols;
    e.data += h.source(0, rows.begin) * gemm.source_row + w.source(0, cols.begin) * gemm.source_col;
    // Steps that nothing takes may be huge.
    if (e.rows.count() > 1) e.row = h.tap * gemm.source_row;
    if (e.cols.count() > 1) e.col = w.tap * gemm.source_col;
    return e;
  }

  // Products [k0, k0 + depth), in the order of k, widened.
  void gather(const TapElements& from, int64_t k0, int64_t depth, T* to) const {
    const int64_t taps = gemm.taps(), end = k0 + depth;
    int64_t next = k0;
    if constexpr (kHasTranspose<T>) {
      // Of channels that lie side by side all taps of whole channels are transposed at once; the parts of channels at
      // either end are copied.
      const int64_t first = div_up(k0, taps), channels = end / taps - first;
      if (from.channel == 1 && taps > 1 && channels > 0) {
        gather_elements(from, k0, first * taps, to);
        gather_channels(from, first, channels, to + first * taps - k0);
        next = (first + channels) * taps;
      }
    }
    gather_elements(from, next, end, to + next - k0);
  }
  // Products [k0, end), one by one.
  void gather_elements(const TapElements& from, int64_t k0, int64_t end, T* to) const {
    int64_t j = k0 % gemm.taps_w, i = k0 / gemm.taps_w % gemm.taps_h, c = k0 / gemm.taps();
    for (int64_t k = k0; k < end;) {
      const bool inside = i >= from.rows.begin && i < from.rows.end;
      for (; j < gemm.taps_w && k < end; ++j, ++k) {
        *to++ = inside && j >= from.cols.begin && j < from.cols.end ? widen_scalar(from.at(c, i, j)) : T{};
      }
      j = 0;
      if (++i == gemm.taps_h) {
        i = 0;
        ++c;
      }
    }
  }
  // All taps of channels [first, first + channels).
  void gather_channels(const TapElements& from, int64_t first, int64_t channels, T* to) const {
    const int64_t taps = gemm.taps();
    const bool all = from.rows.count() == gemm.taps_h && from.cols.count() == gemm.taps_w;
    if (!all) fill_zero(to, channels * taps);
    // Where rows of taps continue one another, all taps are one run.
    const bool joined = all && (gemm.taps_w == 1 || gemm.taps_h == 1 || from.row == gemm.taps_w * from.col);
    const int64_t rows = joined ? 1 : from.rows.count(), count = joined ? taps : from.cols.count();
    const int64_t step = joined && gemm.taps_w == 1 ? from.row : from.col;
    for (int64_t i = 0; i < rows; ++i) {
      pack_planes(from.data + i * from.row + first, step, count, channels,
                  to + (from.rows.begin + i) * gemm.taps_w + from.cols.begin, taps);
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
