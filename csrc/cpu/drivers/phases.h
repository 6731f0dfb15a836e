// The GEMM driver of grad_input where the phases of a stride run together (join_phases, plan/tile_phases.h).
//
// A phase reads some of a kernel's taps, but all of the weight's cache lines. With few pixels, drivers/gemm.h would
// wait for these lines once a phase. Here a work item is some images, or a band of rows, times a chunk of result
// channels. It packs grad_output once for all phases. For each panel of result channels it packs all taps of all
// channels once, phase by phase; the micro-kernel then runs over the pixels of one phase after the other. In planes,
// the sums of all phases are kept, and whole rows of pixels are stored (JoinedPhases::whole_rows).
//
//   panel   [phase][channel][tap of the phase][NR]
//
// Where groups have few channels, vectors run over groups (G), as in drivers/gemm.h. The weights of all result channels
// are then packed at once, and in channels_last a phase's sums of all of them are stored together.
//
// Each phase's sums are those of drivers/gemm.h, chain for chain and bit for bit.
#pragma once

#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/patch.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T, bool G>
struct PhasesCall {
  static constexpr int L = Vec<T>::kLanes;
  static constexpr int kPerVector = G ? 1 : L;  // result channels in a vector: L, or one of each of L groups
  const JoinedPhases& phases;
  const Conv2dProblem& problem = phases.problem();
  const int64_t weight_i = phases.call->b.stride[2], weight_j = phases.call->b.stride[3];  // between the kernel's taps
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
          const int64_t tap = (f / problem.stride_w + i * problem.stride_h) * problem.kernel_w + f % problem.stride_w +
                              j * problem.stride_w;
          rows_of_tap[tap] = {row + i * g.taps_w + j, g.taps()};
        }
      }
      row += g.channels * g.taps();
    }
    // All pixels that a phase reads, as they lie.
    const GatherAxis rows{1, phases.first_row, 1}, cols{1, phases.first_col, 1};
    patch = lay_out_patch(patch_order(G, any.channels, any.source_c, any.source_col, any.source_w),
                          make_patch_axis(rows, 0, tiling.tile_rows + phases.row_reach, 0, 1),
                          make_patch_axis(cols, 0, phases.cols, 0, 1), tiling.tile_images, any.channels, L, sizeof(T));
  }

  int64_t items() const { return tiling.items(); }

  // What a work item computes, and where its operands lie in scratch.
  struct Item {
    int64_t image0, images, row0;
    int64_t group, groups;   // groups: a vector's, or 1
    int64_t m0, channels_m;  // result channels of a group
    Panels panels;
    int64_t *position_offsets, *tap_offsets, *places;
    T *zeros, *taps, *panel, *patch;
    ChunkSums<T> c_tile;
    const S *source, *weight;
  };
  Item item_at(int64_t number) const {
    Item item;
    const TilePart of = tile_part(number, tiling.tiles(), tiling.parts(), tiling.groups_first);
    item.row0 = of.tile % tiling.tiles_h * tiling.tile_rows;
    item.image0 = of.tile / tiling.tiles_h * tiling.tile_images;
    item.images = min64(tiling.tile_images, any.batch - item.image0);
    item.group = of.part / tiling.chunks_m * (G ? L : 1);
    item.groups = G ? min64(L, any.groups - item.group) : 1;
    item.m0 = of.part % tiling.chunks_m * tiling.chunk_vectors * kPerVector;
    item.channels_m = min64(tiling.chunk_vectors * kPerVector, any.m - item.m0);
    item.panels = cut_panels(div_up(item.channels_m, kPerVector), tiling.panel_vectors);

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    item.position_offsets = part<int64_t>(memory, layout.position_offsets);
    item.tap_offsets = part<int64_t>(memory, layout.tap_offsets);
    item.places = part<int64_t>(memory, layout.places);
    item.zeros = part<T>(memory, layout.zeros);
    item.taps = part<T>(memory, layout.taps);
    item.panel = part<T>(memory, layout.panel);
    item.patch = part<T>(memory, layout.patch);
    item.c_tile = chunk_sums<T>(memory, layout.c_tile);
    item.source = static_cast<const S*>(any.source) + item.image0 * any.source_n + item.group * any.source_g();
    item.weight = static_cast<const S*>(any.weight) + item.group * any.weight_g + item.m0 * any.weight_m;
    return item;
  }

  void work(int64_t number) const {
    const Item item = item_at(number);
    Patch tile = patch;
    tile.images = item.images;
    tile.rows.first += item.row0;
    tile.rows.size = tile.rows.run_length = min64(tiling.tile_rows, phases.most_rows() - item.row0) + phases.row_reach;
    Source<S> source = source_of(any, item.source);
    source.lanes = item.groups;
    pack_patch(tile, source, false, item.patch);
    fill_offsets(item);
    if (phases.whole_rows) fill_places(item);
    if constexpr (G) {
      sum_groups(item);
    } else {
      sum_panels(item);
    }
  }

  // Panel after panel of result channels: all phases of each.
  CONV2D_INLINE void sum_panels(const Item& item) const {
    fill_zero(item.zeros, item.panels.size(0) * L);
    for (int64_t at = 0; at < item.panels.count; ++at) {
      const int64_t width = item.panels.size(at) * L, m = item.panels.start(at) * L;
      const int64_t lanes = min64(width, item.channels_m - m);
      pack_taps(item, {item.weight + m * any.weight_m, any.weight_m, lanes}, {item.panel, width, width});
      int64_t before = 0;  // pixels of the phases before
      for (int f = 0; f < phases.count; ++f) {
        const ResultPiece piece = piece_of(item, f);
        const int64_t pixels = piece.tile.pixels();
        if (pixels == 0) continue;
        T* const sums = item.c_tile.sums + (phases.whole_rows ? before * width : 0);
        sum_phase(item, f, {item.panel, width, lanes}, before,
                  {sums, item.c_tile.total, item.c_tile.lost, k[f].has_chunks()});
        before += pixels;
        if (phases.whole_rows) continue;
        store_lanes<S, T>(phases.gemm[f], piece, 0, {sums, width, pixels, lanes, item.zeros}, item.m0 + m, 1);
      }
      if (phases.whole_rows) store_rows(item, {item.c_tile.sums, width, 0, lanes, item.zeros}, item.m0 + m);
    }
  }

  // With vectors over groups, phase after phase: all result channels of each.
  CONV2D_INLINE void sum_groups(const Item& item) const {
    const Panels& panels = item.panels;
    const int64_t depth = any.channels * problem.taps();
    fill_zero(item.zeros, any.m * L);
    for (int64_t at = 0; at < panels.count; ++at) {
      T* const panel = item.panel + depth * panels.start(at) * L;
      if constexpr (kPacksFours<T>) {
        if (packs_fours(panels.size(at), any.weight_m)) {
          pack_fours_of_taps(item, panels.start(at), panel);
          continue;
        }
      }
      for (int64_t v = 0; v < panels.size(at); ++v) {
        pack_taps(item, {item.weight + (panels.start(at) + v) * any.weight_m, any.weight_g, item.groups},
                  {panel + v * L, panels.size(at) * L, L});
      }
    }
    const int64_t kept = item.images * result_rows(item) * problem.in_w;
    int64_t before = 0;  // pixels of the phases before
    for (int f = 0; f < phases.count; ++f) {
      const ResultPiece piece = piece_of(item, f);
      const int64_t pixels = piece.tile.pixels();
      if (pixels == 0) continue;
      for (int64_t at = 0; at < panels.count; ++at) {
        const int64_t start = panels.start(at) * L, width = panels.size(at) * L;
        T* const sums = item.c_tile.sums + (phases.whole_rows ? kept * start + before * width : pixels * start);
        sum_phase(item, f, {item.panel + depth * start, width, width}, before, {sums, nullptr, nullptr, false});
      }
      before += pixels;
      if (!phases.whole_rows) store_groups<S>(phases.gemm[f], piece, item.c_tile.sums, panels, item.zeros);
    }
    for (int64_t at = 0; phases.whole_rows && at < panels.count; ++at) {
      const int64_t width = panels.size(at) * L, start = panels.start(at);
      for (int64_t v = 0; v < panels.size(at); ++v) {
        store_rows(item, {item.c_tile.sums + kept * start * L + v * L, width, 0, item.groups, item.zeros}, start + v);
      }
    }
  }

  ResultPiece piece_of(const Item& item, int f) const {
    const ConvGemm& g = phases.gemm[f];
    return {item.group, item.groups, {item.image0, item.images, item.row0, rows_of_band(g, item.row0), 0, g.cols}};
  }
  int64_t rows_of_band(const ConvGemm& g, int64_t row0) const {
    return max64(min64(tiling.tile_rows, g.rows - row0), 0);
  }
  // Rows of the result, in planes.
  int64_t result_rows(const Item& item) const {
    return min64(tiling.tile_rows * problem.stride_h, problem.in_h - item.row0 * problem.stride_h);
  }

  // All pixels of a phase times a panel, whose rows are `width` wide, `lanes` of them with a channel or group.
  struct TapPanel {
    const T* data;
    int64_t width, lanes;
  };
  CONV2D_INLINE void sum_phase(const Item& item, int f, const TapPanel& panel, int64_t before,
                               const ChunkSums<T>& c) const {
    const ConvGemm& g = phases.gemm[f];
    const int64_t pixels = piece_of(item, f).tile.pixels(), width = panel.width;
    GemmOperands<T> operands{};
    operands.b = item.patch;
    operands.start = item.zeros;
    operands.j_offset = item.position_offsets + before;
    operands.half = !G && ends_in_half<T>(panel.lanes);
    operands.chain = k[f].chain;
    operands.c = c.sums;
    operands.a_pitch = operands.c_pitch = width;
    for (int64_t c0 = 0; c0 < g.channels; c0 += k[f].segment_channels) {
      const int64_t row = first_row[f] + c0 * g.taps();
      operands.depth = min64(k[f].segment_channels, g.channels - c0) * g.taps();
      operands.a = panel.data + row * width;
      operands.k_offset = item.tap_offsets + row;
      operands.accumulate = !c.begin(k[f].segment_at(c0, 0, 0), pixels * width);
      gemm_panel<G, T>(pixels, width / L, operands);
    }
    c.finish(pixels * width);
  }

  // Whole rows of planes, whose sums are those of all phases, one after the other. Lane 0 is result channel m.
  void store_rows(const Item& item, const TileSums<T>& sums, int64_t m) const {
    const int64_t pixels = result_rows(item) * problem.in_w;
    S* const destination = static_cast<S*>(phases.call->result.data) + item.image0 * any.destination_n +
                           (item.group * any.m + m) * any.destination_m + item.row0 * problem.stride_h * problem.in_w;
    const int64_t step = (G ? any.m : 1) * any.destination_m;
    PlacedSums<T> run{sums, item.places};
    run.pixels = pixels;
    for (int64_t n = 0; n < item.images; ++n, run.places += pixels) {
      store_planes<1>(run, TileTarget<S>{destination + n * any.destination_n, 1, step});
    }
  }

  // Where the sums of the result's pixels are, image after image.
  void fill_places(const Item& item) const {
    const int64_t pixels = result_rows(item) * problem.in_w;
    int64_t sum = 0;
    for (int f = 0; f < phases.count; ++f) {
      const ConvGemm& g = phases.gemm[f];
      const int64_t rows = rows_of_band(g, item.row0);
      for (int64_t n = 0; n < item.images; ++n) {
        int64_t* row = item.places + n * pixels + phases.first_pixel[f];
        for (int64_t r = 0; r < rows; ++r, row += problem.stride_h * problem.in_w) {
          for (int64_t q = 0; q < g.cols; ++q) row[q * problem.stride_w] = sum++;
        }
      }
    }
  }

  // The offsets of all phases, one after the other: of their pixels, and of the rows of their panels.
  void fill_offsets(const Item& item) const {
    int64_t *positions = item.position_offsets, *taps = item.tap_offsets;
    for (int f = 0; f < phases.count; ++f) {
      const ConvGemm& g = phases.gemm[f];
      positions = fill_positions(patch, item.images, rows_of_band(g, item.row0), g.cols, positions);
      for (int64_t c = 0; c < g.channels; ++c) {
        for (int64_t i = 0; i < g.taps_h; ++i) {
          for (int64_t j = 0; j < g.taps_w; ++j) {
            *taps++ =
                patch.tap_offset(c, g.axis_h.source(0, i) - phases.first_row, g.axis_w.source(0, j) - phases.first_col);
          }
        }
      }
    }
  }

  // All taps of all channels, of four result channels from m on, with vectors over groups.
  void pack_fours_of_taps(const Item& item, int64_t m, T* panel) const {
    for (int64_t c = 0; c < any.channels; ++c) {
      for (int64_t tap = 0; tap < problem.taps(); ++tap) {
        const S* const src =
            item.weight + m + c * any.weight_c + tap / problem.kernel_w * weight_i + tap % problem.kernel_w * weight_j;
        T* const row = panel + (rows_of_tap[tap].first + c * rows_of_tap[tap].step) * 4 * L;
        pack_fours<T>(item.groups, row, [&](int64_t lane) { return load_as_partial(src + lane * any.weight_g, 4); });
      }
    }
  }

  // Lanes of the weight: result channels, or groups, that are `step` apart.
  struct TapLanes {
    const S* data;
    int64_t step, lanes;
  };
  // All taps of all channels, of a panel or of one of its vectors.
  void pack_taps(const Item& item, const TapLanes& from, const Panel<T>& to) const {
    const int64_t last_ahead = any.channels - kStepsAhead;
    const auto row = [&](int64_t tap, int64_t c) {
      return to.data + (rows_of_tap[tap].first + c * rows_of_tap[tap].step) * to.pitch;
    };
    if (from.step == 1) {  // channels_last: each tap has its own lines
      for (int64_t c = 0; c < any.channels; ++c) {
        for (int64_t i = 0; i < problem.kernel_h; ++i) {
          for (int64_t j = 0; j < problem.kernel_w; ++j) {
            const S* const source = from.data + c * any.weight_c + i * weight_i + j * weight_j;
            if (c < last_ahead) prefetch_lanes(source + kStepsAhead * any.weight_c, 1, from.lanes);
            T* const target = row(i * problem.kernel_w + j, c);
            copy_run(source, 1, from.lanes, target, false);
            fill_zero(target + from.lanes, to.width - from.lanes);
          }
        }
      }
      return;
    }
    const bool is_one_run = problem.kernel_h == 1 || weight_i == weight_j * problem.kernel_w;
    const int64_t rows = is_one_run ? 1 : problem.kernel_h, run = problem.taps() / rows, width = to.width;
    for (int64_t c = 0; c < any.channels; ++c) {
      const S* const source = from.data + c * any.weight_c;
      if (c < last_ahead) prefetch_lanes(source + kStepsAhead * any.weight_c, from.step, from.lanes);
      for (int64_t i = 0; i < rows; ++i) {
        pack_lanes(LaneSource<S>{source + i * weight_i, from.step, weight_j, from.lanes, run},
                   Panel<T>{item.taps + i * run * width, width, width}, false);
      }
      for (int64_t tap = 0; tap < problem.taps(); ++tap) {
        const T* const packed = item.taps + tap * width;
        for (int64_t x = 0; x < width; x += L) Vec<T>::store(row(tap, c) + x, Vec<T>::load(packed + x));
      }
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
