// What an implicit GEMM kernel is told: PODs passed by value, and the rules that fix the order of summation.
//
// A kernel computes, for each group,
//     C[m, x] = sum over k of A[m, k] * B[k, x]
// where one operand is dense and the other im2col, neither ever built in memory:
//   convolution (forward, or a phase of grad_input)  m result channel, x result pixel, k (channel, tap); A the weight
//   grad_weight                                       m output channel, x (input channel, tap), k output pixel
// All strides and offsets are in bytes.
#pragma once

#include <cstdint>

#include "../conv2d_problem.h"

namespace conv2d_ext::cuda {

// One axis of a phase of grad_input (conv2d_problem.h); forward has one phase.
struct AxisPhase {
  int64_t positions;
  int64_t result_offset;  // of position 0
  int64_t weight_offset;  // of tap 0
  int32_t taps;
  int32_t origin;  // source coordinate of position 0 at tap 0
};

// Phases of an axis that one launch can take: what fits in 4 KiB of kernel parameters.
constexpr int kMaxPhases = 16;

// How K is cut (docs/design.md, "One order of summation"), counted in tiles of k. The sum over K is cut into segments
// of near-equal length, a segment into chains: each chain is summed from zero.
struct Segments {
  int32_t count, tiles;  // tiles of all but the last
};
CONV2D_HOST_DEVICE inline Segments cut_into_segments(int32_t k_tiles, int32_t most_tiles) {
  const int32_t count = k_tiles <= most_tiles ? 1 : (k_tiles + most_tiles - 1) / most_tiles;
  return {count, (k_tiles + count - 1) / count};
}

// What the three kinds of kernels share.
struct TileParams {
  int64_t result;            // address
  int64_t partials;          // address, or 0: a CTA sums all segments of its tile; otherwise one, and stores it here
  int64_t partial_row;       // bytes from a row of partial sums to the next
  int64_t packed_row;        // bytes of a row of k of the packed weight; 0: the weight is read where it lies
  int64_t m_tiles, x_tiles;  // x_tiles: of the largest phase
  int64_t segments;          // the most of a phase, where they have CTAs of their own; otherwise 1
  int32_t segment_tiles;     // the most tiles of k in a segment
  int32_t chain_tiles;
  int32_t tile_k, sum_bytes;
  int32_t dense_rows;     // of the dense operand that exist: m, or more where it is packed
  int32_t stages;         // of the ring, where both operands of 16 bits are copied 16 bytes at a time
  int32_t result_vector;  // 8 or 4 neighbouring results of 16 bits are stored at once; 0: each by itself
  bool a_over_k, b_over_k, result_over_m;  // which index neighbouring lanes take
  bool keeps_l1;                           // copies of both operands along k pass through the L1 cache, else past it
  bool conjugate_a, conjugate_b;
};

struct ConvParams {
  TileParams tile;
  int64_t weight, source;  // addresses
  const char* bias;        // or null
  int64_t bias_stride;
  int64_t weight_group, weight_m, weight_c, weight_h, weight_w;
  int64_t source_group, source_n, source_c, source_h, source_w;
  int64_t result_group, result_n, result_m, result_h, result_w;
  int64_t batch;
  int32_t m, channels;  // of a group
  int32_t source_rows, source_cols;
  int32_t step_h, step_w, tap_h, tap_w;  // of the gather axes
  int32_t groups, row_phases, col_phases;
  AxisPhase rows[kMaxPhases], cols[kMaxPhases];
};

struct WeightParams {
  TileParams tile;
  int64_t grad_output, source;  // addresses
  int64_t grad_group, grad_n, grad_m, grad_h, grad_w;
  int64_t source_group, source_n, source_c, source_h, source_w;
  int64_t result_group, result_m, result_c, result_h, result_w;
  int64_t batch, out_w, out_pixels;  // out_pixels: of an image
  int32_t m, channels;               // of a group
  int32_t source_rows, source_cols;
  int32_t step_h, step_w, origin_h, origin_w, tap_h, tap_w;
  int32_t taps_h, taps_w;
  int32_t groups;
  bool channels_fastest;  // x is (tap, channel) instead of (channel, tap): changes which tile has an element, not its
                          // sum
};

// No tile is longer. The kernels round K up to whole tiles in 32 bits: the planner leaves room for that.
constexpr int64_t kMostTileK = 64;

// Of a CTA of reduce_partials, one result each. Few, so that a small gradient's results lie on many SMs.
constexpr int kReduceThreads = 128;

// ---- the order of k in a convolution: (block of channels, tap, channel of the block), counted in groups of 8 channels
// that share a tap. The last group of a block may be short; its other products are of zeros. Problems with fewer than
// 8 channels count (tap, channel) one by one.

constexpr int kChannelGroup = 8;

CONV2D_HOST_DEVICE inline bool counts_channel_groups(int64_t channels) { return channels >= kChannelGroup; }

// k as the kernel counts it, short groups filled up.
CONV2D_HOST_DEVICE inline int64_t conv_k(int64_t channels, int64_t taps) {
  return counts_channel_groups(channels) ? (channels + kChannelGroup - 1) / kChannelGroup * kChannelGroup * taps
                                         : channels * taps;
}

}  // namespace conv2d_ext::cuda
