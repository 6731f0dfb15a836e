// Products of matrices with few rows, as linear of a few examples: bound by reading the other factor once. Its elements
// lie along k here; drivers/rows.h takes the one whose columns lie side by side.
//
//   result[r, n] = bias[n] + sum over k of factor[r, k] * weight[n, k]
//
// They keep the order of the GEMM driver, which takes more rows, complex and integer types, and other strides.
#pragma once

#include "../kernels/columns.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct ColumnCall {
  static constexpr int64_t kPerStep = kTakesPairs<T> ? 2 : 1;
  const RowProducts& products;
  const RowTiling tiling;
  const ColumnScratch layout;
  const bool reads_factors;  // where they lie
  const bool far;

  ColumnCall(const RowProducts& p, int num_threads)
      : products(p),
        tiling(tile_rows(p, num_threads)),
        layout(lay_out_column_scratch(p, tiling, sizeof(T))),
        reads_factors((kTakesPairs<T> || std::is_same_v<S, T>) && p.factor_k == kPerStep),
        far(saturating_mul(p.lanes, p.depth, kPerStep * int64_t(sizeof(S))) > limits::one_pixel::kFarColumnsBytes) {}

  int64_t items() const { return tiling.items(products.groups); }
  static void run(void* context, int64_t item) { static_cast<const ColumnCall*>(context)->work(item); }

  void work(int64_t item) const {
    const int64_t lane0 = item % tiling.blocks_l * tiling.lanes;
    const int64_t result0 = item / tiling.blocks_l % tiling.blocks_r * tiling.results;
    const int64_t lanes = min64(tiling.lanes, products.lanes - lane0);
    const int64_t last = min64(result0 + tiling.results, products.results);
    const int64_t step = column_results(last - result0);
    for (int64_t r = result0; r < last; r += step) sum(r, step, min64(step, last - r), lane0, lanes);
  }

  // As many results as the kernel takes, of which `valid` exist; surplus ones repeat the last.
  void sum(int64_t result0, int64_t results, int64_t valid, int64_t lane0, int64_t lanes) const {
    char* const scratch = static_cast<char*>(thread_scratch(layout.bytes));
    T* const sums = part<T>(scratch, layout.sums);
    T* const totals = part<T>(scratch, layout.totals);
    T* const lost = part<T>(scratch, layout.lost);
    const T* const bias = load_bias<S>(products, lane0, lanes, layout.pitch, part<T>(scratch, layout.bias));
    const int64_t chunk = products.segments_per_chunk * products.segment;
    const bool has_chunks = products.depth > chunk;
    const S* const factor = static_cast<const S*>(products.factor) + result0 * products.factor_r;
    const Operand<T>* factors[kMostColumnResults];
    ColumnOperands<S, T> operands{};
    operands.segment = products.segment;
    operands.chain = products.chain;
    operands.far = far;
    operands.factors = factors;
    operands.lane_step = products.lane_step;
    operands.sums = sums;
    operands.sum_pitch = layout.pitch;
    for (int64_t k = 0; k < products.depth; k += chunk) {
      operands.depth = min64(chunk, products.depth - k);
      for (int64_t r = 0; r < results; ++r) {
        const S* const from = factor + min64(r, valid - 1) * products.factor_r + k * products.factor_k;
        Operand<T>* const copy = part<Operand<T>>(scratch, layout.factors) + r * layout.factor_pitch;
        if (!reads_factors) copy_factors(from, operands.depth, copy);
        factors[r] = reads_factors ? reinterpret_cast<const Operand<T>*>(from) : copy;
      }
      operands.lanes = static_cast<const S*>(products.rows) + lane0 * products.lane_step + k * kPerStep;
      multiply(results, operands, lanes);
      if (has_chunks) add_chunk(totals, lost, sums, results * layout.pitch, k == 0);
    }
    if (has_chunks) finish_chunks(sums, totals, lost, results * layout.pitch);
    for (int64_t r = 0; r < valid; ++r) {
      S* const result = static_cast<S*>(products.result) + (result0 + r) * products.result_r + lane0;
      store_with_bias(sums + r * layout.pitch, bias, lanes, result);
    }
  }

  static void multiply(int64_t results, const ColumnOperands<S, T>& operands, int64_t lanes) {
    switch (results) {
      case 1:
        return column_panels<S, T, 1>(operands, lanes);
      case 2:
        return column_panels<S, T, 2>(operands, lanes);
      case 4:
        return column_panels<S, T, 4>(operands, lanes);
      default:
        return column_panels<S, T, 8>(operands, lanes);
    }
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
