// Convolutions with few channels a group, where a GEMM's tiles would be mostly empty: depthwise ones above all.
//
// Forward and grad_input: a thread computes whole sums, of up to TILE_M result channels at kPixels pixels, with
// products and sums in registers and its operands straight from the caches: neighbouring pixels share what they read
// there. K runs over (channel, kh, kw) in chains of kDirectChain products, each from zero, added in order.
//
// grad_weight: sums over all pixels of the batch. Pixels are cut into segments (CTAs of their own), and in a segment
// dealt out to 32 residues: pixel p to residue p % 32. A residue's products are added in chains like those above, its
// chains in order, then the residues from 0 to 31, with what those additions round away. Which thread takes which
// residue follows from the memory format, the order does not.
#pragma once

#include "gemm_geometry.cuh"
#include "kernels.h"

namespace conv2d_ext::cuda {

// ---- forward and grad_input

struct DirectShape {
  int64_t pixel_blocks, group_blocks;
  bool lanes_are_groups;  // neighbouring lanes take neighbouring groups instead of neighbouring pixels
};

// The grid: pixel_blocks x group_blocks x phases. With lanes over pixels a group block is a group, and a pixel block
// 4 * 256 pixels; with lanes over groups 32 groups, and 4 pixels of each of 8 warps. TAPS_W: the taps of a row, whose
// loads are then made together; 0 where it takes any number.
template <class T, int TILE_M, int TAPS_W>
__global__ void __launch_bounds__(kDirectThreads, 1)
    direct_conv(const __grid_constant__ ConvParams p, const __grid_constant__ DirectShape shape) {
  using Sum = SumOf<T>;
  int64_t item = blockIdx.x;
  const int64_t pixel_block = item % shape.pixel_blocks;
  item /= shape.pixel_blocks;
  const int64_t group_block = item % shape.group_blocks;
  item /= shape.group_blocks;
  const AxisPhase& rows = p.rows[item / p.col_phases];
  const AxisPhase& cols = p.cols[item % p.col_phases];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t group = shape.lanes_are_groups ? group_block * direct_conv_groups(true) + lane : group_block;
  if (group >= p.groups) return;
  const int64_t pixels = p.batch * rows.positions * cols.positions;
  const int64_t first = shape.lanes_are_groups ? (pixel_block * (kDirectThreads / 32) + warp) * kDirectPixels
                                               : pixel_block * kDirectThreads * kDirectPixels + threadIdx.x;
  const int64_t stride = shape.lanes_are_groups ? 1 : kDirectThreads;

  int64_t source[kDirectPixels], result[kDirectPixels];
  int32_t h0[kDirectPixels], w0[kDirectPixels];
#pragma unroll
  for (int i = 0; i < kDirectPixels; ++i) {
    const int64_t x = first + i * stride;
    const int64_t image = rows.positions * cols.positions;
    const int64_t n = x / image;
    const int64_t oh = (x - n * image) / cols.positions;
    const int64_t ow = x - n * image - oh * cols.positions;
    const int64_t h = oh * p.step_h + rows.origin;
    const int64_t w = ow * p.step_w + cols.origin;
    const bool exists = x < pixels;
    h0[i] = exists ? static_cast<int32_t>(h) : kOutside;
    w0[i] = static_cast<int32_t>(w);
    source[i] = p.source + group * p.source_group + n * p.source_n + h * p.source_h + w * p.source_w;
    result[i] = exists ? p.tile.result + group * p.result_group + rows.result_offset + cols.result_offset +
                             n * p.result_n + oh * p.result_h + ow * p.result_w
                       : 0;
  }
  int64_t weight[TILE_M];
#pragma unroll
  for (int m = 0; m < TILE_M; ++m)
    weight[m] =
        p.weight + group * p.weight_group + min_of(m, p.m - 1) * p.weight_m + rows.weight_offset + cols.weight_offset;

  Sum sums[TILE_M][kDirectPixels], chain[TILE_M][kDirectPixels];
#pragma unroll
  for (int m = 0; m < TILE_M; ++m)
#pragma unroll
    for (int i = 0; i < kDirectPixels; ++i) sums[m][i] = chain[m][i] = zero_of<Sum>();
  int products = 0;
  const auto end_chain = [&] {
#pragma unroll
    for (int m = 0; m < TILE_M; ++m)
#pragma unroll
      for (int i = 0; i < kDirectPixels; ++i) {
        sums[m][i] = add(sums[m][i], chain[m][i]);
        chain[m][i] = zero_of<Sum>();
      }
    products = 0;
  };
  for (int32_t c = 0; c < p.channels; ++c) {
    for (int32_t kh = 0; kh < rows.taps; ++kh) {
      const int32_t h = kh * p.tap_h;
      constexpr int kTaps = TAPS_W == 0 ? 1 : TAPS_W;  // at once
#pragma unroll 1
      for (int32_t first_kw = 0; first_kw < cols.taps; first_kw += kTaps) {
        Sum values[kTaps][kDirectPixels], factors[kTaps][TILE_M];
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          const int32_t kw = first_kw + j;
          const int32_t w = kw * p.tap_w;
          const int64_t at = c * p.source_c + h * p.source_h + w * p.source_w;
#pragma unroll
          for (int i = 0; i < kDirectPixels; ++i) {
            const bool inside = static_cast<uint32_t>(h0[i] + h) < static_cast<uint32_t>(p.source_rows) &&
                                static_cast<uint32_t>(w0[i] + w) < static_cast<uint32_t>(p.source_cols);
            values[j][i] = inside ? load_operand(reinterpret_cast<const T*>(source[i] + at)) : zero_of<Sum>();
          }
          const int64_t tap = c * p.weight_c + kh * p.weight_h + kw * p.weight_w;
#pragma unroll
          for (int m = 0; m < TILE_M; ++m) {
            factors[j][m] = load_operand(reinterpret_cast<const T*>(weight[m] + tap));
            if (kIsComplex<Sum> && p.tile.conjugate_a) factors[j][m] = conjugate(factors[j][m]);
          }
        }
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
#pragma unroll
          for (int m = 0; m < TILE_M; ++m)
#pragma unroll
            for (int i = 0; i < kDirectPixels; ++i)
              chain[m][i] = multiply_add(factors[j][m], values[j][i], chain[m][i]);
          if (++products == kDirectChain) end_chain();
        }
      }
    }
  }
  if (products != 0) end_chain();

#pragma unroll
  for (int m = 0; m < TILE_M; ++m) {
    if (m >= p.m) break;
    Sum bias = zero_of<Sum>();
    if (p.bias != nullptr) bias = load_operand(reinterpret_cast<const T*>(p.bias + (group * p.m + m) * p.bias_stride));
#pragma unroll
    for (int i = 0; i < kDirectPixels; ++i) {
      if (result[i] == 0) continue;
      // Added where there is no bias, too, as in gemm_kernel.cuh.
      store_result(reinterpret_cast<T*>(result[i] + m * p.result_m), add(sums[m][i], bias));
    }
  }
}

// ---- grad_weight

template <class Sum, int ROWS>
constexpr int direct_weight_shared_bytes() {
  return static_cast<int>(sizeof(XEntry)) * kDirectColumns +
         ROWS * kDirectColumns * kSlots * (kResidues + 1) * static_cast<int>(sizeof(Sum));
}

struct DirectWeightShape {
  int64_t segment_pixels;                           // a multiple of kResidues
  int64_t column_blocks, row_blocks, group_blocks;  // and segments: the grid
  bool lanes_are_groups;
};

// A sum over pixels of one residue, walked in steps of kResidues without divisions.
struct PixelWalk {
  int64_t n, h, w, step_n, step_h, step_w, height, width;
  __device__ PixelWalk(int64_t pixel, int64_t height, int64_t width) : height(height), width(width) {
    const int64_t image = height * width;
    n = pixel / image;
    h = (pixel - n * image) / width;
    w = pixel - n * image - h * width;
    step_n = kResidues / image;
    step_h = (kResidues - step_n * image) / width;
    step_w = kResidues - step_n * image - step_h * width;
  }
  __device__ __forceinline__ void advance() {
    w += step_w;
    h += step_h;
    n += step_n;
    if (w >= width) {
      w -= width;
      ++h;
    }
    if (h >= height) {
      h -= height;
      ++n;
    }
  }
};

template <class T, int ROWS>
__global__ void __launch_bounds__(kDirectThreads)
    direct_weight(const __grid_constant__ WeightParams p, const __grid_constant__ DirectWeightShape shape) {
  using Sum = SumOf<T>;
  int64_t item = blockIdx.x;
  const int64_t column0 = item % shape.column_blocks * kDirectColumns;
  item /= shape.column_blocks;
  const int64_t row0 = item % shape.row_blocks * ROWS;
  item /= shape.row_blocks;
  const int64_t group_block = item % shape.group_blocks;
  const int64_t segment = item / shape.group_blocks;

  const int thread = threadIdx.x;
  // With lanes over groups 8 of them share a sector, and 4 residues a warp.
  const int slot = shape.lanes_are_groups ? thread % kSlots : thread / kResidues;
  const int residue = shape.lanes_are_groups ? thread / kSlots : thread % kResidues;
  const int64_t group = group_block * kSlots + slot;
  const int64_t columns = int64_t{p.channels} * p.taps_h * p.taps_w;
  const int64_t taps = int64_t{p.taps_h} * p.taps_w;

  XEntry* const table = reinterpret_cast<XEntry*>(dynamic_shared());
  Sum* const values = reinterpret_cast<Sum*>(table + kDirectColumns);
  if (thread < kDirectColumns) {
    const int64_t column = column0 + thread;
    const int64_t c = column / taps;
    const int64_t kh = column % taps / p.taps_w;
    const int64_t kw = column % taps % p.taps_w;
    XEntry entry{0, kOutside, 0};
    if (column < columns)
      entry = {c * p.source_c + kh * p.tap_h * p.source_h + kw * p.tap_w * p.source_w,
               static_cast<int32_t>(kh * p.tap_h), static_cast<int32_t>(kw * p.tap_w)};
    store_shared(table + thread, entry);
  }
  sync_threads();

  Sum sums[ROWS][kDirectColumns], chain[ROWS][kDirectColumns];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int j = 0; j < kDirectColumns; ++j) sums[r][j] = chain[r][j] = zero_of<Sum>();
  const auto end_chain = [&] {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < kDirectColumns; ++j) {
        sums[r][j] = add(sums[r][j], chain[r][j]);
        chain[r][j] = zero_of<Sum>();
      }
  };
  if (group < p.groups) {
    const int64_t begin = segment * shape.segment_pixels;
    const int64_t end = min_of(begin + shape.segment_pixels, p.batch * p.out_pixels);
    PixelWalk pixel(begin + residue, p.out_pixels / p.out_w, p.out_w);
    int products = 0;
    for (int64_t at = begin + residue; at < end; at += kResidues, pixel.advance()) {
      const int64_t grad =
          p.grad_output + group * p.grad_group + pixel.n * p.grad_n + pixel.h * p.grad_h + pixel.w * p.grad_w;
      const int64_t h = pixel.h * p.step_h + p.origin_h;
      const int64_t w = pixel.w * p.step_w + p.origin_w;
      const int64_t source = p.source + group * p.source_group + pixel.n * p.source_n + h * p.source_h + w * p.source_w;
      Sum factors[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        factors[r] = load_operand(reinterpret_cast<const T*>(grad + min_of<int64_t>(row0 + r, p.m - 1) * p.grad_m));
#pragma unroll
      for (int j = 0; j < kDirectColumns; ++j) {
        const XEntry entry = load_shared(table + j);
        const bool inside =
            static_cast<uint32_t>(static_cast<int32_t>(h) + entry.h) < static_cast<uint32_t>(p.source_rows) &&
            static_cast<uint32_t>(static_cast<int32_t>(w) + entry.w) < static_cast<uint32_t>(p.source_cols);
        Sum value = inside ? load_operand(reinterpret_cast<const T*>(source + entry.address)) : zero_of<Sum>();
        if (kIsComplex<Sum> && p.tile.conjugate_b) value = conjugate(value);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) chain[r][j] = multiply_add(factors[r], value, chain[r][j]);
      }
      if (++products == kDirectChain) {
        end_chain();
        products = 0;
      }
    }
    end_chain();
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int j = 0; j < kDirectColumns; ++j)
      store_shared(values + ((r * kDirectColumns + j) * kSlots + slot) * (kResidues + 1) + residue, sums[r][j]);
  sync_threads();

  for (int i = thread; i < ROWS * kDirectColumns * kSlots; i += kDirectThreads) {
    const int64_t g = group_block * kSlots + i % kSlots;
    const int64_t column = column0 + i / kSlots % kDirectColumns;
    const int64_t m = row0 + i / kSlots / kDirectColumns;
    if (g >= p.groups || column >= columns || m >= p.m) continue;
    CompensatedSum<Sum> all{load_shared(values + i * (kResidues + 1))};
    for (int r = 1; r < kResidues; ++r) all.add(load_shared(values + i * (kResidues + 1) + r));
    const Sum sum = all.total();
    if (p.tile.partials != 0) {
      const int64_t place = ((g * p.tile.segments + segment) * p.m + m) * p.tile.partial_row + column * sizeof(Sum);
      *reinterpret_cast<Sum*>(p.tile.partials + place) = sum;
    } else {
      const int64_t place = g * p.result_group + m * p.result_m + column / taps * p.result_c +
                            column % taps / p.taps_w * p.result_h + column % taps % p.taps_w * p.result_w;
      store_result(reinterpret_cast<T*>(p.tile.result + place), sum);
    }
  }
}

// ---- grad_bias: the same sums of grad_output alone

struct BiasParams {
  int64_t grad_output, result, partials;  // addresses; partials 0 where there is one segment
  int64_t grad_n, grad_c, grad_h, grad_w;
  int64_t batch, channels, out_h, out_w;
  int64_t segments, segment_pixels;
  bool lanes_are_channels;
};

template <class T>
__global__ void __launch_bounds__(kDirectThreads) sum_pixels(const __grid_constant__ BiasParams p) {
  using Sum = SumOf<T>;
  const int64_t channel_blocks = (p.channels + kSlots - 1) / kSlots;
  const int64_t channel_block = blockIdx.x % channel_blocks;
  const int64_t segment = blockIdx.x / channel_blocks;
  const int thread = threadIdx.x;
  const int slot = p.lanes_are_channels ? thread % kSlots : thread / kResidues;
  const int residue = p.lanes_are_channels ? thread / kSlots : thread % kResidues;
  const int64_t channel = channel_block * kSlots + slot;
  Sum sum = zero_of<Sum>(), chain = zero_of<Sum>();
  if (channel < p.channels) {
    const int64_t begin = segment * p.segment_pixels;
    const int64_t end = min_of(begin + p.segment_pixels, p.batch * p.out_h * p.out_w);
    PixelWalk pixel(begin + residue, p.out_h, p.out_w);
    int terms = 0;
    for (int64_t at = begin + residue; at < end; at += kResidues, pixel.advance()) {
      const int64_t address =
          p.grad_output + channel * p.grad_c + pixel.n * p.grad_n + pixel.h * p.grad_h + pixel.w * p.grad_w;
      chain = add(chain, load_operand(reinterpret_cast<const T*>(address)));
      if (++terms == kDirectChain / 4) {
        sum = add(sum, chain);
        chain = zero_of<Sum>();
        terms = 0;
      }
    }
    sum = add(sum, chain);
  }
  Sum* const values = reinterpret_cast<Sum*>(dynamic_shared());
  store_shared(values + slot * (kResidues + 1) + residue, sum);
  sync_threads();
  if (thread < kSlots && channel_block * kSlots + thread < p.channels) {
    CompensatedSum<Sum> all{load_shared(values + thread * (kResidues + 1))};
    for (int r = 1; r < kResidues; ++r) all.add(load_shared(values + thread * (kResidues + 1) + r));
    const Sum total = all.total();
    const int64_t c = channel_block * kSlots + thread;
    if (p.partials != 0) {
      reinterpret_cast<Sum*>(p.partials)[segment * p.channels + c] = total;
    } else {
      store_result(reinterpret_cast<T*>(p.result) + c, total);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kDirectThreads) add_pixel_sums(const __grid_constant__ BiasParams p) {
  using Sum = SumOf<T>;
  const int64_t channel = int64_t{blockIdx.x} * kDirectThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const Sum* const partials = reinterpret_cast<const Sum*>(p.partials);
  const Sum sum = add_in_order<CompensatedSum<Sum>>(partials + channel, p.channels, static_cast<int32_t>(p.segments));
  store_result(reinterpret_cast<T*>(p.result) + channel, sum);
}

}  // namespace conv2d_ext::cuda
