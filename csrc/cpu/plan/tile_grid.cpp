#include "tile_grid.h"

namespace conv2d_ext::cpu {

void cut_pixels(const ConvGemm& gemm, int64_t groups, int64_t target, int num_threads, TileGrid& t) {
  // Wide rows are cut so that a tile of several rows shares the rows its taps overlap in.
  t.tile_cols = even_piece(gemm.cols, gemm.taps_h > 1 ? target / 2 : target);
  const int64_t tiles_w = div_up(gemm.cols, t.tile_cols);
  const int64_t max_rows = max64(1, target * 4 / 3 / t.tile_cols);
  t.tile_images = 1;
  t.tile_rows = min64(max_rows, gemm.rows);
  if (gemm.rows <= max_rows && tiles_w == 1) {
    t.tile_images = even_piece(gemm.batch, target * 4 / 3 / (gemm.rows * gemm.cols));
    // No fewer tiles than threads while there are images.
    if (div_up(gemm.batch, t.tile_images) * groups < num_threads) {
      t.tile_images = even_piece(gemm.batch, gemm.batch * groups / num_threads);
    }
  } else {
    // Of the row counts near the target, the one whose last round leaves the fewest threads idle.
    double best_cost = 1e300;
    for (int64_t rows = t.tile_rows, min_rows = max64(1, max_rows / 2); rows >= min_rows; --rows) {
      if (rows != even_piece(gemm.rows, rows)) continue;
      const int64_t items = div_up(gemm.rows, rows) * tiles_w * gemm.batch * groups;
      // 40 pixels' worth of work stand for what a tile costs by itself (weight panels, halo rows).
      const double cost = double(div_up(items, num_threads)) * double(rows * t.tile_cols + 40);
      if (cost < best_cost) {
        best_cost = cost;
        t.tile_rows = rows;
      }
    }
  }
  t.count_tiles(gemm);
}

int64_t avoid_idle_threads(int64_t tiles, int64_t vectors, int64_t chunks, int num_threads) {
  if (!threads_would_idle(tiles * chunks, num_threads)) return chunks;
  // Rounds of the threads over the items, weighted by an item's share, decide between a few finer cuts.
  double best_cost = 1e300;
  int64_t best = chunks;
  for (int64_t c = chunks; c <= min64(vectors, chunks * 2 * num_threads); ++c) {
    const int64_t per_chunk = div_up(vectors, c);
    const double rounds = double(div_up(tiles * div_up(vectors, per_chunk), num_threads));
    const double cost = rounds * (double(per_chunk) + 0.2);
    if (cost < best_cost * 0.97) {
      best_cost = cost;
      best = c;
    }
  }
  return best;
}

}  // namespace conv2d_ext::cpu
