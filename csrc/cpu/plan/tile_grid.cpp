#include "tile_grid.h"

#include "../base/limits.h"
#include "caches.h"

namespace conv2d_ext::cpu {

namespace {
// What an item takes beside its products, in the time of a vector's products with one pixel: so many pixels' worth
// stand for packing a vector's weights and for the halo's rows, so much of a vector for a pixel's patch, which taps
// share.
constexpr int64_t kItemPixels = 40;
constexpr double kPatchVectors = 0.2, kPatchVectorsOfTap = 0.8;

constexpr int64_t kSocketL3Bytes = 96 * 1024 * 1024;
}  // namespace

bool exceeds_l3(int64_t moved_bytes) {
  constexpr int64_t kL3OfMovedBytes = 72 * 1024 * 1024;  // kMovedBytes is a third of such an L3
  const int64_t least = limits::tiling::kMovedBytes;
  return moved_bytes >= max64(least, saturating_mul(least, l3_bytes()) / kL3OfMovedBytes);
}

bool has_socket_l3() { return l3_bytes() > kSocketL3Bytes; }

void cut_pixels(const ConvGemm& gemm, int64_t groups, int64_t target, int num_threads, TileGrid& t) {
  // Wide rows are cut so that a tile of several rows shares the rows its taps overlap in.
  t.tile_cols = even_piece(gemm.cols, gemm.taps_h > 1 ? target / 2 : target);
  const int64_t tiles_w = div_up(gemm.cols, t.tile_cols);
  const int64_t max_rows = max64(1, target * 4 / 3 / t.tile_cols);
  t.tile_images = 1;
  t.tile_rows = min64(max_rows, gemm.rows);
  if (gemm.rows <= max_rows && tiles_w == 1) {
    t.tile_images = images_of_tile(gemm, groups, target * 4 / 3 / (gemm.rows * gemm.cols), num_threads);
  } else {
    // Of the row counts near the target, the one whose last round leaves the fewest threads idle.
    double best_cost = 1e300;
    for (int64_t rows = t.tile_rows, min_rows = max64(1, max_rows / 2); rows >= min_rows; --rows) {
      if (rows != even_piece(gemm.rows, rows)) continue;
      const int64_t items = div_up(gemm.rows, rows) * tiles_w * gemm.batch * groups;
      const double cost = double(div_up(items, num_threads)) * double(rows * t.tile_cols + kItemPixels);
      if (cost < best_cost) {
        best_cost = cost;
        t.tile_rows = rows;
      }
    }
  }
  t.count_tiles(gemm);
}

ChunkCut cut_chunks(const ConvGemm& gemm, const TileGrid& t, int64_t parts, const ChunkLimits& limits,
                    int num_threads) {
  const int64_t vectors = limits.vectors;
  const int64_t tiles = saturating_mul(t.tiles(), parts);
  const double pixels = double(t.pixels() + kItemPixels);
  const double patch = kPatchVectors + kPatchVectorsOfTap / double(max64(gemm.taps(), 1));
  const double depth = double(max64(saturating_mul(gemm.channels, gemm.taps()), 1));
  ChunkCut best{limits.least, 1e300};
  for (int64_t count = limits.least; count <= limits.most;) {
    const int64_t per_chunk = div_up(vectors, count);
    count = div_up(vectors, per_chunk);
    const int64_t items = saturating_mul(tiles, count);
    const double rounds = double(div_up(items, num_threads));
    const double width = double(per_chunk) + (per_chunk == 1 ? kLoneVector : 0);
    const double wake = items > 1 ? kWakeCycles / depth : 0;
    const double cost = rounds * (pixels * (width + patch) + kItemCycles / depth) + wake;
    if (cost < best.cost * 0.97) best = {count, cost};
    if (per_chunk == 1 || !has_few_items(items, num_threads)) break;
    count = div_up(vectors, per_chunk - 1);
  }
  return best;
}

}  // namespace conv2d_ext::cpu
