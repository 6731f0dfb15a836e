#include "tile_depthwise.h"

#include "../base/limits.h"

namespace conv2d_ext::cpu {

namespace limit = limits::depthwise;

namespace {

constexpr int64_t kLine = 64;

// Whether AMD made the CPU: its shifts and shuffles then run beside multiply-adds. Intel's take their ports.
bool widens_aside() {
#if defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd");
  return is_amd;
#else
  return false;
#endif
}

bool reads_in_place(const ConvGemm& gemm, int64_t chain, bool widens) {
  const bool inside = meets_no_padding(gemm);
  if (inside && !widens) return true;
  const DepthwiseRow row = depthwise_row(gemm);
  // At edges each run is a call or two: few pixels would not pay for it.
  return gemm.taps() <= chain && has_depthwise_ukernel(gemm.taps_w, row, gemm.cols) &&
         (inside || row.runs == 1 || gemm.cols / row.runs >= kDepthwisePixels) &&
         (!widens || gemm.taps_h <= (widens_aside() ? limit::kRowsWidenedAside : limit::kWidenedRows));
}

bool skips(const ConvGemm& gemm) { return gemm.axis_h.step > 1 || gemm.axis_w.step > 1; }

// Whether a source is copied since its pixels crowd an L1 of 64 sets and 8 ways: so many lines that a micro-kernel's
// taps meet lie in one set. In a patch they are odd numbers of lines apart. (Where a stride skips positions a line is
// read once for most of its rows of results, if a vector of sums is as wide: a copy costs more.)
bool crowds_sets(const ConvGemm& gemm, const VectorShape& vector, int64_t storage_size) {
  constexpr int64_t kWays = 8;
  if (skips(gemm) && vector.is_wide()) return false;
  const int64_t pixel_bytes = saturating_mul(gemm.source_col, storage_size);
  // Each vector of a line asks for it anew.
  const int64_t lines = gemm.taps() * kLine / vector.bytes();
  if (pixel_bytes % (2 * limit::kTwoSetsBytes) == 0) return lines > kWays;
  const int64_t bytes = source_bytes(gemm, gemm.groups * storage_size);
  return pixel_bytes % limit::kTwoSetsBytes == 0 && lines > 2 * kWays && bytes < limit::kCopiedBytes;
}

}  // namespace

DepthwiseTiling tile_depthwise(const ConvGemm& gemm, const VectorShape& vector, int64_t storage_size, int num_threads) {
  DepthwiseTiling t{};
  const bool widens = storage_size != vector.element_size;
  t.in_place =
      reads_in_place(gemm, block_k(gemm, vector.limits).chain, widens) && !crowds_sets(gemm, vector, storage_size);
  const int64_t pixel_size = saturating_mul(gemm.groups, storage_size);
  t.streams = t.in_place && exceeds_l3(moved_bytes(gemm, pixel_size, storage_size)) &&
              source_streams(gemm, pixel_size, num_threads, limits::tiling::kStreamedBytes);
  const int64_t vectors = gemm.groups / vector.lanes;  // the rest overlaps the last of them
  int64_t most_bytes =
      min64(limit::kBlockBytes, max64(limit::kLeastBlockBytes, limit::kBlockWeightBytes / max64(gemm.taps(), 1)));
  if (t.streams && skips(gemm)) {
    const int64_t weight_bytes = limit::kStreamedBlockWeightBytes / max64(gemm.taps(), 1);
    most_bytes = max64(most_bytes, min64(limit::kStreamedBlockBytes, weight_bytes));
  }
  // Whole pairs of vectors, where micro-kernels take two at once.
  const int64_t at_once = vector.is_wide() ? 2 : 1;
  const int64_t even = even_piece(div_up(vectors, at_once), most_bytes / (at_once * vector.bytes()));
  t.block_vectors = min64(at_once * even, vectors);
  t.blocks = div_up(vectors, t.block_vectors);
  t.prefetches_results = t.streams && (!skips(gemm) || pixel_size <= limit::kPrefetchedResultBytes);

  const int64_t pixel_bytes =
      odd_lines_of_channels((t.block_vectors + 1) * vector.lanes, vector.element_size) * vector.element_size;
  t.tile_cols = gemm.cols;
  const auto patch_bytes = [&](int64_t rows) {
    return saturating_mul(patch_size(gemm.axis_h, rows, gemm.taps_h), patch_size(gemm.axis_w, t.tile_cols, gemm.taps_w),
                          pixel_bytes);
  };
  const int64_t most = widens && !t.in_place ? limit::kPackedBytes : limit::kTileBytes;
  // A wide row's patch can be too large. A single pixel's always fits.
  while (t.tile_cols > 1 && patch_bytes(1) > most) t.tile_cols = div_up(t.tile_cols, 2);
  t.tile_rows = gemm.rows;
  while (t.tile_rows > 1 && patch_bytes(t.tile_rows) > most) t.tile_rows = div_up(t.tile_rows, 2);
  // Threads share a small image's rows, and the columns of few rows; large images have tiles enough.
  const auto too_few_items = [&] {
    const int64_t items = div_up(gemm.rows, t.tile_rows) * div_up(gemm.cols, t.tile_cols) * t.blocks * gemm.batch;
    return has_few_items(items, num_threads);
  };
  while (t.tile_rows > 4 && too_few_items()) t.tile_rows = div_up(t.tile_rows, 2);
  while (t.tile_cols > 4 * kDepthwisePixels && too_few_items()) {
    t.tile_cols = round_up(div_up(t.tile_cols, 2), kDepthwisePixels);
  }
  // Small images several together, which share the packed weights.
  t.tile_images = 1;
  if (t.tile_rows == gemm.rows && t.tile_cols == gemm.cols) {
    t.tile_images = even_piece(gemm.batch, limit::kTilePixels / max64(t.image_pixels(), 1));
    if (has_few_items(div_up(gemm.batch, t.tile_images) * t.blocks, num_threads)) t.tile_images = 1;
  }
  t.count_tiles(gemm);
  t.patch_elements = t.in_place ? 0 : patch_bytes(t.tile_rows) / vector.element_size + 128 / vector.element_size;
  return t;
}

DepthwiseScratch lay_out_scratch(const DepthwiseTiling& tiling, const ConvGemm& gemm, const VectorShape& vector) {
  const int64_t block = (tiling.block_vectors + 1) * vector.bytes();
  DepthwiseScratch s{};
  s.position_offsets = s.take_offsets(tiling.image_pixels());
  s.tap_offsets = s.take_offsets(gemm.taps());
  s.start = s.take(block);
  s.bias = s.take(block);
  s.weights = s.take(gemm.taps() * block);
  s.c_tile = s.take(tiling.image_pixels() * vector.bytes());
  s.patch = s.take(tiling.patch_elements * vector.element_size);
  return s;
}

Interval met_outputs(const GatherAxis& axis, int64_t kernel, int64_t first, int64_t size) {
  // output * step + origin + tap * axis.tap = coordinate, rounded down.
  const auto output = [&](int64_t coordinate, int64_t tap) {
    const int64_t steps = coordinate - axis.source(0, tap);
    return steps >= 0 ? steps / axis.step : -div_up(-steps, axis.step);
  };
  return {output(first, kernel - 1), output(first + size - 1, 0) + 1};
}

StridedTiling tile_strided(const Conv2dProblem& p, const VectorShape& vector, int num_threads) {
  StridedTiling t{};
  t.tile_pairs = min64(round_up(even_piece(div_up(p.in_w, 2), limit::kStridedPairs), vector.lanes), div_up(p.in_w, 2));
  t.tiles_w = div_up(div_up(p.in_w, 2), t.tile_pairs);
  // Whole rounds of the row phases, so that tiles have alike rows.
  const int64_t rounds = div_up(p.in_h, p.stride_h);
  int64_t tile_rounds = even_piece(rounds, limit::kStridedPixels / max64(2 * t.tile_pairs * p.stride_h, 1));
  if (has_few_items(p.batch * p.groups * t.tiles_w * div_up(rounds, tile_rounds), num_threads)) {
    tile_rounds = even_piece(rounds, div_up(rounds, 2 * num_threads));
  }
  t.tile_rows = tile_rounds * p.stride_h;
  t.tiles_h = div_up(p.in_h, t.tile_rows);
  // One more than what any tile meets: where that begins differs by the border it is rounded to.
  t.patch_rows = met_outputs(p.rows(), p.kernel_h, 0, t.tile_rows).count() + 1;
  t.patch_pitch = met_outputs(p.cols(), p.kernel_w, 0, 2 * round_up(t.tile_pairs, vector.lanes)).count() + 1;
  return t;
}

StridedScratch lay_out_scratch(const StridedTiling& tiling, const Conv2dProblem& p, const VectorShape& vector) {
  // The taps of one phase of the rows.
  const int64_t taps = div_up(p.kernel_h, p.stride_h) * p.kernel_w;
  StridedScratch s{};
  s.take(taps * vector.element_size);
  s.patch = s.bytes;
  s.bytes += odd_lines(tiling.patch_rows * tiling.patch_pitch, vector.element_size) * vector.element_size;
  return s;
}

}  // namespace conv2d_ext::cpu
