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

// What multiplies a segment's rows and one panel of output channels.
//  fill_tables: where a segment's rows and steps lie, for any panel. `scratch` has room for them.
//  multiply_steps: for one panel.
#if defined(CONV2D_AMX)
using StepOperands = AmxOperands;

template <class Scratch>
void fill_tables(int64_t elements, int64_t pixels, const Scratch& scratch) {
  // One lies where the offsets of its elements would, or in the cache line that a part of scratch has at least.
  static_assert(sizeof(RowTile) <= kTileRows * sizeof(int64_t) && sizeof(RowTile) <= 64);
  const int64_t blocks = div_up(pixels, kBlockChannels);
  RowTile* const row_tiles = reinterpret_cast<RowTile*>(scratch.element_offsets);
  for (int64_t e = 0; e < elements; e += kTileRows) {
    row_tiles[e / kTileRows] = {e * blocks, blocks, nullptr, min64(kTileRows, elements - e)};
  }
  for (int64_t s = 0; s < blocks; ++s) scratch.pixel_offsets[s] = s;
}
// (Nothing is prefetched between tiles.)
template <class Scratch, class Before>
void multiply_steps(int64_t elements, int64_t vectors, const Scratch& scratch, StepOperands& operands, const Before&) {
  const RowTile* const row_tiles = reinterpret_cast<const RowTile*>(scratch.element_offsets);
  amx_panel(row_tiles, div_up(elements, kTileRows), vectors, operands);
}
#else
using StepOperands = GemmOperands<float>;

template <class Scratch>
void fill_tables(int64_t elements, int64_t pixels, const Scratch& scratch) {
  const int64_t pairs = div_up(pixels, kBlockChannels) * (kBlockChannels / 2);
  for (int64_t e = 0; e < elements; ++e) scratch.element_offsets[e] = e * pairs;
  for (int64_t s = 0; s < div_up(pixels, 2); ++s) scratch.pixel_offsets[s] = s;
}
// A segment is one chain, and one pass.
template <class Scratch, class Before>
void multiply_steps(int64_t elements, int64_t vectors, const Scratch& scratch, StepOperands& operands,
                    const Before& before) {
  operands.chain = operands.depth;
  operands.c_pitch = operands.a_pitch;
  operands.j_offset = scratch.element_offsets;
  operands.start = scratch.zeros;
  gemm_panel<false, float>(elements, vectors, operands, before);
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
    const int64_t pixels = segment.pixels(), blocks = div_up(pixels, kBlockChannels);
    pack_pixel_rows(patch, call.source_from(call.input_at(t, segment)), segment, {t.tap_rows, t.tap_cols}, patch_data,
                    blocks, rows);
    if (pixels != pixels_of_tables) fill_tables(t.elements(), pixels, scratch);
    pixels_of_tables = pixels;
    StepOperands operands{};
    operands.depth = kTakesBlocks<float> ? blocks : div_up(pixels, 2);
    operands.b = reinterpret_cast<const Operand<float>*>(rows);
    operands.k_offset = scratch.pixel_offsets;
    operands.accumulate = number != segments.begin;
    typename Call::SegmentAhead ahead = call.ahead_of(t, segments, number, /*passes=*/1);
    const Panels panels = call.panels_of(t);
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t m = panels.start(x) * L, channel = t.group * p.out_channels_per_group() + t.m0 + m;
      const int64_t vectors = panels.size(x);
      // Vector after vector for tiles, else side by side.
      const int64_t tile = blocks * (kBlockChannels / 2);
      const PairRows all =
          kTakesBlocks<float> ? PairRows{panel, tile, 1, tile} : PairRows{panel, div_up(pixels, 2), vectors, 1};
      for (int64_t v = 0; v < vectors; v += 2) {
        PairRows two = all;
        two.first += v * all.pitch;
        pack_pixel_pairs(call.grad_output_at(segment, channel + v * L), call.grad_output.stride, segment,
                         min64(t.channels_m - m - v * L, min64(vectors - v, 2) * L), two);
      }
      operands.a = reinterpret_cast<const Operand<float>*>(panel);
      operands.a_pitch = (kTakesBlocks<float> ? blocks : vectors) * L;
      operands.c = c_tile + t.elements() * m;
      multiply_steps(t.elements(), vectors, scratch, operands, [&](int64_t rows) { ahead.ask(rows); });
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
