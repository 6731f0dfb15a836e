// The driver of Winograd's F(2 x 2, 3 x 3) (kernels/winograd.h), for forward and grad_input.
//
// A work item is (group, chunk of result channels, run of tiles). For each tile, of whole squares of 2 x 2 results:
//
//   for all source channels                 copy the tile's zero-padded patch, a few at a time; transform it
//     for each panel of result channels
//       for each block of source channels   pack its weights, transform them (or take what the item has kept);
//                                           16 times: run the GEMM micro-kernel over the tile's squares
//       transform the sums; store them      with the bias, as drivers/gemm.h stores its own
//
// Order of summation: channels in chains of ChainLimits::winograd, of near-equal length, each from zero, added in
// order; then the transformation's own sums, and the bias. A square belongs to one image, so nothing follows the batch.
//
// A square of a result channel with a result that is not finite (before the bias is added, and before it is rounded to
// 16 bits) is computed again, all of it that lies in the image, by the sums of drivers/gemm.h, bit for bit. Otherwise
// infinities would become NaNs, since here they meet with other signs, and so would large numbers whose sums overflow.
#pragma once

#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../kernels/winograd.h"
#include "../pack/store.h"
#include "../pack/weights.h"
#include "parts.h"
#include "winograd_again.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct WinogradCall {
  static constexpr int L = Vec<T>::kLanes;
  static constexpr int kMaxWidth = L * Vec<T>::kMaxVectors;
  const ConvGemm& gemm;
  const int num_threads;
  const WinogradTiling tiling = tile_winograd(gemm, vector_shape<T>(), num_threads);
  const WinogradScratch layout = lay_out_scratch(tiling, gemm, vector_shape<T>());
  // With ascending taps, whichever order the GEMM has them in.
  const GatherAxis axis_h = ascending(gemm.axis_h, 3), axis_w = ascending(gemm.axis_w, 3);
  const PatchOrder order = patch_order(false, tiling.staged_channels, gemm.source_c, gemm.source_col, gemm.source_w);

  int64_t items() const { return tiling.items(gemm.groups); }
  // What a work item computes, and where its operands lie in scratch.
  struct Item {
    ResultPiece piece;
    int64_t m0, channels_m;  // result channels of the group
    Panels panels;
    int64_t *square_offsets, *channel_offsets;
    T *zeros, *bias, *source, *weight, *sums, *pixels, *staged;
  };
  // A panel of result channels.
  struct ResultPanel {
    int64_t number, m, vectors;
    int64_t width() const { return vectors * L; }
  };

  CONV2D_INLINE Item item_at(int64_t group, int64_t chunk) const {
    Item item;
    item.piece = {group, 1, {}};
    item.m0 = chunk * tiling.chunk_vectors * L;
    item.channels_m = min64(tiling.chunk_vectors * L, gemm.m - item.m0);
    item.panels = cut_panels(div_up(item.channels_m, L), Vec<T>::kMaxVectors);
    char* const scratch = static_cast<char*>(thread_scratch(layout.bytes));
    item.square_offsets = part<int64_t>(scratch, layout.square_offsets);
    item.channel_offsets = part<int64_t>(scratch, layout.channel_offsets);
    item.zeros = part<T>(scratch, layout.zeros);
    item.bias = part<T>(scratch, layout.bias);
    item.source = part<T>(scratch, layout.source);
    item.weight = part<T>(scratch, layout.weight);
    item.sums = part<T>(scratch, layout.sums);
    item.pixels = part<T>(scratch, layout.pixels);
    item.staged = part<T>(scratch, layout.staged);
    return item;
  }
  ResultPanel panel_at(const Item& item, int64_t number) const {
    return {number, item.m0 + item.panels.start(number) * L, item.panels.size(number)};
  }

  void work(int64_t number) const {
    // Runs of tiles vary fastest: neighbouring items share weights.
    const int64_t run = number % tiling.runs, chunk = number / tiling.runs % tiling.chunks_m;
    Item item = item_at(number / tiling.runs / tiling.chunks_m, chunk);
    fill_zero(item.zeros, item.panels.size(0) * L);
    if (tiling.keeps_weights) {
      for (int64_t at = 0; at < item.panels.count; ++at) {
        const ResultPanel panel = panel_at(item, at);
        for_each_channel_block([&](int64_t c, int64_t channels) {
          transform_weights(item, panel, c, channels, weights_of(item, panel, c));
        });
      }
    }
    for (int64_t t = run * tiling.run, end = min64(t + tiling.run, tiling.tiles()); t < end; ++t) {
      item.piece.tile = tiling.tile(t, gemm);
      transform_source(item);
      for (int64_t at = 0; at < item.panels.count; ++at) multiply(item, panel_at(item, at));
    }
  }

  template <class Visit>
  CONV2D_INLINE void for_each_channel_block(const Visit& visit) const {
    for (int64_t c = 0; c < gemm.channels; c += tiling.block_channels) {
      visit(c, min64(tiling.block_channels, gemm.channels - c));
    }
  }

  // ---- weights

  // Where the transformed weights of a panel and of the block that begins with channel c lie.
  CONV2D_INLINE T* weights_of(const Item& item, const ResultPanel& panel, int64_t c) const {
    if (!tiling.keeps_weights) return item.weight;
    const int64_t blocks = div_up(gemm.channels, tiling.block_channels);
    return item.weight + (panel.number * blocks + c / tiling.block_channels) * layout.block_weights;
  }

  CONV2D_INLINE void transform_weights(const Item& item, const ResultPanel& panel, int64_t first, int64_t channels,
                                       T* to) const {
    const int64_t width = panel.width(), lanes = min64(width, gemm.m - panel.m);
    const S* const weight = static_cast<const S*>(gemm.weight) + item.piece.group * gemm.weight_g +
                            panel.m * gemm.weight_m + first * gemm.weight_c;
    // Taps that descend are read from the last one on.
    const bool descends = gemm.axis_h.tap < 0;
    CONV2D_EXT_ASSERT(descends == (gemm.axis_w.tap < 0));
    const T* const taps = item.staged + (descends ? 8 : 0) * width;
    const int64_t step = (descends ? -1 : 1) * width;
    for (int64_t c = 0; c < channels; c += tiling.staged_channels) {
      const int64_t now = min64(tiling.staged_channels, channels - c);
      prefetch_weights(weight + (c + now) * gemm.weight_c, lanes, min64(now, gemm.channels - first - c - now));
      pack_weight(gemm, WeightSegment<S>{weight + c * gemm.weight_c, gemm.weight_m, lanes, now, 3, 3},
                  Panel<T>{item.staged, width, width});
      for (int64_t s = 0; s < now; ++s) {
        for (int64_t v = 0; v < width; v += L) {
          transform_weight<T>(taps + s * 9 * width + v, step, to + (c + s) * width + v, layout.weight_pitch);
        }
      }
    }
  }

  // Asks for the weights of the next channels: too many streams for hardware prefetchers. Runs of what lies together
  // are those of lanes or of channels, whichever are the nearer neighbours, with all taps where these lie between them.
  CONV2D_INLINE void prefetch_weights(const S* weight, int64_t lanes, int64_t channels) const {
    constexpr int64_t kLine = 64 / sizeof(S);
    const bool over_lanes = gemm.weight_m < gemm.weight_c;
    const int64_t near = over_lanes ? gemm.weight_m : gemm.weight_c, far = over_lanes ? gemm.weight_c : gemm.weight_m;
    const int64_t length = (over_lanes ? lanes : channels) * near, runs = over_lanes ? channels : lanes;
    const bool taps_between = near >= gemm.weight_i * 2 + gemm.weight_j * 2;
    if (near < 1 || near > kLine || far < kLine) return;
    for (int64_t run = 0; run < runs; ++run) {
      for (int tap = 0; tap < (taps_between ? 1 : 9); ++tap) {
        const S* const first = weight + run * far + tap / 3 * gemm.weight_i + tap % 3 * gemm.weight_j;
        for (int64_t x = 0; x < length; x += kLine) __builtin_prefetch(first + x, 0, 2);
      }
    }
  }

  // ---- the source

  // Elements from channel to channel of the transformed source, and from square to square.
  bool is_planar() const { return order == PatchOrder::kPlanar; }
  int64_t channel_step(const Tile& tile) const { return is_planar() ? winograd_squares(tile) : 1; }
  int64_t square_step() const { return is_planar() ? 1 : layout.channel_pitch; }

  CONV2D_INLINE void transform_source(const Item& item) const {
    const Tile& tile = item.piece.tile;
    const int64_t squares_h = winograd_squares(tile.rows), squares_w = winograd_squares(tile.cols);
    const PatchAxis rows = make_patch_axis(axis_h, tile.row, 2 * squares_h, 0, 3);
    const PatchAxis cols = make_patch_axis(axis_w, tile.col, 2 * squares_w, 0, 3);
    const S* const source =
        static_cast<const S*>(gemm.source) + tile.image * gemm.source_n + item.piece.group * gemm.source_g();
    for (int64_t c = 0; c < gemm.channels; c += tiling.staged_channels) {
      const int64_t now = min64(tiling.staged_channels, gemm.channels - c);
      const Patch patch = lay_out_patch(order, rows, cols, tile.images, now, L, sizeof(T));
      pack_patch(patch, source_of(gemm, source + c * gemm.source_c), false, item.staged);
      for (int64_t plane = 0; plane < (is_planar() ? now : div_up(now, L)); ++plane) {
        const int64_t channel = is_planar() ? plane : plane * L;
        const T* const from = item.staged + channel * patch.channel_pitch;
        T* to = item.source + (c + channel) * channel_step(tile);
        for (int64_t n = 0; n < tile.images; ++n) {
          for (int64_t i = 0; i < squares_h; ++i, to += squares_w * square_step()) {
            const T* const row = from + n * patch.image_pitch + 2 * i * patch.row_pitch;
            if (is_planar()) {
              transform_planar_squares<T>(row, patch.row_pitch, squares_w, to, layout.source_pitch);
            } else {
              transform_inner_squares<T>(row, patch.row_pitch, patch.col_pitch, squares_w, to, square_step(),
                                         layout.source_pitch);
            }
          }
        }
      }
    }
    fill_offsets(item.square_offsets, winograd_squares(tile), square_step());
    fill_offsets(item.channel_offsets, tiling.block_channels, channel_step(tile));
  }
  static void fill_offsets(int64_t* offsets, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; ++i) offsets[i] = i * step;
  }

  // ---- products and results

  CONV2D_INLINE void multiply(const Item& item, const ResultPanel& panel) const {
    const Tile& tile = item.piece.tile;
    const int64_t squares = winograd_squares(tile);
    for_each_channel_block([&](int64_t c, int64_t channels) {
      T* const weights = weights_of(item, panel, c);
      if (!tiling.keeps_weights) transform_weights(item, panel, c, channels, weights);
      for (int64_t f = 0; f < kWinogradProducts; ++f) {
        GemmOperands<T> operands{};
        operands.depth = channels;
        operands.chain = tiling.chain;
        operands.a = weights + f * layout.weight_pitch;
        operands.a_pitch = panel.width();
        operands.b = item.source + f * layout.source_pitch + c * channel_step(tile);
        operands.j_offset = item.square_offsets;
        operands.k_offset = item.channel_offsets;
        operands.start = item.zeros;
        operands.c = item.sums + f * layout.sums_pitch;
        operands.c_pitch = panel.width();
        operands.accumulate = c > 0;
        prefetch_source(item, f + 1 < kWinogradProducts ? f + 1 : 0, f + 1 < kWinogradProducts ? c : c + channels,
                        squares);
        gemm_panel<false, T>(squares, panel.vectors, operands);
      }
    });
    fill_zero(item.bias, panel.width());
    load_bias<S>(gemm, item.piece.group, panel.m, min64(panel.width(), gemm.m - panel.m), item.bias);
    if (!finish(item, panel)) compute_again(item, panel);
  }

  // Asks for the transformed source of the next product, which may lie beyond L2, line by line: its rows are read a few
  // elements at a time, which hardware prefetchers follow badly.
  CONV2D_INLINE void prefetch_source(const Item& item, int64_t f, int64_t c, int64_t squares) const {
    if (c >= gemm.channels) return;
    const int64_t channels = min64(tiling.block_channels, gemm.channels - c);
    const T* const first = item.source + f * layout.source_pitch + c * (is_planar() ? squares : 1);
    const int64_t runs = is_planar() ? 1 : squares, length = is_planar() ? channels * squares : channels;
    prefetch_row_parts(first, layout.channel_pitch, runs, {0, length});
  }

  // Row of squares after row of squares. Whether all results are finite.
  CONV2D_INLINE bool finish(const Item& item, const ResultPanel& panel) const {
    const Tile& tile = item.piece.tile;
    const int64_t squares_h = winograd_squares(tile.rows), squares_w = winograd_squares(tile.cols);
    const int64_t width = panel.width();
    typename Vec<T>::reg check = Vec<T>::zero();
    const T* sums = item.sums;
    for (int64_t n = 0; n < tile.images; ++n) {
      for (int64_t i = 0; i < squares_h; ++i, sums += squares_w * width) {
        const int64_t rows = min64(2, tile.rows - 2 * i);
        transform_row(sums, panel, rows, tile.cols, item.pixels, check);
        TileSums<T> finished{item.pixels, width, rows * tile.cols, min64(width, gemm.m - panel.m), item.bias};
        store_lanes<S, T>(gemm, item.piece, (n * tile.rows + 2 * i) * tile.cols, finished, panel.m, 1);
      }
    }
    T lanes[L];
    Vec<T>::store(lanes, check);
    bool finite = true;
    for (int l = 0; l < L; ++l) finite = finite && lanes[l] == T(0);
    return finite;
  }

  // A row of squares: `rows` times `cols` pixels. `check` becomes NaN where one is not finite.
  CONV2D_INLINE void transform_row(const T* sums, const ResultPanel& panel, int64_t rows, int64_t cols, T* pixels,
                                   typename Vec<T>::reg& check) const {
    using V = Vec<T>;
    const int64_t width = panel.width(), row = cols * width;
    const typename V::reg zero = V::zero();
    for (int64_t x = 0; x < cols; x += 2, sums += width, pixels += 2 * width) {
      for (int64_t v = 0; v < width; v += L) {
        typename V::reg y[2][2];
        transform_sums<T>(sums + v, layout.sums_pitch, y);
        V::store(pixels + v, y[0][0]);
        check = V::fma(y[0][0], zero, check);
        if (x + 1 < cols) {
          V::store(pixels + width + v, y[0][1]);
          check = V::fma(y[0][1], zero, check);
        }
        if (rows < 2) continue;
        V::store(pixels + row + v, y[1][0]);
        check = V::fma(y[1][0], zero, check);
        if (x + 1 < cols) {
          V::store(pixels + row + width + v, y[1][1]);
          check = V::fma(y[1][1], zero, check);
        }
      }
    }
  }

  // The sums are still there: which squares they are, and their results, is found by transforming them once more.
  void compute_again(const Item& item, const ResultPanel& panel) const {
    const Tile& tile = item.piece.tile;
    const int64_t squares_h = winograd_squares(tile.rows), squares_w = winograd_squares(tile.cols);
    WinogradAgain<S, T> again{gemm, layout, item.piece, panel.m, panel.vectors, item.bias, item.zeros};
    const T* sums = item.sums;
    for (int64_t n = 0; n < tile.images; ++n) {
      for (int64_t i = 0; i < squares_h; ++i) {
        for (int64_t j = 0; j < squares_w; ++j, sums += panel.width()) {
          T results[4 * kMaxWidth];
          for (int64_t v = 0; v < panel.width(); v += L) {
            typename Vec<T>::reg y[2][2];
            transform_sums<T>(sums + v, layout.sums_pitch, y);
            for (int pixel = 0; pixel < 4; ++pixel) {
              Vec<T>::store(results + pixel * panel.width() + v, y[pixel / 2][pixel % 2]);
            }
          }
          again.add(tile.image + n, tile.row + 2 * i, tile.col + 2 * j, results);
        }
      }
    }
    again.flush();
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
