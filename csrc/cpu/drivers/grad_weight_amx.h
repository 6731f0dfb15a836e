// What drivers/grad_weight.h does with a chunk of pixels where AMX multiplies tiles of bfloat16.
//
// A step of a sum is 32 pixels of a segment, numbered through its images, rows and columns, the last step filled up
// with zeros. A weight element (c, i, j) is a row of tiles: the input's values at the segment's pixels. grad_output's
// pixels are packed in pairs, 16 output channels to a tile, as weights are in the forward.
#pragma once

#include "../kernels/amx.h"
#include "../pack/amx_pixels.h"
#include "grad_weight.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class Call>
void sum_chunk_in_tiles(const Call& call, const typename Call::WeightTile& t, int64_t chunk, char* memory,
                        float* c_tile) {
  constexpr int64_t L = kTileColumns;
  const AmxScope tiles;
  const Interval segments = call.segments_of(chunk);
  RowTile* const row_tiles = part<RowTile>(memory, call.layout.element_offsets);
  int64_t* const step_offsets = part<int64_t>(memory, call.layout.pixel_offsets);
  BFloat16Block* const panel = part<BFloat16Block>(memory, call.layout.panel);
  BFloat16* const patch_data = part<BFloat16>(memory, call.layout.patch);
  BFloat16Block* const rows = part<BFloat16Block>(memory, call.layout.rows);
  const Conv2dProblem& p = call.problem;
  for (int64_t number = segments.begin; number < segments.end; ++number) {
    const Tile segment = call.segment_at(number);
    const int64_t steps = div_up(segment.pixels(), kBlockChannels);
    const PixelPatch patch = lay_out_pixel_patch(make_patch_axis(p.rows(), segment.row, segment.rows, t.i0, t.tap_rows),
                                                 make_patch_axis(p.cols(), segment.col, segment.cols, t.j0, t.tap_cols),
                                                 segment.images, t.channels);
    pack_pixel_patch(patch, call.source_from(call.input_at(t, segment)), patch_data);
    copy_pixel_rows(patch, segment, {t.tap_rows, t.tap_cols}, patch_data, steps, rows);
    for (int64_t e = 0; e < t.elements(); e += kTileRows) {
      row_tiles[e / kTileRows] = {e * steps, steps, nullptr, min64(kTileRows, t.elements() - e)};
    }
    for (int64_t s = 0; s < steps; ++s) step_offsets[s] = s;

    AmxOperands operands{};
    operands.depth = steps;
    operands.a = panel;
    operands.a_pitch = steps * L;
    operands.b = rows;
    operands.k_offset = step_offsets;
    operands.accumulate = number != segments.begin;
    const Panels panels = call.panels_of(t);
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t vectors = panels.size(x), start = panels.start(x);
      const int64_t m = start * L, channel = t.group * p.out_channels_per_group() + t.m0 + m;
      pack_pixel_pairs(call.grad_output_at(segment, channel), call.grad_output.stride, segment,
                       min64(t.channels_m - m, vectors * L), panel, steps * L);
      operands.c = c_tile + t.elements() * start * L;
      amx_panel(row_tiles, div_up(t.elements(), kTileRows), vectors, operands);
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
