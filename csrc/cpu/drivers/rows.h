// The gradients of convolutions with one result pixel, and products of matrices with few rows: rows times factors
// (RowProducts, plan/tile_one_pixel.h). At small batches they are bound by reading or writing the weight once, so
// nothing of it is packed.
//
//   grad_input   result[n, k] = sum over m of grad_output[n, m] * weight[m, k]      k = (c, i, j)
//   grad_weight  result[m, k] = sum over n of grad_output[n, m] * input[n, k]
//   matmul       result[r, n] = bias[n] + sum over k of mat1[r, k] * mat2[k, n]
//
// A patch that doesn't lie in the image as a row of the weight does, or not all of it, is gathered before, or scattered
// after: at small batches that takes less than reading the weight's lines anew for every tap.
//
// The second factor's elements lie side by side along the results' lanes (kernels/rows.h) or along k
// (kernels/columns.h): the two sum a chunk of K differently, and share the rest.
//
// They keep the order of the GEMM drivers, which take what RowProducts can't express: complex and integer types, and
// strides by which neither lies as one run.
#pragma once

#include "../kernels/columns.h"
#include "../kernels/rows.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T, Along kAlong>
struct RowCall {
  static constexpr int L = Vec<T>::kLanes;
  static constexpr int64_t kPerStep = kTakesPairs<T> ? 2 : 1;
  const RowProducts& products;
  const int num_threads;
  const RowTiling tiling = tile_rows(products, num_threads);
  const RowScratch layout = lay_out_scratch(products, tiling, sizeof(T));
  // Along k: whether factors are read where they lie, and whether what they multiply comes from memory.
  const bool reads_factors = (kTakesPairs<T> || std::is_same_v<S, T>) && products.factor_k == kPerStep;
  const bool far = saturating_mul(products.lanes, products.depth, kPerStep, int64_t(sizeof(S))) >
                   limits::one_pixel::kFarColumnsBytes;

  int64_t items() const { return tiling.items(products.groups); }

  // As many results as a micro-kernel takes (those beyond the valid ones repeat the last), and their sums.
  struct Rows {
    int64_t results, lanes;
    const S* factor;  // of the first result
    ChunkSums<T> sums;
    T* factors;
    RowOperands<S, T> operands;  // of a chain that begins with the first k
  };

  void work(int64_t item) const {
    const int64_t lane0 = item % tiling.blocks_l * tiling.lanes;
    const int64_t result0 = item / tiling.blocks_l % tiling.blocks_r * tiling.results;
    const int64_t group = item / tiling.blocks_l / tiling.blocks_r;
    const int64_t last = min64(result0 + tiling.results, products.results);
    char* const scratch = static_cast<char*>(thread_scratch(layout.bytes));
    Rows rows{};
    rows.lanes = min64(tiling.lanes, products.lanes - lane0);
    rows.results = row_results(last - result0, kAlong);
    rows.sums = chunk_sums<T>(scratch, layout.sums);
    rows.factors = part<T>(scratch, layout.factors);
    RowOperands<S, T>& operands = rows.operands;
    operands.factors = rows.factors;
    operands.sums = rows.sums.sums;
    operands.sum_pitch = layout.pitch;
    operands.bias = load_bias<S>(products, lane0, rows.lanes, layout.pitch, part<T>(scratch, layout.bias));
    operands.rows = static_cast<const S*>(products.rows) + group * products.rows_g + lane0 * products.lane_step;
    operands.row_pitch = products.rows_k;
    operands.result_pitch = products.result_r;
    S* const placed = part<S>(scratch, layout.placed);
    if (products.placed == Placed::kRows) {
      operands.rows = placed;
      operands.row_pitch = layout.pitch;
      const S* const image = static_cast<const S*>(products.rows) + group * products.rows_g;
      for (int64_t k = 0; k < products.depth; ++k) {
        gather(image + k * products.rows_k, {lane0, lane0 + rows.lanes}, placed + k * layout.pitch);
      }
    }
    for (int64_t r = result0; r < last; r += rows.results) {
      operands.valid_results = min64(rows.results, last - r);
      rows.factor = static_cast<const S*>(products.factor) + group * products.factor_g + r * products.factor_r;
      S* const result = static_cast<S*>(products.result) + group * products.result_g + r * products.result_r;
      operands.result = result + lane0;
      if (products.placed == Placed::kResults) {
        operands.result = placed;
        operands.result_pitch = layout.pitch;
      }
      sum(rows);
      if (products.placed != Placed::kResults) continue;
      for (int64_t i = 0; i < operands.valid_results; ++i) {
        scatter(placed + i * layout.pitch, {lane0, lane0 + rows.lanes}, result + i * products.result_r);
      }
    }
  }

  // Of a patch's lanes those whose taps lie in the image: calls visit(lane - lanes.begin, offset in the image).
  template <class Visit>
  CONV2D_INLINE void for_each_place(const Interval& lanes, const Visit& visit) const {
    const Conv2dProblem& p = *products.patch.problem;
    const int64_t *const image = products.patch.image, *const weight = products.patch.weight;
    const GatherAxis h = p.rows(), w = p.cols();
    const Interval rows = taps_inside(h, p.kernel_h, p.in_h), cols = taps_inside(w, p.kernel_w, p.in_w);
    const int64_t all_channels = p.in_channels_per_group();
    const int64_t lane_c = all_channels == 1 ? p.taps() : weight[1];  // of one channel a step that is not taken
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      for (int64_t j = cols.begin; j < cols.end; ++j) {
        const int64_t lane = i * weight[2] + j * weight[3] - lanes.begin;
        const int64_t place = h.source(0, i) * image[2] + w.source(0, j) * image[3];
        const Interval channels = indices_inside(lane, lane_c, all_channels, lanes.count());
        for (int64_t c = channels.begin; c < channels.end; ++c) visit(lane + c * lane_c, place + c * image[1]);
      }
    }
  }
  void gather(const S* image, const Interval& lanes, S* to) const {
    fill_zero(to, lanes.count());
    for_each_place(lanes, [&](int64_t lane, int64_t place) { to[lane] = image[place]; });
  }
  void scatter(const S* from, const Interval& lanes, S* image) const {
    for_each_place(lanes, [&](int64_t lane, int64_t place) { image[place] = from[lane]; });
  }

  void sum(const Rows& rows) const {
    const ChunkSums<T>& c = rows.sums;
    const int64_t sums = rows.results * layout.pitch, chunk = products.chunk();
    for (int64_t k = 0; k < products.depth; k += chunk) {
      const int64_t end = min64(k + chunk, products.depth);
      if constexpr (kAlong == Along::kK) {
        sum_along_k(rows, k, end);
      } else {
        sum_along_lanes(rows, k, end);
      }
      if (c.several) add_chunk(c.total, c.lost, c.sums, sums, k == 0);
    }
    if (c.several) {
      finish_chunks(c.sums, c.total, c.lost, sums);
    } else if (kAlong == Along::kLanes) {
      return;  // the last chain has stored them
    }
    const RowOperands<S, T>& operands = rows.operands;
    store_pixels(TileSums<T>{c.sums, layout.pitch, operands.valid_results, rows.lanes, operands.bias},
                 TileTarget<S>{operands.result, operands.result_pitch, 1});
  }

  const S* factor_of(const Rows& rows, int64_t r, int64_t k) const {
    return rows.factor + min64(r, rows.operands.valid_results - 1) * products.factor_r + k * products.factor_k;
  }

  // Chain by chain. What is summed at once is a row: factors lie in scratch as [k][result].
  void sum_along_lanes(const Rows& rows, int64_t k, int64_t end) const {
    const int64_t results = rows.results, first = k;
    RowOperands<S, T> operands = rows.operands;
    while (k < end) {
      operands.first = k == first;
      operands.depth = min64(products.chain, min64(round_up(k + 1, products.segment), end) - k);
      for (int64_t r = 0; r < results; ++r) {
        const S* const from = factor_of(rows, r, k);
        for (int64_t i = 0; i < operands.depth; ++i) {
          rows.factors[i * results + r] = widen_scalar(from[i * products.factor_k]);
        }
      }
      operands.rows = rows.operands.rows + k * operands.row_pitch;
      k += operands.depth;
      operands.last = k == products.depth && !products.has_chunks();
      row_chain(results, operands, rows.lanes);
    }
  }

  // All of the chunk at once, a vector of lanes after the other.
  void sum_along_k(const Rows& rows, int64_t k, int64_t end) const {
    const Operand<T>* factors[kMostColumnResults];
    ColumnOperands<S, T> operands{};
    operands.depth = end - k;
    operands.segment = products.segment;
    operands.chain = products.chain;
    operands.ahead = far ? ColumnsAhead::kOfEachLane : ColumnsAhead::kNothing;
    operands.factors = factors;
    operands.lanes = rows.operands.rows + k * kPerStep;
    operands.lane_step = products.lane_step;
    operands.sums = rows.sums.sums;
    operands.sum_pitch = layout.pitch;
    for (int64_t r = 0; r < rows.results; ++r) {
      const S* const from = factor_of(rows, r, k);
      Operand<T>* const copy = reinterpret_cast<Operand<T>*>(rows.factors) + r * layout.factor_pitch;
      if (!reads_factors) copy_factors(from, operands.depth, copy);
      factors[r] = reads_factors ? reinterpret_cast<const Operand<T>*>(from) : copy;
    }
    column_panels(rows.results, operands, rows.lanes);
  }

  void copy_factors(const S* from, int64_t depth, Operand<T>* to) const {
    for (int64_t k = 0; k < depth; ++k) {
      const S* const at = from + k * products.factor_k;
      if constexpr (kTakesPairs<T>) {
        to[k] = {uint32_t(at[0].bits) | uint32_t(at[products.factor_k / 2].bits) << 16};
      } else {
        to[k] = widen_scalar(*at);
      }
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
