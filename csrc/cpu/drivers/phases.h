// The GEMM driver of grad_input where the phases of a stride run together (join_phases, plan/tile_phases.h).
//
// A phase reads some of a kernel's taps, but all of the weight's cache lines. With few pixels, drivers/gemm.h would
// wait for these lines once a phase. Here a work item is some images, or a band of rows, times a chunk of result
// channels. It packs grad_output once for all phases. For each panel of result channels it packs all taps of all
// channels once, phase by phase; the micro-kernel then runs over the pixels of one phase after the other. In planes,
// the columns of two phases lie in turn, and are stored together.
//
//   panel   [phase][channel][tap of the phase][NR]
//
// Each phase's sums are those of drivers/gemm.h, chain for chain and bit for bit.
#pragma once

#include <functional>

#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/patch.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct PhasesCall {
  static constexpr int L = Vec<T>::kLanes;
  const JoinedPhases& phases;
  const ConvGemm& any;  // what all phases have in common
  const PhasesTiling tiling;
  const PhasesScratch layout;
  KBlocking k[JoinedPhases::kMost];
  // Where a tap's weights go in a panel: the first channel's row, and the step to the next channel's.
  struct Rows {
    int64_t first, step;
  };
  Rows rows_of_tap[JoinedPhases::kMostTaps];
  int64_t first_row[JoinedPhases::kMost];  // of a phase in a panel
  Patch patch;                             // of a full tile

  PhasesCall(const JoinedPhases& joined, int num_threads)
      : phases(joined),
        any(joined.gemm[0]),
        tiling(tile_phases(joined, vector_shape<T>(), num_threads)),
        layout(lay_out_scratch(tiling, joined, vector_shape<T>())) {
    int64_t row = 0;
    for (int f = 0; f < phases.count; ++f) {
      const ConvGemm& g = phases.gemm[f];
      k[f] = block_k(g, vector_shape<T>().limits);
      first_row[f] = row;
      for (int64_t i = 0; i < g.taps_h; ++i) {
        for (int64_t j = 0; j < g.taps_w; ++j) {
          const int64_t tap =
              (phases.first_i[f] + i * phases.step_i) * phases.taps_w + phases.first_j[f] + j * phases.step_j;
          rows_of_tap[tap] = {row + i * g.taps_w + j, g.taps()};
        }
      }
      row += g.channels * g.taps();
    }
    // All pixels that a phase reads, as they lie.
    const GatherAxis rows{1, phases.first_row, 1}, cols{1, phases.first_col, 1};
    patch = lay_out_patch(patch_order(false, any.channels, any.source_c, any.source_col, any.source_w),
                          make_patch_axis(rows, 0, tiling.tile_rows + phases.row_reach, 0, 1),
                          make_patch_axis(cols, 0, phases.cols, 0, 1), tiling.tile_images, any.channels, L, sizeof(T));
  }

  int64_t items() const { return tiling.items(phases); }

  void work(int64_t item) const {
    // Where bands, then images, vary fastest neighbouring items share weights.
    const int64_t parts = items() / tiling.tiles();
    const int64_t tile_number = tiling.groups_first ? item / parts : item % tiling.tiles();
    const int64_t part_number = tiling.groups_first ? item % parts : item / tiling.tiles();
    const int64_t row0 = tile_number % tiling.tiles_h * tiling.tile_rows;
    const int64_t image0 = tile_number / tiling.tiles_h * tiling.tile_images;
    const int64_t images = min64(tiling.tile_images, any.batch - image0);
    const int64_t group = part_number / tiling.chunks_m;
    const int64_t m0 = part_number % tiling.chunks_m * tiling.chunk_vectors * L;
    const int64_t channels_m = min64(tiling.chunk_vectors * L, any.m - m0);
    const Panels panels = cut_panels(div_up(channels_m, L), tiling.panel_vectors);

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    int64_t* const position_offsets = part<int64_t>(memory, layout.position_offsets);
    int64_t* const tap_offsets = part<int64_t>(memory, layout.tap_offsets);
    T* const zeros = part<T>(memory, layout.zeros);
    T* const panel = part<T>(memory, layout.panel);
    T* const patch_data = part<T>(memory, layout.patch);

    const S* const source = static_cast<const S*>(any.source) + image0 * any.source_n + group * any.source_g();
    const S* const weight = static_cast<const S*>(any.weight) + group * any.weight_g + m0 * any.weight_m;
    Patch tile = patch;
    tile.images = images;
    tile.rows.first += row0;
    tile.rows.size = tile.rows.run_length = min64(tiling.tile_rows, phases.most_rows() - row0) + phases.row_reach;
    pack_patch(tile, source_of(any, source), false, patch_data);
    fill_zero(zeros, panels.size(0) * L);
    fill_offsets(images, row0, position_offsets, tap_offsets);

    GemmOperands<T> operands{};
    operands.b = patch_data;
    operands.start = zeros;
    for (int64_t at = 0; at < panels.count; ++at) {
      const int64_t vectors = panels.size(at), width = vectors * L, m = panels.start(at) * L;
      const int64_t lanes = min64(width, channels_m - m);
      pack_taps(weight + m * any.weight_m, lanes, width, part<T>(memory, layout.taps), panel);
      operands.j_offset = position_offsets;
      operands.half = ends_in_half<T>(lanes);
      for (int f = 0; f < phases.count; ++f) {
        const ConvGemm& g = phases.gemm[f];
        const ResultPiece piece{group, 1, {image0, images, row0, rows_of_band(g, row0), 0, g.cols}};
        const int64_t pixels = piece.tile.pixels();
        if (pixels == 0) continue;
        const ChunkSums<T> c{sums_of(memory, f), part<T>(memory, layout.total_tile), part<T>(memory, layout.lost_tile),
                             k[f].has_chunks()};
        operands.chain = k[f].chain;
        operands.c = c.sums;
        operands.a_pitch = operands.c_pitch = width;
        for (int64_t c0 = 0; c0 < g.channels; c0 += k[f].segment_channels) {
          const int64_t row = first_row[f] + c0 * g.taps();
          operands.depth = min64(k[f].segment_channels, g.channels - c0) * g.taps();
          operands.a = panel + row * width;
          operands.k_offset = tap_offsets + row;
          operands.accumulate = !c.begin(k[f].segment_at(c0, 0, 0), pixels * width);
          gemm_panel<false, T>(pixels, vectors, operands);
        }
        c.finish(pixels * width);
        operands.j_offset += pixels;
        if (!phases.columns_in_turn) {
          store_lanes<S, T>(g, piece, 0, {c.sums, width, pixels, lanes, zeros}, m0 + m, 1);
        } else if (f % 2 == 1) {
          store_two_phases(f - 1, piece, memory, {nullptr, width, 0, lanes, zeros}, m0 + m);
        }
      }
    }
  }

  int64_t rows_of_band(const ConvGemm& g, int64_t row0) const {
    return max64(min64(tiling.tile_rows, g.rows - row0), 0);
  }

  T* sums_of(char* memory, int f) const {
    return part<T>(memory, phases.columns_in_turn && f % 2 == 1 ? layout.second_tile : layout.c_tile);
  }

  // Phases f and f + 1, of the same rows: all columns of these. Which phase has column 0 depends on the padding.
  // `even`: its `data` and `pixels` are set here.
  void store_two_phases(int f, const ResultPiece& piece, char* memory, TileSums<T> even, int64_t m) const {
    const bool in_order = std::less<>()(phases.gemm[f].destination, phases.gemm[f + 1].destination);
    const int first = in_order ? f : f + 1, second = in_order ? f + 1 : f;
    const ConvGemm& g = phases.gemm[first];
    TileSums<T> odd = even;
    even.data = sums_of(memory, first);
    even.pixels = g.cols;
    odd.data = sums_of(memory, second);
    odd.pixels = phases.gemm[second].cols;
    S* const destination = piece.first_pixel<S>(g, m);
    for (int64_t n = 0; n < piece.tile.images; ++n) {
      for (int64_t row = 0; row < piece.tile.rows; ++row) {
        store_columns_in_turn(even, odd, destination + n * g.destination_n + row * g.destination_row, g.destination_m);
        even.data += even.pixels * even.pitch;
        odd.data += odd.pixels * odd.pitch;
      }
    }
  }

  // The offsets of all phases, one after the other: of their pixels, and of the rows of their panels.
  void fill_offsets(int64_t images, int64_t row0, int64_t* position_offsets, int64_t* tap_offsets) const {
    for (int f = 0; f < phases.count; ++f) {
      const ConvGemm& g = phases.gemm[f];
      position_offsets = fill_positions(patch, images, rows_of_band(g, row0), g.cols, position_offsets);
      for (int64_t c = 0; c < g.channels; ++c) {
        for (int64_t i = 0; i < g.taps_h; ++i) {
          for (int64_t j = 0; j < g.taps_w; ++j) {
            *tap_offsets++ =
                patch.tap_offset(c, g.axis_h.source(0, i) - phases.first_row, g.axis_w.source(0, j) - phases.first_col);
          }
        }
      }
    }
  }

  // All taps of all channels of a panel. `taps`: room for those of one channel.
  void pack_taps(const S* weight, int64_t lanes, int64_t width, T* taps, T* panel) const {
    const int64_t last_ahead = any.channels - kStepsAhead;
    const auto row = [&](int64_t tap, int64_t c) {
      return panel + (rows_of_tap[tap].first + c * rows_of_tap[tap].step) * width;
    };
    if (any.weight_m == 1) {  // channels_last: each tap has its own lines
      for (int64_t c = 0; c < any.channels; ++c) {
        for (int64_t i = 0; i < phases.taps_h; ++i) {
          for (int64_t j = 0; j < phases.taps_w; ++j) {
            const S* const from = weight + c * any.weight_c + i * phases.weight_i + j * phases.weight_j;
            if (c < last_ahead) prefetch_lanes(from + kStepsAhead * any.weight_c, 1, lanes);
            T* const to = row(i * phases.taps_w + j, c);
            copy_run(from, 1, lanes, to, false);
            fill_zero(to + lanes, width - lanes);
          }
        }
      }
      return;
    }
    const bool rows_join = phases.taps_h == 1 || phases.weight_i == phases.weight_j * phases.taps_w;
    const int64_t rows = rows_join ? 1 : phases.taps_h, run = phases.taps() / rows;
    for (int64_t c = 0; c < any.channels; ++c) {
      const S* const from = weight + c * any.weight_c;
      if (c < last_ahead) prefetch_lanes(from + kStepsAhead * any.weight_c, any.weight_m, lanes);
      for (int64_t i = 0; i < rows; ++i) {
        pack_lanes(LaneSource<S>{from + i * phases.weight_i, any.weight_m, phases.weight_j, lanes, run},
                   Panel<T>{taps + i * run * width, width, width}, false);
      }
      for (int64_t tap = 0; tap < phases.taps(); ++tap) {
        for (int64_t x = 0; x < width; x += L) Vec<T>::store(row(tap, c) + x, Vec<T>::load(taps + tap * width + x));
      }
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
