#include "tile_pixels.h"

#include "../base/limits.h"
#include "caches.h"
#include "tile_one_pixel.h"

namespace conv2d_ext::cpu {

namespace limit = limits::tiling;

namespace {

// Whether `depth` runs of so many cache lines, `pitch` bytes apart, fit so many ways of an L1 of 64 sets. Planes whose
// size is a multiple of a large power of two fall into few sets.
bool planes_fit_l1(int64_t pitch, int64_t depth, int64_t lines, int64_t ways) {
  const int64_t aligned = max64(64 * lines, min64(pitch & -pitch, 4096));
  return depth <= ways * (4096 / aligned);
}

// Ways of an L1 of 64 sets: 12 since Ice Lake and Zen 5, 8 before; 0 where the system doesn't tell.
int64_t l1_ways() { return l1_bytes() / 4096; }

// Whether a result channel's weights of a segment are neighbours, in the order of k.
bool segments_are_contiguous(const ConvGemm& gemm, const KBlocking& k) {
  const int64_t taps = k.tap_rows * k.tap_cols, tap_step = k.tap_cols > 1 ? gemm.weight_j : gemm.weight_i;
  const bool rows_join = k.tap_rows == 1 || k.tap_cols == 1 || gemm.weight_i == k.tap_cols;
  return (taps == 1 || (tap_step == 1 && rows_join)) && (k.segment_channels == 1 || gemm.weight_c == taps);
}

// Vectors of the widest panel for so many result channels, which are cut into blocks.
int64_t widest_panel(int64_t channels_m, const VectorShape& vector) {
  return pixel_panel_vectors(cut_panels(channels_m, pixel_rows(vector)).size(0), vector);
}

}  // namespace

bool takes_whole_planes(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size) {
  const bool lines = vector.lanes * storage_size == 64 && l1_ways() >= limit::kLeastWholeWays;
  if (!lines || storage_size != vector.element_size || !reads_whole_planes(gemm) || k.has_chunks()) return false;
  if (gemm.channels == 0 || gemm.m < limit::kLeastWholeRows) return false;  // without channels a panel has no bytes
  if (gemm.destination_col != 1 || gemm.cols < vector.lanes) return false;
  const int64_t plane_bytes = saturating_mul(gemm.source_c, storage_size);
  const int64_t panel_lines = widest_panel(gemm.m, vector) + (plane_bytes % 64 != 0 ? 1 : 0);
  if (saturating_mul(gemm.channels, panel_lines * 64) > limit::kWholePanelBytes) return false;
  if (saturating_mul(gemm.channels, min64(plane_bytes, 4096)) > limit::kWholePageBytes) return false;
  // Weights whose k are not neighbours are copied, all of them at once.
  const int64_t copied = gemm.weight_c == 1 ? 0 : saturating_mul(gemm.m, gemm.channels, storage_size);
  // Planes a multiple of 4 KiB apart share few sets of L1 and L2: few result channels read them again.
  const bool one_set = plane_bytes % 4096 == 0;
  return copied <= limit::kWholeWeightBytes && (!one_set || gemm.m <= limit::kMostRowsOfOneSet);
}

bool reads_pixels_in_place(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size) {
  if (storage_size != vector.element_size || !reads_whole_planes(gemm)) return false;
  if (takes_whole_planes(gemm, k, vector, storage_size)) return true;
  // A single block of result channels reads every pixel once.
  if (gemm.m <= pixel_rows(vector)) return true;
  const int64_t plane_bytes = saturating_mul(gemm.source_c, storage_size);
  const bool lines = vector.lanes * storage_size == 64 && l1_ways() >= 12;
  // In planes of whole lines no load crosses lines. A panel of four vectors leaves two ways free for the next panel,
  // weights and sums: on an Intel Xeon with 12 ways reading in place was up to 1.5 times as fast as a copy, though what
  // is asked for meanwhile finds less room.
  if (lines && plane_bytes % 64 == 0) return planes_fit_l1(plane_bytes, k.segment_channels, 4, l1_ways() - 2);
  // Planes off the borders of 16 bytes have nearly every other vector of 32 in two cache lines, those off the borders
  // of a line most vectors of 64: many channels had better read a copy.
  const bool few_cross = !lines && plane_bytes % 16 == 0;
  // Half of 8 ways is for what is asked for meanwhile, the weights and the sums.
  return planes_fit_l1(plane_bytes, k.segment_channels, 1, 4) && (few_cross || gemm.m < limit::kLeastChannelsToAlign);
}

bool goes_by_columns(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size) {
  if (gemm.taps() != 1 || gemm.source_c != 1 || gemm.channels < vector.lanes) return false;
  // Of other types than float32 five and six results are faster with vectors over them.
  constexpr int64_t kMostOfOtherTypes = 4;
  const bool is_float32 = storage_size == 4 && vector.element_size == 4;
  if (gemm.m > (is_float32 ? kMostPixelColumnResults : kMostOfOtherTypes)) return false;
  // The last vector of each row is filled in part: short rows would waste too many lanes.
  constexpr int64_t kLeastVectorsOfRow = 4;
  if (gemm.cols < vector.lanes * (gemm.rows == 1 ? 1 : kLeastVectorsOfRow)) return false;
  return meets_no_padding(gemm) && !k.has_chunks() && !gemm.starts_from_bias();
}

namespace {

int64_t pixels_of_panel(const VectorShape& vector) { return max64(limit::kPanelBytes / vector.element_size, 1); }

// Panels that a tile may have so that each thread still gets kLeastTilesOfThread tiles.
int64_t panels_for_threads(const ConvGemm& gemm, const VectorShape& vector, int num_threads) {
  return saturating_mul(gemm.groups, gemm.batch, gemm.pixels()) /
         (limit::kLeastTilesOfThread * num_threads * pixels_of_panel(vector));
}

// By columns there is no patch, and an item computes all result channels.
PixelTiling tile_columns(const ConvGemm& gemm, const VectorShape& vector, int64_t storage_size, int num_threads) {
  PixelTiling t{};
  t.by_columns = true;
  t.tile_images = 1;
  const int64_t panels = max64(1, min64(limit::kMostPanelsOfTile, panels_for_threads(gemm, vector, num_threads)));
  const int64_t pixels = panels * pixels_of_panel(vector);
  t.tile_cols = min64(round_up(even_piece(gemm.cols, pixels), vector.lanes), gemm.cols);
  t.tile_rows = even_piece(gemm.rows, pixels / t.tile_cols);
  t.count_tiles(gemm);
  t.chunk_m = gemm.m;
  t.chunks_m = 1;
  t.weight_depth = storage_size == vector.element_size && gemm.weight_c == 1 ? 0 : gemm.channels;
  // Of the last row some results are computed twice (multiply_columns).
  const int64_t run = round_up(t.tile_cols, vector.lanes), surplus = row_results(gemm.m, Along::kK) - gemm.m;
  t.c_elements = (t.tile_rows * gemm.m + surplus) * run;
  return t;
}

struct PixelTiler {
  const ConvGemm& gemm;
  const KBlocking& k;
  const VectorShape& vector;
  const int64_t storage_size;
  const int num_threads;
  const bool takes_whole = takes_whole_planes(gemm, k, vector, storage_size);
  const bool source_in_place = reads_pixels_in_place(gemm, k, vector, storage_size);

  bool is_pointwise() const { return gemm.taps() == 1; }
  bool same_type() const { return storage_size == vector.element_size; }

  int64_t depth() const { return max64(saturating_mul(gemm.channels, gemm.taps()), 1); }

  int64_t plane_of(int64_t rows, int64_t cols) const {
    return odd_lines(
        saturating_mul(patch_size(gemm.axis_h, rows, k.tap_rows), patch_size(gemm.axis_w, cols, k.tap_cols)),
        vector.element_size);
  }

  // Pixels of a tile, about. Segments of few planes leave room for larger tiles, which store rows in longer runs; while
  // all threads have some.
  int64_t most_pixels() const {
    if (takes_whole) return limit::kWholeTilePixels;
    const int64_t few_planes = limit::kPanelPlanes / max64(k.segment_channels, 1);
    const int64_t panels =
        min64(min64(limit::kMostPanelsOfTile, few_planes), panels_for_threads(gemm, vector, num_threads));
    return max64(source_in_place ? 2 : 1, panels) * pixels_of_panel(vector);
  }

  // Tiles of about `target` pixels, or of fewer, whose patch fits.
  PixelTiling cut(int64_t target) const {
    PixelTiling t{};
    t.tile_images = 1;
    t.source_in_place = source_in_place;
    int64_t plane = 0;
    for (;; target /= 2) {
      // Wide rows are cut so that a tile of several rows shares the rows its taps overlap in.
      const int64_t cols = even_piece(gemm.cols, gemm.taps_h > 1 ? max64(vector.lanes, target / 4) : target);
      const int64_t panel = widest_panel(gemm.m, vector) * vector.lanes;
      t.tile_cols = min64(round_up(cols, takes_whole && cols > panel ? panel : vector.lanes), gemm.cols);
      t.tile_rows = even_piece(gemm.rows, target / t.tile_cols);
      plane =
          plane_of(t.tile_rows, t.source_in_place ? min64(t.tile_cols, kMaxPanelVectors * vector.lanes) : t.tile_cols);
      if (saturating_mul(plane, k.segment_channels, vector.element_size) <= limit::kMaxPatchBytes || target < 16) break;
    }
    t.count_tiles(gemm);
    t.block_channels = channels_of_block(k, plane, vector.element_size, limit::kPatchBytes);
    // The last panel reads beyond the last row of the patch.
    t.patch_elements =
        patch_elements(plane, t.block_channels, 1, vector.element_size) + kMaxPanelVectors * vector.lanes;
    t.join_rows = t.tile_cols == gemm.cols && is_pointwise();
    // The sum of a chunk lies in scratch, beside the total of those before it.
    t.direct = same_type() && !k.has_chunks() && gemm.destination_col == 1 &&
               (!t.join_rows || t.tile_rows == 1 || gemm.destination_row == gemm.cols);
    const bool rows_far_apart = is_pointwise() && gemm.m > 1 &&
                                saturating_mul(gemm.weight_m, storage_size) >= limit::kFarRowsBytes &&
                                t.tile_rows * t.tile_cols >= limit::kLeastPixelsToCopyRows;
    t.whole_planes = t.direct && (t.join_rows || t.tile_rows == 1) && takes_whole;
    const bool weight_in_place =
        same_type() && segments_are_contiguous(gemm, k) && (t.whole_planes ? gemm.weight_c == 1 : !rows_far_apart);
    t.weight_depth = weight_in_place ? 0 : t.whole_planes ? gemm.channels : k.max_depth();
    cut_result_channels(t);
    if (t.whole_planes) order_panels(t);
    return t;
  }

  // Of whole planes: how many panels meet all result channels in turn, and what each asks for.
  void order_panels(PixelTiling& t) const {
    const int64_t panel = widest_panel(t.chunk_m, vector) * vector.lanes;
    const int64_t panel_bytes = saturating_mul(gemm.channels, panel, storage_size);
    // Four, even where they are larger than that, as far as half of L2 holds them.
    const int64_t held = l2_bytes() == 0 ? limit::kPanelsOfRun : max64(l2_bytes() / 2 / panel_bytes, 1);
    t.panels_at_once = max64(limit::kWholeRunBytes / panel_bytes, min64(limit::kPanelsOfRun, held));
    const bool streams = saturating_mul(gemm.channels, gemm.source_c, storage_size) > limit::kStreamedBytes;
    t.asks_next_panel = gemm.channels <= limit::kNextPanelDepth / (streams ? 2 : 1);
  }

  // As many as scratch holds, fewer where threads would idle.
  void cut_result_channels(PixelTiling& t) const {
    const int64_t runs = t.join_rows ? 1 : t.tile_rows;
    const int64_t run = round_up(t.join_rows ? t.tile_rows * t.tile_cols : t.tile_cols, vector.lanes);
    const int64_t c_row = runs * (t.direct ? min64(run, kMaxPanelVectors * vector.lanes) : run);
    const int64_t row = c_row + round_up(t.weight_depth, vector.lanes);
    // Of several chunks there are three tiles of them (tile_conv).
    int64_t fit = (k.has_chunks() ? limit::kTileBytes / 3 : limit::kTileBytes) / (row * vector.element_size);
    // Sums that every segment adds to stay in L2, wherever they lie.
    if (k.segments() > 1 && !t.whole_planes) fit = min64(fit, limit::kSumBytes / (runs * run * vector.element_size));
    int64_t chunks = div_up(gemm.m, max64(pixel_rows(vector), fit));
    const int64_t tiles = gemm.groups * t.tiles();
    // Of a single item only where it takes longer than waking threads.
    const bool wakes =
        tiles * chunks > 1 || double(saturating_mul(gemm.m, t.pixels(), depth())) > kWakeCycles * double(vector.lanes);
    const int64_t most_chunks = wakes ? gemm.m / (2 * pixel_rows(vector)) : chunks;
    while (threads_would_idle(tiles * chunks, num_threads) && chunks < most_chunks) ++chunks;
    t.chunk_m = div_up(gemm.m, chunks);
    t.c_elements = t.chunk_m * c_row;
    while (t.chunk_m > 1 && !fits_scratch(lay_out_scratch(t, k, vector))) {
      t.chunk_m = div_up(t.chunk_m, 2);
      t.c_elements = t.chunk_m * c_row;
    }
    t.chunks_m = div_up(gemm.m, t.chunk_m);
  }

  // The threads' rounds over all items, in the time of a pixel's products with one row: an item copies its patch, and
  // so many pixels' worth stand for its other work.
  double cost_of_items(const PixelTiling& t) const {
    constexpr int64_t kOtherPixels = 64, kPatchRows = 4;
    const int64_t rows = t.chunk_m + (source_in_place ? 0 : kPatchRows);
    const double per_cycle = double(vector.lanes) / double(depth());
    const int64_t items = t.items(gemm.groups);
    const double rounds = double(div_up(items, num_threads)), wake = items > 1 ? kWakeCycles : 0;
    return rounds * (double((t.pixels() + kOtherPixels) * rows) + kItemCycles * per_cycle) + wake * per_cycle;
  }
};

}  // namespace

PixelTiling tile_pixel_conv(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size,
                            int num_threads) {
  if (goes_by_columns(gemm, k, vector, storage_size)) return tile_columns(gemm, vector, storage_size, num_threads);
  const PixelTiler tiler{gemm, k, vector, storage_size, num_threads};
  PixelTiling t = tiler.cut(tiler.most_pixels());
  // Finer tiles where there are few.
  const int64_t least = kMaxPanelVectors * vector.lanes;
  double best = kWorthCutting * tiler.cost_of_items(t);
  for (int64_t target = t.pixels(); has_few_items(t.items(gemm.groups), num_threads) && target > least;) {
    target = max64(target * 3 / 4, least);
    const PixelTiling finer = tiler.cut(target);
    const double cost = tiler.cost_of_items(finer);
    if (cost >= best) continue;
    best = cost;
    t = finer;
  }
  return t;
}

Panels cut_run(const PixelTiling& tiling, int64_t run, int64_t rows, const VectorShape& vector) {
  const int64_t vectors = div_up(run, vector.lanes);
  const Panels panels = cut_panels(vectors, pixel_panel_vectors(rows, vector));
  const bool overlaps = tiling.whole_planes && run > vector.lanes && run % vector.lanes != 0;
  return overlaps && panels.count == 1 ? near_equal(vectors, 2) : panels;
}

PixelScratch lay_out_scratch(const PixelTiling& tiling, const KBlocking& k, const VectorShape& vector) {
  const int64_t size = vector.element_size;
  PixelScratch s{};
  s.tap_offsets = s.take_offsets(k.max_depth());
  s.channel_offsets = s.take_offsets(k.max_depth());
  s.zeros = s.take(tiling.chunk_m * size);
  s.bias = s.take(tiling.chunk_m * size);
  s.weight = s.take(tiling.chunk_m * round_up(tiling.weight_depth, vector.lanes) * size);
  s.c = s.take_sums(tiling.c_elements * size, k.has_chunks());
  s.patch = s.take(tiling.patch_elements * size);
  return s;
}

}  // namespace conv2d_ext::cpu
