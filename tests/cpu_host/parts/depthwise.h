// kernels/depthwise.h and kernels/strided.h.
#pragma once

#include "../../../csrc/cpu/kernels/depthwise.h"
#include "../../../csrc/cpu/kernels/strided.h"
#include "arithmetic.h"

namespace parts {

template <class P, class S>
void check_depthwise() {
  using T = ComputeType<S>;
  begin_part(std::string("depthwise_ukernel ") + kNameOf<S> + (std::is_same_v<P, S> ? "" : ", widened"));
  constexpr int L = Vec<T>::kLanes;
  Random random(20);
  for (const int64_t taps_w : {1, 2, 3, 4, 5, 6, 7}) {
    for (const int64_t step : {1, 2}) {
      if (!has_depthwise_ukernel(taps_w, step)) continue;
      const DepthwiseUkernels<P, S>& ukernels = depthwise_ukernels<P, S>(taps_w, step);
      for (const int64_t width : {7, 4, 1}) {
        const DepthwiseUkernelPair<P, S>& pair = width == 7   ? ukernels.by_seven
                                                 : width == 4 ? ukernels.by_four
                                                              : ukernels.one;
        for (int64_t taps_h = 1; taps_h <= 4; ++taps_h) {
          const bool at_edges = std::is_same_v<P, S> && random.once_in(2);
          const int64_t blocks = at_edges ? 1 : random.between(1, 3), vectors = random.between(1, 5);
          // The last vector overlaps the one before it where groups are no whole vectors.
          const int64_t last_lane = (vectors - 1) * L - (vectors > 1 ? random.between(0, L - 1) : 0);
          const int64_t groups = last_lane + L;
          // Where taps run against the positions, the pixels do, too: columns descend.
          const int64_t tap_col = (random.once_in(3) ? -1 : 1) * (groups + random.between(0, 2));
          // Blocks ascend or descend whichever way the pixels of one do.
          const int64_t turn = random.once_in(3) ? -1 : 1;
          const int64_t position = turn * step * tap_col;
          const int64_t pixels = width * blocks, columns = (pixels - 1) * step + taps_w;
          const int64_t tap_row = (random.once_in(3) ? -1 : 1) * columns * (groups + 3);
          const int64_t dst_step = (random.once_in(3) ? -1 : 1) * (groups + random.between(0, 3));
          describe("%dx%ds%d, %d rows of taps %d apart, columns %d apart, %d groups, %d blocks", int(width),
                   int(taps_w), int(step), int(taps_h), int(tap_row), int(tap_col), int(groups), int(blocks));
          // Beside the source there are zeros, whatever lies there in memory.
          Interval rows{0, taps_h}, taken = rows, cols{0, columns};
          if (at_edges) {
            rows.end = random.between(0, taps_h);
            rows.begin = random.between(0, rows.end);
            if (random.once_in(2)) taken = rows;
            cols.end = random.between(0, columns);
            cols.begin = random.between(0, cols.end);
          }
          const uint32_t bits = uint32_t(((uint64_t{1} << cols.end) - 1) ^ ((uint64_t{1} << cols.begin) - 1));
          const Dimension from[] = {{taps_h, tap_row}, {columns, tap_col}, {groups, 1}};
          const Dimension to[] = {{pixels, dst_step}, {groups, 1}};
          int64_t before = 0, elements = 0, dst_before = 0, dst_elements = 0;
          span_of(from, before, elements);
          span_of(to, dst_before, dst_elements);
          Buffer<P> source(elements);
          Buffer<T> weights(vectors * taps_h * taps_w * L), start(vectors * L), bias(vectors * L);
          Result<S> dst(dst_elements);
          fill(source, random);
          const auto group = [&](int64_t v, int64_t l) {
            const int64_t pair = v / 2 * 2;
            if (kHasEvenOdd<P> && pair + 2 <= vectors_side_by_side<L>(vectors, last_lane)) {
              return pair * L + 2 * l + v % 2;
            }
            return (v + 1 < vectors ? v * L : last_lane) + l;
          };
          for (int64_t v = 0; v < vectors; ++v) {
            for (int64_t i = 0; i < L; ++i) {
              // A group that two vectors hold has the same operands in both.
              Random of_group(uint64_t(1000 + group(v, i)));
              start[v * L + i] = any_value<T>(of_group);
              bias[v * L + i] = any_value<T>(of_group);
              for (int64_t t = 0; t < taps_h * taps_w; ++t) {
                weights[(v * taps_h * taps_w + t) * L + i] = any_value<T>(of_group);
              }
            }
          }
          const int64_t first = turn < 0 ? (blocks - 1) * width : 0;  // pixel of the first block
          const int64_t from_first = before + first * step * tap_col, to_first = dst_before + first * dst_step;
          (at_edges ? pair.at_edges
                    : pair.inside)({source.data() + from_first, position, tap_row, tap_col, taps_h, rows, taken, bits,
                                    weights.data(), start.data(), bias.data(), vectors, last_lane,
                                    dst.data() + to_first, turn * dst_step, dst_step, blocks});
          for (int64_t q = 0; q < pixels; ++q) {
            for (int64_t v = 0; v < vectors; ++v) {
              for (int64_t l = 0; l < L; ++l) {
                T sum = start[v * L + l];
                for (int64_t i = taken.begin; i < taken.end; ++i) {
                  for (int64_t j = 0; j < taps_w; ++j) {
                    const int64_t at = before + q * step * tap_col + i * tap_row + j * tap_col + group(v, l);
                    const P value = rows.contains(i) && cols.contains(q * step + j) ? source[at] : P{};
                    sum = multiply_add(weights[((v * taps_h + i) * taps_w + j) * L + l], widened(value), sum);
                  }
                }
                dst.expected[size_t(dst_before + q * dst_step + group(v, l))] = narrowed<S>(add(sum, bias[v * L + l]));
              }
            }
          }
          dst.compare();
        }
      }
    }
  }
}

template <class S>
void check_strided() {
  using T = ComputeType<S>;
  begin_part(std::string("strided_ukernel ") + kNameOf<S>);
  constexpr int L = Vec<T>::kLanes;
  Random random(21);
  for (int64_t vectors = 1; vectors <= kStridedVectors; ++vectors) {
    for (const bool several : {true, false}) {
      const int64_t rows = several ? strided_rows(vectors) : 1;
      // Planning takes no vector more than the columns need; of an inner panel all are stored.
      for (int64_t columns = 2 * (vectors - 1) * L + 1; columns <= 2 * vectors * L + 2; ++columns) {
        const int64_t taps_h = random.between(0, 3), even_taps = random.between(0, 3), odd_taps = random.between(0, 3);
        const int64_t stored = min64(columns, 2 * vectors * L), dst_row = stored + random.between(0, 3);
        // Taps of a phase descend along grad_output.
        const int64_t tap_col = -random.between(1, 2), position_row = vectors * L + 12, tap_row = -position_row;
        const int64_t odd = random.between(-1, 1);
        describe("%dx%d, %d columns, %d rows of %d and %d taps", int(rows), int(vectors), int(columns), int(taps_h),
                 int(even_taps), int(odd_taps));
        const int64_t before = 3 * position_row + 8;
        Buffer<T> source(before + rows * position_row), weights(taps_h * (even_taps + odd_taps));
        Result<S> dst((rows - 1) * dst_row + stored);
        fill(source, random);
        fill(weights, random);
        StridedOperands<S, T> o{};
        o.source = source.data() + before;
        o.odd = odd;
        o.position_row = position_row;
        o.tap_row = tap_row;
        o.tap_col = tap_col;
        o.taps_h = taps_h;
        o.even_taps = even_taps;
        o.odd_taps = odd_taps;
        o.weights = weights.data();
        o.dst = dst.data();
        o.dst_row = dst_row;
        o.columns = columns;
        const StridedUkernels<S, T>& ukernels = strided_ukernels<S, T>(vectors);
        (several ? ukernels.several : ukernels.one)(o);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t x = 0; x < stored; ++x) {
            const bool is_odd = x % 2 == 1;
            T sum{};
            for (int64_t i = 0; i < taps_h; ++i) {
              for (int64_t j = 0; j < (is_odd ? odd_taps : even_taps); ++j) {
                const T w = weights[i * (even_taps + odd_taps) + (is_odd ? even_taps : 0) + j];
                sum = multiply_add(
                    w, source[before + (is_odd ? odd : 0) + r * position_row + i * tap_row + j * tap_col + x / 2], sum);
              }
            }
            dst.expected[size_t(r * dst_row + x)] = narrowed<S>(add(sum, T{}));
          }
        }
        dst.compare();
      }
    }
  }
}

}  // namespace parts
