// The GEMM driver of forward and grad_input with vectors over pixels (a ConvGemm, plan/conv_gemm.h).
//
// A work item is (group, chunk of result channels, tile of pixels of one image). For each block of source channels the
// item copies the tile's zero-padded patch into scratch, planar (from channels_last by transposition); for each K
// segment and each panel of neighbouring pixels the micro-kernel runs over the chunk's channels. What already lies as
// the micro-kernel wants it is not copied:
//  * the pixels of a 1x1 kernel, full panels of them;
//  * weights whose k is contiguous (but many pixels of a 1x1 kernel read a copy of rows that lie far apart);
//  * results: full panels are summed in the planes of the result tensor.
// Where planes are both read and summed in place (takes_whole_planes), each panel takes all of K at once
// (kernels/whole_planes.h), and the last one overlaps the one before instead of going through scratch: its first pixels
// are computed twice. A few panels at a time meet all result channels.
//
// What needs converting or has other strides goes through scratch, and so does otherwise the last panel of a run where
// pixels don't fill it: nothing is read or written beyond a tensor's end.
//
// Of 1x1 kernels to few channels no pixel is packed where pixels have their channels side by side: they are transposed
// in registers (kernels/columns.h), and read once. Each is multiplied a few times: reading them is the bound.
//
// It computes what drivers/gemm.h does, in the same order, bit for bit; plan/candidates.cpp chooses.
#pragma once

#include "../kernels/columns.h"
#include "../kernels/pixels.h"
#include "../kernels/whole_planes.h"
#include "../pack/interleave.h"
#include "../pack/patch.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct PixelCall {
  static constexpr int L = Vec<T>::kLanes;
  const ConvGemm& gemm;
  const int num_threads;
  const KBlocking k = block_k(gemm, vector_shape<T>().limits);
  const PixelTiling tiling = tile_pixel_conv(gemm, k, vector_shape<T>(), sizeof(S), num_threads);
  const PixelScratch layout = lay_out_scratch(tiling, k, vector_shape<T>());
  const bool bias_first = gemm.starts_from_bias();

  int64_t items() const { return tiling.items(gemm.groups); }

  // What a work item computes, and where its operands lie in scratch. Its pixels are runs of neighbours, one for each
  // row or a single one, in panels of vectors; the last panel of a run may not be full. Of each run the first panels
  // need no scratch: `in_place` of them are read from the source, `direct` of them are summed in the result.
  struct Item {
    Tile tile;
    int64_t channels_m;
    Panels blocks;  // of result channels
    int64_t runs, run;
    Panels panels;  // of a run
    int64_t in_place, direct;
    int64_t *tap_offsets, *channel_offsets;
    T *zeros, *bias, *weight_scratch, *patch;
    ChunkSums<T> c;  // [run][result channel][c_pitch], of what is not direct
    int64_t c_pitch;
    const S *source, *weight;
    S* destination;
    // The first pixels of a run that are packed, and that are summed in scratch.
    int64_t first_packed() const { return panels.start(in_place) * L; }
    int64_t first_scratch() const { return panels.start(direct) * L; }
    int64_t sums() const { return runs * channels_m * c_pitch; }
  };
  CONV2D_INLINE Item item_at(int64_t number) const {
    Item item;
    // Pixel tiles vary fastest: neighbouring items share weights.
    item.tile = tiling.tile(number % tiling.tiles(), gemm);
    const Tile& tile = item.tile;
    const int64_t m0 = number / tiling.tiles() % tiling.chunks_m * tiling.chunk_m;
    const int64_t group = number / tiling.tiles() / tiling.chunks_m;
    item.channels_m = min64(tiling.chunk_m, gemm.m - m0);
    item.blocks = cut_panels(item.channels_m, pixel_rows(vector_shape<T>()));
    item.runs = tiling.join_rows ? 1 : tile.rows;
    item.run = tiling.join_rows ? tile.rows * tile.cols : tile.cols;
    item.panels = cut_run(tiling, item.run, item.blocks.size(0), vector_shape<T>());
    const int64_t full_panels = item.panels.count - (item.run % L != 0 ? 1 : 0);
    item.direct = tiling.direct ? full_panels : 0;
    item.in_place = tiling.source_in_place ? full_panels : 0;
    item.c_pitch = div_up(item.run, L) * L - item.first_scratch();

    char* const scratch = static_cast<char*>(thread_scratch(layout.bytes));
    item.tap_offsets = part<int64_t>(scratch, layout.tap_offsets);
    item.channel_offsets = part<int64_t>(scratch, layout.channel_offsets);
    item.zeros = part<T>(scratch, layout.zeros);
    item.bias = part<T>(scratch, layout.bias);
    item.weight_scratch = part<T>(scratch, layout.weight);
    item.patch = part<T>(scratch, layout.patch);
    item.c = chunk_sums<T>(scratch, layout.c);
    item.source = static_cast<const S*>(gemm.source) + tile.image * gemm.source_n + group * gemm.source_g();
    item.weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g + m0 * gemm.weight_m;
    item.destination = ResultPiece{group, 1, tile}.first_pixel<S>(gemm, m0);
    fill_zero(item.zeros, item.channels_m);
    load_bias<S>(gemm, group, m0, item.channels_m, item.bias);
    return item;
  }

  void work(int64_t number) const {
    const Item item = item_at(number);
    if (tiling.by_columns) {
      multiply_columns(item);
      return store(item);
    }
    if constexpr (sizeof(S) == sizeof(T) && L * sizeof(T) == 64) {
      if (tiling.whole_planes && item.run >= L) return multiply_whole_planes(item);
    }
    for_each_block(gemm, k, tiling.block_channels, [&](const KBlock& block) {
      Patch patch{};
      if (item.in_place < item.panels.count) {
        Tile packed = item.tile;
        packed.col += item.first_packed();
        packed.cols -= item.first_packed();
        patch = lay_out_patch<T>(PatchOrder::kPlanar, gemm, packed, block);
        pack_patch(patch, source_of(gemm, item.source + block.channel * gemm.source_c), false, item.patch);
      }
      for (int64_t s = 0; s < block.channels; s += k.segment_channels) {
        multiply(item, block.part(s, k.segment_channels), patch, s);
      }
    });
    if (item.direct < item.panels.count) store(item);
  }

  // All of K, for a tile whose pixels have their channels side by side.
  void multiply_columns(const Item& item) const {
    const int64_t channels = gemm.channels;
    const WeightRows w = weight_rows(item, KBlock{0, channels, 0, 1, 0, 1});
    const T* factors[kMostColumnResults];
    // The micro-kernel takes 1, 2, 4 or 6 results; where there are three or five, the last one twice.
    const int64_t results = row_results(item.channels_m, Along::kK);
    for (int64_t r = 0; r < results; ++r) factors[r] = w.data + min64(r, item.channels_m - 1) * w.pitch;
    ColumnOperands<S, T> operands{};
    operands.depth = channels;
    operands.segment = k.segment_channels;
    operands.chain = k.chain;
    operands.factors = factors;
    operands.lane_step = gemm.axis_w.step * gemm.source_col;
    operands.ahead = operands.lane_step == channels ? ColumnsAhead::kOfTheRun : ColumnsAhead::kNothing;
    operands.sum_pitch = item.c_pitch;
    const S* const first = item.source + gemm.axis_w.source(item.tile.col, 0) * gemm.source_col;
    for (int64_t r = 0; r < item.runs; ++r) {
      operands.lanes = first + gemm.axis_h.source(item.tile.row + r, 0) * gemm.source_row;
      operands.sums = item.c.sums + r * item.channels_m * item.c_pitch;
      column_panels(results, operands, item.run);
    }
  }

  // One K segment, which begins with channel `s` of the patch.
  CONV2D_INLINE void multiply(const Item& item, const KBlock& segment, const Patch& patch, int64_t s) const {
    const WeightRows w = weight_rows(item, segment);
    int64_t depth = 0;
    for (int64_t c = 0; c < segment.channels; ++c) {
      for (int64_t i = 0; i < segment.tap_rows; ++i) {
        for (int64_t j = 0; j < segment.tap_cols; ++j) {
          item.channel_offsets[depth] = (segment.channel + c) * gemm.source_c;
          item.tap_offsets[depth++] = patch.tap_offset(s + c, i, j);
        }
      }
    }
    const int64_t number = k.segment_at(segment.channel, segment.tap_row, segment.tap_col);
    PixelOperands<T> o{};
    o.depth = depth;
    o.chain = k.chain;
    o.w_pitch = w.pitch;
    o.accumulate = !item.c.begin(number, item.sums());
    const bool add_bias = number + 1 == k.segments() && !k.has_chunks();
    for (int64_t r = 0; r < item.runs; ++r) {
      for (int64_t p = 0; p < item.panels.count; ++p) {
        const int64_t start = item.panels.start(p) * L;
        o.b = item.patch + patch.position_offset(0, r, 0) + start - item.first_packed();
        o.k_offset = item.tap_offsets;
        T* c = item.c.sums + r * item.channels_m * item.c_pitch + start - item.first_scratch();
        o.c_pitch = item.c_pitch;
        if constexpr (sizeof(S) == sizeof(T)) {
          if (p < item.in_place) {
            o.b = item.source + item.tile.col + start;
            o.k_offset = item.channel_offsets;
          }
          if (p < item.direct) {
            c = item.destination + r * gemm.destination_row + start;
            o.c_pitch = gemm.destination_m;
          }
        }
        multiply_panel(item, w.data, add_bias, p, c, o);
      }
    }
  }

  // All result channels of a panel of pixels. Each block asks for its share of the next panel.
  CONV2D_INLINE void multiply_panel(const Item& item, const T* w, bool add_bias, int64_t p, T* c,
                                    PixelOperands<T>& o) const {
    const Panels &blocks = item.blocks, &panels = item.panels;
    const bool has_next = p + 1 < panels.count && p + 1 != item.in_place;
    o.next = panels.size(p) * L;
    o.next_pixels = has_next ? panels.size(p + 1) * L : 0;
    o.asked_steps = div_up(o.depth, blocks.count);
    o.first_asked = 0;
    for_each_size(blocks, 0, blocks.count, [&](int64_t block, int64_t rows, int64_t count) {
      const int64_t m = blocks.start(block);
      o.blocks = count;
      o.w = w + m * o.w_pitch;
      o.c = c + m * o.c_pitch;
      o.start = bias_first ? item.bias + m : item.zeros;
      o.bias = !add_bias ? nullptr : bias_first ? item.zeros : item.bias + m;
      pixel_ukernel_for<T>(rows, panels.size(p))(o);
      o.first_asked += count * o.asked_steps;
    });
  }

  // All of K at once, of planes that are read and summed in place.
  void multiply_whole_planes(const Item& item) const {
    const WeightRows w = weight_rows(item, KBlock{0, gemm.channels, 0, 1, 0, 1});
    WholePlaneOperands<T> o{};
    o.depth = gemm.channels;
    o.segment = k.segment_channels;
    o.chain = k.chain;
    o.w_pitch = w.pitch;
    o.plane_pitch = gemm.channels > 1 ? gemm.source_c : 0;  // of a single plane the stride may be anything
    o.c_pitch = gemm.destination_m;
    constexpr int64_t kStepsAhead = limits::tiling::kWholeStepsAhead;
    // Off the borders of cache lines the panel before has read the first line: long sums ask for the last one instead.
    const int64_t last_line = gemm.channels > limits::tiling::kNextPanelDepth ? L - 1 : 0;
    const Panels& panels = item.panels;
    for (int64_t p = 0; p < panels.count; p += tiling.panels_at_once) {
      const int64_t end = min64(p + tiling.panels_at_once, panels.count);
      for_each_size(item.blocks, 0, item.blocks.count, [&](int64_t block, int64_t rows, int64_t count) {
        const int64_t m = item.blocks.start(block);
        o.blocks = count;
        o.w = w.data + m * w.pitch;
        o.start = bias_first ? item.bias + m : nullptr;
        o.bias = bias_first ? item.zeros + m : item.bias + m;
        for_each_size(panels, p, end, [&](int64_t first, int64_t vectors, int64_t of_width) {
          const int64_t most = item.run - vectors * L, pixel = min64(panels.start(first) * L, most);
          o.panels = of_width;
          o.last = most - pixel;
          o.ahead = last_line + (tiling.asks_next_panel ? vectors * L : kStepsAhead * o.plane_pitch);
          o.planes = item.source + item.tile.col + pixel;
          o.c = item.destination + m * gemm.destination_m + pixel;
          whole_plane_ukernel_for<T>(rows, vectors)(o);
        });
      });
    }
  }

  // visit(first panel, its size, panels) for those of [begin, end) that have one size.
  template <class Visit>
  CONV2D_INLINE static void for_each_size(const Panels& panels, int64_t begin, int64_t end, const Visit& visit) {
    const int64_t larger = min64(max64(panels.larger, begin), end);
    if (begin < larger) visit(begin, panels.size(begin), larger - begin);
    if (larger < end) visit(larger, panels.vectors, end - larger);
  }

  // The weights of one K segment, or by columns of all of K, for the micro-kernel: rows `pitch` apart.
  struct WeightRows {
    const T* data;
    int64_t pitch;
  };
  WeightRows weight_rows(const Item& item, const KBlock& segment) const {
    const S* const weight = item.weight + segment.weight_offset(gemm);
    if constexpr (sizeof(S) == sizeof(T)) {
      if (tiling.weight_in_place()) return {weight, gemm.weight_m};
    }
    T* const scratch = item.weight_scratch;
    const int64_t channels = segment.channels, depth = channels * segment.taps(), pitch = round_up(depth, L);
    if (segment.taps() == 1) {
      // Where the rows' step is the smaller one (grad_input), a transposition.
      pack_lanes(LaneSource<S>{weight, gemm.weight_c, gemm.weight_m, channels, item.channels_m},
                 Panel<T>{scratch, pitch, pitch}, false);
      return {scratch, pitch};
    }
    for (int64_t m = 0; m < item.channels_m; ++m) {
      T* dst = scratch + m * pitch;
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t i = 0; i < segment.tap_rows; ++i, dst += segment.tap_cols) {
          copy_run(weight + m * gemm.weight_m + c * gemm.weight_c + i * gemm.weight_i, gemm.weight_j, segment.tap_cols,
                   dst, false);
        }
      }
    }
    return {scratch, pitch};
  }

  // What lies in scratch: the rest of each run, or all rows of it.
  void store(const Item& item) const {
    if (k.has_chunks()) item.c.finish(item.sums());
    const bool lacks_bias = k.has_chunks() || tiling.by_columns;  // else the micro-kernel has added it
    if (lacks_bias) {
      for (int64_t row = 0; row < item.runs * item.channels_m; ++row) {
        T* const c = item.c.sums + row * item.c_pitch;
        store_row(c, Vec<T>::broadcast(item.bias + row % item.channels_m), item.c_pitch, c);
      }
    }
    const int64_t step = gemm.destination_col, first = item.first_scratch();
    const bool interleaved = gemm.destination_m == 1 && step == item.channels_m && can_interleave(item.channels_m);
    const bool whole_rows = tiling.join_rows && !tiling.direct;
    const int64_t pieces = whole_rows ? item.tile.rows : 1, n = whole_rows ? item.tile.cols : item.run - first;
    for (int64_t r = 0; r < item.runs; ++r) {
      const T* const from = item.c.sums + r * item.channels_m * item.c_pitch;
      S* const to = item.destination + r * gemm.destination_row;
      for (int64_t y = 0; y < pieces; ++y) {
        const T* const c = from + y * item.tile.cols;
        S* const d = to + (whole_rows ? y * gemm.destination_row : first * step);
        if (interleaved) {
          store_inner(c, item.c_pitch, item.channels_m, n, d);
          continue;
        }
        for (int64_t m = 0; m < item.channels_m; ++m) {
          store_run(c + m * item.c_pitch, n, d + m * gemm.destination_m, step);
        }
      }
    }
  }

  // To pixels that consist of these 2, 4, 8 or 16 channels.
  static void store_inner(const T* from, int64_t pitch, int64_t channels, int64_t n, S* to) {
    const T* const no_bias = nullptr;
    const T* planes[kMaxInterleaved];
    for (int64_t m = 0; m < channels; ++m) planes[m] = from + m * pitch;
    store_interleaved(channels, planes, L, no_bias, GroupPixels<S>{to, channels * L, n / L, L});
    const int64_t done = n / L * L;
    if (done == n) return;
    for (int64_t m = 0; m < channels; ++m) planes[m] += done;
    store_interleaved(channels, planes, L, no_bias, GroupPixels<S>{to + done * channels, channels * L, 1, n - done});
  }

  static void store_run(const T* from, int64_t n, S* to, int64_t step) {
    int64_t x = 0;
    if (step == 1) {
      for (; x + L <= n; x += L) store_as(to + x, Vec<T>::load(from + x));
    } else if constexpr (sizeof(S) != sizeof(T)) {
      S narrowed[L];
      for (; x + L <= n; x += L) {
        store_as(narrowed, Vec<T>::load(from + x));
        for (int i = 0; i < L; ++i) to[(x + i) * step] = narrowed[i];
      }
    }
    for (; x < n; ++x) to[x * step] = Narrow<S>::from(from[x]);
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
