// The GEMM driver of forward and grad_input (a ConvGemm, plan/conv_gemm.h).
//
// A work item is (group, chunk of result channels, tile of pixels):
//
//   for each block of source channels          copy the tile's zero-padded patch into scratch
//     for each panel of result channels
//       for each K segment of the block        pack its weights; run the micro-kernel over the tile's pixels
//   store the C tile (panel by panel, where the only block of channels is all of K)
//
// The C tile stays in scratch until K is exhausted: pixel by pixel, NR channels each. Where the result is channels_last
// and K is a single chunk, the micro-kernel sums in the result itself, or rounds finished sums and stores them there.
//
// A thread's items of one chunk of result channels, tile after tile, find the packed weights of the first one in
// scratch, as far as there is room.
//
// Where groups have few channels, vectors run over groups instead (G): an item then takes a block of `lanes` groups,
// and a panel NV result channels of each. The bits are the same either way.
//
// Tiles whose pixels meet enough of the padding leave out its products (drivers/listed_steps.h).
//
// With operands of pairs a step of k takes two channels; the rest is the same, but that no products are left out, and
// that vectors run over groups in channels_last alone, where a pair is moved as the word that it is.
#pragma once

#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/interleave.h"
#include "../pack/patch.h"
#if defined(CONV2D_BFLOAT16_PAIRS)
#include "../pack/pairs.h"
#endif
#include "../pack/store.h"
#include "../pack/weights.h"
#include "lines_ahead.h"
#include "listed_steps.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Pixels of a finished piece of the C tile, about.
template <class T>
constexpr int64_t store_pixels_at_once(int64_t vectors) {
  return kTakesPairs<T> && vectors < 3 ? 144 : 48;
}

template <class S, class T, bool G>
struct ConvCall {
  static constexpr int L = Vec<T>::kLanes;
  // Channels in a step of k.
  static constexpr int kPerStep = kTakesPairs<T> ? 2 : 1;
  static constexpr bool kListsSteps = !G && ListedSteps<T>::kExists;
  static constexpr int kPerVector = G ? 1 : L;  // result channels in a vector: L, or one of each of L groups
  const ConvGemm& gemm;
  const int num_threads;
  const KBlocking k = block_k(gemm, vector_shape<T>().limits);
  const ConvTiling tiling = tile_conv(gemm, k, vector_shape<T>(), G, num_threads);
  const PatchOrder order =
      patch_order(G, (kPerStep * tiling.block_channels), gemm.source_c / kPerStep, gemm.source_col, gemm.source_w);
  const ConvScratch layout = lay_out_scratch(tiling, k, vector_shape<T>());
  // Of the weights that items keep: those of a group's chunk have one.
  const uint64_t first_owner = tiling.kept_panels == 0 ? 0 : new_scratch_owners(gemm.groups * tiling.chunks_m);
  const bool bias_first = gemm.starts_from_bias();
  const bool in_place = reads_in_place();         // the source is read where it lies
  const bool asks_ahead = waits_for_source();     // while an item multiplies, the next one's source is prefetched
  const bool asks_results = waits_for_results();  // while a piece of the sums is finished, its place in the result
  // While a block of channels is packed, the next one's pixels and weights.
  const bool asks_pixels = k.takes_all_taps() && order == PatchOrder::kChannelInner &&
                           lie_apart(gemm.source_col, limits::tiling::kFarPixelBytes);
  const bool asks_weights = k.takes_all_taps() && !G && gemm.weight_c == kPerStep && gemm.result_taps() == 1 &&
                            lie_apart(gemm.weight_m, limits::tiling::kFarWeightRowBytes);

  static bool lie_apart(int64_t step, int64_t bytes) { return saturating_mul(step, int64_t(sizeof(S))) >= bytes; }

  // Where the source is a patch and its elements are operands. With pixels far apart a segment reads a few lines of
  // each, every time from other pages: with many result channels a dense copy is then faster. An L2 of 2 MiB holds what
  // segments come back to, so that it takes more of them.
  bool reads_in_place() const {
    constexpr int64_t kFarApart = 2048, kLargeL2Bytes = 2048 * 1024;
    constexpr bool kAreOperands = kPerStep > 1 || std::is_same_v<S, Operand<T>>;
    if (G || !kAreOperands || order != PatchOrder::kChannelInner || !source_is_patch(gemm)) return false;
    const int64_t least_channels = l2_bytes() >= kLargeL2Bytes ? 256 : 128;
    const bool far_apart = saturating_mul(gemm.source_col, gemm.axis_w.step, int64_t(sizeof(S))) >= kFarApart;
    return kPerStep > 1 || !far_apart || gemm.m < least_channels;
  }

  // A source of dense pixels that comes from beyond L2, or from memory: with pairs, whose sums take half the time, and
  // where L3 answers late.
  // (Sums that wait in scratch are stored in bursts, which these prefetches would delay.)
  bool waits_for_source() const {
    const bool dense =
        order == PatchOrder::kChannelInner && gemm.groups == 1 && gemm.source_col == gemm.single_channels();
    // Rows and columns that no tap meets are not worth a request.
    const bool meets_all = gemm.axis_h.step <= gemm.taps_h && gemm.axis_w.step <= gemm.taps_w;
    const int64_t pixel_bytes = gemm.single_channels() * int64_t(sizeof(S));
    const int64_t least = kTakesPairs<T> ? limits::tiling::kStreamedPairSourceBytes : limits::tiling::kStreamedBytes;
    const bool stores =
        kRoundsSums ? pixel_bytes >= limits::tiling::kLeastPairPixelBytes : kStoresSums && gemm.m % kLeastLanes == 0;
    const bool in_late_l3 =
        !kTakesPairs<T> && has_socket_l3() && !exceeds_l3(moved_bytes(gemm, pixel_bytes, sizeof(S)));
    return stores && dense && meets_all && gemm.destination_m == 1 && tiling.one_block && !in_late_l3 &&
           source_streams(gemm, pixel_bytes, num_threads, least);
  }

  // Whether finished pieces' lines are prefetched, for which stores would wait: of pixels so far apart that hardware
  // prefetchers don't follow them, or that come from memory for few products each. (Sums in the result itself, of wider
  // elements, don't gain.)
  bool waits_for_results() const {
    constexpr int64_t kFarApart = 1024 / sizeof(S);
    const int64_t pixel_bytes = saturating_mul(gemm.groups, gemm.single_channels(), int64_t(sizeof(S)));
    return !G && stores_pixels() &&
           (gemm.destination_col >= kFarApart || (gemm.single_channels() * gemm.taps() <= limits::tiling::kMovedDepth &&
                                                  exceeds_l3(moved_bytes(gemm, pixel_bytes, sizeof(S)))));
  }

  // Whether a pixel's result channels lie side by side.
  bool stores_pixels() const { return gemm.destination_m == 1 && gemm.result_taps() == 1; }

  int64_t items() const { return tiling.items(div_up(gemm.groups, G ? L : 1)); }

  // Channels whose weights are one panel.
  int64_t panel_channels() const { return tiling.segments_at_once * k.segment_channels; }

  // What a work item computes, and where its operands lie in scratch.
  struct Item {
    ResultPiece piece;
    int64_t m0, channels_m;  // result channels of a group
    Panels panels;
    int64_t *position_offsets, *tap_offsets;
    char* scratch;
    T *zeros, *bias;
    Operand<T>*panel, *patch, *kept;
    bool is_packed;  // what is kept, if anything is
    ChunkSums<T> c_tile;
    const S *source, *weight;  // of the item's first image and group
  };
  CONV2D_INLINE Item item_at(int64_t number) const {
    Item item;
    const TilePart of = tile_part(number, tiling.tiles(), items() / tiling.tiles(), tiling.groups_first);
    const int64_t chunk = of.part % tiling.chunks_m;
    const int64_t group = of.part / tiling.chunks_m * (G ? L : 1);
    item.piece = {group, G ? min64(L, gemm.groups - group) : 1, tiling.tile(of.tile, gemm)};
    const Panels chunks = near_equal(div_up(gemm.m, kPerVector), tiling.chunks_m);
    item.m0 = chunks.start(chunk) * kPerVector;
    item.channels_m = min64(chunks.size(chunk) * kPerVector, gemm.m - item.m0);
    item.panels = cut_panels(div_up(item.channels_m, kPerVector), kPanelVectors<T>);
    const OwnedScratch owned =
        thread_scratch(layout.bytes, tiling.kept_panels == 0 ? 0 : first_owner + static_cast<uint64_t>(of.part));
    item.is_packed = owned.kept;
    char* const scratch = item.scratch = static_cast<char*>(owned.memory);
    item.kept = part<Operand<T>>(scratch, layout.kept);
    item.position_offsets = part<int64_t>(scratch, layout.position_offsets);
    item.tap_offsets = part<int64_t>(scratch, layout.tap_offsets);
    item.zeros = part<T>(scratch, layout.zeros);
    item.bias = part<T>(scratch, layout.bias);
    item.panel = part<Operand<T>>(scratch, layout.panel);
    item.patch = part<Operand<T>>(scratch, layout.patch);
    item.c_tile = chunk_sums<T>(scratch, layout.c_tile);
    item.source = static_cast<const S*>(gemm.source) + item.piece.tile.image * gemm.source_n + group * gemm.source_g();
    item.weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g;
    return item;
  }

  void work(int64_t number) const {
    const Item item = item_at(number);
    fill_zero(item.zeros, item.panels.size(0) * L);
    for_each_block(gemm, k, tiling.block_channels, [&](const KBlock& block) {
      Patch patch;
      const Operand<T>* const operand = read_source(item, block, patch);
      const Tile& tile = item.piece.tile;
      fill_positions(patch, tile.images, tile.rows, tile.cols, item.position_offsets);
      // Of the first panel; in later ones the same taps lie whole channels further.
      fill_taps(patch, min64(panel_channels(), block.channels), block.tap_rows, block.tap_cols, item.tap_offsets);
      const ListedSteps<T> listed = list_steps(item, block, patch);
      LinesAhead ahead = lines_after(number, item);
      for (int64_t at = 0; at < item.panels.count; ++at) multiply(item, block, {patch, operand, listed, ahead}, at);
    });
    if (!tiling.one_block) finish(item);
  }

  // What the next item reads.
  CONV2D_INLINE LinesAhead lines_after(int64_t number, const Item& item) const {
    if (!asks_ahead || number + 1 == items()) return {};
    const TilePart next = tile_part(number + 1, tiling.tiles(), items() / tiling.tiles(), tiling.groups_first);
    const Tile tile = tiling.tile(next.tile, gemm);
    const S* const source = static_cast<const S*>(gemm.source) + tile.image * gemm.source_n;
    return LinesAhead::of(SourceOfTile<S>{source, gemm.single_channels(), gemm.source_row, gemm.source_col},
                          gathered_rows(gemm), gathered_cols(gemm), tile, item.piece.tile.pixels());
  }

  // The patch, and where it lies: in scratch, or in the source itself.
  CONV2D_INLINE const Operand<T>* read_source(const Item& item, const KBlock& block, Patch& patch) const {
    const Tile& tile = item.piece.tile;
    const S* const source = item.source + block.channel * gemm.source_c;
    if (in_place) {
      patch = patch_in_place(gemm.axis_h, gemm.axis_w, gemm.source_n / kPerStep, 1, gemm.source_row / kPerStep,
                             gemm.source_col / kPerStep);
      return reinterpret_cast<const Operand<T>*>(source + gemm.axis_h.source(tile.row, 0) * gemm.source_row +
                                                 gemm.axis_w.source(tile.col, 0) * gemm.source_col);
    }
    patch = lay_out_patch<T>(order, gemm, tile, block);
    // Pairs of neighbouring channels are moved as the words that they are.
    constexpr bool kInWords = G && kTakesPairs<T>;
    using Element = std::conditional_t<kInWords, float, S>;
    Source<Element> from = source_of(gemm, reinterpret_cast<const Element*>(source));
    if constexpr (kInWords) {
      int64_t* const steps[] = {&from.image, &from.channel, &from.row, &from.col, &from.group, &from.of_group};
      for (int64_t* const step : steps) *step /= kPerStep;
    }
    from.lanes = item.piece.groups;
    if (asks_pixels) from.ahead = channels_after(block);
    from.first = block.channel;
    from.missing = block.channel + block.channels == gemm.channels ? gemm.missing : 0;
    pack_patch(patch, from, false, reinterpret_cast<std::conditional_t<kInWords, float, Operand<T>>*>(item.patch));
    return item.patch;
  }

  // The single channels of the block after this one, counted from this one's first.
  Interval channels_after(const KBlock& block) const {
    const int64_t next = block.channels + min64(block.channels, gemm.channels - block.channel - block.channels);
    return {kPerStep * block.channels, kPerStep * next};
  }

  // The steps of a panel's products without those of the padding, or none.
  CONV2D_INLINE ListedSteps<T> list_steps(const Item& item, const KBlock& block, const Patch& patch) const {
    ListedSteps<T> listed;
    if constexpr (kListsSteps) {
      const Tile& tile = item.piece.tile;
      if (tiling.padding.permille > 0) listed.padding = padding_classes(gemm, tile, tiling.padding);
      if (listed.padding.count == 0) return listed;
      listed.chain = k.chain;
      listed.results = {tile.images, tile.rows, tile.cols};
      listed.all_steps = {min64(panel_channels(), block.channels), gemm.taps_h, gemm.taps_w};
      listed.b_offsets = part<int64_t>(item.scratch, layout.listed_offsets);
      listed.steps = part<int64_t>(item.scratch, layout.listed_steps);
      listed.pitch = 2 * tiling.segments_at_once * k.max_depth();
      int64_t* const numbers = part<int64_t>(item.scratch, layout.listed_numbers);
      int64_t* const places = part<int64_t>(item.scratch, layout.listed_places);
      listed.for_each_result([&](int64_t at, int64_t n, int64_t p, int64_t q) {
        listed.b_offsets[at] = patch.position_offset(n, p, q);
        numbers[at] = (n * tile.rows + p) * tile.cols + q;
        places[at] = n * gemm.destination_n + p * gemm.destination_row + q * gemm.destination_col;
      });
      listed.fill_steps([&](int64_t c, int64_t i, int64_t j) { return patch.tap_offset(c, i, j); });
    }
    return listed;
  }

  // What a block reads of the source: the patch, where it lies, and which steps its sums take.
  struct BlockSource {
    const Patch& patch;
    const Operand<T>* data;
    const ListedSteps<T>& listed;
    LinesAhead& ahead;
  };

  // Segment after segment of a block, for one panel of result channels. (Here a segment may be two of K's.)
  CONV2D_INLINE void multiply(const Item& item, const KBlock& block, const BlockSource& source, int64_t at) const {
    const int64_t vectors = item.panels.size(at), width = vectors * L, pixels = item.piece.tile.pixels();
    const int64_t m = item.m0 + item.panels.start(at) * kPerVector;
    const ChunkSums<T> c = tiling.one_block ? item.c_tile : item.c_tile.from(pixels * item.panels.start(at) * L);
    const bool in_result = sums_in_result(item, m, width);
    const bool has_list = source.listed.padding.count > 0, half = !G && ends_in_half<T>(min64(width, gemm.m - m));
    if (tiling.one_block || bias_first || in_result || has_list) load_bias_panel(item.piece, m, vectors, item.bias);
    const bool leaves_out = has_list && !half && !has_negative_zero(item.bias, width);
    for (int64_t s = 0; s < block.channels; s += panel_channels()) {
      const KBlock segment = block.part(s, panel_channels());
      const int64_t number = k.segment_at(segment.channel, segment.tap_row, segment.tap_col);
      const bool begins = c.begin(number, pixels * width);
      GemmOperands<T> operands{};
      operands.depth = segment.channels * segment.taps();
      operands.chain = k.chain;
      operands.a = packed_panel(item, segment, at);
      operands.a_pitch = width;
      operands.b = source.data + s * source.patch.channel_pitch;
      operands.j_offset = item.position_offsets;
      operands.k_offset = item.tap_offsets;
      operands.start = bias_first ? item.bias : item.zeros;
      operands.c = c.sums;
      operands.c_pitch = width;
      operands.accumulate = !begins;
      operands.half = half;
      if constexpr (kListsSteps) {
        if (leaves_out) {
          multiply_listed(item, source.listed, {m, vectors, in_result, segment.ends(gemm)}, c, operands);
          continue;
        }
      }
      if (in_result) {
        if (segment.ends(gemm)) operands.bias = bias_first ? item.zeros : item.bias;
        if constexpr (kStoresSums) sum_in_result(item, m, operands, vectors, source.ahead);
      } else if (!tiling.one_block || !segment.ends(gemm)) {
        gemm_panel<G, T>(pixels, vectors, operands);
      } else {
        finish_pieces(item, m, vectors, operands, c, /*complete=*/s == 0, source.ahead);
      }
    }
  }

  // The same without products with the padding, of all the tile's pixels at once.
  struct PanelPart {
    int64_t m, vectors;
    bool in_result, is_last;
  };
  CONV2D_INLINE void multiply_listed(const Item& item, const ListedSteps<T>& listed, const PanelPart& panel,
                                     const ChunkSums<T>& c, GemmOperands<T>& operands) const {
    const int64_t width = panel.vectors * L, pixels = item.piece.tile.pixels();
    operands.c_offset = part<int64_t>(item.scratch, layout.listed_numbers);
    if constexpr (kStoresSums) {
      if (panel.in_result) {
        operands.c = item.piece.template first_pixel<S>(gemm, panel.m);
        operands.c_pitch = 1;
        operands.c_offset = part<int64_t>(item.scratch, layout.listed_places);
        if (panel.is_last) operands.bias = item.bias;
      }
    }
    listed.multiply(panel.vectors, operands, [](int64_t) {});
    if (panel.in_result || !tiling.one_block || !panel.is_last) return;
    c.finish(pixels * width);
    store(item, 0, {c.sums, width, pixels, 0, item.bias}, panel.m, panel.vectors);
  }

  // Where a sum that is zero meets such a bias, the sign of that zero shows; a product with the padding may decide it.
  static bool has_negative_zero(const T* bias, int64_t n) {
    if constexpr (kListsSteps) {
      for (int64_t i = 0; i < n; ++i) {
        if (is_negative_zero(bias[i])) return true;
      }
    }
    return false;
  }

  // Pixels in near-equal pieces, since a rest of few pixels would leave the FMA units waiting, and whole micro-kernels
  // but for the last: visit(first, count).
  template <class Visit>
  static CONV2D_INLINE void for_each_piece(int64_t pixels, int64_t pieces, int64_t rows_at_once, const Visit& visit) {
    for (int64_t x = 0, now = 0; x < pixels; x += now, --pieces) {
      now = min64(round_up(div_up(pixels - x, pieces), rows_at_once), pixels - x);
      visit(x, now);
    }
  }

  // The last segment of a panel whose sums leave scratch at once, while they are still in L1; for planes of channels
  // longer runs are the better. `complete`: it is the first segment, too. Then no sums wait in scratch, and all pieces
  // use the same place there.
  CONV2D_INLINE void finish_pieces(const Item& item, int64_t m, int64_t vectors, GemmOperands<T>& operands,
                                   const ChunkSums<T>& c, bool complete, [[maybe_unused]] LinesAhead& ahead) const {
    if constexpr (kRoundsSums) {
      if (stores_in_runs(item.piece.tile)) return round_in_result(item, m, vectors, operands, c, complete, ahead);
    }
    const int64_t width = vectors * L, pixels = item.piece.tile.pixels();
    const T* const added = bias_first ? item.zeros : item.bias;
    const int64_t rows_at_once = ukernels_for<T, G>(vectors).rows;
    const int64_t pieces = stores_pixels() ? div_up(pixels, store_pixels_at_once<T>(vectors)) : 1;
    for_each_piece(pixels, pieces, rows_at_once, [&](int64_t x, int64_t now) CONV2D_INLINE_LAMBDA {
      const ChunkSums<T> sums = complete ? c : c.from(x * width);
      operands.c = sums.sums;
      if (!G && asks_results) prefetch_result(item.piece, x, now, m, vectors);
      gemm_panel<G, T>(now, vectors, operands);
      operands.j_offset += now;
      sums.finish(now * width);
      store(item, x, {sums.sums, width, now, 0, added}, m, vectors);
    });
  }

  // The weights of a segment and of panel number `at`, packed now or by an earlier item.
  CONV2D_INLINE const Operand<T>* packed_panel(const Item& item, const KBlock& segment, int64_t at) const {
    const int64_t vectors = item.panels.size(at), m = item.m0 + item.panels.start(at) * kPerVector;
    const bool keeps = at < tiling.kept_panels;
    Operand<T>* const panel =
        keeps ? item.kept + at * layout.kept_pitch + segment.channel * segment.taps() * vectors * L : item.panel;
    if (!keeps || !item.is_packed) pack_panel(item, segment, m, vectors, panel);
    return panel;
  }

  CONV2D_INLINE void pack_panel(const Item& item, const KBlock& segment, int64_t m, int64_t vectors,
                                Operand<T>* panel) const {
    const int64_t width = vectors * L, lanes = min64(width, gemm.m - m);
    const WeightSegment<S> weight = segment.weights(gemm, item.weight + m * gemm.weight_m,
                                                    G ? gemm.weight_g : gemm.weight_m, G ? item.piece.groups : lanes);
    if (asks_weights && item.piece.tile.pixels() >= limits::tiling::kLeastPixelsToCopyRows) {
      for (int64_t t = 0; t < weight.taps(); ++t) {
        prefetch_row_parts(weight.data + weight.tap_offset(gemm, t), weight.lane_step, lanes, channels_after(segment));
      }
    }
    if constexpr (G) {
      pack_weight_of_groups(gemm, weight, vectors, Panel<Operand<T>>{panel, width, width});
    } else if constexpr (kTakesPairs<T>) {
      const bool lone = gemm.missing != 0 && segment.channel + segment.channels == gemm.channels;
      pack_weight_pairs(gemm, weight, lone, {panel, width, width});
    } else if (gemm.result_taps() > 1) {
      pack_weight_of_taps(gemm, item.weight + segment.weight_offset(gemm), m, lanes, segment.channels,
                          Panel<T>{panel, width, width});
    } else {
      pack_weight(gemm, weight, Panel<T>{panel, width, width});
    }
  }

  // Whether the result tensor itself can serve as the C tile: pixel by pixel, channels side by side.
  static constexpr bool kStoresSums = std::is_same_v<S, T> && kHasTranspose<T> && !G;
  // Lanes that a micro-kernel stores are a multiple of these.
  static constexpr int kLeastLanes = kHasHalves<T> ? L / 2 : L;
  bool sums_in_result(const Item& item, int64_t m, int64_t width) const {
    return kStoresSums && min64(width, gemm.m - m) % kLeastLanes == 0 && stores_in_runs(item.piece.tile);
  }
  // Whether micro-kernels round finished sums and store them in the result.
  static constexpr bool kRoundsSums = kTakesPairs<T> && std::is_same_v<S, BFloat16> && !G;

  // Whether micro-kernels may store in the result themselves. Rows that don't continue one another are stored one by
  // one, if they have enough pixels.
  bool stores_in_runs(const Tile& tile) const {
    constexpr int64_t kLeastPixels = 4 * kMR;
    return !k.has_chunks() && stores_pixels() && (tile.cols >= kLeastPixels || is_one_run(tile));
  }
  bool is_one_run(const Tile& tile) const {
    return pixels_join(tile, {gemm.destination_n, gemm.destination_row, gemm.destination_col});
  }
  // Multiplies the tile's pixels in the runs that they are in the result from channel m on, each in pieces where
  // something is prefetched with them: before(first pixel, pixels, where they lie).
  template <class Before>
  CONV2D_INLINE void multiply_runs(const Item& item, int64_t m, int64_t vectors, GemmOperands<T>& operands,
                                   LinesAhead& ahead, const Before& before) const {
    const Tile& tile = item.piece.tile;
    const int64_t rows = is_one_run(tile) ? 1 : tile.images * tile.rows, run = tile.pixels() / rows;
    S* const first = item.piece.template first_pixel<S>(gemm, m);
    for (int64_t row = 0; row < rows; ++row) {
      S* const to = first + row / tile.rows * gemm.destination_n + row % tile.rows * gemm.destination_row;
      const bool in_pieces = (kRoundsSums && asks_results) || ahead.any();
      const int64_t pieces = in_pieces ? div_up(run, store_pixels_at_once<T>(vectors)) : 1;
      for_each_piece(run, pieces, ukernels_for<T, G>(vectors).rows, [&](int64_t x, int64_t now) {
        before(row * run + x, now, to + x * gemm.destination_col);
        ahead.ask(now);
        gemm_panel<G, T, S>(now, vectors, operands);
        operands.j_offset += now;
      });
    }
  }

  void sum_in_result(const Item& item, int64_t m, GemmOperands<T>& operands, int64_t vectors, LinesAhead& ahead) const {
    operands.c_pitch = gemm.destination_col;
    for (int64_t row = 0; row < operands.depth; row += pass_depth(operands.chain)) {
      const GemmPass<T> pass(operands, row);
      const int64_t* const j_offset = operands.j_offset;
      multiply_runs(item, m, vectors, operands, ahead, [&](int64_t, int64_t, S* to) { operands.c = to; });
      operands.j_offset = j_offset;
    }
  }

  // The last segment of a panel, as finish_pieces takes it. (A segment of pairs is one pass.)
  CONV2D_INLINE void round_in_result(const Item& item, int64_t m, int64_t vectors, GemmOperands<T>& operands,
                                     const ChunkSums<T>& c, bool complete, LinesAhead& ahead) const {
    operands.bias = bias_first ? item.zeros : item.bias;
    operands.result_pitch = gemm.destination_col;
    operands.lanes = min64(vectors * L, gemm.m - m);
    multiply_runs(item, m, vectors, operands, ahead, [&](int64_t x, int64_t now, S* to) CONV2D_INLINE_LAMBDA {
      operands.c = (complete ? c : c.from(x * vectors * L)).sums;
      operands.result = to;
      if (asks_results) prefetch_result(item.piece, x, now, m, vectors);
    });
  }

  // The bias of a panel's result channels, zeros where there is none.
  void load_bias_panel(const ResultPiece& piece, int64_t m, int64_t vectors, T* bias) const {
    fill_zero(bias, vectors * L);
    if (gemm.bias == nullptr) return;
    const S* const source = static_cast<const S*>(gemm.bias) + (piece.group * gemm.m + m) * gemm.bias_stride;
    const int64_t channels = min64(vectors * kPerVector, gemm.m - m), groups = G ? piece.groups : 1;
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t group = 0; group < groups; ++group) {
        const T value = widen_scalar(source[(group * gemm.m + c) * gemm.bias_stride]);
        set_lane(bias, G ? c * L + group : c, value);
      }
    }
  }

  // The C tile, which has waited in scratch for the end of K.
  void finish(const Item& item) const {
    const int64_t pixels = item.piece.tile.pixels();
    item.c_tile.finish(pixels * div_up(item.channels_m, kPerVector) * L);
    if constexpr (G && kHasTranspose<T>) {
      if (tiling.interleaved) {
        T bias[kMaxInterleaved * L];
        if (bias_first) {
          fill_zero(bias, gemm.m * L);
        } else {
          load_bias_panel(item.piece, 0, gemm.m, bias);
        }
        return store_groups<S>(gemm, item.piece, item.c_tile.sums, item.panels, bias);
      }
    }
    for (int64_t at = 0; at < item.panels.count; ++at) {
      const int64_t vectors = item.panels.size(at), width = vectors * L, start = item.panels.start(at);
      const int64_t m = item.m0 + start * kPerVector;
      T* const c = item.c_tile.sums + pixels * start * L;
      if (gemm.channels * gemm.taps() != 0 && sums_in_result(item, m, width)) continue;
      // A sum without channels or taps is its bias. (No sum of products that starts from the bias comes here: it has
      // one block, and is stored by then.)
      if (gemm.channels * gemm.taps() == 0) fill_zero(c, pixels * width);
      load_bias_panel(item.piece, m, vectors, item.bias);
      store(item, 0, {c, width, pixels, 0, item.bias}, m, vectors);
    }
  }

  // Finished pixels of the tile, from `first` on: a panel of result channels from m on.
  void store(const Item& item, int64_t first, TileSums<T> sums, int64_t m, int64_t vectors) const {
    if constexpr (G) {
      sums.channels = item.piece.groups;
      for (int64_t v = 0; v < vectors; ++v, sums.data += L, sums.bias += L) {
        store_lanes<S, T>(gemm, item.piece, first, sums, m + v, gemm.m);
      }
    } else {
      sums.channels = min64(vectors * L, gemm.m - m);
      if (gemm.result_taps() > 1) {
        store_taps(item.piece, sums, m);
      } else {
        store_lanes<S, T>(gemm, item.piece, first, sums, m, 1);
      }
    }
  }

  // Asks for the lines that a piece's store will write. (Inlined: of a function that prefetches and does nothing else
  // GCC leaves out the calls.)
  CONV2D_INLINE void prefetch_result(const ResultPiece& piece, int64_t first, int64_t count, int64_t m,
                                     int64_t vectors) const {
    constexpr int64_t kLine = 64 / sizeof(S);
    const Tile& tile = piece.tile;
    const S* const channel = piece.template first_pixel<S>(gemm, m);
    const int64_t lanes = min64(vectors * L, gemm.m - m);
    const auto ask = [&](int64_t, int64_t pixels, int64_t offset) CONV2D_INLINE_LAMBDA {
      const S* pixel = channel + offset;
      for (int64_t x = 0; x < pixels; ++x, pixel += gemm.destination_col) {
        for (int64_t i = 0; i < lanes; i += kLine) __builtin_prefetch(pixel + i, 1);
      }
    };
    for_each_run(gemm, tile, {tile.cols, tile.rows * tile.cols}, first, count, ask);
  }

  // Lane l of the panel is (channel, tap) number m + l; the taps of a row of the kernel lie side by side.
  void store_taps(const ResultPiece& piece, const TileSums<T>& sums, int64_t m) const {
    const Tile& tile = piece.tile;
    const int64_t taps_w = gemm.result_taps_w, channels = gemm.m / gemm.result_taps();
    S* const destination = static_cast<S*>(gemm.destination) + tile.image * gemm.destination_n +
                           piece.group * channels * gemm.destination_m;
    for (int64_t lane = 0, run = 0; lane < sums.channels; lane += run) {
      const int64_t tap_row = (m + lane) / taps_w, j = (m + lane) % taps_w;
      run = min64(taps_w - j, sums.channels - lane);
      S* const plane = destination + tap_row / gemm.result_taps_h * gemm.destination_m;
      const T* from = sums.data;
      for (int64_t n = 0; n < tile.images; ++n) {
        for (int64_t p = tile.row; p < tile.row + tile.rows; ++p) {
          const int64_t row = gemm.place_h.source(p, tap_row % gemm.result_taps_h);
          if (row >= 0 && row < gemm.destination_h) {
            S* const to = plane + n * gemm.destination_n + row * gemm.destination_row;
            for (int64_t q = 0; q < tile.cols; ++q) {
              store_tap_row(from + q * sums.pitch, lane, run, gemm.place_w.source(tile.col + q, j), to);
            }
          }
          from += tile.cols * sums.pitch;
        }
      }
    }
  }
  // A pixel's lanes [lane, lane + run) are neighbouring taps, of which the first one's column is `col`.
  CONV2D_INLINE void store_tap_row(const T* from, int64_t lane, int64_t run, int64_t col, S* row) const {
    const int64_t step = gemm.place_w.tap;
    const Interval in = indices_inside(col, step, run, gemm.destination_w);
    for (int64_t t = in.begin; t < in.end; ++t) {
      // As with every other result a bias, here none, is added last.
      row[(col + t * step) * gemm.destination_col] = Narrow<S>::from(add_scalar(get_lane(from, lane + t), T{}));
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
