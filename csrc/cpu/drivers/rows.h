// The gradients of convolutions with one result pixel, and products of matrices with few rows: rows times factors. At
// small batches they are bound by reading or writing the weight once, so nothing of it is packed; vectors lie along its
// rows.
//
//   grad_input   result[n, k] = sum over m of grad_output[n, m] * weight[m, k]      k = (c, i, j)
//   grad_weight  result[m, k] = sum over n of grad_output[n, m] * input[n, k]
//   matmul       result[r, n] = bias[n] + sum over k of mat1[r, k] * mat2[k, n]
//
// They keep the order of the GEMM drivers, which take what RowProducts (plan/tile_one_pixel.h) can't express: complex
// and integer types, and strides by which k doesn't lie as one run.
#pragma once

#include "../kernels/rows.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S>
struct RowCall {
  using T = ComputeType<S>;
  static constexpr int L = Vec<T>::kLanes;
  const RowProducts& products;
  const RowTiling tiling;
  const int64_t sum_pitch;

  RowCall(const RowProducts& p, int num_threads)
      : products(p), tiling(tile_rows(p, num_threads)), sum_pitch(round_up(tiling.lanes, 16)) {}

  using Chain = void (*)(const RowOperands<S, T>&, int64_t lanes);
  // For what row_results() may return.
  static Chain chain_of(int64_t results) {
    switch (results) {
      case 1:
        return row_chain<S, T, 1>;
      case 2:
        return row_chain<S, T, 2>;
      case 3:
        return row_chain<S, T, 3>;
      case 4:
        return row_chain<S, T, 4>;
      default:
        return row_chain<S, T, 6>;
    }
  }

  static void run(void* context, int64_t item) { static_cast<const RowCall*>(context)->work(item); }

  void work(int64_t item) const {
    const int64_t lane0 = item % tiling.blocks_l * tiling.lanes;
    const int64_t result0 = item / tiling.blocks_l % tiling.blocks_r * tiling.results;
    const int64_t group = item / tiling.blocks_l / tiling.blocks_r;
    const int64_t lanes = min64(tiling.lanes, products.lanes - lane0);
    const int64_t last = min64(result0 + tiling.results, products.results);
    const int64_t step = row_results(last - result0);
    for (int64_t r = result0; r < last; r += step) sum(group, r, step, min64(step, last - r), lane0, lanes);
  }

  // As many results as the kernel takes, of which `valid` exist.
  void sum(int64_t group, int64_t result0, int64_t results, int64_t valid, int64_t lane0, int64_t lanes) const {
    const Chain chain = chain_of(results);
    T* factors = static_cast<T*>(thread_scratch(row_scratch_bytes(products, tiling, results, sizeof(T))));
    const T* const bias = load_bias<S>(products, lane0, lanes, sum_pitch, factors);
    if (bias != nullptr) factors += sum_pitch;
    const S* const factor =
        static_cast<const S*>(products.factor) + group * products.factor_g + result0 * products.factor_r;
    RowOperands<S, T> operands{};
    operands.factors = factors;
    operands.row_pitch = products.rows_k;
    operands.sums = factors + products.chain * results;
    operands.sum_pitch = sum_pitch;
    T* const totals = operands.sums + sum_pitch * results;
    T* const lost = totals + sum_pitch * results;
    operands.result =
        static_cast<S*>(products.result) + group * products.result_g + result0 * products.result_r + lane0;
    operands.result_pitch = products.result_r;
    operands.valid_results = valid;
    operands.first = true;
    operands.bias = bias;
    const int64_t chunk = products.segments_per_chunk * products.segment;
    const bool has_chunks = products.depth > chunk;
    for (int64_t k = 0; k < products.depth;) {
      const int64_t segment_end = min64(round_up(k + 1, products.segment), products.depth);
      operands.depth = min64(products.chain, segment_end - k);
      // A row of each result's; surplus ones stand for the last.
      for (int64_t r = 0; r < results; ++r) {
        const S* const from = factor + min64(r, valid - 1) * products.factor_r + k * products.factor_k;
        for (int64_t i = 0; i < operands.depth; ++i) {
          factors[i * results + r] = widen_scalar(from[i * products.factor_k]);
        }
      }
      operands.rows = static_cast<const S*>(products.rows) + group * products.rows_g + k * products.rows_k + lane0;
      k += operands.depth;
      operands.last = k == products.depth && !has_chunks;
      chain(operands, lanes);
      operands.first = has_chunks && (k % chunk == 0 || k == products.depth);
      if (operands.first) add_chunk(totals, lost, operands.sums, results * sum_pitch, k <= chunk);
    }
    if (!has_chunks) return;
    finish_chunks(operands.sums, totals, lost, results * sum_pitch);
    for (int64_t r = 0; r < valid; ++r) {
      store_with_bias(operands.sums + r * sum_pitch, bias, lanes, operands.result + r * operands.result_pitch);
    }
  }
};

template <class S>
void run_rows(const RowProducts& products, const Executor& executor) {
  RowCall<S> call(products, executor.num_threads);
  run_items(executor, call.tiling.items(products.groups), &call, &RowCall<S>::run);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
