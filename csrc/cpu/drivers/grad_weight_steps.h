// What drivers/grad_weight.h does with a chunk of pixels where a step of a sum takes several of bfloat16: pairs, by dot
// products of two, or 32 pixels, by AMX tiles.
//
// The pixels of a segment are numbered through its images, rows and columns, and the last step is filled up with zeros
// in both operands. The input's values at these pixels are a row for each weight element (c, i, j): the one place where
// columns of im2col exist, those of a segment for an item's tile of the weight. So pixels that a stride takes apart are
// neighbours. grad_output's pixels are packed in pairs, as weights are in the forward.
#pragma once

#include "../pack/pixel_rows.h"
#include "grad_weight.h"
#if defined(CONV2D_AMX)
#include "../kernels/amx.h"
#endif

namespace conv2d_ext::cpu::CONV2D_ISA {

// A segment's operands, and where its sums go, for one panel of output channels.
struct StepOperands {
  const BFloat16Block *panel, *rows;
  int64_t pixels, elements, vectors;
  bool accumulate;
  float* c;
  int64_t blocks() const { return div_up(pixels, kBlockChannels); }  // of a row
};

// fill_tables: where rows and steps lie, for any panel. `scratch` has room for them.
#if defined(CONV2D_AMX)
template <class Scratch>
void fill_tables(const StepOperands& of, const Scratch& scratch) {
  // One lies where the offsets of its elements would, or in the cache line that a part of scratch has at least.
  static_assert(sizeof(RowTile) <= kTileRows * sizeof(int64_t) && sizeof(RowTile) <= 64);
  RowTile* const row_tiles = reinterpret_cast<RowTile*>(scratch.element_offsets);
  for (int64_t e = 0; e < of.elements; e += kTileRows) {
    row_tiles[e / kTileRows] = {e * of.blocks(), of.blocks(), nullptr, min64(kTileRows, of.elements - e)};
  }
  for (int64_t s = 0; s < of.blocks(); ++s) scratch.pixel_offsets[s] = s;
}
// (Nothing is prefetched between tiles.)
template <class Scratch, class Before>
void multiply_steps(const StepOperands& of, const Scratch& scratch, const Before&) {
  AmxOperands operands{};
  operands.depth = of.blocks();
  operands.a = of.panel;
  operands.a_pitch = of.blocks() * kTileColumns;
  operands.b = of.rows;
  operands.k_offset = scratch.pixel_offsets;
  operands.accumulate = of.accumulate;
  operands.c = of.c;
  const RowTile* const row_tiles = reinterpret_cast<const RowTile*>(scratch.element_offsets);
  amx_panel(row_tiles, div_up(of.elements, kTileRows), of.vectors, operands);
}
#else
template <class Scratch>
void fill_tables(const StepOperands& of, const Scratch& scratch) {
  const int64_t pairs = of.blocks() * (kBlockChannels / 2);
  for (int64_t e = 0; e < of.elements; ++e) scratch.element_offsets[e] = e * pairs;
  for (int64_t s = 0; s < div_up(of.pixels, 2); ++s) scratch.pixel_offsets[s] = s;
}
// A segment is one chain, and one pass.
template <class Scratch, class Before>
void multiply_steps(const StepOperands& of, const Scratch& scratch, const Before& before) {
  GemmOperands<float> operands{};
  operands.depth = operands.chain = div_up(of.pixels, 2);
  operands.a = reinterpret_cast<const BFloat16Pair*>(of.panel);
  operands.a_pitch = operands.c_pitch = of.vectors * Vec<float>::kLanes;
  operands.b = reinterpret_cast<const BFloat16Pair*>(of.rows);
  operands.j_offset = scratch.element_offsets;
  operands.k_offset = scratch.pixel_offsets;
  operands.start = scratch.zeros;
  operands.accumulate = of.accumulate;
  operands.c = of.c;
  gemm_panel<false, float>(of.elements, of.vectors, operands, before);
}
#endif

template <class Call>
void sum_chunk_in_steps(const Call& call, const typename Call::WeightTile& t, int64_t chunk, char* memory,
                        float* c_tile) {
  constexpr int64_t L = Vec<float>::kLanes;
#if defined(CONV2D_AMX)
  const AmxScope tiles;
#endif
  const Interval segments = call.segments_of(chunk);
  const auto scratch = call.scratch_in(memory);
  BFloat16Block* const panel = part<BFloat16Block>(memory, call.layout.panel);
  BFloat16* const patch_data = part<BFloat16>(memory, call.layout.patch);
  BFloat16Block* const rows = part<BFloat16Block>(memory, call.layout.rows);
  const Conv2dProblem& p = call.problem;
  fill_zero(scratch.zeros, kPanelVectors<float> * L);
  int64_t pixels_of_tables = -1;
  for (int64_t number = segments.begin; number < segments.end; ++number) {
    const Tile segment = call.segment_at(number);
    const Patch patch = lay_out_pixel_patch(make_patch_axis(p.rows(), segment.row, segment.rows, t.i0, t.tap_rows),
                                            make_patch_axis(p.cols(), segment.col, segment.cols, t.j0, t.tap_cols),
                                            segment.images, t.channels);
    StepOperands operands{panel, rows, segment.pixels(), t.elements(), 0, number != segments.begin, nullptr};
    pack_pixel_rows(patch, call.source_from(call.input_at(t, segment)), segment, {t.tap_rows, t.tap_cols}, patch_data,
                    operands.blocks(), rows);
    if (operands.pixels != pixels_of_tables) fill_tables(operands, scratch);
    pixels_of_tables = operands.pixels;
    typename Call::SegmentAhead ahead = call.ahead_of(t, segments, number, /*passes=*/1);
    const Panels panels = call.panels_of(t);
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t m = panels.start(x) * L, channel = t.group * p.out_channels_per_group() + t.m0 + m;
      operands.vectors = panels.size(x);
      operands.c = c_tile + t.elements() * m;
      // Vector after vector for tiles, else side by side.
      const int64_t tile = operands.blocks() * (kBlockChannels / 2);
      const PairRows all = kTakesBlocks<float> ? PairRows{panel, tile, 1, tile}
                                               : PairRows{panel, div_up(segment.pixels(), 2), operands.vectors, 1};
      for (int64_t v = 0; v < operands.vectors; v += 2) {
        PairRows two = all;
        two.first += v * all.pitch;
        pack_pixel_pairs(call.grad_output_at(segment, channel + v * L), call.grad_output.stride, segment,
                         min64(t.channels_m - m - v * L, min64(operands.vectors - v, 2) * L), two);
      }
      multiply_steps(operands, scratch, [&](int64_t rows) { ahead.ask(rows); });
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
