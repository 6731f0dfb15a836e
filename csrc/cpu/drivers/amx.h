// The GEMM driver of forward and grad_input where AMX multiplies tiles of bfloat16: drivers/gemm.h's place, with steps
// of 32 channels (a ConvGemm in blocks, plan/conv_gemm.h).
//
// A work item is (group, chunk of result channels, tile of pixels):
//
//   for each block of source channels          copy the tile's zero-padded patch into scratch, once for all taps
//     for each run of sums, each panel of 16 or 32 result channels
//       for each K segment of the block        run the micro-kernel over the run
//       store the run's sums, where the only block of channels is all of K. Where that is a single segment and a
//         pixel's result channels lie side by side: between the multiplications of the next run (WaitingStores)
//
// AMX multiplies so fast that all else shows:
// - Weights that fit the threads' memory are packed once a call, and shared (share).
// - Sums stay in AMX tiles for a whole segment, and weights stream past them. With small weights a run is short, and
//   its sums stay in L1 until they are stored.
// - A patch has one copy of each pixel where it can: neighbouring taps find it in L1. Its rows continue one another
//   with the border between them, so that any 16 pixels are a tile; sums of border pixels are formed and dropped.
// - A 1 x 1 kernel without padding reads a channels_last source in place.
#pragma once

#include "../kernels/amx.h"
#include "../kernels/vector_shape.h"
#include "../pack/amx.h"
#include "../pack/amx_columns.h"
#include "../pack/line_stores.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

struct AmxCall {
  static constexpr int L = Vec<float>::kLanes;
  static_assert(sizeof(RowTile) == 32);
  const ConvGemm& gemm;
  const int num_threads;
  const KBlocking k = block_k(gemm, amx_limits());
  const AmxTiling tiling = tile_amx(gemm, k, vector_shape<float>(), num_threads);
  const AmxScratch layout = lay_out_scratch(tiling, k, vector_shape<float>());
  const bool in_place = source_is_patch(gemm);  // the source is read where it lies
  BFloat16Block* shared = nullptr;              // all weights, packed

  int64_t items() const { return tiling.items(gemm.groups); }

  // What a work item computes, and where its operands lie in scratch.
  struct Item {
    ResultPiece piece;
    int64_t m0, channels_m;  // result channels of a group
    Panels panels;
    RowTile* row_tiles;
    int64_t *position_offsets, *tap_offsets;
    float* bias;
    BFloat16Block *panel, *patch, *row;
    ChunkSums<float> c_tile;
    const BFloat16 *source, *weight;  // of the item's first image and group
  };
  Item item_at(int64_t number) const {
    Item item;
    // Pixel tiles vary fastest: neighbouring items share weights.
    const int64_t chunk = number / tiling.tiles() % tiling.chunks_m;
    const int64_t group = number / tiling.tiles() / tiling.chunks_m;
    item.piece = {group, 1, tiling.tile(number % tiling.tiles(), gemm)};
    const Panels chunks = near_equal(div_up(gemm.m, L), tiling.chunks_m);
    item.m0 = chunks.start(chunk) * L;
    item.channels_m = min64(chunks.size(chunk) * L, gemm.m - item.m0);
    item.panels = cut_panels(div_up(item.channels_m, L), kPanelVectors<float>);
    char* const scratch = static_cast<char*>(thread_scratch(layout.bytes));
    item.row_tiles = part<RowTile>(scratch, layout.row_tiles);
    item.position_offsets = part<int64_t>(scratch, layout.position_offsets);
    item.tap_offsets = part<int64_t>(scratch, layout.tap_offsets);
    item.bias = part<float>(scratch, layout.bias);
    fill_zero(item.bias + item.channels_m, round_up(item.channels_m, L) - item.channels_m);
    load_bias<BFloat16>(gemm, group, item.m0, item.channels_m, item.bias);
    item.panel = part<BFloat16Block>(scratch, layout.panel);
    item.patch = part<BFloat16Block>(scratch, layout.patch);
    item.row = part<BFloat16Block>(scratch, layout.row);
    item.c_tile = chunk_sums<float>(scratch, layout.c_tile);
    item.source =
        static_cast<const BFloat16*>(gemm.source) + item.piece.tile.image * gemm.source_n + group * gemm.source_g();
    item.weight = static_cast<const BFloat16*>(gemm.weight) + group * gemm.weight_g;
    return item;
  }

  // ---- weights

  // Two vectors of a group's result channels at once.
  int64_t shares() const { return tiling.shared_bytes == 0 ? 0 : gemm.groups * div_up(gemm.m, 2 * L); }
  // Packs their weights for all items: [group][vector][step], segment after segment.
  static void share(void* context, int64_t number) {
    const AmxCall& call = *static_cast<const AmxCall*>(context);
    const ConvGemm& gemm = call.gemm;
    const int64_t panels = div_up(gemm.m, 2 * L), group = number / panels, m = number % panels * 2 * L;
    const BFloat16* const weight = static_cast<const BFloat16*>(gemm.weight) + group * gemm.weight_g;
    for_each_block(gemm, call.k, call.k.segment_channels, [&](const KBlock& segment) {
      call.pack(weight, segment, m, min64(2 * L, gemm.m - m), call.shared_at(group, m, segment), shared_blocks(gemm));
    });
  }
  // Where a segment's weights lie among them, of L result channels from m on.
  BFloat16Block* shared_at(int64_t group, int64_t m, const KBlock& segment) const {
    const int64_t steps_before =
        segment.channel * gemm.taps() + segment.tap_row * gemm.taps_w + segment.tap_rows * segment.tap_col;
    return shared + (group * div_up(gemm.m, L) + m / L) * shared_blocks(gemm) + steps_before * L;
  }
  // A segment of up to 2 * L result channels from m on.
  void pack(const BFloat16* weight, const KBlock& segment, int64_t m, int64_t channels_m, BFloat16Block* dst,
            int64_t pitch) const {
    const bool last = segment.channel + segment.channels == gemm.channels;
    const WeightSegment<BFloat16> columns =
        segment.weights(gemm, weight + m * gemm.weight_m, gemm.weight_m, channels_m);
    if (gemm.columns != 1) return pack_weight_columns(gemm, columns, segment.tap_col, dst, pitch);
    BlockWeightPacker(gemm, columns, last ? gemm.missing : 0).pack(dst, pitch);
  }

  // ---- the source

  // The patch of a tile and a block of channels, and how the tile's sums are numbered.
  struct Operand {
    Patch patch;
    const BFloat16Block* data;
    SumPitches pitches;
  };
  Operand read_source(const Item& item, const KBlock& block) const {
    const Tile& tile = item.piece.tile;
    const BFloat16* const source = item.source + block.channel * gemm.source_c;
    if (in_place) {
      const BFloat16* const first = source + gemm.axis_h.source(tile.row, 0) * gemm.source_row +
                                    gemm.axis_w.source(tile.col, 0) * gemm.source_col;
      return {patch_in_place(gemm.axis_h, gemm.axis_w, gemm.source_n / kBlockChannels, 1,
                             gemm.source_row / kBlockChannels, gemm.source_col / kBlockChannels),
              reinterpret_cast<const BFloat16Block*>(first), amx_sum_pitches(gemm, tile, tile.cols)};
    }
    const PatchAxis cols = amx_patch_cols(gemm, tiling.expands, tile, block.tap_col, block.tap_cols);
    const Patch patch = lay_out_patch(PatchOrder::kBlocks, amx_patch_rows(gemm, tile, block.tap_row, block.tap_rows),
                                      cols, tile.images, block.channels, 1, sizeof(BFloat16Block));
    Source<BFloat16> from = source_of(gemm, source);
    from.missing = block.channel + block.channels == gemm.channels ? gemm.missing : 0;
    if (gemm.columns != 1) {
      ColumnPatchPacker(patch, from, gemm, block.tap_col, item.row).pack(item.patch);
    } else {
      BlockPatchPacker(patch, from, item.row).pack(item.patch);
    }
    return {patch, item.patch, amx_sum_pitches(gemm, tile, cols.run_length)};
  }

  // Where the pixels of the tile's sums lie; the number of sums.
  int64_t describe_rows(const Item& item, const Operand& operand) const {
    const Tile& tile = item.piece.tile;
    const SumPitches& pitches = operand.pitches;
    const int64_t sums = tile.images * pitches.image;
    if (in_place) fill_positions(operand.patch, tile.images, tile.rows, tile.cols, item.position_offsets);
    for (int64_t x = 0; x < sums; x += kTileRows) {
      RowTile& rows = item.row_tiles[x / kTileRows];
      if (in_place) {
        rows = row_tile_at(item.position_offsets + x, min64(kTileRows, sums - x));
      } else {
        const int64_t image = x / pitches.image;
        rows = {image * operand.patch.image_pitch + x - image * pitches.image, 1, nullptr, kTileRows};
      }
    }
    return sums;
  }

  // ---- the item

  void work(int64_t number) const {
    const AmxScope tiles;
    const Item item = item_at(number);
    SumPitches pitches{};
    WaitingStores waiting;
    for_each_block(gemm, k, tiling.block_channels, [&](const KBlock& block) {
      const Operand operand = read_source(item, block);
      pitches = operand.pitches;
      // Of the first segment; in later ones the same taps lie whole channels further.
      fill_taps(operand.patch, min64(k.segment_channels, block.channels), block.tap_rows, block.tap_cols,
                item.tap_offsets);
      const int64_t sums = describe_rows(item, operand);
      for (int64_t first = 0; first < sums; first += tiling.sums_at_once) {
        const int64_t count = min64(tiling.sums_at_once, sums - first);
        if (tiling.stores_between) {
          multiply_and_store(item, block, operand, first, count, waiting);
          continue;
        }
        for (int64_t at = 0; at < item.panels.count; ++at) multiply(item, block, operand, at, first, count);
      }
    });
    waiting.finish();
    if (tiling.one_block) return;
    const int64_t sums = item.piece.tile.images * pitches.image;  // they have waited in scratch for the end of K
    for (int64_t at = 0; at < item.panels.count; ++at) store(item, pitches, at, 0, sums);
  }

  // The sums of a panel, in scratch.
  ChunkSums<float> sums_of(const Item& item, int64_t at) const {
    return tiling.one_block ? item.c_tile : item.c_tile.from(tiling.sums * item.panels.start(at) * L);
  }

  // Of a segment and a panel from m on, `b` the source's. Of the weights, those of L result channels lie after those of
  // the L before.
  CONV2D_INLINE AmxOperands operands_of(const Item& item, const KBlock& segment, int64_t m, int64_t vectors,
                                        const BFloat16Block* b) const {
    AmxOperands operands{};
    operands.depth = segment.channels * segment.taps();
    operands.b = b;
    operands.k_offset = item.tap_offsets;
    operands.a = shared != nullptr ? shared_at(item.piece.group, m, segment) : item.panel;
    operands.a_pitch = shared != nullptr ? shared_blocks(gemm) : operands.depth * L;
    if (shared == nullptr) {
      pack(item.weight, segment, m, min64(gemm.m - m, vectors * L), item.panel, operands.a_pitch);
    }
    return operands;
  }

  // Segment after segment of a block, for one panel of result channels and a run of sums.
  void multiply(const Item& item, const KBlock& block, const Operand& operand, int64_t at, int64_t first,
                int64_t count) const {
    const int64_t vectors = item.panels.size(at), width = vectors * L, m = item.m0 + item.panels.start(at) * L;
    const ChunkSums<float> c = sums_of(item, at);
    for (int64_t s = 0; s < block.channels; s += k.segment_channels) {
      const KBlock segment = block.part(s, k.segment_channels);
      AmxOperands operands = operands_of(item, segment, m, vectors, operand.data + s * operand.patch.channel_pitch);
      operands.c = c.sums;
      operands.accumulate = !c.begin(k.segment_at(segment.channel, segment.tap_row, segment.tap_col), count * width);
      amx_panel(item.row_tiles + first / kTileRows, div_up(count, kTileRows), vectors, operands);
    }
    if (tiling.one_block) store(item, operand.pitches, at, first, count);
  }

  // What the last micro-kernel has summed, which the next one stores (LineStores).
  struct WaitingStores {
    PendingLines<1> narrow{};
    PendingLines<2> wide{};
    PixelRuns runs[2];  // of this run of sums, and of the one before, which may wait
    int64_t number = 0, kernels = 0;

    PixelRuns& this_run() { return runs[number % 2]; }
    void finish() {
      finish(narrow);
      finish(wide);
    }
    template <int C>
    static void finish(PendingLines<C>& pending) {
      if (pending.runs < pending.end) LineStores<C>(pending).finish();
      pending.runs = pending.end;
    }
  };

  // A run of sums of all panels, whose epilogue runs while the next ones are multiplied.
  void multiply_and_store(const Item& item, const KBlock& block, const Operand& operand, int64_t first, int64_t count,
                          WaitingStores& waiting) const {
    ++waiting.number;
    waiting.this_run().find(gemm, item.piece.tile, operand.pitches, first, count, kSumsOfKernel);
    const RowTile* const rows = item.row_tiles + first / kTileRows;
    for (int64_t at = 0; at < item.panels.count; ++at) {
      const int64_t vectors = item.panels.size(at), m = item.m0 + item.panels.start(at) * L;
      const AmxOperands operands = operands_of(item, block, m, vectors, operand.data);
      if (vectors == 2) {
        waiting.finish(waiting.narrow);
        multiply_panel(item, at, operands, rows, count, waiting, waiting.wide);
      } else {
        waiting.finish(waiting.wide);
        multiply_panel(item, at, operands, rows, count, waiting, waiting.narrow);
      }
    }
  }
  template <int C>
  void multiply_panel(const Item& item, int64_t at, const AmxOperands& operands, const RowTile* rows, int64_t count,
                      WaitingStores& waiting, PendingLines<C>& pending) const {
    constexpr int64_t kSums = kSumsOfKernel * 2 / C;
    const int64_t start = item.panels.start(at) * L;
    const PixelRuns& runs = waiting.this_run();
    const PixelRun* run = runs.begin();
    for (int64_t x = 0; x < count; x += kSums) {
      float* const sums = item.c_tile.sums + waiting.kernels++ % 2 * (kSums * C * L);
      const int64_t tiles = div_up(min64(kSums, count - x), kTileRows);
      kAmxUkernels<C, LineStores<C>>[tiles - 1](operands, rows + x / kTileRows, sums, pending);
      pending.sums = sums;
      pending.first = x;
      pending.runs = run;
      while (run < runs.end() && run->sum < x + kSums) ++run;
      pending.end = run;
      pending.bias = gemm.bias != nullptr ? item.bias + start : nullptr;
      pending.destination = item.piece.first_pixel<BFloat16>(gemm, item.m0 + start);
      pending.x_step = gemm.destination_col;
      pending.channels = min64(C * L, item.channels_m - start);
    }
  }

  // The sums of a panel.
  void store(const Item& item, const SumPitches& pitches, int64_t at, int64_t first, int64_t count) const {
    const int64_t start = item.panels.start(at) * L, width = item.panels.size(at) * L;
    const ChunkSums<float> c = sums_of(item, at);
    c.finish(count * width);
    const float* const bias = gemm.bias != nullptr ? item.bias + start : nullptr;
    const TileSums<float> sums{c.sums, width, count, min64(width, item.channels_m - start), bias};
    store_lanes<BFloat16, float>(gemm, item.piece, pitches, first, sums, item.m0 + start, 1);
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
