#include "tile_gemm.h"

#include <cfenv>
#include <algorithm>
#include <limits>

#include "../base/limits.h"
#include "caches.h"

namespace conv2d_ext::cpu {

namespace {

namespace limit = limits::tiling;

// What a row of C costs at least: vectors of the panel are loaded in the time of so many rows.
constexpr int64_t kLeastRows = 4;

// Which products with the padding are left out, of sums of m results in chunks of so many vectors. Pairs and AMX tiles
// flush denormal sums, so that even zeros change them. Rounding down, +0 and a product of -0 are -0, which no bias
// hides. A panel that ends in half a vector has micro-kernels of its own. A list serves all vectors, segment after
// segment.
PaddingRule padding_rule(int64_t m, int64_t chunk_vectors, int64_t segments, const VectorShape& vector) {
  if (!vector.is_native || vector.step > 1) return {};
  const Panels panels = cut_panels(chunk_vectors, vector.max_vectors);
  const bool ends_in_half = vector.lanes == 16 && (m - 1) % vector.lanes < vector.lanes / 2;
  if (ends_in_half && panels.count == 1) return {};
  if (std::fegetround() == FE_DOWNWARD) return {};
  const bool is_half = 2 * panels.size(0) <= vector.max_vectors;
  const int64_t permille = vector.is_wide() ? limit::kPaddingPermille : limit::kNarrowPaddingPermille;
  return {permille + (is_half ? limit::kHalfPanelPermille : 0), max64(kSumsInFlight / panels.size(0), kLeastRows),
          is_half ? div_up(limit::kListedStepProducts, max64(saturating_mul(chunk_vectors, segments), 1)) : 0};
}

// Whether a core has little L2; not where the system doesn't tell.
bool has_small_l2() { return l2_bytes() > 0 && l2_bytes() <= limit::kSmallL2Bytes; }

// Numbers of the lists of all classes, of so many steps each.
int64_t take_lists(ScratchLayout& s, int64_t steps) { return s.take_offsets(2 * PaddingClasses::kMost * steps); }

struct ConvTiler {
  const ConvGemm& gemm;
  const KBlocking& k;
  const VectorShape& vector;
  const bool lanes_are_groups;
  const int num_threads;

  // Groups in an item, and items of them.
  int64_t group_lanes() const { return lanes_are_groups ? vector.lanes : 1; }
  int64_t groups() const { return div_up(gemm.groups, group_lanes()); }

  // Whether a panel's lanes lie side by side, and its rows far from one another.
  bool weight_rows_lie_apart() const {
    const int64_t step = gemm.taps_w > 1 ? gemm.weight_j : gemm.taps_h > 1 ? gemm.weight_i : gemm.weight_c;
    return gemm.weight_m == 1 && saturating_mul(step, vector.element_size) >= limit::kFarWeightBytes;
  }

  // Whether a patch is gathered from planes, element by element. Every chunk of result channels does that anew.
  bool gathers() const { return gemm.source_c != gemm.per_step && gemm.taps_w == 1 && gemm.axis_w.step > 1; }

  void cut_source_channels(ConvTiling& t) const {
    // A GEMM without products, which writes zeros, needs no patch.
    int64_t plane = 0;
    if (gemm.taps() > 0) {
      const int64_t rows = patch_size(gemm.axis_h, t.tile_rows, k.tap_rows);
      const int64_t cols = patch_size(gemm.axis_w, t.tile_cols, k.tap_cols);
      const int64_t elements = saturating_mul(rows, cols, group_lanes());
      plane = saturating_mul(odd_lines(elements, vector.operand_size()), t.tile_images);
    }
    t.block_channels = channels_of_block(k, plane, vector.operand_size(), limit::kPatchBytes);
    if (weight_rows_lie_apart()) {
      const int64_t segments = limit::kWeightRows / max64(gemm.taps(), 1) / k.segment_channels;
      t.block_channels = min64(t.block_channels, k.segment_channels * max64(segments, 1));
    }
    t.patch_elements = patch_elements(plane, t.block_channels, t.tile_images, vector.operand_size());
  }

  // The fewest pixels of a tile that takes fewer where its patch then holds all channels, of `most`; in channels_last.
  // A stride's patches are several times as large as their results: a pixel's lines are read once, not by each block of
  // channels. With one tap sums have few products, and those of several blocks wait beyond L2, to be stored in bursts:
  // of one block each panel's are finished at once.
  int64_t least_pixels(int64_t most) const {
    if (lanes_are_groups || gemm.source_c != gemm.per_step || !k.takes_all_taps()) return most;
    const bool strided = saturating_mul(gemm.axis_h.step, gemm.axis_w.step) > 2 && gemm.taps() > 1;
    const bool stores = gemm.destination_m == 1 && gemm.taps() == 1 && saturating_mul(gemm.batch, gemm.pixels()) > most;
    return strided || stores ? limit::kLeastWholePixels : most;
  }

  // Pixels of a tile, of `most`.
  int64_t target_pixels(int64_t most, ConvTiling t) const {
    const int64_t least = least_pixels(most);
    int64_t target = min64(most, saturating_mul(gemm.batch, gemm.pixels()));
    for (; least < most && target >= least; target = target * 7 / 8) {
      cut_pixels(gemm, groups(), target, num_threads, t);
      cut_source_channels(t);
      if (t.block_channels >= gemm.channels) return target;
    }
    return most;
  }

  int64_t vectors() const { return lanes_are_groups ? gemm.m : div_up(gemm.m, vector.lanes); }

  // Result channels in chunks whose C tile of so many pixels fits. (Those that are interleaved are stored together.)
  ChunkLimits chunk_limits(const ConvTiling& t, int64_t pixels) const {
    if (t.one_block || t.interleaved) return {vectors(), 1, t.interleaved ? 1 : vectors()};
    const int64_t at_once = k.has_chunks() ? limit::kChunkedTileBytes : limit::kTileBytes;
    const int64_t tile_bytes = gathers() ? limit::kGatheredTileBytes / (k.has_chunks() ? 3 : 1) : at_once;
    const int64_t fit = tile_bytes / (pixels * vector.bytes());
    return {vectors(), div_up(vectors(), max64(vector.max_vectors, fit)), vectors()};
  }

  // Tiles of fewer pixels, where there are few.
  void cut_tiles(ConvTiling& t) const {
    const auto limits_of = [&](int64_t pixels) { return chunk_limits(t, pixels); };
    if (!has_few_items(saturating_mul(t.tiles(), t.chunks_m, groups()), num_threads)) return;
    if (!cut_tiles_for_threads(gemm, groups(), limits_of, num_threads, t)) return;
    cut_source_channels(t);
    cut_result_channels(t);
  }

  // Result channels of a work item: all of them while the C tile fits, fewer where threads would idle.
  void cut_result_channels(ConvTiling& t) const {
    t.interleaved = lanes_are_groups && gemm.channels > 0 && gemm.taps() > 0 && gemm.destination_m == 1 &&
                    can_interleave(gemm.m) && vector.is_native;
    t.one_block = !t.interleaved && gemm.channels > 0 && t.block_channels >= gemm.channels && k.takes_all_taps();
    t.chunk_vectors = vectors();
    t.chunks_m = 1;
    if (t.interleaved) return;
    const ChunkCut cut = cut_chunks(gemm, t, groups(), chunk_limits(t, t.pixels()), num_threads);
    t.chunk_vectors = div_up(vectors(), cut.chunks);
    while (t.chunk_vectors > 1 && !fits_scratch(lay_out_scratch(t, k, vector))) {
      t.chunk_vectors = div_up(t.chunk_vectors, 2);
    }
    t.chunks_m = div_up(vectors(), t.chunk_vectors);
  }

  // Two segments of whole chains are one panel where L1 holds it: it is packed at once, and their sums are complete
  // sooner.
  void join_segments(ConvTiling& t) const {
    const bool joins = gemm.per_step == 1 && !k.has_chunks() && k.takes_all_taps() && k.blocks_c > 1 &&
                       2 * k.max_depth() <= kMaxSegment && k.max_depth() % k.chain == 0;
    t.segments_at_once = joins ? 2 : 1;
  }

  // Sums that start from the bias are so short that it would not pay; and a denormal bias may be flushed.
  void leave_out_padding(ConvTiling& t, int64_t images, int64_t chunk_vectors) const {
    const PaddingRule rule = padding_rule(gemm.m, chunk_vectors, k.segments(), vector);
    const bool leaves_out = rule.permille > 0 && !lanes_are_groups && gemm.per_step == 1 && gemm.channels > 0 &&
                            gemm.taps() > 1 && k.takes_all_taps() && !gemm.starts_from_bias() &&
                            padding_classes(gemm, {0, images, 0, gemm.rows, 0, gemm.cols}, rule).count > 0;
    t.padding = leaves_out ? rule : PaddingRule{};
  }

  // A thread that takes several tiles packs a panel once, as far as its scratch goes.
  void keep_weights(ConvTiling& t) const {
    t.kept_panels = 0;
    if (lanes_are_groups || t.groups_first || !k.takes_all_taps()) return;
    if (t.tiles() <= num_threads) return;
    const ConvScratch scratch = lay_out_scratch(t, k, vector);
    const int64_t room = min64(limit::kKeptWeightBytes, limits::kMaxScratchBytes - scratch.bytes);
    const int64_t panels = div_up(t.chunk_vectors, vector.max_vectors);
    t.kept_panels = min64(panels, room / max64(1, saturating_mul(scratch.kept_pitch, vector.operand_size())));
  }
};

// The pixels of a segment as a row of operands, for steps of several.
int64_t row_bytes(const PixelBlocking& pixels) {
  return round_up(pixels.images * pixels.rows * pixels.cols, kBlockChannels) * int64_t(sizeof(BFloat16));
}

struct WeightTiler {
  const Call& call;
  const PixelBlocking& pixels;
  const VectorShape& vector;
  const WeightLanes lanes;
  const int num_threads;
  const Conv2dProblem& problem = call.problem;
  const bool groups_are_neighbours = weight_groups_are_neighbours(call, vector.element_size);
  const bool input_channels_are_neighbours = call.b.stride[1] == 1 && problem.in_w * problem.in_h > 1;

  bool in_steps() const { return vector.step > 1; }  // of several pixels
  bool in_tiles() const { return vector.step > 2; }  // of AMX

  // Whether a tile takes all channels of some rows of taps, rather than many taps of one channel: where pixels have few
  // channels, which share a line, and more products than a tile takes at once.
  bool takes_whole_pixels() const {
    const int64_t channels = problem.in_channels_per_group();
    return input_channels_are_neighbours && lanes == WeightLanes::kChannels && channels <= limit::kWholePixelChannels &&
           channels * problem.taps() > 2 * kMaxSegment;
  }

  void cut_groups(WeightTiling& t) const {
    t.groups_in_turn = 1;
    if (lanes == WeightLanes::kInnerGroups) {
      // The rest of the groups overlaps the last whole vector. Few pixels' groups are cut evenly for the threads, into
      // pieces of a cache line or more; of many pixels threads take chunks.
      const int64_t whole = problem.groups / vector.lanes, bytes = vector.bytes();
      const int64_t most = max64(1, limit::kInnerGroupsBytes / bytes),
                    least = min64(min64(most, whole), max64(1, 64 / bytes));
      int64_t blocks = div_up(whole, most);
      if (blocks > 1 || pixels.chunks() < limit::kLeastChunksOfThread * num_threads) {
        blocks = round_up(blocks, num_threads);
      }
      t.group_vectors = max64(least, div_up(whole, blocks));
      t.group_blocks = div_up(whole, t.group_vectors);
    } else if (lanes == WeightLanes::kGroups) {
      t.group_blocks = div_up(problem.groups, vector.lanes);
    } else {
      // Items of a tile's bytes, as many for each thread.
      const int64_t bytes = saturating_mul(round_up(problem.out_channels_per_group(), vector.lanes),
                                           problem.in_channels_per_group() * problem.taps(), vector.element_size);
      const int64_t most = groups_are_neighbours && !in_steps() ? limit::kWeightTileBytes / max64(bytes, 1) : 1;
      const int64_t blocks = div_up(problem.groups, max64(most, 1));
      t.groups_in_turn = div_up(problem.groups, round_up(blocks, num_threads));
      t.group_blocks = div_up(problem.groups, t.groups_in_turn);
    }
  }

  // The patch of one channel; rectangles of taps that scatter too far are cut further.
  void cut_kernel(WeightTiling& t) const {
    t.tap_rows = problem.kernel_h;
    t.tap_cols = problem.kernel_w;
    const int64_t columns = vector.step == 2 ? min64(limit::kPairColumns, kMaxSegment) : kMaxSegment;
    const int64_t most_taps = takes_whole_pixels() ? max64(columns / problem.in_channels_per_group(), 1) : kMaxSegment;
    if (problem.taps() > most_taps)
      cut_rectangle(problem.kernel_h, problem.kernel_w, most_taps, t.tap_rows, t.tap_cols);
    t.patch_segments = 1;
    while (plane(t) > limit::kMaxPatchBytes / vector.element_size && t.tap_rows * t.tap_cols > 1) {
      int64_t& longer = t.tap_rows >= t.tap_cols ? t.tap_rows : t.tap_cols;
      longer = div_up(longer, 2);
    }
    t.blocks_h = div_up(problem.kernel_h, t.tap_rows);
    t.blocks_w = div_up(problem.kernel_w, t.tap_cols);
    if (lanes != WeightLanes::kInnerGroups || pixels.images != 1 || pixels.blocks_w != 1) return;
    while (t.patch_segments < min64(pixels.blocks_h, kPixelSegmentsPerChunk)) {
      ++t.patch_segments;
      if (plane(t) <= limit::kInnerPatchBytes / vector.element_size) continue;
      --t.patch_segments;
      break;
    }
  }

  // Whether a larger C tile pays: panels have few vectors (measured with AVX2), a group's weight is more than a tile,
  // and the patch of one channel leaves room in scratch. (In planes it gains nothing: their patches cost less.)
  bool takes_large_tiles(const WeightTiling& t) const {
    const int64_t weights = saturating_mul(problem.out_channels_per_group(),
                                           saturating_mul(problem.in_channels_per_group(), problem.taps()));
    return lanes == WeightLanes::kChannels && input_channels_are_neighbours && vector.is_native &&
           vector.max_vectors <= 2 && weights > limit::kWeightTileBytes / vector.element_size &&
           plane(t) <= limit::kPatchBytes / vector.element_size;
  }

  void leave_out_padding(WeightTiling& t) const {
    const PaddingRule rule = padding_rule(problem.out_channels_per_group(), t.chunk_vectors, 1, vector);
    const Tile image{0, 1, 0, problem.out_h, 0, problem.out_w};
    const bool leaves_out =
        rule.permille > 0 && lanes == WeightLanes::kChannels && t.tap_rows * t.tap_cols > 1 &&
        padding_classes(problem, image, {0, t.tap_rows, 0, t.tap_cols, t.block_channels}, rule).count > 0;
    t.padding = leaves_out ? rule : PaddingRule{};
  }

  // Output channels first: a patch, the dearer operand, then serves as many of them as possible.
  void cut_channels(WeightTiling& t, int64_t tile_bytes, int64_t least_columns) const {
    const int64_t channels = problem.in_channels_per_group(), taps = problem.taps();
    const int64_t vectors =
        div_up(problem.out_channels_per_group(), lanes == WeightLanes::kChannels ? vector.lanes : 1);
    const int64_t tile_taps = t.tap_rows * t.tap_cols;
    const int64_t elements = tile_bytes / vector.bytes();
    t.block_channels = tile_taps < taps && takes_whole_pixels() ? channels : 1;
    const int64_t columns = max64(t.block_channels * tile_taps, min64(least_columns, channels * taps));
    t.chunk_vectors = even_piece(vectors, max64(vector.max_vectors, elements / columns));
    t.chunks_m = div_up(vectors, t.chunk_vectors);
    if (tile_taps == taps) {
      // Of groups in channels_last some channels take as long to pack as all of them (pack/interleave.h).
      const int64_t bytes = lanes == WeightLanes::kGroups ? limit::kMaxPatchBytes : limit::kPatchBytes;
      const int64_t fit_patch = bytes / vector.element_size / max64(plane(t), 1);
      const int64_t fit_tile = min64(elements / t.chunk_vectors, most_rows()) / tile_taps;
      t.block_channels = whole_lines(channels, max64(1, min64(fit_patch, fit_tile)));
    }
    t.blocks_c = div_up(channels, t.block_channels);
    cut_for_threads(t, vectors);
    t.patch_elements = patch_elements(plane(t), t.block_channels, pixels.images, vector.element_size);
  }

  // Finer tiles where there are few, and that is estimated to be faster on so many threads.
  void cut_for_threads(WeightTiling& t, int64_t vectors) const {
    const int64_t channels = problem.in_channels_per_group(), tile_taps = t.tap_rows * t.tap_cols;
    const int64_t least_channels = max64(div_up(limit::kLeastWeightTileColumns, tile_taps), 1);
    double best = kWorthCutting * cost_of_items(t);
    const auto take = [&](const WeightTiling& finer) {
      const double cost = cost_of_items(finer);
      if (cost >= best) return;
      best = cost;
      t = finer;
    };
    for (WeightTiling by_c = t; has_few_items(by_c.items(), num_threads);) {
      for (WeightTiling by_m = by_c; by_m.chunk_vectors > 1 && has_few_items(by_m.items(), num_threads); take(by_m)) {
        by_m.chunk_vectors = even_piece(vectors, by_m.chunk_vectors - 1);
        by_m.chunks_m = div_up(vectors, by_m.chunk_vectors);
      }
      if (by_c.block_channels <= least_channels) return;
      by_c.block_channels = even_piece(channels, by_c.block_channels - 1);
      by_c.blocks_c = div_up(channels, by_c.block_channels);
      take(by_c);
    }
  }

  // The threads' rounds over all items, in the time of a vector's products with one column: an item packs its vectors
  // of grad_output and its columns of the patch. (Fitted to AVX-512.)
  double cost_of_items(const WeightTiling& t) const {
    constexpr double kPanelColumns = 3, kPatchVectors = 0.1, kPatchVectorsOfChannel = 0.4;
    const int64_t taps = t.tap_rows * t.tap_cols, columns = max64(t.block_channels * taps, kLeastRows);
    // Parts of a line of channels_last cost as much as the line.
    const int64_t line = input_channels_are_neighbours ? 64 / (in_steps() ? 2 : vector.element_size) : 1;
    const double patch =
        kPatchVectors * double(columns) + kPatchVectorsOfChannel * double(round_up(t.block_channels, line));
    const double vectors = double(t.chunk_vectors) + (t.chunk_vectors == 1 ? kLoneVector : 0);
    const double depth = double(max64(saturating_mul(problem.batch, problem.out_pixels()), 1));
    const double item =
        double(columns) * vectors + patch + kPanelColumns * double(t.chunk_vectors) + kItemCycles / depth;
    const double rounds = double(div_up(t.items(), num_threads)), wake = t.items() > 1 ? kWakeCycles / depth : 0;
    const int64_t slots = slots_of(t);
    if (slots == 1) return rounds * item + wake;
    // Chunks in parallel, of which the last may have fewer segments. Each is then added to the total.
    constexpr double kAddCycles = 16;  // of a vector
    const int64_t flights = div_up(pixels.chunks(), slots);
    const double chunk = double(kPixelSegmentsPerChunk) / double(max64(pixels.segments(), 1));
    const double of_chunks = double(flights * div_up(t.items() * slots, num_threads)) * chunk;
    const double adds = rounds * double(pixels.chunks()) * double(columns * t.chunk_vectors) * kAddCycles / depth;
    return std::min(of_chunks, 1.0) * item + adds + kWakeCycles / depth;
  }

  // Chunks of pixels in parallel, where items are too few: in near-equal flights of as many as fit the workspace.
  int64_t slots_of(const WeightTiling& t) const {
    if (t.items() >= num_threads || pixels.chunks() <= 1) return 1;
    // A slot's, and twice as much for the totals and what they lost.
    const int64_t partial = t.tile_size(vector.lanes) * vector.element_size * t.items();
    const int64_t fit = num_threads * limit::kPartialBytes / max64(partial, 1) - 2;
    return even_piece(pixels.chunks(), max64(div_up(num_threads, t.items()), fit));
  }

  // Pieces of at most `most` channels, of whole cache lines in a weight in channels_last where they can be: a line that
  // two items write costs both.
  int64_t whole_lines(int64_t channels, int64_t most) const {
    const int64_t line = 64 / vector.element_size;
    if (most >= channels || most < line) return even_piece(channels, most);
    return line * even_piece(div_up(channels, line), most / line);
  }

  // Weight elements of a tile whose pixels are copied to rows, which lie in scratch beside the patch.
  int64_t most_rows() const {
    if (!in_steps()) return std::numeric_limits<int64_t>::max();
    return (in_tiles() ? limits::amx::kRowBytes : limit::kPairRowBytes) / max64(row_bytes(pixels), 1);
  }

  // Of a pixel of the patch.
  int64_t inner_lanes(const WeightTiling& t) const {
    return odd_lines_of_channels((t.group_vectors + 1) * vector.lanes, vector.element_size);
  }

  // Elements of a channel's patch, of all images of a segment.
  int64_t plane(const WeightTiling& t) const {
    const int64_t patch_lanes = lanes == WeightLanes::kChannels ? 1
                                : lanes == WeightLanes::kGroups ? vector.lanes
                                                                : inner_lanes(t);
    const int64_t image = saturating_mul(patch_size(problem.rows(), t.patch_segments * pixels.rows, t.tap_rows),
                                         patch_size(problem.cols(), pixels.cols, t.tap_cols), patch_lanes);
    return saturating_mul(odd_lines(image, vector.element_size), pixels.images);
  }
};

}  // namespace

ConvTiling tile_conv(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, bool lanes_are_groups,
                     int num_threads) {
  const ConvTiler tiler{gemm, k, vector, lanes_are_groups, num_threads};
  ConvTiling t{};
  tiler.join_segments(t);
  tiler.leave_out_padding(t, gemm.batch, div_up(gemm.m, vector.lanes));
  // (Pairs keep the weights of a group.)
  t.groups_first = (lanes_are_groups || gemm.per_step == 1) && gemm.groups_are_neighbours(vector.element_size);
  // 1x1 kernels on two segments of channels_last write much for their few products: with half the tile more of it stays
  // in L2.
  const bool short_pixels =
      gemm.taps() == 1 && k.blocks_c == 2 && gemm.per_step == 1 && gemm.destination_m == 1 && gemm.m >= gemm.channels;
  // So does more of all sums over several segments where L2 is small. That pays where most weights stay packed from
  // tile to tile, and threads have several tiles each.
  const int64_t weight_bytes = saturating_mul(gemm.m, gemm.channels, gemm.taps(), vector.element_size);
  const bool crowds_l2 = has_small_l2() && !lanes_are_groups && gemm.destination_m == 1 && k.segments() > 1 &&
                         weight_bytes <= limit::kKeptWeightBytes &&
                         saturating_mul(gemm.batch, gemm.pixels()) >= 2 * num_threads * limit::kTilePixels;
  // A segment of wide elements or of scattered taps can make a patch too large: smaller tiles then. Of a few pixels
  // every patch fits, since it has at most kMaxSegment elements of a pixel's lanes.
  const int64_t most = limit::kTilePixels / (short_pixels ? 2 : 1) / (crowds_l2 ? 2 : 1);
  for (int64_t target = tiler.target_pixels(most, t);; target /= 2) {
    const bool smallest = target < 16;
    cut_pixels(gemm, tiler.groups(), target, num_threads, t);
    tiler.cut_source_channels(t);
    if (t.patch_elements > limit::kMaxPatchBytes / vector.operand_size() && !smallest) continue;
    tiler.cut_result_channels(t);
    tiler.cut_tiles(t);
    if (fits_scratch(lay_out_scratch(t, k, vector)) || smallest) break;
  }
  // Threads that would idle may have made chunks too narrow, or tiles of too few images.
  if (t.padding.permille > 0) tiler.leave_out_padding(t, t.tile_images, t.chunk_vectors);
  tiler.keep_weights(t);
  return t;
}

WeightTiling tile_grad_weight(const Call& call, const PixelBlocking& pixels, const VectorShape& vector,
                              WeightLanes lanes, int num_threads) {
  const WeightTiler tiler{call, pixels, vector, lanes, num_threads};
  WeightTiling t{};
  tiler.cut_groups(t);
  tiler.cut_kernel(t);
  // In channels_last a row of the weight is stored tap by tap: channels make long runs, not columns.
  const int64_t* const to = call.result.stride;
  const bool by_taps = lanes == WeightLanes::kChannels && call.problem.taps() > 1 && to[1] == 1 && to[3] != 1;
  const int64_t columns = vector.step == 2 ? limit::kPairColumns
                          : by_taps        ? limit::kWeightTileColumnsByTap
                                           : limit::kWeightTileColumns;
  // Tiles that have partials are small enough for the workspace.
  bool is_cut = false;
  if (tiler.in_tiles()) {
    tiler.cut_channels(t, limits::amx::kWeightTileBytes, limits::amx::kWeightTileColumns);
    is_cut = t.items() >= num_threads;
  } else if (tiler.takes_large_tiles(t)) {
    tiler.cut_channels(t, limit::kLargeWeightTileBytes, columns);
    is_cut = !threads_would_idle(t.items(), num_threads);
  }
  if (!is_cut) tiler.cut_channels(t, limit::kWeightTileBytes, columns);
  t.slots = tiler.slots_of(t);
  tiler.leave_out_padding(t);
  return t;
}

int64_t partial_bytes(const WeightTiling& t, const VectorShape& vector) {
  if (t.slots == 1) return 0;
  return (t.slots + 2) * t.items() * t.tile_size(vector.lanes) * vector.element_size;
}

ConvScratch lay_out_scratch(const ConvTiling& tiling, const KBlocking& k, const VectorShape& vector) {
  const int64_t size = vector.element_size, width = min64(tiling.chunk_vectors, vector.max_vectors) * vector.lanes;
  // One panel's C tile where each is finished at once, else the chunk's.
  const int64_t tile_bytes = tiling.pixels() * (tiling.one_block ? width : tiling.chunk_vectors * vector.lanes) * size;
  ConvScratch s{};
  s.position_offsets = s.take_offsets(tiling.pixels());
  s.tap_offsets = s.take_offsets(tiling.segments_at_once * k.max_depth());
  if (tiling.padding.permille > 0) {
    s.listed_offsets = s.take_offsets(tiling.pixels());
    s.listed_numbers = s.take_offsets(tiling.pixels());
    s.listed_places = s.take_offsets(tiling.pixels());
    s.listed_steps = take_lists(s, tiling.segments_at_once * k.max_depth());
  }
  s.zeros = s.take(width * size);
  s.bias = s.take(width * size);
  s.panel = s.take(tiling.segments_at_once * k.max_depth() * width * vector.operand_size());
  s.c_tile = s.take_sums(tile_bytes, k.has_chunks());
  s.patch = s.take(tiling.patch_elements * vector.operand_size());
  s.kept_pitch = saturating_mul(k.segments(), k.max_depth(), width);
  s.kept = s.take(tiling.kept_panels * s.kept_pitch * vector.operand_size());
  return s;
}

WeightScratch lay_out_scratch(const WeightTiling& tiling, const PixelBlocking& pixels, const VectorShape& vector) {
  const int64_t size = vector.element_size, width = min64(tiling.chunk_vectors, vector.max_vectors) * vector.lanes;
  const int64_t segment_pixels = pixels.images * pixels.rows * pixels.cols;
  const int64_t tile_bytes = tiling.tile_size(vector.lanes) * size;
  WeightScratch s{};
  const bool inner_groups = tiling.group_vectors > 0;
  s.element_offsets = s.take_offsets(inner_groups ? 0 : tiling.max_elements());
  s.pixel_offsets = s.take_offsets(inner_groups ? 0 : segment_pixels);
  if (tiling.padding.permille > 0) {
    s.listed_offsets = s.take_offsets(tiling.max_elements());
    s.listed_numbers = s.take_offsets(tiling.max_elements());
    s.listed_steps = take_lists(s, segment_pixels);
  }
  s.runs = s.take(inner_groups ? segment_pixels * kWeightRunBytes : 0);
  s.zeros = s.take(inner_groups ? 0 : vector.max_vectors * vector.lanes * size);
  if (vector.step == 1) {
    s.panel = s.take(inner_groups ? 0 : segment_pixels * size * width);
    s.patch = s.take(tiling.patch_elements * size);
    s.rows = s.patch;
  } else {
    s.panel = s.take(row_bytes(pixels) * width);
    s.patch = s.take(tiling.patch_elements * int64_t(sizeof(BFloat16)));
    // The last AMX tile reads 16 rows, whether they are there or not.
    s.rows = s.take(row_bytes(pixels) * round_up(tiling.max_elements(), kAmxTileRows));
  }
  if (tiling.slots == 1) s.tile = s.take_sums(tile_bytes, pixels.chunks() > 1);
  return s;
}

}  // namespace conv2d_ext::cpu
