// Tiles of result positions, as the drivers gemm, pixels, depthwise, amx and winograd cut their results; and panels of
// vectors.
#pragma once

#include "conv_gemm.h"

namespace conv2d_ext::cpu {

// A rectangle of positions of `images` images.
struct Tile {
  int64_t image, images, row, rows, col, cols;
  int64_t pixels() const { return images * rows * cols; }
};

// Tiles of one image each, or of several whole images. Columns vary fastest.
struct TileGrid {
  int64_t tile_images, tile_rows, tile_cols;
  int64_t tiles_n, tiles_h, tiles_w;
  int64_t pixels() const { return tile_images * tile_rows * tile_cols; }
  int64_t tiles() const { return tiles_n * tiles_h * tiles_w; }
  void count_tiles(const ConvGemm& gemm) {
    tiles_n = div_up(gemm.batch, tile_images);
    tiles_h = div_up(gemm.rows, tile_rows);
    tiles_w = div_up(gemm.cols, tile_cols);
  }
  // The last one along each axis takes what is left.
  Tile tile(int64_t number, const ConvGemm& gemm) const {
    const int64_t image = number / (tiles_h * tiles_w) * tile_images;
    const int64_t row = number / tiles_w % tiles_h * tile_rows, col = number % tiles_w * tile_cols;
    return {image, min64(tile_images, gemm.batch - image), row, min64(tile_rows, gemm.rows - row),
            col,   min64(tile_cols, gemm.cols - col)};
  }
};

// Steps of a tensor between images, rows and columns.
struct PixelSteps {
  int64_t image, row, col;
};
// Whether a tile's rows continue one another in the tensor, and whether all of its pixels do.
inline bool rows_join(const Tile& t, const PixelSteps& step) { return t.rows == 1 || step.row == step.col * t.cols; }
inline bool pixels_join(const Tile& t, const PixelSteps& step) {
  return rows_join(t, step) && (t.images == 1 || step.image == step.col * t.rows * t.cols);
}

// A work item is a tile of pixels times a part: a chunk of the result channels of a group.
struct TilePart {
  int64_t tile, part;
};
// Of `parts` for each of `tiles`. Neighbouring items have one part, and so share weights, or (parts_first) one tile.
inline TilePart tile_part(int64_t item, int64_t tiles, int64_t parts, bool parts_first) {
  return parts_first ? TilePart{item / parts, item % parts} : TilePart{item % tiles, item / tiles};
}

// Cuts a GEMM's positions into tiles of about `target` pixels. groups: work items of a tile, at least.
void cut_pixels(const ConvGemm& gemm, int64_t groups, int64_t target, int num_threads, TileGrid& t);

// How the pixels of a tile are numbered among its sums: image * image + row * row + column. Between them there may be
// sums of no pixel.
struct SumPitches {
  int64_t row, image;
};

// The size of a source of whose pixels pixel_bytes are read, and whether each thread's share is `least` bytes or more.
inline int64_t source_bytes(const ConvGemm& gemm, int64_t pixel_bytes) {
  return saturating_mul(gemm.batch, gemm.source_h, gemm.source_w, pixel_bytes);
}
inline bool source_streams(const ConvGemm& gemm, int64_t pixel_bytes, int num_threads, int64_t least) {
  return source_bytes(gemm, pixel_bytes) / num_threads >= least;
}
// What is moved from and to memory where no cache holds anything: of each source pixel pixel_bytes, of results
// element_bytes each. Lines are read before they are written; phases write parts of the same rows.
inline int64_t moved_bytes(const ConvGemm& gemm, int64_t pixel_bytes, int64_t element_bytes) {
  const int64_t of_image =
      max64(saturating_mul(gemm.rows, gemm.destination_row), saturating_mul(gemm.cols, gemm.destination_col));
  const int64_t results = saturating_mul(gemm.batch, of_image, element_bytes);
  return saturating_add(source_bytes(gemm, pixel_bytes), saturating_mul(2, results));
}
// Whether L3 is taken not to hold so much.
bool exceeds_l3(int64_t moved_bytes);
// Whether L3 is that of a whole socket. It answers so late that requests ahead, which are few at a time, hold up more
// than they save.
bool has_socket_l3();

// Whether there are few items for so many threads, and whether their last round leaves threads without one.
inline bool has_few_items(int64_t items, int num_threads) { return num_threads > 1 && items < 4 * num_threads; }
inline bool threads_would_idle(int64_t items, int num_threads) {
  return has_few_items(items, num_threads) && items % num_threads != 0;
}

// Images of a tile, of `most`: no fewer tiles than threads while there are images.
inline int64_t images_of_tile(const ConvGemm& gemm, int64_t groups, int64_t most, int num_threads) {
  const int64_t images = even_piece(gemm.batch, most);
  if (div_up(gemm.batch, images) * groups >= num_threads) return images;
  return even_piece(gemm.batch, gemm.batch * groups / num_threads);
}

// The FMA units wait for sums unless so many vectors of them are in flight.
constexpr int64_t kSumsInFlight = 8;

// Cuts for threads are chosen by estimates. In cycles, in each of which a core multiplies and adds one vector:
constexpr double kItemCycles = 3000;   // what a work item takes by itself
constexpr double kWakeCycles = 10000;  // what waking threads takes, where there are several items
// A panel of one vector loads as much as it multiplies: what it takes more, in vectors.
constexpr double kLoneVector = 0.25;
// The share of the cost below which a finer cut is worth it.
constexpr double kWorthCutting = 0.95;

// Result channels of a GEMM as chunks of vectors, each of which is a work item of every tile.
struct ChunkCut {
  int64_t chunks;
  double cost;  // of the threads' rounds over all items, about
};
// So many vectors, as `least` to `most` chunks.
struct ChunkLimits {
  int64_t vectors, least, most;
};
// Cuts them for each of `parts` of each tile.
ChunkCut cut_chunks(const ConvGemm& gemm, const TileGrid& t, int64_t parts, const ChunkLimits& limits, int num_threads);

// Cuts tiles of one image further where that is estimated to be faster on so many threads. limits_of(pixels): those of
// a tile of so many. Returns whether it cut any.
template <class LimitsOf>
bool cut_tiles_for_threads(const ConvGemm& gemm, int64_t parts, const LimitsOf& limits_of, int num_threads,
                           TileGrid& t) {
  constexpr int64_t kLeastPixels = 24;  // a few micro-kernels
  if (num_threads == 1 || t.tile_images > 1) return false;
  const auto cost_of = [&](const TileGrid& grid) {
    return cut_chunks(gemm, grid, parts, limits_of(grid.pixels()), num_threads).cost;
  };
  const TileGrid whole = t;
  double best = kWorthCutting * cost_of(whole);
  bool cuts = false;
  for (TileGrid grid = whole;;) {
    int64_t& size = grid.tile_rows > 1 ? grid.tile_rows : grid.tile_cols;
    const int64_t all = grid.tile_rows > 1 ? gemm.rows : gemm.cols;
    if (size == 1) return cuts;
    size = even_piece(all, size - max64(1, size / 16));
    if (grid.pixels() < kLeastPixels) return cuts;
    grid.count_tiles(gemm);
    const double cost = cost_of(grid);
    if (cost < best) {
      best = cost;
      t = grid;
      cuts = true;
    }
    if (!has_few_items(saturating_mul(grid.tiles(), parts), num_threads)) return cuts;
  }
}

// Vectors cut into panels of near-equal width, at most a given one.
struct Panels {
  int64_t count, vectors, larger;  // the first `larger` panels take one vector more
  int64_t size(int64_t panel) const { return vectors + (panel < larger ? 1 : 0); }
  int64_t start(int64_t panel) const { return panel * vectors + (panel < larger ? panel : larger); }
};
// So many panels, or chunks; and as few as such a width allows.
inline Panels near_equal(int64_t vectors, int64_t count) { return {count, vectors / count, vectors % count}; }
inline Panels cut_panels(int64_t vectors, int64_t max_vectors) {
  return near_equal(vectors, div_up(vectors, max_vectors));
}

}  // namespace conv2d_ext::cpu
