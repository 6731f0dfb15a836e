#include "tile_winograd.h"

#include "../base/limits.h"

namespace conv2d_ext::cpu {

namespace limit = limits::winograd;

const char* refuse_winograd(const ConvGemm& g, DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
    return "neither float32 nor a 16-bit type";
  }
  // Phases may run together, which takes the direct order; whether they do follows from strides and threads.
  if (g.is_phase) return "a phase of a stride";
  if (g.is_matmul || g.taps_h != 3 || g.taps_w != 3 || g.result_taps() != 1) return "not a 3x3 kernel";
  const auto adjacent = [](const GatherAxis& axis) { return axis.step == 1 && (axis.tap == 1 || axis.tap == -1); };
  if (!adjacent(g.axis_h) || !adjacent(g.axis_w)) return "a stride or a dilation other than 1";
  if (g.channels < kWinogradLeastChannels || g.m < kWinogradLeastChannels) return "fewer than 16 channels in a group";
  if (g.channels > kWinogradMostChannels) return "more than 2048 channels in a sum";
  // Below, transforming the weights costs as much as it spares, and squares reach far beyond the image.
  if (g.rows < kWinogradLeastSide || g.cols < kWinogradLeastSide) return "fewer than 7 rows or columns";
  return nullptr;
}

namespace {

struct WinogradTiler {
  const ConvGemm& gemm;
  const VectorShape& vector;
  const int num_threads;

  int64_t vectors() const { return div_up(gemm.m, vector.lanes); }

  // Tiles of about `target` squares, and the result channels of a work item: of the numbers of rows near the target,
  // and of channels, those that take the threads the shortest.
  void cut(int64_t target, WinogradTiling& best) const {
    const int64_t rows = winograd_squares(gemm.rows), cols = winograd_squares(gemm.cols);
    const int64_t tile_cols = even_piece(cols, target);
    WinogradTiling t = best;
    t.tile_images = 1;
    t.tile_cols = min64(2 * tile_cols, gemm.cols);
    const int64_t most_rows = tile_cols < cols ? 1 : max64(1, target * 5 / 4 / cols);
    double least = 1e300;
    for (int64_t tile_rows = min64(most_rows, rows); tile_rows > most_rows / 2 || tile_rows == rows; --tile_rows) {
      if (tile_rows != even_piece(rows, tile_rows)) continue;
      const bool whole = tile_rows == rows && tile_cols == cols;
      t.tile_images = whole ? images_of_tile(gemm, gemm.groups, target * 5 / 4 / (rows * cols), num_threads) : 1;
      t.tile_rows = min64(2 * tile_rows, gemm.rows);
      t.squares = t.tile_images * tile_rows * tile_cols;
      t.count_tiles(gemm);
      const double cost = cut_result_channels(t);
      if (cost < least * 0.97) {
        least = cost;
        best = t;
      }
    }
  }

  // All result channels, or fewer where threads would idle. Returns about what the call takes, in squares of an item.
  double cut_result_channels(WinogradTiling& t) const {
    // What transforming the weights takes, and, of all squares, what transforming the source does.
    constexpr double kWeights = 10, kSource = 0.05;
    const int64_t tiles = gemm.groups * t.tiles();
    const int64_t most = threads_would_idle(tiles, num_threads) ? min64(vectors(), 2 * num_threads) : 1;
    double least = 1e300;
    for (int64_t chunks = 1; chunks <= most; ++chunks) {
      const int64_t per_chunk = div_up(vectors(), chunks), count = div_up(vectors(), per_chunk);
      const double share = double(per_chunk) / double(vectors());
      const double item = share * (double(t.squares) + kWeights) + kSource * double(t.squares);
      const double cost = double(div_up(tiles * count, num_threads)) * item;
      if (cost < least * 0.97) {
        least = cost;
        t.chunk_vectors = per_chunk;
        t.chunks_m = count;
      }
    }
    return least;
  }

  // Tiles that an item takes one after the other, so that its weights are transformed once.
  void cut_runs(WinogradTiling& t) const {
    const int64_t weights = saturating_mul(kWinogradProducts, gemm.channels, t.chunk_vectors * vector.bytes());
    t.keeps_weights = weights <= limit::kKeptWeightBytes;
    t.run = 1;
    if (t.keeps_weights) {
      const int64_t others = gemm.groups * t.chunks_m;
      const int64_t items =
          num_threads == 1 ? 1 : max64(1, div_up(limit::kItemsPerThread * num_threads, max64(others, 1)));
      t.run = even_piece(t.tiles(), t.tiles() / items);
    }
    t.runs = div_up(t.tiles(), t.run);
  }
};

}  // namespace

WinogradTiling tile_winograd(const ConvGemm& gemm, const VectorShape& vector, int num_threads) {
  const WinogradTiler tiler{gemm, vector, num_threads};
  WinogradTiling t{};
  t.chain = even_piece(gemm.channels, vector.limits.winograd);
  t.block_channels = min64(gemm.channels, t.chain * max64(1, limit::kBlockChannels / t.chain));
  t.staged_channels = min64(gemm.channels, round_up(limit::kStagedChannels, vector.lanes));
  const int64_t square_bytes = kWinogradProducts * gemm.channels * vector.element_size;
  int64_t target = min64(limit::kSquares, max64(8, limit::kSourceBytes / square_bytes));
  for (;; target = target * 3 / 4) {
    tiler.cut(target, t);
    tiler.cut_runs(t);
    if (fits_scratch(lay_out_scratch(t, gemm, vector)) || target <= 1) break;
  }
  return t;
}

WinogradScratch lay_out_scratch(const WinogradTiling& t, const ConvGemm& gemm, const VectorShape& vector) {
  const int64_t size = vector.element_size, width = min64(t.chunk_vectors, vector.max_vectors) * vector.lanes;
  const int64_t tile_rows = round_up(t.tile_rows, 2), tile_cols = round_up(t.tile_cols, 2);
  WinogradScratch s{};
  s.channel_pitch = odd_lines_of_channels(round_up(gemm.channels, vector.lanes), size);
  s.source_pitch = odd_lines(t.squares * s.channel_pitch + vector.lanes, size);
  s.weight_pitch = odd_lines(t.block_channels * width, size);
  s.block_weights = kWinogradProducts * s.weight_pitch;
  s.sums_pitch = odd_lines(t.squares * width, size);
  const int64_t panels = t.keeps_weights ? div_up(t.chunk_vectors, vector.max_vectors) : 1;
  const int64_t blocks = t.keeps_weights ? div_up(gemm.channels, t.block_channels) : 1;
  // A patch, or packed weights.
  const int64_t plane = odd_lines((tile_rows + 2) * (tile_cols + 2), size) * t.tile_images;
  const int64_t patch = patch_elements(plane, t.staged_channels, t.tile_images, size);
  const int64_t staged = max64(patch + 3 * vector.lanes, 9 * t.staged_channels * width);
  const KBlocking direct = block_k(gemm, vector.limits);
  s.square_offsets = s.take_offsets(t.squares);
  s.channel_offsets = s.take_offsets(t.block_channels);
  s.zeros = s.take(width * size);
  s.bias = s.take(width * size);
  s.sums = s.take(kWinogradProducts * s.sums_pitch * size);
  s.pixels = s.take(2 * tile_cols * width * size);
  s.staged = s.take(staged * size);
  s.weight = s.take(panels * blocks * s.block_weights * size);
  s.source = s.take((kWinogradProducts * s.source_pitch + vector.lanes) * size);
  s.again = s.take_sums(4 * kWinogradAgain * width * size, direct.has_chunks());
  s.again_panel = s.take(direct.max_depth() * width * size);
  s.again_patch = s.take(patch_elements(odd_lines(16, size), direct.segment_channels, 1, size) * size);
  s.again_offsets = s.take_offsets(direct.max_depth() + 4);
  return s;
}

}  // namespace conv2d_ext::cpu
