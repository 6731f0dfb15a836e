// The gradients of convolutions with one result pixel: rows of a matrix times factors, at small batches bound by
// reading or writing the weight once. So nothing of it is packed; vectors lie along its rows.
//
//   grad_input   result[n, k] = sum over m of grad_output[n, m] * weight[m, k]      k = (c, i, j)
//   grad_weight  result[m, k] = sum over n of grad_output[n, m] * input[n, k]
//
// They keep the order of the GEMM drivers, which take what RowProducts (one_pixel.h) can't express: complex and integer
// types, and strides by which k doesn't lie as one run.
#pragma once

namespace conv2d_ext::cpu::CONV2D_ISA {

// row_ukernel_<dtype>_<MR>x<NR>__<isa>
//
//   sum[r][0:NR]  =  sum over k of factors[k][r] * rows[k][0:NR]
//
// for 0 <= r < MR: one chain of `depth` fused multiply-adds from zero. It is added to sums[r] unless it is the first of
// its chunk, and goes into sums[r] or, if it is the last of the only chunk, is rounded and stored: sums of one product
// are as long as writing them takes. Of the MR results valid_results exist. With kPartial NR is less than a vector:
// `lanes` elements.
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
};

template <class S, class T, int MR, int NV, bool kPartial>
void row_ukernel(const RowOperands<S, T>& operands, int lanes) {
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
      // As with every other result a bias, here none, is added last.
      sum = V::add(sum, V::zero());
      if constexpr (kPartial) {
        store_as_partial(result, sum, lanes);
      } else {
        store_as(result + v * L, sum);
      }
    }
  }
}

// A chain of any number of lanes: NV vectors at a time, then half as many, and the lanes left over.
template <class S, class T, int MR, int NV>
CONV2D_INLINE void row_panels(RowOperands<S, T> operands, int64_t lanes) {
  constexpr int L = Vec<T>::kLanes;
  for (; lanes >= NV * L; lanes -= NV * L) {
    row_ukernel<S, T, MR, NV, false>(operands, L);
    operands.rows += NV * L;
    operands.sums += NV * L;
    operands.result += NV * L;
  }
  if constexpr (NV > 1) {
    row_panels<S, T, MR, NV / 2>(operands, lanes);
  } else if (lanes > 0) {
    row_ukernel<S, T, MR, 1, true>(operands, int(lanes));
  }
}
template <class S, class T, int MR>
void row_chain(const RowOperands<S, T>& operands, int64_t lanes) {
  row_panels<S, T, MR, int(row_vectors(Vec<T>::kLanes * int64_t(sizeof(T)), MR))>(operands, lanes);
}

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
    T* const factors = static_cast<T*>(thread_scratch(row_scratch_bytes(products, tiling, results, sizeof(T))));
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
      store_row(operands.sums + r * sum_pitch, Vec<T>::zero(), lanes, operands.result + r * operands.result_pitch);
    }
  }
};

template <class S>
void run_rows(const RowProducts& products, const Executor& executor) {
  RowCall<S> call(products, executor.num_threads);
  run_items(executor, call.tiling.items(products.groups), &call, &RowCall<S>::run);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
