// The forward of convolutions with one result pixel: the product of a matrix and a few vectors, at small batches bound
// by reading the weight once. So nothing of it is packed; vectors lie along its rows.
//
//   output[n, m] = bias[m] + sum over k of weight[m, k] * patch[n, k]      k = (c, i, j)
//
// It has an order of summation of its own (DotBlocking, one_pixel.h), and so runs here whatever the batch and the
// strides: float, double and the 16-bit types, which are widened as they are loaded. Complex and integer types go
// through the GEMM drivers.
#pragma once

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
    reg acc[MR][NC][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < NC; ++c) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][c][v] = V::zero();
      }
    }

    for (int64_t k = step * W, end = full_end * W; k < end; k += W) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        reg x[NC];
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) x[c] = V::load(source[c] + k + v * L);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          reg w = load_as(row[r] + k + v * L);
          if constexpr (NC > 1) load_once(w);
#pragma GCC unroll 8
          for (int c = 0; c < NC; ++c) acc[r][c][v] = V::fma(w, x[c], acc[r][c][v]);
        }
      }
    }
    if (full_end != chain_end) {
      const int64_t k = full_end * W;
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const int n = int(min64(max64(operands.tail - v * L, 0), L));
        reg x[NC];
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) x[c] = V::load_partial(source[c] + k + v * L, n);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          const reg w = load_as_partial(row[r] + k + v * L, n);
#pragma GCC unroll 8
          for (int c = 0; c < NC; ++c) acc[r][c][v] = V::fma(w, x[c], acc[r][c][v]);
        }
      }
    }
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

// The shapes that fill the registers, for one source vector and for several.
template <class T>
struct DotShape {
  static constexpr int kBytes = Vec<T>::kLanes * int(sizeof(T));
  static constexpr int kSingleRows = kBytes == 64 ? 8 : kBytes == 32 ? 6 : 3;
  static constexpr int kRows = kBytes == 64 ? 6 : 3;
  static constexpr int kColumns = kBytes == 64 ? 4 : kBytes == 32 ? 2 : 1;
};

template <class S>
constexpr DotKernelShape dot_shape() {
  using T = ComputeType<S>;
  using Shape = DotShape<T>;
  return {Vec<T>::kLanes,     kDotWidth<T>, int64_t(sizeof(T)), int64_t(sizeof(S)),
          Shape::kSingleRows, Shape::kRows, Shape::kColumns};
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
        source_is_dense(sizeof(S) == sizeof(T) && taps_are_inside(g) &&
                        dot_is_dense(g, g.source_c, g.source_row * g.axis_h.tap, g.source_col * g.axis_w.tap)) {}

  static void run(void* context, int64_t item) { static_cast<const DotCall*>(context)->work(item); }

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
    T* const bias = reinterpret_cast<T*>(memory + layout.bias);
    T* const lanes = reinterpret_cast<T*>(memory + layout.lanes);
    T* const patches = reinterpret_cast<T*>(memory + layout.patches);
    S* const packed_rows = reinterpret_cast<S*>(memory + layout.rows);
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
      int64_t source_pitch = tiling.depth;
      if (!source_is_dense) {
        for (int64_t n = 0; n < images; ++n) gather_source(source + n * gemm.source_n, k0, depth, patches + n * depth);
        source_pitch = depth;
      } else if constexpr (sizeof(S) == sizeof(T)) {
        first_source = source + gemm.axis_h.origin * gemm.source_row + gemm.axis_w.origin * gemm.source_col + k0;
        source_pitch = gemm.source_n;
      }
      operands.source_pitch = source_pitch;
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
          operands.source = first_source + n * source_pitch;
          operands.valid_sources = min64(Shape::kColumns, images - n);
          operands.lanes = lanes + n * lane_pitch + r * W;
          dot_ukernel<S, T, Shape::kRows, Shape::kColumns>(operands);
        }
      }
    }

    load_bias(group * gemm.m + m0, rows, bias);
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

  void load_bias(int64_t m, int64_t rows, T* bias) const {
    fill_zero(bias, tiling.padded_rows);
    if (gemm.bias == nullptr) return;
    copy_run(static_cast<const S*>(gemm.bias) + m * gemm.bias_stride, gemm.bias_stride, rows, bias, false);
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
      const S* const from = source + c * gemm.source_c + row * gemm.source_row;
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

template <class S>
void run_dot(const ConvGemm& gemm, const Executor& executor) {
  DotCall<S> call(gemm, executor.num_threads);
  run_items(executor, call.tiling.items(gemm.groups), &call, &DotCall<S>::run);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
