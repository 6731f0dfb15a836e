// Depthwise convolutions by small kernels, forward and grad_input: one channel a group on both sides.
//
// A result reads as many rows of its plane as the kernel has, and the one below it all of them but STEP. So a thread
// takes a column of results and walks along it: rows that are still needed stay in registers, with the whole kernel
// beside them, and a result costs STEP * TAPS_W loads for TAPS_H * TAPS_W products. The rows of the next result are
// loaded before this one's products are summed, which hides their latency. Neighbouring lanes take what lies side by
// side in memory: columns, or channels (channels_last), there two of 16 bits. Memory bounds it: each element is read
// and written once, the rest are hits of the L1 cache.
//
// A sum is one chain over (kh, kw), as in direct_kernel.cuh: the bits are the same.
#pragma once

#include "direct_kernel.cuh"
#include "kernels.h"

namespace conv2d_ext::cuda {

constexpr int kDepthwiseThreads = 128;

// Elements that a lane takes at once.
template <class T, int VECTOR>
struct alignas(sizeof(T) * VECTOR) Neighbours {
  T at[VECTOR];
};

template <class T, int VECTOR>
__device__ __forceinline__ Neighbours<SumOf<T>, VECTOR> load_neighbours(int64_t address) {
  Neighbours<SumOf<T>, VECTOR> values;
  if constexpr (VECTOR == 1) {
    values.at[0] = load_operand(reinterpret_cast<const T*>(address));
  } else {
    static_assert(VECTOR == 2 && sizeof(T) == 2);
    const uint32_t bits = load_global(reinterpret_cast<const uint32_t*>(address));
    values.at[0] = widen(T{static_cast<uint16_t>(bits)});
    values.at[1] = widen(T{static_cast<uint16_t>(bits >> 16)});
  }
  return values;
}

// A thread's column of results.
struct WalkedColumn {
  int64_t source;                              // address at the first result's first tap
  int64_t weight;                              // address of the first tap
  int64_t result;                              // address of the first result
  int64_t source_step, tap_step, result_step;  // bytes: to the next row, to the next tap of a row, to the next result
  int32_t h, h_step;                           // source row of the first tap, and to the next row
  int32_t w;                                   // source column of the first tap
  int32_t results;
};

template <class T, int VECTOR, int STEP, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void walk(const ConvParams& p, const DepthwiseShape& shape, WalkedColumn column,
                                     const Neighbours<SumOf<T>, VECTOR>& bias) {
  using Sum = SumOf<T>;
  using Values = Neighbours<Sum, VECTOR>;
  static_assert(STEP <= TAPS_H);
  Values weight[TAPS_H][TAPS_W];
#pragma unroll
  for (int kh = 0; kh < TAPS_H; ++kh)
#pragma unroll
    for (int kw = 0; kw < TAPS_W; ++kw)
#pragma unroll
      for (int v = 0; v < VECTOR; ++v)
        weight[kh][kw].at[v] = load_operand(
            reinterpret_cast<const T*>(column.weight + v * p.weight_group + kh * p.weight_h + kw * p.weight_w));

  bool in_cols[TAPS_W];
#pragma unroll
  for (int kw = 0; kw < TAPS_W; ++kw)
    in_cols[kw] = static_cast<uint32_t>(column.w + kw * p.tap_w) < static_cast<uint32_t>(p.source_cols);
  // Rows of this result and of the next one, by their number modulo kRows.
  constexpr int kRows = TAPS_H + STEP;
  Values rows[kRows][TAPS_W];
  const auto load_row = [&](Values(&row)[TAPS_W]) {
    const bool in_rows = static_cast<uint32_t>(column.h) < static_cast<uint32_t>(p.source_rows);
#pragma unroll
    for (int kw = 0; kw < TAPS_W; ++kw) {
      row[kw] = Values{};
      if (in_rows && in_cols[kw]) row[kw] = load_neighbours<T, VECTOR>(column.source + kw * column.tap_step);
    }
    column.source += column.source_step;
    column.h += column.h_step;
  };
#pragma unroll
  for (int row = 0; row < TAPS_H; ++row) load_row(rows[row]);

#pragma unroll 1
  for (int first = 0; first < column.results; first += kRows) {
    // The rows' numbers modulo kRows are known here: after kRows results they begin anew.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Otherwise the offsets of all rows in this loop are kept in registers.
      column.source = opaque(column.source);
#pragma unroll
      for (int row = 0; row < STEP; ++row) load_row(rows[(i * STEP + TAPS_H + row) % kRows]);
      if (first + i >= column.results) continue;
      Values sum{};
#pragma unroll
      for (int kh = 0; kh < TAPS_H; ++kh)
#pragma unroll
        for (int kw = 0; kw < TAPS_W; ++kw)
#pragma unroll
          for (int v = 0; v < VECTOR; ++v)
            sum.at[v] = multiply_add(weight[kh][kw].at[v], rows[(i * STEP + kh) % kRows][kw].at[v], sum.at[v]);
      // The chain is added to a sum of +0, the bias to that: as in direct_conv.
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sum.at[v] = add(add(zero_of<Sum>(), sum.at[v]), bias.at[v]);
      if constexpr (VECTOR == 1) {
        store_result(reinterpret_cast<T*>(column.result), sum.at[0]);
      } else if (shape.stores_vectors) {
        Neighbours<T, VECTOR> narrowed;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) narrow(sum.at[v], narrowed.at[v]);
        store_global(reinterpret_cast<Neighbours<T, VECTOR>*>(column.result), narrowed);
      } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
          store_result(reinterpret_cast<T*>(column.result + v * p.result_group), sum.at[v]);
      }
      column.result += column.result_step;
    }
  }
}

// The grid: blocks of a phase, times phases. A thread's number counts columns of an image's plane (NCHW), then bands of
// rows, planes and images, or groups first, where lanes are groups.
template <class T, int VECTOR, int KERNEL, int STEP>
__global__ void __launch_bounds__(kDepthwiseThreads, 1)
    depthwise_conv(const __grid_constant__ ConvParams p, const __grid_constant__ DepthwiseShape shape) {
  using Sum = SumOf<T>;
  const uint32_t block = blockIdx.x % shape.phase_blocks;
  const uint32_t phase = blockIdx.x / shape.phase_blocks;
  const AxisPhase& rows = p.rows[phase / p.col_phases];
  const AxisPhase& cols = p.cols[phase % p.col_phases];
  if (rows.positions == 0 || cols.positions == 0) return;
  const int64_t bands = (rows.positions + shape.band_rows - 1) / shape.band_rows;
  const int64_t lanes = p.groups / VECTOR;
  int64_t item = int64_t{block} * kDepthwiseThreads + threadIdx.x;
  int64_t group = 0;
  if (shape.lanes_are_groups) group = take_index(item, lanes) * VECTOR;
  const int64_t ow = take_index(item, cols.positions);
  const int64_t band = take_index(item, bands);
  if (!shape.lanes_are_groups) group = take_index(item, lanes) * VECTOR;
  const int64_t n = item;
  if (n >= p.batch) return;

  const bool down = p.tap_h > 0;  // else taps go up, and so does the walk
  const int64_t first = band * shape.band_rows;
  const int64_t results = min_of<int64_t>(rows.positions - first, shape.band_rows);
  const int64_t oh = down ? first : first + results - 1;
  const int64_t h = oh * p.step_h + rows.origin;
  const int64_t w = ow * p.step_w + cols.origin;
  WalkedColumn column;
  column.source = p.source + group * p.source_group + n * p.source_n + h * p.source_h + w * p.source_w;
  column.weight = p.weight + group * p.weight_group + rows.weight_offset + cols.weight_offset;
  column.result = p.tile.result + group * p.result_group + rows.result_offset + cols.result_offset + n * p.result_n +
                  oh * p.result_h + ow * p.result_w;
  column.source_step = down ? p.source_h : -p.source_h;
  column.tap_step = p.tap_w * p.source_w;
  column.result_step = down ? p.result_h : -p.result_h;
  column.h = static_cast<int32_t>(h);
  column.h_step = down ? 1 : -1;
  column.w = static_cast<int32_t>(w);
  column.results = static_cast<int32_t>(results);
  Neighbours<Sum, VECTOR> bias{};
  if (p.bias != nullptr) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
      bias.at[v] = load_operand(reinterpret_cast<const T*>(p.bias + (group + v) * p.bias_stride));
  }

  if (rows.taps == KERNEL) {
    walk<T, VECTOR, STEP, KERNEL, KERNEL>(p, shape, column, bias);
  } else if constexpr (STEP == 1) {
    // A phase of grad_input, or a whole kernel of these sizes.
    constexpr int kMore = more_taps(KERNEL), kFewer = fewer_taps(KERNEL);
    if (rows.taps == kMore) {
      if (cols.taps == kMore) {
        walk<T, VECTOR, STEP, kMore, kMore>(p, shape, column, bias);
      } else {
        walk<T, VECTOR, STEP, kMore, kFewer>(p, shape, column, bias);
      }
    } else if (cols.taps == kMore) {
      walk<T, VECTOR, STEP, kFewer, kMore>(p, shape, column, bias);
    } else {
      walk<T, VECTOR, STEP, kFewer, kFewer>(p, shape, column, bias);
    }
  }
}

}  // namespace conv2d_ext::cuda
