// The driver of depthwise problems whose channels are innermost (channels_last): forward, and each phase of grad_input.
//
//   destination[n, p, q, g] = bias[g] + sum over (i, j) of weight[g, i, j] * source[n, row(p, i), col(q, j), g]
//
// Vectors run over groups, which lie side by side in both tensors. So pixels are computed in place, without a patch and
// mostly without a C tile: at the source's edges micro-kernels read zeros for the taps beyond. A zero-padded patch
// [row][col][group] serves what has no micro-kernel for rows of its taps but meets padding, dilated rows with few
// pixels in a run, 16-bit types with many rows of taps (on CPUs where widening the source for each delays the
// products), and pixels so far apart that they crowd L1's sets (DepthwiseTiling::in_place). Where dilation spreads the
// taps of a row, its pixels go through the micro-kernels in runs (DepthwiseRow).
//
// The order of summation is the canonical one (plan/summation_order.h): one chain of fused multiply-adds, taps
// ascending. Problems of several chains, those without a micro-kernel, and those of too few pixels in a run go through
// gemm_ukernel and the C tile.
#pragma once

#include "../kernels/depthwise.h"
#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/patch.h"
#include "../pack/store.h"
#include "../pack/weights.h"
#include "../plan/candidates.h"
#include "lines_ahead.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// A rectangle of pixels as the micro-kernels read it, in the patch or in the source: element steps between positions
// and between taps, from the first position's first tap, modulo 2^64. A patch may have other runs than the source.
template <class P>
struct DepthwiseView {
  const P* data;
  int64_t position_row, position_col, tap_row, tap_col;
  DepthwiseRow row;
  int64_t cols;  // that the choice of a micro-kernel goes by
};

// Whether products with zeros change no result of a GEMM of one channel: all weights are finite, and no bias is -0,
// which would show the sign of a sum that is zero.
template <class S, class T>
bool zeros_change_nothing(const ConvGemm& g) {
  const S* const bias = static_cast<const S*>(g.bias);
  for (int64_t group = 0; bias != nullptr && group < g.groups; ++group) {
    if (is_negative_zero(widen_scalar(bias[group * g.bias_stride]))) return false;
  }
  const S* const first = static_cast<const S*>(g.weight);
  // Mostly they fill their memory, in whichever order.
  const bool ascend = g.weight_g >= 0 && g.weight_i >= 0 && g.weight_j >= 0;
  const int64_t last = (g.groups - 1) * g.weight_g + (g.taps_h - 1) * g.weight_i + (g.taps_w - 1) * g.weight_j;
  if (ascend && last < g.groups * g.taps()) return are_finite<S, T>(first, last + 1);
  T zeros = 0;
  for (int64_t group = 0; group < g.groups; ++group) {
    for (int64_t i = 0; i < g.taps_h; ++i) {
      const S* const row = first + group * g.weight_g + i * g.weight_i;
      for (int64_t j = 0; j < g.taps_w; ++j) zeros += widen_scalar(row[j * g.weight_j]) * T(0);
    }
  }
  return zeros == 0;
}

template <class S, class T>
struct DepthwiseCall {
  static constexpr int L = Vec<T>::kLanes;
  const ConvGemm& gemm;
  const bool zeros_checked;  // they are known to change nothing
  const int num_threads;
  const int64_t chain = block_k(gemm, vector_shape<T>().limits).chain;
  const DepthwiseTiling tiling = tile_depthwise(gemm, vector_shape<T>(), sizeof(S), num_threads);
  const DepthwiseScratch layout = lay_out_scratch(tiling, gemm, vector_shape<T>());
  // Of taps beside the source.
  const bool leaves_out_rows = tiling.in_place && may_leave_out_rows(gemm, vector_shape<T>().limits) &&
                               (zeros_checked || zeros_change_nothing<S, T>(gemm));

  // A work item's block of groups, and where its operands lie in scratch.
  struct Block {
    int64_t group, groups;
    int64_t *position_offsets, *tap_offsets;
    T *start, *bias, *weights, *c_tile, *patch;
    int64_t vectors() const { return div_up(groups, L); }
    // The last vector ends with the groups: where they are no multiple of L it overlaps the one before it.
    int64_t lane(int64_t vector) const { return min64(vector * L, groups - L); }
  };

  int64_t items() const { return tiling.items(); }

  void work(int64_t item) const {
    // Blocks of groups vary fastest: they lie side by side.
    const Block block = block_at(item % tiling.blocks);
    load_operands(block);
    const Tile tile = tiling.tile(item / tiling.blocks, gemm);
    for (int64_t n = tile.image; n < tile.image + tile.images; ++n) {
      if (tiling.in_place) {
        compute_in_place(block, n, tile);
      } else {
        compute_packed(block, n, tile);
      }
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
    if (tiling.in_place) split_even_odd(block);
  }

  // Reorders the operands of vectors that a micro-kernel takes as even and odd groups.
  void split_even_odd([[maybe_unused]] const Block& block) const {
    if constexpr (kHasEvenOdd<S>) {
      using V = Vec<T>;
      const auto split = [](T* first, T* second) {
        typename V::reg even, odd;
        V::unzip(V::load(first), V::load(second), even, odd);
        V::store(first, even);
        V::store(second, odd);
      };
      const int64_t depth = gemm.taps() * L, vectors = block.vectors();
      for (int64_t v = 0; v + 2 <= vectors_side_by_side<L>(vectors, block.lane(vectors - 1)); v += 2) {
        split(block.start + v * L, block.start + (v + 1) * L);
        split(block.bias + v * L, block.bias + (v + 1) * L);
        T* const weights = block.weights + v * depth;
        for (int64_t at = 0; at < depth; at += L) split(weights + at, weights + depth + at);
      }
    }
  }

  const S* source_of_image(const Block& block, int64_t image) const {
    return static_cast<const S*>(gemm.source) + image * gemm.source_n + block.group;
  }

  S* result(const Block& block, int64_t image, int64_t row, int64_t col) const {
    return static_cast<S*>(gemm.destination) + image * gemm.destination_n + row * gemm.destination_row +
           col * gemm.destination_col + block.group;
  }

  void compute_packed(const Block& block, int64_t image, const Tile& tile) const {
    const Patch patch =
        lay_out_patch(PatchOrder::kChannelInner, make_patch_axis(gemm.axis_h, tile.row, tile.rows, 0, gemm.taps_h),
                      make_patch_axis(gemm.axis_w, tile.col, tile.cols, 0, gemm.taps_w), 1, block.groups, L, sizeof(T));
    Source<S> source = source_of(gemm, source_of_image(block, image));
    source.channel = 1;  // the patch's channels are groups
    pack_patch(patch, source, false, block.patch);
    const PatchAxis &rows = patch.rows, &cols = patch.cols;
    compute(block, image, tile,
            DepthwiseView<T>{
                block.patch + patch.tap_offset(0, 0, 0), saturating_mul(rows.position_pitch, patch.row_pitch),
                saturating_mul(cols.position_pitch, patch.col_pitch), saturating_mul(rows.tap_pitch, patch.row_pitch),
                saturating_mul(cols.tap_pitch, patch.col_pitch),
                depthwise_row(gemm.taps_w, cols.position_pitch, cols.tap_pitch), tile.cols});
  }

  void compute_in_place(const Block& block, int64_t image, const Tile& tile) const {
    const S* const first = moved(moved(source_of_image(block, image), gemm.source_row, gemm.axis_h.source(tile.row, 0)),
                                 gemm.source_col, gemm.axis_w.source(tile.col, 0));
    compute(block, image, tile,
            DepthwiseView<S>{first, wrapping_mul(gemm.axis_h.step, gemm.source_row),
                             wrapping_mul(gemm.axis_w.step, gemm.source_col),
                             wrapping_mul(gemm.axis_h.tap, gemm.source_row),
                             wrapping_mul(gemm.axis_w.tap, gemm.source_col), depthwise_row(gemm), gemm.cols});
  }

  template <class P>
  void compute(const Block& block, int64_t image, const Tile& tile, const DepthwiseView<P>& view) const {
    S* const dst = result(block, image, tile.row, tile.col);
    const int64_t runs = view.row.runs;
    if constexpr (std::is_same_v<P, T>) {
      if (gemm.taps() > chain || !has_depthwise_ukernel(gemm.taps_w, view.row, view.cols)) {
        return compute_by_table(block, tile, view, dst);
      }
    }
    const DepthwiseUkernels<P, S>& ukernels = depthwise_ukernels<P, S>(gemm.taps_w, view.row.step);
    DepthwiseOperands<P, S> operands = operands_of(block, view);
    const Interval cols_inside = positions_inside(gemm.axis_w, gemm.taps_w, gemm.cols, gemm.source_w);
    for (int64_t row = 0; row < tile.rows; ++row) {
      if (tiling.in_place) {
        const int64_t step = gemm.taps_h == 1 ? gemm.axis_h.step : gemm.axis_h.tap;
        operands.rows_inside =
            coordinates_inside(gemm.axis_h.source(tile.row + row, 0), step, gemm.taps_h, gemm.source_h);
        if (leaves_out_rows) operands.rows_taken = operands.rows_inside;
      }
      const bool inside = operands.rows_inside.count() == gemm.taps_h;
      RowBelow below = row_below(block, image, tile, row);
      for (int64_t first = 0; first < min64(runs, tile.cols); ++first) {
        Run<P> run{};
        run.source = moved(moved(view.data, view.position_row, row), view.position_col, first);
        run.dst = dst + row * gemm.destination_row + first * gemm.destination_col;
        run.col = tile.col + first;
        run.row = view.row;
        run.count = div_up(tile.cols - first, runs);
        run.inside = {0, run.count};
        if (tiling.in_place) {
          run.inside.begin = inside ? div_up(max64(cols_inside.begin - run.col, 0), runs) : run.count;
          run.inside.end = div_up(max64(cols_inside.end - run.col, 0), runs);
        }
        compute_run(ukernels, run, operands, below);
      }
    }
  }

  // Of every row of pixels alike.
  template <class P>
  DepthwiseOperands<P, S> operands_of(const Block& block, const DepthwiseView<P>& view) const {
    const int64_t runs = view.row.runs;
    DepthwiseOperands<P, S> operands{};
    operands.position = wrapping_mul(runs, view.position_col);
    operands.tap_row = view.tap_row;
    operands.tap_col = gemm.taps_w == 1 ? operands.position : view.tap_col;
    operands.taps_h = gemm.taps_h;
    operands.rows_inside = operands.rows_taken = {0, gemm.taps_h};
    operands.weights = block.weights;
    operands.start = block.start;
    operands.bias = block.bias;
    operands.vectors = block.vectors();
    operands.last_lane = block.lane(block.vectors() - 1);
    operands.dst_position = wrapping_mul(runs, gemm.destination_col);
    operands.dst_step = wrapping_mul(backwards() ? -runs : runs, gemm.destination_col);
    return operands;
  }

  // What the next row of pixels reads of the source and this one doesn't, and what it writes: prefetched, pixel by
  // pixel of this one.
  struct RowBelow {
    LinesAhead source, results;
    bool any() const { return source.any() || results.any(); }
    CONV2D_INLINE void ask(int64_t pixels) {
      source.ask<Cache::kL1>(pixels);
      results.ask<Cache::kL1>(pixels);
    }
  };
  // Below a tile as wide as the image is the thread's next one, if blocks don't take turns.
  RowBelow row_below(const Block& block, int64_t image, const Tile& tile, int64_t row) const {
    const int64_t next = tile.row + row + 1;
    if (!tiling.streams || next == gemm.rows || (tiling.blocks > 1 && row + 1 == tile.rows)) return {};
    const GatheredAxis h = gathered_rows(gemm), w = gathered_cols(gemm);
    const Interval rows{max64(met(h, next, 1).begin, met(h, next - 1, 1).end), met(h, next, 1).end};
    RowBelow below;
    below.source = LinesAhead::of_rectangle(
        SourceOfTile<S>{source_of_image(block, image), block.groups, gemm.source_row, gemm.source_col}, rows,
        met(w, tile.col, tile.cols), gemm.source_w, tile.cols);
    if (!tiling.prefetches_results) return below;
    below.results = LinesAhead::of_pixels(result(block, image, next, tile.col), tile.cols, block.groups,
                                          gemm.destination_col, tile.cols);
    return below;
  }

  // Where taps run against the positions, so do a block's pixels, from its last one on.
  bool backwards() const { return gemm.taps_w > 1 && gemm.axis_w.tap < 0; }

  // Pixels of a row that follow one another in micro-kernels.
  template <class P>
  struct Run {
    const P* source;  // of the first pixel, which is at column `col` of the result
    S* dst;
    int64_t col;
    DepthwiseRow row;
    int64_t count;
    Interval inside;  // those all of whose taps lie in the source; none where begin >= end
  };

  // What seven or four don't divide overlaps the pixels before: computed twice, to the same bits.
  template <class P>
  void compute_run(const DepthwiseUkernels<P, S>& ukernels, const Run<P>& run, DepthwiseOperands<P, S>& operands,
                   RowBelow& below) const {
    constexpr int64_t kSeven = kDepthwisePixels;
    const int64_t count = run.count, sevens = count / kSeven, left = count % kSeven;
    const auto pixels = [&](const DepthwiseUkernelPair<P, S>& pair, int64_t width, int64_t at, int64_t blocks) {
      compute_blocks(pair, width, at, blocks, run, operands, below);
    };
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

  // `count` blocks of `width` pixels from pixel `at` on: those inside the source by one call, those at its edges, or
  // before each of which something is prefetched, by one each.
  template <class P>
  void compute_blocks(const DepthwiseUkernelPair<P, S>& ukernels, int64_t width, int64_t at, int64_t count,
                      const Run<P>& run, DepthwiseOperands<P, S>& operands, RowBelow& below) const {
    const int64_t begin = min64(div_up(max64(run.inside.begin - at, 0), width), count);
    const int64_t end = max64(min64(max64(run.inside.end - at, 0) / width, count), begin);
    for (int64_t b = 0; b < count; b += operands.blocks) {
      const bool inside = begin <= b && b < end;
      const int64_t pixel = at + b * width + (backwards() ? width - 1 : 0);
      operands.source = moved(run.source, operands.position, pixel);
      operands.dst = run.dst + pixel * run.row.runs * gemm.destination_col;
      operands.blocks = inside && !below.any() ? end - b : 1;
      below.ask(width);
      if (!inside) operands.columns_inside = columns_inside(run, width, pixel);
      (inside ? ukernels.inside : ukernels.at_edges)(operands);
    }
  }

  // Of the columns that a block meets, from those of `pixel` on: a bit for each that lies in the source.
  template <class P>
  uint32_t columns_inside(const Run<P>& run, int64_t width, int64_t pixel) const {
    const int64_t first = gemm.axis_w.source(run.col + pixel * run.row.runs, 0);
    const int64_t step = gemm.taps_w == 1 ? gemm.axis_w.step : gemm.axis_w.tap;
    const Interval inside = coordinates_inside(first, step, (width - 1) * run.row.step + gemm.taps_w, gemm.source_w);
    return (uint32_t{1} << inside.end) - (uint32_t{1} << inside.begin);
  }

  // Any taps and any number of chains: the GEMM's micro-kernel, whose tables hold what the view says.
  void compute_by_table(const Block& block, const Tile& tile, const DepthwiseView<T>& view, S* dst) const {
    int64_t* position_offset = block.position_offsets;
    for (int64_t row = 0; row < tile.rows; ++row) {
      for (int64_t col = 0; col < tile.cols; ++col) {
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
      gemm_panel<true, T>(tile.rows * tile.cols, 1, operands);
      for (int64_t row = 0; row < tile.rows; ++row) {
        store_tile(TileSums<T>{block.c_tile + row * tile.cols * L, L, tile.cols, L, block.bias + v * L},
                   TileTarget<S>{dst + row * gemm.destination_row + lane, gemm.destination_col, 1}, Between::kOthers);
      }
    }
  }
};

// A task's calls, which take turns, item by item.
template <class S, class T>
struct DepthwiseCalls {
  std::optional<DepthwiseCall<S, T>> calls[kMostDepthwiseGemms];

  DepthwiseCalls(const Task& task, int num_threads) {
    const bool zeros_checked = task.whole != nullptr && zeros_change_nothing<S, T>(*task.whole);
    const ConvGemm* const gemms = task.whole != nullptr && !zeros_checked ? task.whole : task.gemm;
    for (int f = 0; f < task.gemms; ++f) calls[f].emplace(DepthwiseCall<S, T>{gemms[f], zeros_checked, num_threads});
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
