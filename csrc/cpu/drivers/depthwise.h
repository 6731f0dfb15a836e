// The driver of depthwise problems whose channels are innermost (channels_last): forward, and each phase of grad_input.
//
//   destination[n, p, q, g] = bias[g] + sum over (i, j) of weight[g, i, j] * source[n, row(p, i), col(q, j), g]
//
// Vectors run over groups, which lie side by side in both tensors. So pixels all of whose taps lie inside the source
// are computed in place: no patch, no C tile. The others read a zero-padded patch [row][col][group], and so do 16-bit
// types of kernels with many rows, each of which would widen the source anew, or without a micro-kernel
// (reads_depthwise_in_place). Where dilation spreads the taps of a row, its pixels go through the micro-kernels in runs
// (DepthwiseRow).
//
// The order of summation is the canonical one (plan/summation_order.h): one chain of fused multiply-adds, taps
// ascending. Problems of several chains, those without a micro-kernel, and those of too few pixels in a run go through
// gemm_ukernel and the C tile.
#pragma once

#include <optional>

#include "../kernels/depthwise.h"
#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/patch.h"
#include "../pack/store.h"
#include "../pack/weights.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// A rectangle of pixels as the micro-kernels read it, in the patch or in the source: element steps between positions
// and between taps, from the first position's first tap. A patch may have other runs than the source.
template <class P>
struct DepthwiseView {
  const P* data;
  int64_t position_row, position_col, tap_row, tap_col;
  DepthwiseRow row;
  int64_t cols;  // that the choice of a micro-kernel goes by
  bool streams;  // from memory
};

template <class S, class T>
struct DepthwiseCall {
  static constexpr int L = Vec<T>::kLanes;
  const ConvGemm& gemm;
  const int64_t chain;
  const bool in_place;  // pixels inside the source are
  const bool streams;   // caches don't hold the source
  const DepthwiseTiling tiling;
  const DepthwiseScratch layout;

  DepthwiseCall(const ConvGemm& g, int num_threads)
      : gemm(g),
        chain(block_k(g, vector_shape<T>().limits).chain),
        in_place(reads_depthwise_in_place(g, chain, sizeof(S) != sizeof(T))),
        streams(saturating_mul(g.batch, g.source_h, g.source_w, g.groups * int64_t(sizeof(S))) >=
                limits::depthwise::kStreamedBytes),
        tiling(tile_depthwise(g, vector_shape<T>(), sizeof(S), num_threads)),
        layout(lay_out_scratch(tiling, g, vector_shape<T>())) {}

  // A work item's block of groups, and where its operands lie in scratch.
  struct Block {
    int64_t group, groups;
    int64_t *position_offsets, *tap_offsets;
    T *start, *bias, *weights, *c_tile, *patch;
    int64_t vectors() const { return div_up(groups, L); }
    // The last vector ends with the groups: where they are no multiple of L it overlaps the one before it.
    int64_t lane(int64_t vector) const { return min64(vector * L, groups - L); }
  };
  struct Rectangle {
    int64_t row, rows, col, cols;
    int64_t area() const { return rows * cols; }
  };

  int64_t items() const { return tiling.items(); }

  void work(int64_t item) const {
    // Blocks of groups vary fastest: they lie side by side.
    const Block block = block_at(item % tiling.blocks);
    load_operands(block);
    const Tile tile = tiling.tile(item / tiling.blocks, gemm);
    const int64_t row = tile.row, row_end = row + tile.rows, col = tile.col, col_end = col + tile.cols;
    const Rectangle whole{row, tile.rows, col, tile.cols};
    const Interval rows = positions_inside(gemm.axis_h, gemm.taps_h, gemm.rows, gemm.source_h);
    const Interval cols = positions_inside(gemm.axis_w, gemm.taps_w, gemm.cols, gemm.source_w);
    const int64_t row_low = min64(max64(rows.begin, row), row_end), row_high = max64(min64(rows.end, row_end), row_low);
    const int64_t col_low = min64(max64(cols.begin, col), col_end), col_high = max64(min64(cols.end, col_end), col_low);
    const Rectangle inner{row_low, row_high - row_low, col_low, col_high - col_low};
    for (int64_t n = tile.image; n < tile.image + tile.images; ++n) {
      // Strips of the border cost a patch each; where they are most of the tile, one patch is cheaper.
      if (!in_place || 4 * inner.area() < 3 * whole.area()) {
        compute_packed(block, n, whole);
        continue;
      }
      compute_packed(block, n, {row, row_low - row, col, whole.cols});
      compute_packed(block, n, {row_low, inner.rows, col, col_low - col});
      compute_in_place(block, n, inner);
      compute_packed(block, n, {row_low, inner.rows, col_high, col_end - col_high});
      compute_packed(block, n, {row_high, row_end - row_high, col, whole.cols});
    }
  }

  Block block_at(int64_t number) const {
    char* const scratch = static_cast<char*>(thread_scratch(layout.bytes));
    Block block;
    block.group = number * tiling.block_vectors * L;
    block.groups = number + 1 == tiling.blocks ? gemm.groups - block.group : tiling.block_vectors * L;
    block.position_offsets = part<int64_t>(scratch, layout.position_offsets);
    block.tap_offsets = part<int64_t>(scratch, layout.tap_offsets);
    block.start = part<T>(scratch, layout.start);
    block.bias = part<T>(scratch, layout.bias);
    block.weights = part<T>(scratch, layout.weights);
    block.c_tile = part<T>(scratch, layout.c_tile);
    block.patch = part<T>(scratch, layout.patch);
    return block;
  }

  void load_operands(const Block& block) const {
    const bool bias_first = gemm.starts_from_bias();
    T* const bias = bias_first ? block.start : block.bias;
    fill_zero(bias_first ? block.bias : block.start, block.vectors() * L);
    for (int64_t v = 0; v < block.vectors(); ++v) {
      const int64_t group = block.group + block.lane(v);
      load_bias<S>(gemm, group, 0, L, bias + v * L);
      const WeightSegment<S> weight{
          static_cast<const S*>(gemm.weight) + group * gemm.weight_g, gemm.weight_g, L, 1, gemm.taps_h, gemm.taps_w};
      pack_weight(gemm, weight, Panel<T>{block.weights + v * gemm.taps() * L, L, L});
    }
  }

  const S* source_of_image(const Block& block, int64_t image) const {
    return static_cast<const S*>(gemm.source) + image * gemm.source_n + block.group;
  }

  void compute_packed(const Block& block, int64_t image, const Rectangle& r) const {
    if (r.area() == 0) return;
    const Patch patch =
        lay_out_patch(PatchOrder::kChannelInner, make_patch_axis(gemm.axis_h, r.row, r.rows, 0, gemm.taps_h),
                      make_patch_axis(gemm.axis_w, r.col, r.cols, 0, gemm.taps_w), 1, block.groups, L, sizeof(T));
    Source<S> source = source_of(gemm, source_of_image(block, image));
    source.channel = 1;  // the patch's channels are groups
    pack_patch(patch, source, false, block.patch);
    const PatchAxis &rows = patch.rows, &cols = patch.cols;
    compute(block, image, r,
            DepthwiseView<T>{
                block.patch + patch.tap_offset(0, 0, 0), saturating_mul(rows.position_pitch, patch.row_pitch),
                saturating_mul(cols.position_pitch, patch.col_pitch), saturating_mul(rows.tap_pitch, patch.row_pitch),
                saturating_mul(cols.tap_pitch, patch.col_pitch),
                depthwise_row(gemm.taps_w, cols.position_pitch, cols.tap_pitch), r.cols, false});
  }

  void compute_in_place(const Block& block, int64_t image, const Rectangle& r) const {
    if (r.area() == 0) return;
    compute(block, image, r,
            DepthwiseView<S>{
                source_of_image(block, image) + gemm.axis_h.source(r.row, 0) * gemm.source_row +
                    gemm.axis_w.source(r.col, 0) * gemm.source_col,
                saturating_mul(gemm.axis_h.step, gemm.source_row), saturating_mul(gemm.axis_w.step, gemm.source_col),
                saturating_mul(gemm.axis_h.tap, gemm.source_row), saturating_mul(gemm.axis_w.tap, gemm.source_col),
                depthwise_row(gemm), gemm.cols, streams});
  }

  template <class P>
  void compute(const Block& block, int64_t image, const Rectangle& r, const DepthwiseView<P>& view) const {
    S* const dst = static_cast<S*>(gemm.destination) + image * gemm.destination_n + r.row * gemm.destination_row +
                   r.col * gemm.destination_col + block.group;
    const int64_t runs = view.row.runs;
    if constexpr (std::is_same_v<P, T>) {
      if (gemm.taps() > chain || !has_depthwise_ukernel(gemm.taps_w, view.row, view.cols)) {
        return compute_by_table(block, r, view, dst);
      }
    }
    const DepthwiseUkernels<P, S>& ukernels = depthwise_ukernels<P, S>(gemm.taps_w, view.row.step);
    // Where taps run against the positions, so do a block's pixels, from its last one on.
    const bool backwards = gemm.taps_w > 1 && view.tap_col < 0;
    // Micro-kernels advance once more after the last row and column; a step that is never taken may lead anywhere.
    const int64_t position = r.cols <= runs ? 0 : runs * view.position_col;
    const int64_t tap_row_step = gemm.taps_h == 1 ? 0 : view.tap_row;
    const int64_t tap_col_step = gemm.taps_w == 1 ? position : view.tap_col;
    const int64_t dst_position = r.cols <= runs ? 0 : runs * gemm.destination_col;
    DepthwiseOperands<P, S> operands{};
    operands.position = position;
    operands.tap_row = tap_row_step;
    operands.tap_col = tap_col_step;
    operands.taps_h = gemm.taps_h;
    operands.weights = block.weights;
    operands.start = block.start;
    operands.bias = block.bias;
    operands.vectors = block.vectors();
    operands.last_lane = block.lane(block.vectors() - 1);
    operands.dst_position = dst_position;
    operands.dst_step = backwards ? -dst_position : dst_position;
    // Rows and columns that the pixels above and before don't read.
    if (view.streams) {
      operands.rows_ahead = min64(depthwise_row(gemm.taps_h, gemm.axis_h.step, gemm.axis_h.tap).step, gemm.taps_h);
    }
    const int64_t first_row = gemm.axis_h.tap < 0 ? 0 : gemm.taps_h - operands.rows_ahead;
    const int64_t first_col = backwards ? 0 : gemm.taps_w - view.row.step;
    const int64_t ahead = first_row * tap_row_step + first_col * tap_col_step;
    for (int64_t row = 0; row < r.rows; ++row) {
      for (int64_t run = 0; run < min64(runs, r.cols); ++run) {
        const int64_t count = div_up(r.cols - run, runs);
        const auto pixels = [&](DepthwiseUkernel<P, S> ukernel, int64_t width, int64_t at, int64_t blocks) {
          const int64_t col = run + (backwards ? at + width - 1 : at) * runs;
          operands.source = view.data + row * view.position_row + col * view.position_col;
          operands.dst = dst + row * gemm.destination_row + col * gemm.destination_col;
          operands.blocks = blocks;
          operands.ahead = ahead + width * position;
          ukernel(operands);
        };
        compute_run(ukernels, count, pixels);
      }
    }
  }

  // What seven or four don't divide overlaps the pixels before: computed twice, to the same bits.
  template <class P, class Pixels>
  static void compute_run(const DepthwiseUkernels<P, S>& ukernels, int64_t count, const Pixels& pixels) {
    constexpr int64_t kSeven = kDepthwisePixels;
    const int64_t sevens = count / kSeven, left = count % kSeven;
    if (sevens > 0) pixels(ukernels.by_seven, kSeven, 0, sevens);
    if (left > 4 && sevens > 0) {
      pixels(ukernels.by_seven, kSeven, count - kSeven, 1);
    } else if (left > 1 && count >= 4) {
      if (left > 4) pixels(ukernels.by_four, 4, 0, 1);
      pixels(ukernels.by_four, 4, count - 4, 1);
    } else if (left > 0) {
      pixels(ukernels.one, 1, count - left, left);
    }
  }

  // Any taps and any number of chains: the GEMM's micro-kernel, whose tables hold what the view says.
  void compute_by_table(const Block& block, const Rectangle& r, const DepthwiseView<T>& view, S* dst) const {
    int64_t* position_offset = block.position_offsets;
    for (int64_t row = 0; row < r.rows; ++row) {
      for (int64_t col = 0; col < r.cols; ++col) {
        *position_offset++ = row * view.position_row + col * view.position_col;
      }
    }
    int64_t* tap_offset = block.tap_offsets;
    for (int64_t i = 0; i < gemm.taps_h; ++i) {
      for (int64_t j = 0; j < gemm.taps_w; ++j) *tap_offset++ = i * view.tap_row + j * view.tap_col;
    }
    GemmOperands<T> operands{};
    operands.depth = gemm.taps();
    operands.chain = chain;
    operands.a_pitch = operands.c_pitch = L;
    operands.j_offset = block.position_offsets;
    operands.k_offset = block.tap_offsets;
    operands.c = block.c_tile;
    for (int64_t v = 0; v < block.vectors(); ++v) {
      const int64_t lane = block.lane(v);
      operands.a = block.weights + v * gemm.taps() * L;
      operands.b = view.data + lane;
      operands.start = block.start + v * L;
      gemm_panel<true, T>(r.area(), 1, operands);
      for (int64_t row = 0; row < r.rows; ++row) {
        store_tile(TileSums<T>{block.c_tile + row * r.cols * L, L, r.cols, L, block.bias + v * L},
                   TileTarget<S>{dst + row * gemm.destination_row + lane, gemm.destination_col, 1}, Between::kOthers);
      }
    }
  }
};

// Several of them in turn, item by item.
template <class S, class T>
struct DepthwiseCalls {
  std::optional<DepthwiseCall<S, T>> calls[kMostDepthwiseGemms];

  DepthwiseCalls(const ConvGemm* gemms, int count, int num_threads) {
    for (int f = 0; f < count; ++f) calls[f].emplace(gemms[f], num_threads);
  }
  int64_t items() const {
    int64_t most = 0;
    for (const auto& call : calls) {
      if (call) most = max64(most, call->items());
    }
    return most;
  }
  void work(int64_t item) const {
    for (const auto& call : calls) {
      if (call && item < call->items()) call->work(item);
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
