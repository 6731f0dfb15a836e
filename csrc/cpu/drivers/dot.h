// The forward of convolutions with one result pixel: the product of a matrix and a few vectors. At small batches it is
// bound by reading the weight once, so nothing of it is packed; vectors lie along its rows.
//
//   output[n, m] = bias[m] + sum over k of weight[m, k] * patch[n, k]      k = (c, i, j)
//
// Its order of summation is its own (DotBlocking, plan/summation_order.h). So it runs here whatever the batch and the
// strides: float, double and the 16-bit types, which are widened as they are loaded. Complex and integer types go
// through the GEMM drivers.
#pragma once

#include "../kernels/dot.h"
#include "../kernels/vector_shape.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S>
struct DotCall {
  using T = ComputeType<S>;
  static constexpr int L = Vec<T>::kLanes;
  static constexpr int64_t W = kDotWidth<T>;
  using Shape = DotShape<T>;

  const ConvGemm& gemm;
  const DotBlocking k;
  const DotTiling tiling;
  const DotScratch layout;
  const bool weight_is_dense, source_is_dense;

  DotCall(const ConvGemm& g, int num_threads)
      : gemm(g),
        k(block_dot(g, W, vector_shape<T>().limits)),
        tiling(tile_dot(g, k, dot_shape<S>(), num_threads)),
        layout(lay_out_scratch(tiling, dot_shape<S>())),
        weight_is_dense(dot_is_dense(g, g.weight_c, g.weight_i, g.weight_j)),
        source_is_dense(sizeof(S) == sizeof(T) && meets_no_padding(g) &&
                        dot_is_dense(g, g.source_c, g.source_row * g.axis_h.tap, g.source_col * g.axis_w.tap)) {}

  int64_t items() const { return tiling.items(gemm.groups); }

  void work(int64_t item) const {
    // Images vary fastest: neighbouring items share weights.
    const int64_t image0 = item % tiling.blocks_n * tiling.images;
    const int64_t m0 = item / tiling.blocks_n % tiling.blocks_m * tiling.rows;
    const int64_t group = item / tiling.blocks_n / tiling.blocks_m;
    const int64_t images = min64(tiling.images, gemm.batch - image0);
    const int64_t rows = min64(tiling.rows, gemm.m - m0);
    const S* const source =
        static_cast<const S*>(gemm.source) + image0 * gemm.source_n + group * gemm.channels * gemm.source_c;
    const S* const weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g + m0 * gemm.weight_m;

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    T* const bias = part<T>(memory, layout.bias);
    T* const lanes = part<T>(memory, layout.lanes);
    T* const patches = part<T>(memory, layout.patches);
    S* const packed_rows = part<S>(memory, layout.rows);
    const int64_t lane_pitch = tiling.padded_rows * W;

    for (int64_t k0 = 0; k0 < k.products; k0 += tiling.depth) {
      const int64_t depth = min64(tiling.depth, k.products - k0);
      DotOperands<S, T> operands{};
      operands.steps = div_up(depth, W);
      operands.tail = depth % W;
      operands.chain = k.chain;
      operands.lane_pitch = lane_pitch;
      operands.accumulate = k0 != 0;
      const T* first_source = patches;
      operands.source_pitch = depth;
      if (!source_is_dense) {
        for (int64_t n = 0; n < images; ++n) gather_source(source + n * gemm.source_n, k0, depth, patches + n * depth);
      } else if constexpr (sizeof(S) == sizeof(T)) {
        first_source = source + gemm.axis_h.origin * gemm.source_row + gemm.axis_w.origin * gemm.source_col + k0;
        operands.source_pitch = gemm.source_n;
      }
      const int64_t step = images == 1 ? Shape::kSingleRows : Shape::kRows;
      for (int64_t r = 0; r < rows; r += step) {
        operands.valid_rows = min64(step, rows - r);
        if (weight_is_dense) {
          operands.rows = weight + r * gemm.weight_m + k0;
          operands.row_pitch = gemm.weight_m;
        } else {
          for (int64_t i = 0; i < operands.valid_rows; ++i) {
            gather_row(weight + (r + i) * gemm.weight_m, k0, depth, packed_rows + i * depth);
          }
          operands.rows = packed_rows;
          operands.row_pitch = depth;
        }
        if (images == 1) {
          operands.source = first_source;
          operands.valid_sources = 1;
          operands.lanes = lanes + r * W;
          dot_ukernel<S, T, Shape::kSingleRows, 1>(operands);
          continue;
        }
        for (int64_t n = 0; n < images; n += Shape::kColumns) {
          operands.source = first_source + n * operands.source_pitch;
          operands.valid_sources = min64(Shape::kColumns, images - n);
          operands.lanes = lanes + n * lane_pitch + r * W;
          if (images - n <= Shape::kFewColumns) {
            dot_ukernel<S, T, Shape::kRows, Shape::kFewColumns>(operands);
          } else {
            dot_ukernel<S, T, Shape::kRows, Shape::kColumns>(operands);
          }
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

  // Products [k0, k0 + depth) of one row of a weight that doesn't lie as (c, i, j).
  void gather_row(const S* weight, int64_t k0, int64_t depth, S* row) const {
    int64_t j = k0 % gemm.taps_w, i = k0 / gemm.taps_w % gemm.taps_h, c = k0 / gemm.taps();
    for (int64_t at = 0; at < depth;) {
      const int64_t run = min64(gemm.taps_w - j, depth - at);
      const S* const from = weight + c * gemm.weight_c + i * gemm.weight_i;
      for (int64_t end = j + run; j < end; ++j) row[at++] = from[j * gemm.weight_j];
      next_row(c, i, j);
    }
  }
  // The same of an image's patch, zeros where it lies in the padding.
  void gather_source(const S* source, int64_t k0, int64_t depth, T* patch) const {
    int64_t j = k0 % gemm.taps_w, i = k0 / gemm.taps_w % gemm.taps_h, c = k0 / gemm.taps();
    for (int64_t at = 0; at < depth;) {
      const int64_t run = min64(gemm.taps_w - j, depth - at);
      const int64_t row = gemm.axis_h.source(0, i);
      const bool inside = row >= 0 && row < gemm.source_h;
      const S* const from = source + c * gemm.source_c + (inside ? row * gemm.source_row : 0);
      for (int64_t end = j + run; j < end; ++j) {
        const int64_t col = gemm.axis_w.source(0, j);
        patch[at++] = inside && col >= 0 && col < gemm.source_w ? widen_scalar(from[col * gemm.source_col]) : T{};
      }
      next_row(c, i, j);
    }
  }
  void next_row(int64_t& c, int64_t& i, int64_t& j) const {
    j = 0;
    if (++i == gemm.taps_h) {
      i = 0;
      ++c;
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
